"""Gated attention (2505.06708): grouped-query attention with a gate. The sigmoid of the gate
multiplies the output of attention elementwise.

Letters: B batch, T time, S cache slots, D model, N query heads, M key/value heads, K head width, J
width of a query and its gate side by side.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import (
    Context,
    call_saving_only_inputs,
    norm_scale,
    rms_norm,
    rotary_cos_sin,
    rotate,
    token_mean,
)
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops import attention, attention_heads
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import (
    CONTEXT,
    TENSOR,
    activation_spec,
    constrain,
    num_shards,
    per_shard,
)

# The diagnostics find the largest score with a softmax of the scores times this factor. The
# weighted mean of S scores is then within ln S / 1024 of the largest score. The factor is a power
# of two, so that the multiplication is exact.
SHARPENED = 1024.0


class GatedAttention(Mixer):
    """Query, key and value projections → per-head norms and partial RoPE → attention → gate →
    output projection.

    Diagnostics, over the tokens that count (`Context.stats_mask`):
      first_token_share [N]: the attention probability on the first token of the document, averaged
        over the queries of the other tokens;
      gate_mean []: the mean of the output gate (if there is a gate);
      gate_closed []: the share of the gate's elements below 0.1 (if there is a gate);
      logit_max [N]: the largest scaled score of a query and a key that the query sees.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # whether the norm of queries and keys is taken over each head alone ("head") or over all
        # heads of the layer together ("layer")
        qk_norm_over: Literal["head", "layer"] = "head"

    switches_read = ("attention_output_gate", "qk_norm", "yarn_factor", "block.rope_scaling")
    cache_kind = "slots"
    writes_cache_in_place = True
    marks_saved_results = True

    def __init__(self, config: ModelConfig, make: Make, layer_indices: tuple[int, ...]):
        self.config = c = config
        d, n, m, k = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        query = (("query", k), ("gate", k)) if c.attention_output_gate else (("query", k),)
        self.q_proj = make.matrix(
            (d, n, len(query) * k), "embed -> query_heads head_width", parts=query
        )
        self.k_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.v_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.o_proj = make.matrix((n, k, d), "query_heads head_width -> embed")
        if c.qk_norm:
            layer = self.settings(c).qk_norm_over == "layer"
            self.q_norm = make.norm(n * k if layer else k)
            self.k_norm = make.norm(m * k if layer else k)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict, dict | None]:
        """Returns (the output [B, T, D], diagnostics, the cache with these tokens' keys and values
        written, or None without a cache).
        """
        if cache is None and self.uses_head_kernels(x_BTD, context):
            return *self._fused_forward(x_BTD, context), None
        q_BTNK, gate_BTNK, k_BTMK, v_BTMK = self.queries_gate_keys_values(x_BTD, context)
        o_BTNK, after = self.attend(q_BTNK, k_BTMK, v_BTMK, context, cache)
        diagnostics = {}
        if context.options.collect_stats and cache is None:
            diagnostics = self.diagnostics(q_BTNK, k_BTMK, gate_BTNK, context)
        return gated_projection(o_BTNK, gate_BTNK, self.o_proj[...], context), diagnostics, after

    def queries_gate_keys_values(
        self, x_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
        """Projects x [B, T, D] to queries [B, T, N, K], output gates [B, T, N, K] (or None), keys
        and values [B, T, M, K], and applies norms and positions to queries and keys.
        """
        q_BTNK, gate_BTNK, k_BTMK, v_BTMK = self.input_projections(x_BTD, context)
        if self.config.qk_norm:
            q_BTNK = self.norm_queries_or_keys(q_BTNK, self.q_norm[...])
            k_BTMK = self.norm_queries_or_keys(k_BTMK, self.k_norm[...])
        q_BTNK, k_BTMK = (self.with_positions(x, context.positions) for x in (q_BTNK, k_BTMK))
        return q_BTNK, gate_BTNK, k_BTMK, v_BTMK

    def input_projections(
        self, x_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
        """Projects x [B, T, D] to queries [B, T, N, K], their output gates [B, T, N, K] (None if
        the setting `attention_output_gate` is off), keys and values [B, T, M, K].
        """
        dtype = x_BTD.dtype
        query_gate_BTNJ = jnp.einsum("btd,dnk->btnk", x_BTD, self.q_proj[...].astype(dtype))
        query_gate_BTNJ = save_for_backward(
            constrain(
                query_gate_BTNJ, context.mesh, "batch", context.logical_time_axis, "heads", None
            ),
            "queries",
        )
        q_BTNK, gate_BTNK = (
            jnp.split(query_gate_BTNJ, 2, axis=-1)
            if self.config.attention_output_gate
            else (query_gate_BTNJ, None)
        )
        k_BTMK = save_for_backward(
            jnp.einsum("btd,dmk->btmk", x_BTD, self.k_proj[...].astype(dtype)), "keys"
        )
        v_BTMK = save_for_backward(
            jnp.einsum("btd,dmk->btmk", x_BTD, self.v_proj[...].astype(dtype)), "values"
        )
        return q_BTNK, gate_BTNK, k_BTMK, v_BTMK

    def uses_head_kernels(self, x_BTD: jax.Array, context: Context) -> bool:
        """Returns whether a call without a cache uses the two kernels of `ops.attention_heads`. One
        kernel normalises and rotates queries and keys; the other kernel gates the outputs of the
        heads. Arrays between the projections and the kernels of `ops.attention_heads` have all
        heads side by side in their last axis, [B, T, N·K]. The kernels are used if the class is
        `GatedAttention` itself and no subclass, each head has an RMS norm of its own, there is an
        output gate, and the platform's kernels support the shapes.
        """
        c, time = (
            self.config,
            x_BTD.shape[1]
            // (num_shards(context.mesh, CONTEXT) if context.logical_time_axis else 1),
        )
        over = self.settings(c).qk_norm_over
        normed = c.qk_norm and over == "head" and c.block.norm == "rms"
        return (
            type(self) is GatedAttention
            and normed
            and c.attention_output_gate
            and attention_heads.kernels_norm_rotate_and_gate(
                time, c.head_dim, c.rotary_dim, x_BTD.dtype
            )
        )

    def _fused_forward(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        """Returns (the output [B, T, D], diagnostics) like `__call__` without a cache, computed
        with the kernels of `ops.attention_heads`. The weight of the queries' norm is multiplied by
        the scale of the scores, K^-1/2.
        """
        c, (n, m) = self.config, (self.config.num_attention_heads, self.config.num_key_value_heads)
        shared = m % num_shards(context.mesh, TENSOR) != 0
        parts = *jnp.split(self.q_proj[...], 2, axis=-1), self.k_proj[...], self.v_proj[...]
        key_heads = None if shared else "heads"
        names = "heads", "heads", key_heads, key_heads
        through = lambda part: x_BTD @ part.astype(x_BTD.dtype).reshape(part.shape[0], -1)
        q, gate, k, v = (
            save_for_backward(
                constrain(through(part), context.mesh, "batch", context.logical_time_axis, name),
                saved_as,
            )
            for part, name, saved_as in zip(parts, names, ("queries", "queries", "keys", "values"))
        )
        norms = self.q_norm[...], self.k_norm[...]

        def run(q, k, v, gate, norms, cos, sin, segment_ids):
            in_heads = lambda x: x.reshape(*x.shape[:2], -1, c.head_dim)
            if shared:
                k, v = (
                    _key_value_head_of_shard(in_heads(x), in_heads(q), n // m)[:, :, 0]
                    for x in (k, v)
                )
            weights = (norm_scale(norm, c) for norm in norms)
            rotation = attention_heads.cosine_and_sine_by_lane(cos, sin)
            q, k = (
                attention_heads.norm_and_rotate(
                    x, weight * scale, *rotation, c.rotary_dim // 2, c.rms_norm_eps
                ).swapaxes(1, 2)
                for x, weight, scale in zip((q, k), weights, (c.head_dim**-0.5, 1.0))
            )
            o = attention(
                q,
                k,
                in_heads(v),
                segment_ids=segment_ids,
                axis_name=context.mesh_time_axis,
                scale=1.0,
            )
            return attention_heads.gate_heads(o.swapaxes(1, 2), gate)

        split, tokens = (
            activation_spec("batch", context.logical_time_axis, "heads"),
            activation_spec("batch", context.logical_time_axis),
        )
        keys = activation_spec("batch", context.logical_time_axis, names[2])
        o_BTC = per_shard(
            run, context.mesh, (split, keys, keys, split, P(), tokens, tokens, tokens), split
        )(q, k, v, gate, norms, *rotary_cos_sin(context.positions, c), context.segment_ids)
        y_BTD = o_BTC @ self.o_proj[...].astype(x_BTD.dtype).reshape(-1, c.hidden_size)
        if not context.options.collect_stats:
            return y_BTD, {}
        q, gate, k = (x.reshape(*x.shape[:2], -1, c.head_dim) for x in (q, gate, k))
        q, k = (
            self.with_positions(self.norm_queries_or_keys(x, norm), context.positions)
            for x, norm in zip((q, k), norms)
        )
        return y_BTD, self.diagnostics(q, k, gate, context)

    def norm_queries_or_keys(self, x_BTNK: jax.Array, weight: jax.Array) -> jax.Array:
        """Applies the norm to queries or keys [B, T, N, K]: over each head alone or over all heads
        together, as the setting `qk_norm_over` says.
        """
        if self.settings(self.config).qk_norm_over == "head":
            return rms_norm(x_BTNK, weight, self.config)
        return rms_norm(x_BTNK.reshape(*x_BTNK.shape[:2], -1), weight, self.config).reshape(
            x_BTNK.shape
        )

    def with_positions(self, x_BTNK: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Applies the positions [B, T] to queries or keys [B, T, N, K]. This class rotates queries
        and keys (RoPE); subclasses may apply the positions in another way.
        """
        return rotate(x_BTNK, positions_BT, self.config)

    def diagnostics(self, q_BTNK, k_BTMK, gate_BTNK, context: Context) -> dict[str, jax.Array]:
        return attention_diagnostics(
            lambda q, k, v: self.attend(q, k, v, context)[0], q_BTNK, k_BTMK, gate_BTNK, context
        )

    def attend(
        self,
        q_BTNK: jax.Array,
        k_BTMK: jax.Array,
        v_BTMK: jax.Array,
        context: Context,
        cache: dict | None = None,
    ) -> tuple[jax.Array, dict | None]:
        """Returns (the output of attention [B, T, N, K], the cache with these keys and values
        written, or None without a cache).
        """
        if cache is None:
            return attend(q_BTNK, k_BTMK, v_BTMK, context), None
        return attend_cached(q_BTNK, {"k": k_BTMK, "v": v_BTMK}, cache, context)

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Returns an empty cache of `length` slots for each of `batch` rows."""
        shape = (batch, length, config.num_key_value_heads, config.head_dim)
        return {"k": jnp.zeros(shape, config.dtype), "v": jnp.zeros(shape, config.dtype)}

    @classmethod
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs per token of the scores and of the weighted sum of values. A causal
        query reads (length + 1) / 2 keys on average.
        """
        return 2 * (length + 1) * config.num_attention_heads * config.head_dim

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        over = cls.settings(config).qk_norm_over
        require(
            config.qk_norm or over == "head",
            f"model.mixer.qk_norm_over = {over!r} with model.qk_norm = False: nothing is normed",
        )

    @classmethod
    def sizes_split_by_tensor(cls, config: ModelConfig) -> dict[str, int]:
        return {"num_attention_heads": config.num_attention_heads}


def gated_projection(
    o_BTNK: jax.Array, gate_BTNK: jax.Array | None, o_proj_NKD: jax.Array, context: Context
) -> jax.Array:
    """Multiplies the heads' outputs by their gate and projects them to the model's width,
    [B, T, D].
    """
    dtype = o_BTNK.dtype

    def project(o_BTNK, gate_BTNK, o_proj_NKD):
        if gate_BTNK is not None:
            o_BTNK = o_BTNK * jax.nn.sigmoid(gate_BTNK.astype(jnp.float32)).astype(dtype)
        o_BTNK = constrain(o_BTNK, context.mesh, "batch", context.logical_time_axis, "heads", None)
        return jnp.einsum("btnk,nkd->btd", o_BTNK, o_proj_NKD.astype(dtype))

    return call_saving_only_inputs(project, o_BTNK, gate_BTNK, o_proj_NKD)


def attention_diagnostics(
    attend: Callable, q_BTNK, k_BTMK, gate_BTNK, context: Context
) -> dict[str, jax.Array]:
    """Computes the diagnostics of `GatedAttention`.

    Args:
      attend: function (q, k, v) → the output of attention, [B, T, N, K].
      q_BTNK, k_BTMK: queries and keys, with norms and positions applied.
      gate_BTNK: the output gate before its activation; None: there is no gate.
      context: the inputs that all layers of the forward pass share.
    """
    # With values of 1 at first tokens and 0 elsewhere, attention returns its probability on the
    # first tokens, and no T × T matrix is needed.
    first_BT = context.positions == 0
    indicator_BTMK = jnp.broadcast_to(first_BT[:, :, None, None], k_BTMK.shape).astype(k_BTMK.dtype)
    share_BTN = attend(q_BTNK, k_BTMK, indicator_BTMK)[..., 0]
    counted_BT = ~first_BT if context.stats_mask is None else context.stats_mask & ~first_BT
    # With scores multiplied by SHARPENED, softmax puts nearly all weight on the largest score. With
    # the keys as values, attention then returns for each query the key with the largest score.
    best_BTNK = attend(q_BTNK * SHARPENED, k_BTMK, k_BTMK)
    logit_BTN = (
        jnp.einsum("btnk,btnk->btn", q_BTNK, best_BTNK, preferred_element_type=jnp.float32)
        * q_BTNK.shape[-1] ** -0.5
    )
    if context.stats_mask is not None:
        logit_BTN = jnp.where(context.stats_mask[..., None], logit_BTN, -jnp.inf)
    measured = {
        "first_token_share": token_mean(share_BTN, counted_BT),
        "logit_max": jnp.max(logit_BTN, axis=(0, 1)),
    }
    if gate_BTNK is None:
        return measured
    open_BTNK = jax.nn.sigmoid(gate_BTNK.astype(jnp.float32))
    return measured | {
        "gate_mean": jnp.mean(token_mean(open_BTNK, context.stats_mask)),
        "gate_closed": jnp.mean(token_mean(open_BTNK < 0.1, context.stats_mask)),
    }


def attend(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    context: Context,
    q_positions_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes attention, o [B, T, N, K], with the heads split over the mesh axis `tensor`.

    If the number of shards does not divide the number of key/value heads, every shard holds all
    key/value heads and uses the one head that its query heads read.

    Args:
      q_BTNK: the queries.
      k_BSMK, v_BSMK: the keys and values, of the same tokens or of the slots of a cache.
      context: the inputs that all layers of the forward pass share.
      q_positions_BT: with a cache, the positions of the queries; None: there is no cache.
    """
    mesh, (n, m) = context.mesh, (q_BTNK.shape[2], k_BSMK.shape[2])
    shared = m % num_shards(mesh, TENSOR) != 0

    def run(q, k, v, segment_ids, q_positions):
        if shared:
            k, v = (_key_value_head_of_shard(x, q, n // m) for x in (k, v))
        if q_positions is not None:
            from qwen3next_jax.ops.cached_attention import cached_attention

            return cached_attention(q, k[None], v[None], 0, q_positions)
        return attention(q, k, v, segment_ids=segment_ids, axis_name=context.mesh_time_axis)

    split, tokens = (
        activation_spec("batch", context.logical_time_axis, "heads", None),
        activation_spec("batch", context.logical_time_axis),
    )
    keys = activation_spec("batch", context.logical_time_axis, None, None) if shared else split
    return per_shard(run, mesh, (split, keys, keys, tokens, tokens), split)(
        q_BTNK, k_BSMK, v_BSMK, context.segment_ids, q_positions_BT
    )


def write_tokens_to_cache(
    cache_BSMK: jax.Array, new_BTMK: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    """Returns the cache [B, S, M, K] of one layer with new tokens [B, T, M, K] written to the slots
    `positions_BT`. The function serves mixers that do not write to the cache in place
    (`Mixer.writes_cache_in_place`). Padding after the end of a row is written too, but later tokens
    overwrite the padding before any query sees it. Tokens whose slot would lie past the end of the
    cache are dropped.
    """
    row_B1 = jnp.arange(cache_BSMK.shape[0])[:, None]
    written_BSMK = cache_BSMK.at[row_B1, positions_BT].set(
        new_BTMK.astype(cache_BSMK.dtype), mode="drop"
    )
    # Without the barrier XLA on CPU repeats the write for each of its readers, with two copies of
    # the cache each time.
    return jax.lax.optimization_barrier(written_BSMK)


def attend_cached(
    q_BTNK: jax.Array, new: dict, cache: dict, context: Context
) -> tuple[jax.Array, dict]:
    """Writes new keys and values into the layer's slots of the cache, and attends to the cache.

    Args:
      q_BTNK: the queries.
      new: {name: [B, T, M, K]}: first the keys and last the values; or one array that serves as
        keys and values.
      cache: {name: [layers, B, S, M, K]}.
      context: the inputs that all layers of the forward pass share.

    Returns:
      o [B, T, N, K]; the cache with the new keys and values.
    """
    from qwen3next_jax.ops.cached_attention import cached_attention, write_to_cache

    mesh, (n, m) = context.mesh, (q_BTNK.shape[2], next(iter(new.values())).shape[2])
    shared = m % num_shards(mesh, TENSOR) != 0

    def run(q, new, cache, positions, layer):
        cache = {
            name: write_to_cache(cache[name], x, layer, positions[:, 0]) for name, x in new.items()
        }
        keys, *_, values = 2 * tuple(cache.values())  # a single array serves as both
        if shared:
            keys, values, layer = (
                *(_key_value_head_of_shard(x[layer], q, n // m)[None] for x in (keys, values)),
                0,
            )
        return cached_attention(q, keys, values, layer, positions), cache

    split, whole = (
        activation_spec("batch", None, "heads", None),
        activation_spec("batch", None, None, None),
    )
    tokens, slots = whole if shared else split, cache_spec(m, mesh)
    return per_shard(
        run, mesh, (split, tokens, slots, activation_spec("batch", None), P()), (split, slots)
    )(q_BTNK, new, cache, context.positions, context.layer_in_stack)


def cache_spec(heads: int, mesh: Mesh | None) -> P:
    """Returns the PartitionSpec of a cache [layers, B, S, heads, K]."""
    return activation_spec(
        None, "batch", None, None if heads % num_shards(mesh, TENSOR) else "heads", None
    )


def _key_value_head_of_shard(x_BSMK: jax.Array, q_BTNK: jax.Array, readers: int) -> jax.Array:
    """Selects, from all key/value heads, the head [B, S, 1, K] that the query heads of this shard
    read. `readers`: the number of query heads per key/value head.
    """
    return jax.lax.dynamic_slice_in_dim(
        x_BSMK, jax.lax.axis_index(TENSOR) * q_BTNK.shape[2] // readers, 1, axis=2
    )
