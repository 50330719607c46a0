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
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.ops.delta_rule import chunk_math, inverse
from qwen3next_jax.ops.delta_rule.chunk_math import Documents, Products, Scaled

LANES = 128
SMALLEST_VMEM = 16 * 2**20  # of the supported chips (v4); assumed where the chip is not known


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one call is cut: `block` value heads and `size` tokens a grid step, widths padded to whole lanes.

    The heads of a step are independent and hide each other's latency, so the largest block wins, up to 16 (32 gave nothing
    more on v6e); memory for what the compiler keeps of a head while the others go through the same stage sets the bound.
    """

    block: int
    share: int  # value heads a key head
    size: int
    key: int
    value: int
    operand_bytes: int

    def __post_init__(self):
        if self.block % self.share != 0:
            raise ValueError(f"block of {self.block} value heads: expected a multiple of the {self.share} that share a key head")
        if self.key % LANES != 0 or self.value % LANES != 0:
            raise ValueError(f"widths {self.key} and {self.value}: expected multiples of {LANES}")

    @property
    def vmem_bytes(self) -> int:
        """Of the backward kernel, the larger one: double-buffered blocks and the intermediates of every head (34 arrays of
        [C, K + V] float32 in the compiler's allocation for v6e)."""
        tokens = self.size * (self.key + self.value)
        state = self.key * self.value
        buffers = 4 * self.operand_bytes * tokens + (8 + self.operand_bytes) * state + 4 * self.size**2
        return self.block * (2 * buffers + 34 * 4 * tokens)

    @classmethod
    def choose(cls, value_heads: int, share: int, size: int, key: int, value: int, operand_bytes: int, vmem: int):
        """The largest block that divides the heads and fits in `vmem` bytes.

        Raises ValueError where not even one key head fits.
        """
        for block in range(max(16, share), 0, -1):
            if value_heads % block == 0 and block % share == 0:
                tiling = cls(block, share, size, key, value, operand_bytes)
                if tiling.vmem_bytes <= vmem:
                    return tiling
        raise ValueError(
            f"head widths {key} and {value} with {share} value heads a key head: one block needs more than the "
            f"{vmem} bytes of this chip's VMEM; use implementation='chunked'"
        )


def _vmem_bytes() -> int:
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # traced on a machine without a TPU and outside a described chip's abstract mesh
        return SMALLEST_VMEM


def forward(
    q, k, v, g, beta, initial_state, segments, *, size: int, normalize_qk: bool, erase: bool, save: bool, interpret: bool
):
    """As `chunked.forward`; without `save` the last two results are None and never exist."""
    p = _Problem(q, v, size)
    inputs = p.inputs(q, k, v, g, beta, segments)
    spec = p.specs(forward=True)
    names = list(inputs) + ["initial_state"]
    shapes = dict(o=p.flat(p.value_heads, p.value, v.dtype), final=jax.ShapeDtypeStruct(p.state_shape, jnp.float32))
    if save:
        shapes["states"] = jax.ShapeDtypeStruct((p.chunks, *p.state_shape), v.dtype)
        if erase:
            shapes["inverses"] = jax.ShapeDtypeStruct((p.chunks, *p.state_shape[:2], size, size), jnp.float32)
    kernel = functools.partial(_forward_kernel, p, names, list(shapes), normalize_qk, erase)
    out = pl.pallas_call(
        kernel,
        grid=p.grid,
        out_shape=list(shapes.values()),
        in_specs=[spec[n] for n in names],
        out_specs=[spec[n] for n in shapes],
        interpret=interpret,
        name="gated_delta_rule_forward",
        compiler_params=p.compiler_params,
    )(*inputs.values(), p.pad_state(initial_state.astype(jnp.float32)))
    out = dict(zip(shapes, out))
    o = p.unflatten(out["o"], p.value_heads, p.value)[..., : p.value_in]
    states = p.cut_state(out["states"]) if save else None
    return o, p.cut_state(out["final"]), states, out.get("inverses")


def backward(
    q, k, v, g, beta, segments, states, inverses, do, dfinal, *, size: int, normalize_qk: bool, erase: bool, interpret: bool
):
    """As `chunked.backward`."""
    p = _Problem(q, v, size)
    inputs = p.inputs(q, k, v, g, beta, segments)
    inputs |= dict(do=p.flatten(do.astype(v.dtype)), states=p.pad_state(states), dfinal=p.pad_state(dfinal.astype(jnp.float32)))
    if erase:
        inputs["inverses"] = inverses
    spec = p.specs(forward=False)
    rows = jax.ShapeDtypeStruct((p.batch, p.chunks, p.value_heads // p.block, p.block, size), jnp.float32)
    shapes = dict(
        dq=p.flat(p.key_heads, p.key, q.dtype),
        dk=p.flat(p.key_heads, p.key, k.dtype),
        dv=p.flat(p.value_heads, p.value, v.dtype),
        dg=rows,
        dbeta=rows,
        dinitial=jax.ShapeDtypeStruct(p.state_shape, jnp.float32),
    )
    kernel = functools.partial(_backward_kernel, p, list(inputs), list(shapes), normalize_qk, erase)
    out = pl.pallas_call(
        kernel,
        grid=p.grid,
        out_shape=list(shapes.values()),
        in_specs=[spec[n] for n in inputs],
        out_specs=[spec[n] for n in shapes],
        interpret=interpret,
        name="gated_delta_rule_backward",
        compiler_params=p.compiler_params,
    )(*inputs.values())
    out = dict(zip(shapes, out))
    dq, dk = (p.unflatten(out[n], p.key_heads, p.key)[..., : p.key_in] for n in ("dq", "dk"))
    dv = p.unflatten(out["dv"], p.value_heads, p.value)[..., : p.value_in]
    return dq, dk, dv, p.unchunk(out["dg"]), p.unchunk(out["dbeta"]), p.cut_state(out["dinitial"])


# ---- shapes, layouts, blocks --------------------------------------------------------------------------------------


class _Problem:
    """The sizes of one call, its arrays in the kernels' layouts, and the blocks the grid cuts from them."""

    def __init__(self, q, v, size: int):
        self.batch, self.time, self.key_heads, self.key_in = q.shape
        self.value_heads, self.value_in = v.shape[2:]
        self.operand = v.dtype
        self.share = self.value_heads // self.key_heads
        self.key, self.value = (-(-x // LANES) * LANES for x in (self.key_in, self.value_in))
        self.width = max(self.key, self.value)
        self.size, self.chunks = size, -(-self.time // size)
        vmem = _vmem_bytes()
        tiling = Tiling.choose(self.value_heads, self.share, size, self.key, self.value, v.dtype.itemsize, int(0.95 * vmem))
        self.block, self.key_block = tiling.block, tiling.block // self.share
        self.grid = (self.batch, self.value_heads // self.block, self.chunks)
        self.state_shape = (self.batch, self.value_heads, self.key, self.value)
        self.compiler_params = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        )

    # layouts

    def flat(self, heads: int, width: int, dtype):
        return jax.ShapeDtypeStruct((self.batch, self.chunks * self.size, heads * width), dtype)

    def flatten(self, x):
        """[B, T, heads, width] to [B, N C, heads * padded width]: a head is then a slice of whole lanes."""
        width = -(-x.shape[-1] // LANES) * LANES
        x = jnp.pad(x, ((0, 0), (0, self.chunks * self.size - self.time), (0, 0), (0, width - x.shape[-1])))
        return x.reshape(*x.shape[:2], -1)

    def unflatten(self, x, heads: int, width: int):
        return x[:, : self.time].reshape(self.batch, self.time, heads, width)

    def pad_state(self, x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, self.key - self.key_in), (0, self.value - self.value_in)])

    def cut_state(self, x):
        return x[..., : self.key_in, : self.value_in]

    def rows(self, x, mode="constant"):
        """[B, T, heads] to [B, N, blocks, heads of a block, C]: per head a row of lanes."""
        x = jnp.pad(x, ((0, 0), (0, self.chunks * self.size - self.time), (0, 0)), mode=mode)
        x = jnp.swapaxes(x.reshape(self.batch, self.chunks, self.size, -1), 2, 3)
        return x.reshape(self.batch, self.chunks, -1, min(self.block, x.shape[2]), self.size)

    def unchunk(self, x):
        """The reverse of `rows`, for value heads."""
        x = x.reshape(self.batch, self.chunks, self.value_heads, self.size)
        return jnp.swapaxes(x, 2, 3).reshape(self.batch, -1, self.value_heads)[:, : self.time]

    def inputs(self, q, k, v, g, beta, segments) -> dict:
        g_rows = self.rows(g.astype(jnp.float32))
        total = jnp.matmul(g_rows, chunk_math.lower_mask(self.size).astype(jnp.float32).T, precision=chunk_math.HIGHEST)
        arrays = dict(
            q=self.flatten(q), k=self.flatten(k), v=self.flatten(v), total=total, beta=self.rows(beta.astype(jnp.float32))
        )
        if segments is not None:
            signed = self.rows(segments[:, :, None], "edge")[:, :, 0]  # [B, N, 1, C]
            index = chunk_math.document_index(jnp.swapaxes(signed[:, :, 0], 0, 1))
            index = jnp.swapaxes(index, 0, 1)[:, :, None].astype(jnp.float32)
            arrays["documents"] = jnp.where(signed > 0, index, -1 - index)  # padding rows keep their document, negated
        return arrays

    def specs(self, forward: bool) -> dict:
        """Block specifications by name; the backward grid walks the chunks from the last to the first."""
        n = (lambda i: i) if forward else (lambda i: self.chunks - 1 - i)
        flat = lambda width: pl.BlockSpec((1, self.size, width), lambda b, h, i: (b, n(i), h))
        rows = pl.BlockSpec((1, 1, 1, self.block, self.size), lambda b, h, i: (b, n(i), h, 0, 0))
        state = pl.BlockSpec((1, self.block, self.key, self.value), lambda b, h, i: (b, h, 0, 0))
        per_chunk = lambda *shape: pl.BlockSpec((1, 1, self.block, *shape), lambda b, h, i: (n(i), b, h, 0, 0))
        keys, values = flat(self.key_block * self.key), flat(self.block * self.value)
        return dict(
            q=keys,
            k=keys,
            v=values,
            do=values,
            o=values,
            dq=keys,
            dk=keys,
            dv=values,
            total=rows,
            beta=rows,
            dg=rows,
            dbeta=rows,
            documents=pl.BlockSpec((1, 1, 1, self.size), lambda b, h, i: (b, n(i), 0, 0)),
            initial_state=state,
            final=state,
            dfinal=state,
            dinitial=state,
            states=per_chunk(self.key, self.value),
            inverses=per_chunk(self.size, self.size),
        )


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

    def __init__(self, p: _Problem, refs, normalize: bool):
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


def _forward_kernel(p: _Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
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
        a = inverse.tiled_inverse(chunk_math.interaction(c.kk, c.beta, c.decay), c.exact)
        if "inverses" in refs:
            refs["inverses"][0, 0] = a
        written = c.exact.nn(c.exact.split(a), right)
    else:
        written = c.beta_CV * values
    refs["final"][0] = chunk_math.next_state(refs["final"][0], c.k, written, c.decay, c.dots)
    c.store("o", chunk_math.output(qs, c.qk * c.decay.pair, written, c.decay, c.dots))


def _backward_kernel(p: _Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
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
