"""Numerical guards: what the compiled step does about a poisoned batch, and what the run does
about it after.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.commands.python import Run
from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    GuardConfig,
    OptimizerConfig,
    TrainConfig,
)
from qwen3next_jax.data.pipeline import TextData
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.guard_flags import read_dump
from qwen3next_jax.sharding.rules import batch_sharding
from qwen3next_jax.sweeps.results import is_done
from qwen3next_jax.training import guards
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from tests import in_process
from tests.corpora import write_texts
from tests.in_process import resolved, shared_step
from tests.models import SMALLEST
from tests.refusals import refused

MODEL = dataclasses.replace(SMALLEST, vocab_size=257)
# segment ids that mark a batch whose loss is made NaN, or a thousand times too large
POISON, SURGE = 101, 102
ALONE = 103  # one whose tokens are each a document of its own, so that none is to be predicted


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, 40)
    return Config(
        name="guarded",
        model=MODEL,
        data=DataConfig(
            path=f"{folder}/*.txt",
            heldout_fraction=0.2,
            prepared_dir=str(tmp_path_factory.mktemp("prepared")),
        ),
        train=TrainConfig(steps=16, batch_size=4, sequence_length=64, log_every=1),
        optimizer=OptimizerConfig(warmup_steps=2),
        guards=GuardConfig(spike_z=100.0, window=4, max_skips=3, on_spike="rewind"),
        checkpoint=CheckpointConfig(every=4),
        eval=EvalConfig(every=100, rows=4, sample_tokens=0),
    )


BATCHES, MARKS = TextData.batches, {}


def _spoiled(model, batch, *rest, **named):
    total, parts = total_loss(model, batch, *rest, **named)
    mark = jnp.max(batch["segment_ids"])
    factor = jnp.where(mark == POISON, jnp.nan, jnp.where(mark == SURGE, 1e3, 1.0))
    return total * factor, parts | {"total_loss": parts["total_loss"] * factor}


def _marked(self, start, *share):
    for i, batch in enumerate(BATCHES(self, start, *share), start=start):
        if i in MARKS:
            batch = batch | {
                "segment_ids": np.where(batch["segment_ids"] == 1, MARKS[i], batch["segment_ids"])
            }
            if MARKS[i] == ALONE:
                alone = np.arange(1, batch["segment_ids"].shape[1] + 1, dtype=np.int32)
                batch["segment_ids"] = np.broadcast_to(alone, batch["segment_ids"].shape)
        yield batch


@pytest.fixture
def poisoned(monkeypatch):
    """Marks batches: `poisoned({index: POISON})`. `train`, below, spoils the loss of a marked
    batch inside the compiled step.
    """
    MARKS.clear()
    monkeypatch.setattr(TextData, "batches", _marked)
    return MARKS.update


spoiled_step = functools.partial(shared_step, loss=_spoiled)


def train(config, workdir, **options):
    return in_process.train(config, workdir, make_step=spoiled_step, **options)


def _with(config, **changes):
    return dataclasses.replace(config, guards=dataclasses.replace(config.guards, **changes))


def _events(workdir, kind):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def _losses(workdir):
    return {line["step"]: line["loss"] for line in _events(workdir, "train")}


def _state(config, workdir, step):
    with Checkpoints(workdir) as checkpoints:
        return jax.device_get(checkpoints.restore(step, resolved(config).abstract_state))


def _same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_solved_tasks_losses_near_zero_are_no_spikes():
    config = GuardConfig(window=4)
    # four losses and gradient norms of 0
    solved = guards.init_guards(config) | {"entries": jnp.int32(4)}
    assert (
        int(guards.check_step(config, solved, jnp.float32(0.005), jnp.float32(5e-6))[2]["flags"])
        == 0
    )
    unsolved = solved | {"losses": jnp.full(4, 0.5)}
    for window, loss, grad_norm, flags in (
        (solved, 0.05, 0.0, guards.SPIKE),
        (unsolved, 0.5, 5e-5, guards.SPIKE),
        # the smallest loss that is a spike is 10 · 0.001
        (solved, 0.0099, 1.0, 0),
        (solved, 0.0101, 0.0, guards.SPIKE),
    ):
        measured = guards.check_step(config, window, jnp.float32(loss), jnp.float32(grad_norm))[2]
        assert int(measured["flags"]) == flags, (loss, grad_norm)


def test_a_spike_is_a_jump_upwards_of_a_full_window():
    config = GuardConfig(window=8, on_spike="skip", max_skips=2)
    memory = guards.init_guards(config)
    verdicts = []
    for loss in [5.0, 50.0, 4.9, 5.1, 5.0, 4.8, 5.2, 5.0, 1.0, 5.3, 9.0, float("nan"), 5.0]:
        skip, memory, metrics = guards.check_step(
            config, memory, jnp.float32(loss), jnp.float32(1.0)
        )
        verdicts.append((int(metrics["flags"]), bool(skip)))
    spike, nan, halted = (
        guards.SPIKE | guards.SKIPPED,
        guards.NON_FINITE | guards.SKIPPED | guards.HALTED,
        guards.SKIPPED | guards.HALTED,
    )
    assert verdicts == [(0, False)] * 10 + [(spike, True), (nan, True), (halted, True)]
    assert int(memory["spikes"]) == 1
    assert int(memory["skipped"]) == 3


def test_a_batch_without_targets_is_skipped_and_compared_with_no_other():
    """Nor is it one of the skips in a row that end a run, or the end of such a row."""
    config = GuardConfig(window=4, max_skips=2)
    check = functools.partial(guards.check_step, config)
    memory = guards.init_guards(config)
    for loss in (5.0, 5.1, 5.2, 5.0, float("nan")):
        memory = check(memory, jnp.float32(loss), jnp.float32(1.0))[1]
    skip, after, metrics = check(memory, jnp.float32(0.0), jnp.float32(0.0), jnp.array(False))
    assert skip
    assert int(metrics["flags"]) == guards.NO_TARGETS | guards.SKIPPED
    assert metrics["loss_z"] == 0
    _same(after, memory | {"skipped": memory["skipped"] + 1})
    assert int(check(after, jnp.float32(jnp.nan), jnp.float32(1.0))[1]["halted"])


def test_weights_whose_sum_is_not_finite_make_no_loss_of_zero():
    """They come from sources of data outside the package alone."""
    batch = {"tokens": jnp.ones((1, 4), jnp.int32), "segment_ids": jnp.ones((1, 4), jnp.int32)}
    for weight in (3e38, np.inf, np.nan):
        counts = count_tokens_and_targets(
            batch | {"loss_weights": jnp.full((1, 4), weight, jnp.float32)}, 1
        )
        assert np.isnan(counts.target_weight_sum)
        assert counts.has_targets
        assert np.isnan(counts.mtp_target_weight_sums[0])
    counts = count_tokens_and_targets(batch | {"loss_weights": jnp.zeros((1, 4), jnp.float32)}, 1)
    assert counts.target_weight_sum == 1
    assert not counts.has_targets


def test_a_nan_is_skipped_and_everything_else_goes_on(config, poisoned, tmp_path):
    """The update of step 5 is dropped, bit for bit; a run resumed behind it ends as the one that
    was not.
    """
    poisoned({4: POISON})
    states = {}

    def add_hooks(trainer):
        keep = lambda info: states.update({info.step: jax.device_get(info.state)})
        trainer.add_hook(keep, every=(4, 5))

    assert train(config, tmp_path / "run", add_hooks=add_hooks) == 0
    before, after = states[4], states[5]
    _same((before["params"], before["opt_state"]), (after["params"], after["opt_state"]))
    assert [e["step"] for e in _events(tmp_path / "run", "skip")] == [5]
    assert int(after["guards"]["skipped"]) == 1
    assert int(after["step"]) == 5
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    for step in (12, 16):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(step))
    assert train(config, tmp_path / "resumed") == 0
    assert _losses(tmp_path / "resumed") == _losses(tmp_path / "run")
    _same(_state(config, tmp_path / "resumed", 16), _state(config, tmp_path / "run", 16))


@pytest.mark.slow
def test_a_batch_without_targets_has_no_loss(config, poisoned, tmp_path):
    poisoned({6: ALONE})
    assert train(config, tmp_path) == 0
    (event,) = _events(tmp_path, "no_targets")
    assert event["step"] == 7
    assert event["skipped"] == 1
    (at_7,) = (e for e in _events(tmp_path, "train") if e["step"] == 7)
    assert [at_7[name] for name in ("loss", "total_loss", "top1", "bits_per_byte")] == [None] * 4
    assert None not in [loss for step, loss in _losses(tmp_path).items() if step != 7]
    missing = np.isnan(Run(tmp_path).series("loss")[1])
    assert np.flatnonzero(missing).tolist() == [6]


@pytest.mark.slow
def test_a_first_batch_without_targets_ends_the_run(config, poisoned, tmp_path):
    poisoned({0: ALONE})
    of_prefix = dataclasses.replace(
        MODEL, full_mixer="masked_attention", mixer={"mask": "prefix", "prefix_tokens": 5}
    )
    for model, why in ((MODEL, "two tokens"), (of_prefix, "prefix_tokens = 5")):
        with refused("step 1", why):
            train(dataclasses.replace(config, model=model), tmp_path)
        assert not _events(tmp_path, "train")


@pytest.mark.slow
def test_the_dump_of_too_many_skips_replays(config, poisoned, tmp_path, capsys, monkeypatch):
    poisoned({6: POISON, 7: POISON, 8: POISON})
    assert train(config, tmp_path) == ExitCode.DIVERGED
    (stop,) = _events(tmp_path, "stop")
    assert stop["step"] == 9
    assert ".txt" in capsys.readouterr().err
    assert len(stop["documents"]) == 4
    command = [sys.executable, "-m", "qwen3next_jax", "replay", str(tmp_path / "dumps" / "9")]
    result = subprocess.run(
        command, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "loss nan" in result.stdout, result.stderr
    assert "embedding" in result.stdout
    assert ".txt" in result.stdout
    # the same step of a run that was trained with another version of its mixer
    monkeypatch.setattr(GatedAttention, "version", 2, raising=False)
    with refused("version 1 of gated_attention", "version 2"):
        read_dump(tmp_path / "dumps" / "9")


def test_a_spike_rewinds_and_passes_over_the_data_since_the_checkpoint(config, poisoned, tmp_path):
    """Spike at step 11, checkpoint at 8: steps 9 … take the batches behind the spike, as a run
    does that starts there.
    """
    poisoned({10: SURGE})
    assert train(config, tmp_path / "run") == 0
    (event,) = _events(tmp_path / "run", "rewind")
    assert (event["step"], event["to_step"], event["data_offset"]) == (11, 8, 3)
    assert int(_state(config, tmp_path / "run", 16)["guards"]["data_offset"]) == 3

    run = resolved(config)
    state = jax.device_put(_state(config, tmp_path / "run", 8), run.state_shardings)
    take_step = spoiled_step(run, *run.stages)
    data = TextData(config.data, 64, 4, 257)
    for step, batch in zip(range(9, 17), data.batches(11)):
        state, values = take_step(state, jax.device_put(batch, batch_sharding(run.mesh)))
        assert float(values["loss"]) == _losses(tmp_path / "run")[step]


@pytest.mark.slow
def test_a_run_that_diverges_at_its_end_is_not_done(config, poisoned, tmp_path, capsys):
    poisoned({14: POISON, 15: POISON})
    for _ in range(2):  # a second start ends as the first
        assert train(config, tmp_path) == ExitCode.DIVERGED
        assert "step 16" in capsys.readouterr().err
    assert len(_events(tmp_path, "stop")) == 1
    assert not is_done(tmp_path, config.train.steps, ())


@pytest.mark.slow
def test_stop_at_a_spike(config, poisoned, tmp_path):
    poisoned({10: SURGE})
    assert train(_with(config, on_spike="stop"), tmp_path) == ExitCode.DIVERGED
    assert _events(tmp_path, "stop")[0]["step"] == 11
