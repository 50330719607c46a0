"""A run of stages is the branches that it stands for, whatever it is interrupted by, and reads
on at every boundary.
"""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.config import Config, DataConfig, Stage, TrainConfig, from_dict, to_dict
from qwen3next_jax.data.estimate import Estimate
from qwen3next_jax.runs.dry_run import estimate_source_readings, find_data_read_by_parent
from qwen3next_jax.runs.facts import read_facts
from qwen3next_jax.runs.folder import saved_steps
from qwen3next_jax.runs.record import ParentCheckpoint
from qwen3next_jax.runs.start import decide_start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.training.stages import (
    DataCursor,
    data_offset_after_rewind,
    epoch_by_stream,
    open_data_of_stages,
    reading_by_source,
    resolve_stages,
    stage_index_of_step,
    start_data_at_cursors,
    tokens_seen,
)
from tests.in_process import train
from tests.records import record
from tests.runs.test_branching import losses, same, saved, with_

STAGES = (
    Stage(10, "main"),
    Stage(10, "long", batch_size=2, sequence_length=64),
    Stage(10, schedule="linear", final_fraction=0.0),
)


def with_stages(*stages, steps=30, **more):
    return with_(train={"steps": steps, "stages": stages}, **more)


STAGED = with_stages(*STAGES, checkpoint={"every": 3, "keep_last": 40})


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A finished run of two stages, to which a third one was appended."""
    folder = tmp_path_factory.mktemp("staged")
    assert (
        train(with_stages(*STAGES[:2], steps=20, checkpoint={"every": 3, "keep_last": 40}), folder)
        == 0
    )
    assert train(STAGED, folder) == 0
    return folder


@pytest.mark.slow
def test_stages_are_the_branches_that_they_stand_for(staged, tmp_path):
    """Each with its row length, batch size and schedule."""
    parent, branches = f"{staged}@10", {}
    for steps, change, schedule in (
        (20, {"batch_size": 2, "sequence_length": 64}, {"schedule": "constant"}),
        (
            30,
            {},
            {"schedule": "warmup_stable_decay", "decay_fraction": 1 / 3, "final_fraction": 0.0},
        ),
    ):
        run = tmp_path / str(steps)
        change |= {"steps": steps, "init_from": parent, "init_state": "all"}
        assert train(with_(train=change, optimizer=schedule), run) == 0
        parent, branches = str(run), branches | losses(run)
    assert branches == {step: values for step, values in losses(staged).items() if step > 10}
    same(saved(run, 30, STAGED), saved(staged, 30, STAGED))
    events = read_events(staged / "metrics.jsonl")
    assert [(e["step"], e["stage"]) for e in events if e["event"] == "stage"] == [
        (1, "main"),
        (11, "long"),
        (21, "3"),
    ]
    last = [e for e in events if e["event"] == "train"][-1]
    assert last["stage"] == "3"
    assert (
        last["tokens_seen"]
        == tokens_seen(resolve_stages(STAGED), 30)
        == 10 * 4 * 32 + 10 * 2 * 64 + 10 * 4 * 32
    )
    assert last["learning_rate"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 20, 21])
def test_resumed_around_a_boundary_it_is_the_run_that_was_resumed_at_one(staged, tmp_path, step):
    """From just before the first one it passes both in one go, whereas `staged` went on from a
    checkpoint at the second.
    """
    run = tmp_path / "run"
    shutil.copytree(staged, run)
    for later in saved_steps(run):
        if later > step:
            shutil.rmtree(run / "checkpoints" / str(later))
    assert train(STAGED, run) == 0
    assert losses(run) == losses(staged)
    same(saved(run, 30, STAGED), saved(staged, 30, STAGED))


@pytest.mark.parametrize(
    "config, message",
    [
        (
            with_stages(Stage(10, learning_rate=1.0), *STAGES[1:]),
            "stage main has taken 10 steps with learning_rate = 0.01, not 1.0",
        ),
        (
            with_stages(Stage(9), Stage(11), *STAGES[2:]),
            r"stage main has taken 10 steps, not 9: train.stages\[0\].steps = 10 cannot change",
        ),
        (
            with_stages(STAGES[0], Stage(4), Stage(16, schedule="linear")),
            "stage long has taken 5 steps, not 4: give it at least that many",
        ),
        (
            with_stages(STAGES[0], steps=10),
            "stage long has taken 5 steps, but train.stages ends before it",
        ),
        (
            with_stages(STAGES[0], dataclasses.replace(STAGES[1], steps=5), STAGES[2], steps=25),
            None,
        ),
        (
            with_stages(
                *STAGES[:2], Stage(20, batch_size=4, schedule="cosine"), Stage(1), steps=41
            ),
            None,
        ),
    ],
)
def test_only_what_comes_may_change(tmp_path, config, message):
    (tmp_path / "checkpoints" / "15").mkdir(parents=True)
    open_store(tmp_path).write_run_json(record(config=to_dict(STAGED)))
    if message:
        with pytest.raises(UserError, match=message):
            decide_start(config, read_facts(config, tmp_path))
    else:
        decide_start(config, read_facts(config, tmp_path))


@pytest.mark.parametrize(
    "stages, message",
    [
        (
            [{"steps": 5}, {"steps": 5}],
            "train.steps = 9, but the steps of train.stages, 5 . 5, sum to 10",
        ),
        (
            [{"steps": 9, "sequence_lenght": 8}],
            r"stages\[0\].sequence_lenght: no such setting .did you mean 'sequence_length",
        ),
        ([{"steps": 9}, {"batch_size": 4}], r"train.stages\[1\]: steps = 0: expected at least 1"),
        (
            [{"steps": 9, "batch_size": 3, "gradient_accumulation": 2}],
            r"stages\[0\]: train.batch_size = 3 is not a multiple",
        ),
    ],
)
def test_mistakes_in_stages_are_named(stages, message):
    with pytest.raises(UserError, match=message):
        resolve_stages(from_dict(Config, {"train": {"steps": 9, "stages": stages}}))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in "abc":
        (folder / f"{name}.jsonl").write_text(
            "".join(f'{{"text": "{name} {i} {"xyz" * (i % 5)}"}}\n' for i in range(200))
        )
    return folder


def opened(config):
    return open_data_of_stages(resolve_stages(config), config.model.vocab_size)


@pytest.fixture(scope="module")
def mixed(texts):
    """Six stages of three sources: batches of another size, streams mixed otherwise, left out and
    taken up again, rows of another length in between. Returns the configuration, the data and the
    cursor of each stage, and the first document of each row that each stage reads.
    """
    data = DataConfig(
        path=",".join(f"{name}={texts}/{name}.jsonl" for name in "abc"),
        weights="3,1,0",
        prepared_dir=str(texts / "rows"),
    )
    train = TrainConfig(
        steps=36,
        batch_size=4,
        sequence_length=16,
        stages=(
            Stage(6),
            Stage(6),
            Stage(6, batch_size=3),
            Stage(6, weights="a=1,b=1,c=2"),
            Stage(6, sequence_length=32),
            Stage(6, weights="0,1,1"),
        ),
    )
    config = dataclasses.replace(with_(model={"vocab_size": 257}), data=data, train=train)
    rows = opened(config)
    stages = resolve_stages(config)
    cursors = start_data_at_cursors(stages, rows, DataCursor(rows[0].fingerprint, 4))
    drawn = []
    for stage, read, cursor in zip(stages, rows, cursors, strict=True):
        first = cursor.batch_index(stage.steps_before + 1, 0)
        drawn.append(
            [
                name[0]
                for step in range(first, first + 6)
                for name in read.document_names_of_batch(step)
            ]
        )
    return config, rows, cursors, drawn


def test_epochs_count_the_rows_that_stages_read(mixed):
    _, rows, cursors, drawn = mixed
    epochs = epoch_by_stream(rows)
    lengths = [{epoch.source: epoch.rows for epoch in read.stream_epochs.values()} for read in rows]
    for number, cursor in enumerate(cursors):
        read = reading_by_source(cursor.rows_read_by_stream(6 * number + 6), epochs)
        for name in "abc":
            expected = sum(
                sum(document.startswith(name) for document in drawn[stage]) / lengths[stage][name]
                for stage in range(number + 1)
            )
            assert read[name].epochs == pytest.approx(expected), (number, name)


def test_a_dry_run_counts_the_epochs_of_a_branch_as_its_training_does(mixed):
    """Before its first step, and when it resumes: with the rows that its parent had read. If the
    parent read other data, without them.
    """
    config, *_ = mixed
    train = dataclasses.replace(config.train, stages=(), init_from="parent", init_state="all")
    branch = dataclasses.replace(config, train=dataclasses.replace(train, steps=18))
    (rows,), stages = opened(branch), resolve_stages(branch)
    begun = DataCursor(rows.fingerprint, 4).for_next_stage(0, rows).for_next_stage(9, rows)
    (cursor,) = start_data_at_cursors(stages, [rows], begun)
    exact = reading_by_source(cursor.rows_read_by_stream(18), rows.stream_epochs)
    sizes = {epoch.source: epoch.rows for epoch in rows.stream_epochs.values()}
    estimates = [Estimate(sizes.get(name, 1) * 16, 1) for name in "abc"]

    def estimated(parent, data, record):
        source = SimpleNamespace(config=dataclasses.replace(branch, data=data))
        facts = SimpleNamespace(initial_model=source, folder=SimpleNamespace(record=record))
        start = SimpleNamespace(config=branch, parent=parent, facts=facts)
        reading = find_data_read_by_parent(SimpleNamespace(stages=stages), start)
        return estimate_source_readings(stages, estimates, reading)

    parent, other = ParentCheckpoint("parent", 9, "", ""), dataclasses.replace(config.data, seed=1)
    for name in "ab":
        close = {"abs": 1 / sizes[name]}  # a row
        for read in (
            estimated(parent, config.data, None),
            estimated(None, None, record(data=(cursor,))),
        ):
            assert read[name].epochs == pytest.approx(exact[name].epochs, **close)
        alone = estimated(parent, other, None)
        assert alone[name].epochs == pytest.approx(exact[name].epochs / 2, **close)


def test_no_row_is_read_twice_where_the_rows_are_the_same(mixed, texts):
    """Every stream is read in its order, without a gap; where nothing differs, as if there were no
    boundary.
    """
    config, rows, cursors, drawn = mixed
    data, train, stages = config.data, config.train, resolve_stages(config)
    for stage, read, cursor in zip(stages, rows, cursors, strict=True):
        first = cursor.batch_index(stage.steps_before + 1, 0)
        np.testing.assert_array_equal(
            next(read.batches(first))["tokens"][0],
            read.row(read._first_row_of_batch(first))["tokens"],
        )
    whole = dataclasses.replace(config, train=dataclasses.replace(train, stages=(), steps=18))
    (plain,) = opened(whole)
    assert sum(drawn[:3], []) == [
        name[0] for step in range(12) for name in plain.document_names_of_batch(step)
    ] + [plain.document_names_of_row(i)[0] for i in range(48, 66)]
    for i, name in enumerate("abc"):
        (alone,) = opened(
            dataclasses.replace(
                whole,
                data=dataclasses.replace(
                    data, weights=",".join(str(int(j == i)) for j in range(3))
                ),
            )
        )
        found = [one for stage in (0, 1, 2, 3, 5) for one in drawn[stage] if one.startswith(name)]
        assert found, name
        assert found == [alone.document_names_of_row(n)[0] for n in range(len(found))], name


def test_what_rewinds_passed_over_stays_passed_over():
    cursors = [DataCursor("a", 4), DataCursor("b", 2, step=10), DataCursor("b", 8, step=20)]
    assert [stage_index_of_step(cursors, step) for step in (0, 1, 10, 11, 20, 21)] == [
        0,
        0,
        0,
        1,
        1,
        2,
    ]
    assert data_offset_after_rewind(cursors, 14, 0, 12) == 2
    assert data_offset_after_rewind(cursors, 14, 3, 12) == 5
    assert (
        data_offset_after_rewind(cursors, 12, 1, 8) == 4
    )  # 2 batches of 4, 2 of 2, and 1 of 2 before: 14 rows
    assert (
        data_offset_after_rewind(cursors, 21, 0, 20) == 4
    )  # the state after step 20 counts in batches of 2
    assert data_offset_after_rewind([None, DataCursor("b", 2, step=10)], 12, 0, 10) == 2
