"""Parses the settings of the group `data` that list the sources of the training data.

`data.path` lists sources, separated by commas: globs, each with or without a name, such as
`web=data/web/*.jsonl`. `data.weights`, `data.text_field` and `data.messages_field` give a value to
each source, in the same order (`3,1`) or by name (`web=3,code=1`).
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)\s*=(.*)", re.DOTALL)


class SourceConfig(NamedTuple):
    """One source of the training data.

    Attributes:
      name: the name of the source in reports: the name that the user gave, or the glob.
      glob: the glob of the files; "" for the source code of Python's standard library.
      text_field: the field that holds the text.
      messages_field: the field that holds the messages of a conversation; "" for texts.
    """

    name: str
    glob: str
    text_field: str
    messages_field: str


def parse_sources(path: str, text_field: str, messages_field: str) -> tuple[SourceConfig, ...]:
    """Returns the sources that the settings `data.path`, `data.text_field` and
    `data.messages_field` describe; () if `path` consists of commas.

    Raises:
      UserError: two sources have the same name, a name has no glob, or a field is given to a source
        that does not exist.
    """
    names, globs = _names_and_globs(path)
    texts = _field_of_each_source("data.text_field", text_field, names, "text")
    messages = _field_of_each_source("data.messages_field", messages_field, names, "")
    return tuple(map(SourceConfig, names, globs, texts, messages))


def parse_weights(weights: str, path: str) -> tuple[float, ...]:
    """Returns the weight of each source of `data.path`; () if `weights` is "".

    Args:
      weights: the setting: "3,1" or "web=3,code=1".
      path: the setting `data.path`.

    Raises:
      UserError: a weight is not a number, or is given to a source that does not exist; a source has
        no weight; or all weights are 0.
    """
    require(
        isinstance(weights, str),
        f"data.weights = {weights!r}: expected a text, such as '3,1' or 'web=3,code=1'",
    )
    if not weights:
        return ()
    names, _ = _names_and_globs(path)
    values = _value_per_source("data.weights", weights, names)
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    require(
        not missing,
        f"data.weights = {weights!r} has no weight for {', '.join(map(repr, missing))}: expected "
        "one for each source of data.path, 0 for one that is not read (NAME=GLOB gives it a name)",
    )
    numbers = tuple(_parse_weight(weights, value) for value in values)
    require(max(numbers) > 0, f"data.weights = {weights!r}: expected at least one number above 0")
    return numbers


def _names_and_globs(path: str) -> tuple[list[str], list[str]]:
    """Returns the names of the sources of `data.path`, and the globs of the sources.

    Raises:
      UserError: two sources have the same name, or a name has no glob.
    """
    items = [text.strip() for text in path.split(",") if text.strip()]
    given, globs = _split_names(items if path else [""])
    names = []
    for name, glob in zip(given, globs, strict=True):
        require(
            not name or glob,
            f"data.path = {path!r}: the source {name!r} has no files: expected {name}=GLOB",
        )
        same = sum(glob == other for other in globs[: len(names)])
        names.append(name or (f"{glob} ({same + 1})" if same else glob))
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"data.path = {path!r} names two sources {twice!r}: expected two names")
    return names, globs


def _parse_weight(weights: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    require(
        0 <= number < math.inf,
        f"data.weights = {weights!r}: {text!r} is no weight: expected numbers of 0 or more, such "
        "as 3,1 or web=3,code=1",
    )
    return number


def _field_of_each_source(where: str, text: str, names: Sequence[str], default: str) -> list[str]:
    """Returns, for each source, the name of the field of a record that holds the text or the
    messages.

    Args:
      where: the name of the setting.
      text: the value of the setting: one field for all sources, a field for each source in order,
        or fields by the names of sources ("web=content,code=text").
      names: the names of the sources.
      default: the field of a source to which `text` gives none.
    """
    fields = [field.strip() for field in text.split(",")]
    if len(fields) == 1 and not _NAMED.fullmatch(fields[0]):
        return fields * len(names)
    values = _value_per_source(where, text, names)
    return [default if value is None else value for value in values]


def _value_per_source(where: str, text: str, names: Sequence[str]) -> list[str | None]:
    """Returns the value that the setting `text` gives to each source; None for a source without a
    value.

    Args:
      where: the name of the setting.
      text: the value of the setting: a value for each source in order ("3,1"), or values by the
        names of sources ("web=3,code=1").
      names: the names of the sources.

    Raises:
      UserError: the number of values is not that of the sources, or a name is not that of a source.
    """
    keys, values = _split_names([item.strip() for item in text.split(",")])
    if not any(keys):
        require(
            len(values) == len(names),
            f"{where} = {text!r} has {_count_text(len(values), 'value')} for "
            f"{_count_text(len(names), 'source')} in data.path: expected one for each",
        )
        return list(values)
    require(all(keys), f"{where} = {text!r}: expected a name for each value, or for none")
    for key in keys:
        if key not in names:
            raise UserError(
                f"{where} = {text!r}: data.path has no source {key!r}{did_you_mean(key, names)}: "
                f"expected one of {', '.join(map(repr, names))}"
            )
        require(keys.count(key) == 1, f"{where} = {text!r} has two values for {key!r}")
    by_name = dict(zip(keys, values, strict=True))
    return [by_name.get(name) for name in names]


def _split_names(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits items of the form "NAME=TEXT". Returns the names of all items ("" for an item without
    a name), and the texts of all items.
    """
    found = [_NAMED.fullmatch(item) for item in items]
    names = [match[1] if match else "" for match in found]
    return names, [match[2].strip() if match else item for match, item in zip(found, items)]


def _count_text(count: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 value" or "2 values"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
