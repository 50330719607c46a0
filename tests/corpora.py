"""The texts that tests share, and files of them."""

import json
import pathlib
from collections.abc import Iterable

import numpy as np

_RANDOM = np.random.default_rng(0)
_WORDS = ["def", "return", "größe", "x", "\n", "import", "∀", "42"]
# Texts of 1 to 79 words, in letters of one, two and three bytes
TEXTS = [f"{i}: " + " ".join(_RANDOM.choice(_WORDS, _RANDOM.integers(1, 80))) for i in range(150)]


def jsonl(texts: Iterable[str]) -> bytes:
    """JSON lines whose field "text" holds a text each."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_jsonl(path: pathlib.Path, texts: Iterable[str]) -> None:
    """Writes JSON lines, after the folders that they lie in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl(texts))


def write_texts(folder: pathlib.Path, number: int) -> None:
    """Writes text files of 20 to 119 words that a model learns in a few steps."""
    rng = np.random.default_rng(0)
    for i in range(number):
        words = rng.choice(["def ", "x", " = ", "\n", "é"], int(rng.integers(20, 120)))
        (folder / f"{i:02}.txt").write_text("".join(words))
