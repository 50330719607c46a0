"""A sweep as its points: a base configuration, axes, and every combination of their values,
checked before any starts.

A sweep file is Python with `get_sweep()` that returns a dict:

    base      a config file, such as "configs/tiny.py"
    set       {setting: value} for every point; an axis or --set may say otherwise
    axes      {axis: values}; a setting ("train.seed": [0, 1]), "ratio": ["3:1", …] (linear to
              full attention layers), or any
              other name with {value's name: {setting: value, …}}; no setting has two of axes,
              `match` and --set as its source
    match     "parameters" or "flops": the MLPs' width of every point is chosen so that it has as
              many as the first; "" (the
              default) leaves the widths alone
    x         the axis along which the report draws; the first one if not given

A point's name is its axes' values, and its command is a plain train.py with overrides.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, did_you_mean
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import Config, ModelConfig, default_config, from_dict, to_dict
from qwen3next_jax.config.files import call_file, load_config_file
from qwen3next_jax.config.mixer import is_mixer_setting, without_earlier_defaults
from qwen3next_jax.config.registry import trust_user_settings
from qwen3next_jax.runs.vocabulary import fill_from_tokenizer

_KEYS = ("base", "set", "axes", "match", "x")
_MATCHES = ("", "parameters", "flops")
_WIDTH_STEP = 8
_LONGEST_NAME = 255  # bytes, of a file or a folder


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep. `values`: the name of its value on every axis; `overrides`: settings
    that differ from the base.
    """

    name: str
    values: dict[str, str]
    overrides: dict[str, Any]
    config: Config


@dataclasses.dataclass(frozen=True)
class Sweep:
    """`alone`: the base file's own configuration; None: the points' settings complete it."""

    base: str
    alone: Config | None
    axes: dict[str, tuple[str, ...]]
    x: str
    match: str
    points: tuple[Point, ...]


def load_sweep(path: str | pathlib.Path, changes: dict[str, Any] | None = None) -> Sweep:
    """Reads a sweep file and checks every point of it. `changes` are settings that override
    every point's.

    Raises:
      UserError: the file, an axis, or the configuration of a point is wrong (the point is named).
    """
    record, changes = _read(pathlib.Path(path)), changes or {}
    base = load_config_file(pathlib.Path(record["base"]), f"{path}: base = ")
    axes = {
        axis: _axis_values(axis, values, path) for axis, values in record.get("axes", {}).items()
    }
    sources = _sources(axes, changes, path)
    if not axes:
        raise UserError(
            f"{path}: axes is empty: expected at least one, such as {{'ratio': ['1:1', '3:1']}}"
        )
    match = record.get("match", "")
    if match not in _MATCHES:
        raise UserError(
            f"{path}: match = {match!r}: expected one of "
            f"{', '.join(map(repr, _MATCHES))}{did_you_mean(str(match), _MATCHES)}"
        )
    x = record.get("x", next(iter(axes)))
    if x not in list(axes):
        raise UserError(
            f"{path}: x = {x!r}: expected one of the axes, "
            f"{', '.join(axes)}{did_you_mean(str(x), axes)}"
        )

    points: list[Point] = []
    for combination in itertools.product(*(values.items() for values in axes.values())):
        chosen = {axis: value for axis, (value, _) in zip(axes, combination, strict=True)}
        overrides = dict(record.get("set", {}))
        for _, settings in combination:
            overrides |= settings
        overrides |= changes
        name = _point_name(chosen)
        where = f"{path}: point {name}"
        config = _config(base, overrides, where)
        if isinstance(record["axes"].get("ratio"), (list, tuple)):
            _check_ratio(chosen["ratio"], config.model.num_hidden_layers, where)
        if match and points:
            first, length = points[0].config.model, config.train.sequence_length
            width, value = _matched(first, config.model, length, match, where)
            if width in sources:
                raise UserError(_two_sources(path, width, sources[width], "match"))
            overrides[width] = value
            config = _config(base, overrides, where)
        points.append(Point(name, chosen, overrides, config))
    names = [point.name for point in points]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"{path}: two points are named {twice}: give the values of an axis different names"
        )
    seen: dict[str, Point] = {}
    for point in points:
        if (first := seen.setdefault(json.dumps(settings_of(point.config)), point)) is not point:
            raise UserError(
                f"{path}: points {first.name} and {point.name} are the same run: every setting of "
                "theirs is equal"
            )
    try:
        alone = _config(base, {}, "")
    except UserError:
        alone = None
    return Sweep(
        str(record["base"]),
        alone,
        {axis: tuple(values) for axis, values in axes.items()},
        x,
        match,
        tuple(points),
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
    record = call_file(path, "get_sweep")
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


def _sources(
    axes: dict[str, dict[str, dict[str, Any]]], changes: dict[str, Any], path: str | pathlib.Path
) -> dict[str, str]:
    """Setting → the axis or flag it comes from. Of two, one would be shown and the other
    trained, so that is refused.
    """
    sources: dict[str, str] = {}
    given = {
        f"axis {axis!r}": {setting for settings in values.values() for setting in settings}
        for axis, values in axes.items()
    }
    for source, settings in {**given, "--set": set(changes)}.items():
        for setting in sorted(settings, key=str):
            if setting in sources:
                raise UserError(_two_sources(path, setting, sources[setting], source))
            sources[setting] = source
    return sources


def _two_sources(path: str | pathlib.Path, setting: str, first: str, second: str) -> str:
    return f"{path}: {setting} comes from {first} and from {second}: leave it out of one of them"


def _axis_values(axis: str, values: Any, path: str | pathlib.Path) -> dict[str, dict[str, Any]]:
    """Name of each value → the settings it stands for."""
    if isinstance(axis, str) and re.search(r"[/\x00-\x1f\x7f-\x9f\ud800-\udfff]", axis):
        raise UserError(
            f"{path}: axis {axis!r}: expected a name without '/' and control characters, as the "
            "folders of the points are named after it"
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
        result = {str(value): _ratio(str(value), path) for value in values}
    else:
        _known_setting(axis, f"{path}: axis {axis!r}", known=("ratio",))
        result = {_value_name(value): {axis: value} for value in values}
        if len(result) < len(values):
            raise UserError(f"{path}: axis {axis!r} names a value twice: {values!r}")
    if not result:
        raise UserError(f"{path}: axis {axis!r} has no values")
    return result


def _ratio(value: str, path: str | pathlib.Path) -> dict[str, Any]:
    found = re.fullmatch(r"(\d+):([01])", value)
    if not found or value == "0:0":
        raise UserError(
            f"{path}: ratio {value!r}: expected LINEAR:FULL layers of one period with FULL 1, "
            "such as 3:1, or 1:0 for none"
        )
    return {
        "model.full_attention_interval": int(found[1]) + 1 if found[2] == "1" else 0,
        "model.layer_types": (),
    }


def _check_ratio(ratio: str, layers: int, where: str) -> None:
    linear, full = map(int, ratio.split(":"))
    if full and layers % (period := linear + full):
        fewer = layers // period * period
        nearest = f"{fewer} or {fewer + period}" if fewer else f"{period}"
        raise UserError(
            f"{where}: ratio {ratio} needs a multiple of {period} layers, but "
            f"model.num_hidden_layers = {layers}: expected {nearest}"
        )


def _value_name(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _point_name(chosen: dict[str, str]) -> str:
    """The name of a point's folder. One that a file system could not hold ends in its digest."""
    name = ",".join(
        f"{axis.rpartition('.')[2]}={_file_name(value)}" for axis, value in chosen.items()
    )
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    end = f"-{digests.sha256(name)[:16]}"
    return name.encode()[: _LONGEST_NAME - len(end)].decode(errors="ignore") + end


def _file_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", value)


def as_text(value: Any) -> str:
    """The value of a setting as `--config.setting=` takes it."""
    plain = json.loads(json.dumps(value))  # a number of NumPy's is written like any other
    return str(tuple(plain)) if isinstance(plain, list) else str(plain)


def _check_text(name: str, value: Any, where: str) -> None:
    """Raises UserError where no command line can hold the value of a setting."""
    text = as_text(value)
    if "\0" in text or text.encode(errors="replace").decode() != text:
        raise UserError(
            f"{where}: {name} = {value!r}: expected text without NUL and lone surrogates, as it "
            "stands on the command line of the point"
        )


def _known_setting(name: str, where: str, known: tuple[str, ...] = ()) -> None:
    settings: Any = default_config()
    if not isinstance(name, str):
        raise UserError(
            f"{where}: {name!r} is of type {type(name).__name__}: expected a setting's name, such "
            "as 'train.seed'"
        )
    if is_mixer_setting(name):
        return
    for key in name.split("."):
        if not isinstance(settings, dict) or key not in settings:
            hint = did_you_mean(key, [*settings, *known] if isinstance(settings, dict) else known)
            raise UserError(f"{where}: no such setting as {name}{hint}")
        settings = settings[key]
    if isinstance(settings, dict):
        raise UserError(
            f"{where}: {name} is a group of settings: name one of {', '.join(settings)}"
        )


def _config(base: dict[str, Any], overrides: dict[str, Any], where: str) -> Config:
    values = _copy(base)
    for name, value in overrides.items():
        _known_setting(name, where)
        *groups, key = name.split(".")
        group = values
        for part in groups:
            group = group[part]
        group[key] = value
    try:
        fill_from_tokenizer(values)
        trust_user_settings(values)
        config = from_dict(Config, values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for name, value in overrides.items():
        _check_text(name, value, where)
    return config


def _copy(tree: Any) -> Any:
    return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _matched(
    first: ModelConfig, model: ModelConfig, sequence_length: int, match: str, where: str
) -> tuple[str, int]:
    """The MLP width (setting and value) with which `model` comes nearest to the parameters of
    `first`, or to its FLOPs per token.
    """
    # This loads JAX; a mistake should not wait for it.
    from qwen3next_jax.runs.costs import model_amount

    name = "moe_intermediate_size" if model.has_experts else "intermediate_size"

    def amount(model: ModelConfig) -> float:
        return model_amount(model, sequence_length, match)

    def with_width(width: int) -> ModelConfig:
        return dataclasses.replace(model, **{name: width})

    # Both amounts grow linearly with the width.
    low, high = amount(with_width(_WIDTH_STEP)), amount(with_width(2 * _WIDTH_STEP))
    steps = 1 + round((amount(first) - low) / (high - low))
    if steps < 1:
        raise UserError(
            f"{where} has more {match} than the first one even with MLPs of width {_WIDTH_STEP} "
            f"(match = {match!r}): order the axes so that the largest comes first"
        )
    return f"model.{name}", steps * _WIDTH_STEP


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting as JSON has it ("model.hidden_size": 64), but for the two of which
    model.layer_types is what came out.
    """
    settings = flatten(_jsonable(to_dict(config))) | {
        "model.layer_types": list(config.model.pattern)
    }
    del settings["model.full_attention_interval"], settings["model.full_attention_placement"]
    return settings


def check_unchanged(
    sweep: Sweep, before: dict[str, dict[str, Any]], where: str | pathlib.Path
) -> None:
    """Refuses a folder that holds another sweep; `before`: name of each point → its settings,
    from the manifest there.
    """
    now = {point.name: settings_of(point.config) for point in sweep.points}
    # at which settings stand that were not there then, as they do for a run
    defaults = settings_of(Config())
    before = {
        name: {
            setting: value
            for setting, value in defaults.items()
            if not setting.startswith("model.layer_types")
        }
        | without_earlier_defaults(settings)
        for name, settings in before.items()
    }
    for name in (*now, *before):
        if name not in before or name not in now:
            raise UserError(
                f"{where} holds another sweep (point {name} is "
                f"{'new' if name in now else 'gone'}): give another --workdir"
            )
    for name, settings in now.items():
        for setting in dict.fromkeys((*settings, *before[name])):
            old, new = before[name].get(setting), settings.get(setting)
            # a tokenizer that is not given was recorded as "bytes", the default then
            unset = setting == "data.tokenizer" and {old, new} == {"", "bytes"}
            if old != new and not unset:
                raise UserError(
                    f"{where} holds another sweep (point {name} has {setting} = {old!r}, not "
                    f"{new!r}): give another --workdir"
                )


def manifest(sweep: Sweep) -> dict[str, Any]:
    """What sweep.json records. A point's config holds what its base file said too, so that an
    edit of that is seen.
    """
    return {
        "base": sweep.base,
        "x": sweep.x,
        "match": sweep.match,
        "axes": sweep.axes,
        "points": [
            {
                "name": p.name,
                "values": p.values,
                "overrides": _jsonable(p.overrides),
                "config": settings_of(p.config),
            }
            for p in sweep.points
        ],
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
