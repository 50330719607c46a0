"""Runs with adapters and frozen parameters: resumed bitwise, saved small, on their own base."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.trees import leaves_by_path
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LoRAConfig,
    OptimizerConfig,
    TrainConfig,
)
from qwen3next_jax.model.adapter_names import is_adapter
from qwen3next_jax.runs.checkpoint import Checkpoints, load_trained
from qwen3next_jax.runs.checks import check_and_resolve_run
from qwen3next_jax.runs.first_state import describe_first_state, make_first_state
from qwen3next_jax.runs.record import BaseModel, ParentCheckpoint, read_record
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.trained.base_model import find_adapter_base
from qwen3next_jax.training.stages import open_data_of_stages
from tests.in_process import dry_run, resolved, train
from tests.models import SMALLEST

BASE = Config(
    name="base",
    model=SMALLEST,
    data=DataConfig(source="mqar"),
    train=TrainConfig(steps=2, batch_size=2, sequence_length=32, log_every=1),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"),
    checkpoint=CheckpointConfig(every=2, keep_last=9),
    eval=EvalConfig(every=100, rows=2, sample_tokens=0),
)
LORA = dataclasses.replace(SMALLEST, lora=LoRAConfig(rank=2))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("base")
    assert train(BASE, workdir) == 0
    return workdir


@pytest.fixture(scope="module")
def config(base):
    return dataclasses.replace(
        BASE,
        model=LORA,
        train=dataclasses.replace(BASE.train, steps=4, init_from=f"{base}@2"),
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("adapted")
    assert train(config, workdir) == 0
    return workdir


def _state(config, workdir, step):
    with Checkpoints(workdir) as checkpoints:
        return jax.device_get(checkpoints.restore(step, resolved(config).abstract_state))


@pytest.mark.slow
def test_an_adapter_is_saved_small_and_resumes_bitwise(config, base, finished, tmp_path):
    end = _state(config, finished, 4)
    begin = leaves_by_path(_state(BASE, base, 2)["params"])
    for path, leaf in leaves_by_path(end["params"]).items():
        if not is_adapter(path):
            np.testing.assert_array_equal(leaf, begin[path])
    record = json.loads((finished / "checkpoints" / "4" / "frozen.json").read_text())
    assert set(record["parameters"]) == set(begin)
    stored = json.loads((finished / "checkpoints" / "4" / "_METADATA").read_text())
    names = set(stored["tree_metadata"])
    assert not any("'embedding'" in name for name in names)
    assert any("k_proj_lora" in name for name in names)

    shutil.copytree(finished, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "4")
    assert train(config, tmp_path / "killed") == 0
    again = _state(config, tmp_path / "killed", 4)
    jax.tree.map(np.testing.assert_array_equal, end, again)


@pytest.mark.slow
def test_an_adapter_on_another_base_is_refused(config, finished, tmp_path):
    other = tmp_path / "other"
    alone = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=""))
    assert train(alone, other) == 0
    mixed = tmp_path / "mixed"
    shutil.copytree(finished, mixed)
    shutil.rmtree(mixed / "frozen")
    shutil.copytree(other / "frozen", mixed / "frozen")
    with pytest.raises(UserError, match="frozen"):
        load_trained(mixed)


@pytest.mark.slow
def test_the_base_of_an_adapter_is_the_directory_that_holds_its_matrices(base, finished, tmp_path):
    """And not one whose weights a run trained further before the adapters."""
    hf = tmp_path / "hf"
    source = BaseModel(str(hf), "qwen3_next")
    of_base, of_adapters = read_record(base), read_record(finished)

    def copy(name, of, parent=None, vocab_size=SMALLEST.vocab_size):
        (folder := tmp_path / name).mkdir()
        config = json.loads(json.dumps(of.config))
        config["model"]["vocab_size"] = vocab_size
        parent = parent and ParentCheckpoint(str(parent), 2, "", read_record(parent).id)
        of = dataclasses.replace(of, config=config, parent=parent, source=source)
        open_store(folder).write_run_json(of)
        return folder

    trained, direct = copy("trained", of_base), copy("direct", of_adapters)
    assert find_adapter_base(copy("on_trained", of_adapters, trained)) is None
    assert (
        find_adapter_base(direct) == find_adapter_base(copy("further", of_adapters, direct)) == hf
    )
    with pytest.raises(UserError, match=f"{SMALLEST.vocab_size}"):
        find_adapter_base(copy("grown", of_adapters, trained, SMALLEST.vocab_size + 3))


def test_the_start_of_a_run_says_what_is_trained(config, tmp_path, capsys):
    assert dry_run(config, tmp_path / "run") == 0
    printed = capsys.readouterr().out
    adapters = sum(
        leaf.size
        for path, leaf in leaves_by_path(resolved(config).abstract_state["params"]).items()
        if is_adapter(path)
    )
    assert f"{adapters:,} of " in printed


def test_a_branch_with_the_whole_state_has_the_adapters_of_its_parent(config, base, tmp_path):
    whole = dataclasses.replace(config.train, init_state="all")
    with pytest.raises(UserError, match="model.lora"):
        train(dataclasses.replace(config, train=whole), tmp_path)


def test_a_vocabulary_grows_by_the_mean_of_its_rows(base, tmp_path):
    grown = dataclasses.replace(
        BASE,
        model=dataclasses.replace(SMALLEST, vocab_size=SMALLEST.vocab_size + 3),
        train=dataclasses.replace(BASE.train, init_from=str(base)),
    )
    start = prepare_start(grown, tmp_path)
    run = check_and_resolve_run(start, make_mesh(grown.parallel, jax.devices()[:1]))
    data = open_data_of_stages(run.stages, grown.model.vocab_size)
    assert f"{SMALLEST.vocab_size} grows to {grown.model.vocab_size}" in describe_first_state(
        run, data, start
    )
    state, _ = make_first_state(run, data, start)
    old = leaves_by_path(_state(BASE, base, 2)["params"])
    changed = set()
    for path, leaf in leaves_by_path(jax.device_get(state["params"])).items():
        if leaf.shape == old[path].shape:
            np.testing.assert_array_equal(leaf, old[path])
            continue
        changed.add(path)
        axis = int(leaf.shape[0] == old[path].shape[0])  # [tokens, width] or [width, tokens]
        rows = np.moveaxis(leaf, axis, 0)
        np.testing.assert_array_equal(rows[:-3], np.moveaxis(old[path], axis, 0))
        mean = np.mean(old[path], axis, dtype=np.float64)
        np.testing.assert_allclose(rows[-3:], [mean] * 3, atol=1e-6)  # float32 sums of values < 1
    assert len(changed) == 2  # the embedding and the head


@pytest.mark.parametrize(
    ("more", "init_state", "message"),
    [(-1, "weights", "vocab_size"), (1, "all", "vocab_size.*init_state = 'weights'")],
)
def test_a_vocabulary_neither_shrinks_nor_grows_with_the_optimizer(
    base, tmp_path, more, init_state, message
):
    model = dataclasses.replace(SMALLEST, vocab_size=SMALLEST.vocab_size + more)
    changes = dict(steps=4, init_from=str(base), init_state=init_state)
    changed = dataclasses.replace(
        BASE, model=model, train=dataclasses.replace(BASE.train, **changes)
    )
    with pytest.raises(UserError, match=message):
        prepare_start(changed, tmp_path)
