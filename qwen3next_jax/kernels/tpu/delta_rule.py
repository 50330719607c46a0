"""Mosaic TPU kernels of the gated delta rule, forward and backward.

One grid step handles one chunk of a block of heads; the chunk axis is innermost and sequential,
and the state (forward) or its gradient (backward) stays in VMEM across it, in the block of the
output that becomes the final state (or the gradient of the initial one). The value heads of a
key head share K K^T and Q K^T, and dQ and dK are summed over them in the kernel.

The algebra is that of docs/delta_rule.md, "In terms of E": beta, the decays and the norms of q
and k meet matrices as rows and columns of two heads at once, or are multiplied together as rows
before they are spread over lanes.

Matrix products take operands in the inputs' dtype and accumulate in float32; where sums cancel,
bfloat16 operands go in two parts (`head_pairs.PairProducts`).

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width; J key
heads, I value heads and E = I / 2 pairs of one grid step (`head_pairs.py`).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import head_pairs
from qwen3next_jax.kernels.tpu.delta_rule_tiling import Problem
from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs, chunk_size


def supports(x: Inputs, normalize_qk: bool, erase: bool, split: bool) -> str:
    """Why the kernels cannot run a call on the chip, "" where they can.

    It depends on shapes, dtypes and the chip alone, so that all passes over a problem run the same
    implementation: the kernels save other inverses than XLA's forms.
    """
    if any(array is not None and array.dtype == jnp.float64 for array in x):
        return "has float64 inputs: expected float32 or bfloat16"
    try:
        Problem(x.q, x.v, chunk_size(x))
    except NotImplementedError as error:
        return str(error)
    return ""


def forward(
    x: Inputs,
    initial_state,
    inverses,
    *,
    size: int,
    normalize_qk: bool,
    erase: bool,
    save: bool,
    interpret: bool = False,
):
    """As `chunked.forward`; without `save` the last two results are None and never exist."""
    p, v = Problem(x.q, x.v, size), x.v
    inputs = p.inputs(*x)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    if inverses is not None:
        inputs["inverses"] = p.pad_pairs(inverses)
    shapes = dict(
        o=p.flat(p.value_heads, p.value, v.dtype),
        final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    if save:
        shapes["states"] = jax.ShapeDtypeStruct((p.chunks, *p.state_shape), v.dtype)
        if erase and inverses is None:
            shapes["inverses"] = p.inverses_shape
    out = p.call(_forward_kernel, inputs, shapes, True, normalize_qk, erase, interpret)
    o = p.unflatten(out["o"], v.shape)
    states = p.cut_state(out["states"]) if save else None
    known = p.cut_pairs(out["inverses"]) if "inverses" in out else inverses
    return o, p.cut_state(out["final"]), states, known if save else None


def affine_map(
    x: Inputs, initial_state, *, size: int, normalize_qk: bool, erase: bool, interpret: bool = False
):
    """As `chunked.affine_map`."""
    p = Problem(x.q, x.v, size)
    inputs = p.inputs(*x)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    heads = p.state_shape[:2]
    shapes = dict(
        final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
        m=jax.ShapeDtypeStruct((*heads, p.key, p.key), jnp.float32),
        reads=jax.ShapeDtypeStruct((p.chunks, *heads, size, p.key), x.v.dtype),
    )
    if erase:
        shapes["inverses"] = p.inverses_shape
    out = p.call(_map_kernel, inputs, shapes, True, normalize_qk, erase, interpret)
    m, reads = (
        out["m"][:, : p.heads_in, : p.key_in, : p.key_in],
        out["reads"][:, :, : p.heads_in, :, : p.key_in],
    )
    return p.cut_state(out["final"]), m, reads, p.cut_pairs(out["inverses"]) if erase else None


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
    interpret: bool = False,
):
    """As `chunked.backward`."""
    q, k, v, *_ = x
    p = Problem(q, v, size)
    inputs = p.inputs(*x)
    inputs |= dict(do=p.flatten(do.astype(v.dtype), p.value_heads), states=p.pad_state(states))
    inputs["dfinal"] = p.pad_state(dfinal.astype(jnp.float32))
    if erase:
        inputs["inverses"] = p.pad_pairs(inverses)
    rows = jax.ShapeDtypeStruct(
        (p.batch, p.chunks, p.value_heads // p.block, p.block // 2, 2 * size), jnp.float32
    )
    shapes = dict(
        dq=p.flat(p.key_heads, p.key, q.dtype),
        dk=p.flat(p.key_heads, p.key, k.dtype),
        dv=p.flat(p.value_heads, p.value, v.dtype),
        dg=rows,
        dbeta=rows,
        dinitial=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    out = p.call(_backward_kernel, inputs, shapes, False, normalize_qk, erase, interpret)
    dq, dk, dv = (
        p.unflatten(out[n], shape)
        for n, shape in (("dq", q.shape), ("dk", k.shape), ("dv", v.shape))
    )
    return dq, dk, dv, p.unchunk(out["dg"]), p.unchunk(out["dbeta"]), p.cut_state(out["dinitial"])


# ---- kernels
# --------------------------------------------------------------------------------------------------
#
# All heads of a step go through each stage together, as a leading dimension: the compiler schedules
# near the order it is given, and side by side their chains hide each other's latency.


class _Block:
    """The inputs of one step's heads and what both directions make of them."""

    def __init__(self, p: Problem, refs, normalize: bool):
        self.p, self.refs, size = p, refs, p.size
        self.dots = head_pairs.PairProducts(p.operand)
        total, beta = refs["total"][0, 0, 0], refs["beta"][0, 0, 0]  # [E, 2C]
        row, column = chunk_math.indices(size, 2 * size)
        self.lower, self.strict, on_diagonal = (
            f(row, column % size) for f in (jnp.greater_equal, jnp.greater, jnp.equal)
        )
        last = jnp.where(
            head_pairs.is_first_head((1, 2 * size)),
            total[:, size - 1 : size],
            total[:, 2 * size - 1 :],
        )
        gamma, rho, carry, mask, live = total, last - total, last, self.lower, None
        if "documents" in refs:
            signed = refs["documents"][0, 0]  # [1, 2C]
            live = signed >= 0
            index = jnp.where(live, signed, -1 - signed)
            mask = mask & (jnp.broadcast_to(index, (8, 2 * size)).T[:size, :1] == index)
            gamma = jnp.where(index == 0, gamma, -jnp.inf)
            rho = jnp.where(index == index[:, -1:], rho, -jnp.inf)
            carry = jnp.where(index[:, -1:] == 0, carry, -jnp.inf)
        self.beta, carry = beta[:, None], jnp.exp(carry)[:, None]  # [E, 1, 2C]
        self.carry = head_pairs.interleave_heads(
            carry[..., :1], carry[..., size : size + 1]
        )  # [I, 1, 1]
        self.pair = jnp.exp(
            jnp.where(mask, head_pairs.pair_columns(total) - total[:, None], -jnp.inf)
        )

        # One product of the rows as they came holds K K^T, Q K^T and, on diagonals, the squared
        # norms.
        self.shared = p.share % 2 == 0  # the heads of a pair have the same keys
        self.k, self.q = (self.load(name, p.key).astype(p.operand) for name in "kq")
        self.both = jnp.concatenate([self.k, self.q], axis=1)  # [J, 2C, K]
        if self.shared:
            pairs = self.dots.plain.nt(
                self.both, jnp.concatenate([self.k, self.k, self.q, self.q], axis=1)
            )
        else:
            right = jnp.concatenate(
                [head_pairs.block_diagonal(self.repeated(x)) for x in (self.k, self.q)], axis=1
            )
            pairs = self.dots.plain.nt(head_pairs.concat_pair(self.repeated(self.both)), right)
        k_row = q_row = jnp.ones((pairs.shape[0], 2 * size), jnp.float32)  # [J or E, 2C]
        if normalize:
            squares = pairs[:, :size, : 2 * size], pairs[:, size:, 2 * size :]
            k_row, q_row = (
                chunk_math.inverse_root(jnp.sum(jnp.where(on_diagonal, x, 0), axis=1))
                for x in squares
            )
        q_row = q_row * p.key_in**-0.5
        if live is not None:
            q_row = jnp.where(live, q_row, 0)
        if self.shared:
            self.norms = tuple(head_pairs.over_lanes(x[:, :size]) for x in (k_row, q_row))
            scale = jnp.concatenate([x[..., : 2 * size] for x in self.norms], axis=1)
        else:
            first = lambda x: x.reshape(-1, p.share, *x.shape[1:])[:, 0]
            self.norms = tuple(
                first(head_pairs.pairs_over_lanes(x)) for x in (k_row, q_row)
            )  # [J, C, LANES]
            scale = jnp.concatenate([head_pairs.pair_columns(x) for x in (k_row, q_row)], axis=1)
        scale = scale * k_row[:, None]
        each = lambda x: jnp.repeat(x, p.share // 2, axis=0) if self.shared and p.share > 2 else x
        # [E, C, 2C], no norms in them
        self.kk, self.qk = each(pairs[:, :size, : 2 * size]), each(pairs[:, size:, : 2 * size])
        self.kk_scale, self.qk_scale = each(scale[:, :size]), each(scale[:, size:])
        k_row, gamma = each(k_row), jnp.exp(gamma)
        self.rho_row = k_row * jnp.exp(rho)
        # [E, 2C]
        self.k_gamma, self.q_gamma, self.k_rho = (
            gamma * k_row,
            gamma * each(q_row),
            self.rho_row * beta,
        )

    def load(self, name: str, width: int):
        """[heads, C, width] out of a block [1, C, heads * width]."""
        ref = self.refs[name]
        return jnp.stack([ref[0, :, i : i + width] for i in range(0, ref.shape[-1], width)])

    def store(self, name: str, x):
        """The reverse of `load`."""
        ref, width = self.refs[name], x.shape[-1]
        for i in range(x.shape[0]):
            ref[0, :, i * width : (i + 1) * width] = x[i].astype(ref.dtype)

    # products of what belongs to a key head with what belongs to its value heads, all of these in
    # one

    def repeated(self, x_J):
        """What a key head holds, for each of its value heads."""
        return x_J if self.p.share == 1 else jnp.repeat(x_J, self.p.share, axis=0)

    def wide(self, x_IRX):
        """[J, R, share X]."""
        x = x_IRX.reshape(-1, self.p.share, *x_IRX.shape[1:])
        return jnp.concatenate([x[:, i] for i in range(self.p.share)], axis=-1)

    def narrow(self, x_JRX):
        """The reverse of `wide`."""
        x = jnp.stack(jnp.split(x_JRX, self.p.share, axis=-1), axis=1)
        return x.reshape(-1, *x.shape[2:])

    def read(self, rows_JRK, state_IKV):
        """[I, R, V] rows of the keys' heads times the states."""
        return self.narrow(
            self.dots.plain.nn(rows_JRK, self.wide(state_IKV.astype(self.p.operand)))
        )

    def write(self, rows_JRK, *parts_IRV):
        """[I, K, V] the sum of rows^T part over the parts."""
        rows, parts = (
            jnp.concatenate([rows_JRK] * len(parts_IRV), axis=1),
            [self.wide(x) for x in parts_IRV],
        )
        return self.narrow(self.dots.plain.tn(rows, jnp.concatenate(parts, axis=1)))

    def from_states(self, xs_IRV, y_IRV, state_IKV, other_IKV):
        """[J, R, K] each: the sum over the value heads of a key head of x state^T for every x,
        and of y other^T. The two states fill the matrix unit's columns, of which each row then
        needs half.
        """
        stack = lambda *xs: jnp.concatenate(
            [self.wide(x.astype(self.p.operand)) for x in xs], axis=1
        )
        out = self.dots.plain.nt(stack(*xs_IRV, y_IRV), stack(state_IKV, other_IKV))
        *found, last = jnp.split(out, len(xs_IRV) + 1, axis=1)
        key = state_IKV.shape[1]
        return [x[..., :key] for x in found], last[..., key:]

    def times_keys(self, x_ERC):
        """[J, R, K] the sum over value heads of pairs times the keys."""
        if not self.shared:
            return self.summed(self.dots.nn((x_ERC,), (self.repeated(self.k),)))
        each = x_ERC.reshape(-1, self.p.share // 2, *x_ERC.shape[1:])
        x = jnp.concatenate([each[:, i] for i in range(self.p.share // 2)], axis=-1)
        return self.dots.plain.nn(x, jnp.concatenate([self.k] * self.p.share, axis=1))

    def transposed_times(self, x_ERC, rows_JRK):
        """[J, C, K] the sum over value heads of pairs transposed times the key heads' rows."""
        if not self.shared:
            return self.summed(self.dots.tn((x_ERC,), (self.repeated(rows_JRK),)))
        each = x_ERC.reshape(-1, self.p.share // 2, *x_ERC.shape[1:])
        x = jnp.concatenate([each[:, i] for i in range(self.p.share // 2)], axis=-1)
        return sum(jnp.split(self.dots.plain.tn(x, rows_JRK), self.p.share, axis=1))

    def summed(self, x_I):
        """The sum over the value heads of a key head."""
        return (
            x_I
            if self.p.share == 1
            else jnp.sum(x_I.reshape(-1, self.p.share, *x_I.shape[1:]), axis=1)
        )


def _spread(rows_EC, width: int):
    """[I, C, width]; at the place of its use, since what waits there is spilled."""
    return head_pairs.tile_lanes(head_pairs.pairs_over_lanes(rows_EC), width)


def _start(p: Problem, ref, initial_ref):
    """The state before the first chunk, into the block that keeps it."""
    here = initial_ref.at[pl.ds(pl.program_id(0), 1), pl.ds(pl.program_id(1) * p.block, p.block)]

    @pl.when(pl.program_id(2) == 0)
    def _():
        pltpu.sync_copy(here, ref)


def _inverse(c: _Block):
    return head_pairs.pair_inverse(c.kk * c.kk_scale * c.pair * c.beta, c.dots)


def _next_state(c: _Block, state, errors):
    return c.carry * state + c.write(
        c.k, *c.dots.parts(_spread(c.k_rho, errors.shape[-1]) * errors)
    )


def _output(c: _Block, qs, errors):
    p_CC = c.qk * c.qk_scale * c.pair * c.beta
    return _spread(c.q_gamma, qs.shape[-1]) * qs + c.dots.nn(
        (p_CC.astype(c.p.operand),), c.dots.parts(errors)
    )


def _forward_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    refs = dict(zip(inputs + outputs, refs))
    _start(p, refs["final"], refs["initial_state"])
    c = _Block(p, refs, normalize)
    values, state = c.load("v", p.value).astype(jnp.float32), refs["final"][0]
    if "states" in refs:
        refs["states"][0, 0] = state.astype(refs["states"].dtype)
    read = c.read(c.both, state)  # before the inverse, which leaves the matrix unit idle at first
    a = None
    if erase:
        a = refs["inverses"][0, 0] if "inverses" in inputs else _inverse(c)
    if "inverses" in outputs:
        refs["inverses"][0, 0] = a
    errors = values - _spread(c.k_gamma, values.shape[-1]) * read[:, : p.size] if erase else values
    if erase:
        errors = c.dots.nn(c.dots.parts(a), c.dots.parts(errors))
    c.store("o", _output(c, read[:, p.size :], errors))
    refs["final"][0] = _next_state(c, refs["final"][0], errors)


def _map_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    """U and M side by side along the lanes, [U | M]: M is the state of values zero that starts
    at the identity.
    """
    refs = dict(zip(inputs + outputs, refs))
    _start(p, refs["final"], refs["initial_state"])

    @pl.when(pl.program_id(2) == 0)
    def _():
        row, column = chunk_math.indices(p.key, p.key)
        refs["m"][0] = jnp.broadcast_to((row == column).astype(jnp.float32), refs["m"].shape[1:])

    c = _Block(p, refs, normalize)
    values = c.load("v", p.value).astype(jnp.float32)
    values = jnp.concatenate([values, jnp.zeros((*values.shape[:-1], p.key), jnp.float32)], axis=-1)
    state = jnp.concatenate([refs["final"][0], refs["m"][0]], axis=-1)
    read, a = c.read(c.both, state), None
    if erase:
        a = refs["inverses"][0, 0] = _inverse(c)
    errors = values - _spread(c.k_gamma, values.shape[-1]) * read[:, : p.size] if erase else values
    if erase:
        errors = c.dots.nn(c.dots.parts(a), c.dots.parts(errors))
    state = _next_state(c, state, errors)
    refs["final"][0], refs["m"][0] = state[..., : p.value], state[..., p.value :]
    reads = _output(c, read[:, p.size :, p.value :], errors[..., p.value :])
    refs["reads"][0, 0] = reads.astype(refs["reads"].dtype)


def _backward_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    refs = dict(zip(inputs + outputs, refs))
    _start(p, refs["dinitial"], refs["dfinal"])
    c = _Block(p, refs, normalize)
    dots, size, value = c.dots, p.size, p.value
    do, values = c.load("do", value).astype(p.operand), c.load("v", value).astype(jnp.float32)
    state, dstate = refs["states"][0, 0], refs["dinitial"][0]
    a = refs["inverses"][0, 0] if erase else None
    q_pair, k_pair = c.qk_scale * c.pair, c.kk_scale * c.pair
    read, kd = c.read(c.both, state), c.read(c.k, dstate)
    ks, qs = read[:, :size], read[:, size:]
    k_gamma, k_rho = _spread(c.k_gamma, value), _spread(c.k_rho, value)
    q_gamma = head_pairs.tile_lanes(head_pairs.pairs_over_lanes_by_product(c.q_gamma), value)
    errors = dots.nn(dots.parts(a), dots.parts(values - k_gamma * ks)) if erase else values
    p_CC = (c.qk * q_pair * c.beta).astype(p.operand)
    dv = dots.tn((p_CC,), (do,)) + k_rho * kd  # beta dV'
    if erase:
        dv = dots.tn(dots.parts(a), dots.parts(dv))
    c.store("dv", dv)

    # rows of q and k against rows of the states
    yq, yr = q_gamma * do.astype(jnp.float32), k_rho * errors
    enter, written = qs * yq, kd * errors
    ys = [yq]
    if erase:
        yk = -k_gamma * dv
        enter += ks * yk
        ys.append(yk)
        dread = c.write(c.both, jnp.concatenate([yk, yq], axis=1).astype(p.operand))
    else:
        dread = c.write(c.q, yq.astype(p.operand))
    refs["dinitial"][0] = c.carry * dstate + dread

    # pairs of rows
    parts = dots.parts(errors)
    (d_qk,) = dots.nt([(do,)], parts)
    d_kk = dots.nt([dots.parts(dv)], parts)
    d_qk = d_qk * q_pair
    pairs = c.qk * d_qk
    if erase:
        d_kk = jnp.where(c.strict, d_kk[0], 0) * k_pair
        pairs = pairs - c.kk * d_kk
    before = dots.sums_before(pairs * c.beta)
    d_pairs, rows = (d_qk * c.beta).astype(p.operand), c.q
    if erase:
        d_pairs, rows = (
            jnp.concatenate([d_pairs, (-d_kk * c.beta).astype(p.operand)], axis=1),
            jnp.concatenate([c.q, c.k], axis=1),
        )

    # keys and queries
    left = c.times_keys(d_pairs)
    (dq, *dks), dk = c.from_states(ys, yr, state, dstate)
    dq = dq + left[:, :size]
    dk = sum(dks, dk) + c.transposed_times(d_pairs, rows)
    if erase:
        dk = dk + left[:, size:]
    if normalize:
        scales = c.norms[0], c.norms[1] * p.key_in**0.5
        for_norm = lambda dx, x, scale: (
            dx - (scale * scale) * jnp.sum(dx * x, axis=-1, keepdims=True) * x
        )
        dk, dq = (
            for_norm(dx, x.astype(jnp.float32), head_pairs.tile_lanes(s, p.key))
            for dx, x, s in zip((dk, dq), (c.k, c.q), scales)
        )
    c.store("dq", dq)
    c.store("dk", dk)

    # decay and beta, as rows [E, 2C]
    beta, (enter, written) = c.beta[:, 0], head_pairs.row_sums(enter, written)
    written = c.rho_row * written
    refs["dbeta"][0, 0, 0] = jnp.sum(pairs, axis=1) + written
    kept = jnp.sum(
        jnp.sum(dstate * state.astype(jnp.float32), axis=1, keepdims=True), axis=2, keepdims=True
    )
    first, second = head_pairs.split_heads(c.carry * kept)
    kept = jnp.where(head_pairs.is_first_head((1, 1, 2 * size)), first, second)[:, 0]
    dg = (
        jnp.sum(jnp.where(c.lower, before, 0), axis=1)
        + head_pairs.sums(enter, jnp.greater_equal)
        + head_pairs.sums(beta * written, jnp.less)
    )
    refs["dg"][0, 0, 0] = dg + kept
