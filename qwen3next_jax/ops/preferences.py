"""How a layer should arrange its arrays for the platform that the program is compiled for. Layers
call these functions, so that no layer names a platform.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from qwen3next_jax.ops.compile_target import compile_target

_LANES = 128


def heads_side_by_side(*widths: int) -> bool:
    """Whether the operators of a recurrent layer pass arrays [B, T, heads · width] to each other
    instead of [B, T, heads, width]. They do so on a GPU, and on a TPU if every one of `widths`
    (channels per head) is a multiple of the 128 lanes.
    """
    platform = compile_target().platform
    return platform == "gpu" or platform == "tpu" and all(width % _LANES == 0 for width in widths)


def experts_in_tiles() -> bool:
    """Whether the operator `routed_experts`, which lays out the tokens of each expert in tiles of
    rows, computes the experts for every dtype and number of tokens.
    """
    return compile_target().platform == "tpu"


def experts_in_caches() -> bool:
    """Whether the experts are computed in the way that suits a CPU's caches: the rows are sorted by
    expert, and for few tokens only the experts that a token chose are computed.
    """
    return compile_target().platform == "cpu"


def unroll_short_loops() -> bool:
    """Whether a loop over few layers is unrolled. It is unrolled on a TPU, where a loop copies
    every slice that it reads from or writes to the stacked arrays of the layers.
    """
    return compile_target().platform == "tpu"


def float32_precision(dtype) -> jax.lax.Precision:
    """Returns the precision for float32 matrix products whose operands were cast from `dtype`. On a
    TPU, operands cast from bfloat16 get HIGH, which takes three bfloat16 passes; its results differ
    by 2e-6 from those of the six passes of HIGHEST.
    """
    if compile_target().platform == "tpu" and dtype == jnp.bfloat16:
        return jax.lax.Precision.HIGH
    return jax.lax.Precision.HIGHEST


def row_major(x):
    """Returns x; on a TPU with the constraint that its layout in memory is row-major, which is the
    layout that kernels read and write.

    Use it on arrays of rows that devices exchange. Without it the TPU's compiler may give the
    exchanged array the layout of a neighbouring operation, and then copies that whole array, which
    is many times as large as the rows of one device.
    """
    if compile_target().platform != "tpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
