"""Mosaic GPU kernels of the gated delta rule for Hopper (sm_90a). They never ran on a GPU: see docs/gpu.md.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.ops import kernel_trial
from qwen3next_jax.ops.delta_rule import chunk_math, pallas_gpu_gradients
from qwen3next_jax.ops.delta_rule import pallas_gpu_kernels as kernels
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs
from qwen3next_jax.ops.delta_rule.pallas_gpu_kernels import C, rows, tiles

WIDTHS = (64, 128, 256)
INTERPRETER = plgpu.InterpretGPUParams()


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

    @property
    def state_shape(self):
        return self.batch, self.value_heads, self.key, self.value

    @property
    def stages(self) -> int:
        """Chunks in shared memory at a time, in the passes of the state."""
        return 1 if self.key == max(WIDTHS) else 2

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
        return x[:, :, :, 0] if self.share == 1 else jnp.sum(x, axis=3, dtype=jnp.float32).astype(x.dtype)

    def call(self, body, name: str, grid: dict, outputs: dict, scratch: list, inputs: list, interpret: bool):
        """`body` over the grid: arrays in, named arrays out."""
        with jax.enable_x64(False):
            out = plgpu.kernel(
                functools.partial(body, self), out_type=tuple(outputs.values()), scratch_types=tuple(scratch), grid=tuple(grid.values()),
                grid_names=tuple(grid), kernel_name=f"gated_delta_rule_{name}",
                interpret=INTERPRETER if interpret else None,
            )(*inputs)
        return dict(zip(outputs, out))

    def over_chunks(self, body, name: str, outputs: dict, scratch: list, inputs: list, interpret: bool):
        """The same for a pass of the state: a block for every 64 channels of every value head."""
        arrived = plgpu.Barrier(num_arrivals=2 * self.key_tiles + 4 + 2 * self.erase, num_barriers=self.stages)
        grid = dict(value_tiles=self.value_tiles, heads=self.value_heads, batch=self.batch)
        return self.call(body, name, grid, outputs, [*scratch, arrived], inputs, interpret)

    def state_scratch(self) -> list:
        """For q, k, v or dO, P, the inverse and the numbers of a chunk, as often as chunks are there at a time."""
        n, keys = self.stages, tiles(self.stages, self.key_tiles)
        return [keys, keys, tiles(n), tiles(n), tiles(n, 2), rows(n, 6), rows(n, 8)]

    def shaped(self, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def by_chunk(self, q, k, by_token, inverses: bool, interpret: bool):
        """What a chunk makes by itself: numbers [B, H, N, 6, C], P beta [B, H, N, C, C], the inverses [N, B, H, 2, C, C] in halves."""
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


def refusal(q, k, v) -> str:
    """Why the kernels do not take these arrays here; empty where they do."""
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"has q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: expected bfloat16"
    if q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return f"has heads of {q.shape[3]} and {v.shape[3]} channels: expected {', '.join(map(str, WIDTHS))}"
    return kernel_trial.hopper_refusal()


def forward(x: Inputs, initial_state, inverses, *, size: int, normalize_qk: bool, erase: bool, save: bool, interpret: bool):
    """As `chunked.forward`, in chunks of 64 for any `size`. The inverses are those of I + M beta, in `to_residual`'s form."""
    p = Problem.of(x, normalize=normalize_qk, erase=erase, save=save)
    q, k, v = (p.pad(y) for y in x[:3])
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, erase and inverses is None, interpret)
    inputs = [q, k, v, made["numbers"], by_token, made["p"]]
    if erase:
        inverses = made["inverses"] if inverses is None else from_residual(inverses, p.value_heads)
        inputs.append(inverses)
    outputs = dict(o=p.shaped(*v.shape), final=p.shaped(*p.state_shape, dtype=jnp.float32))
    if save:
        outputs["states"] = p.shaped(p.chunks, *p.state_shape)
    scratch = p.state_scratch() + [tiles(p.key_tiles), tiles(2), tiles()]
    out = p.over_chunks(kernels.forward_kernel, "forward", outputs, scratch, [*inputs, initial_state.astype(jnp.float32)], interpret)
    o = out["o"][:, : x.v.shape[1]]
    return (o, out["final"], out["states"], to_residual(inverses) if erase else None) if save else (o, out["final"], None, None)


def backward(x: Inputs, states, inverses, do, dfinal, *, size: int, normalize_qk: bool, erase: bool, interpret: bool):
    """As `chunked.backward`."""
    p = Problem.of(x, normalize=normalize_qk, erase=erase)
    time = x.v.shape[1]
    q, k, v, do = (p.pad(y) for y in (*x[:3], do.astype(x.v.dtype)))
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, False, interpret)
    known = [from_residual(inverses, p.value_heads)] if erase else []
    outputs = dict(dv=p.shaped(*v.shape), dv_low=p.shaped(*v.shape), dstates=p.shaped(p.chunks, *p.state_shape),
                   dinitial=p.shaped(*p.state_shape, dtype=jnp.float32))
    inputs = [q, k, do, made["numbers"], by_token, made["p"], *known, dfinal.astype(jnp.float32)]
    scratch = p.state_scratch() + [tiles(p.key_tiles), tiles(2), tiles(2)]
    out = p.over_chunks(kernels.backward_kernel, "backward", outputs, scratch, inputs, interpret)

    by_head = p.shaped(*v.shape[:3], p.key)
    outputs = dict(dq=by_head, dk=by_head, sums=p.shaped(p.batch, p.value_heads, p.chunks, 2, C, dtype=jnp.float32))
    inputs = [q, k, v, do, out["dv"], out["dv_low"], states, out["dstates"], made["numbers"], by_token, *known]
    keys, values, streamed = tiles(p.key_tiles), tiles(p.value_tiles), 2 if p.key_tiles + p.value_tiles == 8 else 4
    scratch = [keys, keys, values, values, values, tiles(2), tiles(), tiles(), tiles(), tiles(streamed), rows(6), rows(8), rows(2),
               plgpu.Barrier(num_arrivals=2 * (p.key_tiles + p.value_tiles + 1 + erase)), plgpu.Barrier(num_arrivals=2),
               plgpu.Barrier(num_barriers=streamed)]
    grid = dict(chunks=p.chunks, heads=p.value_heads, batch=p.batch)
    found = p.call(pallas_gpu_gradients.gradient_kernel, "gradients", grid, outputs, scratch, inputs, interpret)
    dq, dk = (p.to_key_heads(found[name])[:, :time] for name in ("dq", "dk"))
    dg, dbeta = (p.by_token(found["sums"][:, :, :, i])[:, :time] for i in range(2))
    return dq, dk, out["dv"][:, :time], dg, dbeta, out["dinitial"]
