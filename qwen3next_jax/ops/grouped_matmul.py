"""Grouped matrix products: rows sorted by group are multiplied by the matrix of their group, as in
a mixture of experts.

"blocked" copies the rows into blocks of one group each, padded with zeros, and multiplies the
blocks as one batch, so every row is multiplied by one matrix only. XLA's own `ragged_dot`
multiplies every row by all matrices on CPUs and GPUs.

R rows, C rows of a block, D width in, F width out, E groups (experts), G = min(E, R) groups that
can have rows, I expert width, n batches of K blocks, W groups of a batch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import checks
from qwen3next_jax.ops.blocks import wide
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.implementations import Chosen, Form, choose

IMPLEMENTATIONS = ("blocked", "ragged_dot")


class BlockSizes(NamedTuple):
    """How "blocked" splits rows into blocks.

    Attributes:
      largest: rows of a block, at most.
      per_group: blocks that a group of mean size fills. Every group wastes less than one block, so
        at most 1 / per_group of its rows.
      batch: elements of the weights that are copied for one batch of blocks.
    """

    largest: int
    per_group: int
    batch: int


# The best of several sizes for 8 to 64 groups and 8192 to 16384 rows
# (benchmarks/grouped_matmul.py); the copied weights stay in cache.
_CPU = BlockSizes(largest=128, per_group=1, batch=2**20)
# Not timed. Long blocks copy the weights seldom; the blocks of a batch are one product, which
# should fill the chip.
_GPU = BlockSizes(largest=512, per_group=8, batch=2**26)
_FULL_TILE = 64  # rows of a matrix unit's tile: shorter blocks save nothing


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """y_r = x_r · w[group of r].

    Args:
      x: [R, D] rows sorted by group.
      w: [E, D, F].
      group_sizes: [E] integers, the rows of each group. Their sum may be below R; the rows after it
        give zeros.
      implementation: "blocked", "ragged_dot", or None for the platform's best: "ragged_dot" on a
        TPU, tokamax's kernels on an H100 or H200 where they passed their test (docs/gpu.md),
        "blocked" elsewhere.

    Returns:
      y [R, F] in x's dtype, accumulated in float32; differentiable in x and w.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check(group_sizes, implementation, x=(x, "RD"), w=(w, "EDF"))
    return _matmul(_choose(implementation, x, w), x, w, group_sizes.astype(jnp.int32))


def expert_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """SwiGLU experts on rows sorted by expert: y_r = (silu(x_r gate_e) · (x_r up_e)) down_e.

    Args:
      x: [R, D] rows sorted by expert.
      gate_up: [E, D, 2, I], gate at index 0.
      down: [E, I, D].
      group_sizes, implementation: as in `grouped_matmul`.

    Returns:
      y [R, D] in x's dtype; differentiable in x, gate_up and down.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check(
        group_sizes,
        implementation,
        x=(x, "RD"),
        gate_up=(gate_up, ("E", "D", 2, "I")),
        down=(down, "EID"),
    )
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
    chosen = _choose(implementation, x, gate_up, down)
    return _mlp(chosen, x, gate_up, down, group_sizes.astype(jnp.int32))


def _check(group_sizes, implementation, **arrays):
    checks.implementation(implementation, IMPLEMENTATIONS)
    checks.shapes(**arrays, group_sizes=(group_sizes, "E"))
    checks.integers(group_sizes=group_sizes)


# ---- the custom gradient around the chosen implementation


def _choose(implementation, x, *weights) -> Chosen:
    return choose("grouped_matmul", implementation, FORMS, x=x, weights=weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(chosen: Chosen, x, w, group_sizes):
    return chosen.function("matmul")(x, w, group_sizes)


def _matmul_backward(chosen: Chosen, residuals, dy):
    return *chosen.function("gradients")(*residuals, dy), None


_matmul.defvjp(lambda chosen, *inputs: (_matmul(chosen, *inputs), inputs), _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(chosen: Chosen, *inputs):
    return _mlp_forward(chosen, *inputs)[0]


def _mlp_forward(chosen: Chosen, *inputs):
    if chosen.name == "blocked":
        y, hidden = chosen.function("mlp")(*inputs)
    else:
        y, hidden = _mlp_of_products(chosen.function("matmul"), *inputs)
    return y, (*inputs, hidden)


def _mlp_backward(chosen: Chosen, residuals, dy):
    if chosen.name == "blocked":
        gradients = chosen.function("mlp_gradients")(*residuals, dy)
    else:
        gradients = _mlp_gradients_of_products(chosen.function("gradients"), *residuals, dy)
    return *gradients, None


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _mlp_of_products(matmul, x, gate_up, down, group_sizes):
    hidden = matmul(x, gate_up, group_sizes)
    return matmul(_swiglu(hidden), down, group_sizes), hidden


def _mlp_gradients_of_products(gradients, x, gate_up, down, group_sizes, hidden, dy):
    activation, pullback = jax.vjp(_swiglu, hidden)
    da, ddown = gradients(activation, down, group_sizes, dy)
    dx, dgate_up = gradients(x, gate_up, group_sizes, *pullback(da))
    return dx, dgate_up, ddown


def _swiglu(hidden):
    """silu(gate) · up [..., I], computed in float32. hidden: [..., 2I], gate before up."""
    gate, up = jnp.split(hidden.astype(wide(hidden)), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)


# ---- ragged_dot


def _ragged(x, w, group_sizes):
    return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=wide(x)).astype(x.dtype)


def _ragged_gradients(x, w, group_sizes, dy):
    _, pullback = jax.vjp(lambda x, w: _ragged(x, w, group_sizes), x, w)
    return pullback(dy)


# ---- blocked


class _Plan(NamedTuple):
    """Which rows fill which blocks. The rank of a group is its number among those with rows."""

    group: jax.Array  # [n, K] the group of each block
    first: jax.Array  # [n] the smallest rank among the W groups of a batch
    member: jax.Array  # [n, W, K] whether a block belongs to a group
    row: jax.Array  # [n, K, C] the row in each place of a block
    filled: jax.Array  # [n, K, C] whether the place has that row, or a zero
    place: jax.Array  # [R] the place of each row, in the flattened [n, K, C]
    used: jax.Array  # [R] whether the row belongs to a group
    rank: jax.Array  # [E] the rank of each group
    groups: int  # G


def _block_size(sizes: BlockSizes, rows: int, groups: int) -> int:
    """A power of two up to the mean size of a group, as each group wastes less than one block."""
    mean = rows // groups
    return min(
        1 << (max(mean // sizes.per_group, min(mean, _FULL_TILE)).bit_length() - 1), sizes.largest
    )


def _plan(sizes: BlockSizes, group_sizes, rows: int, weights: int) -> _Plan:
    """The plan for groups of `group_sizes` [E]; `weights`: elements of a group's largest matrix."""
    groups = min(group_sizes.shape[0], rows)
    size = _block_size(sizes, rows, groups)
    blocks = min(rows // size + groups, rows)  # enough for any sizes of the groups
    batches = -(-blocks // min(blocks, max(sizes.batch // weights, 1)))
    batch = -(-blocks // batches)

    group_G = jnp.argsort(group_sizes == 0, stable=True)[:groups]
    size_G = group_sizes[group_G]
    end_G = jnp.cumsum(size_G)
    blocks_G = -(-size_G // size)
    block_end_G = jnp.cumsum(blocks_G)
    block_start_G = block_end_G - blocks_G

    ends_by = lambda end_G, index: jnp.sum(end_G <= index[..., None], axis=-1)
    block = jnp.arange(batches * batch).reshape(batches, batch)
    # Blocks that no group needs stay empty.
    rank = jnp.minimum(ends_by(block_end_G, block), groups - 1)
    row = ((end_G - size_G)[rank] + (block - block_start_G[rank]) * size)[..., None] + jnp.arange(
        size
    )
    window = min(batch, groups)
    first = jnp.minimum(rank[:, 0], groups - window)

    index = jnp.arange(rows)
    rank_R = jnp.minimum(ends_by(end_G, index), groups - 1)
    place = block_start_G[rank_R] * size + index - (end_G - size_G)[rank_R]
    return _Plan(
        group_G[rank],
        first,
        rank[:, None] == first[:, None, None] + jnp.arange(window)[:, None],
        jnp.minimum(row, rows - 1),
        row < end_G[rank][..., None],
        place,
        index < end_G[-1],
        jnp.cumsum(group_sizes > 0) - 1,
        groups,
    )


def _scan_batches(plan: _Plan, rows, weights, step):
    """Runs `step` over the batches of blocks.

    Args:
      rows: tuple of arrays [R, F].
      weights: tuple of arrays [E, D, F], in whose shapes terms are summed.
      step: (group [K], the blocks [K, C, F] of each of `rows`) → (tuple of outputs [K, C, F], tuple
        of terms [K, D, F]).

    Returns:
      Tuple of outputs [R, F], zeros in rows of no group, and tuple of terms [E, D, F], summed over
      the blocks of each group.
    """

    def batch(totals, inputs):
        group, first, member, *blocks = inputs
        outputs, terms = step(group, *blocks)
        # Terms of a sum that is rounded to bfloat16 may be rounded to the 11 bits of a GPU's tf32.
        precision = (
            jax.lax.Precision.DEFAULT
            if rows[0].dtype == jnp.bfloat16
            else jax.lax.Precision.HIGHEST
        )
        return tuple(
            _add(total, first, member, term, precision)
            for total, term in zip(totals, terms, strict=True)
        ), outputs

    blocks = (jnp.where(plan.filled[..., None], x[plan.row], 0) for x in rows)
    zeros = tuple(jnp.zeros((plan.groups, *w.shape[1:]), wide(w)) for w in weights)
    totals, outputs = jax.lax.scan(batch, zeros, (plan.group, plan.first, plan.member, *blocks))
    return (
        tuple(
            jnp.where(plan.used[:, None], y.reshape(-1, y.shape[-1])[plan.place], 0)
            for y in outputs
        ),
        tuple(
            jnp.where(
                (jnp.diff(plan.rank, prepend=-1) > 0)[:, None, None], total[plan.rank], 0
            ).astype(w.dtype)
            for total, w in zip(totals, weights)
        ),
    )


def _add(total, first, member_WK, term, precision):
    """total[first + g] += the sum of the terms of group g's blocks, for g < W."""
    sums = jnp.einsum("wk,kdf->wdf", member_WK.astype(term.dtype), term, precision=precision)
    old = jax.lax.dynamic_slice_in_dim(total, first, member_WK.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(total, old + sums, first, 0)


def _dot(x_KCD, w_KDF):
    return jnp.einsum("kcd,kdf->kcf", x_KCD, w_KDF, preferred_element_type=wide(x_KCD)).astype(
        x_KCD.dtype
    )


def _dot_transposed(y_KCF, w_KDF):
    return jnp.einsum("kcf,kdf->kcd", y_KCF, w_KDF, preferred_element_type=wide(y_KCF)).astype(
        y_KCF.dtype
    )


def _transposed_product(x_KCD, y_KCF):
    """xᵀ y of each block, in the dtype of accumulation."""
    x_KDC = x_KCD.swapaxes(1, 2)
    if compile_target().platform == "cpu":
        # Without the barrier XLA folds the transpose into the product, which then takes 1.5 times
        # as long.
        x_KDC = jax.lax.optimization_barrier(x_KDC)
    return jnp.einsum("kdc,kcf->kdf", x_KDC, y_KCF, preferred_element_type=wide(x_KCD))


def _blocked(sizes, x, w, group_sizes):
    return _scan_batches(
        _plan(sizes, group_sizes, x.shape[0], w[0].size),
        (x,),
        (),
        lambda group, x_KCD: ((_dot(x_KCD, w[group]),), ()),
    )[0][0]


def _blocked_gradients(sizes, x, w, group_sizes, dy):
    def step(group, x_KCD, dy_KCF):
        return (_dot_transposed(dy_KCF, w[group]),), (_transposed_product(x_KCD, dy_KCF),)

    (dx,), (dw,) = _scan_batches(
        _plan(sizes, group_sizes, x.shape[0], w[0].size), (x, dy), (w,), step
    )
    return dx, dw


def _blocked_mlp(sizes, x, gate_up, down, group_sizes):
    def step(group, x_KCD):
        hidden = _dot(x_KCD, gate_up[group])
        return (_dot(_swiglu(hidden), down[group]), hidden), ()

    return _scan_batches(_plan(sizes, group_sizes, x.shape[0], gate_up[0].size), (x,), (), step)[0]


def _blocked_mlp_gradients(sizes, x, gate_up, down, group_sizes, hidden, dy):
    def step(group, x_KCD, hidden, dy_KCD):
        activation, pullback = jax.vjp(_swiglu, hidden)
        (dhidden,) = pullback(_dot_transposed(dy_KCD, down[group]))
        dx_KCD = _dot_transposed(dhidden, gate_up[group])
        return (dx_KCD,), (
            _transposed_product(x_KCD, dhidden),
            _transposed_product(activation, dy_KCD),
        )

    (dx,), (dgate_up, ddown) = _scan_batches(
        _plan(sizes, group_sizes, x.shape[0], gate_up[0].size),
        (x, hidden, dy),
        (gate_up, down),
        step,
    )
    return dx, dgate_up, ddown


# ---- the table of implementations


def _blocks_of(sizes: BlockSizes):
    functions = dict(
        matmul=_blocked,
        gradients=_blocked_gradients,
        mlp=_blocked_mlp,
        mlp_gradients=_blocked_mlp_gradients,
    )
    return {name: functools.partial(f, sizes) for name, f in functions.items()}


FORMS = (
    Form("blocked", ("cpu",), _blocks_of(_CPU)),
    Form("blocked", ("gpu",), _blocks_of(_GPU)),
    Form("ragged_dot", ("tpu",), dict(matmul=_ragged, gradients=_ragged_gradients)),
)
