"""An embedding of n-grams that a layer adds to the residual streams before its mixer (the
per-layer embedding, PLE, of Qwen3.8-Flash-Next; transformers' `qwen4_exp`).

For every token, every head hashes the n-gram that ends at this token. The hash is the number of a
row in the head's own part of the embedding table. Let e be the concatenated rows of all heads, and
h one residual stream. Then, for each stream,

    key = norm(K e)     query = norm(h)     value = V e, the same for all streams
    s = <key, query> / √D,  s ← sign(s) √max(|s|, 1e-6),  v = sigmoid(s) · value
    h ← h + v + silu(causal depthwise convolution of norm(v), dilated by ngram_size)

In an n-gram, the end token replaces the tokens of earlier documents, and the tokens before the last
end token that precedes the n-gram's last token.

JAX without x64 has no 64-bit integers, so the hash is computed on pairs of uint32, the high and the
low word. The products in the hash are less than 2^63, and every step of the hash is exact.

Letters: B batch, T time, S residual streams, D model, E = S·D, P width of all heads' rows together,
H heads, W taps of the convolution, C = (W - 1) · ngram_size earlier tokens that the convolution
reaches back to, K number of earlier entries that a cache keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, call_saving_only_inputs, rms_norm
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding import row_tables

Words = tuple[jax.Array, jax.Array]  # the high and the low 32 bits, uint32
_SMALLEST_SCORE = 1e-6


class NgramEmbedding(nnx.Module):
    """The n-gram embedding of one layer.

    Args:
      number: index of this embedding among the model's n-gram embeddings, from 0. Each n-gram
        embedding has its own hash functions and its own table.

    Attributes:
      whole_rows: True, because the module needs whole rows on one device (as in
        `model.mixer.Mixer`).
    """

    needs_whole_rows = True

    def __init__(self, config: ModelConfig, make: Make, number: int):
        self.config, self.number = config, number
        ple, d = config.ple, config.hidden_size
        s = stream_count(config)
        self.table = make.matrix(
            (ple.table_rows(number), ple.head_width),
            "table_rows table_width",
            kind="embedding",
            gathered_by="operator",
        )
        self.key_proj = make.matrix((ple.embed_dim, s, d), ". -> . embed")
        self.value_proj = make.matrix((ple.embed_dim, d), ". -> embed")
        self.key_norm = make.norm(s * d)
        self.query_norm = make.norm(s * d)
        self.conv_norm = make.norm(s * d)
        self.conv_kernel = make.parameter(
            jnp.zeros, (ple.conv_kernel_size, s * d), ". channels", kind="convolution"
        )

    def __call__(
        self, h_BTE: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict | None]:
        """Computes the sum of value and convolution that the layer adds to the residual streams h
        [B, T, S·D].

        Returns:
          what the layer adds, [B, T, S·D]; the cache after the last token or, with
          `context.options.return_all_states`, after each token, [B, T, …]; None without a cache.
        """
        c, (before_BK, before_BCE) = self.config, (None, None)
        if cache is not None:
            before_BK, before_BCE = cache["tokens"], cache["conv"]
        if context.embedding_rows is None:
            ids_BTH = ngram_ids(c, self.number, context.tokens, context.positions, before_BK)
            e_BTP = row_tables.look_up_rows(
                self.table[...],
                ids_BTH,
                self.table.declared,
                context.mesh,
                context.logical_time_axis,
                c.dtype,
            )
        else:
            e_BTP = context.embedding_rows[self.number].astype(h_BTE.dtype)
        e_BTP = save_for_backward(e_BTP)
        v_BTE = self._gated_value(e_BTP, h_BTE)
        n_BTE = self._norm_each_stream(v_BTE, self.conv_norm[...]).reshape(v_BTE.shape)
        y_BTE = v_BTE + jax.nn.silu(self._convolve(n_BTE, context.positions, before_BCE))
        if cache is None:
            return y_BTE, None
        ends = context.segment_ids
        return y_BTE, {
            "tokens": _last_entries_for_cache(
                before_BK, context.tokens, ends, context.options.return_all_states
            ),
            "conv": _last_entries_for_cache(
                before_BCE, n_BTE, ends, context.options.return_all_states
            ),
        }

    def _norm_each_stream(self, x_BTE: jax.Array, weight_E: jax.Array) -> jax.Array:
        """Returns the RMSNorm [B, T, S, D] of the streams, each normalized alone."""
        shape = (-1, self.config.hidden_size)
        x_BTSD = x_BTE.reshape(*x_BTE.shape[:2], *shape)
        return rms_norm(x_BTSD, weight_E.reshape(shape), self.config)

    def _gated_value(self, e_BTP: jax.Array, h_BTE: jax.Array) -> jax.Array:
        """Returns v = sigmoid(s) · value for each stream, [B, T, S·D], with s and value as at the
        top of the file.
        """
        dtype = h_BTE.dtype
        key_BTSD = jnp.einsum("btp,psd->btsd", e_BTP, self.key_proj[...].astype(dtype))
        value_BTD = e_BTP @ self.value_proj[...].astype(dtype)

        def gate(h_BTE, key_BTSD, value_BTD):
            key_BTSD = self._norm_each_stream(key_BTSD.reshape(h_BTE.shape), self.key_norm[...])
            query_BTSD = self._norm_each_stream(h_BTE, self.query_norm[...])
            s_BTS = jnp.einsum(
                "btsd,btsd->bts", key_BTSD, query_BTSD, preferred_element_type=jnp.float32
            )
            s_BTS = s_BTS * self.config.hidden_size**-0.5
            s_BTS = jnp.sign(s_BTS) * jnp.sqrt(jnp.maximum(jnp.abs(s_BTS), _SMALLEST_SCORE))
            open_BTS = jax.nn.sigmoid(s_BTS).astype(dtype)
            return (open_BTS[..., None] * value_BTD[:, :, None]).reshape(h_BTE.shape)

        return call_saving_only_inputs(gate, h_BTE, key_BTSD, value_BTD)

    def _convolve(
        self, n_BTE: jax.Array, positions_BT: jax.Array, before_BCE: jax.Array | None
    ) -> jax.Array:
        """Returns the dilated convolution of n, y_t = Σ_w kernel_w n_{t - (W - 1 - w) · dilation}
        [B, T, E], where the sum leaves out tokens of other documents.

        Args:
          before_BCE: the inputs n of the convolution for the C tokens before the row; None: there
            are no earlier tokens.
        """
        kernel_WE, dilation = self.conv_kernel[...].astype(n_BTE.dtype), self.config.ple.ngram_size
        width, time = len(kernel_WE), n_BTE.shape[1]
        reach = (width - 1) * dilation
        if before_BCE is None:
            padded_BXE = jnp.pad(n_BTE, ((0, 0), (reach, 0), (0, 0)))
        else:
            padded_BXE = jnp.concatenate((before_BCE.astype(n_BTE.dtype), n_BTE), axis=1)
        y_BTE = jnp.zeros_like(n_BTE)
        for w in range(width):
            back = (width - 1 - w) * dilation
            tap_BTE = padded_BXE[:, reach - back : reach - back + time]
            inside_BT1 = (positions_BT >= back)[..., None]
            y_BTE += kernel_WE[w] * jnp.where(inside_BT1, tap_BTE, 0)
        return y_BTE

    @staticmethod
    def ngram_ids(config, number, tokens_BT, positions_BT, before_BK=None) -> jax.Array:
        """Returns `ngram_ids` of the same arguments."""
        return ngram_ids(config, number, tokens_BT, positions_BT, before_BK)

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int) -> dict[str, jax.Array]:
        """Returns the cache before the first token. The cache has space for the last tokens and for
        the last inputs of the convolution. The zeros in the cache are never read as tokens, because
        an n-gram and the convolution look back no further than the start of the document.
        """
        ple = config.ple
        reach, width = (ple.conv_kernel_size - 1) * ple.ngram_size, stream_count(config)
        return {
            "tokens": jnp.zeros((batch, ple.ngram_size - 1), jnp.int32),
            "conv": jnp.zeros((batch, reach, width * config.hidden_size), config.dtype),
        }


def stream_count(config: ModelConfig) -> int:
    """Returns the number of residual streams of the model."""
    return (
        jax.eval_shape(
            lambda x: config.block.import_part("placement").residual_from_embeddings(x, config),
            jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.float32),
        ).shape[-1]
        // config.hidden_size
    )


def _last_entries_for_cache(
    before_BKx: jax.Array, new_BTx: jax.Array, segment_ids_BT: jax.Array | None, each: bool
) -> jax.Array:
    """Appends the new entries to `before`, drops the padding at the right (segment id 0), and
    returns the last K entries [B, K, …].

    Args:
      each: whether to return [B, T, K, …] instead: for each new entry, the K entries that end with
        the new entry.
    """
    kept, time = before_BKx.shape[1], new_BTx.shape[1]
    all_BXx = jnp.concatenate((before_BKx, new_BTx.astype(before_BKx.dtype)), axis=1)
    if each:
        return jnp.stack([all_BXx[:, t : t + kept] for t in range(1, time + 1)], axis=1)
    if segment_ids_BT is None:
        return all_BXx[:, time:]
    count_B = jnp.sum(segment_ids_BT > 0, axis=1)
    return jax.vmap(lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, kept))(all_BXx, count_B)


# ---- hashing


def ngram_ids(
    config: ModelConfig,
    number: int,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    before_BK: jax.Array | None = None,
) -> jax.Array:
    """Returns [B, T, H] int32: for each head, the row of the table for the n-gram that ends at the
    token. The heads of 2-grams come first, then the heads of 3-grams, and so on.

    Args:
      number: index of the embedding among the model's n-gram embeddings.
      tokens_BT: token ids.
      positions_BT: the position of each token in its document.
      before_BK: the ngram_size - 1 tokens before `tokens_BT`; None: there are none.
    """
    ple, time = config.ple, tokens_BT.shape[1]
    factors = ple.hash_multipliers(number, config.vocab_size)
    sizes, offsets = ple.table_rows_per_head(number), ple.head_row_offsets(number)
    reach = ple.ngram_size - 1
    if before_BK is None:
        padded_BX = jnp.pad(tokens_BT, ((0, 0), (reach, 0)))
    else:
        padded_BX = jnp.concatenate((before_BK, tokens_BT), axis=1)
    within_BT = jnp.ones(tokens_BT.shape, bool)
    hashed, ids = None, []
    for back, factor in enumerate(factors):
        token_BT = padded_BX[:, reach - back : reach - back + time]
        if back:
            # An earlier end token, and every token before it, counts as an end token. An end token
            # at the last position of the n-gram (back = 0) has no such effect.
            within_BT &= (positions_BT >= back) & (token_BT != config.eos_token_id)
        product = _token_times_factor(jnp.where(within_BT, token_BT, config.eos_token_id), factor)
        hashed = product if hashed is None else tuple(x ^ y for x, y in zip(hashed, product))
        if back:
            heads = slice((back - 1) * ple.heads_per_ngram, back * ple.heads_per_ngram)
            size_H, offset_H = (np.array(x[heads], np.uint32) for x in (sizes, offsets))
            ids.append(_remainder(hashed, size_H) + offset_H)
    return jnp.concatenate(ids, axis=-1).astype(jnp.int32)


def _token_times_factor(token: jax.Array, factor: int) -> Words:
    """Returns token × factor, for 0 ≤ token < 2^31 and a product less than 2^64."""
    token = token.astype(jnp.uint32)
    high, low = _multiply_32_bits(token, factor % 2**32)
    return high + token * np.uint32(factor >> 32), low


def _multiply_32_bits(a: jax.Array, b: int) -> Words:
    """Returns a × b of two 32-bit numbers, computed from their halves of 16 bits."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = np.uint32(b >> 16), np.uint32(b & 0xFFFF)
    low, middle = a_low * b_low, a_high * b_low
    # Each of the next two sums is at most (2^16 - 1)^2 + 2^16 - 1 < 2^32, so no carry is lost.
    middle += low >> 16
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16), (other << 16) | (low & 0xFFFF)


def _remainder(words: Words, size_H: np.ndarray) -> jax.Array:
    """Returns [..., H] uint32, the remainder of each 64-bit number divided by each size.

    The function computes a long division. Each step of the division appends the next bits of the
    number to the remainder, as many as fit into 32 bits.

    Args:
      words: the numbers [...].
      size_H: the divisors, each less than 2^31.
    """
    step = 32 - int(size_H.max()).bit_length()
    rest = jnp.zeros((*words[0].shape, len(size_H)), jnp.uint32)
    for word in words:
        for begin in range(0, 32, step):
            bits = min(step, 32 - begin)
            piece = (word >> np.uint32(32 - begin - bits)) & np.uint32(2**bits - 1)
            rest = ((rest << np.uint32(bits)) | piece[..., None]) % size_H
    return rest


# ---- reference
# --------------------------------------------------------------------------------------------------


def ngram_ids_reference(config: ModelConfig, number: int, tokens: Any) -> np.ndarray:
    """Returns `ngram_ids` [T, H] of one document, computed with Python's integers."""
    ple, eos = config.ple, config.eos_token_id
    factors = ple.hash_multipliers(number, config.vocab_size)
    sizes, offsets = ple.table_rows_per_head(number), ple.head_row_offsets(number)
    ids = []
    for t in range(len(tokens)):
        seen, hashed, row = [int(tokens[t])], int(tokens[t]) * factors[0], []
        for back in range(1, ple.ngram_size):
            earlier = int(tokens[t - back]) if t >= back else eos
            seen.append(eos if eos in seen[1:] or earlier == eos else earlier)
            hashed ^= seen[-1] * factors[back]
            first = (back - 1) * ple.heads_per_ngram
            for head in range(first, first + ple.heads_per_ngram):
                row.append(hashed % sizes[head] + offsets[head])
        ids.append(row)
    return np.array(ids)
