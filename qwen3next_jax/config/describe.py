"""Lists the settings for `--help`: names, defaults and meanings.

The meaning of a setting is the comment above or after its field in the config dataclass. This file
reads the comments from the source code.
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
    """One setting.

    Attributes:
      name: the dotted name, such as "train.steps".
      default: the default value.
      allowed_values: the choices or the bound that the field declares, as text; "" if it declares
        none.
      meaning: what the setting does; "" if its field has no comment.
    """

    name: str
    default: Any
    allowed_values: str
    meaning: str


def list_settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    """Yields the settings of the config dataclass `cls` in the order of its fields, and after them
    the settings of each group in `cls`. The names of the settings begin with `prefix`.
    """
    comments = {}
    for parent in reversed(cls.__mro__):
        if dataclasses.is_dataclass(parent):
            comments |= _field_comments(parent)
    bounds = declared_bounds(cls)
    hints = typing.get_type_hints(cls)
    groups = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            groups[name] = hint
            continue
        allowed = ", ".join(_literal_choices(hint)) or bounds.get(field.name, "")
        yield Setting(name, field.default, allowed, comments.get(field.name, ""))
    for name, group in groups.items():
        yield from list_settings(group, f"{name}.")


def settings_by_mixer() -> dict[str, list[Setting]]:
    """Returns mixer → its settings in the group `model.mixer`, for every mixer of the registry that
    can be imported and has such settings. The settings are named without the prefix "model.mixer.".
    """
    by_mixer = {}
    for mixer in MIXERS:
        try:
            mixer_settings = list(list_settings(resolve(MIXERS, mixer, "mixer").Settings))
        except UserError:  # the mixer's folder was removed
            continue
        if mixer_settings:
            by_mixer[mixer] = mixer_settings
    return by_mixer


def _literal_choices(hint: Any) -> tuple[str, ...]:
    """Returns the values of a `Literal`; () for other types."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _field_comments(cls: type) -> dict[str, str]:
    """Returns field of `cls` → the comment above or after the field, as one line."""
    try:
        source = inspect.getsource(cls)
    except OSError:  # the installation has no source code
        return {}
    comments: dict[str, str] = {}
    comments_above: list[str] = []
    field = ""  # the field on the line being read
    candidate = ""  # a name that is a field if a colon follows
    depth = 0  # nesting depth of brackets
    level = 0  # of indentation; fields have 1, and the code of methods more
    previous = 0  # type of the previous token
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        text = token.string
        if token.type == tokenize.COMMENT:
            comment = text.removeprefix("#").strip()
            if field:
                comments[field] = f"{comments.get(field, '')} {comment}".strip()
            else:
                comments_above.append(comment)
        elif token.type == tokenize.OP:
            if text in "([{":
                depth += 1
            elif text in ")]}":
                depth -= 1
            if text == ":" and depth == 0 and level == 1 and candidate and not field:
                field = candidate
                comments[field] = " ".join(comments_above)
        elif token.type in (tokenize.NEWLINE, tokenize.DEDENT):
            field = ""
            comments_above = []
        elif token.type == previous == tokenize.NL:  # a blank line: the comment was a heading
            comments_above = []
        if token.type == tokenize.INDENT:
            level += 1
        elif token.type == tokenize.DEDENT:
            level -= 1
        candidate = text if token.type == tokenize.NAME and depth == 0 else ""
        previous = token.type
    return comments
