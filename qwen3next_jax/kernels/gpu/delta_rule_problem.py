"""The sizes of one call of the gated delta rule, and the functions that run its Mosaic GPU kernels
over their grids.

"A pass of the state" is a call of a kernel of `delta_rule_states`, which carries the state, or its
gradient, from chunk to chunk. A pass may split each row of the batch into pieces that run at the
same time, and then takes two calls (`delta_rule_passes`). "Maps" are the affine maps U + M S of the
pieces: if S is the state before a piece, U + M S is the state after the piece.

B batch, T time, G key heads, H value heads, N chunks of C = 64 tokens, K key width, V value width.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu import delta_rule_chunks, delta_rule_states
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C, row_memory, tile_memory
from qwen3next_jax.kernels.gpu.kernel_call import KernelCall, run_kernel
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


def multiprocessor_count() -> int:
    """Returns the number of streaming multiprocessors of this process's GPU. If this process does
    not have the GPU that the program is compiled for, or if the kernels are interpreted, returns
    PROCESSORS.
    """
    target = compile_target()
    if target.may_lack_device or target.platform != "gpu":
        return PROCESSORS
    return getattr(jax.local_devices()[0], "core_count", PROCESSORS)


def padded_width(width: int) -> int:
    """Returns the smallest of WIDTHS that is at least `width`."""
    return min(w for w in WIDTHS if w >= width)


class WorkSplit(NamedTuple):
    """How the passes of the state split the work of a call over the chip.

    Attributes:
      pieces_per_row: number of pieces into which every row is split: 1, or from 3 up to the number
        of chunks. The lengths of two pieces differ by at most one chunk.
      warpgroups_per_block: number of warpgroups in a block that compute one tile of 64 value
        channels each: 1 or 2; 1 if rows are split or if the number of tiles is odd.
    """

    pieces_per_row: int
    warpgroups_per_block: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and static settings of one call.

    Attributes:
      batch: B.
      chunks: N.
      key_heads: G.
      value_heads: H.
      key_width: K, one of WIDTHS. The channels of q and k above `unpadded_key_width` are zeros.
      value_width: V, one of WIDTHS.
      unpadded_key_width: the key width of the caller's arrays. The product of a query and a key is
        divided by the square root of `unpadded_key_width`.
      normalize_qk: whether q and k are L2-normalised.
      delta_term: whether a write to the state has the delta term (`Settings.delta_term`).
      save_states: whether the forward pass writes the state before each chunk.
      interpret: whether a CPU interprets the kernels.
      work_split: how the passes of the state split the work over the chip.
    """

    batch: int
    chunks: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    unpadded_key_width: int
    normalize_qk: bool
    delta_term: bool
    save_states: bool = False
    interpret: bool = False
    work_split: WorkSplit = WorkSplit(1, 1)

    @classmethod
    def of_call(
        cls, x: Inputs, settings: Settings, split: WorkSplit | None = None, **others
    ) -> "Problem":
        """Returns the problem of a call. If `split` is None, `best_work_split` chooses
        `work_split`. `others` are the fields `save_states` and `interpret`.
        """
        batch, time, key_heads, channels = x.q.shape
        value_heads, value = x.v.shape[2:]
        normalize, delta_term = settings.normalize_qk, settings.delta_term
        heads = key_heads, value_heads, padded_width(channels), padded_width(value)
        p = cls(batch, -(-time // C), *heads, channels, normalize, delta_term, **others)
        return dataclasses.replace(p, work_split=split or p.best_work_split())

    # ---- numbers that follow from the sizes

    @property
    def heads_per_key(self) -> int:
        """The number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_tile_count(self) -> int:
        """The number of tiles of 64 channels of a key head."""
        return self.key_width // C

    @property
    def value_tile_count(self) -> int:
        """The number of tiles of 64 channels of a value head."""
        return self.value_width // C

    @property
    def inverse_tile_count(self) -> int:
        """The number of tiles of the inverse: its high and low part; 0 without the delta term."""
        return 2 if self.delta_term else 0

    @property
    def state_shape(self):
        """The shape [B, H, K, V] of the states."""
        return self.batch, self.value_heads, self.key_width, self.value_width

    @property
    def blocks_per_map(self) -> int:
        """The number of blocks of the grid that compute the map of a piece for a value head. Each
        block computes two tiles of 64 columns: U has `value_tile_count` tiles, and M has
        `key_tile_count` tiles. If U and M together have an odd number of tiles, the last tile of
        the last block has no meaning.
        """
        return -(-(self.value_tile_count + self.key_tile_count) // 2)

    @property
    def pipeline_stages(self) -> int:
        """The number of chunks whose inputs are in shared memory at a time in a pass of the
        state.
        """
        return 1 if self.key_width == max(WIDTHS) else 2

    @property
    def pieces_per_row(self) -> int:
        """The number of pieces into which the passes of the state split every row."""
        return self.work_split.pieces_per_row

    @property
    def warpgroups_per_block(self) -> int:
        """The number of warpgroups that compute in a block of a pass of the state."""
        return self.work_split.warpgroups_per_block

    def best_work_split(self) -> WorkSplit:
        """Returns how the passes of the state split the work over the chip.

        A block of a pass uses so much shared memory that it needs a multiprocessor to itself. If
        rows are not split, the pass computes the N chunks of a row one after another. With one tile
        of value channels per block, the pass over whole rows fills B · H · `value_tile_count`
        multiprocessors. If the chip has fewer multiprocessors, each block computes two tiles, and
        reads q and k only once for both tiles.

        With P pieces per row, the pass computes 2 N / P chunks one after another: the first call
        computes piece 0 and the maps of the pieces 1 to P - 2, the second call computes the pieces
        1 to P - 1. If K is at most V, each of the two calls needs P - 1 times as many
        multiprocessors as a pass over whole rows, because a map takes `blocks_per_map` blocks of
        two tiles, and a piece takes `value_tile_count` blocks of one tile. P is the largest number
        of pieces with which the chip runs all blocks of a call at the same time. With more pieces,
        some blocks would have to wait for other blocks.

        Rows are not split if the split would save less than a fifth of the estimated time;
        COMPOSING_CHUNKS is the estimated overhead of a split. So rows stay whole if P would be 2,
        which saves nothing, if the rows are short, or if a call has enough heads and rows to fill
        the chip. Packed documents and gates do not change the choice: they can make M zero, but
        leaving out a map would save no time, because piece 0, which runs at the same time, takes as
        long.
        """
        rows = self.batch * self.value_heads
        pieces = 1 + multiprocessor_count() // (
            rows * max(self.value_tile_count, self.blocks_per_map)
        )
        pieces = min(pieces, self.chunks, MOST_PIECES)
        in_turn = 2 * -(-self.chunks // pieces) + COMPOSING_CHUNKS
        if pieces > 2 and in_turn <= 0.8 * self.chunks:
            return WorkSplit(pieces, 1)
        one_tile = (
            self.value_tile_count % 2 or rows * self.value_tile_count <= multiprocessor_count()
        )
        return WorkSplit(1, 1 if one_tile else 2)

    def piece_start_and_length(self, piece):
        """Returns two integers: the index of the first chunk of a piece, and the number of chunks
        of the piece. Chunks are numbered in the order in which the pass computes them.
        """
        if self.pieces_per_row == 1:
            return 0, self.chunks
        start, stop = (i * self.chunks // self.pieces_per_row for i in (piece, piece + 1))
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
        """Returns q or k, with T padded to a multiple of C and each head padded to K channels."""
        return pad_axis(self.pad_time(x_BTGK), -1, self.key_width)

    def pad_values(self, x_BTHV):
        """Returns v, or the gradient of o, with T padded to a multiple of C and each head padded to
        V channels.
        """
        return pad_axis(self.pad_time(x_BTHV), -1, self.value_width)

    def pad_state(self, x_BHKV):
        """Returns a state, or its gradient, with heads of K and V channels, in float32."""
        x_BHKV = pad_axis(x_BHKV.astype(jnp.float32), -2, self.key_width)
        return pad_axis(x_BHKV, -1, self.value_width)

    def gate_rows_of_chunks(self, x: Inputs):
        """Returns [B, H, N, 8, C] in float32: for each chunk of each value head the 8 gate rows,
        whose indices `delta_rule_tiles` names TOTAL, DOCUMENT, ….
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

    def chunks_to_tokens(self, x_BHNC):
        """Rearranges x [B, H, N, C] into [B, N C, H]."""
        return jnp.moveaxis(x_BHNC, 1, 3).reshape(self.batch, -1, self.value_heads)

    def sum_over_value_heads(self, x_BTHK):
        """Returns [B, T, G, K], the sum of x [B, T, H, K] over the value heads of each key head."""
        x = x_BTHK.reshape(*x_BTHK.shape[:2], self.key_heads, self.heads_per_key, self.key_width)
        if self.heads_per_key == 1:
            return x[:, :, :, 0]
        return jnp.sum(x, axis=3, dtype=jnp.float32).astype(x.dtype)

    def unflatten_pieces(self, x):
        """Reshapes x [pieces · B, …], for some of the pieces, to [pieces, B, …]."""
        return x.reshape(-1, self.batch, *x.shape[1:])

    # ---- calls

    def call_kernel(
        self,
        kernel,
        name: str,
        grid: dict,
        outputs: dict,
        scratch: list,
        inputs: list,
        warpgroups: int = 1,
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
          warpgroups: number of warpgroups of a block.
        """
        call = KernelCall(
            body=kernel,
            arguments=(self,),
            name=f"gated_delta_rule_{name}",
            grid=tuple(grid.items()),
            outputs=tuple(outputs.values()),
            scratch=tuple(scratch),
            warpgroups=warpgroups,
            interpret=self.interpret,
        )
        return dict(zip(outputs, run_kernel(call, *inputs)))

    def run_chunk_kernel(self, q, k, gate_rows_BHN8C, inverses: bool) -> dict:
        """Runs the kernel of `delta_rule_chunks`, which computes the arrays of a chunk that do not
        depend on the state. Returns a dict with the arrays:

        norm_rows: [B, H, N, 6, C] float32, the rows whose indices `delta_rule_tiles` names K_GAMMA,
          ….
        p_beta: [B, H, N, C, C] bfloat16, P beta.
        inverses: [N, B, H, 2, C, C] bfloat16, the high and the low part of the inverse of I + M
          beta; only if the argument `inverses` is True.
        """
        heads = (self.batch, self.value_heads, self.chunks)
        outputs = dict(
            norm_rows=self.shape_struct(*heads, 6, C, dtype=jnp.float32),
            p_beta=self.shape_struct(*heads, C, C),
        )
        if inverses:
            outputs["inverses"] = self.shape_struct(self.chunks, *heads[:2], 2, C, C)
        grid = dict(chunks=self.chunks, heads=self.key_heads, batch=self.batch)
        return self.call_kernel(
            delta_rule_chunks.chunk_kernel,
            "chunks",
            grid,
            outputs,
            delta_rule_chunks.scratch_memory(self),
            [q, k, gate_rows_BHN8C],
        )

    def run_state_kernel(
        self, kernel, name: str, outputs: dict, result_memory, inputs: list
    ) -> dict:
        """Runs a pass of the state over whole rows or, if rows are split, over all pieces except
        the first. The grid has one block for each 64 or 128 value channels of each value head of
        each row or piece. Returns the outputs by name.

        Args:
          kernel: `delta_rule_states.forward_kernel` or `backward_kernel`.
          name: name of the kernel in a compiled program.
          outputs: shape and dtype of each output by name.
          result_memory: shared memory from which the kernel's results (O, or in the backward pass
            dV) are copied to global memory.
          inputs: the input arrays. If rows are split, references to the arrays that
            `run_first_piece_and_maps` returned for the first piece come last; the kernel writes to
            these arrays.
        """
        grid = dict(
            value_tiles=self.value_tile_count // self.warpgroups_per_block,
            heads=self.value_heads,
            batch=max(1, self.pieces_per_row - 1) * self.batch,
        )
        scratch = self._state_kernel_scratch(self.warpgroups_per_block, result_memory)
        scratch += self._state_kernel_barriers(self.warpgroups_per_block)
        return self._call_state_kernel(kernel, name, grid, outputs, scratch, inputs)

    def run_first_piece_and_maps(
        self, kernel, name: str, outputs: dict, results, inputs: list
    ) -> dict:
        """Runs the pass of the state that computes the first piece of every row, and the maps of
        all pieces between the first and the last. The arguments and the result have the same
        meaning as in `run_state_kernel`. `kernel` is `first_piece_and_maps_forward_kernel` or
        `first_piece_and_maps_backward_kernel` of `delta_rule_states`.
        """
        blocks = self.value_tile_count + (self.pieces_per_row - 2) * self.blocks_per_map
        grid = dict(blocks=blocks, heads=self.value_heads, batch=self.batch)
        not_read = (
            2 if kernel is delta_rule_states.first_piece_and_maps_forward_kernel else 0
        )  # q and P beta
        barriers = self._state_kernel_barriers(1) + self._state_kernel_barriers(2, not_read)
        scratch = self._state_kernel_scratch(2, results) + barriers
        return self._call_state_kernel(kernel, name, grid, outputs, scratch, inputs)

    def _call_state_kernel(self, kernel, name, grid, outputs, scratch, inputs) -> dict:
        """Calls a kernel of a pass of the state. The arguments are those of `call_kernel`."""
        return self.call_kernel(kernel, name, grid, outputs, scratch, inputs, warpgroups=2)

    def _state_kernel_scratch(self, warpgroups: int, results) -> list:
        """Returns the shared memory of a pass of the state, in this order. For each stage: q; k; v,
        or dO in the backward pass; P beta; both parts of the inverse; the 6 norm rows; the 8 gate
        rows. For each of the warpgroups: the tiles of its state. Then `results`.
        """
        n, keys = self.pipeline_stages, tile_memory(self.pipeline_stages, width=self.key_width)
        return [
            keys,
            keys,
            tile_memory(n, warpgroups),
            tile_memory(n),
            tile_memory(n, 2),
            row_memory(n, 6),
            row_memory(n, 8),
            tile_memory(warpgroups, height=self.key_width),
            results,
        ]

    def _state_kernel_barriers(self, warpgroups: int, not_read: int = 0) -> list:
        """Returns the barriers `inputs_arrived` and `inputs_read` of blocks with `warpgroups`
        warpgroups that compute. `not_read`: the number of arrays among q, k, P beta, the norm rows,
        the gate rows and the inverse that the blocks do not read.
        """
        copies = warpgroups + (6 if self.delta_term else 5) - not_read
        return [
            plgpu.Barrier(num_arrivals=n, num_barriers=self.pipeline_stages)
            for n in (copies, warpgroups)
        ]


def pad_axis(x, axis: int, size: int):
    """Returns x with zeros at the end of an axis, so that the axis has `size` elements."""
    missing = size - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, missing
    return jnp.pad(x, widths)
