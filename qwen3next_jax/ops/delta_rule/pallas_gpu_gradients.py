"""The Mosaic GPU kernel of the gradients of a chunk, the states that enter and their gradients known: what one block of one warpgroup
does for a value head. Tiles, products and rows of numbers are those of `pallas_gpu_tiles`.

Two blocks share a processor, one works while the other waits: so shared memory holds no more than what products read that wait for
nothing else, and what is made of pairs of rows is transposed, j by i: then E is a left operand, which wgmma takes from registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.ops.delta_rule.pallas_gpu_tiles import (BETA, C, GAMMA, K_GAMMA, K_NORM, K_NORM_J, K_RHO,
                                                             Q_GAMMA, Q_NORM, RHO, ROW, TOTAL, TOTAL_J, across, channels, down, halves,
                                                             indices, product, rows, same_document, tiles, tokens, transposed,
                                                             with_sums)

Q_NORM_ROW = 6  # Q_NORM once more, which is needed along both sides


def scratch(p) -> list:
    """k, dO, dV, the inverse's halves and later the pairs', slots; numbers, sums; barriers."""
    slots = 2 * p.key_tiles + 1
    return [tiles(p.key_tiles), tiles(p.value_tiles), tiles(p.value_tiles), tiles(2), tiles(slots), rows(7), rows(8), rows(2),
            plgpu.Barrier(num_arrivals=p.key_tiles + 3 + 2 * p.erase), plgpu.Barrier(num_arrivals=2, num_barriers=p.value_tiles),
            *[plgpu.Barrier(num_arrivals=n) for n in (p.key_tiles, p.key_tiles, 1)]]


def apart(*refs):
    """The same places by addresses that the compiler takes for others: else it would keep the first ones from use to use, in more
    registers than there are."""
    zero = jax.lax.optimization_barrier(jnp.int32(0))
    return [ref.at[pl.ds(zero, ref.shape[0])] for ref in refs]


def row_sums(x, y):
    return jnp.sum(x * y, axis=1)


def spread(x_C):
    """[C, C] a column of numbers along the rows."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_C, (C, C), (0,)), plgpu.Layout.WGMMA)


def no_numbers():
    return plgpu.layout_cast(jnp.zeros((C,), jnp.float32), ROW)


def load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def decay_of_pairs(rows_ref, row, column):
    """Gamma transposed: the exponent is masked, never the result."""
    mask = (column >= row) & same_document(rows_ref)
    return jnp.exp(jnp.where(mask, across(rows_ref, TOTAL_J) - down(rows_ref, TOTAL), -jnp.inf))


def gradient_kernel(p, q_gmem, k_gmem, v_gmem, do_gmem, dv_gmem, dv_low_gmem, states_gmem, dstates_gmem, numbers_gmem, rows_gmem, *refs):
    """dQ and dK of a value head, dg and dbeta."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dq_gmem, dk_gmem, dg_gmem = refs[:3]
    k, do, dv, a, slots, numbers, rows_ref, sums, keys_here, values_here, states_here, dstates_here, spare_here = refs[3:]
    places = k, do, dv, a, slots
    b, h, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
    g = jax.lax.div(h, p.share)
    keys, last = range(p.key_tiles), p.value_tiles - 1
    # A slot for each of a state's tiles and of its gradient's, for one block of the value's channels; then q has the latter. One spare.
    kept_at, dstate_at, spare = list(keys), [p.key_tiles + t for t in keys], 2 * p.key_tiles

    def start(slot, source):
        here = states_here if slot in kept_at else dstates_here if slot in dstate_at else spare_here
        plgpu.copy_gmem_to_smem(source, places[-1].at[slot], here)

    of_value = lambda gmem, c: gmem.at[b, tokens(n), h, channels(c)]
    of_state = lambda gmem, t, c: gmem.at[n, b, h, channels(t), channels(c)]
    of_key = lambda gmem, t: gmem.at[b, tokens(n), g, channels(t)]
    for t in keys:
        plgpu.copy_gmem_to_smem(of_key(k_gmem, t), k.at[t], keys_here)
        start(kept_at[t], of_state(states_gmem, t, 0))
    plgpu.copy_gmem_to_smem(numbers_gmem.at[b, h, n], numbers.at[:6], keys_here)
    plgpu.copy_gmem_to_smem(numbers_gmem.at[b, h, n, Q_NORM], numbers.at[Q_NORM_ROW], keys_here)
    plgpu.copy_gmem_to_smem(rows_gmem.at[b, h, n], rows_ref, keys_here)
    for t in keys:
        start(dstate_at[t], of_state(dstates_gmem, t, 0))
    start(spare, of_value(v_gmem, 0))
    for part in range(2 * p.erase):
        plgpu.copy_gmem_to_smem(inverses_gmem.at[n, b, h, part], a.at[part], keys_here)
    for c in range(p.value_tiles):
        plgpu.copy_gmem_to_smem(of_value(do_gmem, c), do.at[c], values_here.at[c])
        plgpu.copy_gmem_to_smem(of_value(dv_gmem, c), dv.at[c], values_here.at[c])
    plgpu.barrier_wait(keys_here)

    # E, what pairs of rows take of E, dO and dV, and what keys take of E
    highs, wrote, rv = [], {}, None
    enter, written, kept = (no_numbers() for _ in range(3))  # [C] along i; the sum of the last is <S, dS>
    for c in range(p.value_tiles):
        k, do, dv, a, slots = apart(*places)
        for here in (states_here, dstates_here, spare_here, values_here.at[c]):
            plgpu.barrier_wait(here)
        for t in keys:
            kept = kept + row_sums(load_tile(slots.at[kept_at[t]]), load_tile(slots.at[dstate_at[t]]))
        if p.erase:
            ks = down(numbers, K_GAMMA) * product(*((k.at[t], slots.at[kept_at[t]]) for t in keys))
            enter = enter - row_sums(ks, load_tile(dv.at[c]))
            slots[spare] = (load_tile(slots.at[spare]) - ks).astype(jnp.bfloat16)
            ks = jax.lax.optimization_barrier(ks.astype(jnp.bfloat16))
            plgpu.commit_smem()
            found = product((a.at[0], slots.at[spare]), (a.at[1], slots.at[spare]))
        else:
            found = load_tile(slots.at[spare])
        written = written + row_sums(product(*((k.at[t], slots.at[dstate_at[t]]) for t in keys)), found)
        plgpu.commit_smem()  # what was read of slots, before copies write there
        for t in keys if c < last else ():
            start(kept_at[t], of_state(states_gmem, t, c + 1))
        if p.erase:
            start(spare, of_value(dv_low_gmem, c))
        high, low = halves(found)
        highs.append(high)

        def of_keys(some, *found):  # E dS^T
            for t, x in zip(some, found):
                if c:
                    x.start(wrote[t])
                x.add(high, transposed(slots.at[dstate_at[t]]))
            return [x() for x in found]

        for some in filter(len, (keys[:2], keys[2:])):  # there are registers for two at a time
            wrote |= zip(some, with_sums(p, [C] * len(some), functools.partial(of_keys, some)))

        def of_pairs(found):  # E dV^T
            if c:
                found.start(rv)
            found.add(high, transposed(dv.at[c]))
            found.add(low, transposed(dv.at[c]))
            plgpu.barrier_wait(spare_here)
            found.add(high, transposed(slots.at[spare]))
            return row_sums(ks.astype(jnp.float32), load_tile(slots.at[spare])), found()

        if p.erase:
            lost, rv = with_sums(p, [C], of_pairs)
            enter = enter - lost
        plgpu.commit_smem()
        for t in keys:
            start(dstate_at[t], of_state(dstates_gmem, t, c + 1) if c < last else of_key(q_gmem, t))
        if c < last:
            start(spare, of_value(v_gmem, c + 1))
        elif last:
            start(spare, of_state(states_gmem, 0, last - 1))

    k, do, dv, a, slots = apart(*places)

    def against_outputs(ov):  # E dO^T
        for c, high in enumerate(highs):
            ov.add(high, transposed(do.at[c]))
        return ov()

    ov = with_sums(p, [C], against_outputs)

    # pairs of rows, j by i
    q = [slots.at[slot] for slot in dstate_at]
    row, column = indices()
    plgpu.barrier_wait(dstates_here)

    decay = decay_of_pairs(rows_ref, row, column) * down(numbers, K_NORM)
    ov = ov * across(numbers, Q_NORM) * decay
    a[0] = (ov * down(rows_ref, BETA)).astype(jnp.bfloat16)
    a[1] = jnp.where(row >= column, 1.0, 0.0).astype(jnp.bfloat16)
    if p.erase:
        rv = jnp.where(column > row, rv, 0.0) * (-across(numbers, K_NORM_J) * decay)
    pairs = ov * product(*((k.at[t], transposed(q[t])) for t in keys))
    if p.erase:
        pairs = pairs + rv * product(*((k.at[t], transposed(k.at[t])) for t in keys))
        rv = (rv * down(rows_ref, BETA)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    written = written * plgpu.load(rows_ref.at[RHO], layout=ROW) * plgpu.load(numbers.at[K_NORM], layout=ROW)
    sums[1] = jnp.sum(pairs, axis=1) + written

    def from_column_on(after):  # column t: the sum over columns from t on
        for part in halves(pairs * down(rows_ref, BETA)):
            after.add(part, a.at[1])
        return after()

    leave = spread(written * plgpu.load(rows_ref.at[BETA], layout=ROW))
    after = with_sums(p, [C], from_column_on)
    sums[0] = jnp.sum(jnp.where(row < column, after + leave, spread(enter)), axis=0)
    if p.erase:
        plgpu.commit_smem()  # of a[1], which all have read
        a[1] = rv
        plgpu.commit_smem()

    # queries and keys
    def of_channels(t, of_q, of_k):
        k, do, dv, a, slots = apart(*places)
        q = [slots.at[slot] for slot in dstate_at]
        for c in reversed(range(p.value_tiles)):
            state = slots.at[kept_at[t] if c == last else spare]
            if c < last:
                plgpu.barrier_wait(spare_here)
            of_q.add(do.at[c], transposed(state))
            if p.erase:
                of_k.add(dv.at[c], transposed(state))
            if 0 < c < last:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                start(spare, of_state(states_gmem, t, c - 1))
        read = down(numbers, Q_GAMMA) * of_q()
        if last and t + 1 < p.key_tiles:
            plgpu.commit_smem()
            start(spare, of_state(states_gmem, t + 1, last - 1))
        of_q.start(read)
        of_q.add(transposed(a.at[0]), k.at[t])
        gradient = down(numbers, K_RHO) * wrote[t]
        if p.erase:
            gradient = gradient - down(numbers, K_GAMMA) * of_k(1)
        of_k.start(gradient)
        of_k.add(a.at[0], q[t])
        if p.erase:
            of_k.add(a.at[1], k.at[t])
            of_k.add(transposed(a.at[1]), k.at[t])
        return row_sums(read, load_tile(q[t])), of_q(), of_k()

    enters, dq, dk = zip(*(with_sums(p, [C, C], lambda *found, t=t: of_channels(t, *found)) for t in keys))
    sums[0] = sums[0] + jnp.sum(jnp.where(row >= column, spread(sum(enters)), 0.0) + spread(rows_ref[GAMMA, C - 1] * kept), axis=0)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums, dg_gmem.at[b, h, n])

    def finish(gmem, gradients, tile_refs, norm_squared, targets):
        if p.normalize:
            inner = jnp.sum(sum(x * load_tile(tile) for x, tile in zip(gradients, tile_refs)), axis=1)
            gradients = [x - spread(norm_squared * inner) * load_tile(tile) for x, tile in zip(gradients, tile_refs)]
        for x, slot in zip(gradients, targets):
            slots[slot] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for t in keys:
            plgpu.copy_smem_to_gmem(slots.at[targets[t]], gmem.at[b, tokens(n), h, channels(t)])

    norm = lambda row: plgpu.load(numbers.at[row], layout=ROW)
    finish(dq_gmem, dq, q, norm(Q_NORM_ROW) * norm(Q_NORM_ROW) * p.key, kept_at)
    finish(dk_gmem, dk, [k.at[t] for t in keys], norm(K_NORM) * norm(K_NORM), dstate_at)
    plgpu.wait_smem_to_gmem(0)
