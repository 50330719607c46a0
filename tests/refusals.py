"""What a test asks of a refusal: one line that names the file, the setting and the value."""

import contextlib
from collections.abc import Iterator

import pytest

from qwen3next_jax.common.errors import UserError


@contextlib.contextmanager
def refused(*names: object, error: type[Exception] = UserError) -> Iterator[None]:
    """The code inside must raise `error`, whose message is one printable line with all `names` in
    it. Names are what a user looks for: a file, a setting, a value. The wording is free.
    """
    with pytest.raises(error) as caught:
        yield
    line = str(caught.value)
    assert line, line
    assert line.isprintable(), line
    missing = [name for name in map(str, names) if name not in line]
    assert not missing, f"{missing} missing: {line}"
