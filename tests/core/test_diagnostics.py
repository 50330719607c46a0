"""What is measured per layer, against the same numbers computed the long way round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import Config, MeshConfig, ParallelConfig, TrainConfig
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.layers import Context, ForwardOptions, document_positions, rms_norm, rotate
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from qwen3next_jax.training.diagnostics import diagnostics_event_fields, make_diagnostics_step
from qwen3next_jax.training.state import abstract_model
from tests.in_process import resolved
from tests.models import HYBRID, numpy_draws

MODEL = dataclasses.replace(HYBRID, num_hidden_layers=4, mtp_depth=1, initializer_range=0.5)
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(steps=2, batch_size=4, sequence_length=32, gradient_accumulation=2),
)
SEGMENTS = np.sort(np.random.default_rng(1).integers(1, 4, (4, 32)), axis=1) * (
    np.arange(32) < np.array([[32], [20], [25], [7]])
)
BATCH = {
    "tokens": jnp.asarray(np.random.default_rng(0).integers(0, 63, (4, 32)), jnp.int32),
    "segment_ids": jnp.asarray(SEGMENTS, jnp.int32),
}

COLLECT = ForwardOptions(collect_stats=True)


@pytest.fixture(scope="module")
def measured():
    graphdef, _ = abstract_model(CONFIG.model)
    with numpy_draws():
        params = resolved(CONFIG).init_state()["params"]
    step = make_diagnostics_step(CONFIG.model, graphdef, CONFIG.train.gradient_accumulation)
    return graphdef, params, step, jax.device_get(step(params, BATCH))


def test_attention_is_measured_as_the_explicit_scores_say():
    layer = GatedAttention(MODEL, Make(MODEL, nnx.Rngs(0)), (0,))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 16)), jnp.float32)
    segments = BATCH["segment_ids"]
    context = Context(document_positions(segments), segments, segments > 0, options=COLLECT)
    diagnostics = jax.jit(lambda x: layer(x, context)[1])(x)

    @jax.jit
    def explicit(x):
        query, gate = jnp.split(jnp.einsum("btd,dnk->btnk", x, layer.q_proj[...]), 2, axis=-1)
        key = jnp.einsum("btd,dmk->btmk", x, layer.k_proj[...])
        query, key = (
            rotate(rms_norm(a, jnp.zeros(8), MODEL), context.positions, MODEL) for a in (query, key)
        )
        scores = jnp.einsum("btnk,bsnk->bnts", query, jnp.repeat(key, 2, axis=2)) * 8**-0.5
        seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((32, 32), bool))
        scores = jnp.where(seen[:, None], scores, -1e30)
        return jax.nn.softmax(scores), jax.nn.sigmoid(gate), scores

    probability, gate, scores = jax.device_get(explicit(x))
    positions = np.asarray(context.positions)
    shares = [
        probability[b, :, t, t - positions[b, t]]
        for b in range(4)
        for t in range(32)
        if segments[b, t] > 0 and positions[b, t] > 0
    ]
    np.testing.assert_allclose(diagnostics["first_token_share"], np.mean(shares, axis=0), rtol=1e-5)
    assert 0.05 < np.mean(shares) < 0.95
    counted = np.where(np.asarray(segments > 0)[:, None, :, None], scores, -np.inf)
    np.testing.assert_allclose(diagnostics["logit_max"], counted.max(axis=(0, 2, 3)), rtol=1e-3)
    # padding's would be larger
    assert (scores.max(axis=(0, 2, 3)) > 1.01 * counted.max(axis=(0, 2, 3))).any()
    open_gates = gate[np.asarray(segments) > 0]
    np.testing.assert_allclose(diagnostics["gate_mean"], open_gates.mean(), rtol=1e-5)
    np.testing.assert_allclose(diagnostics["gate_closed"], (open_gates < 0.1).mean(), rtol=1e-5)


@pytest.mark.slow
def test_norms_are_those_of_each_layer_in_order(measured):
    _, params, _, result = measured
    params, norms = jax.device_get(params), result["param_norms"]

    def norm_of(tree):
        return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))

    for layer in range(4):
        mine = jax.tree.map(lambda leaf: leaf[layer // 2], params["layers"][layer % 2])
        np.testing.assert_allclose(norms["layers"][layer], norm_of(mine), rtol=1e-6)
    np.testing.assert_allclose(norm_of(norms), norm_of(params), rtol=1e-6)
    # as they start: only the recurrent layers' output norm is not 0
    assert result["norm_weights"].tolist() == [1, 0, 1, 0, 0]


@pytest.mark.slow
def test_padding_has_no_part_in_diagnostics(measured):
    _, params, step, result = measured
    load = np.array([[2, 1, 1, 0], [1, 1, 1, 1], [4, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    record = diagnostics_event_fields(result, result["param_norms"], load)
    assert record["dead_experts"] == [1, 0, 3, 0, 0]
    assert record["load_max_violation"] == [
        1,
        0,
        3,
        0,
        0,
    ]
    kinds = [name for name, _ in MODEL.mixers_and_sparsity]
    for name, owner in (("beta", "gated_deltanet"), ("gate_mean", "gated_attention")):
        assert [value is not None for value in record[name]] == [kind == owner for kind in kinds]
    assert set(record["groups"]) == {"embedding", "final_norm", "head"}

    # The micro-batch is rows 0 and 2: other tokens in other rows change nothing, nor do huge ones
    # in the padding.
    params = params | {"embedding": params["embedding"].at[63].multiply(1e3)}
    moved = jnp.where(BATCH["segment_ids"] > 0, BATCH["tokens"].at[1].set(0).at[3].set(0), 63)
    one, other = (
        jax.device_get(step(params, BATCH | {"tokens": tokens}))
        for tokens in (BATCH["tokens"], moved)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_a_mesh_measures_the_same(measured):
    """2 × 2 devices over rows and heads against one, the same numbers in every process's reach."""
    graphdef, params, _, result = measured
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(mesh=MeshConfig(data=2, tensor=2)))
    mesh = make_mesh(config.parallel, jax.devices()[:4])
    placed = jax.device_put(
        params,
        resolved(config, mesh).state_shardings["params"],
    )
    again = make_diagnostics_step(config.model, graphdef, config.train.gradient_accumulation, mesh)(
        placed, jax.device_put(BATCH, batch_sharding(mesh))
    )
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(again))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(again),
        result,
    )


@pytest.mark.slow
def test_activations_are_those_of_the_hidden_states(measured):
    graphdef, params, _, result = measured
    model = nnx.merge(graphdef, params)
    rows = {name: array[::2] for name, array in BATCH.items()}
    states = jax.jit(
        lambda rows: (
            model.features(
                rows["tokens"],
                rows["segment_ids"],
                options=ForwardOptions(capture_layer_outputs=True),
            ).layer_outputs
        )
    )(rows)
    inside = np.asarray(rows["segment_ids"]) > 0
    # the last state of the trunk is given after its norm
    for layer, x in zip(result["layers"][:3], states[1:4]):
        size = np.abs(np.asarray(x)[inside])
        np.testing.assert_allclose(layer["activation_max"], size.max(), rtol=1e-5)
        np.testing.assert_allclose(
            layer["activation_median"], np.median(size, axis=-1).mean(), rtol=1e-5
        )


@pytest.mark.slow
def test_decay_half_life_is_what_the_decay_does(measured):
    """With W_ba = 0 every g is -exp(A_log) · softplus(dt_bias): 4 tokens to halve."""
    _, params, step, _ = measured
    mixer = params["layers"][0]["mixer"]
    still = {
        "in_proj_ba": jnp.zeros_like(mixer["in_proj_ba"]),
        "dt_bias": jnp.ones_like(mixer["dt_bias"]),
        "a_log": jnp.full_like(mixer["a_log"], np.log(np.log(2) / 4 / np.log1p(np.exp(1.0)))),
    }
    params = params | {
        "layers": params["layers"] | {0: params["layers"][0] | {"mixer": mixer | still}}
    }
    layers = jax.device_get(step(params, BATCH))["layers"]
    for layer in (layers[0], layers[2]):
        np.testing.assert_allclose(layer["half_life"], 4.0, rtol=1e-5)
        np.testing.assert_allclose(layer["beta"], 0.5, rtol=1e-6)
