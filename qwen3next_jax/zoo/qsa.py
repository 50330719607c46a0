"""Qwen Sparse Attention (QSA): gated attention in which an indexer chooses, for each query, the
blocks of keys that the query sees (Qwen3.8-Flash-Next; transformers' `qwen4_exp`).

The indexer has H small query heads and one key head. The indexer's keys are averaged over blocks of
`ratio` consecutive tokens; the first block begins at the document's start. A block is complete for
a query if the query is at the block's last token or after it. A query sees the tokens of the budget
/ ratio complete blocks with the highest scores

    Σ over heads of relu(⟨q, k⟩) / √d        with d the width of the indexer's heads

A query also sees the tokens after its last complete block, up to the query's own token. If two
blocks have the same score, the earlier one is preferred (relu makes many scores 0). A query sees
all earlier tokens if its document has at most budget + ratio - 1 tokens so far.

No gradient passes through the selection, so the language model's loss does not train the indexer.
The indexer has its own loss (`TrainConfig.indexer_training`), which follows the technical report
and Megatron-LM's implementation:

    teacher   attention's probabilities are summed over the heads; a block has the largest of its
              tokens' sums, divided by the total of these largest sums over the blocks
    student   softmax of the blocks' scores
    loss      KL(teacher ‖ student), averaged over the queries that see a complete block

In the mode "sparse", the loss is computed over the blocks that a query selects. In the mode
"dense", which is a warm-up, attention sees all tokens, and the loss is computed over all complete
blocks. An incomplete block has no score, so the loss leaves it out. No gradient passes to the
teacher or to the indexer's input, so the loss trains only the indexer.

A position is counted from the start of the token's document.

Letters: B batch, T queries, S keys (with a cache: its slots), C queries of a chunk, N query heads,
M key/value heads, K head width, H heads of the indexer, I their width, G blocks of a row, R tokens
of a block.
"""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.gated_attention import (
    GatedAttention,
    attend,
    attention_diagnostics,
    gated_projection,
    write_tokens_to_cache,
)
from qwen3next_jax.model.layers import Context, rms_norm, rotate, token_mean
from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.implementations import XlaImplementation, choose_implementation
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, num_shards, per_shard
from qwen3next_jax.zoo.attention_references import (
    apply_norm,
    gated_attention,
    positions_and_causal_mask,
    rotate_by_distance,
)
from qwen3next_jax.zoo.ops.gathered_attention import (
    gathered_attention,
    gathered_scores,
    queries_per_chunk,
    take_entries,
    token_indices_and_mask,
)
from qwen3next_jax.zoo.ops.indexed_attention import TokensAndBlocks, indexed_attention
from qwen3next_jax.zoo.ops.pair_attention import QUERIES_PER_CHUNK, scaled_dot

# A configuration for the tests. With this ratio and budget, even short rows can end in an
# incomplete block, and have queries that do not see every block.
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
_HIDDEN = -1e30  # score of a key or block that the query does not see
# Without a kernel, attention gathers the selected keys if there are more than this many times the
# budget. With fewer keys, attention to all keys under a mask is faster. Measured on a CPU and on an
# H200 (docs/notes/gpu.md has the times). No TPU was measured: the model of
# benchmarks/planner/flash_plan.py says that gathering becomes faster at 15 times the budget on a
# v5p. Where the TPU kernels fit, they run at every length: by the same model, gathering would be
# faster than the kernels only beyond some 100 times the budget, or more if the heads are split over
# devices (docs/notes/models.md).
GATHER_BEYOND_BUDGETS = {"cpu": 4, "gpu": 16, "tpu": 16}


class CompleteBlocks(NamedTuple):
    """The complete blocks of every row, in the order of their tokens.

    Attributes:
      pooled_key: [B, G, I], the mean of the indexer's keys in each block, normed and rotated.
      first_token_position: [B, G] int32, the position of each block's first token.
      segment_id: [B, G] int32, the segment id of each block's document; 0 for entries after the
        row's last block.
      last_token_index: [B, G] int32, the index in the row of each block's last token.
      block_index_of_token: [B, S] int32, the index of the block of each token. For a token of an
        incomplete block, block_index_of_token is the number of complete blocks before the token in
        the row.
    """

    pooled_key: jax.Array
    first_token_position: jax.Array
    segment_id: jax.Array
    last_token_index: jax.Array
    block_index_of_token: jax.Array


class QueryAndKeyPositions(NamedTuple):
    """The positions and documents of the queries and of the keys of a call.

    Attributes:
      query_position: [B, T] int32, the position of each query.
      key_position: [B, S] int32, the position of each key.
      query_segment: [B, T] int32, the segment id of each query's document; 0 for padding.
      key_segment: [B, S] int32, the segment id of each key's document; 0 for padding.
      own_key_index: [B, T] int32, for each query the index (0 to S - 1) of the key of its own
        token.
    """

    query_position: jax.Array
    key_position: jax.Array
    query_segment: jax.Array
    key_segment: jax.Array
    own_key_index: jax.Array


class QSA(GatedAttention):
    """Gated attention to the blocks of keys that an indexer selects.

    Besides keys and values, the cache holds the indexer's key of every token, and one pooled key of
    every complete block: the mean of the indexer's keys in the block, normed and rotated.

    Diagnostics: those of `GatedAttention`, computed for the keys that each query sees, and the
    scalar indexer_overlap. If a query may select n blocks, the overlap of the query is the share of
    the n selected blocks that are also among the n blocks with the largest probabilities in dense
    attention. indexer_overlap is the mean overlap of the queries that have more complete blocks
    than they may select, without the queries outside of `Context.stats_mask`.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedAttention.Settings):
        # number of the indexer's query heads; the indexer has one key head
        indexer_n_heads: Annotated[int, "at least 1"] = 4
        # width of the indexer's heads
        indexer_head_dim: Annotated[int, "at least 1"] = 128
        # the most tokens in complete blocks that a query sees
        indexer_budget: Annotated[int, "at least 1"] = 2048
        # number of tokens of a block
        indexer_compress_ratio: Annotated[int, "at least 1"] = 4

        def __post_init__(self):
            if self.indexer_compress_ratio < 1:
                return  # the check of the bound "at least 1" comes later and raises the error
            require(
                self.indexer_budget % self.indexer_compress_ratio == 0,
                f"model.mixer.indexer_budget = {self.indexer_budget}: expected a multiple of "
                f"model.mixer.indexer_compress_ratio = {self.indexer_compress_ratio}: whole blocks "
                "are selected",
            )

    settings_free_after_training = ("indexer_budget",)
    writes_cache_in_place = False
    has_indexer_loss = True
    needs_whole_rows = True

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        s = self.settings(config)
        # The last head is the key head; the others are query heads.
        self.index_qk_proj = make.matrix(
            (config.hidden_size, s.indexer_n_heads + 1, s.indexer_head_dim),
            "embed -> . .",
            kind="indexer",
            uses_model_dtype=True,
        )
        start = jnp.zeros if config.zero_centered_norm else jnp.ones
        self.index_q_norm, self.index_k_norm = (
            make.parameter(start, (s.indexer_head_dim,), ".", kind="indexer") for _ in range(2)
        )

    def __call__(self, x_BTD, context, cache=None):
        q_BTNK, gate_BTNK, k_BTMK, v_BTMK = self.queries_gate_keys_values(x_BTD, context)
        index_q_BTHI, index_k_BTI = self.index_queries_and_keys(x_BTD, context)
        if cache is not None:
            o_BTNK, cache = self._attend_cached(
                q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context, cache
            )
            return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), {}, cache

        is_sparse = context.options.indexer_training != "dense" and self.is_sparse_at_length(
            x_BTD.shape[1]
        )
        row_blocks = None
        if (
            is_sparse
            or context.options.indexer_training != "frozen"
            or context.options.collect_stats
        ):
            row_blocks = self.complete_blocks_of_rows(index_k_BTI, context)
        if is_sparse:
            o_BTNK = self._sparse_attention_on_each_device(
                q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, row_blocks, context
            )
        else:
            o_BTNK = attend(q_BTNK, k_BTMK, v_BTMK, context)
        diagnostics = {}
        if context.options.collect_stats:

            def attend_as_above(q_BTNK, k_BTMK, v_BTMK):
                if not is_sparse:
                    return attend(q_BTNK, k_BTMK, v_BTMK, context)
                return self._sparse_attention_on_each_device(
                    q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, row_blocks, context
                )

            diagnostics = attention_diagnostics(attend_as_above, q_BTNK, k_BTMK, gate_BTNK, context)
            diagnostics["indexer_overlap"] = self._indexer_overlap(
                q_BTNK, k_BTMK, index_q_BTHI, row_blocks, context
            )
        if context.options.indexer_training != "frozen":
            diagnostics["mixer_loss"] = self._indexer_loss(
                q_BTNK, k_BTMK, index_q_BTHI, row_blocks, context
            )
        return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), diagnostics, None

    def is_sparse_at_length(self, length: int) -> bool:
        """Whether some query in a document of `length` tokens does not see all earlier tokens."""
        s = self.settings(self.config)
        return length > s.indexer_budget + s.indexer_compress_ratio - 1

    def index_queries_and_keys(
        self, x_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the indexer's queries [B, T, H, I], normed and rotated, and its keys [B, T, I],
        neither normed nor rotated.
        """
        x_BTD = jax.lax.stop_gradient(x_BTD)
        qk_BTHI = jnp.einsum("btd,dhi->bthi", x_BTD, self.index_qk_proj[...].astype(x_BTD.dtype))
        q_BTHI = rms_norm(qk_BTHI[:, :, :-1], self.index_q_norm[...], self.config)
        return rotate(q_BTHI, context.positions, self.config), qk_BTHI[:, :, -1]

    def pooled_block_keys(self, mean_BGI: jax.Array, start_BG: jax.Array) -> jax.Array:
        """Returns the pooled keys [B, G, I]: the means of the blocks' keys, normed, and rotated to
        the positions of the blocks' first tokens.

        Args:
          mean_BGI: the mean of the indexer's keys in each block.
          start_BG: the position of each block's first token.
        """
        k_BGI = rms_norm(mean_BGI, self.index_k_norm[...], self.config)
        return rotate(k_BGI[:, :, None], start_BG, self.config)[:, :, 0]

    def complete_blocks_of_rows(self, index_k_BTI: jax.Array, context: Context) -> CompleteBlocks:
        """Returns the complete blocks of all documents of each row."""
        ratio, t_BT = self.settings(self.config).indexer_compress_ratio, context.positions
        segment_BT = _segment_ids_of_tokens(context)
        ends_BT = ((t_BT + 1) % ratio == 0) & (segment_BT > 0)
        before_BT = jnp.cumsum(ends_BT, axis=1) - ends_BT
        count = t_BT.shape[1] // ratio
        # the indices in the row of the blocks' last tokens; 0 for entries after the last block
        last_BG = jax.vmap(lambda ends: jnp.nonzero(ends, size=count, fill_value=0)[0])(ends_BT)
        there_BG = jnp.arange(count) < jnp.sum(ends_BT, axis=1, keepdims=True)
        tokens_BGR = jnp.maximum(last_BG[..., None] - jnp.arange(ratio), 0)

        def take(x_BTx, index):
            return jax.vmap(lambda x, i: x[i])(x_BTx, index)

        mean_BGI = jnp.mean(take(index_k_BTI, tokens_BGR).astype(jnp.float32), axis=2)
        start_BG = take(t_BT, last_BG) - (ratio - 1)
        return CompleteBlocks(
            self.pooled_block_keys(mean_BGI.astype(index_k_BTI.dtype), start_BG),
            start_BG,
            jnp.where(there_BG, take(segment_BT, last_BG), 0),
            last_BG,
            before_BT,
        )

    def attention_mask(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        """Returns [B, T, T] bool: whether each query (second axis) sees each token (third axis)."""
        index_q_BTHI, index_k_BTI = self.index_queries_and_keys(x_BTD, context)
        row_blocks = self.complete_blocks_of_rows(index_k_BTI, context)
        positions, settings = query_and_key_positions(context), self.settings(self.config)
        query_position_and_segment = positions.query_position, positions.query_segment
        selected_BTG, *_ = select_blocks(
            index_q_BTHI, row_blocks, *query_position_and_segment, settings
        )
        return seen_tokens_mask(
            selected_BTG, row_blocks, *query_position_and_segment, positions, settings
        )

    def _attend_cached(
        self, q_BTNK, k_BTMK, v_BTMK, index_q_BTHI, index_k_BTI, context: Context, cache: dict
    ):
        """Returns the attention output o [B, T, N, K], and the cache with the new tokens."""
        ratio, t_BT = self.settings(self.config).indexer_compress_ratio, context.positions
        cache = {
            "k": write_tokens_to_cache(cache["k"], k_BTMK, t_BT),
            "v": write_tokens_to_cache(cache["v"], v_BTMK, t_BT),
            "index_k": write_tokens_to_cache(cache["index_k"], index_k_BTI, t_BT),
            "block_k": cache["block_k"],
        }
        batch, slots = cache["k"].shape[:2]
        count = cache["block_k"].shape[1]
        # Pools every block that contains one of these tokens. Only the complete ones are written.
        touched_BG = t_BT[:, :1] // ratio + jnp.arange(t_BT.shape[1] // ratio + 2)
        complete_BG = (touched_BG + 1) * ratio <= t_BT[:, -1:] + 1
        tokens_BGR = jnp.minimum(touched_BG[..., None] * ratio + jnp.arange(ratio), slots - 1)
        raw_BGRI = jax.vmap(lambda x, i: x[i])(cache["index_k"], tokens_BGR)
        mean_BGI = jnp.mean(raw_BGRI.astype(jnp.float32), axis=2).astype(raw_BGRI.dtype)
        pooled_BGI = self.pooled_block_keys(mean_BGI, touched_BG * ratio)
        place_BG = jnp.where(complete_BG, touched_BG, count)
        cache["block_k"] = write_tokens_to_cache(cache["block_k"], pooled_BGI, place_BG)

        start_BG = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32) * ratio, (batch, count))
        s_BS = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        row_blocks = CompleteBlocks(
            cache["block_k"],
            start_BG,
            jnp.ones_like(start_BG),
            start_BG + ratio - 1,
            s_BS // ratio,
        )
        # No query sees the padding at the right, because its slots come after the query's.
        context = context._replace(segment_ids=None)
        o_BTNK = self._sparse_attention_on_each_device(
            q_BTNK, cache["k"], cache["v"], index_q_BTHI, row_blocks, context, s_BS
        )
        return o_BTNK, cache

    def _sparse_attention_on_each_device(
        self,
        q_BTNK,
        k_BSMK,
        v_BSMK,
        index_q_BTHI,
        row_blocks: CompleteBlocks,
        context: Context,
        s_BS=None,
    ):
        """Runs `block_sparse_attention` with the heads split over the mesh axis `tensor`. Every
        shard of `tensor` selects the same blocks.

        Args:
          s_BS: the positions of the keys; None if the keys are those of the queries' tokens.
        """
        settings = self.settings(self.config)

        def run(q, k, v, *rest):
            return block_sparse_attention(q, k, v, *rest, settings, cached=s_BS is not None)

        heads = activation_spec("batch", None, "heads")
        return self._per_device_function(run, (q_BTNK, k_BSMK, v_BSMK), heads, context)(
            index_q_BTHI, row_blocks, query_and_key_positions(context, s_BS)
        )

    def _indexer_loss(
        self, q_BTNK, k_BTMK, index_q_BTHI, row_blocks: CompleteBlocks, context: Context
    ):
        """Returns a scalar: the sum of the KL divergence of the indexer's loss over the tokens that
        `loss_token_mask` marks and `Context.stats_mask` does not leave out.
        """
        if not row_blocks.pooled_key.shape[1]:  # rows shorter than a block
            return jnp.zeros(())

        settings, axis = self.settings(self.config), self._mesh_axis_of_heads(context)
        dense = context.options.indexer_training == "dense"
        gathers = _should_gather(k_BTMK.shape[1], settings) and not dense

        def run(q, k, *rest):
            if gathers:
                return gathered_indexer_divergence(q, k, *rest, settings, axis)
            return indexer_divergence(q, k, *rest, settings, dense, axis)

        heads = (jax.lax.stop_gradient(q_BTNK), jax.lax.stop_gradient(k_BTMK))
        kl_BT = self._per_device_function(run, heads, activation_spec("batch"), context)(
            index_q_BTHI, row_blocks, query_and_key_positions(context)
        )
        counted_BT = self.loss_token_mask(
            self.config, context.positions, jnp.ones_like(context.positions, bool)
        )
        if context.stats_mask is not None:
            counted_BT &= context.stats_mask
        return jnp.sum(kl_BT, where=counted_BT)

    def _indexer_overlap(
        self, q_BTNK, k_BTMK, index_q_BTHI, row_blocks: CompleteBlocks, context: Context
    ):
        settings = self.settings(self.config)
        if not row_blocks.pooled_key.shape[1]:
            return jnp.zeros(())

        def run(q, k, *rest):
            return indexer_overlap(q, k, *rest, settings, self._mesh_axis_of_heads(context))

        row = activation_spec("batch")
        share_BT = self._per_device_function(run, (q_BTNK, k_BTMK), row, context)(
            index_q_BTHI, row_blocks, query_and_key_positions(context)
        )
        ratio = settings.indexer_compress_ratio
        has_choice_BT = context.positions + 1 >= settings.indexer_budget + ratio
        if context.stats_mask is not None:
            has_choice_BT &= context.stats_mask
        return token_mean(share_BT, has_choice_BT)

    def _per_device_function(self, run, heads, out_spec, context: Context):
        """Returns a function that calls `run` on each device, with the device's own rows and heads.
        The returned function takes the arguments of `run` after the arrays in `heads`.

        Args:
          run: function of the arrays in `heads`, followed by the remaining arguments.
          heads: queries and keys, and values if `run` takes values, [B, tokens, heads, K].
          out_spec: the sharding of what `run` returns.
        """
        mesh = context.mesh
        require(
            context.mesh_time_axis is None,
            "parallel.mesh.context splits rows, and the mixer 'qsa' selects among the blocks of "
            "whole rows: expected parallel.mesh.context = 1 (docs/qwen3_8_flash_next.md says what "
            "it would take)",
        )
        q_BTNK, *keys = heads
        if keys[0].shape[2] % num_shards(mesh, TENSOR):
            keys = [jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in keys]
        by_head, row = activation_spec("batch", None, "heads"), activation_spec("batch")
        in_specs = (*(by_head,) * len(heads), row, row, row)
        return lambda *rest: per_shard(run, mesh, in_specs, out_spec)(q_BTNK, *keys, *rest)

    @staticmethod
    def _mesh_axis_of_heads(context: Context) -> str | None:
        return TENSOR if num_shards(context.mesh, TENSOR) > 1 else None

    @classmethod
    def loss_token_mask(cls, config, positions_BT, counted_BT):
        """Returns [B, T] bool: the tokens of `counted_BT` that see a complete block."""
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
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs per token: attention's scores and values for the keys that a query sees
        on average, and the indexer's scores of the blocks.
        """
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


def _segment_ids_of_tokens(context: Context) -> jax.Array:
    """Returns [B, T], the segment id of each token's document; 0 for padding."""
    if context.segment_ids is None:
        return jnp.ones_like(context.positions)
    return context.segment_ids


def query_and_key_positions(
    context: Context, s_BS: jax.Array | None = None
) -> QueryAndKeyPositions:
    """Returns the positions and documents of the queries and of the keys.

    Args:
      context: the inputs that all layers share, with the positions and documents of the queries.
      s_BS: the positions of the keys in a cache; None if the keys are those of the queries' tokens.
    """
    t_BT, segment_BT = context.positions, _segment_ids_of_tokens(context)
    if s_BS is None:
        index_BT = jnp.broadcast_to(jnp.arange(t_BT.shape[1], dtype=jnp.int32), t_BT.shape)
        return QueryAndKeyPositions(t_BT, t_BT, segment_BT, segment_BT, index_BT)
    # In a cache, the position of a token is its slot.
    return QueryAndKeyPositions(t_BT, s_BS, segment_BT, jnp.ones_like(s_BS), t_BT)


def score_blocks(
    index_q_BCHI: jax.Array,
    row_blocks: CompleteBlocks,
    t_BC: jax.Array,
    segment_BC: jax.Array,
    settings,
) -> tuple[jax.Array, jax.Array]:
    """Scores the blocks of every row for each query.

    Args:
      index_q_BCHI: the indexer's queries.
      row_blocks: the blocks of every row.
      t_BC: the position of each query.
      segment_BC: the segment id of each query's document.
      settings: the `QSA.Settings`.

    Returns:
      score [B, C, G] float32: the indexer's score of the block;
      visible [B, C, G] bool: whether the block is complete for the query and belongs to the query's
      document.
    """
    s_BHCG = jnp.einsum(
        "bchi,bgi->bhcg", index_q_BCHI, row_blocks.pooled_key, preferred_element_type=jnp.float32
    )
    score_BCG = jnp.sum(jax.nn.relu(s_BHCG), axis=1) * settings.indexer_head_dim**-0.5
    last_BG = row_blocks.first_token_position + settings.indexer_compress_ratio - 1
    visible_BCG = last_BG[:, None] <= t_BC[..., None]
    return score_BCG, visible_BCG & (row_blocks.segment_id[:, None] == segment_BC[..., None])


def select_blocks(
    index_q_BCHI: jax.Array,
    row_blocks: CompleteBlocks,
    t_BC: jax.Array,
    segment_BC: jax.Array,
    settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects complete blocks for each query. The arguments are those of `score_blocks`.

    Returns:
      selected [B, C, G] bool: whether the query selects the block;
      score and visible [B, C, G], as `score_blocks` returns them.
    """
    score_BCG, visible_BCG = score_blocks(index_q_BCHI, row_blocks, t_BC, segment_BC, settings)
    count = settings.indexer_budget // settings.indexer_compress_ratio
    return best_blocks_mask(score_BCG, visible_BCG, count), score_BCG, visible_BCG


def list_selected_blocks(
    score_BCG: jax.Array, visible_BCG: jax.Array, settings: "QSA.Settings"
) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks that `best_blocks_mask` marks as a list of J blocks for each query: the
    index of each block [B, C, J], and [B, C, J] bool, whether the entry is a selected block. A list
    with fewer than J selected blocks ends with blocks that the query does not see.
    """
    count = settings.indexer_budget // settings.indexer_compress_ratio
    ranked_BCG = jnp.where(visible_BCG, jax.lax.stop_gradient(score_BCG), -jnp.inf)
    # Of equal scores, top_k returns the one with the lowest index first.
    best, number_BCJ = jax.lax.top_k(ranked_BCG, min(count, ranked_BCG.shape[-1]))
    return number_BCJ, best > -jnp.inf


def best_blocks_mask(score_BCG: jax.Array, visible_BCG: jax.Array, count: int) -> jax.Array:
    """Returns [B, C, G] bool: whether a block is one of the `count` visible blocks with the highest
    scores. Of blocks with equal scores, the earlier ones are preferred.
    """
    if count >= score_BCG.shape[-1]:
        return visible_BCG
    ranked_BCG = jnp.where(visible_BCG, score_BCG, -jnp.inf)
    least_BC1 = jax.lax.top_k(ranked_BCG, count)[0][..., -1:]
    above_BCG = ranked_BCG > least_BC1
    equal_BCG = ranked_BCG == least_BC1
    room_BC1 = count - jnp.sum(above_BCG, axis=-1, keepdims=True)
    first_BCG = equal_BCG & (jnp.cumsum(equal_BCG, axis=-1) <= room_BC1)
    return visible_BCG & (above_BCG | first_BCG)


def seen_tokens_mask(
    selected_BCG: jax.Array,
    row_blocks: CompleteBlocks,
    t_BC: jax.Array,
    segment_BC: jax.Array,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
) -> jax.Array:
    """Returns [B, C, S] bool: whether the query sees the token. A query sees the tokens of the
    blocks that it selected, and the tokens after its last complete block up to the query's own
    token.

    Args:
      selected_BCG: bool, whether the query selected the block.
      row_blocks: the blocks of every row.
      t_BC, segment_BC: the position of each query, and the segment id of its document.
      positions: the positions and documents of the keys.
      settings: the settings of the mixer.
    """
    ratio = settings.indexer_compress_ratio
    incomplete_BC1 = ((t_BC + 1) // ratio * ratio)[..., None]
    s_B1S = positions.key_position[:, None]
    tail_BCS = (s_B1S >= incomplete_BC1) & (s_B1S <= t_BC[..., None])
    same_document_BCS = positions.key_segment[:, None] == segment_BC[..., None]
    tail_BCS &= same_document_BCS
    if not selected_BCG.shape[-1]:
        return tail_BCS
    # An incomplete block at the end of a document has, in `block_index_of_token`, the index of the
    # next document's first block. At the end of a row, this index may lie beyond the last block.
    inside_BS = row_blocks.block_index_of_token < selected_BCG.shape[-1]
    number_BS = jnp.where(inside_BS, row_blocks.block_index_of_token, 0)
    chosen_BCS = jax.vmap(lambda selected, number: selected[:, number])(selected_BCG, number_BS)
    return tail_BCS | (chosen_BCS & inside_BS[:, None] & same_document_BCS)


def key_ranges_to_read(
    number_BCJ,
    is_selected_BCJ,
    row_blocks: CompleteBlocks,
    t_BC,
    index_BC,
    settings: "QSA.Settings",
) -> tuple[jax.Array, jax.Array]:
    """Returns which keys each query reads: for each block of the query, the index of the first key
    and the number of keys to read, both int32 [B, C, J + 1]. The last block of a query is its
    incomplete block, of 0 to ratio - 1 tokens.

    Args:
      number_BCJ, is_selected_BCJ: as `list_selected_blocks` returns them.
      t_BC, index_BC: `query_position` and `own_key_index` of `QueryAndKeyPositions`, for the
        queries of number_BCJ.
    """
    ratio = settings.indexer_compress_ratio
    start_BCJ = take_entries(row_blocks.last_token_index, number_BCJ) - (ratio - 1)
    tail_BC1 = ((t_BC + 1) % ratio)[..., None]
    return (
        jnp.concatenate((start_BCJ, index_BC[..., None] - tail_BC1 + 1), axis=-1),
        jnp.concatenate((jnp.where(is_selected_BCJ, ratio, 0), tail_BC1), axis=-1),
    )


def _should_gather(num_keys: int, settings: "QSA.Settings") -> bool:
    """Whether attention gathers the selected keys of each query if a row has `num_keys` keys.
    Whether attention gathers keys depends on the platform that the program is compiled for.
    """
    return num_keys > GATHER_BEYOND_BUDGETS[compile_target().platform] * settings.indexer_budget


def block_sparse_attention(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
    cached: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the result of `masked_block_attention` with the fastest implementation. The
    arguments that are not listed are those of `masked_block_attention`.

    Args:
      cached: whether the keys are those of a cache; with a cache, no kernel runs.
      implementation: "masked", "gathered" or "pallas_tpu"; None: the best one.
    """
    ratio = settings.indexer_compress_ratio
    if cached and implementation is None:
        implementation = "gathered" if _should_gather(k_BSMK.shape[1], settings) else "masked"
    chosen = choose_implementation(
        "indexed_attention",
        implementation,
        XLA_IMPLEMENTATIONS,
        tokens=q_BTNK.shape[1],
        heads=q_BTNK.shape[2],
        key_heads=k_BSMK.shape[2],
        width=q_BTNK.shape[3],
        index_heads=index_q_BTHI.shape[2],
        index_width=index_q_BTHI.shape[3],
        blocks=row_blocks.pooled_key.shape[1],
        dtype=q_BTNK.dtype,
    )
    if chosen.is_kernel:
        rows = TokensAndBlocks(
            position=positions.query_position,
            segment=positions.query_segment,
            complete_blocks_before=row_blocks.block_index_of_token,
            block_indexer_key=row_blocks.pooled_key,
            block_end_position=row_blocks.first_token_position + ratio - 1,
            block_segment=row_blocks.segment_id,
        )
        count = settings.indexer_budget // ratio
        return indexed_attention(chosen, ratio, count, rows, index_q_BTHI, q_BTNK, k_BSMK, v_BSMK)
    attend = masked_block_attention
    if (
        chosen.name == "gathered"
        or implementation is None
        and _should_gather(k_BSMK.shape[1], settings)
    ):
        attend = gathered_block_attention
    return attend(q_BTNK, k_BSMK, v_BSMK, index_q_BTHI, row_blocks, positions, settings)


def masked_block_attention(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
) -> jax.Array:
    """Returns o [B, T, N, K], in v's dtype: attention of each query to the keys that it sees, with
    the softmax in float32.

    The function computes the scores of all queries and keys of a row, one chunk of queries after
    another, and hides the keys that a query does not see. For T queries and S keys, memory grows
    with chunk × S, and work with T × S.

    Args:
      q_BTNK, k_BSMK, v_BSMK: attention's queries, keys and values.
      index_q_BTHI: the indexer's queries.
      row_blocks: the blocks of every row.
      positions: the positions and documents of the queries and keys.
      settings: the settings of the mixer.
    """

    def attend_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        selected_BCG, *_ = select_blocks(index_q_BCHI, row_blocks, t_BC, segment_BC, settings)
        seen_BCS = seen_tokens_mask(selected_BCG, row_blocks, t_BC, segment_BC, positions, settings)
        p_BNCS = attention_probabilities(q_BCNK, k_BSMK, seen_BCS)
        b, n, c, keys = p_BNCS.shape
        p_BMHCS = p_BNCS.astype(v_BSMK.dtype).reshape(b, v_BSMK.shape[2], -1, c, keys)
        o = jnp.einsum("bmhcs,bsmk->bcmhk", p_BMHCS, v_BSMK, preferred_element_type=jnp.float32)
        return o.reshape(b, c, n, v_BSMK.shape[3]).astype(v_BSMK.dtype)

    return _map_chunks_of_queries(
        attend_chunk, q_BTNK, index_q_BTHI, positions.query_position, positions.query_segment
    )


def gathered_block_attention(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
) -> jax.Array:
    """Computes the result of `masked_block_attention` from the selected blocks alone: for each
    query, the function gathers the keys and values of the query's selected blocks. Memory grows
    with T + S. For T queries and S keys, the work of attention grows with T × budget; only the work
    of the indexer's scores grows with T × S.
    """

    def list_chunk(index_q_BCHI, t_BC, segment_BC, index_BC):
        listed = list_selected_blocks(
            *score_blocks(index_q_BCHI, row_blocks, t_BC, segment_BC, settings), settings
        )
        return key_ranges_to_read(*listed, row_blocks, t_BC, index_BC, settings)

    # the selection has no gradient, so the backward pass needs its result alone
    index_q_BTHI, row_blocks = jax.lax.stop_gradient((index_q_BTHI, row_blocks))
    start_BTJ, size_BTJ = save_for_backward(
        _map_chunks_of_queries(
            list_chunk,
            index_q_BTHI,
            positions.query_position,
            positions.query_segment,
            positions.own_key_index,
        )
    )
    ratio = settings.indexer_compress_ratio
    return gathered_attention(q_BTNK, k_BSMK, v_BSMK, start_BTJ, size_BTJ, ratio)


# Without a name, the length of the row decides between the two forms (`_should_gather`).
XLA_IMPLEMENTATIONS = (
    XlaImplementation("masked", ("cpu", "gpu", "tpu"), {}),
    XlaImplementation("gathered", (), {}),
)


def indexer_divergence(
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
    dense: bool,
    head_axis: str | None = None,
) -> jax.Array:
    """Returns the indexer's loss of each query, [B, T] float32: KL(teacher ‖ student) over the
    query's blocks; 0 for a query without blocks. The arguments that are not listed are those of
    `masked_block_attention`.

    Args:
      dense: whether the loss is that of the mode "dense", over all complete blocks.
      head_axis: the mesh axis that splits the heads, over which attention's probabilities are
        summed. None if no mesh axis splits the heads.
    """

    def divergence_of_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        selected_BCG, score_BCG, visible_BCG = select_blocks(
            index_q_BCHI, row_blocks, t_BC, segment_BC, settings
        )
        kept_BCG = visible_BCG if dense else selected_BCG
        teacher_BCG = indexer_teacher_probabilities(
            q_BCNK, k_BTMK, kept_BCG, row_blocks, t_BC, segment_BC, positions, settings, head_axis
        )
        return _kl_divergence(teacher_BCG, jnp.where(kept_BCG, score_BCG, _HIDDEN))

    return _map_chunks_of_queries(
        divergence_of_chunk, q_BTNK, index_q_BTHI, positions.query_position, positions.query_segment
    )


def gathered_indexer_divergence(
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
    head_axis: str | None = None,
) -> jax.Array:
    """Computes the result of `indexer_divergence` in the mode "sparse" from the selected blocks
    alone: for each query, the function gathers the keys of the query's selected blocks. The
    arguments are those of `indexer_divergence`.
    """
    ratio, keys = settings.indexer_compress_ratio, k_BTMK.shape[1]

    def divergence_of_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC, index_BC):
        score_BCG, visible_BCG = score_blocks(index_q_BCHI, row_blocks, t_BC, segment_BC, settings)
        number_BCJ, is_selected_BCJ = list_selected_blocks(score_BCG, visible_BCG, settings)
        start, size = key_ranges_to_read(
            number_BCJ, is_selected_BCJ, row_blocks, t_BC, index_BC, settings
        )
        token_BCX, seen_BCX = token_indices_and_mask(start, size, ratio, keys)
        q_BCMHK = q_BCNK.reshape(*q_BCNK.shape[:2], k_BTMK.shape[2], -1, q_BCNK.shape[3])
        s_BCMHX = gathered_scores(q_BCMHK, take_entries(k_BTMK, token_BCX), seen_BCX)
        p_BCX = jnp.sum(jax.nn.softmax(s_BCMHX, axis=-1), axis=(2, 3))
        if head_axis is not None:
            p_BCX = jax.lax.psum(p_BCX, head_axis)
        # The last entry is the incomplete block, which the loss leaves out.
        largest_BCJ = jnp.max(p_BCX.reshape(*start.shape, ratio), axis=-1)[..., :-1]
        largest_BCJ = jnp.where(is_selected_BCJ, largest_BCJ, 0)
        total_BC1 = jnp.sum(largest_BCJ, axis=-1, keepdims=True)
        score_BCJ = jnp.take_along_axis(score_BCG, number_BCJ, axis=-1)
        return _kl_divergence(
            largest_BCJ / jnp.where(total_BC1 > 0, total_BC1, 1),
            jnp.where(is_selected_BCJ, score_BCJ, _HIDDEN),
        )

    query_arrays = (
        q_BTNK,
        index_q_BTHI,
        positions.query_position,
        positions.query_segment,
        positions.own_key_index,
    )
    size = queries_per_chunk(*q_BTNK.shape[:2])
    return _map_chunks_of_queries(divergence_of_chunk, *query_arrays, size=size)


def _kl_divergence(teacher_BCG: jax.Array, logits_BCG: jax.Array) -> jax.Array:
    """Returns [B, C], KL(teacher ‖ softmax(logits)), without a gradient to the teacher."""
    teacher_BCG = jax.lax.stop_gradient(teacher_BCG)
    student_BCG = jax.nn.log_softmax(logits_BCG, axis=-1)
    difference_BCG = jnp.log(jnp.where(teacher_BCG > 0, teacher_BCG, 1)) - student_BCG
    return jnp.sum(jnp.where(teacher_BCG > 0, teacher_BCG * difference_BCG, 0), axis=-1)


def indexer_overlap(
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    index_q_BTHI: jax.Array,
    row_blocks: CompleteBlocks,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
    head_axis: str | None = None,
) -> jax.Array:
    """Returns [B, T], the overlap of each query (see indexer_overlap of `QSA`): the query selects
    this share of the n blocks to which dense attention gives the largest probabilities, where n is
    the largest number of blocks that a query can select. The arguments are those of
    `indexer_divergence`.
    """
    count = settings.indexer_budget // settings.indexer_compress_ratio

    def overlap_of_chunk(q_BCNK, index_q_BCHI, t_BC, segment_BC):
        selected_BCG, _, visible_BCG = select_blocks(
            index_q_BCHI, row_blocks, t_BC, segment_BC, settings
        )
        teacher_BCG = indexer_teacher_probabilities(
            q_BCNK,
            k_BTMK,
            visible_BCG,
            row_blocks,
            t_BC,
            segment_BC,
            positions,
            settings,
            head_axis,
        )
        best_BCG = best_blocks_mask(teacher_BCG, visible_BCG, count)
        return jnp.sum(best_BCG & selected_BCG, axis=-1) / count

    return _map_chunks_of_queries(
        overlap_of_chunk, q_BTNK, index_q_BTHI, positions.query_position, positions.query_segment
    )


def indexer_teacher_probabilities(
    q_BCNK: jax.Array,
    k_BTMK: jax.Array,
    kept_BCG: jax.Array,
    row_blocks: CompleteBlocks,
    t_BC: jax.Array,
    segment_BC: jax.Array,
    positions: QueryAndKeyPositions,
    settings: QSA.Settings,
    head_axis: str | None,
) -> jax.Array:
    """Returns [B, C, G] float32: the teacher of the indexer's loss, a distribution over the blocks
    of each query. Attention's probabilities are summed over the heads. A block's probability is the
    largest sum among the block's tokens, divided by the total of the largest sums of the query's
    blocks.

    Args:
      q_BCNK, k_BTMK: attention's queries and keys.
      kept_BCG: bool, the blocks of each query. For the teacher, a query attends to the tokens of
        the blocks in kept_BCG, and to the tokens after its last complete block up to the query's
        own token. The blocks outside of kept_BCG get 0.
      row_blocks: the blocks of every row.
      t_BC, segment_BC: the position of each query, and the segment id of its document.
      positions: the positions and documents of the keys.
      settings: the settings of the mixer.
      head_axis: as in `indexer_divergence`.
    """
    seen_BCS = seen_tokens_mask(kept_BCG, row_blocks, t_BC, segment_BC, positions, settings)
    p_BCS = jnp.sum(attention_probabilities(q_BCNK, k_BTMK, seen_BCS), axis=1)
    if head_axis is not None:
        p_BCS = jax.lax.psum(p_BCS, head_axis)
    back = jnp.arange(settings.indexer_compress_ratio)
    tokens_BGR = jnp.maximum(row_blocks.last_token_index[..., None] - back, 0)
    p_BCGR = jax.vmap(lambda p_CS, tokens_GR: p_CS[:, tokens_GR])(p_BCS, tokens_BGR)
    largest_BCG = jnp.where(kept_BCG, jnp.max(p_BCGR, axis=-1, initial=0.0), 0)
    total_BC1 = jnp.sum(largest_BCG, axis=-1, keepdims=True)
    return largest_BCG / jnp.where(total_BC1 > 0, total_BC1, 1)


def _map_chunks_of_queries(of_chunk, *of_queries: jax.Array, size: int = QUERIES_PER_CHUNK) -> Any:
    """Applies `of_chunk` to the queries, one chunk of `size` at a time. In the forward and in the
    backward pass, the intermediate arrays of only one chunk are in memory at any time.
    """

    @jax.checkpoint
    def step(carry, inputs):
        return carry, of_chunk(*inputs)

    time = of_queries[0].shape[1]
    _, results = blocks.scan_or_call_once(
        step, None, blocks.to_chunks(of_queries, 1, min(size, time))
    )
    return blocks.from_chunks(results, 1, time)


def attention_probabilities(q_BCNK: jax.Array, k_BSMK: jax.Array, seen_BCS: jax.Array) -> jax.Array:
    """Returns attention's probabilities [B, N, C, S] float32 of every query head."""
    return jax.nn.softmax(
        jnp.where(seen_BCS[:, None], scaled_dot(q_BCNK, k_BSMK), _HIDDEN), axis=-1
    )


# ---- reference
# --------------------------------------------------------------------------------------------------


def block_scores_reference(config, params, x) -> jax.Array:
    """Returns [T, blocks]: the score of every complete block of one document for every query."""
    ratio = config.settings_of_mixer("qsa").indexer_compress_ratio
    qk = jnp.einsum("td,dhi->thi", jax.lax.stop_gradient(x), params["index_qk_proj"])
    position = np.arange(len(x))
    q = rotate_by_distance(
        config, apply_norm(config, qk[:, :-1], params["index_q_norm"]), position[:, None]
    )
    scores = []
    for start in range(0, len(x) - ratio + 1, ratio):
        key = apply_norm(config, jnp.mean(qk[start : start + ratio, -1], 0), params["index_k_norm"])
        head_scores = jax.nn.relu(q @ rotate_by_distance(config, key, np.array(start)))
        scores.append(jnp.sum(head_scores, axis=-1) / math.sqrt(qk.shape[-1]))
    return jnp.stack(scores, axis=1)


def attention_mask_reference(config, params, x) -> jax.Array:
    """Returns [T, T] bool: whether each query (first axis) of one document sees each key."""
    s = config.settings_of_mixer("qsa")
    ratio, count = s.indexer_compress_ratio, s.indexer_budget // s.indexer_compress_ratio
    score, position, seen = block_scores_reference(config, params, x), np.arange(len(x)), []
    for t in range(len(x)):
        complete = (t + 1) // ratio
        best = jnp.argsort(-score[t, :complete], stable=True)[:count]
        blocks_seen = jnp.zeros(len(x) // ratio + 1, bool).at[best].set(True)
        seen.append(
            (blocks_seen[position // ratio] | (position >= complete * ratio)) & (position <= t)
        )
    return jnp.stack(seen)


def qsa_reference(config, params, x):
    i, j, _ = positions_and_causal_mask(x)
    seen = attention_mask_reference(config, params, x)
    return gated_attention(config, params, x, seen=seen, distance=i - j)


def indexer_teachers_reference(config, params, x, dense: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Returns a pair for each query t ≥ ratio - 1 of one document: the teacher [blocks], and
    [blocks] bool, the blocks over which the teacher is a distribution.
    """
    ratio, width = config.settings_of_mixer("qsa").indexer_compress_ratio, config.head_dim
    seen, position = attention_mask_reference(config, params, x), np.arange(len(x))
    params, x = jax.lax.stop_gradient((params, x))

    def heads(name):
        y = jnp.einsum("td,dnk->tnk", x, params[f"{name}_proj"])[..., :width]
        return rotate_by_distance(
            config, apply_norm(config, y, params[f"{name}_norm"]), position[:, None]
        )

    readers = config.num_attention_heads // config.num_key_value_heads
    q, k = heads("q"), jnp.repeat(heads("k"), readers, axis=1)
    count, teachers = len(x) // ratio, []
    for t in range(ratio - 1, len(x)):
        keys = position <= t if dense else seen[t]
        logits = jnp.einsum("nk,snk->ns", q[t], k) / math.sqrt(width)
        p = jnp.sum(jax.nn.softmax(jnp.where(keys, logits, -jnp.inf)), axis=0)
        p = (p / jnp.sum(p))[: count * ratio].reshape(count, ratio)
        kept = jnp.where(keys, True, False)[: count * ratio : ratio]
        kept &= np.arange(count) < (t + 1) // ratio
        teacher = jnp.where(kept, jnp.max(p, axis=1), 0)
        teachers.append((teacher / jnp.sum(teacher), kept))
    return teachers


def indexer_loss_reference(config, params, x, dense: bool) -> jax.Array:
    """Returns the indexer's loss, summed over the queries of one document one by one."""
    ratio, total = config.settings_of_mixer("qsa").indexer_compress_ratio, 0.0
    score = block_scores_reference(config, params, x)
    for t, (teacher, kept) in enumerate(
        indexer_teachers_reference(config, params, x, dense), ratio - 1
    ):
        student = jax.nn.softmax(jnp.where(kept, score[t], -jnp.inf))
        ratio_of_both = jnp.where(kept, teacher, 1) / jnp.where(kept, student, 1)
        total += jnp.sum(teacher * jnp.log(ratio_of_both))
    return total


def indexer_overlap_reference(config, params, x) -> float:
    """Returns indexer_overlap of one document."""
    s = config.settings_of_mixer("qsa")
    ratio, count = s.indexer_compress_ratio, s.indexer_budget // s.indexer_compress_ratio
    score, shares = block_scores_reference(config, params, x), []
    for t, (teacher, _) in enumerate(
        indexer_teachers_reference(config, params, x, True), ratio - 1
    ):
        complete = (t + 1) // ratio
        if complete > count:
            best, chosen = (
                set(np.argsort(-np.asarray(a)[:complete], kind="stable")[:count].tolist())
                for a in (teacher, score[t])
            )
            shares.append(len(best & chosen) / count)
    return float(np.mean(shares))


REFERENCES = {"qsa": qsa_reference}
