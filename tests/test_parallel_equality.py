"""On any mesh the same run: loss, every gradient and 20 steps of a whole model, float32, on
eight virtual devices against one.

The suite takes a sharp subset, one depth of prediction and four steps; `pytest -m slow
tests/test_parallel_equality.py` takes every axis alone at 2, 4 and 8, the products 2×2×2 of
every three axes, and both exchanges of the experts. Eight devices for the whole suite (conftest)
cost the other tests nothing: they use the first one, and a program for one device is the same
program.
"""

import dataclasses
import functools
import itertools

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
from qwen3next_jax.model.row_groups import row_groups
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from tests.in_process import resolved, step_of

# Two periods; two key/value heads, so that tensor = 4 and 8 share them. Parameters of this size
# keep rounding errors at 1.5e-6 of a gradient; four times larger ones amplify them to 1e-5. The
# seed has no near-tie in the router.
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    full_attention_interval=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    mtp_depth=2,
    decay_init="log_uniform",
    dtype="float32",
    initializer_range=0.05,
    moe=MoEConfig(router_bias=True),
)
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
# rows over `data` alone are split in test_mixers.py, too
SUBSET = (dict.fromkeys(MESH_AXES[1:], 2),)
ALONE = tuple({axis: size} for axis in MESH_AXES for size in (2, 4, 8))
PRODUCTS = tuple(dict.fromkeys(axes, 2) for axes in itertools.combinations(MESH_AXES, 3))


def _batch(seed: int) -> dict[str, np.ndarray]:
    """Four documents a row, cut anywhere; padding at the end of some rows."""
    rng = np.random.default_rng(seed)
    b, t = CONFIG.train.batch_size, CONFIG.train.sequence_length
    cuts = np.sort(rng.random((b, t - 1)).argsort(axis=1)[:, :3] + 1, axis=1)
    segments = 1 + np.sum(np.arange(t) >= cuts[..., None], axis=1)
    segments[::3, -5:] = 0
    return {
        "tokens": rng.integers(0, 16, (b, t)).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
    }


def _on(axes: dict[str, int], depth: int):
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, mtp_depth=depth),
        parallel=ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes)),
    )
    devices = int(np.prod(list(axes.values())))
    return config, make_mesh(config.parallel, jax.devices()[:devices])


@functools.cache
def _first_params(depth: int):
    """That they are drawn alike on every mesh is seen in test_evals.py."""
    return jax.device_get(resolved(*_on({}, depth)).init_state()["params"])


def _run(axes: dict[str, int], depth: int, steps: int):
    """(metrics of the first step, its gradient, of each of the first `steps` its total loss, and
    after it the routers' biases).
    """
    config, mesh = _on(axes, depth)
    state = resolved(config, mesh).init_state(_first_params(depth))
    step = step_of(config, mesh)
    losses, biases = [], []
    for i in range(steps):
        state, metrics = step(state, jax.device_put(_batch(i), batch_sharding(mesh)))
        # Adam's first moment is then (1 - beta1) times the gradient, which nothing has clipped
        if i == 0:
            adam = next(
                s
                for s in jax.tree.leaves(state["opt_state"], is_leaf=lambda s: hasattr(s, "mu"))
                if hasattr(s, "mu")
            )
            first = jax.device_get((metrics, adam.mu))
        losses.append(float(metrics["total_loss"]))
        biases.append(
            [
                np.asarray(block["mlp"]["router_bias"])
                for block in (*state["params"]["layers"].values(), state["params"]["mtp"]["block"])
            ]
        )
    return *first, losses, biases


@functools.cache
def _alone(depth: int):
    metrics, gradient, losses, biases = _run({}, depth, CONFIG.train.steps)
    assert losses[-1] < losses[0] - 0.1 and np.abs(biases[-1][0]).max() > 0.002
    return metrics, gradient, losses, biases


def _check(axes, depth=MODEL.mtp_depth, steps=CONFIG.train.steps):
    (metrics, gradient, losses, biases), alone = _run(axes, depth, steps), _alone(depth)
    for (path, expected), got in zip(
        jax.tree_util.tree_leaves_with_path(alone[:2]),
        jax.tree.leaves((metrics, gradient)),
        strict=True,
    ):
        error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"
    np.testing.assert_allclose(losses, alone[2][:steps], rtol=0, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, biases, alone[3][:steps])


@pytest.mark.parametrize("axes", SUBSET, ids=str)
def test_the_run_equals_that_on_one_device(axes, monkeypatch):
    monkeypatch.setattr(exchange, "OVERLAP_ROWS", 1)
    rows = jax.ShapeDtypeStruct(
        (CONFIG.train.batch_size, CONFIG.train.sequence_length, MODEL.hidden_size), jnp.float32
    )
    groups = functools.partial(row_groups, config=MODEL, mesh=_on(axes, 1)[1])
    assert groups(rows) == 2 and groups(rows.update(shape=(6, 64, 32))) == 1, (
        "even rows go through the layers in two groups"
    )
    _check(axes, depth=1, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [axes for axes in ALONE + PRODUCTS if axes not in SUBSET], ids=str)
def test_the_run_on_every_mesh(axes, monkeypatch):
    monkeypatch.setattr(exchange, "OVERLAP_ROWS", 1)
    _check(axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"expert": 2}, {"expert": 4}, {"expert": 8}, *(p for p in PRODUCTS if "expert" in p)],
    ids=str,
)
def test_the_run_with_choices_exchanged(axes, monkeypatch):
    monkeypatch.setattr(exchange, "GATHERED_SHARDS", 1)
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 8192)
    _check(axes)
