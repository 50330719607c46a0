"""Qwen Sparse Attention (QSA): gated attention in which an indexer chooses, for each query, the
blocks of keys that it sees (Qwen3.8-Flash-Next; transformers' `qwen4_exp`).

The indexer has H small query heads and one key head. Its keys are averaged over blocks of `ratio`
consecutive tokens, counted from the document's start. A query at place p sees the tokens of the
budget / ratio complete blocks with the best scores

    Σ over heads of relu(⟨q, k⟩) / √d

and the tokens after the last complete block, its own among them. Of equal scores the earlier
block is taken (relu makes many scores 0). Within budget + ratio - 1 tokens nothing is left out.

No gradient passes the selection: the language model's loss does not train the indexer.

Letters: B batch, T queries, S keys (slots of the cache), C queries of a chunk, N query heads, M
key/value heads, K head width, H heads of the indexer, I their width, G blocks of a row.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.gated_attention import (
    GatedAttention,
    attend,
    gated_projection,
    write,
)
from qwen3next_jax.model.layers import Context, rms_norm, rotate
from qwen3next_jax.ops import blocks
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, local, shards
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
    of_token: [B, S] int32, the block of each token, complete or not yet.
    """

    k: jax.Array
    start: jax.Array
    segment: jax.Array
    of_token: jax.Array


class QSA(GatedAttention):
    """Gated attention to the blocks of keys that an indexer selects. The cache also holds the
    indexer's keys, and the blocks' pooled ones, which are made when a block is complete.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedAttention.Settings):
        # query heads of the indexer; it has one key head
        indexer_n_heads: int = 4
        # width of the indexer's heads
        indexer_head_dim: int = 128
        # tokens of the complete blocks that a query sees, at most
        indexer_budget: int = 2048
        # tokens of a block
        indexer_compress_ratio: int = 4

        def __post_init__(self):
            names = "indexer_n_heads indexer_head_dim indexer_budget indexer_compress_ratio"
            check_bounds(self, "model.mixer", {"at least 1": names})
            require(
                self.indexer_budget % self.indexer_compress_ratio == 0,
                f"model.mixer.indexer_budget = {self.indexer_budget}: expected a multiple of "
                f"model.mixer.indexer_compress_ratio = {self.indexer_compress_ratio}: whole blocks "
                "are selected",
            )

    read_time = ("indexer_budget",)
    in_place = False

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        s = self.settings(config)
        # the query heads, and the key head last
        self.index_qk_proj = make.matrix(
            (config.hidden_size, s.indexer_n_heads + 1, s.indexer_head_dim), "embed -> . ."
        )
        self.index_q_norm = make.norm(s.indexer_head_dim)
        self.index_k_norm = make.norm(s.indexer_head_dim)

    def __call__(self, x_BTD, context, cache=None):
        q_BTNK, k_BTMK, v_BTMK, gate_BTNK = self.project(x_BTD, context)
        index_q_BTHI, index_k_BTI = self.index(x_BTD, context)
        if cache is not None:
            o_BTNK, cache = self._attend_cached(
                q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context, cache
            )
            return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), {}, cache

        def attend_to(v_BTMK, scale=1.0):
            if not self.is_sparse(x_BTD.shape[1]):
                return attend(q_BTNK * scale, k_BTMK, v_BTMK, context)
            return self._attend_sparse(
                q_BTNK * scale, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context
            )

        diagnostics = {}
        if context.collect_stats:
            diagnostics = self.diagnostics(q_BTNK, k_BTMK, gate_BTNK, context)
        y_BTD = gated_projection(attend_to(v_BTMK), gate_BTNK, self.o_proj[...], context)
        return y_BTD, diagnostics, None

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
        segment_BT = jnp.ones_like(t_BT) if context.segment_ids is None else context.segment_ids
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
            before_BT,
        )

    def seen(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        """[B, T, T] bool: the tokens that each query sees."""
        index_q_BTHI, index_k_BTI = self.index(x_BTD, context)
        of_rows, t_BT = self.blocks_of_rows(index_k_BTI, context), context.positions
        segment_BT = jnp.ones_like(t_BT) if context.segment_ids is None else context.segment_ids
        settings = self.settings(self.config)
        selected_BTG, *_ = select_blocks(index_q_BTHI, of_rows, t_BT, segment_BT, settings)
        return seen_tokens(selected_BTG, of_rows, t_BT, t_BT, segment_BT, segment_BT, settings)

    def _attend_sparse(self, q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context: Context):
        of_rows, t_BT = self.blocks_of_rows(index_k_BTI, context), context.positions
        segment_BT = jnp.ones_like(t_BT) if context.segment_ids is None else context.segment_ids
        return self._selected_attention(
            q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, of_rows, t_BT, t_BT, segment_BT, context
        )

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
        of_rows = Blocks(cache["block_k"], start_BG, jnp.ones_like(start_BG), s_BS // ratio)
        o_BTNK = self._selected_attention(
            q_BTNK,
            cache["k"],
            cache["v"],
            index_q_BTHI,
            of_rows,
            t_BT,
            s_BS,
            jnp.ones_like(s_BS),
            context._replace(segment_ids=None),
        )
        return o_BTNK, cache

    def _selected_attention(
        self, q_BTNK, k_BSMK, v_BSMK, index_q_BTHI, of_rows, t_BT, s_BS, segment_BS, context
    ):
        """`selected_attention` with the heads split over `tensor`; every shard selects alike."""
        mesh, settings = context.mesh, self.settings(self.config)
        require(
            context.time_axis is None,
            "parallel.mesh.context splits rows, and the mixer 'qsa' selects among the blocks of "
            "whole rows: expected parallel.mesh.context = 1 (docs/qwen3_8_flash_next.md says what "
            "it would take)",
        )
        if k_BSMK.shape[2] % shards(mesh, TENSOR):
            readers = q_BTNK.shape[2] // k_BSMK.shape[2]
            k_BSMK, v_BSMK = (jnp.repeat(x, readers, axis=2) for x in (k_BSMK, v_BSMK))
        segment_BT = jnp.ones_like(t_BT) if context.segment_ids is None else context.segment_ids

        def run(q, k, v, index_q, of_rows, t, s, segment_BT, segment_BS):
            return selected_attention(
                q, k, v, index_q, of_rows, t, s, segment_BT, segment_BS, settings
            )

        heads = activation_spec("batch", None, "heads")
        row = activation_spec("batch")
        in_specs = (heads, heads, heads, row, row, row, row, row, row)
        return local(run, mesh, in_specs, heads)(
            q_BTNK, k_BSMK, v_BSMK, index_q_BTHI, of_rows, t_BT, s_BS, segment_BT, segment_BS
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        s = cls.settings(config)
        index_k = (batch, length, s.indexer_head_dim)
        block_k = (batch, length // s.indexer_compress_ratio, s.indexer_head_dim)
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
    if count >= score_BCG.shape[-1]:
        return visible_BCG, score_BCG, visible_BCG
    ranked_BCG = jnp.where(visible_BCG, score_BCG, -jnp.inf)
    least_BC1 = jax.lax.top_k(ranked_BCG, count)[0][..., -1:]
    above_BCG = ranked_BCG > least_BC1
    equal_BCG = ranked_BCG == least_BC1
    room_BC1 = count - jnp.sum(above_BCG, axis=-1, keepdims=True)
    first_BCG = equal_BCG & (jnp.cumsum(equal_BCG, axis=-1) <= room_BC1)
    return visible_BCG & (above_BCG | first_BCG), score_BCG, visible_BCG


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
    q_BTNK,
    k_BSMK,
    v_BSMK,
    index_q_BTHI,
    of_rows: Blocks,
    t_BT,
    s_BS,
    segment_BT,
    segment_BS,
    settings,
) -> jax.Array:
    """softmax over the seen keys, in float32 → o [B, T, N, K] in v's dtype. Queries are worked a
    chunk at a time, so that memory is chunk × T; the work is T × T.
    """

    @jax.checkpoint
    def attend_chunk(carry, inputs):
        q_BCNK, index_q_BCHI, t_BC, segment_BC = inputs
        selected_BCG, *_ = select_blocks(index_q_BCHI, of_rows, t_BC, segment_BC, settings)
        seen_BCS = seen_tokens(selected_BCG, of_rows, t_BC, s_BS, segment_BC, segment_BS, settings)
        p_BNCS = probabilities(q_BCNK, k_BSMK, seen_BCS)
        b, n, c, keys = p_BNCS.shape
        p_BMHCS = p_BNCS.astype(v_BSMK.dtype).reshape(b, v_BSMK.shape[2], -1, c, keys)
        o = jnp.einsum("bmhcs,bsmk->bcmhk", p_BMHCS, v_BSMK, preferred_element_type=jnp.float32)
        return carry, o.reshape(b, c, n, v_BSMK.shape[3]).astype(v_BSMK.dtype)

    time = q_BTNK.shape[1]
    chunks = blocks.to_chunks((q_BTNK, index_q_BTHI, t_BT, segment_BT), 1, min(CHUNK, time))
    _, o = blocks.scan(attend_chunk, None, chunks)
    return blocks.from_chunks(o, 1, time)


def probabilities(q_BCNK: jax.Array, k_BSMK: jax.Array, seen_BCS: jax.Array) -> jax.Array:
    """[B, N, C, S] float32: attention's, of every head."""
    return jax.nn.softmax(jnp.where(seen_BCS[:, None], dot(q_BCNK, k_BSMK), _HIDDEN), axis=-1)


# ---- reference
# --------------------------------------------------------------------------------------------------


def selected_reference(config, params, x) -> np.ndarray:
    """[T, T] bool: the keys that each query of one document sees, block by block."""
    s = config.settings_of("qsa")
    ratio, count = s.indexer_compress_ratio, s.indexer_budget // s.indexer_compress_ratio
    qk = jnp.einsum("td,dhi->thi", jax.lax.stop_gradient(x), params["index_qk_proj"])
    place = np.arange(len(x))
    q = rotated(config, norm(config, qk[:, :-1], params["index_q_norm"]), place[:, None])
    score = [
        jnp.sum(jax.nn.relu(q @ rotated(config, key, np.array(start))), axis=-1)
        for start in range(0, len(x) - ratio + 1, ratio)
        for key in [
            norm(config, jnp.mean(qk[start : start + ratio, -1], 0), params["index_k_norm"])
        ]
    ]
    seen = []
    for t in range(len(x)):
        complete = (t + 1) // ratio
        of_t = jnp.stack([s[t] for s in score[:complete]]) if complete else jnp.zeros(0)
        best = jnp.argsort(-of_t, stable=True)[:count]
        blocks_seen = jnp.zeros(len(x) // ratio + 1, bool).at[best].set(True)
        seen.append((blocks_seen[place // ratio] | (place >= complete * ratio)) & (place <= t))
    return jnp.stack(seen)


def qsa_reference(config, params, x):
    i, j, _ = places(x)
    seen = selected_reference(config, params, x)
    return gated_attention(config, params, x, seen=seen, distance=i - j)


REFERENCES = {"qsa": qsa_reference}
