"""Scans over time. `linear_scan` and `low_memory_linear_scan` compute h ← e^a h + b, and
`max_plus_scan` computes m ← max(a + m, b), elementwise and for many tokens in parallel.
`token_scan` computes any recurrence, token by token.

At the first token of a document, the log decay a is set to −∞. The value −∞ resets the state
exactly, because all exponents are sums of a, never differences of sums.

Letters: B batch, T time, C tokens of a chunk, `…` any further axes.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.delta_rule.context import last_segment_id_before_shard

TOKENS_PER_CHUNK = 64


def linear_scan(a, b, *, initial_state=None, segment_ids=None, axis_name: str | None = None):
    """Computes h_t = exp(a_t) h_{t-1} + b_t, in parallel within a chunk of 64 tokens, and one chunk
    after another.

    Args:
      a: [B, T, …] log decay with real part <= 0; -inf resets h to b. Axes of a of size 1 are
        broadcast to the axes of b.
      b: [B, T, …], real or complex.
      initial_state: [B, …] or None for zeros. With `segment_ids`, only the first document starts
        from initial_state.
      segment_ids: [B, T] integers or None, as in `gated_delta_rule`. In padding h is the state
        after the last token.
      axis_name: inside `shard_map`, the mesh axis over which T is split in order, as in
        `gated_delta_rule`.

    Returns:
      h [B, T, …]; the h before each token [B, T, …] (zero where a is -inf); the last h [B, …]. The
      three arrays have the dtype of b.

    Raises:
      ValueError: the arguments' shapes or dtypes do not fit.
    """
    state = _checked_initial_state(a, b, initial_state, segment_ids, 0)
    a, b = _reset_at_documents(a, b, segment_ids, axis_name, 0)

    @jax.checkpoint  # saves only a chunk's inputs and its initial state for the backward pass
    def step(state, chunk):
        a, b = jax.lax.associative_scan(_compose_linear_maps, chunk, axis=1)
        h = jnp.exp(a) * state[:, None] + b
        return h[:, -1], h

    def run(state):
        final, h = blocks.scan_or_call_once(
            step, state, blocks.to_chunks((a, b), 1, min(TOKENS_PER_CHUNK, b.shape[1]))
        )
        return final, blocks.from_chunks(h, 1, b.shape[1])

    def before(entering, h):
        return jnp.where(a == -jnp.inf, 0, jnp.concatenate([entering[:, None], h[:, :-1]], axis=1))

    if axis_name is None:
        final, h = run(state)
        return h, before(state, h), final
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    state = jnp.where(shard == 0, state, 0)
    final, h = run(state)
    total = jnp.exp(jnp.sum(a, axis=1))
    entering = _state_entering_shard(total, final, axis_name)
    h = h + jnp.exp(jnp.cumsum(a, axis=1)) * entering[:, None]
    return (
        h,
        before(state + entering, h),
        jax.lax.psum(jnp.where(shard == shards - 1, total * entering + final, 0), axis_name),
    )


def low_memory_linear_scan(
    expand, read, inputs, initial_state, *, segment_ids=None, axis_name: str | None = None
):
    """Computes h_t = exp(a_t) h_{t-1} + b_t without storing a, b and h for all tokens. For each
    chunk of tokens, it computes a and b from the inputs, then h, then the outputs from h. The
    function needs less memory than `linear_scan` if a, b and h are larger than the inputs and
    outputs. If T is split over a mesh axis, every shard computes its chunks twice.

    Args:
      expand: function (inputs of a chunk) → (a, b), each [B, C, …].
      read: function (h [B, C, …], inputs of the chunk) → outputs [B, C, …].
      inputs: a tree of arrays [B, T, …].
      initial_state: [B, …], in the dtype of b.
      segment_ids, axis_name: as in `linear_scan`.

    Returns:
      The outputs [B, T, …]; the last h [B, …].
    """
    time = jax.tree.leaves(inputs)[0].shape[1]
    new, live = (
        jnp.zeros(initial_state.shape[:1] + (time,), bool),
        jnp.ones(initial_state.shape[:1] + (time,), bool),
    )
    if segment_ids is not None:
        new, live = reset_and_token_masks(segment_ids, axis_name)

    @jax.checkpoint
    def step(carry, chunk):
        (state, total), (inputs, new, live) = carry, chunk
        a, b = expand(inputs)
        over = lambda mask: mask.reshape(*mask.shape, *(1,) * (b.ndim - 2))
        a, b = (
            jnp.where(over(new), -jnp.inf, jnp.where(over(live), a, 0)),
            jnp.where(over(live), b, 0),
        )
        totals, h = jax.lax.associative_scan(
            _compose_linear_maps, (jnp.broadcast_to(a, b.shape), b), axis=1
        )
        h = h + jnp.exp(totals) * state[:, None]
        return (h[:, -1], total + totals[:, -1]), read(h, inputs)

    def run(state):
        chunks = blocks.to_chunks((inputs, new, live), 1, min(TOKENS_PER_CHUNK, time))
        (final, total), o = blocks.scan_or_call_once(step, (state, jnp.zeros_like(state)), chunks)
        return final, total, blocks.from_chunks(o, 1, time)

    if axis_name is None:
        final, _, o = run(initial_state)
        return o, final
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    state = jnp.where(shard == 0, initial_state, 0)
    final, total, _ = run(state)
    final, _, o = run(state + _state_entering_shard(jnp.exp(total), final, axis_name))
    return o, jax.lax.psum(jnp.where(shard == shards - 1, final, 0), axis_name)


def token_scan(step, inputs, initial_state, *, segment_ids=None, axis_name: str | None = None):
    """Runs a recurrence that can only be computed token by token. The state is set to zero where a
    document starts, and padding does not change it.

    Args:
      step: function (state, inputs of a token [B, …]) → (state, outputs [B, …]).
      inputs: a tree of arrays [B, T, …].
      initial_state: a tree of arrays [B, …]. With `segment_ids`, only the first document starts
        from initial_state.
      segment_ids: as in `linear_scan`.
      axis_name: as in `linear_scan`. Each shard waits for the state of the shard before it, so that
        splitting T saves no time.

    Returns:
      The outputs [B, T, …]; the last state.
    """
    shape = jax.tree.leaves(inputs)[0].shape[:2]
    new, live = jnp.zeros(shape, bool), jnp.ones(shape, bool)
    if segment_ids is not None:
        new, live = reset_and_token_masks(segment_ids, axis_name)

    def choose(mask, a, b):
        return jax.tree.map(
            lambda a, b: jnp.where(mask.reshape(-1, *(1,) * (a.ndim - 1)), a, b), a, b
        )

    def one(state, token):
        x, new, live = token
        state = choose(new, jax.tree.map(jnp.zeros_like, state), state)
        after, o = step(state, x)
        return choose(live, after, state), o

    chunks = blocks.to_chunks(
        jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, new, live)),
        0,
        min(TOKENS_PER_CHUNK, shape[1]),
    )

    def run(state):  # saves only each chunk's inputs and its initial state for the backward pass
        final, o = blocks.scan_or_call_once(
            jax.checkpoint(lambda state, chunk: jax.lax.scan(one, state, chunk)), state, chunks
        )
        return final, jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1), blocks.from_chunks(o, 0, shape[1])
        )

    if axis_name is None:
        return run(initial_state)[::-1]
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    state = jax.tree.map(lambda x: jnp.where(shard == 0, x, 0), initial_state)
    for turn in range(shards - 1):
        handed = jax.lax.ppermute(run(state)[0], axis_name, [(turn, turn + 1)])
        state = jax.tree.map(lambda new, old: jnp.where(shard == turn + 1, new, old), handed, state)
    final, o = run(state)
    return o, jax.lax.psum(
        jax.tree.map(lambda x: jnp.where(shard == shards - 1, x, 0), final), axis_name
    )


def _compose_linear_maps(first, second):
    """Composes two maps h ← e^a h + b. A map is a pair (a, b); the map `first` is applied first.
    Returns the pair (a, b) of the composed map.
    """
    return second[0] + first[0], jnp.exp(second[0]) * first[1] + second[1]


def _state_entering_shard(carry, leaving, axis_name):
    """Returns the state that enters this shard if the state that enters the first shard is 0.

    Args:
      carry: the factor by which the decays of this shard multiply the state that enters it.
      leaving: the state after this shard if zeros enter it.
    """
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    carries, left = jax.lax.all_gather((carry, leaving), axis_name)
    entering = jnp.zeros_like(leaving)
    for earlier in range(shards - 1):
        entering = jnp.where(earlier < shard, carries[earlier] * entering + left[earlier], entering)
    return entering


def max_plus_scan(a, b, *, initial_state=None, segment_ids=None, axis_name: str | None = None):
    """Computes m_t = max(a_t + m_{t-1}, b_t). No gradient passes through m. A caller subtracts the
    running maximum m from exponents to avoid overflow; the result of the caller must not depend on
    m.

    Args:
      a, b: real arrays [B, T, …] of the same shape.
      initial_state: [B, …] or None for −∞.
      segment_ids, axis_name: as in `linear_scan`.

    Returns:
      m [B, T, …]; the m before each token [B, T, …] (−∞ where a is −∞); the last m [B, …].
    """
    a, b = jax.lax.stop_gradient((a, b))
    state = _checked_initial_state(a, b, initial_state, segment_ids, -jnp.inf)
    a, b = _reset_at_documents(a, b, segment_ids, axis_name, -jnp.inf)

    def compose(first, second):
        return second[0] + first[0], jnp.maximum(second[0] + first[1], second[1])

    totals, m = jax.lax.associative_scan(compose, (a, b), axis=1)
    entering = state
    if axis_name is not None:
        shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
        total_of_shard, maximum_of_shard = jax.lax.all_gather((totals[:, -1], m[:, -1]), axis_name)
        for earlier in range(shards - 1):
            after = jnp.maximum(total_of_shard[earlier] + entering, maximum_of_shard[earlier])
            entering = jnp.where(earlier < shard, after, entering)
    m = jnp.maximum(m, totals + entering[:, None])
    before = jnp.where(
        a == -jnp.inf, -jnp.inf, jnp.concatenate([entering[:, None], m[:, :-1]], axis=1)
    )
    final = m[:, -1]
    if axis_name is not None:
        final = jax.lax.pmax(jnp.where(shard == shards - 1, final, -jnp.inf), axis_name)
    return jax.lax.stop_gradient((m, before, final))


def _checked_initial_state(a, b, initial_state, segment_ids, start):
    """Checks the arguments of a scan. Returns the initial state in b's dtype; if it is None, an
    array [B, …] filled with `start`.
    """
    letters = ("B", "T", *b.shape[2:])
    checks.check_shapes(
        b=(b, letters),
        a=(a, ("B", "T", *(n if n == 1 else m for n, m in zip(a.shape[2:], b.shape[2:])))),
        segment_ids=(segment_ids, "BT"),
        initial_state=(initial_state, ("B", *b.shape[2:])),
    )
    checks.check_integers(segment_ids=segment_ids)
    state = jnp.full((b.shape[0], *b.shape[2:]), start, b.dtype)
    return state if initial_state is None else initial_state.astype(b.dtype)


def _reset_at_documents(a, b, segment_ids, axis_name, nothing):
    """Returns the arguments (a, b) of a scan, with a = −∞ at the tokens before which the state is
    reset. In padding, a is 0 and b is `nothing`, so that padding does not change the state.
    """
    if segment_ids is None:
        return a, b
    new, live = reset_and_token_masks(segment_ids, axis_name)
    over = lambda mask, x: mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
    return jnp.where(over(new, a), -jnp.inf, jnp.where(over(live, a), a, 0)), jnp.where(
        over(live, b), b, nothing
    )


def reset_and_token_masks(segment_ids, axis_name):
    """Returns two boolean arrays [B, T]: whether the state is reset before each token, and whether
    the entry is a token (not padding). The state is reset before the first token of every document
    except the document at the start of the row, which continues the initial state.
    """
    earlier = segment_ids[:, :1]
    if axis_name is not None:
        before = last_segment_id_before_shard(segment_ids, axis_name)[:, None].astype(earlier.dtype)
        earlier = jnp.where(jax.lax.axis_index(axis_name) == 0, earlier, before)
    return (segment_ids > 0) & (
        segment_ids != jnp.concatenate([earlier, segment_ids[:, :-1]], axis=1)
    ), segment_ids > 0
