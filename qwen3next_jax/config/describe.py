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

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config.bounds import declared_bounds
from qwen3next_jax.config.registry import MIXERS, resolve


class Setting(NamedTuple):
    """name: dotted, such as "train.steps". allowed: the choices or the bound that the field
    declares; "" where it declares none. meaning: "" where the name says it all.
    """

    name: str
    default: Any
    allowed: str
    meaning: str


def settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    """Every setting of the config dataclass `cls`, those of its groups in place of the groups."""
    comments = {}
    for parent in reversed(cls.__mro__):
        if dataclasses.is_dataclass(parent):
            comments |= _comments(parent)
    bounds = declared_bounds(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from settings(hint, f"{name}.")
            continue
        allowed = ", ".join(_choices(hint)) or bounds.get(field.name, "")
        yield Setting(name, field.default, allowed, comments.get(field.name, ""))


def mixer_settings() -> dict[str, list[Setting]]:
    """{mixer: its settings of the group `model.mixer`} of all mixers of the registry that can be
    imported and have any; the names are those behind "model.mixer.".
    """
    found = {}
    for mixer in MIXERS:
        try:
            own = list(settings(resolve(MIXERS, mixer, "mixer").Settings))
        except UserError:  # its folder has been removed
            continue
        if own:
            found[mixer] = own
    return found


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
    previous = 0  # type of the token before
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
        elif token.type == previous == tokenize.NL:  # a blank line: the comment was a heading
            above = []
        candidate = text if token.type == tokenize.NAME and depth == 0 else ""
        previous = token.type
    return found
