"""Muon against optax's own, parts of slabs against matrices of their own, eight devices against
one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from qwen3next_jax.config import (
    MeshConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    ParallelConfig,
)
from qwen3next_jax.config.registry import MIXERS
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.parameters import Make, ParameterDeclaration, declared_tree
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import tree_shardings
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.optimizers import muon
from qwen3next_jax.training.optimizers.muon import orthogonalised

MUON = OptimizerConfig(name="muon", learning_rate=0.1, warmup_steps=3, clip_norm=0.0)


def matrix(shape, dims, stack=(), **decisions):
    return (
        Make(ModelConfig(), None, stack)
        .parameter(jnp.zeros, shape, dims, kind="matrix", **decisions)
        .declared
    )


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def reference(x, rows, columns):
    """Newton–Schulz in float64 of the one matrix in `x` (layers, heads and the like taken out)."""
    y = np.asarray(x, np.float64).reshape(rows, columns)
    y = y / np.linalg.norm(y)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return 0.2 * max(rows, columns) ** 0.5 * y.reshape(x.shape)


def theirs(name, declared, rate, dtype):
    """The same by optax alone."""
    adamw = optax.adamw(
        rate,
        b1=MUON.beta1,
        b2=MUON.beta2,
        weight_decay=0.1,
        mask=lambda params: {key: key != "norm" for key in params},
        mu_dtype=dtype,
    )
    if name == "adamw":
        return optax.chain(optax.identity(), adamw)
    return optax.partition(
        {  # its muon would give the rest AdamW with Nesterov's momentum
            "muon": optax.contrib.muon(rate, weight_decay=0.1, consistent_rms=0.2, mu_dtype=dtype),
            "adamw": adamw,
        },
        {key: "muon" if one.kind == "matrix" else "adamw" for key, one in declared.items()},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, tolerance", [("adamw", 0.0), ("muon", 1e-6)])
def test_both_are_those_of_optax(name, tolerance, dtype):
    declared = {
        "wide": matrix((6, 10), "embed -> mlp"),
        "tall": matrix((12, 5), "embed -> mlp"),
        "norm": ParameterDeclaration("norm", (7,), (), (None,)),
        "embedding": ParameterDeclaration("embedding", (9, 6), (), ("vocab", "embed")),
    }
    config = dataclasses.replace(MUON, name=name, decay_norm_weights=False, mean_dtype=dtype)
    schedule = learning_rate_schedule(config, 8)
    optimizers = (
        make_optimizer(config, declared, schedule),
        theirs(name, declared, schedule, dtype),
    )

    @jax.jit
    def trained(params):
        states, both = [optimizer.init(params) for optimizer in optimizers], [params, params]
        for seed in range(5):
            grads = {
                name: random(*one.shape, seed=(seed, len(name))) for name, one in declared.items()
            }
            for i, optimizer in enumerate(optimizers):
                updates, states[i] = optimizer.update(grads, states[i], both[i])
                both[i] = optax.apply_updates(both[i], updates)
        return both, states

    (mine, its), states = trained({name: random(*one.shape) for name, one in declared.items()})
    for key in declared:
        np.testing.assert_allclose(mine[key], its[key], rtol=tolerance, atol=tolerance, err_msg=key)
    kept = [x.dtype for x in jax.tree.leaves(states[0]) if x.ndim and x.dtype != jnp.float32]
    assert len(kept) == (len(declared) if dtype == "bfloat16" else 0)
    # as checkpoints hold it
    assert name == "muon" or jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.parametrize("per_head", [False, True])
def test_parts_of_a_slab_are_matrices(per_head):
    declared = {
        "qkvz": matrix(
            (6, 2, 14), "embed -> key_heads .", (3,), parts=(("q", 4), ("k", 4), ("v", 6, 2))
        ),
        "out": matrix((4, 3, 6), "value_heads . -> embed", (3,)),
        "gate_up": matrix((2, 6, 2, 5), "experts | embed -> * mlp", (3,)),
    }
    config = dataclasses.replace(MUON, muon=MuonConfig(per_head=per_head))
    tree = {name: random(*one.stack_shape, *one.shape) for name, one in declared.items()}
    done = jax.jit(lambda tree: orthogonalised(tree, declared, config, None))(tree)
    expected = {name: np.zeros(x.shape) for name, x in tree.items()}

    def one(name, index, rows, columns):
        expected[name][index] = reference(tree[name][index], rows, columns)

    for layer in range(3):
        values = (slice(8, 11), slice(11, 14)) if per_head else (slice(8, 14),)
        for part in (slice(0, 4), slice(4, 8), *values):
            for heads in (slice(0, 1), slice(1, 2)) if per_head else (slice(None),):
                one(
                    "qkvz",
                    (layer, slice(None), heads, part),
                    6,
                    (1 if per_head else 2) * (part.stop - part.start),
                )
        for heads in range(4) if per_head else (slice(None),):
            one("out", (layer, heads), 3 if per_head else 12, 6)
        for expert in range(2):
            for p in range(2):
                one("gate_up", (layer, expert, slice(None), p), 6, 5)
    for name in tree:
        np.testing.assert_allclose(done[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_no_mixer_has_two_heads_in_one_matrix():
    """Twice as many value heads for each key head make no matrix larger, and the update of each
    is Muon's of that head alone.
    """

    def matrices(name, heads):
        config = ModelConfig(
            hidden_size=24,
            linear_num_key_heads=2,
            linear_num_value_heads=heads,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
        layer = nnx.eval_shape(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,)))
        slabs = declared_tree(nnx.state(layer, nnx.Param))
        return {key: one for key, one in slabs.items() if one.kind == "matrix"}

    def sizes(slabs):
        return {
            tuple(sorted(muon._layout(one, width, True, None).shape[-2:]))
            for one in slabs.values()
            for width in muon._part_widths(one, True)
        }

    for name in MIXERS:
        assert sizes(matrices(name, 4)) == sizes(matrices(name, 2)), name

    # [q | k | v v | z z] and [b b | a a] of each of two key heads
    edges = {"in_proj_qkvz": range(0, 49, 8), "in_proj_ba": range(5)}
    slabs = {name: one for name, one in matrices("gated_deltanet", 4).items() if name in edges}
    tree = {name: random(*one.shape) for name, one in slabs.items()}
    config = dataclasses.replace(MUON, muon=MuonConfig(per_head=True))
    done = jax.jit(lambda tree: orthogonalised(tree, slabs, config, None))(tree)
    for name, of_parts in edges.items():
        for head in range(2):
            for start, end in zip(of_parts, of_parts[1:]):
                one = (slice(None), head, slice(start, end))
                np.testing.assert_allclose(
                    done[name][one],
                    reference(tree[name][one].T, end - start, 24).T,
                    rtol=1e-4,
                    atol=1e-5,
                )


@pytest.mark.slow
def test_eight_devices_divide_muon_s_products():
    declared = {
        "qkvz": matrix(
            (16, 2, 12), "embed -> key_heads .", (3,), parts=(("q", 4), ("k", 4), ("v", 4, 2))
        ),
        "k_proj": matrix((16, 1, 8), "embed -> key_value_heads head_width"),
        "out": matrix((4, 3, 16), "value_heads . -> embed", (3,)),
        "gate_up": matrix((4, 16, 2, 12), "experts | embed -> * mlp", (3,)),
        "down": matrix((4, 12, 16), "experts | mlp -> embed", (3,)),
    }
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, expert=2, tensor=2)), jax.devices()[:8])
    tree = {name: random(*one.stack_shape, *one.shape) for name, one in declared.items()}
    lies = tree_shardings(tree, declared, mesh)

    def done(mesh):
        return lambda tree: [
            orthogonalised(
                tree, declared, dataclasses.replace(MUON, muon=MuonConfig(per_head=per_head)), mesh
            )
            for per_head in (False, True)
        ]

    one = jax.jit(done(None)).lower(tree).compile()
    eight = (
        jax.jit(done(mesh), in_shardings=(lies,), out_shardings=[lies, lies]).lower(tree).compile()
    )
    found = jax.device_get(eight(jax.device_put(tree, lies)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, one(tree)
    )
    # 1/8 each, and what stacks are padded with to a multiple of 8; whole matrices, none of whose
    # products is summed over devices.
    assert eight.cost_analysis()["flops"] < one.cost_analysis()["flops"] / 8 * 1.5
    assert "all-to-all(" in eight.as_text()
    assert "all-reduce(" not in eight.as_text()
