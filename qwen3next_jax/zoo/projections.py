"""Projections and an L2 norm that several mixers of this folder use.

Letters: B batch, T time, D model, H value heads.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.parameters import Make


def make_low_rank_projection(make: Make, rank: int, width: int) -> tuple[nnx.Param, nnx.Param]:
    """Makes the two matrices [D, rank] and [rank, H, width] of a projection of low rank."""
    c = make.config
    down = make.matrix((c.hidden_size, rank), "embed -> .")
    up = make.matrix((rank, c.linear_num_value_heads, width), ". -> value_heads .")
    return down, up


def project_to_float32(x_BTD: jax.Array, *matrices: nnx.Param) -> jax.Array:
    """Multiplies x by one matrix after the other. Each product contracts the last axis of x with
    the first axis of the matrix. Returns an array [B, T, …], whose last axes are the axes of the
    last matrix except its first. The last product is float32; earlier products have the dtype of x.
    """
    for matrix in matrices:
        is_last = matrix is matrices[-1]
        x_BTD = jnp.tensordot(
            x_BTD, matrix[...].astype(x_BTD.dtype), 1, preferred_element_type=jnp.float32
        ).astype(jnp.float32 if is_last else x_BTD.dtype)
    return x_BTD


def l2_normalize(x: jax.Array) -> jax.Array:
    """Returns x / √(Σ x² + 1e-6), with the sum over the last axis. The result is float32, or
    float64 if x is float64.
    """
    x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
