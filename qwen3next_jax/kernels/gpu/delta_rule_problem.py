"""The sizes of one call of the gated delta rule's Mosaic GPU kernels, the numbers that follow from
the sizes, and the calls of the kernels over their grids.

"A pass of the state" is a call of a kernel of `delta_rule_states`, which carries the state, or its
gradient, from chunk to chunk. It may split each row into pieces that run at the same time
(`delta_rule_passes`). "Maps" are the affine maps U + M S of these pieces, where S is the state
before a piece and U + M S is the state after it.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu import delta_rule_chunks, delta_rule_states
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, rows, tiles
from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

WIDTHS = (64, 128, 256)  # the head widths that the kernels take
# The number of streaming multiprocessors of an H200 or an H100 SXM. A block of a pass of the state
# uses so much shared memory that it occupies one multiprocessor alone.
PROCESSORS = 132
# The time in which XLA composes the maps of the pieces, as the number of chunks that a pass of the
# state computes in that time. This is a guess; it has not been timed.
COMPOSING = 64
INTERPRETER = plgpu.InterpretGPUParams()


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and static settings of one call.

    Attributes:
      batch: B.
      chunks: N.
      key_heads: G.
      value_heads: H.
      key: K.
      value: V.
      normalize: whether q and k are L2-normalised.
      erase: whether a write to the state has the delta term (`Settings.erase`).
      save: whether the forward pass writes the state before each chunk.
      interpret: whether a CPU interprets the kernels.
      pieces: number of pieces of equal length into which every row is split in the passes of the
        state.
      map_tiles: for a pass that computes maps, the number of blocks of 64 columns of U and the
        number of blocks of 64 columns of M; None for other passes.
    """

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
    pieces: int = 1
    map_tiles: tuple[int, int] | None = None

    @classmethod
    def of(cls, x: Inputs, settings: Settings, pieces: int | None = None, **others) -> "Problem":
        """Returns the problem of a call. If `pieces` is None, `best_pieces` chooses the number of
        pieces. `others` sets the fields `save` and `interpret`.
        """
        batch, time, key_heads, key = x.q.shape
        value_heads, value = x.v.shape[2:]
        normalize, erase = settings.normalize_qk, settings.erase
        sizes = batch, -(-time // C), key_heads, value_heads, key, value
        p = cls(*sizes, normalize, erase, **others)
        return dataclasses.replace(p, pieces=pieces or p.best_pieces())

    # ---- numbers that follow from the sizes

    @property
    def heads_per_key(self) -> int:
        """The number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_tiles(self) -> int:
        """The number of tiles of 64 channels of a key head."""
        return self.key // C

    @property
    def value_tiles(self) -> int:
        """The number of tiles of 64 channels of a value head."""
        return self.value // C

    @property
    def state_shape(self):
        """The shape [B, H, K, V] of the states."""
        return self.batch, self.value_heads, self.key, self.value

    @property
    def computes_maps(self) -> bool:
        """Whether this is the problem of a pass that computes maps."""
        return self.map_tiles is not None

    @property
    def columns(self) -> int:
        """The number of blocks of 64 value channels in a pass of the state. In a pass that computes
        maps it counts the columns of U and M.
        """
        return sum(self.map_tiles) if self.computes_maps else self.value_tiles

    @property
    def stages(self) -> int:
        """The number of chunks whose inputs are in shared memory at a time in a pass of the
        state.
        """
        return 1 if self.key == max(WIDTHS) else 2

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups that compute in a block of a pass of the state. It is 1 or 2,
        and each warpgroup computes 64 value channels. Two warpgroups share the tiles of q and k
        that they read. One warpgroup is used if `columns` is odd, or if there are enough
        multiprocessors for all blocks of one warpgroup.
        """
        blocks = self.pieces * self.batch * self.value_heads * self.columns
        return 1 if self.columns % 2 or blocks <= PROCESSORS else 2

    def best_pieces(self) -> int:
        """Returns the number of pieces with which the passes of the state take the least time, or 1
        if several pieces would save less than a fifth of the time. It tries the powers of two up to
        32 that divide the number of chunks.

        The time is estimated as the number of chunks that a multiprocessor computes one after
        another. With several pieces there is an additional pass for the maps, and XLA needs time to
        compose them (COMPOSING).
        """

        def chunks_in_turn(pieces: int) -> int:
            passes = [self.value_tiles] + [self.value_tiles + self.key_tiles] * (pieces > 1)
            blocks = (self.batch * self.value_heads * pieces * -(-tiles // 2) for tiles in passes)
            return self.chunks // pieces * sum(-(-n // PROCESSORS) for n in blocks) + COMPOSING * (
                pieces > 1
            )

        best = min((n for n in (1, 2, 4, 8, 16, 32) if self.chunks % n == 0), key=chunks_in_turn)
        return best if chunks_in_turn(best) <= 0.8 * chunks_in_turn(1) else 1

    # ---- layouts

    def shaped(self, *shape, dtype=jnp.bfloat16):
        """Returns the shape and dtype of an array as a `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def pad_time(self, x_BT, mode: str = "constant"):
        """Returns x [B, T, …] with T padded to a multiple of C. `mode` is the mode of `jnp.pad`."""
        missing = self.chunks * C - x_BT.shape[1]
        if not missing:
            return x_BT
        return jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2), mode=mode)

    def rows(self, x: Inputs):
        """Returns [B, H, N, 8, C] in float32: for each chunk of each value head the 8 rows whose
        indices `delta_rule_tiles` names TOTAL, DOCUMENT, ….
        """
        by_chunk = lambda x_BTH: jnp.moveaxis(
            self.pad_time(x_BTH).reshape(self.batch, self.chunks, C, -1), 3, 1
        ).astype(jnp.float32)
        g, beta = by_chunk(x.g), by_chunk(x.beta)
        total = jnp.matmul(
            g, chunk_math.lower_mask(C).astype(jnp.float32).T, precision=chunk_math.HIGHEST
        )
        gamma, rho, document = total, total[..., -1:] - total, jnp.zeros_like(total)
        if x.segments is not None:
            signed = self.pad_time(x.segments, "edge").reshape(self.batch, self.chunks, C)
            index = jnp.swapaxes(chunk_math.document_index(jnp.swapaxes(signed, 0, 1)), 0, 1)
            signed, index = signed[:, None], index[:, None].astype(jnp.float32)
            gamma = jnp.where(index == 0, gamma, -jnp.inf)
            rho = jnp.where(index == index[..., -1:], rho, -jnp.inf)
            document = document + jnp.where(signed > 0, index, -1 - index)
        return jnp.stack(
            [total, document, beta, jnp.exp(gamma), jnp.exp(rho), total, document, beta], axis=3
        )

    def from_rows(self, x_BHNC):
        """Rearranges x [B, H, N, C] into [B, N C, H]."""
        return jnp.moveaxis(x_BHNC, 1, 3).reshape(self.batch, -1, self.value_heads)

    def to_key_heads(self, x_BTHK):
        """Returns [B, T, G, K], the sum of x [B, T, H, K] over the value heads of each key head."""
        x = x_BTHK.reshape(*x_BTHK.shape[:2], self.key_heads, self.heads_per_key, self.key)
        if self.heads_per_key == 1:
            return x[:, :, :, 0]
        return jnp.sum(x, axis=3, dtype=jnp.float32).astype(x.dtype)

    def by_piece(self, x):
        """Reshapes x [pieces · B, …] to [pieces, B, …]."""
        return x.reshape(self.pieces, self.batch, *x.shape[1:])

    # ---- calls

    def call(
        self, kernel, name: str, grid: dict, outputs: dict, scratch: list, inputs: list, **threads
    ) -> dict:
        """Runs `kernel` over the grid and returns its outputs by name.

        Args:
          kernel: function of this problem and of the Pallas references of inputs, outputs and
            scratch memory.
          name: name of the kernel in a compiled program.
          grid: size of each grid axis by name.
          outputs: shape and dtype of each output by name.
          scratch: the scratch memory and barriers.
          inputs: the input arrays.
          threads: `num_threads` and `thread_name` for blocks of several warpgroups.
        """
        with jax.enable_x64(False):
            results = plgpu.kernel(
                functools.partial(kernel, self),
                out_type=tuple(outputs.values()),
                scratch_types=tuple(scratch),
                grid=tuple(grid.values()),
                grid_names=tuple(grid),
                kernel_name=f"gated_delta_rule_{name}",
                interpret=INTERPRETER if self.interpret else None,
                **threads,
            )(*inputs)
        return dict(zip(outputs, results))

    def run_chunks(self, q, k, rows_BHN8C, inverses: bool) -> dict:
        """Runs the kernel of `delta_rule_chunks`, which computes the arrays of a chunk that do not
        depend on the state. Returns a dict with these arrays:

        factors: [B, H, N, 6, C] float32, the rows that `delta_rule_tiles` lists as K_GAMMA, ….
        p: [B, H, N, C, C] bfloat16, P beta.
        inverses: [N, B, H, 2, C, C] bfloat16, the high and the low part of the inverse of I + M
          beta; only if the argument `inverses` is True.
        """
        heads = (self.batch, self.value_heads, self.chunks)
        outputs = dict(
            factors=self.shaped(*heads, 6, C, dtype=jnp.float32), p=self.shaped(*heads, C, C)
        )
        if inverses:
            outputs["inverses"] = self.shaped(self.chunks, *heads[:2], 2, C, C)
        grid = dict(chunks=self.chunks, heads=self.key_heads, batch=self.batch)
        return self.call(
            delta_rule_chunks.chunk_kernel,
            "chunks",
            grid,
            outputs,
            delta_rule_chunks.scratch(self),
            [q, k, rows_BHN8C],
        )

    def run_states(self, kernel, name: str, outputs: dict, scratch, inputs: list) -> dict:
        """Runs a pass of the state. The grid has one block for every 64 or 128 value channels of
        every value head in every piece of every row of the batch. Returns the outputs by name.

        Args:
          kernel: `delta_rule_states.forward_kernel` or `backward_kernel`.
          name: name of the kernel in a compiled program.
          outputs: shape and dtype of each output by name.
          scratch: shared memory from which the kernel's results (O, or in the backward pass dV) are
            copied to global memory.
          inputs: the input arrays.
        """
        maps_forward = self.computes_maps and kernel is delta_rule_states.forward_kernel
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
            kernel,
            name,
            grid,
            outputs,
            [*self._state_scratch(), scratch, *barriers],
            inputs,
            num_threads=self.warpgroups + 1,
            thread_name="warpgroups",
        )

    def _state_scratch(self) -> list:
        """Returns the shared memory of a pass of the state, in this order. For each stage: q; k; v,
        or dO in the backward pass; P beta; both parts of the inverse; the 6 rows of `factors`; the
        8 rows that the method `rows` returns. For each warpgroup: the tiles of its state.
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
