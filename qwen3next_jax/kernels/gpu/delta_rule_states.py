"""The Mosaic GPU kernels of the passes of the state (sm_90a), chunk after chunk, forward and
backward. A block takes one or two tiles of 64 value channels of a value head, a warpgroup each,
and has one that copies. The algebra is that of docs/delta_rule.md, "In terms of E".
"""

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
    across,
    channels,
    high_and_low,
    tokens,
    transposed,
    with_sums,
)


def copies_and_chunks(p, loads, arrived, read, first_to_last: bool, chunk, first, store):
    """The last warpgroup copies: `loads(n, slot, barrier)` for every chunk of the piece, some
    ahead, once all others have `read` what was in the slot. They take the chunks in turn:
    `store` of what `chunk(n, slot, carry)` leaves, from `first()`.
    """
    length, w = p.chunks // p.pieces, jax.lax.axis_index("warpgroups")
    start = jax.lax.div(jax.lax.axis_index("batch"), p.batch) * length
    number = lambda i: start + (i if first_to_last else length - 1 - i)

    @pl.when(w == p.warpgroups)
    def _():
        if not p.interpret:
            plgpu.set_max_registers(24 if no_registers(p) else 40, action="decrease")

        @pl.loop(0, length)
        def _(i):
            slot = jax.lax.rem(i, p.stages)
            pl.when(i >= p.stages)(lambda: plgpu.barrier_wait(read.at[slot]))
            loads(number(i), slot, arrived.at[slot])

    @pl.when(w < p.warpgroups)
    def _():
        if not p.interpret:
            plgpu.set_max_registers(240 if no_registers(p) else 232, action="increase")

        def step(i, carry):
            slot = jax.lax.rem(i, p.stages)
            # else the compiler keeps the addresses of all that lies there for all chunks
            if p.stages == 1:
                slot = jax.lax.optimization_barrier(slot)
            plgpu.barrier_wait(arrived.at[slot])
            carry = chunk(number(i), slot, carry)
            plgpu.commit_smem()  # what was read of the slot, before a copy writes there
            plgpu.barrier_arrive(read.at[slot])
            return carry

        store(jax.lax.fori_loop(0, length, step, first()))
        plgpu.wait_smem_to_gmem(0)


def first_state(p, gmem, h, c):
    """What makes the state that enters the piece, transposed: the block c of the value's
    channels by all of the key, float32. Of a map zeros for the value's blocks, and the columns
    of one for the key's behind them.
    """

    def known():
        return plgpu.load(
            gmem.at[jax.lax.axis_index("batch"), h, channels(c)],
            layout=plgpu.Layout.WGMMA,
            optimized=False,
        )

    def of_map():
        i, j = (
            plgpu.broadcasted_iota(jnp.int32, (C, p.key), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        return jnp.where(i + (c - p.map_tiles[0]) * C == j, 1.0, 0.0)

    return of_map if p.maps else known


def store_state(gmem, h, c):
    def store(state):
        gmem[jax.lax.axis_index("batch"), h, channels(c)] = state

    return store


def place(p):
    """(batch, value head, the warpgroup and its value tile)."""
    b, h, c, w = (
        jax.lax.axis_index(name) for name in ("batch", "heads", "value_tiles", "warpgroups")
    )
    return jax.lax.rem(b, p.batch), h, w, c * p.warpgroups + w


def load_transposed(tile):
    return plgpu.load(transposed(tile), layout=plgpu.Layout.WGMMA)


def send_transposed(x, tile, target, in_flight: int):
    """An array to memory through a tile, once all but so many copies before have left theirs."""
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    transposed(tile)[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def no_registers(p) -> bool:
    """Whether the state takes half of the registers: then it is a left operand from shared
    memory, and less is done at a time.
    """
    return p.key > 128


def operand(p, state, tile, target, in_flight: int):
    """A state as a left operand of products, and what sends it to memory, if anywhere."""
    if not no_registers(p):
        x = state.astype(jnp.bfloat16)
        return x, lambda: None if target is None else send_transposed(x, tile, target, in_flight)
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    for t in range(p.key_tiles):
        transposed(tile.at[channels(t)])[...] = state[:, t * C : (t + 1) * C].astype(jnp.bfloat16)
    plgpu.commit_smem()
    return transposed(
        tile
    ), lambda: None if target is None else plgpu.copy_smem_to_gmem(tile, target)


def loads_of(p, b, h, sources, targets):
    """What copies chunk n of a value head, the value tiles of all warpgroups, with what its key
    head and the chunk's numbers are, into a slot; not what has no source.
    """

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
    """The state of a value head, 64 of its value channels in a warpgroup, over all chunks of a
    piece; o beside it. For a map the state alone, which has blocks of channels behind the
    value's: without values, from one.

    State, errors and o are transposed, channels of the value by …: each is a left operand, which
    wgmma takes from registers, so that nothing that the next chunk waits for goes through shared
    memory.
    """
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
    loads = loads_of(
        p,
        b,
        h,
        (q_gmem, k_gmem, v_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
        (q, k, v, p_ref, numbers, rows_ref, a),
    )

    tight = no_registers(p)

    def chunk(n, slot, state):
        def products(of_k, outputs, errors, after):
            here = numbers.at[slot]
            before, send = operand(
                p,
                state,
                s.at[w],
                states_gmem.at[n, b, h, :, channels(c)] if p.save else None,
                in_flight=1,
            )
            if p.erase:
                of_k.add(before, transposed(k.at[slot]))
            if not (p.maps or tight):
                outputs.add(before, transposed(q.at[slot]))
            send()
            values = load_transposed(v.at[slot, w]).astype(jnp.float32)
            if p.maps:
                values = values * (c < p.map_tiles[0]).astype(jnp.float32)
            if p.erase:
                values = (
                    values - across(here, K_GAMMA) * of_k(0 if p.maps or tight else 1)
                ).astype(jnp.bfloat16)
                for part in range(2):
                    errors.add(values, transposed(a.at[slot, part]))
            if tight and not p.maps:
                outputs.add(before, transposed(q.at[slot]))
            if not p.maps:
                outputs.start(across(here, Q_GAMMA) * outputs(0 if tight else 2 * p.erase))
            after.start(rows_ref[slot, GAMMA, C - 1] * state)
            if p.erase:
                values = errors()
            parts = (
                jax.lax.optimization_barrier(high_and_low(values))
                if tight
                else high_and_low(values)
            )
            if not p.maps:
                for part in parts:
                    outputs.add(part, transposed(p_ref.at[slot]))
            send_outputs = lambda in_flight: (
                None
                if p.maps
                else send_transposed(
                    outputs(in_flight),
                    o.at[w],
                    o_gmem.at[b, tokens(n), h, channels(c)],
                    in_flight=int(p.save),
                )
            )
            if tight:  # o, then of E what its parts hold
                send_outputs(0)
                values = sum(part.astype(jnp.float32) for part in parts)
            for part in high_and_low(across(here, K_RHO) * values):
                after.add(part, k.at[slot])
            if not tight:
                send_outputs(2)
            return after()

        return with_sums(p, (C, C, C, p.key), products)

    copies_and_chunks(
        p,
        loads,
        arrived,
        read_all,
        True,
        chunk,
        first_state(p, initial_gmem, h, c),
        store_state(final_gmem, h, c),
    )


def backward_kernel(p, q_gmem, k_gmem, do_gmem, numbers_gmem, rows_gmem, p_gmem, *refs):
    """The gradient of the state of a value head, 64 of its value channels in a warpgroup, over
    all chunks of a piece from the last; dV beside it, in halves. For a map the gradient alone,
    from zero. All transposed, as in `forward_kernel`.
    """
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dfinal_gmem = None if p.maps else refs.pop(0)
    dinitial_gmem = refs.pop(0)
    dv_gmem, dv_low_gmem, dstates_gmem = [None] * 3 if p.maps else (refs.pop(0) for _ in range(3))
    b, h, w, c = place(p)
    q, k, do, p_ref, a, numbers, rows_ref, ds, dv, arrived, read_all = refs
    loads = loads_of(
        p,
        b,
        h,
        (q_gmem, k_gmem, do_gmem, p_gmem, numbers_gmem, rows_gmem, inverses_gmem),
        (q, k, do, p_ref, numbers, rows_ref, a),
    )

    tight = no_registers(p)

    def chunk(n, slot, dstate):
        def products(of_k, of_p, values, after):
            here = numbers.at[slot]
            target = None if p.maps else dstates_gmem.at[n, b, h, :, channels(c)]
            before, send = operand(p, dstate, ds.at[w], target, in_flight=2)
            of_k.add(before, transposed(k.at[slot]))
            if tight:
                of_p.start(across(here, K_RHO) * of_k())
            doutputs = load_transposed(do.at[slot, w])
            of_p.add(doutputs, p_ref.at[slot])
            send()
            dvalues = of_p() if tight else across(here, K_RHO) * of_k(1) + of_p()
            if p.erase:
                high, low = high_and_low(dvalues)
                for x, part in ((high, 0), (high, 1), (low, 0)):
                    values.add(x, a.at[slot, part])
            after.start(rows_ref[slot, GAMMA, C - 1] * dstate)
            after.add(
                (across(here, Q_GAMMA) * doutputs.astype(jnp.float32)).astype(jnp.bfloat16),
                q.at[slot],
            )
            if p.erase:
                dvalues = values(1)
                after.add((-across(here, K_GAMMA) * dvalues).astype(jnp.bfloat16), k.at[slot])
            if not p.maps:
                for i, (x, gmem) in enumerate(zip(high_and_low(dvalues), (dv_gmem, dv_low_gmem))):
                    send_transposed(
                        x, dv.at[w, i], gmem.at[b, tokens(n), h, channels(c)], in_flight=2
                    )
            return after()

        return with_sums(p, (C, C, C, p.key), products)

    copies_and_chunks(
        p,
        loads,
        arrived,
        read_all,
        False,
        chunk,
        first_state(p, dfinal_gmem, h, c),
        store_state(dinitial_gmem, h, c),
    )
