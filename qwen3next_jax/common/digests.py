"""SHA-256 of texts, of JSON and of files, in hexadecimal digits."""

import hashlib
import json
import os
import pathlib
import sys
from typing import Any


def sha256(content: str | bytes) -> str:
    """Returns the SHA-256 of bytes, or of a text encoded as UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_json(value: Any) -> str:
    """Returns the SHA-256 of a JSON-serializable value. The order of dict keys does not matter."""
    return sha256(json.dumps(value, sort_keys=True))


def md5_file(path: str | os.PathLike) -> str:
    """Returns the MD5 of a local file, the checksum that object stores keep."""
    with pathlib.Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def sha256_file(path: str | os.PathLike, start: int = 0, length: int = sys.maxsize) -> str:
    """Returns the SHA-256 of at most `length` bytes of a local file, from the byte `start` on. The
    file is read in pieces of 256 KiB.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with pathlib.Path(path).open("rb", buffering=0) as file:
        file.seek(start)
        while length and (count := file.readinto(buffer[: min(len(buffer), length)])):
            digest.update(buffer[:count])
            length -= count
    return digest.hexdigest()
