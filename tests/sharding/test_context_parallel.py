"""The operators with the sequence split over devices against themselves on one device, outputs
and all gradients.
"""

import functools
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.ops import attention, causal_conv1d, gated_delta_rule
from qwen3next_jax.ops.delta_rule import chunked, dispatch
from tests.refusals import refused

BAR = 1e-5  # relative L2 error in float32: a sum in another order
B = 3


def layout(time: int) -> np.ndarray:
    """Segment ids [3, T]: documents that end on the middle edge, of one token, and from inside a
    shard; a row whose last half is padding; a document over 11/16 of the row, which is three of
    four shards and more, and the last one padded.
    """
    rows = np.zeros((B, time), int)
    half, n = time // 2, time // 16
    rows[0] = np.repeat((1, 2, 3, 4, 5, 7), (n, half - n, 1, 1, half - 2 - 3 * n, 3 * n))
    rows[1, :half] = np.repeat((3, 4), (half - 1, 1))
    rows[2, : 14 * n] = np.repeat((2, 5), (3 * n, 11 * n))
    return rows


def arrays(seed: int, **shapes) -> dict:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def split(f, shards: int, by_time: dict, whole: dict):
    """`f(by_time, whole, axis_name)` → (by time, whole) run on `shards` devices, each with its
    part of T.
    """
    mesh = Mesh(np.array(jax.devices()[:shards]), ("context",))
    return jax.shard_map(
        functools.partial(f, axis_name="context"),
        mesh=mesh,
        check_vma=False,
        in_specs=(P(None, "context"), P()),
        out_specs=(P(None, "context"), P()),
    )(by_time, whole)


def results(f, by_time: dict, whole: dict, shards: int | None, ids):
    """Outputs and the gradients of every array, for fixed cotangents."""

    @jax.jit
    def run(by_time, whole):
        def call(by_time, whole):
            if shards is None:
                return f(by_time, whole, ids, None)
            g = lambda x, w, axis_name: f(x[0], w, x[1], axis_name)
            return split(g, shards, (by_time, ids), whole)

        out, pullback = jax.vjp(call, by_time, whole)
        rng = np.random.default_rng(9)
        return out, pullback(
            jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out)
        )

    return run(by_time, whole)


def assert_equal(got, want, bar=BAR):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= bar, f"{jax.tree_util.keystr(path)}: relative L2 error {error:.1e}"


# An edge of a shard in a document, an edge that ends one, and documents over several shards are in
# the rows of `layout` with any number of shards.
SPLITS = ((2, False), (4, True), (8, True))


@pytest.mark.slow
@pytest.mark.parametrize("shards, packed", [(2, False), (8, True)])
def test_convolution(shards, packed):
    time, channels, width = 32, (3, 2), 4
    by_time = arrays(0, x=(B, time, *channels))
    whole = arrays(1, kernel=(width, *channels), initial_state=(B, width - 1, *channels))
    ids = jnp.asarray(layout(time)) if packed else None

    def f(x, w, ids, axis_name):
        return causal_conv1d(
            x["x"],
            w["kernel"],
            initial_state=w["initial_state"],
            segment_ids=ids,
            axis_name=axis_name,
        )

    assert_equal(results(f, by_time, whole, shards, ids), results(f, by_time, whole, None, ids))


def test_convolution_refuses_shards_shorter_than_its_halo():
    with refused("3", "4", error=ValueError):
        split(
            lambda x, w, axis_name: causal_conv1d(x, w, axis_name=axis_name),
            4,
            jnp.zeros((1, 8, 2)),
            jnp.zeros((4, 2)),
        )


def attention_case(time, implementation=None):
    def f(x, w, ids, axis_name):
        o = attention(**x, segment_ids=ids, axis_name=axis_name, implementation=implementation)
        # padding rows may hold anything
        return (o if ids is None else jnp.where(ids[..., None, None] > 0, o, 0)), w

    return f, arrays(2, q=(B, time, 4, 8), k=(B, time, 2, 8), v=(B, time, 2, 8))


@pytest.mark.parametrize(
    "shards, packed",
    [x if x == (4, True) else pytest.param(*x, marks=pytest.mark.slow) for x in SPLITS],
)
def test_attention(shards, packed):
    time = 160  # blocks of 20 to 40 queries, no multiple of the key blocks of 64
    f, arguments = attention_case(time)
    ids = jnp.asarray(layout(time)) if packed else None
    assert_equal(results(f, arguments, {}, shards, ids), results(f, arguments, {}, None, ids))


@pytest.mark.slow
@pytest.mark.needs("kernels")
def test_attention_by_splash_kernels():
    time = 64  # blocks of 16, padded to whole lanes
    (f, arguments), (whole, _) = attention_case(time, "splash"), attention_case(time)
    ids = jnp.asarray(layout(time))
    assert_equal(results(f, arguments, {}, 2, ids), results(whole, arguments, {}, None, ids))


@pytest.mark.slow
@pytest.mark.needs("kernels")
def test_attention_by_cudnn():
    time = 512  # blocks of 128, in bfloat16
    (f, arguments), (whole, _) = attention_case(time, "cudnn"), attention_case(time)
    arguments = {name: x.astype(jnp.bfloat16) for name, x in arguments.items()}
    wide = {name: x.astype(jnp.float32) for name, x in arguments.items()}
    ids = jnp.asarray(layout(time))
    got, want = results(f, arguments, {}, 2, ids), results(whole, wide, {}, None, ids)
    assert_equal(got, want, bar=4 * 2.0**-9)


def test_attention_refuses_an_odd_number_of_tokens():
    with refused("even", error=ValueError):
        split(
            lambda x, w, axis_name: (attention(x, x, x, axis_name=axis_name), w),
            2,
            jnp.zeros((1, 10, 2, 4)),
            {},
        )


def delta_rule_case(time, key=8, value=12, **settings):
    rng = np.random.default_rng(3)
    by_time = arrays(4, q=(B, time, 2, key), k=(B, time, 2, key), v=(B, time, 4, value))
    # a state outlives a shard
    by_time["g"] = jnp.asarray(-np.exp(rng.normal(size=(B, time, 4)) - 3), jnp.float32)
    by_time["beta"] = jnp.asarray(rng.uniform(size=(B, time, 4)), jnp.float32)

    def f(x, w, ids, axis_name):
        return gated_delta_rule(**x, **w, segment_ids=ids, axis_name=axis_name, **settings)

    return f, by_time, arrays(5, initial_state=(B, 4, key, value))


@functools.cache
def delta_rule_on_one_device(packed, **settings):
    f, by_time, whole = delta_rule_case(160, **settings)
    return results(f, by_time, whole, None, jnp.asarray(layout(160)) if packed else None)


@pytest.mark.slow
@pytest.mark.parametrize("shards, packed", SPLITS)
def test_delta_rule(shards, packed):
    f, by_time, whole = delta_rule_case(160)
    ids = jnp.asarray(layout(160)) if packed else None
    assert_equal(
        results(f, by_time, whole, shards, ids),
        delta_rule_on_one_device(packed, implementation="chunked"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "packed, settings",
    [
        (True, dict(implementation="recurrent")),
        (True, dict(implementation="associative")),
        pytest.param(True, dict(implementation="pallas_tpu"), marks=pytest.mark.needs("kernels")),
        (False, dict(delta_term=False)),
    ],
    ids=str,
)
def test_delta_rule_in_every_form(packed, settings):
    ids = jnp.asarray(layout(160)) if packed else None
    f, by_time, whole = delta_rule_case(160, **settings)
    assert_equal(
        results(f, by_time, whole, 2, ids),
        delta_rule_on_one_device(packed, **settings | dict(implementation="chunked")),
    )


@pytest.mark.slow
def test_delta_rule_in_pieces(monkeypatch):
    """With the chunks' inverses known, of which every piece takes its own."""
    want = delta_rule_on_one_device(True, implementation="chunked")
    # a chunk a piece
    limits = chunked.BlockLimits(single_chunk_multiply_adds=1, block_elements=1)
    forms = dispatch.chunked_implementation(("cpu",), limits), *dispatch.XLA_IMPLEMENTATIONS[1:]
    monkeypatch.setattr(dispatch, "XLA_IMPLEMENTATIONS", forms)
    f, by_time, whole = delta_rule_case(160)
    assert_equal(results(f, by_time, whole, 2, jnp.asarray(layout(160))), want)


@pytest.mark.slow
def test_delta_rule_in_bfloat16():
    """As accurate as on one device: the bars of tests/kernels/test_delta_rule.py against the
    recurrence in float64.
    """
    time = 256
    ids = jnp.asarray(layout(time))
    f, by_time, whole = delta_rule_case(time, 16, 16)
    narrow = {n: x.astype(jnp.bfloat16) if n in "qkv" else x for n, x in by_time.items()}
    (o, final), gradients = results(f, narrow, whole, 4, ids)
    with jax.enable_x64(True):
        f, *_ = delta_rule_case(time, 16, 16, implementation="recurrent")
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (narrow, whole))
        (want_o, want_final), want_gradients = results(f, *wide, None, ids)
    assert_equal((o, final), (want_o, want_final), 5e-3)
    assert_equal(gradients, want_gradients, 2e-2)


# ---- through the TPU compiler, in a process of its own: it reads the description of the chip once
# -----------------------

COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from qwen3next_jax.ops import attention, causal_conv1d, gated_delta_rule

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
mesh, spec, T = Mesh(np.array(topology.devices), ("context",)), P(None, "context"), 8192
array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, T, *shape), dtype, sharding=NamedSharding(mesh, spec))

def kernels(f, o, **arrays):
    def step(arrays, ids, do):
        sharded = jax.shard_map(f, mesh=mesh, check_vma=False, in_specs=(spec, spec), out_specs=spec)
        o, pullback = jax.vjp(lambda x: sharded(x, ids), arrays)
        return o, pullback(do)
    return jax.jit(step).lower(arrays, array(dtype=jnp.int32), o).compile().as_text().count("tpu_custom_call")

print(kernels(lambda x, ids: attention(**x, segment_ids=ids, axis_name="context"), array(16, 256),
              q=array(16, 256), k=array(2, 256), v=array(2, 256)),
      kernels(lambda x, ids: gated_delta_rule(**x, segment_ids=ids, axis_name="context")[0], array(32, 128),
              q=array(16, 128), k=array(16, 128), v=array(32, 128), g=array(32), beta=array(32)))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_kernels_compile_for_four_chips():
    environment = {
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Attention's forward and backward kernels of three pieces: the shard's own keys, and the two
    # pairs of blocks of a turn. Map, forward, backward of the delta rule.
    assert done.stdout.split() == ["6", "3"]
