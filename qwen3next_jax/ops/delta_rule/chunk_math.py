"""One chunk of the gated delta rule, forward and backward, as pure functions of arrays.

The XLA forms are made of it (any leading batch dimensions); the TPU kernels share its products,
norms and documents, and arrange the rest for two heads at once (`kernels/tpu/head_pairs.py`). The
derivation is in docs/delta_rule.md. Every product has a name there; the names here follow it:

  gamma  decay from the chunk's start to row i        rho  decay from row i to the chunk's end
         pair   decay from row j to row i (lower triangle)    carry  decay over the whole chunk A
         = (I + L)^{-1}, L the strictly lower part of beta (K K^T) * pair;  P = (Q K^T) * pair;
         written = V' = A R

q arrives multiplied by K^{-1/2} (and by zero on padding rows), so that no scale appears below.

C chunk length, K key width, V value width; a 1 is a column or row kept for broadcasting; `...`
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


def parts(x, operand):
    """x as a sum of arrays of the type `operand`: itself, or its high part and what that leaves."""
    high = x.astype(operand)
    return (high,) if operand == x.dtype else (high, (x - high.astype(x.dtype)).astype(operand))


def stacked(x_parts, y_parts, x_axis: int, y_axis: int):
    """The pairs of parts whose products count (all but low with low), stacked along the
    contraction: those axes of x and y.
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
    """Rows as they came, and the number each is to be multiplied by, as a column and as a row.

    Normalised keys rounded to bfloat16 no longer have length one, and with keys that repeat that
    error compounds; keys as they came are exact. So for bfloat16 the norm stays outside the
    products.
    """

    raw: jax.Array  # [..., C, K]
    column: jax.Array  # [..., C, 1]
    row: jax.Array  # [..., 1, C]

    @property
    def shape(self):
        return self.raw.shape


class Products(typing.NamedTuple):
    """Matrix products with operands in `operand` and at least float32 accumulation; either
    operand may be `Scaled`.

    `fine` takes the right operand (`nt`: both) in two bfloat16 parts where that is the operand
    type: terms may cancel in the sums that follow.

    `copies` says that x^T may be made where x^T @ y is slow: on CPU, XLA hands only products
    over the left operand's last axis to its fast library (half of the time of the others).
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
            x, y = stacked((x.astype(self.operand),), parts(y, self.operand), -1, -2)
        return _dot(x.astype(self.operand), y.astype(self.operand), 1, 0, self.precision)

    def nt(self, x, y, fine: bool = False):
        """x @ y^T."""
        if isinstance(x, Scaled):
            product = _dot(
                x.raw.astype(self.operand), y.raw.astype(self.operand), 1, 1, self.precision
            )
            return x.column * product * y.row
        if fine and self._narrow:
            x, y = stacked(parts(x, self.operand), parts(y, self.operand), -1, -1)
        return _dot(x.astype(self.operand), y.astype(self.operand), 1, 1, self.precision)

    def tn(self, x, y, fine: bool = False):
        """x^T @ y."""
        if isinstance(x, Scaled):
            return self.tn(x.raw, x.column * y, fine)
        if isinstance(y, Scaled):
            return self.tn(y.column * x, y.raw, fine)
        if fine and self._narrow:
            x, y = stacked((x.astype(self.operand),), parts(y, self.operand), -2, -2)
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


# ---- inputs
# -----------------------------------------------------------------------------------------------


class Inputs(typing.NamedTuple):
    """The arrays of one call by token, which every pass over it takes."""

    q: jax.Array  # [B, T, G, K]
    k: jax.Array  # [B, T, G, K]
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H]
    beta: jax.Array  # [B, T, H]
    segments: jax.Array | None = None  # [B, T], see `encode_segments`

    def cast(self, gradients) -> "Inputs":
        """The gradients of q, k, v, g and beta in their dtypes; ids have none."""
        return Inputs(*(dx.astype(x.dtype) for dx, x in zip(gradients, self)))


def chunk_size(x: Inputs) -> int:
    """Tokens of a chunk: 64; 16 for float32 heads of at most 32 channels, where work within a
    chunk (8 C d) outweighs the state's (6 d²): a training step of configs/tiny.py took 0.57 s
    instead of 0.66 on 2 CPU cores. For a shorter sequence, the power of two that holds it. In
    bfloat16 every chunk rounds the state once more as an operand, so there it stays 64.
    """
    narrow = max(x.q.shape[-1], x.v.shape[-1]) <= 32
    longest = 16 if narrow and x.v.dtype == jnp.float32 else 64
    return min(longest, max(16, 1 << (x.q.shape[1] - 1).bit_length()))


def encode_segments(segment_ids, before=None):
    """[B, T] ids (0 = padding at the end) to signed ids: a padding row carries minus the last
    document's id.

    |id| then says which state a row belongs to, and the sign whether it is a token at all.
    `before` [B]: the id of the last document that started before these rows, where they are not
    the first of their sequence.
    """
    ids = segment_ids.astype(jnp.int32)
    last = jnp.maximum(
        jax.lax.cummax(ids, axis=ids.ndim - 1), 1 if before is None else before[:, None]
    )
    return jnp.where(ids > 0, ids, -last)


def document_index(signed_chunks):
    """[N, B, C] signed ids to the document's index inside its chunk, 0 being the incoming
    state's document.

    The state entering the first chunk belongs to the first document.
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
    """Gradient of x for y = x * inverse_norm(x), `scale` being inverse_norm(x)."""
    y = x * scale
    return scale * (dy - y * jnp.sum(dy * y, axis=-1, keepdims=True))


def scales(q, k, normalize: bool):
    """[..., 1] factors of the rows of q and k: the L2 norm's inverse where asked, for q also
    K^{-1/2}.
    """
    if not normalize:
        one = jnp.ones((), q.dtype)
        return jnp.full((*q.shape[:-1], 1), q.shape[-1] ** -0.5, q.dtype), jnp.broadcast_to(
            one, (*k.shape[:-1], 1)
        )
    return inverse_norm(q) * q.shape[-1] ** -0.5, inverse_norm(k)


# ---- decay
# ------------------------------------------------------------------------------------------------


class Decay(typing.NamedTuple):
    pair: jax.Array  # [..., C, C], zero above the diagonal and across documents
    gamma: jax.Array  # [..., C, 1]
    rho: jax.Array  # [..., C, 1]
    carry: jax.Array  # [..., 1, 1]


class Documents(typing.NamedTuple):
    """Which document of the chunk each row belongs to, counted from 0 = the incoming state's, as
    a column and a row.
    """

    column: jax.Array  # [..., C, 1]
    row: jax.Array  # [..., 1, C]
    last: jax.Array  # [..., 1, 1]


def decay(total_C1, total_1C, total_11, documents: Documents | None) -> Decay:
    """The four decays of a chunk from the inclusive running sum of g (a column, a row, and its
    last entry).

    The exponent is masked, never the result, and never split into a product: |total| can pass 1000.
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


# ---- forward
# ----------------------------------------------------------------------------------------------


def interaction(kk_CC, beta_C1, d: Decay):
    """L: how much of row j's write row i erases."""
    return jnp.where(lower_mask(kk_CC.shape[-1], strict=True), beta_C1 * kk_CC * d.pair, 0)


def unseen(v_CV, ks_CV, d: Decay):
    """V - gamma K S: the part of the values that the incoming state does not predict."""
    return v_CV - d.gamma * ks_CV


def next_state(state_KV, k_CK, written_CV, d: Decay, dots: Products):
    """S' = carry S + K^T (rho V')."""
    return d.carry * state_KV + dots.tn(k_CK, d.rho * written_CV, fine=True)


def output(qs_CV, p_CC, written_CV, d: Decay, dots: Products):
    """O = gamma (Q S) + P V'."""
    return d.gamma * qs_CV + dots.nn(p_CC, written_CV, fine=True)


# ---- backward
# ---------------------------------------------------------------------------------------------


class Gradients(typing.NamedTuple):
    q: jax.Array  # [..., C, K]
    k: jax.Array  # [..., C, K]
    v: jax.Array  # [..., C, V]
    beta: jax.Array  # [..., C, 1]
    g: jax.Array  # [..., 1, C]


def written_backward(po_CV, k_CK, dstate_KV, d: Decay, dots: Products):
    """dV' = P^T dO + rho (K dS'), the first term given."""
    return po_CV + d.rho * dots.nn(k_CK, dstate_KV)


def state_backward(qo_KV, k_CK, x_CV, dstate_KV, d: Decay, dots: Products):
    """dS = carry dS' + (gamma Q)^T dO - K^T X, the second term given; X = beta gamma dR, None
    without erasing.
    """
    dstate = d.carry * dstate_KV + qo_KV
    return dstate if x_CV is None else dstate - dots.tn(k_CK, x_CV)


def chunk_gradients(
    q_CK,
    k_CK,
    unseen_CV,
    beta_C1,
    d: Decay,
    kk_CC,
    qk_CC,
    written_CV,
    dr_CV,
    x_CV,
    state_KV,
    dstate_KV,
    do_CV,
    erase: bool,
    dots: Products,
) -> Gradients:
    """Everything but the state pass: the gradients of one chunk's inputs from V', dR, X, S, dS'
    and dO.

    `unseen_CV` is V - gamma K S, or V without erasing.
    """
    strict = lower_mask(q_CK.shape[-2], strict=True)
    dv_CV = beta_C1 * dr_CV
    dbeta_C1 = jnp.sum(dr_CV * unseen_CV, axis=-1, keepdims=True)
    ov_CC = dots.nt(do_CV, written_CV, fine=True) * d.pair
    pairs_CC = ov_CC * qk_CC
    os_CK = d.gamma * dots.nt(do_CV, state_KV)
    enter_C1 = rows_dot(q_CK, os_CK)
    dq_CK = os_CK + dots.nn(ov_CC, k_CK)
    vs_CK = d.rho * dots.nt(written_CV, dstate_KV, fine=True)
    leave_C1 = rows_dot(k_CK, vs_CK)
    dk_CK = dots.tn(ov_CC, q_CK) + vs_CK
    if erase:
        rv_CC = jnp.where(strict, -dots.nt(dr_CV, written_CV, fine=True) * d.pair, 0)
        n_CC = beta_C1 * rv_CC
        pairs_CC += n_CC * kk_CC
        dbeta_C1 += jnp.sum(rv_CC * kk_CC, axis=-1, keepdims=True)
        xs_CK = dots.nt(x_CV, state_KV, fine=True)
        enter_C1 -= rows_dot(k_CK, xs_CK)
        dk_CK += dots.tn(n_CC, k_CK) + dots.nn(n_CC, k_CK) - xs_CK
    carry_11 = d.carry * jnp.sum(dstate_KV * state_KV, axis=(-1, -2), keepdims=True)
    return Gradients(
        dq_CK, dk_CK, dv_CV, dbeta_C1, decay_gradient(pairs_CC, enter_C1, leave_C1) + carry_11
    )


def decay_gradient(pairs_CC, enter_C1, leave_C1):
    """dg_t = sum_{i>=t>j} pairs_ij + sum_{i>=t} enter_i + sum_{i<t} leave_i, as a row [..., 1, C].

    The rectangle is summed as it stands: differences of row and column sums cancel
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
