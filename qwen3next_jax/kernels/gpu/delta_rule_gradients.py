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
    across,
    channels,
    down,
    halves,
    indices,
    product,
    rows,
    same_document,
    tiles,
    tokens,
    transposed,
    with_sums,
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


def apart(*refs):
    """The same places by addresses that the compiler takes for others: else it would keep the
    first ones from use to use, in more registers than there are.
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
    return jnp.exp(jnp.where(mask, across(rows_ref, TOTAL_J) - down(rows_ref, TOTAL), -jnp.inf))


def gradient_kernel(
    p,
    q_gmem,
    k_gmem,
    v_gmem,
    do_gmem,
    dv_gmem,
    dv_low_gmem,
    states_gmem,
    dstates_gmem,
    numbers_gmem,
    rows_gmem,
    *refs,
):
    """dQ and dK of a value head, dg and dbeta."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dq_gmem, dk_gmem, dg_gmem = refs[:3]
    *places, numbers, rows_ref, all_sums = refs[3:11]
    k, do, dv, a, slots = places
    keys_here, values_here, states_here, dstates_here, q_here, spares_here, met = refs[11:]
    b, h, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
    g, last, keys = jax.lax.div(h, p.share), p.value_tiles - 1, range(p.key_tiles)
    alone = warpgroups(p) == 1
    w = 0 if alone else jax.lax.axis_index("warpgroups")
    own = [w * (p.key_tiles // warpgroups(p)) + i for i in range(p.key_tiles // warpgroups(p))]
    # A slot for each of a state's tiles and of its gradient's, for one block of the value's
    # channels; then q has the latter. One spare, or one for v, one for the low half of dV, and one
    # for each warpgroup.
    dstate_at = lambda t: p.key_tiles + t
    v_at, low_at, spare = (2 * p.key_tiles + (0 if alone else i) for i in (0, 1, 2 + w))
    v_here, low_here, spare_here = (
        spares_here.at[at - 2 * p.key_tiles] for at in (v_at, low_at, spare)
    )
    sums = all_sums.at[w]

    def once(do):
        do() if alone else pl.when(w == 0)(do)

    def meet():
        """What was read and written so far, before any warpgroup or copy goes on."""
        plgpu.commit_smem()
        if not alone:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

    def add(row, x):  # not kept in registers, of which there are too few
        sums[row] = plgpu.load(sums.at[row], layout=ROW) + x

    start = lambda slot, source, here: plgpu.copy_gmem_to_smem(source, slots.at[slot], here)
    of_value = lambda gmem, c: gmem.at[b, tokens(n), h, channels(c)]
    of_state = lambda gmem, t, c: gmem.at[n, b, h, channels(t), channels(c)]
    of_key = lambda gmem, t: gmem.at[b, tokens(n), g, channels(t)]

    @once
    def _():
        for t in keys:
            plgpu.copy_gmem_to_smem(of_key(k_gmem, t), k.at[t], keys_here)
        plgpu.copy_gmem_to_smem(numbers_gmem.at[b, h, n], numbers.at[:6], keys_here)
        plgpu.copy_gmem_to_smem(numbers_gmem.at[b, h, n, Q_NORM], numbers.at[Q_NORM_ROW], keys_here)
        plgpu.copy_gmem_to_smem(rows_gmem.at[b, h, n], rows_ref, keys_here)

    for t in own:
        start(t, of_state(states_gmem, t, 0), states_here)
    for t in own:
        start(dstate_at(t), of_state(dstates_gmem, t, 0), dstates_here.at[w])

    @once
    def _():
        start(v_at, of_value(v_gmem, 0), v_here)
        for part in range(2 * p.erase):
            plgpu.copy_gmem_to_smem(inverses_gmem.at[n, b, h, part], a.at[part], keys_here)
        for c in range(p.value_tiles):
            plgpu.copy_gmem_to_smem(of_value(do_gmem, c), do.at[c], values_here.at[c])
            plgpu.copy_gmem_to_smem(of_value(dv_gmem, c), dv.at[c], values_here.at[c])

    for row in (ENTER, WRITTEN, KEPT):
        sums[row] = no_numbers()
    plgpu.barrier_wait(keys_here)

    # E, what pairs of rows take of E, dO and dV, and what keys take of E
    highs, wrote, pairs = [], None, None
    for c in range(p.value_tiles):
        k, do, dv, a, slots = apart(*places)
        for here in (states_here, dstates_here.at[w], v_here, values_here.at[c]):
            plgpu.barrier_wait(here)
        add(
            KEPT,
            sum(row_sums(load_tile(slots.at[t]), load_tile(slots.at[dstate_at(t)])) for t in own),
        )
        if p.erase:
            ks = down(numbers, K_GAMMA) * product(*((k.at[t], slots.at[t]) for t in keys))
            once(lambda: add(ENTER, -row_sums(ks, load_tile(dv.at[c]))))
            slots[spare] = (load_tile(slots.at[v_at]) - ks).astype(jnp.bfloat16)
            ks = jax.lax.optimization_barrier(ks.astype(jnp.bfloat16))
            if not alone:
                once(lambda: put_tile(a.at[2], ks))
            plgpu.commit_smem()
            found = product((a.at[0], slots.at[spare]), (a.at[1], slots.at[spare]))
        else:
            found = load_tile(slots.at[v_at])
        add(WRITTEN, row_sums(product(*((k.at[t], slots.at[dstate_at(t)]) for t in own)), found))
        meet()  # what was read of slots, before copies write there
        for t in own if c < last else ():
            start(t, of_state(states_gmem, t, c + 1), states_here)

        @once
        def _():
            if p.erase:
                start(low_at, of_value(dv_low_gmem, c), low_here)
            if c < last and not alone:
                start(v_at, of_value(v_gmem, c + 1), v_here)

        high, low = halves(found)

        def to_errors(found, meanwhile=lambda: None):
            """E dV^T and <ks, the low half of dV>; `meanwhile` while that is on its way."""
            if c:
                found.start(pairs)
            found.add(low, transposed(dv.at[c]))
            found.add(high, transposed(dv.at[c]))
            meanwhile()
            plgpu.barrier_wait(low_here)
            found.add(high, transposed(slots.at[low_at]))
            lost = row_sums(
                ks.astype(jnp.float32) if alone else load_tile(a.at[2]), load_tile(slots.at[low_at])
            )
            return lost, found()

        def to_outputs(found):  # E dO^T
            if c:
                found.start(pairs)
            found.add(high, transposed(do.at[c]))
            return no_numbers(), found()

        def to_keys(*found):  # E dS^T
            for i, x in enumerate(found):
                if c:
                    x.start(wrote[i])
                x.add(high, transposed(slots.at[dstate_at(own[i])]))
            return found

        if alone and p.erase:
            lost, pairs, *wrote = with_sums(
                p,
                [C] * (1 + len(own)),
                lambda of_errors, *of_keys: (
                    *to_errors(of_errors, lambda: to_keys(*of_keys)),
                    *(x() for x in of_keys),
                ),
            )
        else:
            wrote = with_sums(p, [C] * len(own), lambda *of_keys: [x() for x in to_keys(*of_keys)])
            if not alone:
                errors = functools.partial(with_sums, p, [C], to_errors) if p.erase else no_pairs
                lost, pairs = jax.lax.cond(
                    w == 0, errors, functools.partial(with_sums, p, [C], to_outputs)
                )
        if p.erase:
            add(ENTER, -lost)
        plgpu.commit_smem()
        if alone:
            highs.append(high)
        for t in own:
            if c < last:
                start(dstate_at(t), of_state(dstates_gmem, t, c + 1), dstates_here.at[w])
            else:
                start(dstate_at(t), of_key(q_gmem, t), q_here)
        if c < last and alone:
            start(v_at, of_value(v_gmem, c + 1), v_here)
        elif c == last and last:
            start(spare, of_state(states_gmem, own[0], last - 1), spare_here)

    k, do, dv, a, slots = apart(*places)

    def against_outputs(found):  # E dO^T
        for c, high in enumerate(highs):
            found.add(high, transposed(do.at[c]))
        return found()

    # pairs of rows, j by i
    outputs = with_sums(p, [C], against_outputs) if alone else None
    q = lambda t: slots.at[dstate_at(t)]
    row, column = indices()
    plgpu.barrier_wait(q_here)
    decay = decay_of_pairs(rows_ref, row, column) * down(numbers, K_NORM)

    of_queries = lambda: product(*((k.at[t], transposed(q(t))) for t in keys))
    of_themselves = lambda: product(*((k.at[t], transposed(k.at[t])) for t in keys))
    weigh_outputs = lambda x: x * across(numbers, Q_NORM) * decay
    weigh_errors = lambda x: jnp.where(column > row, x, 0.0) * (-across(numbers, K_NORM_J) * decay)

    def put_triangle():
        a[warpgroups(p)] = jnp.where(row >= column, 1.0, 0.0).astype(jnp.bfloat16)

    if alone:
        of_outputs = weigh_outputs(outputs)
        a[0] = (of_outputs * down(rows_ref, BETA)).astype(jnp.bfloat16)
        put_triangle()
        if p.erase:
            of_errors = weigh_errors(pairs)
        products = jax.lax.optimization_barrier(of_outputs * of_queries())
        if p.erase:
            products = products + of_errors * of_themselves()
            of_errors = (of_errors * down(rows_ref, BETA)).astype(jnp.bfloat16)
    else:
        errors = (w == 0).astype(jnp.float32)
        pairs = (
            pairs
            * decay
            * (
                across(numbers, Q_NORM) * (1 - errors)
                - jnp.where(column > row, across(numbers, K_NORM_J) * errors, 0.0)
            )
        )
        meet()  # the inverse is read
        a[1 - w] = (pairs * down(rows_ref, BETA)).astype(jnp.bfloat16)
        products = pairs * jax.lax.cond(w == 0, of_themselves, of_queries)
        once(put_triangle)
    meet()
    of_row = lambda ref, i: plgpu.load(ref.at[i], layout=ROW)
    written = of_row(sums, WRITTEN) * of_row(rows_ref, RHO) * of_row(numbers, K_NORM)
    sums[DBETA] = jnp.sum(products, axis=1) + written

    def from_column_on(after):  # column t: the sum over columns from t on
        for part in halves(products * down(rows_ref, BETA)):
            after.add(part, a.at[warpgroups(p)])
        return after()

    leave = spread(written * of_row(rows_ref, BETA))
    after = with_sums(p, [C], from_column_on)
    sums[DG] = jnp.sum(jnp.where(row < column, after + leave, spread(of_row(sums, ENTER))), axis=0)
    if alone and p.erase:
        plgpu.commit_smem()  # of the triangle, which all have read
        a[1] = of_errors
        plgpu.commit_smem()

    # queries and keys
    def of_channels(i, of_q, of_k):
        k, do, dv, a, slots = apart(*places)
        t = own[i]
        for c in reversed(range(p.value_tiles)):
            state = slots.at[t if c == last else spare]
            if c < last:
                plgpu.barrier_wait(spare_here)
            of_q.add(do.at[c], transposed(state))
            if p.erase:
                of_k.add(dv.at[c], transposed(state))
            if 0 < c < last:
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                start(spare, of_state(states_gmem, t, c - 1), spare_here)
        read = down(numbers, Q_GAMMA) * of_q()
        if last and i + 1 < len(own):
            plgpu.commit_smem()
            start(spare, of_state(states_gmem, own[i + 1], last - 1), spare_here)
        of_q.start(read)
        of_q.add(transposed(a.at[0]), k.at[t])
        gradient = down(numbers, K_RHO) * wrote[i]
        if p.erase:
            gradient = gradient - down(numbers, K_GAMMA) * of_k(1)
        of_k.start(gradient)
        of_k.add(a.at[0], slots.at[dstate_at(t)])
        if p.erase:
            of_k.add(a.at[1], k.at[t])
            of_k.add(transposed(a.at[1]), k.at[t])
        return row_sums(read, load_tile(slots.at[dstate_at(t)])), of_q(), of_k()

    enters, dq, dk = zip(
        *(with_sums(p, [C, C], functools.partial(of_channels, i)) for i in range(len(own)))
    )
    kept = rows_ref[GAMMA, C - 1] * of_row(sums, KEPT)
    sums[DG] = sums[DG] + jnp.sum(
        jnp.where(row >= column, spread(sum(enters)), 0.0) + spread(kept), axis=0
    )
    gradients = [(dq, [q(t) for t in own]), (dk, [k.at[t] for t in own])]
    inner = [
        jnp.sum(sum(x * load_tile(tile) for x, tile in zip(*pair)), axis=1)
        for pair in gradients
        if p.normalize
    ]
    if alone:
        plgpu.commit_smem()
    else:
        for i, x in zip((INNER_Q, INNER_K), inner):
            sums[i] = x
        meet()
        inner = [
            of_row(all_sums.at[0], i) + of_row(all_sums.at[1], i)
            for i in (INNER_Q, INNER_K)
            if p.normalize
        ]

        @once
        def _():
            for i, layout in ((DG, COLUMN), (DBETA, ROW)):
                sums[i] = sum(plgpu.load(all_sums.at[j, i], layout=layout) for j in range(2))
            plgpu.commit_smem()

    once(lambda: plgpu.copy_smem_to_gmem(sums.at[:2], dg_gmem.at[b, h, n]))

    def finish(i, gmem, norm, at):
        found, tile_refs = gradients[i]
        if p.normalize:
            found = [
                x - spread(norm * inner[i]) * load_tile(tile) for x, tile in zip(found, tile_refs)
            ]
        for x, t in zip(found, own):
            slots[at(t)] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for t in own:
            plgpu.copy_smem_to_gmem(slots.at[at(t)], gmem.at[b, tokens(n), h, channels(t)])

    finish(
        0, dq_gmem, of_row(numbers, Q_NORM_ROW) * of_row(numbers, Q_NORM_ROW) * p.key, lambda t: t
    )
    finish(1, dk_gmem, of_row(numbers, K_NORM) * of_row(numbers, K_NORM), dstate_at)
    plgpu.wait_smem_to_gmem(0)
