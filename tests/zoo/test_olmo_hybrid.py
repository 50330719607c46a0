"""Olmo Hybrid as a whole model: norms before recurrent layers and behind attention, β up to 2, one
norm over all queries or keys. test_reference.py compares it with transformers'.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from models import drawn_model

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MeshConfig, MixerConfig, ModelConfig, ParallelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.interop.layout import check_hf_form
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding, storage_spec

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    partial_rotary_factor=0.0,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    beta_range=2,
    decay_init="log_uniform",
    num_experts=0,
    intermediate_size=24,
    mtp_depth=0,
    attention_output_gate=False,
    zero_centered_norm=False,
    block=BlockConfig(placement="olmo_hybrid"),
    mixer=MixerConfig(qk_norm_over="layer", output_norm_eps=1e-5),
    max_position_embeddings=64,
    dtype="float32",
    initializer_range=0.3,
    hf_form="olmo_hybrid",
)
T = 24
TOKENS = np.random.default_rng(0).integers(0, 32, (2, T)).astype(np.int32)
SEGMENTS = np.repeat([[1, 2, 3]], (7, 1, 16), axis=1).repeat(2, axis=0).astype(np.int32)


@pytest.mark.slow
def test_packed_documents_are_as_separate_ones_and_the_cache_continues_them():
    check_hf_form(CONFIG)
    graph, params = nnx.split(drawn_model(CONFIG))
    run = jax.jit(lambda tokens, ids: nnx.merge(graph, params)(tokens, ids).logits)
    whole, packed = run(TOKENS, np.ones_like(TOKENS)), run(TOKENS, SEGMENTS)
    last = run(np.roll(TOKENS, -8, axis=1), np.ones_like(TOKENS))[:, : T - 8]
    np.testing.assert_allclose(packed[:, :7], whole[:, :7], rtol=0, atol=5e-5)
    np.testing.assert_allclose(packed[:, 8:], last, rtol=0, atol=5e-5)
    assert np.abs(packed[:, 8:] - whole[:, 8:]).max() > 1e-2  # the past matters

    @jax.jit
    def step(tokens, places, cache):
        model = nnx.merge(graph, params)
        x, cache = model.decode(tokens, places, cache)
        return model.logits(x), cache

    cache, logits = nnx.merge(graph, params).init_cache(2, T), []
    for part in (slice(0, 20), *(slice(t, t + 1) for t in range(20, T))):
        places = jnp.broadcast_to(jnp.arange(T)[part], TOKENS[:, part].shape)
        of_part, cache = step(TOKENS[:, part], places, cache)
        logits.append(of_part)
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), whole, rtol=0, atol=5e-5)


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives():
    model = drawn_model(CONFIG)
    graph, params = nnx.split(model)
    axes = MeshConfig(data=2, context=2, tensor=2)
    mesh = make_mesh(ParallelConfig(mesh=axes), jax.devices()[:8])

    def gradient(mesh):
        def loss(params, tokens):
            model = nnx.merge(graph, params)
            return jnp.sum(jnp.sin(model.features(tokens, SEGMENTS, mesh=mesh).hidden))

        return jax.jit(jax.value_and_grad(loss))

    placed = jax.tree.map(
        lambda p: p.replace(
            jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    one = gradient(None)(params, TOKENS)
    many = gradient(mesh)(placed, jax.device_put(TOKENS, batch_sharding(mesh)))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * largest), one, many
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": MixerConfig(qk_norm_over="layer")},
        {"block": BlockConfig()},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ("linear_attention",) * 2, "mixer": MixerConfig(output_norm_eps=1e-5)},
        {"attention_output_gate": True},
        {"layer_types": ("kda", "full_attention")},
        {"hf_form": "qwen3_next"},
        {"hf_form": "qwen3_5_text"},
    ],
    ids=str,
)
def test_what_a_form_cannot_store_is_refused(changes):
    with pytest.raises(UserError) as error:
        check_hf_form(dataclasses.replace(CONFIG, **changes))
    assert "\n" not in str(error.value)
