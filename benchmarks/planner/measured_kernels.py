"""What the MaxText runs that `validation.py` predicts compute in another way than this project:

- Experts: MaxText repeats each token for each of its experts, permutes these rows, multiplies them
  by the gate and by the up matrix in two products, permutes the results back, and sums them by the
  router's weights (src/maxtext/layers/moe.py, `permute`, `sparse_matmul` and `unpermute`). Its
  products are the kernels of megablox or of tokamax. This module uses JAX's copy of megablox for
  both.
- Attention: blocks of another size, and gradients by one kernel or by two.

`MaxTextExperts` are experts of this kind, for the setting `model.moe.experts`. After `install`, the
grouped products and the attention of every program that this process compiles for a TPU run in
these kernels.

R tokens, Q rows sorted by expert, D model or input width of a product, E experts, A choices per
token, I width of an expert, F output width of a product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from qwen3next_jax import kernels
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.model.expert_implementations import sorted_moe
from qwen3next_jax.model.layers import call_saving_only_inputs
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.ops.grouped_matmul import grouped_matmul
from qwen3next_jax.planner.grouped_products import TILING
from qwen3next_jax.sharding.rules import EXPERT, num_shards


class MeasuredKernels(NamedTuple):
    """The kernels' settings of a published program.

    Attributes:
      rows, embedding, width: the tile of megablox, as MaxText's settings `tile_batch_seq`,
        `tile_embed_dim` and `tile_mlp_dim` give it.
      two_backward_kernels: whether attention's dq has a kernel of its own, beside that of dk and dv
        (`sa_use_fused_bwd_kernel=False`).
      attention_block: the number of queries, and of keys, in a block of attention, and of the keys
        that one product takes (the settings `sa_block_…`); None: as in this project.
    """

    rows: int
    embedding: int
    width: int
    two_backward_kernels: bool = False
    attention_block: int | None = None


# the settings, and the width of an expert; empty before `install`
_installed: dict[str, int | None] = {}


def install(measured: MeasuredKernels, hidden: int, expert_width: int) -> None:
    """Makes the programs that this process compiles run the kernels of a published program.

    Args:
      hidden: width of the model.
      expert_width: width of an expert's hidden layer.

    Raises:
      ValueError: the model is as wide as an expert, so that the width of an array does not tell
        which one it is.
    """
    if hidden == expert_width:
        raise ValueError(f"a model {hidden} wide with experts as wide is ambiguous")
    _installed.update(measured._asdict(), expert_width=expert_width)
    kernels.KERNELS["grouped_matmul"] = {"megablox": ("tpu", __name__)}
    if measured.attention_block:
        splash_attention.BLOCK = splash_attention.LONG_BLOCK = measured.attention_block
    if measured.two_backward_kernels:
        splash_attention.PARTS_OF_DQ = 0


class MaxTextExperts(SparseMoE):
    """Routed SwiGLU experts as MaxText computes them: gate and up are two parameters. The shared
    expert is this project's.
    """

    expert_parameter_names = ("expert_gate", "expert_up", "expert_down")

    def make_experts(self, make, d, e, i):
        of_hidden = "experts | embed -> mlp"
        self.expert_gate = make.matrix((e, d, i), of_hidden, gathered_by="operator")
        self.expert_up = make.matrix((e, d, i), of_hidden, gathered_by="operator")
        self.expert_down = make.matrix(
            (e, i, d), "experts | mlp_in -> embed", gathered_by="operator"
        )

    @staticmethod
    def choose_expert_implementation(mesh, *_, layer, **__):
        if num_shards(mesh, EXPERT) > 1 or layer is not None:
            raise ValueError("MaxTextExperts: expected all experts on each device, and no decoding")
        return experts_of_maxtext


def experts_of_maxtext(x_RD, weight_RA, expert_RA, *experts):
    """Computes the weighted sum [R, D] of each token's experts. The choices are summed in float32
    (MaxText's default `float32_weight_sum`).
    """
    weight_RA = weight_RA.astype(jnp.float32)
    y_RD = sorted_moe(x_RD, weight_RA, expert_RA, *experts, mlp=_three_products)
    return y_RD.astype(x_RD.dtype)


def _three_products(x_QD, gate_EDI, up_EDI, down_EID, sizes_E):
    gate_QI, up_QI = (grouped_matmul(x_QD, w_EDI, sizes_E) for w_EDI in (gate_EDI, up_EDI))
    return grouped_matmul(call_saving_only_inputs(_silu_times, gate_QI, up_QI), down_EID, sizes_E)


def _silu_times(gate_QI, up_QI):
    return jax.nn.silu(gate_QI) * up_QI


def unsupported_reason(x, weights) -> str:
    """Returns "": every call runs the kernels."""
    return ""


def matmul(x, w, group_sizes):
    """Returns the product [Q, F] of each row of x [Q, D] and the matrix [D, F] of its expert."""
    tile = _tile(x.shape[1], w.shape[2])
    with _scope(tile):
        # JAX drops the scope's name inside of a jitted function, so this calls the function itself.
        return gmm.__wrapped__(x, w, group_sizes, x.dtype, tile)


def gradients(x, w, group_sizes, dy):
    """Returns the gradients of x and w of `matmul`, given dy [Q, F]."""
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
    these widths.
    """
    expert = _installed["expert_width"]
    along = (_installed["width" if w == expert else "embedding"] for w in widths)
    return _installed["rows"], *map(min, along, widths)
