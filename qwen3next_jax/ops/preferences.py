"""How a layer should arrange its arrays for the platform that is compiled for: layers ask here, so
that they name no chip.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from qwen3next_jax.ops.compile_target import compile_target

_LANES = 128


def heads_side_by_side(*widths: int) -> bool:
    """Whether arrays pass from operator to operator of a recurrent layer as [B, T, heads · width]:
    on a GPU, and on a TPU where heads of all `widths` fill whole lanes.
    """
    platform = compile_target().platform
    return platform == "gpu" or platform == "tpu" and all(width % _LANES == 0 for width in widths)


def experts_in_tiles() -> bool:
    """Whether `routed_experts` computes all experts, for every dtype and number of tokens."""
    return compile_target().platform == "tpu"


def experts_in_caches() -> bool:
    """Whether experts are computed as is best for a CPU's caches: rows sorted by expert, and for a
    few tokens the experts in use alone.
    """
    return compile_target().platform == "cpu"


def unroll_short_loops() -> bool:
    """Whether a loop over few layers is written out: a TPU copies what passes in and out of a
    loop's stacked arrays.
    """
    return compile_target().platform == "tpu"


def float32_precision(dtype) -> jax.lax.Precision:
    """For products in float32 of numbers that were of `dtype`: three of a TPU's six bfloat16 passes
    are 2e-6 off for bfloat16.
    """
    if compile_target().platform == "tpu" and dtype == jnp.bfloat16:
        return jax.lax.Precision.HIGH
    return jax.lax.Precision.HIGHEST


def row_major(x):
    """`x` in the layout of the kernels. A TPU's compiler would exchange rows between devices in the
    layout of what comes before or after, and copy all of them, many times what one device holds.
    """
    if compile_target().platform != "tpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
