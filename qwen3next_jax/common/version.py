"""Identifies this code by the commit of its checkout or the version of the installed package."""

import importlib.metadata
import pathlib
import subprocess


def code_commit() -> str | None:
    """Returns the commit of the checkout from which this package runs; None without a checkout."""
    return git_output("rev-parse", "HEAD")


def code_version() -> str:
    """Returns the first 12 digits of `code_commit`, followed by "+" if files of the package have
    uncommitted changes. Without a checkout, returns the version of the installed package.
    """
    if commit := code_commit():
        status = git_output("status", "--porcelain", "--untracked-files=no", "--", "qwen3next_jax")
        return commit[:12] + ("" if status == "" else "+")
    try:
        return importlib.metadata.version("qwen3next-jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def git_output(*command: str) -> str | None:
    """Returns the output of a git command about the checkout from which this package runs. Returns
    None if the command fails, or there is no checkout or no git.
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
