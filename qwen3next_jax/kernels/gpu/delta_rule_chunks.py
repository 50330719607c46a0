"""The Mosaic GPU kernel of what a chunk makes by itself (sm_90a): norms, decays, P beta and the
inverse of I + M beta. One block of one warpgroup takes a chunk of a key head, with all its value
heads. The algebra is that of docs/delta_rule.md, "In terms of E".
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu.delta_rule_tiles import (
    BETA,
    BETA_J,
    DOCUMENT,
    GAMMA,
    K_GAMMA,
    K_NORM,
    K_NORM_J,
    K_RHO,
    PARTS,
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
    high_and_low,
    indices,
    products,
    put,
    same_document,
    tokens,
    transposed,
    with_sums,
)
from qwen3next_jax.ops.delta_rule import chunk_math

LOG2_E = 1.4426950408889634
# columns of the smallest product, which are those that an operand of 32 swizzled bytes has
NARROW = 16


def half_products(p, a, b_refs, meanwhile=lambda: None):
    """[C, columns] float32 a @ b, a in halves in registers, b in halves in shared memory;
    `meanwhile` is done while they run.
    """

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
    i, j = (
        plgpu.broadcasted_iota(jnp.int32, (C, NARROW), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
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
    return jax.lax.rsqrt(
        jnp.sum(jnp.where(i == j, on_diagonal(squares), 0.0), axis=1) + chunk_math.NORM_EPSILON
    )


def unit_lower_inverse(p, l, l_refs, x_refs, blocks_refs):
    """(I + L)^{-1} into x_refs, by the ladder of `inverse.py`: X <- X + X (-L) X in the lower
    left quarter of each 2m diagonal block.

    X stays in registers, in blocks of 16: x has the four of the diagonal, one below the other.
    As the left operand they are spread over the diagonal of [C, C] again; the right operand has
    its blocks one below the other, too. l_refs has in its first 16 columns those of -L on the
    diagonal, then those left of the second and the fourth, then all of the lower left quarter.
    """
    block, i, j = blocks()
    ones = [jnp.where(block == n, 1.0, 0.0).astype(jnp.bfloat16) for n in range(C // NARROW)]

    def spread(pair, up: int = 0):
        return [jnp.concatenate([x * one for one in ones[up:]], axis=1) for x in pair]

    diagonal = on_diagonal(l)
    beside = choose(None, l[:, columns(0)], None, l[:, columns(2)])
    put(l_refs, *high_and_low(-jnp.concatenate([diagonal, beside, l[:, : C // 2]], axis=1)))
    first, second, half = l_refs.at[:, :, columns(0)], l_refs.at[:, :, columns(1)], slice(C // 2, C)
    x = jnp.where(i == j, 1.0, jnp.where(i ^ j == 1, -diagonal, 0.0))
    for m in (2, 4, 8):
        pair = high_and_low(x)
        t = half_products(p, spread(pair), first, lambda: put(blocks_refs, *pair))
        # the quarter: above the diagonal it is zero anyway
        t = jnp.where((i ^ j) // m == 1, t, 0.0)
        x = x + half_products(p, spread(high_and_low(t)), blocks_refs)
    pair = high_and_low(x)
    t = half_products(p, spread(pair), second, lambda: put(blocks_refs, *pair))
    below = half_products(p, spread(high_and_low(t), up=1), blocks_refs.at[:, : C - NARROW])
    left = jnp.concatenate([choose(x, below), choose(None, x)], axis=1)
    right = high_and_low(
        jnp.concatenate([choose(None, None, x, below), choose(None, None, None, x)], axis=1)
    )
    left_refs, right_refs = (x_refs.at[:, :, n] for n in (slice(C // 2), half))

    def both():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # P beta, which x_refs has had until now
        put(left_refs, *high_and_low(left))
        put(right_refs, *right)

    t = half_products(p, right, l_refs.at[:, half, half], both)
    put(
        left_refs,
        *high_and_low(left + half_products(p, high_and_low(t), left_refs.at[:, : C // 2])),
    )


def chunk_kernel(p, q_gmem, k_gmem, rows_gmem, numbers_gmem, p_gmem, *refs):
    """Of every value head of a key head: norms and decays, P beta, and the inverse where there
    is a place for it.
    """
    (
        *inverses_gmem,
        (q, qk_ref),
        (k, kk_ref),
        l,
        x,
        blocks_refs,
        rows_refs,
        numbers,
        keys_here,
        rows_here,
    ) = refs
    b, g, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))

    def bring_rows(head):
        slot = head % 2
        plgpu.copy_gmem_to_smem(
            rows_gmem.at[b, g * p.share + head, n], rows_refs.at[slot], rows_here.at[slot]
        )

    for t in range(p.key_tiles):
        plgpu.copy_gmem_to_smem(q_gmem.at[b, tokens(n), g, channels(t)], q.at[t], keys_here)
        plgpu.copy_gmem_to_smem(k_gmem.at[b, tokens(n), g, channels(t)], k.at[t], keys_here)
    bring_rows(0)
    plgpu.barrier_wait(keys_here)
    against = lambda rows, others: [
        (rows.at[t], transposed(others.at[t])) for t in range(p.key_tiles)
    ]
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

    # What all value heads share: the products of normalized queries and keys with keys, of a
    # document and not of the future.
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
        column = jnp.exp2(
            jnp.minimum(down(here, TOTAL) * LOG2_E - across(here, TOTAL_J) * LOG2_E, 126.0)
        ) * across(here, BETA_J)
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
            unit_lower_inverse(
                p,
                plgpu.load(kk_ref, layout=plgpu.Layout.WGMMA, optimized=False) * column,
                l,
                x,
                blocks_refs,
            )
            for part in range(2):
                plgpu.copy_smem_to_gmem(x.at[part], inverses_gmem[0].at[n, b, h, part])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
