"""Divides the parameters into three groups: the main group, which the main optimizer trains; the
n-gram embedding tables that lazy AdamW trains (`optimizer.ngram_table`); and frozen parameters
(`train.freeze`). Parameters of the main group may have learning rates and weight decays of their
own (`optimizer.groups`).

A parameter that is frozen as a whole has no gradient and no optimizer state. Two kinds of arrays
can be frozen in part:

- An array that stacks the parameters of several layers. If some of the layers are frozen, the main
  group has a smaller array, with the trained layers only. The backward pass still computes the
  gradients of all layers of the stack, and those of the frozen layers are dropped.
- An array that holds several matrices as parts. If some of the matrices are frozen, the main group
  has the whole array, with gradients that are 0 in the frozen parts. The frozen parts have
  optimizer state, too. The update rule `KeepFrozen` restores the values of the frozen parts, which
  weight decay changes.
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
from qwen3next_jax.model.parameters import ParameterDeclaration
from qwen3next_jax.model.selection import (
    ParameterChoice,
    broadcast_to_parameter,
    choose_parameters,
    layer_and_part_counts,
)
from qwen3next_jax.training.optimizer import Scale
from qwen3next_jax.training.scaling import scaling_factors
from qwen3next_jax.training.update_rules import StepInput, UpdateRule

# The most names of arrays that a line of `ParameterGroups.summary_lines` lists.
NAMES_SHOWN = 4


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterGroups:
    """The groups of a model's parameters. Trees of parameters are nested dicts; "path" is a path
    such as "layers/0/mixer/q_proj".

    Attributes:
      main_parameters: path → declaration, for the arrays of the main group, without frozen layers.
      lazy_adamw_tables: path of a table that lazy AdamW trains → number of its n-gram embedding.
      frozen_paths: the paths of the arrays that are frozen as a whole.
      trained_layers_by_stack: path of an array of stacked layers of which some are frozen → the
        indices of its trained layers.
      frozen_element_masks: path of an array that is frozen in part → bool array, true where an
        element is frozen. The mask can be broadcast to the array with all layers.
      learning_rate_factors, weight_decays: the arguments of `optimizer.make_optimizer`.
      init_scale_factors: path → the factor by which the array's random initial values are
        multiplied, for the arrays whose factor is not 1.
      summary_lines: lines for the terminal: the parameters that each entry of `train.freeze` and
        `optimizer.groups` chooses, and the number of trained parameters; () if nothing is frozen
        and there are no groups.
    """

    main_parameters: Mapping[str, ParameterDeclaration]
    lazy_adamw_tables: Mapping[tuple[str | int, ...], int]
    frozen_paths: frozenset[str]
    trained_layers_by_stack: Mapping[str, np.ndarray]
    frozen_element_masks: Mapping[str, np.ndarray]
    learning_rate_factors: Mapping[str, Scale]
    weight_decays: Mapping[str, Scale]
    init_scale_factors: Mapping[str, float]
    summary_lines: tuple[str, ...]

    def select_main_group(self, tree: dict) -> dict:
        """Returns the arrays of the main group from `tree`, a tree of all parameters."""

        def select(path, leaf):
            if path not in self.main_parameters:
                return None
            return (
                leaf[self.trained_layers_by_stack[path]]
                if path in self.trained_layers_by_stack
                else leaf
            )

        return map_leaves(select, tree)

    def select_lazy_adamw_tables(self, tree: dict) -> dict:
        """Returns the tables of `tree`, a tree of all parameters, that lazy AdamW trains."""
        return map_leaves(
            lambda path, leaf: leaf if path in self._lazy_adamw_table_paths else None, tree
        )

    def scale_initial_params(self, params: dict) -> dict:
        """Returns the random initial parameters `params`, multiplied by `init_scale_factors`."""
        return (
            map_leaves(lambda path, leaf: leaf * self.init_scale_factors.get(path, 1), params)
            if self.init_scale_factors
            else params
        )

    def select_frozen(self, tree: dict) -> dict:
        """Returns the arrays that are frozen as a whole from `tree`, a tree of all parameters."""
        return map_leaves(lambda path, leaf: leaf if path in self.frozen_paths else None, tree)

    def replace_main_and_tables(self, tree: dict, main: dict, tables: dict | None = None) -> dict:
        """Returns `tree`, a tree of all parameters, with the main group replaced by `main`, and the
        tables of lazy AdamW by `tables` unless it is None. `main` has the structure that
        `select_main_group` returns, `tables` the structure that `select_lazy_adamw_tables` returns.
        """
        main, tables = leaves_by_path(main), leaves_by_path(tables or {})

        def replaced(path, leaf):
            if path in self.trained_layers_by_stack:
                return leaf.at[self.trained_layers_by_stack[path]].set(main[path])
            return main.get(path, tables.get(path, leaf))

        return map_leaves(replaced, tree)

    def fill_frozen_with_zeros(self, params: dict, main: dict) -> dict:
        """Extends `main`, such as the gradients of the main group, to a tree of all parameters but
        the tables of lazy AdamW, with 0 for frozen parameters. An array that is frozen as a whole
        becomes an array with a single 0 for each layer.
        """
        main = leaves_by_path(main)

        def filled(path, leaf):
            if path in self.trained_layers_by_stack:
                return jnp.zeros_like(leaf).at[self.trained_layers_by_stack[path]].set(main[path])
            if path in main or path in self._lazy_adamw_table_paths:
                return main.get(path)
            return jnp.zeros((*leaf.shape[:1], *(1,) * (leaf.ndim - 1)), leaf.dtype)

        return map_leaves(filled, params)

    def zero_frozen_parts(self, gradients: dict) -> dict:
        """Returns `gradients`, a tree of the main group, with 0 in the frozen parts of arrays."""

        def masked(path, leaf):
            if path not in self.frozen_element_masks:
                return leaf
            frozen = self.frozen_element_masks[path]
            if path in self.trained_layers_by_stack:
                frozen = frozen[self.trained_layers_by_stack[path]]
            return jnp.where(frozen, 0, leaf) if frozen.any() else leaf

        return map_leaves(masked, gradients)

    def keep_frozen(self, before: dict, after: dict) -> dict:
        """Returns `after`, a tree of all parameters, with the frozen parameters taken from
        `before`.
        """
        before = leaves_by_path(before)

        def kept(path, leaf):
            if path in self.frozen_paths:
                return before[path]
            if path in self.frozen_element_masks:
                return jnp.where(self.frozen_element_masks[path], before[path], leaf)
            return leaf

        return map_leaves(kept, after)

    @property
    def _lazy_adamw_table_paths(self) -> set[str]:
        return {_slash_path(path) for path in self.lazy_adamw_tables}


@dataclasses.dataclass(frozen=True, eq=False)
class KeepFrozen(UpdateRule):
    """The update rule that restores frozen parameters after an update. Weight decay changes the
    frozen parts of arrays, and other update rules may change any parameter.
    """

    groups: ParameterGroups

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        params = self.groups.keep_frozen(step.state_before["params"], after["params"])
        return after | {"params": params}, metrics


def make_rule(config: Config, groups: ParameterGroups) -> KeepFrozen | None:
    """Returns the update rule that restores frozen parameters; None if none are frozen."""
    return KeepFrozen(groups) if groups.frozen_paths or groups.frozen_element_masks else None


def make_parameter_groups(
    model: ModelConfig, freeze: Sequence[str], optimizer: OptimizerConfig
) -> ParameterGroups:
    """Divides the parameters of `model` into groups.

    Args:
      freeze: `train.freeze`.
      optimizer: the settings of the optimizer.

    Raises:
      UserError: `optimizer.scaling` has no rule for the model or the optimizer; an entry of
        `train.freeze` or `optimizer.groups` is not valid, or chooses nothing; the entries of
        `train.freeze` choose everything; a group chooses everything, only frozen parameters, a
        parameter of another group, or a table of lazy AdamW; or some tables of lazy AdamW are
        frozen, but not all.
    """
    parameters = parameter_declarations(model)
    frozen, lines = _frozen_masks_and_summary_lines(model, parameters, freeze)
    if model.lora.rank:
        lines.insert(0, _freeze_all_but_adapters(model, parameters, frozen))
    tables = _unfrozen_lazy_adamw_tables(model, optimizer, frozen)
    table_paths = {_slash_path(path) for path in tables}
    main, trained_layers_by_stack, frozen_element_masks = _main_group_and_frozen_parts(
        parameters, frozen, table_paths
    )
    group_numbers, group_lines = _group_numbers_and_summary_lines(
        model, parameters, optimizer.groups, frozen, table_paths
    )
    group_numbers = {
        path: cells[trained_layers_by_stack[path]] if path in trained_layers_by_stack else cells
        for path, cells in group_numbers.items()
    }
    scaling = scaling_factors(model, optimizer, parameters)
    factors = {path: scale.learning_rate for path, scale in scaling.items() if path in main}
    learning_rate_factors, weight_decays = _learning_rate_factors_and_weight_decays(
        main, optimizer, group_numbers, factors
    )
    lines += group_lines
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
        trained_layers_by_stack,
        frozen_element_masks,
        learning_rate_factors,
        weight_decays,
        {path: scale.init_scale for path, scale in scaling.items()},
        tuple(lines),
    )


def _main_group_and_frozen_parts(
    parameters: Mapping[str, ParameterDeclaration],
    frozen: Mapping[str, np.ndarray],
    table_paths: Container[str],
) -> tuple[dict[str, ParameterDeclaration], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the attributes `main_parameters`, `trained_layers_by_stack` and
    `frozen_element_masks` of `ParameterGroups`.
    """
    main, trained_layers_by_stack, frozen_element_masks = {}, {}, {}
    for path, cells in frozen.items():
        if cells.all() or path in table_paths:
            continue
        main[path] = parameters[path]
        layers = np.flatnonzero(~cells.all(axis=1))
        if len(layers) < len(cells):
            trained_layers_by_stack[path] = layers
            main[path] = dataclasses.replace(main[path], stack_shape=(len(layers),))
        if cells.any():
            frozen_element_masks[path] = broadcast_to_parameter(parameters[path], cells)
    return main, trained_layers_by_stack, frozen_element_masks


def _learning_rate_factors_and_weight_decays(
    main: Mapping[str, ParameterDeclaration],
    optimizer: OptimizerConfig,
    group_numbers: Mapping[str, np.ndarray],
    scaling: Mapping[str, float],
) -> tuple[dict[str, Scale], dict[str, Scale]]:
    """Returns the attributes `learning_rate_factors` and `weight_decays` of `ParameterGroups`.

    Args:
      main: the declarations of the main group.
      optimizer: the settings of the optimizer.
      group_numbers: path → the group numbers of the trained layers (from
        `_group_numbers_and_summary_lines`).
      scaling: path → the factor of the learning rate that `optimizer.scaling` asks for.
    """
    factors_by_group, decays_by_group = [1.0], [optimizer.weight_decay]
    for group in optimizer.groups:
        factors_by_group.append(group.learning_rate_factor)
        group_decay = group.weight_decay
        decays_by_group.append(optimizer.weight_decay if group_decay is None else group_decay)
    factors, decays = {}, {}
    for path, cells in group_numbers.items():
        factor, decay = (
            _value_per_element(main[path], cells, by_group_number)
            for by_group_number in (factors_by_group, decays_by_group)
        )
        if np.any(factor != 1.0):
            factors[path] = factor
        if np.any(decay != optimizer.weight_decay):
            decays[path] = decay
    for path, factor in scaling.items():
        decays[path] = decays.get(path, optimizer.weight_decay) / factor
        factors[path] = factors.get(path, 1.0) * factor
    return factors, decays


def _frozen_masks_and_summary_lines(
    model: ModelConfig, parameters: Mapping[str, ParameterDeclaration], freeze: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns (path of every parameter → bool [layers, parts], true where it is frozen; one line
    for the terminal for each entry of `freeze`).
    """
    frozen = {path: np.zeros(layer_and_part_counts(one), bool) for path, one in parameters.items()}
    lines = []
    for i, text in enumerate(freeze):
        setting = f"train.freeze[{i}]"
        choices = choose_parameters(model, parameters, text, setting)
        for path, choice in choices.items():
            frozen[path] |= choice.chosen_layer_parts
        lines.append(_describe_choice(f"{setting} = {text!r}", choices))
    require(
        not all(cells.all() for cells in frozen.values()),
        f"train.freeze = {list(freeze)}: it chooses every parameter, so nothing is left to train: "
        "choose fewer, such as kind!=norm for all but the norms",
    )
    return frozen, lines


def _freeze_all_but_adapters(
    model: ModelConfig,
    parameters: Mapping[str, ParameterDeclaration],
    frozen: dict[str, np.ndarray],
) -> str:
    """Marks all parameters but the adapters as frozen, in the arrays of `frozen`. Returns a line
    for the terminal that describes the adapters.

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


def _unfrozen_lazy_adamw_tables(
    model: ModelConfig, optimizer: OptimizerConfig, frozen: Mapping[str, np.ndarray]
) -> dict[tuple[str | int, ...], int]:
    """Returns the tables of lazy AdamW that are not frozen."""
    if optimizer.ngram_table != "lazy_adamw":
        return {}
    from qwen3next_jax.training import lazy_adamw

    tables = lazy_adamw.embedding_number_by_table_path(model)
    trained = {
        path: number for path, number in tables.items() if not frozen[_slash_path(path)].any()
    }
    require(
        not trained or trained == tables,
        "train.freeze chooses some of the tables that lazy AdamW updates: choose all or none, or "
        "set optimizer.ngram_table = 'adamw'",
    )
    return trained


def _group_numbers_and_summary_lines(
    model: ModelConfig,
    parameters: Mapping[str, ParameterDeclaration],
    groups: Sequence[ParameterGroup],
    frozen: Mapping[str, np.ndarray],
    table_paths: Container[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns (path → int [layers, parts], the group numbers of a parameter; one line for the
    terminal for each group). A group number is 1 + the index of the group in `optimizer.groups`, or
    0 for no group. Parameters in no group, or frozen as a whole, are left out.
    """
    group_numbers, lines = {}, []
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
            part_numbers = group_numbers.setdefault(
                path, np.zeros(choice.chosen_layer_parts.shape, int)
            )
            require(
                path not in table_paths,
                f"{where}: it chooses {path}, which lazy AdamW updates with one rate for all rows: "
                "choose others, or set optimizer.ngram_table = 'adamw'",
            )
            others = part_numbers[choice.chosen_layer_parts]
            require(
                not others.any(),
                f"{where}: {path} is in optimizer.groups[{others.max(initial=1) - 1}] too: choose "
                "it once",
            )
            part_numbers[choice.chosen_layer_parts] = i + 1
        decay = group.weight_decay
        effect = f"learning rate × {group.learning_rate_factor:g}"
        effect += "" if decay is None else f", weight decay {decay:g}"
        lines.append(_describe_choice(f"{where}, {effect}", choices))
    return {
        path: part_numbers for path, part_numbers in group_numbers.items() if not frozen[path].all()
    }, lines


def _value_per_element(
    parameter: ParameterDeclaration, numbers: np.ndarray, values: Sequence[float]
) -> Scale:
    """Returns the value for each element of a parameter: a number if all are equal, otherwise an
    array that can be broadcast to the parameter. `numbers` [layers, parts] are indices into
    `values`.
    """
    values_of_parts = np.asarray(values, np.float32)[numbers]
    if (numbers == numbers.flat[0]).all():
        return float(values[numbers.flat[0]])
    return broadcast_to_parameter(parameter, values_of_parts)


def _describe_choice(setting: str, choices: Mapping[str, ParameterChoice]) -> str:
    """Returns a line for the terminal: the setting and the parameters that it chooses."""
    names = [path if c.is_whole else f"parts of {path}" for path, c in choices.items()]
    listed = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        listed += ", …"
    size = sum(choice.element_count for choice in choices.values())
    arrays = "1 array" if len(names) == 1 else f"{len(names)} arrays"
    return f"{setting}: {size:,} numbers in {arrays} ({listed})"


def _slash_path(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path))
