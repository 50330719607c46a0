"""Grouped matrix products with tokamax's kernels for Hopper GPUs (docs/gpu.md). Rows are sorted by
group, and the rows of a group are multiplied by the matrix of that group. Rows after the last group
belong to no group.

R rows, D input width, F output width, E groups.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import tokamax

# The largest allowed relative L2 difference between the kernels' and XLA's products of the same
# bfloat16 operands. Both sum in float32 and round the result to bfloat16.
TOLERANCE = 0.02
MIN_ROWS = 128  # calls of fewer rows than a tile do not run the kernels by default


def supports(x, weights) -> str:
    """Returns why the kernels cannot run a call; "" if they can.

    Args:
      x: [R, D], the rows.
      weights: the arrays of matrices [E, D, F], one array for each product of the call.
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
    """Returns whether a call that names no implementation runs the kernels. The call runs them if
    it has at least MIN_ROWS rows, if the kernels support it and if they passed their test on this
    GPU. For MIN_ROWS rows or more the function prints the decision once.
    """
    if x.shape[0] < MIN_ROWS:
        return False
    return self_test.is_enabled(test(), supports(x, weights))


def matmul(x_RD, w_EDF, sizes_E):
    """Returns y [R, F], the result of `ops.grouped_matmul`, with zeros in rows of no group.
    `sizes_E` [E] has the number of rows of each group.
    """
    kernel = tokamax.module("ragged_dot.pallas_mosaic_gpu_kernel_sm90").ragged_dot_kernel
    y_RF = kernel(x_RD, w_EDF, sizes_E, x_RD.dtype, _config(block_m=128, num_stages=4))
    # The kernel does not write the rows of no group.
    return jnp.where(jnp.arange(x_RD.shape[0])[:, None] < jnp.sum(sizes_E), y_RF, 0)


def gradients(x_RD, w_EDF, sizes_E, dy_RF):
    """Returns the gradients of x_RD and w_EDF, given dy_RF [R, F], the gradient of y."""
    kernel = tokamax.module(
        "ragged_dot.pallas_mosaic_gpu_kernel_sm90"
    ).ragged_contracting_dim_dot_kernel
    return matmul(dy_RF, w_EDF.swapaxes(1, 2), sizes_E), kernel(
        x_RD, dy_RF, sizes_E, w_EDF.dtype, _config(block_m=64, num_stages=2)
    )


def _config(**sizes):
    """Returns tokamax's settings of a kernel. `sizes` are `block_m` and `num_stages`."""
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
    """Returns the test, which is the same for all calls."""
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
    """Runs the kernels and the XLA products on groups that end inside a tile, an empty group and
    rows of no group. Returns the name of the result in which they differ most, and the relative L2
    difference.

    Args:
      functions: two functions to test instead of `matmul` and `gradients`; None means `matmul` and
        `gradients`.
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
