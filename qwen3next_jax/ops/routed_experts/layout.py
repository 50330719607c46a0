"""The routed experts of one device: tokens to the experts they chose, and the weighted results
summed by token.

Choices are sorted by expert, and each expert's rows laid out in whole tiles. The router's weight
enters the hidden layer, so that neither the results nor their gradients need a pass of their
own, and results are summed by a product with their tokens: no array has a row for each choice of
each token. The layout has room for a given number of choices; what a skewed router sends beyond
is worked off one expert after another in a loop that a balanced one never enters.

Letters: N tokens, A choices of each, Q = N·A, D model, E experts, I expert width, F = 2I (gate
before up), T tiles of M rows, P = T·M, O rows of a step of the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import wide
from qwen3next_jax.ops.grouped_matmul import grouped_matmul
from qwen3next_jax.ops.implementations import Form, choose

_LARGEST_TILE = 256
_LOOP_ROWS = 512
_LARGEST_NUMBER = 2**31


def routed_experts(x, weight, expert, gate_up, down, *, capacity: int):
    """Σ_a weight · SwiGLU_expert(x) over the choices whose expert is here.

    Args:
      x: [N, D]. weight: [N, A]. expert: [N, A] integers, those below 0 or from E on are
      elsewhere; a token's choices differ. gate_up: [E, D, 2, I], or flat [E, D, F]. down: [E, I,
      D].
      capacity: choices of experts here that the layout holds; all are computed, however many.

    Returns:
      [N, D] in x's dtype, accumulated in float32 (but for what passes through the loop).
    """
    plan = _arrange(weight, expert, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    y_PD = _mlp(plan, _rows(x, plan.token_P), flat, down)

    def an_expert(e, y_ND):
        w = _matrices(e, flat, down)

        def step(left, y_ND):
            y_OD = _dense(_rows(x, left.token_O).astype(wide(x)), left.weight_O, *w)
            return y_ND.at[left.into_O].add(y_OD.astype(x.dtype), mode="drop", unique_indices=True)

        return _steps(plan, e, weight, step, y_ND)

    return _loop(
        plan,
        an_expert,
        sum_by_token(y_PD, jnp.where(plan.here_P, plan.choice_P, weight.size), weight.shape),
    )


def routed_experts_gradients(x, weight, expert, gate_up, down, dy, *before, capacity: int):
    """Gradients of `routed_experts` for that of its result, dy [N, D]. before: what those of
    gate_up and down are added to, in their shapes and dtypes (of other tokens, so far).

    Returns:
      dx [N, D], dweight [N, A] in float32, dgate_up and ddown; all but dweight in the arguments'
      shapes and dtypes.
    """
    plan = _arrange(weight, expert, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    before = [d.reshape(w.shape) for d, w in zip(before, (flat, down))]
    dx_PD, dweight_P, *dw = _mlp_gradients(
        plan, _rows(x, plan.token_P), flat, down, _rows(dy, plan.token_P), *before
    )
    choice_P = jnp.where(plan.here_P, plan.choice_P, weight.size)
    dx_ND = sum_by_token(dx_PD, choice_P, weight.shape)
    dweight_Q = (
        jnp.zeros(weight.size, wide(weight))
        .at[choice_P]
        .set(dweight_P, mode="drop", unique_indices=True)
    )

    def an_expert(e, carry):
        w = _matrices(e, flat, down)

        def step(left, carry):
            sums, dx_ND, dweight_Q = carry
            _, pullback = jax.vjp(_dense, _rows(x, left.token_O).astype(wide(x)), left.weight_O, *w)
            dx_OD, dweight_O, *terms = pullback(_rows(dy, left.token_O).astype(wide(x)))
            return (
                jax.tree.map(jnp.add, sums, terms),
                dx_ND.at[left.into_O].add(dx_OD.astype(x.dtype), mode="drop", unique_indices=True),
                dweight_Q.at[left.choice_O].set(dweight_O, mode="drop", unique_indices=True),
            )

        dw, dx_ND, dweight_Q = carry
        sums, dx_ND, dweight_Q = _steps(
            plan, e, weight, step, ([jnp.zeros_like(m) for m in w], dx_ND, dweight_Q)
        )
        begun = plan.begun_E[e] | bool(before)  # else nothing has been written there yet
        dw = [
            d.at[e].set((jnp.where(begun, d[e].astype(s.dtype), 0) + s).astype(d.dtype))
            for d, s in zip(dw, sums)
        ]
        return dw, dx_ND, dweight_Q

    (dflat, ddown), dx_ND, dweight_Q = _loop(plan, an_expert, (dw, dx_ND, dweight_Q))
    return dx_ND, dweight_Q.reshape(weight.shape), dflat.reshape(gate_up.shape), ddown


def sum_by_token(rows, choice, shape: tuple[int, int]):
    """[N, D]: of each token the sum of its rows, accumulated in float32.

    Args:
      rows: [P, D], finite. choice: [P] integers in any order, the number of the row's choice;
      those from Q on are left out, and below
        it no two are alike. shape: (N, A).
    """

    chosen = choose("sum_by_token", None, SUM_FORMS, rows=rows, shape=shape)
    return chosen.function("sum_by_token")(rows, choice, shape)


def _sum_by_token(rows, choice, shape: tuple[int, int]):
    """By a gather, not a scatter, which a GPU would add up in any order."""
    place_Q = (
        jnp.full(shape[0] * shape[1], rows.shape[0])
        .at[choice]
        .set(jnp.arange(rows.shape[0]), mode="drop", unique_indices=True)
    )
    rows_NAD = rows.at[place_Q.reshape(shape)].get(mode="fill", fill_value=0)
    return jnp.sum(rows_NAD, axis=1, dtype=wide(rows)).astype(rows.dtype)


# ---- the layout


class _Plan(NamedTuple):
    # [T] of each tile, ascending
    expert_T: jax.Array
    # [1] tiles that hold rows
    used: jax.Array
    # [E] rows of each expert's tiles
    sizes_E: jax.Array
    # [P] whether the row holds a choice; one that does not has weight 0 and any token
    here_P: jax.Array
    # [P] number of the row's choice
    choice_P: jax.Array
    # [P]
    token_P: jax.Array
    # [P] float32
    weight_P: jax.Array
    # choices and weights as in P, but of all choices, and O more
    ordered: tuple[jax.Array, jax.Array]
    # [E] index into them of the first of the expert's choices that the layout does not hold
    left_E: jax.Array
    # [E] and of the end of its choices
    ends_E: jax.Array
    # [E] whether the expert has a tile
    begun_E: jax.Array
    # expert with which the loop starts, E where there is nothing left; None: never is
    first: jax.Array | None


def _arrange(weight_NA, expert_NA, experts: int, capacity: int) -> _Plan:
    choices = expert_NA.size
    capacity = min(capacity, choices)
    # A fourth of the rows of an expert at most: half a tile of each is wasted.
    size = min(1 << max((capacity // experts // 4).bit_length() - 1, 4), _LARGEST_TILE)
    most = choices // size + experts  # tiles, with at least one for each expert
    tiles = most if capacity == choices else min(-(-capacity // size) + experts // 2, most)

    expert_Q = (
        jnp.where((expert_NA >= 0) & (expert_NA < experts), expert_NA, experts)
        .reshape(-1)
        .astype(jnp.int32)
    )
    count_E = jnp.sum(expert_Q[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles_E = jnp.maximum(-(-count_E // size), 1)
    tile_ends_E = jnp.cumsum(tiles_E)
    tile_starts_E = tile_ends_E - tiles_E
    # What fills an expert's last tile is sorted behind its choices, so that the sort itself makes
    # the layout.
    filling_EM = jnp.where(
        jnp.arange(size) < (tiles_E * size - count_E)[:, None],
        jnp.arange(experts)[:, None],
        experts,
    )
    # choices that are none have numbers from Q on, and weight 0
    filling = experts * size + _LOOP_ROWS
    keys = jnp.concatenate([expert_Q, filling_EM.reshape(-1), jnp.full(_LOOP_ROWS, experts)])
    weights = jnp.pad(weight_NA.reshape(-1).astype(wide(weight_NA)), (0, filling))
    numbers, bits = (
        jnp.arange(choices + filling, dtype=jnp.int32),
        (choices + filling - 1).bit_length(),
    )
    # key and number as one: half as many arrays to sort
    if (experts + 1) << bits <= _LARGEST_NUMBER:
        numbers, weights = jax.lax.sort(
            (keys << bits | numbers, weights), num_keys=1, is_stable=False
        )
        ordered = numbers & (1 << bits) - 1, weights
    else:
        _, *ordered = jax.lax.sort((keys, numbers, weights), num_keys=1, is_stable=True)

    rows, tile = tiles * size, jnp.arange(tiles)
    choice_P, weight_P = (a[:rows] for a in ordered)
    expert_T = jnp.minimum(
        jnp.sum(tile_ends_E <= tile[:, None], axis=1, dtype=jnp.int32), experts - 1
    )
    used = jnp.minimum(tile_ends_E[-1:], tiles)
    here_P = (choice_P < choices) & (jnp.arange(rows) < used * size)
    first = None if tiles == most else jnp.sum(tile_ends_E <= tiles)
    return _Plan(
        expert_T,
        used,
        (jnp.minimum(tile_ends_E, tiles) - jnp.minimum(tile_starts_E, tiles)) * size,
        here_P,
        choice_P,
        _token(choice_P, weight_NA),
        jnp.where(here_P, weight_P, 0),
        tuple(ordered),
        jnp.maximum(tile_starts_E * size, rows),
        tile_starts_E * size + count_E,
        tile_starts_E < tiles,
        first,
    )


def _token(choice, weight_NA):
    """Of a choice's number; any for one that stands for none."""
    return jnp.minimum(choice, weight_NA.size - 1) // weight_NA.shape[1]


def _rows(x, index):
    return x.at[index].get(mode="promise_in_bounds")


# ---- what the layout holds


def _products(x_PD, weight_P, gate_up_EDF, down_EID, sizes_E):
    hidden_PF = grouped_matmul(x_PD, gate_up_EDF, sizes_E)
    return grouped_matmul(
        _weighted_swiglu(hidden_PF.astype(wide(x_PD)), weight_P).astype(x_PD.dtype),
        down_EID,
        sizes_E,
    )


def _weighted_swiglu(hidden, weight):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up * weight[:, None]


def _product_gradients(x_PD, weight_P, gate_up_EDF, down_EID, sizes_E, dy_PD, *before):
    _, pullback = jax.vjp(lambda *a: _products(*a, sizes_E), x_PD, weight_P, gate_up_EDF, down_EID)
    dx_PD, dweight_P, *dw = pullback(dy_PD)
    return dx_PD, dweight_P, *(map(jnp.add, dw, before) if before else dw)


def _mlp(plan: _Plan, *arguments):
    return _run(plan, "mlp", *arguments)


def _mlp_gradients(plan: _Plan, *arguments):
    return _run(plan, "mlp_gradients", *arguments)


def _run(plan: _Plan, name: str, x_PD, gate_up_EDF, down_EID, *gradients):
    chosen = choose(
        "routed_experts",
        None,
        FORMS,
        x=x_PD,
        gate_up=gate_up_EDF,
        tile=x_PD.shape[0] // plan.expert_T.shape[0],
        added=len(gradients) > 1,
    )
    # kernels go by the expert of each tile, products by the rows of each expert
    groups = (plan.expert_T, plan.used) if chosen.is_kernel else (plan.sizes_E,)
    return chosen.function(name)(x_PD, plan.weight_P, gate_up_EDF, down_EID, *groups, *gradients)


FORMS = (Form("xla", ("cpu", "gpu", "tpu"), dict(mlp=_products, mlp_gradients=_product_gradients)),)
SUM_FORMS = (Form("xla", ("cpu", "gpu", "tpu"), dict(sum_by_token=_sum_by_token)),)


# ---- what it does not hold


def _loop(plan: _Plan, an_expert, carry):
    """`carry` through `an_expert`(number, carry) of each expert with choices left."""
    if plan.first is None:
        return carry
    return jax.lax.fori_loop(plan.first, plan.ends_E.shape[0], an_expert, carry)


class _Left(NamedTuple):
    """Choices of a step of the loop. Those beyond the expert's last have weight 0, any token,
    and nowhere to go.
    """

    token_O: jax.Array
    weight_O: jax.Array
    into_O: jax.Array  # the token, or a number from N on
    choice_O: jax.Array  # the number, or one from Q on


def _steps(plan: _Plan, e, weight_NA, step, carry):
    """`carry` through `step`(choices, carry) of all that is left of an expert."""
    left = plan.left_E[e]

    def a_step(k, carry):
        first, index_O = left + k * _LOOP_ROWS, jnp.arange(_LOOP_ROWS)
        choice_O, weight_O = (
            jax.lax.dynamic_slice(a, (first,), (_LOOP_ROWS,)) for a in plan.ordered
        )
        token_O, here_O = _token(choice_O, weight_NA), first + index_O < plan.ends_E[e]
        return step(
            _Left(
                token_O,
                jnp.where(here_O, weight_O, 0),
                jnp.where(here_O, token_O, weight_NA.shape[0] + index_O),
                jnp.where(here_O, choice_O, weight_NA.size + index_O),
            ),
            carry,
        )

    return jax.lax.fori_loop(0, -(-(plan.ends_E[e] - left) // _LOOP_ROWS), a_step, carry)


def _matrices(e, gate_up_EDF, down_EID):
    return tuple(w[e].astype(wide(w)) for w in (gate_up_EDF, down_EID))


def _dense(x_OD, weight_O, gate_up_DF, down_ID):
    return _weighted_swiglu(x_OD @ gate_up_DF, weight_O) @ down_ID
