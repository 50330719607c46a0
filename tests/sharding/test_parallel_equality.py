"""A run is the same on any mesh: the loss, every gradient and 20 steps of a whole model in float32,
on eight virtual devices and on one.

The default suite tests one mesh with a recurrent layer and four steps. The slow tests have two
periods, on every axis alone with 8 devices, on meshes 2×2×2 with any two axes together, and with
both ways to exchange the experts' tokens. The eight virtual devices (conftest) cost the other
tests nothing: these use the first device, and a program for one device is the same whether there
are others or not.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.config import (
    MESH_AXES,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.model import expert_parallelism as exchange
from qwen3next_jax.model.router import BINS
from qwen3next_jax.model.row_groups import row_group_count
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, batch_sharding, num_shards
from tests.in_process import resolved, step_of
from tests.models import DIVISIBLE, numpy_draws

# Two periods of layers. There are two key/value heads, so that with tensor = 4 or 8 several devices
# share one. With initial weights of this size, rounding errors are 1.5e-6 of a gradient; weights
# four times larger amplify them to 1e-5. With this seed, the router has no near-ties.
MODEL = dataclasses.replace(
    DIVISIBLE,
    num_hidden_layers=4,
    mtp_depth=2,
    decay_init="log_uniform",
    moe=MoEConfig(router_bias=True),
)
ONE_PERIOD = dataclasses.replace(MODEL, mtp_depth=1, num_hidden_layers=2, layer_types=())
# A recurrent layer. test_context_parallel.py and test_parallel.py have attention on a mesh.
QUICK = dataclasses.replace(ONE_PERIOD, num_hidden_layers=1, full_attention_interval=0, mtp_depth=0)
CONFIG = Config(
    model=MODEL,
    optimizer=OptimizerConfig(warmup_steps=5, learning_rate=1e-3, clip_norm=0.0),
    train=TrainConfig(
        batch_size=8,
        sequence_length=64,
        steps=20,
        balance_loss_weight=0.01,
        router_z_loss_weight=0.001,
    ),
)
# The mesh of the suite, without the axes `slice` and `data`, which test_slices.py and
# test_mixers.py test.
SUBSET = (dict.fromkeys(MESH_AXES[2:], 2),)
SINGLE_AXES = tuple({axis: 8} for axis in MESH_AXES)
# With SUBSET, any two axes stand together in one of them.
PRODUCTS = tuple(
    dict.fromkeys(axes, 2)
    for axes in (
        ("slice", "data", "expert"),
        ("slice", "context", "tensor"),
        ("data", "context", "tensor"),
    )
)
WITH_EXPERTS = tuple(axes for axes in SUBSET + PRODUCTS if "expert" in axes)


def test_any_two_axes_stand_together():
    pairs = {pair for axes in SUBSET + PRODUCTS for pair in itertools.combinations(axes, 2)}
    assert pairs == set(itertools.combinations(MESH_AXES, 2))


def _batch(seed: int) -> dict[str, np.ndarray]:
    """A batch with four documents of random lengths in each row, and padding at the end of some
    rows.
    """
    rng = np.random.default_rng(seed)
    b, t = CONFIG.train.batch_size, CONFIG.train.sequence_length
    starts = np.sort(rng.random((b, t - 1)).argsort(axis=1)[:, :3] + 1, axis=1)
    segments = 1 + np.sum(np.arange(t) >= starts[..., None], axis=1)
    segments[::3, -5:] = 0
    return {
        "tokens": rng.integers(0, 16, (b, t)).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
    }


def _config_and_mesh(axes: dict[str, int], model: ModelConfig):
    """The configuration with this model, and its mesh with these axes."""
    config = dataclasses.replace(
        CONFIG, model=model, parallel=ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes))
    )
    devices = int(np.prod(list(axes.values())))
    return config, make_mesh(config.parallel, jax.devices()[:devices])


@functools.cache
def _first_params(model: ModelConfig):
    """Initial parameters. test_evals.py tests that a run's are the same on every mesh."""
    with numpy_draws():
        return jax.device_get(resolved(*_config_and_mesh({}, model)).init_state()["params"])


def _run(axes: dict[str, int], model: ModelConfig, steps: int):
    """Trains `steps` steps on a mesh.

    Returns:
      (metrics of the first step, its gradient, total loss of each step, routers' biases after each
      step).
    """
    config, mesh = _config_and_mesh(axes, model)
    state = resolved(config, mesh).init_state(_first_params(model))
    step = step_of(config, mesh)
    losses, biases = [], []
    for i in range(steps):
        state, metrics = step(state, jax.device_put(_batch(i), batch_sharding(mesh)))
        if i == 0:
            # Adam's first moment is now (1 - beta1) times the gradient, which is not clipped.
            states = jax.tree.leaves(state["opt_state"], is_leaf=lambda s: hasattr(s, "mu"))
            adam = next(s for s in states if hasattr(s, "mu"))
            first = jax.device_get((metrics, adam.mu))
        losses.append(float(metrics["total_loss"]))
        params = state["params"]
        modules = [params["mtp"]["block"]] if "mtp" in params else []
        blocks = (*params["layers"].values(), *modules)
        biases.append([np.asarray(block["mlp"]["router_bias"]) for block in blocks])
    return *first, losses, biases


@functools.cache
def _run_on_one_device(model: ModelConfig, steps: int):
    """As `_run`, on one device."""
    metrics, gradient, losses, biases = _run({}, model, steps)
    if steps == CONFIG.train.steps:
        assert losses[-1] < losses[0] - 0.1
        assert np.abs(biases[-1][0]).max() > 0.002
    return metrics, gradient, losses, biases


def _check(axes, model=MODEL, steps=CONFIG.train.steps):
    """Compares a run on a mesh with the run on one device."""
    metrics, gradient, losses, biases = _run(axes, model, steps)
    *expected_first_step, expected_losses, expected_biases = _run_on_one_device(model, steps)
    for (path, expected), got in zip(
        jax.tree_util.tree_leaves_with_path(tuple(expected_first_step)),
        jax.tree.leaves((metrics, gradient)),
        strict=True,
    ):
        error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, biases, expected_biases)


@pytest.mark.parametrize("axes", SUBSET, ids=str)
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_run_equals_that_on_one_device(axes, overlap, monkeypatch):
    """`overlap`: whether each device's rows go through the layers in two groups."""
    if overlap:
        monkeypatch.setattr(exchange, "OVERLAP_ROWS", 1)
    rows = jax.ShapeDtypeStruct(
        (CONFIG.train.batch_size, CONFIG.train.sequence_length, MODEL.hidden_size), jnp.float32
    )
    groups = functools.partial(row_group_count, config=MODEL, mesh=_config_and_mesh(axes, QUICK)[1])
    assert groups(rows) == (2 if overlap else 1)
    assert groups(rows.update(shape=(6, 64, 32))) == 1, "an odd number of rows on a device"
    _check(axes, QUICK, steps=4)


def test_residual_streams_change_no_groups(monkeypatch):
    """The experts read the mixture of the streams, which is as wide as one of them."""
    monkeypatch.setattr(exchange, "OVERLAP_ROWS", 1)
    shape = CONFIG.train.batch_size, CONFIG.train.sequence_length
    mesh = _config_and_mesh(SUBSET[0], QUICK)[1]
    tokens = math.prod(shape) // num_shards(mesh, *ROWS, CONTEXT)
    of_two_chunks = 4 * tokens * MODEL.hidden_size * MODEL.num_experts_per_tok
    monkeypatch.setattr(exchange, "_max_chunk_bytes", lambda: of_two_chunks // 2)
    for streams in (1, 4):
        x = jax.ShapeDtypeStruct((*shape, streams * MODEL.hidden_size), jnp.float32)
        assert row_group_count(x, MODEL, mesh) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "micro_batches"), [({}, 2), *((axes, 1) for axes in WITH_EXPERTS)], ids=str
)
def test_quantile_balancing_counts_the_whole_batch(axes, micro_batches):
    """Micro-batches and meshes give the biases of one device, after two steps."""
    found = []
    for own_axes, own_micro_batches in (({}, 1), (axes, micro_batches)):
        config, mesh = _config_and_mesh(own_axes, ONE_PERIOD)
        train = dataclasses.replace(
            config.train,
            router_bias_update="quantile",
            gradient_accumulation=own_micro_batches,
            balance_loss_weight=0.0,
        )
        config = dataclasses.replace(config, train=train)
        state = resolved(config, mesh).init_state(_first_params(ONE_PERIOD))
        step = step_of(config, mesh)
        for i in range(2):
            state, _ = step(state, jax.device_put(_batch(i), batch_sharding(mesh)))
        blocks = (*state["params"]["layers"].values(), state["params"]["mtp"]["block"])
        biases = [np.asarray(b["mlp"]["router_bias"]).reshape(-1, 8) for b in blocks]
        found.append(np.concatenate(biases))
    assert np.all(np.abs(found[0]).max(axis=1) > 0.01)
    np.testing.assert_allclose(found[0].mean(axis=1), 0, atol=1e-6)
    # Sums in another order may move a token over the edge of a bin, and so a bias by less than one.
    # The range is 2 and the distance of the biases of the step before.
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=3 / BINS)


@pytest.mark.slow
@pytest.mark.parametrize("axes", SINGLE_AXES + PRODUCTS, ids=str)
def test_the_run_on_every_mesh(axes, monkeypatch):
    monkeypatch.setattr(exchange, "OVERLAP_ROWS", 1)
    _check(axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"expert": 8}, *WITH_EXPERTS], ids=str)
def test_the_run_with_choices_exchanged(axes, monkeypatch):
    monkeypatch.setattr(exchange, "GATHERED_SHARDS", 1)
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 8192)
    _check(axes)
