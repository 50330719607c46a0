"""Which code this is: the commit of the checkout, or the version of the installed package."""

import importlib.metadata
import pathlib
import subprocess


def code_commit() -> str | None:
    """The commit of the checkout that the package runs from; None for an installed package."""
    return git("rev-parse", "HEAD")


def code_version() -> str:
    """The first 12 digits of that commit, with a "+" if files were changed; else the version of the
    package.
    """
    if commit := code_commit():
        status = git("status", "--porcelain", "--untracked-files=no", "--", "qwen3next_jax")
        return commit[:12] + ("" if status == "" else "+")
    try:
        return importlib.metadata.version("qwen3next-jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def git(*command: str) -> str | None:
    """The output of a git command about the checkout that the package runs from. None if there is
    no checkout, no git, or git refuses the checkout (another user owns it).
    """
    root = pathlib.Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(root), *command],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
