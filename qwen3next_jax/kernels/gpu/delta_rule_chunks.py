"""The Mosaic GPU kernel that computes the arrays of a chunk that do not depend on the state
(sm_90a): norms, decays, P beta and the inverse of I + M beta.

A block of the grid has one warpgroup and computes one chunk of a key head and of all value heads
that share this key head. The formulas are in docs/delta_rule.md, "In terms of E".

C = 64 tokens per chunk; a matrix [C, C] has rows i and columns j.
"""

import functools
from typing import Any, NamedTuple

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
    PART_PAIRS,
    Q_GAMMA,
    Q_NORM,
    RHO,
    ROW,
    TOTAL,
    TOTAL_J,
    C,
    channel_slice,
    high_and_low,
    load_over_columns,
    load_over_rows,
    named_refs,
    row_and_column_indices,
    row_memory,
    same_document_mask,
    store_tiles,
    sums_of_products,
    tile_memory,
    token_slice,
    transposed_ref,
    with_accumulators,
)
from qwen3next_jax.ops.delta_rule import chunk_math

LOG2_E = 1.4426950408889634
NARROW = 16  # the columns of a product's narrowest operand, swizzled in rows of 32 bytes


def scratch_memory(p) -> list:
    """Returns the shared memory and the barriers of `chunk_kernel`."""
    product = plgpu.SMEM(
        (C, C),
        jnp.float32,
        transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    )
    keys = plgpu.RefUnion(tile_memory(p.key_tile_count), product)
    narrow = functools.partial(tile_memory, 2, columns=NARROW)
    return [
        keys,
        keys,
        narrow(),
        narrow(),
        narrow(width=NARROW),
        row_memory(2, 8),
        row_memory(6),
        plgpu.Barrier(num_arrivals=2 * p.key_tile_count),
        plgpu.Barrier(num_barriers=2),
    ]


def high_low_product(p, a, b_refs, meanwhile=lambda: None):
    """Returns the product of two matrices, [C, columns] in float32. Each matrix is the sum of a
    high and a low part. The product of the low parts of both matrices is left out, because it is
    negligible.

    Args:
      p: the `Problem`.
      a: the high and the low part of the left matrix, in registers.
      b_refs: [2, …, columns] in shared memory, the high and the low part of the right matrix.
      meanwhile: a function that is called while the tensor cores compute the products.
    """

    def accumulate(total):
        for x, y in PART_PAIRS:
            total.add_product(a[x], b_refs.at[y])
        meanwhile()
        return total.wait_and_read()

    return with_accumulators(p, [b_refs.shape[2]], accumulate)


def column_block_slice(n: int):
    """Returns the slice of the columns from 16 n to 16 n + 15."""
    return slice(n * NARROW, (n + 1) * NARROW)


def block_row_column_indices():
    """Returns three arrays [C, 16] for four 16 x 16 blocks that lie below each other: the index of
    the block, the index of the row inside the block, and the index of the column.
    """
    i, j = (
        plgpu.broadcasted_iota(jnp.int32, (C, NARROW), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    return i // NARROW, i % NARROW, j


def row_block_n_of_array_n(*arrays):
    """Returns [C, 16], four blocks of 16 rows. Block n consists of the rows 16 n to 16 n + 15 of
    array n, [C, 16]. If array n is None or missing, block n is zero.
    """
    block, result = block_row_column_indices()[0], 0.0
    for n, x in enumerate(arrays):
        result = result if x is None else jnp.where(block == n, x, result)
    return result


def stack_diagonal_blocks(x):
    """Returns the 16 x 16 blocks on the diagonal of x [C, C], stacked vertically: [C, 16]."""
    return row_block_n_of_array_n(*(x[:, column_block_slice(n)] for n in range(C // NARROW)))


def inverse_norms(squares):
    """Returns [C]: for every row of a matrix x, 1 / sqrt(sum of squares + 1e-6). The argument
    `squares` is x @ x.T, [C, C].
    """
    _, i, j = block_row_column_indices()
    return jax.lax.rsqrt(
        jnp.sum(jnp.where(i == j, stack_diagonal_blocks(squares), 0.0), axis=1)
        + chunk_math.NORM_EPSILON
    )


def unit_lower_inverse(p, l, l_refs, x_refs, diagonal_refs):
    """Writes X = (I + L)^{-1} to `x_refs`, as a high and a low part.

    Like `diagonal_block_inverses` in `ops/delta_rule/inverse.py`, the function starts with the
    inverses of diagonal blocks of m = 2 rows. Each step doubles m: it adds X (-L) X to X in the
    lower left quarter of each diagonal block of 2m rows.

    X stays in registers. Until m is 16, X is stored as an array [C, 16]: the four diagonal blocks
    of 16 rows, below each other. In shared memory, as the right operand of a product, X is an array
    [C, 16], too. For a left operand, `to_diagonal` moves the four blocks to the diagonal of a
    matrix [C, C].

    Args:
      p: the `Problem`.
      l: [C, C] float32, L, which is zero on and above the diagonal.
      l_refs: [2, C, C] in shared memory, for the high and the low part of -L. The columns 0 to 15
        get the diagonal blocks, the columns 16 to 31 the blocks to the left of the second and the
        fourth diagonal block, and the columns 32 to 63 the left half of -L.
      x_refs: [2, C, C] in shared memory, for the result.
      diagonal_refs: [2, C, 16] in shared memory, for the diagonal blocks of X as a right operand.
    """
    block, i, j = block_row_column_indices()
    ones = [jnp.where(block == n, 1.0, 0.0).astype(jnp.bfloat16) for n in range(C // NARROW)]

    def to_diagonal(parts, first: int = 0):
        """Returns one matrix [C, C] for each array [C, 16] in `parts`. The four 16 x 16 blocks of
        the array become the diagonal blocks of the matrix. The first 16 · `first` columns of the
        matrix are left out.
        """
        return [jnp.concatenate([x * one for one in ones[first:]], axis=1) for x in parts]

    diagonal = stack_diagonal_blocks(l)
    left_blocks = row_block_n_of_array_n(
        None, l[:, column_block_slice(0)], None, l[:, column_block_slice(2)]
    )
    store_tiles(
        l_refs, *high_and_low(-jnp.concatenate([diagonal, left_blocks, l[:, : C // 2]], axis=1))
    )
    first, second, half = (
        l_refs.at[:, :, column_block_slice(0)],
        l_refs.at[:, :, column_block_slice(1)],
        slice(C // 2, C),
    )
    x = jnp.where(i == j, 1.0, jnp.where(i ^ j == 1, -diagonal, 0.0))
    for m in (2, 4, 8):
        parts = high_and_low(x)
        t = high_low_product(
            p, to_diagonal(parts), first, lambda: store_tiles(diagonal_refs, *parts)
        )
        # Keeps only the lower left quarter of each diagonal block of 2m rows.
        t = jnp.where((i ^ j) // m == 1, t, 0.0)
        x = x + high_low_product(p, to_diagonal(high_and_low(t)), diagonal_refs)
    parts = high_and_low(x)
    t = high_low_product(p, to_diagonal(parts), second, lambda: store_tiles(diagonal_refs, *parts))
    below = high_low_product(
        p, to_diagonal(high_and_low(t), first=1), diagonal_refs.at[:, : C - NARROW]
    )
    left = jnp.concatenate(
        [row_block_n_of_array_n(x, below), row_block_n_of_array_n(None, x)], axis=1
    )
    right = high_and_low(
        jnp.concatenate(
            [
                row_block_n_of_array_n(None, None, x, below),
                row_block_n_of_array_n(None, None, None, x),
            ],
            axis=1,
        )
    )
    left_refs, right_refs = (x_refs.at[:, :, n] for n in (slice(C // 2), half))

    def store_halves():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a copy of P beta may still read x_refs
        store_tiles(left_refs, *high_and_low(left))
        store_tiles(right_refs, *right)

    t = high_low_product(p, right, l_refs.at[:, half, half], store_halves)
    store_tiles(
        left_refs,
        *high_and_low(left + high_low_product(p, high_and_low(t), left_refs.at[:, : C // 2])),
    )


class _Refs(NamedTuple):
    """The references of `chunk_kernel`: inputs and outputs in global memory (`…_gmem`), then the
    shared memory and the barriers of `scratch_memory`.
    """

    q_gmem: Any
    k_gmem: Any
    gate_rows_gmem: Any
    norm_rows_gmem: Any
    p_beta_gmem: Any
    inverses_gmem: Any  # None if the inverse is no output
    q_or_qk: Any  # pair: the tiles of q, and Q K^T in the same memory
    k_or_kk: Any  # pair: the tiles of k, and K K^T in the same memory
    negated_l_parts: Any  # the high and the low part of -M beta
    p_beta_or_inverse_parts: Any  # P beta, then the high and the low part of the inverse
    inverse_diagonal_parts: Any  # `diagonal_refs` of `unit_lower_inverse`
    gate_rows: Any
    norm_rows: Any  # the 6 norm rows that `delta_rule_tiles` lists
    q_and_k_arrived: Any
    gate_rows_arrived: Any


def chunk_kernel(p, *refs):
    """Computes one chunk of a key head: for each of its value heads the norm rows (see
    `delta_rule_tiles`), P beta and, if there is an output for it, the inverse of I + M beta.
    """
    has_inverses = len(refs) == len(_Refs._fields)
    refs = named_refs(_Refs, refs, missing="" if has_inverses else "inverses_gmem")
    (q, qk_ref), (k, kk_ref), norm_rows = refs.q_or_qk, refs.k_or_kk, refs.norm_rows
    b, g, n = (jax.lax.axis_index(name) for name in ("batch", "heads", "chunks"))

    def load_rows(head):
        slot = head % 2
        plgpu.copy_gmem_to_smem(
            refs.gate_rows_gmem.at[b, g * p.heads_per_key + head, n],
            refs.gate_rows.at[slot],
            refs.gate_rows_arrived.at[slot],
        )

    for t in range(p.key_tile_count):
        plgpu.copy_gmem_to_smem(
            refs.q_gmem.at[b, token_slice(n), g, channel_slice(t)], q.at[t], refs.q_and_k_arrived
        )
        plgpu.copy_gmem_to_smem(
            refs.k_gmem.at[b, token_slice(n), g, channel_slice(t)], k.at[t], refs.q_and_k_arrived
        )
    load_rows(0)
    plgpu.barrier_wait(refs.q_and_k_arrived)
    against = lambda left, right: [
        (left.at[t], transposed_ref(right.at[t])) for t in range(p.key_tile_count)
    ]
    qk, kk, qq = sums_of_products(against(q, k), against(k, k), against(q, q))
    if p.normalize_qk:
        k_norm, q_norm = inverse_norms(kk), inverse_norms(qq)
    else:
        k_norm = q_norm = plgpu.layout_cast(jnp.ones((C,), jnp.float32), ROW)
    plgpu.barrier_wait(refs.gate_rows_arrived.at[0])
    row = lambda slot, i: plgpu.load(refs.gate_rows.at[slot, i], layout=ROW)
    q_norm = jnp.where(row(0, DOCUMENT) >= 0, q_norm * p.unpadded_key_width**-0.5, 0.0)
    norm_rows[K_NORM], norm_rows[K_NORM_J], norm_rows[Q_NORM] = k_norm, k_norm, q_norm
    plgpu.commit_smem()

    # All value heads share the products of normalised queries with keys and of keys with keys. The
    # products are zero between documents and for keys after the query.
    i, j = row_and_column_indices()
    mask, norm = (
        same_document_mask(refs.gate_rows.at[0]) & (i >= j),
        load_over_rows(norm_rows, K_NORM_J),
    )
    qk = jnp.where(mask, qk * (load_over_columns(norm_rows, Q_NORM) * norm), 0.0)
    kk = jnp.where(mask & (i > j), kk * (load_over_columns(norm_rows, K_NORM) * norm), 0.0)
    # These products go to shared memory, because three blocks share a multiprocessor, which leaves
    # only 168 registers for each thread.
    qk_ref[...], kk_ref[...] = qk, kk

    @pl.loop(0, p.heads_per_key)
    def _(head):
        slot, h = head % 2, g * p.heads_per_key + head
        head_rows = refs.gate_rows.at[slot]

        @pl.when(head > 0)
        def _():
            plgpu.barrier_wait(refs.gate_rows_arrived.at[slot])

        # Where qk and kk are masked they are zero, so the exponential there only has to be finite.
        column = jnp.exp2(
            jnp.minimum(
                load_over_columns(head_rows, TOTAL) * LOG2_E
                - load_over_rows(head_rows, TOTAL_J) * LOG2_E,
                126.0,
            )
        ) * load_over_rows(head_rows, BETA_J)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the previous head is copied
        norm_rows[K_GAMMA], norm_rows[Q_GAMMA] = (
            row(slot, GAMMA) * k_norm,
            row(slot, GAMMA) * q_norm,
        )
        norm_rows[K_RHO] = row(slot, RHO) * row(slot, BETA) * k_norm
        store_tiles(
            refs.p_beta_or_inverse_parts,
            plgpu.load(qk_ref, layout=plgpu.Layout.WGMMA, optimized=False) * column,
        )
        plgpu.copy_smem_to_gmem(norm_rows, refs.norm_rows_gmem.at[b, h, n])
        plgpu.copy_smem_to_gmem(refs.p_beta_or_inverse_parts.at[0], refs.p_beta_gmem.at[b, h, n])

        @pl.when(head + 1 < p.heads_per_key)
        def _():
            load_rows(head + 1)

        if refs.inverses_gmem is not None:
            unit_lower_inverse(
                p,
                plgpu.load(kk_ref, layout=plgpu.Layout.WGMMA, optimized=False) * column,
                refs.negated_l_parts,
                refs.p_beta_or_inverse_parts,
                refs.inverse_diagonal_parts,
            )
            for part in range(2):
                plgpu.copy_smem_to_gmem(
                    refs.p_beta_or_inverse_parts.at[part], refs.inverses_gmem.at[n, b, h, part]
                )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
