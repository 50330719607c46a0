"""Routers beside the released one: experts and weights against DeepSeek-V3's rule in NumPy, and
the bias that the load moves.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.config import Config, TrainConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.moe import choose_experts
from qwen3next_jax.model.router import BINS, required_bias_histogram
from qwen3next_jax.training.router_bias import balance_by_sign, quantile_biases
from tests.models import HYBRID
from tests.refusals import refused

MODEL = dataclasses.replace(
    HYBRID,
    num_hidden_layers=5,
    num_experts=8,
    mlp_only_layers=(0,),
    mtp_depth=1,
    moe=MoEConfig(scoring_func="sigmoid", router_bias=True),
)


def expected(config, logits, bias):
    """(experts, weights) of one token, as 2412.19437 (section 2.1.2) has them."""
    c = config.moe
    scores = (
        1 / (1 + np.exp(-logits))
        if c.scoring_func == "sigmoid"
        else np.exp(logits) / np.exp(logits).sum()
    )
    ranks = scores + bias
    groups = ranks.reshape(c.n_group, -1)
    best = np.argsort(-np.sort(groups)[:, -2:].sum(axis=1))[: c.topk_group]
    allowed = [e for e in range(len(ranks)) if e // groups.shape[1] in best]
    experts = sorted(allowed, key=lambda e: -ranks[e])[: config.num_experts_per_tok]
    weights = scores[experts] / (scores[experts].sum() + 1e-20 if config.norm_topk_prob else 1)
    return experts, weights * c.routed_scaling_factor


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_and_weights_are_those_of_the_rule(scoring, groups, biased):
    config = dataclasses.replace(
        MODEL,
        norm_topk_prob=biased != (groups[0] == 4),
        moe=MoEConfig(
            scoring_func=scoring,
            router_bias=biased,
            n_group=groups[0],
            topk_group=groups[1],
            routed_scaling_factor=1 + 1.5 * biased,
        ),
    )
    rng = np.random.default_rng(groups[0])
    logits, bias = (
        rng.normal(size=(40, 8)).astype(np.float32),
        0.3 * biased * rng.normal(size=8).astype(np.float32),
    )
    logits[:3] -= 46  # of a sigmoid 1e-20
    shares, weights, experts = map(
        np.asarray,
        choose_experts(config, jnp.asarray(logits), jnp.asarray(bias) if biased else None),
    )
    np.testing.assert_allclose(np.sum(shares[3:], axis=1), 1, rtol=1e-6)
    for token in range(40):
        of_token, of_them = expected(config, logits[token].astype(np.float64), bias)
        assert experts[token].tolist() == of_token
        np.testing.assert_allclose(weights[token], of_them, rtol=1e-5)
    # scores that vanish: neither 0 / 0 nor a gradient of it
    if config.norm_topk_prob and scoring == "sigmoid" and groups == (1, 1):
        outputs, pullback = jax.vjp(
            lambda logits: choose_experts(config, logits, jnp.asarray(bias))[:2],
            jnp.asarray(logits - 200),
        )
        assert not any(np.any(np.asarray(x) != 0) for x in (*outputs, *pullback(outputs)))


@pytest.mark.slow
def test_the_bias_follows_the_load_layer_by_layer():
    """Five layers, the first dense, the others stacked in pairs, and the prediction module's."""
    assert MODEL.layer_stacks == ((0,), (1, 3), (2, 4))
    params = {}
    counts = np.random.default_rng(0).multinomial(3_000_001, np.ones(8) / 8, size=5)
    counts[2] = 375_000  # balanced: nothing moves
    load = jnp.asarray(counts / counts.sum(axis=1, keepdims=True) * 8, jnp.float32)
    for path, parameter in parameter_declarations(MODEL).items():
        *groups, name = path.split("/")
        place = params
        for group in groups:
            place = place.setdefault(int(group) if group.isdecimal() else group, {})
        place[name] = jnp.zeros(parameter.stack_shape + parameter.shape)
    after = balance_by_sign(MODEL, params, load, rate=0.01)
    moves = 0.01 * np.sign(counts.mean(axis=1, keepdims=True) - counts)
    for place, rows in (
        (after["layers"][1], [0, 2]),
        (after["layers"][2], [1, 3]),
        (after["mtp"]["block"], 4),
    ):
        np.testing.assert_array_equal(place["mlp"].pop("router_bias"), np.float32(moves[rows]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(after))
    assert not any(
        p.decays(True) for p in parameter_declarations(MODEL).values() if p.kind == "balance"
    )


def _skewed_scores(tokens):
    """Scores [tokens, 8] of which some experts get most, and the mask of 9 tokens in 10."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(tokens, 8)) + np.linspace(-2, 2, 8)
    return (1 / (1 + np.exp(-logits))).astype(np.float32), rng.random(tokens) < 0.9


_count = jax.jit(required_bias_histogram, static_argnums=2)
_quantile = jax.jit(quantile_biases, static_argnums=2)


def test_the_histogram_gives_the_quantile_of_the_required_biases():
    scores, mask = _skewed_scores(1000)
    bias = np.linspace(0.3, -0.3, 8).astype(np.float32)
    # padding does not count, and the counts of micro-batches add up
    counts = _count(scores, bias, 2, mask)
    assert counts.dtype == jnp.int32
    assert np.all(np.sum(counts, axis=1) == mask.sum())
    first = _count(scores, bias, 2, mask & (np.arange(1000) < 300))
    np.testing.assert_array_equal(
        counts, first + _count(scores, bias, 2, mask & (np.arange(1000) >= 300))
    )

    cutoff = np.sort(scores + bias, axis=1)[:, -3, None]
    exact = np.quantile((cutoff - scores)[mask], 2 / 8, axis=0, method="inverted_cdf")
    width = (2 + bias.max() - bias.min()) / BINS
    got = np.asarray(_quantile(counts[None], bias[None], 2 / 8))[0]
    # one bin for the quantile, and at most one for the mean that is subtracted
    np.testing.assert_allclose(got, exact - exact.mean(), rtol=0, atol=2 * width)
    # a layer without tokens keeps its biases
    empty = _quantile(np.zeros((1, 8, BINS), np.int32), bias[None], 2 / 8)
    np.testing.assert_array_equal(empty[0], bias)


def test_quantile_balancing_evens_out_the_load():
    scores, mask = _skewed_scores(2000)
    bias, loads = np.zeros(8, np.float32), []
    for _ in range(20):
        experts = np.argsort(scores + bias, axis=1)[mask, -2:]
        loads.append(np.bincount(experts.ravel(), minlength=8) / (mask.sum() * 2 / 8))
        counts = _count(scores, bias, 2, mask)
        bias = np.asarray(_quantile(counts[None], bias[None], 2 / 8))[0]
    assert loads[0].max() > 2
    # Each bias is wrong by less than a bin, and the difference of two by less than two bins. The
    # bin of the bias itself is left out: it holds the tokens whose next expert this is.
    width = (2 + bias.max() - bias.min()) / BINS
    own = ((bias - (bias.min() - 1)) / width).astype(int)[:, None]
    near = np.take_along_axis(np.asarray(counts), own + [-1, 1], axis=1)
    np.testing.assert_allclose(loads[-1], 1, rtol=0, atol=2 * near.max() / (mask.sum() * 2 / 8))


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({"moe": MoEConfig()}, {}),
        ({}, {"router_bias_rate": 0.01}),
        ({"moe": MoEConfig(router_bias=True, n_group=2)}, {}),
        ({"num_experts_per_tok": 8}, {}),
    ],
    ids=("no bias", "rate", "groups", "all experts"),
)
def test_settings_that_quantile_balancing_does_not_fit(model, train):
    with refused("router_bias_update"):
        Config(
            model=dataclasses.replace(MODEL, **model),
            train=TrainConfig(router_bias_update="quantile", sequence_length=64, **train),
        )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"moe": MoEConfig(n_group=3)},
            ("model.moe.n_group = 3", "model.num_experts = 8"),
        ),
        (
            {"moe": MoEConfig(n_group=4, topk_group=5)},
            ("model.moe.topk_group = 5", "1", "model.moe.n_group = 4"),
        ),
        (
            {"moe": MoEConfig(n_group=4), "num_experts_per_tok": 3},
            ("model.num_experts_per_tok = 3", "2"),
        ),
        (
            {"num_experts": 0, "intermediate_size": 8},
            ("model.moe.scoring_func = 'sigmoid'", "'softmax'"),
        ),
        (
            {"shared_expert_intermediate_size": 0, "moe": MoEConfig(shared_expert_gate=False)},
            ("model.moe.shared_expert_gate = False",),
        ),
    ],
)
def test_settings_that_fit_no_router(settings, names):
    with refused(*names):
        dataclasses.replace(MODEL, **settings)
