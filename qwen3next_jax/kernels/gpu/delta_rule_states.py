"""The Mosaic GPU kernels that pass the state, or its gradient, from chunk to chunk (sm_90a).

A block of the grid has two warpgroups. It computes one or two tiles of 64 value channels of a value
head, each with one warpgroup. The second warpgroup of a block that computes one tile copies inputs
to shared memory. In a block that computes two tiles, the first warpgroup copies them as well: with
a third warpgroup for the copies, each thread would have 168 registers. `setmaxnreg`, which moves
registers from one warpgroup to another, has no effect if nvJitLink compiles the kernels, as it does
with jax 0.12 where it is installed. The formulas are in docs/delta_rule.md, "In terms of E".

States, errors and outputs are transposed here: their rows are value channels, and their columns are
tokens or key channels. So they can be left operands of products, which wgmma takes from registers.
For keys of at most 128 channels, everything that the next chunk waits for therefore stays in
registers.

If rows are split into P pieces (`Problem.best_split`), two kernels run one after the other. Pieces
are numbered in the order in which the state, or its gradient, passes through them: in a backward
pass, piece 0 is the end of the row. The first kernel computes piece 0, whose first state is known,
and at the same time the affine maps of the pieces 1 to P - 2: the state after a piece is U + M S if
S is the state before it. XLA composes the maps. The second kernel computes the pieces 1 to P - 1,
all at the same time.

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
    along_j,
    channel_slice,
    high_and_low,
    named_refs,
    token_slice,
    transposed_ref,
    with_accumulators,
)


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """What a block of the grid computes.

    Attributes:
      b, h: the index of the row of the batch and of the value head.
      piece: the index of the piece of the row; 0 if rows are not split.
      index: the index of the piece's states in the arrays of first and last states.
      tile: the index of the first tile of 64 columns. The columns are the value channels. In a
        block that computes maps, they are the columns of U and then those of M.
      warpgroups: the number of warpgroups that compute one tile each, 1 or 2.
      maps: whether the block computes a part of the map of the piece.
    """

    b: Any
    h: Any
    piece: Any
    index: Any
    tile: Any
    warpgroups: int
    maps: bool


class Inputs(NamedTuple):
    """The references to the inputs of a pass of the state, in global memory."""

    q: Any
    k: Any
    v: Any  # in the backward pass dO
    factors: Any
    rows: Any
    p: Any
    inverses: Any  # None without the delta term
    first: Any  # the states (or gradients) with which pieces start


class SharedMemory(NamedTuple):
    """The shared memory of a block, as `Problem.run_states` orders it, and its barriers."""

    q: Any
    k: Any
    v: Any
    p: Any
    inverse: Any
    factors: Any
    rows: Any
    state_tiles: Any
    result_tiles: Any
    arrived: Any
    read: Any


def forward_kernel(p, *refs):
    """Computes the state of a value head from the first chunk of a row to the last, and O. If rows
    are split into pieces, it computes all pieces but piece 0.
    """
    _run_rows(_Forward, p, refs)


def backward_kernel(p, *refs):
    """Computes the gradient of a value head's state from the last chunk of a row to the first, and
    dV as a high and a low part. If rows are split into pieces, it computes all pieces but piece 0.
    """
    _run_rows(_Backward, p, refs)


def first_forward_kernel(p, *refs):
    """Computes piece 0 of each row as `forward_kernel` computes a row, and the maps of the pieces
    1 to P - 2.
    """
    _run_first_pieces(_Forward, p, refs)


def first_backward_kernel(p, *refs):
    """Computes piece 0 of each row as `backward_kernel` computes a row, and the maps of the pieces
    1 to P - 2.
    """
    _run_first_pieces(_Backward, p, refs)


def _run_rows(kind, p, refs):
    """Runs a block of `forward_kernel` or `backward_kernel`. `kind` is the class of the block."""
    inputs, outputs, (last, *scratch) = _split_refs(kind, p, refs)
    index, tile = jax.lax.axis_index("batch"), jax.lax.axis_index("value_tiles")
    place = BlockWork(
        b=jax.lax.rem(index, p.batch),
        h=jax.lax.axis_index("heads"),
        piece=1 + jax.lax.div(index, p.batch) if p.pieces > 1 else 0,
        index=index,
        tile=tile * p.warpgroups,
        warpgroups=p.warpgroups,
        maps=False,
    )
    kind(p, place, inputs, outputs, last, SharedMemory(*scratch)).run()


def _run_first_pieces(kind, p, refs):
    """Runs a block of `first_forward_kernel` or `first_backward_kernel`. Of the blocks of a value
    head, the first ones compute piece 0, and each of the others computes two tiles of columns of a
    map.
    """
    inputs, outputs, (last, last_maps, *scratch) = _split_refs(kind, p, refs)
    *scratch, maps_arrived, maps_read = scratch
    shared = SharedMemory(*scratch)
    b, h, block = (jax.lax.axis_index(name) for name in ("batch", "heads", "blocks"))
    first = BlockWork(b, h, piece=0, index=b, tile=block, warpgroups=1, maps=False)
    number = block - p.value_tiles
    piece = 1 + jax.lax.div(number, p.map_blocks)
    other = BlockWork(
        b,
        h,
        piece,
        index=(piece - 1) * p.batch + b,
        tile=2 * jax.lax.rem(number, p.map_blocks),
        warpgroups=2,
        maps=True,
    )

    @pl.when(number < 0)
    def _():
        kind(p, first, inputs, outputs, last, shared).run()

    @pl.when(number >= 0)
    def _():
        of_maps = shared._replace(arrived=maps_arrived, read=maps_read)
        kind(p, other, inputs, outputs, last_maps, of_maps).run()


def _split_refs(kind, p, refs):
    """Returns the `Inputs`, the references to the outputs with an axis of tokens or chunks, and
    all others.
    """
    inputs = len(Inputs._fields) if p.delta_term else len(Inputs._fields) - 1
    outputs = inputs + kind.output_count(p)
    named = named_refs(Inputs, refs[:inputs], missing="" if p.delta_term else "inverses")
    return named, refs[inputs:outputs], refs[outputs:]


def state_in_shared_memory(p) -> bool:
    """Returns whether products read the state from shared memory. They do for keys of more than 128
    channels, because such a state takes half of the registers. Fewer products run at a time then.
    """
    return p.key > 128


def load_transposed(tile):
    """Returns the transpose of a tile [C, C] of shared memory, in registers."""
    return plgpu.load(transposed_ref(tile), layout=plgpu.Layout.WGMMA)


def store_transposed(x, tile, target, in_flight: int):
    """Waits until all copies except the last `in_flight` ones have read shared memory. Then it
    writes the transpose of x to `tile` in shared memory and starts a copy of `tile` to `target` in
    global memory.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    transposed_ref(tile)[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


class _StatePass:
    """One block of the grid of a pass of the state. Subclasses compute a chunk.

    Attributes:
      first_to_last: True if the block goes from the first chunk of its piece to the last; False if
        it goes from the last chunk to the first.
      place: what the block computes.
      w, c: the index of the warpgroup in the block, and of the tile of columns that it computes.
        A warpgroup that only copies has no tile.
      inputs: seven pairs (array in global memory or None, its copy in shared memory with one slot
        for each stage): q, k, v (in the backward pass dO), P beta, the factors, the rows and the
        inverse. A pair whose array is None is not copied.
      first_gmem: the states (or gradients) with which pieces start.
      last_gmem: the output for the states (or gradients) with which pieces end.
      arrived, read: two barriers for each slot. `arrived` is passed when the slot's inputs have
        been copied, `read` when all computing warpgroups have read them.
    """

    first_to_last: bool

    def __init__(self, p, place: BlockWork, inputs: Inputs, last_gmem, shared: SharedMemory):
        self.p, self.place, self.w = p, place, jax.lax.axis_index("warpgroups")
        self.b, self.h, self.c = place.b, place.h, place.tile + self.w
        self.first_gmem, self.last_gmem = inputs.first, last_gmem
        self.q, self.k, self.v, self.p_ref = shared.q, shared.k, shared.v, shared.p
        self.inverse, self.factors, self.rows = shared.inverse, shared.factors, shared.rows
        self.state_tiles, self.result_tiles = shared.state_tiles, shared.result_tiles
        self.arrived, self.read = shared.arrived, shared.read
        self.inputs = (
            (inputs.q, shared.q),
            (inputs.k, shared.k),
            (inputs.v, shared.v),
            (inputs.p, shared.p),
            (inputs.factors, shared.factors),
            (inputs.rows, shared.rows),
            (inputs.inverses, shared.inverse),
        )

    @staticmethod
    def output_count(p) -> int:
        """Returns the number of outputs with an axis of tokens or chunks."""
        raise NotImplementedError

    def run(self):
        """Runs the block. The inputs of a chunk are copied to a slot as soon as all computing
        warpgroups have read the slot's earlier inputs. The chunks are computed one after another.
        """
        p, w = self.p, self.w
        start, length = p.chunks_of_piece(self.place.piece)
        number = lambda i: start + i if self.first_to_last else p.chunks - 1 - start - i

        def copy(i):
            slot = jax.lax.rem(i, p.stages)
            pl.when(i >= p.stages)(lambda: plgpu.barrier_wait(self.read.at[slot]))
            self.start_copies(number(i), slot, self.arrived.at[slot])

        def step(i, state):
            slot = jax.lax.rem(i, p.stages)
            # Without this barrier, the compiler keeps the addresses of all arrays in the slot in
            # registers during the whole loop.
            if p.stages == 1:
                slot = jax.lax.optimization_barrier(slot)
            plgpu.barrier_wait(self.arrived.at[slot])
            state = self.compute_chunk(number(i), slot, state)
            plgpu.commit_smem()  # all reads of the slot end before a copy writes to it
            plgpu.barrier_arrive(self.read.at[slot])
            if self.place.warpgroups > 1:
                pl.when((w == 0) & (i + p.stages < length))(lambda: copy(i + p.stages))
            return state

        def compute():
            state = jax.lax.fori_loop(0, length, step, self.load_first_state())
            self.store_last_state(state)
            plgpu.wait_smem_to_gmem(0)

        if self.place.warpgroups > 1:
            first_copies = jnp.minimum(length, p.stages)
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
        """Returns the transposed state with which the piece starts: the 64 columns of this
        warpgroup by all key channels, float32. In a block that computes maps it is zeros for the
        tiles of U and 64 rows of the identity for the tiles of M.
        """
        if not self.place.maps:
            return plgpu.load(
                self.first_gmem.at[self.place.index, self.h, channel_slice(self.c)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
        i, j = (
            plgpu.broadcasted_iota(jnp.int32, (C, self.p.key), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        return jnp.where(i + (self.c - self.p.value_tiles) * C == j, 1.0, 0.0)

    def store_last_state(self, state):
        """Stores the state (or gradient) with which the piece ends."""
        self.last_gmem[self.place.index, self.h, channel_slice(self.c)] = state

    def load_values(self, slot):
        """Returns the transposed tile of v, or in the backward pass of dO. M starts from the
        identity and gets zeros as values: for tiles of M the result is zeros.
        """
        values = load_transposed(self.v.at[slot, self.w])
        if not self.place.maps:
            return values
        is_u = (self.c < self.p.value_tiles).astype(jnp.float32)
        return (values.astype(jnp.float32) * is_u).astype(jnp.bfloat16)

    def start_copies(self, n, slot, barrier):
        """Starts the copies of chunk n's inputs to a slot: q and k, the tiles of v or dO of all
        warpgroups, P beta, the factors, the rows and the inverse. It skips an input whose array is
        None.
        """
        p, h, b = self.p, self.h, self.b
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, barrier)
        *keys, values, products, factors, rows, inverses = self.inputs
        for source, target in keys:
            if source is not None:
                copy(source.at[b, token_slice(n), jax.lax.div(h, p.heads_per_key)], target.at[slot])
        for w in range(self.place.warpgroups):
            c = jnp.minimum(self.place.tile + w, p.value_tiles - 1)
            copy(values[0].at[b, token_slice(n), h, channel_slice(c)], values[1].at[slot, w])
        for source, target in (products, factors, rows):
            if source is not None:
                copy(source.at[b, h, n], target.at[slot])
        if p.delta_term:
            copy(inverses[0].at[n, b, h], inverses[1].at[slot])

    def state_operand(self, state, tile, target, in_flight: int):
        """Returns two things: the state, or in the backward pass its gradient, as a left operand of
        products, and a function that copies it to `target` in global memory. The function does
        nothing if `target` is None.
        """
        if not state_in_shared_memory(self.p):
            x = state.astype(jnp.bfloat16)
            return (
                x,
                lambda: None if target is None else store_transposed(x, tile, target, in_flight),
            )
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        for t in range(self.p.key_tiles):
            columns = state[:, t * C : (t + 1) * C]
            transposed_ref(tile.at[channel_slice(t)])[...] = columns.astype(jnp.bfloat16)
        plgpu.commit_smem()
        return transposed_ref(
            tile
        ), lambda: None if target is None else plgpu.copy_smem_to_gmem(tile, target)


class _Forward(_StatePass):
    """The block of a forward pass. A block that computes maps computes no O."""

    first_to_last = True

    def __init__(self, p, place, inputs, outputs, last_gmem, shared):
        super().__init__(p, place, inputs, last_gmem, shared)
        self.o_gmem, *states_gmem = outputs
        self.states_gmem = states_gmem[0] if p.save and not place.maps else None
        if place.maps:
            _, k, v, _, *others = self.inputs
            self.inputs = ((None, self.q), k, v, (None, self.p_ref), *others)

    @staticmethod
    def output_count(p) -> int:
        return 2 if p.save else 1

    def compute_chunk(self, n, slot, state):
        body = functools.partial(self.compute_with_accumulators, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key), body)

    def compute_with_accumulators(self, n, slot, state, k_state, outputs, errors, after):
        """Computes chunk n and returns S', the state after it, [64, K] like `state`. `k_state`,
        `outputs`, `errors` and `after` are accumulators for K S, O, E and S'.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = self.place.maps, state_in_shared_memory(p)
        factors = self.factors.at[slot]
        before, copy_state = self.state_operand(
            state,
            self.state_tiles.at[w],
            None if self.states_gmem is None else self.states_gmem.at[n, b, h, :, channel_slice(c)],
            in_flight=1,
        )
        if p.delta_term:
            k_state.add(before, transposed_ref(self.k.at[slot]))
        if not (maps or from_shared):
            outputs.add(before, transposed_ref(self.q.at[slot]))
        copy_state()
        values = self.load_values(slot).astype(jnp.float32)
        if p.delta_term:
            in_flight = 0 if maps or from_shared else 1
            values = (values - along_j(factors, K_GAMMA) * k_state.read(in_flight)).astype(
                jnp.bfloat16
            )
            for part in range(2):
                errors.add(values, transposed_ref(self.inverse.at[slot, part]))
        if from_shared and not maps:
            outputs.add(before, transposed_ref(self.q.at[slot]))
        if not maps:
            in_flight = 2 if p.delta_term and not from_shared else 0
            outputs.start(along_j(factors, Q_GAMMA) * outputs.read(in_flight))
        after.start(self.rows[slot, GAMMA, C - 1] * state)
        if p.delta_term:
            values = errors.read()
        parts = high_and_low(values)
        if from_shared:
            parts = jax.lax.optimization_barrier(parts)
        if not maps:
            for part in parts:
                outputs.add(part, transposed_ref(self.p_ref.at[slot]))
        if from_shared:
            self.copy_outputs(n, outputs, in_flight=0)
            # E is added up again from its parts, so that only the parts stay in registers.
            values = sum(part.astype(jnp.float32) for part in parts)
        for part in high_and_low(along_j(factors, K_RHO) * values):
            after.add(part, self.k.at[slot])
        if not from_shared:
            self.copy_outputs(n, outputs, in_flight=2)
        return after.read()

    def copy_outputs(self, n, outputs, in_flight: int):
        """Waits for all products except the last `in_flight` ones, then starts the copy of O to
        global memory. In a block that computes maps it does nothing.
        """
        if self.place.maps:
            return
        store_transposed(
            outputs.read(in_flight),
            self.result_tiles.at[self.w],
            self.o_gmem.at[self.b, token_slice(n), self.h, channel_slice(self.c)],
            in_flight=int(self.p.save),
        )


class _Backward(_StatePass):
    """The block of a backward pass. A block that computes maps computes only the gradient of the
    state.
    """

    first_to_last = False

    def __init__(self, p, place, inputs, outputs, last_gmem, shared):
        super().__init__(p, place, inputs, last_gmem, shared)
        *self.dv_gmems, self.dstates_gmem = outputs

    @staticmethod
    def output_count(p) -> int:
        return 3

    def compute_chunk(self, n, slot, state):
        body = functools.partial(self.compute_with_accumulators, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key), body)

    def compute_with_accumulators(self, n, slot, dstate, k_dstate, p_do, values, before):
        """Computes chunk n and returns dS, the gradient of the state before it, [64, K] like
        `dstate`, the gradient dS' of the state after it. `k_dstate`, `p_do`, `values` and `before`
        are accumulators for K dS', (P beta)^T dO, dV and dS.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = self.place.maps, state_in_shared_memory(p)
        factors = self.factors.at[slot]
        target = None if maps else self.dstates_gmem.at[n, b, h, :, channel_slice(c)]
        after, copy_state = self.state_operand(dstate, self.state_tiles.at[w], target, in_flight=2)
        k_dstate.add(after, transposed_ref(self.k.at[slot]))
        if from_shared:
            p_do.start(along_j(factors, K_RHO) * k_dstate.read())
        doutputs = self.load_values(slot)
        p_do.add(doutputs, self.p_ref.at[slot])
        copy_state()
        if from_shared:
            dvalues = p_do.read()
        else:
            dvalues = along_j(factors, K_RHO) * k_dstate.read(1) + p_do.read()
        if p.delta_term:
            high, low = high_and_low(dvalues)
            for x, part in ((high, 0), (high, 1), (low, 0)):
                values.add(x, self.inverse.at[slot, part])
        before.start(self.rows[slot, GAMMA, C - 1] * dstate)
        scaled = along_j(factors, Q_GAMMA) * doutputs.astype(jnp.float32)
        before.add(scaled.astype(jnp.bfloat16), self.q.at[slot])
        if p.delta_term:
            dvalues = values.read(1)
            dread = -along_j(factors, K_GAMMA) * dvalues
            before.add(dread.astype(jnp.bfloat16), self.k.at[slot])
        if not maps:
            for i, (x, gmem) in enumerate(zip(high_and_low(dvalues), self.dv_gmems)):
                store_transposed(
                    x,
                    self.result_tiles.at[w, i],
                    gmem.at[b, token_slice(n), h, channel_slice(c)],
                    in_flight=2,
                )
        return before.read()
