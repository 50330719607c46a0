"""Functions for the texts of documents, short and long.

Python holds a string in one, two or four bytes per character: an ASCII text with a single emoji
takes four bytes for every character. A long text is therefore held as UTF-8 and decoded in pieces.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator

from qwen3next_jax.common import json_files
from qwen3next_jax.data import fields

Text = str | bytes  # bytes: a long text, as UTF-8
LONG = 1 << 20  # bytes of UTF-8, from which on a text is long
_PIECE = 1 << 20  # characters or bytes

# Group 1: escapes of JSON for characters beyond ASCII. An escaped backslash is matched, too: what
# follows it is no escape.
_ESCAPES = re.compile(
    rb"""\\\\ | ( (?:
        \\u[dD][89abAB][0-9a-fA-F]{2} \\u[dD][c-fC-F][0-9a-fA-F]{2}  # a surrogate pair
        | \\u(?!00[0-7])[0-9a-fA-F]{4}
    ){1,4096}+ )""",
    re.VERBOSE,
)


def text_pieces(text: Text) -> Iterator[str]:
    """Yields a text in pieces of at most 2^20 characters.

    Raises:
      UnicodeDecodeError: `text` is not UTF-8.
    """
    if isinstance(text, str):
        for start in range(0, len(text), _PIECE):
            yield text[start : start + _PIECE]
        return
    decode = codecs.getincrementaldecoder("utf-8")().decode
    for start in range(0, len(text), _PIECE):
        yield decode(text[start : start + _PIECE], final=start + _PIECE >= len(text))


def is_blank(text: Text) -> bool:
    """Whether a text is empty or holds only white space."""
    return all(piece.isspace() for piece in text_pieces(text))


def byte_count(text: Text) -> int:
    """Returns the number of bytes of a text as UTF-8."""
    return len(text) if isinstance(text, bytes) else sum(len(p.encode()) for p in text_pieces(text))


def is_long_text(data: bytes) -> bool:
    """Whether `data` has at least `LONG` bytes, is UTF-8, and contains no NUL."""
    return len(data) >= LONG and b"\0" not in data and _is_utf8(data)


def _is_utf8(data: bytes) -> bool:
    try:
        for _ in text_pieces(data):
            pass
    except UnicodeDecodeError:
        return False
    return True


def text_of_long_json(line: bytes, field: str) -> Text | None:
    """Returns the text in a field of a long JSON object; None if the object has a fault, or if the
    field holds no text.

    To save memory, the whole object is decoded as Latin-1, one character per byte; the syntax of
    JSON is ASCII. Encoding the field's string as Latin-1 then gives back the UTF-8 bytes of the
    text.
    """
    if not _is_utf8(line):
        return None
    try:
        plain = _without_unicode_escapes(line.removeprefix(codecs.BOM_UTF8)).decode("latin-1")
        value = fields.find_field(json_files.parse(plain), field.encode().decode("latin-1")).value
    except ValueError:
        return None
    del plain  # frees memory
    if not isinstance(value, str) or "\0" in value:
        return None
    utf8 = value.encode("latin-1")
    return utf8 if len(utf8) >= LONG else utf8.decode()


def _without_unicode_escapes(line: bytes) -> bytes | bytearray:
    """Returns a line of JSON in which UTF-8 replaces the escapes of non-ASCII characters.

    Raises:
      ValueError: the line has the escape of half a surrogate pair.
    """
    if b"\\u" not in line:
        return line
    result, start = bytearray(), 0
    for found in _ESCAPES.finditer(line):
        if found[1]:
            result += memoryview(line)[start : found.start()]
            result += json.loads(f'"{found[1].decode()}"').encode()
            start = found.end()
    result += memoryview(line)[start:]
    return result


def batches_by_size[T](
    items: Iterable[T], size: Callable[[T], int], limit: int
) -> Iterator[list[T]]:
    """Yields consecutive items in lists. A list ends with the item that makes the sum of the sizes
    in the list reach `limit`.
    """
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
