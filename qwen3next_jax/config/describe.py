"""The settings as a list for `--help`: names, defaults, and the comments beside the fields.

The comment above a field of a config dataclass, or behind it, is the setting's meaning. This is
the only place where it is written, so `--help` reads it from the source.
"""

import dataclasses
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """name: dotted, such as "train.steps". meaning: "" where the name says it all."""

    name: str
    default: Any
    meaning: str


def list_settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    """Every setting of the config dataclass `cls`, those of its groups in place of the groups."""
    comments = _comments(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from list_settings(hint, f"{name}.")
            continue
        meaning = comments.get(field.name, "")
        if choices := _choices(hint):
            meaning = f"{', '.join(choices)}{': ' * bool(meaning)}{meaning}"
        yield Setting(name, field.default, meaning)


def _choices(hint: Any) -> tuple[str, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _comments(cls: type) -> dict[str, str]:
    """{field: the comment above it or behind it, as one line}."""
    try:
        source = inspect.getsource(cls)
    except OSError:  # an installation without sources
        return {}
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""  # the field on the line being read
    candidate = ""  # a name that is a field if a colon follows
    depth = 0  # of brackets
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        text = token.string
        if token.type == tokenize.COMMENT:
            comment = text.removeprefix("#").strip()
            if name:
                found[name] = f"{found.get(name, '')} {comment}".strip()
            else:
                above.append(comment)
        elif token.type == tokenize.OP:
            depth += (text in "([{") - (text in ")]}")
            if text == ":" and depth == 0 and candidate and not name:
                name = candidate
                found[name] = " ".join(above)
        elif token.type in (tokenize.NEWLINE, tokenize.DEDENT):
            name = ""
            above = []
        candidate = text if token.type == tokenize.NAME and depth == 0 else ""
    return found
