"""Mosaic GPU kernels of the gated delta rule for Hopper (sm_90a); docs/gpu.md says what they do
and how fast.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import (
    delta_rule_chunks,
    delta_rule_gradients,
    delta_rule_states,
)
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, rows, tiles
from qwen3next_jax.ops.delta_rule import associative, chunk_math
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs

WIDTHS = (64, 128, 256)
# of an H100 or H200; a block of a pass of the state takes one, by its shared memory
PROCESSORS = 132
# chunks that a pass of the state does while XLA composes the maps of pieces: a guess, nobody timed
# it
COMPOSING = 64
INTERPRETER = plgpu.InterpretGPUParams()
EXACT = chunk_math.Products(jnp.float32)


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
    interpret: bool = False
    # of every row, in the passes of the state
    pieces: int = 1
    # of a pass that makes maps: their blocks of 64 channels, the value's and the key's
    map_tiles: tuple[int, int] | None = None

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

    @property
    def warpgroups(self) -> int:
        """Of a block in the passes of the state: each has 64 channels of the value; two share
        what is read of q and k, where there are not processors for all.
        """
        return (
            1
            if self.columns % 2
            or self.pieces * self.batch * self.value_heads * self.columns <= PROCESSORS
            else 2
        )

    @property
    def maps(self) -> bool:
        return self.map_tiles is not None

    @property
    def columns(self) -> int:
        """Blocks of 64 channels of what is passed from chunk to chunk."""
        return sum(self.map_tiles) if self.maps else self.value_tiles

    @classmethod
    def of(cls, x: Inputs, pieces: int | None = None, **settings):
        batch, time, key_heads, key = x.q.shape
        p = cls(batch, -(-time // C), key_heads, x.v.shape[2], key, x.v.shape[3], **settings)
        return dataclasses.replace(p, pieces=pieces or p.best_pieces())

    def best_pieces(self) -> int:
        """Into how many pieces a row goes, for all processors to have work: maps are a pass
        more, and some time to compose them. One where more do not save a fifth.
        """

        def chunks_in_turn(pieces: int) -> int:
            passes = [self.value_tiles] + [self.value_tiles + self.key_tiles] * (pieces > 1)
            blocks = (self.batch * self.value_heads * pieces * -(-tiles // 2) for tiles in passes)
            return self.chunks // pieces * sum(-(-n // PROCESSORS) for n in blocks) + COMPOSING * (
                pieces > 1
            )

        best = min((n for n in (1, 2, 4, 8, 16, 32) if self.chunks % n == 0), key=chunks_in_turn)
        return best if chunks_in_turn(best) <= 0.8 * chunks_in_turn(1) else 1

    def pad(self, x_BT, mode: str = "constant"):
        """T to whole chunks."""
        missing = self.chunks * C - x_BT.shape[1]
        return (
            jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2), mode=mode)
            if missing
            else x_BT
        )

    def rows(self, x: Inputs):
        """[B, H, N, 8, C] numbers by token, in the order of `delta_rule_tiles.TOTAL` …"""
        by_chunk = lambda x_BTH: jnp.moveaxis(
            self.pad(x_BTH).reshape(self.batch, self.chunks, C, -1), 3, 1
        ).astype(jnp.float32)
        g, beta = by_chunk(x.g), by_chunk(x.beta)
        total = jnp.matmul(
            g, chunk_math.lower_mask(C).astype(jnp.float32).T, precision=chunk_math.HIGHEST
        )
        gamma, rho, document = total, total[..., -1:] - total, jnp.zeros_like(total)
        if x.segments is not None:
            signed = self.pad(x.segments, "edge").reshape(self.batch, self.chunks, C)
            index = jnp.swapaxes(chunk_math.document_index(jnp.swapaxes(signed, 0, 1)), 0, 1)
            signed, index = signed[:, None], index[:, None].astype(jnp.float32)
            gamma = jnp.where(index == 0, gamma, -jnp.inf)
            rho = jnp.where(index == index[..., -1:], rho, -jnp.inf)
            document = document + jnp.where(signed > 0, index, -1 - index)
        return jnp.stack(
            [total, document, beta, jnp.exp(gamma), jnp.exp(rho), total, document, beta], axis=3
        )

    def by_token(self, x_BHNC):
        """[B, T, H], T of whole chunks."""
        return jnp.moveaxis(x_BHNC, 1, 3).reshape(self.batch, -1, self.value_heads)

    def to_key_heads(self, x_BTHK):
        """The sum over the value heads of each key head."""
        x = x_BTHK.reshape(*x_BTHK.shape[:2], self.key_heads, self.share, self.key)
        return (
            x[:, :, :, 0]
            if self.share == 1
            else jnp.sum(x, axis=3, dtype=jnp.float32).astype(x.dtype)
        )

    def call(
        self, body, name: str, grid: dict, outputs: dict, scratch: list, inputs: list, **threads
    ):
        """`body` over the grid: arrays in, named arrays out."""
        with jax.enable_x64(False):
            out = plgpu.kernel(
                functools.partial(body, self),
                out_type=tuple(outputs.values()),
                scratch_types=tuple(scratch),
                grid=tuple(grid.values()),
                grid_names=tuple(grid),
                kernel_name=f"gated_delta_rule_{name}",
                interpret=INTERPRETER if self.interpret else None,
                **threads,
            )(*inputs)
        return dict(zip(outputs, out))

    def over_chunks(self, body, name: str, outputs: dict, scratch, inputs: list):
        """The same for a pass of the state: a block for every 128 channels of every value head,
        or 64. `scratch`: for what it gives.
        """
        maps_forward = self.maps and body is delta_rule_states.forward_kernel
        copies = self.warpgroups + 5 + self.erase - 2 * maps_forward
        barriers = [
            plgpu.Barrier(num_arrivals=n, num_barriers=self.stages)
            for n in (copies, self.warpgroups)
        ]
        grid = dict(
            value_tiles=self.columns // self.warpgroups,
            heads=self.value_heads,
            batch=self.pieces * self.batch,
        )
        return self.call(
            body,
            name,
            grid,
            outputs,
            [*self.state_scratch(), scratch, *barriers],
            inputs,
            num_threads=self.warpgroups + 1,
            thread_name="warpgroups",
        )

    def piecewise(self, x):
        """[pieces · B, …] as [pieces, B, …]."""
        return x.reshape(self.pieces, self.batch, *x.shape[1:])

    def maps_of_pieces(self, values: int, inputs: list):
        """What each piece does to the state S that enters, M S + U: U and M, [pieces, B, H, K,
        …] float32, U of so many of the value's blocks.
        """
        p = dataclasses.replace(self, save=False, map_tiles=(values, self.key_tiles))
        outputs = dict(
            maps=p.shaped(
                p.pieces * p.batch, p.value_heads, p.columns * C, p.key, dtype=jnp.float32
            )
        )
        maps = p.over_chunks(delta_rule_states.forward_kernel, "maps", outputs, tiles(1), inputs)[
            "maps"
        ]
        return jnp.split(flipped(p.piecewise(maps)), [values * C], axis=-1)

    def state_scratch(self) -> list:
        """For q, k, v or dO, P, the inverse and the numbers of a chunk, as often as chunks are
        there at a time; for states.
        """
        n, keys = self.stages, tiles(self.stages, width=self.key)
        return [
            keys,
            keys,
            tiles(n, self.warpgroups),
            tiles(n),
            tiles(n, 2),
            rows(n, 6),
            rows(n, 8),
            tiles(self.warpgroups, height=self.key),
        ]

    def shaped(self, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def by_chunk(self, q, k, by_token, inverses: bool):
        """What a chunk makes by itself: numbers [B, H, N, 6, C], P beta [B, H, N, C, C], the
        inverses [N, B, H, 2, C, C] in halves.
        """
        heads = (self.batch, self.value_heads, self.chunks)
        outputs = dict(
            numbers=self.shaped(*heads, 6, C, dtype=jnp.float32), p=self.shaped(*heads, C, C)
        )
        if inverses:
            outputs["inverses"] = self.shaped(self.chunks, *heads[:2], 2, C, C)
        product = plgpu.SMEM(
            (C, C),
            jnp.float32,
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        )
        keys = plgpu.RefUnion(tiles(self.key_tiles), product)
        narrow = functools.partial(tiles, 2, columns=delta_rule_chunks.NARROW)
        scratch = [
            keys,
            keys,
            narrow(),
            narrow(),
            narrow(width=delta_rule_chunks.NARROW),
            rows(2, 8),
            rows(6),
            plgpu.Barrier(num_arrivals=2 * self.key_tiles),
            plgpu.Barrier(num_barriers=2),
        ]
        grid = dict(chunks=self.chunks, heads=self.key_heads, batch=self.batch)
        return self.call(
            delta_rule_chunks.chunk_kernel, "chunks", grid, outputs, scratch, [q, k, by_token]
        )


def flipped(x):
    return jnp.swapaxes(x, -1, -2)


def to_residual(inverses):
    """The halves [N, B, H, 2, C, C] as the residual keeps inverses, [N, B, ceil(H / 2), C, 2C]
    of 4 bytes each.
    """
    chunks, batch, heads = inverses.shape[:3]
    x = jax.lax.bitcast_convert_type(inverses.reshape(chunks, batch, heads, C * C, 2), jnp.float32)
    return jnp.pad(x, [(0, 0), (0, 0), (0, heads % 2), (0, 0)]).reshape(chunks, batch, -1, C, 2 * C)


def from_residual(x, heads: int):
    chunks, batch = x.shape[:2]
    x = x.reshape(chunks, batch, -1, C * C)[:, :, :heads]
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).reshape(chunks, batch, heads, 2, C, C)


def supports(x: Inputs, normalize_qk: bool, erase: bool, split: bool) -> str:
    """Why the kernels cannot run a call here, "" where they can. `split`: over a mesh axis."""
    q, k, v = x.q, x.k, x.v
    if split:
        return "over a mesh axis: there is no kernel for it"
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"has q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: expected bfloat16"
    if q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return (
            f"has heads of {q.shape[3]} and {v.shape[3]} channels: expected "
            f"{', '.join(map(str, WIDTHS))}"
        )
    return self_test.unsupported_chip()


def is_default(x: Inputs, normalize_qk: bool, erase: bool, split: bool) -> bool:
    """Where the kernels passed their test; says once what was decided."""
    from qwen3next_jax.kernels.gpu import delta_rule_self_test  # which imports this module

    if x.q.shape[1] <= C // 2:  # the XLA form cuts shorter rows into shorter chunks
        return False
    pieces = Problem.of(x, normalize=normalize_qk, erase=erase).pieces
    test = delta_rule_self_test.test(
        x.q.shape[3], x.v.shape[3], normalize_qk, erase, split=pieces > 1
    )
    return self_test.is_enabled(test, supports(x, normalize_qk, erase, split))


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
    pieces: int | None = None,
):
    """As `chunked.forward`, in chunks of 64 for any `size`. The inverses are those of I + M
    beta, in `to_residual`'s form. `pieces`: of a row, at the same time; None for as many as are
    worth it.
    """
    p = Problem.of(x, pieces, normalize=normalize_qk, erase=erase, save=save, interpret=interpret)
    q, k, v = (p.pad(y) for y in x[:3])
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, erase and inverses is None)
    inputs, initial = (
        [q, k, v, made["numbers"], by_token, made["p"]],
        initial_state.astype(jnp.float32),
    )
    if erase:
        inverses = made["inverses"] if inverses is None else from_residual(inverses, p.value_heads)
        inputs.append(inverses)
    if p.pieces > 1:
        u, m = p.maps_of_pieces(p.value_tiles, inputs)
        initial = associative.states((m, u), initial, EXACT, reverse=False)[0].reshape(
            -1, *p.state_shape[1:]
        )
    transposed = p.shaped(p.pieces * p.batch, p.value_heads, p.value, p.key, dtype=jnp.float32)
    outputs = dict(final=transposed, o=p.shaped(*v.shape))
    if save:
        outputs["states"] = p.shaped(p.chunks, *p.state_shape)
    out = p.over_chunks(
        delta_rule_states.forward_kernel,
        "forward",
        outputs,
        tiles(p.warpgroups),
        [*inputs, flipped(initial)],
    )
    o, final = out["o"][:, : x.v.shape[1]], flipped(p.piecewise(out["final"])[-1])
    return (
        (o, final, out["states"], to_residual(inverses) if erase else None)
        if save
        else (o, final, None, None)
    )


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
    pieces: int | None = None,
):
    """As `chunked.backward`; `pieces` as in `forward`."""
    p = Problem.of(x, pieces, normalize=normalize_qk, erase=erase, interpret=interpret)
    time = x.v.shape[1]
    q, k, v, do = (p.pad(y) for y in (*x[:3], do.astype(x.v.dtype)))
    by_token = p.rows(x)
    made = p.by_chunk(q, k, by_token, False)
    known = [from_residual(inverses, p.value_heads)] if erase else []
    numbers, dlast = [made["numbers"], by_token, made["p"], *known], dfinal.astype(jnp.float32)
    dfirst = dict(
        dinitial=p.shaped(p.pieces * p.batch, p.value_heads, p.value, p.key, dtype=jnp.float32)
    )
    if p.pieces > 1:
        _, m = p.maps_of_pieces(0, [q, k, v, *numbers])
        of_map = dataclasses.replace(p, map_tiles=(p.value_tiles, 0))
        d = of_map.over_chunks(
            delta_rule_states.backward_kernel,
            "map_backward",
            dfirst,
            tiles(1),
            [q, k, do, *numbers],
        )
        maps = flipped(m), flipped(p.piecewise(d["dinitial"]))
        dlast = associative.states(maps, dlast, EXACT, reverse=True)[0].reshape(
            -1, *p.state_shape[1:]
        )
    outputs = dfirst | dict(
        dv=p.shaped(*v.shape), dv_low=p.shaped(*v.shape), dstates=p.shaped(p.chunks, *p.state_shape)
    )
    inputs = [q, k, do, *numbers, flipped(dlast)]
    out = p.over_chunks(
        delta_rule_states.backward_kernel, "backward", outputs, tiles(p.warpgroups, 2), inputs
    )
    dinitial = flipped(p.piecewise(out["dinitial"])[0])

    by_head = p.shaped(*v.shape[:3], p.key)
    outputs = dict(
        dq=by_head,
        dk=by_head,
        sums=p.shaped(p.batch, p.value_heads, p.chunks, 2, C, dtype=jnp.float32),
    )
    inputs = [
        q,
        k,
        v,
        do,
        out["dv"],
        out["dv_low"],
        states,
        out["dstates"],
        made["numbers"],
        by_token,
        *known,
    ]
    grid = dict(chunks=p.chunks, heads=p.value_heads, batch=p.batch)
    found = p.call(
        delta_rule_gradients.gradient_kernel,
        "gradients",
        grid,
        outputs,
        delta_rule_gradients.scratch(p),
        inputs,
        **delta_rule_gradients.threads(p),
    )
    dq, dk = (p.to_key_heads(found[name])[:, :time] for name in ("dq", "dk"))
    dg, dbeta = (p.by_token(found["sums"][:, :, :, i])[:, :time] for i in range(2))
    return dq, dk, out["dv"][:, :time], dg, dbeta, dinitial
