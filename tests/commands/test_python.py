"""The commands as Python functions: a run evaluated and continued from Python, and mistakes.
How a run is read as arrays is in tests/runs/test_training.py.
"""

import pytest

import qwen3next_jax
from qwen3next_jax.commands import verify
from tests import in_process
from tests.refusals import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = {"train.steps": 3, "train.batch_size": 8, "eval.rows": 2, "train.log_every": 1}
    path = tmp_path_factory.mktemp("run") / "mqar"
    in_process.train(qwen3next_jax.load_config("mqar", settings), path)
    return qwen3next_jax.Run(path)


@pytest.mark.slow
def test_a_run_is_evaluated_and_continued(run):
    values = qwen3next_jax.evaluate(run.path, rows=2)["heldout"]
    # The two rows that the evaluation at the end of training read.
    assert values["loss"] == pytest.approx(run.series("loss", "heldout")[1][-1], rel=1e-5)
    texts = qwen3next_jax.generate(run.path, ["17 4", "3 9"], max_new_tokens=4)
    assert [len(text.split()) for text in texts] == [4, 4]
    assert qwen3next_jax.generate(run.path, "17 4", max_new_tokens=4) == texts[0]


def test_a_folder_does_not_hide_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mqar").mkdir()
    assert qwen3next_jax.load_config("mqar").name == "mqar"
    with refused("mqr", "'mqar'"):
        qwen3next_jax.load_config("mqr")


def test_mistakes_are_one_line(tmp_path):
    for call in (
        lambda: qwen3next_jax.load_config("mqr"),
        lambda: qwen3next_jax.load_config("mqar", {"train.stesp": 3}),
        lambda: qwen3next_jax.load_config("mqar", {"train.steps": "many"}),
        lambda: qwen3next_jax.Run(tmp_path),
    ):
        with refused():
            call()


@pytest.mark.parametrize("name", ["train.step", "train.learning_rate", "optimizer"])
def test_python_names_settings_without_dashes(name):
    with pytest.raises(qwen3next_jax.UserError) as told:
        qwen3next_jax.load_config("mqar", {name: 3})
    assert str(told.value).startswith(f"{name}: ")
    assert "--config" not in str(told.value)


def test_arguments_of_another_type_are_one_line(tmp_path):
    config = qwen3next_jax.load_config("mqar")
    for call in (
        lambda: qwen3next_jax.load_config(None),
        lambda: qwen3next_jax.load_config(""),
        lambda: qwen3next_jax.load_config("mqar", ["train.steps"]),
        lambda: qwen3next_jax.load_config("mqar", "train.steps=3"),
        lambda: qwen3next_jax.load_config("mqar", {3: 4}),
        lambda: qwen3next_jax.load_config("mqar", {"train.steps": None}),
        lambda: qwen3next_jax.train("mqar", tmp_path),
        lambda: qwen3next_jax.train(None, tmp_path),
        lambda: qwen3next_jax.train(config, None),
        lambda: qwen3next_jax.train(config, ""),
        lambda: qwen3next_jax.evaluate(tmp_path, "heldout"),
        lambda: qwen3next_jax.evaluate(None),
        lambda: qwen3next_jax.evaluate(tmp_path, config="mqar"),
        lambda: qwen3next_jax.generate("", "def "),
        lambda: qwen3next_jax.generate(tmp_path, 3),
        lambda: qwen3next_jax.generate(tmp_path, [3]),
        lambda: qwen3next_jax.generate(tmp_path, "def ", max_new_tokens="a"),
        lambda: qwen3next_jax.generate(tmp_path, "def ", max_new_tokens=2.5),
        lambda: qwen3next_jax.generate(tmp_path, "def ", temperature="hot"),
        lambda: qwen3next_jax.generate(tmp_path, "def ", seed=True),
        lambda: qwen3next_jax.generate(tmp_path, "def ", temprature=0.8),
        lambda: qwen3next_jax.plan("mqar", "v5p:2x2x1"),
        lambda: qwen3next_jax.plan(config, None),
        lambda: qwen3next_jax.plan(config, "v5p:2x2x1", {"dta": 4}),
        lambda: qwen3next_jax.plan(config, "v5p:2x2x1", {"data": "four"}),
        lambda: qwen3next_jax.plan(config, "v5p:2x2x1", slices=0),
        lambda: qwen3next_jax.Run(None),
        lambda: qwen3next_jax.Run(""),
    ):
        with refused():
            call()


def test_an_empty_argument_is_not_the_current_folder():
    with refused("''"):
        verify.main([""])


def test_public_names_exist():
    for name in qwen3next_jax.__all__:
        assert getattr(qwen3next_jax, name) is not None
