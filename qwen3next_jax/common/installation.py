"""How this project was installed, for advice that names commands: in a checkout `uv run` makes the
environment, and an installed package has its command on the PATH.
"""

import pathlib

_IN_CHECKOUT = (pathlib.Path(__file__).parents[2] / "pyproject.toml").exists()


def shell_command(verb: str) -> str:
    """Returns the beginning of a command line, such as "uv run qwen3next eval"."""
    return f"uv run qwen3next {verb}" if _IN_CHECKOUT else f"qwen3next {verb}"


def how_to_install(extra: str) -> str:
    """Returns advice that installs the packages of an extra of pyproject.toml."""
    if _IN_CHECKOUT:
        return f"use `uv run --extra {extra} …`, or run `pip install -e '.[{extra}]'`"
    return f"run `pip install 'qwen3next-jax[{extra}]'`"
