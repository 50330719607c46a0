"""`examples/one_page.py` is the package's model, loss, gradients and optimizer."""

import dataclasses
import runpy
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import OptimizerConfig, TrainConfig
from qwen3next_jax.model.language_model import parameter_declarations
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from tests.models import HYBRID, drawn_model

PAGE = types.SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "examples/one_page.py"), run_name="one_page")
)
CONFIG = PAGE.Config(
    vocab_size=32,
    hidden_size=32,
    num_layers=2,
    full_attention_interval=2,
    num_experts=4,
    expert_width=16,
    mtp_depth=2,
)
MODEL = dataclasses.replace(
    HYBRID,
    vocab_size=32,
    hidden_size=32,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=128,
    mtp_depth=2,
    initializer_range=0.02,
)
# The largest relative L2 difference of two float32 computations in another order.
CLOSE = 1e-5
# The gradients of the decays are differences of sums that nearly cancel. In float32, each of the
# two computations is up to 2e-4 away from the page in float64.
CLOSE_DECAY = 5e-4


@pytest.fixture(scope="module")
def batch():
    """Rows of documents of several lengths, a whole row, and padding; longer than a chunk."""
    rng = np.random.default_rng(0)
    lengths = [[1, 63, 2, 62], [128], [70, 1, 30]]
    segments = np.zeros((3, 128), np.int32)
    for row, own in enumerate(lengths):
        ids = np.repeat(1 + np.arange(len(own)), own)
        segments[row, : len(ids)] = ids
    return dict(tokens=rng.integers(32, size=segments.shape), segment_ids=segments)


def page_layout(params):
    """The package stacks the parameters of equal layers; here every stack has one layer."""
    first = lambda layer: jax.tree.map(lambda leaf: leaf[0], layer)
    return params | {"layers": [first(params["layers"][i]) for i in range(CONFIG.num_layers)]}


@pytest.fixture(scope="module")
def results(batch):
    """(logits, loss, gradients), of the package and of the page, in the layout of the page."""
    graphdef, state = nnx.split(drawn_model(MODEL), nnx.Param)
    params = nnx.to_pure_dict(state)

    @jax.jit
    def of_package(params):
        def loss(params):
            train = dataclasses.replace(TrainConfig(), balance_loss_weight=0.001)
            counts = count_tokens_and_targets(batch, MODEL.mtp_depth)
            return total_loss(nnx.merge(graphdef, params), batch, train, counts)[0]

        output = nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"])
        return output.logits, *jax.value_and_grad(loss)(params)

    @jax.jit
    def of_page(params):
        inputs = batch["tokens"], batch["segment_ids"], CONFIG
        logits, _ = PAGE.forward(params, *inputs)
        (loss, _), gradients = jax.value_and_grad(PAGE.training_loss, has_aux=True)(params, *inputs)
        return logits[0], loss, gradients

    logits, loss, gradients = of_package(params)
    page = page_layout(params)
    return (logits, loss, page_layout(gradients)), of_page(page), page


def assert_close(got, want):
    """Compares trees of arrays."""

    def check(path, a, b):
        difference = np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)
        name = jax.tree_util.keystr(path)
        limit = CLOSE_DECAY if "a_log" in name or "dt_bias" in name else CLOSE
        assert difference <= limit, name

    jax.tree_util.tree_map_with_path(check, got, want)


def test_its_parameters_have_the_packages_shapes(results):
    drawn = jax.eval_shape(lambda: PAGE.init_params(CONFIG, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, results[2])


def test_its_logits_loss_and_gradients_are_the_packages(results, batch):
    (logits, *package), (page_logits, *page), _ = results
    inside = batch["segment_ids"] > 0  # padding predicts nothing
    assert_close(page_logits[inside], logits[inside])
    assert_close(page, package)


def test_its_optimizer_is_the_packages(results):
    """Two updates, with gradients that are clipped and that are not."""
    gradients, params = results[1][2], results[2]
    config = OptimizerConfig(learning_rate=3e-3, warmup_steps=50)
    by_path = {
        path.rpartition("/")[2]: parameter
        for path, parameter in parameter_declarations(MODEL).items()
    }
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = {f"{i}/{path[-1].key}": path[-1].key for i, (path, _) in enumerate(leaves)}
    flat = lambda tree: dict(zip(names, jax.tree.leaves(tree)))
    optimizer = make_optimizer(
        config,
        {name: by_path[key] for name, key in names.items()},
        learning_rate_schedule(config, 500),
    )
    theirs, state = flat(params), optimizer.init(flat(params))
    ours, means, squares = params, *[jax.tree.map(jnp.zeros_like, params)] * 2
    for step, size in enumerate((100.0, 1e-3)):
        scaled = jax.tree.map(lambda g, size=size: g * size, gradients)
        updates, state = optimizer.update(flat(scaled), state, theirs)
        theirs = jax.tree.map(jnp.add, theirs, updates)
        rate = PAGE.learning_rate(step, 500)
        ours, means, squares = PAGE.adamw(ours, scaled, means, squares, step, rate)
        assert_close(flat(ours), theirs)


def test_the_recurrence_and_its_chunks_agree():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 96, 2, 8)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.exponential(size=(2, 96, 2)), rng.uniform(size=(2, 96, 2))
    starts = rng.uniform(size=(2, 96)) < 0.1
    inputs = [jnp.asarray(x) for x in (q, k, v, g, beta, starts)]
    assert_close(PAGE.delta_rule_in_chunks(*inputs, chunk=32), PAGE.delta_rule(*inputs))


def test_rows_hold_whole_pieces_of_all_documents():
    documents = [b"a" * 10, b"b" * 3, b"c" * 25]
    tokens, segments = PAGE.pack(documents, 8)
    assert (segments > 0).sum() == sum(len(text) + 1 for text in documents)
    counts = np.bincount(tokens[segments > 0], minlength=257)
    assert [counts[i] for i in (*b"abc", 256)] == [10, 3, 25, 3]
