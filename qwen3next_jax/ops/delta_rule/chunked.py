"""The chunked form of the gated delta rule in XLA: what lies inside the chunks is computed for all
of them at once, then the state passes over them.

Forward and backward pass are explicit (docs/delta_rule.md); `api` wires them into one
`jax.custom_vjp`. Saved for the backward pass are the inputs, the state at the start of every chunk
(in the inputs' dtype) and the chunks' inverses: per head O(T (K + V + C)) numbers and one state a
chunk. Everything else is recomputed.

The state pass is a `lax.scan` (the implementation "chunked") or a `lax.associative_scan` over the
chunks' affine maps ("associative"). `forward_in_blocks` and `backward_in_blocks` take a long
sequence a few chunks at a time, so that the intermediate arrays stay in a CPU's caches, or take
a small part of an accelerator's memory.

The functions that `dispatch` lists have the arguments and results of `interface.Implementation`.

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import associative, chunk_math, inverse
from qwen3next_jax.ops.delta_rule.chunk_math import Chunk, Documents, Products, Scaled
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings


class BlockLimits(typing.NamedTuple):
    """How many chunks are computed at once, as a block.

    single_chunk: multiply-adds of a product of [B, H, C, C] and [B, H, C, width] from which a
      chunk is a block of its own, whose state pass is no loop.
    elements: of the [B, H, C, width] arrays of a block of smaller chunks, at most.
    """

    single_chunk: int
    elements: int


# Arrays of 0.5 MB in float32: a core's caches hold a few of them. Every block costs something, too.
CPU_LIMITS = BlockLimits(1 << 21, 1 << 17)
# 64 MB in float32: thousands of chunks' products at once, while some thirty such arrays live.
LIMITS = BlockLimits(1 << 30, 1 << 24)


# ---- the three passes, over all chunks at once


def forward(x: Inputs, initial_state, inverses, settings: Settings, *, save: bool, parallel: bool):
    """`Implementation.forward`. `parallel`: the state pass is an associative scan."""
    c, dots, exact = _prepare_chunks(x, inverses, settings)
    states, written, final = _state_pass(
        c, initial_state.astype(exact.operand), dots, exact, parallel
    )
    o = chunk_math.output(dots.nn(c.q, states), c.p, written, c.decay, dots)
    o = _from_chunks(o, x.v.shape[1]).astype(x.v.dtype)
    if not save:
        return o, final, None, None
    return o, final, states.astype(x.v.dtype), _to_head_pairs(c.inverse)


def affine_map(x: Inputs, initial_state, settings: Settings, *, parallel: bool):
    """`Implementation.affine_map`. `parallel`: the state pass is an associative scan."""
    c, dots, exact = _prepare_chunks(x, None, settings)
    key, value = x.q.shape[-1], x.v.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(key, dtype=exact.operand), (*initial_state.shape[:-1], key))
    # M is the final state of a call whose values are zero and whose initial state is I: it takes K
    # more columns of the same state pass.
    c = c._replace(v=jnp.pad(c.v, [(0, 0)] * 4 + [(0, key)]))
    state = jnp.concatenate([initial_state.astype(exact.operand), identity], axis=-1)
    states, written, final = _state_pass(c, state, dots, exact, parallel)
    r = chunk_math.output(
        dots.nn(c.q, states[..., value:]), c.p, written[..., value:], c.decay, dots
    )
    return final[..., :value], final[..., value:], r.astype(x.v.dtype), _to_head_pairs(c.inverse)


def map_gradient(r, do):
    """The gradient of S where o = o0 + r S: r^T dO over all tokens, [B, H, K, V].

    Args:
      r: [N, B, H, C, K], as `affine_map` returns it. do: [B, T, H, V].
    """
    return jnp.sum(Products(r.dtype).tn(r, _to_chunks(do.astype(r.dtype), r.shape[3])), axis=0)


def backward(x: Inputs, states, inverses, do, dfinal, settings: Settings, *, parallel: bool):
    """`Implementation.backward`. `parallel`: the state pass is an associative scan."""
    c, dots, exact = _prepare_chunks(x, inverses, settings)
    q, k, v, *_, segments = x
    states = states.astype(exact.operand)
    time, dtype = v.shape[1], exact.operand
    do = _to_chunks(do.astype(dtype), settings.chunk_size)
    dfinal = dfinal.astype(dtype)
    written, error = _written(c, states, dots, exact)
    dstates, dr, dread, dinitial = _state_pass_backward(c, do, dfinal, dots, exact, parallel)
    d = chunk_math.chunk_gradients(c, error, written, dr, dread, states, dstates, do, dots)
    dq, dk, dv, dbeta, dg = (
        _from_chunks(x, time) for x in (d.q, d.k, d.v, d.beta[..., 0], d.g[..., 0, :])
    )
    if segments is not None:
        dq = jnp.where(segments[:, :, None, None] > 0, dq, 0)
    dq, dk = _prepare_backward(dq, dk, q.astype(dtype), k.astype(dtype), settings.normalize_qk)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg, dbeta, dinitial


# ---- the same, a block of chunks at a time


def forward_in_blocks(
    x: Inputs, initial_state, inverses, settings: Settings, *, save: bool, limits: BlockLimits
):
    """`Implementation.forward`, one block of chunks after another."""
    size, time = settings.chunk_size, x.v.shape[1]
    chunks = _chunks_of_a_block(limits, x, size)
    if chunks * size >= time:
        return forward(x, initial_state, inverses, settings, save=save, parallel=False)

    def block(state, inputs):
        continues, inverses, x = inputs
        state = zero_unless_continued(continues, state)
        o, state, *saved = forward(x, state, inverses, settings, save=save, parallel=False)
        return state, (o, *saved)

    block_inputs, continues = _split_inputs(x, chunks * size)
    initial = initial_state.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    final, (o, *saved) = jax.lax.scan(
        block, initial, (continues, blocks.to_chunks(inverses, 0, chunks), block_inputs)
    )
    return blocks.from_chunks(o, 1, time), final, *blocks.from_chunks(saved, 0, -(-time // size))


def backward_in_blocks(
    x: Inputs, states, inverses, do, dfinal, settings: Settings, *, limits: BlockLimits
):
    """`Implementation.backward`, one block of chunks after another, the last one first."""
    size, time = settings.chunk_size, x.v.shape[1]
    chunks = _chunks_of_a_block(limits, x, size)
    if chunks * size >= time:
        return backward(x, states, inverses, do, dfinal, settings, parallel=False)

    def block(dstate, inputs):
        continues, *inputs = inputs
        *gradients, dstate = backward(*inputs, dstate, settings, parallel=False)
        return zero_unless_continued(continues, dstate), gradients

    block_inputs, continues = _split_inputs(x, chunks * size)
    saved = blocks.to_chunks((states, inverses), 0, chunks)
    do = blocks.to_chunks(do, 1, chunks * size)
    dfinal = dfinal.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    dinitial, gradients = jax.lax.scan(
        block, dfinal, (continues, block_inputs, *saved, do), reverse=True
    )
    return *blocks.from_chunks(gradients, 1, time), dinitial


def _chunks_of_a_block(limits: BlockLimits, x: Inputs, size: int) -> int:
    """The number of chunks in a block, such that all blocks have one length; the last may be
    padded.
    """
    batch, time, heads, value = x.v.shape
    chunks = -(-time // size)
    elements_of_a_chunk = batch * size * heads * max(x.q.shape[3], value)
    most = max(1, limits.elements // elements_of_a_chunk)
    if elements_of_a_chunk * size >= limits.single_chunk:
        most = 1
    block_count = -(-chunks // most)
    return -(-chunks // block_count)


def _split_inputs(x: Inputs, length: int):
    """(the inputs of every block [blocks, B, length, …]; for every block whether its first token
    continues the document before it [blocks, B], None without documents).

    The rows of zeros that fill up the last block neither decay nor write nor read.
    """
    block_inputs = blocks.to_chunks(x._replace(segments=None), 1, length)
    if x.segments is None:
        return block_inputs, None
    segments = blocks.to_chunks(x.segments, 1, length, "edge")
    ids = jnp.abs(segments)
    continues = jnp.concatenate(
        [jnp.ones_like(ids[:1, :, 0], bool), ids[1:, :, 0] == ids[:-1, :, -1]]
    )
    return block_inputs._replace(segments=segments), continues


def zero_unless_continued(continues_B, state_BHKV):
    """The state [B, H, K, V], set to zero where the next token begins another document.

    Args:
      continues_B: [B] whether the next token continues the document; None: all do.
    """
    if continues_B is None:
        return state_BHKV
    return jnp.where(continues_B[:, None, None, None], state_BHKV, 0)


# ---- inputs by chunk


def _prepare_chunks(
    x: Inputs, known_inverses, settings: Settings
) -> tuple[Chunk, Products, Products]:
    """All chunks [N, B, H, …], the products with operands in the inputs' dtype, and those in
    float32 at least.
    """
    q, k, v, g, beta, segments = x
    size, operand, heads = settings.chunk_size, v.dtype, v.shape[2]
    dtype = jnp.promote_types(jnp.float32, operand)
    dots, exact = Products(operand, copies=True), Products(dtype, copies=True)
    scales = chunk_math.scales(q.astype(dtype), k.astype(dtype), settings.normalize_qk)
    unscaled = operand == jnp.bfloat16  # then the norms stay outside the products
    q_, k_ = (
        _scaled(_to_chunks(x, size), _to_chunks(scale, size))
        if unscaled
        else _to_chunks(x.astype(dtype) * scale, size)
        for x, scale in zip((q, k), scales)
    )
    v_, g_, beta_ = (_to_chunks(x.astype(dtype), size) for x in (v, g, beta))
    documents = None
    if segments is not None:
        documents, is_token = _documents(segments, size)
        if unscaled:
            q_ = _scaled(q_.raw, jnp.where(is_token, q_.column, 0))
        else:
            q_ = jnp.where(is_token, q_, 0)
    total = jnp.matmul(
        g_, chunk_math.lower_mask(size).astype(dtype).T, precision=chunk_math.HIGHEST
    )
    d = chunk_math.decay(total[..., None], total[..., None, :], total[..., -1:, None], documents)

    def to_value_heads(tree):
        return jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[2], axis=2), tree)

    kk, qk = to_value_heads(dots.nt(k_, k_)), to_value_heads(dots.nt(q_, k_))
    beta_ = beta_[..., None]
    a = None if known_inverses is None else _from_head_pairs(known_inverses, heads)
    if settings.erase and a is None:
        a = inverse.unit_lower_inverse(chunk_math.interaction(kk, beta_, d), exact)
    q_, k_ = to_value_heads(q_), to_value_heads(k_)
    return Chunk(q_, k_, v_, beta_, d, kk, qk, a, qk * d.pair), dots, exact


def _documents(segments, size: int):
    """The documents of the rows of every chunk, and whether each row is a token [N, B, 1, C, 1]."""
    signed = _to_chunks(segments[:, :, None], size, "edge")  # [N, B, 1, C]
    index = chunk_math.document_index(signed[:, :, 0])[:, :, None]
    documents = Documents(index[..., None], index[..., None, :], index[..., -1:, None])
    return documents, signed[..., None] > 0


def _to_chunks(x, size: int, mode: str = "constant"):
    """[B, T, heads, ...] to [N, B, heads, C, ...], T padded to a multiple of C."""
    return jnp.swapaxes(blocks.to_chunks(x, 1, size, mode), 2, 3)


def _from_chunks(x, time: int):
    """The inverse of `_to_chunks`."""
    return blocks.from_chunks(jnp.swapaxes(x, 2, 3), 1, time)


def _scaled(raw, column):
    return Scaled(raw, column, jnp.swapaxes(column, -1, -2))


def _to_head_pairs(a_NBHCC):
    """The inverses in the shape in which the TPU kernels save them, [N, B, ceil(H / 2), C, 2C]: the
    same numbers in the same order.
    """
    if a_NBHCC is None:
        return None
    count, batch, heads, size, _ = a_NBHCC.shape
    a = jnp.pad(a_NBHCC, [(0, 0), (0, 0), (0, heads % 2), (0, 0), (0, 0)])
    return a.reshape(count, batch, -1, size, 2 * size)


def _from_head_pairs(a, heads: int):
    """The inverse of `_to_head_pairs`."""
    count, batch, _, size, _ = a.shape
    return a.reshape(count, batch, -1, size, size)[:, :, :heads]


# ---- the state over the chunks


def _written(c: Chunk, state, dots: Products, exact: Products):
    """V', and the error V - gamma K S that it is made of; without the delta term V' = beta V, and
    V stands for the error.
    """
    if c.inverse is None:
        return c.beta * c.v, c.v
    error = chunk_math.prediction_error(c.v, dots.nn(c.k, state), c.decay)
    return exact.nn(c.inverse, c.beta * error), error


def _without_pairs(c: Chunk) -> Chunk:
    """What a step of the state pass reads: a scan would slice the rest for nothing."""
    return c._replace(q=None, kk=None, qk=None, p=None, decay=c.decay._replace(pair=None))


def _state_pass(c: Chunk, initial_state, dots: Products, exact: Products, parallel: bool):
    """The state that enters each chunk, V' of each chunk, and the final state."""
    if parallel:
        states, final = associative.forward_pass(c, initial_state, dots, exact)
        return states, _written(c, states, dots, exact)[0], final

    def step(state, chunk: Chunk):
        written, _ = _written(chunk, state, dots, exact)
        return chunk_math.next_state(state, chunk.k, written, chunk.decay, dots), (state, written)

    final, (states, written) = jax.lax.scan(step, initial_state, _without_pairs(c))
    return states, written, final


def _state_pass_backward(c: Chunk, do, dfinal, dots: Products, exact: Products, parallel: bool):
    """The gradient of the state that leaves each chunk, dR and X of each chunk, and the gradient of
    the initial state.
    """
    po, qo = dots.tn(c.p, do), dots.tn(c.q, c.decay.gamma * do)
    if parallel:
        dstates, dinitial = associative.backward_pass(c, po, qo, dfinal, dots, exact)
        dwritten = chunk_math.written_backward(po, c.k, dstates, c.decay, dots)
        dr, dread = _residual_backward(c, dwritten, exact)
        return dstates, dr, dread, dinitial

    def step(dstate, inputs):
        chunk, po, qo = inputs
        dwritten = chunk_math.written_backward(po, chunk.k, dstate, chunk.decay, dots)
        dr, dread = _residual_backward(chunk, dwritten, exact)
        before = chunk_math.state_backward(qo, chunk.k, dread, dstate, chunk.decay, dots)
        return before, (dstate, dr, dread)

    dinitial, (dstates, dr, dread) = jax.lax.scan(
        step, dfinal, (_without_pairs(c), po, qo), reverse=True
    )
    return dstates, dr, dread, dinitial


def _residual_backward(c: Chunk, dwritten, exact: Products):
    """dR = A^T dV' and X = beta gamma dR; without the delta term dV' and None."""
    if c.inverse is None:
        return dwritten, None
    dr = exact.tn(c.inverse, dwritten)
    return dr, c.beta * c.decay.gamma * dr


def _prepare_backward(dq_BTHK, dk_BTHK, q_BTGK, k_BTGK, normalize: bool):
    """The gradients of q and k [B, T, G, K] from those of the prepared ones: summed over the value
    heads of each key head, then through the norm and the scale of q.
    """
    batch, time, groups, width = q_BTGK.shape
    dq, dk = (x.reshape(batch, time, groups, -1, width).sum(axis=3) for x in (dq_BTHK, dk_BTHK))
    dq = dq * width**-0.5
    if normalize:
        dq, dk = (
            chunk_math.inverse_norm_backward(dy, x, chunk_math.inverse_norm(x))
            for dy, x in ((dq, q_BTGK), (dk, k_BTGK))
        )
    return dq, dk
