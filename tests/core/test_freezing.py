"""Frozen parameters and groups of parameters, against full gradients, masks and optax's AdamW, all
written out here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import (
    Config,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
    TrainConfig,
)
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from qwen3next_jax.training.gradients import make_gradients
from qwen3next_jax.training.state import abstract_model
from tests.in_process import resolved, shared_step
from tests.models import SMALLEST
from tests.refusals import refused

# The batches have all 32 tokens: a gradient near the eps of Adam would be noise.
MODEL = dataclasses.replace(SMALLEST, vocab_size=32, num_hidden_layers=2)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=0.1)
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(steps=8, batch_size=8, sequence_length=16),
    optimizer=OPTIMIZER,
)
# a whole array, a layer of stacks, a part of a slab, and both of the latter in one array
FREEZE = ("embedding", "name=*/mlp/* layer=0", "part=gate", "name=*/q_proj layer=1")
GROUPS = (
    ParameterGroup("name=*/v_proj layer=1", 0.5),
    ParameterGroup("name=*/mlp/down|head", 3.0, 0.0),
)


def with_(freeze=(), groups=(), **optimizer):
    return dataclasses.replace(
        CONFIG,
        train=dataclasses.replace(CONFIG.train, freeze=freeze),
        optimizer=dataclasses.replace(OPTIMIZER, groups=groups, **optimizer),
    )


def start_params():
    rng = np.random.default_rng(0)
    _, params = abstract_model(MODEL)
    return jax.tree.map(lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), s.dtype), params)


def batch(seed):
    tokens = np.random.default_rng(seed).integers(1, 32, (8, 16)).astype(np.int32)
    return {"tokens": tokens, "segment_ids": np.ones((8, 16), np.int32)}


def is_trained(path, leaf):
    """The elements that FREEZE leaves, by hand."""
    trained = np.ones(leaf.shape, bool)
    if path == "embedding":
        trained[:] = False
    if "/mlp/" in path:
        trained[0] = False
    if path.endswith("q_proj"):  # [layer, D, heads, query | gate]
        trained[..., 8:] = False
        trained[1] = False
    return trained


def factor_and_decay(path, leaf):
    """What GROUPS asks for, by hand."""
    factor, decay = np.ones(leaf.shape), np.full(leaf.shape, OPTIMIZER.weight_decay)
    if path.endswith("v_proj"):
        factor[1] = 0.5
    if path.endswith("mlp/down") or path == "head":
        factor[:], decay[:] = 3.0, 0.0
    return factor, decay


def map_with_path(f, *trees):
    return jax.tree_util.tree_map_with_path(lambda path, *leaf: f(path_string(path), *leaf), *trees)


def trained(config, mesh=None, steps=3):
    run = resolved(config, mesh)
    step, state = shared_step(run, *run.stages), run.init_state(start_params())
    for seed in range(steps):
        state, metrics = step(state, jax.device_put(batch(seed), batch_sharding(run.mesh)))
    return run, jax.device_get(state), jax.device_get(metrics)


@pytest.mark.slow
def test_frozen_parameters_have_no_gradients_or_updates():
    run, state, metrics = trained(with_(FREEZE, GROUPS))
    gradients = make_gradients(resolved(CONFIG), *resolved(CONFIG).stages)
    adam = optax.chain(
        optax.clip_by_global_norm(OPTIMIZER.clip_norm),
        optax.scale_by_adam(OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.eps),
    )
    first = params = start_params()
    opt_state = adam.init(params)
    masks = map_with_path(is_trained, params)
    scales = map_with_path(lambda path, leaf: factor_and_decay(path, leaf), params)

    @jax.jit
    def reference_step(params, opt_state, batch):
        grads = jax.tree.map(lambda g, m: g * m, gradients(params, batch)[0].main_group, masks)
        directions, opt_state = adam.update(grads, opt_state)
        params = jax.tree.map(
            lambda p, d, m, s: jnp.where(m, p - 1e-2 * s[0] * (d + s[1] * p), p),
            params,
            directions,
            masks,
            scales,
        )
        return params, opt_state, optax.tree.norm(grads)

    for seed in range(3):
        params, opt_state, norm = reference_step(params, opt_state, batch(seed))
    for (path, got), want, start, mask in zip(
        jax.tree_util.tree_leaves_with_path(state["params"]),
        *map(jax.tree.leaves, (params, first, masks)),
        strict=True,
    ):
        np.testing.assert_array_equal(got[~mask], start[~mask], err_msg=path_string(path))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=path_string(path))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    # no moments of the embedding, moments of one layer of the MLPs and of the queries
    moments = {path_string(p): m.shape for p, m in _leaves(state["opt_state"][1][0].mu)}
    assert "embedding" not in moments
    assert moments["layers/0/mlp/down"] == (1, 24, 16)
    assert moments["layers/0/mixer/q_proj"] == (1, 16, 2, 16)
    assert moments["layers/0/mixer/v_proj"] == (2, 16, 1, 8)


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_eight_devices_freeze_what_one_freezes(name):
    config = with_(FREEZE, GROUPS, name=name)
    parallel = ParallelConfig(mesh=MeshConfig(slice=2, data=2, tensor=2), slice_state="sharded")
    mesh = make_mesh(parallel, jax.devices()[:8])
    _, one, _ = trained(config, steps=2)
    _, many, _ = trained(dataclasses.replace(config, parallel=parallel), mesh, steps=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, many)
    for (path, start), end in zip(
        _leaves(start_params()), jax.tree.leaves(many["params"]), strict=True
    ):
        frozen = ~is_trained(path_string(path), start)
        np.testing.assert_array_equal(end[frozen], start[frozen])


@pytest.mark.parametrize(
    "freeze, groups",
    [
        (("kind=router",), ()),  # this model has no router
        (("layer=7",), ()),
        (("kind=norms",), ()),
        (("part=keys",), ()),
        (("layers=0",), ()),
        (("layer=1-0",), ()),
        (("layer=1-",), ()),
        (("layer=0-99999999999",), ()),
        (("layer=0-" + "9" * 5000,), ()),
        (("",), ()),
        (("kind=norm", "kind!=norm"), ()),
        ((), (ParameterGroup("name=*"),)),
        ((), (ParameterGroup("kind=norm", 2.0), ParameterGroup("final_norm", 2.0))),
        (("kind=norm",), (ParameterGroup("final_norm", 2.0),)),
    ],
)
def test_choices_of_nothing_of_everything_and_twice_are_refused(freeze, groups):
    with refused():
        resolved(with_(freeze, groups))
