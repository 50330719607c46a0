"""`model.depth_scaled_init`, and `optimizer.scaling`: the table of 2203.03466 and 2505.01618, that
paper's own form of the model trained beside ours, and the sizes of activations over width and
depth.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import LoRAConfig, MuonConfig, OptimizerConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.registry import OPTIMIZERS, PLACEMENTS
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.runs.changes import may_change
from qwen3next_jax.training.optimizer import make_optimizer
from qwen3next_jax.training.parameter_groups import make_parameter_groups
from qwen3next_jax.training.scaling import ScalingFactors, scaling_factors
from tests.models import SMALLEST, drawn_model
from tests.refusals import refused

HEAD = 8
# Compiling takes nearly all of the time of these tests.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def model(width, layers=2, hybrid=True, **changes):
    """A model whose heads and MLPs grow with its width. Without recurrent layers it compiles in a
    fraction of the time.
    """
    heads = width // HEAD
    settings = dict(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        full_attention_interval=2 if hybrid else 1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
    )
    return dataclasses.replace(SMALLEST, **settings | changes)


def optimizer(name="adamw", scaling="completep", width=16, depth=2, **changes):
    base = {"none": {}, "mup": {"base_width": width}}
    base["completep"] = base["mup"] | {"base_depth": depth}
    settings = {"learning_rate": 1e-2, "clip_norm": 0.0, "weight_decay": 0.0}
    return OptimizerConfig(name=name, scaling=scaling, **base[scaling], **settings | changes)


def test_at_the_base_size_nothing_changes():
    config = model(16)
    for name in OPTIMIZERS:
        assert scaling_factors(config, optimizer(name), parameter_declarations(config)) == {}
        groups = make_parameter_groups(config, (), optimizer(name))
        assert not groups.init_scale_factors
        assert not groups.learning_rate_factors


def test_factors_are_those_of_the_papers():
    """Four times the width and twice the depth of the base."""
    config = model(
        64,
        4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mtp_depth=1,
    )
    parameters = parameter_declarations(config)
    adamw, muon = (
        scaling_factors(config, optimizer(name), parameters) for name in ("adamw", "muon")
    )
    rows = {
        "embedding": (ScalingFactors(), ScalingFactors()),
        "layers/1/mixer_norm": (ScalingFactors(), ScalingFactors()),
        "layers/0/mixer/a_log": (ScalingFactors(), ScalingFactors()),
        "layers/0/mixer/conv_kernel": (ScalingFactors(), ScalingFactors()),
        "head": (ScalingFactors(1 / 4, 1 / 4),) * 2,
        "layers/0/mlp/router": (ScalingFactors(1 / 4, 1 / 4),) * 2,
        "layers/0/mlp/shared_gate": (ScalingFactors(1 / 4, 1 / 4),) * 2,
        "layers/0/mixer/in_proj_qkvz": (ScalingFactors(1 / 2, 1 / 4), ScalingFactors(1 / 2, 1 / 2)),
        "layers/1/mixer/q_proj": (ScalingFactors(1 / 2, 1 / 4), ScalingFactors(1 / 2, 1 / 2)),
        "layers/0/mlp/expert_gate_up": (ScalingFactors(1 / 2, 1 / 4), ScalingFactors(1 / 2, 1 / 2)),
        "layers/0/mlp/expert_down": (ScalingFactors(1 / 4, 1 / 8), ScalingFactors(1 / 4, 1 / 4)),
        "layers/0/mixer/out_proj": (ScalingFactors(1 / 4, 1 / 8), ScalingFactors(1 / 4, 1 / 4)),
        "layers/1/mixer/o_proj": (ScalingFactors(1 / 4, 1 / 8), ScalingFactors(1 / 4, 1 / 4)),
        "mtp/block/mixer/o_proj": (ScalingFactors(1 / 2, 1 / 4), ScalingFactors(1 / 2, 1 / 2)),
    }
    for path, (of_adamw, of_muon) in rows.items():
        assert path in parameters
        assert adamw.get(path, ScalingFactors()) == pytest.approx(of_adamw), path
        assert muon.get(path, ScalingFactors()) == pytest.approx(of_muon), path
    decaying = optimizer(weight_decay=0.1)
    groups = make_parameter_groups(config, (), decaying)
    for path, factor in groups.learning_rate_factors.items():
        assert groups.weight_decays[path] * factor == pytest.approx(0.1)


def test_a_narrower_model_has_the_inverse_factors():
    """What a model of width 64 has for the base 16, and one of width 16 for the base 64."""
    for name in ("adamw", "muon"):
        wide, narrow = (
            scaling_factors(
                model(width),
                optimizer(name, width=80 - width),
                parameter_declarations(model(width)),
            )
            for width in (64, 16)
        )
        assert wide.keys() == narrow.keys()
        for path, factors in wide.items():
            inverse = ScalingFactors(*(1 / factor for factor in factors))
            assert narrow[path] == pytest.approx(inverse), path


def test_a_full_rank_does_not_grow():
    """The latent vector of MLA: its width is a setting of its own."""

    def latent(rank):
        mixer = {"latent_rank": rank, "shared_key_width": 4}
        config = model(64, full_mixer="mla", mixer=mixer)
        return scaling_factors(config, optimizer(), parameter_declarations(config))

    assert latent(64) == latent(65)
    rwkv = model(64, linear_mixer="rwkv4")
    found = scaling_factors(rwkv, optimizer(depth=2), parameter_declarations(rwkv))
    assert found["layers/0/mixer/key_proj"] == pytest.approx(ScalingFactors(1 / 2, 1 / 4))


def loss(graphdef, params, tokens):
    logits = nnx.merge(graphdef, params)(tokens[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens(seed, rows=4, length=17):
    return jnp.asarray(np.random.default_rng(seed).integers(1, 32, (rows, length)), jnp.int32)


@pytest.mark.slow
def test_completep_is_the_model_of_its_paper():
    """There the output of each block is divided by the depth and the logits by the width; of the
    parameters only the matrices in layers are scaled, starts by 1/√m and rates by 1/m. Three steps
    of both, with an eps that is nothing beside the gradients.
    """
    config, one = model(64, 4, hybrid=False), optimizer(eps=1e-30)
    m, l = 4, 2
    matrices = {
        path
        for path, declaration in parameter_declarations(config).items()
        if declaration.kind == "matrix"
    }
    divisors = {"head": m} | {path: l for path in matrices if path.endswith(("o_proj", "down"))}
    graphdef, drawn = nnx.split(drawn_model(config))
    drawn = nnx.to_pure_dict(drawn)

    def divided(params):
        return map_leaves(lambda path, leaf: leaf / divisors.get(path, 1), params)

    def trained(params, loss, factors):
        adam = make_optimizer(one, parameter_declarations(config), lambda _: 1e-2, None, factors)

        @jit
        def step(params, state, batch):
            updates, state = adam.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        state = adam.init(params)
        for i in range(3):
            params, state = step(params, state, tokens(i))
        return params

    groups = make_parameter_groups(config, (), one)
    start = groups.scale_initial_params(drawn)
    ours = trained(start, functools.partial(loss, graphdef), groups.learning_rate_factors)
    theirs = trained(
        map_leaves(lambda path, leaf: leaf * (m**-0.5 if path in matrices else 1), drawn),
        lambda params, batch: loss(graphdef, divided(params), batch),
        dict.fromkeys(matrices, 1 / m),
    )
    theirs, start = leaves_by_path(divided(theirs)), leaves_by_path(start)
    for path, leaf in leaves_by_path(ours).items():
        moved = np.abs(leaf - start[path]).max()
        assert np.abs(leaf - theirs[path]).max() < 0.02 * moved + 1e-7, path


def coordinates(config, one, steps=(1, 10)):
    """{step: root mean squares over all elements of what the steps added to the output of the last
    layer, before the final norm, and to the logits}.
    """
    groups = make_parameter_groups(config, (), one)
    graphdef, params = nnx.split(drawn_model(config))
    params = groups.scale_initial_params(nnx.to_pure_dict(params))
    updater = make_optimizer(
        one,
        parameter_declarations(config),
        lambda _: one.learning_rate,
        None,
        groups.learning_rate_factors,
        groups.weight_decays,
    )

    @jit
    def look(params):
        out = nnx.merge(graphdef, params)(tokens(99), output_hidden_states=True)
        return out.hidden_states[-2], out.logits

    @jit
    def step(params, state, batch):
        updates, state = updater.update(
            jax.grad(functools.partial(loss, graphdef))(params, batch), state, params
        )
        return optax.apply_updates(params, updates), state

    before, state, found = look(params), updater.init(params), {}
    for i in range(1, max(steps) + 1):
        params, state = step(params, state, tokens(0))
        if i in steps:
            now = look(params)
            found[i] = [float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in zip(now, before)]
    return found


def ratios(name, scaling, small, large):
    """How much larger the coordinates are in the large model, [steps, coordinates]."""
    found = [coordinates(config, optimizer(name, scaling)) for config in (small, large)]
    return np.array([np.array(found[1][step]) / found[0][step] for step in found[0]])


def check_width(name, hybrid):
    """Between widths 16 and 128 what is learned stays within a factor of √8, half of the way (in
    exponents) to the 8 by which the logits grow in the first step if every rate is kept.
    """
    within = ratios(name, "mup", model(16, hybrid=hybrid), model(128, hybrid=hybrid))
    assert (within < 8**0.5).all(), within
    assert (within > 8**-0.5).all(), within


@pytest.mark.slow
def test_activations_do_not_grow_with_the_width():
    check_width("adamw", hybrid=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_activations_of_a_hybrid_keep_their_size(name):
    check_width(name, hybrid=True)


@pytest.mark.slow
def test_without_scaling_activations_grow_with_the_width():
    grown = ratios("adamw", "none", model(16), model(128))
    assert grown[0, 1] > 8**0.5, grown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_activations_do_not_grow_with_the_depth(name):
    within = ratios(name, "completep", model(32, 2), model(32, 16))
    assert (within < 8**0.5).all(), within
    assert (within > 8**-0.5).all(), within


@pytest.mark.parametrize(
    "changes, of_optimizer, name",
    [
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings"),
        ({"block": BlockConfig("post")}, {}, "placement"),
        ({"lora": LoRAConfig(rank=2)}, {}, "model.lora"),
        ({}, {"name": "muon", "muon": MuonConfig(per_head=True)}, "per_head"),
        ({}, {"name": "mine"}, "rate_over_width"),
        ({"depth_scaled_init": True}, {}, "depth_scaled_init"),
    ],
    ids=("tied", "placement", "adapters", "per head", "own optimizer", "depth twice"),
)
def test_what_has_no_rule_is_refused(monkeypatch, changes, of_optimizer, name):
    monkeypatch.setitem(OPTIMIZERS, "mine", f"{__name__}:my_direction")
    config = dataclasses.replace(model(32), **changes)
    with refused(name):
        scaling_factors(config, optimizer(**of_optimizer), parameter_declarations(config))


@pytest.mark.parametrize(
    "scaling, settings, name",
    [
        ("mup", {}, "base_width = 0"),
        ("mup", {"base_width": -3}, "base_width = -3"),
        ("completep", {"base_width": 16}, "base_depth = 0"),
        ("mup", {"base_width": 16, "base_depth": 2}, "base_depth = 2"),
        ("none", {"base_width": 16}, "base_width = 16"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(scaling, settings, name):
    with refused(name):
        OptimizerConfig(scaling=scaling, **settings)


def test_a_run_keeps_its_scaling():
    assert not may_change("config.optimizer.scaling")
    assert not may_change("config.optimizer.base_width")


def test_starts_scaled_by_depth_are_those_of_gpt2():
    """What mixers and MLPs add to the residual stream starts 1 / √(2 · 4 layers) times as large."""
    plain = model(
        16,
        4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        mtp_depth=1,
    )
    plain = dataclasses.replace(plain, mlp_only_layers=(1,))
    last = ("o_proj", "out_proj", "down", "expert_down", "shared_down")
    parameters = {
        path.rpartition("/")[2]: one for path, one in parameter_declarations(plain).items()
    }
    assert {name for name, one in parameters.items() if one.writes_to_residual} == set(last)

    def start(config, dims):
        return Make(config, nnx.Rngs(0)).matrix((2, 2), dims)[...]

    scaled = dataclasses.replace(plain, depth_scaled_init=True)
    for dims, factor in (("mlp -> embed", 8**-0.5), ("embed -> mlp", 1.0)):
        np.testing.assert_allclose(start(scaled, dims), start(plain, dims) * factor, rtol=1e-6)


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "pre"])
def test_a_norm_or_gate_after_the_last_matrix_has_no_such_start(placement):
    with refused("depth_scaled_init", placement):
        model(16, block=BlockConfig(placement), depth_scaled_init=True)


def my_direction(config, declared, mesh):
    return optax.scale_by_sign()
