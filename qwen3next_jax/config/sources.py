"""The sources of the training data, as the settings of the group `data` write them.

`data.path` lists sources, separated by commas: globs, each with or without a name, such as
`web=data/web/*.jsonl`. `data.weights`, `data.text_field` and `data.messages_field` give a value to
each source, in the same order (`3,1`) or by name (`web=3,code=1`).
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)


class SourceConfig(NamedTuple):
    """One source of the training data.

    Attributes:
      name: what reports call it: the name that the user gave it, or else its glob.
      glob: the files; "" for the source code of Python's standard library.
      text_field: the field that holds the text.
      messages_field: the field that holds the messages of a conversation; "" for texts.
    """

    name: str
    glob: str
    text_field: str
    messages_field: str


def parse_sources(path: str, text_field: str, messages_field: str) -> tuple[SourceConfig, ...]:
    """Returns the sources that the settings `data.path`, `data.text_field` and
    `data.messages_field` describe; none if `path` has commas alone.

    Raises:
      UserError: two sources have one name, or a field is for no source.
    """
    globs = [text.strip() for text in path.split(",") if text.strip()]
    if not path:
        globs = [""]
    given, globs = _split_names(globs)
    twice = next((name for name in given if name and given.count(name) > 1), None)
    require(twice is None, f"data.path = {path!r} names two sources {twice!r}: expected two names")
    names = []
    for name, glob in zip(given, globs, strict=True):
        same = sum(glob == other for other in globs[: len(names)])
        names.append(name or (f"{glob} ({same + 1})" if same else glob))
    texts = _fields("data.text_field", text_field, given, "text")
    messages = _fields("data.messages_field", messages_field, given, "")
    return tuple(map(SourceConfig, names, globs, texts, messages))


def parse_weights(
    weights: str, sources: Sequence[SourceConfig], where: str = "data.weights"
) -> tuple[float, ...]:
    """Returns the weight of each source; () if `weights` is "".

    Args:
      weights: the setting: "3,1" or "web=3,code=1".
      sources: the sources.
      where: the name of the setting.

    Raises:
      UserError: a weight is not a number or for no source, a source has none, or all are 0.
    """
    if not weights:
        return ()
    names = [source.name for source in sources]
    values = _value_per_source(where, weights, names)
    missing = [name for name in names if name not in values]
    require(
        not missing,
        f"{where} = {weights!r} has no weight for {', '.join(map(repr, missing))}: expected one "
        "for each source of data.path, 0 for one that is not read",
    )
    numbers = tuple(_number(where, weights, values[name]) for name in names)
    require(max(numbers) > 0, f"{where} = {weights!r}: expected at least one number above 0")
    return numbers


def _number(where: str, weights: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    require(
        0 <= number < math.inf,
        f"{where} = {weights!r}: {text!r} is no weight: expected numbers of 0 or more, such as 3,1 "
        "or web=3,code=1",
    )
    return number


def _fields(where: str, text: str, given: Sequence[str], default: str) -> list[str]:
    """Returns the field of each source.

    Args:
      where: the name of the setting.
      text: the setting: one field for all sources, one for each, or fields by name.
      given: the name that the user gave each source; "" for none.
      default: the field of a source for which `text`, by name, has none.
    """
    fields = [field.strip() for field in text.split(",")]
    if len(fields) == 1 and not _NAMED.fullmatch(fields[0]):
        return fields * len(given)
    keys = [name or str(i) for i, name in enumerate(given)]
    values = _value_per_source(where, text, keys)
    return [values.get(key, default) for key in keys]


def _value_per_source(where: str, text: str, names: Sequence[str]) -> dict[str, str]:
    """Returns name of a source → its value in the setting `text`.

    Raises:
      UserError: the values are for other sources than `names`.
    """
    items = [item.strip() for item in text.split(",")]
    keys, values = _split_names(items)
    if not any(keys):
        require(
            len(values) == len(names),
            f"{where} = {text!r} has {len(values)} values for {len(names)} sources in data.path: "
            "expected one for each",
        )
        return dict(zip(names, values, strict=True))
    require(all(keys), f"{where} = {text!r}: expected a name for each value, or for none")
    for key in keys:
        if key not in names:
            raise UserError(
                f"{where} = {text!r}: data.path has no source {key!r}{did_you_mean(key, names)}: "
                f"expected one of {', '.join(map(repr, names))}"
            )
        require(keys.count(key) == 1, f"{where} = {text!r} has two values for {key!r}")
    return dict(zip(keys, values, strict=True))


def _split_names(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the names before "=" in each item, "" for none, and what is left of the items."""
    found = [_NAMED.fullmatch(item) for item in items]
    names = [match[1] if match else "" for match in found]
    return names, [match[2].strip() if match else item for match, item in zip(found, items)]
