"""Residual streams that are wider than the model: hyper-connections with a doubly stochastic
mixture, and attention residuals. The gated residual is in test_qwen4.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from qwen3next_jax import Qwen3Next
from qwen3next_jax.config import Config, MeshConfig, ParallelConfig, TrainConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.ngram import PLEConfig
from qwen3next_jax.config.registry import STREAM_SETTINGS
from qwen3next_jax.config.streams import StreamsConfig
from qwen3next_jax.inference import generate_to_end
from qwen3next_jax.interop.layout import check_hf_form
from qwen3next_jax.model import apply_block, parameter_declarations
from qwen3next_jax.model.apply_block import run_with_diagnostics
from qwen3next_jax.model.flops import forward_flops_per_token, parameter_counts
from qwen3next_jax.model.layers import Context, ForwardOptions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding, storage_spec
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from qwen3next_jax.training.unused_settings import find_unused
from qwen3next_jax.zoo import attention_residual, hyper_connections
from tests.models import HYBRID, SMALLEST, drawn, drawn_model
from tests.refusals import refused

# Three layers, so that the second block of attention residuals has a single layer.
BASE = dataclasses.replace(SMALLEST, num_hidden_layers=3, mtp_depth=1, initializer_range=0.3)
FORMS = {
    name: {"block": BlockConfig(**example["block"]), "streams": StreamsConfig(**example["streams"])}
    for family in (hyper_connections, attention_residual)
    for name, example in family.EXAMPLES.items()
}
forms = pytest.mark.parametrize("name", FORMS)
CLOSE = dict(rtol=1e-4, atol=2e-5)  # float32 through at most 5 layers


def config_of(name, base=BASE):
    return dataclasses.replace(base, **FORMS[name])


def moved(params, seed=0):
    """`params` with noise on all that do not start at random: norms, queries, α and biases."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (
            p.replace(p[...] + 0.3 * rng.normal(size=p.shape).astype(np.float32))
            if p.declared.kind in ("norm", "vector", "rate")
            else p
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


@functools.cache
def model_of(config):
    graph, params = nnx.split(drawn_model(config))
    return nnx.merge(graph, moved(params))


def tokens_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 64, shape).astype(np.int32)


# ---- the formulas


MAPS = [lambda x: 2 * x, lambda x: -x[::-1], lambda x: x**2, jnp.sin, lambda x: -x, jnp.cos]


def oracle(config, params, last, x_D):
    """What the head reads, by the reference of each form."""
    if config.block.placement == "attention_residual":
        return attention_residual.attention_residual_reference(config, params, last, x_D, MAPS)
    h_SD = jnp.tile(x_D, (config.streams.hc_count, 1))
    sum_D = hyper_connections.streams_after_blocks_reference(config, params, h_SD, MAPS).sum(axis=0)
    return sum_D / jnp.sqrt(jnp.mean(sum_D**2) + config.rms_norm_eps) * (1 + last)


class Stack(nnx.Module):
    """Three layers and what follows them, without mixers and MLPs."""

    def __init__(self, config):
        placement, make = config.block.import_part("placement"), Make(config, nnx.Rngs(0))
        layers = (0, 1, 2)  # a layer finds its number among these by `layer_in_stack`
        blocks = [placement(config, "gated_attention", False, make, layers) for _ in layers]
        for block in blocks:
            del block.mixer, block.mlp
        self.blocks, self.last = nnx.List(blocks), placement.make_final_norm(config, make)


@forms
def test_a_residual_stream_is_its_formula(name):
    """Output and all gradients in float64, with functions in place of mixers and MLPs, and with an
    ε of the norms that no rounding hides.
    """
    config = dataclasses.replace(config_of(name), rms_norm_eps=0.1)
    placement = config.block.import_part("placement")
    graph, params = nnx.split(drawn(lambda: Stack(config)))
    params = moved(params)
    x, weight = np.random.default_rng(1).normal(size=(2, config.hidden_size))

    def ours(params, x):
        stack = nnx.merge(graph, params)
        h = placement.residual_from_embeddings(x[None, None], config)
        for number, f in enumerate(MAPS):
            layer, part = number // 2, ("mixer", "mlp")[number % 2]
            read, add = stack.blocks[layer].input_and_add_output(
                h, part, Context(None, layer_in_stack=layer)
            )
            h = add(f(read[0, 0])[None, None])
        y = placement.head_input(h, stack.last, config)[0, 0]
        return y @ weight, y

    def theirs(params, x):
        blocks = [params["blocks"][i] for i in range(3)]
        norms = [block[f"{part}_norm"] for block in blocks for part in ("mixer", "mlp")]
        y = oracle(config, norms, params["last"], x)
        return y @ weight, y

    run = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    (_, got), (d_params, d_x) = run(ours)(params, jnp.asarray(x, jnp.float32))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(params))
        (_, want), d_want = run(theirs)(exact, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        # 1e-12 is above what float64's rounding leaves of a gradient of 0
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * np.abs(b).max() + 1e-12),
        (nnx.to_pure_dict(d_params), d_x),
        d_want,
    )
    flat = jax.tree_util.tree_leaves_with_path(d_want)
    still = {jax.tree_util.keystr(path) for path, d in flat if np.abs(d).max() < 1e-12}
    # The first mixer reads the embedding alone, whatever its query.
    first = "[0]['blocks'][0]['mixer_norm']"
    alone = {f"{first}['query']", f"{first}['key_norm']"}
    assert still == (alone if name == "attention_residual" else set())


def test_sinkhorn_is_doubly_stochastic():
    """And finite where exp overflows, and where whole rows would vanish beside the others."""
    logits = np.random.default_rng(0).normal(size=(4, 4, 9)).astype(np.float32)
    found = hyper_connections.sinkhorn(logits, 20)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=0), 1, atol=1e-4)
    logits[0] -= 300
    logits[1] += 300
    extreme, slope = jax.jvp(lambda x: hyper_connections.sinkhorn(x, 20), (logits,), (logits,))
    np.testing.assert_allclose(extreme.sum(axis=1), 1, atol=1e-4)
    assert np.isfinite(slope).all()


def test_queries_of_zero_average():
    """A model starts with the plain mean of what it reads."""
    config = config_of("attention_residual")
    layer = attention_residual.DepthAttention(config, Make(config, nnx.Rngs(0)))
    v = np.random.default_rng(0).normal(size=(1, 1, 3, config.hidden_size)).astype(np.float32)
    mean = v[0, 0, :2].mean(axis=0)
    want = mean / np.sqrt(np.mean(mean**2))
    np.testing.assert_allclose(layer(v.reshape(1, 1, -1), 2)[0, 0], want, rtol=1e-5)


def test_equal_streams_start_as_one():
    """With α = 0, a new model is the model with the placement "pre" that has the same weights. Its
    blocks read a multiple of the stream, which the norm divides out if its ε is small.
    """
    config = dataclasses.replace(config_of("mhc"), rms_norm_eps=1e-12)
    graph, params = nnx.split(drawn_model(config))
    params = nnx.to_pure_dict(params)
    one = dataclasses.replace(config, block=BlockConfig())
    pre, own = nnx.split(nnx.eval_shape(lambda: Qwen3Next(one, rngs=nnx.Rngs(0))))
    for block in (params["layers"][0], params["mtp"]["block"]):
        for part in ("mixer_norm", "mlp_norm"):
            block[part]["alpha"] *= 0
    same = jax.tree.map(lambda x: x, params)
    for block in (same["layers"][0], same["mtp"]["block"]):
        for part in ("mixer_norm", "mlp_norm"):
            block[part] = block[part]["norm"]

    def logits(graph, state, params):
        nnx.replace_by_pure_dict(state, params)
        out = nnx.merge(graph, state)(tokens_of((1, 9)))
        return out.logits, out.mtp_logits

    states = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))[1], own
    got = jax.jit(lambda p: logits(graph, states[0], p))(params)
    want = jax.jit(lambda p: logits(pre, states[1], p))(same)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)


# ---- whole models


@forms
def test_packed_and_cached_states_are_those_of_whole_rows(name):
    """Layers in a scan, against one row of one document: two packed documents, with multi-token
    prediction, and a cache that is filled in three parts.
    """
    graph, params = nnx.split(model_of(config_of(name)))
    tokens = tokens_of((1, 20))
    packed = np.repeat([[1, 2]], [8, 12], axis=1).astype(np.int32)

    @jax.jit
    def run(params):
        model = nnx.merge(graph, params)
        cache, hidden = model.init_cache(1, 20), []
        for part in (slice(0, 9), slice(9, 10), slice(10, 20)):
            x, cache = model.decode(tokens[:, part], np.arange(20)[None, part], cache)
            hidden.append(x)
        both, rows = model.features(tokens, packed), model.features(tokens)
        second = model.features(tokens[:, 8:])
        return both, second, jnp.concatenate(hidden, axis=1), rows

    both, second, cached, rows = run(params)
    np.testing.assert_allclose(cached, rows.hidden, **CLOSE)
    np.testing.assert_allclose(both.hidden[:, 8:], second.hidden, **CLOSE)
    np.testing.assert_allclose(both.mtp_hidden[0][:, 8:-1], second.mtp_hidden[0][:, :-1], **CLOSE)


@forms
def test_scanned_layers_are_those_of_a_loop(name):
    """The number of a layer reaches a layer in the scan. Diagnostics measure all streams, or the
    sum of all blocks.
    """
    config = config_of(name)
    model = model_of(config)
    graph, params = nnx.split(model.layers[0])
    positions = jnp.arange(7)[None]
    tokens = tokens_of((1, 7))

    @jax.jit
    def loop(model):
        x = config.block.import_part("placement").residual_from_embeddings(
            model.embed(tokens), config
        )
        for i in range(config.num_hidden_layers):
            block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], params))
            x, aux, _ = run_with_diagnostics(block, x, Context(positions, layer_in_stack=i))
        left = model.head_input(x)
        if name == "attention_residual":
            x = x.reshape(*x.shape[:2], -1, config.hidden_size).sum(axis=2)
        return left, jnp.abs(x).max(), aux["diagnostics"]

    options = ForwardOptions(collect_stats=True)
    features = jax.jit(lambda model: model.features(tokens, options=options))(model)
    want, largest, diagnostics = loop(model)
    np.testing.assert_allclose(features.hidden, want, **CLOSE)
    for found in (diagnostics, features.diagnostics[2]):
        np.testing.assert_allclose(found["activation_max"], largest, **CLOSE)


@forms
def test_the_module_is_a_model_of_one_layer(name):
    """The residual stream of multi-token prediction, which the trunk's depth does not change."""
    config = config_of(name)
    module = model_of(config).mtp
    streams = dataclasses.replace(config.streams, block_layers=1)
    one = dataclasses.replace(config, num_hidden_layers=1, streams=streams)
    placement = config.block.import_part("placement")
    graph, _ = nnx.split(
        nnx.eval_shape(
            lambda: placement(one, "gated_attention", False, Make(one, nnx.Rngs(0)), (0,))
        )
    )
    context = Context(jnp.arange(7)[None])
    state, embedded = np.random.default_rng(0).normal(size=(2, 1, 7, config.hidden_size))

    @jax.jit
    def run(module, state, embedded):
        x = module.join_state_and_embedding(state, embedded, context)[..., : config.hidden_size]
        layer = nnx.merge(graph, nnx.state(module.block))
        after, _, _ = layer(placement.residual_from_embeddings(x, one), context)
        return module(state, embedded, context)[0], placement.head_input(after, module.norm, one)

    found, want = run(module, jnp.asarray(state, jnp.float32), jnp.asarray(embedded, jnp.float32))
    np.testing.assert_allclose(found, want, **CLOSE)


def batch_of(rows):
    segments = np.repeat([1, 2, 0], (7, 5, 4)).astype(np.int32)[None].repeat(rows, axis=0)
    return {"tokens": tokens_of((rows, 16)), "segment_ids": segments}


def loss_and_gradient(config, batch, mesh=None, remat="none"):
    """Of a model with moved parameters."""
    graph, params = nnx.split(model_of(config))
    if mesh is not None:
        params = jax.tree.map(
            lambda p: p.replace(
                jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))
            ),
            params,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        batch = jax.device_put(batch, batch_sharding(mesh))

    def loss(params, batch):
        counts = count_tokens_and_targets(batch, config.mtp_depth, config)
        train = TrainConfig(remat=remat)
        return total_loss(nnx.merge(graph, params), batch, train, counts, mesh=mesh)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params, batch)
    return value, nnx.to_pure_dict(gradient)


def assert_same(got, want):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(b).max()))
        ),
        got,
        want,
    )


@pytest.mark.slow
@forms
def test_four_devices_give_what_one_gives(name):
    """The loss and all gradients, on a mesh of 2 × 2 and with remat."""
    config = config_of(name)
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, tensor=2)), jax.devices()[:4])
    want = loss_and_gradient(config, batch_of(4))
    assert_same(loss_and_gradient(config, batch_of(4), mesh, remat="full"), want)


@pytest.mark.slow
@forms
@pytest.mark.parametrize("remat", ["dots", "keep=mixer,attention"])
def test_remat_changes_no_gradient(name, remat):
    config = config_of(name)
    want = loss_and_gradient(config, batch_of(2))
    assert_same(loss_and_gradient(config, batch_of(2), remat=remat), want)


@pytest.mark.slow
@forms
@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2}, {"context": 2, "tensor": 2}])
def test_meshes_and_groups_of_rows_give_what_one_device_gives(name, axes, monkeypatch):
    """Recurrent layers and experts; with `expert`, each device's rows in two groups."""
    config = config_of(name, dataclasses.replace(HYBRID, mtp_depth=1))
    want = loss_and_gradient(config, batch_of(8))
    groups = []
    split = apply_block.split_rows
    monkeypatch.setattr(apply_block, "row_group_count", lambda x, *_: 2 if "expert" in axes else 1)
    monkeypatch.setattr(
        apply_block, "split_rows", lambda x, context, n: groups.append(n) or split(x, context, n)
    )
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes)), jax.devices()[:4])
    assert_same(loss_and_gradient(config, batch_of(8), mesh), want)
    assert set(groups) == ({2} if "expert" in axes else set())


@pytest.mark.slow
@forms
def test_drafts_give_the_plain_text(name):
    model = model_of(config_of(name, dataclasses.replace(HYBRID, mtp_depth=1)))
    prompts = [tokens_of(n, seed=n) for n in (1, 16, 7)]
    plain = generate_to_end(model, prompts, max_new_tokens=24)
    drafted = generate_to_end(model, prompts, max_new_tokens=24, speculative=2)
    for a, b in zip(plain, drafted):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@forms
def test_bfloat16_is_near_float32(name):
    """Gradients too, with the remat policy of bfloat16: norms differ by less than the roundings of
    3 layers.
    """
    config = config_of(name, dataclasses.replace(HYBRID, num_experts=0, initializer_range=0.05))
    model_of.cache_clear()
    (value, gradient), (narrow, d_narrow) = (
        loss_and_gradient(dataclasses.replace(config, dtype=dtype), batch_of(2))
        for dtype in ("float32", "bfloat16")
    )
    assert float(narrow) == pytest.approx(float(value), rel=2e-3)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(d_narrow), strict=True):
        assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(a) + 1e-4


# ---- what is counted, what is refused


def test_parameters_and_products_are_counted():
    """Beyond those of the placement "pre", by the formulas at the top of the files."""
    pre, d, s, layers = dataclasses.replace(BASE, block=BlockConfig()), BASE.hidden_size, 3, 3
    maps = 2 * s + s * s
    # of the mixer and the MLP of each of 3 layers and of the layer of multi-token prediction
    more = {"mhc": 8 * (s * d * maps + maps + 3), "attention_residual": (8 + 2) * 2 * d}
    # sources that are read: by 3 mixers and MLPs, and by the head; by the layer of the module
    read, of_module = (1 + 2) + (2 + 2) + (2 + 3) + 3, 1 + 2 + 2
    products = {
        "mhc": (layers * 2 * 2 * (s + 1) * maps * d, 2 * 2 * (s + 1) * maps * d),
        "attention_residual": (4 * d * read, 4 * d * of_module),
    }
    before, flops = parameter_counts(pre), forward_flops_per_token(pre, 16)
    for name in FORMS:
        config = config_of(name)
        assert parameter_counts(config).total == before.total + more[name]
        found = forward_flops_per_token(config, 16)
        of_trunk, of_mtp = products[name]
        assert found.pop("residual") == of_trunk
        assert found == flops | {"mtp": flops["mtp"] + of_mtp}


@pytest.mark.parametrize("setting", ["hc_count", "sinkhorn_iterations", "block_layers"])
def test_a_stream_of_nothing_is_refused(setting):
    with refused(f"model.streams.{setting} = 0"):
        StreamsConfig(**{setting: 0})


def test_what_attention_residuals_cannot_have_is_one_line():
    config = config_of("attention_residual")
    with refused("model.streams.block_layers = 4", "model.num_hidden_layers = 3"):
        parameter_declarations(dataclasses.replace(config, streams=StreamsConfig(block_layers=4)))
    with refused("model.ple.layer_ids = (2,)", "'attention_residual'"):
        parameter_declarations(
            dataclasses.replace(config, eos_token_id=3, ple=PLEConfig(layer_ids=(2,)))
        )


@forms
def test_settings_of_another_form_are_unused(name):
    fields = {field.name for field in dataclasses.fields(StreamsConfig)}
    config = Config(model=config_of(name), train=TrainConfig(sequence_length=16))
    unused = find_unused(config)
    found = {field for field in fields if f"model.streams.{field}" in unused}
    assert found == fields - set(STREAM_SETTINGS[name])


@forms
def test_a_wider_stream_is_not_exported(name):
    with refused("model.block.placement", repr(name)):
        check_hf_form(config_of(name))
