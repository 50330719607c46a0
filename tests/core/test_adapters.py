"""LoRA: the merged matrices against NumPy, part by part and expert by expert; the merged model
against the unmerged; training on devices and at full rank.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.common.trees import leaves_by_path
from qwen3next_jax.config import (
    Config,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.model.adapter_names import base_params, is_adapter
from qwen3next_jax.model.adapters import merge_adapters, merged_model
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from tests.in_process import resolved, shared_step
from tests.models import HYBRID, drawn_model
from tests.refusals import refused

LORA = LoRAConfig(rank=2, alpha=3.0)
# Gated DeltaNet and gated attention, experts and a shared expert, MTP
MODEL = dataclasses.replace(HYBRID, mtp_depth=1, lora=LORA)
CONFIG = Config(
    model=dataclasses.replace(MODEL, num_hidden_layers=1, mtp_depth=0, full_attention_interval=1),
    train=TrainConfig(steps=8, batch_size=8, sequence_length=16),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"),
)


def with_(config=CONFIG, **groups):
    """`config` with other values in some groups of settings."""
    return dataclasses.replace(
        config,
        **{name: dataclasses.replace(getattr(config, name), **g) for name, g in groups.items()},
    )


def randomised(params, seed=0):
    """Adapters start with B = 0; here nothing is 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), params)


@pytest.mark.slow
def test_matrices_are_merged_part_by_part():
    params = randomised(nnx.state(drawn_model(MODEL), nnx.Param))
    before, after = (
        {path: np.asarray(leaf, np.float64) for path, leaf in leaves_by_path(p).items()}
        for p in (
            nnx.to_pure_dict(params),
            nnx.to_pure_dict(merge_adapters(params, LORA)),
        )
    )
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert not any(map(is_adapter, changed))

    def change(path):
        return after[path] - before[path]

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-6)

    slab = "layers/0/mixer/in_proj_qkvz"  # [layer, D, key heads, q 8 | k 8 | v 16 | z 16]
    columns = {"q": slice(0, 8), "k": slice(8, 16), "v": slice(16, 32), "z": slice(32, 48)}
    for part, own in columns.items():
        a, b = (before[f"{slab}_lora/{part}/{x}"][0] for x in "ab")
        for head in range(2):
            close(change(slab)[0, :, head, own], 1.5 * a @ b[:, head])
    experts = "layers/1/mlp/expert_gate_up"  # [layer, expert, D, gate and up, I]
    for expert in range(4):
        for i in range(2):
            a, b = before[experts + "_lora/a"][0, expert], before[experts + "_lora/b"][0, expert]
            close(change(experts)[0, expert, :, i], 1.5 * a[:, i] @ b[:, i])
    out = "mtp/block/mixer/o_proj"  # [heads, K, D]
    a, b = (before[f"{out}_lora/{x}"] for x in "ab")
    close(change(out).reshape(32, 16), 1.5 * a.reshape(32, 2) @ b)


@pytest.mark.slow
def test_merged_model_has_the_logits_of_the_unmerged():
    model = drawn_model(MODEL)
    nnx.update(model, randomised(nnx.state(model, nnx.Param)))
    merged, tokens = merged_model(model), np.random.default_rng(0).integers(0, 32, (2, 16))
    assert merged.config == dataclasses.replace(MODEL, lora=LoRAConfig())
    run = nnx.jit(lambda model, tokens: model(tokens))
    for a, b in zip(jax.tree.leaves(run(model, tokens)), jax.tree.leaves(run(merged, tokens))):
        np.testing.assert_allclose(a, b, atol=1e-5)


def batch(run, seed=0):
    tokens = np.random.default_rng(seed).integers(1, 32, (8, 16)).astype(np.int32)
    rows = {"tokens": tokens, "segment_ids": np.ones((8, 16), np.int32)}
    return jax.device_put(rows, batch_sharding(run.mesh))


def trained(config, steps, mesh=None, params=None, seeds=lambda step: step):
    run = resolved(config, mesh)
    step, state = shared_step(run, *run.stages), run.init_state(params)
    for i in range(steps):
        state, metrics = step(state, batch(run, seeds(i)))
    return jax.device_get(state), jax.device_get(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_eight_devices_train_the_adapters_that_one_trains(name):
    config = with_(CONFIG, optimizer={"name": name})
    parallel = ParallelConfig(mesh=MeshConfig(data=2, expert=2, tensor=2))
    mesh = make_mesh(parallel, jax.devices()[:8])
    first = jax.device_get(resolved(config).init_state()["params"])
    params = jax.device_get(randomised(first))
    one, _ = trained(config, 2, None, params)
    many, _ = trained(dataclasses.replace(config, parallel=parallel), 2, mesh, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), one, many)
    jax.tree.map(np.testing.assert_array_equal, base_params(many["params"]), base_params(params))
    moved = leaves_by_path(jax.tree.map(lambda a, b: np.any(a != b), many["params"], dict(params)))
    assert all(changed == is_adapter(path) for path, changed in moved.items())
    # no optimizer state of the base
    sizes = [leaf.size for leaf in jax.tree.leaves(one["opt_state"])]
    adapters = sum(x.size for path, x in leaves_by_path(first).items() if is_adapter(path))
    assert sum(sizes) <= 2 * adapters + 4


@pytest.mark.slow
def test_adapters_of_full_rank_fit_what_the_matrices_fit():
    """60 steps on one batch: the full run trains the same matrices."""
    model = dataclasses.replace(
        CONFIG.model, num_experts=0, intermediate_size=16, num_key_value_heads=2
    )
    full = with_(
        dataclasses.replace(CONFIG, model=dataclasses.replace(model, lora=LoRAConfig())),
        train={"freeze": ("kind!=matrix",)},
    )
    rank = LoRAConfig(rank=16, alpha=16.0)
    lora = dataclasses.replace(CONFIG, model=dataclasses.replace(model, lora=rank))
    base = jax.device_get(randomised(resolved(full).init_state()["params"]))
    losses = [trained(c, 60, None, base, lambda i: 0)[1]["loss"] for c in (full, lora)]
    start = trained(full, 1, None, base, lambda i: 0)[1]["loss"]
    assert losses[0] < start - 0.5
    assert losses[1] < losses[0] + 0.1 * (start - losses[0])


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ("kind=norm",)},
        {"targets": ("embedding",)},
        {"targets": ("name=*/no_proj",)},
        {"rank": 17, "targets": ("name=*/k_proj",)},  # 16 × 16
        {"targets": ("name=*/q_proj layer=0",), "layers": 2},  # half of a stack
        {"rank": 0, "alpha": 4.0},
    ],
)
def test_vectors_and_ranks_above_the_matrix_are_refused(lora):
    layers = lora.pop("layers", 1) if "layers" in lora else 1
    with refused():
        model = dataclasses.replace(
            CONFIG.model, num_hidden_layers=layers, lora=LoRAConfig(**{"rank": 2} | lora)
        )
        resolved(dataclasses.replace(CONFIG, model=model))
