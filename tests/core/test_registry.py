"""Names of parts: an unknown one, and one that cannot be imported, are one line each. Settings:
each is described where `--help` shows it.
"""

import pytest

from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import Config, registry, to_dict
from qwen3next_jax.config.describe import list_settings
from qwen3next_jax.config.registry import resolve
from tests.refusals import refused


@pytest.mark.parametrize(
    "line, reason",
    [
        ("no_such_module:Thing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:tua", "AttributeError: module 'math' has no attribute 'tua'"),
        ("broken:Thing", "ZeroDivisionError: division by zero; "),
        ("unnamed:Thing", "unnamed.py, line 1)"),
        ("math", "AttributeError: module 'math' has no attribute ''"),
    ],
)
def test_a_line_that_cannot_be_imported_is_named(line, reason, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "unnamed.py").write_text("class Thing(Mixer): pass\n")
    with refused("model.thing", repr(line), reason):
        resolve({"thing": line}, "thing", "model.thing")


def test_an_unknown_name_gets_the_nearest(monkeypatch):
    # a line nobody names is not imported
    table = {"tau": "math:tau", "absent": "no_such_module:Thing"}
    with monkeypatch.context() as patched:
        # Models resolve names thousands of times: a valid one is not compared with the others.
        patched.setattr(registry, "did_you_mean", pytest.fail)
        assert resolve(table, "tau", "model.number") == __import__("math").tau
    with refused("model.number", "absent", "'tau'"):
        resolve(table, "tua", "model.number")


def test_every_setting_is_described():
    """`--help` reads the comments of the config's fields: all fields are found, also those that
    span lines, and a comment belongs to one field.
    """
    described = {setting.name: setting for setting in list_settings(Config)}
    # of the mixers' settings, which the model's mixers declare, there is the group alone
    assert described.pop("model.mixer").default == {}
    assert described.keys() == {
        name for name, value in flatten(to_dict(Config())).items() if not isinstance(value, dict)
    }
    assert all(
        setting.default == flatten(to_dict(Config()))[name] for name, setting in described.items()
    )
    meanings = [setting.meaning for setting in described.values() if setting.meaning]
    assert len(set(meanings)) == len(meanings) > 80
