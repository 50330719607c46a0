"""The kernels of the programs that were measured, for `validation.py`: MaxText computes its experts
with megablox, of which JAX has a copy, and the gradients of attention with two kernels.

`install` makes every program of this process contain them in place of this project's kernels. Such
a program can be compiled and priced; nothing has run one.

R rows, D input width, F output width, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from qwen3next_jax import kernels
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.ops.routed_experts import layout
from qwen3next_jax.planner.grouped_products import TILING


class MeasuredKernels(NamedTuple):
    """What a published program runs.

    Attributes:
      rows, embedding, width: the tile of megablox, as MaxText's settings `tile_batch_seq`,
        `tile_embed_dim` and `tile_mlp_dim` give it.
      two_backward_kernels: whether dq has a kernel of its own (`sa_use_fused_bwd_kernel=False`).
    """

    rows: int
    embedding: int
    width: int
    two_backward_kernels: bool = False


_installed: list[tuple[MeasuredKernels, int]] = []  # the kernels, and the width of an expert


def install(measured: MeasuredKernels, expert_width: int) -> None:
    """Makes the programs that this process compiles contain the kernels.

    Args:
      expert_width: the width of an expert's hidden layer.
    """
    _installed[:] = [(measured, expert_width)]
    kernels.KERNELS["routed_experts"] = {}
    kernels.KERNELS["grouped_matmul"] = {"megablox": ("tpu", __name__)}
    # The rows of an expert follow those of the one before it, without rows between them: the
    # smallest tile of this project's layout leaves at most 15.
    layout._LARGEST_TILE = 16
    if measured.two_backward_kernels:
        splash_attention.PARTS_OF_DQ = 0


def supports(x, weights) -> str:
    """Returns "": every call runs the kernels."""
    return ""


def matmul(x, w, group_sizes):
    """Returns the product [R, F] of each row of x [R, D] and the matrix [D, F] of its expert."""
    return _call(gmm, x, w, group_sizes, x.shape[1], w.shape[2])


def gradients(x, w, group_sizes, dy):
    """Returns the gradients of x and w of `matmul`, given dy [R, F]."""
    dx = _call(gmm, dy, w, group_sizes, w.shape[2], x.shape[1], transpose_rhs=True)
    return dx, _call(tgmm, x, dy, group_sizes, x.shape[1], w.shape[2])


def _call(kernel, x, other, group_sizes, contracted: int, columns: int, **options):
    """Calls a kernel of megablox with the tile of the measured program."""
    tile = (_installed[0][0].rows, _tile(contracted), _tile(columns))
    padding = ((0, -x.shape[0] % tile[0]), (0, 0))
    rows = [jnp.pad(x, padding), jnp.pad(other, padding) if other.ndim == 2 else other]
    if kernel is tgmm:
        rows[0] = rows[0].T
    with jax.named_scope("_".join(map(str, (TILING, *tile)))):
        out = kernel.__wrapped__(*rows, group_sizes, x.dtype, tile, **options)
    return out if kernel is tgmm else out[: x.shape[0]]


def _tile(width: int) -> int:
    """Returns the tile along an axis of `width` columns. The measured program multiplies by the
    gate and the up matrix one after the other, and each product fills its last tile. Here both
    matrices are one, and a tile of twice the width computes as many columns that do not exist.
    """
    measured, expert_width = _installed[0]
    if width == 2 * expert_width:
        return 2 * min(measured.width, expert_width)
    return min(measured.width if width == expert_width else measured.embedding, width)
