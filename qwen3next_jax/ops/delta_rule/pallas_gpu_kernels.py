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
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def tiles(*count):
    """Shared memory for so many bfloat16 tiles."""
    return plgpu.SMEM((*count, C, C), jnp.bfloat16, transforms=TRANSFORMS)


def rows(*count):
    return plgpu.SMEM((*count, C), jnp.float32)


def product(*pairs):
    """[C, C] float32: the sum of a @ b."""
    def accumulate(sum_ref):
        for a, b in pairs:
            plgpu.wgmma(sum_ref, a, b)
        return plgpu.layout_cast(sum_ref[...], plgpu.Layout.WGMMA)
    return pl.run_scoped(accumulate, plgpu.ACC((C, C)))


def transposed(tile):
    return tile.transpose((1, 0))


def halves(x):
    """A float32 array as two bfloat16 ones: its high part and what that leaves."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def put(tile_refs, *arrays):
    """Arrays into tiles, for wgmma and copies to read."""
    for i, x in enumerate(arrays):
        tile_refs[i] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


def exact(a_refs, b_refs, transpose: bool = False):
    """a @ b (a^T @ b) of halves: all products but low with low."""
    turn = transposed if transpose else lambda x: x
    return product(*((turn(a_refs.at[x]), b_refs.at[y]) for x, y in ((0, 0), (1, 0), (0, 1))))


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


def pair_decay(rows_ref):
    """Gamma: the exponent is masked, never the result."""
    i, j = indices()
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


def unit_lower_inverse(l, l_refs, x_refs, y_refs):
    """(I + L)^{-1} by the ladder of `inverse.py`, X <- X - X L X in the lower left quarter of each 2m diagonal block. There L may
    be whole: X is zero outside blocks of m, so that the quarter takes nothing else of it."""
    i, j = indices()
    put(l_refs, *halves(l))
    x = jnp.where(i == j, 1.0, jnp.where(i >> 1 == j >> 1, -l, 0.0))
    for m in range(1, 6):  # blocks of 2^m
        put(x_refs, *halves(x))
        put(y_refs, *halves(exact(l_refs, x_refs)))
        quarter = (i >> (m + 1) == j >> (m + 1)) & (i >> m > j >> m)
        x = x - jnp.where(quarter, exact(x_refs, y_refs), 0.0)
    return x


def chunk_kernel(p, q_gmem, k_gmem, rows_gmem, numbers_gmem, p_gmem, *refs):
    """Of every value head of a key head: norms and decays, P beta, and the inverse where there is a place for it."""
    *inverses_gmem, q, k, ls, x, y, rows_ref, numbers, keys_here, rows_here = refs
    b, g, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
    for t in range(p.key_tiles):
        plgpu.copy_gmem_to_smem(q_gmem.at[b, tokens(n), g, channels(t)], q.at[t], keys_here)
        plgpu.copy_gmem_to_smem(k_gmem.at[b, tokens(n), g, channels(t)], k.at[t], keys_here)
    plgpu.barrier_wait(keys_here)
    against_keys = lambda rows: product(*((rows.at[t], transposed(k.at[t])) for t in range(p.key_tiles)))

    @pl.loop(0, p.share)
    def _(head):
        h = g * p.share + head
        plgpu.copy_gmem_to_smem(rows_gmem.at[b, h, n], rows_ref, rows_here)
        plgpu.barrier_wait(rows_here)
        row = lambda i: plgpu.load(rows_ref.at[i], layout=ROW)
        ones = jnp.ones((C,), jnp.float32)
        k_norm = inverse_norms(k) if p.normalize else plgpu.layout_cast(ones, ROW)
        q_norm = (inverse_norms(q) if p.normalize else plgpu.layout_cast(ones, ROW)) * p.key**-0.5
        q_norm = jnp.where(row(DOCUMENT) >= 0, q_norm, 0.0)
        numbers[K_NORM], numbers[K_NORM_J], numbers[Q_NORM] = k_norm, k_norm, q_norm
        numbers[K_GAMMA], numbers[Q_GAMMA] = row(GAMMA) * k_norm, row(GAMMA) * q_norm
        numbers[K_RHO] = row(RHO) * row(BETA) * k_norm
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(numbers, numbers_gmem.at[b, h, n])
        column = pair_decay(rows_ref) * across(numbers, K_NORM_J) * across(rows_ref, BETA_J)
        if inverses_gmem:
            i, j = indices()
            l = jnp.where(i > j, against_keys(k) * down(numbers, K_NORM) * column, 0.0)
        put(y, against_keys(q) * down(numbers, Q_NORM) * column)
        plgpu.copy_smem_to_gmem(y.at[0], p_gmem.at[b, h, n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if inverses_gmem:
            put(x, *halves(unit_lower_inverse(l, ls, x, y)))
            for part in range(2):
                plgpu.copy_smem_to_gmem(x.at[part], inverses_gmem[0].at[n, b, h, part])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- the state, chunk after chunk -----------------------------------------------------------------------------------


def each_chunk(p, loads, arrived, first_to_last: bool, body, carry):
    """`body(n, slot, carry)` for every chunk; `loads(n, slot, barrier)` copies what it needs of it, some chunks ahead."""
    chunk = lambda i: i if first_to_last else p.chunks - 1 - i
    for i in range(min(p.stages, p.chunks)):
        loads(chunk(i), i, arrived.at[i])

    def step(i, carry):
        slot = jax.lax.rem(i, p.stages)
        plgpu.barrier_wait(arrived.at[slot])
        carry = body(chunk(i), slot, carry)
        plgpu.commit_smem()  # what was read of the slot, before a copy writes there

        @pl.when(i + p.stages < p.chunks)
        def _():
            loads(chunk(i + p.stages), slot, arrived.at[slot])

        return carry

    return jax.lax.fori_loop(0, p.chunks, step, carry)


def load_state(p, gmem, b, h, c):
    """Tiles of a float32 state: its channels of the key by the block c of the value's."""
    return tuple(plgpu.load(gmem.at[b, h, channels(t), channels(c)], layout=plgpu.Layout.WGMMA, optimized=False)
                 for t in range(p.key_tiles))


def store_state(p, gmem, b, h, c, state):
    for t in range(p.key_tiles):
        plgpu.store(gmem.at[b, h, channels(t), channels(c)], state[t], optimized=False)


def loads_of(p, b, h, c, sources, targets):
    """What copies chunk n of a value head and its value tile c, with what its key head and the chunk's numbers are, into a slot."""
    def loads(n, slot, barrier):
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, barrier)
        *keys, values, products, numbers, rows, inverses = zip(sources, targets, strict=True)
        for t in range(p.key_tiles):
            for source, target in keys:
                copy(source.at[b, tokens(n), jax.lax.div(h, p.share), channels(t)], target.at[slot, t])
        copy(values[0].at[b, tokens(n), h, channels(c)], values[1].at[slot])
        for source, target in (products, numbers, rows):
            copy(source.at[b, h, n], target.at[slot])
        if p.erase:
            for part in range(2):
                copy(inverses[0].at[n, b, h, part], inverses[1].at[slot, part])
    return loads


def forward_kernel(p, q_gmem, k_gmem, v_gmem, numbers_gmem, rows_gmem, p_gmem, *refs):
    """The state of a value head, 64 of its value channels, over all chunks; o beside it."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    initial_gmem, o_gmem, final_gmem = refs[:3]
    states_gmem = refs[3] if p.save else None
    q, k, v, p_ref, a, numbers, rows_ref, s, e, o, arrived = refs[3 + p.save :]
    b, h, c = (jax.lax.axis_index(name) for name in ("batch", "heads", "value_tiles"))
    loads = loads_of(p, b, h, c, (q_gmem, k_gmem, v_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
                     (q, k, v, p_ref, numbers, rows_ref, a))

    def chunk(n, slot, state):
        here = numbers.at[slot]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        put(s, *state)
        if p.save:
            for t in range(p.key_tiles):
                plgpu.copy_smem_to_gmem(s.at[t], states_gmem.at[n, b, h, channels(t), channels(c)])
        read = lambda rows: product(*((rows.at[slot, t], s.at[t]) for t in range(p.key_tiles)))
        errors = plgpu.load(v.at[slot], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        if p.erase:
            put(e, *halves(errors - down(here, K_GAMMA) * read(k)))
            errors = exact(a.at[slot], e)
        put(e, *halves(errors))
        out = down(here, Q_GAMMA) * read(q) + product((p_ref.at[slot], e.at[0]), (p_ref.at[slot], e.at[1]))
        o[...] = out.astype(jnp.bfloat16)
        put(e, *halves(down(here, K_RHO) * errors))
        plgpu.copy_smem_to_gmem(o, o_gmem.at[b, tokens(n), h, channels(c)])
        carry = rows_ref[slot, GAMMA, C - 1]
        write = lambda t: product(*((transposed(k.at[slot, t]), e.at[part]) for part in range(2)))
        return tuple(carry * state[t] + write(t) for t in range(p.key_tiles))

    state = each_chunk(p, loads, arrived, True, chunk, load_state(p, initial_gmem, b, h, c))
    store_state(p, final_gmem, b, h, c, state)
    plgpu.wait_smem_to_gmem(0)


def backward_kernel(p, q_gmem, k_gmem, do_gmem, numbers_gmem, rows_gmem, p_gmem, *refs):
    """The gradient of the state of a value head, 64 of its value channels, over all chunks from the last; dV beside it, in halves."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dfinal_gmem, dv_gmem, dv_low_gmem, dstates_gmem, dinitial_gmem = refs[:5]
    q, k, do, p_ref, a, numbers, rows_ref, ds, dv, reads, arrived = refs[5:]
    b, h, c = (jax.lax.axis_index(name) for name in ("batch", "heads", "value_tiles"))
    loads = loads_of(p, b, h, c, (q_gmem, k_gmem, do_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
                     (q, k, do, p_ref, numbers, rows_ref, a))

    def chunk(n, slot, dstate):
        here = numbers.at[slot]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        put(ds, *dstate)
        for t in range(p.key_tiles):
            plgpu.copy_smem_to_gmem(ds.at[t], dstates_gmem.at[n, b, h, channels(t), channels(c)])
        dvalues = down(here, K_RHO) * product(*((k.at[slot, t], ds.at[t]) for t in range(p.key_tiles)))
        dvalues = dvalues + product((transposed(p_ref.at[slot]), do.at[slot]))
        if p.erase:
            put(reads, *halves(dvalues))
            dvalues = exact(a.at[slot], reads, transpose=True)
        put(dv, *halves(dvalues))
        plgpu.copy_smem_to_gmem(dv.at[0], dv_gmem.at[b, tokens(n), h, channels(c)])
        plgpu.copy_smem_to_gmem(dv.at[1], dv_low_gmem.at[b, tokens(n), h, channels(c)])
        put(reads, down(here, Q_GAMMA) * plgpu.load(do.at[slot], layout=plgpu.Layout.WGMMA).astype(jnp.float32),
            -down(here, K_GAMMA) * dvalues)
        carry = rows_ref[slot, GAMMA, C - 1]

        def read(t):
            pairs = ((transposed(q.at[slot, t]), reads.at[0]), (transposed(k.at[slot, t]), reads.at[1]))
            return product(*pairs[: 1 + p.erase])

        return tuple(carry * dstate[t] + read(t) for t in range(p.key_tiles))

    dstate = each_chunk(p, loads, arrived, False, chunk, load_state(p, dfinal_gmem, b, h, c))
    store_state(p, dinitial_gmem, b, h, c, dstate)
    plgpu.wait_smem_to_gmem(0)
