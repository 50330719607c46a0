"""Divides the parameters into groups: the main group, which the main optimizer trains; the tables
that lazy AdamW trains (`optimizer.ngram_table`); and frozen parameters (`train.freeze`), which
nothing trains. `resolve.resolve_run` does this once. Parameters of the main group may have another
learning rate or weight decay (`optimizer.groups`).

What is frozen takes no gradient and has no optimizer state. Two arrays can be frozen in part:

- Several layers may be stacked in one array. The main group then has an array of the layers that
  are trained. The backward pass still computes the gradient of every layer of the stack, and the
  gradients of its frozen layers are dropped.
- Several matrices may be parts of one array. The main group then has the whole array, with
  gradients that are 0 in the frozen parts. The frozen parts have optimizer state, too. The rule
  `KeepFrozen` undoes what weight decay changes in them.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import Config, ModelConfig, OptimizerConfig, ParameterGroup
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.adapter_names import is_adapter
from qwen3next_jax.model.parameters import Declared
from qwen3next_jax.model.selection import (
    ParameterChoice,
    broadcast_to_parameter,
    choose_parameters,
    layer_and_part_counts,
)
from qwen3next_jax.training.optimizer import Scale
from qwen3next_jax.training.scaling import scaling_factors
from qwen3next_jax.training.update_rules import StepInput, UpdateRule

# The most names of arrays that a line of `ParameterGroups.lines` lists.
NAMES_SHOWN = 4


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterGroups:
    """The groups of a model's parameters. Trees of parameters are nested dicts; "path" is a path
    such as "layers/0/mixer/q_proj".

    Attributes:
      parameters: path → declaration, for the arrays of the main group, without frozen layers.
      tables: the result of `lazy_adamw.lazy_tables`, without frozen tables.
      frozen_paths: the paths of the arrays that are frozen as a whole.
      trained_layers: path of a stack that is frozen in part → the indices of its other layers.
      frozen_elements: path of an array that is frozen in part → bool array, which can be broadcast
        to the array with all layers: whether an element is frozen.
      learning_rate_factors, weight_decays: the arguments of `optimizer.make_optimizer`.
      start_factors: path → by what the random start values of the array are multiplied, for the
        arrays with other factors than 1.
      lines: text for the terminal: what each entry of `train.freeze` and `optimizer.groups`
        chooses, and the number of trained parameters; () if both settings are empty.
    """

    parameters: Mapping[str, Declared]
    tables: Mapping[tuple[str | int, ...], int]
    frozen_paths: frozenset[str]
    trained_layers: Mapping[str, np.ndarray]
    frozen_elements: Mapping[str, np.ndarray]
    learning_rate_factors: Mapping[str, Scale]
    weight_decays: Mapping[str, Scale]
    start_factors: Mapping[str, float]
    lines: tuple[str, ...]

    def main(self, tree: dict) -> dict:
        """Returns the main group of `tree`, a tree of all parameters."""

        def of_main(path, leaf):
            if path not in self.parameters:
                return None
            return leaf[self.trained_layers[path]] if path in self.trained_layers else leaf

        return map_leaves(of_main, tree)

    def tables_of(self, tree: dict) -> dict:
        """Returns the tables of `tree`, a tree of all parameters, that lazy AdamW trains."""
        return map_leaves(lambda path, leaf: leaf if path in self._table_paths else None, tree)

    def scale_start(self, params: dict) -> dict:
        """Returns the random start values `params` times their factors."""
        return (
            map_leaves(lambda path, leaf: leaf * self.start_factors.get(path, 1), params)
            if self.start_factors
            else params
        )

    def frozen(self, tree: dict) -> dict:
        """Returns the arrays of `tree`, a tree of all parameters, that nothing trains."""
        return map_leaves(lambda path, leaf: leaf if path in self.frozen_paths else None, tree)

    def replace(self, tree: dict, main: dict, tables: dict | None = None) -> dict:
        """Returns `tree`, a tree of all parameters, with the main group taken from `main`, and the
        tables from `tables` unless it is None. Both have the form of the results of `main` and
        `tables_of`.
        """
        main, tables = leaves_by_path(main), leaves_by_path(tables or {})

        def replaced(path, leaf):
            if path in self.trained_layers:
                return leaf.at[self.trained_layers[path]].set(main[path])
            return main.get(path, tables.get(path, leaf))

        return map_leaves(replaced, tree)

    def with_zeros(self, params: dict, main: dict) -> dict:
        """Returns `main`, such as the gradients of the main group, as a tree of all parameters
        but the tables, with 0 for what is frozen. An array that is frozen as a whole
        becomes one with a single 0 for each layer.
        """
        main = leaves_by_path(main)

        def filled(path, leaf):
            if path in self.trained_layers:
                return jnp.zeros_like(leaf).at[self.trained_layers[path]].set(main[path])
            if path in main or path in self._table_paths:
                return main.get(path)
            return jnp.zeros((*leaf.shape[:1], *(1,) * (leaf.ndim - 1)), leaf.dtype)

        return map_leaves(filled, params)

    def without_frozen_parts(self, gradients: dict) -> dict:
        """Returns the gradients of the main group with 0 in frozen parts."""

        def masked(path, leaf):
            if path not in self.frozen_elements:
                return leaf
            frozen = self.frozen_elements[path]
            if path in self.trained_layers:
                frozen = frozen[self.trained_layers[path]]
            return jnp.where(frozen, 0, leaf) if frozen.any() else leaf

        return map_leaves(masked, gradients)

    def keep_frozen(self, before: dict, after: dict) -> dict:
        """Returns the tree `after` of all parameters, but what is frozen as it is in `before`."""
        before = leaves_by_path(before)

        def kept(path, leaf):
            if path in self.frozen_paths:
                return before[path]
            if path in self.frozen_elements:
                return jnp.where(self.frozen_elements[path], before[path], leaf)
            return leaf

        return map_leaves(kept, after)

    @property
    def _table_paths(self) -> set[str]:
        return {_text(path) for path in self.tables}


@dataclasses.dataclass(frozen=True, eq=False)
class KeepFrozen(UpdateRule):
    """Undoes what an update changed in frozen parameters. The optimizer changes frozen parts of
    arrays by weight decay; other rules may change any parameter.
    """

    groups: ParameterGroups

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        params = self.groups.keep_frozen(step.before["params"], after["params"])
        return after | {"params": params}, metrics


def rule(config: Config, groups: ParameterGroups) -> KeepFrozen | None:
    """Returns the rule of frozen parameters; None if none are frozen."""
    return KeepFrozen(groups) if groups.frozen_paths or groups.frozen_elements else None


def make_parameter_groups(
    model: ModelConfig, freeze: Sequence[str], optimizer: OptimizerConfig
) -> ParameterGroups:
    """Divides the parameters of `model` into groups.

    Args:
      freeze: `train.freeze`.
      optimizer: the settings of the optimizer.

    Raises:
      UserError: `optimizer.scaling` has no rule for the model or the optimizer;
        an entry of `train.freeze` or `optimizer.groups` is not valid, or chooses nothing;
        the entries of `train.freeze` choose everything; a group chooses everything, only frozen
        parameters, a parameter of another group, or a table of lazy AdamW; or some of these tables
        are frozen, but not all.
    """
    parameters = parameter_declarations(model)
    frozen, lines = _frozen(model, parameters, freeze)
    if model.lora.rank:
        lines.insert(0, _freeze_base(model, parameters, frozen))
    tables = _tables(model, optimizer, frozen)
    table_paths = {_text(path) for path in tables}
    main, trained_layers, frozen_elements = _main(parameters, frozen, table_paths)
    numbers, of_groups = _groups(model, parameters, optimizer.groups, frozen, table_paths)
    numbers = {
        path: cells[trained_layers[path]] if path in trained_layers else cells
        for path, cells in numbers.items()
    }
    scaling = scaling_factors(model, optimizer, parameters)
    factors = {path: scale.learning_rate for path, scale in scaling.items() if path in main}
    learning_rate_factors, weight_decays = _rates(main, optimizer, numbers, factors)
    lines += of_groups
    if lines:
        trained = sum(
            ParameterChoice(~cells, parameters[path]).element_count
            for path, cells in frozen.items()
        )
        total = sum(parameter.size for parameter in parameters.values())
        lines.append(f"{trained:,} of {total:,} parameters are trained")
    return ParameterGroups(
        main,
        tables,
        frozenset(path for path, cells in frozen.items() if cells.all()),
        trained_layers,
        frozen_elements,
        learning_rate_factors,
        weight_decays,
        {path: scale.start for path, scale in scaling.items()},
        tuple(lines),
    )


def _main(
    parameters: Mapping[str, Declared],
    frozen: Mapping[str, np.ndarray],
    table_paths: Container[str],
) -> tuple[dict[str, Declared], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the attributes `parameters`, `trained_layers` and `frozen_elements` of
    `ParameterGroups`.
    """
    main, trained_layers, frozen_elements = {}, {}, {}
    for path, cells in frozen.items():
        if cells.all() or path in table_paths:
            continue
        main[path] = parameters[path]
        layers = np.flatnonzero(~cells.all(axis=1))
        if len(layers) < len(cells):
            trained_layers[path] = layers
            main[path] = dataclasses.replace(main[path], stack_shape=(len(layers),))
        if cells.any():
            frozen_elements[path] = broadcast_to_parameter(parameters[path], cells)
    return main, trained_layers, frozen_elements


def _rates(
    main: Mapping[str, Declared],
    optimizer: OptimizerConfig,
    numbers: Mapping[str, np.ndarray],
    scaling: Mapping[str, float],
) -> tuple[dict[str, Scale], dict[str, Scale]]:
    """Returns the attributes `learning_rate_factors` and `weight_decays` of `ParameterGroups`.

    Args:
      main: the declarations of the main group.
      optimizer: the settings of the optimizer.
      numbers: the numbers of `_groups`, of trained layers alone.
      scaling: path → the factor of the learning rate that `optimizer.scaling` asks for.
    """
    rates, values = [1.0], [optimizer.weight_decay]
    for group in optimizer.groups:
        rates.append(group.learning_rate_factor)
        own = group.weight_decay
        values.append(optimizer.weight_decay if own is None else own)
    factors, decays = {}, {}
    for path, cells in numbers.items():
        factor, decay = (_scale(main[path], cells, of_group) for of_group in (rates, values))
        if np.any(factor != 1.0):
            factors[path] = factor
        if np.any(decay != optimizer.weight_decay):
            decays[path] = decay
    for path, factor in scaling.items():
        decays[path] = decays.get(path, optimizer.weight_decay) / factor
        factors[path] = factors.get(path, 1.0) * factor
    return factors, decays


def _frozen(
    model: ModelConfig, parameters: Mapping[str, Declared], freeze: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns (path of every parameter → bool [layers, parts], whether it is frozen; one line of
    text for each entry of `freeze`).
    """
    frozen = {path: np.zeros(layer_and_part_counts(one), bool) for path, one in parameters.items()}
    lines = []
    for i, text in enumerate(freeze):
        setting = f"train.freeze[{i}]"
        choices = choose_parameters(model, parameters, text, setting)
        for path, choice in choices.items():
            frozen[path] |= choice.chosen_layer_parts
        lines.append(_line(f"{setting} = {text!r}", choices))
    require(
        not all(cells.all() for cells in frozen.values()),
        f"train.freeze = {list(freeze)}: it chooses every parameter, so nothing is left to train: "
        "choose fewer, such as kind!=norm for all but the norms",
    )
    return frozen, lines


def _freeze_base(
    model: ModelConfig, parameters: Mapping[str, Declared], frozen: dict[str, np.ndarray]
) -> str:
    """Freezes, in `frozen`, all parameters but adapters. Returns a description of the adapters.

    Raises:
      UserError: `train.freeze` chooses all adapters.
    """
    adapters = {path for path in parameters if is_adapter(path)}
    require(
        not all(frozen[path].all() for path in adapters),
        "train.freeze chooses all adapters of model.lora, and with adapters nothing else is "
        "trained: leave it out",
    )
    for path in parameters.keys() - adapters:
        frozen[path][:] = True
    size = sum(parameters[path].size for path in adapters)
    return (
        f"model.lora: {size:,} numbers in {len(adapters) // 2} adapters of rank {model.lora.rank}, "
        f"scaled by {model.lora.alpha / model.lora.rank:g}; all else is frozen"
    )


def _tables(
    model: ModelConfig, optimizer: OptimizerConfig, frozen: Mapping[str, np.ndarray]
) -> dict[tuple[str | int, ...], int]:
    """Returns the tables of lazy AdamW that are not frozen."""
    if optimizer.ngram_table != "lazy_adamw":
        return {}
    from qwen3next_jax.training import lazy_adamw

    tables = lazy_adamw.lazy_tables(model)
    trained = {path: number for path, number in tables.items() if not frozen[_text(path)].any()}
    require(
        not trained or trained == tables,
        "train.freeze chooses some of the tables that lazy AdamW updates: choose all or none, or "
        "set optimizer.ngram_table = 'adamw'",
    )
    return trained


def _groups(
    model: ModelConfig,
    parameters: Mapping[str, Declared],
    groups: Sequence[ParameterGroup],
    frozen: Mapping[str, np.ndarray],
    table_paths: Container[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns (path of a parameter in any group, which is not frozen as a whole → int [layers,
    parts], 1 + the index of the group, 0 for no group; one line of text for each group).
    """
    numbers, lines = {}, []
    for i, group in enumerate(groups):
        setting = f"optimizer.groups[{i}].parameters"
        where = f"{setting} = {group.parameters!r}"
        choices = choose_parameters(model, parameters, group.parameters, setting)
        require(
            len(choices) < len(parameters) or not all(c.is_whole for c in choices.values()),
            f"{where}: it chooses every parameter: set optimizer.learning_rate and "
            "optimizer.weight_decay instead",
        )
        require(
            any(
                (choice.chosen_layer_parts & ~frozen[path]).any()
                for path, choice in choices.items()
            ),
            f"{where}: everything that it chooses is frozen (train.freeze): leave the group out",
        )
        for path, choice in choices.items():
            of_path = numbers.setdefault(path, np.zeros(choice.chosen_layer_parts.shape, int))
            require(
                path not in table_paths,
                f"{where}: it chooses {path}, which lazy AdamW updates with one rate for all rows: "
                "choose others, or set optimizer.ngram_table = 'adamw'",
            )
            others = of_path[choice.chosen_layer_parts]
            require(
                not others.any(),
                f"{where}: {path} is in optimizer.groups[{others.max(initial=1) - 1}] too: choose "
                "it once",
            )
            of_path[choice.chosen_layer_parts] = i + 1
        decay = group.weight_decay
        effect = f"learning rate × {group.learning_rate_factor:g}"
        effect += "" if decay is None else f", weight decay {decay:g}"
        lines.append(_line(f"{where}, {effect}", choices))
    return {path: of for path, of in numbers.items() if not frozen[path].all()}, lines


def _scale(parameter: Declared, numbers: np.ndarray, values: Sequence[float]) -> Scale:
    """Returns the value of each element of a parameter: a number if all are equal, otherwise an
    array that can be broadcast to the parameter. `numbers` [layers, parts] indexes `values`.
    """
    of_cells = np.asarray(values, np.float32)[numbers]
    if (numbers == numbers.flat[0]).all():
        return float(values[numbers.flat[0]])
    return broadcast_to_parameter(parameter, of_cells)


def _line(what: str, choices: Mapping[str, ParameterChoice]) -> str:
    """Describes what an entry of a setting chooses."""
    names = [path if c.is_whole else f"parts of {path}" for path, c in choices.items()]
    listed = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        listed += ", …"
    size = sum(choice.element_count for choice in choices.values())
    arrays = "1 array" if len(names) == 1 else f"{len(names)} arrays"
    return f"{what}: {size:,} numbers in {arrays} ({listed})"


def _text(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path))
