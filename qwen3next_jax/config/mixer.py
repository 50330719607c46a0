"""The group `model.mixer`: the settings of the token mixers that a model's layers name.

Which settings there are depends on those mixers. Each mixer declares, as a dataclass, the settings
that it reads (`Mixer.Settings` in `model/mixer.py`). This file holds the values that were given,
and checks them against those declarations. Where no value was given, no mixer is imported.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean
from qwen3next_jax.config.bounds import check_declared_bounds
from qwen3next_jax.config.reading import FlagText, from_dict, parse
from qwen3next_jax.config.registry import MIXERS, resolve

# Every run.json of earlier versions holds all of these settings, most of them at these defaults.
# Such a record loads whether or not the mixers that read them are installed.
_EARLIER_DEFAULTS = {
    "feature_map": "elu",
    "normaliser": True,
    "qk_norm_over": "head",
    "window": 1024,
    "first_tokens": 0,
    "sink_logit": False,
    "latent_rank": 512,
    "query_rank": 0,
    "shared_key_width": 0,
    "latent_norm_eps": 0.0,
    "slots": 64,
    "state_size": 16,
    "block": 16,
    "mask": "causal",
    "prefix_tokens": 0,
    "buckets": 32,
    "max_distance": 128,
    "stretch": 16.0,
    "contexts": 1,
    "selected": 64,
}


def is_mixer_setting(name: str) -> bool:
    """Whether the dotted name is one of a mixer's setting. Whether there is a mixer that reads it
    is known once the model is.
    """
    return name.startswith("model.mixer.") and name.removeprefix("model.mixer.").isidentifier()


class MixerConfig(Mapping[str, Any]):
    """Values of mixers' settings, such as `MixerConfig(window=512)`; hashable.

    In a ModelConfig it holds no value that is a default, so that two models are equal if and only
    if their configs are.
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

    def read(self, settings: type) -> Any:
        """The settings of one mixer, whose dataclass is `settings`: the values given here, the
        defaults of the rest.

        Raises:
          UserError: a value is not of the setting's type, or `settings` refuses it.
        """
        return _read(self, settings)

    def checked(self, mixers: Iterable[str]) -> "MixerConfig":
        """These values for a model whose layers name `mixers`: of the right types, without
        defaults.

        Raises:
          UserError: a value is not of its setting's type, the mixer refuses it, or none of
          `mixers` has such a setting and the value is not its default.
        """
        given = dict(self)
        if given.keys() >= _EARLIER_DEFAULTS.keys():
            given = {name: value for name, value in self.items() if not _is_earlier(name, value)}
        if not given:
            return MixerConfig()
        readers = {name: resolve(MIXERS, name, "mixer").Settings for name in dict.fromkeys(mixers)}
        read = [_built(reader, given) for reader in readers.values()]
        changed = {}
        for name, value in given.items():
            values = [getattr(one, name) for one in read if name in _defaults(type(one))]
            defaults = [_defaults(type(one))[name] for one in read if name in _defaults(type(one))]
            if not values:
                _check_unread(name, value, tuple(readers))
            elif values != defaults:
                changed[name] = values[0]
        return MixerConfig(**changed)


@functools.lru_cache(maxsize=256)
def _read(values: MixerConfig, settings: type) -> Any:
    return _built(settings, values)


def _built(settings: type, values: Mapping[str, Any]) -> Any:
    """The dataclass `settings` with those of `values` that it has, their bounds checked."""
    built = from_dict(settings, _of(settings, values), "model.mixer")
    check_declared_bounds(built, "model.mixer")
    return built


def _of(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that the dataclass `settings` has; a flag's text as its type's value."""
    defaults = _defaults(settings)
    return {name: _typed(name, values[name], defaults[name]) for name in values if name in defaults}


def _typed(name: str, value: Any, default: Any) -> Any:
    if not isinstance(value, FlagText):
        return value
    return parse(value, default, f"--config.model.mixer.{name}={value}")


def _defaults(settings: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(settings)}


def without_earlier_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings by their dotted names, without mixers' settings that only earlier versions
    would have recorded.
    """
    return {
        name: value
        for name, value in settings.items()
        if not (is_mixer_setting(name) and _is_earlier(name.rpartition(".")[2], value))
    }


def _is_earlier(name: str, value: Any) -> bool:
    default = _EARLIER_DEFAULTS.get(name)
    return type(value) is type(default) and value == default


def _check_unread(name: str, value: Any, used: tuple[str, ...]) -> None:
    """Raises UserError unless `value` is the default of a setting `name` that some mixer of the
    registry has. `used`: the model's mixers, which do not read it.
    """
    known = {}
    for mixer in MIXERS:
        try:
            known[mixer] = _defaults(resolve(MIXERS, mixer, "mixer").Settings)
        except UserError:  # its folder has been removed
            continue
    readers = {mixer: defaults[name] for mixer, defaults in known.items() if name in defaults}
    if any(_typed(name, value, default) == default for default in readers.values()):
        return
    if not readers:
        names = dict.fromkeys(name for defaults in known.values() for name in defaults)
        raise UserError(
            f"model.mixer.{name} = {value!r}: no mixer has such a setting"
            f"{did_you_mean(name, names)}; docs/mixers.md lists them"
        )
    raise UserError(
        f"model.mixer.{name} = {value!r}: no layer of this model reads it (its mixers: "
        f"{', '.join(used)}; {', '.join(readers)} would): expected "
        f"{next(iter(readers.values()))!r}"
    )
