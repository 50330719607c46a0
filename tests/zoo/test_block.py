"""The rest of the block as settings (`model.block`, `model.mixer.mask`, …): each against its
formula in float64, and what it refuses.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from mixer_references import errors

from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.compatibility import settings_incompatible_with_weights
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.config.registry import EXPERTS, MLPS, NORMS, PLACEMENTS, STREAM_SETTINGS
from qwen3next_jax.inference.decode import checked_prompts
from qwen3next_jax.interop.layout import check_hf_form
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context, rotate
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding, gather_params, storage_spec
from qwen3next_jax.zoo import experts
from qwen3next_jax.zoo.block_parts import (
    EXAMPLES,
    LearnedPositions,
    SinusoidalPositions,
    block_reference,
)
from tests.models import SMALLEST, drawn, drawn_model, numpy_draws
from tests.refusals import refused

BASE = dataclasses.replace(
    SMALLEST,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    partial_rotary_factor=0.5,
    initializer_range=0.3,
)
T = 12


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_block_is_its_formula(name):
    """Output and gradients of every parameter, which every placement, norm and MLP of the tables
    is in; norms away from their start.
    """
    blocks = [BlockConfig(**example["block"]) for example in EXAMPLES.values()]
    # tests/zoo/test_qwen4.py and test_residuals.py have those with a wider residual stream
    assert {block.placement for block in blocks} == set(PLACEMENTS) - set(STREAM_SETTINGS)
    assert {block.norm for block in blocks} == set(NORMS)
    assert {*(block.mlp for block in blocks), "none"} == set(MLPS)
    groups = {"block": BlockConfig, "mixer": MixerConfig}
    settings = {
        key: groups[key](**value) if key in groups else value
        for key, value in EXAMPLES[name].items()
    }
    c = dataclasses.replace(BASE, **settings)
    with numpy_draws():
        block = c.block.import_part("placement")(
            c, "gated_attention", False, Make(c, nnx.Rngs(0)), (0,)
        )
    graph, params = nnx.split(block)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, T, c.hidden_size))
    moved = lambda p: (
        p.replace(p[...] + 0.3 * rng.normal(size=p.shape).astype(np.float32))
        if p.declared.kind == "norm"
        else p
    )
    params = jax.tree.map(moved, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.jit
    @jax.value_and_grad
    def ours(params):
        y, _, _ = nnx.merge(graph, params)(jnp.asarray(x, jnp.float32)[None], Context(positions))
        return jnp.sum(y[0] * dy)

    got = ours(params)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64)), (nnx.to_pure_dict(params), x, dy)
        )
        theirs = lambda p, x, dy: jnp.sum(block_reference(c, p, x) * dy)
        want = jax.jit(jax.value_and_grad(theirs))(*wide)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * largest),
        (got[0], nnx.to_pure_dict(got[1])),
        want,
    )


def mixture(name, **settings):
    """A model of two layers with these experts, wide enough that some are clipped."""
    given = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 12}
    given |= {"shared_expert_intermediate_size": 8} | experts.EXAMPLES[name] | settings
    return dataclasses.replace(BASE, **given | {"moe": MoEConfig(**given.get("moe", {}))})


def away_from_zero(params, rng):
    """`params` with random numbers in place of all that start at zero."""
    return jax.tree.map(
        lambda p: (
            p
            if np.any(p[...])
            else p.replace(jnp.asarray(0.3 * rng.normal(size=p.shape), jnp.float32))
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_their_formula(name):
    """Outputs and gradients in float32, biases away from 0; some gates are clipped."""
    c, rng = mixture(name), np.random.default_rng(0)
    with numpy_draws():
        graph, params = nnx.split(c.moe.mixture_class()(c, Make(c, nnx.Rngs(0))))
    params = away_from_zero(params, rng)
    x, dy = rng.normal(size=(2, T, c.hidden_size))
    x *= 4
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def ours(params, x):
        y, _ = nnx.merge(graph, params)(x[None], Context(positions))
        return jnp.sum(y[0] * dy), y[0]

    (_, y), gradients = ours(params, jnp.asarray(x, jnp.float32))
    got = (y, nnx.to_pure_dict(gradients[0]), gradients[1])

    def theirs(p, x, dy):
        y = experts.experts_reference(c, p, x)
        return jnp.sum(y * dy), y

    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64)), (nnx.to_pure_dict(params), x, dy)
        )
        of_reference = jax.jit(jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True))
        (_, y), gradients = of_reference(*wide)
        if "expert_gate_up" in wide[0]:
            gates = np.einsum("td,edi->tei", wide[1], wide[0]["expert_gate_up"][:, :, 0])
            assert (gates > experts.LIMIT).any()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max()),
        got,
        (y, *gradients),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in EXPERTS if name != "swiglu"],
)
def test_other_experts_decode_and_split(name):
    """Steps from the cache give what one pass of the model gives; two shards of experts, of
    their width and of the rows give what one device gives, gradients included.
    """
    c, rng = mixture(name), np.random.default_rng(0)
    graph, params = nnx.split(drawn_model(c))
    params = away_from_zero(params, rng)
    tokens = rng.integers(0, 32, (2, T)).astype(np.int32)

    @jax.jit
    def whole_and_steps(params):
        model = nnx.merge(graph, params)
        cache, hidden = model.init_cache(2, T), []
        for part in (slice(0, 9), slice(9, 10), slice(10, 11), slice(11, 12)):
            places = jnp.broadcast_to(jnp.arange(T)[part], tokens[:, part].shape)
            x, cache = model.decode(tokens[:, part], places, cache)
            hidden.append(x)
        return model(tokens).logits, model.logits(jnp.concatenate(hidden, axis=1))

    whole, steps = whole_and_steps(params)
    np.testing.assert_allclose(steps, whole, rtol=0, atol=2e-5)

    graph, params = nnx.split(drawn(lambda: c.moe.mixture_class()(c, Make(c, nnx.Rngs(0)))))
    params = away_from_zero(params, rng)
    x = jnp.asarray(rng.normal(size=(4, T, c.hidden_size)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (4, T))
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, expert=2, tensor=2)), jax.devices()[:8])

    def gradient(mesh):
        def loss(params, x):
            layer = nnx.merge(graph, gather_params(params, mesh, c.dtype))
            y, _ = layer(x, Context(positions, mesh=mesh))
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    placed = jax.tree.map(
        lambda p: p.replace(
            jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    one = gradient(None)(params, x)
    many = gradient(mesh)(placed, jax.device_put(x, batch_sharding(mesh)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max()),
        one,
        many,
    )


def test_gradients_of_experts_biases_sum_many_rows():
    """A scatter-add in bfloat16 would stop at 256 where it adds ones."""
    rows, sizes = 2048, jnp.array([1500, 548])
    x, up, down = jnp.zeros((rows, 4)), jnp.zeros((2, 4, 2, 3)), jnp.zeros((2, 3, 4))
    biases = jnp.zeros((2, 2, 3)), jnp.zeros((2, 4))

    def loss(biases):
        x_, up_, up_bias, down_, down_bias = (
            a.astype(jnp.bfloat16) for a in (x, up, biases[0], down, biases[1])
        )
        y = experts._clipped_swiglu_experts(1, x_, up_, up_bias, down_, down_bias, sizes)
        return jnp.sum(y.astype(jnp.float32))

    _, down_bias = jax.jit(jax.grad(loss))(biases)
    np.testing.assert_allclose(down_bias, jnp.repeat(sizes[:, None], 4, axis=1), rtol=0.01)


def test_deep_norm_starts_smaller():
    def start(name):
        c = dataclasses.replace(BASE, block=BlockConfig(placement=name))
        return nnx.to_pure_dict(
            nnx.state(
                c.block.import_part("placement")(
                    c, "gated_attention", False, Make(c, nnx.Rngs(0)), (0,)
                )
            )
        )

    ratio = jax.tree.map(
        lambda a, b: np.linalg.norm(b) / max(np.linalg.norm(a), 1e-9), start("post"), start("deep")
    )
    smaller = {
        path[-1].key
        for path, r in jax.tree_util.tree_leaves_with_path(ratio)
        if abs(r - 16**-0.25) < 1e-6
    }
    assert smaller == {"v_proj", "o_proj", "gate_up", "down"}


# ---- masks
# --------------------------------------------------------------------------------------------------

PREFIX = MixerConfig(mask="prefix", prefix_tokens=5)


@pytest.mark.parametrize(
    "name, mixer",
    [
        ("t5_bias", PREFIX | {"buckets": 8, "max_distance": 12}),
        ("masked_attention", PREFIX),
        ("alibi", MixerConfig(mask="bidirectional")),
        ("t5_bias", MixerConfig(mask="bidirectional", buckets=8, max_distance=12)),
    ],
)
@pytest.mark.slow
def test_masks_are_their_dense_forms(name, mixer):
    output, gradients = errors(
        name, dataclasses.replace(BASE, full_mixer=name, mixer=mixer), "float32", 40
    )
    assert output <= 5e-6, (output, gradients)
    assert max(jax.tree.leaves(gradients)) <= 2e-5, (output, gradients)


@pytest.mark.slow
def test_a_prefix_in_one_row_packs_decodes_and_sees_no_target():
    """Two layers under the prefix mask with learned positions and LayerNorm behind: encoder and
    decoder in one row.
    """
    config = dataclasses.replace(
        BASE,
        full_mixer="masked_attention",
        mixer=PREFIX,
        block=BlockConfig("post", "layer", "relu", "learned"),
    )
    graph, params = nnx.split(drawn_model(config))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 20)).astype(np.int32)
    segments, places = (
        np.repeat([[1, 2]], [8, 12], axis=1).astype(np.int32),
        np.arange(12, dtype=np.int32)[None],
    )
    batch = {"tokens": tokens, "segment_ids": segments}

    @jax.jit
    def run(params, rows):
        model = nnx.merge(graph, params)
        cache, hidden = model.init_cache(1, 12), []
        for part in (slice(0, 7), slice(7, 8), slice(8, 12)):
            x, cache = model.decode(tokens[:, 8:][:, part], places[:, part], cache)
            hidden.append(x)
        return (
            model(tokens, segments).logits[0, 8:],
            model.logits(jnp.concatenate(hidden, axis=1))[0],
            model(rows).logits,
        )

    # the first five are the prefix
    inside, behind = (tokens[:, 8:] ^ (np.arange(12) == place) for place in (2, 5))
    packed, steps, (document, of_prefix, of_rest) = run(
        params, np.concatenate([tokens[:, 8:], inside, behind])
    )
    np.testing.assert_allclose(packed, document, rtol=0, atol=2e-5)
    np.testing.assert_allclose(steps, document, rtol=0, atol=2e-5)
    differs = lambda row: (np.abs(row - document).max(axis=-1) > 1e-4).tolist()
    assert differs(of_prefix) == [True] * 12
    assert differs(of_rest) == [False] * 5 + [True] * 7

    np.testing.assert_array_equal(
        mask_seen_targets(config, batch)["target_mask"][0],
        np.r_[np.arange(8) >= 5, np.arange(12) >= 5],
    )
    marked = mask_seen_targets(config, batch | {"target_mask": np.arange(20)[None] % 2 == 0})[
        "target_mask"
    ][0]
    assert np.flatnonzero(marked).tolist() == [6, 14, 16, 18]
    assert mask_seen_targets(BASE, batch) is batch


def test_what_a_mask_cannot_do():
    config = dataclasses.replace(BASE, full_mixer="masked_attention", mixer=PREFIX)
    with refused("prompt 1", "model.mixer.prefix_tokens = 5"):
        checked_prompts(config, [np.arange(9), np.arange(5)], 2, 0.0)
    with refused("4 tokens"):
        checked_prompts(config, [np.arange(9)], 2, 0.0, chunk=4)
    both_ways = dataclasses.replace(config, mixer=MixerConfig(mask="bidirectional"))
    layer = mixer_class("masked_attention")(both_ways, Make(both_ways, nnx.Rngs(0)), (0,))
    with refused("'causal'", "'prefix'"):
        layer(
            jnp.zeros((1, 2, 16)), Context(jnp.asarray([[0, 1]])), layer.init_cache(both_ways, 1, 4)
        )
    with refused("model.mixer.mask = 'bidirectional'"):
        mask_seen_targets(both_ways, {})


# ---- positions
# --------------------------------------------------------------------------------------------------


def test_stretched_rotations():
    theta, once, i = 100.0, 2 * np.pi / 64, np.arange(4)
    plain = theta ** (-2 * i / 8)
    truncated = np.array([f if f >= once else once / 4 if f > once / 4 else 0 for f in plain])
    assert (truncated[:3] == plain[:3]).all()
    assert truncated[3] == once / 4 != plain[3]
    for name, frequency in (
        ("linear", plain / 4),
        ("ntk", (theta * 4 ** (8 / 6)) ** (-2 * i / 8)),
        ("truncated", truncated),
    ):
        slower, gain = BlockConfig(rope_scaling=name).import_part("rope_scaling")(4, theta, 4.0, 64)
        np.testing.assert_allclose(plain * slower, frequency, rtol=1e-6)
        assert gain == 1
    c = dataclasses.replace(
        BASE,
        partial_rotary_factor=1.0,
        yarn_factor=4.0,
        block=BlockConfig(rope_scaling="linear"),
        rope_theta=theta,
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 8)), jnp.float32)
    at = lambda place, c: rotate(x, jnp.full((1, 1), place), c)
    np.testing.assert_allclose(
        at(200, c),
        at(50, dataclasses.replace(c, yarn_factor=1.0, block=BlockConfig())),
        rtol=0,
        atol=1e-5,
    )


def test_positions_that_are_added():
    make = Make(
        dataclasses.replace(
            BASE, block=BlockConfig(positions="learned"), max_position_embeddings=12
        ),
        nnx.Rngs(0),
    )
    x, positions = jnp.zeros((1, 12, 16)), jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    learned = LearnedPositions(make.config, make)
    np.testing.assert_array_equal(learned(x, positions)[0], learned.table[...][positions[0]])
    with refused("13", "model.block.positions = 'learned'", "12"):
        learned(jnp.zeros((1, 13, 16)), positions)
    want = [
        [f(t / 10_000 ** (2 * i / 16)) for i in range(8) for f in (np.sin, np.cos)]
        for t in np.asarray(positions[0])
    ]
    np.testing.assert_allclose(
        SinusoidalPositions(BASE, make)(x, positions)[0], want, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "settings, names",
    [
        (
            {"block": BlockConfig(placement="sandwhich")},
            ("model.block.placement = 'sandwhich'", "'sandwich'"),
        ),
        (
            {"block": BlockConfig(mlp="relu"), "num_experts": 16},
            ("model.block.mlp = 'relu'",),
        ),
        (
            {"block": BlockConfig(rope_scaling="ntk")},
            ("model.block.rope_scaling = 'ntk'", "model.yarn_factor = 1"),
        ),
        (
            {"yarn_factor": 2.0, "full_mixer": "alibi"},
            ("model.yarn_factor = 2.0", "1.0"),
        ),
        (
            {
                "yarn_factor": 2.0,
                "full_mixer": "dynamic_ntk",
                "block": BlockConfig(rope_scaling="ntk"),
            },
            ("block.rope_scaling = 'ntk'",),
        ),
        (
            {"yarn_factor": 2.0, "partial_rotary_factor": 0.0},
            ("model.yarn_factor = 2", "0"),
        ),
        (
            {"mixer": MixerConfig(qk_norm_over="layer"), "qk_norm": False},
            ("model.mixer.qk_norm_over = 'layer'", "model.qk_norm = False"),
        ),
        ({"mixer": PREFIX}, ("model.mixer.mask = 'prefix'",)),
        (
            {"mixer": MixerConfig(mask="prefix"), "full_mixer": "alibi"},
            ("mask = 'prefix'", "model.mixer.prefix_tokens = 0"),
        ),
        (
            {"mixer": PREFIX, "full_mixer": "alibi", "mtp_depth": 1},
            ("model.mtp_depth = 1",),
        ),
        (
            {"full_mixer": "dynamic_ntk", "partial_rotary_factor": 0.25},
            ("'dynamic_ntk'", "2"),
        ),
    ],
)
def test_settings_that_do_not_fit(settings, names):
    with refused(*names):
        parameter_declarations(dataclasses.replace(BASE, **settings))


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"block": BlockConfig(norm="layer")}, "block.norm = 'layer'"),
        ({"mixer": MixerConfig(qk_norm_over="layer")}, "mixer.qk_norm_over = 'layer'"),
    ],
)
def test_no_hugging_face_form(settings, named):
    check_hf_form(BASE)
    with refused(f"model.{named}"):
        check_hf_form(dataclasses.replace(BASE, **settings))


def test_weights_of_attention_serve_as_their_kin():
    """Only where the same arrays mean the same: other ways to read keys, and of stretching
    rotations.
    """
    trained = dataclasses.replace(BASE, mixer=MixerConfig(qk_norm_over="layer"))
    other = dataclasses.replace(
        trained,
        full_mixer="lambda_window",
        mixer=trained.mixer | {"window": 8, "first_tokens": 2},
    )
    assert other.differing_settings(trained) == ("layer_types", "mixer")
    assert settings_incompatible_with_weights(other, trained) == ()
    of_prefix = trained.mixer | PREFIX
    assert (
        settings_incompatible_with_weights(
            dataclasses.replace(trained, full_mixer="masked_attention", mixer=of_prefix), trained
        )
        == ()
    )
    t5 = dataclasses.replace(trained, full_mixer="t5_bias")
    assert settings_incompatible_with_weights(dataclasses.replace(t5, mixer=of_prefix), t5) == (
        "mixer",
    )
    longer = dataclasses.replace(trained, yarn_factor=4.0, block=BlockConfig(rope_scaling="ntk"))
    assert settings_incompatible_with_weights(longer, trained) == ()
    longer = dataclasses.replace(longer, max_position_embeddings=256)
    assert settings_incompatible_with_weights(longer, trained) == ()
    for settings, names in [
        ({"block": BlockConfig(positions="learned")}, {"max_position_embeddings", "yarn_factor"}),
        ({"full_mixer": "hyena", "mixer": MixerConfig()}, {"max_position_embeddings"}),
    ]:
        bound = [dataclasses.replace(c, **settings) for c in (longer, trained)]
        assert set(settings_incompatible_with_weights(*bound)) - {"block"} == names
    for settings, name in [
        ({"full_mixer": "alibi"}, "layer_types"),
        ({"layer_types": ("rerope", "gated_attention")}, "layer_types"),
        ({"mixer": MixerConfig()}, "mixer"),
        ({"block": BlockConfig(placement="olmo2")}, "block"),
    ]:
        assert settings_incompatible_with_weights(
            dataclasses.replace(trained, **settings), trained
        ) == (name,)


def test_pairs_are_counted_as_they_are_seen():
    t, s = np.arange(23)[:, None], np.arange(23)[None]
    for name, mixer in [
        ("masked_attention", MixerConfig()),
        ("masked_attention", PREFIX),
        ("masked_attention", MixerConfig(mask="bidirectional")),
        ("lambda_window", MixerConfig(window=6, first_tokens=3)),
        ("parallel_windows", MixerConfig(window=4, contexts=3)),
    ]:
        config, kind = dataclasses.replace(BASE, full_mixer=name, mixer=mixer), mixer_class(name)
        layer = types.SimpleNamespace(config=config, settings=kind.settings)
        for length in (5, 10, 14, 23):
            seen = kind.attention_mask(layer, t[:length], s[:, :length])
            assert kind.visible_pair_count(config, length) == np.sum(seen), (name, mixer, length)
