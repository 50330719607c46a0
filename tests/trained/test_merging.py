"""Weights, means and runs of merged checkpoints."""

import dataclasses
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
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.record import read_record
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sharding.mesh import make_mesh, single_device_mesh
from qwen3next_jax.trained import merging
from qwen3next_jax.trained.merging import (
    find_sources,
    read_merged_state,
    require_writable_new_folder,
    weight_of_each_checkpoint,
    write_merged_run,
)
from tests.in_process import resolved, train
from tests.models import SMALLEST

CONFIG = Config(
    name="merged",
    model=SMALLEST,
    data=DataConfig(source="mqar"),
    train=TrainConfig(steps=6, batch_size=2, sequence_length=32, freeze=("embedding",)),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"),
    checkpoint=CheckpointConfig(every=2, keep_last=9),
    eval=EvalConfig(every=100, rows=2, sample_tokens=0),
)
DECAYS = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + np.cos(np.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - np.sqrt(x),
}


def _with_steps(steps: int) -> Config:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    assert train(CONFIG, workdir) == 0
    return workdir


def _saved(workdir, step):
    with Checkpoints(workdir) as checkpoints:
        return jax.device_get(checkpoints.restore(step, resolved(CONFIG).abstract_state))


def _merged(run, steps, weights, mesh=None, **options):
    sources = find_sources([f"{run}@{step}" for step in steps])
    mesh = single_device_mesh() if mesh is None else mesh
    return jax.device_get(read_merged_state(sources, weights, mesh, **options))


@pytest.mark.parametrize("decay", DECAYS)
def test_the_weights_of_a_decay_reproduce_it_on_a_straight_path_between_checkpoints(decay):
    """θ_0 + ∫ d(x) θ'(x) dx, where θ' is constant between two checkpoints."""
    steps = np.array([100, 130, 190, 200, 260])
    points = np.random.default_rng(0).normal(size=len(steps))
    weights = weight_of_each_checkpoint(decay, steps)
    assert abs(weights.sum() - 1) < 1e-12
    assert weights.min() > 0
    fine = np.linspace(0, 1, 160_001)
    places = (steps - steps[0]) / (steps[-1] - steps[0])
    path, middle = np.interp(fine, places, points), (fine[1:] + fine[:-1]) / 2
    end = points[0] + np.sum(DECAYS[decay](middle) * np.diff(path))
    assert abs(weights @ points - end) < 1e-5


def test_lists_of_weights_are_ratios():
    np.testing.assert_allclose(weight_of_each_checkpoint("1, 2, 1", [3, 1, 2]), [0.25, 0.5, 0.25])
    np.testing.assert_allclose(weight_of_each_checkpoint("-1,3", [1, 2]), [-0.5, 1.5])
    np.testing.assert_allclose(weight_of_each_checkpoint("uniform", [3, 1]), [0.5, 0.5])


@pytest.mark.slow
def test_the_merge_of_one_checkpoint_is_that_checkpoint(run):
    jax.tree.map(np.testing.assert_array_equal, _saved(run, 4), _merged(run, [4], [1.0]))


@pytest.mark.slow
def test_a_merge_is_the_weighted_mean_on_any_mesh_and_in_any_groups(run):
    steps, weights = (2, 4, 6), np.array([0.2, 0.3, 0.5])
    saved = [leaves_by_path(_saved(run, step)["params"]) for step in steps]
    merged = _merged(run, steps, weights)
    moved = False
    for path, leaf in leaves_by_path(merged["params"]).items():
        arrays = np.stack([one[path] for one in saved]).astype(np.float64)
        # Each of the three sums rounds by half a unit in the last place of the largest term.
        tolerance = 3 * np.finfo(np.float32).eps * np.abs(arrays).max(axis=0)
        exact = np.tensordot(weights, arrays, axes=1)
        assert (np.abs(leaf - exact) <= tolerance).all(), path
        moved |= bool((np.abs(leaf - arrays[-1]) > 1e-4).any())
        if path == "embedding":
            np.testing.assert_array_equal(leaf, saved[-1][path])
    assert moved
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=4, tensor=2)), jax.devices()[:8])
    others = (_merged(run, steps, weights, mesh), _merged(run, steps, weights, group_bytes=1))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, merged, other)


@pytest.mark.slow
def test_replaced_arrays_do_not_stay_in_memory(run, monkeypatch):
    add, counts = merging._add_to_base, []

    def counted(base, total):
        counts.append(len(jax.live_arrays()))
        return add(base, total)

    monkeypatch.setattr(merging, "_add_to_base", counted)
    _merged(run, (2, 4), (0.5, 0.5), whole=False, group_bytes=1)
    assert len(counts) > 5
    assert counts[-1] - counts[0] <= 2  # the group before


@pytest.mark.slow
def test_a_merged_run_goes_on_and_resumes_bitwise(run, tmp_path):
    sources, out = find_sources([f"{run}@2", f"{run}@6", str(run)]), tmp_path / "merged"
    write_merged_run(sources, [0.25, 0.25, 0.5], single_device_mesh(), out)
    with pytest.raises(UserError, match="merged"):
        require_writable_new_folder(out)
    record = read_record(out)
    assert record.id != read_record(run).id
    assert [(one.step, one.weight) for one in record.merged] == [
        (2, 0.25),
        (6, 0.25),
        (6, 0.5),
    ]
    merged, last = _saved(out, 6), _saved(run, 6)
    jax.tree.map(np.testing.assert_array_equal, merged["opt_state"], last["opt_state"])

    config = _with_steps(10)
    assert train(config, out) == 0
    assert read_record(out).merged == record.merged
    killed = tmp_path / "killed"
    shutil.copytree(out, killed)
    shutil.rmtree(killed / "checkpoints" / "10")
    assert train(config, killed) == 0
    jax.tree.map(np.testing.assert_array_equal, _saved(out, 10), _saved(killed, 10))


def test_of_merges_at_once_one_wins_and_a_foreign_folder_stays(tmp_path):
    out = tmp_path / "merged"
    first, others = merging._PartialFolder(out), [merging._PartialFolder(out) for _ in range(2)]
    first.create_and_lock()
    for other in others:
        with pytest.raises(UserError, match="another merge is writing there"):
            other.create_and_lock()
    (first.folder / "run.json").write_text("first")
    first.rename_to_final()
    assert [path.name for path in out.iterdir()] == ["run.json"]
    with pytest.raises(UserError, match="already there"):
        others[0].create_and_lock()
    killed = merging._PartialFolder(tmp_path / "again")
    killed.create_and_lock()
    (killed.folder / "checkpoints").mkdir()
    killed._lock.close()
    merging._PartialFolder(tmp_path / "again").create_and_lock()
    assert [path.name for path in killed.folder.iterdir()] == ["merging"]
    (killed.folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        merging._PartialFolder(tmp_path / "again").create_and_lock()
    (foreign := tmp_path / ".theirs.partial").mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        merging._PartialFolder(tmp_path / "theirs").create_and_lock()
    (foreign / "merging").touch()
    with pytest.raises(UserError, match="holds other files"):
        merging._PartialFolder(tmp_path / "theirs").create_and_lock()
    assert (foreign / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("weights", "steps"),
    [("1,-1", (1, 2)), ("1,2", (1, 2, 3)), ("nan,1", (1, 2)), ("square", (1,)), ("linear", (2, 1))],
)
def test_wrong_weights_are_refused(weights, steps):
    with pytest.raises(UserError, match=f"--weights={weights}"):
        weight_of_each_checkpoint(weights, steps)


@pytest.mark.slow
def test_runs_that_do_not_fit_are_refused(run, tmp_path):
    def other(name, of_config=None, **entries):
        folder = tmp_path / name
        shutil.copytree(run, folder)
        record = read_record(run)
        for group, values in (of_config or {}).items():
            record.config[group] |= values
        open_store(folder).write_run_json(dataclasses.replace(record, **entries))
        return f"{folder}@2"

    lora = dataclasses.asdict(LoRAConfig(rank=2))
    cases = {
        "model.hidden_size": other("wide", {"model": {"hidden_size": 32}}),
        "tokenizer": other("tokens", tokenizer="other"),
        "model.lora": other("adapters", {"model": {"lora": lora}}),
        "width 8": other("scaled", {"optimizer": {"scaling": "mup", "base_width": 8}}),
        "train.freeze": other("frozen", {"train": {"freeze": []}}),
        "saved steps": f"{run}@3",
        "no run": str(tmp_path / "nowhere"),
    }
    for message, name in cases.items():
        with pytest.raises(UserError, match=message):
            find_sources([name, f"{run}@6"])
