"""The Mosaic GPU kernel of the gradients of a chunk, the states that enter and their gradients known: what one block of one warpgroup
does for a value head. Tiles, products and rows of numbers are those of `pallas_gpu_kernels`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.ops.delta_rule.pallas_gpu_kernels import (BETA, BETA_J, C, GAMMA, K_GAMMA, K_NORM, K_NORM_J, K_RHO, Q_GAMMA, Q_NORM,
                                                             RHO, ROW, across, channels, down, halves, indices, pair_decay, product,
                                                             tokens, transposed)


def row_sums(x, y):
    return jnp.sum(x * y, axis=1)


def spread(x_C):
    """[C, C] a column of numbers along i."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_C, (C, C), (0,)), plgpu.Layout.WGMMA)


def no_numbers():
    return plgpu.layout_cast(jnp.zeros((C,), jnp.float32), ROW)


def load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


class Stream:
    """Tiles of a chunk's state and of its gradient, one after the other, a few on their way at a time: for every block of the value's
    channels those of the state, then those of the gradient; then twice both together, in the order of the key's channels. Where there
    is place for all of them, they stay, and are copied once."""

    def __init__(self, p, copy, refs, arrived):
        self.p, self.copy, self.refs, self.arrived = p, copy, refs, arrived
        self.slots, self.pairs = refs.shape[0], p.key_tiles * p.value_tiles
        self.stay = self.slots == 2 * self.pairs
        for i in range(self.slots):
            self._start(i)

    def _tile(self, i):
        """Its channels of the key and of the value, and whether it is the gradient's."""
        keys, values = self.p.key_tiles, self.p.value_tiles
        if isinstance(i, int) and i < 2 * self.pairs:
            return i % keys, i // (2 * keys), i // keys % 2
        first, pair = i < 2 * self.pairs, jax.lax.rem(jax.lax.div(i, 2), self.pairs)
        return (jnp.where(first, jax.lax.rem(i, keys), jax.lax.div(pair, values)),
                jnp.where(first, jax.lax.div(i, 2 * keys), jax.lax.rem(pair, values)),
                jnp.where(first, jax.lax.rem(jax.lax.div(i, keys), 2), jax.lax.rem(i, 2)))

    def _slot(self, i):
        if self.stay:
            t, c, gradient = self._tile(i)
            i = (2 * c + gradient) * self.p.key_tiles + t
        return jax.lax.rem(i, self.slots)

    def _start(self, i):
        t, c, gradient = self._tile(i)
        slot = self._slot(i)
        self.copy(gradient, t, c, self.refs.at[slot], self.arrived.at[slot])

    def __call__(self, i, count: int, use):
        """`use` of the tiles i … i + count - 1, and what it returns. They come one by one the first time."""
        slots = [self._slot(i + n) for n in range(count)]
        if not self.stay or count == 1:
            for slot in slots:
                plgpu.barrier_wait(self.arrived.at[slot])
        result = use(*(self.refs.at[slot] for slot in slots))
        plgpu.wgmma_wait(0)
        if not self.stay:
            plgpu.commit_smem()  # what was read of the slots, before copies write there
            for n in range(count):
                pl.when(i + n + self.slots < 6 * self.pairs)(functools.partial(self._start, i + n + self.slots))
        return result


def sums_of_products(count: int, body):
    """What `body` returns, given places for sums of products."""
    return pl.run_scoped(body, *[plgpu.ACC((C, C))] * count)


def summed(ref):
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)


def multiply(sum_ref, *pairs):
    """sum += a @ b, not waited for."""
    for a, b in pairs:
        plgpu.wgmma(sum_ref, a, b)


def gradient_kernel(p, q_gmem, k_gmem, v_gmem, do_gmem, dv_gmem, dv_low_gmem, states_gmem, dstates_gmem, numbers_gmem, rows_gmem, *refs):
    """dQ and dK of a value head, dg and dbeta."""
    refs = list(refs)
    inverses_gmem = refs.pop(0) if p.erase else None
    dq_gmem, dk_gmem, dg_gmem = refs[:3]
    q, k, do, dv, e, a, low, dv_low, out, streamed, numbers, rows_ref, sums, arrived, values_here, stream_here = refs[3:]
    b, h, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))
    g = jax.lax.div(h, p.share)
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, arrived)
    for t in range(p.key_tiles):
        copy(q_gmem.at[b, tokens(n), g, channels(t)], q.at[t])
        copy(k_gmem.at[b, tokens(n), g, channels(t)], k.at[t])
    for c in range(p.value_tiles):
        copy(do_gmem.at[b, tokens(n), h, channels(c)], do.at[c])
        copy(dv_gmem.at[b, tokens(n), h, channels(c)], dv.at[c])
    copy(numbers_gmem.at[b, h, n], numbers)
    copy(rows_gmem.at[b, h, n], rows_ref)
    if p.erase:
        for part in range(2):
            copy(inverses_gmem.at[n, b, h, part], a.at[part])

    def copy_state(gradient, t, c, ref, barrier):
        if isinstance(gradient, int):
            source = (states_gmem, dstates_gmem)[gradient]
            return plgpu.copy_gmem_to_smem(source.at[n, b, h, channels(t), channels(c)], ref, barrier)
        for i, gmem in enumerate((states_gmem, dstates_gmem)):
            start = functools.partial(plgpu.copy_gmem_to_smem, gmem.at[n, b, h, channels(t), channels(c)], ref, barrier)
            pl.when(gradient == i)(start)

    stream = Stream(p, copy_state, streamed, stream_here)
    plgpu.barrier_wait(arrived)

    # E, and what pairs of rows take of E, dO and dV
    def pairs_of_values(ov, rv):  # dO E^T, dV E^T
        def step(c, carry):
            enter, written = carry  # [C] along i
            plgpu.copy_gmem_to_smem(v_gmem.at[b, tokens(n), h, channels(c)], low, values_here)
            plgpu.copy_gmem_to_smem(dv_low_gmem.at[b, tokens(n), h, channels(c)], dv_low, values_here)

            def read(which):
                def reads(read_ref):
                    @pl.loop(0, p.key_tiles)
                    def _(t):
                        use = lambda tile: multiply(read_ref, (k.at[t], tile))
                        stream((2 * c + which) * p.key_tiles + t, 1, use)
                    return summed(read_ref)
                return sums_of_products(1, reads)

            ks = down(numbers, K_GAMMA) * read(0)
            plgpu.barrier_wait(values_here)
            if p.erase:
                enter = enter - row_sums(ks, load_tile(dv.at[c])) - row_sums(ks, load_tile(dv_low))
                e[c] = (load_tile(low) - ks).astype(jnp.bfloat16)
                plgpu.commit_smem()
                errors = product((a.at[0], e.at[c]), (a.at[1], e.at[c]))
            else:
                errors = load_tile(low)
            e[c], low[...] = halves(errors)
            plgpu.commit_smem()
            written = written + row_sums(read(1), errors)
            high, rest = transposed(e.at[c]), transposed(low)
            multiply(ov, (do.at[c], high))
            if p.erase:
                multiply(rv, (dv.at[c], high), (dv_low, high), (dv.at[c], rest))
            plgpu.wgmma_wait(0)
            return enter, written

        enter, written = jax.lax.fori_loop(0, p.value_tiles, step, (no_numbers(), no_numbers()))
        return summed(ov), summed(rv), enter, written

    ov, rv, enter, written = sums_of_products(2, pairs_of_values)

    # pairs of rows
    i, j = indices()
    column = pair_decay(rows_ref, i, j) * across(numbers, K_NORM_J)
    ov = ov * down(numbers, Q_NORM) * column
    a[0] = (ov * across(rows_ref, BETA_J)).astype(jnp.bfloat16)
    if p.erase:
        # The decays carry the sign: jax 0.11.2 was seen to give zeros for minus a fresh sum of products on sm_90.
        rv = jnp.where(i > j, rv, 0.0) * (-down(numbers, K_NORM) * column)
        a[1] = (rv * across(rows_ref, BETA_J)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    pairs = ov * product(*((q.at[t], transposed(k.at[t])) for t in range(p.key_tiles)))
    if p.erase:
        pairs = pairs + rv * product(*((k.at[t], transposed(k.at[t])) for t in range(p.key_tiles)))
    written = written * plgpu.load(rows_ref.at[RHO], layout=ROW) * plgpu.load(numbers.at[K_NORM], layout=ROW)
    sums[1] = jnp.sum(pairs + jnp.where(i == j, spread(written), 0.0), axis=0)
    low[...], out[...] = halves(pairs * across(rows_ref, BETA_J))
    dv_low[...] = jnp.where(i < j, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()
    before = product((low, dv_low), (out, dv_low))  # column t: the sum over columns before t
    leave = written * plgpu.load(rows_ref.at[BETA], layout=ROW)
    sums[0] = jnp.sum(jnp.where(i >= j, before + spread(enter), spread(leave)), axis=0)

    # queries, then keys
    def finish(gmem, gradients, rows, norm_squared):
        if p.normalize:
            inner = 0.0
            for t in range(p.key_tiles):
                inner = inner + row_sums(gradients[t], load_tile(rows.at[t]))
            gradients = [x - spread(norm_squared * inner) * load_tile(rows.at[t]) for t, x in enumerate(gradients)]
        for t, x in enumerate(gradients):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[...] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, gmem.at[b, tokens(n), h, channels(t)])

    norm = lambda row: plgpu.load(numbers.at[row], layout=ROW)
    gradients, kept, enter = [], no_numbers(), no_numbers()
    for t in range(p.key_tiles):
        def reads(read, kept):
            def step(c, kept):
                def use(state, dstate):
                    multiply(read, (do.at[c], transposed(state)))
                    return row_sums(load_tile(state), load_tile(dstate))
                return kept + stream(2 * ((p.key_tiles + t) * p.value_tiles + c), 2, use)
            kept = jax.lax.fori_loop(0, p.value_tiles, step, kept)
            return summed(read), kept
        read, kept = sums_of_products(1, functools.partial(reads, kept=kept))
        read = down(numbers, Q_GAMMA) * read
        enter = enter + row_sums(read, load_tile(q.at[t]))
        gradients.append(read + product((a.at[0], k.at[t])))
    sums[0] = sums[0] + jnp.sum(jnp.where(i >= j, spread(enter), 0.0) + spread(rows_ref[GAMMA, C - 1] * kept), axis=0)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums, dg_gmem.at[b, h, n])
    finish(dq_gmem, gradients, q, norm(Q_NORM) * norm(Q_NORM) * p.key)
    gradients = []
    for t in range(p.key_tiles):
        def reads(read, wrote):
            @pl.loop(0, p.value_tiles)
            def _(c):
                def use(state, dstate):
                    multiply(wrote, (e.at[c], transposed(dstate)))
                    if p.erase:
                        multiply(read, (dv.at[c], transposed(state)))
                stream(2 * ((2 * p.key_tiles + t) * p.value_tiles + c), 2, use)
            return summed(read), summed(wrote)
        read, wrote = sums_of_products(2, reads)
        gradient = down(numbers, K_RHO) * wrote
        if p.erase:
            gradient = gradient - down(numbers, K_GAMMA) * read
        pairs = [(transposed(a.at[0]), q.at[t]), (transposed(a.at[1]), k.at[t]), (a.at[1], k.at[t])]
        gradients.append(gradient + product(*pairs[: 1 + 2 * p.erase]))
    finish(dk_gmem, gradients, k, norm(K_NORM) * norm(K_NORM))
    plgpu.wait_smem_to_gmem(0)
