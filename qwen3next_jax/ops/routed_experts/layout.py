"""The routed experts of one device: every token through the experts it chose, and the weighted
results summed by token.

Choices are sorted by expert, and each expert's rows are laid out in whole tiles. The router's
weight multiplies the hidden layer, so that neither the results nor their gradients need a pass for
it. No array has a row for each choice of each token.

The layout has a capacity, a number of choices. Choices beyond it, which an unbalanced router sends,
are computed one expert after another in a loop that runs no step if all choices fit: none is
dropped.

N tokens, A choices of each, Q = N·A, D model, E experts, I expert width, F = 2I (gate before up),
T tiles of M rows, P = T·M, O rows of a step of the loop.
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
    """Σ_a weight · SwiGLU_expert(x) over the choices of experts on this device.

    Args:
      x: [N, D]. weight: [N, A].
      expert: [N, A] integers; experts below 0 or from E on are on other devices. A token's choices
        differ.
      gate_up: [E, D, 2, I], or flat [E, D, F]. down: [E, I, D].
      capacity: choices that the layout holds. The result is the same for any capacity.

    Returns:
      [N, D] in x's dtype, accumulated in float32; sums in the loop are in x's dtype.
    """
    plan = _arrange(weight, expert, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    y_PD = _mlp(plan, _rows(x, plan.token_P), flat, down)

    def add_expert(e, y_ND):
        w = _matrices(e, flat, down)

        def step(rest, y_ND):
            y_OD = _dense(_rows(x, rest.token_O).astype(wide(x)), rest.weight_O, *w)
            return y_ND.at[rest.target_O].add(
                y_OD.astype(x.dtype), mode="drop", unique_indices=True
            )

        return _for_choices_beyond(plan, e, weight, step, y_ND)

    return _for_experts_beyond(
        plan,
        add_expert,
        sum_by_token(y_PD, jnp.where(plan.is_choice_P, plan.choice_P, weight.size), weight.shape),
    )


def routed_experts_gradients(x, weight, expert, gate_up, down, dy, *dw_before, capacity: int):
    """The gradients of `routed_experts`.

    Args:
      dy: [N, D], the gradient of its result.
      dw_before: gradients of gate_up and down by other tokens, to which this call's are added; in
        their shapes and dtypes.

    Returns:
      dx [N, D], dweight [N, A] in float32, dgate_up and ddown; all but dweight in the arguments'
      shapes and dtypes.
    """
    plan = _arrange(weight, expert, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    dw_before = [d.reshape(w.shape) for d, w in zip(dw_before, (flat, down))]
    dx_PD, dweight_P, *dw = _mlp_gradients(
        plan, _rows(x, plan.token_P), flat, down, _rows(dy, plan.token_P), *dw_before
    )
    choice_P = jnp.where(plan.is_choice_P, plan.choice_P, weight.size)
    dx_ND = sum_by_token(dx_PD, choice_P, weight.shape)
    dweight_Q = (
        jnp.zeros(weight.size, wide(weight))
        .at[choice_P]
        .set(dweight_P, mode="drop", unique_indices=True)
    )

    def add_expert(e, carry):
        w = _matrices(e, flat, down)

        def step(rest, carry):
            sums, dx_ND, dweight_Q = carry
            _, pullback = jax.vjp(_dense, _rows(x, rest.token_O).astype(wide(x)), rest.weight_O, *w)
            dx_OD, dweight_O, *terms = pullback(_rows(dy, rest.token_O).astype(wide(x)))
            return (
                jax.tree.map(jnp.add, sums, terms),
                dx_ND.at[rest.target_O].add(
                    dx_OD.astype(x.dtype), mode="drop", unique_indices=True
                ),
                dweight_Q.at[rest.choice_O].set(dweight_O, mode="drop", unique_indices=True),
            )

        dw, dx_ND, dweight_Q = carry
        sums, dx_ND, dweight_Q = _for_choices_beyond(
            plan, e, weight, step, ([jnp.zeros_like(m) for m in w], dx_ND, dweight_Q)
        )
        # Without a tile and earlier gradients, nothing has been written for the expert yet.
        written = plan.has_tile_E[e] | bool(dw_before)
        dw = [
            d.at[e].set((jnp.where(written, d[e].astype(s.dtype), 0) + s).astype(d.dtype))
            for d, s in zip(dw, sums)
        ]
        return dw, dx_ND, dweight_Q

    (dflat, ddown), dx_ND, dweight_Q = _for_experts_beyond(plan, add_expert, (dw, dx_ND, dweight_Q))
    return dx_ND, dweight_Q.reshape(weight.shape), dflat.reshape(gate_up.shape), ddown


def sum_by_token(rows, choice, shape: tuple[int, int]):
    """[N, D]: the sum of each token's rows, accumulated in float32.

    Args:
      rows: [P, D], finite.
      choice: [P] integers in any order: the number n · A + a of each row's choice. Numbers below Q
        differ; rows with a number from Q on are left out.
      shape: (N, A).
    """
    chosen = choose("sum_by_token", None, SUM_FORMS, rows=rows, shape=shape)
    return chosen.function("sum_by_token")(rows, choice, shape)


def _sum_by_token(rows, choice, shape: tuple[int, int]):
    """By a gather: a GPU would add up a scatter in any order."""
    place_Q = (
        jnp.full(shape[0] * shape[1], rows.shape[0])
        .at[choice]
        .set(jnp.arange(rows.shape[0]), mode="drop", unique_indices=True)
    )
    rows_NAD = rows.at[place_Q.reshape(shape)].get(mode="fill", fill_value=0)
    return jnp.sum(rows_NAD, axis=1, dtype=wide(rows)).astype(rows.dtype)


# ---- the layout


class _Plan(NamedTuple):
    """The layout of the choices, and the choices beyond it. Choices are numbered n · A + a."""

    # [T] the expert of each tile, ascending
    expert_T: jax.Array
    # [1] the number of tiles that hold rows
    used: jax.Array
    # [E] the rows of each expert's tiles
    sizes_E: jax.Array
    # [P] whether the row holds a choice; one that does not has weight 0 and any token
    is_choice_P: jax.Array
    # [P] the number of the row's choice
    choice_P: jax.Array
    # [P] its token
    token_P: jax.Array
    # [P] its weight, float32
    weight_P: jax.Array
    # numbers and weights of all choices in the layout's order, and O more entries
    ordered: tuple[jax.Array, jax.Array]
    # [E] the index in `ordered` of the expert's first choice beyond the layout
    beyond_E: jax.Array
    # [E] the index in `ordered` after the expert's last choice
    ends_E: jax.Array
    # [E] whether the expert has a tile
    has_tile_E: jax.Array
    # [] the first expert with choices beyond the layout, E if there is none; None: the layout holds
    # all
    first_beyond: jax.Array | None


def _arrange(weight_NA, expert_NA, experts: int, capacity: int) -> _Plan:
    """The plan for the choices `expert_NA` with the router's weights `weight_NA`."""
    choices = expert_NA.size
    size, tiles, most = _tile_sizes(choices, experts, capacity)
    expert_Q = (
        jnp.where((expert_NA >= 0) & (expert_NA < experts), expert_NA, experts)
        .reshape(-1)
        .astype(jnp.int32)
    )
    count_E = jnp.sum(expert_Q[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles_E = jnp.maximum(-(-count_E // size), 1)
    tile_ends_E = jnp.cumsum(tiles_E)
    tile_starts_E = tile_ends_E - tiles_E
    # The padding of an expert's last tile is sorted behind its choices, so that the sort makes the
    # layout. Padding has numbers from Q on, and weight 0.
    padding_EM = jnp.where(
        jnp.arange(size) < (tiles_E * size - count_E)[:, None],
        jnp.arange(experts)[:, None],
        experts,
    )
    padding = experts * size + _LOOP_ROWS
    keys = jnp.concatenate([expert_Q, padding_EM.reshape(-1), jnp.full(_LOOP_ROWS, experts)])
    weights = jnp.pad(weight_NA.reshape(-1).astype(wide(weight_NA)), (0, padding))
    ordered = _sort_by_expert(keys, weights, experts)

    rows, tile = tiles * size, jnp.arange(tiles)
    choice_P, weight_P = (a[:rows] for a in ordered)
    expert_T = jnp.minimum(
        jnp.sum(tile_ends_E <= tile[:, None], axis=1, dtype=jnp.int32), experts - 1
    )
    used = jnp.minimum(tile_ends_E[-1:], tiles)
    is_choice_P = (choice_P < choices) & (jnp.arange(rows) < used * size)
    first_beyond = None if tiles == most else jnp.sum(tile_ends_E <= tiles)
    return _Plan(
        expert_T,
        used,
        (jnp.minimum(tile_ends_E, tiles) - jnp.minimum(tile_starts_E, tiles)) * size,
        is_choice_P,
        choice_P,
        _token(choice_P, weight_NA),
        jnp.where(is_choice_P, weight_P, 0),
        ordered,
        jnp.maximum(tile_starts_E * size, rows),
        tile_starts_E * size + count_E,
        tile_starts_E < tiles,
        first_beyond,
    )


def _tile_sizes(choices: int, experts: int, capacity: int) -> tuple[int, int, int]:
    """(rows of a tile, tiles of the layout, tiles with which a layout holds any choices)."""
    capacity = min(capacity, choices)
    # A quarter of an expert's mean number of rows, at most, as half a tile of each expert is
    # wasted.
    size = min(1 << max((capacity // experts // 4).bit_length() - 1, 4), _LARGEST_TILE)
    most = choices // size + experts  # every expert has at least one tile
    tiles = most if capacity == choices else min(-(-capacity // size) + experts // 2, most)
    return size, tiles, most


def _sort_by_expert(keys, weights, experts: int):
    """(numbers, weights) sorted by key, an expert up to E; the numbers count the entries."""
    count = keys.shape[0]
    numbers, bits = jnp.arange(count, dtype=jnp.int32), (count - 1).bit_length()
    # Key and number in one integer, if they fit: one array less to sort.
    if (experts + 1) << bits <= _LARGEST_NUMBER:
        numbers, weights = jax.lax.sort(
            (keys << bits | numbers, weights), num_keys=1, is_stable=False
        )
        return numbers & (1 << bits) - 1, weights
    _, *ordered = jax.lax.sort((keys, numbers, weights), num_keys=1, is_stable=True)
    return tuple(ordered)


def _token(choice, weight_NA):
    """The token of a choice's number; any token for numbers from Q on."""
    return jnp.minimum(choice, weight_NA.size - 1) // weight_NA.shape[1]


def _rows(x, index):
    return x.at[index].get(mode="promise_in_bounds")


# ---- the choices in the layout


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


def _product_gradients(x_PD, weight_P, gate_up_EDF, down_EID, sizes_E, dy_PD, *dw_before):
    _, pullback = jax.vjp(lambda *a: _products(*a, sizes_E), x_PD, weight_P, gate_up_EDF, down_EID)
    dx_PD, dweight_P, *dw = pullback(dy_PD)
    return dx_PD, dweight_P, *(map(jnp.add, dw, dw_before) if dw_before else dw)


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
    # Kernels take the expert of each tile, grouped products the rows of each expert.
    groups = (plan.expert_T, plan.used) if chosen.is_kernel else (plan.sizes_E,)
    return chosen.function(name)(x_PD, plan.weight_P, gate_up_EDF, down_EID, *groups, *gradients)


FORMS = (Form("xla", ("cpu", "gpu", "tpu"), dict(mlp=_products, mlp_gradients=_product_gradients)),)
SUM_FORMS = (Form("xla", ("cpu", "gpu", "tpu"), dict(sum_by_token=_sum_by_token)),)


# ---- the choices beyond the layout


def _for_experts_beyond(plan: _Plan, body, carry):
    """`carry` after carry = body(e, carry) for every expert e with choices beyond the layout."""
    if plan.first_beyond is None:
        return carry
    return jax.lax.fori_loop(plan.first_beyond, plan.ends_E.shape[0], body, carry)


class _ChoicesBeyond(NamedTuple):
    """The choices of a step of the loop. Entries behind the expert's last choice have weight 0 and
    any token, and scatters drop them.
    """

    token_O: jax.Array
    weight_O: jax.Array
    target_O: jax.Array  # the token, or a number from N on
    choice_O: jax.Array  # the choice's number, or one from Q on


def _for_choices_beyond(plan: _Plan, e, weight_NA, step, carry):
    """`carry` after carry = step(choices, carry) for all choices of expert e beyond the layout."""
    beyond = plan.beyond_E[e]

    def body(k, carry):
        first, index_O = beyond + k * _LOOP_ROWS, jnp.arange(_LOOP_ROWS)
        choice_O, weight_O = (
            jax.lax.dynamic_slice(a, (first,), (_LOOP_ROWS,)) for a in plan.ordered
        )
        token_O, is_choice_O = _token(choice_O, weight_NA), first + index_O < plan.ends_E[e]
        return step(
            _ChoicesBeyond(
                token_O,
                jnp.where(is_choice_O, weight_O, 0),
                jnp.where(is_choice_O, token_O, weight_NA.shape[0] + index_O),
                jnp.where(is_choice_O, choice_O, weight_NA.size + index_O),
            ),
            carry,
        )

    return jax.lax.fori_loop(0, -(-(plan.ends_E[e] - beyond) // _LOOP_ROWS), body, carry)


def _matrices(e, gate_up_EDF, down_EID):
    return tuple(w[e].astype(wide(w)) for w in (gate_up_EDF, down_EID))


def _dense(x_OD, weight_O, gate_up_DF, down_ID):
    return _weighted_swiglu(x_OD @ gate_up_DF, weight_O) @ down_ID
