"""Chooses parameters by conditions, such as "kind=norm" or "layer=0-3 part=v" (docs/adapting.md).

A condition is FIELD=VALUE or FIELD!=VALUE; several conditions, separated by spaces, must all hold.
A value may list alternatives, separated by "|". The fields:

    name    the path of the parameter, with the wildcards of a shell: name=*/mixer/*. "*" also
            matches "/". A word without "=" is a name.
    kind    the kind of the parameter, as it is declared (`model.parameters.ParameterKind`)
    layer   the number of a layer, or a range of numbers with both ends: layer=0-3|7. The layer of
            the multi-token prediction module is numbered after the last layer of the trunk.
    part    the name of one of the matrices that lie side by side in a parameter: part=v

One parameter may hold the arrays of several layers, stacked, and several matrices side by side;
conditions may choose only some of these layers and matrices.
"""

import fnmatch
import math
import typing
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, did_you_mean, require, short_repr
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.parameters import ParameterDeclaration, ParameterKind

FIELDS = ("name", "kind", "layer", "part")


class ParameterChoice(NamedTuple):
    """The layers and parts of one parameter that the conditions choose.

    Attributes:
      chosen_layer_parts: bool [layers, parts], whether each part of each layer is chosen. `layers`
        is the number of layers that are stacked in the parameter, 1 without a stack. `parts` is the
        number of declared parts of the parameter, 1 for a single matrix.
      declared: the declaration of the parameter.
    """

    chosen_layer_parts: np.ndarray
    declared: ParameterDeclaration

    @property
    def is_whole(self) -> bool:
        """Whether the whole parameter is chosen."""
        return bool(self.chosen_layer_parts.all())

    @property
    def element_count(self) -> int:
        """The number of chosen elements of the parameter."""
        columns = int((self.chosen_layer_parts * np.array(_part_widths(self.declared))).sum())
        return (
            self.declared.size
            // (len(self.chosen_layer_parts) * sum(_part_widths(self.declared)))
            * columns
        )


def layer_and_part_counts(declared: ParameterDeclaration) -> tuple[int, int]:
    """Returns (number of stacked layers, number of parts) of a parameter, each at least 1."""
    return math.prod(declared.stack_shape), max(len(declared.parts), 1)


def broadcast_to_parameter(declared: ParameterDeclaration, values: np.ndarray) -> np.ndarray:
    """Returns one value for each layer and part of a parameter, `values` [layers, parts], as an
    array that can be broadcast to the parameter.
    """
    columns = np.repeat(values, _part_widths(declared), axis=1)
    last = (*(1,) * (len(declared.shape) - 1), columns.shape[-1]) if declared.shape else ()
    return columns.reshape(*declared.stack_shape, *last)


def _part_widths(declared: ParameterDeclaration) -> list[int]:
    return [part.width for part in declared.parts] or [(1, *declared.shape)[-1]]


def choose_parameters(
    model: ModelConfig, parameters: Mapping[str, ParameterDeclaration], text: str, setting: str
) -> dict[str, ParameterChoice]:
    """Chooses the parameters for which all conditions of `text` hold.

    Args:
      model: the settings of the model.
      parameters: {path of a parameter: its declaration}.
      text: the conditions, separated by spaces.
      setting: the name of the setting that holds `text`, for messages.

    Returns:
      {path of a parameter: its chosen layers and parts}, without parameters of which nothing is
      chosen.

    Raises:
      UserError: `text` is not valid, or it chooses nothing.
    """
    where = f"{setting} = {text!r}"
    # The module for multi-token prediction is the layer after the last one.
    last_layer = model.num_hidden_layers - 1 + bool(model.mtp_depth)
    conditions = [_parse_condition(word, parameters, last_layer, where) for word in text.split()]
    require(bool(conditions), f"{where}: expected conditions such as kind=norm or layer=0-3")
    chosen = {}
    for path, declared in parameters.items():
        cells = np.ones(layer_and_part_counts(declared), bool)
        for holds in conditions:
            cells &= holds(path, declared, _layer_numbers(model, path, declared))
        if cells.any():
            chosen[path] = ParameterChoice(cells, declared)
    if not chosen:
        raise UserError(
            f"{where}: it chooses no parameter of this model, whose parameters are, for "
            "example, " + ", ".join(list(parameters)[:4])
        )
    return chosen


def _layer_numbers(
    model: ModelConfig, path: str, declared: ParameterDeclaration
) -> list[int | None]:
    """Returns the number of each layer that is stacked in the parameter. If the parameter belongs
    to no layer, every number is None.
    """
    group, block, *_ = path.split("/") + [""]
    count = math.prod(declared.stack_shape)
    if group == "mtp":
        return [model.num_hidden_layers] * count
    layers = model.layer_stacks[int(block)] if group == "layers" else ()
    return list(layers) if len(layers) == count else [None] * count


def _parse_condition(
    word: str, parameters: Mapping[str, ParameterDeclaration], last_layer: int, where: str
) -> Callable[[str, ParameterDeclaration, list[int | None]], np.ndarray | bool]:
    """Parses one condition, such as "layer=0-3".

    Returns:
      A function of a parameter (path, declaration, numbers of its layers) → bool, or a bool array
      that can be broadcast to [layers, parts]: where the condition holds.
    """
    field, equals, value = word.partition("=")
    if not equals:
        field, value = "name", word
    negates = field.endswith("!")
    field = field.removesuffix("!")
    require(
        field in FIELDS,
        f"{where}: {field!r} is no field{did_you_mean(field, FIELDS)}: expected one of "
        f"{', '.join(FIELDS)}",
    )
    values = value.split("|")
    if field == "kind":
        kinds = typing.get_args(ParameterKind)
        for kind in values:
            require(
                kind in kinds,
                f"{where}: no kind {kind!r}{did_you_mean(kind, kinds)}: expected one of "
                f"{', '.join(kinds)}",
            )
    if field == "part":
        known = sorted({part.name for declared in parameters.values() for part in declared.parts})
        for part in values:
            require(
                part in known,
                f"{where}: no parameter of this model has a part {part!r}"
                f"{did_you_mean(part, known)}: expected one of {', '.join(known)}",
            )
    ranges = (
        [_parse_layer_range(text, last_layer, where) for text in values] if field == "layer" else []
    )

    def holds(
        path: str, declared: ParameterDeclaration, layer_numbers: list[int | None]
    ) -> np.ndarray | bool:
        if field == "name":
            return any(fnmatch.fnmatchcase(path, pattern) for pattern in values)
        if field == "kind":
            return declared.kind in values
        if field == "layer":
            return np.array([_is_in_any_range(layer, ranges) for layer in layer_numbers])[:, None]
        names = [part.name for part in declared.parts] or [""]
        return np.array([name in values for name in names])[None, :]

    return (lambda *parameter: np.logical_not(holds(*parameter))) if negates else holds


def _parse_layer_range(text: str, last_layer: int, where: str) -> range:
    """Parses a value of the field "layer", such as "7" or "0-3". Returns the range of the layers,
    all of which must lie in 0 … `last_layer`.
    """
    first, dash, last = text.partition("-")
    last = last if dash else first
    require(
        first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 19,
        f"{where}: layer={short_repr(text)}: expected a number, or a range with both ends such as "
        "0-3",
    )
    require(
        int(first) <= int(last) <= last_layer,
        f"{where}: layer={text}: expected layers of this model, which are 0 to {last_layer}",
    )
    return range(int(first), int(last) + 1)


def _is_in_any_range(layer: int | None, ranges: list[range]) -> bool:
    return layer is not None and any(layer in numbers for numbers in ranges)
