"""How a layer should arrange its arrays for the platform that the program is compiled for. Layers
ask these functions, so that no layer names a chip.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from qwen3next_jax.ops.compile_target import compile_target

_LANES = 128


def heads_side_by_side(*widths: int) -> bool:
    """Whether the operators of a recurrent layer pass each other arrays [B, T, heads · width], and
    not [B, T, heads, width]: on a GPU, and on a TPU where heads of all `widths` fill whole lanes.
    """
    platform = compile_target().platform
    return platform == "gpu" or platform == "tpu" and all(width % _LANES == 0 for width in widths)


def experts_in_tiles() -> bool:
    """Whether `routed_experts`, with rows in tiles, computes the experts for every dtype and number
    of tokens.
    """
    return compile_target().platform == "tpu"


def experts_in_caches() -> bool:
    """Whether experts are computed as suits a CPU's caches: rows sorted by expert, and for few
    tokens only the experts in use.
    """
    return compile_target().platform == "cpu"


def unroll_short_loops() -> bool:
    """Whether a loop over few layers is unrolled: on a TPU, which copies what a loop reads from
    stacked arrays and writes to them.
    """
    return compile_target().platform == "tpu"


def float32_precision(dtype) -> jax.lax.Precision:
    """The precision of float32 products whose operands were cast from `dtype`. For bfloat16 on a
    TPU three bfloat16 passes are enough: they are 2e-6 off the six of HIGHEST.
    """
    if compile_target().platform == "tpu" and dtype == jnp.bfloat16:
        return jax.lax.Precision.HIGH
    return jax.lax.Precision.HIGHEST


def row_major(x):
    """x, on a TPU with the constraint that its layout is row-major, as kernels have it.

    Use it where rows are exchanged between devices. Otherwise the TPU's compiler takes the layout
    of an operation before or after the exchange and copies all rows, many times what one device
    holds.
    """
    if compile_target().platform != "tpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
