"""A run that begins with another one: its whole state goes on bitwise, its weights go anywhere,
and what cannot be is said in a line.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from qwen3next_jax.commands import evaluate
from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import (
    MESH_AXES,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    TelemetryConfig,
    TrainConfig,
    to_dict,
)
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.config.run import MuonConfig, SyntheticConfig
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.runs import checkpoint, manifest
from qwen3next_jax.runs.checkpoint import Checkpoints, load_trained
from qwen3next_jax.runs.facts import ParentRun, read_facts
from qwen3next_jax.runs.first_state import describe_first_state, make_first_state
from qwen3next_jax.runs.lock_and_record import base_model_record
from qwen3next_jax.runs.record import BaseModel, ParentCheckpoint, read_record, settings_as_json
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.trained import load as trained_load
from qwen3next_jax.trained.base_model import find_base_model
from qwen3next_jax.trained.load import load_model
from qwen3next_jax.training.stages import open_data_of_stages
from qwen3next_jax.training.state import abstract_model
from tests.in_process import dry_run, resolved, train
from tests.models import SMALLEST
from tests.records import record

STEPS, BRANCHED = 30, 10
MUON_PER_HEAD = {"name": "muon", "muon": MuonConfig(per_head=True)}
CONFIG = Config(
    model=SMALLEST,
    data=DataConfig(source="mqar", synthetic=SyntheticConfig(pairs=4)),
    train=TrainConfig(
        steps=STEPS,
        batch_size=4,
        sequence_length=32,
        log_every=1,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, schedule="constant"),
    checkpoint=CheckpointConfig(every=BRANCHED),
    eval=EvalConfig(every=1000, rows=4, sample_tokens=0),
    telemetry=TelemetryConfig(diagnostics_every=0),
)
ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "moe": MoEConfig(scoring_func="sigmoid", router_bias=True, shared_expert_gate=False),
}


def with_(**sections):
    groups = {
        name: dataclasses.replace(getattr(CONFIG, name), **changes)
        for name, changes in sections.items()
    }
    return dataclasses.replace(CONFIG, **groups)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    assert train(CONFIG, folder) == 0
    return folder


def losses(workdir):
    events = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        e["step"]: (e["loss"], e["grad_norm"], e["learning_rate"])
        for e in events
        if e["event"] == "train"
    }


def saved(workdir, step, config=CONFIG):
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore(step, resolved(config).abstract_state)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_the_whole_state_goes_on_as_its_parent_did_and_then_without_it(tmp_path):
    """With the biases of a router, and a rate that falls."""

    def routed(**train):
        train = {"router_bias_update": "quantile"} | train
        return with_(model=ROUTED, optimizer={"schedule": "cosine"}, train=train)

    parent, gone = tmp_path / "theirs", tmp_path / "parent"
    assert train(routed(), parent) == 0
    theirs, trained = losses(parent), saved(parent, STEPS, routed())
    shutil.copytree(parent, gone)
    config = routed(init_from=f"{gone}@{BRANCHED}", init_state="all")
    assert train(config, tmp_path / "branch") == 0
    assert losses(tmp_path / "branch") == {
        step: theirs[step] for step in range(BRANCHED + 1, STEPS + 1)
    }
    same(saved(tmp_path / "branch", STEPS, routed()), trained)
    assert np.any(trained["params"]["layers"][0]["mlp"]["router_bias"])
    digest = digests.sha256_file(parent / "checkpoints" / str(BRANCHED) / manifest.FILE_NAME)[:20]
    record = read_record(tmp_path / "branch").parent
    assert record == ParentCheckpoint(str(gone), BRANCHED, digest, read_record(parent).id)

    shutil.rmtree(gone)
    shutil.rmtree(tmp_path / "branch" / "checkpoints" / "30")
    shutil.rmtree(tmp_path / "branch" / "checkpoints" / "20")  # to the copy of what it began with
    # run.json is written anew
    assert train(dataclasses.replace(config, name="renamed"), tmp_path / "branch") == 0
    same(saved(tmp_path / "branch", STEPS, routed()), trained)
    assert read_record(tmp_path / "branch").parent == record
    assert find_base_model(tmp_path / "branch") is None


def opened(run):
    """The data of its stages."""
    return open_data_of_stages(run.stages, run.model.vocab_size)


def begun(config, mesh=None):
    """→ (its first state, the cursor of its first step)."""
    run = resolved(config, mesh)
    return make_first_state(run, opened(run), prepare_start(config, pathlib.Path("nowhere")))


@pytest.mark.slow
def test_the_weights_alone_begin_another_run_on_other_devices(parent):
    config = with_(
        train={"init_from": str(parent), "sequence_length": 64, "batch_size": 8},
        optimizer={"name": "muon"},
        data={"synthetic": SyntheticConfig(pairs=8)},
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2, 1, 1, 1), MESH_AXES)
    state, _ = begun(config, mesh)
    same(state["params"], saved(parent, STEPS)["params"])
    fresh = resolved(config, mesh).init_state(state["params"])
    same({**state, "params": 0}, {**fresh, "params": 0})
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, fresh)


@pytest.mark.parametrize(
    "change, row, anew",
    [
        ({"optimizer": {"learning_rate": 1e-3}}, 4 * BRANCHED, False),
        ({"train": {"batch_size": 3}}, 4 * BRANCHED, True),
        ({"data": {"seed": 1}}, 0, True),
    ],
    ids=str,
)
def test_the_whole_state_on_other_data(parent, change, row, anew):
    whole = {"init_from": f"{parent}@{BRANCHED}", "init_state": "all"}
    (state, reading), held = (
        begun(with_(**change | {"train": change.get("train", {}) | whole})),
        saved(parent, BRANCHED),
    )
    for name in ("params", "opt_state", "step"):
        same(state[name], held[name])
    assert (reading.step, reading.row, int(state["guards"]["data_offset"])) == (BRANCHED, row, 0)
    assert int(state["guards"]["entries"]) == (0 if anew else BRANCHED)


@pytest.mark.parametrize(
    "init_from, change, message",
    [
        ("{}/nowhere@10", {}, "there is no folder .*nowhere"),
        ("{}/nowhere", {}, "it does not exist here: expected a run"),
        ("{}@15", {}, "it has no checkpoint of step 15; saved steps: 10, 20, 30"),
        (
            "{}@20",
            {"model": {"intermediate_size": 32}},
            "its intermediate_size is 24, model.intermediate_size = 32",
        ),
        (
            "{}@20",
            {"optimizer": {"name": "muon"}},
            "its optimizer.name is 'adamw', here it is 'muon'",
        ),
        (
            "{}@20",
            {"optimizer": {"scaling": "mup", "base_width": 8}},
            "its optimizer.scaling is none .*, here it is mup",
        ),
        ("{}", {}, "train.steps = 30 includes the 30 steps"),
        ("{}@20", {"profile": {"steps": "18:20"}}, "profile.steps = '18:20' has no effect"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_read(
    parent, tmp_path, init_from, change, message
):
    config = with_(train={"init_from": init_from.format(parent), "init_state": "all"}, **change)
    with pytest.raises(UserError, match=message) as told:
        prepare_start(config, tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize(
    "when",
    [
        "as it is digested",
        "before it is read",
        "while it is read",
    ],
)
def test_what_is_loaded_is_what_was_digested(parent, tmp_path, monkeypatch, when, change):
    """And so what a rewind to step 0 loads, which reads it once more."""
    theirs = tmp_path / "parent"
    shutil.copytree(parent, theirs)
    config = with_(train={"init_from": f"{theirs}@{BRANCHED}"})
    other = saved(parent, BRANCHED)
    other["params"] = jax.tree.map(lambda leaf: leaf + 1, other["params"])

    def happens():
        monkeypatch.undo()
        shutil.rmtree(theirs / "checkpoints" / str(BRANCHED))
        if change == "replaced":
            with open_store(theirs).open_checkpoints(CheckpointConfig()) as checkpoints:
                checkpoints.save(BRANCHED, other)

    def digested(*args, looks=manifest.find_damage, **kwargs):
        damage = looks(*args, **kwargs)
        happens()
        return damage

    def read(*args, reads=checkpoint.read_arrays, **kwargs):
        happens()
        return reads(*args, **kwargs)

    if when == "as it is digested":
        monkeypatch.setattr(manifest, "find_damage", digested)
    with pytest.raises(UserError, match=f"checkpoints/{BRANCHED}: ") as told:
        start = prepare_start(config, tmp_path / "nowhere")
        run = resolved(config)
        if when == "before it is read":
            happens()
        elif when == "while it is read":
            monkeypatch.setattr(checkpoint, "read_arrays", read)
        make_first_state(run, opened(run), start)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "when",
    [
        "record",
        "settings",
        "newest step",
        "structure",
    ],
)
def test_a_run_exchanged_while_it_is_read_is_refused(parent, tmp_path, monkeypatch, when):
    folder, other = tmp_path / "run", tmp_path / "other"
    for copy in (folder, other):
        shutil.copytree(parent, copy)
    state = saved(parent, STEPS)
    state["params"] = jax.tree.map(lambda leaf: leaf + 1, state["params"])
    shutil.rmtree(other / "checkpoints")
    open_store(other).write_run_json(dataclasses.replace(read_record(other), id="other"))
    with open_store(other).open_checkpoints(CheckpointConfig()) as checkpoints:
        checkpoints.save(STEPS, state)

    def then_exchanged(function):
        def call(*arguments):
            result = function(*arguments)
            monkeypatch.undo()
            folder.rename(tmp_path / "away")
            other.rename(folder)
            return result

        return call

    module, name = {
        "record": (trained_load, "read_record"),
        "settings": (checkpoint, "check_module_versions"),
        "newest step": (Checkpoints, "newest_valid_step"),
        "structure": (checkpoint, "abstract_model"),
    }[when]
    assert load_model(folder).step == STEPS
    monkeypatch.setattr(module, name, then_exchanged(getattr(module, name)))
    with pytest.raises(UserError, match=f"^{folder}.*: (another run|not the checkpoint)") as told:
        load_model(folder)
    assert "\n" not in str(told.value)


def test_an_older_step_than_the_newest_is_said(parent, tmp_path):
    theirs = tmp_path / "parent"
    shutil.copytree(parent, theirs)
    os.truncate(max((theirs / "checkpoints" / "30").rglob("d/*")), 1)
    for init_from, says in ((theirs, True), (f"{theirs}@20", False)):
        config = with_(train={"init_from": str(init_from)})
        start, run = prepare_start(config, tmp_path), resolved(config)
        text = describe_first_state(run, opened(run), start)
        assert start.parent.step == 20
        assert "step 20" in text
        assert ("step 30" in text) == says


def test_a_run_records_what_its_parent_began_with(tmp_path):
    """So the folders of the runs before it need not be kept."""
    for source in (None, BaseModel(f"{tmp_path}/hf", "qwen3_5")):
        (tmp_path / "first").mkdir(exist_ok=True)
        open_store(tmp_path / "first").write_run_json(record(source=source))
        assert find_base_model(tmp_path / "first") == source
        first = read_record(tmp_path / "first")
        assert base_model_record(ParentRun(tmp_path / "first", first, CONFIG, None, {})) == source


@pytest.mark.parametrize(
    "settings, reads",
    [
        ({}, True),
        ({"block": BlockConfig(positions="learned")}, False),
        ({"full_mixer": "hyena"}, False),
    ],
    ids=["default", "learned", "hyena"],
)
def test_settings_that_give_weights_their_meaning_are_compared_wherever_they_are_read(
    parent, tmp_path, settings, reads
):
    """How many rows a table of positions has, over which distance a filter is spread."""
    model = dataclasses.replace(CONFIG.model, linear_num_key_heads=1, linear_num_value_heads=1)
    folder, bound = tmp_path / "parent", dataclasses.replace(model, **settings)
    abstract_model(bound)  # without the folder of this mixer, the test ends here
    shutil.copytree(parent, folder)
    trained = dataclasses.replace(CONFIG, model=bound)
    open_store(folder).write_run_json(
        dataclasses.replace(read_record(folder), config=to_dict(trained))
    )
    begins = dataclasses.replace(CONFIG.train, init_from=str(folder))

    def start(model):
        prepare_start(dataclasses.replace(CONFIG, model=model, train=begins), tmp_path / "new")

    start(bound)
    wider = dataclasses.replace(bound, max_position_embeddings=2**19)
    for meets in (
        lambda: start(wider),
        lambda: evaluate._check_weights_fit_config(wider, bound, folder),
    ):
        with (
            contextlib.nullcontext()
            if reads
            else pytest.raises(UserError, match="max_position_embeddings")
        ):
            meets()


def test_weights_of_another_version_are_refused_by_name(parent, tmp_path, monkeypatch):
    """Where a run goes on, begins with another one, is loaded."""
    folder = tmp_path / "parent"
    shutil.copytree(parent, folder)
    load_trained(folder)
    monkeypatch.setattr(GatedAttention, "version", 2, raising=False)
    branch = with_(train={"init_from": str(folder)})
    for meets in (
        lambda: load_trained(folder),
        lambda: train(with_(train={"steps": STEPS + 1}), folder),
        lambda: train(branch, tmp_path / "branch"),
    ):
        with pytest.raises(UserError, match="version 1 of gated_attention .* version 2"):
            meets()
    assert not (tmp_path / "branch" / "checkpoints").exists()


def test_a_dry_run_of_a_branch_counts_what_it_has_left(parent, tmp_path, capsys):
    for whole, steps in (("all", "20 steps (11 … 30)"), ("weights", "30 steps (1 … 30)")):
        config = with_(train={"init_from": f"{parent}@{BRANCHED}", "init_state": whole})
        assert dry_run(config, tmp_path) == 0
        assert f" in {steps}" in capsys.readouterr().out


def test_a_branch_killed_before_it_was_saved_begins_with_the_step_that_it_began_with(
    parent, tmp_path
):
    """Although its parent has saved later ones since."""
    config = with_(train={"init_from": str(parent)})
    assert read_facts(config, tmp_path).initial_model.checkpoint.step == STEPS
    begun = ParentCheckpoint(str(parent), BRANCHED, "0" * 20, "0")
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1, "time": 1.0}\n')
    (tmp_path / "checkpoints" / "11").mkdir(parents=True)  # of which the manifest is not there yet
    open_store(tmp_path).write_run_json(record(config=settings_as_json(config), parent=begun))
    assert read_facts(config, tmp_path).initial_model.checkpoint.step == BRANCHED
