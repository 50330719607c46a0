"""Mosaic TPU kernels of the gated delta rule, forward and backward.

One grid step handles one chunk of a block of heads; the chunk axis is innermost and sequential, and the state (forward) or
its gradient (backward) stays in VMEM across it, in the block of the output that becomes the final state (or the gradient
of the initial one). The value heads of a key head share K K^T and Q K^T, and dQ and dK are summed over them in the kernel.

Matrix products take operands in the inputs' dtype and accumulate in float32. The inverse and its two products need
float32: for bfloat16 inputs three products of bfloat16 halves (`ThreePass`), one pass of the matrix unit where the halves
are stacked along the contraction; for float32 inputs Precision.HIGHEST.

N chunks, B batch, G key heads, H value heads, C chunk length, K key width, V value width; J key heads and I value heads of
one grid step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from qwen3next_jax.ops.delta_rule import chunk_math, inverse
from qwen3next_jax.ops.delta_rule.chunk_math import Documents, Products, Scaled
from qwen3next_jax.ops.delta_rule.tiling import Problem


def forward(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    segments,
    inverses,
    *,
    size: int,
    normalize_qk: bool,
    erase: bool,
    save: bool,
    interpret: bool,
):
    """As `chunked.forward`; without `save` the last two results are None and never exist."""
    p = Problem(q, v, size)
    inputs = p.inputs(q, k, v, g, beta, segments)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    if inverses is not None:
        inputs["inverses"] = inverses
    shapes = dict(o=p.flat(p.value_heads, p.value, v.dtype), final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32))
    if save:
        shapes["states"] = jax.ShapeDtypeStruct((p.chunks, *p.state_shape), v.dtype)
        if erase and inverses is None:
            shapes["inverses"] = p.inverses_shape
    out = p.call(_forward_kernel, inputs, shapes, True, normalize_qk, erase, interpret)
    o = p.unflatten(out["o"], p.value_heads, p.value)[..., : p.value_in]
    states = p.cut_state(out["states"]) if save else None
    return o, p.cut_state(out["final"]), states, out.get("inverses", inverses) if save else None


def affine_map(
    q, k, v, g, beta, initial_state, segments, *, size: int, normalize_qk: bool, erase: bool, interpret: bool
):
    """As `chunked.affine_map`."""
    p = Problem(q, v, size)
    inputs = p.inputs(q, k, v, g, beta, segments)
    inputs["initial_state"] = p.pad_state(initial_state.astype(jnp.float32))
    heads = p.state_shape[:2]
    shapes = dict(
        final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
        m=jax.ShapeDtypeStruct((*heads, p.key, p.key), jnp.float32),
        reads=jax.ShapeDtypeStruct((p.chunks, *heads, size, p.key), v.dtype),
    )
    if erase:
        shapes["inverses"] = p.inverses_shape
    out = p.call(_map_kernel, inputs, shapes, True, normalize_qk, erase, interpret)
    m, reads = out["m"][..., : p.key_in, : p.key_in], out["reads"][..., : p.key_in]
    return p.cut_state(out["final"]), m, reads, out.get("inverses")


def backward(
    q, k, v, g, beta, segments, states, inverses, do, dfinal, *, size: int, normalize_qk: bool, erase: bool, interpret: bool
):
    """As `chunked.backward`."""
    p = Problem(q, v, size)
    inputs = p.inputs(q, k, v, g, beta, segments)
    inputs |= dict(do=p.flatten(do.astype(v.dtype)), states=p.pad_state(states), dfinal=p.pad_state(dfinal.astype(jnp.float32)))
    if erase:
        inputs["inverses"] = inverses
    rows = jax.ShapeDtypeStruct((p.batch, p.chunks, p.value_heads // p.block, p.block, size), jnp.float32)
    shapes = dict(
        dq=p.flat(p.key_heads, p.key, q.dtype),
        dk=p.flat(p.key_heads, p.key, k.dtype),
        dv=p.flat(p.value_heads, p.value, v.dtype),
        dg=rows,
        dbeta=rows,
        dinitial=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    out = p.call(_backward_kernel, inputs, shapes, False, normalize_qk, erase, interpret)
    dq, dk = (p.unflatten(out[n], p.key_heads, p.key)[..., : p.key_in] for n in ("dq", "dk"))
    dv = p.unflatten(out["dv"], p.value_heads, p.value)[..., : p.value_in]
    return dq, dk, dv, p.unchunk(out["dg"]), p.unchunk(out["dbeta"]), p.cut_state(out["dinitial"])


# ---- float32 products out of bfloat16 ones ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ThreePass:
    """Products of float32 arrays as bfloat16 halves, x y = xh yh + xh yl + xl yh, stacked along the contraction. Operands are
    given split, so that one used twice is split once."""

    def split(self, x):
        high = x.astype(jnp.bfloat16)
        return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

    def nn(self, x, y):
        (xh, xl), (yh, yl) = x, y
        return chunk_math.BFLOAT16.nn(jnp.concatenate([xh, xh, xl], axis=-1), jnp.concatenate([yh, yl, yh], axis=-2))

    def tn(self, x, y):
        (xh, xl), (yh, yl) = x, y
        return chunk_math.BFLOAT16.tn(jnp.concatenate([xh, xh, xl], axis=-2), jnp.concatenate([yh, yl, yh], axis=-2))


# ---- kernels ------------------------------------------------------------------------------------------------------
#
# All heads of a step go through each stage together, as a leading dimension [I, C, ...] of `chunk_math`'s functions: the
# compiler schedules near the order it is given, and side by side their chains hide each other's latency.


class _Block:
    """The inputs of one step's heads and what both directions make of them."""

    def __init__(self, p: Problem, refs, normalize: bool):
        self.p, self.refs = p, refs
        self.dots = Products(p.operand)
        self.exact = ThreePass() if p.operand == jnp.bfloat16 else chunk_math.EXACT
        self.live = documents = None
        if "documents" in refs:
            signed = refs["documents"][0, 0]  # [1, C]
            column = jnp.broadcast_to(signed, (8, p.size)).T[:, :1]
            self.live = column >= 0
            index = jnp.where(signed < 0, -1 - signed, signed)
            documents = Documents(jnp.where(self.live, column, -1 - column), index, index[:, -1:])
        total = refs["total"][0, 0, 0]  # [I, C]
        row = total[:, None, :]
        self.decay = chunk_math.decay(_spread(total, p.width), row, row[..., -1:], documents)
        self.beta = _spread(refs["beta"][0, 0, 0], p.width)
        self.beta_CV = self.beta[..., : p.value]
        # One product of the rows as they came holds K K^T, Q K^T and, on its diagonal, the squared norms.
        raw = jnp.concatenate([self.heads("k", p.key), self.heads("q", p.key)], axis=1).astype(p.operand)  # [J, 2C, K]
        pairs = self.dots.nt(raw, raw)
        diagonal = chunk_math.lower_mask(2 * p.size) & ~chunk_math.lower_mask(2 * p.size, strict=True)
        if normalize:
            rows = jax.lax.rsqrt(jnp.sum(jnp.where(diagonal, pairs, 0), axis=1) + chunk_math.NORM_EPSILON)  # [J, 2C]
        else:
            rows = jnp.ones((p.key_block, 2 * p.size), jnp.float32)
        k_row, q_row = rows[:, : p.size], rows[:, p.size :]
        self.k_norm, self.q_norm = _spread(k_row, p.width), _spread(q_row, p.width)
        q_column = self.q_norm * p.key_in**-0.5
        if self.live is not None:
            q_column = jnp.where(self.live, q_column, 0)
        columns, row = jnp.concatenate([self.k_norm, q_column], axis=1), k_row[:, None, :]
        pairs = chunk_math.fit(columns, p.size) * pairs[..., : p.size] * row
        self.kk, self.qk = self.repeated(pairs[:, : p.size]), self.repeated(pairs[:, p.size :])
        self.k = self.repeated_rows(Scaled(raw[:, : p.size], self.k_norm, row))
        self.q = self.repeated_rows(Scaled(raw[:, p.size :], q_column, row))  # no product takes q's row of factors
        self.both = self.repeated_rows(Scaled(raw, columns, row))

    def repeated_rows(self, x):
        return Scaled(*map(self.repeated, x))

    def heads(self, name: str, width: int):
        """[heads, C, width] out of a block [1, C, heads * width]."""
        ref = self.refs[name]
        return jnp.stack([ref[0, :, i : i + width] for i in range(0, ref.shape[-1], width)])

    def store(self, name: str, x):
        """The reverse of `heads`."""
        ref, width = self.refs[name], x.shape[-1]
        for i in range(x.shape[0]):
            ref[0, :, i * width : (i + 1) * width] = x[i].astype(ref.dtype)

    def repeated(self, x):
        """What a key head holds, for each of its value heads."""
        return x if self.p.share == 1 else jnp.repeat(x, self.p.share, axis=0)

    def summed(self, x):
        """The reverse of `repeated`."""
        return x if self.p.share == 1 else jnp.sum(x.reshape(-1, self.p.share, *x.shape[1:]), axis=1)


def _spread(rows, width: int):
    """[I, C] to [I, C, width], every lane of a row of the result holding that row's number.

    By a product with ones and zeros, in which three bfloat16 parts carry a float32 exactly: the matrix unit is idle where
    this is needed, and the cross-lane unit that would broadcast columns is not.
    """
    heads = rows.shape[0]
    parts, rest = [], rows
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    row = jax.lax.broadcasted_iota(jnp.int32, (3 * heads, heads * width), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (3 * heads, heads * width), 1)
    pick = (row % heads == column // width).astype(jnp.bfloat16)
    columns = chunk_math.BFLOAT16.tn(jnp.concatenate(parts), pick)  # [C, I * width]
    return jnp.stack([columns[:, i * width : (i + 1) * width] for i in range(heads)])


def _forward_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    known = "inverses" in inputs
    refs = dict(zip(inputs + outputs, refs))

    @pl.when(pl.program_id(2) == 0)
    def _():
        refs["final"][...] = refs["initial_state"][...]

    c = _Block(p, refs, normalize)
    values, state = c.heads("v", p.value).astype(jnp.float32), refs["final"][0]
    if "states" in refs:
        refs["states"][0, 0] = state.astype(refs["states"].dtype)
    read = c.dots.nn(c.both, state)  # before the inverse, which leaves the matrix unit idle at first
    ks, qs = read[:, : p.size], read[:, p.size :]
    if erase:
        right = c.exact.split(c.beta_CV * chunk_math.unseen(values, ks, c.decay))
        a = refs["inverses"][0, 0] if known else inverse.tiled_inverse(chunk_math.interaction(c.kk, c.beta, c.decay), c.exact)
        if "inverses" in outputs:
            refs["inverses"][0, 0] = a
        written = c.exact.nn(c.exact.split(a), right)
    else:
        written = c.beta_CV * values
    refs["final"][0] = chunk_math.next_state(refs["final"][0], c.k, written, c.decay, c.dots)
    c.store("o", chunk_math.output(qs, c.qk * c.decay.pair, written, c.decay, c.dots))


def _map_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    """U and M side by side along the lanes, [U | M]: M is the state of values zero that starts at the identity."""
    refs = dict(zip(inputs + outputs, refs))

    @pl.when(pl.program_id(2) == 0)
    def _():
        refs["final"][...] = refs["initial_state"][...]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (p.key, p.key), i) for i in (0, 1))
        refs["m"][0] = jnp.broadcast_to((row == column).astype(jnp.float32), refs["m"].shape[1:])

    c = _Block(p, refs, normalize)
    beside = lambda u, m: jnp.concatenate([u, m], axis=-1)
    wide = lambda spread: beside(spread[..., : p.value], spread[..., : p.key])
    k, decay = c.k._replace(column=wide(c.k.column)), c.decay._replace(gamma=wide(c.decay.gamma), rho=wide(c.decay.rho))
    m = refs["m"][0]
    values = c.heads("v", p.value).astype(jnp.float32)
    values = beside(values, jnp.zeros((*values.shape[:-1], p.key), jnp.float32))
    qm, written = c.dots.nn(c.q, m), wide(c.beta) * values
    if erase:
        ks = c.dots.nn(k, beside(refs["final"][0], m))
        right = c.exact.split(wide(c.beta) * chunk_math.unseen(values, ks, decay))
        a = inverse.tiled_inverse(chunk_math.interaction(c.kk, c.beta, c.decay), c.exact)
        refs["inverses"][0, 0] = a
        written = c.exact.nn(c.exact.split(a), right)
    state = chunk_math.next_state(beside(refs["final"][0], m), k, written, decay, c.dots)
    refs["final"][0], refs["m"][0] = state[..., : p.value], state[..., p.value :]
    reads = chunk_math.output(qm, c.qk * c.decay.pair, written[..., p.value :], c.decay, c.dots)
    refs["reads"][0, 0] = reads.astype(refs["reads"].dtype)


def _backward_kernel(p: Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
    refs = dict(zip(inputs + outputs, refs))

    @pl.when(pl.program_id(2) == 0)
    def _():
        refs["dinitial"][...] = refs["dfinal"][...]

    c = _Block(p, refs, normalize)
    do, unseen = c.heads("do", p.value), c.heads("v", p.value).astype(jnp.float32)
    state, dstate = refs["states"][0, 0], refs["dinitial"][0]
    gamma_CV = c.decay.gamma[..., : p.value]
    if erase:
        unseen = chunk_math.unseen(unseen, c.dots.nn(c.k, state), c.decay)
    dr = chunk_math.written_backward(c.dots.tn(c.qk * c.decay.pair, do), c.k, dstate, c.decay, c.dots)
    x, written = None, c.beta_CV * unseen
    if erase:
        a = c.exact.split(refs["inverses"][0, 0])
        written = c.exact.nn(a, c.exact.split(written))
        dr = c.exact.tn(a, c.exact.split(dr))
        x = c.beta_CV * gamma_CV * dr
    d = chunk_math.chunk_gradients(
        c.q, c.k, unseen, c.beta, c.decay, c.kk, c.qk, written, dr, x, state, dstate, do, erase, c.dots
    )
    qo = c.dots.tn(c.q, gamma_CV * do)
    refs["dinitial"][0] = chunk_math.state_backward(qo, c.k, x, dstate, c.decay, c.dots)
    c.store("dv", d.v)
    refs["dg"][0, 0, 0] = d.g[:, 0]
    refs["dbeta"][0, 0, 0] = jnp.concatenate(list(d.beta), axis=-1).T
    dq, dk = c.summed(d.q) * p.key_in**-0.5, c.summed(d.k)
    if c.live is not None:
        dq = jnp.where(c.live, dq, 0)
    if normalize:
        dq = chunk_math.inverse_norm_backward(dq, c.heads("q", p.key).astype(jnp.float32), chunk_math.fit(c.q_norm, p.key))
        dk = chunk_math.inverse_norm_backward(dk, c.heads("k", p.key).astype(jnp.float32), chunk_math.fit(c.k_norm, p.key))
    c.store("dq", dq)
    c.store("dk", dk)
