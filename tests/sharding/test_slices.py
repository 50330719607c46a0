"""Slices: a run on several of them is that of one mesh, goes on with any number of them, and gives
one clear line where they do not fit. On TPU slices that are only described: where the axes of the
mesh lie.
"""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from qwen3next_jax.config import Config, MeshConfig, ParallelConfig, TrainConfig
from qwen3next_jax.config.run import OptimizerConfig
from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.compiled import program_collectives
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from qwen3next_jax.sharding.slices import on_each_slice, sum_gradients_over_slices
from tests.in_process import resolved, shared_step
from tests.models import DIVISIBLE, numpy_draws
from tests.refusals import refused

# A single layer, because test_parallel_equality.py has slices of a whole model (slow).
CONFIG = Config(
    model=dataclasses.replace(
        DIVISIBLE, num_hidden_layers=1, full_attention_interval=1, shared_expert_intermediate_size=0
    ),
    optimizer=OptimizerConfig(warmup_steps=2, learning_rate=1e-3, clip_norm=0.5),
    train=TrainConfig(batch_size=8, sequence_length=32, steps=8, balance_loss_weight=0.1),
)


def _run(micro_batches: int = 1, slice_state: str = "replicated", **axes):
    """The configuration on a mesh with these axes: (run, its step)."""
    config = dataclasses.replace(
        CONFIG,
        parallel=ParallelConfig(mesh=MeshConfig(**{"data": 1} | axes), slice_state=slice_state),
        train=dataclasses.replace(CONFIG.train, gradient_accumulation=micro_batches),
    )
    devices = jax.devices()[: math.prod(axes.values())]
    run = resolved(config, make_mesh(config.parallel, devices))
    return run, shared_step(run, *run.stages)


def _batch(run, seed: int):
    """Rows of two documents each, of random lengths; the rows differ in the tokens that count."""
    rng = np.random.default_rng(seed)
    segments = 1 + (np.arange(32) >= rng.integers(8, 24, (8, 1)))
    segments[np.arange(32) >= 34 - 2 * np.arange(8)[:, None]] = 0
    batch = {
        "tokens": rng.integers(0, 64, (8, 32)).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
    }
    return jax.device_put(batch, batch_sharding(run.mesh))


@functools.cache
def _first_params():
    with numpy_draws():
        return jax.device_get(_run()[0].init_state()["params"])


@functools.cache
def _on_one_device():
    """After each of four steps: (state, metrics)."""
    run, step = _run()
    state, found = run.init_state(_first_params()), []
    for i in range(4):
        state, metrics = step(state, _batch(run, i))
        found.append(jax.device_get((state, metrics)))
    return found


def _assert_close(got, expected):
    """Relative L2 distance of every array at most 1e-5: float32 sums in another order."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True)
    for (path, a), b in pairs:
        error = np.linalg.norm(b - a) / max(np.linalg.norm(a), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


SLICED = {
    "four": {"slice": 4},
    "two, moments split, micro-batches": {
        "slice": 2,
        "expert": 2,
        "micro_batches": 2,
        "slice_state": "sharded",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SLICED.values(), ids=SLICED)
def test_slices_are_one_mesh(options):
    """Metrics (losses, the balance loss, counts, norms) and Adam's moments after a step, which are
    the clipped gradient and its square, times constants.
    """
    run, step = _run(**options)
    state, metrics = step(run.init_state(_first_params()), _batch(run, 0))
    expected_state, expected_metrics = _on_one_device()[0]
    assert float(metrics["grad_norm"]) > CONFIG.optimizer.clip_norm
    _assert_close(jax.device_get(metrics), expected_metrics)
    _assert_close(jax.device_get(state["opt_state"]), expected_state["opt_state"])
    on_slices = run.mesh.shape["slice"] if run.config.parallel.slice_state == "sharded" else 1
    for moment, parameter in zip(
        jax.tree.leaves(state["opt_state"][1][0].mu), jax.tree.leaves(state["params"]), strict=True
    ):
        shards = {str(shard.index) for shard in parameter.addressable_shards}
        parts = {str(shard.index) for shard in moment.addressable_shards}
        assert len(parts) == len(shards) * on_slices or moment.size < 8


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_slices(tmp_path):
    """One slice, two that share the moments, four, one: four steps as on one."""
    runs = ({}, SLICED["two, moments split, micro-batches"], SLICED["four"], {})
    losses = []
    with open_store(tmp_path).open_checkpoints(CONFIG.checkpoint) as checkpoints:
        for i, options in enumerate(runs):
            run, step = _run(**options)
            if i == 0:
                state = run.init_state(_first_params())
            else:
                state = checkpoints.restore(i, run.abstract_state)
            state, metrics = step(state, _batch(run, i))
            losses.append(float(metrics["total_loss"]))
            checkpoints.save(i + 1, state)
            checkpoints.wait()
    expected = [float(metrics["total_loss"]) for _, metrics in _on_one_device()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert expected[0] != pytest.approx(expected[1], rel=1e-4)


def test_gradients_cross_in_the_dtype_that_is_asked_for():
    """In bfloat16 a slice's gradient is rounded once, by at most 2^-8 of it, and so is the sum."""
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(slice=2)), jax.devices())
    stored = NamedSharding(mesh, PartitionSpec("data"))
    shared = NamedSharding(mesh, PartitionSpec(("data", "slice")))
    rng = np.random.default_rng(0)
    values = rng.uniform(1, 2, (2, 64)).astype(np.float32)
    grads = jax.device_put(values, NamedSharding(mesh, PartitionSpec("slice", "data")))
    for after in (stored, shared):
        for dtype, least, most in (("float32", 0.0, 2**-23), ("bfloat16", 2**-12, 2 * 2**-8)):
            total = jax.jit(lambda grads: sum_gradients_over_slices(grads, stored, after, dtype))(
                grads
            )
            assert total.sharding.is_equivalent_to(after, 1)
            assert total.dtype == np.float32
            error = np.abs(np.asarray(total) / values.sum(0) - 1).max()
            assert least <= error <= most, (after, dtype)


# ---- where the axes lie


@functools.cache
def _two_slices(grid: str):
    describe_topology(f"v5p:{grid}")  # sets the variables that libtpu reads when it is loaded
    return topologies.get_topology_desc(
        platform="tpu", topology_name=f"v5p:{grid}", num_slices=2
    ).devices


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@needs_libtpu
@pytest.mark.parametrize("sizes, crosses", [({}, 0), ({"slice": 1}, 1)], ids=("found", "data"))
def test_only_one_axis_crosses_slices(sizes, crosses):
    """Two slices of 64 chips lie along `slice`, or along `data` where `slice` is set to 1."""
    mesh = make_mesh(
        ParallelConfig(mesh=MeshConfig(expert=8, context=2, tensor=2, **sizes)),
        _two_slices("4x4x4"),
    )
    assert len(set(mesh.devices.flat)) == 128
    assert tuple(mesh.shape.values()) == ((1, 4) if sizes else (2, 2)) + (8, 2, 2)
    slice_index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    along = np.arange(mesh.devices.shape[crosses]) // (2 if crosses else 1)
    expected = np.expand_dims(along, [axis for axis in range(5) if axis != crosses])
    np.testing.assert_array_equal(slice_index, np.broadcast_to(expected, slice_index.shape))


@needs_libtpu
@pytest.mark.parametrize(
    "sizes, names",
    [
        ({"expert": 128}, ("parallel.mesh.expert = 128", "64")),
        ({"slice": 1, "data": 1, "expert": -1}, ("1", "2 TPU")),
        ({"slice": 3}, ("parallel.mesh", "3", "128")),
    ],
    ids=("expert", "rest to expert", "three of two"),
)
def test_no_other_axis_crosses_slices(sizes, names):
    with refused(*names):
        make_mesh(ParallelConfig(mesh=MeshConfig(**sizes)), _two_slices("4x4x4"))


@needs_libtpu
def test_slices_of_unequal_shape_are_refused():
    devices = _two_slices("4x4x4")
    smaller = [d for d in devices if d.slice_index == 0 or d.coords[2] < 2]
    with refused("slice 0", "4x4x4", "slice 1", "4x4x2"):
        make_mesh(ParallelConfig(), smaller)


# ---- what crosses between TPU slices


def _layers(params, x, counts, mesh):
    """Gradients of matrix products in bfloat16, stored over `data`: (gradients, {"loss"})."""

    def loss(params):
        hidden = x
        for weight in params:
            weight = jax.lax.with_sharding_constraint(
                weight.astype(jnp.bfloat16), NamedSharding(mesh, PartitionSpec())
            )
            hidden = jax.lax.with_sharding_constraint(
                jnp.tanh(hidden @ weight), NamedSharding(mesh, PartitionSpec("data"))
            )
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    total, grads = jax.value_and_grad(loss)(params)
    stored = NamedSharding(mesh, PartitionSpec("data"))
    return [jax.lax.with_sharding_constraint(grad, stored) for grad in grads], {"loss": total}


@pytest.mark.slow
@needs_libtpu
def test_only_gradients_cross_between_slices():
    """Compiled for two slices of four chips. Each of three gradients crosses in the dtype asked
    for, and the loss.
    """
    described = describe_topology("v6e:2x2", 2)
    mesh = make_mesh(ParallelConfig(), described.devices)
    place = functools.partial(NamedSharding, mesh)
    stored = [place(PartitionSpec("data"))] * 3

    def step(params, x):
        grads, parts = on_each_slice(_layers, mesh)(params, x, {})
        return sum_gradients_over_slices(grads, stored, stored, "bfloat16"), parts

    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=s) for s in stored]
    x = jax.ShapeDtypeStruct(
        (8192, 1024), jnp.bfloat16, sharding=place(PartitionSpec(("slice", "data")))
    )
    out = (stored, place(PartitionSpec()))
    options = compiler_options(ParallelConfig(), mesh)
    lowered = jax.jit(step, out_shardings=out, compiler_options=options).lower(params, x)
    program = hlo.parse_program(lowered.compile().as_text())
    crossing = [c for c in program_collectives(program, mesh) if "slice" in c.axes]
    gradients = [c for c in crossing if c.sent_bytes > 1000]
    assert {c.kind for c in crossing} == {"all-reduce"}
    assert [c.total_sent_bytes for c in gradients] == [1024 * 1024 / 4 * 2] * 3
    assert len(crossing) == 4
    assert min(c.total_sent_bytes for c in crossing) <= 512
    opcodes = [i.opcode for i in program.computations[program.entry_computation].values()]
    last_send = max(i for i, opcode in enumerate(opcodes) if opcode == "send")
    assert last_send < opcodes.index("recv-done")
