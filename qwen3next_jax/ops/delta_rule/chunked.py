"""The chunked algorithm of the gated delta rule in XLA. The algorithm first computes the matrices
that do not depend on the state, for all chunks at once. After the matrices, the algorithm carries
the state from chunk to chunk ("state pass").

This module has explicit formulas for the forward and the backward pass (docs/delta_rule.md);
`api.py` combines the two passes in one `jax.custom_vjp`. The arrays saved for the backward pass are
the inputs, the state before every chunk (in the inputs' dtype) and the chunks' inverses: per head,
O(T (K + V + C)) numbers and one state per chunk. The backward pass recomputes everything else.

The state pass is a `lax.scan` over the chunks in the implementation "chunked", and a
`lax.associative_scan` over the chunks' affine maps in the implementation "associative".
`forward_in_blocks` and `backward_in_blocks` compute a long sequence a few chunks at a time, so that
the intermediate arrays stay in a CPU's caches, or take a small part of an accelerator's memory.

The functions that `dispatch.py` lists take the arguments and return the results that
`Implementation` in `interface.py` describes.

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import chunk_math, inverse
from qwen3next_jax.ops.delta_rule.chunk_math import (
    Chunk,
    DocumentIndices,
    MatrixProducts,
    RowScaled,
)
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings


class BlockLimits(typing.NamedTuple):
    """Limits for the number of chunks that are computed at once, as one block. In the shapes,
    `width` is the larger of K and V.

    Attributes:
      single_chunk_multiply_adds: if a product of arrays [B, H, C, C] and [B, H, C, width] takes at
        least this number of multiply-adds, every block has a single chunk. Carrying the state
        through a block of one chunk needs no loop.
      block_elements: if a block may have several chunks, the largest number of elements that the
        arrays [B, H, C, width] of all its chunks may have together.
    """

    single_chunk_multiply_adds: int
    block_elements: int


# The arrays of a block take up to 0.5 MB each in float32, so a core's caches hold a few of them.
# Smaller blocks would take more time in total, because every block has a fixed cost.
CPU_LIMITS = BlockLimits(1 << 21, 1 << 17)
# The arrays of a block take up to 64 MB each in float32. A batched product then covers thousands of
# chunks, and about thirty such arrays are in memory at the same time.
LIMITS = BlockLimits(1 << 30, 1 << 24)


# ---- the three passes, over all chunks at once


def forward(x: Inputs, initial_state, inverses, settings: Settings, *, save: bool, parallel: bool):
    """Computes `forward` of `interface.Implementation` for all chunks at once. `parallel` says
    whether the state pass is an associative scan.
    """
    c, dots, exact = _prepare_chunks(x, inverses, settings)
    states, written, final = _carry_state_through_chunks(
        c, initial_state.astype(exact.operand_dtype), dots, exact, parallel
    )
    o = chunk_math.chunk_outputs(dots.nn(c.q, states), c.p, written, c.decay, dots)
    o = _from_chunks_by_head(o, x.v.shape[1]).astype(x.v.dtype)
    if not save:
        return o, final, None, None
    return o, final, states.astype(x.v.dtype), _inverses_to_head_pairs(c.inverse)


def affine_map(x: Inputs, initial_state, settings: Settings, *, parallel: bool):
    """Computes `affine_map` of `interface.Implementation` for all chunks at once. `parallel` says
    whether the state pass is an associative scan.
    """
    c, dots, exact = _prepare_chunks(x, None, settings)
    key, value = x.q.shape[-1], x.v.shape[-1]
    identity = jnp.broadcast_to(
        jnp.eye(key, dtype=exact.operand_dtype), (*initial_state.shape[:-1], key)
    )
    # M is the final state of a call whose values are zero and whose initial state is the identity.
    # So the state gets K more columns, and one state pass computes both U and M.
    c = c._replace(v=jnp.pad(c.v, [(0, 0)] * 4 + [(0, key)]))
    state = jnp.concatenate([initial_state.astype(exact.operand_dtype), identity], axis=-1)
    states, written, final = _carry_state_through_chunks(c, state, dots, exact, parallel)
    r = chunk_math.chunk_outputs(
        dots.nn(c.q, states[..., value:]), c.p, written[..., value:], c.decay, dots
    )
    return (
        final[..., :value],
        final[..., value:],
        r.astype(x.v.dtype),
        _inverses_to_head_pairs(c.inverse),
    )


def state_gradient_from_outputs(r, do):
    """Returns [B, H, K, V], the gradient of a state S on which the outputs depend by o = o0 + r S.
    The gradient is r^T dO, summed over all tokens.

    Args:
      r: [N, B, H, C, K], the r that `affine_map` returns.
      do: [B, T, H, V], the gradient of o.
    """
    return jnp.sum(
        MatrixProducts(r.dtype).tn(r, _to_chunks_by_head(do.astype(r.dtype), r.shape[3])), axis=0
    )


def backward(x: Inputs, states, inverses, do, dfinal, settings: Settings, *, parallel: bool):
    """Computes `backward` of `interface.Implementation` for all chunks at once. `parallel` says
    whether the state pass is an associative scan.
    """
    c, dots, exact = _prepare_chunks(x, inverses, settings)
    q, k, v, *_, segments = x
    states = states.astype(exact.operand_dtype)
    time, dtype = v.shape[1], exact.operand_dtype
    do = _to_chunks_by_head(do.astype(dtype), settings.chunk_size)
    dfinal = dfinal.astype(dtype)
    written, error = _written_values_and_errors(c, states, dots, exact)
    dstates, dr, dread, dinitial = _carry_state_gradient_back(c, do, dfinal, dots, exact, parallel)
    d = chunk_math.chunk_gradients(c, error, written, dr, dread, states, dstates, do, dots)
    dq, dk, dv, dbeta, dg = (
        _from_chunks_by_head(x, time) for x in (d.q, d.k, d.v, d.beta[..., 0], d.g[..., 0, :])
    )
    if segments is not None:
        dq = jnp.where(segments[:, :, None, None] > 0, dq, 0)
    dq, dk = _backward_through_normalization(
        dq, dk, q.astype(dtype), k.astype(dtype), settings.normalize_qk
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg, dbeta, dinitial


# ---- the forward and backward passes, one block of chunks after another


def forward_in_blocks(
    x: Inputs, initial_state, inverses, settings: Settings, *, save: bool, limits: BlockLimits
):
    """Computes `forward` of `interface.Implementation`, one block of chunks after another."""
    size, time = settings.chunk_size, x.v.shape[1]
    chunks = _chunks_per_block(limits, x, size)
    if chunks * size >= time:
        return forward(x, initial_state, inverses, settings, save=save, parallel=False)

    def block(state, inputs):
        continues, inverses, x = inputs
        state = zero_state_unless_continued(continues, state)
        o, state, *saved = forward(x, state, inverses, settings, save=save, parallel=False)
        return state, (o, *saved)

    block_inputs, continues = _split_inputs_into_blocks(x, chunks * size)
    initial = initial_state.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    final, (o, *saved) = jax.lax.scan(
        block, initial, (continues, blocks.to_chunks(inverses, 0, chunks), block_inputs)
    )
    return blocks.from_chunks(o, 1, time), final, *blocks.from_chunks(saved, 0, -(-time // size))


def backward_in_blocks(
    x: Inputs, states, inverses, do, dfinal, settings: Settings, *, limits: BlockLimits
):
    """Computes `backward` of `interface.Implementation`, one block of chunks after another, the
    last block first.
    """
    size, time = settings.chunk_size, x.v.shape[1]
    chunks = _chunks_per_block(limits, x, size)
    if chunks * size >= time:
        return backward(x, states, inverses, do, dfinal, settings, parallel=False)

    def block(dstate, inputs):
        continues, *inputs = inputs
        *gradients, dstate = backward(*inputs, dstate, settings, parallel=False)
        return zero_state_unless_continued(continues, dstate), gradients

    block_inputs, continues = _split_inputs_into_blocks(x, chunks * size)
    saved = blocks.to_chunks((states, inverses), 0, chunks)
    do = blocks.to_chunks(do, 1, chunks * size)
    dfinal = dfinal.astype(jnp.promote_types(jnp.float32, x.v.dtype))
    dinitial, gradients = jax.lax.scan(
        block, dfinal, (continues, block_inputs, *saved, do), reverse=True
    )
    return *blocks.from_chunks(gradients, 1, time), dinitial


def _chunks_per_block(limits: BlockLimits, x: Inputs, size: int) -> int:
    """Returns the number of chunks in a block. All blocks have the same number of chunks; the last
    block may be padded.

    Args:
      limits: the limits of a block.
      x: the arrays with a time axis.
      size: C.
    """
    batch, time, heads, value = x.v.shape
    chunks = -(-time // size)
    elements_of_a_chunk = batch * size * heads * max(x.q.shape[3], value)
    most = max(1, limits.block_elements // elements_of_a_chunk)
    if elements_of_a_chunk * size >= limits.single_chunk_multiply_adds:
        most = 1
    block_count = -(-chunks // most)
    return -(-chunks // block_count)


def _split_inputs_into_blocks(x: Inputs, length: int):
    """Splits the inputs into blocks of `length` tokens. Returns the inputs as [blocks, B, length,
    …] and booleans [blocks, B]: whether the first token of the block belongs to the same document
    as the token before it. The booleans of the first block are True. If a row is one document, the
    second result is None.

    The padding of the last block consists of zeros (a decay of 1 and no write), so the padding does
    not change the state.
    """
    block_inputs = blocks.to_chunks(x._replace(signed_segment_ids=None), 1, length)
    if x.signed_segment_ids is None:
        return block_inputs, None
    segments = blocks.to_chunks(x.signed_segment_ids, 1, length, "edge")
    ids = jnp.abs(segments)
    continues = jnp.concatenate(
        [jnp.ones_like(ids[:1, :, 0], bool), ids[1:, :, 0] == ids[:-1, :, -1]]
    )
    return block_inputs._replace(signed_segment_ids=segments), continues


def zero_state_unless_continued(continues_B, state_BHKV):
    """Returns the state [B, H, K, V], but with zeros in the rows of the batch whose next token
    starts another document.

    Args:
      continues_B: [B] booleans, whether the next token belongs to the same document as the state;
        None stands for True in all rows.
      state_BHKV: [B, H, K, V], the state before the next token; or the gradient of a state, or the
        matrix M of a map, which is zeroed in the same way.
    """
    if continues_B is None:
        return state_BHKV
    return jnp.where(continues_B[:, None, None, None], state_BHKV, 0)


# ---- inputs by chunk


def _prepare_chunks(
    x: Inputs, known_inverses, settings: Settings
) -> tuple[Chunk, MatrixProducts, MatrixProducts]:
    """Returns three things: the arrays of all chunks, [N, B, H, …]; `MatrixProducts` that cast
    operands to v's dtype; and `MatrixProducts` that cast operands to float32 (float64 for float64
    inputs).
    """
    q, k, v, g, beta, segments = x
    size, operand, heads = settings.chunk_size, v.dtype, v.shape[2]
    dtype = jnp.promote_types(jnp.float32, operand)
    dots, exact = (
        MatrixProducts(operand, may_copy_transpose=True),
        MatrixProducts(dtype, may_copy_transpose=True),
    )
    scales = chunk_math.query_and_key_scales(
        q.astype(dtype), k.astype(dtype), settings.normalize_qk
    )
    unscaled = operand == jnp.bfloat16  # products then take unscaled rows, see `RowScaled`
    q_, k_ = (
        _row_scaled(_to_chunks_by_head(x, size), _to_chunks_by_head(scale, size))
        if unscaled
        else _to_chunks_by_head(x.astype(dtype) * scale, size)
        for x, scale in zip((q, k), scales)
    )
    v_, g_, beta_ = (_to_chunks_by_head(x.astype(dtype), size) for x in (v, g, beta))
    documents = None
    if segments is not None:
        documents, is_token = _documents_of_chunks(segments, size)
        if unscaled:
            q_ = _row_scaled(q_.unscaled, jnp.where(is_token, q_.scale_column, 0))
        else:
            q_ = jnp.where(is_token, q_, 0)
    total = jnp.matmul(
        g_, chunk_math.lower_mask(size).astype(dtype).T, precision=chunk_math.HIGHEST
    )
    d = chunk_math.chunk_decays(
        total[..., None], total[..., None, :], total[..., -1:, None], documents
    )

    def to_value_heads(tree):
        return jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[2], axis=2), tree)

    kk, qk = to_value_heads(dots.nt(k_, k_)), to_value_heads(dots.nt(q_, k_))
    beta_ = beta_[..., None]
    a = None if known_inverses is None else _inverses_from_head_pairs(known_inverses, heads)
    if settings.delta_term and a is None:
        a = inverse.unit_lower_inverse(chunk_math.write_interaction_matrix(kk, beta_, d), exact)
    q_, k_ = to_value_heads(q_), to_value_heads(k_)
    return Chunk(q_, k_, v_, beta_, d, kk, qk, a, qk * d.pair), dots, exact


def _documents_of_chunks(segments, size: int):
    """Returns the documents of the rows of every chunk, and booleans [N, B, 1, C, 1]: whether the
    row is a token (not padding).
    """
    signed = _to_chunks_by_head(segments[:, :, None], size, "edge")  # [N, B, 1, C]
    index = chunk_math.document_index_in_chunk(signed[:, :, 0])[:, :, None]
    documents = DocumentIndices(index[..., None], index[..., None, :], index[..., -1:, None])
    return documents, signed[..., None] > 0


def _to_chunks_by_head(x, size: int, mode: str = "constant"):
    """Rearranges [B, T, heads, ...] into [N, B, heads, C, ...]; pads T to a multiple of C =
    `size`.
    """
    return jnp.swapaxes(blocks.to_chunks(x, 1, size, mode), 2, 3)


def _from_chunks_by_head(x, time: int):
    """The inverse of `_to_chunks_by_head`."""
    return blocks.from_chunks(jnp.swapaxes(x, 2, 3), 1, time)


def _row_scaled(raw, column):
    """Returns the rows `raw` [..., C, K] with the scales `column` [..., C, 1]."""
    return RowScaled(raw, column, jnp.swapaxes(column, -1, -2))


def _inverses_to_head_pairs(a_NBHCC):
    """Reshapes the inverses [N, B, H, C, C] to [N, B, ceil(H / 2), C, 2C], the shape that all
    implementations save. The numbers keep their order in memory; if H is odd, one head of zeros is
    added. Returns None for None.
    """
    if a_NBHCC is None:
        return None
    count, batch, heads, size, _ = a_NBHCC.shape
    a = jnp.pad(a_NBHCC, [(0, 0), (0, 0), (0, heads % 2), (0, 0), (0, 0)])
    return a.reshape(count, batch, -1, size, 2 * size)


def _inverses_from_head_pairs(a, heads: int):
    """The inverse of `_inverses_to_head_pairs`."""
    count, batch, _, size, _ = a.shape
    return a.reshape(count, batch, -1, size, size)[:, :, :heads]


# ---- the passes of the state from chunk to chunk


def _written_values_and_errors(c: Chunk, state, dots: MatrixProducts, exact: MatrixProducts):
    """Returns V' and the error V - gamma K S, from which V' is computed. Without the delta term, V'
    is beta V, and the error is V.
    """
    if c.inverse is None:
        return c.beta * c.v, c.v
    error = chunk_math.prediction_error(c.v, dots.nn(c.k, state), c.decay)
    return exact.nn(c.inverse, c.beta * error), error


def _without_token_pair_arrays(c: Chunk) -> Chunk:
    """Returns the chunks without the arrays that a step of the state pass does not read, so that
    the scan over the chunks does not slice these arrays.
    """
    return c._replace(q=None, kk=None, qk=None, p=None, decay=c.decay._replace(pair=None))


def _carry_state_through_chunks(
    c: Chunk, initial_state, dots: MatrixProducts, exact: MatrixProducts, parallel: bool
):
    """Returns the state before each chunk, V' of each chunk, and the final state."""
    if parallel:
        from qwen3next_jax.ops.delta_rule import associative

        states, final = associative.states_before_chunks(c, initial_state, exact)
        return states, _written_values_and_errors(c, states, dots, exact)[0], final

    def step(state, chunk: Chunk):
        written, _ = _written_values_and_errors(chunk, state, dots, exact)
        return chunk_math.next_state(state, chunk.k, written, chunk.decay, dots), (state, written)

    final, (states, written) = jax.lax.scan(step, initial_state, _without_token_pair_arrays(c))
    return states, written, final


def _carry_state_gradient_back(
    c: Chunk, do, dfinal, dots: MatrixProducts, exact: MatrixProducts, parallel: bool
):
    """Returns the gradient of the state after each chunk, the gradients dR and X of each chunk
    (`_backward_through_inverse`), and the gradient of the initial state.
    """
    po, qo = dots.tn(c.p, do), dots.tn(c.q, c.decay.gamma * do)
    if parallel:
        from qwen3next_jax.ops.delta_rule import associative

        dstates, dinitial = associative.state_gradients_after_chunks(c, po, qo, dfinal, exact)
        dwritten = chunk_math.gradient_of_written(po, c.k, dstates, c.decay, dots)
        dr, dread = _backward_through_inverse(c, dwritten, exact)
        return dstates, dr, dread, dinitial

    def step(dstate, inputs):
        chunk, po, qo = inputs
        dwritten = chunk_math.gradient_of_written(po, chunk.k, dstate, chunk.decay, dots)
        dr, dread = _backward_through_inverse(chunk, dwritten, exact)
        before = chunk_math.gradient_of_state_before(qo, chunk.k, dread, dstate, chunk.decay, dots)
        return before, (dstate, dr, dread)

    dinitial, (dstates, dr, dread) = jax.lax.scan(
        step, dfinal, (_without_token_pair_arrays(c), po, qo), reverse=True
    )
    return dstates, dr, dread, dinitial


def _backward_through_inverse(c: Chunk, dwritten, exact: MatrixProducts):
    """Computes the backward pass of V' = A R, where A is the inverse and R = beta (V - gamma K S).
    Returns dR = A^T dV', the gradient of R, and X = beta gamma dR, the gradient of -K S. Without
    the delta term there is no inverse, and the results are dV' and None.
    """
    if c.inverse is None:
        return dwritten, None
    dr = exact.tn(c.inverse, dwritten)
    return dr, c.beta * c.decay.gamma * dr


def _backward_through_normalization(dq_BTHK, dk_BTHK, q_BTGK, k_BTGK, normalize: bool):
    """Returns the gradients of q and k [B, T, G, K] from the gradients of the normalised and scaled
    q and k of each value head. The function sums over the value heads of each key head, multiplies
    dq by the scale K^{-1/2} and, if `normalize`, applies the backward pass of the L2 normalisation.
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
