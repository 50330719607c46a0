"""What the MaxText runs that `validation.py` predicts compute in another way than this project:

- Experts: MaxText repeats each token for each of its experts, permutes these rows, multiplies them
  with the kernels of megablox or of tokamax, permutes the results back, and sums them by the
  router's weights (src/maxtext/layers/moe.py, `permute` and `unpermute`). This module uses JAX's
  copy of megablox for both.
- Gradients of attention: MaxText computes them with one kernel or with two.

`install` makes every program of this process for a TPU compute so, if each device holds all
experts.

R rows (in `experts_of_maxtext` tokens), D input width, F output width, E experts, A choices per
token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from qwen3next_jax import kernels
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.model import expert_parallelism
from qwen3next_jax.model.expert_forms import sorted_moe
from qwen3next_jax.planner.grouped_products import TILING


class MeasuredKernels(NamedTuple):
    """The kernels' settings of a published program.

    Attributes:
      rows, embedding, width: the tile of megablox, as MaxText's settings `tile_batch_seq`,
        `tile_embed_dim` and `tile_mlp_dim` give it.
      two_backward_kernels: whether attention's dq has a kernel of its own, beside that of dk and dv
        (`sa_use_fused_bwd_kernel=False`).
    """

    rows: int
    embedding: int
    width: int
    two_backward_kernels: bool = False


# the settings, and the width of an expert; empty before `install`
_installed: dict[str, int] = {}


def install(measured: MeasuredKernels, hidden: int, expert_width: int) -> None:
    """Makes the programs that this process compiles compute their experts and attention as MaxText.

    Args:
      hidden: width of the model.
      expert_width: width of an expert's hidden layer.

    Raises:
      ValueError: the model is as wide as an expert, or as an expert's gate and up matrix together,
        so that the width of an array does not tell which one it is.
    """
    if hidden in (expert_width, 2 * expert_width):
        raise ValueError(f"a model {hidden} wide with experts {expert_width} wide is ambiguous")
    _installed.update(measured._asdict(), expert_width=expert_width)
    kernels.KERNELS["grouped_matmul"] = {"megablox": ("tpu", __name__)}
    expert_parallelism.local_moe = functools.partial(
        expert_parallelism.local_moe, form=experts_of_maxtext
    )
    # MaxText computes all tokens of a device at once.
    expert_parallelism.CHUNK_BYTES = 2**40
    if measured.two_backward_kernels:
        splash_attention.PARTS_OF_DQ = 0


def experts_of_maxtext(x_RD, weight_RA, expert_RA, gate_up, down):
    """The experts as MaxText computes them; a form of `expert_parallelism.local_moe`. The choices
    are summed in float32 (MaxText's default `float32_weight_sum`).
    """
    gate_up = gate_up.reshape(*gate_up.shape[:2], 2, -1)
    y_RD = sorted_moe(x_RD, weight_RA.astype(jnp.float32), expert_RA, gate_up, down)
    return y_RD.astype(x_RD.dtype)


def supports(x, weights) -> str:
    """Returns "": every call runs the kernels."""
    return ""


def matmul(x, w, group_sizes):
    """Returns the product [R, F] of each row of x [R, D] and the matrix [D, F] of its expert."""
    tile = _tile(x.shape[1], w.shape[2])
    with _scope(tile):
        # JAX drops the scope's name inside of a jitted function, so this calls the function itself.
        return gmm.__wrapped__(x, w, group_sizes, x.dtype, tile)


def gradients(x, w, group_sizes, dy):
    """Returns the gradients of x and w of `matmul`, given dy [R, F]."""
    of_rows, of_matrices = _tile(w.shape[2], x.shape[1]), _tile(x.shape[1], w.shape[2])
    with _scope(of_rows):
        dx = gmm.__wrapped__(dy, w, group_sizes, x.dtype, of_rows, transpose_rhs=True)
    with _scope(of_matrices):
        return dx, tgmm.__wrapped__(x.T, dy, group_sizes, w.dtype, of_matrices)


def _scope(tile: tuple[int, int, int]):
    """Returns a scope whose name tells the planner the tile."""
    return jax.named_scope("_".join(map(str, (TILING, *tile))))


def _tile(*widths: int) -> tuple[int, int, int]:
    """Returns the tile of a product: that of its rows, then those of its other two axes, which have
    these widths. MaxText multiplies by the gate matrix and by the up matrix, and pads each to whole
    tiles. This project keeps both in one matrix. A tile of twice the width pads it by as much.
    """
    expert = _installed["expert_width"]
    of_expert = min(_installed["width"], expert)
    along = {expert: of_expert, 2 * expert: 2 * of_expert}
    return _installed["rows"], *(along.get(w, min(_installed["embedding"], w)) for w in widths)
