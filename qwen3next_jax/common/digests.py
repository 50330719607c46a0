"""SHA-256 of texts, of JSON and of files, in hexadecimal digits."""

import hashlib
import json
import os
import pathlib
import sys
from typing import Any


def of(content: str | bytes) -> str:
    """Of bytes, or of a text's UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def of_json(value: Any) -> str:
    """Of what JSON can hold, whatever the order of keys."""
    return of(json.dumps(value, sort_keys=True))


def of_file(path: str | os.PathLike, start: int = 0, length: int = sys.maxsize) -> str:
    """Of the local file's bytes from `start` on, `length` of them at most; nothing but a buffer
    is in memory.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with pathlib.Path(path).open("rb", buffering=0) as file:
        file.seek(start)
        while length and (count := file.readinto(buffer[: min(len(buffer), length)])):
            digest.update(buffer[:count])
            length -= count
    return digest.hexdigest()
