"""The forward and backward computation of one chunk of the gated delta rule, as pure functions of
arrays.

The XLA implementations call all functions of this module, with any leading batch dimensions. The
TPU kernels call only the functions for products, norms and documents, because they compute
everything else for two heads at once (`kernels/tpu/head_pairs.py`). docs/delta_rule.md derives the
formulas and uses the same names. Row i of a matrix belongs to token i of the chunk:

  gamma    [C, 1]  decay from the chunk's start to row i
  rho      [C, 1]  decay from row i to the chunk's end
  pair     [C, C]  decay from row j to row i, for i >= j
  carry    [1, 1]  decay over the whole chunk
  L        [C, C]  the strictly lower part of beta (K K^T) * pair
  A        [C, C]  (I + L)^{-1}
  P        [C, C]  (Q K^T) * pair
  S        [K, V]  the state before the chunk; S' is the state after it
  R        [C, V]  beta (V - gamma K S)
  V'       [C, V]  A R, what the chunk writes into the state; `written` in the code

Q is already multiplied by K^{-1/2}, and is zero for padding, so the formulas have no factor
K^{-1/2}.

C chunk length, K key width, V value width, 1 an axis that is kept for broadcasting, `...` leading
batch dimensions.
"""

import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target

HIGHEST = jax.lax.Precision.HIGHEST
NORM_EPSILON = 1e-6


def row_and_column_indices(rows: int, columns: int):
    """Returns two arrays [rows, columns]: the index of the row and the index of the column."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))


def split_high_and_low(x, operand):
    """Returns a tuple of arrays of dtype `operand` whose sum is x, exactly or up to rounding. If
    `operand` is x's dtype, the tuple is (x,). If `operand` is narrower, the tuple holds x rounded
    to `operand` and the remainder rounded to `operand`; the sum of both differs from x by the
    rounding error of the remainder.
    """
    high = x.astype(operand)
    return (high,) if operand == x.dtype else (high, (x - high.astype(x.dtype)).astype(operand))


def concatenate_split_operands(x_parts, y_parts, x_axis: int, y_axis: int):
    """Returns two operands. The product of the two operands is the sum of the products of all parts
    of x with all parts of y, except the product of the two remainders.

    Args:
      x_parts, y_parts: the parts of x and y, which `split_high_and_low` returns.
      x_axis, y_axis: the contracted axes of x and y, along which the parts are concatenated.
    """
    pairs = [(x, y) for i, x in enumerate(x_parts) for j, y in enumerate(y_parts) if i + j < 2]
    x, y = zip(*pairs)
    return jnp.concatenate(x, axis=x_axis), jnp.concatenate(y, axis=y_axis)


def _dot(x, y, x_dim: int, y_dim: int, precision=None):
    """Returns the product of the matrices x and y [..., rows, columns] in float32 or float64.
    `x_dim` and `y_dim` are the axes of x and y that are contracted: 0 for the rows, 1 for the
    columns.
    """
    batch = tuple(range(x.ndim - 2))
    wide = jnp.promote_types(jnp.float32, x.dtype)
    return jax.lax.dot_general(
        x,
        y,
        (((x.ndim - 2 + x_dim,), (y.ndim - 2 + y_dim,)), (batch, batch)),
        precision=precision,
        preferred_element_type=wide,
    )


class RowScaled(typing.NamedTuple):
    """A matrix in two factors: the unscaled rows, and for each row a number by which the row has to
    be multiplied.

    q and k in bfloat16 are stored as `RowScaled`. Products take the unscaled rows of q and k, which
    need no rounding. A normalised key that is rounded to bfloat16 no longer has length one, and
    this error compounds if keys repeat.
    """

    unscaled: jax.Array  # [..., C, K], the unscaled rows
    scale_column: jax.Array  # [..., C, 1], the numbers as a column
    scale_row: jax.Array  # [..., 1, C], the same numbers as a row

    @property
    def shape(self):
        return self.unscaled.shape


class MatrixProducts(typing.NamedTuple):
    """Matrix products that cast their operands to one dtype and accumulate in float32 or float64.
    An operand may be `RowScaled`; in `nt`, either both operands are `RowScaled` or neither operand
    is.

    If `operand_dtype` is bfloat16 and the argument `fine` is True, a product splits its right
    operand into two bfloat16 parts (`split_high_and_low`); `nt` splits both operands. Use `fine` if
    terms may cancel in later sums.

    Attributes:
      operand_dtype: the dtype to which operands are cast.
      may_copy_transpose: whether `tn` may write x^T to memory. On a CPU, XLA calls its fast
        library, which takes half the time, only for products that contract the last axis of the
        left operand.
    """

    operand_dtype: typing.Any
    may_copy_transpose: bool = False

    def nn(self, x, y, fine: bool = False):
        """x @ y."""
        if isinstance(x, RowScaled):
            product = self.nn(x.unscaled, y, fine)
            return x.scale_column * product
        if isinstance(y, RowScaled):
            return self.nn(x * y.scale_row, y.unscaled, fine)
        if fine and self._casts_to_bfloat16:
            x, y = concatenate_split_operands(
                (x.astype(self.operand_dtype),), split_high_and_low(y, self.operand_dtype), -1, -2
            )
        return _dot(
            x.astype(self.operand_dtype), y.astype(self.operand_dtype), 1, 0, self.precision
        )

    def nt(self, x, y, fine: bool = False):
        """x @ y^T."""
        if isinstance(x, RowScaled):
            product = _dot(
                x.unscaled.astype(self.operand_dtype),
                y.unscaled.astype(self.operand_dtype),
                1,
                1,
                self.precision,
            )
            return x.scale_column * product * y.scale_row
        if fine and self._casts_to_bfloat16:
            x, y = concatenate_split_operands(
                split_high_and_low(x, self.operand_dtype),
                split_high_and_low(y, self.operand_dtype),
                -1,
                -1,
            )
        return _dot(
            x.astype(self.operand_dtype), y.astype(self.operand_dtype), 1, 1, self.precision
        )

    def tn(self, x, y, fine: bool = False):
        """x^T @ y."""
        if isinstance(x, RowScaled):
            return self.tn(x.unscaled, x.scale_column * y, fine)
        if isinstance(y, RowScaled):
            return self.tn(y.scale_column * x, y.unscaled, fine)
        if fine and self._casts_to_bfloat16:
            x, y = concatenate_split_operands(
                (x.astype(self.operand_dtype),), split_high_and_low(y, self.operand_dtype), -2, -2
            )
        x, y = x.astype(self.operand_dtype), y.astype(self.operand_dtype)
        if not self.may_copy_transpose:
            return _dot(x, y, 0, 0, self.precision)
        x = jnp.swapaxes(x, -1, -2)
        if compile_target().platform == "cpu":  # keeps XLA from fusing x^T into the product
            x = jax.lax.optimization_barrier(x)
        return _dot(x, y, 1, 0, self.precision)

    @property
    def _casts_to_bfloat16(self):
        """Whether operands are bfloat16."""
        return jnp.dtype(self.operand_dtype) == jnp.bfloat16

    @property
    def precision(self):
        """The precision of the products: HIGHEST for float32 and float64 operands, None (JAX's
        default) for bfloat16 operands.
        """
        return None if self._casts_to_bfloat16 else HIGHEST


def row_dot_products(x, y):
    """Returns [..., C, 1], the inner product of each row of x with the same row of y. x may be
    `RowScaled`.
    """
    if isinstance(x, RowScaled):
        return x.scale_column * jnp.sum(x.unscaled.astype(y.dtype) * y, axis=-1, keepdims=True)
    return jnp.sum(x * y, axis=-1, keepdims=True)


def lower_mask(size: int, strict: bool = False):
    """Returns booleans [size, size]: row >= column, or row > column if `strict`."""
    row, column = row_and_column_indices(size, size)
    return row > column if strict else row >= column


# ---- documents


def signed_segment_ids(segment_ids, before=None):
    """Returns signed ids [B, T] for `segment_ids` [B, T], which has 0 for padding at the end. A
    token keeps the id of its document. Padding gets minus the id of the last document before the
    padding, or -1 if there is no document before it.

    If a signed id is negative, the position holds padding. The absolute value of the signed id is
    the id of the document whose state is carried through the position.

    Args:
      segment_ids: [B, T] integers.
      before: [B], the id of the last document before the T positions; None if nothing precedes the
        T positions.
    """
    ids = segment_ids.astype(jnp.int32)
    last = jnp.maximum(
        jax.lax.cummax(ids, axis=ids.ndim - 1), 1 if before is None else before[:, None]
    )
    return jnp.where(ids > 0, ids, -last)


def document_index_in_chunk(signed_chunks):
    """Returns [N, B, C], the index of each row's document inside its chunk, from signed ids
    [N, B, C]. Index 0 is the document to which the state before the chunk belongs. The state before
    the first chunk belongs to the first document.
    """
    ids = jnp.abs(signed_chunks)
    incoming = jnp.concatenate([ids[:1, :, :1], ids[:-1, :, -1:]])
    return jnp.cumsum(ids != jnp.concatenate([incoming, ids[..., :-1]], axis=-1), axis=-1)


def rsqrt_with_epsilon(squares):
    """Returns rsqrt(squares + 1e-6)."""
    return jax.lax.rsqrt(squares + NORM_EPSILON)


def inverse_norm(x):
    """Returns [..., 1], rsqrt(sum x^2 + 1e-6) with the sum over the last axis."""
    return rsqrt_with_epsilon(jnp.sum(x * x, axis=-1, keepdims=True))


def inverse_norm_backward(dy, x, scale):
    """Returns the gradient of x, given the gradient dy of y = x * inverse_norm(x). `scale` is
    inverse_norm(x).
    """
    y = x * scale
    return scale * (dy - y * jnp.sum(dy * y, axis=-1, keepdims=True))


def query_and_key_scales(q, k, normalize: bool):
    """Returns two arrays [..., 1], the factors of the rows of q and the factors of the rows of k.
    If `normalize`, the factors are the inverse L2 norms of the rows, else 1. The factors of q also
    contain K^{-1/2}.
    """
    if not normalize:
        one = jnp.ones((), q.dtype)
        return jnp.full((*q.shape[:-1], 1), q.shape[-1] ** -0.5, q.dtype), jnp.broadcast_to(
            one, (*k.shape[:-1], 1)
        )
    return inverse_norm(q) * q.shape[-1] ** -0.5, inverse_norm(k)


# ---- decay


class ChunkDecays(typing.NamedTuple):
    """The four decays inside a chunk, which the docstring of this module defines."""

    pair: jax.Array  # [..., C, C], zero above the diagonal and across documents
    gamma: jax.Array  # [..., C, 1]
    rho: jax.Array  # [..., C, 1]
    carry: jax.Array  # [..., 1, 1]


class DocumentIndices(typing.NamedTuple):
    """The indices that `document_index_in_chunk` returns for the rows of a chunk."""

    index_column: jax.Array  # [..., C, 1], the indices as a column
    index_row: jax.Array  # [..., 1, C], the same indices as a row
    last_index: jax.Array  # [..., 1, 1], the index of the last row


def chunk_decays(total_C1, total_1C, total_11, documents: DocumentIndices | None) -> ChunkDecays:
    """Returns the four decays of a chunk.

    The mask is applied before the exponential, because the exponential of an entry that the mask
    hides may overflow, and would make the gradient NaN. A decay is never computed as a product of
    two exponentials, because the absolute values of exponents can exceed 1000, where exponentials
    overflow or vanish.

    Args:
      total_C1: [..., C, 1], the inclusive running sum of g, as a column.
      total_1C: [..., 1, C], the running sum of g as a row.
      total_11: [..., 1, 1], the last entry of the running sum of g.
      documents: the documents of the rows; None if all rows belong to one document.
    """
    mask = lower_mask(total_C1.shape[-2])
    gamma, rho, carry = total_C1, total_11 - total_C1, total_11
    # No row sees another document. Only rows of the document that the chunk continues (number 0)
    # read the state before the chunk, and only rows of its last document write to the state after.
    if documents is not None:
        mask = mask & (documents.index_column == documents.index_row)
        gamma = jnp.where(documents.index_column == 0, gamma, -jnp.inf)
        rho = jnp.where(documents.index_column == documents.last_index, rho, -jnp.inf)
        carry = jnp.where(documents.last_index == 0, carry, -jnp.inf)
    pair = jnp.exp(jnp.where(mask, total_C1 - total_1C, -jnp.inf))
    return ChunkDecays(pair, jnp.exp(gamma), jnp.exp(rho), jnp.exp(carry))


class Chunk(typing.NamedTuple):
    """A chunk's inputs for each value head, and the matrices that every pass over a chunk needs."""

    q: jax.Array | RowScaled  # [..., C, K], normalised, times K^{-1/2}, zero for padding
    k: jax.Array | RowScaled  # [..., C, K], normalised
    v: jax.Array  # [..., C, V]
    beta: jax.Array  # [..., C, 1]
    decay: ChunkDecays
    kk: jax.Array  # [..., C, C], K K^T
    qk: jax.Array  # [..., C, C], Q K^T
    inverse: jax.Array | None  # [..., C, C], A; None without the delta term
    p: jax.Array  # [..., C, C], P


# ---- forward


def write_interaction_matrix(kk_CC, beta_C1, d: ChunkDecays):
    """Returns L. Entry (i, j) of L is the factor with which the write of row j is subtracted from
    the write of row i.
    """
    return jnp.where(lower_mask(kk_CC.shape[-1], strict=True), beta_C1 * kk_CC * d.pair, 0)


def prediction_error(v_CV, ks_CV, d: ChunkDecays):
    """Returns V - gamma K S: the values minus the predicted values gamma K S, which the decayed
    state before the chunk holds for the keys. `ks_CV` is K S.
    """
    return v_CV - d.gamma * ks_CV


def next_state(state_KV, k_CK, written_CV, d: ChunkDecays, dots: MatrixProducts):
    """Returns S' = carry S + K^T (rho V')."""
    return d.carry * state_KV + dots.tn(k_CK, d.rho * written_CV, fine=True)


def chunk_outputs(qs_CV, p_CC, written_CV, d: ChunkDecays, dots: MatrixProducts):
    """Returns O = gamma (Q S) + P V'. `qs_CV` is Q S."""
    return d.gamma * qs_CV + dots.nn(p_CC, written_CV, fine=True)


# ---- backward


class ChunkGradients(typing.NamedTuple):
    """The gradients of one chunk's inputs."""

    q: jax.Array  # [..., C, K]
    k: jax.Array  # [..., C, K]
    v: jax.Array  # [..., C, V]
    beta: jax.Array  # [..., C, 1]
    g: jax.Array  # [..., 1, C]


def gradient_of_written(po_CV, k_CK, dstate_KV, d: ChunkDecays, dots: MatrixProducts):
    """Returns dV' = P^T dO + rho (K dS'). `po_CV` is P^T dO and `dstate_KV` is dS'."""
    return po_CV + d.rho * dots.nn(k_CK, dstate_KV)


def gradient_of_state_before(qo_KV, k_CK, x_CV, dstate_KV, d: ChunkDecays, dots: MatrixProducts):
    """Returns dS = carry dS' + (gamma Q)^T dO - K^T X.

    Args:
      qo_KV: (gamma Q)^T dO.
      k_CK: K.
      x_CV: X = beta gamma dR; None without the delta term.
      dstate_KV: dS'.
      d: the decays.
      dots: the products.
    """
    dstate = d.carry * dstate_KV + qo_KV
    return dstate if x_CV is None else dstate - dots.tn(k_CK, x_CV)


def chunk_gradients(
    c: Chunk, error_CV, written_CV, dr_CV, x_CV, state_KV, dstate_KV, do_CV, dots: MatrixProducts
) -> ChunkGradients:
    """Returns the gradients of one chunk's inputs, given the gradient of the state after the chunk.

    Args:
      c: the chunk.
      error_CV: V - gamma K S, or V without the delta term.
      written_CV: V'.
      dr_CV: dR.
      x_CV: X = beta gamma dR; None without the delta term.
      state_KV: S, the state before the chunk.
      dstate_KV: dS', the gradient of the state after the chunk.
      do_CV: dO.
      dots: the products.
    """
    q_CK, k_CK, beta_C1, d = c.q, c.k, c.beta, c.decay
    strict = lower_mask(q_CK.shape[-2], strict=True)
    dv_CV = beta_C1 * dr_CV
    dbeta_C1 = jnp.sum(dr_CV * error_CV, axis=-1, keepdims=True)
    ov_CC = dots.nt(do_CV, written_CV, fine=True) * d.pair
    pairs_CC = ov_CC * c.qk
    os_CK = d.gamma * dots.nt(do_CV, state_KV)
    enter_C1 = row_dot_products(q_CK, os_CK)
    dq_CK = os_CK + dots.nn(ov_CC, k_CK)
    vs_CK = d.rho * dots.nt(written_CV, dstate_KV, fine=True)
    leave_C1 = row_dot_products(k_CK, vs_CK)
    dk_CK = dots.tn(ov_CC, q_CK) + vs_CK
    if c.inverse is not None:
        rv_CC = jnp.where(strict, -dots.nt(dr_CV, written_CV, fine=True) * d.pair, 0)
        n_CC = beta_C1 * rv_CC
        pairs_CC += n_CC * c.kk
        dbeta_C1 += jnp.sum(rv_CC * c.kk, axis=-1, keepdims=True)
        xs_CK = dots.nt(x_CV, state_KV, fine=True)
        enter_C1 -= row_dot_products(k_CK, xs_CK)
        dk_CK += dots.tn(n_CC, k_CK) + dots.nn(n_CC, k_CK) - xs_CK
    carry_11 = d.carry * jnp.sum(dstate_KV * state_KV, axis=(-1, -2), keepdims=True)
    return ChunkGradients(
        dq_CK, dk_CK, dv_CV, dbeta_C1, log_decay_gradient(pairs_CC, enter_C1, leave_C1) + carry_11
    )


def log_decay_gradient(pairs_CC, enter_C1, leave_C1):
    """Returns dg_t = sum_{i>=t>j} pairs_ij + sum_{i>=t} enter_i + sum_{i<t} leave_i, as a row
    [..., 1, C].

    The sum of pairs_ij is computed by adding entries of `pairs_CC`. Differences of running sums
    over rows and columns would take less work, but would suffer from catastrophic cancellation.
    """
    size = pairs_CC.shape[-1]
    lower, strict = lower_mask(size), lower_mask(size, strict=True)
    pairs_CC = jnp.where(strict, pairs_CC, 0)
    before_CC = jax.lax.dot_general(  # entry (i, t) is the sum of pairs_ij over j < t
        pairs_CC,
        strict.astype(pairs_CC.dtype),
        (((pairs_CC.ndim - 1,), (1,)), ((), ())),
        precision=HIGHEST,
    )
    return jnp.sum(jnp.where(lower, before_CC + enter_C1, leave_C1), axis=-2, keepdims=True)
