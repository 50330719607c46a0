"""What holds of every mixer of the table, and of the one that docs/extending.md adds to it."""

import dataclasses
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from mixer_references import errors, example_of
from page import example, line

from qwen3next_jax.config import (
    FULL,
    LINEAR,
    Config,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.reading import UnparsedFlagText
from qwen3next_jax.config.registry import MIXERS
from qwen3next_jax.inference import generate_to_end
from qwen3next_jax.interop.huggingface import stored_dtype
from qwen3next_jax.interop.layout import check_hf_form
from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import gated_norm as gpu_gated_norm
from qwen3next_jax.kernels.gpu import kernel_call
from qwen3next_jax.kernels.tpu import attention_heads as tpu_attention_heads
from qwen3next_jax.kernels.tpu import gated_norm as tpu_gated_norm
from qwen3next_jax.model import Qwen3Next, parameter_declarations
from qwen3next_jax.model.flops import flops_per_token, forward_flops_per_token, parameter_counts
from qwen3next_jax.model.layer_properties import READ_BY_PART, mixer_class
from qwen3next_jax.model.layers import Context, ForwardOptions, document_positions
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.recurrent import RecurrenceInputs
from qwen3next_jax.ops import attention_heads, gated_delta_rule, gated_norm
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.ops.implementations import XlaImplementation
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding, gather_params, storage_spec
from qwen3next_jax.zoo.projections import l2_normalize
from tests.in_process import resolved, step_of
from tests.models import HYBRID, drawn, drawn_model, numpy_draws
from tests.refusals import refused

T, CUTS = 32, (0, 5, 6, 20, 32)
SEGMENTS = jnp.asarray(
    np.repeat(range(1, len(CUTS)), np.diff(CUTS))[None].repeat(2, axis=0), jnp.int32
)

COLLECT = ForwardOptions(collect_stats=True)


@pytest.fixture(scope="module", autouse=True)
def retention(tmp_path_factory):
    """The page's mixer as one file and one line; the tests below take it for one of the table's."""
    folder = tmp_path_factory.mktemp("mixer")
    assert len(list(filter(str.strip, example("my_mixer.py", folder).splitlines()))) <= 30
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setitem(MIXERS, *line("MIXERS"))
        yield
    sys.modules.pop("my_mixer", None)


# One of operator A, of attention, of operators B and N; all others are slow.
QUICK = ("gated_deltanet", "gated_attention", "rnn", "retention")


def quick(names, of=QUICK):
    return [name if name in of else pytest.param(name, marks=pytest.mark.slow) for name in names]


def one_of_each(*methods):
    """One mixer, the first of the table, of those that have the same code for all these methods: a
    test that runs nothing else of a mixer finds with it what it finds with the others.
    """

    def code(name):
        classes = mixer_class(name).__mro__
        return tuple(next((c for c in classes if method in vars(c)), None) for method in methods)

    found = {}
    for name in MIXERS:
        found.setdefault(code(name), name)
    return list(found.values())


# What a token may read of another: what packing, a cache and positions can spoil. Mixers that share
# all of it differ in what they make of a single token.
READING = (
    "__call__",
    "recurrence",
    "attend",
    "init_cache",
    "inputs",
    "norm_and_gate",
    "_scan",
    "cell",
    "queries_for_score",
    "keys_for_score",
    "attention_mask",
    "score",
)


# test_model.py and test_inference.py have the first two.
@pytest.fixture(scope="module", params=quick((*one_of_each(*READING), "retention"), of=QUICK[2:]))
def mixer(request):
    """(name, graph definition, parameters) of one layer's mixer, weights wide enough that the
    context matters.
    """
    return request.param, *layer(request.param)


def layer(name):
    """(graph definition, parameters) of one layer's mixer."""
    config = base(name)
    return nnx.split(drawn(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,))))


def base(name):
    """A small model whose two layers are this mixer, with the example settings of its family."""
    settings = {"mixer": {}} | example_of(name)
    settings["mixer"] = MixerConfig(**settings["mixer"])
    named = ("linear_mixer", "full_mixer")
    settings = {key: value for key, value in settings.items() if key not in named}
    return dataclasses.replace(HYBRID, layer_types=(name, name), **settings)


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, HYBRID.hidden_size)), jnp.float32)


def _run(graph, params, x, context, cache=None):
    return nnx.merge(graph, params)(x, context, cache)


def test_packed_documents_are_as_separate_ones_and_the_cache_continues_them(mixer):
    name, graph, params = mixer
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))
    whole = jax.jit(lambda x: _run(graph, params, x, Context(positions))[0])
    packed = jax.jit(
        lambda x: _run(graph, params, x, Context(document_positions(SEGMENTS), SEGMENTS))[0]
    )(X)
    # each document at the start of a row of its own: what follows changes nothing
    for start, end in zip(CUTS, CUTS[1:]):
        np.testing.assert_allclose(
            packed[:, start:end],
            whole(jnp.roll(X, -start, axis=1))[:, : end - start],
            rtol=0,
            atol=2e-5,
        )
    assert np.abs(packed - whole(X)).max() > 1e-2  # the past matters

    step = jax.jit(lambda x, positions, cache: _run(graph, params, x, Context(positions), cache))
    cache, outs = mixer_class(name).init_cache(base(name), 2, T), []
    if mixer_class(name).writes_cache_in_place:
        cache = jax.tree.map(lambda leaf: leaf[None], cache)
    for part in (slice(0, T // 2), *(slice(t, t + 1) for t in range(T // 2, T))):
        out, _, cache = step(X[:, part], positions[:, part], cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole(X), rtol=0, atol=2e-5)


# The parameter of what each of those takes exponentials of.
SCORES = {"abc": "forget_proj", "rwkv4": "key_proj", "mlstm": "input_proj"}


@pytest.mark.parametrize(
    "name",
    [name if name == "rwkv4" else pytest.param(name, marks=pytest.mark.slow) for name in SCORES],
)
def test_the_cache_continues_scores_of_any_size(name):
    """Of hundreds either way, from the model's cache before the first token."""
    config = dataclasses.replace(base(name), layer_types=(name, name))
    graph, params = nnx.split(mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,)))
    scores = params[SCORES[name]]
    scores[...] = scores[...] * 1000
    x, positions = X[:, :4], jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
    model = nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))
    cache = jax.tree.map(lambda leaf: leaf[0], model.init_cache(2, 4)[0])
    run = jax.jit(lambda x, cache: _run(graph, params, x, Context(positions), cache))
    whole = run(x, None)[0]
    np.testing.assert_allclose(run(x, cache)[0], whole, rtol=0, atol=2e-5)
    assert np.isfinite(whole).all()
    assert np.abs(whole).max() > 1e-2


def predictor(name):
    """(configuration, multi-token prediction) of a model of three layers of this mixer."""
    config = dataclasses.replace(
        base(name),
        num_hidden_layers=3,
        layer_types=(name,) * 3,
        full_mixer=name,
        num_experts=0,
        intermediate_size=16,
        mtp_depth=1,
    )
    return config, drawn(lambda: MultiTokenPrediction(config, Make(config, nnx.Rngs(0))))


OF_DEPTH = ("lightning", "hgrn2")  # what they do depends on the layer's number


class Numbers:
    """The numbers of a mixer's layers, and whether it reads them."""

    read = False

    def __jax_array__(self):
        self.read = True
        return jnp.asarray((1,))


@pytest.mark.slow
def test_the_prediction_module_numbers_as_the_last_layer():
    for name in MIXERS:
        config, numbers = base(name), Numbers()
        nnx.eval_shape(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0), (1,)), numbers))
        assert numbers.read == (name in OF_DEPTH), name
    for name in OF_DEPTH:
        config, module = predictor(name)
        number = config.num_hidden_layers - 1
        last = drawn(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (number,)))
        for key, value in vars(last).items():
            if isinstance(value, nnx.Param) and value.declared.kind == "rate":
                predicting = getattr(module.block.mixer, key)[...]
                np.testing.assert_array_equal(predicting, value[...], f"{name} {key}")


@pytest.mark.parametrize("name", quick(OF_DEPTH, of=OF_DEPTH[:1]))
def test_a_mixer_with_numbers_predicts_several_tokens(name):
    """Outputs and gradients are finite, and what it mixes matters. Those without numbers are in
    test_rematerialisation_changes_no_gradient.
    """
    _, module = predictor(name)
    graph, params = nnx.split(module)
    context = Context(document_positions(SEGMENTS), SEGMENTS)

    def loss(params):
        y, *_ = nnx.merge(graph, params)(X, X[:, ::-1], context)
        return jnp.sum(jnp.sin(y))

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
    matrices = [
        leaf[...]
        for leaf in jax.tree.leaves(
            gradients["block"]["mixer"], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        if leaf.declared.kind == "matrix"
    ]
    assert all(np.abs(matrix).max() > 1e-6 for matrix in matrices)


@pytest.mark.parametrize("name", [*MIXERS, "retention"])
def test_a_mixer_declares_what_gives_its_weights_meaning(name):
    """Weights may be read with another context unless the mixer says otherwise: the same arrays
    then have the same shapes and give the same outputs. (As programs first, which are not
    compiled.)
    """
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))

    def read_with(context):
        config = dataclasses.replace(base(name), max_position_embeddings=context, yarn_factor=1.0)
        graph, params = nnx.split(
            nnx.eval_shape(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,)))
        )
        return params, lambda params: _run(graph, params, X, Context(positions))[0]

    (params, one), (wider, other) = read_with(64), read_with(128)
    same = jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wider)
    if same and str(jax.make_jaxpr(one)(params)) != str(jax.make_jaxpr(other)(params)):
        filled = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, leaf.dtype), params)
        same = np.array_equal(one(filled), other(filled))
    assert same == ("max_position_embeddings" not in mixer_class(name).settings_fixed_by_weights)


# Mixers with another operator, or another way to call it, in a `__call__` that others have, too.
WITH_OPERATORS = ("kda", "linear", "mlstm", "gsa", "gated_deltaproduct", "titans")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*one_of_each("__call__", "attend", "recurrence_parameters"), *WITH_OPERATORS]
)
def test_a_mesh_gives_what_one_device_gives(name):
    """Rows, tokens and heads are each on two devices, all at once."""
    graph, params = layer(name)
    axes = {"data": 2, "context": 1 if name == "qsa" else 2, "tensor": 2}  # qsa refuses context
    mesh = make_mesh(
        ParallelConfig(mesh=MeshConfig(**axes)), jax.devices()[: int(np.prod(list(axes.values())))]
    )

    def gradient(mesh):
        def loss(params, x):
            used = gather_params(params, mesh, HYBRID.dtype)
            y, _, _ = _run(
                graph, used, x, Context(document_positions(SEGMENTS), SEGMENTS, mesh=mesh)
            )
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    one = gradient(None)(params, X)
    placed = jax.tree.map(
        lambda p: p.replace(
            jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    many = gradient(mesh)(placed, jax.device_put(X, batch_sharding(mesh)))
    equal = lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-4, atol=2e-5 * max(1.0, float(np.abs(a).max()))
    )
    jax.tree.map(equal, one, many)
    # heads are really apart: by construction every matrix is stored in parts
    large = [leaf for leaf in jax.tree.leaves(placed) if leaf.ndim > 1 and leaf.size > 64]
    assert large
    assert all(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in large)


def layers(name, **settings):
    """A model of this mixer and attention, that one draft a token is made for."""
    return dataclasses.replace(
        base(name),
        layer_types=(name, "gated_attention"),
        num_experts=0,
        intermediate_size=16,
        decay_init="log_uniform",
        mtp_depth=1,
        **settings,
    )


# test_reference.py has those two
@pytest.mark.parametrize("name", [name for name in quick(MIXERS) if name not in QUICK[:2]])
def test_a_layer_is_its_paper_s_recurrence(name):
    """Outputs and gradients of every parameter, in float32: rounding of some hundred sums, times
    what strong decay makes of it.
    """
    output, gradients = errors(
        name, dataclasses.replace(base(name), decay_init="log_uniform"), "float32", 40
    )
    assert output <= 5e-6, (output, gradients)
    assert max(jax.tree.leaves(gradients)) <= 2e-5, (output, gradients)


@pytest.mark.parametrize("name", quick(("gated_deltanet", "kda")))
def test_a_layer_with_negative_eigenvalues_is_the_recurrence(name):
    config = dataclasses.replace(base(name), decay_init="log_uniform", beta_range=2)
    output, gradients = errors(name, config, "float32", 40)
    assert output <= 5e-6, (output, gradients)
    assert max(jax.tree.leaves(gradients)) <= 2e-5, (output, gradients)


def deltaproduct(writes, **settings):
    mixer = MixerConfig(num_householder=writes)
    return dataclasses.replace(base("gated_deltaproduct"), mixer=mixer, **settings)


def test_an_unread_setting_shows_its_value():
    """Its text came from a flag, and is a number in the mixer that has the setting."""
    values = MixerConfig(num_householder=UnparsedFlagText("3"))
    with refused("model.mixer.num_householder = 3", "gated_deltaproduct"):
        values.checked_for_mixers(["gated_deltanet"])


def test_one_write_a_token_is_gated_deltanet_to_the_bit():
    """The same parameters from the same seed, and the same program, packed and with a cache."""
    positions = document_positions(SEGMENTS)

    def layer_and_programs(name):
        config = deltaproduct(1)
        make = lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,))
        graph, params = nnx.split(drawn(make))
        cache = mixer_class(name).init_cache(config, 2, T)
        loss = lambda p: jnp.sum(_run(graph, p, X, Context(positions, SEGMENTS))[0] ** 2)
        step = lambda p: _run(graph, p, X[:, :1], Context(positions[:, :1]), cache)
        return params, [str(jax.make_jaxpr(program)(params)) for program in (jax.grad(loss), step)]

    (params, programs), (others, same) = map(
        layer_and_programs, ("gated_deltaproduct", "gated_deltanet")
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(params), nnx.to_pure_dict(others))
    assert programs == same


@pytest.mark.parametrize(
    "writes, implementation",
    [
        (4, "chunked"),
        *(
            pytest.param(writes, name, marks=pytest.mark.slow)
            for writes, name in (
                (2, "recurrent"),
                (4, "associative"),
                (2, "pallas_tpu"),
            )
        ),
    ],
)
def test_several_writes_a_token_by_every_implementation(writes, implementation):
    config = deltaproduct(writes, delta_rule=implementation, decay_init="log_uniform")
    output, gradients = errors("gated_deltaproduct", config, "float32", 40)
    assert output <= 5e-6, (output, gradients)
    assert max(jax.tree.leaves(gradients)) <= 2e-5, (output, gradients)


@pytest.mark.slow
def test_several_writes_a_token_by_the_kernels_for_hopper_interpreted():
    """Both round to bfloat16; the kernels are no further off than XLA, and half as much again."""
    config = deltaproduct(
        2, linear_key_head_dim=64, linear_value_head_dim=64, decay_init="log_uniform"
    )
    found = [
        errors("gated_deltaproduct", dataclasses.replace(config, delta_rule=name), "bfloat16", 40)
        for name in ("pallas_gpu", "chunked")
    ]
    for got, bar in zip(*map(jax.tree.leaves, found)):
        assert got <= 1.5 * bar + 2**-8, found


def test_rounded_keys_let_no_state_of_kda_grow():
    """With β = 2, no decay, no values, and one key for 32,768 tokens, whose length is above 1 once
    it is rounded: without a bound of β the state would be 10^8 times as large.
    """
    config = dataclasses.replace(base("kda"), beta_range=2, linear_num_key_heads=1)
    layer = nnx.eval_shape(lambda: mixer_class("kda")(config, Make(config, nnx.Rngs(0)), (0,)))
    rng, (h, k) = np.random.default_rng(3), (4, config.linear_key_head_dim)
    keys = jnp.asarray(rng.normal(size=(2048, k)), jnp.bfloat16)
    rounded = l2_normalize(keys).astype(jnp.bfloat16).astype(jnp.float32)
    key = keys[jnp.argmax(jnp.sum(jnp.square(rounded), axis=-1))]
    time, start = 32_768, jnp.asarray(rng.normal(size=(1, h, k, k)), jnp.float32)
    repeated = jnp.broadcast_to(key, (1, time, 1, k))
    heads = RecurrenceInputs(
        q=repeated,
        k=repeated,
        v=jnp.zeros((1, time, h, k), jnp.bfloat16),
        log_decay=jnp.zeros((1, time, h, k)),
        beta=jnp.full((1, time, h), 2.0),
        recurrence_parameters=(),
        segment_ids=None,
        axis_name=None,
        return_all_states=False,
    )
    _, states = jax.jit(layer.recurrence)(heads, {"state": start})
    assert np.linalg.norm(states["state"]) <= 1.01 * np.linalg.norm(start)


GAMMA = 0.9
# what a state that is trained at test time descends, with the decay and the write that it is
VIEWS = {
    "linear attention": (lambda s, k, v: -v @ (s.T @ k), 0.0, False),
    "retention": (
        lambda s, k, v: -v @ (s.T @ k) + (1 - GAMMA) / 2 * jnp.sum(s * s),
        np.log(GAMMA),
        False,
    ),
    "delta rule": (lambda s, k, v: jnp.sum((s.T @ k - v) ** 2) / 2, 0.0, True),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_is_a_step_of_gradient_descent(view):
    """Of length 1 for sums, of length β for the delta rule; six tokens of one head."""
    loss, g, delta_term = VIEWS[view]
    rng = np.random.default_rng(0)
    k, v, beta = (
        jnp.asarray(x, jnp.float32)
        for x in (rng.normal(size=(6, 5)), rng.normal(size=(6, 3)), rng.uniform(size=6))
    )
    beta, heads = beta if delta_term else jnp.ones(6), lambda x: x[None, :, None]
    descend = lambda state, token: (state - token[2] * jax.grad(loss)(state, *token[:2]), None)
    state, _ = jax.lax.scan(descend, jnp.zeros((5, 3)), (k, v, beta))
    _, final = gated_delta_rule(
        heads(k),
        heads(k),
        heads(v),
        g=jnp.full((1, 6, 1), g),
        beta=heads(beta),
        normalize_qk=False,
        delta_term=delta_term,
        implementation="recurrent",
    )
    np.testing.assert_allclose(final[0, 0], state, rtol=0, atol=2e-6 * np.abs(state).max())


# The last four have operators of their own inside a `__call__` that others have, too. test_training
# has the released model's.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*one_of_each("__call__")[2:], "kda", "linear", "ttt", "rerope"])
def test_rematerialisation_changes_no_gradient(name):
    """A layer and the multi-token prediction after it, which has the same mixer."""
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=1)), jax.devices()[:1])
    batch = {
        "tokens": np.asarray(np.random.default_rng(1).integers(0, 64, (2, T)), np.int32),
        "segment_ids": np.asarray(SEGMENTS),
    }
    alone = dict(layer_types=(name,), num_hidden_layers=1, full_mixer=name)
    config = Config(
        model=dataclasses.replace(layers(name), **alone),
        train=TrainConfig(steps=4, batch_size=2, sequence_length=T),
        parallel=ParallelConfig(mesh=MeshConfig(data=1)),
    )
    with numpy_draws():
        start = resolved(config, mesh).init_state()

    def trained(remat):
        train = dataclasses.replace(config.train, remat=remat)
        step = step_of(dataclasses.replace(config, train=train), mesh)
        state = jax.tree.map(jnp.copy, start)  # the step takes its memory
        for _ in range(3):
            state, _ = step(state, jax.device_put(batch, batch_sharding(mesh)))
        return state["params"]

    plain = trained("none")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(plain))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
    jax.tree.map(close, plain, trained("block"))


# A draft that is refused makes a cache go back: a state, two states, one that does not begin at
# zero, the last tokens, keys in their slots (latent, of a window, of additive scores, of blocks).
# test_inference.py has the released model's. A state goes back to a token that was computed alone,
# as the test of caches above does with every mixer.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["rwkv6", "linear", "mlstm", "hyena", "mla", "sliding_window", "bahdanau", "qsa"],
)
def test_drafts_change_no_token(name):
    model, prompts = drawn_model(layers(name)), [np.arange(5), np.arange(20) % 7]
    drafted = generate_to_end(model, prompts, max_new_tokens=12, speculative=2)
    for row, expected in zip(
        drafted, generate_to_end(model, prompts, max_new_tokens=12), strict=True
    ):
        np.testing.assert_array_equal(row, expected)


@pytest.mark.slow
def test_flat_arrays_between_the_kernels_change_nothing(monkeypatch):
    """As GPUs and TPUs have them, here on two shards of the heads and two of the tokens, by
    products in place of the kernels. Lowered for a GPU the program has the kernels of norm and
    gate, one each way.
    """
    mesh = make_mesh(
        ParallelConfig(mesh=MeshConfig(data=1, tensor=2, context=2)), jax.devices()[:4]
    )

    layer = lambda config: mixer_class("gated_deltanet")(config, Make(config, nnx.Rngs(0)), (0,))

    def gradient(config, mesh, graph, params, x, ids):
        def loss(params, x):
            y, _, _ = _run(
                graph,
                gather_params(params, mesh, config.dtype),
                x,
                Context(document_positions(ids), ids, mesh=mesh),
            )
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).trace(params, x)

    graph, params = nnx.split(layer(HYBRID))

    def run(mesh, platform):
        with compiling_for(platform):
            traced = gradient(HYBRID, mesh, graph, params, X, SEGMENTS)
        return traced.lower().compile()(params, X)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        run(None, "cpu"),
        run(mesh, "gpu"),
    )

    monkeypatch.setattr(
        self_test,
        "kernels_run_by_default",
        lambda test, unsupported="": test.name == "norm and gate",
    )
    wide = dataclasses.replace(HYBRID, linear_value_head_dim=64, dtype="bfloat16")
    x = jax.ShapeDtypeStruct((1, 128, 16), jnp.bfloat16)
    with compiling_for("gpu"):
        traced = gradient(
            wide,
            mesh,
            *nnx.split(nnx.eval_shape(lambda: layer(wide))),
            x,
            jnp.ones((1, 128), jnp.int32),
        )
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


def test_kernels_of_norm_and_gate_match_the_products():
    """Two heads and two blocks of 16 tokens, against float64."""
    rng = np.random.default_rng(0)
    o, gate, dy, weight = (rng.normal(size=s) for s in (*[(2, 32, 256)] * 3, (128,)))

    @jax.jit(static_argnums=0)
    def both_ways(dtype):
        y, pullback = jax.vjp(
            lambda *a: gated_norm.gated_norm(*a, 1e-6),
            *(jnp.asarray(a, dtype) for a in (o, gate, weight)),
        )
        return y, *pullback(jnp.asarray(dy, dtype))

    with jax.enable_x64(True):
        want = both_ways(jnp.float64)

    functions = {
        name: functools.partial(getattr(tpu_gated_norm, name), interpret=True)
        for name in ("forward", "backward")
    }
    with (
        mock.patch.object(
            gated_norm,
            "XLA_IMPLEMENTATIONS",
            (XlaImplementation("interpreted", ("cpu",), functions),),
        ),
        mock.patch.object(tpu_gated_norm, "BLOCK", (16, 128)),
    ):
        got = both_ways(jnp.float32)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_the_kernels_of_norm_and_gate_for_hopper_interpreted():
    """Two heads and two blocks of tokens; races are errors."""
    with mock.patch.object(
        kernel_call,
        "INTERPRETER",
        plgpu.InterpretGPUParams(detect_races=True, on_race="raise"),
    ):
        name, error = gpu_gated_norm.max_error(1e-6, 128, interpret=True)
    assert error < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("width, half", [(128, 64), (256, 32)])
def test_kernels_beside_attention_match_the_products(width, half):
    """Two blocks of two heads and two of 32 tokens, against float64."""
    rng, heads, time = np.random.default_rng(0), 4, 64
    x, gate, dz, o, dy = (
        rng.normal(size=shape)
        for shape in (*[(2, time, heads * width)] * 3, *[(2, heads, time, width)] * 2)
    )
    weight, angles = rng.normal(size=width), 3 * rng.normal(size=(2, time, half))
    cos, sin = attention_heads.cosine_and_sine_by_lane(np.cos(angles), np.sin(angles))

    def products():
        def rotate(x, weight):
            return attention_heads.norm_and_rotate(x, weight, cos, sin, half, 1e-6)

        y, rotated = jax.vjp(rotate, x, weight)
        z, gated = jax.vjp(attention_heads.gate_heads, o, gate)
        return y, *rotated(dy), z, *gated(dz)

    def kernels(x, weight, cos, sin, dy, o, gate, dz):
        whole = {"interpret": True}
        return (
            tpu_attention_heads.norm_and_rotate(1e-6, half, x, weight, cos, sin, **whole),
            *tpu_attention_heads.norm_and_rotate_gradients(
                1e-6, half, x, weight, cos, sin, dy, **whole
            ),
            tpu_attention_heads.gate(o, gate, **whole),
            *tpu_attention_heads.gate_gradients(o, gate, dz, **whole),
        )

    with jax.enable_x64(True):
        want = jax.jit(products)()
    with mock.patch.object(tpu_attention_heads, "BLOCK", (32, 2 * width)):
        got = jax.jit(kernels)(
            *(jnp.asarray(a, jnp.float32) for a in (x, weight, cos, sin, dy, o, gate, dz))
        )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"data": 2, "tensor": 4}], ids=str)
def test_side_by_side_heads_change_nothing(axes):
    """Packed documents, on one device and where each shard has one query head and two share a
    key head.
    """
    config = dataclasses.replace(HYBRID, head_dim=128)
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**axes)), jax.devices()[:8]) if axes else None
    layer = drawn(lambda: mixer_class("gated_attention")(config, Make(config, nnx.Rngs(0)), (0,)))
    graph, params = nnx.split(layer)
    context = Context(document_positions(SEGMENTS), SEGMENTS, mesh=mesh, options=COLLECT)

    def loss(params):
        y, diagnostics, _ = _run(graph, params, X, context)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), (y, diagnostics)

    both_ways = lambda: jax.jit(jax.grad(loss, has_aux=True))(params)
    want = both_ways()
    with (
        mock.patch.object(attention_heads, "kernels_norm_rotate_and_gate", return_value=True),
        mock.patch.object(
            attention_heads, "norm_and_rotate", wraps=attention_heads.norm_and_rotate
        ) as rotated,
    ):
        got = both_ways()
    assert rotated.call_count == 2
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-6)


@pytest.mark.slow
def test_every_delta_rule_can_be_trained_with():
    """What each gives, and its gradients, are the operator's tests; here that the setting
    reaches it.
    """

    def program(name):
        config = dataclasses.replace(HYBRID, delta_rule=name)
        layer = nnx.eval_shape(
            lambda: mixer_class("gated_deltanet")(config, Make(HYBRID, nnx.Rngs(0)), (0,))
        )
        graph, params = nnx.split(layer)
        return str(
            jax.make_jaxpr(
                jax.grad(lambda p: jnp.sum(_run(graph, p, X, Context(SEGMENTS, SEGMENTS))[0]))
            )(params)
        )

    programs = {
        name: program(name) for name in ("recurrent", "chunked", "associative", "pallas_tpu")
    }
    assert len(set(programs.values())) == 4
    assert [name for name, text in programs.items() if "pallas_call" in text] == ["pallas_tpu"]


@pytest.fixture(params=(*MIXERS, "retention"))
def declarations(request):
    """(name, configuration of two layers, path → declaration of the parameters of a mixer)."""
    config = base(request.param)
    found = parameter_declarations(config)
    return request.param, config, {path: p for path, p in found.items() if "/mixer/" in path}


def test_counts_are_those_of_the_parameters(declarations):
    name, config, of_mixer = declarations
    layer = nnx.eval_shape(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,)))
    of_layer = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    assert sum(p.size for p in of_mixer.values()) == 2 * of_layer
    assert parameter_counts(config).total == sum(
        p.size for p in parameter_declarations(config).values()
    )


def test_flops_are_weights_and_the_mixer_s(declarations):
    name, config, of_mixer = declarations
    matrices = [p for p in of_mixer.values() if p.kind in ("matrix", "indexer")]
    products = 2 * sum(p.size for p in matrices if len(p.shape) > 1)
    own = 2 * mixer_class(name).activation_flops(config, T)
    assert forward_flops_per_token(config, T)[name] == products + own > 0


def test_matrices_are_stored_in_parts(declarations):
    """On a mesh of rows, tokens and heads."""
    axes = MeshConfig(data=2, context=2, tensor=2)
    mesh = make_mesh(ParallelConfig(mesh=axes), jax.devices()[:8])
    for path, p in declarations[2].items():
        if len(p.shape) > 1 and p.size > 64:
            part = NamedSharding(mesh, storage_spec(p, p.shape, mesh)).shard_shape(p.shape)
            assert part != p.shape, path


def test_rates_do_not_decay(declarations):
    assert all(not p.decays(True) for p in declarations[2].values() if p.kind == "rate")


@pytest.mark.slow
def test_the_page_s_mixer_trains_on_a_mesh():
    model = dataclasses.replace(
        HYBRID,
        linear_mixer="retention",
        full_attention_interval=2,
        num_experts=0,
        intermediate_size=16,
    )
    config = Config(model=model, train=TrainConfig(steps=4, batch_size=4, sequence_length=T))
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, tensor=2)), jax.devices()[:4])
    batch = {
        "tokens": np.asarray(np.random.default_rng(1).integers(0, 64, (4, T)), np.int32),
        "segment_ids": np.ones((4, T), np.int32),
    }
    state, step, losses = resolved(config, mesh).init_state(), step_of(config, mesh), []
    log_decay = np.asarray(state["params"]["layers"][0]["mixer"]["log_decay"])
    for _ in range(3):
        state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
        losses.append(float(metrics["loss"]))
    # neither learns nor decays
    np.testing.assert_array_equal(state["params"]["layers"][0]["mixer"]["log_decay"], log_decay)
    assert losses[-1] < losses[0]
    assert flops_per_token(config.model, T) > 0
    with refused("retention", "layers 0"):
        check_hf_form(config.model)


# ---- the table and the declarations
# ------------------------------------------------------------------------------


SWAPPED = dataclasses.replace(
    HYBRID, full_mixer="gated_deltanet", linear_mixer="gated_attention", mtp_depth=1
)


def test_names_of_the_pattern_stand_for_mixers():
    assert SWAPPED.mixers == ("gated_attention", "gated_deltanet")
    assert SWAPPED.mixers_and_sparsity[-1] == ("gated_deltanet", True)


def test_the_same_mixers_are_the_same_model():
    same = dataclasses.replace(SWAPPED, layer_types=("gated_attention", FULL))
    assert same.mixers == SWAPPED.mixers
    assert not SWAPPED.differing_settings(same)
    other = dataclasses.replace(HYBRID, layer_types=(FULL, LINEAR))
    assert HYBRID.differing_settings(other) == ("layer_types",)


@pytest.mark.parametrize(
    "layers, stacks",
    [(6, ((0,), (1,), (2, 4), (3, 5))), (4, ((0,), (1,), (2,), (3,)))],
)
def test_layers_of_a_kind_are_stacked(layers, stacks):
    """Where they come in periods, after the first dense ones."""
    config = dataclasses.replace(HYBRID, num_hidden_layers=layers, mlp_only_layers=(0, 1))
    assert config.layer_stacks == stacks


def test_the_released_model_is_stacked_by_period():
    assert ModelConfig().layer_stacks == tuple(tuple(range(i, 48, 4)) for i in range(4))


@pytest.mark.parametrize(
    "settings, names",
    [
        (
            {"linear_mixer": "gated_deltnet"},
            ("model.linear_mixer = 'gated_deltnet'", "'gated_deltanet'"),
        ),
        (
            {"layer_types": (LINEAR, "retentoin")},
            ("model.layer_types[1] = 'retentoin'", "'retention'"),
        ),
        (
            {"layer_types": (FULL, FULL), "delta_term": False},
            ("model.delta_term = False", "gated_att"),
        ),
        (
            {"layer_types": (FULL, "gdn2"), "beta_range": 2},
            ("model.beta_range = 2", "gated_att", "gdn2"),
        ),
        (
            {"layer_types": (FULL, "gated_deltanet"), "beta_range": 2, "beta_gate": False},
            ("model.beta_range = 2", "model.beta_gate = False"),
        ),
        (
            {"layer_types": (FULL, FULL), "delta_rule": "chunked"},
            ("model.delta_rule = 'chunked'",),
        ),
        (
            {"linear_mixer": "broken"},
            ("'broken'", "'my_mixer:Missing'", "AttributeError"),
        ),
    ],
)
def test_names_and_settings_that_fit_no_layer(monkeypatch, settings, names):
    monkeypatch.setitem(MIXERS, "broken", "my_mixer:Missing")
    with refused(*names):
        parameter_declarations(dataclasses.replace(HYBRID, **settings))


@pytest.mark.parametrize("name", MIXERS)
def test_every_line_traces_in_bfloat16(name):
    """Also those whose values only slow tests look at: packed rows and a cached token, whose
    cache goes on as it was.
    """
    kind, read = mixer_class(name), set()

    class Recorded(ModelConfig):
        def __getattribute__(self, setting):
            read.add(setting)
            return super().__getattribute__(setting)

    config = Recorded(**vars(dataclasses.replace(base(name), dtype="bfloat16")))
    read.clear()  # of its own checks
    graph, params = nnx.split(nnx.eval_shape(lambda: kind(config, Make(config, nnx.Rngs(0)), (0,))))
    # what it says of the settings that are refused where no layer reads them
    assert read & set(READ_BY_PART) == set(kind.switches_read) & set(READ_BY_PART)
    x, one = (
        jax.ShapeDtypeStruct((2, length, config.hidden_size), jnp.bfloat16) for length in (T, 1)
    )
    packed = lambda params, x: _run(
        graph, params, x, Context(document_positions(SEGMENTS), SEGMENTS)
    )[0]
    step = lambda params, x, cache: _run(
        graph, params, x, Context(jnp.zeros((2, 1), jnp.int32)), cache
    )
    cache = jax.eval_shape(
        lambda: jax.tree.map(
            lambda leaf: leaf[None] if kind.writes_cache_in_place else leaf,
            kind.init_cache(config, 2, T),
        )
    )
    y, _, after = jax.eval_shape(step, params, one, cache)
    alike = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert alike(jax.eval_shape(packed, params, x), x)
    assert alike(y, one)
    assert all(jax.tree.leaves(jax.tree.map(alike, cache, after)))
    rates = [
        p
        for p in parameter_declarations(dataclasses.replace(config, linear_mixer=name)).values()
        if p.kind == "rate"
    ]
    assert all(stored_dtype(rate, "bfloat16") == np.float32 for rate in rates)


def test_a_parameter_without_a_decision_is_an_error(monkeypatch):
    layer = mixer_class("retention")
    start = layer.make_output

    def forgetful(self, make):
        start(self, make)
        self.extra = nnx.Param(jnp.zeros(3))

    monkeypatch.setattr(layer, "make_output", forgetful)
    with refused("layers/0/mixer/extra", "my_mixer:Retention", error=ValueError):
        parameter_declarations(
            dataclasses.replace(HYBRID, linear_mixer="retention", rope_theta=77.0)
        )
    make = Make(HYBRID, nnx.Rngs(0))
    with refused("'embd'", "'embed'", error=ValueError):
        make.matrix((4, 4), "embd -> mlp")
    with refused("1", error=ValueError):
        make.matrix((4, 4), "embed ->")
