"""Checkpoints: what is kept and what deleted, failed saves, the verify command, what may change
on resume.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.commands.verify import verify
from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    TrainConfig,
)
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.changes import MAY_CHANGE
from qwen3next_jax.runs.checkpoint import Checkpoints, load_trained
from qwen3next_jax.runs.facts import read_facts
from qwen3next_jax.runs.folder import best_step
from qwen3next_jax.runs.lock_and_record import lock_folder, make_record
from qwen3next_jax.runs.record import read_record
from qwen3next_jax.runs.start import decide_start
from qwen3next_jax.runs.store import arrays, local_checkpoints, open_store
from qwen3next_jax.runs.store.local_checkpoints import LocalCheckpoints
from qwen3next_jax.training.stages import DataCursor
from tests.faults import table
from tests.records import record
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[2]
STATE = {"w": jnp.arange(1000.0)}
ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
)


def _save(workdir, steps, **keep):
    """Saves at `steps`, one process after another. → the events told."""
    told = []
    with LocalCheckpoints(workdir, CheckpointConfig(**keep)) as checkpoints:
        checkpoints.prepare_folder(max(checkpoints.steps(), default=0))
        for step in steps:
            checkpoints.save(step, STATE)
            checkpoints.wait()
            told += checkpoints.take_events()
    return told


def _steps(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


def _flip(folder):
    largest = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_the_newest_and_every_so_many_are_kept(tmp_path):
    _save(tmp_path, range(1, 9), keep_last=2, keep_every=3)
    assert _steps(tmp_path) == [3, 6, 7, 8]


def _save_evaluated(workdir, losses, start=0):
    """Saves at the steps of `losses`, step → held-out loss, and records the losses."""
    with LocalCheckpoints(workdir, CheckpointConfig(keep_last=2, keep_best=True)) as checkpoints:
        checkpoints.prepare_folder(start)
        for step, loss in losses.items():
            event = {"event": "heldout", "step": step, "time": 1, "loss": loss}
            with (workdir / "metrics.jsonl").open("a") as record:
                record.write(json.dumps(event) + "\n")
            checkpoints.note_heldout_loss(event)
            checkpoints.save(step, STATE)
            checkpoints.wait()
    return _steps(workdir)


def test_the_best_is_kept_until_a_better_one(tmp_path):
    assert _save_evaluated(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: "nan", 5: 1.0}) == [2, 4, 5]
    assert best_step(tmp_path) == 2
    assert _save_evaluated(tmp_path, {6: 2.0, 7: 2.0}, start=5) == [2, 6, 7]  # another process
    assert _save_evaluated(tmp_path, {8: 0.5, 9: 0.7}, start=7) == [8, 9]
    assert best_step(tmp_path) == 8


def test_the_best_of_repeated_steps_is_forgotten(tmp_path):
    """A rewind takes the steps after a checkpoint again, with other data."""
    _save_evaluated(tmp_path, {1: 3.0, 2: 2.0, 3: 1.0})
    assert _save_evaluated(tmp_path, {3: 4.0, 4: 5.0, 5: 5.0}, start=2) == [2, 4, 5]


def test_a_damaged_best_makes_way_for_the_next(tmp_path):
    _save_evaluated(tmp_path, {1: 2.0, 2: 1.0})
    _flip(tmp_path / "checkpoints" / "2")
    assert 1 in _save_evaluated(tmp_path, {3: 5.0, 4: 5.0, 5: 5.0}, start=2)


def test_without_an_evaluation_there_is_no_best(tmp_path):
    _save(tmp_path, [10])
    with refused(tmp_path, "10", "metrics.jsonl"):
        best_step(tmp_path)


@pytest.mark.parametrize("every, evaluated", [(300, 250), (250, 300)])
def test_a_best_needs_evaluated_checkpoints(every, evaluated):
    checkpoint, evaluation = CheckpointConfig(every=every), EvalConfig(every=evaluated)
    Config(checkpoint=checkpoint, eval=evaluation)
    with refused("keep_best", "300", "250"):
        Config(checkpoint=dataclasses.replace(checkpoint, keep_best=True), eval=evaluation)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    _save(tmp_path, [10, 20], keep_last=2)
    _flip(tmp_path / "checkpoints" / "20")
    told = _save(tmp_path, [30], keep_last=2)
    assert _steps(tmp_path) == [10, 20, 30]
    assert [(event, step) for event, step, _ in told] == [("checkpoint", 30), ("damaged", 20)]
    _save(tmp_path, [40], keep_last=2)  # now two good ones are newer than 10
    assert 10 not in _steps(tmp_path)
    assert {30, 40} <= set(_steps(tmp_path))


def test_a_failed_save_is_told_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    _save(tmp_path, [10], keep_last=2)
    write_manifest = manifest.write_manifest

    def full(directory, *named):
        if directory.name == "20":
            raise OSError(28, "No space left on device")
        return write_manifest(directory, *named)

    monkeypatch.setattr(manifest, "write_manifest", full)
    told = _save(tmp_path, [20, 30], keep_last=2)
    assert [(event, step) for event, step, _ in told] == [("save_failed", 20), ("checkpoint", 30)]
    assert _steps(tmp_path) == [10, 30]
    assert "checkpoints/20 could not be saved" in capsys.readouterr().err


def test_an_old_checkpoint_that_cannot_be_deleted_or_read_costs_no_new_one(
    tmp_path, monkeypatch, capsys
):
    _save(tmp_path, [10, 20], keep_last=2)

    def held(path, **_):
        raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(local_checkpoints.shutil, "rmtree", held)
        told = _save(tmp_path, [30], keep_last=2)
    assert [(event, step) for event, step, _ in told] == [("checkpoint", 30)]
    assert "not be deleted" in capsys.readouterr().err
    assert manifest.find_damage(tmp_path / "checkpoints" / "30") is None

    def unreadable(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "sha256_of", unreadable)
    assert "Input/output error" in manifest.find_damage(tmp_path / "checkpoints" / "20")


def test_what_a_killed_save_or_deletion_left_is_removed(tmp_path):
    _save(tmp_path, [10], keep_last=2)
    for name in ("20.orbax-checkpoint-tmp", ".deleted-5"):
        (tmp_path / "checkpoints" / name).mkdir()
    with LocalCheckpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.newest_valid_step() == 10
        checkpoints.prepare_folder(10)
    assert _steps(tmp_path) == [10]


def test_names_with_pattern_characters_hold_checkpoints(tmp_path):
    for name in ("lr=[0.1,0.2]", "**", "a?{b}", "50%20#ü \n"):
        _save(tmp_path / name, [10])
        with Checkpoints(tmp_path / name) as checkpoints:
            assert jnp.array_equal(checkpoints.restore(10, ABSTRACT)["w"], STATE["w"])


@pytest.mark.parametrize(
    "name", ["a\\b", "gs:/a", "/gs/a", "/s3/a", "gs://a/b?c", "gs://a/b#c", "gs://a/b\nc"]
)
def test_names_that_orbax_takes_for_others_are_refused(name):
    with pytest.raises(UserError, match="--workdir=") as caught:
        open_store(to_path(name)).check_can_hold_run(f"--workdir={name}")
    assert str(caught.value).isprintable()


def test_a_checkpoint_without_its_index_is_neither_sealed_nor_verified(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # as for a path that is a pattern
        patch.setattr(arrays.OrbaxPath, "glob", lambda self, pattern: iter(()))
        told = _save(tmp_path, [10])
    assert [(event, step) for event, step, _ in told] == [("save_failed", 10)]
    assert _steps(tmp_path) == []
    _save(tmp_path, [20])
    (tmp_path / "checkpoints/20/manifest.ocdbt").unlink()
    manifest.write_manifest(tmp_path / "checkpoints/20", 20)
    assert "manifest.ocdbt" in manifest.find_damage(tmp_path / "checkpoints/20")


def test_verify_compares_frozen_parameters_with_the_checkpoints(tmp_path):
    state = {"params": {"a": jnp.arange(4.0), "b": jnp.arange(9.0)}}
    for name in ("run", "other"):
        frozen = {"b"} if name == "run" else {"a"}
        with LocalCheckpoints(
            tmp_path / name, CheckpointConfig(), frozen_paths=frozenset(frozen)
        ) as checkpoints:
            checkpoints.prepare_folder(0)
            checkpoints.save(10, state)

    def damages():
        return {name: damage for name, damage in verify(tmp_path / "run") if name != "run.json"}

    assert damages() == {"checkpoints/10": None, "frozen": None}
    (tmp_path / "run/frozen").rename(tmp_path / "frozen")
    assert "missing" in damages()["frozen"]
    (tmp_path / "other/frozen").rename(tmp_path / "run/frozen")
    assert "another run" in damages()["frozen"]


@pytest.mark.parametrize("size", [0, 1, 100, 250])
def test_every_piece_of_a_file_is_compared(tmp_path, monkeypatch, size):
    monkeypatch.setattr(manifest, "PIECE_BYTES", 100)
    content = np.random.default_rng(0).bytes(size)
    (tmp_path / "data").write_bytes(content)
    assert manifest.write_manifest(tmp_path) == size
    assert manifest.find_damage(tmp_path) is None
    for at in range(0, size, 33):
        (tmp_path / "data").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert "SHA-256 differs" in manifest.find_damage(tmp_path)
        assert manifest.find_damage(tmp_path, sizes_only=True) is None
    (tmp_path / "data").write_bytes(content + b"x")
    assert "bytes instead of" in manifest.find_damage(tmp_path, sizes_only=True)


def _verify(*paths):
    command = [sys.executable, "-m", "qwen3next_jax", "verify", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_verify_names_the_damaged_checkpoint(tmp_path):
    open_store(tmp_path).write_run_json(record())
    _save(tmp_path, [10, 20], keep_last=2)
    assert _verify(tmp_path).returncode == 0
    _flip(tmp_path / "checkpoints" / "10")
    result = _verify(tmp_path)
    assert result.returncode == 1
    assert "3 checked, 1 damaged" in result.stdout
    assert re.search(r"checkpoints/10 .*damaged.*SHA-256 differs", result.stdout)
    assert re.search(r"checkpoints/20 +ok", result.stdout)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = _verify(empty)
    assert result.returncode == ExitCode.USER_ERROR
    assert "neither the folder of a run" in result.stderr


SMALL = ModelConfig(hidden_size=16, num_hidden_layers=1, full_attention_interval=0)


def _open(workdir, config, data="data", tokens="tokens"):
    """→ the changes, written down as a run does before its first step."""
    rows = SimpleNamespace(fingerprint=data, tokenizer=SimpleNamespace(fingerprint=tokens))
    store, start = open_store(workdir), decide_start(config, read_facts(config, workdir))
    with lock_folder(start, [rows], store) as start:
        run = SimpleNamespace(config=start.config, model=config.model)
        cursors = [DataCursor(data, config.train.batch_size)]
        if now := make_record(start, run, cursors, tokens):
            store.write_run_json(now)
    return [str(change) for change in start.changes]


def test_a_model_with_lost_checkpoints_is_named(tmp_path):
    events = tmp_path / "metrics.jsonl"
    events.write_text('{"event": "start", "step": 0, "time": 1.0}\n')
    _open(tmp_path, Config(model=SMALL))
    with refused("no valid checkpoint", "its first one"):
        load_trained(tmp_path)
    events.write_text('{"event": "checkpoint", "step": 6, "time": 1.0}\n')
    with refused("last after step 6", "is missing", str(tmp_path / "checkpoints")):
        load_trained(tmp_path)


def test_allowed_changes_are_kept_and_others_are_refused_by_name(tmp_path):
    config = Config(model=SMALL)
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "step": 0, "time": 1.0}\n')
    # nothing trained yet
    assert (
        _open(tmp_path, dataclasses.replace(config, name="mistyped"), "other")
        == []
        == _open(tmp_path, config)
    )
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 10, "time": 1.0}\n')
    moved = dataclasses.replace(
        config, train=TrainConfig(steps=2000), data=DataConfig(path="moved/*.txt")
    )
    assert _open(tmp_path, moved) == [
        "config.data.path: '' → 'moved/*.txt'",
        "config.train.steps: 1000 → 2000",
    ]
    assert read_record(tmp_path).changes[1] == ("config.train.steps", 1000, 2000)
    assert _open(tmp_path, moved) == []
    before = (tmp_path / "run.json").read_bytes()
    for change, message in (
        (
            {"config": dataclasses.replace(moved, train=TrainConfig(steps=2000, seed=1))},
            "train.seed = 0, not 1",
        ),
        ({"data": "0" * 20}, "run on other data"),
        ({"tokens": "0" * 20}, "run on other tokens"),
    ):
        with pytest.raises(UserError, match=message):
            _open(tmp_path, **{"config": moved} | change)
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize("number, age", [(None, "an older"), (2, "an older"), (99, "a newer")])
def test_a_run_of_another_format_is_refused(tmp_path, number, age):
    content = {"format": number}
    content["digest"] = digests.sha256_json(content)
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"run.json: written by {age} version.* expected"):
        read_record(tmp_path)


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    other = open_store(tmp_path)  # locks of one process exclude each other as those of two do
    with open_store(tmp_path) as lock:
        assert lock.run_locked(lambda: 3) == 3
        with pytest.raises(UserError, match="another process is training in it"):
            other.run_locked(lambda: None)
    with pytest.raises(ZeroDivisionError):
        other.run_locked(lambda: 1 / 0)
    with open_store(tmp_path) as lock:
        assert lock.run_locked(lambda: 4) == 4


def test_the_documents_tables_are_those_of_the_code():
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", page, re.M) == list(MAY_CHANGE.items())
    records = json.loads((ROOT / "docs" / "fault_table.json").read_text())
    assert table.BEGIN + "\n" + table.render(records) in table.PAGE.read_text()


def test_what_is_moved_aside_does_not_fill_the_disk(tmp_path):
    for step in (8, 9, 10, 11):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)  # killed before they were sealed
    strays = "checkpoints/²", "checkpoints/٣", "checkpoints/007", "damaged/old", "damaged/²-1"
    for stray in strays:  # that somebody else put there
        (tmp_path / stray).mkdir(parents=True)
    (tmp_path / "damaged" / "1-1").write_text("mine")
    (tmp_path / "damaged" / "notes.txt").write_text("mine")
    with LocalCheckpoints(tmp_path, CheckpointConfig(keep_last=2)) as checkpoints:
        assert checkpoints.newest_valid_step() is None
        checkpoints.prepare_folder(0)
    moved = [re.match("([0-9]+)-[0-9]{9}", p.name) for p in (tmp_path / "damaged").iterdir()]
    assert {match[1] for match in moved if match} == {"10", "11"}
    assert all((tmp_path / stray).is_dir() for stray in strays)
    assert {"1-1", "notes.txt"} < {path.name for path in (tmp_path / "damaged").iterdir()}
    assert [name for name, _ in verify(tmp_path)] == ["run.json"]
