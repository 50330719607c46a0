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
    """A float32 array as two bfloat16 ones: its high part, cut off, and what that leaves. By the bits, since a conversion of one number
    at a time, which rounding takes, is slow."""
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)
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


def pair_decay(rows_ref, i, j):
    """Gamma: the exponent is masked, never the result."""
    document = [jnp.where(x >= 0, x, -1 - x) for x in (down(rows_ref, DOCUMENT), across(rows_ref, DOCUMENT_J))]
    mask = (i >= j) & (document[0] == document[1])
    return jnp.exp(jnp.where(mask, down(rows_ref, TOTAL) - across(rows_ref, TOTAL_J), -jnp.inf))


def inverse_norms(tile_refs):
    """[C] rsqrt(sum x^2 + 1e-6) of every row."""
    squares = 0.0
    for i in range(tile_refs.shape[0]):
        x = plgpu.load(tile_refs.at[i], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        squares = squares + jnp.sum(x * x, axis=1)
    return jax.lax.rsqrt(squares + chunk_math.NORM_EPSILON)


NARROW = 16  # columns of the smallest product, which are those that an operand of 32 swizzled bytes has


def unit_lower_inverse(l, i, j, l_refs, x_refs, y_refs):
    """(I + L)^{-1} into x_refs, by the ladder of `inverse.py`: X <- X - X L X in the lower left quarter of each 2m diagonal block.
    Products are of the blocks alone, of 16 at least, where L X is cut to the quarters; with that the rest of X L X is zero, since X is
    zero outside blocks of m. -L stands in l_refs: jax 0.11.2 was seen to give zeros for minus a fresh sum of products on sm_90."""
    put(l_refs, *halves(-l))
    put(x_refs, *halves(jnp.where(i == j, 1.0, jnp.where(i >> 1 == j >> 1, -l, 0.0))))
    for m in (2, 4, 8, 16, 32):
        width, starts = max(m, NARROW), range(0, C, max(2 * m, NARROW))
        cuts = [pl.ds(start, width) for start in starts]
        below = [pl.ds(start + m * (m >= NARROW), width) for start in starts]  # the quarters' rows
        lx = products(*([(l_refs.at[a, :, cut], x_refs.at[b, cut, cut]) for a, b in PARTS] for cut in cuts))
        if m < NARROW:
            i, j = (plgpu.broadcasted_iota(jnp.int32, (C, width), axis, layout=plgpu.Layout.WGMMA) % NARROW for axis in (0, 1))
            quarter = (i // (2 * m) == j // (2 * m)) & (i // m > j // m)
            lx = [jnp.where(quarter, x, 0.0) for x in lx]
        for cut, x in zip(cuts, lx):
            put(y_refs.at[:, :, cut], *halves(x))
        found = products(*([(x_refs.at[a, :, rows], y_refs.at[b, rows, cut]) for a, b in PARTS] for rows, cut in zip(below, cuts)))
        for cut, x in zip(cuts, found):
            known = (plgpu.load(x_refs.at[part, :, cut], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for part in range(2))
            put(x_refs.at[:, :, cut], *(half.astype(jnp.float32) + before for half, before in zip(halves(x), known)))


def chunk_kernel(p, q_gmem, k_gmem, rows_gmem, numbers_gmem, p_gmem, *refs):
    """Of every value head of a key head: norms and decays, P beta, and the inverse where there is a place for it."""
    *inverses_gmem, q, k, ls, x, y, rows_ref, numbers, keys_here, rows_here = refs
    b, g, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
    for t in range(p.key_tiles):
        plgpu.copy_gmem_to_smem(q_gmem.at[b, tokens(n), g, channels(t)], q.at[t], keys_here)
        plgpu.copy_gmem_to_smem(k_gmem.at[b, tokens(n), g, channels(t)], k.at[t], keys_here)
    plgpu.barrier_wait(keys_here)
    against_keys = lambda rows: product(*((rows.at[t], transposed(k.at[t])) for t in range(p.key_tiles)))

    norms = inverse_norms if p.normalize else lambda rows: plgpu.layout_cast(jnp.ones((C,), jnp.float32), ROW)
    k_norm, q_length = norms(k), norms(q) * p.key**-0.5

    @pl.loop(0, p.share)
    def _(head):
        h = g * p.share + head
        plgpu.copy_gmem_to_smem(rows_gmem.at[b, h, n], rows_ref, rows_here)
        plgpu.barrier_wait(rows_here)
        row = lambda i: plgpu.load(rows_ref.at[i], layout=ROW)
        q_norm = jnp.where(row(DOCUMENT) >= 0, q_length, 0.0)
        numbers[K_NORM], numbers[K_NORM_J], numbers[Q_NORM] = k_norm, k_norm, q_norm
        numbers[K_GAMMA], numbers[Q_GAMMA] = row(GAMMA) * k_norm, row(GAMMA) * q_norm
        numbers[K_RHO] = row(RHO) * row(BETA) * k_norm
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(numbers, numbers_gmem.at[b, h, n])
        i, j = indices()
        column = pair_decay(rows_ref, i, j) * across(numbers, K_NORM_J) * across(rows_ref, BETA_J)
        put(y, against_keys(q) * down(numbers, Q_NORM) * column)
        plgpu.copy_smem_to_gmem(y.at[0], p_gmem.at[b, h, n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if inverses_gmem:
            unit_lower_inverse(jnp.where(i > j, against_keys(k) * down(numbers, K_NORM) * column, 0.0), i, j, ls, x, y)
            for part in range(2):
                plgpu.copy_smem_to_gmem(x.at[part], inverses_gmem[0].at[n, b, h, part])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- the state, chunk after chunk -----------------------------------------------------------------------------------


def each_chunk(p, loads, arrived, read, first_to_last: bool, body, carry):
    """`body(n, slot, carry)` for every chunk of the piece, in every warpgroup; the first one has `loads(n, slot, barrier)` copy what it
    needs of it, some chunks ahead, once all have `read` what was there."""
    length = p.chunks // p.pieces
    first = jax.lax.div(jax.lax.axis_index("batch"), p.batch) * length
    chunk = lambda i: first + (i if first_to_last else length - 1 - i)
    copies = jax.lax.axis_index("warpgroups") == 0

    @pl.when(copies)
    def _():
        for i in range(min(p.stages, length)):
            loads(chunk(i), i, arrived.at[i])

    def step(i, carry):
        slot = jax.lax.rem(i, p.stages)
        plgpu.barrier_wait(arrived.at[slot])
        carry = body(chunk(i), slot, carry)
        plgpu.commit_smem()  # what was read of the slot, before a copy writes there
        plgpu.barrier_arrive(read.at[slot])

        @pl.when(copies & (i + p.stages < length))
        def _():
            plgpu.barrier_wait(read.at[slot])
            loads(chunk(i + p.stages), slot, arrived.at[slot])

        return carry

    return jax.lax.fori_loop(0, length, step, carry)


def load_state(p, gmem, h, c):
    """The piece's state, transposed: the block c of the value's channels by all of the key, float32."""
    at = gmem.at[jax.lax.axis_index("batch"), h, channels(c)]
    return plgpu.load(at, layout=plgpu.Layout.WGMMA, optimized=False)


def store_state(p, gmem, h, c, state):
    gmem[jax.lax.axis_index("batch"), h, channels(c)] = state


def first_of_map(p, c):
    """Zeros for the value's blocks, the columns of one for the key's behind them."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, (C, p.key), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
    return jnp.where(i + (c - p.map_tiles[0]) * C == j, 1.0, 0.0)


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

    first = first_of_map(p, c) if p.maps else load_state(p, initial_gmem, h, c)
    store_state(p, final_gmem, h, c, each_chunk(p, loads, arrived, read_all, True, chunk, first))
    plgpu.wait_smem_to_gmem(0)


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

    last = first_of_map(p, c) if p.maps else load_state(p, dfinal_gmem, h, c)
    store_state(p, dinitial_gmem, h, c, each_chunk(p, loads, arrived, read_all, False, chunk, last))
    plgpu.wait_smem_to_gmem(0)
