"""The commands as Python functions: a run evaluated and continued from Python, and mistakes.
How a run is read as arrays is in tests/runs/test_training.py.
"""

import pytest

import qwen3next_jax
from qwen3next_jax import UserError
from tests import in_process


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
    with pytest.raises(UserError, match=r"mqr: no such file \(did you mean 'mqar'\?\)"):
        qwen3next_jax.load_config("mqr")


def test_mistakes_are_one_line(tmp_path):
    for call in (
        lambda: qwen3next_jax.load_config("mqr"),
        lambda: qwen3next_jax.load_config("mqar", {"train.stesp": 3}),
        lambda: qwen3next_jax.load_config("mqar", {"train.steps": "many"}),
        lambda: qwen3next_jax.Run(tmp_path),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert len(str(error.value).splitlines()) == 1


def test_public_names_exist():
    for name in qwen3next_jax.__all__:
        assert getattr(qwen3next_jax, name) is not None
