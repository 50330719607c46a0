"""Decoding one token per pass.

Every row carries one pending token: known, but not yet in the cache. Prefill puts all but the
last token of each prompt into the cache; one step puts the pending token in and chooses the
next. So a prompt of one token needs no prefill, and rows of any length enter the same program.

Letters: B batch, T time, V vocabulary, N tokens that one call emits at most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.inference.sampling import Sampling, sample_token, argmax_token, log_probabilities
from qwen3next_jax.model import Qwen3Next

STEPS = 64  # of one call at most: a call costs as much as some steps of a small model


class DecodeState(NamedTuple):
    """Decoding in progress. Donated to every call that continues it.

    cache: as `Qwen3Next.init_cache`, holding the tokens before `position`.
    token, position: [B] int32, the pending token and its position.
    left: [B] int32, tokens that the row may still get: 0 once it has met a stop token.
    """

    cache: list
    token: jax.Array
    position: jax.Array
    left: jax.Array


class Emitted(NamedTuple):
    """What one call gave: tokens [B, N], of which the first `count` [B] of a row are new; passes
    []: how often rows went through the trunk; accepted [K]: how often drafts were, by depth.
    """

    tokens: jax.Array
    count: jax.Array
    passes: jax.Array
    accepted: jax.Array


def init_state(model: Qwen3Next, length: int, token_B, position_B, left_B) -> DecodeState:
    """Before the first token, with a cache of `length` slots."""
    return DecodeState(model.init_cache(len(token_B), length), token_B, position_B, left_B)


def prefill(model: Qwen3Next, mesh, rows: DecodeState, tokens_BT, begin) -> DecodeState:
    """Puts the tokens at positions `begin` … that are below `rows.position` into the cache."""
    positions_BT = jnp.broadcast_to(
        begin + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    inside_BT = (positions_BT < rows.position[:, None]).astype(jnp.int32)
    return rows._replace(
        cache=model.decode(tokens_BT, positions_BT, rows.cache, inside_BT, mesh)[1]
    )


def advance(
    model: Qwen3Next,
    mesh,
    greedy: bool,
    filters: bool,
    rows: DecodeState,
    steps,
    stop_ids,
    sampling: Sampling,
    seed,
) -> tuple[DecodeState, Emitted]:
    """`steps` ≤ STEPS steps, fewer where every row has ended."""

    def more(carry):
        step, rows, *_ = carry
        return (step < steps) & jnp.any(rows.left > 0)

    def one(carry):
        step, rows, tokens_BN, count_B, passes = carry
        hidden_B1D, cache = model.decode(
            rows.token[:, None], rows.position[:, None], rows.cache, mesh=mesh
        )
        logits_BV = model.logits(hidden_B1D[:, 0])
        if greedy:
            next_B = argmax_token(logits_BV)
        else:
            next_B = sample_token(
                log_probabilities(logits_BV, sampling, filters), seed, rows.position + 1
            )
        live_B = rows.left > 0
        emits_B = live_B & ~jnp.isin(next_B, stop_ids)
        # A finished row repeats its last step: its slots stay inside the cache and nobody reads
        # them.
        rows = DecodeState(
            cache,
            jnp.where(emits_B, next_B, rows.token),
            rows.position + emits_B,
            jnp.where(emits_B, rows.left - 1, 0),
        )
        return (
            step + 1,
            rows,
            tokens_BN.at[:, step].set(next_B),
            count_B + emits_B,
            passes + jnp.sum(live_B),
        )

    batch = len(rows.token)
    _, rows, *emitted = jax.lax.while_loop(
        more, one, (0, rows, jnp.zeros((batch, STEPS), jnp.int32), jnp.zeros(batch, jnp.int32), 0)
    )
    return rows, Emitted(*emitted, jnp.zeros(0, jnp.int32))
