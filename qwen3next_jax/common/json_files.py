"""JSON that others wrote: from regular files only, of bounded size and depth, and what is wrong
with it in one line.

Python's own reader waits at a FIFO for ever, and answers deep nesting and long integers with
errors of kinds of their own.
"""

import errno
import json
import os
import stat
from typing import Any

from etils import epath

DEPTH = 100  # levels of lists and objects: whoever walks through the result may do so by recursion
MAX_BYTES = 1 << 28  # the index of the released model's shards has 8 MB
_NAMES = {
    dict: "object",
    list: "list",
    str: "string",
    bool: "truth value",
    int: "number",
    float: "number",
    type(None): "null",
}


def parse(text: str | bytes, kind: type = dict) -> Any:
    """The value of `kind` (dict or list) in `text`.

    Raises:
      ValueError: it is no JSON, something else, or nested beyond DEPTH; one line that says which.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} at {line}column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error
    except ValueError as error:  # Python's limit, told in Python's terms
        raise ValueError("an integer of more than 4300 digits") from error
    except RecursionError as error:
        raise ValueError(f"nested more than {DEPTH} levels deep") from error
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {_NAMES[kind]}, found a {_NAMES[type(value)]}")
    if sum(map(text.count, (b"[", b"{") if isinstance(text, bytes) else ("[", "{"))) <= DEPTH:
        return value
    level = [value]
    for _ in range(DEPTH):
        level = [
            child
            for inner in level
            for child in (inner.values() if isinstance(inner, dict) else inner)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} levels deep")


def read(path: str | os.PathLike, kind: type = dict) -> Any:
    """The value of `kind` in a file, local or gs://.

    Raises:
      OSError: the file cannot be read, or is no regular one; `strerror` says why.
      ValueError: as `parse`, or the file has more than MAX_BYTES.
    """
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
    return parse(content, kind)


def open_regular(path: str | os.PathLike) -> Any:
    """The file opened for reading bytes.

    Raises:
      OSError: it is missing, a folder, or something that waits for a writer or never ends.
    """
    check_regular(path)
    return epath.Path(path).open("rb")


def check_regular(path: str | os.PathLike) -> None:
    """Raises OSError where a local `path` is missing or no regular file, which for many a reader
    means to wait for ever.
    """
    if "://" in os.fspath(path):
        return
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        what = (
            "a folder"
            if stat.S_ISDIR(mode)
            else "a FIFO"
            if stat.S_ISFIFO(mode)
            else "a socket or a device"
        )
        raise OSError(errno.EINVAL, f"{what}, not a regular file", os.fspath(path))
