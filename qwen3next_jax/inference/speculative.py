"""Drafting with the multi-token prediction module: greedy decoding that verifies several tokens per trunk call.

One round, for k = mtp_depth drafts per row: the trunk runs once over the pending token and the drafts; its own greedy
choices accept the leading drafts that match, and give one token more; the MTP module then drafts again. The tokens are
those of plain greedy decoding, whatever the drafts are.

What a rejection must undo:
- Attention slots of rejected tokens are simply rewritten: no query sees a slot before the true token is in it.
- A recurrent state cannot be taken back. The state from before the block stays in use, and the tokens accepted since
  (at most k) are put before the next block's drafts, to run through the layers again. So a round is always one
  trunk call, of 2k+1 tokens with padding at the end, and every row goes its own way; a second call that re-advances the
  accepted tokens would double the weights read per rejection, and a state per draft would keep k+1 of the largest tensors
  of the cache. Once a row lags by 2k it spends a round without drafts, in which nothing can be rejected.
- The MTP module's entries at depth d were made from drafts where token t+1+d was one. The last 2k positions run again
  through every depth each round, by when all tokens that are not drafts are known. So each depth's cache holds what
  training computed, and each draft comes from the trained `mtp_logits`.

Letters: B batch, T time, D model, V vocabulary, K = mtp_depth, W = 2K positions that the module runs over, L slots.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.errors import UserError
from qwen3next_jax.inference.cache import rounded_length, select_recurrent
from qwen3next_jax.inference.decode import check_request, prompt_chunks
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.layers import Context


class Drafting(NamedTuple):
    """Speculative decoding in progress.

    tokens: [B, L] int32: known up to `position`, then K drafts.
    position: [B] int32 of the pending token, the last one known.
    lag: [B] int32: the recurrent states hold the tokens before `position - lag`.
    earlier: [B, K-1, D], the trunk's states at the positions just before the pending token.
    cache, mtp_caches: the trunk's, and one per depth.
    draft_logits: [B, K, V], what the drafts were taken from.
    """

    tokens: jax.Array
    position: jax.Array
    lag: jax.Array
    earlier: jax.Array
    cache: list
    mtp_caches: list
    draft_logits: jax.Array


class Round(NamedTuple):
    """tokens [B, K+1]: the trunk's choices, of which the first `accepted` + 1 are new; proposed, accepted: [B] drafts."""

    tokens: jax.Array
    proposed: jax.Array
    accepted: jax.Array


class Speculation(NamedTuple):
    """tokens: the new tokens of every row. trunk_calls: rounds taken. proposed, accepted: per depth, how many drafts were
    verified and how many matched together with all shallower ones, summed over rows."""

    tokens: list[np.ndarray]
    trunk_calls: int
    proposed: np.ndarray
    accepted: np.ndarray


def speculative_generate(model: Qwen3Next, prompts: Sequence[np.ndarray], *, max_new_tokens: int,
                         stop_ids: Sequence[int] = ()) -> Speculation:
    """Continues every prompt greedily, exactly as `decode.complete` at temperature 0 does.

    Args and errors: as `decode.generate`. The model must have an MTP module.
    """
    prompts = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    check_request(model.config, prompts, max_new_tokens, temperature=0.0)
    if not model.config.mtp_depth:
        raise UserError("speculative decoding needs a multi-token prediction module: expected model.mtp_depth ≥ 1")
    graphdef, params = nnx.split(model)
    state = start(model, prompts, max_new_tokens)
    depth = model.config.mtp_depth
    rows: list[list[int]] = [[] for _ in prompts]
    live = [True] * len(prompts)
    proposed, accepted = np.zeros(depth, int), np.zeros(depth, int)
    calls = 0
    while any(live):
        state, step = _round_program(graphdef)(params, state, np.array(live))
        step = jax.device_get(step)
        calls += 1
        for i in np.flatnonzero(live):
            if calls > 1:  # the first round has no drafts yet
                proposed += np.arange(depth) < step.proposed[i]
                accepted += np.arange(depth) < step.accepted[i]
            for token in step.tokens[i, :step.accepted[i] + 1]:
                live[i] = token not in stop_ids and len(rows[i]) < max_new_tokens
                if not live[i]:
                    break
                rows[i].append(int(token))
            live[i] = live[i] and len(rows[i]) < max_new_tokens
    return Speculation([np.array(row, np.int32) for row in rows], calls, proposed, accepted)


def start(model: Qwen3Next, prompts: list[np.ndarray], max_new_tokens: int) -> Drafting:
    """Prefills all but the last token of each prompt, in the trunk and in every depth of the MTP module."""
    c, batch, depth = model.config, len(prompts), model.config.mtp_depth
    longest = max(map(len, prompts))
    length = rounded_length(longest + max_new_tokens + depth)
    tokens_BL = np.zeros((batch, length), np.int32)
    for row, prompt in zip(tokens_BL, prompts):
        row[:len(prompt)] = prompt
    position_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    state = Drafting(jnp.asarray(tokens_BL), jnp.asarray(position_B), jnp.zeros(batch, jnp.int32),
                     jnp.zeros((batch, depth - 1, c.hidden_size), c.dtype), model.init_cache(batch, length),
                     [mixer_class(c.full_mixer).init_cache(c, batch, length) for _ in range(depth)],
                     jnp.zeros((batch, depth, c.vocab_size), jnp.float32))
    graphdef, params = nnx.split(model)
    for begin, tokens_BT in prompt_chunks(prompts):
        state = _prefill_program(graphdef)(params, state, begin, tokens_BT.shape[1])
    return state


@functools.lru_cache(maxsize=8)
def _prefill_program(graphdef: nnx.GraphDef):
    return jax.jit(functools.partial(_prefill, graphdef), donate_argnums=1, static_argnums=3)


@functools.lru_cache(maxsize=8)
def _round_program(graphdef: nnx.GraphDef):
    return jax.jit(functools.partial(_round, graphdef), donate_argnums=1)


def _prefill(graphdef, params, state: Drafting, begin, size: int) -> Drafting:
    model = nnx.merge(graphdef, params)
    batch = len(state.tokens)
    t_BT = jnp.broadcast_to(begin + jnp.arange(size, dtype=jnp.int32), (batch, size))
    hidden_BTD, cache = model.decode(_take(state.tokens, t_BT), t_BT, state.cache,
                                     (t_BT < state.position[:, None]).astype(jnp.int32))
    wanted_BK = state.position[:, None] + jnp.arange(1 - model.config.mtp_depth, 0)
    inside_BK1 = ((wanted_BK >= begin) & (wanted_BK < begin + size))[..., None]
    earlier = jnp.where(inside_BK1, _take(hidden_BTD, wanted_BK - begin), state.earlier)
    caches = []
    for depth, mtp_cache in enumerate(state.mtp_caches):
        # The last 1+d entries of a row read tokens not known yet; the first round runs over these positions again.
        hidden_BTD, _, mtp_cache = model.mtp(hidden_BTD, model.embed(_take(state.tokens, t_BT + 1 + depth)),
                                             Context(t_BT), mtp_cache)
        caches.append(mtp_cache)
    return state._replace(earlier=earlier, cache=cache, mtp_caches=caches)


def _round(graphdef, params, state: Drafting, live_B) -> tuple[Drafting, Round]:
    """Verifies the drafts, takes the trunk's next token, drafts again. Rows that are not live stay as they are."""
    model = nnx.merge(graphdef, params)
    state, step, hidden_BTD = _verify(model, state, live_B)
    return _draft(model, state, hidden_BTD, jnp.where(live_B, step.accepted, -1)), step


def _verify(model: Qwen3Next, state: Drafting, live_B) -> tuple[Drafting, Round, jax.Array]:
    """→ (state whose `position` is still the old one but whose `tokens` hold the new ones, round, trunk states
    [B, K+1, D] from `position` on)."""
    depth = model.config.mtp_depth
    size = 2 * depth + 1
    proposed_B = jnp.minimum(depth, size - 1 - state.lag)
    offset_BT = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (len(state.tokens), size))
    t_BT = (state.position - state.lag)[:, None] + offset_BT
    valid_BT = offset_BT <= (state.lag + proposed_B)[:, None]
    hidden_BTD, cache = model.decode(_take(state.tokens, t_BT), t_BT, state.cache, valid_BT.astype(jnp.int32))

    drafts_BK = _take(state.tokens, state.position[:, None] + jnp.arange(1, depth + 1))
    hidden_BJD = _take(hidden_BTD, state.lag[:, None] + jnp.arange(depth + 1))  # J = K+1 positions from the pending one on
    choice_BJ = jnp.argmax(model.logits(hidden_BJD), axis=-1).astype(jnp.int32)
    match_BK = (choice_BJ[:, :depth] == drafts_BK) & (jnp.arange(depth) < proposed_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(match_BK.astype(jnp.int32), axis=1), axis=1)

    complete_B = accepted_B == proposed_B
    cache = select_recurrent(model.config, complete_B & live_B, cache, state.cache)
    lag_B = jnp.where(complete_B, 0, state.lag + accepted_B + 1)
    state = state._replace(tokens=_put(state.tokens, state.position[:, None] + jnp.arange(1, depth + 2), choice_BJ),
                           lag=jnp.where(live_B, lag_B, state.lag), cache=cache)
    return state, Round(choice_BJ, proposed_B, accepted_B), hidden_BJD


def _draft(model: Qwen3Next, state: Drafting, hidden_BJD, accepted_B) -> Drafting:
    """Moves on by `accepted_B` + 1 tokens and drafts from there."""
    depth = model.config.mtp_depth
    t_BW = state.position[:, None] + jnp.arange(1 - depth, depth + 1)
    # Positions before the prompt get a slot past the end, where writes are dropped.
    slot_BW = jnp.where(t_BW < 0, state.tokens.shape[1], t_BW)
    hidden_BWD = jnp.concatenate((state.earlier, hidden_BJD), axis=1)
    position_B = state.position + accepted_B + 1
    earlier = _take(hidden_BWD, (accepted_B + 1)[:, None] + jnp.arange(depth - 1))
    tokens, caches, logits = state.tokens, [], []
    for d, mtp_cache in enumerate(state.mtp_caches):
        hidden_BWD, _, mtp_cache = model.mtp(hidden_BWD, model.embed(_take(tokens, t_BW + 1 + d)), Context(slot_BW), mtp_cache)
        last_BD = _take(hidden_BWD, (depth - 1 + accepted_B)[:, None])[:, 0]  # at the last position whose next token is known
        logits_BV = model.logits(last_BD)
        draft_B1 = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)[:, None]
        tokens = _put(tokens, (position_B + 1 + d)[:, None], draft_B1)
        caches.append(mtp_cache)
        logits.append(logits_BV)
    return state._replace(tokens=tokens, position=position_B, earlier=earlier, mtp_caches=caches,
                          draft_logits=jnp.stack(logits, axis=1))


def _take(x, index_BT):
    """x [B, S, …] at `index_BT` → [B, T, …]; indices outside are moved to the nearest end."""
    index_BT = jnp.clip(index_BT, 0, x.shape[1] - 1) if x.shape[1] else index_BT
    return jnp.take_along_axis(x, index_BT.reshape(*index_BT.shape, *(1,) * (x.ndim - 2)), axis=1)


def _put(x_BL, index_BT, value_BT):
    return x_BL.at[jnp.arange(len(x_BL))[:, None], index_BT].set(value_BT, mode="drop")
