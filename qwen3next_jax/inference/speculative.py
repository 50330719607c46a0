"""Speculative decoding: the multi-token prediction (MTP) module drafts tokens, and one pass of the
trunk (the model without this module) verifies several drafts.

A round with K drafts per row has three steps:
1. The trunk processes the pending token and the K drafts in one pass.
2. The trunk accepts the drafts before the first rejected draft, and chooses one more token itself.
   The accepted drafts and the trunk's own token are the round's new tokens.
3. The module drafts the next K tokens.

Greedy decoding accepts a draft if it is the trunk's own most likely token, so the tokens are the
same as without drafts. Sampling follows "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192): let p be the trunk's distribution, and q the distribution from which the draft
was sampled. The draft is accepted with probability min(1, p/q). The first rejected draft is
replaced by a sample from max(p - q, 0), normalized. With this rule, every token has the
distribution p, with the same filters as without drafts.

A rejected draft has already changed the caches:
- Attention layers: the slot of a rejected draft is overwritten with the right token before any
  query sees the slot.
- Recurrent layers: a state update cannot be undone. The trunk's pass therefore returns the state
  after each of its K+1 tokens (`Mixer.call_returning_all_states`), and the next round continues
  from the state after the last accepted token. An alternative would process the accepted tokens
  again from the state before the round. The alternative needs no memory for the states, but passes
  of 2K+1 tokens; `benchmarks/inference/decoding.py --part=replay` measures both methods.
- The MTP module: while the module drafts, it computes the cache entries of drafts from its own
  hidden states. For the accepted tokens, the next round overwrites the entries of the module with
  entries computed from the trunk's hidden states. The module therefore makes the first draft of a
  round under the same conditions as at depth 0 in training. The later drafts attend to the entries
  of accepted tokens and to the entries of the same round; in training, each depth attends only to
  its own entries. A cache for each depth would give the drafts the conditions of training, but it
  would take more time than the additional accepted drafts save (docs/notes/cpu.md).

Letters: B batch, T time, X = T + 1, D model, V vocabulary, K drafts, J = K + 1 positions from the
pending token on, N the most tokens that one call generates per row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.inference.cache import roll_back_cache
from qwen3next_jax.inference.plain import EmittedTokens
from qwen3next_jax.inference.sampling import (
    ACCEPT,
    DRAFT,
    RESAMPLE,
    Sampling,
    argmax_token,
    log_probabilities,
    random_keys,
    sample_token,
)
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context
from qwen3next_jax.sharding.rules import gather_params

MAX_DRAFTS = 4  # the most drafts per round
MAX_ROUNDS = 32  # the most rounds of one call


class DraftState(NamedTuple):
    """The state of decoding with drafts. Every call donates the state's memory and returns the next
    state.

    Attributes:
      cache, pending_token, pending_position, remaining_tokens: the attributes of
        `plain.DecodeState`.
      mtp_cache: the cache of the MTP module, with an entry for every token before
        `pending_position`.
      drafts: [B, K] int32, drafts of the K tokens after the pending token.
      log_q: [B, K, V], the log-probabilities from which the drafts were sampled; [B, K, 0] in
        greedy decoding.
    """

    cache: list
    pending_token: jax.Array
    pending_position: jax.Array
    remaining_tokens: jax.Array
    mtp_cache: dict
    drafts: jax.Array
    log_q: jax.Array


def check_drafts(config: ModelConfig, drafts: int) -> None:
    """Checks that a model of this config can draft `drafts` tokens per round.

    Raises:
      UserError: `drafts` is out of range, or the model cannot draft.
    """
    if not 1 <= drafts <= MAX_DRAFTS:
        raise UserError(f"speculative = {drafts}: expected 1 … {MAX_DRAFTS} drafts, or 0 for none")
    if not config.mtp_depth:
        raise UserError(
            f"speculative = {drafts}: the model has no multi-token prediction module "
            "(model.mtp_depth = 0): expected 0"
        )
    # The module writes the cache entries of a position more than once. This is possible only in a
    # cache with slots.
    if mixer_class(config.full_mixer).cache_kind != "slots":
        raise UserError(
            f"speculative = {drafts} with model.full_mixer = {config.full_mixer!r}: expected a "
            "mixer whose cache has a slot for every token, such as gated_attention"
        )


def init_state(
    model: Qwen3Next,
    length: int,
    token_B: jax.Array,
    position_B: jax.Array,
    remaining_B: jax.Array,
    *,
    drafts: int,
    greedy: bool,
) -> DraftState:
    """Returns the decoding state before the first token, with caches of `length` slots.

    The drafts of the first round do not come from the MTP module: every draft is token 0, as if
    sampled with probability 1.
    """
    config, batch = model.config, len(token_B)
    mtp_cache = mixer_class(config.full_mixer).init_cache(config, batch, length)
    log_q_V = jnp.where(jnp.arange(0 if greedy else config.vocab_size) == 0, 0.0, -jnp.inf)
    return DraftState(
        model.init_cache(batch, length),
        token_B,
        position_B,
        remaining_B,
        jax.tree.map(lambda leaf: leaf[None], mtp_cache),
        jnp.zeros((batch, drafts), jnp.int32),
        jnp.tile(log_q_V, (batch, drafts, 1)),
    )


def prefill(
    model: Qwen3Next, mesh: Mesh | None, state: DraftState, tokens_BX: jax.Array, begin
) -> DraftState:
    """Writes a chunk of the prompts into the caches of the trunk and of the MTP module. The chunk
    begins at position `begin`. In each row, the trunk's cache gets only the tokens before the
    pending token.

    Args:
      model: the model.
      mesh: the devices; None: one device.
      state: the state before the call.
      tokens_BX: [B, T + 1], the T tokens of the chunk and the token after them, which the MTP
        module reads.
      begin: the position of the chunk's first token.
    """
    size = tokens_BX.shape[1] - 1
    t_BT = jnp.broadcast_to(begin + jnp.arange(size, dtype=jnp.int32), (len(tokens_BX), size))
    is_token_BT = (t_BT < state.pending_position[:, None]).astype(jnp.int32)
    x_BTD, cache = model.decode(
        tokens_BX[:, :size], t_BT, state.cache, is_token_BT, mesh, final_norm=False
    )
    state_BTD = model.mtp.next_depth_state(x_BTD, model.head_input(x_BTD))
    run_mtp = _make_run_mtp(model, mesh)
    *_, mtp_cache = run_mtp(state_BTD, tokens_BX[:, 1:], t_BT, state.mtp_cache)
    return state._replace(cache=cache, mtp_cache=mtp_cache)


def advance(
    model: Qwen3Next,
    mesh: Mesh | None,
    greedy: bool,
    filters: bool,
    state: DraftState,
    rounds: jax.Array,
    stop_ids: jax.Array,
    sampling: Sampling,
    seed: jax.Array,
) -> tuple[DraftState, EmittedTokens]:
    """Takes `rounds` rounds of drafting and verifying, or fewer if every row ends before. `rounds`
    must be at most MAX_ROUNDS.

    All arguments except `rounds`, and the results, are those of `plain.advance`.
    """
    batch, k = state.drafts.shape

    def any_active(carry):
        step, state, *_ = carry
        return (step < rounds) & jnp.any(state.remaining_tokens > 0)

    def take_round(carry):
        step, state, emitted = carry
        new_BJ, accepted_B, state_BJD, cache = _verify_drafts(
            model, mesh, greedy, filters, state, sampling, seed
        )
        active_B = state.remaining_tokens > 0
        is_stop_BJ = jnp.isin(new_BJ, stop_ids) & (jnp.arange(k + 1) <= accepted_B[:, None])
        stopped_B = jnp.any(is_stop_BJ, axis=1)
        count_B = jnp.where(stopped_B, jnp.argmax(is_stop_BJ, axis=1), accepted_B + 1)
        count_B = jnp.minimum(count_B, state.remaining_tokens)
        offset_BJ = jnp.broadcast_to(jnp.arange(k + 1), new_BJ.shape)
        # Tokens that are not emitted get an index past the end, and are dropped.
        index_BJ = jnp.where(
            offset_BJ < count_B[:, None],
            emitted.token_counts[:, None] + offset_BJ,
            emitted.tokens.shape[1],
        )
        accepted_K = jnp.sum(active_B[:, None] & (accepted_B[:, None] > jnp.arange(k)), axis=0)
        emitted = EmittedTokens(
            _scatter_tokens(emitted.tokens, index_BJ, new_BJ),
            emitted.token_counts + count_B,
            emitted.model_passes + jnp.sum(active_B),
            emitted.accepted_drafts + accepted_K,
        )
        drafted = _draft_next_tokens(
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
        # A row that has ended keeps its position, so it only overwrites slots that nobody reads any
        # more.
        state = drafted._replace(
            pending_token=_gather_positions(new_BJ, accepted_B[:, None])[:, 0],
            pending_position=jnp.where(
                active_B, state.pending_position + accepted_B + 1, state.pending_position
            ),
            remaining_tokens=jnp.where(stopped_B, 0, state.remaining_tokens - count_B),
        )
        return step + 1, state, emitted

    nothing = EmittedTokens(
        tokens=jnp.zeros((batch, MAX_ROUNDS * (k + 1)), jnp.int32),
        token_counts=jnp.zeros(batch, jnp.int32),
        model_passes=0,
        accepted_drafts=jnp.zeros(k, jnp.int32),
    )
    return jax.lax.while_loop(any_active, take_round, (0, state, nothing))[1:]


def _verify_drafts(
    model: Qwen3Next,
    mesh: Mesh | None,
    greedy: bool,
    filters: bool,
    state: DraftState,
    sampling: Sampling,
    seed: jax.Array,
):
    """Runs the trunk over the pending token and the drafts, and decides which drafts are accepted.

    Returns:
      new tokens [B, J] after the pending token, of which the first accepted + 1 are valid;
      accepted [B], the number of accepted drafts;
      the trunk's hidden states [B, J, D] for the MTP module, from the pending token on;
      the cache after the accepted drafts.
    """
    k = state.drafts.shape[1]
    offset_J = jnp.arange(k + 1, dtype=jnp.int32)
    tokens_BJ = jnp.concatenate((state.pending_token[:, None], state.drafts), axis=1)
    x_BJD, cache = model.decode(
        tokens_BJ,
        state.pending_position[:, None] + offset_J,
        state.cache,
        mesh=mesh,
        return_all_states=True,
        final_norm=False,
    )
    hidden_BJD = model.head_input(x_BJD)
    logits_BJV = model.logits(hidden_BJD)
    if greedy:
        new_BJ = argmax_token(logits_BJV)
        accepted_B = _count_leading_accepted(new_BJ[:, :k] == state.drafts)
    else:
        log_p_BJV = log_probabilities(logits_BJV, sampling, filters)
        new_BJ, accepted_B = _accept_samples(state, log_p_BJV, seed)
    state_BJD = model.mtp.next_depth_state(x_BJD, hidden_BJD)
    return new_BJ, accepted_B, state_BJD, roll_back_cache(model.config, cache, accepted_B)


def _accept_samples(
    state: DraftState, log_p_BJV: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts or rejects sampled drafts, given the trunk's log-probabilities.

    Returns:
      new tokens [B, J]: the accepted drafts, then one more token (which also fills the rest of the
      row); accepted [B], the number of accepted drafts.
    """
    k = state.drafts.shape[1]
    log_p_of_draft_BK = _gather_token_entries(log_p_BJV[:, :k], state.drafts)
    log_ratio_BK = log_p_of_draft_BK - _gather_token_entries(state.log_q, state.drafts)
    u_BK = jnp.stack(
        [
            jax.vmap(jax.random.uniform)(random_keys(seed, state.pending_position + 1 + d, ACCEPT))
            for d in range(k)
        ],
        axis=1,
    )
    accepted_B = _count_leading_accepted(jnp.log(u_BK) < log_ratio_BK)
    # If all drafts are accepted, no draft was rejected, and one more token is sampled from p. This
    # is the same formula with q = 0.
    log_q_BJV = jnp.pad(state.log_q, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
    p_BV, q_BV = (
        jnp.exp(_gather_positions(x, accepted_B[:, None])[:, 0]) for x in (log_p_BJV, log_q_BJV)
    )
    residual_BV = jnp.maximum(p_BV - q_BV, 0)
    # max(p - q, 0) is 0 everywhere only if p and q are equal up to rounding; then p itself is
    # sampled.
    has_residual_B1 = jnp.sum(residual_BV, axis=-1, keepdims=True) > 0
    residual_BV = jnp.where(has_residual_B1, residual_BV, p_BV)
    next_position_B = state.pending_position + 1 + accepted_B
    own_B = sample_token(jnp.log(residual_BV), seed, next_position_B, RESAMPLE)
    drafts_BJ = jnp.pad(state.drafts, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(k + 1) < accepted_B[:, None], drafts_BJ, own_B[:, None]), accepted_B


def _draft_next_tokens(
    model: Qwen3Next,
    mesh: Mesh | None,
    greedy: bool,
    filters: bool,
    state: DraftState,
    state_BJD: jax.Array,
    new_BJ: jax.Array,
    accepted_B: jax.Array,
    sampling: Sampling,
    seed: jax.Array,
) -> DraftState:
    """Drafts the next K tokens after the new tokens of the round.

    For the first draft, the MTP module reads the trunk's hidden states of the accepted tokens. For
    each later draft, the module reads its own hidden state of the previous draft.

    Args:
      state: the decoding state, with the cache that `_verify_drafts` returned.
      state_BJD, new_BJ, accepted_B: the other results of `_verify_drafts`.
      `advance` explains the other arguments.

    Returns:
      The decoding state with new drafts and the new cache of the MTP module.
    """
    k = state.drafts.shape[1]
    run_mtp = _make_run_mtp(model, mesh)
    t_BJ = state.pending_position[:, None] + jnp.arange(k + 1, dtype=jnp.int32)
    # This call only writes keys and values of the accepted tokens into the cache; XLA removes the
    # rest of it.
    *_, cache = run_mtp(state_BJD, new_BJ, t_BJ, state.mtp_cache)
    state_B1D, token_B1, t_B1 = (
        _gather_positions(x, accepted_B[:, None]) for x in (state_BJD, new_BJ, t_BJ)
    )
    drafts, log_q = [], []
    for d in range(k):
        hidden_B1D, state_B1D, cache = run_mtp(state_B1D, token_B1, t_B1 + d, cache)
        logits_BV = model.logits(hidden_B1D[:, 0])
        if greedy:
            draft_B, log_q_BV = argmax_token(logits_BV), state.log_q[:, d]
        else:
            log_q_BV = log_probabilities(logits_BV, sampling, filters)
            draft_B = sample_token(
                log_q_BV, seed, state.pending_position + accepted_B + 2 + d, DRAFT
            )
        token_B1 = draft_B[:, None]
        drafts.append(draft_B)
        log_q.append(log_q_BV)
    return state._replace(
        mtp_cache=cache, drafts=jnp.stack(drafts, axis=1), log_q=jnp.stack(log_q, axis=1)
    )


def _make_run_mtp(model: Qwen3Next, mesh: Mesh | None):
    """Returns a function that applies the MTP module once.

    The function's arguments are hidden states [B, T, D], the token after each hidden state [B, T],
    positions [B, T], and the cache of the MTP module. The function returns the hidden states for
    the output head [B, T, D], the hidden states for the next depth [B, T, D], and the new cache.
    """
    graphdef, params = nnx.split(model.mtp)
    module = nnx.merge(graphdef, gather_params(params, mesh, model.config.dtype))

    def run_mtp(state_BTD, tokens_BT, t_BT, cache):
        in_place = mixer_class(model.config.full_mixer).writes_cache_in_place
        cache = cache if in_place else jax.tree.map(lambda leaf: leaf[0], cache)
        hidden_BTD, state_BTD, _, cache = module(
            state_BTD,
            model.embed(tokens_BT, mesh, time=None),
            Context(t_BT, mesh=mesh, logical_time_axis=None),
            cache,
        )
        cache = cache if in_place else jax.tree.map(lambda leaf: leaf[None], cache)
        return hidden_BTD, state_BTD, cache

    return run_mtp


def _count_leading_accepted(accepted_BK) -> jax.Array:
    """Returns [B], the number of drafts before the first rejected one; K if none is rejected."""
    return jnp.sum(jnp.cumprod(accepted_BK.astype(jnp.int32), axis=1), axis=1)


def _gather_token_entries(x_BKV, token_BK) -> jax.Array:
    """Returns [B, K]: from x [B, K, V] the entry at the index of each token [B, K]."""
    return jnp.take_along_axis(x_BKV, token_BK[..., None], axis=-1)[..., 0]


def _gather_positions(x, index_BT):
    """Returns [B, T, …], the entries of x [B, S, …] at the indices [B, T]. An index outside of 0 …
    S-1 is replaced by the nearest valid index.
    """
    index_BT = jnp.clip(index_BT, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index_BT.reshape(*index_BT.shape, *(1,) * (x.ndim - 2)), axis=1)


def _scatter_tokens(x_BL, index_BT, value_BT):
    """Returns x [B, L] with the values [B, T] written at the indices [B, T]. Values with an index
    outside of x are dropped.
    """
    return x_BL.at[jnp.arange(len(x_BL))[:, None], index_BT].set(value_BT, mode="drop")
