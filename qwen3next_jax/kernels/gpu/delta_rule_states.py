"""The Mosaic GPU kernels that pass the state, or its gradient, from chunk to chunk (sm_90a).

A block of the grid has two warpgroups. The block computes one or two tiles of 64 value channels of
a value head, each tile with one warpgroup. The second warpgroup of a block that computes one tile
copies inputs to shared memory. In a block that computes two tiles, the first warpgroup copies the
inputs as well: with a third warpgroup for the copies, each thread would have only 168 registers.
`setmaxnreg`, which moves registers from one warpgroup to another, has no effect if nvJitLink
compiles the kernels; jax 0.12 uses nvJitLink where it is installed. The formulas are in
docs/delta_rule.md, "In terms of E".

In these kernels, states, errors and outputs are transposed: their rows are value channels, and
their columns are tokens or key channels. Transposed states, errors and outputs can be left operands
of products, which wgmma takes from registers. For keys of at most 128 channels, all arrays that the
next chunk waits for stay in registers.

If rows are split into P pieces (`Problem.best_work_split`), two kernels run one after the other.
Pieces are numbered in the order in which the state, or its gradient, passes through them: in a
backward pass, piece 0 is the end of the row. The first kernel computes piece 0, whose first state
is known, and at the same time the affine maps of the pieces 1 to P - 2: if S is the state before a
piece, U + M S is the state after the piece. XLA composes the maps, which gives the
state before each piece. The second kernel computes all pieces but piece 0, all at the same time.

C = 64 tokens of a chunk.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu.delta_rule_tiles import (
    GAMMA,
    K_GAMMA,
    K_RHO,
    Q_GAMMA,
    C,
    channel_slice,
    high_and_low,
    load_over_rows,
    named_refs,
    token_slice,
    transposed_ref,
    with_accumulators,
)


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """What a block of the grid computes.

    Attributes:
      batch_index, head_index: the index of the row of the batch and of the value head.
      piece_index: the index of the piece of the row; 0 if rows are not split.
      state_index: the index of the piece's states in the arrays of first and last states.
      first_tile: the index of the first tile of 64 columns. The columns are the value channels. In
        a block that computes maps, the columns are the columns of U, then the columns of M.
      computing_warpgroups: the number of warpgroups that compute one tile each, 1 or 2.
      computes_maps: whether the block computes a part of the map of the piece.
    """

    batch_index: Any
    head_index: Any
    piece_index: Any
    state_index: Any
    first_tile: Any
    computing_warpgroups: int
    computes_maps: bool


class StatePassInputs(NamedTuple):
    """The references to the inputs of a pass of the state, in global memory."""

    q_gmem: Any
    k_gmem: Any
    v_gmem: Any  # in the backward pass dO
    norm_rows_gmem: Any
    gate_rows_gmem: Any
    p_beta_gmem: Any
    inverses_gmem: Any  # None without the delta term
    first_states_gmem: Any  # the states (or gradients) with which pieces start


class SharedMemory(NamedTuple):
    """The shared memory of a block and its barriers, in the order of `Problem.run_state_kernel`.
    Each slot of an input holds the input of one chunk.
    """

    q_slots: Any
    k_slots: Any
    v_or_do_slots: Any  # v; in the backward pass dO
    p_beta_slots: Any
    inverse_slots: Any
    norm_row_slots: Any
    gate_row_slots: Any
    state_tiles: Any
    result_tiles: Any
    inputs_arrived: Any
    inputs_read: Any


def forward_kernel(p, *refs):
    """Computes the state of a value head, from the first chunk of a row to the last, and the
    outputs O. If rows are split into pieces, the kernel computes all pieces except piece 0.
    """
    _run_state_block(_ForwardBlock, p, refs)


def backward_kernel(p, *refs):
    """Computes the gradient of a value head's state from the last chunk of a row to the first, and
    dV as a high and a low part. If rows are split into pieces, the kernel computes all pieces
    except piece 0.
    """
    _run_state_block(_BackwardBlock, p, refs)


def first_piece_and_maps_forward_kernel(p, *refs):
    """Computes piece 0 of each row, with the code of `forward_kernel`, and the maps of the pieces 1
    to P - 2.
    """
    _run_first_piece_or_map_block(_ForwardBlock, p, refs)


def first_piece_and_maps_backward_kernel(p, *refs):
    """Computes piece 0 of each row, with the code of `backward_kernel`, and the maps of the pieces
    1 to P - 2.
    """
    _run_first_piece_or_map_block(_BackwardBlock, p, refs)


def _run_state_block(kind, p, refs):
    """Runs a block of `forward_kernel` or `backward_kernel`. `kind` is the class of the block."""
    inputs, outputs, (last, *scratch) = _inputs_outputs_and_other_refs(kind, p, refs)
    index, tile = jax.lax.axis_index("batch"), jax.lax.axis_index("value_tiles")
    work = BlockWork(
        batch_index=jax.lax.rem(index, p.batch),
        head_index=jax.lax.axis_index("heads"),
        piece_index=1 + jax.lax.div(index, p.batch) if p.pieces_per_row > 1 else 0,
        state_index=index,
        first_tile=tile * p.warpgroups_per_block,
        computing_warpgroups=p.warpgroups_per_block,
        computes_maps=False,
    )
    kind(p, work, inputs, outputs, last, SharedMemory(*scratch)).run_chunks()


def _run_first_piece_or_map_block(kind, p, refs):
    """Runs a block of `first_piece_and_maps_forward_kernel` or
    `first_piece_and_maps_backward_kernel`. The first `p.value_tile_count` blocks of a value head
    compute piece 0; each later block computes two tiles of columns of a map.
    """
    inputs, outputs, (last, last_maps, *scratch) = _inputs_outputs_and_other_refs(kind, p, refs)
    *scratch, maps_arrived, maps_read = scratch
    shared = SharedMemory(*scratch)
    b, h, block = (jax.lax.axis_index(name) for name in ("batch", "heads", "blocks"))
    first = BlockWork(
        b,
        h,
        piece_index=0,
        state_index=b,
        first_tile=block,
        computing_warpgroups=1,
        computes_maps=False,
    )
    number = block - p.value_tile_count
    piece = 1 + jax.lax.div(number, p.blocks_per_map)
    other = BlockWork(
        b,
        h,
        piece,
        state_index=(piece - 1) * p.batch + b,
        first_tile=2 * jax.lax.rem(number, p.blocks_per_map),
        computing_warpgroups=2,
        computes_maps=True,
    )

    @pl.when(number < 0)
    def _():
        kind(p, first, inputs, outputs, last, shared).run_chunks()

    @pl.when(number >= 0)
    def _():
        shared_by_maps = shared._replace(inputs_arrived=maps_arrived, inputs_read=maps_read)
        kind(p, other, inputs, outputs, last_maps, shared_by_maps).run_chunks()


def _inputs_outputs_and_other_refs(kind, p, refs):
    """Splits the references of a kernel into three parts: the `StatePassInputs`, the outputs with
    an axis of tokens or chunks, and all other references.
    """
    inputs = len(StatePassInputs._fields) if p.delta_term else len(StatePassInputs._fields) - 1
    outputs = inputs + kind.per_chunk_output_count(p)
    named = named_refs(
        StatePassInputs, refs[:inputs], missing="" if p.delta_term else "inverses_gmem"
    )
    return named, refs[inputs:outputs], refs[outputs:]


def reads_state_from_shared_memory(p) -> bool:
    """Returns whether products read the state from shared memory. The answer is True for keys of
    more than 128 channels, because the state then takes half of the registers, so that fewer
    products can run at a time.
    """
    return p.key_width > 128


def load_transposed_tile(tile):
    """Returns the transpose of a tile [C, C] of shared memory, in registers."""
    return plgpu.load(transposed_ref(tile), layout=plgpu.Layout.WGMMA)


def store_transposed_and_start_copy(x, tile, target, in_flight: int):
    """Waits until all copies except the last `in_flight` ones have read shared memory. Then writes
    the transpose of x to `tile` in shared memory, and starts a copy of `tile` to `target` in global
    memory.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    transposed_ref(tile)[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


class _StatePassBlock:
    """One block of the grid of a pass of the state. Subclasses compute a chunk.

    Attributes:
      visits_chunks_in_order: True if the block goes from the first chunk of its piece to the last;
        False if it goes from the last chunk to the first.
      work: what the block computes.
      w, c: the index of this warpgroup in the block, and the index of the tile of columns that this
        warpgroup computes. A warpgroup that only copies has no tile.
      inputs: seven pairs (array in global memory or None, its copy in shared memory with one slot
        for each stage): q, k, v (in the backward pass dO), P beta, the norm rows, the gate rows
        and the inverse. A pair whose array is None is not copied.
      first_gmem: the states (or gradients) with which pieces start.
      last_gmem: the output for the states (or gradients) with which pieces end.
      inputs_arrived, inputs_read: two barriers for each slot. `inputs_arrived` is passed when the
        slot's inputs have been copied, `inputs_read` when all computing warpgroups have read the
        slot's inputs.
    """

    visits_chunks_in_order: bool

    def __init__(
        self, p, work: BlockWork, inputs: StatePassInputs, last_gmem, shared: SharedMemory
    ):
        self.p, self.work, self.w = p, work, jax.lax.axis_index("warpgroups")
        self.b, self.h, self.c = work.batch_index, work.head_index, work.first_tile + self.w
        self.first_gmem, self.last_gmem = inputs.first_states_gmem, last_gmem
        self.q_slots, self.k_slots = shared.q_slots, shared.k_slots
        self.v_or_do_slots = shared.v_or_do_slots
        self.p_beta_slots, self.inverse_slots = shared.p_beta_slots, shared.inverse_slots
        self.norm_row_slots, self.gate_row_slots = shared.norm_row_slots, shared.gate_row_slots
        self.state_tiles, self.result_tiles = shared.state_tiles, shared.result_tiles
        self.inputs_arrived, self.inputs_read = shared.inputs_arrived, shared.inputs_read
        self.inputs = (
            (inputs.q_gmem, shared.q_slots),
            (inputs.k_gmem, shared.k_slots),
            (inputs.v_gmem, shared.v_or_do_slots),
            (inputs.p_beta_gmem, shared.p_beta_slots),
            (inputs.norm_rows_gmem, shared.norm_row_slots),
            (inputs.gate_rows_gmem, shared.gate_row_slots),
            (inputs.inverses_gmem, shared.inverse_slots),
        )

    @staticmethod
    def per_chunk_output_count(p) -> int:
        """Returns the number of outputs with an axis of tokens or chunks."""
        raise NotImplementedError

    def run_chunks(self):
        """Runs the block. The inputs of a chunk are copied to a slot as soon as all computing
        warpgroups have read the slot's earlier inputs. The chunks are computed one after another.
        """
        p, w = self.p, self.w
        start, length = p.piece_start_and_length(self.work.piece_index)
        number = lambda i: start + i if self.visits_chunks_in_order else p.chunks - 1 - start - i

        def copy(i):
            slot = jax.lax.rem(i, p.pipeline_stages)
            pl.when(i >= p.pipeline_stages)(lambda: plgpu.barrier_wait(self.inputs_read.at[slot]))
            self.start_input_copies(number(i), slot, self.inputs_arrived.at[slot])

        def step(i, state):
            slot = jax.lax.rem(i, p.pipeline_stages)
            # Without this barrier, the compiler keeps the addresses of all arrays in the slot in
            # registers during the whole loop.
            if p.pipeline_stages == 1:
                slot = jax.lax.optimization_barrier(slot)
            plgpu.barrier_wait(self.inputs_arrived.at[slot])
            state = self.compute_chunk(number(i), slot, state)
            plgpu.commit_smem()  # all reads of the slot end before a copy writes to it
            plgpu.barrier_arrive(self.inputs_read.at[slot])
            if self.work.computing_warpgroups > 1:
                pl.when((w == 0) & (i + p.pipeline_stages < length))(
                    lambda: copy(i + p.pipeline_stages)
                )
            return state

        def compute():
            state = jax.lax.fori_loop(0, length, step, self.load_first_state())
            self.store_last_state(state)
            plgpu.wait_smem_to_gmem(0)

        if self.work.computing_warpgroups > 1:
            first_copies = jnp.minimum(length, p.pipeline_stages)
            pl.when(w == 0)(lambda: pl.loop(0, first_copies)(copy))
            compute()
        else:
            pl.when(w == 1)(lambda: pl.loop(0, length)(copy))
            pl.when(w == 0)(compute)

    def compute_chunk(self, n, slot, state):
        """Computes chunk n from the inputs in `slot`. Takes and returns this warpgroup's 64 rows of
        the transposed state, or in the backward pass of its gradient, [64, K] float32.
        """
        raise NotImplementedError

    def load_first_state(self):
        """Returns this warpgroup's 64 rows of the transposed state with which the piece starts,
        [64, K] float32. In a block that computes maps, the rows are zeros for a tile of U, and rows
        of the identity matrix for a tile of M.
        """
        if not self.work.computes_maps:
            return plgpu.load(
                self.first_gmem.at[self.work.state_index, self.h, channel_slice(self.c)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
        i, j = (
            plgpu.broadcasted_iota(
                jnp.int32, (C, self.p.key_width), axis, layout=plgpu.Layout.WGMMA
            )
            for axis in (0, 1)
        )
        return jnp.where(i + (self.c - self.p.value_tile_count) * C == j, 1.0, 0.0)

    def store_last_state(self, state):
        """Stores the state (or gradient) with which the piece ends."""
        self.last_gmem[self.work.state_index, self.h, channel_slice(self.c)] = state

    def load_transposed_values(self, slot):
        """Returns the transposed tile of v, or in the backward pass of dO. For a tile of M in a map
        U + M S, the result is zeros.
        """
        values = load_transposed_tile(self.v_or_do_slots.at[slot, self.w])
        if not self.work.computes_maps:
            return values
        is_u = (self.c < self.p.value_tile_count).astype(jnp.float32)
        return (values.astype(jnp.float32) * is_u).astype(jnp.bfloat16)

    def start_input_copies(self, n, slot, barrier):
        """Starts the copies of chunk n's inputs to a slot: q and k, the tiles of v or dO of all
        warpgroups, P beta, the norm rows, the gate rows and the inverse. The method skips an input
        whose array is None.
        """
        p, h, b = self.p, self.h, self.b
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, barrier)
        *keys, values, products, norm_rows, rows, inverses = self.inputs
        for source, target in keys:
            if source is not None:
                copy(source.at[b, token_slice(n), jax.lax.div(h, p.heads_per_key)], target.at[slot])
        for w in range(self.work.computing_warpgroups):
            c = jnp.minimum(self.work.first_tile + w, p.value_tile_count - 1)
            copy(values[0].at[b, token_slice(n), h, channel_slice(c)], values[1].at[slot, w])
        for source, target in (products, norm_rows, rows):
            if source is not None:
                copy(source.at[b, h, n], target.at[slot])
        if p.delta_term:
            copy(inverses[0].at[n, b, h], inverses[1].at[slot])

    def state_operand_and_copy(self, state, tile, target, in_flight: int):
        """Returns two things: the state, or in the backward pass its gradient, as a left operand of
        products; and a function that copies the state to `target` in global memory, or does nothing
        if `target` is None.
        """
        if not reads_state_from_shared_memory(self.p):
            x = state.astype(jnp.bfloat16)
            return (
                x,
                lambda: (
                    None
                    if target is None
                    else store_transposed_and_start_copy(x, tile, target, in_flight)
                ),
            )
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        for t in range(self.p.key_tile_count):
            columns = state[:, t * C : (t + 1) * C]
            transposed_ref(tile.at[channel_slice(t)])[...] = columns.astype(jnp.bfloat16)
        plgpu.commit_smem()
        return transposed_ref(
            tile
        ), lambda: None if target is None else plgpu.copy_smem_to_gmem(tile, target)


class _ForwardBlock(_StatePassBlock):
    """The block of a forward pass. A block that computes maps computes no O."""

    visits_chunks_in_order = True

    def __init__(self, p, work, inputs, outputs, last_gmem, shared):
        super().__init__(p, work, inputs, last_gmem, shared)
        self.o_gmem, *states_gmem = outputs
        self.states_gmem = states_gmem[0] if p.save_states and not work.computes_maps else None
        if work.computes_maps:
            _, k, v, _, *others = self.inputs
            self.inputs = ((None, self.q_slots), k, v, (None, self.p_beta_slots), *others)

    @staticmethod
    def per_chunk_output_count(p) -> int:
        return 2 if p.save_states else 1

    def compute_chunk(self, n, slot, state):
        body = functools.partial(self.compute_chunk_with_accumulators, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key_width), body)

    def compute_chunk_with_accumulators(self, n, slot, state, k_state, outputs, errors, after):
        """Computes chunk n and returns S', the state after chunk n, [64, K] like `state`.
        `k_state`, `outputs`, `errors` and `after` are accumulators for K S, O, E and S'.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = self.work.computes_maps, reads_state_from_shared_memory(p)
        norm_rows = self.norm_row_slots.at[slot]
        before, copy_state = self.state_operand_and_copy(
            state,
            self.state_tiles.at[w],
            None if self.states_gmem is None else self.states_gmem.at[n, b, h, :, channel_slice(c)],
            in_flight=1,
        )
        if p.delta_term:
            k_state.add_product(before, transposed_ref(self.k_slots.at[slot]))
        if not (maps or from_shared):
            outputs.add_product(before, transposed_ref(self.q_slots.at[slot]))
        copy_state()
        values = self.load_transposed_values(slot).astype(jnp.float32)
        if p.delta_term:
            in_flight = 0 if maps or from_shared else 1
            values = (
                values - load_over_rows(norm_rows, K_GAMMA) * k_state.wait_and_read(in_flight)
            ).astype(jnp.bfloat16)
            for part in range(2):
                errors.add_product(values, transposed_ref(self.inverse_slots.at[slot, part]))
        if from_shared and not maps:
            outputs.add_product(before, transposed_ref(self.q_slots.at[slot]))
        if not maps:
            in_flight = 2 if p.delta_term and not from_shared else 0
            outputs.set_sum(load_over_rows(norm_rows, Q_GAMMA) * outputs.wait_and_read(in_flight))
        after.set_sum(self.gate_row_slots[slot, GAMMA, C - 1] * state)
        if p.delta_term:
            values = errors.wait_and_read()
        parts = high_and_low(values)
        if from_shared:
            parts = jax.lax.optimization_barrier(parts)
        if not maps:
            for part in parts:
                outputs.add_product(part, transposed_ref(self.p_beta_slots.at[slot]))
        if from_shared:
            self.start_output_copy(n, outputs, in_flight=0)
            # E is added up again from its parts, so that only the parts stay in registers.
            values = sum(part.astype(jnp.float32) for part in parts)
        for part in high_and_low(load_over_rows(norm_rows, K_RHO) * values):
            after.add_product(part, self.k_slots.at[slot])
        if not from_shared:
            self.start_output_copy(n, outputs, in_flight=2)
        return after.wait_and_read()

    def start_output_copy(self, n, outputs, in_flight: int):
        """Waits for all products except the last `in_flight` ones, then starts the copy of O to
        global memory. In a block that computes maps the method does nothing.
        """
        if self.work.computes_maps:
            return
        store_transposed_and_start_copy(
            outputs.wait_and_read(in_flight),
            self.result_tiles.at[self.w],
            self.o_gmem.at[self.b, token_slice(n), self.h, channel_slice(self.c)],
            in_flight=int(self.p.save_states),
        )


class _BackwardBlock(_StatePassBlock):
    """The block of a backward pass. A block that computes maps computes only the gradient of the
    state.
    """

    visits_chunks_in_order = False

    def __init__(self, p, work, inputs, outputs, last_gmem, shared):
        super().__init__(p, work, inputs, last_gmem, shared)
        *self.dv_gmems, self.dstates_gmem = outputs

    @staticmethod
    def per_chunk_output_count(p) -> int:
        return 3

    def compute_chunk(self, n, slot, state):
        body = functools.partial(self.compute_chunk_with_accumulators, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key_width), body)

    def compute_chunk_with_accumulators(self, n, slot, dstate, k_dstate, p_do, values, before):
        """Computes chunk n. Takes `dstate`, the gradient dS' of the state after chunk n, and
        returns dS, the gradient of the state before chunk n, both [64, K]. `k_dstate`, `p_do`,
        `values` and `before` are accumulators for K dS', (P beta)^T dO, dV and dS.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = self.work.computes_maps, reads_state_from_shared_memory(p)
        norm_rows = self.norm_row_slots.at[slot]
        target = None if maps else self.dstates_gmem.at[n, b, h, :, channel_slice(c)]
        after, copy_state = self.state_operand_and_copy(
            dstate, self.state_tiles.at[w], target, in_flight=2
        )
        k_dstate.add_product(after, transposed_ref(self.k_slots.at[slot]))
        if from_shared:
            p_do.set_sum(load_over_rows(norm_rows, K_RHO) * k_dstate.wait_and_read())
        doutputs = self.load_transposed_values(slot)
        p_do.add_product(doutputs, self.p_beta_slots.at[slot])
        copy_state()
        if from_shared:
            dvalues = p_do.wait_and_read()
        else:
            dvalues = (
                load_over_rows(norm_rows, K_RHO) * k_dstate.wait_and_read(1) + p_do.wait_and_read()
            )
        if p.delta_term:
            high, low = high_and_low(dvalues)
            for x, part in ((high, 0), (high, 1), (low, 0)):
                values.add_product(x, self.inverse_slots.at[slot, part])
        before.set_sum(self.gate_row_slots[slot, GAMMA, C - 1] * dstate)
        scaled = load_over_rows(norm_rows, Q_GAMMA) * doutputs.astype(jnp.float32)
        before.add_product(scaled.astype(jnp.bfloat16), self.q_slots.at[slot])
        if p.delta_term:
            dvalues = values.wait_and_read(1)
            dread = -load_over_rows(norm_rows, K_GAMMA) * dvalues
            before.add_product(dread.astype(jnp.bfloat16), self.k_slots.at[slot])
        if not maps:
            for i, (x, gmem) in enumerate(zip(high_and_low(dvalues), self.dv_gmems)):
                store_transposed_and_start_copy(
                    x,
                    self.result_tiles.at[w, i],
                    gmem.at[b, token_slice(n), h, channel_slice(c)],
                    in_flight=2,
                )
        return before.wait_and_read()
