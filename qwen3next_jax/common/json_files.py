"""Reads JSON files that other programs wrote, if they are regular files of bounded size and depth.

Python's own reader waits forever for a FIFO, and raises RecursionError at deep nesting. The errors
of this module describe what is wrong with a file in one line.
"""

import errno
import itertools
import json
import os
import stat
from typing import Any

from etils import epath

from qwen3next_jax.common.storage import is_bucket, to_path

DEPTH = 100  # levels of nested lists and objects; recursive functions can handle this depth
MAX_BYTES = 1 << 28  # for comparison, the released model's index of shards has 8 MB
_NAMES = {
    dict: "object",
    list: "list",
    str: "string",
    bool: "truth value",
    int: "number",
    float: "number",
    type(None): "null",
}


def parse(text: str | bytes, expected_type: type = dict) -> Any:
    """Returns the JSON value in `text`, which must be of type `expected_type` (dict or list).

    Raises:
      ValueError: the text is not JSON, or its value has another type or is nested deeper than
        DEPTH. The message is one line.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} at {line}column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error
    except ValueError as error:  # Python limits the number of digits
        raise ValueError("an integer of more than 4300 digits") from error
    except RecursionError as error:
        raise ValueError(f"nested more than {DEPTH} levels deep") from error
    if not isinstance(value, expected_type):
        raise ValueError(f"expected a JSON {_NAMES[expected_type]}, found a {_NAMES[type(value)]}")
    if sum(map(text.count, (b"[", b"{") if isinstance(text, bytes) else ("[", "{"))) <= DEPTH:
        return value
    level = [value]
    for _ in range(DEPTH):
        children_of_values = (
            inner.values() if isinstance(inner, dict) else inner for inner in level
        )
        children = itertools.chain.from_iterable(children_of_values)
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} levels deep")


def read(path: str | os.PathLike, expected_type: type = dict) -> Any:
    """Returns the JSON value in a local file or an object of a bucket. `expected_type` is the
    type that the value should have: dict or list.

    Raises:
      OSError: the file cannot be read or is not a regular file. The attribute `strerror` says why.
      ValueError: `parse` raises it for the text of the file, or the file is larger than MAX_BYTES.
    """
    with open_regular_file(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
    return parse(content, expected_type)


def open_regular_file(path: str | os.PathLike) -> Any:
    """Opens a regular file for reading bytes.

    Raises:
      OSError: the file is missing, a folder, a FIFO, a socket or a device.
    """
    check_regular_file(path)
    return (to_path(path) if is_bucket(path) else epath.Path(path)).open("rb")


def check_regular_file(path: str | os.PathLike) -> None:
    """Raises OSError if a local `path` is missing or is not a regular file, because reading from a
    FIFO or a device might never end.
    """
    if "://" in os.fspath(path):
        return
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        what = "a folder"
    elif stat.S_ISFIFO(mode):
        what = "a FIFO"
    else:
        what = "a socket or a device"
    raise OSError(errno.EINVAL, f"{what}, not a regular file", os.fspath(path))
