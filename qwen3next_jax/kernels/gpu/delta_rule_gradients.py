"""The Mosaic GPU kernel that computes the gradients of a chunk from the state before the chunk and
the gradient of the state after it (sm_90a). A block of the grid computes one chunk of a value head.

The formulas are in docs/delta_rule.md, "In terms of E"; `delta_rule_tiles` defines the tiles,
the norm rows and the gate rows.

With keys of 64 or 128 channels, a block has one warpgroup, and two blocks share a multiprocessor,
so that one block computes while the other block waits. If two blocks share a multiprocessor, each
block has at most 115,712 bytes of shared memory, and all inputs of a block take more. So several
inputs of a block use the same shared memory one after another: an input is copied as soon as no
product reads the earlier input in its place. The [C, C] matrices are transposed: their rows are
tokens j, their columns tokens i. The transposition makes the errors E a left operand, which wgmma
takes from registers.

With keys of 256 channels, one block fills a multiprocessor and needs more registers than one
warpgroup has, so a block has two warpgroups. Both warpgroups compute E. dQ and dK have four tiles
of 64 key channels, and each warpgroup computes two of them. The first warpgroup computes the
gradient of K K^T, the second warpgroup the gradient of Q K^T. At the end the sums of both
warpgroups are added.

C = 64 tokens of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu.delta_rule_tiles import (
    BETA,
    COLUMN,
    GAMMA,
    K_GAMMA,
    K_NORM,
    K_NORM_J,
    K_RHO,
    Q_GAMMA,
    Q_NORM,
    RHO,
    ROW,
    TOTAL,
    TOTAL_J,
    C,
    broadcast_over_columns,
    channel_slice,
    high_and_low,
    load_over_columns,
    load_over_rows,
    named_refs,
    row_and_column_indices,
    row_memory,
    same_document_mask,
    sum_of_products,
    tile_memory,
    token_slice,
    transposed_ref,
    with_accumulators,
)

Q_NORM_ROW = 6  # a second copy of the row Q_NORM, read in the other layout
# The indices of rows [C] of sums. DG and DBETA are results. ENTER holds for each token the sum of
# the terms of dg that contain gamma, the decay from the chunk's start. LEAVE holds for each token
# the sum of the terms that contain rho, the decay to the chunk's end. The C numbers of CARRIED add
# up to the inner product <S, dS'>. INNER_Q and INNER_K hold the inner products of the rows of q and
# k with their gradients.
DG, DBETA, ENTER, LEAVE, CARRIED, INNER_Q, INNER_K = range(7)


def warpgroup_count(p) -> int:
    """Returns the number of warpgroups of a block: 2 for keys of 256 channels, otherwise 1."""
    return 2 if p.key_tile_count > 2 else 1


def scratch_memory(p) -> list:
    """Returns the shared memory of a block, in this order: the tiles of k, dO and dV; the parts of
    the inverse, which the gradients of K K^T and Q K^T overwrite; the slots (see
    `_GradientBlock`); the norm rows, the gate rows and the sums. The barriers follow.
    """
    n = warpgroup_count(p)
    slots, own_tiles = 2 * p.key_tile_count + (1 if n == 1 else 2 + n), p.key_tile_count // n
    arrivals = lambda tiles_each, count=1: plgpu.Barrier(
        num_arrivals=tiles_each, num_barriers=count
    )
    return [
        tile_memory(p.key_tile_count),
        tile_memory(p.value_tile_count),
        tile_memory(p.value_tile_count),
        tile_memory(1 + n),
        tile_memory(slots),
        row_memory(7),
        row_memory(8),
        row_memory(n, 7),
        arrivals(p.key_tile_count + 3 + p.inverse_tile_count),
        arrivals(2, p.value_tile_count),
        arrivals(p.key_tile_count),
        arrivals(own_tiles, n),
        arrivals(p.key_tile_count),
        arrivals(1, 1 if n == 1 else 2 + n),
        arrivals(n),
    ]


def hide_addresses_from_compiler(*refs):
    """Returns references to the same memory in a form that hides from the compiler that the
    addresses are the same. If the compiler knew all addresses, it would keep all of them in
    registers, and there are too few registers.
    """
    zero = jax.lax.optimization_barrier(jnp.int32(0))
    return [ref.at[pl.ds(zero, ref.shape[0])] for ref in refs]


def row_inner_products(x, y):
    """Returns [C], the inner product of each row of x with the same row of y."""
    return jnp.sum(x * y, axis=1)


def zeros_per_token():
    """Returns C zeros in registers."""
    return plgpu.layout_cast(jnp.zeros((C,), jnp.float32), ROW)


def zero_error_products():
    """Returns zeros [C] and zeros [C, C] in registers. Without the delta term, the zeros stand for
    the first two results of `_GradientBlock.add_error_products`.
    """
    return zeros_per_token(), plgpu.layout_cast(jnp.zeros((C, C), jnp.float32), plgpu.Layout.WGMMA)


def store_tile(ref, x):
    """Writes x to the tile `ref` of shared memory."""
    ref[...] = x


def load_tile(ref):
    """Returns a tile [C, C] of shared memory in float32."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def decay_between_tokens(gate_rows_ref, row, column):
    """Returns [C, C], the decay from token j (the row) to token i (the column); zero for i < j and
    between documents. The mask is applied before the exponential, because the exponential of an
    entry that the mask hides may overflow.

    Args:
      gate_rows_ref: the 8 gate rows of the chunk.
      row, column: the two results of `row_and_column_indices`.
    """
    mask = (column >= row) & same_document_mask(gate_rows_ref)
    return jnp.exp(
        jnp.where(
            mask,
            load_over_rows(gate_rows_ref, TOTAL_J) - load_over_columns(gate_rows_ref, TOTAL),
            -jnp.inf,
        )
    )


def load_row(ref, i: int):
    """Returns row i [C] of `ref`."""
    return plgpu.load(ref.at[i], layout=ROW)


class _Refs(NamedTuple):
    """The references of `gradient_kernel`: inputs and outputs in global memory (`…_gmem`), then the
    shared memory and the barriers of `scratch_memory`. A barrier `…_arrived` is passed when the
    inputs in its name have been copied to shared memory.
    """

    q_gmem: Any
    k_gmem: Any
    v_gmem: Any
    do_gmem: Any
    dv_gmem: Any
    dv_low_gmem: Any
    states_gmem: Any
    dstates_gmem: Any
    norm_rows_gmem: Any
    gate_rows_gmem: Any
    inverses_gmem: Any  # None without the delta term
    dq_gmem: Any
    dk_gmem: Any
    dg_and_dbeta_gmem: Any
    k_tiles: Any
    do_tiles: Any
    dv_tiles: Any
    inverse_or_gradient_tiles: Any  # the inverse, then the gradients of Q K^T and K K^T
    input_slots: Any
    norm_rows: Any
    gate_rows: Any
    sum_rows: Any
    first_inputs_arrived: Any  # k, the norm rows, the gate rows and the inverse
    do_and_dv_arrived: Any
    states_arrived: Any
    dstates_arrived: Any
    q_arrived: Any
    other_slots_arrived: Any  # v, the low part of dV, and the spare slots
    warpgroup_barrier: Any


def gradient_kernel(p, *refs):
    """Computes dQ, dK, dg and dbeta of one chunk of a value head."""
    block = _GradientBlock(
        p, named_refs(_Refs, refs, missing="" if p.delta_term else "inverses_gmem")
    )
    block.start_copies()
    error_highs, error_dstate, pairs = block.compute_errors_and_products()
    block.hide_tile_addresses_from_compiler()
    block.store_qk_and_kk_gradients(error_highs, pairs)
    block.write_gradients(*block.query_and_key_gradients(error_dstate))


class _GradientBlock:
    """One block of the grid. The methods `start_copies`, `compute_errors_and_products`,
    `store_qk_and_kk_gradients`, `query_and_key_gradients` and `write_gradients` run in this order.
    Copies, and products in accumulators, run while later statements execute, so the order of
    statements matters.

    Attributes:
      w: the index of this warpgroup.
      own_tiles: the indices of the tiles of 64 key channels that this warpgroup computes.
      k, do, dv: the tiles of k, dO and dV in shared memory.
      inverse_or_gradient_tiles: tiles of shared memory. The first two tiles hold the high and the
        low part of the inverse until `store_qk_and_kk_gradients` overwrites both tiles with the
        gradients of Q K^T and K K^T.
      slots: tiles of shared memory for inputs. The first slots hold the tiles of the state. The
        next slots hold the tiles of the state's gradient, and later the tiles of q. With one
        warpgroup, one spare slot comes last. With two warpgroups, the last slots are one slot for
        v, one slot for the low part of dV and a spare slot for each warpgroup.
      …_arrived: barriers that are passed when the copy of the input in the name has arrived.
    """

    def __init__(self, p, refs: _Refs):
        self.p, self.refs = p, refs
        self.tiles = (
            refs.k_tiles,
            refs.do_tiles,
            refs.dv_tiles,
            refs.inverse_or_gradient_tiles,
            refs.input_slots,
        )
        self.k, self.do, self.dv, self.inverse_or_gradient_tiles, self.slots = self.tiles
        self.norm_rows, self.gate_rows = refs.norm_rows, refs.gate_rows

        self.b, self.h, self.n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
        self.g = jax.lax.div(self.h, p.heads_per_key)
        self.last = p.value_tile_count - 1
        self.keys = range(p.key_tile_count)
        self.one_warpgroup = warpgroup_count(p) == 1
        self.w = 0 if self.one_warpgroup else jax.lax.axis_index("warpgroups")
        tiles_each = p.key_tile_count // warpgroup_count(p)
        self.own_tiles = [self.w * tiles_each + i for i in range(tiles_each)]
        self.v_slot, self.low_slot, self.spare_slot = (
            2 * p.key_tile_count + (0 if self.one_warpgroup else i) for i in (0, 1, 2 + self.w)
        )
        self.v_arrived, self.low_arrived, self.spare_arrived = (
            refs.other_slots_arrived.at[at - 2 * p.key_tile_count]
            for at in (self.v_slot, self.low_slot, self.spare_slot)
        )
        self.sums = refs.sum_rows.at[self.w]
        self.dstates_arrived = lambda: refs.dstates_arrived.at[self.w]

    # ---- places in memory, copies and sums

    def dstate_slot(self, t: int) -> int:
        """Returns the slot of tile t of the state's gradient. Tile t of q later overwrites this
        slot.
        """
        return self.p.key_tile_count + t

    def q_tile(self, t: int):
        """Returns a reference to tile t of q, valid after its copy has arrived."""
        return self.slots.at[self.dstate_slot(t)]

    def gmem_value_tile(self, gmem, c: int):
        """Returns the tile [C, C] of an array [B, T, H, V] with this chunk's tokens and the value
        channels 64 c to 64 c + 63.
        """
        return gmem.at[self.b, token_slice(self.n), self.h, channel_slice(c)]

    def gmem_state_tile(self, gmem, t: int, c: int):
        """Returns this chunk's tile [C, C] of an array [N, B, H, K, V], with the key channels from
        64 t on and the value channels from 64 c on.
        """
        return gmem.at[self.n, self.b, self.h, channel_slice(t), channel_slice(c)]

    def gmem_key_tile(self, gmem, t: int):
        """Returns the tile [C, C] of an array [B, T, G, K] with this chunk's tokens and the key
        channels 64 t to 64 t + 63.
        """
        return gmem.at[self.b, token_slice(self.n), self.g, channel_slice(t)]

    def copy_to_slot(self, slot: int, source, barrier):
        """Starts the copy of the tile `source` of global memory to a slot."""
        plgpu.copy_gmem_to_smem(source, self.slots.at[slot], barrier)

    def copy_state(self, slot: int, t: int, c: int, barrier):
        """Starts the copy of tile (t, c) of the state to a slot."""
        self.copy_to_slot(slot, self.gmem_state_tile(self.refs.states_gmem, t, c), barrier)

    def copy_dstate(self, t: int, c: int):
        """Starts the copy of tile (t, c) of the state's gradient to its slot."""
        self.copy_to_slot(
            self.dstate_slot(t),
            self.gmem_state_tile(self.refs.dstates_gmem, t, c),
            self.dstates_arrived(),
        )

    def hide_tile_addresses_from_compiler(self):
        """Replaces the references to tiles by references with hidden addresses."""
        self.k, self.do, self.dv, self.inverse_or_gradient_tiles, self.slots = (
            hide_addresses_from_compiler(*self.tiles)
        )

    def on_first_warpgroup(self, do):
        """Runs the function `do` in the first warpgroup only."""
        do() if self.one_warpgroup else pl.when(self.w == 0)(do)

    def sync_warpgroups(self):
        """Waits until all warpgroups have finished the reads and writes of shared memory that
        precede this call.
        """
        plgpu.commit_smem()
        if not self.one_warpgroup:
            plgpu.barrier_arrive(self.refs.warpgroup_barrier)
            plgpu.barrier_wait(self.refs.warpgroup_barrier)

    def add_to_sum_row(self, row: int, x):
        """Adds x [C] to a row of sums. The sums are in shared memory, because there are too few
        registers.
        """
        self.sums[row] = plgpu.load(self.sums.at[row], layout=ROW) + x

    # ---- copies

    def start_copies(self):
        """Starts the copies of k, the norm rows, the gate rows, the inverse, all tiles of dO and
        dV, and, for the first tile of value channels, v, the state and its gradient. Sets the sums
        ENTER, LEAVE and CARRIED to zero. Waits for k, the norm rows, the gate rows and the inverse.
        """

        @self.on_first_warpgroup
        def _():
            at = self.b, self.h, self.n
            copy = plgpu.copy_gmem_to_smem
            for t in self.keys:
                copy(
                    self.gmem_key_tile(self.refs.k_gmem, t),
                    self.k.at[t],
                    self.refs.first_inputs_arrived,
                )
            copy(
                self.refs.norm_rows_gmem.at[at],
                self.norm_rows.at[:6],
                self.refs.first_inputs_arrived,
            )
            copy(
                self.refs.norm_rows_gmem.at[*at, Q_NORM],
                self.norm_rows.at[Q_NORM_ROW],
                self.refs.first_inputs_arrived,
            )
            copy(self.refs.gate_rows_gmem.at[at], self.gate_rows, self.refs.first_inputs_arrived)

        for t in self.own_tiles:
            self.copy_state(t, t, 0, self.refs.states_arrived)
        for t in self.own_tiles:
            self.copy_dstate(t, 0)

        @self.on_first_warpgroup
        def _():
            copy = plgpu.copy_gmem_to_smem
            self.copy_to_slot(
                self.v_slot, self.gmem_value_tile(self.refs.v_gmem, 0), self.v_arrived
            )
            for part in range(self.p.inverse_tile_count):
                inverse = self.refs.inverses_gmem.at[self.n, self.b, self.h, part]
                copy(
                    inverse, self.inverse_or_gradient_tiles.at[part], self.refs.first_inputs_arrived
                )
            for c in range(self.p.value_tile_count):
                copy(
                    self.gmem_value_tile(self.refs.do_gmem, c),
                    self.do.at[c],
                    self.refs.do_and_dv_arrived.at[c],
                )
                copy(
                    self.gmem_value_tile(self.refs.dv_gmem, c),
                    self.dv.at[c],
                    self.refs.do_and_dv_arrived.at[c],
                )

        for row in (ENTER, LEAVE, CARRIED):
            self.sums[row] = zeros_per_token()
        plgpu.barrier_wait(self.refs.first_inputs_arrived)

    # ---- errors E

    def compute_errors_and_products(self):
        """Computes the prediction errors E, one tile of value channels after another, and the
        products of E with dV, dO and the state's gradient dS.

        Returns:
          error_highs: for each tile of value channels the high part of E, [C, 64]; empty with two
            warpgroups.
          error_dstate: a list of E dS^T [C, 64] for each of this warpgroup's tiles of key channels.
          pairs: [C, C], E dV^T, or E dO^T in the second of two warpgroups. Without the delta term,
            `pairs` is None with one warpgroup, and zeros in the first of two.
        """
        error_highs, error_dstate, pairs = [], None, None
        for c in range(self.p.value_tile_count):
            self.hide_tile_addresses_from_compiler()
            for barrier in (
                self.refs.states_arrived,
                self.dstates_arrived(),
                self.v_arrived,
                self.refs.do_and_dv_arrived.at[c],
            ):
                plgpu.barrier_wait(barrier)
            ks, errors = self.prediction_errors_of_tile(c)
            self.sync_warpgroups()  # all reads of the slots end before copies write there
            self.refill_slots_after_prediction_errors(c)
            high, low = high_and_low(errors)
            dv_low_term, pairs, error_dstate = self.add_error_products(
                c, ks, high, low, pairs, error_dstate
            )
            if self.p.delta_term:
                self.add_to_sum_row(ENTER, -dv_low_term)
            plgpu.commit_smem()
            if self.one_warpgroup:
                error_highs.append(high)
            self.refill_slots_after_products(c)
        return error_highs, error_dstate, pairs

    def prediction_errors_of_tile(self, c: int):
        """Returns gamma K S in bfloat16 (None without the delta term) and E in float32, [C, 64]
        each, for tile c of the value channels. Adds this tile's terms to the sums CARRIED, LEAVE
        and, with the delta term, ENTER.
        """
        k, dv, a, slots, spare_slot = (
            self.k,
            self.dv,
            self.inverse_or_gradient_tiles,
            self.slots,
            self.spare_slot,
        )
        carried = sum(
            row_inner_products(load_tile(slots.at[t]), load_tile(slots.at[self.dstate_slot(t)]))
            for t in self.own_tiles
        )
        self.add_to_sum_row(CARRIED, carried)
        ks = None
        if self.p.delta_term:
            ks = load_over_columns(self.norm_rows, K_GAMMA) * sum_of_products(
                *((k.at[t], slots.at[t]) for t in self.keys)
            )
            self.on_first_warpgroup(
                lambda: self.add_to_sum_row(ENTER, -row_inner_products(ks, load_tile(dv.at[c])))
            )
            slots[spare_slot] = (load_tile(slots.at[self.v_slot]) - ks).astype(jnp.bfloat16)
            rounded = jax.lax.optimization_barrier(ks.astype(jnp.bfloat16))
            if not self.one_warpgroup:
                self.on_first_warpgroup(lambda: store_tile(a.at[2], rounded))
            plgpu.commit_smem()
            errors = sum_of_products(
                (a.at[0], slots.at[spare_slot]), (a.at[1], slots.at[spare_slot])
            )
            ks = rounded
        else:
            errors = load_tile(slots.at[self.v_slot])
        leave = sum_of_products(*((k.at[t], slots.at[self.dstate_slot(t)]) for t in self.own_tiles))
        self.add_to_sum_row(LEAVE, row_inner_products(leave, errors))
        return ks, errors

    def refill_slots_after_prediction_errors(self, c: int):
        """Starts copies into the slots that `prediction_errors_of_tile` has finished reading.
        Unless tile c of the value channels is the last, the method copies the state and, with two
        warpgroups, v for tile c + 1. With the delta term, the method also copies the low part of dV
        for tile c.
        """
        for t in self.own_tiles if c < self.last else ():
            self.copy_state(t, t, c + 1, self.refs.states_arrived)

        @self.on_first_warpgroup
        def _():
            if self.p.delta_term:
                self.copy_to_slot(
                    self.low_slot, self.gmem_value_tile(self.refs.dv_low_gmem, c), self.low_arrived
                )
            if c < self.last and not self.one_warpgroup:
                self.copy_to_slot(
                    self.v_slot, self.gmem_value_tile(self.refs.v_gmem, c + 1), self.v_arrived
                )

    def refill_slots_after_products(self, c: int):
        """Starts copies into the slots that the products of tile c of the value channels have
        finished reading. Unless tile c is the last, the method copies the gradient of the state
        and, with one warpgroup, v for tile c + 1. After the last tile, the method copies q and, if
        there are several tiles, the tile of the state that `query_and_key_tile_gradients` reads
        second.
        """
        for t in self.own_tiles:
            if c < self.last:
                self.copy_dstate(t, c + 1)
            else:
                self.copy_to_slot(
                    self.dstate_slot(t),
                    self.gmem_key_tile(self.refs.q_gmem, t),
                    self.refs.q_arrived,
                )
        if c < self.last and self.one_warpgroup:
            self.copy_to_slot(
                self.v_slot, self.gmem_value_tile(self.refs.v_gmem, c + 1), self.v_arrived
            )
        elif c == self.last and self.last:
            self.copy_state(self.spare_slot, self.own_tiles[0], self.last - 1, self.spare_arrived)

    def add_error_products(self, c: int, ks, high, low, pairs, error_dstate):
        """Multiplies tile c of the value channels of E by dV^T (in the second warpgroup by dO^T)
        and by dS^T; E is the sum of `high` and `low`. Adds the products to `pairs` and
        `error_dstate`, which hold the sums over the tiles before c.

        Returns:
          Three results: [C], the inner product of each token's row of `ks` (gamma K S) with its row
          of the low part of dV; the new `pairs`; the new `error_dstate` (see
          `compute_errors_and_products`). In the second warpgroup the inner products are zeros.
          Without the delta term they are not used.
        """
        p, do, dv, a, slots = self.p, self.do, self.dv, self.inverse_or_gradient_tiles, self.slots

        def to_errors(products, meanwhile=lambda: None):
            """Returns the first two results of `add_error_products`. Calls `meanwhile` while
            the low part of dV is copied.
            """
            if c:
                products.set_sum(pairs)
            products.add_product(low, transposed_ref(dv.at[c]))
            products.add_product(high, transposed_ref(dv.at[c]))
            meanwhile()
            plgpu.barrier_wait(self.low_arrived)
            products.add_product(high, transposed_ref(slots.at[self.low_slot]))
            dv_low_term = row_inner_products(
                ks.astype(jnp.float32) if self.one_warpgroup else load_tile(a.at[2]),
                load_tile(slots.at[self.low_slot]),
            )
            return dv_low_term, products.wait_and_read()

        def to_outputs(products):  # E dO^T
            if c:
                products.set_sum(pairs)
            products.add_product(high, transposed_ref(do.at[c]))
            return zeros_per_token(), products.wait_and_read()

        def to_keys(*products):  # E dS^T
            for i, x in enumerate(products):
                if c:
                    x.set_sum(error_dstate[i])
                x.add_product(high, transposed_ref(slots.at[self.dstate_slot(self.own_tiles[i])]))
            return products

        def errors_and_keys(of_errors, *products):
            dv_low_term, pairs = to_errors(of_errors, lambda: to_keys(*products))
            return dv_low_term, pairs, *(x.wait_and_read() for x in products)

        count = len(self.own_tiles)
        if self.one_warpgroup and p.delta_term:
            dv_low_term, pairs, *error_dstate = with_accumulators(
                p, [C] * (1 + count), errors_and_keys
            )
            return dv_low_term, pairs, error_dstate
        error_dstate = with_accumulators(
            p, [C] * count, lambda *products: [x.wait_and_read() for x in to_keys(*products)]
        )
        dv_low_term = None
        if not self.one_warpgroup:
            to_pairs = functools.partial(with_accumulators, p, [C])
            errors = zero_error_products
            if p.delta_term:
                errors = functools.partial(to_pairs, to_errors)
            outputs = functools.partial(to_pairs, to_outputs)
            dv_low_term, pairs = jax.lax.cond(self.w == 0, errors, outputs)
        return dv_low_term, pairs, error_dstate

    # ---- the gradients of K K^T and Q K^T, with rows j and columns i

    def store_qk_and_kk_gradients(self, error_highs, pairs):
        """Computes the gradients of Q K^T and K K^T and stores them in `inverse_or_gradient_tiles`.
        Stores dbeta in the sum DBETA. Stores dg in the sum DG, but without the parts that come from
        Q S and from <S, dS'>.
        """
        p, a, k, norm_rows, sums = (
            self.p,
            self.inverse_or_gradient_tiles,
            self.k,
            self.norm_rows,
            self.sums,
        )

        def errors_times_output_gradients(products):  # E dO^T
            for c, high in enumerate(error_highs):
                products.add_product(high, transposed_ref(self.do.at[c]))
            return products.wait_and_read()

        outputs = (
            with_accumulators(p, [C], errors_times_output_gradients) if self.one_warpgroup else None
        )
        row, column = self.row, self.column = row_and_column_indices()
        plgpu.barrier_wait(self.refs.q_arrived)
        decay = decay_between_tokens(self.gate_rows, row, column) * load_over_columns(
            norm_rows, K_NORM
        )

        def key_query_products():
            return sum_of_products(*((k.at[t], transposed_ref(self.q_tile(t))) for t in self.keys))

        def key_key_products():
            return sum_of_products(*((k.at[t], transposed_ref(k.at[t])) for t in self.keys))

        def store_triangle():
            a[warpgroup_count(p)] = jnp.where(row >= column, 1.0, 0.0).astype(jnp.bfloat16)

        kk_gradients = None
        if self.one_warpgroup:
            qk_gradients = outputs * load_over_rows(norm_rows, Q_NORM) * decay
            a[0] = (qk_gradients * load_over_columns(self.gate_rows, BETA)).astype(jnp.bfloat16)
            store_triangle()
            if p.delta_term:
                before = jnp.where(column > row, pairs, 0.0)
                kk_gradients = before * (-load_over_rows(norm_rows, K_NORM_J) * decay)
            products = jax.lax.optimization_barrier(qk_gradients * key_query_products())
            if p.delta_term:
                products = products + kk_gradients * key_key_products()
                kk_gradients = (kk_gradients * load_over_columns(self.gate_rows, BETA)).astype(
                    jnp.bfloat16
                )
        else:
            errors = (self.w == 0).astype(jnp.float32)
            pairs = (
                pairs
                * decay
                * (
                    load_over_rows(norm_rows, Q_NORM) * (1 - errors)
                    - jnp.where(column > row, load_over_rows(norm_rows, K_NORM_J) * errors, 0.0)
                )
            )
            self.sync_warpgroups()  # all reads of the inverse are done
            a[1 - self.w] = (pairs * load_over_columns(self.gate_rows, BETA)).astype(jnp.bfloat16)
            products = pairs * jax.lax.cond(self.w == 0, key_key_products, key_query_products)
            self.on_first_warpgroup(store_triangle)
        self.sync_warpgroups()
        leave = load_row(sums, LEAVE) * load_row(self.gate_rows, RHO) * load_row(norm_rows, K_NORM)
        sums[DBETA] = jnp.sum(products, axis=1) + leave

        def from_column_on(after):  # column t becomes the sum of the columns from t on
            for part in high_and_low(products * load_over_columns(self.gate_rows, BETA)):
                after.add_product(part, a.at[warpgroup_count(p)])
            return after.wait_and_read()

        leave_rows = broadcast_over_columns(leave * load_row(self.gate_rows, BETA))
        after = with_accumulators(p, [C], from_column_on)
        spans = jnp.where(
            row < column, after + leave_rows, broadcast_over_columns(load_row(sums, ENTER))
        )
        sums[DG] = jnp.sum(spans, axis=0)
        if self.one_warpgroup and p.delta_term:
            plgpu.commit_smem()  # all reads of the triangle are done
            a[1] = kk_gradients
            plgpu.commit_smem()

    # ---- queries and keys

    def query_and_key_gradients(self, error_dstate):
        """Returns dQ and dK, computed as if the L2 norms of q and k were constants. dQ and dK are
        lists with an array [C, 64] for each of this warpgroup's tiles of key channels. Adds to the
        sum DG the parts of dg that come from Q S and from <S, dS'> (CARRIED).
        """
        sums = self.sums
        gradients = [
            with_accumulators(
                self.p,
                [C, C],
                functools.partial(self.query_and_key_tile_gradients, i, error_dstate[i]),
            )
            for i in range(len(self.own_tiles))
        ]
        enters, dq, dk = zip(*gradients)
        carried = self.gate_rows[GAMMA, C - 1] * load_row(sums, CARRIED)
        sums[DG] = sums[DG] + jnp.sum(
            jnp.where(self.row >= self.column, broadcast_over_columns(sum(enters)), 0.0)
            + broadcast_over_columns(carried),
            axis=0,
        )
        return dq, dk

    def query_and_key_tile_gradients(self, i: int, error_dstate, of_q, of_k):
        """Returns three results for the tile `own_tiles[i]` of key channels: [C], the inner product
        of each row of q with the part of the row's gradient that comes through the state; dQ; dK.
        The L2 norms of the rows of q and k are treated as constants in dQ and dK. `of_q` and `of_k`
        are accumulators for dQ and dK.
        """
        p, last, norm_rows = self.p, self.last, self.norm_rows
        k, do, dv, a, slots = hide_addresses_from_compiler(*self.tiles)
        t = self.own_tiles[i]
        for c in reversed(range(p.value_tile_count)):
            state = slots.at[t if c == last else self.spare_slot]
            if c < last:
                plgpu.barrier_wait(self.spare_arrived)
            of_q.add_product(do.at[c], transposed_ref(state))
            if p.delta_term:
                of_k.add_product(dv.at[c], transposed_ref(state))
            if 0 < c < last:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                self.copy_state(self.spare_slot, t, c - 1, self.spare_arrived)
        read = load_over_columns(norm_rows, Q_GAMMA) * of_q.wait_and_read()
        if last and i + 1 < len(self.own_tiles):
            plgpu.commit_smem()
            self.copy_state(self.spare_slot, self.own_tiles[i + 1], last - 1, self.spare_arrived)
        of_q.set_sum(read)
        of_q.add_product(transposed_ref(a.at[0]), k.at[t])
        gradient = load_over_columns(norm_rows, K_RHO) * error_dstate
        if p.delta_term:
            gradient = gradient - load_over_columns(norm_rows, K_GAMMA) * of_k.wait_and_read(1)
        of_k.set_sum(gradient)
        of_k.add_product(a.at[0], slots.at[self.dstate_slot(t)])
        if p.delta_term:
            of_k.add_product(a.at[1], k.at[t])
            of_k.add_product(transposed_ref(a.at[1]), k.at[t])
        return (
            row_inner_products(read, load_tile(slots.at[self.dstate_slot(t)])),
            of_q.wait_and_read(),
            of_k.wait_and_read(),
        )

    # ---- results

    def write_gradients(self, dq, dk):
        """If q and k are normalised, applies the backward pass of the L2 norms to dQ and dK. Writes
        dQ and dK. Sums dg and dbeta over the warpgroups and writes them.
        """
        p, sums, norm_rows, own_tiles = self.p, self.sums, self.norm_rows, self.own_tiles
        gradients = [
            (dq, [self.q_tile(t) for t in own_tiles]),
            (dk, [self.k.at[t] for t in own_tiles]),
        ]
        inner = [
            jnp.sum(sum(x * load_tile(tile) for x, tile in zip(*pair)), axis=1)
            for pair in gradients
            if p.normalize_qk
        ]
        if self.one_warpgroup:
            plgpu.commit_smem()
        else:
            for i, x in zip((INNER_Q, INNER_K), inner):
                sums[i] = x
            self.sync_warpgroups()
            inner = [
                load_row(self.refs.sum_rows.at[0], i) + load_row(self.refs.sum_rows.at[1], i)
                for i in (INNER_Q, INNER_K)
                if p.normalize_qk
            ]

            @self.on_first_warpgroup
            def _():
                for i, layout in ((DG, COLUMN), (DBETA, ROW)):
                    parts = (
                        plgpu.load(self.refs.sum_rows.at[j, i], layout=layout) for j in range(2)
                    )
                    sums[i] = sum(parts)
                plgpu.commit_smem()

        at = self.b, self.h, self.n
        self.on_first_warpgroup(
            lambda: plgpu.copy_smem_to_gmem(sums.at[:2], self.refs.dg_and_dbeta_gmem.at[at])
        )

        def finish(i, gmem, norm, slot_of):
            tiles_, tile_refs = gradients[i]
            if p.normalize_qk:
                tiles_ = [
                    x - broadcast_over_columns(norm * inner[i]) * load_tile(tile)
                    for x, tile in zip(tiles_, tile_refs)
                ]
            for x, t in zip(tiles_, own_tiles):
                self.slots[slot_of(t)] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for t in own_tiles:
                source = self.slots.at[slot_of(t)]
                plgpu.copy_smem_to_gmem(
                    source, gmem.at[self.b, token_slice(self.n), self.h, channel_slice(t)]
                )

        q_norm = (
            load_row(norm_rows, Q_NORM_ROW) * load_row(norm_rows, Q_NORM_ROW) * p.unpadded_key_width
        )
        finish(0, self.refs.dq_gmem, q_norm, lambda t: t)
        k_norm = load_row(norm_rows, K_NORM) * load_row(norm_rows, K_NORM)
        finish(1, self.refs.dk_gmem, k_norm, self.dstate_slot)
        plgpu.wait_smem_to_gmem(0)
