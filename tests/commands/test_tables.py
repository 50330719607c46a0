"""The tables that commands print, in a pipe and in a narrow terminal."""

import io

import numpy as np
from rich.console import Console

from qwen3next_jax.commands.console import make_console
from qwen3next_jax.commands.replay import norms_table

NAME = "layers.1.mixer.in_proj_qkvz"


def _table():
    tree = {NAME: np.full((3, 4), 12345.678, np.float32)}
    return norms_table(tree, tree)


def test_a_pipe_gets_whole_names_and_numbers(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    console = make_console()
    console.print(_table())
    (row,) = [line for line in console.file.getvalue().splitlines() if "layers" in line]
    assert row.split() == [NAME, "4.277e+04", "4.277e+04", "1.23e+04"]


def test_a_narrow_terminal_cuts_nothing():
    console = Console(file=io.StringIO(), width=70, highlight=False)
    console.print(_table())
    lines = console.file.getvalue()
    first = [line.split() for line in lines.splitlines()]
    names = "".join(words[0] for words in first if words and words[0] in NAME)
    assert names == NAME
    assert "…" not in lines
    assert "4.277e+04" in lines
