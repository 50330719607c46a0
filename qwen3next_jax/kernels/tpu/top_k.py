"""A TPU kernel that finds the A largest numbers of each row. XLA sorts whole rows to find the
largest numbers; the kernel instead finds and removes the largest number of a row A times.

R rows, E numbers of a row, A largest numbers to find in a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.pallas_call import pallas_call

BLOCK = 512  # the largest number of rows of a grid step
ROWS = LANES  # rows that are worked on at once
LARGEST = 4 * LANES  # the largest E. With more, fewer numbers of these rows stay in registers
MOST = 32  # the largest A. The kernel's time grows with A; the time of XLA's sort does not
LOWEST = jnp.iinfo(jnp.int32).min


def unsupported_reason(x_RE, count: int) -> str:
    """Returns why the kernel cannot find the `count` largest of each row; "" if it can."""
    rows, numbers = x_RE.shape
    fits = rows % ROWS == 0 and numbers % 8 == 0 and numbers <= LARGEST
    if x_RE.dtype != jnp.float32 or not fits or count > min(numbers, MOST):
        return (
            f"has {rows} rows of {numbers} numbers in {x_RE.dtype}, {count} of them to find: "
            f"expected a multiple of {ROWS} rows, of a multiple of 8 up to {LARGEST} numbers, in "
            f"float32, and at most {MOST} to find"
        )
    return ""


def top_k(x_RE, count: int, *, interpret: bool = False):
    """Returns what `ops.top_k` describes. `interpret` says whether a CPU interprets the kernel.

    A NaN whose bits are all set counts as the smallest number, and may be found twice.
    """
    rows, numbers = x_RE.shape
    block = next(n for n in (BLOCK, 256, ROWS) if rows % n == 0)
    best = pl.BlockSpec((count, block), lambda r: (0, r))
    value_AR, index_AR = pallas_call(
        functools.partial(_top_k_kernel, count),
        grid=(rows // block,),
        in_specs=[pl.BlockSpec((block, numbers), lambda r: (r, 0))],
        out_specs=[best, best],
        out_shape=[jax.ShapeDtypeStruct((count, rows), t) for t in (jnp.float32, jnp.int32)],
        interpret=interpret,
        name="top_k",
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=4 * rows * (numbers + 2 * count)
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x_RE)
    return value_AR.T, index_AR.T


def _to_ordered_integers(bits):
    """Takes the bits of float32 numbers as integers, and returns integers that have the order of
    the float32 numbers: -inf, …, -0, 0, …, inf, NaN. The function is its own inverse.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _top_k_kernel(count, x, value, index):
    """Finds the largest numbers of each row in a block, for ROWS rows at once."""

    def find_in_rows(i, _):
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        # The rows lie along the lanes, so the search for the largest number stays within a lane.
        key_ER = _to_ordered_integers(jax.lax.bitcast_convert_type(x[rows], jnp.int32)).T
        number_ER = jax.lax.broadcasted_iota(jnp.int32, key_ER.shape, 0)
        values, indices = [], []
        for _ in range(count):
            best_1R = jnp.max(key_ER, axis=0, keepdims=True)
            # of equal numbers the first
            at_1R = jnp.min(
                jnp.where(key_ER == best_1R, number_ER, len(key_ER)), axis=0, keepdims=True
            )
            key_ER = jnp.where(number_ER == at_1R, LOWEST, key_ER)
            values.append(best_1R)
            indices.append(at_1R)
        value_AR = _to_ordered_integers(jnp.concatenate(values))
        value[:, rows] = jax.lax.bitcast_convert_type(value_AR, jnp.float32)
        index[:, rows] = jnp.concatenate(indices)
        return 0

    jax.lax.fori_loop(0, x.shape[0] // ROWS, find_in_rows, 0)
