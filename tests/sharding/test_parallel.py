"""Sharding rules, meshes and their errors, expert parallelism, checkpoints between meshes, and
rematerialisation. test_parallel_equality.py compares whole runs on meshes with one device.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import Config, MeshConfig, ParallelConfig, TrainConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.model import expert_implementations, parameter_declarations
from qwen3next_jax.model import expert_parallelism as exchange
from qwen3next_jax.model.layers import Context, ForwardOptions
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.remat import keeps_expert_hidden, rematerialized
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sharding import gathering
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import LOGICAL_AXES, per_shard, storage_spec, tree_shardings
from tests.in_process import resolved
from tests.models import DIVISIBLE, drawn
from tests.refusals import refused

RELEASED = Config(train=TrainConfig(batch_size=64, sequence_length=4096))
SMALL = Config(
    model=dataclasses.replace(DIVISIBLE, mtp_depth=1),
    train=TrainConfig(batch_size=8, sequence_length=32),
)


def _mesh(**axes):
    """A mesh of the first virtual devices, with these numbers of devices along its axes."""
    return make_mesh(
        ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes)),
        jax.devices()[: math.prod(axes.values())],
    )


# ---- rules


@pytest.mark.parametrize(
    "change",
    [{}, {"num_experts": 0, "tie_word_embeddings": True, "mtp_depth": 0}],
    ids=("sparse", "dense"),
)
@pytest.mark.parametrize(
    "axes",
    [{"data": 8}, {"expert": 4, "tensor": 2}, {"data": 2, "context": 4}, {"tensor": 8}],
    ids=str,
)
def test_everything_large_is_stored_in_parts(axes, change):
    """All arrays of the released model's train state: those above 1 MiB are split over all eight
    devices, and no stack of layers is split along its layers.
    """
    if change and "expert" in axes:
        axes = {"data": 8}
    config = dataclasses.replace(
        RELEASED, model=dataclasses.replace(RELEASED.model, layer_types=(), **change)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        resolved(config, _mesh(**axes)).abstract_state
    ):
        name, spec = path_string(path), leaf.sharding.spec
        if leaf.size * leaf.dtype.itemsize > 2**20:
            assert math.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size / 8, name
        if "layers" in name:
            assert spec[0] is None, name


def test_what_follows_no_parameter_is_an_error():
    with refused("opt_state/mu/layers/0/mixer/new_proj", error=ValueError):
        tree_shardings(
            {"opt_state": {"mu": {"layers": [{"mixer": {"new_proj": jnp.zeros((2, 2))}}]}}},
            parameter_declarations(RELEASED.model),
            _mesh(data=2),
        )


def test_dimensions_take_the_axes_that_divide_them():
    parameters = parameter_declarations(RELEASED.model)
    axes = {axis for p in parameters.values() for axis in p.axes}
    assert axes | {"table_rows", "table_width"} == set(LOGICAL_AXES)
    # The first axis of a dimension splits it in computation too; the others split only its storage.
    for name, axes, expected in (
        ("mixer/q_proj", {"data": 2, "tensor": 4}, P(None, "data", "tensor", None)),
        ("mixer/k_proj", {"data": 2, "tensor": 4}, P(None, "data", None, "tensor")),
        ("mlp/expert_down", {"data": 4, "tensor": 2}, P(None, None, ("tensor", "data"), None)),
        ("mixer/k_proj", {"data": 2, "context": 4}, P(None, ("context", "data"), None, None)),
    ):
        parameter = parameters[f"layers/3/{name}"]
        shape = parameter.stack_shape + parameter.shape
        assert storage_spec(parameter, shape, _mesh(**axes)) == expected


# ---- meshes


@pytest.mark.parametrize(
    "mesh, names",
    [
        (
            {"data": 3, "tensor": 2},
            ("2 = 6", "8"),
        ),
        ({"tensor": 3}, ("3 = 3", "8")),
        ({"data": 0}, ("parallel.mesh.data = 0", "1", "-1")),
        ({"data": -1, "expert": -1}, ("-1",)),
    ],
)
def test_axes_that_do_not_multiply_to_the_devices(mesh, names):
    with refused(*names):
        make_mesh(ParallelConfig(mesh=MeshConfig(**mesh)), jax.devices())


@pytest.mark.parametrize(
    "mesh, model, train, names",
    [
        (
            {"data": 8},
            {},
            {"batch_size": 12},
            ("expert = 8", "12", "6"),
        ),
        (
            {"expert": 8},
            {"num_experts": 12},
            {},
            ("parallel.mesh.expert = 8", "model.num_experts = 12", "6", "12"),
        ),
        (
            {"tensor": 4},
            {"linear_num_key_heads": 2},
            {},
            ("parallel.mesh.tensor = 4", "model.linear_num_key_heads = 2", "2"),
        ),
        (
            {"context": 8},
            {},
            {"sequence_length": 40},
            ("context = 8", "train.sequence_length = 40", "5", "10"),
        ),
        ({"expert": 2}, {"num_experts": 0}, {}, ()),
        *[
            (
                {"tensor": n},
                {
                    "linear_num_key_heads": 16,
                    "linear_num_value_heads": 16,
                    "num_attention_heads": 12,
                },
                {},
                (f"parallel.mesh.tensor = {n}", "4"),
            )
            for n in (5, 6, 8)
        ],
        (
            {"tensor": 6},
            {
                "linear_num_key_heads": 12,
                "linear_num_value_heads": 12,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
            },
            {},
            ("tensor = 6", "model.num_key_value_heads = 4", "4", "12"),
        ),
        (
            {"context": 4},
            {},
            {"sequence_length": 8},
            ("context = 4", "2", "3"),
        ),
        (
            {"context": 5},
            {},
            {"sequence_length": 8},
            ("context = 5", "2"),
        ),
    ],
)
def test_axes_that_do_not_divide(mesh, model, train, names):
    config = dataclasses.replace(
        SMALL,
        model=dataclasses.replace(SMALL.model, **model),
        train=dataclasses.replace(SMALL.train, **train),
    )
    with refused(*names):
        resolved(config, _mesh(**mesh))


# ---- experts


def _outputs_and_gradients(mesh, x, weight, expert, gate_up, down, keep_hidden=False):
    """(output of the experts, its four gradients): expert parallel on `mesh`; None: one device."""
    if mesh is None:
        moe = expert_implementations.sorted_moe
    else:
        rows, experts = P(("data", "expert")), P("expert")
        moe = functools.partial(
            exchange.expert_parallel_moe,
            expert_axis="expert",
            token_axes=("data", "expert"),
            keep_hidden=keep_hidden,
        )
        moe = per_shard(moe, mesh, (rows, rows, rows, experts, experts), rows)
    y, pullback = jax.vjp(lambda x, w, g, d: moe(x, w, expert, g, d), x, weight, gate_up, down)
    return y, *pullback(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))


@pytest.mark.parametrize(
    "gathered_shards, chunk_bytes, overlap_rows, keep_hidden",
    [
        pytest.param(8, 2048, 16, True, marks=pytest.mark.slow),
        pytest.param(8, 2**29, 512, False, marks=pytest.mark.slow),
        (1, 4096, 512, False),
    ],
    ids=("gathered", "at once", "exchanged"),
)
def test_split_experts_are_exact_at_any_imbalance(
    gathered_shards, chunk_bytes, overlap_rows, keep_hidden, monkeypatch
):
    """Three kinds of choices: balanced; all on one shard, beyond its capacity; a shard and an
    expert without choices. The tokens go through the experts in chunks (the gathered ones in two
    overlapping halves, whose hidden layers are kept), or all at once.
    """
    monkeypatch.setattr(exchange, "GATHERED_SHARDS", gathered_shards)
    monkeypatch.setattr(exchange, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(exchange, "OVERLAP_ROWS", overlap_rows)
    monkeypatch.setattr(exchange, "_buffer_rows", lambda balanced: balanced // 2 + 3)
    rng = np.random.default_rng(0)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((512, 16), (8, 16, 2, 12), (8, 12, 16))
    )
    weight = jnp.asarray(rng.random((512, 2)), jnp.float32)
    run = jax.jit(
        functools.partial(_outputs_and_gradients, _mesh(data=2, expert=4), keep_hidden=keep_hidden)
    )
    run_on_one_device = jax.jit(functools.partial(_outputs_and_gradients, None))
    for choices in (
        rng.permuted(np.tile(np.arange(8), (512, 1)), axis=1)[:, :2],
        np.tile([2, 3], (512, 1)),
        rng.permuted(np.tile([0, 1, 5, 7], (512, 1)), axis=1)[:, :2],
    ):
        arguments = (x, weight, jnp.asarray(choices, jnp.int32), gate_up, down)
        expected_values = run_on_one_device(*arguments)
        for got, expected in zip(run(*arguments), expected_values, strict=True):
            # Sums of up to 512 products of float32: a few times √512 roundings of 6e-8.
            np.testing.assert_allclose(
                got, expected, rtol=0, atol=5e-6 * float(np.abs(expected).max())
            )


@pytest.mark.slow
@pytest.mark.parametrize("chunk_memory, at_once", [(1e-3, True), (1e9, False)])
def test_one_device_takes_all_tokens_at_once(chunk_memory, at_once, monkeypatch):
    """Eight chunks of rows, or one, where the gradients that eight chunks sum up take the memory of
    more rows than there are. Both have the results and gradients of each token by itself.
    """
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(exchange, "CHUNK_MEMORY", chunk_memory)
    x, weight, gate_up, down = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((128, 16), (128, 2), (8, 16, 2, 12), (8, 12, 16)))
    )
    choices = np.random.default_rng(0).permuted(np.tile(np.arange(8), (128, 1)), axis=1)[:, :2]
    expert = jnp.asarray(choices, jnp.int32)

    def experts(x, weight, gate_up, down):
        return exchange.local_moe(x, weight, expert, gate_up, down)

    def run(function, *inputs):
        y, pullback = jax.vjp(function, *inputs)
        return y, *pullback(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    run_experts = functools.partial(run, experts)
    equations = jax.make_jaxpr(run_experts)(x, weight, gate_up, down).eqns
    scans = [e.params["length"] for e in equations if e.primitive.name == "scan"]
    assert scans.count(8) == (0 if at_once else 2)  # forward and backward

    def by_token(x, weight, gate_up, down):
        hidden = jnp.einsum("nd,nadki->naki", x, gate_up[expert])
        hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1] * weight[..., None]
        return jnp.einsum("nai,naid->nd", hidden, down[expert])

    results = jax.jit(run_experts)(x, weight, gate_up, down)
    expected_values = jax.jit(functools.partial(run, by_token))(x, weight, gate_up, down)
    for got, expected in zip(results, expected_values, strict=True):
        # Sums of up to some 100 products of float32: a few times √100 roundings of 6e-8.
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tpu_s_gather_has_the_same_gradient(dim):
    """For a TPU, 37 tiles of lanes are padded to 38; other platforms do not pad."""
    mesh, spec = _mesh(data=8), P("data") if dim == 0 else P(None, "data")
    shape = (16, -1) if dim == 0 else (-1, 16)
    x_RD = jnp.arange(16 * 37 * gathering.LANES, dtype=jnp.float32).reshape(shape) / 2**14

    def gradient(x_RD):
        def loss(x_RD):
            gathered = gathering.all_gather(x_RD, "data", dim)
            return jnp.sum(jnp.sin(gathered * (1.0 + jax.lax.axis_index("data"))))

        return jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x_RD)

    expected = sum(device * np.cos(np.float64(x_RD) * device) for device in range(1, 9))
    for platform, columns in (("cpu", 37), ("tpu", 38)):
        with compiling_for(platform):
            jaxpr = jax.make_jaxpr(lambda x: gradient(x))(x_RD).pretty_print(use_color=False)
            got = gradient(x_RD)
        width = columns * gathering.LANES
        assert (f"f32[16,{width}]" if dim == 0 else f"f32[{width},16]") in jaxpr
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_every_device_counts_required_biases_and_replays_its_tokens():
    """Only tokens that count are counted, and only those without -1 are replayed."""
    config = dataclasses.replace(
        SMALL.model, moe=MoEConfig(scoring_func="sigmoid", router_bias=True)
    )
    layer = drawn(lambda: SparseMoE(config, Make(config, nnx.Rngs(0))))
    layer.router_bias[...] = jnp.linspace(-0.2, 0.2, 8)
    x_BTD = jax.random.normal(jax.random.key(1), (8, 16, 32))
    mask_BT = jnp.arange(16) < jnp.arange(9, 17)[:, None]
    choices = np.tile(np.arange(8, dtype=np.int16), (8, 16, 1))
    choices = np.random.default_rng(0).permuted(choices, axis=-1)[..., :2]
    choices[:, ::2] = -1
    graphdef, params = nnx.split(layer)

    def run(mesh):
        context = Context(
            jnp.zeros((8, 16), jnp.int32),
            stats_mask=mask_BT,
            mesh=mesh,
            replayed_expert_ids=jnp.asarray(choices),
            options=ForwardOptions(count_required_bias=True, record_routing=True),
        )

        @jax.jit
        def forward(params, x_BTD):
            y_BTD, aux = nnx.merge(graphdef, params)(x_BTD, context)
            return y_BTD, aux["required_bias"], aux["expert_ids"]

        return map(np.asarray, forward(params, x_BTD))

    y_one, counts_one, used_one = run(None)
    y_mesh, counts_mesh, used_mesh = run(_mesh(expert=2, context=2, tensor=2))
    assert np.all(counts_one.sum(axis=1) == np.sum(mask_BT))
    # Products summed in another order may move one token over the edge of a bin.
    assert np.abs(counts_mesh - counts_one).sum() <= 2
    np.testing.assert_array_equal(used_one[:, 1::2], choices[:, 1::2])
    assert np.all(used_one[:, ::2] >= 0)
    np.testing.assert_array_equal(used_mesh, used_one)
    assert np.linalg.norm(y_mesh - y_one) <= 1e-5 * np.linalg.norm(y_one)


# ---- checkpoints between meshes


def test_a_checkpoint_of_one_mesh_is_restored_on_others(tmp_path):
    rng = np.random.default_rng(0)
    pattern = resolved(SMALL, _mesh(data=4, tensor=2)).abstract_state
    expected = jax.tree.map(
        lambda leaf: rng.integers(0, 1000, leaf.shape).astype(leaf.dtype), pattern
    )
    expected["step"] = np.int32(1)
    state = jax.tree.map(
        lambda value, leaf: jax.device_put(value, leaf.sharding), expected, pattern
    )
    with open_store(tmp_path).open_checkpoints(
        dataclasses.replace(SMALL.checkpoint, keep_last=2)
    ) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path) as checkpoints:
        for axes in ({"data": 1}, {"tensor": 2}, {"expert": 4, "context": 2}):
            pattern = resolved(SMALL, _mesh(**axes)).abstract_state
            restored = checkpoints.restore(1, pattern)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), expected)
            leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(pattern), strict=True)
            for leaf, abstract in leaves:
                assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


# ---- remat


@pytest.mark.parametrize(
    "policy",
    ["block", "full", "dots", "kept", "offload", "keep=attention", "offload=input,attention"],
)
def test_remat_keeps_what_its_name_says(policy):
    """A scan over three blocks of two matmuls and an operation named "attention": how many
    residuals are saved and in which memory, and the gradient.
    """
    weights = jax.random.normal(jax.random.key(0), (3, 2, 8, 8)) / 3
    x = jax.random.normal(jax.random.key(1), (5, 8))

    def loss(weights, policy):
        def layer(w, x):
            return (
                x
                + jnp.tanh(save_for_backward(x @ w[0])) @ w[1]
                + save_for_backward(jnp.sin(x), "attention") ** 2 / 32
            )

        block = rematerialized(layer, policy, looped="offload" not in policy)
        return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0] ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    # four rounding errors of the largest element, 16
    np.testing.assert_allclose(
        gradient(weights, policy), gradient(weights, "none"), rtol=1e-6, atol=4e-6
    )
    _, pullback = jax.vjp(lambda weights: loss(weights, policy), weights)
    saved = [
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(pullback) if leaf.shape == (3, 5, 8)
    ]
    default = jax.devices()[0].default_memory().kind
    expected = {
        "block": [default] * 2,
        "full": [default],
        "dots": [default] * 3,
        "kept": [default] * 3,
        "offload": ["pinned_host"],
        "keep=attention": [default] * 2,
        "offload=input,attention": ["pinned_host"] * 2,
    }
    assert saved == expected[policy]


def test_a_kept_input_is_saved_once():
    """As in a block, the input goes to a norm that is itself rematerialised, and to a sum."""

    def block(weights, x):
        for w in weights:
            norm = jax.checkpoint(lambda x: x / (1 + jnp.abs(x)))
            x = x + jnp.tanh(norm(x) @ w)
        return x

    def loss(weights, x):
        step = rematerialized(block, "keep=input", looped=True)
        return jnp.sum(jax.lax.scan(lambda x, w: (step(w, x), None), x, weights)[0])

    weights, x = jnp.ones((3, 2, 8, 8)), jnp.ones((5, 8))
    _, pullback = jax.eval_shape(lambda w: jax.vjp(lambda w: loss(w, x), w), weights)
    assert [leaf.shape for leaf in jax.tree.leaves(pullback)].count((3, 5, 8)) == 1


@pytest.mark.parametrize(
    "policy, gathers, sorts, hidden",
    [
        ("full", 3, 2, False),
        ("block", 3, 1, False),
        ("dots", 2, 1, False),
        ("dots keep=experts", 2, 1, True),
    ],
)
def test_a_policy_decides_what_experts_recompute(policy, gathers, sorts, hidden):
    """The rows of x are gathered forward, those of dy backward, and, under "full" and "block",
    those of x again backward: 128 rows of 8 shards. The choices are sorted forward, and under
    "full" again backward. The hidden layer, 24 wide, is saved under "dots keep=experts" alone.
    """
    x, weight, gate_up, down = (
        jnp.ones(s) for s in ((128, 16), (128, 2), (8, 16, 2, 12), (8, 12, 16))
    )
    f = functools.partial(
        exchange.expert_parallel_moe,
        expert_axis="expert",
        token_axes=("expert",),
        keep_hidden=keeps_expert_hidden(policy),
    )
    split = P("expert")
    layer = per_shard(
        lambda w, x: f(x, weight[:16], jnp.zeros((16, 2), jnp.int32), *w),
        _mesh(expert=8),
        (split, split),
        split,
    )
    block = rematerialized(layer, policy)
    gradient = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(block(w, x) ** 2)))((gate_up, down), x)
    lines = gradient.pretty_print(use_color=False).splitlines()

    def count(operation, result):
        return sum(f"{result} = {operation}[" in line for line in lines)

    assert count("all_gather", "f32[128,16]") == gathers
    assert sum(" = sort[" in line and "i32[784]" in line for line in lines) == sorts
    _, pullback = jax.eval_shape(lambda w, x: jax.vjp(block, w, x), (gate_up, down), x)
    assert any(leaf.shape[-1:] == (24,) for leaf in jax.tree.leaves(pullback)) == hidden
