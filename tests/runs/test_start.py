"""The decision about a start: from facts alone, and once."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from qwen3next_jax.runs import lock_and_record
from qwen3next_jax.runs.facts import StartFacts, TokenizerPair, read_facts
from qwen3next_jax.runs.folder import RunFolder, read_folder
from qwen3next_jax.runs.record import (
    BaseModel,
    Change,
    MergedCheckpoint,
    ParentCheckpoint,
    read_record,
    settings_as_json,
)
from qwen3next_jax.runs.start import decide_start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.training.stages import DataCursor
from tests.records import record

CONFIG = Config(
    model=ModelConfig(hidden_size=16, num_hidden_layers=1, full_attention_interval=0),
    data=DataConfig(tokenizer="bytes"),
)
ROWS = SimpleNamespace(fingerprint="data", tokenizer=SimpleNamespace(fingerprint="tokens"))
OTHER = dataclasses.replace(CONFIG, train=TrainConfig(seed=1))


def trained_record(config):
    cursors = (DataCursor("data", config.train.batch_size),)
    return record(config=settings_as_json(config), data=cursors)


def test_a_start_is_refused_without_a_file():
    """Nothing of the run in these facts is on a disk."""
    nowhere = pathlib.Path("/nowhere")
    trained = RunFolder(nowhere, trained_record(OTHER), saved_steps=(2,), has_trained=True)
    facts = StartFacts(trained, False, True, (), CONFIG.data, None, None)
    with pytest.raises(UserError, match=r"/nowhere .*train\.seed = 1, not 0"):
        decide_start(CONFIG, facts)
    begins = dataclasses.replace(facts, folder=RunFolder(nowhere))
    assert decide_start(CONFIG, begins).changes == ()


def test_a_run_that_took_no_step_holds_no_settings(tmp_path):
    """It may have ended because they did not fit in memory."""
    open_store(tmp_path).write_run_json(trained_record(OTHER))
    events = ("start", "operators", "train")
    for count in (2, 3):
        lines = [json.dumps({"event": event, "step": 0, "time": 0.0}) for event in events[:count]]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert read_folder(tmp_path).has_trained == (count == 3)


def test_an_unchanged_folder_is_decided_once(tmp_path, monkeypatch):
    start = decide_start(CONFIG, read_facts(CONFIG, tmp_path))
    monkeypatch.setattr(lock_and_record, "decide_start", None)
    with lock_and_record.lock_folder(start, [ROWS], open_store(tmp_path)) as locked:
        assert locked == start


def test_a_folder_that_changed_is_decided_again(tmp_path):
    """Another process has trained in it while the data were prepared."""
    start = decide_start(CONFIG, read_facts(CONFIG, tmp_path))
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    open_store(tmp_path).write_run_json(trained_record(OTHER))
    with pytest.raises(UserError, match=r"train\.seed"):
        lock_and_record.lock_folder(start, [ROWS], open_store(tmp_path)).__enter__()


def test_a_tokenizer_replaced_while_the_data_were_prepared_is_named(tmp_path, monkeypatch):
    start = decide_start(CONFIG, read_facts(CONFIG, tmp_path))
    tokenizers = TokenizerPair(SimpleNamespace(fingerprint="another"), "another", True, None, "")
    facts = dataclasses.replace(start.facts, tokenizers=tokenizers)
    monkeypatch.setattr(lock_and_record, "read_facts", lambda *_, **__: facts)
    with pytest.raises(UserError, match="train.init_from.*tokenizer was replaced"):
        lock_and_record.lock_folder(
            dataclasses.replace(start, facts=facts), [ROWS], open_store(tmp_path)
        ).__enter__()


def test_an_error_after_the_lock_releases_it(tmp_path):
    def fail(folder, patience):
        raise UserError("not shared")

    start = decide_start(CONFIG, read_facts(CONFIG, tmp_path))
    first, second = open_store(tmp_path), open_store(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="not shared"):
        patch.setattr(lock_and_record, "check_shared_folder", fail)
        lock_and_record.lock_folder(start, [ROWS], first).__enter__()
    with second:
        assert second.run_locked(lambda: 3) == 3


def test_a_record_is_read_as_it_was_written(tmp_path):
    parent = ParentCheckpoint("/parent", 3, "0" * 20, "other")
    whole = record(
        config=settings_as_json(CONFIG),
        data=(None, DataCursor("data", 8, 2, 16, {"a": 3}, {"a": 0.5})),
        source=BaseModel("/hf", "qwen3_next", "files"),
        parent=parent,
        merged=(MergedCheckpoint(**dataclasses.asdict(parent), weight=0.5),),
        changes=(Change("code", "a", "b"),),
        operators=({"operator": "attention"},),
    )
    for one in (record(), whole):
        open_store(tmp_path).write_run_json(one)
        assert read_record(tmp_path) == one
