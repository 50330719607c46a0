"""What holds of every mixer of the table, and of the one that docs/extending.md adds to it."""

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from qwen3next_jax.config import FULL, LINEAR, Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.config.mixers import MIXERS
from qwen3next_jax.config.model import ABLATIONS
from qwen3next_jax.errors import UserError
from qwen3next_jax.interop.layout import check_hf_form
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.flops import flops_per_token, forward_flops_per_token, parameter_counts
from qwen3next_jax.model.layers import Context, document_positions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.parallel.mesh import make_mesh
from qwen3next_jax.parallel.rules import gather, storage_spec
from qwen3next_jax.training.step import abstract_train_state, batch_sharding, init_state, make_train_step

T, CUTS = 32, (0, 5, 6, 20, 32)
BASE = ModelConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                   linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
                   num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8, max_position_embeddings=64,
                   mtp_depth=0, dtype="float32", initializer_range=0.2)
PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "extending.md").read_text()
SEGMENTS = jnp.asarray(np.repeat(range(1, len(CUTS)), np.diff(CUTS))[None].repeat(2, axis=0), jnp.int32)


@pytest.fixture(scope="module", autouse=True)
def retention(tmp_path_factory):
    """The page's mixer as one file and one line; the tests below take it for one of the table's."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "my_mixer.py" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    folder = tmp_path_factory.mktemp("mixer")
    (folder / "my_mixer.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setitem(MIXERS, "retention", "my_mixer:Retention")
        yield
    sys.modules.pop("my_mixer", None)


@pytest.fixture(scope="module", params=[*MIXERS, "retention"])
def mixer(request):
    """(name, graph definition, parameters) of one layer's mixer, weights wide enough that the context matters."""
    layer = mixer_class(request.param)(BASE, Make(BASE, nnx.Rngs(0)), (0,))
    return request.param, *nnx.split(layer)


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, BASE.hidden_size)), jnp.float32)


def _run(graph, params, x, context, cache=None):
    return nnx.merge(graph, params)(x, context, cache)


def test_packed_documents_are_as_separate_ones_and_the_cache_continues_them(mixer):
    name, graph, params = mixer
    packed, _, _ = jax.jit(lambda x: _run(graph, params, x, Context(document_positions(SEGMENTS), SEGMENTS)))(X)
    for start, end in zip(CUTS, CUTS[1:]):
        positions = jnp.broadcast_to(jnp.arange(end - start, dtype=jnp.int32), (2, end - start))
        alone, _, _ = _run(graph, params, X[:, start:end], Context(positions))
        np.testing.assert_allclose(packed[:, start:end], alone, rtol=0, atol=2e-5)
    # A prompt of 11 tokens, then one, then the rest, against one pass.
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))
    whole, _, _ = _run(graph, params, X, Context(positions))
    cache, outs = mixer_class(name).init_cache(BASE, 2, T), []
    for part in (slice(0, 11), slice(11, 12), slice(12, T)):
        out, _, cache = _run(graph, params, X[:, part], Context(positions[:, part]), cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, rtol=0, atol=2e-5)
    assert np.abs(whole - jnp.concatenate([alone] * (T // alone.shape[1] + 1), axis=1)[:, :T]).max() > 1e-2  # the past matters


@pytest.mark.parametrize("axes", [{"tensor": 2, "data": 2}, {"context": 2}], ids=("tensor", "context"))
def test_a_mesh_gives_what_one_device_gives(mixer, axes):
    name, graph, params = mixer
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes)), jax.devices()[:int(np.prod(list(axes.values())))])

    def gradient(mesh):
        def loss(params, x):
            used = gather(params, mesh, BASE.dtype)
            y, _, _ = _run(graph, used, x, Context(document_positions(SEGMENTS), SEGMENTS, mesh=mesh))
            return jnp.sum(jnp.sin(y)), y
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    one = gradient(None)(params, X)
    placed = jax.tree.map(lambda p: p.replace(jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))),
                          params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    many = gradient(mesh)(placed, jax.device_put(X, batch_sharding(mesh)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), one, many)
    if "tensor" in axes:  # heads are really apart: by construction every matrix is stored in parts
        assert all(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(placed) if leaf.ndim > 1 and leaf.size > 64)


def test_flops_and_counts_are_those_of_the_shapes(mixer):
    name, _, params = mixer
    config = dataclasses.replace(BASE, layer_types=(name, name))
    sizes = {path: p for path, p in declared(config).items() if "/mixer/" in path}
    assert parameter_counts(config).total - parameter_counts(dataclasses.replace(config, num_hidden_layers=1, layer_types=(name,))).total \
        == sum(leaf.size for leaf in jax.tree.leaves(params)) + sum(p.size for path, p in declared(config).items() if path.startswith(
            "layers") and "/mixer/" not in path) // 2
    products = 2 * sum(p.size for p in sizes.values() if p.kind == "matrix")
    assert forward_flops_per_token(config, T)[name] == products + 2 * mixer_class(name).forward_flops(config, T) > products > 0
    assert all(not p.decays(True) for path, p in sizes.items() if p.kind == "rate")


def test_the_page_s_mixer_trains_shards_and_is_not_exported():
    config = Config(model=dataclasses.replace(BASE, linear_mixer="retention", num_hidden_layers=4, full_attention_interval=2, mtp_depth=1),
                    train=TrainConfig(steps=4, batch_size=4, sequence_length=T))
    rng = np.random.default_rng(1)
    batch = {"tokens": np.asarray(rng.integers(0, 64, (4, T)), np.int32), "segment_ids": np.ones((4, T), np.int32)}
    losses = []
    for axes in ({"data": 1}, {"data": 2, "tensor": 2}):
        mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**axes)), jax.devices()[:int(np.prod(list(axes.values())))])
        state, step = init_state(config, mesh), make_train_step(config, mesh)
        log_decay = np.asarray(state["params"]["layers"][0]["mixer"]["log_decay"])
        values = []
        for _ in range(3):
            state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
            values.append(float(metrics["loss"]))
        np.testing.assert_array_equal(state["params"]["layers"][0]["mixer"]["log_decay"], log_decay)  # neither learns nor decays
        losses.append(values)
    assert losses[0][-1] < losses[0][0] and flops_per_token(config.model, T) > 0
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    with pytest.raises(UserError, match=r"layers without a Hugging Face form: retention \(layers 0, 2\)"):
        check_hf_form(config.model)


# ---- the table and the declarations ------------------------------------------------------------------------------


def test_names_of_the_pattern_stand_for_the_mixers_named():
    config = dataclasses.replace(BASE, full_attention_interval=2, full_mixer="gated_deltanet", linear_mixer="gated_attention", mtp_depth=1)
    assert config.mixers == ("gated_attention", "gated_deltanet") and config.layer_kinds[-1] == ("gated_deltanet", True)
    same = dataclasses.replace(config, layer_types=("gated_attention", FULL))
    assert same.mixers == config.mixers and not config.differs(same)
    assert BASE.differs(dataclasses.replace(BASE, layer_types=(FULL, LINEAR))) == ("layer_types",)
    first_dense = dataclasses.replace(BASE, num_hidden_layers=6, full_attention_interval=2, mlp_only_layers=(0, 1))
    assert first_dense.stacks == ((0,), (1,), (2, 4), (3, 5))
    assert dataclasses.replace(first_dense, num_hidden_layers=4).stacks == ((0,), (1,), (2,), (3,))
    assert ModelConfig().stacks == tuple(tuple(range(i, 48, 4)) for i in range(4))


@pytest.mark.parametrize("settings, message", [
    ({"linear_mixer": "gated_deltnet"}, r"model.linear_mixer = 'gated_deltnet': expected one of .* \(did you mean 'gated_deltanet'\?\)"),
    ({"layer_types": (LINEAR, "retentoin")}, r"model.layer_types\[1\] = 'retentoin': .* \(did you mean 'retention'\?\)"),
    ({"layer_types": (FULL, FULL), "erase": False}, r"model.erase = False: no layer of this model reads it \(its mixers: gated_attention\)"),
    ({"layer_types": (FULL, FULL), "delta_rule": "chunked"}, "model.delta_rule = 'chunked': no layer of this model reads it"),
    ({"linear_mixer": "broken"}, r"'broken': 'my_mixer:Missing', cannot be imported \(AttributeError"),
])
def test_names_and_settings_that_fit_no_layer(monkeypatch, settings, message):
    monkeypatch.setitem(MIXERS, "broken", "my_mixer:Missing")
    with pytest.raises(UserError, match=message):
        declared(dataclasses.replace(BASE, **settings))


def test_a_parameter_without_a_decision_is_an_error(monkeypatch):
    layer = mixer_class("retention")
    start = layer.make_output

    def forgetful(self, make):
        start(self, make)
        self.extra = nnx.Param(jnp.zeros(3))
    monkeypatch.setattr(layer, "make_output", forgetful)
    with pytest.raises(ValueError, match=r"layers/0/mixer/extra of my_mixer:Retention is not declared"):
        declared(dataclasses.replace(BASE, linear_mixer="retention", rope_theta=77.0))
    make = Make(BASE, nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no logical axis 'embd' in parallel/rules.py \(did you mean 'embed'\?\)"):
        make.matrix((4, 4), "embd -> mlp")
    with pytest.raises(ValueError, match="names 1 dimensions of a parameter of shape"):
        make.matrix((4, 4), "embed ->")
