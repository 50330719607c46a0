"""The bodies of the Mosaic GPU kernels for Hopper (sm_90a): what one block of one warpgroup does. `pallas_gpu.py` says what they are for.

Every matrix is cut into tiles of 64 x 64, the height of a wgmma: rows of a chunk by channels, channels by channels. bfloat16 tiles
lie in shared memory, swizzled as wgmma reads them; what is summed, decayed or inverted is float32 in registers. Where sums
cancel, a float32 operand goes in two bfloat16 parts (`halves`).

The algebra is that of docs/delta_rule.md, "In terms of E"; i is the row, j the column of a [C, C] matrix.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.ops.delta_rule import chunk_math

C = 64  # tokens of a chunk, and the side of every tile
# Rows of numbers by token: those that a chunk brings (`pallas_gpu.Problem.rows`), and those that the chunk kernel makes, norms and
# decays times norms. What is needed along i and along j lies there twice: one place in shared memory is read in one layout.
TOTAL, DOCUMENT, BETA, GAMMA, RHO, TOTAL_J, DOCUMENT_J, BETA_J = range(8)
K_GAMMA, Q_GAMMA, K_RHO, K_NORM, Q_NORM, K_NORM_J = range(6)
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def tiles(*count, height: int = C, width: int = C, columns: int = C):
    """Shared memory for so many bfloat16 tiles, of which products take so many columns at a time."""
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM((*count, height, width), jnp.bfloat16, transforms=transforms)


def rows(*count):
    return plgpu.SMEM((*count, C), jnp.float32)


class Sum:
    """[C, columns] float32, to which products are added by and by; a left operand may lie in registers."""

    def __init__(self, ref):
        self.ref = ref

    def start(self, x):
        self.ref[...] = x

    def add(self, a, b):
        plgpu.wgmma(self.ref, a, b)

    def __call__(self, in_flight: int = 0):
        """Its value, once no more than so many products, the last ones, are not done. The barrier keeps the compiler from taking a step
        with the registers, a change of sign, ahead of that wait: without, minus a sum was seen to be zeros on an H100."""
        x = jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight))
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


class InterpretedSum:
    """The same where a CPU interprets: its wgmma takes no registers, and its sums start from zero."""

    def __init__(self):
        self.value = 0.0

    def start(self, x):
        self.value = x

    def add(self, a, b):
        a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
        self.value = self.value + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def __call__(self, in_flight: int = 0):
        return self.value


def with_sums(p, widths, body):
    """What `body` returns, given a sum of every width."""
    if p.interpret:
        return body(*(InterpretedSum() for _ in widths))
    return pl.run_scoped(lambda *refs: body(*map(Sum, refs)), *[plgpu.ACC((C, width)) for width in widths])


def products(*sums):
    """[C, columns] float32 each: for every list of pairs the sum of a @ b."""
    def accumulate(*sum_refs):
        for sum_ref, pairs in zip(sum_refs, sums):
            for a, b in pairs:
                plgpu.wgmma(sum_ref, a, b)
        return [Sum(sum_ref)() for sum_ref in sum_refs]
    return pl.run_scoped(accumulate, *[plgpu.ACC((C, pairs[0][1].shape[1])) for pairs in sums])


def product(*pairs):
    """[C, C] float32: the sum of a @ b."""
    return products(pairs)[0]


def transposed(tile):
    return tile.transpose((1, 0))


def halves(x):
    """A float32 array as two bfloat16 ones: its high part and what that leaves. Rounded by the bits, since a conversion of one number at
    a time is slow."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) + 0x8000 & -65536
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def put(tile_refs, *arrays):
    """Arrays into tiles, for wgmma and copies to read."""
    for i, x in enumerate(arrays):
        tile_refs[i] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


PARTS = (0, 0), (1, 0), (0, 1)  # of two operands in halves: all but low with low


def down(ref, row: int):
    """[C, C] a row of numbers by token, along i."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(plgpu.load(ref.at[row], layout=ROW), (C, C), (0,)), plgpu.Layout.WGMMA)


def across(ref, row: int):
    """[C, C] the same along j."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(plgpu.load(ref.at[row], layout=COLUMN), (C, C), (1,)), plgpu.Layout.WGMMA)


def indices():
    return tuple(plgpu.broadcasted_iota(jnp.int32, (C, C), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))


def channels(i: int):
    return pl.ds(i * C, C)


def tokens(n):
    return pl.ds(n * C, C)


# ---- a chunk by itself ----------------------------------------------------------------------------------------------


def same_document(rows_ref):
    document = [jnp.where(x >= 0, x, -1 - x) for x in (down(rows_ref, DOCUMENT), across(rows_ref, DOCUMENT_J))]
    return document[0] == document[1]


def pair_decay(rows_ref, i, j):
    """Gamma: the exponent is masked, never the result."""
    mask = (i >= j) & same_document(rows_ref)
    return jnp.exp(jnp.where(mask, down(rows_ref, TOTAL) - across(rows_ref, TOTAL_J), -jnp.inf))


LOG2_E = 1.4426950408889634
NARROW = 16  # columns of the smallest product, which are those that an operand of 32 swizzled bytes has


def half_products(p, a, b_refs, meanwhile=lambda: None):
    """[C, columns] float32 a @ b, a in halves in registers, b in halves in shared memory; `meanwhile` is done while they run."""
    def accumulate(found):
        for x, y in PARTS:
            found.add(a[x], b_refs.at[y])
        meanwhile()
        return found()

    return with_sums(p, [b_refs.shape[2]], accumulate)


def columns(n: int):
    return slice(n * NARROW, (n + 1) * NARROW)


def blocks():
    """[C, 16] of four blocks of rows: the block, the row in it and the column."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, (C, NARROW), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
    return i // NARROW, i % NARROW, j


def choose(*found):
    """[C, 16]: of every argument the block of rows that its place says, zeros for None."""
    block, chosen = blocks()[0], 0.0
    for n, x in enumerate(found):
        chosen = chosen if x is None else jnp.where(block == n, x, chosen)
    return chosen


def on_diagonal(x):
    """[C, 16]: the blocks of 16 on the diagonal, one below the other."""
    return choose(*(x[:, columns(n)] for n in range(C // NARROW)))


def inverse_norms(squares):
    """[C] rsqrt(sum x^2 + 1e-6) of every row of x, of x @ x.T."""
    _, i, j = blocks()
    return jax.lax.rsqrt(jnp.sum(jnp.where(i == j, on_diagonal(squares), 0.0), axis=1) + chunk_math.NORM_EPSILON)


def unit_lower_inverse(p, l, l_refs, x_refs, blocks_refs):
    """(I + L)^{-1} into x_refs, by the ladder of `inverse.py`: X <- X + X (-L) X in the lower left quarter of each 2m diagonal block.

    X stays in registers, in blocks of 16: x has the four of the diagonal, one below the other. As the left operand they are spread over
    the diagonal of [C, C] again; the right operand has its blocks one below the other, too. l_refs has in its first 16 columns those of
    -L on the diagonal, then those left of the second and the fourth, then all of the lower left quarter."""
    block, i, j = blocks()
    ones = [jnp.where(block == n, 1.0, 0.0).astype(jnp.bfloat16) for n in range(C // NARROW)]

    def spread(pair, up: int = 0):
        return [jnp.concatenate([x * one for one in ones[up:]], axis=1) for x in pair]

    diagonal = on_diagonal(l)
    beside = choose(None, l[:, columns(0)], None, l[:, columns(2)])
    put(l_refs, *halves(-jnp.concatenate([diagonal, beside, l[:, : C // 2]], axis=1)))
    first, second, half = l_refs.at[:, :, columns(0)], l_refs.at[:, :, columns(1)], slice(C // 2, C)
    x = jnp.where(i == j, 1.0, jnp.where(i ^ j == 1, -diagonal, 0.0))
    for m in (2, 4, 8):
        pair = halves(x)
        t = half_products(p, spread(pair), first, lambda: put(blocks_refs, *pair))
        t = jnp.where((i ^ j) // m == 1, t, 0.0)  # the quarter: above the diagonal it is zero anyway
        x = x + half_products(p, spread(halves(t)), blocks_refs)
    pair = halves(x)
    t = half_products(p, spread(pair), second, lambda: put(blocks_refs, *pair))
    below = half_products(p, spread(halves(t), up=1), blocks_refs.at[:, : C - NARROW])
    left = jnp.concatenate([choose(x, below), choose(None, x)], axis=1)
    right = halves(jnp.concatenate([choose(None, None, x, below), choose(None, None, None, x)], axis=1))
    left_refs, right_refs = (x_refs.at[:, :, n] for n in (slice(C // 2), half))

    def both():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # P beta, which x_refs has had until now
        put(left_refs, *halves(left))
        put(right_refs, *right)

    t = half_products(p, right, l_refs.at[:, half, half], both)
    put(left_refs, *halves(left + half_products(p, halves(t), left_refs.at[:, : C // 2])))


def chunk_kernel(p, q_gmem, k_gmem, rows_gmem, numbers_gmem, p_gmem, *refs):
    """Of every value head of a key head: norms and decays, P beta, and the inverse where there is a place for it."""
    *inverses_gmem, (q, qk_ref), (k, kk_ref), l, x, blocks_refs, rows_refs, numbers, keys_here, rows_here = refs
    b, g, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))

    def bring_rows(head):
        slot = head % 2
        plgpu.copy_gmem_to_smem(rows_gmem.at[b, g * p.share + head, n], rows_refs.at[slot], rows_here.at[slot])

    for t in range(p.key_tiles):
        plgpu.copy_gmem_to_smem(q_gmem.at[b, tokens(n), g, channels(t)], q.at[t], keys_here)
        plgpu.copy_gmem_to_smem(k_gmem.at[b, tokens(n), g, channels(t)], k.at[t], keys_here)
    bring_rows(0)
    plgpu.barrier_wait(keys_here)
    against = lambda rows, others: [(rows.at[t], transposed(others.at[t])) for t in range(p.key_tiles)]
    qk, kk, qq = products(against(q, k), against(k, k), against(q, q))
    if p.normalize:
        k_norm, q_norm = inverse_norms(kk), inverse_norms(qq)
    else:
        k_norm = q_norm = plgpu.layout_cast(jnp.ones((C,), jnp.float32), ROW)
    plgpu.barrier_wait(rows_here.at[0])
    row = lambda slot, i: plgpu.load(rows_refs.at[slot, i], layout=ROW)
    q_norm = jnp.where(row(0, DOCUMENT) >= 0, q_norm * p.key**-0.5, 0.0)
    numbers[K_NORM], numbers[K_NORM_J], numbers[Q_NORM] = k_norm, k_norm, q_norm
    plgpu.commit_smem()

    # What all value heads share: the products of normalized queries and keys with keys, of a document and not of the future.
    i, j = indices()
    mask, norm = same_document(rows_refs.at[0]) & (i >= j), across(numbers, K_NORM_J)
    qk = jnp.where(mask, qk * (down(numbers, Q_NORM) * norm), 0.0)
    kk = jnp.where(mask & (i > j), kk * (down(numbers, K_NORM) * norm), 0.0)
    qk_ref[...], kk_ref[...] = qk, kk  # not kept in registers: three blocks at a time have 168 each

    @pl.loop(0, p.share)
    def _(head):
        slot, h = head % 2, g * p.share + head
        here = rows_refs.at[slot]

        @pl.when(head > 0)
        def _():
            plgpu.barrier_wait(rows_here.at[slot])

        # Of the masked pairs, whose products are zero, the exponent must only not be too large.
        column = jnp.exp2(jnp.minimum(down(here, TOTAL) * LOG2_E - across(here, TOTAL_J) * LOG2_E, 126.0)) * across(here, BETA_J)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before
        numbers[K_GAMMA], numbers[Q_GAMMA] = row(slot, GAMMA) * k_norm, row(slot, GAMMA) * q_norm
        numbers[K_RHO] = row(slot, RHO) * row(slot, BETA) * k_norm
        put(x, plgpu.load(qk_ref, layout=plgpu.Layout.WGMMA, optimized=False) * column)
        plgpu.copy_smem_to_gmem(numbers, numbers_gmem.at[b, h, n])
        plgpu.copy_smem_to_gmem(x.at[0], p_gmem.at[b, h, n])

        @pl.when(head + 1 < p.share)
        def _():
            bring_rows(head + 1)

        if inverses_gmem:
            unit_lower_inverse(p, plgpu.load(kk_ref, layout=plgpu.Layout.WGMMA, optimized=False) * column, l, x, blocks_refs)
            for part in range(2):
                plgpu.copy_smem_to_gmem(x.at[part], inverses_gmem[0].at[n, b, h, part])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- the state, chunk after chunk -----------------------------------------------------------------------------------


def copies_and_chunks(p, loads, arrived, read, first_to_last: bool, chunk, first, store):
    """The last warpgroup copies: `loads(n, slot, barrier)` for every chunk of the piece, some ahead, once all others have `read` what was
    in the slot. They take the chunks in turn: `store` of what `chunk(n, slot, carry)` leaves, from `first()`."""
    length, w = p.chunks // p.pieces, jax.lax.axis_index("warpgroups")
    start = jax.lax.div(jax.lax.axis_index("batch"), p.batch) * length
    number = lambda i: start + (i if first_to_last else length - 1 - i)

    @pl.when(w == p.warpgroups)
    def _():
        if not p.interpret:
            plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, length)
        def _(i):
            slot = jax.lax.rem(i, p.stages)
            pl.when(i >= p.stages)(lambda: plgpu.barrier_wait(read.at[slot]))
            loads(number(i), slot, arrived.at[slot])

    @pl.when(w < p.warpgroups)
    def _():
        if not p.interpret:
            plgpu.set_max_registers(232, action="increase")

        def step(i, carry):
            slot = jax.lax.rem(i, p.stages)
            plgpu.barrier_wait(arrived.at[slot])
            carry = chunk(number(i), slot, carry)
            plgpu.commit_smem()  # what was read of the slot, before a copy writes there
            plgpu.barrier_arrive(read.at[slot])
            return carry

        store(jax.lax.fori_loop(0, length, step, first()))
        plgpu.wait_smem_to_gmem(0)


def first_state(p, gmem, h, c):
    """What makes the state that enters the piece, transposed: the block c of the value's channels by all of the key, float32. Of a map
    zeros for the value's blocks, and the columns of one for the key's behind them."""
    def known():
        return plgpu.load(gmem.at[jax.lax.axis_index("batch"), h, channels(c)], layout=plgpu.Layout.WGMMA, optimized=False)

    def of_map():
        i, j = (plgpu.broadcasted_iota(jnp.int32, (C, p.key), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
        return jnp.where(i + (c - p.map_tiles[0]) * C == j, 1.0, 0.0)

    return of_map if p.maps else known


def store_state(gmem, h, c):
    def store(state):
        gmem[jax.lax.axis_index("batch"), h, channels(c)] = state
    return store


def place(p):
    """(batch, value head, the warpgroup and its value tile)."""
    b, h, c, w = (jax.lax.axis_index(name) for name in ("batch", "heads", "value_tiles", "warpgroups"))
    return jax.lax.rem(b, p.batch), h, w, c * p.warpgroups + w


def load_transposed(tile):
    return plgpu.load(transposed(tile), layout=plgpu.Layout.WGMMA)


def send_transposed(x, tile, target, in_flight: int):
    """An array to memory through a tile, once all but so many copies before have left theirs."""
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    transposed(tile)[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def loads_of(p, b, h, sources, targets):
    """What copies chunk n of a value head, the value tiles of all warpgroups, with what its key head and the chunk's numbers are, into
    a slot; not what has no source."""
    def loads(n, slot, barrier):
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, barrier)
        *keys, values, products, numbers, rows, inverses = zip(sources, targets, strict=True)
        for source, target in keys:
            if source is not None:
                copy(source.at[b, tokens(n), jax.lax.div(h, p.share)], target.at[slot])
        for w in range(p.warpgroups):
            c = jnp.minimum(jax.lax.axis_index("value_tiles") * p.warpgroups + w, p.value_tiles - 1)
            copy(values[0].at[b, tokens(n), h, channels(c)], values[1].at[slot, w])
        for source, target in (products, numbers, rows):
            if source is not None:
                copy(source.at[b, h, n], target.at[slot])
        if p.erase:
            copy(inverses[0].at[n, b, h], inverses[1].at[slot])
    return loads


def forward_kernel(p, q_gmem, k_gmem, v_gmem, numbers_gmem, rows_gmem, p_gmem, *refs):
    """The state of a value head, 64 of its value channels in a warpgroup, over all chunks of a piece; o beside it. For a map the state
    alone, which has blocks of channels behind the value's: without values, from one.

    State, errors and o are transposed, channels of the value by …: each is a left operand, which wgmma takes from registers, so that
    nothing that the next chunk waits for goes through shared memory."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    initial_gmem = None if p.maps else refs.pop(0)
    final_gmem = refs.pop(0)
    o_gmem = None if p.maps else refs.pop(0)
    states_gmem = refs.pop(0) if p.save else None
    b, h, w, c = place(p)
    q, k, v, p_ref, a, numbers, rows_ref, s, o, arrived, read_all = refs
    if p.maps:
        q_gmem = p_gmem = None
    loads = loads_of(p, b, h, (q_gmem, k_gmem, v_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
                     (q, k, v, p_ref, numbers, rows_ref, a))

    def chunk(n, slot, state):
        def products(of_k, outputs, errors, after):
            here, before = numbers.at[slot], state.astype(jnp.bfloat16)
            if p.erase:
                of_k.add(before, transposed(k.at[slot]))
            if not p.maps:
                outputs.add(before, transposed(q.at[slot]))
            if p.save:
                send_transposed(before, s.at[w], states_gmem.at[n, b, h, :, channels(c)], in_flight=1)
            values = load_transposed(v.at[slot, w]).astype(jnp.float32)
            if p.maps:
                values = values * (c < p.map_tiles[0]).astype(jnp.float32)
            if p.erase:
                values = (values - across(here, K_GAMMA) * of_k(0 if p.maps else 1)).astype(jnp.bfloat16)
                for part in range(2):
                    errors.add(values, transposed(a.at[slot, part]))
            if not p.maps:
                outputs.start(across(here, Q_GAMMA) * outputs(2 * p.erase))
            after.start(rows_ref[slot, GAMMA, C - 1] * state)
            if p.erase:
                values = errors()
            if not p.maps:
                for part in halves(values):
                    outputs.add(part, transposed(p_ref.at[slot]))
            for part in halves(across(here, K_RHO) * values):
                after.add(part, k.at[slot])
            if not p.maps:
                send_transposed(outputs(2), o.at[w], o_gmem.at[b, tokens(n), h, channels(c)], in_flight=int(p.save))
            return after()

        return with_sums(p, (C, C, C, p.key), products)

    copies_and_chunks(p, loads, arrived, read_all, True, chunk, first_state(p, initial_gmem, h, c), store_state(final_gmem, h, c))


def backward_kernel(p, q_gmem, k_gmem, do_gmem, numbers_gmem, rows_gmem, p_gmem, *refs):
    """The gradient of the state of a value head, 64 of its value channels in a warpgroup, over all chunks of a piece from the last; dV
    beside it, in halves. For a map the gradient alone, from zero. All transposed, as in `forward_kernel`."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dfinal_gmem = None if p.maps else refs.pop(0)
    dinitial_gmem = refs.pop(0)
    dv_gmem, dv_low_gmem, dstates_gmem = [None] * 3 if p.maps else (refs.pop(0) for _ in range(3))
    b, h, w, c = place(p)
    q, k, do, p_ref, a, numbers, rows_ref, ds, dv, arrived, read_all = refs
    loads = loads_of(p, b, h, (q_gmem, k_gmem, do_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
                     (q, k, do, p_ref, numbers, rows_ref, a))

    def chunk(n, slot, dstate):
        def products(of_k, of_p, values, after):
            here, before = numbers.at[slot], dstate.astype(jnp.bfloat16)
            of_k.add(before, transposed(k.at[slot]))
            doutputs = load_transposed(do.at[slot, w])
            of_p.add(doutputs, p_ref.at[slot])
            if not p.maps:
                send_transposed(before, ds.at[w], dstates_gmem.at[n, b, h, :, channels(c)], in_flight=2)
            dvalues = across(here, K_RHO) * of_k(1) + of_p()
            if p.erase:
                high, low = halves(dvalues)
                for x, part in ((high, 0), (high, 1), (low, 0)):
                    values.add(x, a.at[slot, part])
            after.start(rows_ref[slot, GAMMA, C - 1] * dstate)
            after.add((across(here, Q_GAMMA) * doutputs.astype(jnp.float32)).astype(jnp.bfloat16), q.at[slot])
            if p.erase:
                dvalues = values(1)
                after.add((-across(here, K_GAMMA) * dvalues).astype(jnp.bfloat16), k.at[slot])
            if not p.maps:
                for i, (x, gmem) in enumerate(zip(halves(dvalues), (dv_gmem, dv_low_gmem))):
                    send_transposed(x, dv.at[w, i], gmem.at[b, tokens(n), h, channels(c)], in_flight=2)
            return after()

        return with_sums(p, (C, C, C, p.key), products)

    copies_and_chunks(p, loads, arrived, read_all, False, chunk, first_state(p, dfinal_gmem, h, c), store_state(dinitial_gmem, h, c))
