"""Tables of names: what a setting may name, each name with the import string of what it stands
for ("package.module:Name").

They hold strings, so that a table can stand here, below what it names, and a run imports only
what it uses.
"""

import importlib
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean, reason, require


def check_name(table: dict[str, str], name: str, setting: str) -> None:
    """Raises: UserError: `name` is none of the table's; nothing is imported. `setting`: where it
    was given, such as "data.source".
    """
    require(
        name in table,
        f"{setting} = {name!r}: expected one of {', '.join(table)}{did_you_mean(str(name), table)}",
    )


def resolve(table: dict[str, str], name: str, setting: str) -> Any:
    """What `name` stands for, imported now.

    Raises:
      UserError: `name` is none of the table's, or its line of the table cannot be imported.
    """
    check_name(table, name, setting)
    module, _, attribute = table[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does
        raise UserError(
            f"{setting} = {name!r}: its line of the table, {name!r}: {table[name]!r}, cannot be "
            f"imported ({type(error).__name__}: {reason(error)}): correct the line or the module"
        ) from error
