"""Tables of names: what is not in one, and what is but cannot be imported, are one line each."""

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config.registry import resolve


@pytest.mark.parametrize(
    "line, reason",
    [
        ("no_such_module:Thing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:tua", "AttributeError: module 'math' has no attribute 'tua'"),
        ("broken:Thing", "ZeroDivisionError: division by zero"),
        ("math", "AttributeError: module 'math' has no attribute ''"),
    ],
)
def test_a_line_that_cannot_be_imported_is_named_with_the_reason(
    line, reason, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError) as error:
        resolve({"thing": line}, "thing", "model.thing")
    told = str(error.value)
    assert all(word in told for word in ("model.thing", repr(line), reason)) and "\n" not in told


def test_a_name_is_imported_and_an_unknown_one_gets_the_nearest():
    # a line nobody names is not imported
    table = {"tau": "math:tau", "absent": "no_such_module:Thing"}
    assert resolve(table, "tau", "model.number") == __import__("math").tau
    with pytest.raises(UserError) as error:
        resolve(table, "tua", "model.number")
    assert all(
        word in str(error.value) for word in ("model.number", "absent", "did you mean 'tau'")
    )
