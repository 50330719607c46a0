"""Grouped matrix products, of rows sorted by group, by tokamax's kernels for Hopper GPUs
(docs/gpu.md).

R rows, D width in, F width out, E groups.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import tokamax

# Relative L2 difference of two products of the same bfloat16 operands with float32 sums, rounded to
# bfloat16.
TOLERANCE = 0.02
MIN_ROWS = 128  # of a call that runs the kernels by default: the rows of a tile


def supports(x, weights) -> str:
    """Why the kernels cannot run a call; "" where they can.

    Args:
      x: [R, D]. weights: the arrays of matrices [E, D, F] of all products of the call.
    """
    if {x.dtype, *(w.dtype for w in weights)} != {jnp.dtype(jnp.bfloat16)}:
        return f"has rows of {x.dtype} and matrices of {weights[0].dtype}: expected bfloat16"
    if any(n % 64 for w in weights for n in w.shape[1:]) or x.shape[0] % 8:
        return (
            f"has {x.shape[0]} rows, matrices of {weights[0].shape[1:]}: expected multiples of 8 "
            "and 64"
        )
    return tokamax.unsupported()


def is_default(x, weights) -> bool:
    """Whether a call that names no implementation runs the kernels: where they passed their test.
    Prints the decision once.
    """
    if x.shape[0] < MIN_ROWS:
        return False
    return self_test.is_enabled(test(), supports(x, weights))


def matmul(x_RD, w_EDF, sizes_E):
    """y [R, F], as `ops.grouped_matmul`; zeros in rows of no group."""
    kernel = tokamax.module("ragged_dot.pallas_mosaic_gpu_kernel_sm90").ragged_dot_kernel
    y_RF = kernel(x_RD, w_EDF, sizes_E, x_RD.dtype, _config(block_m=128, num_stages=4))
    # The kernel does not write the rows of no group.
    return jnp.where(jnp.arange(x_RD.shape[0])[:, None] < jnp.sum(sizes_E), y_RF, 0)


def gradients(x_RD, w_EDF, sizes_E, dy_RF):
    """The gradients of x and w, from dy_RF [R, F]."""
    kernel = tokamax.module(
        "ragged_dot.pallas_mosaic_gpu_kernel_sm90"
    ).ragged_contracting_dim_dot_kernel
    return matmul(dy_RF, w_EDF.swapaxes(1, 2), sizes_E), kernel(
        x_RD, dy_RF, sizes_E, w_EDF.dtype, _config(block_m=64, num_stages=2)
    )


def _config(**sizes):
    common = tokamax.module("ragged_dot.pallas_mosaic_gpu_common")
    return common.Config(
        block_n=64,
        block_k=128,
        split_k=1,
        persistent=False,
        grid_minor_dim=common.MatmulDimension.M,
        **sizes,
    )


def test() -> self_test.SelfTest:
    """The test of all calls."""
    names = "pallas_mosaic_gpu_kernel_sm90", "pallas_mosaic_gpu_common"
    modules = tuple(f"tokamax._src.ops.ragged_dot.{name}" for name in names)
    return self_test.SelfTest(
        "grouped products",
        self_test.AVOID,
        (tokamax.RELEASE,),
        modules,
        max_error,
        TOLERANCE,
        ran_on="",
    )


def max_error(functions=None) -> tuple[str, float]:
    """The result in which the kernels and products in XLA differ most, and its relative L2
    difference, with groups that end within tiles, an empty group, and rows of no group.

    Args:
      functions: to test in place of `matmul` and `gradients`.
    """
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    sizes = np.array([130, 0, 57, 69])
    x, w, dy = array(264, 192), array(len(sizes), 192, 64), array(264, 64)
    results = lambda matmul, gradients: jax.jit(
        lambda x, w, dy: (
            matmul(x, w, jnp.asarray(sizes, jnp.int32)),
            *gradients(x, w, jnp.asarray(sizes, jnp.int32), dy),
        )
    )(x, w, dy)
    group = np.repeat(np.arange(len(sizes) + 1), [*sizes, 264 - sum(sizes)])

    def dense(x, w, *_):
        matrices = jnp.concatenate([w, jnp.zeros_like(w[:1])]).astype(jnp.float32)
        return jnp.einsum(
            "rd,rdf->rf",
            x.astype(jnp.float32),
            matrices[group],
            precision=jax.lax.Precision.HIGHEST,
        ).astype(x.dtype)

    want = results(dense, lambda x, w, _, dy: jax.vjp(dense, x, w)[1](dy))
    return self_test.largest_error(
        ("product", "dx", "dw"), results(*(functions or (matmul, gradients))), want
    )
