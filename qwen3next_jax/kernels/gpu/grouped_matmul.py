"""Products of rows sorted by group, each row once, by tokamax's kernels for Hopper GPUs
(docs/gpu.md).

R rows, D width in, F width out, E groups.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import tokamax

# relative L2, of two products of the same bfloat16 operands with float32 sums, rounded to bfloat16
TOLERANCE = 0.02
FEWEST = 128  # rows of a tile; fewer are not worth a kernel


def supports(x, weights) -> str:
    """Why the kernels cannot multiply rows x [R, D] by matrices [E, D, F] of each of `weights`; ""
    where they can.
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
    """Where they passed their test; says once what was decided."""
    if x.shape[0] < FEWEST:
        return False
    return self_test.is_enabled(test(), supports(x, weights))


def matmul(x_RD, w_EDF, sizes_E):
    """As `grouped_matmul`."""
    kernel = tokamax.module("ragged_dot.pallas_mosaic_gpu_kernel_sm90").ragged_dot_kernel
    y_RF = kernel(x_RD, w_EDF, sizes_E, x_RD.dtype, _config(block_m=128, num_stages=4))
    # what it leaves alone may be anything
    return jnp.where(jnp.arange(x_RD.shape[0])[:, None] < jnp.sum(sizes_E), y_RF, 0)


def gradients(x_RD, w_EDF, sizes_E, dy_RF):
    """Of `matmul`: dx, dw."""
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


def max_error(form=None) -> tuple[str, float]:
    """The result in which the kernels and XLA's products differ most, with groups that end within
    tiles, an empty group, and rows that belong to none.
    """
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    sizes = np.array([130, 0, 57, 69])
    x, w, dy = array(264, 192), array(len(sizes), 192, 64), array(264, 64)
    both = lambda matmul, gradients: jax.jit(
        lambda x, w, dy: (
            matmul(x, w, jnp.asarray(sizes, jnp.int32)),
            *gradients(x, w, jnp.asarray(sizes, jnp.int32), dy),
        )
    )(x, w, dy)
    group = np.repeat(np.arange(len(sizes) + 1), [*sizes, 264 - sum(sizes)])

    def dense(x, w, *_):
        every = jnp.concatenate([w, jnp.zeros_like(w[:1])]).astype(jnp.float32)
        return jnp.einsum(
            "rd,rdf->rf", x.astype(jnp.float32), every[group], precision=jax.lax.Precision.HIGHEST
        ).astype(x.dtype)

    want = both(dense, lambda x, w, _, dy: jax.vjp(dense, x, w)[1](dy))
    return self_test.largest_error(
        ("product", "dx", "dw"), both(*(form or (matmul, gradients))), want
    )
