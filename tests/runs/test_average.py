"""The moving average of the parameters (`train.ema`): values, meshes, checkpoints, evaluation."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.commands.evaluate import run_evaluations
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.common.trees import leaves_by_path
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.evals.evaluation import EvalOptions
from qwen3next_jax.runs.checkpoint import Checkpoints, load_trained
from qwen3next_jax.sharding.mesh import make_mesh, single_device_mesh
from qwen3next_jax.trained.load import load_model
from qwen3next_jax.trained.merging import find_sources, read_merged_state
from qwen3next_jax.training.average import MovingAverage
from qwen3next_jax.training.update_rules import apply_rule
from tests.in_process import resolved, train
from tests.trained.test_merging import CONFIG

STEPS, DECAY = 6, 0.7


def _config(**settings):
    settings = {"batch_size": 4, "ema": DECAY} | settings
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **settings))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a run, its parameters after each step)."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    return workdir, _train(_config(), workdir)


def _train(config, workdir) -> list:
    """Trains, and returns the parameters after each step."""
    params = []

    def add_hooks(trainer):
        trainer.add_hook(lambda info: params.append(jax.device_get(info.state["params"])))

    assert train(config, workdir, add_hooks=add_hooks) == 0
    return params


def _saved(config, workdir, step=STEPS):
    with Checkpoints(workdir) as checkpoints:
        return jax.device_get(checkpoints.restore(step, resolved(config).abstract_state))


def _check_is_weighted_mean(saved, params):
    """Checks the average of a saved state against the parameters after each step."""
    assert saved["ema"]["updates"] == STEPS
    average, last = leaves_by_path(saved["ema"]["average"]), leaves_by_path(saved["params"])
    assert set(last) - set(average) == {"embedding"}  # it is frozen
    weights = DECAY ** np.arange(STEPS)[::-1]
    for path, leaf in average.items():
        history = np.stack([leaves_by_path(one)[path] for one in params]).astype(np.float64)
        exact = np.tensordot(weights / weights.sum(), history, axes=1)
        # Each update rounds the average three times.
        tolerance = 3 * STEPS * np.finfo(np.float32).eps * np.abs(history).max(axis=0)
        assert (np.abs(leaf - exact) <= tolerance).all(), path


@pytest.mark.slow
def test_the_average_is_the_weighted_mean_of_the_parameters_after_each_update(run):
    workdir, params = run
    saved = _saved(_config(), workdir)
    _check_is_weighted_mean(saved, params)
    loaded = jax.device_get(load_trained(workdir, ema=True).model.embedding[...])
    np.testing.assert_array_equal(loaded, leaves_by_path(saved["params"])["embedding"])


def test_a_skipped_update_does_not_count():
    start = {"a": jnp.array([1.0, 2.0])}
    rule = MovingAverage(0.9999, frozenset())
    state = {"params": start} | rule.init(start)

    def after(state, params, skip):
        state = state | {"params": {"a": jnp.array(params)}}
        return apply_rule(rule, None, state, {}, jnp.array(skip))[0]

    skipped = after(state, [5.0, jnp.inf], skip=True)
    assert skipped["ema"]["updates"] == 0
    np.testing.assert_array_equal(skipped["ema"]["average"]["a"], start["a"])
    taken = after(skipped, [7.0, 9.0], skip=False)
    np.testing.assert_allclose(taken["ema"]["average"]["a"], [7.0, 9.0], rtol=1e-6)


@pytest.mark.slow
def test_the_average_changes_nothing_else_and_without_it_the_state_is_as_before(run, tmp_path):
    off = _config(ema=0.0)
    assert train(off, tmp_path) == 0
    state, averaged = _saved(off, tmp_path), _saved(_config(), run[0])
    assert set(state) == {"params", "opt_state", "step", "guards"} == set(averaged) - {"ema"}
    for name in state:
        jax.tree.map(np.testing.assert_array_equal, state[name], averaged[name])
    with pytest.raises(UserError, match="train.ema"):
        load_trained(tmp_path, ema=True)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_average(run, tmp_path):
    workdir = tmp_path / "killed"
    shutil.copytree(run[0], workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    assert train(_config(), workdir) == 0
    states = _saved(_config(), run[0]), _saved(_config(), workdir)
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_the_average_on_a_mesh_is_the_parameters_weighted_mean_and_sharded_like_them(tmp_path):
    # The averages of two meshes cannot be compared: Adam divides a gradient of almost 0 by its
    # size, so that the rounding of one element changes its first update by 1e-5.
    # test_parallel_equality.py compares losses and gradients.
    parallel = ParallelConfig(mesh=MeshConfig(data=4, tensor=2))
    config = dataclasses.replace(_config(), parallel=parallel)
    mesh_run = resolved(config, make_mesh(parallel, jax.devices()[:8]))
    shardings = mesh_run.state_shardings
    of_params = leaves_by_path(shardings["params"])
    for path, sharding in leaves_by_path(shardings["ema"]["average"]).items():
        assert sharding == of_params[path]
    params = _train(config, tmp_path)
    _check_is_weighted_mean(_saved(config, tmp_path), params)


@pytest.mark.slow
def test_the_average_is_evaluated_beside_the_parameters(run):
    workdir, _ = run
    events = {event["event"]: event for event in read_events(workdir / "metrics.jsonl")}
    losses = {}
    for name, ema in (("heldout", False), ("heldout_average", True)):
        options = EvalOptions(CONFIG.eval.rows)
        (result,) = run_evaluations(None, workdir, options=options, ema=ema)
        losses[name] = result.values["loss"]
        assert "--ema" in result.title or not ema
        # Both are sums of the same float32 losses, perhaps in another order.
        np.testing.assert_allclose(events[name]["loss"], losses[name], rtol=1e-5)
    assert abs(losses["heldout"] / losses["heldout_average"] - 1) > 1e-4
    assert load_model(workdir).weights_identity != load_model(workdir, ema=True).weights_identity


@pytest.mark.slow
def test_the_average_of_a_merged_run_begins_anew(run):
    workdir, _ = run
    sources = find_sources([f"{workdir}@2", f"{workdir}@{STEPS}"])
    state = jax.device_get(read_merged_state(sources, [0.5, 0.5], single_device_mesh()))
    assert state["ema"]["updates"] == 0
    params = leaves_by_path(state["params"])
    for path, leaf in leaves_by_path(state["ema"]["average"]).items():
        np.testing.assert_array_equal(leaf, params[path])


@pytest.mark.slow
@pytest.mark.parametrize("decay", [DECAY, 0.5])
def test_a_branch_takes_over_an_average_with_the_same_decay_rate(run, tmp_path, decay):
    branch = {"init_from": f"{run[0]}@{STEPS}", "init_state": "all"}
    config = _config(steps=STEPS + 2, ema=decay, **branch)
    assert train(config, tmp_path) == 0
    taken_over = STEPS if decay == DECAY else 0
    assert _saved(config, tmp_path, STEPS + 2)["ema"]["updates"] == taken_over + 2
