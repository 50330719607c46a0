"""Mosaic GPU kernels of the gated delta rule for Hopper (sm_90a). They never ran on a GPU: see docs/gpu.md.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule import pallas_gpu_kernels as kernels
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs
from qwen3next_jax.ops.delta_rule.pallas_gpu_kernels import C, rows, tiles

WIDTHS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes of one call and what is static in it."""

    batch: int
    chunks: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    normalize: bool
    erase: bool
    save: bool = False

    @property
    def share(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def key_tiles(self) -> int:
        return self.key // C

    @property
    def value_tiles(self) -> int:
        return self.value // C

    @classmethod
    def of(cls, x: Inputs, **settings):
        batch, time, key_heads, key = x.q.shape
        return cls(batch, -(-time // C), key_heads, x.v.shape[2], key, x.v.shape[3], **settings)

    def pad(self, x_BT, mode: str = "constant"):
        """T to whole chunks."""
        missing = self.chunks * C - x_BT.shape[1]
        return jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2), mode=mode) if missing else x_BT

    def rows(self, x: Inputs):
        """[B, H, N, 8, C] numbers by token, in the order of `kernels.TOTAL` …"""
        by_chunk = lambda x_BTH: jnp.moveaxis(self.pad(x_BTH).reshape(self.batch, self.chunks, C, -1), 3, 1).astype(jnp.float32)
        g, beta = by_chunk(x.g), by_chunk(x.beta)
        total = jnp.matmul(g, chunk_math.lower_mask(C).astype(jnp.float32).T, precision=chunk_math.HIGHEST)
        gamma, rho, document = total, total[..., -1:] - total, jnp.zeros_like(total)
        if x.segments is not None:
            signed = self.pad(x.segments, "edge").reshape(self.batch, self.chunks, C)
            index = jnp.swapaxes(chunk_math.document_index(jnp.swapaxes(signed, 0, 1)), 0, 1)
            signed, index = signed[:, None], index[:, None].astype(jnp.float32)
            gamma = jnp.where(index == 0, gamma, -jnp.inf)
            rho = jnp.where(index == index[..., -1:], rho, -jnp.inf)
            document = document + jnp.where(signed > 0, index, -1 - index)
        return jnp.stack([total, document, beta, jnp.exp(gamma), jnp.exp(rho), total, document, beta], axis=3)

    def by_token(self, x_BHNC):
        """[B, T, H], T of whole chunks."""
        return jnp.moveaxis(x_BHNC, 1, 3).reshape(self.batch, -1, self.value_heads)

    def to_key_heads(self, x_BTHK):
        """The sum over the value heads of each key head."""
        x = x_BTHK.reshape(*x_BTHK.shape[:2], self.key_heads, self.share, self.key)
        return x[:, :, :, 0] if self.share == 1 else jnp.sum(x, axis=3, dtype=jnp.float32)

    def call(self, body, name: str, grid: dict, outputs: dict, scratch: list, inputs: list, interpret: bool):
        out = plgpu.kernel(
            functools.partial(body, self), out_type=tuple(outputs.values()), scratch_types=tuple(scratch), grid=tuple(grid.values()),
            grid_names=tuple(grid), kernel_name=f"gated_delta_rule_{name}",
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*inputs)
        return dict(zip(outputs, out))

    def shaped(self, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def by_chunk(self, q, k, by_token, inverses: bool, interpret: bool):
        """What a chunk makes by itself: numbers [B, H, N, 5, C], P beta [B, H, N, C, C], the inverses [N, B, H, 2, C, C] in halves."""
        heads = (self.batch, self.value_heads, self.chunks)
        outputs = dict(numbers=self.shaped(*heads, 6, C, dtype=jnp.float32), p=self.shaped(*heads, C, C))
        if inverses:
            outputs["inverses"] = self.shaped(self.chunks, *heads[:2], 2, C, C)
        scratch = [tiles(self.key_tiles), tiles(self.key_tiles), tiles(2), tiles(2), tiles(2), rows(8), rows(6),
                   plgpu.Barrier(num_arrivals=2 * self.key_tiles), plgpu.Barrier()]
        grid = dict(chunks=self.chunks, heads=self.key_heads, batch=self.batch)
        return self.call(kernels.chunk_kernel, "chunks", grid, outputs, scratch, [q, k, by_token], interpret)


def to_residual(inverses):
    """The halves [N, B, H, 2, C, C] as the residual keeps inverses, [N, B, ceil(H / 2), C, 2C] of 4 bytes each."""
    chunks, batch, heads = inverses.shape[:3]
    x = jax.lax.bitcast_convert_type(inverses.reshape(chunks, batch, heads, C * C, 2), jnp.float32)
    return jnp.pad(x, [(0, 0), (0, 0), (0, heads % 2), (0, 0)]).reshape(chunks, batch, -1, C, 2 * C)


def from_residual(x, heads: int):
    chunks, batch = x.shape[:2]
    x = x.reshape(chunks, batch, -1, C * C)[:, :, :heads]
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).reshape(chunks, batch, heads, 2, C, C)


def forward(x: Inputs, initial_state, inverses, *, size: int, normalize_qk: bool, erase: bool, save: bool, interpret: bool):
    """As `chunked.forward`."""
    p = Problem.of(x, normalize=normalize_qk, erase=erase, save=save)
    q, k, v = (p.pad(y) for y in (x.q, x.k, x.v))
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, erase and inverses is None, interpret)
    inputs = [q, k, v, made["numbers"], by_token, made["p"]]
    halves = None
    if erase:
        halves = made["inverses"] if inverses is None else from_residual(inverses, p.value_heads)
        inputs.append(halves)
    inputs.append(initial_state.astype(jnp.float32))
    state = (p.batch, p.value_heads, p.key, p.value)
    outputs = dict(o=p.shaped(*v.shape), final=p.shaped(*state, dtype=jnp.float32))
    if save:
        outputs["states"] = p.shaped(p.chunks, *state)
    keys = tiles(2, p.key_tiles)
    arrivals = 2 * p.key_tiles + 4 + 2 * erase
    scratch = [keys, keys, tiles(2), tiles(2), tiles(2, 2), two_rows(6), two_rows(8), tiles(p.key_tiles), tiles(2), tile(),
               plgpu.Barrier(num_arrivals=arrivals, num_barriers=2)]
    grid = dict(value_tiles=p.value_tiles, heads=p.value_heads, batch=p.batch)
    out = p.call(kernels.forward_kernel, "forward", grid, outputs, scratch, inputs, interpret)
    o = out["o"][:, : x.v.shape[1]]
    if not save:
        return o, out["final"], None, None
    return o, out["final"], out["states"], to_residual(halves) if erase else None


def backward(x: Inputs, states, inverses, do, dfinal, *, size: int, normalize_qk: bool, erase: bool, interpret: bool):
    """As `chunked.backward`."""
    p = Problem.of(x, normalize=normalize_qk, erase=erase)
    time = x.v.shape[1]
    q, k, v, do = (p.pad(y) for y in (x.q, x.k, x.v, do.astype(x.v.dtype)))
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, False, interpret)
    known = [from_residual(inverses, p.value_heads)] if erase else []
    state = (p.batch, p.value_heads, p.key, p.value)
    outputs = dict(dv=p.shaped(*v.shape), dv_low=p.shaped(*v.shape), dstates=p.shaped(p.chunks, *state),
                   dinitial=p.shaped(*state, dtype=jnp.float32))
    inputs = [q, k, do, made["numbers"], by_token, made["p"], *known, dfinal.astype(jnp.float32)]
    keys = tiles(2, p.key_tiles)
    scratch = [keys, keys, tiles(2), tiles(2), tiles(2, 2), two_rows(6), two_rows(8), tiles(p.key_tiles), tiles(2), tiles(2),
               plgpu.Barrier(num_arrivals=2 * p.key_tiles + 4 + 2 * erase, num_barriers=2)]
    grid = dict(value_tiles=p.value_tiles, heads=p.value_heads, batch=p.batch)
    out = p.call(kernels.backward_kernel, "backward", grid, outputs, scratch, inputs, interpret)

    by_head = p.shaped(*v.shape[:3], p.key)
    outputs = dict(dq=by_head, dk=by_head, sums=p.shaped(p.batch, p.value_heads, p.chunks, 2, C, dtype=jnp.float32))
    inputs = [q, k, v, do, out["dv"], out["dv_low"], states, out["dstates"], made["numbers"], by_token, *known]
    keys, values, stages = tiles(p.key_tiles), tiles(p.value_tiles), 1 if p.key_tiles + p.value_tiles == 8 else 2
    scratch = [keys, keys, values, values, values, tiles(2), tile(), tile(), tile(), tiles(stages, 2), rows(6), rows(8), rows(2),
               plgpu.Barrier(num_arrivals=2 * (p.key_tiles + p.value_tiles + 1 + erase)), plgpu.Barrier(num_arrivals=2),
               plgpu.Barrier(num_arrivals=2, num_barriers=stages)]
    grid = dict(chunks=p.chunks, heads=p.value_heads, batch=p.batch)
    found = p.call(kernels.gradient_kernel, "gradients", grid, outputs, scratch, inputs, interpret)
    dq, dk = (p.to_key_heads(found[name])[:, :time] for name in ("dq", "dk"))
    dg, dbeta = (p.by_token(found["sums"][:, :, :, i])[:, :time] for i in range(2))
    return dq, dk, out["dv"][:, :time], dg, dbeta, out["dinitial"]


def two_rows(count: int):
    return plgpu.SMEM((2, count, C), jnp.float32)


def tile():
    return plgpu.SMEM((C, C), jnp.bfloat16, transforms=kernels.TRANSFORMS)
