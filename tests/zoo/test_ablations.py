"""Each ablation switch does what its name says: both mixers against their formulas written out
token by token in NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import FULL, LINEAR
from qwen3next_jax.config.model import ABLATIONS
from qwen3next_jax.interop.huggingface import save_hf
from qwen3next_jax.model.flops import parameter_counts
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.gated_deltanet import GatedDeltaNet
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make
from tests.models import HYBRID, drawn_model
from tests.refusals import refused

BASE = dataclasses.replace(
    HYBRID,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_value_head_dim=4,
    num_experts=0,
    decay_init="log_uniform",
    initializer_range=0.3,
)
T = 9


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def recurrent_layer(c, p, x_TD):
    """One Gated DeltaNet layer of one key head (G = 1) and two value heads."""
    k, v, h = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_num_value_heads
    mixed = x_TD @ p["in_proj_qkvz"][:, 0]
    z, mixed = mixed[:, 2 * k + h * v :], mixed[:, : 2 * k + h * v]
    if c.short_convolution:
        padded = np.concatenate([np.zeros((3, mixed.shape[1])), mixed])
        mixed = sum(padded[w : w + T] * p["conv_kernel"][w, 0] for w in range(4))
    mixed = mixed * sigmoid(mixed)
    ba = x_TD @ p["in_proj_ba"][:, 0] if "in_proj_ba" in p else None
    out = np.zeros((T, h, v))
    for head in range(h):
        state = np.zeros((k, v))
        for t in range(T):
            q_t, k_t = unit(mixed[t, :k]) / np.sqrt(k), unit(mixed[t, k : 2 * k])
            v_t = mixed[t, 2 * k + head * v : 2 * k + (head + 1) * v]
            beta = sigmoid(ba[t, head]) if c.beta_gate else 1.0
            if c.decay_gate:
                a = ba[t, head + (h if c.beta_gate else 0)]
                state = state * np.exp(
                    -np.exp(p["a_log"][head]) * np.log1p(np.exp(a + p["dt_bias"][head]))
                )
            error = v_t - state.T @ k_t if c.delta_term else v_t
            state = state + beta * np.outer(k_t, error)
            out[t, head] = state.T @ q_t
    out = rms(out, p["norm"])
    if c.linear_output_gate:
        gate = z.reshape(T, h, v)
        out = out * gate * sigmoid(gate)
    return np.einsum("thv,hvd->td", out, p["out_proj"])


def attention_layer(c, p, x_TD):
    """One gated attention layer without positions (NoPE), two query heads over one key head."""
    q = np.einsum("td,dnk->tnk", x_TD, p["q_proj"])
    gate = q[..., c.head_dim :]
    q, k, v = q[..., : c.head_dim], x_TD @ p["k_proj"][:, 0], x_TD @ p["v_proj"][:, 0]
    if c.qk_norm:
        centre = 1.0 if c.zero_centered_norm else 0.0
        q, k = rms(q, centre + p["q_norm"]), rms(k, centre + p["k_norm"])
    scores = np.einsum("tnk,sk->nts", q, k) / np.sqrt(c.head_dim)
    weights = np.exp(np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf))
    out = np.einsum("nts,sk->tnk", weights / weights.sum(-1, keepdims=True), v)
    if c.attention_output_gate:
        out = out * sigmoid(gate)
    return np.einsum("tnk,nkd->td", out, p["o_proj"])


# All off, and each part of a mixer off alone: a part of one mixer changes nothing in the other.
# test_reference.py has the model with all its parts.
PARTS_OFF = (
    ABLATIONS,
    ("short_convolution", "attention_output_gate"),
    ("decay_gate", "qk_norm"),
    ("delta_term", "zero_centered_norm"),
    ("beta_gate",),
    ("linear_output_gate",),
)


def test_every_part_is_off_alone():
    assert {*ABLATIONS} == {part for off in PARTS_OFF[1:] for part in off}


@pytest.mark.parametrize(
    "off",
    [off if off == ABLATIONS else pytest.param(off, marks=pytest.mark.slow) for off in PARTS_OFF],
    ids="+".join,
)
def test_both_mixers_follow_their_formulas(off):
    config = dataclasses.replace(BASE, partial_rotary_factor=0.0, **dict.fromkeys(off, False))
    assert config.ablated == tuple(name for name in ABLATIONS if name in off)
    x_BTD = np.random.default_rng(0).standard_normal((1, T, config.hidden_size)).astype(np.float32)
    context = Context(jnp.arange(T, dtype=jnp.int32)[None])
    for kind, layer in ((GatedDeltaNet, recurrent_layer), (GatedAttention, attention_layer)):
        module = kind(config, Make(config, nnx.Rngs(1)), (0,))
        rng = np.random.default_rng(2)
        for name in ("q_norm", "k_norm", "norm"):  # not at their start, where some forms agree
            if hasattr(module, name):
                getattr(module, name)[...] = jnp.asarray(
                    rng.uniform(0.2, 0.8, getattr(module, name)[...].shape), jnp.float32
                )
        params = {
            name: np.asarray(value[...], np.float64)
            for name, value in vars(module).items()
            if isinstance(value, nnx.Param)
        }
        graph, state = nnx.split(module)
        y = jax.jit(lambda state, x: nnx.merge(graph, state)(x, context)[0])(state, x_BTD)
        np.testing.assert_allclose(
            y[0], layer(config, params, x_BTD[0].astype(np.float64)), rtol=0, atol=2e-5
        )


@pytest.mark.slow
def test_the_ablated_model_uses_all_its_parameters(tmp_path):
    config = dataclasses.replace(BASE, **dict.fromkeys(ABLATIONS, False))
    model = drawn_model(config)
    graphdef, params = nnx.split(model, nnx.Param)
    tokens = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.jit
    def run(params):
        model = nnx.merge(graphdef, params)
        hidden, _ = model.decode(tokens, tokens, model.init_cache(1, T))
        logits, pullback = jax.vjp(lambda p: nnx.merge(graphdef, p)(tokens).logits, params)
        return (
            model.logits(hidden),
            logits,
            *pullback(jax.grad(lambda x: jnp.sum(jax.nn.log_softmax(x)[..., 0]))(logits)),
        )

    decoded, logits, gradient = run(params)
    np.testing.assert_allclose(decoded, logits, rtol=0, atol=1e-5)
    for path, g in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(g).max() > 0, jax.tree_util.keystr(path)
    assert parameter_counts(config).total == sum(leaf.size for leaf in jax.tree.leaves(params))
    with refused("model.short_convolution = False"):
        save_hf(model, tmp_path / "hf")


@pytest.mark.slow
def test_without_positions_order_does_not_matter():
    x_BTD = np.random.default_rng(0).standard_normal((1, T, BASE.hidden_size)).astype(np.float32)
    context = Context(jnp.arange(T, dtype=jnp.int32)[None])

    def last(factor, x_BTD):
        config = dataclasses.replace(BASE, partial_rotary_factor=factor)
        return GatedAttention(config, Make(config, nnx.Rngs(1)), (0,))(x_BTD, context)[0][0, -1]

    swapped = x_BTD[:, [2, 1, 0, *range(3, T)]]
    np.testing.assert_allclose(last(0.0, x_BTD), last(0.0, swapped), atol=1e-5)
    assert np.abs(last(0.5, x_BTD) - last(0.5, swapped)).max() > 1e-3


@pytest.mark.parametrize(
    "placement, expected", [("last", "LLFLLF"), ("middle", "LFLLFL"), ("first", "FLLFLL")]
)
def test_placement_of_the_full_layer_in_its_interval(placement, expected):
    config = dataclasses.replace(
        BASE,
        num_hidden_layers=6,
        full_attention_interval=3,
        full_attention_placement=placement,
        layer_types=(),
    )
    assert config.resolved_layer_types == tuple(
        {"L": LINEAR, "F": FULL}[letter] for letter in expected
    )
