"""The settings `model.mixer`: settings that only some mixers have.

Each mixer declares its settings as a dataclass (`Mixer.Settings` in `model/mixer.py`).
`MixerConfig` holds the values that a user gave, and checks the values against the dataclasses of
the mixers. If the user gave no value, no mixer is imported.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean
from qwen3next_jax.config.bounds import check_declared_bounds
from qwen3next_jax.config.reading import UnparsedFlagText, from_dict, parse_flag_text
from qwen3next_jax.config.registry import MIXERS, resolve


def is_mixer_setting(name: str) -> bool:
    """Whether a dotted name has the form "model.mixer.NAME". The function does not check that a
    mixer of the model has a setting NAME, because the model may not be known yet.
    """
    return name.startswith("model.mixer.") and name.removeprefix("model.mixer.").isidentifier()


class MixerConfig(Mapping[str, Any]):
    """An immutable, hashable mapping from settings of mixers to their values, such as
    `MixerConfig(window=512)`.

    The MixerConfig in a ModelConfig holds only values that differ from the defaults. So a
    ModelConfig does not change if a user sets a setting to its default.
    """

    def __init__(self, **values: Any):
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"MixerConfig({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __or__(self, values: Mapping[str, Any]) -> "MixerConfig":
        return MixerConfig(**self._values | dict(values))

    def settings_for(self, settings_class: type) -> Any:
        """Returns all settings of one mixer: the values that this object holds, and defaults for
        the other settings.

        Args:
          settings_class: the mixer's dataclass, `Mixer.Settings`.

        Returns:
          An instance of `settings_class`.

        Raises:
          UserError: a value has the wrong type, or `settings_class` refuses the value.
        """
        return _cached_mixer_settings(self, settings_class)

    def checked_for_mixers(self, mixers: Iterable[str]) -> "MixerConfig":
        """Checks the values for a model whose layers have the mixers named in `mixers`.

        Returns:
          The values that differ from their defaults, converted to the types of their settings.

        Raises:
          UserError: a value has the wrong type; a mixer refuses a value; or a value is not the
            default and none of `mixers` has the setting.
        """
        given = dict(self)
        if not given:
            return MixerConfig()
        declared = {name: resolve(MIXERS, name, "mixer").Settings for name in dict.fromkeys(mixers)}
        settings_of_mixers = [_build_checked_settings(cls, given) for cls in declared.values()]
        changed = {}
        for name, value in given.items():
            readers = [
                settings
                for settings in settings_of_mixers
                if name in _field_defaults(type(settings))
            ]
            if not readers:
                _check_setting_no_mixer_reads(name, value, tuple(declared))
                continue
            values = [getattr(settings, name) for settings in readers]
            if values != [_field_defaults(type(settings))[name] for settings in readers]:
                changed[name] = values[0]
        return MixerConfig(**changed)


@functools.lru_cache(maxsize=256)
def _cached_mixer_settings(values: MixerConfig, settings_class: type) -> Any:
    return _build_checked_settings(settings_class, values)


def _build_checked_settings(settings_class: type, values: Mapping[str, Any]) -> Any:
    """Returns an instance of the dataclass `settings_class`. Each field has its value in `values`,
    or else its default. Names in `values` that are not fields of `settings_class` are ignored.

    Raises:
      UserError: a value is of the wrong type or out of its bound.
    """
    built = from_dict(settings_class, _values_of_fields(settings_class, values), "model.mixer")
    check_declared_bounds(built, "model.mixer")
    return built


def _values_of_fields(settings_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `values` whose names are fields of the dataclass `settings_class`. If
    a value is the text of a flag, the text is parsed.
    """
    defaults = _field_defaults(settings_class)
    return {
        name: _parse_if_flag(name, values[name], defaults[name])
        for name in values
        if name in defaults
    }


def _parse_if_flag(name: str, value: Any, default: Any) -> Any:
    """Returns `value`. If `value` is the unparsed text of a flag, parses it as a value of the type
    of `default` first.
    """
    if not isinstance(value, UnparsedFlagText):
        return value
    return parse_flag_text(value, default, f"--config.model.mixer.{name}={value}")


def _field_defaults(settings_class: type) -> dict[str, Any]:
    """Returns name → default, for the fields of a mixer's dataclass `settings_class`."""
    return {field.name: field.default for field in dataclasses.fields(settings_class)}


def _check_setting_no_mixer_reads(name: str, value: Any, model_mixers: tuple[str, ...]) -> None:
    """Checks the value of a setting that none of the model's mixers (`model_mixers`) has. The value
    is accepted if it is the default of the setting in another mixer.

    Raises:
      UserError: no mixer of the registry has the setting, or the value is not the default.
    """
    known = {}
    for mixer in MIXERS:
        try:
            known[mixer] = _field_defaults(resolve(MIXERS, mixer, "mixer").Settings)
        except UserError:  # the mixer's folder was deleted
            continue
    readers = {mixer: defaults[name] for mixer, defaults in known.items() if name in defaults}
    values = [_parse_if_flag(name, value, default) for default in readers.values()]
    if any(map(operator.eq, values, readers.values())):
        return
    if not readers:
        names = dict.fromkeys(name for defaults in known.values() for name in defaults)
        raise UserError(
            f"model.mixer.{name} = {value!r}: no mixer has such a setting"
            f"{did_you_mean(name, names)}; docs/mixers.md lists them"
        )
    raise UserError(
        f"model.mixer.{name} = {values[0]!r}: no layer of this model reads it (its mixers: "
        f"{', '.join(model_mixers)}; {', '.join(readers)} would): expected "
        f"{next(iter(readers.values()))!r}"
    )
