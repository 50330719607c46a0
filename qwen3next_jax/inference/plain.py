"""Decoding without drafts: each pass of the model gives one token per row.

Every row has one pending token, which is known but not in the cache yet. Prefill writes all tokens
of a prompt except the last into the cache; the last token of the prompt is the first pending token.
A step writes the pending token into the cache and chooses the next pending token. A prompt of one
token therefore needs no prefill, and the same program decodes rows of any lengths.

Letters: B batch, T time, D model, V vocabulary, N the most tokens that one call generates per row,
L layers without the multi-token prediction module, A experts per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.inference.sampling import (
    Sampling,
    argmax_token,
    log_probabilities,
    sample_token,
)
from qwen3next_jax.model import Qwen3Next

# The most steps of one call. A call takes several steps, because the overhead of a call is as large
# as several steps of a small model.
MAX_STEPS = 64


class DecodeState(NamedTuple):
    """The state of decoding without drafts. Every call donates the state's memory and returns the
    next state.

    Attributes:
      cache: the caches of all layers (`Qwen3Next.init_cache`), with the tokens before
        `pending_position`.
      pending_token: [B] int32, the token of each row that is known, but not in the cache yet.
      pending_position: [B] int32, the position of the pending token.
      remaining_tokens: [B] int32, the most tokens that each row may still get; 0 once the row has
        ended.
      recorded_experts: [B, slots, L, A] int16, the experts to which the tokens before
        `pending_position` were routed (see `Features`); None unless they are recorded.
    """

    cache: list
    pending_token: jax.Array
    pending_position: jax.Array
    remaining_tokens: jax.Array
    recorded_experts: jax.Array | None = None


class EmittedTokens(NamedTuple):
    """The tokens that one call generated.

    Attributes:
      tokens: [B, N] int32.
      token_counts: [B] int32, the number n of tokens that each row got: the first n entries of its
        row of `tokens`. The entries after the first n have no meaning.
      model_passes: [] int32, number of passes through the model; a pass with n active rows counts n
        times.
      accepted_drafts: [K] int32, for each MTP depth the number of accepted drafts; K = 0 without
        drafts.
    """

    tokens: jax.Array
    token_counts: jax.Array
    model_passes: jax.Array
    accepted_drafts: jax.Array


def init_state(
    model: Qwen3Next,
    length: int,
    token_B: jax.Array,
    position_B: jax.Array,
    remaining_B: jax.Array,
    *,
    record_routing: bool = False,
) -> DecodeState:
    """Returns the decoding state before the first token, with a cache of `length` slots.
    `record_routing`: whether the state records the experts to which tokens are routed.
    """
    config, routing = model.config, None
    if record_routing:
        shape = (len(token_B), length, config.num_hidden_layers, config.num_experts_per_tok)
        routing = jnp.full(shape, -1, jnp.int16)
    cache = model.init_cache(len(token_B), length)
    return DecodeState(cache, token_B, position_B, remaining_B, routing)


def _run_model(
    model: Qwen3Next,
    mesh: Mesh | None,
    state: DecodeState,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    is_token_BT: jax.Array | None = None,
) -> tuple[jax.Array, DecodeState]:
    """Runs the model (`Qwen3Next.decode`) on tokens. Returns the model's hidden states [B, T, D],
    and the decoding state with the cache and the recorded experts after these tokens.

    Args:
      is_token_BT: [B, T] int32, 1 for a token to process, 0 for a place to ignore; None: all tokens
        are processed.
    """
    arguments = tokens_BT, positions_BT, state.cache, is_token_BT, mesh
    if state.recorded_experts is None:
        hidden_BTD, cache = model.decode(*arguments)
        return hidden_BTD, state._replace(cache=cache)
    hidden_BTD, cache, new_BTLA = model.decode(*arguments, record_routing=True)
    row_B1 = jnp.arange(len(tokens_BT))[:, None]
    routing = state.recorded_experts.at[row_B1, positions_BT].set(new_BTLA)
    return hidden_BTD, state._replace(cache=cache, recorded_experts=routing)


def prefill(
    model: Qwen3Next, mesh: Mesh | None, state: DecodeState, tokens_BT: jax.Array, begin
) -> DecodeState:
    """Runs the model on the tokens [B, T] of a chunk of the prompts, which writes them into the
    cache. The chunk begins at position `begin`. In each row, only the tokens before the pending
    token are written to the cache.
    """
    positions_BT = jnp.broadcast_to(
        begin + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    is_token_BT = (positions_BT < state.pending_position[:, None]).astype(jnp.int32)
    return _run_model(model, mesh, state, tokens_BT, positions_BT, is_token_BT)[1]


def advance(
    model: Qwen3Next,
    mesh: Mesh | None,
    greedy: bool,
    filters: bool,
    state: DecodeState,
    steps: jax.Array,
    stop_ids: jax.Array,
    sampling: Sampling,
    seed: jax.Array,
) -> tuple[DecodeState, EmittedTokens]:
    """Takes `steps` decoding steps, or fewer if every row ends before. `steps` must be at most
    MAX_STEPS.

    Args:
      model: the model.
      mesh: the devices; None: one device.
      greedy: whether every step takes the most likely token.
      filters: whether `sampling` has a top_k, top_p or min_p.
      state: the state before the call.
      steps: [] int32, the number of steps.
      stop_ids: [n] int32; a row ends when one of these token ids is chosen. The stop token is not
        emitted.
      sampling: how tokens are sampled.
      seed: [] uint32, the seed of the samples.

    Returns:
      The state after the call; the generated tokens.
    """

    def any_active(carry):
        step, state, *_ = carry
        return (step < steps) & jnp.any(state.remaining_tokens > 0)

    def take_step(carry):
        step, state, tokens_BN, count_B, passes = carry
        hidden_B1D, state = _run_model(
            model, mesh, state, state.pending_token[:, None], state.pending_position[:, None]
        )
        logits_BV = model.logits(hidden_B1D[:, 0])
        if greedy:
            next_B = argmax_token(logits_BV)
        else:
            log_p_BV = log_probabilities(logits_BV, sampling, filters)
            next_B = sample_token(log_p_BV, seed, state.pending_position + 1)
        active_B = state.remaining_tokens > 0
        emits_B = active_B & ~jnp.isin(next_B, stop_ids)
        # A row that has ended repeats its last step, so that it writes to the same slots again.
        state = state._replace(
            pending_token=jnp.where(emits_B, next_B, state.pending_token),
            pending_position=state.pending_position + emits_B,
            remaining_tokens=jnp.where(emits_B, state.remaining_tokens - 1, 0),
        )
        return (
            step + 1,
            state,
            tokens_BN.at[:, step].set(next_B),
            count_B + emits_B,
            passes + jnp.sum(active_B),
        )

    batch = len(state.pending_token)
    tokens_BN, count_B = jnp.zeros((batch, MAX_STEPS), jnp.int32), jnp.zeros(batch, jnp.int32)
    _, state, *emitted = jax.lax.while_loop(
        any_active, take_step, (0, state, tokens_BN, count_B, 0)
    )
    return state, EmittedTokens(*emitted, jnp.zeros(0, jnp.int32))
