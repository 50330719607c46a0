"""The Mosaic GPU kernel of the gradients of a chunk, the states that enter and their gradients
known: what one block does for a value head. Tiles, products and rows of numbers are those of
`delta_rule_tiles`.

Two blocks of one warpgroup share a processor, one works while the other waits: so shared memory
(at most 115,712 bytes each) holds no more than what products read that wait for nothing else,
and what is made of pairs of rows is transposed, j by i: then E is a left operand, which wgmma
takes from registers. Keys of 256 fill a processor, and more registers than a warpgroup has:
there a block has two. Both make E; each has two of the keys' four tiles, and of the pairs of
rows one has those of errors, the other those of outputs. What they sum is added at the end.
"""

import functools

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
    along_i,
    along_j,
    channels,
    high_and_low,
    indices,
    product,
    rows,
    same_document,
    tiles,
    tokens,
    transposed,
    with_accumulators,
)

Q_NORM_ROW = 6  # Q_NORM once more, which is needed along both sides
# Rows of sums: two results; three along i, KEPT's sum is <S, dS>; of queries and of keys along
# their gradients.
DG, DBETA, ENTER, WRITTEN, KEPT, INNER_Q, INNER_K = range(7)


def warpgroups(p) -> int:
    return 2 if p.key_tiles > 2 else 1


def threads(p) -> dict:
    return dict(num_threads=2, thread_name="warpgroups") if warpgroups(p) > 1 else {}


def scratch(p) -> list:
    """k, dO, dV, the inverse's halves and later the pairs', slots; numbers, sums; barriers."""
    n = warpgroups(p)
    slots, own = 2 * p.key_tiles + (1 if n == 1 else 2 + n), p.key_tiles // n
    arrivals = lambda of_each, count=1: plgpu.Barrier(num_arrivals=of_each, num_barriers=count)
    return [
        tiles(p.key_tiles),
        tiles(p.value_tiles),
        tiles(p.value_tiles),
        tiles(1 + n),
        tiles(slots),
        rows(7),
        rows(8),
        rows(n, 7),
        arrivals(p.key_tiles + 3 + 2 * p.erase),
        arrivals(2, p.value_tiles),
        arrivals(p.key_tiles),
        arrivals(own, n),
        arrivals(p.key_tiles),
        arrivals(1, 1 if n == 1 else 2 + n),
        arrivals(n),
    ]


def rebased(*refs):
    """The same memory by addresses that the compiler takes for others: else it would hold the first
    ones from use to use, in more registers than there are.
    """
    zero = jax.lax.optimization_barrier(jnp.int32(0))
    return [ref.at[pl.ds(zero, ref.shape[0])] for ref in refs]


def row_sums(x, y):
    return jnp.sum(x * y, axis=1)


def spread(x_C):
    """[C, C] a column of numbers along the rows."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_C, (C, C), (0,)), plgpu.Layout.WGMMA)


def no_numbers():
    return plgpu.layout_cast(jnp.zeros((C,), jnp.float32), ROW)


def no_pairs():
    return no_numbers(), plgpu.layout_cast(jnp.zeros((C, C), jnp.float32), plgpu.Layout.WGMMA)


def put_tile(ref, x):
    ref[...] = x


def load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def decay_of_pairs(rows_ref, row, column):
    """Gamma transposed: the exponent is masked, never the result."""
    mask = (column >= row) & same_document(rows_ref)
    return jnp.exp(jnp.where(mask, along_j(rows_ref, TOTAL_J) - along_i(rows_ref, TOTAL), -jnp.inf))


def of_row(ref, i: int):
    return plgpu.load(ref.at[i], layout=ROW)


def gradient_kernel(p, *refs):
    """dQ and dK of a value head, dg and dbeta."""
    block = _Block(p, *refs)
    block.start_copies()
    highs, of_keys, pairs = block.errors()
    block.rebase()
    block.pairs_of_rows(highs, pairs)
    block.write_gradients(*block.queries_and_keys(of_keys))


class _Block:
    """One block of the grid: its references, where its copies go, and what it computes, one method
    after another. Its copies and products overlap, so that the order of the statements counts.
    """

    def __init__(
        self,
        p,
        q_gmem,
        k_gmem,
        v_gmem,
        do_gmem,
        dv_gmem,
        dv_low_gmem,
        states_gmem,
        dstates_gmem,
        factors_gmem,
        rows_gmem,
        *refs,
    ):
        refs = list(refs)
        self.p = p
        self.q_gmem, self.k_gmem, self.v_gmem = q_gmem, k_gmem, v_gmem
        self.do_gmem, self.dv_gmem, self.dv_low_gmem = do_gmem, dv_gmem, dv_low_gmem
        self.states_gmem, self.dstates_gmem = states_gmem, dstates_gmem
        self.factors_gmem, self.rows_gmem = factors_gmem, rows_gmem
        self.inverses_gmem = refs.pop(0) if p.erase else None
        self.dq_gmem, self.dk_gmem, self.dg_gmem = refs[:3]
        *self.tiles, self.factors, self.rows, self.all_sums = refs[3:11]
        self.k, self.do, self.dv, self.a, self.slots = self.tiles
        # barriers: what they are named for has arrived
        self.keys_here, self.values_here, self.states_here, dstates_here, self.q_here = refs[11:16]
        spares_here, self.met = refs[16:]

        self.b, self.h, self.n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
        self.g = jax.lax.div(self.h, p.heads_per_key)
        self.last = p.value_tiles - 1
        self.keys = range(p.key_tiles)
        self.alone = warpgroups(p) == 1
        self.w = 0 if self.alone else jax.lax.axis_index("warpgroups")
        of_each = p.key_tiles // warpgroups(p)
        self.own = [self.w * of_each + i for i in range(of_each)]
        # A slot for each of a state's tiles and of its gradient's, for one block of the value's
        # channels; then q has the latter. One spare, or one for v, one for the low half of dV, and
        # one for each warpgroup.
        self.v_at, self.low_at, self.spare = (
            2 * p.key_tiles + (0 if self.alone else i) for i in (0, 1, 2 + self.w)
        )
        self.v_here, self.low_here, self.spare_here = (
            spares_here.at[at - 2 * p.key_tiles] for at in (self.v_at, self.low_at, self.spare)
        )
        self.sums = self.all_sums.at[self.w]
        self.dstates_here = lambda: dstates_here.at[self.w]

    # ---- what every step uses

    def dstate_at(self, t: int) -> int:
        """The slot of tile t of the state's gradient, later of q."""
        return self.p.key_tiles + t

    def q(self, t: int):
        return self.slots.at[self.dstate_at(t)]

    def of_value(self, gmem, c: int):
        return gmem.at[self.b, tokens(self.n), self.h, channels(c)]

    def of_state(self, gmem, t: int, c: int):
        return gmem.at[self.n, self.b, self.h, channels(t), channels(c)]

    def of_key(self, gmem, t: int):
        return gmem.at[self.b, tokens(self.n), self.g, channels(t)]

    def start(self, slot: int, source, here):
        plgpu.copy_gmem_to_smem(source, self.slots.at[slot], here)

    def start_state(self, slot: int, t: int, c: int, here):
        self.start(slot, self.of_state(self.states_gmem, t, c), here)

    def start_dstate(self, t: int, c: int):
        self.start(self.dstate_at(t), self.of_state(self.dstates_gmem, t, c), self.dstates_here())

    def rebase(self):
        self.k, self.do, self.dv, self.a, self.slots = rebased(*self.tiles)

    def once(self, do):
        """By one warpgroup alone."""
        do() if self.alone else pl.when(self.w == 0)(do)

    def meet(self):
        """Everything read and written so far is done before a warpgroup or a copy continues."""
        plgpu.commit_smem()
        if not self.alone:
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)

    def add(self, row: int, x):
        """To a row of sums in shared memory: there are too few registers."""
        self.sums[row] = plgpu.load(self.sums.at[row], layout=ROW) + x

    # ---- copies

    def start_copies(self):
        @self.once
        def _():
            at = self.b, self.h, self.n
            copy = plgpu.copy_gmem_to_smem
            for t in self.keys:
                copy(self.of_key(self.k_gmem, t), self.k.at[t], self.keys_here)
            copy(self.factors_gmem.at[at], self.factors.at[:6], self.keys_here)
            copy(self.factors_gmem.at[*at, Q_NORM], self.factors.at[Q_NORM_ROW], self.keys_here)
            copy(self.rows_gmem.at[at], self.rows, self.keys_here)

        for t in self.own:
            self.start_state(t, t, 0, self.states_here)
        for t in self.own:
            self.start_dstate(t, 0)

        @self.once
        def _():
            copy = plgpu.copy_gmem_to_smem
            self.start(self.v_at, self.of_value(self.v_gmem, 0), self.v_here)
            for part in range(2 * self.p.erase):
                inverse = self.inverses_gmem.at[self.n, self.b, self.h, part]
                copy(inverse, self.a.at[part], self.keys_here)
            for c in range(self.p.value_tiles):
                copy(self.of_value(self.do_gmem, c), self.do.at[c], self.values_here.at[c])
                copy(self.of_value(self.dv_gmem, c), self.dv.at[c], self.values_here.at[c])

        for row in (ENTER, WRITTEN, KEPT):
            self.sums[row] = no_numbers()
        plgpu.barrier_wait(self.keys_here)

    # ---- errors E

    def errors(self):
        """The high halves of E by block of the value's channels (kept where one warpgroup works
        alone), E dS^T, which keys take of it, and what pairs of rows take of E, dO and dV.
        """
        highs, of_keys, pairs = [], None, None
        for c in range(self.p.value_tiles):
            self.rebase()
            for here in (
                self.states_here,
                self.dstates_here(),
                self.v_here,
                self.values_here.at[c],
            ):
                plgpu.barrier_wait(here)
            ks, found = self.errors_of(c)
            self.meet()  # slots were read before copies write there
            self.start_next_state(c)
            high, low = high_and_low(found)
            lost, pairs, of_keys = self.products_of_errors(c, ks, high, low, pairs, of_keys)
            if self.p.erase:
                self.add(ENTER, -lost)
            plgpu.commit_smem()
            if self.alone:
                highs.append(high)
            self.start_next_dstate(c)
        return highs, of_keys, pairs

    def errors_of(self, c: int):
        """(K S, None without erasing; E) of a block of the value's channels."""
        k, dv, a, slots, spare = self.k, self.dv, self.a, self.slots, self.spare
        kept = sum(
            row_sums(load_tile(slots.at[t]), load_tile(slots.at[self.dstate_at(t)]))
            for t in self.own
        )
        self.add(KEPT, kept)
        ks = None
        if self.p.erase:
            ks = along_i(self.factors, K_GAMMA) * product(
                *((k.at[t], slots.at[t]) for t in self.keys)
            )
            self.once(lambda: self.add(ENTER, -row_sums(ks, load_tile(dv.at[c]))))
            slots[spare] = (load_tile(slots.at[self.v_at]) - ks).astype(jnp.bfloat16)
            rounded = jax.lax.optimization_barrier(ks.astype(jnp.bfloat16))
            if not self.alone:
                self.once(lambda: put_tile(a.at[2], rounded))
            plgpu.commit_smem()
            found = product((a.at[0], slots.at[spare]), (a.at[1], slots.at[spare]))
            ks = rounded
        else:
            found = load_tile(slots.at[self.v_at])
        written = product(*((k.at[t], slots.at[self.dstate_at(t)]) for t in self.own))
        self.add(WRITTEN, row_sums(written, found))
        return ks, found

    def start_next_state(self, c: int):
        for t in self.own if c < self.last else ():
            self.start_state(t, t, c + 1, self.states_here)

        @self.once
        def _():
            if self.p.erase:
                self.start(self.low_at, self.of_value(self.dv_low_gmem, c), self.low_here)
            if c < self.last and not self.alone:
                self.start(self.v_at, self.of_value(self.v_gmem, c + 1), self.v_here)

    def start_next_dstate(self, c: int):
        for t in self.own:
            if c < self.last:
                self.start_dstate(t, c + 1)
            else:
                self.start(self.dstate_at(t), self.of_key(self.q_gmem, t), self.q_here)
        if c < self.last and self.alone:
            self.start(self.v_at, self.of_value(self.v_gmem, c + 1), self.v_here)
        elif c == self.last and self.last:
            self.start_state(self.spare, self.own[0], self.last - 1, self.spare_here)

    def products_of_errors(self, c: int, ks, high, low, pairs, of_keys):
        """E's high and low halves against rows: (<ks, the low half of dV>, pairs of rows, E dS^T),
        the latter two added to those of the blocks before.
        """
        p, do, dv, a, slots = self.p, self.do, self.dv, self.a, self.slots

        def to_errors(found, meanwhile=lambda: None):
            """E dV^T and <ks, the low half of dV>; `meanwhile` while that is on its way."""
            if c:
                found.start(pairs)
            found.add(low, transposed(dv.at[c]))
            found.add(high, transposed(dv.at[c]))
            meanwhile()
            plgpu.barrier_wait(self.low_here)
            found.add(high, transposed(slots.at[self.low_at]))
            lost = row_sums(
                ks.astype(jnp.float32) if self.alone else load_tile(a.at[2]),
                load_tile(slots.at[self.low_at]),
            )
            return lost, found.read()

        def to_outputs(found):  # E dO^T
            if c:
                found.start(pairs)
            found.add(high, transposed(do.at[c]))
            return no_numbers(), found.read()

        def to_keys(*found):  # E dS^T
            for i, x in enumerate(found):
                if c:
                    x.start(of_keys[i])
                x.add(high, transposed(slots.at[self.dstate_at(self.own[i])]))
            return found

        def errors_and_keys(of_errors, *found):
            lost, of_pairs = to_errors(of_errors, lambda: to_keys(*found))
            return lost, of_pairs, *(x.read() for x in found)

        count = len(self.own)
        if self.alone and p.erase:
            lost, pairs, *of_keys = with_accumulators(p, [C] * (1 + count), errors_and_keys)
            return lost, pairs, of_keys
        of_keys = with_accumulators(
            p, [C] * count, lambda *found: [x.read() for x in to_keys(*found)]
        )
        lost = None
        if not self.alone:
            to_pairs = functools.partial(with_accumulators, p, [C])
            errors = functools.partial(to_pairs, to_errors) if p.erase else no_pairs
            outputs = functools.partial(to_pairs, to_outputs)
            lost, pairs = jax.lax.cond(self.w == 0, errors, outputs)
        return lost, pairs, of_keys

    # ---- pairs of rows, j by i

    def pairs_of_rows(self, highs, pairs):
        """What they add to dg and dbeta, and what queries and keys take of them, into `a`."""
        p, a, k, factors, sums = self.p, self.a, self.k, self.factors, self.sums

        def against_outputs(found):  # E dO^T
            for c, high in enumerate(highs):
                found.add(high, transposed(self.do.at[c]))
            return found.read()

        outputs = with_accumulators(p, [C], against_outputs) if self.alone else None
        row, column = self.row, self.column = indices()
        plgpu.barrier_wait(self.q_here)
        decay = decay_of_pairs(self.rows, row, column) * along_i(factors, K_NORM)

        def of_queries():
            return product(*((k.at[t], transposed(self.q(t))) for t in self.keys))

        def of_themselves():
            return product(*((k.at[t], transposed(k.at[t])) for t in self.keys))

        def put_triangle():
            a[warpgroups(p)] = jnp.where(row >= column, 1.0, 0.0).astype(jnp.bfloat16)

        of_errors = None
        if self.alone:
            of_outputs = outputs * along_j(factors, Q_NORM) * decay
            a[0] = (of_outputs * along_i(self.rows, BETA)).astype(jnp.bfloat16)
            put_triangle()
            if p.erase:
                before = jnp.where(column > row, pairs, 0.0)
                of_errors = before * (-along_j(factors, K_NORM_J) * decay)
            products = jax.lax.optimization_barrier(of_outputs * of_queries())
            if p.erase:
                products = products + of_errors * of_themselves()
                of_errors = (of_errors * along_i(self.rows, BETA)).astype(jnp.bfloat16)
        else:
            errors = (self.w == 0).astype(jnp.float32)
            pairs = (
                pairs
                * decay
                * (
                    along_j(factors, Q_NORM) * (1 - errors)
                    - jnp.where(column > row, along_j(factors, K_NORM_J) * errors, 0.0)
                )
            )
            self.meet()  # the inverse is read
            a[1 - self.w] = (pairs * along_i(self.rows, BETA)).astype(jnp.bfloat16)
            products = pairs * jax.lax.cond(self.w == 0, of_themselves, of_queries)
            self.once(put_triangle)
        self.meet()
        written = of_row(sums, WRITTEN) * of_row(self.rows, RHO) * of_row(factors, K_NORM)
        sums[DBETA] = jnp.sum(products, axis=1) + written

        def from_column_on(after):  # column t: the sum over columns from t on
            for part in high_and_low(products * along_i(self.rows, BETA)):
                after.add(part, a.at[warpgroups(p)])
            return after.read()

        leave = spread(written * of_row(self.rows, BETA))
        after = with_accumulators(p, [C], from_column_on)
        spans = jnp.where(row < column, after + leave, spread(of_row(sums, ENTER)))
        sums[DG] = jnp.sum(spans, axis=0)
        if self.alone and p.erase:
            plgpu.commit_smem()  # of the triangle, which all have read
            a[1] = of_errors
            plgpu.commit_smem()

    # ---- queries and keys

    def queries_and_keys(self, of_keys):
        """(dQ, dK) by tile of this warpgroup's; adds to dg."""
        sums = self.sums
        found = [
            with_accumulators(self.p, [C, C], functools.partial(self.tile_gradients, i, of_keys[i]))
            for i in range(len(self.own))
        ]
        enters, dq, dk = zip(*found)
        kept = self.rows[GAMMA, C - 1] * of_row(sums, KEPT)
        sums[DG] = sums[DG] + jnp.sum(
            jnp.where(self.row >= self.column, spread(sum(enters)), 0.0) + spread(kept), axis=0
        )
        return dq, dk

    def tile_gradients(self, i: int, of_keys, of_q, of_k):
        """(<q, its gradient by the state>, dQ, dK) of 64 channels, before the norms."""
        p, last, factors = self.p, self.last, self.factors
        k, do, dv, a, slots = rebased(*self.tiles)
        t = self.own[i]
        for c in reversed(range(p.value_tiles)):
            state = slots.at[t if c == last else self.spare]
            if c < last:
                plgpu.barrier_wait(self.spare_here)
            of_q.add(do.at[c], transposed(state))
            if p.erase:
                of_k.add(dv.at[c], transposed(state))
            if 0 < c < last:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                self.start_state(self.spare, t, c - 1, self.spare_here)
        read = along_i(factors, Q_GAMMA) * of_q.read()
        if last and i + 1 < len(self.own):
            plgpu.commit_smem()
            self.start_state(self.spare, self.own[i + 1], last - 1, self.spare_here)
        of_q.start(read)
        of_q.add(transposed(a.at[0]), k.at[t])
        gradient = along_i(factors, K_RHO) * of_keys
        if p.erase:
            gradient = gradient - along_i(factors, K_GAMMA) * of_k.read(1)
        of_k.start(gradient)
        of_k.add(a.at[0], slots.at[self.dstate_at(t)])
        if p.erase:
            of_k.add(a.at[1], k.at[t])
            of_k.add(transposed(a.at[1]), k.at[t])
        return row_sums(read, load_tile(slots.at[self.dstate_at(t)])), of_q.read(), of_k.read()

    # ---- results

    def write_gradients(self, dq, dk):
        """dQ and dK through the norms to the outputs; dg and dbeta, summed over warpgroups."""
        p, sums, factors, own = self.p, self.sums, self.factors, self.own
        gradients = [(dq, [self.q(t) for t in own]), (dk, [self.k.at[t] for t in own])]
        inner = [
            jnp.sum(sum(x * load_tile(tile) for x, tile in zip(*pair)), axis=1)
            for pair in gradients
            if p.normalize
        ]
        if self.alone:
            plgpu.commit_smem()
        else:
            for i, x in zip((INNER_Q, INNER_K), inner):
                sums[i] = x
            self.meet()
            inner = [
                of_row(self.all_sums.at[0], i) + of_row(self.all_sums.at[1], i)
                for i in (INNER_Q, INNER_K)
                if p.normalize
            ]

            @self.once
            def _():
                for i, layout in ((DG, COLUMN), (DBETA, ROW)):
                    parts = (plgpu.load(self.all_sums.at[j, i], layout=layout) for j in range(2))
                    sums[i] = sum(parts)
                plgpu.commit_smem()

        at = self.b, self.h, self.n
        self.once(lambda: plgpu.copy_smem_to_gmem(sums.at[:2], self.dg_gmem.at[at]))

        def finish(i, gmem, norm, slot_of):
            found, tile_refs = gradients[i]
            if p.normalize:
                found = [
                    x - spread(norm * inner[i]) * load_tile(tile)
                    for x, tile in zip(found, tile_refs)
                ]
            for x, t in zip(found, own):
                self.slots[slot_of(t)] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for t in own:
                source = self.slots.at[slot_of(t)]
                plgpu.copy_smem_to_gmem(
                    source, gmem.at[self.b, tokens(self.n), self.h, channels(t)]
                )

        q_norm = of_row(factors, Q_NORM_ROW) * of_row(factors, Q_NORM_ROW) * p.key
        finish(0, self.dq_gmem, q_norm, lambda t: t)
        k_norm = of_row(factors, K_NORM) * of_row(factors, K_NORM)
        finish(1, self.dk_gmem, k_norm, self.dstate_at)
        plgpu.wait_smem_to_gmem(0)
