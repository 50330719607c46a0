"""Reads a sweep file and makes the points of the sweep. An axis is a list of alternative values. A
point is the base configuration with one value of each axis; there is a point for every combination
of values. All points are checked before any of them starts.

A sweep file is Python with `get_sweep()`, which returns a dictionary:

    base      a config file, such as "configs/tiny.py"
    set       {setting: value} for every point; an axis or --set overrides it
    axes      {axis: values}. An axis is a setting with a list of values ("train.seed": [0, 1]);
              or "ratio" with a list of ratios of recurrent to full attention layers (["3:1", …]);
              or "flops" with a list of FLOPs of a whole run ([1e12, …]): each point trains for the
              steps, `train.steps`, whose FLOPs are closest to the value;
              or any other name with {name of a value: {setting: value, …}}. No two axes may give
              the same setting, and neither an axis nor --set may give a setting that `match`
              gives. --set overrides an axis: if the axis is the setting, the value of --set is
              its only value.
    match     "parameters" or "flops": chooses the width of each point's MLPs so that the point has
              as many parameters, or FLOPs per token, as the first point; "" (default) changes no
              width
    x         the axis whose values are the x axis of the report's charts; default: the first axis

The name of a point consists of the names of its values on the axes. A point is trained by
`train.py` with the base file, and with the point's settings as overrides.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import re
from typing import Any

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import Mistakes, UserError, did_you_mean, short_repr
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import Config, default_config, from_dict, to_dict
from qwen3next_jax.config.files import (
    call_function_of_file,
    find_user_or_shipped_file,
    load_config_file,
    settings_ending_in,
)
from qwen3next_jax.config.mixer import is_mixer_setting
from qwen3next_jax.config.registry import trust_user_settings
from qwen3next_jax.runs.vocabulary import fill_vocabulary_from_tokenizer

FORMAT = 3  # of sweep.json; raise it when a recorded sweep would be read wrongly after a change
_KEYS = ("base", "set", "axes", "match", "x")
_MATCHES = ("", "parameters", "flops")
_WIDTH_STEP = 8
# The most points of a sweep. Each is a process, a folder and a row of the report, and reading them
# takes milliseconds each.
_MOST_POINTS = 1_000
_LONGEST_NAME = 255  # the most bytes in the name of a file or a folder
# Columns of results.csv and results.json besides the axes and the metrics (`results.to_csv`). An
# axis with such a name would be written over.
_COLUMNS = (
    "point",
    "steps",
    "steps_done",
    "tokens_per_second",
    "parameters",
    "tokens",
    "flops_per_token",
    "cache_bytes_per_token",
    "state_bytes",
    "seconds",
    "command",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
      name: the name of the point, and of its folder.
      axis_values: axis → the name of the point's value on this axis.
      overrides: setting → value, for the settings that the point changes in the base file's
        configuration.
      config: the complete configuration of the point.
    """

    name: str
    axis_values: dict[str, str]
    overrides: dict[str, Any]
    config: Config


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked.

    Attributes:
      base_path: path of the base config file.
      base_config: the configuration in the base file; None if the file is valid only together with
        the settings of a point.
      axes: axis → the names of its values.
      x_axis: the axis whose values are the x axis of the report's charts.
      match_widths_by: the entry `match` of the file: "parameters" or "flops" if the MLP widths are
        chosen so that all points have the same number of parameters or of FLOPs per token,
        otherwise "".
      points: every combination of the axes' values.
      override_sentences: a sentence for each setting of the file that --set replaces.
    """

    base_path: str
    base_config: Config | None
    axes: dict[str, tuple[str, ...]]
    x_axis: str
    match_widths_by: str
    points: tuple[Point, ...]
    override_sentences: tuple[str, ...] = ()


def load_sweep(path: str | pathlib.Path, changes: dict[str, Any] | None = None) -> Sweep:
    """Reads a sweep file and checks the configuration of every point.

    Args:
      path: path of the sweep file.
      changes: setting → the value of `--set`, which overrides the file's value at every point.

    Raises:
      UserError: the file, an axis, or the configuration of a point (which the message then names)
        is wrong.
    """
    record, changes = _read_sweep_file(find_user_or_shipped_file(path)), changes or {}
    given_axes = record.get("axes", {})
    match, x = record.get("match", ""), record.get("x", next(iter(given_axes), None))
    mistakes = Mistakes()
    with mistakes.collect(str(path)):
        base = load_config_file(find_user_or_shipped_file(record["base"]), f"{path}: base = ")
    axes = {}
    for axis, values in given_axes.items():
        with mistakes.collect(str(path)):
            axes[axis] = _axis_values(axis, values, path)
    for setting in record.get("set", {}):
        with mistakes.collect(str(path)):
            _check_setting_exists(setting, f"{path}: set")
    with mistakes.collect(str(path)):
        _check_match(match, path)
    if given_axes:
        with mistakes.collect(str(path)):
            _check_x(x, tuple(given_axes), path)
    mistakes.raise_any()
    sources = _axis_of_setting(axes, path) | dict.fromkeys(changes, "--set")
    overridden = _override_sentences(record.get("set", {}), axes, changes)
    axes = {
        axis: _axis_values_with_overrides(axis, values, changes) for axis, values in axes.items()
    }
    if not axes:
        raise UserError(
            f"{path}: axes is empty: expected at least one, such as {{'ratio': ['1:1', '3:1']}}"
        )
    if (count := math.prod(map(len, axes.values()))) > _MOST_POINTS:
        sizes = " × ".join(f"{len(values)} of {axis}" for axis, values in axes.items())
        raise UserError(
            f"{path}: {count:,} points ({sizes}): expected at most {_MOST_POINTS:,}; divide the "
            "sweep into several files"
        )

    points: list[Point] = []
    for combination in itertools.product(*(values.items() for values in axes.values())):
        values = {axis: value for axis, (value, _) in zip(axes, combination, strict=True)}
        overrides = dict(record.get("set", {}))
        for _, settings in combination:
            overrides |= settings
        overrides |= changes
        name = _point_name(values)
        where = f"{path}: point {name}"
        with mistakes.collect(where):
            config = _config_with_overrides(base, overrides, where)
            if isinstance(record["axes"].get("ratio"), (list, tuple)):
                _check_layers_fit_ratio(values["ratio"], config.model.num_hidden_layers, where)
            if match and points:
                width, value = _matching_width(points[0].config, config, match, where)
                if width in sources:
                    raise UserError(_conflict_message(path, width, sources[width], "match"))
                overrides[width] = value
                config = _config_with_overrides(base, overrides, where)
            if isinstance(record["axes"].get("flops"), (list, tuple)):
                if "train.steps" in sources:
                    raise UserError(
                        _conflict_message(
                            path, "train.steps", sources["train.steps"], "axis 'flops'"
                        )
                    )
                overrides["train.steps"] = _steps_of_flops(config, float(values["flops"]), where)
                config = _config_with_overrides(base, overrides, where)
            points.append(Point(name, values, overrides, config))
    mistakes.raise_any()
    _check_points_differ(points, path)
    try:
        base_config = _config_with_overrides(base, {}, "")
    except UserError:
        base_config = None
    return Sweep(
        base_path=str(record["base"]),
        base_config=base_config,
        axes={axis: tuple(values) for axis, values in axes.items()},
        x_axis=x,
        match_widths_by=match,
        points=tuple(points),
        override_sentences=overridden,
    )


def _check_match(match: Any, path: str | pathlib.Path) -> None:
    """Raises UserError if `match` has a value that is not allowed."""
    if match not in _MATCHES:
        raise UserError(
            f"{path}: match = {match!r}: expected one of "
            f"{', '.join(map(repr, _MATCHES))}{did_you_mean(str(match), _MATCHES)}"
        )


def _check_x(x: Any, axes: tuple[str, ...], path: str | pathlib.Path) -> None:
    """Raises UserError if `x` is none of the axes."""
    if x not in axes:
        raise UserError(
            f"{path}: x = {x!r}: expected one of the axes, "
            f"{', '.join(axes)}{did_you_mean(str(x), axes)}"
        )


def _check_points_differ(points: list[Point], path: str | pathlib.Path) -> None:
    """Raises UserError if two points have the same name or the same settings."""
    names: set[str] = set()
    first_with: dict[str, Point] = {}
    for point in points:
        if point.name in names:
            raise UserError(
                f"{path}: two points are named {point.name}: give the values of an axis different "
                "names"
            )
        names.add(point.name)
    for point in points:
        first = first_with.setdefault(json.dumps(flat_settings(point.config)), point)
        if first is not point:
            raise UserError(
                f"{path}: points {first.name} and {point.name} are the same run: all their "
                "settings are equal"
            )


def _read_sweep_file(path: pathlib.Path) -> dict[str, Any]:
    """Calls `get_sweep()` in the file, checks the keys and types of the result, and returns it."""
    record = call_function_of_file(path, "get_sweep")
    if not isinstance(record, dict) or "base" not in record:
        raise UserError(
            f"{path}: get_sweep() returned {type(record).__name__}: expected a dict with base and "
            "axes"
        )
    for key in record:
        if key not in _KEYS:
            raise UserError(
                f"{path}: {key!r}: expected one of "
                f"{', '.join(_KEYS)}{did_you_mean(str(key), _KEYS)}"
            )
    for key, kind, example in (
        ("base", str, "configs/tiny.py"),
        ("axes", dict, {"ratio": ["1:1", "3:1"]}),
        ("set", dict, {"train.steps": 100}),
    ):
        if not isinstance(record.get(key, example), kind):
            raise UserError(
                f"{path}: {key} = {record[key]!r}: expected a {kind.__name__}, such as {example!r}"
            )
    return record


def _override_sentences(
    settings: dict[str, Any], axes: dict[str, dict[str, dict[str, Any]]], changes: dict[str, Any]
) -> tuple[str, ...]:
    """Returns a sentence for each setting of the file that --set replaces with another value.

    Args:
      settings: the settings that the file gives to all points.
      axes: axis → {name of a value on the axis: the settings of this value in the file}.
      changes: setting → value, from --set.
    """
    sentences = []
    for setting, value in changes.items():
        places = {"the file": [settings[setting]] if setting in settings else []}
        for axis, values in axes.items():
            places[f"axis {axis!r}"] = [v[setting] for v in values.values() if setting in v]
        for place, given in places.items():
            replaced = dict.fromkeys(short_repr(v) for v in given if v != value)
            if replaced:
                sentences.append(
                    f"--set {setting}={short_repr(value)} replaces {', '.join(replaced)} of {place}"
                )
    return tuple(sentences)


def _axis_values_with_overrides(
    axis: str, values: dict[str, dict[str, Any]], changes: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the values of an axis after --set: the settings in `changes` are removed from each
    value. If the axis is itself a setting in `changes`, its only value is that of --set.
    """
    if axis in changes:
        return {_axis_value_name(changes[axis]): {axis: changes[axis]}}
    return {
        name: {setting: v for setting, v in settings.items() if setting not in changes}
        for name, settings in values.items()
    }


def _axis_of_setting(
    axes: dict[str, dict[str, dict[str, Any]]], path: str | pathlib.Path
) -> dict[str, str]:
    """Returns setting → the axis that gives the setting, as a text such as "axis 'width'".

    Raises:
      UserError: two axes give the same setting. A point would train with the value of only one of
        the two axes, but the report would show the values of both.
    """
    sources: dict[str, str] = {}
    given = {
        f"axis {axis!r}": {setting for settings in values.values() for setting in settings}
        for axis, values in axes.items()
    }
    for source, settings in given.items():
        for setting in sorted(settings, key=str):
            if setting in sources:
                raise UserError(_conflict_message(path, setting, sources[setting], source))
            sources[setting] = source
    return sources


def _conflict_message(path: str | pathlib.Path, setting: str, first: str, second: str) -> str:
    return f"{path}: {setting} comes from {first} and from {second}: leave it out of one of them"


def _axis_values(axis: str, values: Any, path: str | pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns name of a value → {setting: value}, for each value of an axis of a sweep file.

    Raises:
      UserError: the axis or its values are wrong.
    """
    if isinstance(axis, str) and re.search(r"[/\x00-\x1f\x7f-\x9f\ud800-\udfff]", axis):
        raise UserError(
            f"{path}: axis {axis!r}: expected a name without '/' and control characters, as it is "
            "part of the names of the points' folders"
        )
    if axis in _COLUMNS:
        raise UserError(
            f"{path}: axis {axis!r}: expected another name, as results.csv and results.json have a "
            f"column {axis!r} of their own"
        )
    if isinstance(values, dict):
        result = {str(name): settings for name, settings in values.items()}
        if not isinstance(axis, str) or not all(
            isinstance(settings, dict) for settings in result.values()
        ):
            raise UserError(
                f"{path}: axis {axis!r}: expected {{name: {{setting: value}}}}, or a list for a "
                "setting"
            )
    elif not isinstance(values, (list, tuple)):
        raise UserError(
            f"{path}: axis {axis!r} = {values!r}: expected a list of values, or {{name: "
            f"{{setting: value}}}}"
        )
    elif axis == "ratio":
        result = {str(value): _settings_of_ratio(str(value), path) for value in values}
    elif axis == "flops":
        result = {_flops_value_name(value, path): {} for value in values}
    else:
        _check_setting_exists(axis, f"{path}: axis {axis!r}", known=("ratio", "flops"))
        result = {_axis_value_name(value): {axis: value} for value in values}
    if len(result) < len(values):
        raise UserError(f"{path}: axis {axis!r} names a value twice: {list(values)!r}")
    if not result:
        raise UserError(f"{path}: axis {axis!r} has no values")
    return result


def _settings_of_ratio(value: str, path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the settings for a ratio of recurrent to full attention layers, such as "3:1".

    Raises:
      UserError: the ratio is not of the form "3:1".
    """
    found = re.fullmatch(r"(\d+):([01])", value)
    if not found or value == "0:0":
        raise UserError(
            f"{path}: ratio {value!r}: expected LINEAR:FULL layers of one period with FULL 1, "
            "such as 3:1, or 1:0 for no full attention"
        )
    return {
        "model.full_attention_interval": int(found[1]) + 1 if found[2] == "1" else 0,
        "model.layer_types": (),
    }


def _check_layers_fit_ratio(ratio: str, layers: int, where: str) -> None:
    """Raises UserError if the number of layers is not a multiple of the ratio's period."""
    linear, full = map(int, ratio.split(":"))
    if full and layers % (period := linear + full):
        fewer = layers // period * period
        nearest = f"{fewer} or {fewer + period}" if fewer else f"{period}"
        raise UserError(
            f"{where}: ratio {ratio} needs a multiple of {period} layers, but "
            f"model.num_hidden_layers = {layers}: expected {nearest}"
        )


def _flops_value_name(value: Any, path: str | pathlib.Path) -> str:
    """Returns a number of FLOPs as text, such as "1e+15", which `float` converts back exactly.

    Raises:
      UserError: the value is not a positive number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise UserError(
            f"{path}: axis 'flops' has the value {value!r}: expected the FLOPs of a whole run, a "
            "positive number, such as 1e15"
        )
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def _steps_of_flops(config: Config, flops: float, where: str) -> int:
    """Returns the number of steps with which a run of `config` has about `flops` FLOPs.

    Raises:
      UserError: `flops` is less than half of the FLOPs of one step, or the run has stages.
    """
    from qwen3next_jax.sweeps.costs import (
        parameters_or_flops_per_token,
    )  # loads JAX, as in `_matching_width`

    train = config.train
    if train.stages:
        raise UserError(
            f"{where}: axis 'flops' sets train.steps, but train.stages says how long each stage "
            "is: leave one of them out"
        )
    tokens = train.batch_size * train.sequence_length
    step_flops = tokens * parameters_or_flops_per_token(
        config.model, train.sequence_length, "flops"
    )
    steps = round(flops / step_flops)
    if not steps:
        raise UserError(
            f"{where}: one step has {step_flops:.3g} FLOPs: expected a value of the axis 'flops' "
            "of at least that, or fewer tokens a step"
        )
    return steps


def _axis_value_name(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _point_name(chosen: dict[str, str]) -> str:
    """Returns the name of a point and of its folder. If the name is too long for a file system, it
    is cut and a checksum of the whole name is appended.

    Args:
      chosen: axis → the name of the point's value on this axis.
    """
    name = ",".join(
        f"{axis.rpartition('.')[2]}={_safe_file_name(value)}" for axis, value in chosen.items()
    )
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    end = f"-{digests.sha256(name)[:16]}"
    return name.encode()[: _LONGEST_NAME - len(end)].decode(errors="ignore") + end


def _safe_file_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", value)


def value_as_flag_text(value: Any) -> str:
    """Returns the value of a setting as text that can follow `--config.SETTING=`."""
    plain = json.loads(json.dumps(value))
    return str(tuple(plain)) if isinstance(plain, list) else str(plain)


def _check_fits_command_line(name: str, value: Any, where: str) -> None:
    """Raises UserError if the text of a setting's value cannot be part of a command line."""
    text = value_as_flag_text(value)
    if "\0" in text or text.encode(errors="replace").decode() != text:
        raise UserError(
            f"{where}: {name} = {value!r}: expected text without NUL and lone surrogates, as it "
            "goes into the command of the point"
        )


def _check_setting_exists(name: str, where: str, known: tuple[str, ...] = ()) -> None:
    """Raises UserError if there is no setting called `name`. The message may suggest the most
    similar name among the settings and the names in `known`.
    """
    settings: Any = default_config()
    if not isinstance(name, str):
        raise UserError(
            f"{where}: {name!r} is of type {type(name).__name__}: expected a setting's name, such "
            "as 'train.seed'"
        )
    if is_mixer_setting(name):
        return
    path = name.split(".")
    for depth, key in enumerate(path):
        if not isinstance(settings, dict) or key not in settings:
            elsewhere = " or ".join(map(repr, settings_ending_in(".".join(path[depth:]))))
            hint = f" (did you mean {elsewhere}?)" if elsewhere else ""
            names = [*settings, *known] if isinstance(settings, dict) else known
            raise UserError(f"{where}: no such setting as {name}{hint or did_you_mean(key, names)}")
        settings = settings[key]
    if isinstance(settings, dict):
        raise UserError(
            f"{where}: {name} is a group of settings: name one of {', '.join(settings)}"
        )


def _config_with_overrides(base: dict[str, Any], overrides: dict[str, Any], where: str) -> Config:
    """Returns the configuration `base`, a nested dict, after the `overrides` are applied.

    Args:
      overrides: dotted name of a setting → value.
      where: the beginning of error messages, such as the file and the point.
    """
    values = _copy_nested_dicts(base)
    for name, value in overrides.items():
        _check_setting_exists(name, where)
        *groups, key = name.split(".")
        group = values
        for part in groups:
            group = group[part]
        group[key] = value
    try:
        fill_vocabulary_from_tokenizer(values)
        trust_user_settings(values)
        config = from_dict(Config, values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for name, value in overrides.items():
        _check_fits_command_line(name, value, where)
    return config


def _copy_nested_dicts(tree: Any) -> Any:
    return (
        {key: _copy_nested_dicts(value) for key, value in tree.items()}
        if isinstance(tree, dict)
        else tree
    )


def _matching_width(first: Config, config: Config, match: str, where: str) -> tuple[str, int]:
    """Returns the name of the setting for the MLP width, and the width with which the model of
    `config` is closest to that of `first` in parameters or FLOPs per token. Each model has its own
    sequence length, on which the FLOPs depend.

    Raises:
      UserError: the model of `config` has more parameters or FLOPs even at the smallest width.
    """
    # This import loads JAX, which takes time. It is here so that mistakes in the sweep file are
    # reported without that delay.
    from qwen3next_jax.sweeps.costs import parameters_or_flops_per_token

    name = "moe_intermediate_size" if config.model.has_experts else "intermediate_size"

    def amount(width: int) -> float:
        model = dataclasses.replace(config.model, **{name: width})
        return parameters_or_flops_per_token(model, config.train.sequence_length, match)

    wanted = parameters_or_flops_per_token(first.model, first.train.sequence_length, match)
    # Parameters and FLOPs both grow linearly with the width.
    low, high = amount(_WIDTH_STEP), amount(2 * _WIDTH_STEP)
    steps = 1 + round((wanted - low) / (high - low))
    if steps < 1:
        raise UserError(
            f"{where} has more {match} than the first point even with MLPs of width "
            f"{_WIDTH_STEP} (match = {match!r}): order the axes so that the largest comes first"
        )
    return f"model.{name}", steps * _WIDTH_STEP


def flat_settings(config: Config) -> dict[str, Any]:
    """Returns dotted name → value for every setting, such as {"model.hidden_size": 64}, with values
    that JSON can represent. Instead of "model.full_attention_interval" and
    "model.full_attention_placement", the result has the kinds of all layers as "model.layer_types".
    """
    settings = flatten(_jsonable(to_dict(config))) | {
        "model.layer_types": list(config.model.resolved_layer_types)
    }
    del settings["model.full_attention_interval"], settings["model.full_attention_placement"]
    return settings


def check_same_sweep(
    sweep: Sweep, before: dict[str, dict[str, Any]], where: str | pathlib.Path
) -> None:
    """Checks that a sweep has the same points, with the same settings, as the sweep that the
    sweep.json of a folder records.

    Args:
      sweep: the sweep to check.
      before: name of each recorded point → its recorded settings.
      where: the folder, for error messages.

    Raises:
      UserError: the folder holds another sweep; the message names the first difference.
    """
    now = {point.name: flat_settings(point.config) for point in sweep.points}
    for name in (*now, *before):
        if name not in before or name not in now:
            raise UserError(
                f"{where} holds another sweep (point {name} is "
                f"{'new' if name in now else 'gone'}): give another --workdir"
            )
    for name, settings in now.items():
        for setting in dict.fromkeys((*settings, *before[name])):
            old, new = before[name].get(setting), settings.get(setting)
            if old != new:
                raise UserError(
                    f"{where} holds another sweep (point {name} has {setting} = {old!r}, not "
                    f"{new!r}): give another --workdir"
                )


def sweep_manifest(sweep: Sweep) -> dict[str, Any]:
    """Returns the content of sweep.json. The "config" of a point has every setting, so that
    `check_same_sweep` notices a later change of the base file.
    """
    return {
        "format": FORMAT,
        "base": sweep.base_path,
        "x": sweep.x_axis,
        "match": sweep.match_widths_by,
        "axes": sweep.axes,
        "points": [
            {
                "name": p.name,
                "values": p.axis_values,
                "overrides": _jsonable(p.overrides),
                "config": flat_settings(p.config),
            }
            for p in sweep.points
        ],
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
