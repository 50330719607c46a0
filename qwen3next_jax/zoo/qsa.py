"""Qwen Sparse Attention (QSA): gated attention in which an indexer chooses, for each query, the
blocks of keys that it sees (Qwen3.8-Flash-Next; transformers' `qwen4_exp`).

The indexer has H small query heads and one key head. Its keys are averaged over blocks of `ratio`
consecutive tokens, counted from the document's start. A query at place p sees the tokens of the
budget / ratio complete blocks with the best scores

    Σ over heads of relu(⟨q, k⟩) / √d

and the tokens after the last complete block, its own among them. Of equal scores the earlier
block is taken (relu makes many scores 0). Within budget + ratio - 1 tokens nothing is left out.

No gradient passes the selection: the language model's loss does not train the indexer. A loss of
its own does (`TrainConfig.indexer_training`; the technical report, as Megatron-LM writes it out):

    teacher   attention's probabilities summed over heads; the largest of each block, over their sum
    student   softmax of the blocks' scores
    loss      KL(teacher ‖ student), a mean over the queries that see a complete block

over the selected blocks ("sparse"), or over all complete ones while attention is dense ("dense", a
warm-up). The incomplete block has no score, and is left out. Teacher and the indexer's input are
constants, so that nothing else learns from it.

Letters: B batch, T queries, S keys (slots of the cache), C queries of a chunk, N query heads, M
key/value heads, K head width, H heads of the indexer, I their width, G blocks of a row.
"""

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.gated_attention import (
    GatedAttention,
    attend,
    gated_projection,
    write,
)
from qwen3next_jax.model.layers import Context, rms_norm, rotate, token_mean
from qwen3next_jax.ops import blocks
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, per_shard, num_shards
from qwen3next_jax.zoo.attention_references import gated_attention, norm, places, rotated
from qwen3next_jax.zoo.ops.pair_attention import CHUNK, dot

# Ratio and budget such that rows of some tokens have an incomplete block, and leave some out.
EXAMPLES = {
    "qsa": {
        "full_mixer": "qsa",
        "mixer": {
            "indexer_n_heads": 2,
            "indexer_head_dim": 4,
            "indexer_budget": 6,
            "indexer_compress_ratio": 3,
        },
    }
}
_HIDDEN = -1e30  # score of a pair that is not seen


class Blocks(NamedTuple):
    """The complete blocks of every row, in order.

    k: [B, G, I], the indexer's pooled keys, normed and rotated.
    start: [B, G] int32, the place of the block's first token in its document.
    segment: [B, G] int32, its document; 0 where there is no such block.
    last: [B, G] int32, its last token's place in the row.
    of_token: [B, S] int32, the block of each token, complete or not yet.
    """

    k: jax.Array
    start: jax.Array
    segment: jax.Array
    last: jax.Array
    of_token: jax.Array


class QSA(GatedAttention):
    """Gated attention to the blocks of keys that an indexer selects. The cache also holds the
    indexer's keys, and the blocks' pooled ones, which are made when a block is complete.

    Diagnostics: `GatedAttention`'s, of dense attention; indexer_overlap [], of the blocks to which
    dense attention gives most, as many as the budget has, the share that is selected, a mean over
    the counted queries that have more complete blocks than that.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedAttention.Settings):
        # query heads of the indexer; it has one key head
        indexer_n_heads: Annotated[int, "at least 1"] = 4
        # width of the indexer's heads
        indexer_head_dim: Annotated[int, "at least 1"] = 128
        # tokens of the complete blocks that a query sees, at most
        indexer_budget: Annotated[int, "at least 1"] = 2048
        # tokens of a block
        indexer_compress_ratio: Annotated[int, "at least 1"] = 4

        def __post_init__(self):
            if self.indexer_compress_ratio < 1:
                return  # its bound is checked next
            require(
                self.indexer_budget % self.indexer_compress_ratio == 0,
                f"model.mixer.indexer_budget = {self.indexer_budget}: expected a multiple of "
                f"model.mixer.indexer_compress_ratio = {self.indexer_compress_ratio}: whole blocks "
                "are selected",
            )

    read_time = ("indexer_budget",)
    in_place = False
    has_loss = True
    whole_rows = True

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        s = self.settings(config)
        # the query heads, and the key head last
        self.index_qk_proj = make.matrix(
            (config.hidden_size, s.indexer_n_heads + 1, s.indexer_head_dim),
            "embed -> . .",
            kind="indexer",
            operand=True,
        )
        start = jnp.zeros if config.zero_centered_norm else jnp.ones
        self.index_q_norm, self.index_k_norm = (
            make.parameter(start, (s.indexer_head_dim,), ".", kind="indexer") for _ in range(2)
        )

    def __call__(self, x_BTD, context, cache=None):
        q_BTNK, gate_BTNK, k_BTMK, v_BTMK = self.heads(x_BTD, context)
        index_q_BTHI, index_k_BTI = self.index(x_BTD, context)
        if cache is not None:
            o_BTNK, cache = self._attend_cached(
                q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context, cache
            )
            return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), {}, cache

        is_sparse = context.indexer != "dense" and self.is_sparse(x_BTD.shape[1])
        of_rows = None
        if is_sparse or context.indexer != "frozen" or context.collect_stats:
            of_rows = self.blocks_of_rows(index_k_BTI, context)
        if is_sparse:
            o_BTNK = self._selected_attention(
                q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, of_rows, context
            )
        else:
            o_BTNK = attend(q_BTNK, k_BTMK, v_BTMK, context)
        diagnostics = {}
        if context.collect_stats:
            diagnostics = self.diagnostics(q_BTNK, k_BTMK, gate_BTNK, context)
            diagnostics["indexer_overlap"] = self._overlap(
                q_BTNK, k_BTMK, index_q_BTHI, of_rows, context
            )
        if context.indexer != "frozen":
            diagnostics["mixer_loss"] = self._indexer_loss(
                q_BTNK, k_BTMK, index_q_BTHI, of_rows, context
            )
        return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), diagnostics, None

    def is_sparse(self, length: int) -> bool:
        """Whether some query of a document of so many tokens is denied a key."""
        s = self.settings(self.config)
        return length > s.indexer_budget + s.indexer_compress_ratio - 1

    def index(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The indexer's queries [B, T, H, I], normed and rotated, and raw keys [B, T, I]."""
        x_BTD = jax.lax.stop_gradient(x_BTD)
        qk_BTHI = jnp.einsum("btd,dhi->bthi", x_BTD, self.index_qk_proj[...].astype(x_BTD.dtype))
        q_BTHI = rms_norm(qk_BTHI[:, :, :-1], self.index_q_norm[...], self.config)
        return rotate(q_BTHI, context.positions, self.config), qk_BTHI[:, :, -1]

    def block_keys(self, mean_BGI: jax.Array, start_BG: jax.Array) -> jax.Array:
        """The pooled keys [B, G, I] of blocks whose first tokens have the places `start`."""
        k_BGI = rms_norm(mean_BGI, self.index_k_norm[...], self.config)
        return rotate(k_BGI[:, :, None], start_BG, self.config)[:, :, 0]

    def blocks_of_rows(self, index_k_BTI: jax.Array, context: Context) -> Blocks:
        """The complete blocks of all documents of each row."""
        ratio, t_BT = self.settings(self.config).indexer_compress_ratio, context.positions
        segment_BT = _documents(context)
        ends_BT = ((t_BT + 1) % ratio == 0) & (segment_BT > 0)
        before_BT = jnp.cumsum(ends_BT, axis=1) - ends_BT
        count = t_BT.shape[1] // ratio
        # the places in the row of the blocks' last tokens; 0 behind the last block
        last_BG = jax.vmap(lambda ends: jnp.nonzero(ends, size=count, fill_value=0)[0])(ends_BT)
        there_BG = jnp.arange(count) < jnp.sum(ends_BT, axis=1, keepdims=True)
        tokens_BGR = jnp.maximum(last_BG[..., None] - jnp.arange(ratio), 0)

        def take(x_BTx, index):
            return jax.vmap(lambda x, i: x[i])(x_BTx, index)

        mean_BGI = jnp.mean(take(index_k_BTI, tokens_BGR).astype(jnp.float32), axis=2)
        start_BG = take(t_BT, last_BG) - (ratio - 1)
        return Blocks(
            self.block_keys(mean_BGI.astype(index_k_BTI.dtype), start_BG),
            start_BG,
            jnp.where(there_BG, take(segment_BT, last_BG), 0),
            last_BG,
            before_BT,
        )

    def seen(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        """[B, T, T] bool: the tokens that each query sees."""
        index_q_BTHI, index_k_BTI = self.index(x_BTD, context)
        of_rows, t_BT = self.blocks_of_rows(index_k_BTI, context), context.positions
        segment_BT, settings = _documents(context), self.settings(self.config)
        selected_BTG, *_ = select_blocks(index_q_BTHI, of_rows, t_BT, segment_BT, settings)
        return seen_tokens(selected_BTG, of_rows, t_BT, t_BT, segment_BT, segment_BT, settings)

    def _attend_cached(
        self, q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context: Context, cache: dict
    ):
        """(o [B, T, N, K], the cache with these tokens written)."""
        ratio, t_BT = self.settings(self.config).indexer_compress_ratio, context.positions
        cache = {
            "k": write(cache["k"], k_BTMK, t_BT),
            "v": write(cache["v"], v_BTMK, t_BT),
            "index_k": write(cache["index_k"], index_k_BTI, t_BT),
            "block_k": cache["block_k"],
        }
        batch, slots = cache["k"].shape[:2]
        count = cache["block_k"].shape[1]
        # The blocks that these tokens touch are pooled. Queries see those that are complete alone.
        touched_BG = t_BT[:, :1] // ratio + jnp.arange(t_BT.shape[1] // ratio + 2)
        complete_BG = (touched_BG + 1) * ratio <= t_BT[:, -1:] + 1
        tokens_BGR = jnp.minimum(touched_BG[..., None] * ratio + jnp.arange(ratio), slots - 1)
        raw_BGRI = jax.vmap(lambda x, i: x[i])(cache["index_k"], tokens_BGR)
        mean_BGI = jnp.mean(raw_BGRI.astype(jnp.float32), axis=2).astype(raw_BGRI.dtype)
        pooled_BGI = self.block_keys(mean_BGI, touched_BG * ratio)
        place_BG = jnp.where(complete_BG, touched_BG, count)
        cache["block_k"] = write(cache["block_k"], pooled_BGI, place_BG)

        start_BG = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32) * ratio, (batch, count))
        s_BS = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        of_rows = Blocks(
            cache["block_k"],
            start_BG,
            jnp.ones_like(start_BG),
            start_BG + ratio - 1,
            s_BS // ratio,
        )
        # right padding is told by its slots
        context = context._replace(segment_ids=None)
        o_BTNK = self._selected_attention(
            q_BTNK, cache["k"], cache["v"], index_q_BTHI, of_rows, context, s_BS
        )
        return o_BTNK, cache

    def _selected_attention(
        self, q_BTNK, k_BSMK, v_BSMK, index_q_BTHI, of_rows: Blocks, context: Context, s_BS=None
    ):
        """`selected_attention` with the heads split over `tensor`; every shard selects alike.
        `s_BS`: the places of keys that are not the queries' own tokens.
        """

        def run(q, k, v, *rest):
            return selected_attention(q, k, v, *rest, self.settings(self.config))

        heads = activation_spec("batch", None, "heads")
        return self._on_each_device(run, (q_BTNK, k_BSMK, v_BSMK), heads, context)(
            index_q_BTHI, of_rows, *_tokens(context, s_BS)
        )

    def _indexer_loss(self, q_BTNK, k_BTMK, index_q_BTHI, of_rows: Blocks, context: Context):
        """[] the sum of the KL divergence over the tokens of `loss_tokens`."""
        if not of_rows.k.shape[1]:  # rows shorter than a block
            return jnp.zeros(())

        def run(q, k, *rest):
            settings = self.settings(self.config)
            return divergence(
                q, k, *rest, settings, context.indexer == "dense", self._head_axis(context)
            )

        heads = (jax.lax.stop_gradient(q_BTNK), jax.lax.stop_gradient(k_BTMK))
        kl_BT = self._on_each_device(run, heads, activation_spec("batch"), context)(
            index_q_BTHI, of_rows, *_tokens(context)
        )
        counted_BT = self.loss_tokens(
            self.config, context.positions, jnp.ones_like(context.positions, bool)
        )
        if context.stats_mask is not None:
            counted_BT &= context.stats_mask
        return jnp.sum(kl_BT, where=counted_BT)

    def _overlap(self, q_BTNK, k_BTMK, index_q_BTHI, of_rows: Blocks, context: Context):
        settings = self.settings(self.config)
        if not of_rows.k.shape[1]:
            return jnp.zeros(())

        def run(q, k, *rest):
            return overlap(q, k, *rest, settings, self._head_axis(context))

        row = activation_spec("batch")
        share_BT = self._on_each_device(run, (q_BTNK, k_BTMK), row, context)(
            index_q_BTHI, of_rows, *_tokens(context)
        )
        ratio = settings.indexer_compress_ratio
        has_choice_BT = context.positions + 1 >= settings.indexer_budget + ratio
        if context.stats_mask is not None:
            has_choice_BT &= context.stats_mask
        return token_mean(share_BT, has_choice_BT)

    def _on_each_device(self, run, heads, out_spec, context: Context):
        """`run` of each device's own query and key heads and of the rest of its arguments."""
        mesh = context.mesh
        require(
            context.time_axis is None,
            "parallel.mesh.context splits rows, and the mixer 'qsa' selects among the blocks of "
            "whole rows: expected parallel.mesh.context = 1 (docs/qwen3_8_flash_next.md says what "
            "it would take)",
        )
        q_BTNK, *keys = heads
        if keys[0].shape[2] % num_shards(mesh, TENSOR):
            keys = [jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in keys]
        by_head, row = activation_spec("batch", None, "heads"), activation_spec("batch")
        in_specs = (*(by_head,) * len(heads), *(row,) * 6)
        return lambda *rest: per_shard(run, mesh, in_specs, out_spec)(q_BTNK, *keys, *rest)

    @staticmethod
    def _head_axis(context: Context) -> str | None:
        return TENSOR if num_shards(context.mesh, TENSOR) > 1 else None

    @classmethod
    def loss_tokens(cls, config, positions_BT, counted_BT):
        """Those that see a complete block."""
        return counted_BT & (positions_BT + 1 >= cls.settings(config).indexer_compress_ratio)

    @classmethod
    def init_cache(cls, config, batch, length):
        s = cls.settings(config)
        index_k = (batch, length, s.indexer_head_dim)
        block_k = (batch, max(length // s.indexer_compress_ratio, 1), s.indexer_head_dim)
        return super().init_cache(config, batch, length) | {
            "index_k": jnp.zeros(index_k, config.dtype),
            "block_k": jnp.zeros(block_k, config.dtype),
        }

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """Scores and values of the keys that a query sees on average; the blocks' scores."""
        s = cls.settings(config)
        full = min(length, s.indexer_budget + s.indexer_compress_ratio - 1)
        seen = (full * (full + 1) / 2 + (length - full) * s.indexer_budget) / length
        blocks_seen = (length + 1) / 2 / s.indexer_compress_ratio
        attention = 4 * seen * config.num_attention_heads * config.head_dim
        return attention + 2 * blocks_seen * s.indexer_n_heads * s.indexer_head_dim

    @classmethod
    def check(cls, config):
        super().check(config)
        width = cls.settings(config).indexer_head_dim
        require(
            config.rotary_dim <= width,
            f"model.mixer.indexer_head_dim = {width}: expected at least the {config.rotary_dim} "
            "rotated dimensions of attention (model.head_dim × model.partial_rotary_factor), as "
            "the indexer rotates as many",
        )


def _documents(context: Context) -> jax.Array:
    """[B, T] the document of each token, 0 for padding."""
    if context.segment_ids is None:
        return jnp.ones_like(context.positions)
    return context.segment_ids


def _tokens(context: Context, s_BS: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """Places [B, T] and [B, S] of queries and keys, and their documents."""
    if s_BS is None:
        return context.positions, context.positions, _documents(context), _documents(context)
    return context.positions, s_BS, _documents(context), jnp.ones_like(s_BS)


def select_blocks(
    index_q_BCHI: jax.Array, of_rows: Blocks, t_BC: jax.Array, segment_BC: jax.Array, settings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which complete blocks each query selects.

    Args:
      index_q_BCHI: the indexer's queries.
      t_BC, segment_BC: place and document of each query.

    Returns:
      selected [B, C, G] bool, scores [B, C, G] float32, visible [B, C, G] bool: the complete
      blocks of the query's document that lie before it.
    """
    ratio = settings.indexer_compress_ratio
    s_BHCG = jnp.einsum(
        "bchi,bgi->bhcg", index_q_BCHI, of_rows.k, preferred_element_type=jnp.float32
    )
    score_BCG = jnp.sum(jax.nn.relu(s_BHCG), axis=1) * settings.indexer_head_dim**-0.5
    ended_BCG = of_rows.start[:, None] + ratio - 1 <= t_BC[..., None]
    visible_BCG = ended_BCG & (of_rows.segment[:, None] == segment_BC[..., None])
    count = settings.indexer_budget // ratio
    return best_blocks(score_BCG, visible_BCG, count), score_BCG, visible_BCG


def best_blocks(score_BCG: jax.Array, visible_BCG: jax.Array, count: int) -> jax.Array:
    """[B, C, G] bool: the `count` visible blocks of the highest scores, of equal ones the first."""
    if count >= score_BCG.shape[-1]:
        return visible_BCG
    ranked_BCG = jnp.where(visible_BCG, score_BCG, -jnp.inf)
    least_BC1 = jax.lax.top_k(ranked_BCG, count)[0][..., -1:]
    above_BCG = ranked_BCG > least_BC1
    equal_BCG = ranked_BCG == least_BC1
    room_BC1 = count - jnp.sum(above_BCG, axis=-1, keepdims=True)
    first_BCG = equal_BCG & (jnp.cumsum(equal_BCG, axis=-1) <= room_BC1)
    return visible_BCG & (above_BCG | first_BCG)


def seen_tokens(
    selected_BCG, of_rows: Blocks, t_BC, s_BS, segment_BC, segment_BS, settings
) -> jax.Array:
    """[B, C, S] bool: the tokens of the selected blocks, and those after the last complete one."""
    ratio = settings.indexer_compress_ratio
    incomplete_BC1 = ((t_BC + 1) // ratio * ratio)[..., None]
    s_B1S = s_BS[:, None]
    tail_BCS = (s_B1S >= incomplete_BC1) & (s_B1S <= t_BC[..., None])
    same_document_BCS = segment_BS[:, None] == segment_BC[..., None]
    tail_BCS &= same_document_BCS
    if not selected_BCG.shape[-1]:
        return tail_BCS
    # An incomplete block at the end of a document has the number of the next document's first one,
    # and at the end of the row perhaps a number beyond the last.
    inside_BS = of_rows.of_token < selected_BCG.shape[-1]
    number_BS = jnp.where(inside_BS, of_rows.of_token, 0)
    chosen_BCS = jax.vmap(lambda selected, number: selected[:, number])(selected_BCG, number_BS)
    return tail_BCS | (chosen_BCS & inside_BS[:, None] & same_document_BCS)


def selected_attention(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    index_q_BTHI: jax.Array,
    of_rows: Blocks,
    t_BT: jax.Array,
    s_BS: jax.Array,
    segment_BT: jax.Array,
    segment_BS: jax.Array,
    settings: QSA.Settings,
) -> jax.Array:
    """softmax over the seen keys, in float32 → o [B, T, N, K] in v's dtype. Queries are worked a
    chunk at a time, so that memory is chunk × T; the work is T × T.
    """

    def attend_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        selected_BCG, *_ = select_blocks(index_q_BCHI, of_rows, t_BC, segment_BC, settings)
        seen_BCS = seen_tokens(selected_BCG, of_rows, t_BC, s_BS, segment_BC, segment_BS, settings)
        p_BNCS = probabilities(q_BCNK, k_BSMK, seen_BCS)
        b, n, c, keys = p_BNCS.shape
        p_BMHCS = p_BNCS.astype(v_BSMK.dtype).reshape(b, v_BSMK.shape[2], -1, c, keys)
        o = jnp.einsum("bmhcs,bsmk->bcmhk", p_BMHCS, v_BSMK, preferred_element_type=jnp.float32)
        return o.reshape(b, c, n, v_BSMK.shape[3]).astype(v_BSMK.dtype)

    return _by_chunks(attend_chunk, q_BTNK, index_q_BTHI, t_BT, segment_BT)


def divergence(
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    index_q_BTHI: jax.Array,
    of_rows: Blocks,
    t_BT: jax.Array,
    s_BT: jax.Array,
    segment_BT: jax.Array,
    segment_BS: jax.Array,
    settings: QSA.Settings,
    dense: bool,
    head_axis: str | None = None,
) -> jax.Array:
    """[B, T] float32: KL(teacher ‖ student) of each query's blocks; 0 of one without. `head_axis`:
    the mesh axis that splits the heads, which the teacher sums.
    """

    def of_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        of_queries = (t_BC, segment_BC)
        selected_BCG, score_BCG, visible_BCG = select_blocks(
            index_q_BCHI, of_rows, *of_queries, settings
        )
        kept_BCG = visible_BCG if dense else selected_BCG
        seen_BCS = seen_tokens(kept_BCG, of_rows, t_BC, s_BT, segment_BC, segment_BS, settings)
        share_BCG = block_shares(q_BCNK, k_BTMK, seen_BCS, kept_BCG, of_rows, settings, head_axis)
        teacher_BCG = jax.lax.stop_gradient(share_BCG)
        student_BCG = jax.nn.log_softmax(jnp.where(kept_BCG, score_BCG, _HIDDEN), axis=-1)
        difference_BCG = jnp.log(jnp.where(teacher_BCG > 0, teacher_BCG, 1)) - student_BCG
        return jnp.sum(jnp.where(teacher_BCG > 0, teacher_BCG * difference_BCG, 0), axis=-1)

    return _by_chunks(of_chunk, q_BTNK, index_q_BTHI, t_BT, segment_BT)


def overlap(
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    index_q_BTHI: jax.Array,
    of_rows: Blocks,
    t_BT: jax.Array,
    s_BT: jax.Array,
    segment_BT: jax.Array,
    segment_BS: jax.Array,
    settings: QSA.Settings,
    head_axis: str | None = None,
) -> jax.Array:
    """[B, T]: of the blocks to which dense attention gives most, as many as a query may select,
    the share that it selects.
    """
    count = settings.indexer_budget // settings.indexer_compress_ratio

    def of_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        selected_BCG, _, visible_BCG = select_blocks(
            index_q_BCHI, of_rows, t_BC, segment_BC, settings
        )
        seen_BCS = seen_tokens(visible_BCG, of_rows, t_BC, s_BT, segment_BC, segment_BS, settings)
        share_BCG = block_shares(
            q_BCNK, k_BTMK, seen_BCS, visible_BCG, of_rows, settings, head_axis
        )
        own_BCG = best_blocks(share_BCG, visible_BCG, count)
        return jnp.sum(own_BCG & selected_BCG, axis=-1) / count

    return _by_chunks(of_chunk, q_BTNK, index_q_BTHI, t_BT, segment_BT)


def block_shares(
    q_BCNK, k_BTMK, seen_BCS, kept_BCG, of_rows: Blocks, settings: QSA.Settings, head_axis
) -> jax.Array:
    """[B, C, G] float32: attention's largest probability in each kept block, summed over the heads
    before, over the sum of all kept blocks.
    """
    p_BCS = jnp.sum(probabilities(q_BCNK, k_BTMK, seen_BCS), axis=1)
    if head_axis is not None:
        p_BCS = jax.lax.psum(p_BCS, head_axis)
    back = jnp.arange(settings.indexer_compress_ratio)
    tokens_BGR = jnp.maximum(of_rows.last[..., None] - back, 0)
    p_BCGR = jax.vmap(lambda p_CS, tokens_GR: p_CS[:, tokens_GR])(p_BCS, tokens_BGR)
    largest_BCG = jnp.where(kept_BCG, jnp.max(p_BCGR, axis=-1, initial=0.0), 0)
    total_BC1 = jnp.sum(largest_BCG, axis=-1, keepdims=True)
    return largest_BCG / jnp.where(total_BC1 > 0, total_BC1, 1)


def _by_chunks(of_chunk, *of_queries: jax.Array) -> jax.Array:
    """`of_chunk` of the queries, some at a time: what it makes of all keys lives for one chunk, in
    the backward pass, too.
    """

    @jax.checkpoint
    def step(carry, inputs):
        return carry, of_chunk(*inputs)

    time = of_queries[0].shape[1]
    _, results = blocks.scan(step, None, blocks.to_chunks(of_queries, 1, min(CHUNK, time)))
    return blocks.from_chunks(results, 1, time)


def probabilities(q_BCNK: jax.Array, k_BSMK: jax.Array, seen_BCS: jax.Array) -> jax.Array:
    """[B, N, C, S] float32: attention's, of every head."""
    return jax.nn.softmax(jnp.where(seen_BCS[:, None], dot(q_BCNK, k_BSMK), _HIDDEN), axis=-1)


# ---- reference
# --------------------------------------------------------------------------------------------------


def scores_reference(config, params, x) -> jax.Array:
    """[T, blocks]: the score of every complete block of one document, for all queries."""
    ratio = config.settings_of("qsa").indexer_compress_ratio
    qk = jnp.einsum("td,dhi->thi", jax.lax.stop_gradient(x), params["index_qk_proj"])
    place = np.arange(len(x))
    q = rotated(config, norm(config, qk[:, :-1], params["index_q_norm"]), place[:, None])
    scores = []
    for start in range(0, len(x) - ratio + 1, ratio):
        key = norm(config, jnp.mean(qk[start : start + ratio, -1], 0), params["index_k_norm"])
        of_heads = jax.nn.relu(q @ rotated(config, key, np.array(start)))
        scores.append(jnp.sum(of_heads, axis=-1) / math.sqrt(qk.shape[-1]))
    return jnp.stack(scores, axis=1)


def selected_reference(config, params, x) -> jax.Array:
    """[T, T] bool: the keys that each query of one document sees."""
    s = config.settings_of("qsa")
    ratio, count = s.indexer_compress_ratio, s.indexer_budget // s.indexer_compress_ratio
    score, place, seen = scores_reference(config, params, x), np.arange(len(x)), []
    for t in range(len(x)):
        complete = (t + 1) // ratio
        best = jnp.argsort(-score[t, :complete], stable=True)[:count]
        blocks_seen = jnp.zeros(len(x) // ratio + 1, bool).at[best].set(True)
        seen.append((blocks_seen[place // ratio] | (place >= complete * ratio)) & (place <= t))
    return jnp.stack(seen)


def qsa_reference(config, params, x):
    i, j, _ = places(x)
    seen = selected_reference(config, params, x)
    return gated_attention(config, params, x, seen=seen, distance=i - j)


def divergence_reference(config, params, x, dense: bool) -> jax.Array:
    """The indexer's loss, summed over the queries of one document, query by query."""
    ratio, width = config.settings_of("qsa").indexer_compress_ratio, config.head_dim
    score, seen = scores_reference(config, params, x), selected_reference(config, params, x)
    params, x = jax.lax.stop_gradient((params, x))
    place = np.arange(len(x))

    def heads(name):
        y = jnp.einsum("td,dnk->tnk", x, params[f"{name}_proj"])[..., :width]
        return rotated(config, norm(config, y, params[f"{name}_norm"]), place[:, None])

    readers = config.num_attention_heads // config.num_key_value_heads
    q, k = heads("q"), jnp.repeat(heads("k"), readers, axis=1)
    count = len(x) // ratio
    total = 0.0
    for t in range(ratio - 1, len(x)):
        keys = place <= t if dense else seen[t]
        logits = jnp.einsum("nk,snk->ns", q[t], k) / math.sqrt(width)
        p = jnp.sum(jax.nn.softmax(jnp.where(keys, logits, -jnp.inf)), axis=0)
        p = (p / jnp.sum(p))[: count * ratio].reshape(count, ratio)
        kept = jnp.where(keys, True, False)[: count * ratio : ratio]
        kept &= np.arange(count) < (t + 1) // ratio
        teacher = jnp.where(kept, jnp.max(p, axis=1), 0)
        teacher = teacher / jnp.sum(teacher)
        student = jax.nn.softmax(jnp.where(kept, score[t], -jnp.inf))
        ratio_of_both = jnp.where(kept, teacher, 1) / jnp.where(kept, student, 1)
        total += jnp.sum(teacher * jnp.log(ratio_of_both))
    return total


REFERENCES = {"qsa": qsa_reference}
