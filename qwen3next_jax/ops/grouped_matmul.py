"""Matmuls of rows sorted by group, one weight matrix per group: the experts of a mixture.

"blocked" copies the rows into blocks of one group each, filled up with zeros, and multiplies the
blocks as one batch, so every row meets one weight matrix only. (XLA's own `ragged_dot` computes
every group for every row on CPUs and GPUs.)

Letters: R rows, C rows of a block, D width in, F width out, E groups (experts), G = min(E, R)
groups that can have rows, I expert width, K blocks of a batch, W groups of a batch.
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


class Tiles(NamedTuple):
    """How "blocked" cuts rows into blocks.

    largest: rows of a block at most. share: blocks that a group of mean size fills; every group
    wastes less than one block, so a share of 1/share at most. batch: elements of the weights
    copied for one batch of blocks.
    """

    largest: int
    share: int
    batch: int


# Both the best of several for 8 to 64 groups of 8192 to 16384 rows (benchmarks/grouped_matmul.py);
# the copy stays in cache.
_CPU = Tiles(largest=128, share=1, batch=2**20)
# Never timed. Long blocks copy the weights seldom; blocks of one batch are one product, which has
# to fill the chip.
_GPU = Tiles(largest=512, share=8, batch=2**26)
_FULL_TILE = 64  # rows of a matrix unit's tile: shorter blocks save nothing


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """y_r = x_r · w[group of r].

    Args:
      x: [R, D] rows sorted by group.
      w: [E, D, F].
      group_sizes: [E] integers, rows of each group; their sum may be below R, the rows beyond
      give zeros. implementation: "blocked", "ragged_dot", or None for the platform's best:
      "ragged_dot" on TPU, on an H100 tokamax's kernels
        where they were right when first tried, else "blocked".

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


# ---- one custom gradient around every implementation


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
    """[…, 2I], gate before up → silu(gate) · up [..., I], in float32 inside."""
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
    """How rows fill blocks, the blocks lying in n batches of K; "rank" counts the groups that
    have rows.
    """

    group: jax.Array  # [n, K] of each block
    first: jax.Array  # [n] rank where the W groups of a batch start
    member: jax.Array  # [n, W, K] whether a block belongs to a group
    row: jax.Array  # [n, K, C] of each place
    filled: jax.Array  # [n, K, C] whether the place holds that row, or a zero
    place: jax.Array  # [R] of each row, flat
    used: jax.Array  # [R] whether the row belongs to a group
    rank: jax.Array  # [E] of each group
    groups: int  # G


def _block_size(tiles: Tiles, rows: int, groups: int) -> int:
    """A power of two up to the mean size of a group, as each group wastes less than one block."""
    mean = rows // groups
    return min(
        1 << (max(mean // tiles.share, min(mean, _FULL_TILE)).bit_length() - 1), tiles.largest
    )


def _plan(tiles: Tiles, group_sizes, rows: int, weights: int) -> _Plan:
    """`weights`: elements of one group's largest matrix."""
    groups = min(group_sizes.shape[0], rows)
    size = _block_size(tiles, rows, groups)
    blocks = min(rows // size + groups, rows)  # as many as any sizes can need
    batches = -(-blocks // min(blocks, max(tiles.batch // weights, 1)))
    batch = -(-blocks // batches)

    group_G = jnp.argsort(group_sizes == 0, stable=True)[:groups]
    size_G = group_sizes[group_G]
    end_G = jnp.cumsum(size_G)
    blocks_G = -(-size_G // size)
    block_end_G = jnp.cumsum(blocks_G)
    block_start_G = block_end_G - blocks_G

    ends_by = lambda end_G, index: jnp.sum(end_G <= index[..., None], axis=-1)  # how many groups do
    block = jnp.arange(batches * batch).reshape(batches, batch)
    # blocks beyond those needed come out empty
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


def _walk(plan: _Plan, rows, weights, step):
    """Runs `step` over the batches of blocks.

    Args:
      rows: tuple of [R, F].
      weights: tuple of [E, D, F], to whose shapes terms are summed.
      step: (group [K], the blocks [K, C, F] of each of `rows`) → (tuple of [K, C, F], tuple of
      terms [K, D, F]).

    Returns:
      ([R, F] of each output, zeros in rows of no group; [E, D, F] of each term, summed over the
      blocks of a group).
    """

    def batch(totals, inputs):
        group, first, member, *blocks = inputs
        outputs, terms = step(group, *blocks)
        # A sum that ends in bfloat16 may be one of terms rounded to a GPU's 11 bits.
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
    """total[first + g] += Σ of the terms of blocks that belong to group g of the batch."""
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


def _product(x_KCD, y_KCF):
    """xᵀ y of each block in the dtype of accumulation."""
    x_KDC = x_KCD.swapaxes(1, 2)
    if compile_target().platform == "cpu":
        # Without the barrier XLA would fold the transpose into the matmul, which then takes half as
        # long again.
        x_KDC = jax.lax.optimization_barrier(x_KDC)
    return jnp.einsum("kdc,kcf->kdf", x_KDC, y_KCF, preferred_element_type=wide(x_KCD))


def _blocked(tiles, x, w, group_sizes):
    return _walk(
        _plan(tiles, group_sizes, x.shape[0], w[0].size),
        (x,),
        (),
        lambda group, x_KCD: ((_dot(x_KCD, w[group]),), ()),
    )[0][0]


def _blocked_gradients(tiles, x, w, group_sizes, dy):
    def step(group, x_KCD, dy_KCF):
        return (_dot_transposed(dy_KCF, w[group]),), (_product(x_KCD, dy_KCF),)

    (dx,), (dw,) = _walk(_plan(tiles, group_sizes, x.shape[0], w[0].size), (x, dy), (w,), step)
    return dx, dw


def _blocked_mlp(tiles, x, gate_up, down, group_sizes):
    def step(group, x_KCD):
        hidden = _dot(x_KCD, gate_up[group])
        return (_dot(_swiglu(hidden), down[group]), hidden), ()

    return _walk(_plan(tiles, group_sizes, x.shape[0], gate_up[0].size), (x,), (), step)[0]


def _blocked_mlp_gradients(tiles, x, gate_up, down, group_sizes, hidden, dy):
    def step(group, x_KCD, hidden, dy_KCD):
        activation, pullback = jax.vjp(_swiglu, hidden)
        (dhidden,) = pullback(_dot_transposed(dy_KCD, down[group]))
        dx_KCD = _dot_transposed(dhidden, gate_up[group])
        return (dx_KCD,), (_product(x_KCD, dhidden), _product(activation, dy_KCD))

    (dx,), (dgate_up, ddown) = _walk(
        _plan(tiles, group_sizes, x.shape[0], gate_up[0].size),
        (x, hidden, dy),
        (gate_up, down),
        step,
    )
    return dx, dgate_up, ddown


# ---- the table of implementations


def _blocks_of(tiles: Tiles):
    functions = dict(
        matmul=_blocked,
        gradients=_blocked_gradients,
        mlp=_blocked_mlp,
        mlp_gradients=_blocked_mlp_gradients,
    )
    return {name: functools.partial(f, tiles) for name, f in functions.items()}


FORMS = (
    Form("blocked", ("cpu",), _blocks_of(_CPU)),
    Form("blocked", ("gpu",), _blocks_of(_GPU)),
    Form("ragged_dot", ("tpu",), dict(matmul=_ragged, gradients=_ragged_gradients)),
)
