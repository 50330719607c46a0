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
from qwen3next_jax.ops.delta_rule.chunk_math import Documents, Products

LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiling:
  """How many value heads one grid step handles; their chains are independent and hide each other's latency."""
  value_heads: int
  chunk: int


def forward(q, k, v, g, beta, initial_state, segments, *, size: int, normalize_qk: bool, erase: bool, save: bool,
            interpret: bool):
  """As `chunked.forward`; without `save` the last two results are None and never exist."""
  p = _Problem(q, k, v, size, erase)
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
    kernel, grid=p.grid, out_shape=list(shapes.values()), in_specs=[spec[n] for n in names],
    out_specs=[spec[n] for n in shapes], interpret=interpret, name="gated_delta_rule_forward",
    compiler_params=p.compiler_params)(*inputs.values(), p.pad_state(initial_state.astype(jnp.float32)))
  out = dict(zip(shapes, out))
  o = p.unflatten(out["o"], p.value_heads, p.value)[..., :p.value_in]
  states = p.cut_state(out["states"]) if save else None
  return o, p.cut_state(out["final"]), states, out.get("inverses")


def backward(q, k, v, g, beta, segments, states, inverses, do, dfinal, *, size: int, normalize_qk: bool, erase: bool,
             interpret: bool):
  """As `chunked.backward`."""
  p = _Problem(q, k, v, size, erase)
  inputs = p.inputs(q, k, v, g, beta, segments)
  inputs |= dict(do=p.flatten(do.astype(v.dtype)), states=p.pad_state(states), dfinal=p.pad_state(dfinal.astype(jnp.float32)))
  if erase:
    inputs["inverses"] = inverses
  spec = p.specs(forward=False)
  rows = jax.ShapeDtypeStruct((p.batch, p.chunks, p.value_heads, size), jnp.float32)
  shapes = dict(dq=p.flat(p.key_heads, p.key, q.dtype), dk=p.flat(p.key_heads, p.key, k.dtype),
                dv=p.flat(p.value_heads, p.value, v.dtype), dg=rows, dbeta=rows,
                dinitial=jax.ShapeDtypeStruct(p.state_shape, jnp.float32))
  kernel = functools.partial(_backward_kernel, p, list(inputs), list(shapes), normalize_qk, erase)
  out = pl.pallas_call(
    kernel, grid=p.grid, out_shape=list(shapes.values()), in_specs=[spec[n] for n in inputs],
    out_specs=[spec[n] for n in shapes], interpret=interpret, name="gated_delta_rule_backward",
    compiler_params=p.compiler_params)(*inputs.values())
  out = dict(zip(shapes, out))
  dq, dk = (p.unflatten(out[n], p.key_heads, p.key)[..., :p.key_in] for n in ("dq", "dk"))
  dv = p.unflatten(out["dv"], p.value_heads, p.value)[..., :p.value_in]
  return dq, dk, dv, p.unchunk(out["dg"]), p.unchunk(out["dbeta"]), p.cut_state(out["dinitial"])


# ---- shapes, layouts, blocks --------------------------------------------------------------------------------------

class _Problem:
  """The sizes of one call, its arrays in the kernels' layouts, and the blocks the grid cuts from them."""

  def __init__(self, q, k, v, size: int, erase: bool):
    self.batch, self.time, self.key_heads, self.key_in = q.shape
    self.value_heads, self.value_in = v.shape[2:]
    self.key, self.value = (-(-x // LANES) * LANES for x in (self.key_in, self.value_in))
    self.size, self.chunks = size, -(-self.time // size)
    self.share = self.value_heads // self.key_heads
    self.block = self._value_heads_per_step()
    self.key_block = self.block // self.share
    self.group = self.share if self.share % 2 == 0 or self.block % (2 * self.share) else 2 * self.share
    self.operand = v.dtype
    self.grid = (self.batch, self.value_heads // self.block, self.chunks)
    self.state_shape = (self.batch, self.value_heads, self.key, self.value)
    self.compiler_params = pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=64 * 2**20)

  def _value_heads_per_step(self) -> int:
    """Eight value heads where they divide (rows of the gates fill a tile), else all of them."""
    block = 8 * self.share // _gcd(8, self.share)
    return block if self.value_heads % block == 0 else self.value_heads

  # layouts

  def flat(self, heads: int, width: int, dtype):
    return jax.ShapeDtypeStruct((self.batch, self.chunks * self.size, heads * width), dtype)

  def flatten(self, x):
    """[B, T, heads, width] to [B, N C, heads * padded width]: a head is then a slice of whole lanes."""
    width = -(-x.shape[-1] // LANES) * LANES
    x = jnp.pad(x, ((0, 0), (0, self.chunks * self.size - self.time), (0, 0), (0, width - x.shape[-1])))
    return x.reshape(*x.shape[:2], -1)

  def unflatten(self, x, heads: int, width: int):
    return x[:, :self.time].reshape(self.batch, self.time, heads, width)

  def pad_state(self, x):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, self.key - self.key_in), (0, self.value - self.value_in)])

  def cut_state(self, x):
    return x[..., :self.key_in, :self.value_in]

  def rows(self, x, mode="constant"):
    """[B, T, heads] to [B, N, heads, C]: per head a row of lanes."""
    x = jnp.pad(x, ((0, 0), (0, self.chunks * self.size - self.time), (0, 0)), mode=mode)
    return jnp.swapaxes(x.reshape(self.batch, self.chunks, self.size, -1), 2, 3)

  def unchunk(self, x):
    """[B, N, H, C] to [B, T, H]."""
    return jnp.swapaxes(x, 2, 3).reshape(self.batch, -1, self.value_heads)[:, :self.time]

  def inputs(self, q, k, v, g, beta, segments) -> dict:
    g_rows = self.rows(g.astype(jnp.float32))
    total = jnp.matmul(g_rows, chunk_math.lower_mask(self.size).astype(jnp.float32).T, precision=chunk_math.HIGHEST)
    arrays = dict(q=self.flatten(q), k=self.flatten(k), v=self.flatten(v), total=total,
                  beta=self.rows(beta.astype(jnp.float32)))
    if segments is not None:
      signed = self.rows(segments[:, :, None], "edge")  # [B, N, 1, C]
      index = chunk_math.document_index(jnp.swapaxes(signed[:, :, 0], 0, 1))
      index = jnp.swapaxes(index, 0, 1)[:, :, None].astype(jnp.float32)
      arrays["documents"] = jnp.where(signed > 0, index, -1 - index)  # padding rows keep their document, negated
    return arrays

  def specs(self, forward: bool) -> dict:
    """Block specifications by name; the backward grid walks the chunks from the last to the first."""
    n = (lambda i: i) if forward else (lambda i: self.chunks - 1 - i)
    flat = lambda width: pl.BlockSpec((1, self.size, width), lambda b, h, i: (b, n(i), h))
    rows = pl.BlockSpec((1, 1, self.block, self.size), lambda b, h, i: (b, n(i), h, 0))
    state = pl.BlockSpec((1, self.block, self.key, self.value), lambda b, h, i: (b, h, 0, 0))
    per_chunk = lambda *shape: pl.BlockSpec((1, 1, self.block, *shape), lambda b, h, i: (n(i), b, h, 0, 0))
    keys, values = flat(self.key_block * self.key), flat(self.block * self.value)
    return dict(q=keys, k=keys, v=values, do=values, o=values, dq=keys, dk=keys, dv=values, total=rows, beta=rows, dg=rows,
                dbeta=rows, documents=pl.BlockSpec((1, 1, 1, self.size), lambda b, h, i: (b, n(i), 0, 0)),
                initial_state=state, final=state, dfinal=state, dinitial=state,
                states=per_chunk(self.key, self.value), inverses=per_chunk(self.size, self.size))


def _gcd(a, b):
  return a if b == 0 else _gcd(b, a % b)


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
# A step's heads are worked on in small groups, and the groups' programs are interleaved stage by stage with a lag: the
# compiler schedules near the order it is given, so while one group waits for the matrix unit another has vector work, and
# few arrays are alive at once. A group's program is a generator that yields wherever it waits.

LAG = 3


def _interleave(programs):
  """Runs generators side by side, each starting LAG rounds after the one before."""
  running, waiting, rounds = [], list(programs), 0
  while running or waiting:
    if waiting and rounds % LAG == 0:
      running.append(waiting.pop(0))
    running = [x for x in running if next(x, "ended") is None]
    rounds += 1


class _Shared:
  """What all groups of a step read: the gates as rows and columns, and the documents."""

  def __init__(self, p: _Problem, refs):
    self.total, self.beta = refs["total"][0, 0], refs["beta"][0, 0]  # [I, C]
    self.totals, self.betas = self.total.T, self.beta.T  # [C, I]
    self.live = self.documents = None
    if "documents" in refs:
      signed = refs["documents"][0, 0]  # [1, C]
      column = jnp.broadcast_to(signed, (8, p.size)).T[:, :1]
      self.live = column >= 0
      index = jnp.where(signed < 0, -1 - signed, signed)
      self.documents = Documents(jnp.where(self.live, column, -1 - column), index, index[:, -1:])


class _Group:
  """The inputs of value heads start .. start + p.group as [heads, C, ...] arrays, and what both directions make of them."""

  def __init__(self, p: _Problem, refs, shared: _Shared, start: int, normalize: bool):
    self.p, self.refs, self.live = p, refs, shared.live
    self.values = slice(start, start + p.group)
    self.keys = slice(start // p.share, (start + p.group) // p.share)
    self.dots = Products(p.operand)
    self.exact = ThreePass() if p.operand == jnp.bfloat16 else chunk_math.EXACT
    self.beta = self.columns(shared.betas)
    row = shared.total[self.values, None, :]
    self.decay = chunk_math.decay(self.columns(shared.totals), row, row[..., -1:], shared.documents)
    q, k = self.heads("q", self.keys, p.key), self.heads("k", self.keys, p.key)
    if normalize:
      self.q_norm, self.k_norm = chunk_math.inverse_norm(q), chunk_math.inverse_norm(k)
      q, k = q * self.q_norm, k * self.k_norm
    q = q * p.key_in ** -0.5
    if self.live is not None:
      q = jnp.where(self.live, q, 0)
    both = jnp.concatenate([k, q], axis=-2).astype(p.operand)  # [J, 2C, K]: one load of the matrix unit serves both
    pairs = self.dots.nt(both, k)
    self.kk, self.qk = self.repeated(pairs[:, :p.size]), self.repeated(pairs[:, p.size:])
    self.q, self.k, self.both = self.repeated(q), self.repeated(k), self.repeated(both)

  def columns(self, columns):
    """Columns of [C, I] as [heads, C, 1]."""
    return jnp.stack([columns[:, i:i + 1] for i in range(self.values.start, self.values.stop)])

  def heads(self, name: str, which: slice, width: int):
    """[heads, C, width] float32 out of a block [1, C, all heads * width]."""
    ref = self.refs[name]
    return jnp.stack([ref[0, :, i * width:(i + 1) * width] for i in range(which.start, which.stop)]).astype(jnp.float32)

  def store(self, name: str, which: slice, x):
    """The reverse of `heads`."""
    ref, width = self.refs[name], x.shape[-1]
    for i in range(which.start, which.stop):
      ref[0, :, i * width:(i + 1) * width] = x[i - which.start].astype(ref.dtype)

  def repeated(self, x):
    """What a key head holds, for each of its value heads."""
    return x if self.p.share == 1 else jnp.repeat(x, self.p.share, axis=0)

  def summed(self, x):
    """The reverse of `repeated`."""
    return x if self.p.share == 1 else jnp.sum(x.reshape(-1, self.p.share, *x.shape[1:]), axis=1)

  def read(self, state):
    """K S and Q S."""
    read = self.dots.nn(self.both, state)
    return read[:, :self.p.size], read[:, self.p.size:]


def _forward_kernel(p: _Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
  refs = dict(zip(inputs + outputs, refs))

  @pl.when(pl.program_id(2) == 0)
  def _():
    refs["final"][...] = refs["initial_state"][...]

  shared = _Shared(p, refs)
  _interleave(_forward_group(p, refs, shared, start, normalize, erase) for start in range(0, p.block, p.group))


def _forward_group(p: _Problem, refs, shared: _Shared, start: int, normalize: bool, erase: bool):
  c = _Group(p, refs, shared, start, normalize)
  heads = c.values
  yield
  if erase:
    a = yield from inverse.tiled_inverse(chunk_math.interaction(c.kk, c.beta, c.decay), c.exact)
    if "inverses" in refs:
      refs["inverses"][0, 0, heads] = a
  values, state = c.heads("v", heads, p.value), refs["final"][0, heads]
  ks, qs = c.read(state)
  if "states" in refs:
    refs["states"][0, 0, heads] = state.astype(refs["states"].dtype)
  yield
  written = c.beta * values
  if erase:
    written = c.exact.nn(c.exact.split(a), c.exact.split(chunk_math.residual(values, ks, c.beta, c.decay)))
    yield
  refs["final"][0, heads] = chunk_math.next_state(state, c.k, written, c.decay, c.dots)
  c.store("o", heads, chunk_math.output(qs, c.qk * c.decay.pair, written, c.decay, c.dots))


def _backward_kernel(p: _Problem, inputs, outputs, normalize: bool, erase: bool, *refs):
  refs = dict(zip(inputs + outputs, refs))

  @pl.when(pl.program_id(2) == 0)
  def _():
    refs["dinitial"][...] = refs["dfinal"][...]

  shared, dbetas = _Shared(p, refs), []
  _interleave(_backward_group(p, refs, shared, start, normalize, erase, dbetas) for start in range(0, p.block, p.group))
  refs["dbeta"][0, 0] = jnp.concatenate(dbetas, axis=-1).T


def _backward_group(p: _Problem, refs, shared: _Shared, start: int, normalize: bool, erase: bool, dbetas: list):
  c = _Group(p, refs, shared, start, normalize)
  heads = c.values
  values, do = c.heads("v", heads, p.value), c.heads("do", heads, p.value)
  state, dstate = refs["states"][0, 0, heads], refs["dinitial"][0, heads]
  ks, qs = c.read(state)
  yield
  dr = chunk_math.written_backward(c.dots.tn(c.qk * c.decay.pair, do), c.k, dstate, c.decay, c.dots)
  yield
  x, written = None, c.beta * values
  if erase:
    a = c.exact.split(refs["inverses"][0, 0, heads])
    written = c.exact.nn(a, c.exact.split(chunk_math.residual(values, ks, c.beta, c.decay)))
    dr = c.exact.tn(a, c.exact.split(dr))
    x = c.beta * c.decay.gamma * dr
    yield
  qo = c.dots.tn(c.q, c.decay.gamma * do)
  refs["dinitial"][0, heads] = chunk_math.state_backward(qo, c.k, x, dstate, c.decay, c.dots)
  yield
  d = chunk_math.chunk_gradients(c.q, c.k, values, c.beta, c.decay, c.kk, c.qk, ks, qs, written, dr, state, dstate, do,
                                 erase, c.dots)
  c.store("dv", heads, d.v)
  refs["dg"][0, 0, heads] = d.g[:, 0]
  dbetas.extend(d.beta)
  yield
  dq, dk = c.summed(d.q) * p.key_in ** -0.5, c.summed(d.k)
  if c.live is not None:
    dq = jnp.where(c.live, dq, 0)
  if normalize:
    q, k = c.heads("q", c.keys, p.key), c.heads("k", c.keys, p.key)
    dq = chunk_math.inverse_norm_backward(dq, q, c.q_norm)
    dk = chunk_math.inverse_norm_backward(dk, k, c.k_norm)
  c.store("dq", c.keys, dq)
  c.store("dk", c.keys, dk)
