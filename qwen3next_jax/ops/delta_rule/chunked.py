"""The chunked form in XLA alone: everything inside a chunk at once for all chunks, then one pass
of the state over them.

Forward and backward are explicit (docs/delta_rule.md); `api` wires them into one
`jax.custom_vjp`. The residuals are the inputs, the state at the start of every chunk (in the
inputs' dtype) and the chunks' inverses: per head O(T (K + V + C)) plus one state per chunk.
Everything else is recomputed.

The state pass is a `lax.scan` (`chunked`) or a `lax.associative_scan` over the chunks' affine
maps (`associative`). `forward_in_blocks` and `backward_in_blocks` take a long sequence a few
chunks at a time, so that what is made inside the chunks stays in a CPU's caches, or is a small
part of an accelerator's memory.

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import associative, chunk_math, inverse
from qwen3next_jax.ops.delta_rule.chunk_math import Decay, Documents, Inputs, Products, Scaled


class BlockLimits(typing.NamedTuple):
    """How many chunks a block holds.

    single_chunk: multiply-adds of a product of [B, H, C, C] and [B, H, C, width] from which a
      chunk is a block of its own, whose state pass is no loop.
    elements: numbers in the [B, H, C, width] arrays of a block of smaller chunks, at most.
    """

    single_chunk: int
    elements: int


# Arrays of 0.5 MB in float32: a core's caches hold a few of them. Every block costs something, too.
CPU_LIMITS = BlockLimits(1 << 21, 1 << 17)
# 64 MB in float32: thousands of chunks' products at once, while some thirty such arrays live.
LIMITS = BlockLimits(1 << 30, 1 << 24)


class Chunks(typing.NamedTuple):
    """One call's inputs cut into chunks, and what every pass needs of them."""

    q: jax.Array | Scaled  # [N, B, H, C, K] normalised and scaled
    k: jax.Array | Scaled  # [N, B, H, C, K] normalised
    v: jax.Array  # [N, B, H, C, V]
    beta: jax.Array  # [N, B, H, C, 1]
    decay: Decay
    kk: jax.Array  # [N, B, H, C, C]
    qk: jax.Array  # [N, B, H, C, C]
    inverse: jax.Array | None  # A, [N, B, H, C, C]; None without erasing
    p: jax.Array  # P, [N, B, H, C, C]


def _to_chunks(x, size: int, mode: str = "constant"):
    """[B, T, heads, ...] to [N, B, heads, C, ...], T padded to a multiple of C."""
    return jnp.swapaxes(blocks.to_chunks(x, 1, size, mode), 2, 3)


def _scaled(raw, column):
    return Scaled(raw, column, jnp.swapaxes(column, -1, -2))


def _to_head_pairs(a_NBHCC):
    """The inverses in the shape the TPU kernels keep them in, [N, B, ceil(H / 2), C, 2C]: the
    same numbers read in order.
    """
    if a_NBHCC is None:
        return None
    count, batch, heads, size, _ = a_NBHCC.shape
    a = jnp.pad(a_NBHCC, [(0, 0), (0, 0), (0, heads % 2), (0, 0), (0, 0)])
    return a.reshape(count, batch, -1, size, 2 * size)


def _from_head_pairs(a, heads: int):
    count, batch, _, size, _ = a.shape
    return a.reshape(count, batch, -1, size, size)[:, :, :heads]


def _from_chunks(x, time: int):
    """The inverse of `_to_chunks`."""
    return blocks.from_chunks(jnp.swapaxes(x, 2, 3), 1, time)


def _chunks(
    x: Inputs, known_inverse, size: int, normalize_qk: bool, erase: bool
) -> tuple[Chunks, Products, Products]:
    q, k, v, g, beta, segments = x
    operand = v.dtype
    dtype = jnp.promote_types(jnp.float32, operand)
    dots, exact = Products(operand, copies=True), Products(dtype, copies=True)
    heads = v.shape[2]
    narrow = operand == jnp.bfloat16  # then q and k stay as they came, and their norms beside them
    scales = chunk_math.scales(q.astype(dtype), k.astype(dtype), normalize_qk)
    q_, k_ = (
        _scaled(_to_chunks(x, size), _to_chunks(y, size))
        if narrow
        else _to_chunks(x.astype(dtype) * y, size)
        for x, y in zip((q, k), scales)
    )
    v_, g_, beta_ = (_to_chunks(x.astype(dtype), size) for x in (v, g, beta))
    documents = None
    if segments is not None:
        signed = _to_chunks(segments[:, :, None], size, "edge")  # [N, B, 1, C]
        index = chunk_math.document_index(signed[:, :, 0])[:, :, None]
        documents = Documents(index[..., None], index[..., None, :], index[..., -1:, None])
        live = signed[..., None] > 0
        q_ = _scaled(q_.raw, jnp.where(live, q_.column, 0)) if narrow else jnp.where(live, q_, 0)
    total = jnp.matmul(
        g_, chunk_math.lower_mask(size).astype(dtype).T, precision=chunk_math.HIGHEST
    )
    d = chunk_math.decay(total[..., None], total[..., None, :], total[..., -1:, None], documents)
    wide = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[2], axis=2), tree)
    kk, qk = wide(dots.nt(k_, k_)), wide(dots.nt(q_, k_))
    beta_ = beta_[..., None]
    a = None if known_inverse is None else _from_head_pairs(known_inverse, heads)
    if erase and a is None:
        a = inverse.unit_lower_inverse(chunk_math.interaction(kk, beta_, d), exact)
    return Chunks(wide(q_), wide(k_), v_, beta_, d, kk, qk, a, qk * d.pair), dots, exact


def _written(c: Chunks, state, dots: Products, exact: Products):
    """V' and what it is made of: V - gamma K S where the rule erases, V where no row sees the
    memory.
    """
    if c.inverse is None:
        return c.beta * c.v, c.v
    unseen = chunk_math.unseen(c.v, dots.nn(c.k, state), c.decay)
    return exact.nn(c.inverse, c.beta * unseen), unseen


def _state_pass(c: Chunks, initial_state, dots: Products, exact: Products, parallel: bool):
    """The state entering each chunk, V' of each chunk, and the final state."""
    if parallel:
        states, final = associative.forward_pass(c, initial_state, dots, exact)
        return states, _written(c, states, dots, exact)[0], final

    def step(state, chunk: Chunks):
        written, _ = _written(chunk, state, dots, exact)
        return chunk_math.next_state(state, chunk.k, written, chunk.decay, dots), (state, written)

    needed = c._replace(q=None, kk=None, qk=None, p=None, decay=c.decay._replace(pair=None))
    final, (states, written) = jax.lax.scan(step, initial_state, needed)
    return states, written, final


def forward(
    x: Inputs,
    initial_state,
    inverses,
    *,
    size: int,
    normalize_qk: bool,
    erase: bool,
    save: bool,
    parallel: bool,
):
    """o [B, T, H, V], the final state [B, H, K, V], and for the backward pass the state entering
    each chunk [N, B, H, K, V] and the inverses A [N, B, H, C, C] (None without erasing). Without
    `save` the last two are None. `inverses`: those of an earlier pass over the same k, g and
    beta, or None.
    """
    c, dots, exact = _chunks(x, inverses, size, normalize_qk, erase)
    states, written, final = _state_pass(
        c, initial_state.astype(exact.operand), dots, exact, parallel
    )
    o = chunk_math.output(dots.nn(c.q, states), c.p, written, c.decay, dots)
    o = _from_chunks(o, x.v.shape[1]).astype(x.v.dtype)
    return (
        (o, final, states.astype(x.v.dtype), _to_head_pairs(c.inverse))
        if save
        else (o, final, None, None)
    )


def affine_map(
    x: Inputs, initial_state, *, size: int, normalize_qk: bool, erase: bool, parallel: bool
):
    """What these tokens do to any state S that enters beside `initial_state`: U and M of the
    final state U + M S, the reads r of o + r S, and the inverses A.

    Returns U [B, H, K, V] and M [B, H, K, K] in float32 at least, r [N, B, H, C, K] in v's
    dtype, A [N, B, H, C, C].
    """
    c, dots, exact = _chunks(x, None, size, normalize_qk, erase)
    key, value = x.q.shape[-1], x.v.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(key, dtype=exact.operand), (*initial_state.shape[:-1], key))
    # M is the state of values zero that starts at I
    c = c._replace(v=jnp.pad(c.v, [(0, 0)] * 4 + [(0, key)]))
    state = jnp.concatenate([initial_state.astype(exact.operand), identity], axis=-1)
    states, written, final = _state_pass(c, state, dots, exact, parallel)
    r = chunk_math.output(
        dots.nn(c.q, states[..., value:]), c.p, written[..., value:], c.decay, dots
    )
    return final[..., :value], final[..., value:], r.astype(x.v.dtype), _to_head_pairs(c.inverse)


def map_gradient(r, do):
    """The gradient of S where o = o0 + r S: r^T dO over all tokens, [B, H, K, V]. r [N, B, H, C,
    K], do [B, T, H, V].
    """
    return jnp.sum(Products(r.dtype).tn(r, _to_chunks(do.astype(r.dtype), r.shape[3])), axis=0)


def backward(
    x: Inputs,
    states,
    inverses,
    do,
    dfinal,
    *,
    size: int,
    normalize_qk: bool,
    erase: bool,
    parallel: bool,
):
    """Gradients of q, k, v, g, beta and the initial state, from those of o and the final state."""
    c, dots, exact = _chunks(x, inverses, size, normalize_qk, erase)
    q, k, v, *_, segments = x
    states = states.astype(exact.operand)
    time, dtype = v.shape[1], exact.operand
    do = _to_chunks(do.astype(dtype), size)
    dfinal = dfinal.astype(dtype)
    written, unseen = _written(c, states, dots, exact)
    po, qo = dots.tn(c.p, do), dots.tn(c.q, c.decay.gamma * do)

    def step(dstate, inputs):
        chunk, po, qo = inputs
        dr, dread = _residual_backward(
            chunk, chunk_math.written_backward(po, chunk.k, dstate, chunk.decay, dots), exact
        )
        return chunk_math.state_backward(qo, chunk.k, dread, dstate, chunk.decay, dots), (
            dstate,
            dr,
            dread,
        )

    if parallel:
        dstates, dinitial = associative.backward_pass(c, po, qo, dfinal, dots, exact)
        dr, dread = _residual_backward(
            c, chunk_math.written_backward(po, c.k, dstates, c.decay, dots), exact
        )
    else:
        needed = c._replace(q=None, kk=None, qk=None, p=None, decay=c.decay._replace(pair=None))
        dinitial, (dstates, dr, dread) = jax.lax.scan(step, dfinal, (needed, po, qo), reverse=True)
    d = chunk_math.chunk_gradients(
        c.q,
        c.k,
        unseen,
        c.beta,
        c.decay,
        c.kk,
        c.qk,
        written,
        dr,
        dread,
        states,
        dstates,
        do,
        erase,
        dots,
    )
    dq, dk, dv, dbeta, dg = (
        _from_chunks(x, time) for x in (d.q, d.k, d.v, d.beta[..., 0], d.g[..., 0, :])
    )
    if segments is not None:
        dq = jnp.where(segments[:, :, None, None] > 0, dq, 0)
    dq, dk = _prepare_backward(dq, dk, q.astype(dtype), k.astype(dtype), normalize_qk)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg, dbeta, dinitial


def forward_in_blocks(
    x: Inputs, initial_state, inverses, *, limits: BlockLimits, size: int, **settings
):
    """`forward`, block by block of chunks."""
    chunks, time = _chunks_of_a_block(limits, x, size), x.v.shape[1]
    if chunks * size >= time:
        return forward(x, initial_state, inverses, size=size, parallel=False, **settings)

    def block(state, inputs):
        continues, inverses, x = inputs
        o, state, *saved = forward(
            x,
            zero_unless_continued(continues, state),
            inverses,
            size=size,
            parallel=False,
            **settings,
        )
        return state, (o, *saved)

    of_blocks, continues = _split_inputs(x, chunks * size)
    wide = initial_state.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    final, (o, *saved) = jax.lax.scan(
        block, wide, (continues, blocks.to_chunks(inverses, 0, chunks), of_blocks)
    )
    return blocks.from_chunks(o, 1, time), final, *blocks.from_chunks(saved, 0, -(-time // size))


def backward_in_blocks(
    x: Inputs, states, inverses, do, dfinal, *, limits: BlockLimits, size: int, **settings
):
    """`backward`, block by block of chunks."""
    chunks, time = _chunks_of_a_block(limits, x, size), x.v.shape[1]
    if chunks * size >= time:
        return backward(x, states, inverses, do, dfinal, size=size, parallel=False, **settings)

    def block(dstate, inputs):
        continues, *inputs = inputs
        *gradients, dstate = backward(*inputs, dstate, size=size, parallel=False, **settings)
        return zero_unless_continued(continues, dstate), gradients

    of_blocks, continues = _split_inputs(x, chunks * size)
    saved, do = (
        blocks.to_chunks((states, inverses), 0, chunks),
        blocks.to_chunks(do, 1, chunks * size),
    )
    wide = dfinal.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    dinitial, gradients = jax.lax.scan(
        block, wide, (continues, of_blocks, *saved, do), reverse=True
    )
    return *blocks.from_chunks(gradients, 1, time), dinitial


def _chunks_of_a_block(limits: BlockLimits, x: Inputs, size: int) -> int:
    """As many as make blocks of one length; the last may be padded."""
    batch, time, heads, value = x.v.shape
    chunks, numbers = -(-time // size), batch * size * heads * max(x.q.shape[3], value)
    count = -(
        -chunks
        // (1 if numbers * size >= limits.single_chunk else max(1, limits.elements // numbers))
    )
    return -(-chunks // count)


def _split_inputs(x: Inputs, length: int):
    """(every block's inputs [blocks, B, length, …], whether its first token continues the
    document before it [blocks, B]).

    The rows of zeros at the end neither decay nor write nor read.
    """
    of_blocks = blocks.to_chunks(x._replace(segments=None), 1, length)
    if x.segments is None:
        return of_blocks, None
    segments = blocks.to_chunks(x.segments, 1, length, "edge")
    ids = jnp.abs(segments)
    continues = jnp.concatenate(
        [jnp.ones_like(ids[:1, :, 0], bool), ids[1:, :, 0] == ids[:-1, :, -1]]
    )
    return of_blocks._replace(segments=segments), continues


def zero_unless_continued(continues_B, state_BHKV):
    """The state [B, H, K, V], zero where a row's next token begins another document."""
    return (
        state_BHKV
        if continues_B is None
        else jnp.where(continues_B[:, None, None, None], state_BHKV, 0)
    )


def _residual_backward(c: Chunks, dwritten, exact: Products):
    """dR = A^T dV' and X = beta gamma dR (None without erasing)."""
    if c.inverse is None:
        return dwritten, None
    dr = exact.tn(c.inverse, dwritten)
    return dr, c.beta * c.decay.gamma * dr


def _prepare_backward(dq_BTHK, dk_BTHK, q_BTGK, k_BTGK, normalize: bool):
    """Sum over the value heads of each key head, then back through the norm and the scale of q."""
    batch, time, groups, width = q_BTGK.shape
    dq, dk = (x.reshape(batch, time, groups, -1, width).sum(axis=3) for x in (dq_BTHK, dk_BTHK))
    dq = dq * width**-0.5
    if normalize:
        dq, dk = (
            chunk_math.inverse_norm_backward(dy, x, chunk_math.inverse_norm(x))
            for dy, x in ((dq, q_BTGK), (dk, k_BTGK))
        )
    return dq, dk
