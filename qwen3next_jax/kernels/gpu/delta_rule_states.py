"""The Mosaic GPU kernels that pass the state, or its gradient, from chunk to chunk (sm_90a).

A block of the grid computes one or two tiles of 64 value channels of a value head. One warpgroup
computes each tile, and one more warpgroup copies inputs to shared memory. The formulas are in
docs/delta_rule.md, "In terms of E".

States, errors and outputs are transposed here: their rows are value channels, and their columns are
tokens or key channels. So they can be left operands of products, which wgmma takes from registers.
For keys of at most 128 channels, everything that the next chunk waits for therefore stays in
registers.

C = 64 tokens of a chunk.
"""

import functools

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
    channels,
    high_and_low,
    tokens,
    transposed,
    with_accumulators,
)


def forward_kernel(p, *refs):
    """Computes the state of a value head from the first chunk of a piece to the last, and O. A pass
    that computes maps computes no O. In such a pass the first value channels of the state are U,
    which starts from zero. The remaining channels are M, which starts from the identity and gets
    zeros as values.
    """
    _Forward(p, *refs).run()


def backward_kernel(p, *refs):
    """Computes the gradient of a value head's state from the last chunk of a piece to the first,
    and dV as a high and a low part. A pass that computes maps computes only the gradient of the
    state, which starts from zero.
    """
    _Backward(p, *refs).run()


def state_in_shared_memory(p) -> bool:
    """Returns whether products read the state from shared memory. They do for keys of more than 128
    channels, because such a state takes half of the registers. Fewer products run at a time then.
    """
    return p.key > 128


def load_transposed(tile):
    """Returns the transpose of a tile [C, C] of shared memory, in registers."""
    return plgpu.load(transposed(tile), layout=plgpu.Layout.WGMMA)


def store_transposed(x, tile, target, in_flight: int):
    """Waits until all copies except the last `in_flight` ones have read shared memory. Then it
    writes the transpose of x to `tile` in shared memory and starts a copy of `tile` to `target` in
    global memory.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    transposed(tile)[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


class _StatePass:
    """One block of the grid of a pass of the state. Subclasses compute a chunk.

    Attributes:
      first_to_last: True if the block goes from the first chunk of its piece to the last; False if
        it goes from the last chunk to the first.
      b, h: the index of the row of the batch and of the value head.
      w, c: the index of the warpgroup in the block, and of the tile of value channels that it
        computes.
      inputs: seven pairs (array in global memory or None, its copy in shared memory with one slot
        for each stage): q, k, v (in the backward pass dO), P beta, the factors, the rows and the
        inverse. A pair whose array is None is not copied.
      first_gmem: the state (or gradient) with which each piece starts; None in a pass that computes
        maps.
      last_gmem: the output for the state (or gradient) with which each piece ends.
      arrived, read: two barriers for each slot. `arrived` is passed when the slot's inputs have
        been copied, `read` when all computing warpgroups have read them.
    """

    first_to_last: bool

    def __init__(self, p):
        b, self.h, c, self.w = (
            jax.lax.axis_index(name) for name in ("batch", "heads", "value_tiles", "warpgroups")
        )
        self.p, self.b, self.c = p, jax.lax.rem(b, p.batch), c * p.warpgroups + self.w

    def run(self):
        """Runs the block. The last warpgroup copies the inputs of every chunk to a slot as soon as
        all other warpgroups have read the slot's earlier inputs. The other warpgroups compute the
        chunks one after another.
        """
        p = self.p
        length, w = p.chunks // p.pieces, jax.lax.axis_index("warpgroups")
        start = jax.lax.div(jax.lax.axis_index("batch"), p.batch) * length
        number = lambda i: start + (i if self.first_to_last else length - 1 - i)

        @pl.when(w == p.warpgroups)
        def _():
            if not p.interpret:
                registers = 24 if state_in_shared_memory(p) else 40
                plgpu.set_max_registers(registers, action="decrease")

            @pl.loop(0, length)
            def _(i):
                slot = jax.lax.rem(i, p.stages)
                pl.when(i >= p.stages)(lambda: plgpu.barrier_wait(self.read.at[slot]))
                self.start_copies(number(i), slot, self.arrived.at[slot])

        @pl.when(w < p.warpgroups)
        def _():
            if not p.interpret:
                registers = 240 if state_in_shared_memory(p) else 232
                plgpu.set_max_registers(registers, action="increase")

            def step(i, state):
                slot = jax.lax.rem(i, p.stages)
                # Without this barrier, the compiler keeps the addresses of all arrays in the slot
                # in registers during the whole loop.
                if p.stages == 1:
                    slot = jax.lax.optimization_barrier(slot)
                plgpu.barrier_wait(self.arrived.at[slot])
                state = self.chunk(number(i), slot, state)
                plgpu.commit_smem()  # all reads of the slot end before a copy writes to it
                plgpu.barrier_arrive(self.read.at[slot])
                return state

            state = jax.lax.fori_loop(0, length, step, self.first_state())
            self.store_last_state(state)
            plgpu.wait_smem_to_gmem(0)

    def chunk(self, n, slot, state):
        """Computes chunk n from the inputs in `slot`. Takes and returns this warpgroup's 64 rows of
        the transposed state, or in the backward pass of its gradient, [64, K] float32.
        """
        raise NotImplementedError

    def first_state(self):
        """Returns the transposed state with which the piece starts: the 64 value channels of this
        warpgroup by all key channels, float32. In a pass that computes maps it is zeros for the
        tiles of U and 64 rows of the identity for the tiles of M.
        """
        p, c = self.p, self.c
        if not p.computes_maps:
            return plgpu.load(
                self.first_gmem.at[jax.lax.axis_index("batch"), self.h, channels(c)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
        i, j = (
            plgpu.broadcasted_iota(jnp.int32, (C, p.key), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        return jnp.where(i + (c - p.map_tiles[0]) * C == j, 1.0, 0.0)

    def store_last_state(self, state):
        """Stores the state (or gradient) with which the piece ends."""
        self.last_gmem[jax.lax.axis_index("batch"), self.h, channels(self.c)] = state

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
                copy(source.at[b, tokens(n), jax.lax.div(h, p.heads_per_key)], target.at[slot])
        for w in range(p.warpgroups):
            c = jnp.minimum(jax.lax.axis_index("value_tiles") * p.warpgroups + w, p.value_tiles - 1)
            copy(values[0].at[b, tokens(n), h, channels(c)], values[1].at[slot, w])
        for source, target in (products, factors, rows):
            if source is not None:
                copy(source.at[b, h, n], target.at[slot])
        if p.erase:
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
            transposed(tile.at[channels(t)])[...] = columns.astype(jnp.bfloat16)
        plgpu.commit_smem()
        return transposed(
            tile
        ), lambda: None if target is None else plgpu.copy_smem_to_gmem(tile, target)


class _Forward(_StatePass):
    """The block of a forward pass."""

    first_to_last = True

    def __init__(self, p, q_gmem, k_gmem, v_gmem, factors_gmem, rows_gmem, p_gmem, *refs):
        super().__init__(p)
        refs = list(refs)
        inverses_gmem = refs.pop(0) if p.erase else None
        self.first_gmem = None if p.computes_maps else refs.pop(0)
        self.last_gmem = refs.pop(0)
        self.o_gmem = None if p.computes_maps else refs.pop(0)
        self.states_gmem = refs.pop(0) if p.save else None
        *targets, self.state_tiles, self.o_tiles, self.arrived, self.read = refs
        self.q, self.k, self.v, self.p_ref, self.inverse, self.factors, self.rows = targets
        if p.computes_maps:
            q_gmem = p_gmem = None
        self.inputs = (
            (q_gmem, self.q),
            (k_gmem, self.k),
            (v_gmem, self.v),
            (p_gmem, self.p_ref),
            (factors_gmem, self.factors),
            (rows_gmem, self.rows),
            (inverses_gmem, self.inverse),
        )

    def chunk(self, n, slot, state):
        body = functools.partial(self.products, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key), body)

    def products(self, n, slot, state, k_state, outputs, errors, after):
        """Computes chunk n and returns S', the state after it, [64, K] like `state`. `k_state`,
        `outputs`, `errors` and `after` are accumulators for K S, O, E and S'.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = p.computes_maps, state_in_shared_memory(p)
        factors = self.factors.at[slot]
        before, copy_state = self.state_operand(
            state,
            self.state_tiles.at[w],
            self.states_gmem.at[n, b, h, :, channels(c)] if p.save else None,
            in_flight=1,
        )
        if p.erase:
            k_state.add(before, transposed(self.k.at[slot]))
        if not (maps or from_shared):
            outputs.add(before, transposed(self.q.at[slot]))
        copy_state()
        values = load_transposed(self.v.at[slot, w]).astype(jnp.float32)
        if maps:
            values = values * (c < p.map_tiles[0]).astype(jnp.float32)
        if p.erase:
            in_flight = 0 if maps or from_shared else 1
            values = (values - along_j(factors, K_GAMMA) * k_state.read(in_flight)).astype(
                jnp.bfloat16
            )
            for part in range(2):
                errors.add(values, transposed(self.inverse.at[slot, part]))
        if from_shared and not maps:
            outputs.add(before, transposed(self.q.at[slot]))
        if not maps:
            in_flight = 0 if from_shared else 2 * p.erase
            outputs.start(along_j(factors, Q_GAMMA) * outputs.read(in_flight))
        after.start(self.rows[slot, GAMMA, C - 1] * state)
        if p.erase:
            values = errors.read()
        parts = high_and_low(values)
        if from_shared:
            parts = jax.lax.optimization_barrier(parts)
        if not maps:
            for part in parts:
                outputs.add(part, transposed(self.p_ref.at[slot]))
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
        global memory. In a pass that computes maps it does nothing.
        """
        if self.p.computes_maps:
            return
        store_transposed(
            outputs.read(in_flight),
            self.o_tiles.at[self.w],
            self.o_gmem.at[self.b, tokens(n), self.h, channels(self.c)],
            in_flight=int(self.p.save),
        )


class _Backward(_StatePass):
    """The block of a backward pass."""

    first_to_last = False

    def __init__(self, p, q_gmem, k_gmem, do_gmem, factors_gmem, rows_gmem, p_gmem, *refs):
        super().__init__(p)
        refs = list(refs)
        inverses_gmem = refs.pop(0) if p.erase else None
        self.first_gmem = None if p.computes_maps else refs.pop(0)
        self.last_gmem = refs.pop(0)
        if not p.computes_maps:
            *self.dv_gmems, self.dstates_gmem = (refs.pop(0) for _ in range(3))
        *targets, self.dstate_tiles, self.dv_tiles, self.arrived, self.read = refs
        self.q, self.k, self.do, self.p_ref, self.inverse, self.factors, self.rows = targets
        self.inputs = (
            (q_gmem, self.q),
            (k_gmem, self.k),
            (do_gmem, self.do),
            (p_gmem, self.p_ref),
            (factors_gmem, self.factors),
            (rows_gmem, self.rows),
            (inverses_gmem, self.inverse),
        )

    def chunk(self, n, slot, state):
        body = functools.partial(self.products, n, slot, state)
        return with_accumulators(self.p, (C, C, C, self.p.key), body)

    def products(self, n, slot, dstate, k_dstate, p_do, values, before):
        """Computes chunk n and returns dS, the gradient of the state before it, [64, K] like
        `dstate`, the gradient dS' of the state after it. `k_dstate`, `p_do`, `values` and `before`
        are accumulators for K dS', (P beta)^T dO, dV and dS.
        """
        p, b, h, w, c = self.p, self.b, self.h, self.w, self.c
        maps, from_shared = p.computes_maps, state_in_shared_memory(p)
        factors = self.factors.at[slot]
        target = None if maps else self.dstates_gmem.at[n, b, h, :, channels(c)]
        after, copy_state = self.state_operand(dstate, self.dstate_tiles.at[w], target, in_flight=2)
        k_dstate.add(after, transposed(self.k.at[slot]))
        if from_shared:
            p_do.start(along_j(factors, K_RHO) * k_dstate.read())
        doutputs = load_transposed(self.do.at[slot, w])
        p_do.add(doutputs, self.p_ref.at[slot])
        copy_state()
        if from_shared:
            dvalues = p_do.read()
        else:
            dvalues = along_j(factors, K_RHO) * k_dstate.read(1) + p_do.read()
        if p.erase:
            high, low = high_and_low(dvalues)
            for x, part in ((high, 0), (high, 1), (low, 0)):
                values.add(x, self.inverse.at[slot, part])
        before.start(self.rows[slot, GAMMA, C - 1] * dstate)
        scaled = along_j(factors, Q_GAMMA) * doutputs.astype(jnp.float32)
        before.add(scaled.astype(jnp.bfloat16), self.q.at[slot])
        if p.erase:
            dvalues = values.read(1)
            dread = -along_j(factors, K_GAMMA) * dvalues
            before.add(dread.astype(jnp.bfloat16), self.k.at[slot])
        if not maps:
            for i, (x, gmem) in enumerate(zip(high_and_low(dvalues), self.dv_gmems)):
                store_transposed(
                    x, self.dv_tiles.at[w, i], gmem.at[b, tokens(n), h, channels(c)], in_flight=2
                )
        return before.read()
