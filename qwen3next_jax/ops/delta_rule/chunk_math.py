"""One chunk of the gated delta rule, forward and backward, as pure functions of arrays.

The implementations in XLA are made of these functions (with any leading batch dimensions). The TPU
kernels share the products, norms and documents, and arrange the rest for two heads at once
(`kernels/tpu/head_pairs.py`). docs/delta_rule.md derives the formulas and names every product; the
names here are the same:

  gamma  decay from the chunk's start to row i     rho    decay from row i to the chunk's end
  pair   decay from row j to row i, i >= j         carry  decay over the whole chunk
  A = (I + L)^{-1}, L the strictly lower part of beta (K K^T) * pair
  P = (Q K^T) * pair
  written = V' = A R, with R = beta (V - gamma K S)

q arrives multiplied by K^{-1/2} (and by zero on padding rows), so that no scale appears below.

C chunk length, K key width, V value width; a 1 is a row or column kept for broadcasting; `...`
leading batch dimensions.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target

HIGHEST = jax.lax.Precision.HIGHEST
NORM_EPSILON = 1e-6


def indices(rows: int, columns: int):
    """[rows, columns] the number of the row and of the column."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))


def split_precision(x, operand):
    """Arrays of the dtype `operand` whose sum is x: x itself, or, where `operand` is narrower, x
    rounded to it and the rounded remainder.
    """
    high = x.astype(operand)
    return (high,) if operand == x.dtype else (high, (x - high.astype(x.dtype)).astype(operand))


def stack_for_product(x_parts, y_parts, x_axis: int, y_axis: int):
    """Two operands whose one product is the sum of the products of all pairs of parts, but the
    pair of two remainders.

    The parts (`split_precision`) are concatenated along the contracted axes, `x_axis` of x and
    `y_axis` of y.
    """
    pairs = [(x, y) for i, x in enumerate(x_parts) for j, y in enumerate(y_parts) if i + j < 2]
    x, y = zip(*pairs)
    return jnp.concatenate(x, axis=x_axis), jnp.concatenate(y, axis=y_axis)


def _dot(x, y, x_dim: int, y_dim: int, precision=None):
    batch = tuple(range(x.ndim - 2))
    wide = jnp.promote_types(jnp.float32, x.dtype)
    return jax.lax.dot_general(
        x,
        y,
        (((x.ndim - 2 + x_dim,), (y.ndim - 2 + y_dim,)), (batch, batch)),
        precision=precision,
        preferred_element_type=wide,
    )


class Scaled(typing.NamedTuple):
    """A matrix whose rows are still to be multiplied by one number each: the unscaled rows, and the
    numbers as a column and as a row.

    For bfloat16 the norms of q and k stay outside the products: a normalised key that is rounded
    to bfloat16 no longer has length one, and with repeated keys that error compounds, while the
    unscaled key is exact.
    """

    raw: jax.Array  # [..., C, K]
    column: jax.Array  # [..., C, 1]
    row: jax.Array  # [..., 1, C]

    @property
    def shape(self):
        return self.raw.shape


class Products(typing.NamedTuple):
    """Matrix products that cast their operands and accumulate in float32 at least. Either operand
    may be `Scaled`.

    Attributes:
      operand: the dtype of the operands.
      copies: whether `tn` may write x^T to memory. On CPU, XLA gives only products over the left
        operand's last axis to its fast library, which takes half of the time.

    The argument `fine` of a product splits its right operand (`nt`: both) in two bfloat16 parts
    (`split_precision`) where `operand` is bfloat16: use it where terms may cancel in the sums that
    follow.
    """

    operand: typing.Any
    copies: bool = False

    def nn(self, x, y, fine: bool = False):
        """x @ y."""
        if isinstance(x, Scaled):
            product = self.nn(x.raw, y, fine)
            return x.column * product
        if isinstance(y, Scaled):
            return self.nn(x * y.row, y.raw, fine)
        if fine and self._narrow:
            x, y = stack_for_product(
                (x.astype(self.operand),), split_precision(y, self.operand), -1, -2
            )
        return _dot(x.astype(self.operand), y.astype(self.operand), 1, 0, self.precision)

    def nt(self, x, y, fine: bool = False):
        """x @ y^T."""
        if isinstance(x, Scaled):
            product = _dot(
                x.raw.astype(self.operand), y.raw.astype(self.operand), 1, 1, self.precision
            )
            return x.column * product * y.row
        if fine and self._narrow:
            x, y = stack_for_product(
                split_precision(x, self.operand), split_precision(y, self.operand), -1, -1
            )
        return _dot(x.astype(self.operand), y.astype(self.operand), 1, 1, self.precision)

    def tn(self, x, y, fine: bool = False):
        """x^T @ y."""
        if isinstance(x, Scaled):
            return self.tn(x.raw, x.column * y, fine)
        if isinstance(y, Scaled):
            return self.tn(y.column * x, y.raw, fine)
        if fine and self._narrow:
            x, y = stack_for_product(
                (x.astype(self.operand),), split_precision(y, self.operand), -2, -2
            )
        x, y = x.astype(self.operand), y.astype(self.operand)
        if not self.copies:
            return _dot(x, y, 0, 0, self.precision)
        x = jnp.swapaxes(x, -1, -2)
        if compile_target().platform == "cpu":  # the barrier keeps the transpose out of the product
            x = jax.lax.optimization_barrier(x)
        return _dot(x, y, 1, 0, self.precision)

    @property
    def _narrow(self):
        return jnp.dtype(self.operand) == jnp.bfloat16

    @property
    def precision(self):
        return None if self._narrow else HIGHEST


def rows_dot(x, y):
    """[..., C, 1]: the inner product of each row of x (maybe `Scaled`) with the same row of y."""
    if isinstance(x, Scaled):
        return x.column * jnp.sum(x.raw.astype(y.dtype) * y, axis=-1, keepdims=True)
    return jnp.sum(x * y, axis=-1, keepdims=True)


def lower_mask(size: int, strict: bool = False):
    """[size, size] booleans: row >= column, or row > column."""
    row, column = indices(size, size)
    return row > column if strict else row >= column


# ---- documents


def encode_segments(segment_ids, before=None):
    """Signed ids [B, T] of ids [B, T] with 0 for padding at the end: a padding row gets minus the
    id of the last document.

    |id| then says which state a row belongs to, and the sign whether the row is a token.

    Args:
      before: [B], the id of the last document that started before these rows; None where they are
        the first of their sequence.
    """
    ids = segment_ids.astype(jnp.int32)
    last = jnp.maximum(
        jax.lax.cummax(ids, axis=ids.ndim - 1), 1 if before is None else before[:, None]
    )
    return jnp.where(ids > 0, ids, -last)


def document_index(signed_chunks):
    """The index of each row's document inside its chunk, from signed ids [N, B, C]. 0 is the
    document of the state that enters the chunk; the state that enters the first chunk belongs to
    the first document.
    """
    ids = jnp.abs(signed_chunks)
    incoming = jnp.concatenate([ids[:1, :, :1], ids[:-1, :, -1:]])
    return jnp.cumsum(ids != jnp.concatenate([incoming, ids[..., :-1]], axis=-1), axis=-1)


def inverse_root(squares):
    """rsqrt(squares + 1e-6)."""
    return jax.lax.rsqrt(squares + NORM_EPSILON)


def inverse_norm(x):
    """[..., 1] rsqrt(sum x^2 + 1e-6)."""
    return inverse_root(jnp.sum(x * x, axis=-1, keepdims=True))


def inverse_norm_backward(dy, x, scale):
    """The gradient of x for y = x * inverse_norm(x). `scale` is inverse_norm(x)."""
    y = x * scale
    return scale * (dy - y * jnp.sum(dy * y, axis=-1, keepdims=True))


def scales(q, k, normalize: bool):
    """Two arrays [..., 1] of what the rows of q and k are multiplied by: the inverse of their L2
    norm if `normalize`, and for q also K^{-1/2}.
    """
    if not normalize:
        one = jnp.ones((), q.dtype)
        return jnp.full((*q.shape[:-1], 1), q.shape[-1] ** -0.5, q.dtype), jnp.broadcast_to(
            one, (*k.shape[:-1], 1)
        )
    return inverse_norm(q) * q.shape[-1] ** -0.5, inverse_norm(k)


# ---- decay


class Decay(typing.NamedTuple):
    """The decays inside a chunk; the file's legend says from where to where."""

    pair: jax.Array  # [..., C, C], zero above the diagonal and across documents
    gamma: jax.Array  # [..., C, 1]
    rho: jax.Array  # [..., C, 1]
    carry: jax.Array  # [..., 1, 1]


class Documents(typing.NamedTuple):
    """The index of each row's document inside its chunk (`document_index`), as a column and as a
    row, and that of the last row.
    """

    column: jax.Array  # [..., C, 1]
    row: jax.Array  # [..., 1, C]
    last: jax.Array  # [..., 1, 1]


def decay(total_C1, total_1C, total_11, documents: Documents | None) -> Decay:
    """The four decays of a chunk from the inclusive running sum of g, given as a column, as a row
    and as its last entry.

    The exponent is masked, and not the result, whose gradient would be NaN. It is never split into
    a product of two exponentials, because |total| can pass 1000.
    """
    mask = lower_mask(total_C1.shape[-2])
    gamma, rho, carry = total_C1, total_11 - total_C1, total_11
    if documents is not None:
        mask = mask & (documents.column == documents.row)
        gamma = jnp.where(documents.column == 0, gamma, -jnp.inf)
        rho = jnp.where(documents.column == documents.last, rho, -jnp.inf)
        carry = jnp.where(documents.last == 0, carry, -jnp.inf)
    pair = jnp.exp(jnp.where(mask, total_C1 - total_1C, -jnp.inf))
    return Decay(pair, jnp.exp(gamma), jnp.exp(rho), jnp.exp(carry))


class Chunk(typing.NamedTuple):
    """A chunk's inputs by head, and what every pass over them needs."""

    q: jax.Array | Scaled  # [..., C, K] normalised, scaled, zero on padding rows
    k: jax.Array | Scaled  # [..., C, K] normalised
    v: jax.Array  # [..., C, V]
    beta: jax.Array  # [..., C, 1]
    decay: Decay
    kk: jax.Array  # K K^T [..., C, C]
    qk: jax.Array  # Q K^T [..., C, C]
    inverse: jax.Array | None  # A [..., C, C]; None without the delta term
    p: jax.Array  # P [..., C, C]


# ---- forward


def interaction(kk_CC, beta_C1, d: Decay):
    """L: how much of the write at row j the write at row i subtracts."""
    return jnp.where(lower_mask(kk_CC.shape[-1], strict=True), beta_C1 * kk_CC * d.pair, 0)


def prediction_error(v_CV, ks_CV, d: Decay):
    """V - gamma K S, the part of the values that the incoming state does not hold."""
    return v_CV - d.gamma * ks_CV


def next_state(state_KV, k_CK, written_CV, d: Decay, dots: Products):
    """S' = carry S + K^T (rho V')."""
    return d.carry * state_KV + dots.tn(k_CK, d.rho * written_CV, fine=True)


def output(qs_CV, p_CC, written_CV, d: Decay, dots: Products):
    """O = gamma (Q S) + P V'."""
    return d.gamma * qs_CV + dots.nn(p_CC, written_CV, fine=True)


# ---- backward


class Gradients(typing.NamedTuple):
    """Of one chunk's inputs."""

    q: jax.Array  # [..., C, K]
    k: jax.Array  # [..., C, K]
    v: jax.Array  # [..., C, V]
    beta: jax.Array  # [..., C, 1]
    g: jax.Array  # [..., 1, C]


def written_backward(po_CV, k_CK, dstate_KV, d: Decay, dots: Products):
    """dV' = P^T dO + rho (K dS'). `po_CV` is P^T dO."""
    return po_CV + d.rho * dots.nn(k_CK, dstate_KV)


def state_backward(qo_KV, k_CK, x_CV, dstate_KV, d: Decay, dots: Products):
    """dS = carry dS' + (gamma Q)^T dO - K^T X.

    Args:
      qo_KV: (gamma Q)^T dO.
      x_CV: X = beta gamma dR; None without the delta term.
    """
    dstate = d.carry * dstate_KV + qo_KV
    return dstate if x_CV is None else dstate - dots.tn(k_CK, x_CV)


def chunk_gradients(
    c: Chunk, error_CV, written_CV, dr_CV, x_CV, state_KV, dstate_KV, do_CV, dots: Products
) -> Gradients:
    """The gradients of one chunk's inputs, once those of the states are known.

    Args:
      error_CV: V - gamma K S, or V without the delta term.
      written_CV: V'. dr_CV: dR. x_CV: X, as in `state_backward`. do_CV: dO.
      state_KV: S, the state that enters. dstate_KV: dS', the gradient of the state that leaves.
    """
    q_CK, k_CK, beta_C1, d = c.q, c.k, c.beta, c.decay
    strict = lower_mask(q_CK.shape[-2], strict=True)
    dv_CV = beta_C1 * dr_CV
    dbeta_C1 = jnp.sum(dr_CV * error_CV, axis=-1, keepdims=True)
    ov_CC = dots.nt(do_CV, written_CV, fine=True) * d.pair
    pairs_CC = ov_CC * c.qk
    os_CK = d.gamma * dots.nt(do_CV, state_KV)
    enter_C1 = rows_dot(q_CK, os_CK)
    dq_CK = os_CK + dots.nn(ov_CC, k_CK)
    vs_CK = d.rho * dots.nt(written_CV, dstate_KV, fine=True)
    leave_C1 = rows_dot(k_CK, vs_CK)
    dk_CK = dots.tn(ov_CC, q_CK) + vs_CK
    if c.inverse is not None:
        rv_CC = jnp.where(strict, -dots.nt(dr_CV, written_CV, fine=True) * d.pair, 0)
        n_CC = beta_C1 * rv_CC
        pairs_CC += n_CC * c.kk
        dbeta_C1 += jnp.sum(rv_CC * c.kk, axis=-1, keepdims=True)
        xs_CK = dots.nt(x_CV, state_KV, fine=True)
        enter_C1 -= rows_dot(k_CK, xs_CK)
        dk_CK += dots.tn(n_CC, k_CK) + dots.nn(n_CC, k_CK) - xs_CK
    carry_11 = d.carry * jnp.sum(dstate_KV * state_KV, axis=(-1, -2), keepdims=True)
    return Gradients(
        dq_CK, dk_CK, dv_CV, dbeta_C1, decay_gradient(pairs_CC, enter_C1, leave_C1) + carry_11
    )


def decay_gradient(pairs_CC, enter_C1, leave_C1):
    """dg_t = sum_{i>=t>j} pairs_ij + sum_{i>=t} enter_i + sum_{i<t} leave_i, as a row [..., 1, C].

    The rectangle is summed entry by entry, because differences of row and column sums cancel
    catastrophically.
    """
    size = pairs_CC.shape[-1]
    lower, strict = lower_mask(size), lower_mask(size, strict=True)
    pairs_CC = jnp.where(strict, pairs_CC, 0)
    before_CC = jax.lax.dot_general(  # row i, column t: the sum over columns j < t
        pairs_CC,
        strict.astype(pairs_CC.dtype),
        (((pairs_CC.ndim - 1,), (1,)), ((), ())),
        precision=HIGHEST,
    )
    return jnp.sum(jnp.where(lower, before_CC + enter_C1, leave_C1), axis=-2, keepdims=True)
