"""Grouped matrix products: the rows are sorted by group, and each row is multiplied by the matrix
of its group, as in a mixture of experts.

The implementation "blocked" copies the rows into blocks. Each block holds rows of one group, padded
with zeros. The implementation "blocked" then computes batched products of blocks and matrices, so
each row is multiplied by a single matrix. `jax.lax.ragged_dot`, which XLA compiles well for TPUs,
multiplies each row by all matrices on CPUs and GPUs.

R rows, C rows per block, D input width, F output width, E groups (experts), G = min(E, R) the
largest number of groups that can have rows, I expert width, n batches of K blocks each, W groups
per batch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import checks
from qwen3next_jax.ops.blocks import accumulation_dtype
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)

IMPLEMENTATIONS = ("blocked", "ragged_dot")


class BlockSizes(NamedTuple):
    """How the implementation "blocked" splits rows into blocks.

    Attributes:
      largest_block_rows: the largest number of rows in a block.
      blocks_per_group: the number of blocks into which a group of mean size is split. A group is
        split into fewer blocks if the blocks would have less than `_FULL_TILE` rows. With more
        blocks per group, blocks are shorter, and there is less padding, because the padding of a
        group is shorter than one block.
      batch_weight_elements: for each batch of blocks, the weights of the blocks' groups are copied;
        the copies have at most this number of elements.
    """

    largest_block_rows: int
    blocks_per_group: int
    batch_weight_elements: int


# The fastest of several sizes for 8 to 64 groups and 8192 to 16384 rows, by
# benchmarks/ops/grouped_matmul.py. With these sizes the copied weights stay in the cache.
_CPU = BlockSizes(largest_block_rows=128, blocks_per_group=1, batch_weight_elements=2**20)
# These sizes have not been timed. With long blocks, the weights are copied less often. A batch of
# blocks is one batched product. Few, large products use the chip well, and 2**28 elements are 0.5
# GiB of bfloat16. For 327,680 rows, 64 groups and matrices of 2,048 x 1,024 there are 4 batches.
_GPU = BlockSizes(largest_block_rows=1024, blocks_per_group=4, batch_weight_elements=2**28)
_FULL_TILE = 64  # a product of fewer rows takes no less time


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Returns y with y_r = x_r · w[e] for each row r, where e is the group of row r.

    Args:
      x: [R, D], the rows sorted by group.
      w: [E, D, F], the matrix of each group.
      group_sizes: [E] integers, the number of rows of each group. If the sizes add up to less than
        R, the remaining rows of the result, at its end, are zeros.
      implementation: "blocked", "ragged_dot", or None for the platform's best. None means
        "ragged_dot" on a TPU, tokamax's kernels on a GPU on which the kernels passed their test
        (docs/gpu.md), and "blocked" otherwise.

    Returns:
      y [R, F] in x's dtype, accumulated in float32; differentiable in x and w.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check_arguments(group_sizes, implementation, x=(x, "RD"), w=(w, "EDF"))
    return _differentiable_matmul(
        _choose_implementation(implementation, x, w), x, w, group_sizes.astype(jnp.int32)
    )


def expert_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Applies SwiGLU experts to rows sorted by expert: y_r = (silu(x_r gate_e) · (x_r up_e))
    down_e, where e is the expert of row r.

    Args:
      x: [R, D], the rows sorted by expert.
      gate_up: [E, D, 2, I], the gate matrix of each expert at index 0 and the up matrix at index 1.
      down: [E, I, D], the down matrix of each expert.
      group_sizes: [E] integers, the number of rows of each expert; see `grouped_matmul`.
      implementation: name of the implementation or None; see `grouped_matmul`.

    Returns:
      y [R, D] in x's dtype; differentiable in x, gate_up and down.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check_arguments(
        group_sizes,
        implementation,
        x=(x, "RD"),
        gate_up=(gate_up, ("E", "D", 2, "I")),
        down=(down, "EID"),
    )
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
    chosen = _choose_implementation(implementation, x, gate_up, down)
    return _differentiable_mlp(chosen, x, gate_up, down, group_sizes.astype(jnp.int32))


def _check_arguments(group_sizes, implementation, **arrays):
    checks.check_implementation_name(implementation, IMPLEMENTATIONS)
    checks.check_shapes(**arrays, group_sizes=(group_sizes, "E"))
    checks.check_integers(group_sizes=group_sizes)


# ---- the custom gradient around the chosen implementation


def _choose_implementation(implementation, x, *weights) -> ChosenImplementation:
    return choose_implementation(
        "grouped_matmul", implementation, XLA_IMPLEMENTATIONS, x=x, weights=weights
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_matmul(chosen: ChosenImplementation, x, w, group_sizes):
    return chosen.function_named("matmul")(x, w, group_sizes)


def _matmul_backward(chosen: ChosenImplementation, residuals, dy):
    return *chosen.function_named("gradients")(*residuals, dy), None


_differentiable_matmul.defvjp(
    lambda chosen, *inputs: (_differentiable_matmul(chosen, *inputs), inputs), _matmul_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_mlp(chosen: ChosenImplementation, *inputs):
    return _mlp_forward(chosen, *inputs)[0]


def _mlp_forward(chosen: ChosenImplementation, *inputs):
    if chosen.name == "blocked":
        y, hidden = chosen.function_named("mlp")(*inputs)
    else:
        y, hidden = _mlp_by_matmul(chosen.function_named("matmul"), *inputs)
    return y, (*inputs, hidden)


def _mlp_backward(chosen: ChosenImplementation, residuals, dy):
    if chosen.name == "blocked":
        gradients = chosen.function_named("mlp_gradients")(*residuals, dy)
    else:
        gradients = _mlp_gradients_by_matmul(chosen.function_named("gradients"), *residuals, dy)
    return *gradients, None


_differentiable_mlp.defvjp(_mlp_forward, _mlp_backward)


def _mlp_by_matmul(matmul, x, gate_up, down, group_sizes):
    """Returns y [R, D] and the hidden layer [R, 2I] of `expert_mlp`, computed with the function
    `matmul` of an implementation.
    """
    hidden = matmul(x, gate_up, group_sizes)
    return matmul(_swiglu(hidden), down, group_sizes), hidden


def _mlp_gradients_by_matmul(gradients, x, gate_up, down, group_sizes, hidden, dy):
    """Returns the gradients of x, gate_up and down of `expert_mlp`, computed with the function
    `gradients` of an implementation. `hidden` is the second result of `_mlp_by_matmul`.
    """
    activation, pullback = jax.vjp(_swiglu, hidden)
    da, ddown = gradients(activation, down, group_sizes, dy)
    dx, dgate_up = gradients(x, gate_up, group_sizes, *pullback(da))
    return dx, dgate_up, ddown


def _swiglu(hidden):
    """Returns silu(gate) · up [..., I], computed in float32. The first half of hidden [..., 2I] is
    the gate, the second half is up.
    """
    gate, up = jnp.split(hidden.astype(accumulation_dtype(hidden)), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)


# ---- ragged_dot


def _matmul_by_ragged_dot(x, w, group_sizes):
    return jax.lax.ragged_dot(
        x, w, group_sizes, preferred_element_type=accumulation_dtype(x)
    ).astype(x.dtype)


def _gradients_by_ragged_dot(x, w, group_sizes, dy):
    _, pullback = jax.vjp(lambda x, w: _matmul_by_ragged_dot(x, w, group_sizes), x, w)
    return pullback(dy)


# ---- blocked


class _BlockPlan(NamedTuple):
    """Which rows lie in which blocks. The "rank" of a group is the index of the group among the
    groups that have rows.
    """

    group_of_block: jax.Array  # [n, K] the group of each block
    first_rank_of_batch: jax.Array  # [n] the smallest rank among the W groups of each batch
    block_has_rank: jax.Array  # [n, W, K] whether the block belongs to the group of rank first + w
    row_at_position: jax.Array  # [n, K, C] the index of the row at each position of each block
    position_is_filled: jax.Array  # [n, K, C] whether the position holds that row, not padding
    position_of_row: jax.Array  # [R] the position of each row in the flattened [n, K, C]
    row_has_group: jax.Array  # [R] whether the row belongs to a group
    rank_of_group: (
        jax.Array
    )  # [E] the number of groups with rows from group 0 to this group, minus 1
    largest_group_count: int  # G, the largest number of groups that can have rows


def _rows_per_block(sizes: BlockSizes, rows: int, groups: int) -> int:
    """Returns C, the rows of a block: a power of two that is at most the mean number of rows of a
    group. Larger blocks would have more padding, because the last block of each group is padded.
    """
    mean = rows // groups
    return min(
        1 << (max(mean // sizes.blocks_per_group, min(mean, _FULL_TILE)).bit_length() - 1),
        sizes.largest_block_rows,
    )


def _plan_blocks(sizes: BlockSizes, group_sizes, rows: int, weights: int) -> _BlockPlan:
    """Plans which rows lie in which blocks, for groups of the given sizes.

    Args:
      sizes: the limits for blocks and batches.
      group_sizes: [E], the number of rows of each group.
      rows: R.
      weights: number of elements of the largest matrix of a group.
    """
    groups = min(group_sizes.shape[0], rows)
    size = _rows_per_block(sizes, rows, groups)
    blocks = min(rows // size + groups, rows)  # enough for any group sizes
    batches = -(-blocks // min(blocks, max(sizes.batch_weight_elements // weights, 1)))
    batch = -(-blocks // batches)

    group_G = jnp.argsort(group_sizes == 0, stable=True)[:groups]
    size_G = group_sizes[group_G]
    end_G = jnp.cumsum(size_G)
    blocks_G = -(-size_G // size)
    block_end_G = jnp.cumsum(blocks_G)
    block_start_G = block_end_G - blocks_G

    ends_by = lambda end_G, index: jnp.sum(end_G <= index[..., None], axis=-1)
    block = jnp.arange(batches * batch).reshape(batches, batch)
    # The blocks that no group needs get the last rank and hold no row.
    rank = jnp.minimum(ends_by(block_end_G, block), groups - 1)
    row = ((end_G - size_G)[rank] + (block - block_start_G[rank]) * size)[..., None] + jnp.arange(
        size
    )
    window = min(batch, groups)
    first = jnp.minimum(rank[:, 0], groups - window)

    index = jnp.arange(rows)
    rank_R = jnp.minimum(ends_by(end_G, index), groups - 1)
    position = block_start_G[rank_R] * size + index - (end_G - size_G)[rank_R]
    return _BlockPlan(
        group_G[rank],
        first,
        rank[:, None] == first[:, None, None] + jnp.arange(window)[:, None],
        jnp.minimum(row, rows - 1),
        row < end_G[rank][..., None],
        position,
        index < end_G[-1],
        jnp.cumsum(group_sizes > 0) - 1,
        groups,
    )


def _scan_block_batches(plan: _BlockPlan, rows, weights, step):
    """Runs `step` on one batch of blocks after another. In the shapes of the arguments and results,
    D and F stand for any widths, which differ from array to array.

    Args:
      plan: which rows lie in which blocks.
      rows: tuple of arrays [R, F], which `step` takes in blocks.
      weights: tuple of arrays [E, D, F], one for each array of terms. The sum of the terms of an
        array has the shape and dtype of the array.
      step: function that takes the group of each block, [K], and for each array of `rows` its
        blocks, [K, C, F]. `step` returns a tuple of outputs [K, C, F] and a tuple of terms
        [K, D, F].

    Returns:
      A tuple of the outputs as rows [R, F], with zeros in rows that belong to no group; and a tuple
      of the terms summed over the blocks of each group, [E, D, F].
    """

    def batch(totals, inputs):
        group, first, member, *blocks = inputs
        outputs, terms = step(group, *blocks)
        # If the rows are bfloat16, the sums of terms are rounded to bfloat16 at the end. So the
        # terms may be rounded to the 11 significant bits of tf32 on a GPU.
        precision = (
            jax.lax.Precision.DEFAULT
            if rows[0].dtype == jnp.bfloat16
            else jax.lax.Precision.HIGHEST
        )
        return tuple(
            _add_terms_by_group(total, first, member, term, precision)
            for total, term in zip(totals, terms, strict=True)
        ), outputs

    blocks = (
        jnp.where(plan.position_is_filled[..., None], x[plan.row_at_position], 0) for x in rows
    )
    zeros = tuple(
        jnp.zeros((plan.largest_group_count, *w.shape[1:]), accumulation_dtype(w)) for w in weights
    )
    totals, outputs = jax.lax.scan(
        batch, zeros, (plan.group_of_block, plan.first_rank_of_batch, plan.block_has_rank, *blocks)
    )
    return (
        tuple(
            jnp.where(
                plan.row_has_group[:, None], y.reshape(-1, y.shape[-1])[plan.position_of_row], 0
            )
            for y in outputs
        ),
        tuple(
            jnp.where(
                (jnp.diff(plan.rank_of_group, prepend=-1) > 0)[:, None, None],
                total[plan.rank_of_group],
                0,
            ).astype(w.dtype)
            for total, w in zip(totals, weights)
        ),
    )


def _add_terms_by_group(total, first, member_WK, term, precision):
    """Returns `total` [G, D, F], after adding to total[first + g], for every g < W, the sum of
    term[k] over the blocks k for which member_WK[g, k] is true.
    """
    sums = jnp.einsum("wk,kdf->wdf", member_WK.astype(term.dtype), term, precision=precision)
    old = jax.lax.dynamic_slice_in_dim(total, first, member_WK.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(total, old + sums, first, 0)


def _blocks_times_weights(x_KCD, w_KDF):
    """Returns x w of each block, [K, C, F] in x's dtype."""
    return jnp.einsum(
        "kcd,kdf->kcf", x_KCD, w_KDF, preferred_element_type=accumulation_dtype(x_KCD)
    ).astype(x_KCD.dtype)


def _blocks_times_transposed_weights(y_KCF, w_KDF):
    """Returns y wᵀ of each block, [K, C, D] in y's dtype."""
    return jnp.einsum(
        "kcf,kdf->kcd", y_KCF, w_KDF, preferred_element_type=accumulation_dtype(y_KCF)
    ).astype(y_KCF.dtype)


def _transposed_blocks_times_blocks(x_KCD, y_KCF):
    """Returns xᵀ y of each block, [K, D, F], in the dtype of accumulation."""
    x_KDC = x_KCD.swapaxes(1, 2)
    if compile_target().platform == "cpu":
        # Without the barrier, XLA folds the transpose into the product, and the product takes 1.5
        # times as long.
        x_KDC = jax.lax.optimization_barrier(x_KDC)
    return jnp.einsum(
        "kdc,kcf->kdf", x_KDC, y_KCF, preferred_element_type=accumulation_dtype(x_KCD)
    )


def _matmul_in_blocks(sizes, x, w, group_sizes):
    """Returns y [R, F] of `grouped_matmul`, computed in blocks."""
    return _scan_block_batches(
        _plan_blocks(sizes, group_sizes, x.shape[0], w[0].size),
        (x,),
        (),
        lambda group, x_KCD: ((_blocks_times_weights(x_KCD, w[group]),), ()),
    )[0][0]


def _matmul_gradients_in_blocks(sizes, x, w, group_sizes, dy):
    """Returns the gradients of x and w of `grouped_matmul`, given dy [R, F]."""

    def step(group, x_KCD, dy_KCF):
        return (_blocks_times_transposed_weights(dy_KCF, w[group]),), (
            _transposed_blocks_times_blocks(x_KCD, dy_KCF),
        )

    (dx,), (dw,) = _scan_block_batches(
        _plan_blocks(sizes, group_sizes, x.shape[0], w[0].size), (x, dy), (w,), step
    )
    return dx, dw


def _expert_mlp_in_blocks(sizes, x, gate_up, down, group_sizes):
    """Returns y [R, D] and the hidden layer [R, 2I] of `expert_mlp`, computed in blocks."""

    def step(group, x_KCD):
        hidden = _blocks_times_weights(x_KCD, gate_up[group])
        return (_blocks_times_weights(_swiglu(hidden), down[group]), hidden), ()

    return _scan_block_batches(
        _plan_blocks(sizes, group_sizes, x.shape[0], gate_up[0].size), (x,), (), step
    )[0]


def _expert_mlp_gradients_in_blocks(sizes, x, gate_up, down, group_sizes, hidden, dy):
    """Returns the gradients of x, gate_up and down of `expert_mlp`, given dy [R, D]. `hidden` is
    the second result of `_expert_mlp_in_blocks`.
    """

    def step(group, x_KCD, hidden, dy_KCD):
        activation, pullback = jax.vjp(_swiglu, hidden)
        (dhidden,) = pullback(_blocks_times_transposed_weights(dy_KCD, down[group]))
        dx_KCD = _blocks_times_transposed_weights(dhidden, gate_up[group])
        return (dx_KCD,), (
            _transposed_blocks_times_blocks(x_KCD, dhidden),
            _transposed_blocks_times_blocks(activation, dy_KCD),
        )

    (dx,), (dgate_up, ddown) = _scan_block_batches(
        _plan_blocks(sizes, group_sizes, x.shape[0], gate_up[0].size),
        (x, hidden, dy),
        (gate_up, down),
        step,
    )
    return dx, dgate_up, ddown


# ---- the table of implementations


def _blocked_functions_by_name(sizes: BlockSizes):
    """Returns the functions of the implementation "blocked" by name, for blocks of `sizes`."""
    functions = dict(
        matmul=_matmul_in_blocks,
        gradients=_matmul_gradients_in_blocks,
        mlp=_expert_mlp_in_blocks,
        mlp_gradients=_expert_mlp_gradients_in_blocks,
    )
    return {name: functools.partial(f, sizes) for name, f in functions.items()}


XLA_IMPLEMENTATIONS = (
    XlaImplementation("blocked", ("cpu",), _blocked_functions_by_name(_CPU)),
    XlaImplementation("blocked", ("gpu",), _blocked_functions_by_name(_GPU)),
    XlaImplementation(
        "ragged_dot",
        ("tpu",),
        dict(matmul=_matmul_by_ragged_dot, gradients=_gradients_by_ragged_dot),
    ),
)
