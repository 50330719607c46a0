"""The public function `channel_delta_rule`, which checks its arguments, sets the log decay to -inf
where a document starts and chooses an implementation. This file also defines the custom gradient of
the chunked implementation.

Letters: B batch, T time, G key heads, H heads (head h reads key head h // (H // G)), K key width, V
value width.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import checks
from qwen3next_jax.ops.delta_rule.chunked import CPU_LIMITS, LIMITS
from qwen3next_jax.ops.delta_rule.context import last_segment_id_before_shard
from qwen3next_jax.zoo.ops.channel_delta_rule import chunked, context, reference, two_sided
from qwen3next_jax.zoo.ops.channel_delta_rule.chunked import TokenArrays

IMPLEMENTATIONS = ("recurrent", "chunked")


class Options(typing.NamedTuple):
    """The static options of one call.

    Attributes:
      implementation: "recurrent" or "chunked"; None means "chunked".
      delta_term: whether the write has the delta term -S^T k.
      reads_before_write: whether a token reads the state before its own decay and write.
    """

    implementation: str | None
    delta_term: bool
    reads_before_write: bool


def channel_delta_rule(
    q,
    k,
    v,
    *,
    g,
    beta=None,
    delta_term: bool = True,
    erase_key=None,
    read: str = "after",
    bonus=None,
    value_log_decay=None,
    initial_state=None,
    segment_ids=None,
    implementation: str | None = None,
    axis_name: str | None = None,
):
    """Applies the delta rule with a decay for each key channel (Kimi Delta Attention,
    https://arxiv.org/abs/2510.26692) to whole sequences.

    Each token first decays the state S [K, V] of a head, then writes to it, then reads from it:

        S <- Diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t

    The function neither scales nor normalises q and k.

    Args:
      q, k: [B, T, G, K] queries and keys, float32 or bfloat16 (float64 under x64). H is a
        multiple of G.
      v: [B, T, H, V] values.
      g: [B, T, H, K] log decay, <= 0. A log decay of -inf forgets the channel exactly. Even a very
        strong decay costs no accuracy.
      beta: [B, T, H] write strength; None for 1.
      delta_term: whether the write has the delta term -S^T k_t. Without the delta term, the
        function computes gated linear attention (GLA, https://arxiv.org/abs/2312.06635).
      erase_key: [B, T, H, K], the key e_t in S <- S + beta_t k_t (v_t - S^T e_t)^T, for models
        whose delta term reads the state with another key than k_t (Gated DeltaNet-2,
        https://arxiv.org/abs/2605.22791). If erase_key is None, e_t = k_t.
      read: "after": each token reads the state after its own decay and write. "before": each token
        reads the state before its own decay and write (RWKV).
      bonus: [H, K] or None, only with read="before": the token's own term (sum_c q_c bonus_c k_c)
        v_t is added to o_t.
      value_log_decay: [B, T, H, V] or None, log decay <= 0 of the value channels, only with
        delta_term=False. With value_log_decay, the decay is S <- Diag(exp(g_t)) S
        Diag(exp(value_log_decay_t)).
      initial_state: [B, H, K, V] or None for zeros. With `segment_ids`, only the first document
        starts from initial_state.
      segment_ids: [B, T] integers or None. The ids are positive and non-decreasing along T, one id
        per document, and 0 marks padding at the end. The state becomes zero where a document starts
        (at the start of the first document, it stays `initial_state`). In padding o is 0 and all
        gradients are 0.
      implementation: "recurrent" or "chunked". None means "chunked", the faster implementation on
        every platform.
      axis_name: name of the mesh axis over which T is split in order, for a call inside
        `shard_map`. Inside `shard_map`, the arrays are this shard's parts, and a document has the
        same id on every shard. Only the first shard reads its `initial_state`; the `initial_state`
        of every other shard is ignored and gets no gradient. Every shard returns the final state of
        the whole row.

    Returns:
      o: [B, T, H, V] in v's dtype.
      final_state: [B, H, K, V] float32 (float64 for float64 inputs); with `segment_ids`, the state
        after the last document.

    Raises:
      ValueError: wrong shapes or dtypes, an unknown implementation, or arguments that exclude each
        other.

    If the function is traced under `jax.debug_nans(True)`, a host callback raises a ValueError if g
    or value_log_decay has a positive number or a NaN, in padding, too. A compiled program reports
    the callback's ValueError as a `jax.errors.JaxRuntimeError`.
    """
    q, k, v, g = map(jnp.asarray, (q, k, v, g))
    _check_arguments(
        q,
        k,
        v,
        g,
        beta,
        delta_term,
        erase_key,
        read,
        bonus,
        value_log_decay,
        initial_state,
        segment_ids,
        implementation,
    )
    wide = jnp.promote_types(jnp.float32, jnp.result_type(q, k, v))
    batch, time, heads, value = v.shape
    beta = jnp.ones(v.shape[:3], wide) if beta is None else jnp.asarray(beta)
    state = (
        jnp.zeros((batch, heads, k.shape[3], value), wide)
        if initial_state is None
        else initial_state.astype(wide)
    )
    reads_before_write, bonus_q = read == "before", q
    if segment_ids is not None:
        ids = segment_ids
        earlier = ids[:, :1]
        if axis_name is not None:
            earlier = jnp.where(
                jax.lax.axis_index(axis_name) == 0,
                earlier,
                last_segment_id_before_shard(ids, axis_name)[:, None].astype(ids.dtype),
            )
        live, new = ids > 0, (ids > 0) & (ids != jnp.concatenate([earlier, ids[:, :-1]], axis=1))
        over = lambda mask, x: mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
        # padding does not decay, write or read the state
        q, beta, g = (jnp.where(over(live, x), x, 0) for x in (q, beta, g))
        value_log_decay = (
            None
            if value_log_decay is None
            else jnp.where(over(live, value_log_decay), value_log_decay, 0)
        )
        g = jnp.where(over(new, g), -jnp.inf, g)
        bonus_q = q
        # otherwise a document's first token would read the state of the document before
        q = jnp.where(over(new, q), 0, q) if reads_before_write else q
    run = functools.partial(
        _run_implementation, Options(implementation, delta_term, reads_before_write)
    )
    x = TokenArrays(q, k, v, g, beta, value_log_decay, erase_key)
    if axis_name is None:
        o, final = run(x, state)
    elif value_log_decay is None:
        o, final = context.run_across_shards(run, axis_name, x, state)
    else:
        o, final = two_sided.run_across_shards(run, axis_name, x, state, reads_before_write)
    if bonus is not None:
        q_BTHK, k_BTHK = (
            jnp.repeat(x.astype(wide), heads // x.shape[2], axis=2) for x in (bonus_q, k)
        )
        o = o + jnp.sum(q_BTHK * bonus.astype(wide) * k_BTHK, axis=-1, keepdims=True) * v.astype(
            wide
        )
    return o.astype(v.dtype), final


def _check_arguments(
    q,
    k,
    v,
    g,
    beta,
    delta_term,
    erase_key,
    read,
    bonus,
    value_log_decay,
    initial_state,
    segment_ids,
    implementation,
):
    checks.check_implementation_name(implementation, IMPLEMENTATIONS)
    checks.check_shapes(
        q=(q, "BTGK"),
        k=(k, "BTGK"),
        v=(v, "BTHV"),
        g=(g, "BTHK"),
        beta=(beta, "BTH"),
        bonus=(bonus, "HK"),
        value_log_decay=(value_log_decay, "BTHV"),
        erase_key=(erase_key, "BTHK"),
        initial_state=(initial_state, "BHKV"),
        segment_ids=(segment_ids, "BT"),
    )
    checks.check_integers(segment_ids=segment_ids)
    if v.shape[2] % q.shape[2]:
        raise ValueError(
            f"v has {v.shape[2]} heads and q {q.shape[2]}: expected heads to be a multiple of key "
            "heads"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
            raise ValueError(f"{name} has dtype {x.dtype}: expected float32, bfloat16 or float64")
    if read not in ("after", "before"):
        raise ValueError(f"read={read!r}: expected 'after' or 'before'")
    if bonus is not None and read == "after":
        raise ValueError(
            "bonus with read='after': a token that reads after its write reads itself already; "
            "expected read='before'"
        )
    if erase_key is not None and not delta_term:
        raise ValueError("erase_key with delta_term=False: expected delta_term=True")
    if value_log_decay is not None and delta_term:
        raise ValueError("value_log_decay with delta_term=True: expected delta_term=False")
    if jax.config.jax_debug_nans:
        checks.check_values_at_runtime(
            {
                f"{name} is positive or NaN: expected log decay <= 0": jnp.any(~(x <= 0))
                for name, x in (("g", g), ("value_log_decay", value_log_decay))
                if x is not None
            }
        )


def _run_implementation(options: Options, x: TokenArrays, initial_state):
    """Runs the implementation that `options` and `x` require on whole rows. Returns o [B, T, H, V]
    in the state's dtype, and the final state [B, H, K, V].
    """
    if options.implementation == "recurrent":
        return reference.recurrent(
            x,
            initial_state,
            delta_term=options.delta_term,
            reads_before_write=options.reads_before_write,
        )
    if x.value_log_decay is not None:
        return two_sided.chunked_with_value_decay(
            x, initial_state, size=chunk_size(x), reads_before_write=options.reads_before_write
        )
    return _chunked(options, x, initial_state)


# ---- the custom gradient
# --------------------------------------------------------------------------------------------------


def chunk_size(x: TokenArrays) -> int:
    """Returns the number of tokens of a chunk, by the rule of
    `ops.delta_rule.interface.choose_chunk_size`: 16 for float32 heads of at most 32 channels,
    otherwise 64. If the sequence has fewer than 64 tokens, 64 is replaced by the smallest power of
    two that is at least 16 and at least the number of tokens.
    """
    narrow = max(x.q.shape[-1], x.v.shape[-1]) <= 32 and x.v.dtype == jnp.float32
    return min(16 if narrow else 64, max(16, 1 << (x.q.shape[1] - 1).bit_length()))


def _run_with_platform_piece_size(options: Options, pass_over, x: TokenArrays, *arguments):
    """Calls `pass_over` (`chunked.forward_pass` or `chunked.backward_pass`) with the number of
    tokens of a chunk, and the number of chunks that are computed at once (a piece). A piece has as
    many chunks as fit in a CPU's caches, or in a small part of an accelerator's memory.
    """
    size, chunks = chunk_size(x), -(-x.v.shape[1] // chunk_size(x))
    numbers = size * x.v.shape[0] * x.v.shape[2] * max(x.q.shape[3], x.v.shape[3])

    def bound(limits):
        count = -(
            -chunks
            // (
                1
                if numbers * size >= limits.single_chunk_multiply_adds
                else max(1, limits.block_elements // numbers)
            )
        )
        return functools.partial(
            pass_over,
            size=size,
            piece=-(-chunks // count),
            delta_term=options.delta_term,
            reads_before_write=options.reads_before_write,
        )

    return jax.lax.platform_dependent(x, *arguments, cpu=bound(CPU_LIMITS), default=bound(LIMITS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options: Options, x: TokenArrays, initial_state):
    return _run_with_platform_piece_size(options, chunked.forward_pass, x, initial_state)[:2]


def _chunked_forward(options, x, initial_state):
    o, final, *saved = _run_with_platform_piece_size(
        options, chunked.forward_pass, x, initial_state
    )
    return (o, final), (x, saved)


def _chunked_backward(options, residuals, cotangents):
    x, saved = residuals
    *gradients, dinitial = _run_with_platform_piece_size(
        options, chunked.backward_pass, x, *saved, *cotangents
    )
    gradients = (
        None if array is None else dx.astype(array.dtype) for dx, array in zip(gradients, x)
    )
    return TokenArrays(*gradients), dinitial


_chunked.defvjp(_chunked_forward, _chunked_backward)
