"""Mosaic TPU kernels of the gated delta rule, forward and backward.

One grid step computes one chunk of a block of heads. The chunk axis of the grid is innermost and
sequential. In the forward pass the state stays in VMEM from chunk to chunk, in the output block of
the final state. In the backward pass the gradient of the state stays in the output block of the
gradient of the initial state. The value heads that share a key head share the products K K^T and Q
K^T, and the kernel sums dQ and dK over these value heads.

docs/delta_rule.md, "In terms of E", derives the formulas; E is the matrix of prediction errors. A
TPU scales the rows and columns of matrices faster for two heads at once. So the kernels keep beta,
the decays and the norms of q and k as rows [pairs, 2C], which hold one number for each token of two
heads. To scale a matrix, the kernels first multiply rows [pairs, 2C] with each other, and then
broadcast the product over the lanes.

Matrix products take operands in the inputs' dtype and accumulate in float32. Where the terms of a
sum may cancel, an operand is split into two bfloat16 parts (`head_pairs.PairProducts`).

B batch, T time, N chunks, C chunk length, G key heads, H value heads, K key width, V value width.
One grid step has J key heads, I value heads and E = I / 2 pairs of value heads (`head_pairs.py`);
in the shape of an array, E always means I / 2. R any number of rows, X any width.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import head_pairs
from qwen3next_jax.kernels.tpu.delta_rule_tiling import Problem
from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings


def unsupported_reason(x: Inputs, settings: Settings, split: bool) -> str:
    """Returns why the kernels cannot run a call of the operator on the chip; "" if they can.

    The answer depends only on shapes, dtypes and the chip, so the forward and the backward pass of
    a call get the same answer. The forward and the backward pass have to run the same
    implementation, because the kernels arrange the saved inverses differently from the XLA
    implementations.
    """
    if any(array is not None and array.dtype == jnp.float64 for array in x):
        return "has float64 inputs: expected float32 or bfloat16"
    try:
        Problem(x.q, x.v, settings.chunk_size)
    except NotImplementedError as error:
        return str(error)
    return ""


def forward(
    x: Inputs, initial_state, inverses, settings: Settings, *, save: bool, interpret: bool = False
):
    """Computes what `ops.delta_rule.interface.Implementation.forward` describes. Without `save` the
    kernel writes only o and the final state. `interpret` says whether a CPU interprets the kernel.
    """
    p, v = Problem(x.q, x.v, settings.chunk_size), x.v
    inputs = p.common_kernel_inputs(x)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    if inverses is not None:
        inputs["inverses"] = p.pad_inverses(inverses)
    outputs = dict(
        o=p.flattened_shape_struct(p.value_heads, p.value_width, v.dtype),
        final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    if save:
        outputs["states"] = jax.ShapeDtypeStruct((p.chunks, *p.state_shape), v.dtype)
        if settings.delta_term and inverses is None:
            outputs["inverses"] = p.inverses_shape
    results = p.call_kernel(_forward_kernel, inputs, outputs, settings, False, interpret)
    o = p.unflatten_heads(results["o"], v.shape)
    states = p.unpad_state(results["states"]) if save else None
    if "inverses" in results:
        inverses = p.unpad_inverses(results["inverses"])
    return o, p.unpad_state(results["final"]), states, inverses if save else None


def affine_map(x: Inputs, initial_state, settings: Settings, *, interpret: bool = False):
    """Computes what `ops.delta_rule.interface.Implementation.affine_map` describes. `interpret`
    says whether a CPU interprets the kernel.
    """
    p = Problem(x.q, x.v, settings.chunk_size)
    inputs = p.common_kernel_inputs(x)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    heads = p.state_shape[:2]
    outputs = dict(
        final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
        m=jax.ShapeDtypeStruct((*heads, p.key_width, p.key_width), jnp.float32),
        reads=jax.ShapeDtypeStruct((p.chunks, *heads, p.chunk_size, p.key_width), x.v.dtype),
    )
    if settings.delta_term:
        outputs["inverses"] = p.inverses_shape
    results = p.call_kernel(_map_kernel, inputs, outputs, settings, False, interpret)
    key, value_heads = p.unpadded_key_width, p.unpadded_value_heads
    m = results["m"][:, :value_heads, :key, :key]
    reads = results["reads"][:, :, :value_heads, :, :key]
    u = p.unpad_state(results["final"])
    return u, m, reads, p.unpad_inverses(results["inverses"]) if settings.delta_term else None


def backward(
    x: Inputs, states, inverses, do, dfinal, settings: Settings, *, interpret: bool = False
):
    """Computes what `ops.delta_rule.interface.Implementation.backward` describes. `interpret` says
    whether a CPU interprets the kernel.
    """
    q, k, v, *_ = x
    p = Problem(q, v, settings.chunk_size)
    inputs = p.common_kernel_inputs(x)
    inputs |= dict(
        do=p.flatten_heads(do.astype(v.dtype), p.value_heads), states=p.pad_state(states)
    )
    inputs["dfinal"] = p.pad_state(dfinal.astype(jnp.float32))
    if settings.delta_term:
        inputs["inverses"] = p.pad_inverses(inverses)
    outputs = dict(
        dq=p.flattened_shape_struct(p.key_heads, p.key_width, q.dtype),
        dk=p.flattened_shape_struct(p.key_heads, p.key_width, k.dtype),
        dv=p.flattened_shape_struct(p.value_heads, p.value_width, v.dtype),
        dg=p.rows_shape,
        dbeta=p.rows_shape,
        dinitial=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    results = p.call_kernel(_backward_kernel, inputs, outputs, settings, True, interpret)
    dq, dk, dv = (
        p.unflatten_heads(results[name], shape)
        for name, shape in (("dq", q.shape), ("dk", k.shape), ("dv", v.shape))
    )
    dg, dbeta = p.from_pair_rows(results["dg"]), p.from_pair_rows(results["dbeta"])
    return dq, dk, dv, dg, dbeta, p.unpad_state(results["dinitial"])


# ---- kernels
#
# Each operation is applied to all heads of a grid step, which are a leading axis of every array.
# The compiler mostly keeps the order of operations, so the operations of other heads hide the
# latency of one head's operation.


class _ChunkOfHeads:
    """The inputs of the heads of one grid step, and the arrays that both the forward and the
    backward pass compute from these inputs. In this class, "the norm" of a row of q or k is the
    factor that normalises the row: the inverse of the row's L2 norm (1 if q and k are not
    normalised).

    Attributes:
      p, refs: the problem, and the Pallas references of inputs and outputs by name.
      dots: products with operands in the inputs' dtype.
      lower, strict: booleans [C, 2C] for the two matrices of a pair: row >= column, row > column.
      shared: whether the two value heads of every pair have the same key head.
      k, q, kq: [J, C, K], [J, C, K] and [J, 2C, K], the unnormalised rows; `kq` has k above q.
      beta: [E, 1, 2C].
      carry: [I, 1, 1], the decay over the whole chunk.
      pair_decay: [E, C, 2C], the decay from row j to row i.
      kk, qk: [E, C, 2C], K K^T and Q K^T without the norms of q and k.
      kk_scale, qk_scale: [E, C, 2C], the factors by which the entries of `kk` and `qk` have to be
        multiplied: the norms of both rows of an entry, and in `qk_scale` also the scale K^{-1/2}.
      k_gamma, q_gamma: [E, 2C], the decay from the chunk's start times the norm of k or q.
      rho_row: [E, 2C], the decay to the chunk's end times the norm of k.
      k_rho: [E, 2C], `rho_row` times beta.
      k_norm, q_norm: [J, C, LANES], the norms of the key heads' rows, repeated in all lanes;
        `q_norm` also contains the scale K^{-1/2}.
    """

    def __init__(self, p: Problem, refs, normalize: bool):
        self.p, self.refs, size = p, refs, p.chunk_size
        self.dots = head_pairs.PairProducts(p.operand_dtype)
        total, beta = refs["total"][0, 0, 0], refs["beta"][0, 0, 0]  # [E, 2C]
        row, column = chunk_math.row_and_column_indices(size, 2 * size)
        self.lower, self.strict, on_diagonal = (
            f(row, column % size) for f in (jnp.greater_equal, jnp.greater, jnp.equal)
        )
        gamma, rho, is_token = self._set_decays(total, beta)
        # Whether the two value heads of a pair always have the same key head.
        self.shared = p.heads_per_key % 2 == 0
        self.k, self.q = (
            self.load_heads(name, p.key_width).astype(p.operand_dtype) for name in "kq"
        )  # [J, C, K]
        self.kq = jnp.concatenate([self.k, self.q], axis=1)  # [J, 2C, K]
        products = self._products_of_keys_and_queries()
        self._set_norms(products, on_diagonal, is_token, gamma, rho, beta, normalize)

    def _set_decays(self, total, beta):
        """Sets beta, carry and pair_decay. Returns the logarithms of gamma and rho, [E, 2C] each,
        and booleans [1, 2C] that are False for padding (None if each row of the batch is one
        document).
        """
        size = self.p.chunk_size
        last = jnp.where(
            head_pairs.is_first_head((1, 2 * size)),
            total[:, size - 1 : size],
            total[:, 2 * size - 1 :],
        )
        gamma, rho, carry, mask, is_token = total, last - total, last, self.lower, None
        if "documents" in self.refs:
            signed = self.refs["documents"][0, 0]  # [1, 2C]
            is_token = signed >= 0
            index = jnp.where(is_token, signed, -1 - signed)
            mask = mask & (jnp.broadcast_to(index, (8, 2 * size)).T[:size, :1] == index)
            gamma = jnp.where(index == 0, gamma, -jnp.inf)
            rho = jnp.where(index == index[:, -1:], rho, -jnp.inf)
            carry = jnp.where(index[:, -1:] == 0, carry, -jnp.inf)
        self.beta, carry = beta[:, None], jnp.exp(carry)[:, None]  # [E, 1, 2C]
        self.carry = head_pairs.interleave_heads(carry[..., :1], carry[..., size : size + 1])
        self.pair_decay = jnp.exp(
            jnp.where(mask, head_pairs.broadcast_pairs_as_columns(total) - total[:, None], -jnp.inf)
        )
        return gamma, rho, is_token

    def _products_of_keys_and_queries(self):
        """Returns [J, 2C, 4C], or [E, 2C, 4C] if the heads of a pair may have different key heads:
        the products of the unnormalised rows of k and q (2C) with the rows of k and q of two heads
        (4C). The products contain K K^T, Q K^T and Q Q^T. The diagonals of K K^T and Q Q^T are the
        squared L2 norms of the rows.
        """
        if self.shared:
            right = jnp.concatenate([self.k, self.k, self.q, self.q], axis=1)
            return self.dots.plain_products.nt(self.kq, right)
        right = jnp.concatenate(
            [head_pairs.block_diagonal(self.repeat_for_value_heads(x)) for x in (self.k, self.q)],
            axis=1,
        )
        return self.dots.plain_products.nt(
            head_pairs.concat_pair(self.repeat_for_value_heads(self.kq)), right
        )

    def _set_norms(self, products, on_diagonal, is_token, gamma, rho, beta, normalize: bool):
        """Sets kk, qk and all attributes that contain a norm."""
        p, size = self.p, self.p.chunk_size
        k_row = q_row = jnp.ones((products.shape[0], 2 * size), jnp.float32)  # [J or E, 2C]
        if normalize:
            squares = products[:, :size, : 2 * size], products[:, size:, 2 * size :]
            k_row, q_row = (
                chunk_math.rsqrt_with_epsilon(jnp.sum(jnp.where(on_diagonal, x, 0), axis=1))
                for x in squares
            )
        q_row = q_row * p.unpadded_key_width**-0.5
        if is_token is not None:
            q_row = jnp.where(is_token, q_row, 0)
        if self.shared:
            norms = tuple(head_pairs.broadcast_over_lanes(x[:, :size]) for x in (k_row, q_row))
            scale = jnp.concatenate([x[..., : 2 * size] for x in norms], axis=1)
        else:
            first = lambda x: x.reshape(-1, p.heads_per_key, *x.shape[1:])[:, 0]
            norms = tuple(first(head_pairs.broadcast_pairs_over_lanes(x)) for x in (k_row, q_row))
            scale = jnp.concatenate(
                [head_pairs.broadcast_pairs_as_columns(x) for x in (k_row, q_row)], axis=1
            )
        self.k_norm, self.q_norm = norms
        scale = scale * k_row[:, None]
        self.kk = self.repeat_for_pairs(products[:, :size, : 2 * size])
        self.qk = self.repeat_for_pairs(products[:, size:, : 2 * size])
        self.kk_scale = self.repeat_for_pairs(scale[:, :size])
        self.qk_scale = self.repeat_for_pairs(scale[:, size:])
        k_row, gamma = self.repeat_for_pairs(k_row), jnp.exp(gamma)
        self.rho_row = k_row * jnp.exp(rho)
        self.k_gamma = gamma * k_row
        self.q_gamma = gamma * self.repeat_for_pairs(q_row)
        self.k_rho = self.rho_row * beta

    def load_heads(self, name: str, width: int):
        """Loads the block [1, C, heads * width] called `name` as [heads, C, width]."""
        ref = self.refs[name]
        return jnp.stack([ref[0, :, i : i + width] for i in range(0, ref.shape[-1], width)])

    def store_heads(self, name: str, x):
        """Stores x [heads, C, width] in the block called `name`; the reverse of `load_heads`."""
        ref, width = self.refs[name], x.shape[-1]
        for i in range(x.shape[0]):
            ref[0, :, i * width : (i + 1) * width] = x[i].astype(ref.dtype)

    # Key heads and their value heads. To multiply an array of a key head by an array of each of its
    # value heads, the arrays of the value heads are concatenated, so that one product suffices.

    def repeat_for_value_heads(self, x_J):
        """Returns [I, ...]: the array of each key head, repeated for each value head of this key
        head.
        """
        count = self.p.heads_per_key
        return x_J if count == 1 else jnp.repeat(x_J, count, axis=0)

    def repeat_for_pairs(self, x):
        """Returns [E, ...]: the array of each key head, repeated for each pair of value heads of
        this key head.

        Args:
          x: [J, ...], the arrays of the key heads, or [E, ...] if `shared` is False. If `shared` is
            False, x has one array for each pair already, and is returned unchanged.
        """
        count = self.p.heads_per_key
        return jnp.repeat(x, count // 2, axis=0) if self.shared and count > 2 else x

    def concat_value_heads(self, x_IRX):
        """Returns [J, R, heads_per_key · X], with the value heads of a key head side by side."""
        x = x_IRX.reshape(-1, self.p.heads_per_key, *x_IRX.shape[1:])
        return jnp.concatenate([x[:, i] for i in range(self.p.heads_per_key)], axis=-1)

    def split_value_heads(self, x_JRX):
        """The reverse of `concat_value_heads`."""
        x = jnp.stack(jnp.split(x_JRX, self.p.heads_per_key, axis=-1), axis=1)
        return x.reshape(-1, *x.shape[2:])

    def sum_value_heads(self, x_I):
        """Returns [J, ...], the sum over the value heads of each key head."""
        if self.p.heads_per_key == 1:
            return x_I
        return jnp.sum(x_I.reshape(-1, self.p.heads_per_key, *x_I.shape[1:]), axis=1)

    def rows_times_states(self, rows_JRK, state_IKV):
        """Returns [I, R, V]: for each value head, the product of the rows of its key head with its
        state.
        """
        return self.split_value_heads(
            self.dots.plain_products.nn(
                rows_JRK, self.concat_value_heads(state_IKV.astype(self.p.operand_dtype))
            )
        )

    def transposed_rows_times_values(self, rows_JRK, *parts_IRV):
        """Returns [I, K, V]: for each value head, the product of the transposed rows of its key
        head with the sum of its arrays in `parts_IRV`.
        """
        rows = jnp.concatenate([rows_JRK] * len(parts_IRV), axis=1)
        parts = [self.concat_value_heads(x) for x in parts_IRV]
        return self.split_value_heads(
            self.dots.plain_products.tn(rows, jnp.concatenate(parts, axis=1))
        )

    def products_with_transposed_states(self, xs_IRV, y_IRV, state_IKV, other_IKV):
        """Returns two things: the list of the products x state^T, one for each x, and the product y
        other^T. Each product is [J, R, K], summed over the value heads of each key head.

        A single product of stacked matrices computes all products x state^T and y other^T. The
        right operand of this product is `state_IKV` stacked on `other_IKV`, which fills the columns
        of the matrix unit. Half of each row of the result is not used.
        """
        stack = lambda *xs: jnp.concatenate(
            [self.concat_value_heads(x.astype(self.p.operand_dtype)) for x in xs], axis=1
        )
        product = self.dots.plain_products.nt(stack(*xs_IRV, y_IRV), stack(state_IKV, other_IKV))
        *products, last = jnp.split(product, len(xs_IRV) + 1, axis=1)
        key = state_IKV.shape[1]
        return [x[..., :key] for x in products], last[..., key:]

    def matrices_times_keys(self, x_ERC):
        """Returns [J, R, K]: the matrix x [R, C] of each value head times the keys, summed over the
        value heads of each key head.
        """
        if not self.shared:
            return self.sum_value_heads(
                self.dots.nn((x_ERC,), (self.repeat_for_value_heads(self.k),))
            )
        x_JRC = self._concat_pairs(x_ERC)
        return self.dots.plain_products.nn(
            x_JRC, jnp.concatenate([self.k] * self.p.heads_per_key, axis=1)
        )

    def transposed_matrices_times_rows(self, x_ERC, rows_JRK):
        """Returns [J, C, K]: the transpose of the matrix x [R, C] of each value head times the rows
        of its key head, summed over the value heads of each key head.
        """
        if not self.shared:
            return self.sum_value_heads(
                self.dots.tn((x_ERC,), (self.repeat_for_value_heads(rows_JRK),))
            )
        product = self.dots.plain_products.tn(self._concat_pairs(x_ERC), rows_JRK)
        return sum(jnp.split(product, self.p.heads_per_key, axis=1))

    def _concat_pairs(self, x_ERC):
        """Returns [J, R, heads_per_key · C], with the pairs of a key head side by side."""
        count = self.p.heads_per_key // 2
        x = x_ERC.reshape(-1, count, *x_ERC.shape[1:])
        return jnp.concatenate([x[:, i] for i in range(count)], axis=-1)


def _repeat_in_lanes(rows_EC, width: int):
    """Returns [I, C, width]: each number of rows_EC [E, 2C] repeated in `width` lanes. Call this
    function right before the result is used, because the compiler spills a result that is kept for
    later.
    """
    return head_pairs.tile_lanes(head_pairs.broadcast_pairs_over_lanes(rows_EC), width)


def _copy_initial_state(p: Problem, ref, initial_ref):
    """At the first chunk, copies this block's heads of `initial_ref` (the initial state, or in the
    backward pass the gradient of the final state) from HBM into `ref`, the block that holds the
    state or its gradient from chunk to chunk.
    """
    initial_state_of_block = initial_ref.at[
        pl.ds(pl.program_id(0), 1),
        pl.ds(pl.program_id(1) * p.block_value_heads, p.block_value_heads),
    ]

    @pl.when(pl.program_id(2) == 0)
    def _():
        pltpu.sync_copy(initial_state_of_block, ref)


def _compute_inverse(c: _ChunkOfHeads):
    """Returns A = (I + M beta)^{-1} of all heads as pairs [E, C, 2C]."""
    return head_pairs.unit_lower_pair_inverse(c.kk * c.kk_scale * c.pair_decay * c.beta, c.dots)


def _prediction_errors(c: _ChunkOfHeads, values, kq_state, inverse):
    """Returns the errors E = A (V - gamma K S), [I, C, V], or V without the delta term.

    Args:
      c: the heads of the grid step.
      values: [I, C, V].
      kq_state: [I, 2C, V], the rows of K S, followed by the rows of Q S.
      inverse: [E, C, 2C], the matrices A; None without the delta term.
    """
    if inverse is None:
        return values
    k_gamma = _repeat_in_lanes(c.k_gamma, values.shape[-1])
    errors = values - k_gamma * kq_state[:, : c.p.chunk_size]
    return c.dots.nn(c.dots.split_into_parts(inverse), c.dots.split_into_parts(errors))


def _next_state(c: _ChunkOfHeads, state, errors):
    """Returns S' = carry S + K^T (rho beta E)."""
    carried = c.carry * state
    return carried + c.transposed_rows_times_values(
        c.k, *c.dots.split_into_parts(_repeat_in_lanes(c.k_rho, errors.shape[-1]) * errors)
    )


def _outputs(c: _ChunkOfHeads, q_state, errors):
    """Returns O = gamma Q S + P (beta E)."""
    p_CC = c.qk * c.qk_scale * c.pair_decay * c.beta
    return _repeat_in_lanes(c.q_gamma, q_state.shape[-1]) * q_state + c.dots.nn(
        (p_CC.astype(c.p.operand_dtype),), c.dots.split_into_parts(errors)
    )


def _forward_kernel(p: Problem, inputs, outputs, settings: Settings, *refs):
    """Computes one chunk of the forward pass: o and the state after the chunk, and also the state
    before the chunk and the inverses if these two are outputs of the kernel.
    """
    refs = dict(zip(inputs + outputs, refs))
    _copy_initial_state(p, refs["final"], refs["initial_state"])
    c = _ChunkOfHeads(p, refs, settings.normalize_qk)
    values, state = c.load_heads("v", p.value_width).astype(jnp.float32), refs["final"][0]
    if "states" in refs:
        refs["states"][0, 0] = state.astype(refs["states"].dtype)
    # This product stands before the inverse, because the inverse starts with work for the vector
    # unit, which can overlap with the product.
    kq_state = c.rows_times_states(c.kq, state)
    inverse = None
    if settings.delta_term:
        inverse = refs["inverses"][0, 0] if "inverses" in inputs else _compute_inverse(c)
    if "inverses" in outputs:
        refs["inverses"][0, 0] = inverse
    errors = _prediction_errors(c, values, kq_state, inverse)
    c.store_heads("o", _outputs(c, kq_state[:, p.chunk_size :], errors))
    refs["final"][0] = _next_state(c, refs["final"][0], errors)


def _map_kernel(p: Problem, inputs, outputs, settings: Settings, *refs):
    """Computes one chunk of `affine_map`: carries U and M to the next chunk and writes the reads r
    and the inverses. The kernel runs the forward pass on a state that has U and M side by side
    along the lanes. M and r are the final state and the outputs for values of zero and the identity
    as the initial state.
    """
    refs = dict(zip(inputs + outputs, refs))
    _copy_initial_state(p, refs["final"], refs["initial_state"])

    @pl.when(pl.program_id(2) == 0)
    def _():
        row, column = chunk_math.row_and_column_indices(p.key_width, p.key_width)
        refs["m"][0] = jnp.broadcast_to((row == column).astype(jnp.float32), refs["m"].shape[1:])

    c = _ChunkOfHeads(p, refs, settings.normalize_qk)
    values = c.load_heads("v", p.value_width).astype(jnp.float32)
    values = jnp.concatenate(
        [values, jnp.zeros((*values.shape[:-1], p.key_width), jnp.float32)], axis=-1
    )
    state = jnp.concatenate([refs["final"][0], refs["m"][0]], axis=-1)
    kq_state, inverse = c.rows_times_states(c.kq, state), None
    if settings.delta_term:
        inverse = refs["inverses"][0, 0] = _compute_inverse(c)
    errors = _prediction_errors(c, values, kq_state, inverse)
    state = _next_state(c, state, errors)
    refs["final"][0], refs["m"][0] = state[..., : p.value_width], state[..., p.value_width :]
    reads = _outputs(c, kq_state[:, p.chunk_size :, p.value_width :], errors[..., p.value_width :])
    refs["reads"][0, 0] = reads.astype(refs["reads"].dtype)


def _backward_kernel(p: Problem, inputs, outputs, settings: Settings, *refs):
    """Computes one chunk of the backward pass: the gradients of the chunk's inputs and of the state
    before the chunk.
    """
    refs = dict(zip(inputs + outputs, refs))
    delta_term = settings.delta_term
    _copy_initial_state(p, refs["dinitial"], refs["dfinal"])
    c = _ChunkOfHeads(p, refs, settings.normalize_qk)
    dots, size, value = c.dots, p.chunk_size, p.value_width
    do, values = (
        c.load_heads("do", value).astype(p.operand_dtype),
        c.load_heads("v", value).astype(jnp.float32),
    )
    state, dstate = refs["states"][0, 0], refs["dinitial"][0]
    inverse = refs["inverses"][0, 0] if delta_term else None
    q_pair, k_pair = c.qk_scale * c.pair_decay, c.kk_scale * c.pair_decay
    kq_state, k_dstate = c.rows_times_states(c.kq, state), c.rows_times_states(c.k, dstate)
    k_state, q_state = kq_state[:, :size], kq_state[:, size:]
    k_gamma, k_rho = _repeat_in_lanes(c.k_gamma, value), _repeat_in_lanes(c.k_rho, value)
    q_gamma = head_pairs.tile_lanes(
        head_pairs.broadcast_pairs_over_lanes_by_product(c.q_gamma), value
    )
    errors = values
    if delta_term:
        errors = dots.nn(
            dots.split_into_parts(inverse), dots.split_into_parts(values - k_gamma * k_state)
        )
    p_CC = (c.qk * q_pair * c.beta).astype(p.operand_dtype)
    dv = dots.tn((p_CC,), (do,)) + k_rho * k_dstate  # beta dV'
    if delta_term:
        dv = dots.tn(dots.split_into_parts(inverse), dots.split_into_parts(dv))
    c.store_heads("dv", dv)

    # The gradients of q and k through the states. dg needs two sums over channels: `enter` over the
    # terms that contain gamma, the decay from the chunk's start, and `leave` over the terms that
    # contain rho, the decay to the chunk's end.
    dq_read, dk_write = q_gamma * do.astype(jnp.float32), k_rho * errors
    enter, leave = q_state * dq_read, k_dstate * errors
    reads = [dq_read]
    if delta_term:
        dk_read = -k_gamma * dv
        enter += k_state * dk_read
        reads.append(dk_read)
        dread = c.transposed_rows_times_values(
            c.kq, jnp.concatenate([dk_read, dq_read], axis=1).astype(p.operand_dtype)
        )
    else:
        dread = c.transposed_rows_times_values(c.q, dq_read.astype(p.operand_dtype))
    refs["dinitial"][0] = c.carry * dstate + dread

    # The gradients of Q K^T and K K^T.
    error_parts = dots.split_into_parts(errors)
    (d_qk,) = dots.nt([(do,)], error_parts)
    d_kk = dots.nt([dots.split_into_parts(dv)], error_parts)
    d_qk = d_qk * q_pair
    pairs = c.qk * d_qk
    if delta_term:
        d_kk = jnp.where(c.strict, d_kk[0], 0) * k_pair
        pairs = pairs - c.kk * d_kk
    before = dots.sums_of_columns_before(pairs * c.beta)
    d_pairs, rows = (d_qk * c.beta).astype(p.operand_dtype), c.q
    if delta_term:
        d_pairs = jnp.concatenate([d_pairs, (-d_kk * c.beta).astype(p.operand_dtype)], axis=1)
        rows = jnp.concatenate([c.q, c.k], axis=1)

    # The gradients of q and k.
    through_pairs = c.matrices_times_keys(d_pairs)
    (dq, *dk_reads), dk = c.products_with_transposed_states(reads, dk_write, state, dstate)
    dq = dq + through_pairs[:, :size]
    dk = sum(dk_reads, dk) + c.transposed_matrices_times_rows(d_pairs, rows)
    if delta_term:
        dk = dk + through_pairs[:, size:]
    if settings.normalize_qk:
        dk, dq = _backward_through_norms(c, dk, dq)
    c.store_heads("dq", dq)
    c.store_heads("dk", dk)

    # The gradients of g and beta, as rows [E, 2C].
    beta, (enter, leave) = c.beta[:, 0], head_pairs.row_sums(enter, leave)
    leave = c.rho_row * leave
    refs["dbeta"][0, 0, 0] = jnp.sum(pairs, axis=1) + leave
    carried = _gate_gradient_of_carried_state(c, state, dstate)
    dg = (
        jnp.sum(jnp.where(c.lower, before, 0), axis=1)
        + head_pairs.sum_columns_where(enter, jnp.greater_equal)
        + head_pairs.sum_columns_where(beta * leave, jnp.less)
    )
    refs["dg"][0, 0, 0] = dg + carried


def _backward_through_norms(c: _ChunkOfHeads, dk, dq):
    """Applies the backward pass of the L2 normalisation. dk and dq, [J, C, K], are gradients that
    treat the L2 norms as constants.
    """
    scales = c.k_norm, c.q_norm * c.p.unpadded_key_width**0.5
    through_norm = lambda dx, x, scale: (
        dx - (scale * scale) * jnp.sum(dx * x, axis=-1, keepdims=True) * x
    )
    return tuple(
        through_norm(dx, x.astype(jnp.float32), head_pairs.tile_lanes(scale, c.p.key_width))
        for dx, x, scale in zip((dk, dq), (c.k, c.q), scales)
    )


def _gate_gradient_of_carried_state(c: _ChunkOfHeads, state, dstate):
    """Returns [E, 2C], the part of dg that comes from the decay of the state over the whole chunk.
    This part of dg is the same for all tokens of the chunk.
    """
    products = dstate * state.astype(jnp.float32)
    inner = jnp.sum(jnp.sum(products, axis=1, keepdims=True), axis=2, keepdims=True)
    first, second = head_pairs.split_heads(c.carry * inner)
    size = c.p.chunk_size
    return jnp.where(head_pairs.is_first_head((1, 1, 2 * size)), first, second)[:, 0]
