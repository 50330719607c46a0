"""The chunked implementation of `channel_delta_rule`, in XLA alone. The chunks are processed in
groups, called pieces, one piece after another. First the arrays that do not depend on the state are
computed, for all chunks of a piece at once. Then a scan carries the state from chunk to chunk.

In a chunk of C rows (tokens), γ is the decay from the chunk's start to each row, and ρ is the decay
from each row to the chunk's end (both [C, K], see `decay_levels`). S is the state before the chunk,
S' is the state after it, and e^{total} is the decay over the whole chunk. E holds the keys of the
delta term: the argument `erase_key`, or the keys K if `erase_key` is None. Products with β, γ and ρ
are elementwise.

    EK_ij = Σ_c e_ic k_jc e^{Σ_{j<t≤i} g_tc}
    P_ij  = Σ_c q_ic k_jc e^{Σ_{j<t≤i} g_tc}
    L  = strictly lower(β EK)
    A  = (I + L)^{-1}
    W  = A β (V − (E γ) S)                      (without the delta term: W = β V)
    O  = (Q γ) S + P W
    S' = e^{total} S + (K ρ)ᵀ W

The backward pass computes the gradients explicitly from dO and dS':

    dW   = Pᵀ dO + (K ρ) dS'
    dR   = Aᵀ dW
    dV   = β dR
    dL   = −strictly lower(dR Wᵀ)
    N    = β dL
    D    = lower(dO Wᵀ)
    dS   = e^{total} dS' + (Q γ)ᵀ dO − (E γ)ᵀ dV
    dβ   = Σ dR (V − (E γ) S) + rowsum(dL EK)
    read = γ (dO Sᵀ)
    seen = −γ (dV Sᵀ)
    left = ρ (W dS'ᵀ)
    dQ   = read + …
    dK   = left + …
    dE   = seen + …

In dQ, dK and dE, the dots stand for sums over the levels of `decay_levels`, which are computed from
D and N. The gradient of a decay's exponent is the gradient of a decayed number, such as an entry of
K ρ, times the decayed number itself. The transpose of the linear function
`decay_levels.decay_exponents` turns the gradients of all exponents into dg. The arrays saved for
the backward pass are the inputs, the state before each chunk and the inverse A of each chunk. This
file does not treat documents separately, because `api.py` has set g = −∞ where a document starts.

In the recurrence, each token corrects the rounding errors of the tokens before it. In a product
with A, later rows do not correct the errors of earlier rows, and with repeated keys the errors add
up. Therefore W and dR get one step of iterative refinement if the operands of products have the
dtype of the sums (float32 or float64). For W, which solves (I + L) W = Y with Y = β (V − (E γ) S),
the refinement step adds A (Y − (I + L) W) to W. The refinement of dR uses the transposes of A and
L.

With bfloat16 inputs, the operands of matrix products are multiplied by decays and then rounded to
bfloat16. Where the terms of a product cancel if keys repeat, the code splits operands into two
bfloat16 parts: both operands of EK, (E γ) S and (K ρ)ᵀ W, and the operand W of P W.

Letters: N chunks, B batch, G key heads, H heads, C chunk length, K key width, V value width.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import inverse
from qwen3next_jax.ops.delta_rule.chunk_math import (
    MatrixProducts,
    concatenate_split_operands,
    lower_mask,
    row_dot_products,
    split_high_and_low,
)
from qwen3next_jax.zoo.ops.channel_delta_rule import decay_levels


class TokenArrays(typing.NamedTuple):
    """The arguments of a call of `channel_delta_rule` that have an axis of tokens."""

    q: jax.Array  # [B, T, G, K]
    k: jax.Array  # [B, T, G, K]
    v: jax.Array  # [B, T, H, V]
    log_decay: jax.Array  # [B, T, H, K]
    beta: jax.Array  # [B, T, H]
    value_log_decay: jax.Array | None = None  # [B, T, H, V]
    erase_key: jax.Array | None = None  # [B, T, H, K]; None: k

    def repeat_key_heads(self) -> "TokenArrays":
        """Returns the arrays with q and k repeated to [B, T, H, K]: every key head once for each
        head that reads it.
        """
        heads = self.v.shape[2]
        return self._replace(
            q=jnp.repeat(self.q, heads // self.q.shape[2], axis=2),
            k=jnp.repeat(self.k, heads // self.k.shape[2], axis=2),
        )


class Chunks(typing.NamedTuple):
    """The arrays of a group of chunks that both the forward and the backward pass need. The
    comments use the letters of the formulas at the top of the file.
    """

    q: jax.Array  # [N, B, H, C, K]
    k: jax.Array  # [N, B, H, C, K]
    v: jax.Array  # [N, B, H, C, V]
    beta: jax.Array  # [N, B, H, C, 1]
    queries_by_level: tuple  # for each level q times its decays, [N, B, H, C, K]
    keys_by_level: tuple  # for each level k times its decays, [N, B, H, C, K]
    erase_keys_by_level: tuple  # for each level E times its decays; `keys_by_level` if E is k
    decays: decay_levels.DecayExponents  # the decays: e^x for each exponent x
    erase_keys: jax.Array  # E, the keys of the delta term, [N, B, H, C, K]
    erase_keys_from_start: jax.Array  # E γ
    queries_from_start: jax.Array  # Q γ
    keys_to_end: jax.Array  # K ρ
    total_decay: jax.Array  # e^total, [N, B, H, K, 1]
    erase_key_products: jax.Array | None  # EK, [N, B, H, C, C]
    query_key_products: jax.Array  # P, [N, B, H, C, C]
    triangular_inverse: jax.Array | None  # A, [N, B, H, C, C]


def product_of_split_operands(product, x, y, dots: MatrixProducts, x_axis: int, y_axis: int):
    """Returns product(x, y). If `dots.operand` is bfloat16, x and y are both split into two
    bfloat16 parts, which are concatenated along the contracted axes `x_axis` and `y_axis`.
    """
    return product(
        *concatenate_split_operands(
            split_high_and_low(x, dots.operand_dtype),
            split_high_and_low(y, dots.operand_dtype),
            x_axis,
            y_axis,
        )
    )


def _to_chunks(x, size: int):
    """Pads T, and rearranges an array [B, T, H, …] into N chunks of C tokens, [N, B, H, C, …]."""
    return jnp.swapaxes(blocks.to_chunks(x, 1, size), 2, 3)


def _chunks_and_products(
    x: TokenArrays, known_inverse, size: int, delta_term: bool, reads_before_write: bool, dtype
) -> tuple[Chunks, MatrixProducts, MatrixProducts]:
    """Returns the `Chunks` of the rows x; the `MatrixProducts` that cast operands to v's dtype; and
    the `MatrixProducts` that cast operands to `dtype`, the dtype of the state.

    Args:
      x: the arrays of a group of chunks.
      known_inverse: the inverse A = (I + L)^{-1} that the forward pass saved; None in the forward
        pass.
      size: number of tokens of a chunk.
      delta_term: whether the write has the delta term -S^T k.
      reads_before_write: whether a token reads the state before its own decay and write.
      dtype: the dtype of the state.
    """
    dots, exact = (
        MatrixProducts(x.v.dtype, may_copy_transpose=True),
        MatrixProducts(dtype, may_copy_transpose=True),
    )
    q, k, v, g, beta = (_to_chunks(array.astype(dtype), size) for array in x.repeat_key_heads()[:5])
    e = k if x.erase_key is None else _to_chunks(x.erase_key.astype(dtype), size)
    beta = beta[..., None]
    decays = jax.tree.map(jnp.exp, decay_levels.decay_exponents(g, reads_before_write))
    keys = tuple(k * decay for decay in decays.by_level)
    erase_keys = keys if x.erase_key is None else tuple(e * decay for decay in decays.by_level)
    reads = tuple(q * decay for decay in decays.query_by_level)
    p, ek, a = decay_levels.pair_products(reads, keys, dots.nt), None, known_inverse
    if not reads_before_write:
        p = p + jnp.eye(size, dtype=dtype) * row_dot_products(q, k)
    if delta_term:
        ek = decay_levels.pair_products(erase_keys, keys, lambda x, y: dots.nt(x, y, fine=True))
        a = inverse.unit_lower_inverse(beta * ek, exact) if a is None else a
    return (
        Chunks(
            q,
            k,
            v,
            beta,
            reads,
            keys,
            erase_keys,
            decays,
            e,
            e * decays.from_start,
            q * decays.query_from_start,
            k * decays.to_end,
            jnp.swapaxes(decays.total, -1, -2),
            ek,
            p,
            a,
        ),
        dots,
        exact,
    )


def _writes_and_errors(c: Chunks, state, dots: MatrixProducts, exact: MatrixProducts):
    """Returns the writes W and the errors V − (E γ) S of a chunk, with the letters at the top of
    the file. Without the delta term, the results are β V and V.
    """
    if c.triangular_inverse is None:
        return c.beta * c.v, c.v
    errors = c.v - product_of_split_operands(dots.nn, c.erase_keys_from_start, state, dots, -1, -2)
    right = c.beta * errors
    written = exact.nn(c.triangular_inverse, right)
    if dots == exact:
        written += exact.nn(
            c.triangular_inverse, right - written - c.beta * exact.nn(c.erase_key_products, written)
        )
    return written, errors


def _arrays_for_scan(c: Chunks) -> Chunks:
    """Returns `c` without the arrays that the scan over the chunks does not read."""
    return c._replace(
        q=None,
        k=None,
        queries_by_level=None,
        keys_by_level=None,
        erase_keys_by_level=None,
        decays=None,
        erase_keys=None,
        query_key_products=None,
    )


def forward_pass(
    x: TokenArrays,
    initial_state,
    *,
    size: int,
    piece: int,
    delta_term: bool,
    reads_before_write: bool,
):
    """Computes the forward pass of the chunked implementation.

    Args:
      x: the arrays with an axis of tokens.
      initial_state: [B, H, K, V].
      size: the number of tokens of a chunk.
      piece: the number of chunks that are computed at once.
      delta_term: whether the write has the delta term -S^T e (e is k if there is no erase_key).
      reads_before_write: whether a token reads the state before its own decay and write.

    Returns:
      o [B, T, H, V] in the state's dtype; the final state [B, H, K, V]; and for the backward pass
      the state before each chunk [N, B, H, K, V] and the inverses A [N, B, H, C, C] (None without
      the delta term).
    """

    def one(state, x):
        c, dots, exact = _chunks_and_products(
            x, None, size, delta_term, reads_before_write, state.dtype
        )

        def step(state, chunk):
            written, _ = _writes_and_errors(chunk, state, dots, exact)
            return chunk.total_decay * state + product_of_split_operands(
                dots.tn, chunk.keys_to_end, written, dots, -2, -2
            ), (
                state,
                written,
            )

        state, (states, written) = blocks.scan_or_call_once(step, state, _arrays_for_scan(c))
        o = dots.nn(c.queries_from_start, states) + dots.nn(
            c.query_key_products, written, fine=True
        )
        return state, (_from_chunks(o, x.v.shape[1]), states, c.triangular_inverse)

    time, count = x.v.shape[1], -(-x.v.shape[1] // size)
    final, (o, *saved) = blocks.scan_or_call_once(
        one, initial_state, blocks.to_chunks(x, 1, piece * size)
    )
    return blocks.from_chunks(o, 1, time), final, *blocks.from_chunks(saved, 0, count)


def _from_chunks(x, time: int):
    """Rearranges an array of chunks [N, B, H, C, …] into [B, T, H, …] for T = `time`."""
    return blocks.from_chunks(jnp.swapaxes(x, 2, 3), 1, time)


def backward_pass(
    x: TokenArrays,
    states,
    inverses,
    do,
    dfinal,
    *,
    size: int,
    piece: int,
    delta_term: bool,
    reads_before_write: bool,
):
    """Returns the gradients of the fields of `TokenArrays`, in the order of the fields, and the
    gradient of the initial state. The gradient of value_log_decay is None, because this
    implementation does not support a value_log_decay. The gradient of erase_key is None if
    erase_key is None.

    Args:
      x: the arrays with an axis of tokens.
      states, inverses: the last two results of `forward_pass`.
      do: [B, T, H, V], the gradient of o.
      dfinal: [B, H, K, V], the gradient of the final state.
      size, piece, delta_term, reads_before_write: the arguments of `forward_pass`.
    """

    def one(dstate, inputs):
        x, states, inverses, do = inputs
        c, dots, exact = _chunks_and_products(
            x, inverses, size, delta_term, reads_before_write, dstate.dtype
        )
        do = _to_chunks(do, size)
        written, errors = _writes_and_errors(c, states, dots, exact)
        po, qo = dots.tn(c.query_key_products, do), dots.tn(c.queries_from_start, do)

        def step(dstate, inputs):
            chunk, po, qo = inputs
            dwritten = po + dots.nn(chunk.keys_to_end, dstate)
            dr = exact.tn(chunk.triangular_inverse, dwritten) if delta_term else dwritten
            if delta_term and dots == exact:
                dr += exact.tn(
                    chunk.triangular_inverse,
                    dwritten - dr - exact.tn(chunk.erase_key_products, chunk.beta * dr),
                )
            entering = chunk.total_decay * dstate + qo
            if delta_term:
                entering = entering - product_of_split_operands(
                    dots.tn, chunk.erase_keys_from_start, chunk.beta * dr, dots, -2, -2
                )
            return entering, (dstate, dr)

        entering, (dstates, dr) = _reverse_scan(step, dstate, (_arrays_for_scan(c), po, qo))
        gradients = _input_gradients(
            c,
            states,
            dstates,
            written,
            errors,
            dr,
            do,
            reads_before_write,
            dots,
            x.erase_key is None,
        )
        return entering, jax.tree.map(lambda array: _from_chunks(array, x.v.shape[1]), gradients)

    saved, rows = (
        blocks.to_chunks((states, inverses), 0, piece),
        blocks.to_chunks((x, do.astype(dfinal.dtype)), 1, piece * size),
    )
    dinitial, gradients = _reverse_scan(one, dfinal, (rows[0], *saved, rows[1]))
    dq, dk, *rest = blocks.from_chunks(gradients, 1, x.v.shape[1])
    narrow = lambda dx: dx.reshape(*x.q.shape[:3], -1, x.q.shape[3]).sum(axis=3)
    return narrow(dq), narrow(dk), *rest, dinitial


def _reverse_scan(step, carry, xs):
    """Runs `jax.lax.scan` from the last entry to the first. If the arrays have only one entry, this
    function calls `step` without a loop.
    """
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, xs, reverse=True)
    return blocks.scan_or_call_once(step, carry, xs)


def _input_gradients(
    c: Chunks,
    states,
    dstates,
    written,
    errors,
    dr,
    do,
    reads_before_write: bool,
    dots: MatrixProducts,
    by_key: bool,
):
    """Returns the gradients of the fields of `TokenArrays` for each chunk, [N, B, H, C, …]: dq, dk,
    dv, dg, dβ, None and dE.

    Args:
      states: the states before the chunks.
      dstates: the gradients of the states after the chunks.
      written, errors: the results of `_writes_and_errors`.
      dr: the gradient dR.
      do: the gradient of o.
      reads_before_write: whether a token reads the state before its own decay and write.
      by_key: whether the keys E of the delta term are the keys k; then the gradient of E is added
        to dk, and dE is None.
    """
    dv = c.beta * dr
    dbeta = jnp.sum(dr * errors, axis=-1)
    d = dots.nt(do, written, fine=True)
    read = c.decays.query_from_start * dots.nt(do, states)
    left = c.decays.to_end * dots.nt(written, dstates, fine=True)
    seen = n = None
    if c.triangular_inverse is not None:
        dl = jnp.where(lower_mask(d.shape[-1], strict=True), -dots.nt(dr, written, fine=True), 0)
        dbeta += jnp.sum(dl * c.erase_key_products, axis=-1)
        n, seen = c.beta * dl, -c.decays.from_start * dots.nt(dv, states, fine=True)
    dq, dk, de = read, left if seen is None or not by_key else left + seen, seen
    if not reads_before_write:
        diagonal = jnp.diagonal(d, axis1=-2, axis2=-1)[..., None]
        dq, dk = dq + diagonal * c.k, dk + diagonal * c.q
    by_level, by_read = [], []
    for level, (q, k, e) in enumerate(
        zip(c.queries_by_level, c.keys_by_level, c.erase_keys_by_level)
    ):
        dq_scaled, dk_scaled = decay_levels.pair_products_backward(d, q, k, level, dots.nn, dots.tn)
        if n is not None:
            de_scaled, dk_scaled_of_writes = decay_levels.pair_products_backward(
                n, e, k, level, dots.nn, dots.tn
            )
            dk_scaled = (
                dk_scaled + de_scaled + dk_scaled_of_writes
                if by_key
                else dk_scaled + dk_scaled_of_writes
            )
        dq, dk = (
            dq + c.decays.query_by_level[level] * dq_scaled,
            dk + c.decays.by_level[level] * dk_scaled,
        )
        by_level.append(k * dk_scaled)
        if not by_key:
            de, by_level[-1] = (
                de + c.decays.by_level[level] * de_scaled,
                by_level[-1] + e * de_scaled,
            )
        by_read.append(q * dq_scaled)
    total = jnp.swapaxes(c.total_decay * jnp.sum(dstates * states, axis=-1, keepdims=True), -1, -2)
    enter = jnp.zeros_like(c.k) if seen is None else c.erase_keys * seen
    exponent_gradients = decay_levels.DecayExponents(
        tuple(by_level), tuple(by_read), enter, c.q * read, c.k * left, total
    )
    (dg,) = jax.vjp(
        lambda g: decay_levels.decay_exponents(g, reads_before_write), jnp.zeros_like(c.k)
    )[1](exponent_gradients)
    return dq, dk, dv, dg, dbeta, None, None if by_key else de
