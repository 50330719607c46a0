"""Functions that adapt layers to the platform that the program is compiled for. Layers call these
functions, so that no layer names a platform in its own code.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from qwen3next_jax.ops.compile_target import compile_target

_LANES = 128
# Platform → the most periods of layers whose loop is unrolled. More take longer to compile.
UNROLLED = {"tpu": 4, "gpu": 6}
_GPU_MEMORY = 80 * 2**30


def prefers_concatenated_heads(*widths: int) -> bool:
    """Returns whether a recurrent layer passes arrays [B, T, heads · width] from operator to
    operator, instead of [B, T, heads, width]. A layer passes concatenated heads on a GPU, and on a
    TPU if every one of `widths` (channels per head) is a multiple of the 128 lanes of a register.
    """
    platform = compile_target().platform
    return platform == "gpu" or platform == "tpu" and all(width % _LANES == 0 for width in widths)


def prefers_expert_tiles() -> bool:
    """Returns whether a layer computes its experts with the operator `routed_experts` (which lays
    out the rows of each expert in tiles) for every dtype and number of tokens. The result is True
    on a TPU. On other platforms, a layer may use other operators for some dtypes or numbers of
    tokens.
    """
    return compile_target().platform == "tpu"


def prefers_cache_sized_experts() -> bool:
    """Returns whether a layer computes its experts in the way that suits a CPU's caches: the layer
    sorts the rows by expert, and for few tokens it computes only the chosen experts. The result is
    True on a CPU.
    """
    return compile_target().platform == "cpu"


def device_memory_bytes() -> int:
    """Returns the bytes of a device's memory, by which a layer chooses how many rows it computes at
    a time; 0 if the size is not known. During a trace, JAX knows the memory size of a TPU, but not
    of a GPU. Every GPU counts as an H100.
    """
    target = compile_target()
    return _GPU_MEMORY if target.platform == "gpu" else target.memory_bytes or 0


def prefers_unrolled_layers(repeats: int) -> bool:
    """Returns whether a model unrolls a loop over `repeats` periods of layers. A loop over few
    periods is unrolled on a TPU and on a GPU, where a loop copies every slice that it reads from or
    writes to the arrays of all layers. (On a GPU, a loop also fills the arrays that it writes with
    zeros before it begins.)
    """
    return repeats <= UNROLLED.get(compile_target().platform, 0)


def float32_product_precision(dtype) -> jax.lax.Precision:
    """Returns the precision for float32 matrix products whose operands were cast from `dtype`. The
    precision is HIGHEST, except for operands cast from bfloat16 on a TPU, for which the precision
    is HIGH. HIGH takes three bfloat16 passes instead of six. The relative difference between the
    results of HIGH and HIGHEST is 2e-6.
    """
    if compile_target().platform == "tpu" and dtype == jnp.bfloat16:
        return jax.lax.Precision.HIGH
    return jax.lax.Precision.HIGHEST


def require_row_major(x):
    """Returns x. On a TPU, the function adds the constraint that the layout of x in memory is
    row-major, which is the layout that kernels read and write.

    Use this function on arrays of rows that devices exchange. Without the constraint, the TPU's
    compiler may give the exchanged array the layout of a neighbouring operation. With another
    layout, the program copies the whole exchanged array, which is many times as large as the rows
    of one device.
    """
    if compile_target().platform != "tpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
