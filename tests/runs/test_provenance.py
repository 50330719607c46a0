"""What a folder says is what was trained: the short form of rows 18 to 23 of the fault table, in
this process.
"""

import contextlib
import io
import pathlib
import sys

import jax.numpy as jnp
import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.runs.store import open_store
from tests.faults import provenance
from tests.faults.lab import Lab
from tests.in_process import dry_run, train


class Here(Lab):
    """A lab that trains in this process, which spares the start of others."""

    def run(self, workdir, config=None, timeout=0, restart=False):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            try:
                code = train(config or self.config, workdir, restart)
            except UserError as error:
                print(error)
                code = error.exit_code
        with self.log_file(workdir).open("a") as log:
            log.write(said.getvalue())
        return code


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Here(tmp_path_factory.mktemp("lab"), steps=8)
    lab.config = lab.with_(
        model={"num_hidden_layers": 1, "full_attention_interval": 1, "layer_types": ()}
    )
    return lab


@pytest.mark.parametrize(
    "row, argument",
    [
        pytest.param(provenance.lost_parts, 0, marks=pytest.mark.slow),
        pytest.param(provenance.other_steps, 0, marks=pytest.mark.slow),
        pytest.param(provenance.older_folders, 0, marks=pytest.mark.slow),
        (provenance.changing_sources, 0),
        (provenance.links, 0),
        (provenance.parquet_pages, 20),
        pytest.param(provenance.weights_that_are_not_finite, 0, marks=pytest.mark.slow),
        pytest.param(provenance.tokens_outside, 0, marks=pytest.mark.slow),
        pytest.param(provenance.corrected_mistakes, 0, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_nothing_is_mixed_silently_and_no_folder_is_a_dead_end(lab, row, argument):
    trials = row(lab, argument)
    assert trials
    assert [t for t in trials if t.silent or t.bitwise is False] == []


@pytest.mark.parametrize("renames", range(4))
def test_a_move_that_was_cut_short_is_finished(tmp_path, monkeypatch, renames):
    run, rename, left = tmp_path / "run", pathlib.Path.rename, iter(range(renames))
    store = open_store(run)
    contents = {"run.json": "{}", "metrics.jsonl": '{"event": "train"}', "checkpoints/4/x": "4"}
    for name, text in contents.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    def killed(path, target):
        if next(left, None) is None:
            raise KeyboardInterrupt  # which nothing here answers, as SIGKILL
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pathlib.Path, "rename", killed)
        store.move_old_run_aside()
    assert store.has_unfinished_move()
    store.move_old_run_aside()
    assert not store.has_unfinished_move()
    (aside,) = run.iterdir()
    assert {name: (aside / name).read_text() for name in contents} == contents
    # a run that was begun meanwhile by code that does not know of the move
    aside.rename(run / "before-20260101-000000.partial")
    (run / "run.json").write_text("new")
    with pytest.raises(UserError, match="run.json"):
        store.move_old_run_aside()
    assert (run / "run.json").read_text() == "new"


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    "changes, named",
    [
        ({"telemetry": {"wandb": "project"}}, "wandb"),
        ({"telemetry": {"tensorboard": True}}, "tensorboardX"),
        # 1.6 TB
        ({"model": {"vocab_size": 2**31 - 1}}, "optimizer's state"),
        # a name of which nothing could be saved
        ({}, "UTF-8"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_anything_is_written(
    lab, tmp_path, monkeypatch, changes, named, dry
):
    for package in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    workdir = tmp_path / ("run\udcff" if not changes else "run")
    with pytest.raises(UserError, match=named):
        (dry_run if dry else train)(lab.with_(**changes), workdir)
    assert not workdir.exists()


def test_a_step_that_runs_out_of_memory_says_what_it_was_asked_for(lab, tmp_path):
    def too_large(run, stage):
        return lambda state, batch: jnp.zeros(2**45).block_until_ready()

    config = lab.with_(train={"gradient_accumulation": 4})
    with pytest.raises(UserError) as error:
        train(config, tmp_path / "run", make_step=too_large)
    for text in (str(2**47), "batch_size = 8", "accumulation = 4", "remat = 'none'", "plan"):
        assert text in str(error.value)
