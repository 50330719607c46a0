"""The sizes of one call of the gated delta rule's Mosaic GPU kernels, the numbers that follow from
the sizes, and the calls of the kernels over their grids.

"A pass of the state" is a call of a kernel of `delta_rule_states`, which carries the state, or its
gradient, from chunk to chunk. Two such calls may split each row into pieces that run at the same
time (`delta_rule_passes`). "Maps" are the affine maps U + M S of these pieces, where S is the state
before a piece and U + M S is the state after it.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu import delta_rule_chunks, delta_rule_states
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, row_memory, tile_memory
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

WIDTHS = (64, 128, 256)  # the head widths of the kernels; other heads are padded with zeros
# The number of streaming multiprocessors of an H200 or an H100 SXM.
PROCESSORS = 132
# The time that the second call of a row in pieces and XLA's composition of the maps take, as the
# number of chunks that a pass of the state computes in that time. This is a guess; it has not been
# timed.
COMPOSING_CHUNKS = 48
MOST_PIECES = 33  # more would take XLA longer to compose than COMPOSING_CHUNKS says
INTERPRETER = plgpu.InterpretGPUParams()


def multiprocessor_count() -> int:
    """Returns the number of streaming multiprocessors of this process's GPU, or PROCESSORS if the
    program is compiled for a GPU that is not here, or interpreted.
    """
    target = compile_target()
    if target.may_lack_device or target.platform != "gpu":
        return PROCESSORS
    return getattr(jax.local_devices()[0], "core_count", PROCESSORS)


def padded_width(width: int) -> int:
    """Returns the smallest of WIDTHS that is at least `width`."""
    return min(w for w in WIDTHS if w >= width)


class Split(NamedTuple):
    """How the passes of the state split the work of a call over the chip.

    Attributes:
      pieces: number of pieces into which every row is split: 1, or 3 or more, at most the number of
        chunks. Their lengths differ by a chunk at most.
      warpgroups: number of warpgroups that compute in a block, 1 or 2, each one tile of 64 value
        channels; 1 if rows are split or if the number of tiles is odd.
    """

    pieces: int
    warpgroups: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and static settings of one call.

    Attributes:
      batch: B.
      chunks: N.
      key_heads: G.
      value_heads: H.
      key: K, one of WIDTHS. The channels of q and k above `key_channels` are zeros.
      value: V, one of WIDTHS.
      key_channels: the key width of the caller's arrays. Scores are divided by its square root.
      normalize: whether q and k are L2-normalised.
      delta_term: whether a write to the state has the delta term (`Settings.delta_term`).
      save: whether the forward pass writes the state before each chunk.
      interpret: whether a CPU interprets the kernels.
      split: how the passes of the state split the work over the chip.
    """

    batch: int
    chunks: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    key_channels: int
    normalize: bool
    delta_term: bool
    save: bool = False
    interpret: bool = False
    split: Split = Split(1, 1)

    @classmethod
    def of_call(
        cls, x: Inputs, settings: Settings, split: Split | None = None, **others
    ) -> "Problem":
        """Returns the problem of a call. If `split` is None, `best_split` chooses it. `others` sets
        the fields `save` and `interpret`.
        """
        batch, time, key_heads, channels = x.q.shape
        value_heads, value = x.v.shape[2:]
        normalize, delta_term = settings.normalize_qk, settings.delta_term
        heads = key_heads, value_heads, padded_width(channels), padded_width(value)
        p = cls(batch, -(-time // C), *heads, channels, normalize, delta_term, **others)
        return dataclasses.replace(p, split=split or p.best_split())

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
    def inverse_tiles(self) -> int:
        """The number of tiles of the inverse: its high and low part; 0 without the delta term."""
        return 2 if self.delta_term else 0

    @property
    def state_shape(self):
        """The shape [B, H, K, V] of the states."""
        return self.batch, self.value_heads, self.key, self.value

    @property
    def map_blocks(self) -> int:
        """The number of blocks of the grid that compute the map of a piece for a value head. Each
        computes two tiles of 64 columns: U has `value_tiles` tiles, M has `key_tiles` tiles, and if
        the sum is odd, the last tile of the last block has no meaning.
        """
        return -(-(self.value_tiles + self.key_tiles) // 2)

    @property
    def stages(self) -> int:
        """The number of chunks whose inputs are in shared memory at a time in a pass of the
        state.
        """
        return 1 if self.key == max(WIDTHS) else 2

    @property
    def pieces(self) -> int:
        """The number of pieces into which the passes of the state split every row."""
        return self.split.pieces

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups that compute in a block of a pass of the state."""
        return self.split.warpgroups

    def best_split(self) -> Split:
        """Returns how the passes of the state split the work over the chip.

        A block of a pass needs a multiprocessor to itself, because of its shared memory. A row that
        is not split takes N chunks one after another, on B · H · tiles multiprocessors if a block
        computes one tile. If the chip has fewer, a block computes two tiles, which share the tiles
        of q and k that they read.

        A row in P pieces takes 2 N / P chunks one after another: the first call computes piece 0
        and the maps of P - 2 pieces, the second call computes the other P - 1 pieces. If K is at
        most V, either call needs P - 1 times as many multiprocessors as whole rows, because a map
        takes `map_blocks` blocks with two tiles each, and a piece `value_tiles` blocks with one. P
        is the largest number with which the chip runs all blocks of a call at the same time, so
        more pieces would wait for one another.

        Rows are not split if that saves less than a fifth of the time (COMPOSING_CHUNKS). So rows
        stay whole if P is 2, which saves nothing, if they are short, and if a call has enough heads
        and rows to fill the chip and would only pay for the maps. Neither packed documents nor
        gates change the choice. They shrink M, or make it zero, but piece 0 takes as long as a map.
        """
        rows = self.batch * self.value_heads
        pieces = 1 + multiprocessor_count() // (rows * max(self.value_tiles, self.map_blocks))
        pieces = min(pieces, self.chunks, MOST_PIECES)
        in_turn = 2 * -(-self.chunks // pieces) + COMPOSING_CHUNKS
        if pieces > 2 and in_turn <= 0.8 * self.chunks:
            return Split(pieces, 1)
        one_tile = self.value_tiles % 2 or rows * self.value_tiles <= multiprocessor_count()
        return Split(1, 1 if one_tile else 2)

    def chunks_of_piece(self, piece):
        """Returns two integers: the index of the first chunk of a piece, and the number of its
        chunks. The chunks are counted in the order in which the pass computes them.
        """
        if self.pieces == 1:
            return 0, self.chunks
        start, stop = (i * self.chunks // self.pieces for i in (piece, piece + 1))
        return start, stop - start

    # ---- layouts

    def shape_struct(self, *shape, dtype=jnp.bfloat16):
        """Returns the shape and dtype of an array as a `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def pad_time(self, x_BT, mode: str = "constant"):
        """Returns x [B, T, …] with T padded to a multiple of C. `mode` is the mode of `jnp.pad`."""
        missing = self.chunks * C - x_BT.shape[1]
        if not missing:
            return x_BT
        return jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2), mode=mode)

    def pad_keys(self, x_BTGK):
        """Returns q or k with T padded to a multiple of C, and its heads padded to K channels."""
        return pad_axis(self.pad_time(x_BTGK), -1, self.key)

    def pad_values(self, x_BTHV):
        """Returns v, or the gradient of o, padded as `pad_keys` pads; its heads get V channels."""
        return pad_axis(self.pad_time(x_BTHV), -1, self.value)

    def pad_state(self, x_BHKV):
        """Returns a state, or its gradient, with heads of K and V channels, in float32."""
        x_BHKV = pad_axis(x_BHKV.astype(jnp.float32), -2, self.key)
        return pad_axis(x_BHKV, -1, self.value)

    def rows_of_chunks(self, x: Inputs):
        """Returns [B, H, N, 8, C] in float32: for each chunk of each value head the 8 rows whose
        indices `delta_rule_tiles` names TOTAL, DOCUMENT, ….
        """
        by_chunk = lambda x_BTH: jnp.moveaxis(
            self.pad_time(x_BTH).reshape(self.batch, self.chunks, C, -1), 3, 1
        ).astype(jnp.float32)
        g, beta = by_chunk(x.log_decay), by_chunk(x.beta)
        total = jnp.matmul(
            g, chunk_math.lower_mask(C).astype(jnp.float32).T, precision=chunk_math.HIGHEST
        )
        gamma, rho, document = total, total[..., -1:] - total, jnp.zeros_like(total)
        if x.signed_segment_ids is not None:
            signed = self.pad_time(x.signed_segment_ids, "edge").reshape(self.batch, self.chunks, C)
            index = jnp.swapaxes(
                chunk_math.document_index_in_chunk(jnp.swapaxes(signed, 0, 1)), 0, 1
            )
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

    def split_pieces(self, x):
        """Reshapes x [pieces · B, …], for some of the pieces, to [pieces, B, …]."""
        return x.reshape(-1, self.batch, *x.shape[1:])

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
          inputs: the input arrays, or references to arrays (`jax.new_ref`) that the kernel changes.
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
            factors=self.shape_struct(*heads, 6, C, dtype=jnp.float32),
            p=self.shape_struct(*heads, C, C),
        )
        if inverses:
            outputs["inverses"] = self.shape_struct(self.chunks, *heads[:2], 2, C, C)
        grid = dict(chunks=self.chunks, heads=self.key_heads, batch=self.batch)
        return self.call(
            delta_rule_chunks.chunk_kernel,
            "chunks",
            grid,
            outputs,
            delta_rule_chunks.scratch_memory(self),
            [q, k, rows_BHN8C],
        )

    def run_states(self, kernel, name: str, outputs: dict, results, inputs: list) -> dict:
        """Runs a pass of the state over whole rows, or over all pieces but the first. The grid has
        one block for every 64 or 128 value channels of every value head of every row or piece.
        Returns the outputs by name.

        Args:
          kernel: `delta_rule_states.forward_kernel` or `backward_kernel`.
          name: name of the kernel in a compiled program.
          outputs: shape and dtype of each output by name.
          results: shared memory from which the kernel's results (O, or in the backward pass dV) are
            copied to global memory.
          inputs: the input arrays. If rows are split, references to the arrays that
            `run_first_pieces` returned for the first piece come last; the kernel writes to them.
        """
        grid = dict(
            value_tiles=self.value_tiles // self.warpgroups,
            heads=self.value_heads,
            batch=max(1, self.pieces - 1) * self.batch,
        )
        scratch = self._state_scratch(self.warpgroups, results)
        scratch += self._state_barriers(self.warpgroups)
        return self._call_states(kernel, name, grid, outputs, scratch, inputs)

    def run_first_pieces(self, kernel, name: str, outputs: dict, results, inputs: list) -> dict:
        """Runs the pass of the state that computes the first piece of every row, and the maps of
        the other pieces but the last. The arguments and the result are those of `run_states`.
        `kernel` is `delta_rule_states.first_forward_kernel` or `first_backward_kernel`.
        """
        blocks = self.value_tiles + (self.pieces - 2) * self.map_blocks
        grid = dict(blocks=blocks, heads=self.value_heads, batch=self.batch)
        not_read = 2 if kernel is delta_rule_states.first_forward_kernel else 0  # q and P beta
        barriers = self._state_barriers(1) + self._state_barriers(2, not_read)
        scratch = self._state_scratch(2, results) + barriers
        return self._call_states(kernel, name, grid, outputs, scratch, inputs)

    def _call_states(self, kernel, name, grid, outputs, scratch, inputs) -> dict:
        """Calls a kernel of a pass of the state. The arguments are those of `call`."""
        threads = dict(num_threads=2, thread_name="warpgroups")
        return self.call(kernel, name, grid, outputs, scratch, inputs, **threads)

    def _state_scratch(self, warpgroups: int, results) -> list:
        """Returns the shared memory of a pass of the state, in this order. For each stage: q; k; v,
        or dO in the backward pass; P beta; both parts of the inverse; the 6 rows of `factors`; the
        8 rows that the method `rows_of_chunks` returns. For each of the warpgroups: the tiles of
        its state. Then `results`.
        """
        n, keys = self.stages, tile_memory(self.stages, width=self.key)
        return [
            keys,
            keys,
            tile_memory(n, warpgroups),
            tile_memory(n),
            tile_memory(n, 2),
            row_memory(n, 6),
            row_memory(n, 8),
            tile_memory(warpgroups, height=self.key),
            results,
        ]

    def _state_barriers(self, warpgroups: int, not_read: int = 0) -> list:
        """Returns the barriers `arrived` and `read` (`delta_rule_states._StatePass`) of blocks with
        `warpgroups` warpgroups that compute. `not_read`: how many of the inputs q, k, P beta, the
        factors, the rows and the inverse the blocks do not read.
        """
        copies = warpgroups + (6 if self.delta_term else 5) - not_read
        return [
            plgpu.Barrier(num_arrivals=n, num_barriers=self.stages) for n in (copies, warpgroups)
        ]


def pad_axis(x, axis: int, size: int):
    """Returns x with zeros at the end of an axis, so that the axis has `size` elements."""
    missing = size - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, missing
    return jnp.pad(x, widths)
