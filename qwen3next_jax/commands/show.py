"""Describes the model of a config file or of a run: its layers and their parameters, the FLOPs per
token, and the memory that decoding and training need. If two configs are given, the command also
lists the settings in which they differ. The command writes no file except the figure of `--svg`.

    qwen3next show configs/small.py [--config.model.num_hidden_layers=24] [--devices=1,8,64]
        [--context=4096,262144] [--svg=small.svg]
    qwen3next show tiny small
    qwen3next show runs/tiny
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qwen3next_jax.commands import checks, config_flags
from qwen3next_jax.commands.console import make_console
from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    as_user_error,
    escape_control,
    short_repr,
)
from qwen3next_jax.config import Config, ModelConfig

ARGUMENTS = "CONFIG.py or RUN"  # the positional arguments, for --help


def main(paths: list[str]) -> int:
    if len(paths) not in (1, 2):
        raise UserError(
            f"expected one or two config files, not {len(paths)}: qwen3next show configs/tiny.py"
        )
    devices = checks.parse_positive_integers("devices", _devices.value)
    lengths = checks.parse_positive_integers("context", _context.value)
    checks.check_result_file("svg", _svg.value)
    if _svg.value and pathlib.Path(_svg.value).exists():
        raise UserError(f"--svg={_svg.value}: the file exists: choose another name, or remove it")
    console = make_console()
    configs = [_load_config_or_print_settings(path, console) for path in paths]
    for config in configs:
        print_model(config, devices, lengths, console)
    if len(configs) == 2:
        _print_differences(paths, configs, console)
    if _svg.value:
        with as_user_error(f"--svg={_svg.value}: cannot be written", OSError):
            pathlib.Path(_svg.value).write_text(draw_model_of_config(configs[0]))
        print(f"wrote {_svg.value}")
    return ExitCode.DONE


def _load_config_or_print_settings(path: str, console: Console) -> Config:
    """Returns the configuration in a config file, or of a run. If the settings are not valid,
    prints those that differ from their defaults.

    Raises:
      UserError: the file cannot be read, or a setting is not valid.
    """
    values = config_flags.load_settings_of_file_or_run(path)
    try:
        return config_flags.config_from_settings(values)
    except UserError:
        from qwen3next_jax.config import default_config

        table = Table("setting", "default", "in the file", box=SIMPLE)
        default = dict(_flat_settings(default_config()))
        for name, value in _flat_settings(values):
            if name not in default or default[name] != value:
                table.add_row(
                    *map(escape, (name, short_repr(default.get(name)), short_repr(value)))
                )
        console.print(f"{escape(escape_control(str(path)))} is not valid. It sets:", table)
        raise


def print_model(
    config: Config, devices: Sequence[int], lengths: Sequence[int], console: Console
) -> None:
    """Prints the layers, parameters, FLOPs and memory of one configuration, as tables.

    Args:
      config: the configuration.
      devices: numbers of devices for the memory of training.
      lengths: lengths of sequences, in tokens, for the memory of decoding.
      console: the console that shows the tables.
    """
    from qwen3next_jax.model.description import layer_kinds
    from qwen3next_jax.model.flops import parameter_counts

    model = config.model
    counts, kinds = parameter_counts(model), layer_kinds(model)
    console.print(f"[bold]{escape(config.name)}[/]: {_millions_text(counts.total)} parameters")
    parts = [
        f"{_millions_text(counts.active)} that a token uses in the layers",
        f"{_millions_text(counts.embeddings)} in embedding and head",
    ]
    if counts.mtp:
        parts.append(f"{_millions_text(counts.mtp)} in multi-token prediction")
    console.print(f"  {', '.join(parts)}")
    console.print(
        f"  {model.num_hidden_layers} layers of width {model.hidden_size:,}, vocabulary "
        f"{model.vocab_size:,}"
    )
    table = Table("layers", "mixer", "MLP", box=SIMPLE)
    for name in ("parameters of a layer", "that a token uses"):
        table.add_column(name, justify="right")
    for kind in kinds:
        mixer = f"{kind.mixer} + n-gram embedding" if kind.has_ngram_embedding else kind.mixer
        table.add_row(
            layers_text(kind.layer_indices),
            mixer,
            _mlp_text(model, kind.mlp),
            f"{kind.parameter_count:,}",
            f"{kind.parameters_per_token:,}",
        )
    console.print(table)
    shown: list[Any] = []
    for kind in kinds:
        shown_alike = [other for other in shown if other.declarations == kind.declarations]
        if not shown_alike:
            console.print(
                f"One layer of {layers_text(kind.layer_indices)}:", _parameters_table(kind)
            )
            shown.append(kind)
        else:
            console.print(
                f"One layer of {layers_text(kind.layer_indices)}: as of "
                f"{layers_text(shown_alike[0].layer_indices)}"
            )
    console.print(_flops_table(config))
    console.print(_decoding_table(model, lengths))
    console.print(_training_table(config, devices))
    console.print(
        "The memory of training is split evenly here, and leaves out activations and buffers: "
        "qwen3next plan compiles the real step."
    )


def layers_text(layers: Sequence[int]) -> str:
    """Returns a short text for increasing indices of layers, such as "0–2, 4–6". If there are more
    than four ranges of layers, the text leaves out the middle: "3, 7, 11, … 47". For an empty
    sequence, which stands for the layer of the multi-token prediction module, returns "multi-token
    prediction".
    """
    if not layers:
        return "multi-token prediction"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    texts = [f"{first}" if first == last else f"{first}–{last}" for first, last in runs]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], f"… {texts[-1]}"])


def _mlp_text(model: ModelConfig, kind: str) -> str:
    if kind == "dense":
        return f"dense, width {model.intermediate_size:,}"
    text = (
        f"{model.num_experts_per_tok} of {model.num_experts} experts, width "
        f"{model.moe_intermediate_size:,}"
    )
    if model.shared_expert_intermediate_size:
        text += f", shared {model.shared_expert_intermediate_size:,}"
    return text


def _parameters_table(kind: Any) -> Table:
    table = Table("parameter", "shape", "matrices side by side", "kind", box=SIMPLE)
    table.add_column("numbers", justify="right")
    for path, parameter in kind.declarations.items():
        shape = " × ".join(
            f"{size:,}" + (f" {axis}" if axis else "")
            for size, axis in zip(parameter.shape, parameter.axes, strict=True)
        )
        parts = ", ".join(f"{part.name} {part.width:,}" for part in parameter.parts)
        table.add_row(path, shape, parts, parameter.kind, f"{math.prod(parameter.shape):,}")
    return table


def _flops_table(config: Config) -> Table:
    from qwen3next_jax.model.flops import BACKWARD_OVER_FORWARD, forward_flops_per_token

    length = config.train.sequence_length
    table = Table(f"training one token, rows of {length:,}", box=SIMPLE)
    table.add_column("MFLOP", justify="right")
    table.add_column("share", justify="right")
    parts = forward_flops_per_token(config.model, length)
    total = sum(parts.values())
    for name, flops in sorted(parts.items(), key=lambda part: -part[1]):
        if flops:
            flops_of_step = (1 + BACKWARD_OVER_FORWARD) * flops
            table.add_row(name, f"{flops_of_step / 1e6:,.2f}", f"{flops / total:.1%}")
    table.add_row("all", f"{(1 + BACKWARD_OVER_FORWARD) * total / 1e6:,.2f}", "100 %")
    return table


def _decoding_table(model: ModelConfig, lengths: Sequence[int]) -> Table:
    from qwen3next_jax.model.description import context_memory

    memory = context_memory(model)
    table = Table("decoding one sequence of", box=SIMPLE)
    for name in ("recurrent state", "cache of the context", "together"):
        table.add_column(name, justify="right")
    for length in lengths:
        slots = length * memory.bytes_per_token
        table.add_row(
            f"{length:,} tokens",
            _bytes_text(memory.state_bytes),
            _bytes_text(slots),
            _bytes_text(memory.state_bytes + slots),
        )
    return table


def _training_table(config: Config, devices: Sequence[int]) -> Table:
    """Returns a table of the memory per device that parameters, gradients and optimizer state need,
    if they are split evenly over the devices.
    """
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.parameter_groups import make_parameter_groups
    from qwen3next_jax.training.resolve import make_update_rules
    from qwen3next_jax.training.state import abstract_train_state

    groups = make_parameter_groups(config.model, config.train.freeze, config.optimizer)
    state = abstract_train_state(
        config.model,
        config.optimizer,
        groups,
        make_update_rules(config, groups),
        config.guards,
        single_device_mesh(),
    )
    parameters, optimizer = _tree_bytes(state["params"]), _tree_bytes(state["opt_state"])
    frozen = _tree_bytes(groups.select_frozen(state["params"]))
    table = Table("training on", box=SIMPLE)
    bytes_by_use = {
        "parameters": parameters,
        "gradients": parameters - frozen,
        f"{config.optimizer.name}'s state": optimizer,
    }
    if "ema" in state:
        bytes_by_use["average (train.ema)"] = _tree_bytes(state["ema"])
    for name in (*bytes_by_use, "together"):
        table.add_column(name, justify="right")
    for number in devices:
        sizes = [size / number for size in bytes_by_use.values()]
        name = "1 device" if number == 1 else f"{number:,} devices, each"
        table.add_row(name, *map(_bytes_text, sizes), _bytes_text(sum(sizes)))
    return table


def _tree_bytes(tree: Any) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _millions_text(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _bytes_text(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1e3:,.2f} kB"


def _print_differences(paths: Sequence[str], configs: Sequence[Config], console: Console) -> None:
    """Prints the settings whose values differ between the two configurations."""
    first, second = (dict(_flat_settings(dataclasses.asdict(config))) for config in configs)
    table = Table("setting", *paths, box=SIMPLE)
    for name in sorted(first.keys() | second.keys(), key=[*first, *second].index):
        if first.get(name) != second.get(name):
            table.add_row(name, short_repr(first.get(name)), short_repr(second.get(name)))
    console.print("Settings that differ:" if table.row_count else "No setting differs.")
    if table.row_count:
        console.print(table)


def _flat_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every setting in a nested dict."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def draw_model_of_config(config: Config) -> str:
    """Returns a figure of the architecture of the model of `config`, as the text of an SVG file."""
    from qwen3next_jax.model.description import layer_kinds
    from qwen3next_jax.model.flops import parameter_counts
    from qwen3next_jax.reporting.architecture import LayerKindPanel, draw_model

    model = config.model
    boxes = [
        LayerKindPanel(
            kind.mixer,
            kind.layer_indices,
            _mlp_text(model, kind.mlp),
            [
                (name, " × ".join(f"{size:,}" for size in parameter.shape))
                for name, parameter in kind.declarations.items()
            ],
            f"{_millions_text(kind.parameter_count)} parameters, "
            f"{_millions_text(kind.parameters_per_token)} for a token",
        )
        for kind in layer_kinds(model)
    ]
    counts = parameter_counts(model)
    subtitle = (
        f"{_millions_text(counts.total)} parameters, {_millions_text(counts.active)} for a token; "
        f"width {model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    )
    return draw_model(config.name, subtitle, boxes)


config_flags.accept_setting_flags()
_devices = flags.DEFINE_list(
    "devices", ["1", "8", "64"], "numbers of devices for the memory of training"
)
_context = flags.DEFINE_list(
    "context", ["4096", "32768", "262144"], "lengths of contexts for the memory of decoding"
)
_svg = flags.DEFINE_string("svg", "", "file for a figure of the model (of the first config)")
