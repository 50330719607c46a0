"""Drafting with the multi-token prediction module: the trunk verifies several tokens per pass.

One round, for K drafts per row: the trunk runs over the pending token and the drafts; the
leading drafts that it accepts are new tokens, and so is one that it chooses itself; then the
module drafts again. Greedy, a draft is accepted where it is the trunk's own choice, so that the
tokens are those of plain decoding. Sampled (2211.17192), with p the trunk's distribution and q
the one that the draft was drawn from, it is accepted with probability min(1, p/q), and the first
one that is not is replaced by a draw from max(p - q, 0): every token then has the distribution
p, filtered as it is in plain decoding.

What a rejection must undo:
- Attention slots of rejected tokens are simply rewritten: no query sees a slot before the true
  token is in it.
- A recurrent state cannot be taken back. The pass keeps it after each of its K+1 tokens
  (`Mixer.each_token`), and the round goes on
  from the one after the accepted. The other way, to start again from the state before and run
  the accepted tokens once more in front of the next drafts, needs no room but a pass of 2K+1
  tokens; benchmarks/decoding.py prints what either costs.
- The module's entries behind the accepted tokens were made from drafts and its own states. They
  are written over, too, by ones made
  from the trunk's states; so the first draft of a round comes from the trained `mtp_logits` of
  depth 0. Later ones read those entries and their own round's. Training has a depth attend to
  its own entries alone: that takes a cache and a window of positions to run again for each,
  which cost 45 of 556 µs a round with two drafts for as many tokens, and with three gave 0.2 a
  pass more (docs/decoding.md).

Letters: B batch, T time, D model, V vocabulary, K drafts, J = K+1 positions from the pending
token on, N tokens that one call emits at most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.inference.cache import after_token
from qwen3next_jax.inference.plain import Emitted
from qwen3next_jax.inference.sampling import (
    Sampling,
    draw,
    likeliest,
    log_probabilities,
    position_keys,
)
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.layers import Context
from qwen3next_jax.sharding.rules import gather

MOST = 4  # drafts per round
ROUNDS = 32  # of one call at most


class Drafting(NamedTuple):
    """Decoding in progress. Donated to every call that continues it.

    cache, token, position, left: as `plain.Rows`. mtp_cache: the module's, with an entry for
    every token before `position`. drafts: [B, K] int32; log_q: [B, K, V] of the distributions
    they were drawn from, [B, K, 0] where decoding is greedy.
    """

    cache: list
    token: jax.Array
    position: jax.Array
    left: jax.Array
    mtp_cache: dict
    drafts: jax.Array
    log_q: jax.Array


def check(config, drafts: int) -> None:
    """Raises UserError where a model of `config` cannot draft so many tokens."""
    if not 1 <= drafts <= MOST:
        raise UserError(f"speculative = {drafts}: expected 1 … {MOST} drafts, or 0 for none")
    if not config.mtp_depth:
        raise UserError(
            f"speculative = {drafts}: the model has no multi-token prediction module "
            "(model.mtp_depth = 0): expected 0"
        )
    # positions run again, which a state cannot undo
    if mixer_class(config.full_mixer).cache_kind != "slots":
        raise UserError(
            f"speculative = {drafts} with model.full_mixer = {config.full_mixer!r}: expected a "
            "mixer whose cache has a slot for every token, such as gated_attention"
        )


def start(
    model: Qwen3Next, length: int, token_B, position_B, left_B, *, drafts: int, greedy: bool
) -> Drafting:
    """Before the first token, with caches of `length` slots. The first round's drafts are made
    up: token 0, for sure.
    """
    c, batch, of_module = (
        model.config,
        len(token_B),
        mixer_class(model.config.full_mixer).init_cache,
    )
    log_q_V = jnp.where(jnp.arange(0 if greedy else c.vocab_size) == 0, 0.0, -jnp.inf)
    return Drafting(
        model.init_cache(batch, length),
        token_B,
        position_B,
        left_B,
        jax.tree.map(lambda leaf: leaf[None], of_module(c, batch, length)),
        jnp.zeros((batch, drafts), jnp.int32),
        jnp.tile(log_q_V, (batch, drafts, 1)),
    )


def prefill(model: Qwen3Next, mesh, state: Drafting, tokens_BX, begin) -> Drafting:
    """Puts the tokens at positions `begin` … that are below `state.position` into both caches.
    `tokens` [B, T + 1] go on one position further, which the module reads.
    """
    size = tokens_BX.shape[1] - 1
    t_BT = jnp.broadcast_to(begin + jnp.arange(size, dtype=jnp.int32), (len(tokens_BX), size))
    inside_BT = (t_BT < state.position[:, None]).astype(jnp.int32)
    x_BTD, cache = model.decode(
        tokens_BX[:, :size], t_BT, state.cache, inside_BT, mesh, leave=False
    )
    state_BTD = model.mtp.state(x_BTD, model.leave(x_BTD))
    *_, mtp_cache = _predictor(model, mesh)(state_BTD, tokens_BX[:, 1:], t_BT, state.mtp_cache)
    return state._replace(cache=cache, mtp_cache=mtp_cache)


def advance(
    model: Qwen3Next,
    mesh,
    greedy: bool,
    filters: bool,
    state: Drafting,
    rounds,
    stop_ids,
    sampling: Sampling,
    seed,
) -> tuple[Drafting, Emitted]:
    """`rounds` ≤ ROUNDS rounds, fewer where every row has ended."""
    batch, k = state.drafts.shape

    def more(carry):
        step, state, *_ = carry
        return (step < rounds) & jnp.any(state.left > 0)

    def one(carry):
        step, state, emitted = carry
        new_BJ, accepted_B, state_BJD, cache = _verify(
            model, mesh, greedy, filters, state, sampling, seed
        )
        live_B = state.left > 0
        stops_BJ = jnp.isin(new_BJ, stop_ids) & (jnp.arange(k + 1) <= accepted_B[:, None])
        stopped_B = jnp.any(stops_BJ, axis=1)
        emits_B = jnp.where(stopped_B, jnp.argmax(stops_BJ, axis=1), accepted_B + 1)
        emits_B = jnp.minimum(emits_B, state.left)
        offset_BJ = jnp.broadcast_to(jnp.arange(k + 1), new_BJ.shape)
        place_BJ = jnp.where(
            offset_BJ < emits_B[:, None],
            emitted.count[:, None] + offset_BJ,
            emitted.tokens.shape[1],
        )
        counts_K = jnp.sum(live_B[:, None] & (accepted_B[:, None] > jnp.arange(k)), axis=0)
        emitted = Emitted(
            _put(emitted.tokens, place_BJ, new_BJ),
            emitted.count + emits_B,
            emitted.passes + jnp.sum(live_B),
            emitted.accepted + counts_K,
        )
        drafted = _draft(
            model,
            mesh,
            greedy,
            filters,
            state._replace(cache=cache),
            state_BJD,
            new_BJ,
            accepted_B,
            sampling,
            seed,
        )
        # A finished row stays where it is, in slots that nobody reads.
        position_B = jnp.where(live_B, state.position + accepted_B + 1, state.position)
        left_B = jnp.where(stopped_B, 0, state.left - emits_B)
        token_B = _take(new_BJ, accepted_B[:, None])[:, 0]
        return step + 1, drafted._replace(token=token_B, position=position_B, left=left_B), emitted

    zero_B = jnp.zeros(batch, jnp.int32)
    nothing = Emitted(
        jnp.zeros((batch, ROUNDS * (k + 1)), jnp.int32), zero_B, 0, jnp.zeros(k, jnp.int32)
    )
    return jax.lax.while_loop(more, one, (0, state, nothing))[1:]


def _verify(
    model: Qwen3Next, mesh, greedy: bool, filters: bool, state: Drafting, sampling: Sampling, seed
):
    """→ (tokens [B, J] that follow the pending one, right up to index `accepted`; accepted [B];
    trunk states [B, J, D] for the module from the pending token on; the cache after the accepted
    drafts).
    """
    k = state.drafts.shape[1]
    offset_J = jnp.arange(k + 1, dtype=jnp.int32)
    tokens_BJ = jnp.concatenate((state.token[:, None], state.drafts), axis=1)
    x_BJD, cache = model.decode(
        tokens_BJ,
        state.position[:, None] + offset_J,
        state.cache,
        mesh=mesh,
        each=True,
        leave=False,
    )
    hidden_BJD = model.leave(x_BJD)
    logits_BJV = model.logits(hidden_BJD)
    if greedy:
        new_BJ = likeliest(logits_BJV)
        accepted_B = _leading(new_BJ[:, :k] == state.drafts)
    else:
        log_p_BJV = log_probabilities(logits_BJV, sampling, filters)
        log_ratio_BK = _of_token(log_p_BJV[:, :k], state.drafts) - _of_token(
            state.log_q, state.drafts
        )
        u_BK = jnp.stack(
            [
                jax.vmap(jax.random.uniform)(position_keys(seed, state.position + 1 + d, 1))
                for d in range(k)
            ],
            axis=1,
        )
        accepted_B = _leading(jnp.log(u_BK) < log_ratio_BK)
        # no draft stands behind the last
        log_q_BJV = jnp.pad(state.log_q, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
        p_BV, q_BV = (jnp.exp(_take(x, accepted_B[:, None])[:, 0]) for x in (log_p_BJV, log_q_BJV))
        rest_BV = jnp.maximum(p_BV - q_BV, 0)
        # p = q but for rounding
        rest_BV = jnp.where(jnp.sum(rest_BV, axis=-1, keepdims=True) > 0, rest_BV, p_BV)
        own_B = draw(jnp.log(rest_BV), seed, state.position + 1 + accepted_B, purpose=2)
        drafts_BJ = jnp.pad(state.drafts, ((0, 0), (0, 1)))
        new_BJ = jnp.where(offset_J < accepted_B[:, None], drafts_BJ, own_B[:, None])
    state_BJD = model.mtp.state(x_BJD, hidden_BJD)
    return new_BJ, accepted_B, state_BJD, after_token(model.config, cache, accepted_B)


def _draft(
    model: Qwen3Next,
    mesh,
    greedy: bool,
    filters: bool,
    state: Drafting,
    state_BJD,
    new_BJ,
    accepted_B,
    sampling: Sampling,
    seed,
) -> Drafting:
    """Drafts from behind the accepted tokens: the module reads the trunk's states, then from
    draft to draft its own.
    """
    k = state.drafts.shape[1]
    predict = _predictor(model, mesh)
    t_BJ = state.position[:, None] + jnp.arange(k + 1, dtype=jnp.int32)
    # Of the accepted tokens only keys and values are needed: XLA leaves the rest of this call out.
    *_, cache = predict(state_BJD, new_BJ, t_BJ, state.mtp_cache)
    state_B1D, token_B1, t_B1 = (_take(x, accepted_B[:, None]) for x in (state_BJD, new_BJ, t_BJ))
    drafts, log_q = [], []
    for d in range(k):
        hidden_B1D, state_B1D, cache = predict(state_B1D, token_B1, t_B1 + d, cache)
        logits_BV = model.logits(hidden_B1D[:, 0])
        if greedy:
            draft_B, log_q_BV = likeliest(logits_BV), state.log_q[:, d]
        else:
            log_q_BV = log_probabilities(logits_BV, sampling, filters)
            draft_B = draw(log_q_BV, seed, state.position + accepted_B + 2 + d, purpose=3)
        token_B1 = draft_B[:, None]
        drafts.append(draft_B)
        log_q.append(log_q_BV)
    return state._replace(
        mtp_cache=cache, drafts=jnp.stack(drafts, axis=1), log_q=jnp.stack(log_q, axis=1)
    )


def _predictor(model: Qwen3Next, mesh):
    """One depth of the module: (states [B, T, D], tokens beside them [B, T], positions [B, T],
    cache) → (normed states for the head, states for the next depth, cache).
    """
    graphdef, params = nnx.split(model.mtp)
    module = nnx.merge(graphdef, gather(params, mesh, model.config.dtype))

    def predict(state_BTD, tokens_BT, t_BT, cache):
        in_place = mixer_class(model.config.full_mixer).in_place
        cache = cache if in_place else jax.tree.map(lambda leaf: leaf[0], cache)
        hidden_BTD, state_BTD, _, cache = module(
            state_BTD,
            model.embed(tokens_BT, mesh, time=None),
            Context(t_BT, mesh=mesh, time=None),
            cache,
        )
        cache = cache if in_place else jax.tree.map(lambda leaf: leaf[None], cache)
        return hidden_BTD, state_BTD, cache

    return predict


def _leading(accepted_BK) -> jax.Array:
    """[B]: how many are accepted before the first that is not."""
    return jnp.sum(jnp.cumprod(accepted_BK.astype(jnp.int32), axis=1), axis=1)


def _of_token(x_BKV, token_BK) -> jax.Array:
    return jnp.take_along_axis(x_BKV, token_BK[..., None], axis=-1)[..., 0]


def _take(x, index_BT):
    """x [B, S, …] at `index_BT` → [B, T, …]; indices outside are moved to the nearest end."""
    index_BT = jnp.clip(index_BT, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index_BT.reshape(*index_BT.shape, *(1,) * (x.ndim - 2)), axis=1)


def _put(x_BL, index_BT, value_BT):
    return x_BL.at[jnp.arange(len(x_BL))[:, None], index_BT].set(value_BT, mode="drop")
