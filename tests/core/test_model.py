"""Properties of the whole model: documents are separate, time is causal, the layer stack is what
the config says.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.layers import Context
from qwen3next_jax.ops.compile_target import compiling_for
from tests.models import UNEVEN

# Two orders of summation of ~100-term float32 sums through four layers: a few hundred rounding
# errors of 6e-8.
TOLERANCE = 2e-5


def _model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and parameters, all drawn anew: norm weights off their start values, so that a
    wrong form of norm shows.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    return graphdef, jax.tree.map(
        lambda p: jnp.asarray(0.2 * rng.standard_normal(p.shape), jnp.float32), params
    )


def _close(a, b):
    np.testing.assert_allclose(
        a, b, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(b).max(initial=0)))
    )


SHORT = dataclasses.replace(UNEVEN, num_hidden_layers=2, layer_types=())


@pytest.fixture(scope="module")
def packed():
    """A packed batch, its documents one by one, and a function (params, tokens, segment_ids,
    weights) → (Output, the gradient of Σ logits · weights), one program for all tests; weights
    of 0.
    """
    graphdef, params = _model(SHORT)
    rng = np.random.default_rng(0)
    # a document of one token; padding of 0 and 1; a whole row
    lengths = ((1, 2, 17, 9, 3), (20, 11), (32,))
    documents = [[rng.integers(0, SHORT.vocab_size, n) for n in row] for row in lengths]
    tokens, segments = np.zeros((3, 32), np.int32), np.zeros((3, 32), np.int32)
    for i, row in enumerate(documents):
        joined = np.concatenate(row)
        tokens[i, : len(joined)] = joined
        segments[i, : len(joined)] = np.repeat(np.arange(1, len(row) + 1), [len(d) for d in row])

    @jax.jit
    def outputs_and_gradient(params, tokens, segments, weights):
        def loss(params):
            out = nnx.merge(graphdef, params)(tokens, segments)
            return jnp.sum(out.logits * weights), out

        gradient, out = jax.grad(loss, has_aux=True)(params)
        return out, gradient

    return (
        params,
        documents,
        tokens,
        segments,
        # NumPy arrays: each slice of a JAX array would be a program of its own.
        lambda *inputs: jax.device_get(outputs_and_gradient(*inputs)),
        np.zeros((3, 32, SHORT.vocab_size), np.float32),
    )


def _alone(documents):
    """The documents of all rows, each in a row of its own, three rows a batch: (row, start,
    length) of each, and batches.
    """
    places = [
        (i, sum(map(len, row[:j])), document)
        for i, row in enumerate(documents)
        for j, document in enumerate(row)
    ]
    places += [(0, 0, np.zeros(0, np.int32))] * (-len(places) % 3)
    for k in range(0, len(places), 3):
        tokens = np.zeros((3, 32), np.int32)
        for row, (_, _, document) in enumerate(places[k : k + 3]):
            tokens[row, : len(document)] = document
        lengths = np.array([[len(document)] for _, _, document in places[k : k + 3]])
        yield (
            [(i, start, len(d)) for i, start, d in places[k : k + 3]],
            tokens,
            (np.arange(32) < lengths).astype(np.int32),
        )


def test_packed_documents_equal_separate_ones(packed):
    params, documents, tokens, segments, run, nothing = packed
    out, _ = run(params, tokens, segments, nothing)
    for places, *batch in _alone(documents):
        alone, _ = run(params, *batch, nothing)
        for row, (i, start, n) in enumerate(places):
            _close(out.logits[i, start : start + n], alone.logits[row, :n])
            for d in range(SHORT.mtp_depth):
                valid = max(n - 2 - d, 0)  # positions whose target lies in the document
                _close(
                    out.mtp_logits[d][i, start : start + valid], alone.mtp_logits[d][row, :valid]
                )


def test_packed_gradients_equal_the_sum_over_separate_documents(packed):
    params, documents, tokens, segments, run, nothing = packed
    weights = np.random.default_rng(2).standard_normal(nothing.shape, np.float32)
    _, whole = run(params, tokens, segments, weights * (np.asarray(segments) > 0)[..., None])
    parts = []
    for places, *batch in _alone(documents):
        placed = np.zeros_like(weights)
        for row, (i, start, n) in enumerate(places):
            placed[row, :n] = weights[i, start : start + n]
        parts.append(run(params, *batch, placed)[1])
    total = jax.tree.map(lambda *g: sum(g), *parts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * float(np.linalg.norm(b) + 1)
        ),
        whole,
        total,
    )


def test_the_future_never_changes_the_past(packed):
    params, _, tokens, _, run, nothing = packed
    segments, changed = np.ones_like(tokens), tokens.copy()
    changed[:, 20:] = (tokens[:, 20:] + 7) % SHORT.vocab_size
    (a, _), (b, _) = run(params, tokens, segments, nothing), run(params, changed, segments, nothing)
    _close(a.logits[:, :20], b.logits[:, :20])
    for d in range(SHORT.mtp_depth):
        _close(a.mtp_logits[d][:, : 19 - d], b.mtp_logits[d][:, : 19 - d])
        # it does read token t+1+d
        assert np.abs(a.mtp_logits[d][:, 19 - d] - b.mtp_logits[d][:, 19 - d]).max() > 1e-2


@pytest.mark.slow
def test_one_token_alone_is_the_first_of_many(packed):
    params, _, tokens, segments, run, nothing = packed
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Qwen3Next(SHORT, rngs=nnx.Rngs(0))))
    single = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens[:, :1]))(params)
    assert single.logits.shape == (3, 1, SHORT.vocab_size)
    assert [m.shape[1] for m in single.mtp_logits] == [0, 0]
    _close(single.logits[:, 0], run(params, tokens, segments, nothing)[0].logits[:, 0])


def test_scanned_layers_equal_the_same_layers_one_by_one(monkeypatch):
    """Two periods, which a TPU takes without a loop."""
    stacks = ((0, 2), (1, 3))
    config = dataclasses.replace(UNEVEN, mtp_depth=0)
    assert config.layer_stacks == stacks
    apart = dataclasses.replace(config, num_hidden_layers=6, mlp_only_layers=(0, 1))
    assert apart.layer_stacks == ((0,), (1,), (2, 4), (3, 5))
    graphdef, params = _model(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, UNEVEN.vocab_size)

    def run(params):
        return nnx.merge(graphdef, params)(tokens, output_hidden_states=True).hidden_states

    states = jax.device_get(jax.jit(run)(params))
    params = jax.device_get(params)  # in NumPy: each slice of a JAX array would be a program
    for platform in ("tpu", "gpu"):
        with compiling_for(platform):
            assert "unroll=2" in str(jax.make_jaxpr(lambda params: run(params))(params))
    model, x = nnx.merge(graphdef, params), states[0]
    run_block = jax.jit(
        lambda graph, p, x: nnx.merge(graph, p)(x, context), static_argnames="graph"
    )
    context = Context(jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12)))
    for layer in range(config.num_hidden_layers - 1):
        block, place = next(
            (block, layers.index(layer))
            for block, layers in zip(model.layers, stacks)
            if layer in layers
        )
        graph, stacked = nnx.split(block)
        x, _, _ = run_block(graph, jax.tree.map(lambda p, i=place: p[i], stacked), x)
        _close(x, states[layer + 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {
            "layer_types": (LINEAR, FULL, FULL),
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": False,
            "mtp_depth": 1,
        },
        {
            "full_attention_interval": 0,
            "num_hidden_layers": 2,
            "num_experts": 0,
            "tie_word_embeddings": True,
            "mtp_depth": 0,
        },
    ],
    ids=("attention twice, experts every second layer", "recurrent only, dense, tied"),
)
def test_every_variant_runs_and_reaches_all_its_parameters(change):
    config = dataclasses.replace(UNEVEN, **({"layer_types": ()} | change))
    graphdef, params = _model(config)
    tokens = jax.random.randint(jax.random.key(0), (1, 24), 0, UNEVEN.vocab_size)

    @jax.jit
    def gradient(params):
        def loss(params):
            out = nnx.merge(graphdef, params)(tokens)
            return jnp.sum(jax.nn.log_softmax(out.logits)[..., 0]) + sum(
                jnp.sum(jax.nn.log_softmax(m)[..., 0]) for m in out.mtp_logits
            )

        return jax.grad(loss)(params)

    for path, g in jax.tree_util.tree_leaves_with_path(gradient(params)):
        assert np.isfinite(g).all(), jax.tree_util.keystr(path)
        assert np.abs(g).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_bfloat16_follows_float32():
    # Dense: near a tie a rounded router input may choose another expert, which no tolerance covers.
    config = dataclasses.replace(
        UNEVEN, num_experts=0, mtp_depth=0, num_hidden_layers=2, layer_types=()
    )
    _, params = _model(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, UNEVEN.vocab_size)
    graphs = (
        _model(dataclasses.replace(config, dtype=dtype))[0] for dtype in ("float32", "bfloat16")
    )
    exact, rounded = (
        jax.jit(lambda p, graph=graph: nnx.merge(graph, p)(tokens).logits)(params)
        for graph in graphs
    )
    assert rounded.dtype == jnp.float32
    # About 20 roundings of relative size 2⁻⁹ on the way through two layers, adding up as a random
    # walk: 4.5 · 2⁻⁹ = 0.9 %.
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


def test_a_bfloat16_backward_pass_keeps_no_float32_activations():
    """Of what has a number for every channel of a token, the inverses of the delta rule's chunks
    alone are float32.
    """
    config = dataclasses.replace(UNEVEN, dtype="bfloat16", num_hidden_layers=2, mtp_depth=0)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))

    def backward(params, tokens):
        return jax.vjp(lambda params: nnx.merge(graphdef, params).features(tokens).hidden, params)[
            1
        ]

    b, t, chunk = 2, 128, 64
    kept = jax.tree.leaves(
        jax.eval_shape(backward, params, jax.ShapeDtypeStruct((b, t), jnp.int32))
    )
    large = {leaf.shape for leaf in kept if leaf.dtype == jnp.float32 and leaf.size >= b * t * 16}
    # of a stack, and of a layer
    weights = {shape for leaf in jax.tree.leaves(params) for shape in (leaf.shape, leaf.shape[1:])}
    assert large - weights == {(t // chunk, b, 2, chunk, 2 * chunk)}


def test_text_of_a_model_is_short():
    """A line for each part, whether the parameters are arrays or shapes."""
    model = nnx.eval_shape(lambda: Qwen3Next(UNEVEN, rngs=nnx.Rngs(0)))
    for text in (repr(model), str(model)):
        assert len(text.splitlines()) == 3 + len(UNEVEN.layer_stacks)
        assert UNEVEN.linear_mixer in text
        assert UNEVEN.full_mixer in text
