"""The routed experts of one device. Each token passes through the experts that it chose, and the
results of a token's experts are added with the router's weights.

A "choice" is a pair of a token and one of its experts. The choices are sorted by expert, and each
expert gets whole tiles of rows, one row for each of its choices. These tiles are called the layout.
The router's weight multiplies the hidden layer of the expert. If the router's weight multiplied the
results of the expert (in the backward pass, the gradients of the results), extra passes over memory
would be necessary.

The layout has room for a fixed number of choices, the capacity. If an unbalanced router sends more
choices to this device, a loop computes the choices that do not fit, one expert after another. If
all choices fit, the loop runs no step. No choice is dropped.

N tokens, A choices per token, Q = N·A choices in all, D model width, E experts, I expert width,
F = 2I (gate before up), T tiles of M rows, P = T·M rows of the layout, O rows per step of the loop
for choices that do not fit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import accumulation_dtype
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.ops.grouped_matmul import grouped_matmul
from qwen3next_jax.ops.implementations import XlaImplementation, choose_implementation

_LARGEST_TILE = 256
LOOP_ROWS = 512
_LARGEST_NUMBER = 2**31


class SavedForBackward(NamedTuple):
    """Arrays of the forward pass that the backward pass would otherwise compute again.

    Attributes:
      sorted_choices: the choices, sorted by expert.
      hidden_PF: the hidden layer of the experts (gate before up) in the layout, in x's dtype; None:
        the backward pass computes the hidden layer again.
    """

    sorted_choices: "SortedChoices"
    hidden_PF: jax.Array | None


def routed_experts(x, weight, expert, gate_up, down, *, capacity: int, keep_hidden: bool = False):
    """Returns for each token the sum of weight · SwiGLU_expert(x) over the token's choices. Choices
    of experts on other devices are left out.

    Args:
      x: [N, D], the tokens. On a TPU, a NaN or an infinity of one token may reach the results of
        other tokens, because a kernel multiplies rows of other tokens by zero (`sum_by_token`).
      weight: [N, A], the router's weight of each choice.
      expert: [N, A] integers, the expert of each choice. Numbers below 0 and from E on stand for
        experts on other devices. No token chooses an expert of this device twice.
      gate_up: [E, D, 2, I] or, flattened, [E, D, F]: the gate and up matrices.
      down: [E, I, D], the down matrices.
      capacity: number of choices for which the layout has room. Up to rounding, the result does not
        depend on the capacity.
      keep_hidden: whether to keep the hidden layer for `routed_experts_gradients`.

    Returns:
      (an array [N, D] in x's dtype, the arrays saved for `routed_experts_gradients`). The results
      of the layout are summed in float32; the loop adds its results in x's dtype.
    """
    sorted_choices = _sort_choices(weight, expert, gate_up.shape[0], capacity)
    layout = _make_tile_layout(sorted_choices, weight, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    y_PD, hidden_PF = _run_weighted_mlp(
        layout, _take_rows(x, layout.token_P), flat, down, keep_hidden
    )

    def add_expert(e, y_ND):
        w = _matrices_of_expert(e, flat, down)

        def step(overflow, y_ND):
            y_OD = _weighted_expert_mlp(
                _take_rows(x, overflow.token_O).astype(accumulation_dtype(x)), overflow.weight_O, *w
            )
            return y_ND.at[overflow.scatter_token_O].add(
                y_OD.astype(x.dtype), mode="drop", unique_indices=True
            )

        return _loop_over_overflow_choices(layout, e, weight, step, y_ND)

    choice_P = jnp.where(layout.is_choice_P, layout.choice_P, weight.size)
    sums_ND = sum_by_token(y_PD, choice_P, weight.shape)
    return _loop_over_overflowing_experts(layout, add_expert, sums_ND), SavedForBackward(
        sorted_choices, hidden_PF
    )


def routed_experts_gradients(
    x,
    weight,
    expert,
    gate_up,
    down,
    dy,
    *dw_before,
    capacity: int,
    kept: SavedForBackward | None = None,
):
    """Returns the gradients of `routed_experts`.

    Args:
      x, weight, expert, gate_up, down, capacity: the arguments of `routed_experts`.
      dy: [N, D], the gradient of the result of `routed_experts`.
      dw_before: nothing, or two arrays in the shapes and dtypes of gate_up and down: gradients of
        gate_up and down from other tokens, to which the gradients of this call are added.
      kept: the second result of `routed_experts`; None: the arrays are computed again. With
        `kept`, the function reads only the shape and the dtype of `weight`, and does not read
        `expert`.

    Returns:
      dx [N, D], dweight [N, A], dgate_up and ddown. dweight is in float32. dx, dgate_up and ddown
      have the shapes and dtypes of x, gate_up and down.
    """
    if kept is None:
        kept = SavedForBackward(_sort_choices(weight, expert, gate_up.shape[0], capacity), None)
    layout = _make_tile_layout(kept.sorted_choices, weight, gate_up.shape[0], capacity)
    flat = gate_up.reshape(*gate_up.shape[:2], -1)
    dw_before = [d.reshape(w.shape) for d, w in zip(dw_before, (flat, down))]
    dx_PD, dweight_P, *dw = _run_weighted_mlp_gradients(
        layout,
        _take_rows(x, layout.token_P),
        flat,
        down,
        kept.hidden_PF,
        _take_rows(dy, layout.token_P),
        *dw_before,
    )
    choice_P = jnp.where(layout.is_choice_P, layout.choice_P, weight.size)
    dx_ND = sum_by_token(dx_PD, choice_P, weight.shape)
    dweight_Q = _values_by_choice(
        dweight_P.astype(accumulation_dtype(weight)), choice_P, weight.shape
    )

    def add_expert(e, carry):
        w = _matrices_of_expert(e, flat, down)

        def step(overflow, carry):
            sums, dx_ND, dweight_Q = carry
            _, pullback = jax.vjp(
                _weighted_expert_mlp,
                _take_rows(x, overflow.token_O).astype(accumulation_dtype(x)),
                overflow.weight_O,
                *w,
            )
            dx_OD, dweight_O, *terms = pullback(
                _take_rows(dy, overflow.token_O).astype(accumulation_dtype(x))
            )
            return (
                jax.tree.map(jnp.add, sums, terms),
                dx_ND.at[overflow.scatter_token_O].add(
                    dx_OD.astype(x.dtype), mode="drop", unique_indices=True
                ),
                dweight_Q.at[overflow.choice_O].set(dweight_O, mode="drop", unique_indices=True),
            )

        dw, dx_ND, dweight_Q = carry
        sums, dx_ND, dweight_Q = _loop_over_overflow_choices(
            layout, e, weight, step, ([jnp.zeros_like(m) for m in w], dx_ND, dweight_Q)
        )
        # If the expert has no tile and there are no earlier gradients, the kernels have not written
        # its gradient, so `d[e]` is undefined and is replaced by zero.
        written = layout.has_tile_E[e] | bool(dw_before)
        dw = [
            d.at[e].set((jnp.where(written, d[e].astype(s.dtype), 0) + s).astype(d.dtype))
            for d, s in zip(dw, sums)
        ]
        return dw, dx_ND, dweight_Q

    (dflat, ddown), dx_ND, dweight_Q = _loop_over_overflowing_experts(
        layout, add_expert, (dw, dx_ND, dweight_Q)
    )
    return dx_ND, dweight_Q.reshape(weight.shape), dflat.reshape(gate_up.shape), ddown


def sum_by_token(rows, choice, shape: tuple[int, int]):
    """Returns the sum of each token's rows, [N, D], accumulated in float32.

    Args:
      rows: [P, D]. All numbers have to be finite, because a kernel may multiply rows by zero.
      choice: [P] integers in any order, a number for each row. A row that belongs to choice a of
        token n has the number n · A + a. Two rows must not have the same number below Q. Rows with
        a number of Q or more are left out.
      shape: the tuple (N, A).
    """
    chosen = choose_implementation(
        "sum_by_token", None, SUM_XLA_IMPLEMENTATIONS, rows=rows, shape=shape
    )
    return chosen.function_named("sum_by_token")(rows, choice, shape)


def _values_by_choice(values, choice, shape: tuple[int, int]):
    """Returns an array [Q] with `values` [P] at the indices `choice` [P], and 0 elsewhere.
    `sum_by_token` describes `choice`. A value with an index of Q or more is left out, and may be
    undefined.
    """
    rows = jax.ShapeDtypeStruct((*values.shape, 1), values.dtype)
    chosen = choose_implementation(
        "sum_by_token", None, SUM_XLA_IMPLEMENTATIONS, rows=rows, shape=shape
    )
    return chosen.function_named("values_by_choice")(values, choice, shape)


def _values_by_choice_in_xla(values, choice, shape: tuple[int, int]):
    """Computes `_values_by_choice` in XLA."""
    zeros = jnp.zeros(shape[0] * shape[1], values.dtype)
    return zeros.at[choice].set(values, mode="drop", unique_indices=True)


def _sum_by_token_in_xla(rows, choice, shape: tuple[int, int]):
    """Computes `sum_by_token` in XLA with a gather. A scatter on a GPU would add the terms in an
    order that changes from run to run.
    """
    place_Q = (
        jnp.full(shape[0] * shape[1], rows.shape[0])
        .at[choice]
        .set(jnp.arange(rows.shape[0]), mode="drop", unique_indices=True)
    )
    rows_NAD = rows.at[place_Q.reshape(shape)].get(mode="fill", fill_value=0)
    return jnp.sum(rows_NAD, axis=1, dtype=accumulation_dtype(rows)).astype(rows.dtype)


# ---- the layout


class _TileLayout(NamedTuple):
    """The layout of the choices in tiles, and the choices that do not fit in the layout
    ("overflow"). Choice a of token n has the number n · A + a.
    """

    # [T], the expert of each tile, in ascending order
    expert_T: jax.Array
    # [1], the number of tiles that belong to an expert; the tiles after them hold nothing
    used_tile_count: jax.Array
    # [E], the number of rows in the tiles of each expert
    expert_rows_E: jax.Array
    # [P], whether the row holds a choice; a row without one has weight 0 and an arbitrary token
    is_choice_P: jax.Array
    # [P], the number of the choice that each row holds
    choice_P: jax.Array
    # [P], the token of that choice
    token_P: jax.Array
    # [P], the router's weight of that choice, float32
    weight_P: jax.Array
    # the numbers and the weights of all choices and of the padding, sorted by expert, followed by O
    # unused entries
    sorted_numbers_and_weights: tuple[jax.Array, jax.Array]
    # [E], the index in the sorted numbers of the expert's first choice that does not fit in the
    # layout
    overflow_start_E: jax.Array
    # [E], one more than the index in the sorted numbers of the expert's last choice
    choices_end_E: jax.Array
    # [E], whether the layout has a tile for the expert
    has_tile_E: jax.Array
    # scalar, the first expert with choices that do not fit, or E if all choices fit; None if the
    # layout is so large that all choices always fit
    first_overflowing_expert: jax.Array | None


class SortedChoices(NamedTuple):
    """The choices and the padding, sorted by expert.

    Attributes:
      choice_count_E: [E] int32, the number of choices of each expert.
      sorted_numbers_and_weights: the numbers and the weights of all choices and of the padding,
        sorted by expert, followed by O unused entries.
    """

    choice_count_E: jax.Array
    sorted_numbers_and_weights: tuple[jax.Array, jax.Array]


def _sort_choices(weight_NA, expert_NA, experts: int, capacity: int) -> SortedChoices:
    """Sorts the choices `expert_NA`, with the router's weights `weight_NA`, by expert."""
    size, _, _ = _tile_size_and_counts(expert_NA.size, experts, capacity)
    expert_Q = (
        jnp.where((expert_NA >= 0) & (expert_NA < experts), expert_NA, experts)
        .reshape(-1)
        .astype(jnp.int32)
    )
    count_E = jnp.sum(expert_Q[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles_E = jnp.maximum(-(-count_E // size), 1)
    # The sort puts the padding of an expert's last tile right after the expert's choices, so the
    # sorted entries already are the layout. Padding has numbers from Q on, and weight 0.
    padding_EM = jnp.where(
        jnp.arange(size) < (tiles_E * size - count_E)[:, None],
        jnp.arange(experts)[:, None],
        experts,
    )
    padding = experts * size + LOOP_ROWS
    keys = jnp.concatenate([expert_Q, padding_EM.reshape(-1), jnp.full(LOOP_ROWS, experts)])
    weights = jnp.pad(weight_NA.reshape(-1).astype(accumulation_dtype(weight_NA)), (0, padding))
    return SortedChoices(count_E, _sort_entries_by_expert(keys, weights, experts))


def _make_tile_layout(
    sorted_choices: SortedChoices, weight_NA, experts: int, capacity: int
) -> _TileLayout:
    """Returns the layout of sorted choices. The function reads only the shape of `weight_NA`."""
    choices = weight_NA.size
    size, tiles, most = _tile_size_and_counts(choices, experts, capacity)
    count_E, sorted_numbers_and_weights = sorted_choices
    tiles_E = jnp.maximum(-(-count_E // size), 1)
    tile_ends_E = jnp.cumsum(tiles_E)
    tile_starts_E = tile_ends_E - tiles_E
    rows, tile = tiles * size, jnp.arange(tiles)
    choice_P, weight_P = (a[:rows] for a in sorted_numbers_and_weights)
    expert_T = jnp.minimum(
        jnp.sum(tile_ends_E <= tile[:, None], axis=1, dtype=jnp.int32), experts - 1
    )
    used = jnp.minimum(tile_ends_E[-1:], tiles)
    is_choice_P = (choice_P < choices) & (jnp.arange(rows) < used * size)
    first_overflowing = None if tiles == most else jnp.sum(tile_ends_E <= tiles)
    return _TileLayout(
        expert_T,
        used,
        (jnp.minimum(tile_ends_E, tiles) - jnp.minimum(tile_starts_E, tiles)) * size,
        is_choice_P,
        choice_P,
        _token_of_choice(choice_P, weight_NA),
        jnp.where(is_choice_P, weight_P, 0),
        sorted_numbers_and_weights,
        jnp.maximum(tile_starts_E * size, rows),
        tile_starts_E * size + count_E,
        tile_starts_E < tiles,
        first_overflowing,
    )


def _tile_size_and_counts(choices: int, experts: int, capacity: int) -> tuple[int, int, int]:
    """Returns three numbers: the number of rows of a tile, the number of tiles of the layout, and
    the number of tiles with which all choices of any router would fit.
    """
    capacity = min(capacity, choices)
    # On average, half a tile of each expert is padding. To keep that small, a tile has at most a
    # quarter of the mean number of rows of an expert, but at least 16 rows, or on a GPU 64: its
    # kernels copy the rows in tiles of 64.
    smallest = 64 if compile_target().platform == "gpu" else 16
    size = min(max(1 << (capacity // experts // 4).bit_length() >> 1, smallest), _LARGEST_TILE)
    most = choices // size + experts  # every expert has at least one tile
    tiles = most if capacity == choices else min(-(-capacity // size) + experts // 2, most)
    return size, tiles, most


def _sort_entries_by_expert(keys, weights, experts: int):
    """Returns (numbers, weights) sorted by key.

    Args:
      keys: integers from 0 to E, the expert of each entry. The number E stands for no expert of
        this device.
      weights: the weight of each entry.
      experts: E.

    Returns:
      Two arrays: the index that each entry had before the sort, and the weight of each entry.
    """
    count = keys.shape[0]
    numbers, bits = jnp.arange(count, dtype=jnp.int32), (count - 1).bit_length()
    # If the key and the number fit in one integer, one array fewer has to be sorted.
    if (experts + 1) << bits <= _LARGEST_NUMBER:
        numbers, weights = jax.lax.sort(
            (keys << bits | numbers, weights), num_keys=1, is_stable=False
        )
        return numbers & (1 << bits) - 1, weights
    _, *ordered = jax.lax.sort((keys, numbers, weights), num_keys=1, is_stable=True)
    return tuple(ordered)


def _token_of_choice(choice, weight_NA):
    """Returns the token of each choice, given the choice's number. For numbers of Q and more, the
    token is arbitrary.
    """
    return jnp.minimum(choice, weight_NA.size - 1) // weight_NA.shape[1]


def _take_rows(x, index):
    """Returns the rows x[index]. All indices must exist."""
    return x.at[index].get(mode="promise_in_bounds")


# ---- the choices in the layout


def _weighted_mlp_in_xla(x_PD, weight_P, gate_up_EDF, down_EID, sizes_E, keep_hidden: bool):
    """Computes the weighted SwiGLU experts in XLA. Returns the results [P, D], and the hidden layer
    [P, F] if `keep_hidden`, else None. `sizes_E` is the number of rows of each expert; the results
    of rows of no expert are zeros.
    """
    hidden_PF = grouped_matmul(x_PD, gate_up_EDF, sizes_E)
    y_PD = _results_from_hidden_layer(hidden_PF, weight_P, down_EID, sizes_E)
    return y_PD, hidden_PF if keep_hidden else None


def _results_from_hidden_layer(hidden_PF, weight_P, down_EID, sizes_E):
    activation_PI = _weighted_swiglu(hidden_PF.astype(accumulation_dtype(hidden_PF)), weight_P)
    return grouped_matmul(activation_PI.astype(hidden_PF.dtype), down_EID, sizes_E)


def _weighted_swiglu(hidden, weight):
    """Returns silu(gate) · up · weight [rows, I], given the hidden layer [rows, F]."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up * weight[:, None]


def _weighted_mlp_gradients_in_xla(
    x_PD, weight_P, gate_up_EDF, down_EID, sizes_E, hidden_PF, dy_PD, *dw_before
):
    """Returns the gradients of x, weight, gate_up and down of `_weighted_mlp_in_xla`, given dy
    [P, D]. `hidden_PF` is the hidden layer; None: the hidden layer is computed again. If
    `dw_before` is given, these earlier gradients of gate_up and down are added to the gradients of
    this call.
    """
    # If the hidden layer is known, nothing reads this product, and XLA drops it.
    product, pull_first = jax.vjp(lambda *a: grouped_matmul(*a, sizes_E), x_PD, gate_up_EDF)
    _, pull_rest = jax.vjp(
        lambda *a: _results_from_hidden_layer(*a, sizes_E),
        product if hidden_PF is None else hidden_PF,
        weight_P,
        down_EID,
    )
    dhidden_PF, dweight_P, ddown = pull_rest(dy_PD)
    dx_PD, dgate_up = pull_first(dhidden_PF)
    dw = [dgate_up, ddown]
    return dx_PD, dweight_P, *(map(jnp.add, dw, dw_before) if dw_before else dw)


def _run_weighted_mlp(layout: _TileLayout, x_PD, gate_up_EDF, down_EID, keep_hidden: bool):
    return _run_chosen_implementation(
        layout, "mlp", x_PD, gate_up_EDF, down_EID, keep_hidden=keep_hidden
    )


def _run_weighted_mlp_gradients(
    layout: _TileLayout, x_PD, gate_up_EDF, down_EID, hidden_PF, *gradients
):
    return _run_chosen_implementation(
        layout, "mlp_gradients", x_PD, gate_up_EDF, down_EID, hidden_PF, *gradients
    )


def _run_chosen_implementation(
    layout: _TileLayout, name: str, x_PD, gate_up_EDF, down_EID, *others, **options
):
    """Runs the function `name` ("mlp" or "mlp_gradients") of the chosen implementation on the rows
    of the layout. For "mlp_gradients", `others` are the hidden layer, dy and the earlier gradients
    of the weights.
    """
    chosen = choose_implementation(
        "routed_experts",
        None,
        XLA_IMPLEMENTATIONS,
        x=x_PD,
        gate_up=gate_up_EDF,
        tile=x_PD.shape[0] // layout.expert_T.shape[0],
        added=len(others) > 2,
    )
    # Kernels take the expert of each tile. The XLA implementation takes the number of rows of each
    # expert.
    groups = (
        (layout.expert_T, layout.used_tile_count) if chosen.is_kernel else (layout.expert_rows_E,)
    )
    return chosen.function_named(name)(
        x_PD, layout.weight_P, gate_up_EDF, down_EID, *groups, *others, **options
    )


XLA_IMPLEMENTATIONS = (
    XlaImplementation(
        "xla",
        ("cpu", "gpu", "tpu"),
        dict(mlp=_weighted_mlp_in_xla, mlp_gradients=_weighted_mlp_gradients_in_xla),
    ),
)
SUM_XLA_IMPLEMENTATIONS = (
    XlaImplementation(
        "xla",
        ("cpu", "gpu", "tpu"),
        dict(sum_by_token=_sum_by_token_in_xla, values_by_choice=_values_by_choice_in_xla),
    ),
)


# ---- the choices that do not fit in the layout


def _loop_over_overflowing_experts(layout: _TileLayout, body, carry):
    """Runs carry = body(e, carry) for each expert e, from the first expert with choices that do not
    fit in the layout to the last expert. Returns the last `carry`.
    """
    if layout.first_overflowing_expert is None:
        return carry
    return jax.lax.fori_loop(
        layout.first_overflowing_expert, layout.choices_end_E.shape[0], body, carry
    )


class _OverflowChoices(NamedTuple):
    """O choices of one expert that do not fit in the layout, computed by one step of the loop.
    Entries after the expert's last choice have weight 0 and an arbitrary token; scatters drop these
    entries.
    """

    token_O: jax.Array
    weight_O: jax.Array
    scatter_token_O: jax.Array  # the token; N or more for entries that scatters drop
    choice_O: jax.Array  # the number of the choice; Q or more for entries that scatters drop


def _loop_over_overflow_choices(layout: _TileLayout, e, weight_NA, step, carry):
    """Runs carry = step(choices, carry) until all choices of expert e that do not fit in the layout
    have been passed to `step`, O at a time. Returns the last `carry`.
    """
    overflow_start = layout.overflow_start_E[e]

    def body(k, carry):
        first, index_O = overflow_start + k * LOOP_ROWS, jnp.arange(LOOP_ROWS)
        choice_O, weight_O = (
            jax.lax.dynamic_slice(a, (first,), (LOOP_ROWS,))
            for a in layout.sorted_numbers_and_weights
        )
        token_O, is_choice_O = (
            _token_of_choice(choice_O, weight_NA),
            first + index_O < layout.choices_end_E[e],
        )
        return step(
            _OverflowChoices(
                token_O,
                jnp.where(is_choice_O, weight_O, 0),
                jnp.where(is_choice_O, token_O, weight_NA.shape[0] + index_O),
                jnp.where(is_choice_O, choice_O, weight_NA.size + index_O),
            ),
            carry,
        )

    return jax.lax.fori_loop(
        0, -(-(layout.choices_end_E[e] - overflow_start) // LOOP_ROWS), body, carry
    )


def _matrices_of_expert(e, gate_up_EDF, down_EID):
    """Returns the matrices of expert e in the dtype of accumulation."""
    return tuple(w[e].astype(accumulation_dtype(w)) for w in (gate_up_EDF, down_EID))


def _weighted_expert_mlp(x_OD, weight_O, gate_up_DF, down_ID):
    """Returns the weighted SwiGLU of one expert for all rows, [O, D]."""
    return _weighted_swiglu(x_OD @ gate_up_DF, weight_O) @ down_ID
