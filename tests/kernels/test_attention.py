"""Attention against the plain softmax in float64, over packing, padding, cached decoding and
every head ratio.
"""

import functools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from qwen3next_jax.kernels.tpu import splash_attention as splash
from qwen3next_jax.ops import attention
from qwen3next_jax.ops import cached_attention as cached
from qwen3next_jax.ops.attention import dispatch
from qwen3next_jax.ops.cached_attention import cached_attention, write_to_cache
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.ops.implementations import choose_implementation

EPSILON = 2.0**-24  # of float32
RNG_SEED = 0


def oracle(q, k, v, mask, scale=None):
    """Softmax attention in float64. mask [B, T, S]; a row that sees nothing gives zeros."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, jnp.float64) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k) * (
            q.shape[-1] ** -0.5 if scale is None else scale
        )
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
        peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), -1e300)
        p = jnp.exp(scores - peak)
        p = p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), 1e-300)
        return jnp.einsum("bnts,bsnd->btnd", p, v)


def causal(b, t, segment_ids=None):
    mask = np.broadcast_to(np.tril(np.ones((t, t), bool)), (b, t, t))
    return mask if segment_ids is None else mask & (segment_ids[:, :, None] == segment_ids[:, None])


def inputs(b, t, n, m, d, s=None, dtype=np.float32):
    rng = np.random.default_rng(RNG_SEED)
    shapes = (b, t, n, d), (b, s or t, m, d), (b, s or t, m, d), (b, t, n, d)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnums=0)
def output_and_gradients(f, q, k, v, do):
    """o, dq, dk, dv; compiled once for a function and shapes."""
    o, pullback = jax.vjp(f, q, k, v)
    return o, *pullback(do)


def oracle_output_and_gradients(q, k, v, do, mask):
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, do))
        return output_and_gradients(lambda q, k, v: oracle(q, k, v, mask), *wide)


def assert_near(got, expected, relative):
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(a)), name
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= relative, f"{name}: relative L2 error {error:.2e} > {relative:.2e}"


def tolerance(t, dtype=jnp.float32):
    # Random rounding of sums of T terms (float32), or of the bfloat16 operands of three chained
    # matmuls.
    return 4 * EPSILON * t**0.5 if dtype == jnp.float32 else 4 * 2.0**-9


@pytest.mark.parametrize(
    "t, n, m, packed",
    [
        (1, 2, 2, False),
        (63, 4, 2, True),
        (64, 4, 1, False),
        (65, 3, 3, True),
        (200, 8, 2, True),
    ],
)
def test_equals_the_plain_softmax(t, n, m, packed):
    arrays = inputs(2, t, n, m, 16)
    segment_ids = (
        np.sort(np.random.default_rng(1).integers(1, 5, (2, t)), axis=1) if packed else None
    )
    got = output_and_gradients(lambda *x: attention(*x, segment_ids=segment_ids), *arrays)
    assert_near(
        got, oracle_output_and_gradients(*arrays, causal(2, t, segment_ids)), tolerance(t + 16)
    )


@pytest.mark.slow
def test_scale_is_used_as_given():
    q, k, v, _ = inputs(1, 70, 2, 1, 8)
    np.testing.assert_allclose(
        attention(q, k, v, scale=0.7), oracle(q, k, v, causal(1, 70), 0.7), atol=1e-5
    )


@pytest.mark.slow
def test_bfloat16_operands_float32_softmax():
    arrays = inputs(1, 150, 4, 2, 32, dtype=jnp.bfloat16)
    got = output_and_gradients(attention, *arrays)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_near(
        got, oracle_output_and_gradients(*arrays, causal(1, 150)), tolerance(150, jnp.bfloat16)
    )


@pytest.mark.slow
def test_padding_gives_nothing_to_other_rows():
    q, k, v, do = inputs(1, 150, 2, 1, 8)
    segment_ids = np.repeat((1, 2, 0), (40, 60, 50))[None]
    f = lambda *x: attention(*x, segment_ids=segment_ids)
    padded = output_and_gradients(f, q, k, v, do)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in padded)
    silent = output_and_gradients(f, q, k, v, do.at[:, 100:].set(0))
    changed = output_and_gradients(f, *(x.at[:, 100:].set(9.0) for x in (q, k, v)), do)
    for a, b, c in zip(padded, silent, changed):
        np.testing.assert_array_equal(a[:, :100], b[:, :100])
        np.testing.assert_array_equal(a[:, :100], c[:, :100])


@pytest.mark.parametrize(
    "new, layers",
    [
        (1, 1),
        (8, 2),
        (9, 1),
    ],
)
def test_cached_decoding_equals_the_whole(new, layers, monkeypatch):
    """Rows stand at different positions of a cache that is longer than what is filled, no
    multiple of the blocks, and not read further.
    """
    for name in ("_BLOCK", "_BLOCK_OF_FEW"):
        monkeypatch.setattr(cached, name, 32)
    t, capacity = 150, 200
    q, k, v = map(np.asarray, inputs(2, t, 4, 2, 16)[:3])
    whole = np.asarray(jax.jit(attention)(q, k, v))
    positions = np.stack([np.arange(140, 140 + new), np.arange(7, 7 + new)])
    rows = np.arange(2)[:, None]

    @jax.jit
    def run(q, new_k, new_v, k, v):
        at = jnp.asarray(positions)
        k, v = (write_to_cache(x, new, layers - 1, at[:, 0]) for x, new in ((k, new_k), (v, new_v)))
        return cached_attention(q, k, v, layers - 1, at)

    filled = np.arange(capacity) < positions[:, :1]
    stored = [
        np.where(
            filled[..., None, None], np.pad(x, ((0, 0), (0, capacity - t), (0, 0), (0, 0))), 1e4
        )
        for x in (k, v)
    ]
    caches = [jnp.stack([np.full_like(x, np.nan)] * (layers - 1) + [x]) for x in stored]
    got = run(*(x[rows, positions] for x in (q, k, v)), *caches)
    np.testing.assert_allclose(got, whole[rows, positions], atol=4 * EPSILON * t**0.5 * 4)


def test_tokens_before_the_first_slot_are_dropped():
    new = jnp.arange(1.0, 5.0).reshape(1, 4, 1, 1)
    written = write_to_cache(jnp.zeros((1, 1, 6, 1, 1)), new, 0, jnp.array([-1]))
    np.testing.assert_array_equal(written.ravel()[:3], [2, 3, 4])


@pytest.mark.parametrize("layers", [1, 3])
def test_decoding_copies_no_cache(layers):
    """Steps of a loop over equal layers: what the program needs beyond its donated caches is
    less than a layer's, of blocks alone.
    """
    shape = (layers, 1, 16384, 2, 32)

    def step(i, carry):
        def layer(carry, r):
            q, k, v = carry
            k, v = (write_to_cache(x, q[:, :, :2], r, jnp.full(1, i)) for x in (k, v))
            return (cached_attention(q, k, v, r, jnp.full((1, 1), i)), k, v), None

        return jax.lax.scan(layer, carry, jnp.arange(layers))[0]

    run = jax.jit(
        lambda q, k, v: jax.lax.fori_loop(0, 9000, step, (q, k, v)), donate_argnums=(1, 2)
    )
    cache = jax.ShapeDtypeStruct(shape, jnp.float32)
    memory = (
        run.lower(jax.ShapeDtypeStruct((1, 1, 4, 32), jnp.float32), cache, cache)
        .compile()
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes < cache.size * 4 / layers / 2


@pytest.mark.slow
def test_a_query_without_keys_gives_zeros():
    q, k, v, do = inputs(1, 3, 2, 1, 8, s=80)
    kv_segment_ids = np.repeat((1, 0), (70, 10))[None]
    options, arrays = (
        dispatch.AttentionOptions(
            choose_implementation("attention", None, dispatch.XLA_IMPLEMENTATIONS),
            8**-0.5,
            causal=False,
        ),
        (q, k, v, np.array([[1, 2, 2]]), kv_segment_ids),
    )
    o, logsumexp = dispatch.forward(options, *arrays)
    dq, dk, dv = dispatch.backward(options, arrays, o, logsumexp, do)
    mask = np.zeros((1, 3, 80), bool)
    mask[0, 0, :70] = True
    assert_near((o, dq, dk, dv), oracle_output_and_gradients(q, k, v, do, mask), tolerance(80))
    np.testing.assert_array_equal(o[:, 1:], 0)


def test_a_nan_query_gives_nan():
    q, k, v, _ = inputs(1, 5, 2, 1, 8)
    o = jax.jit(attention)(q.at[0, 3, 1, 2].set(jnp.nan), k, v)
    assert np.isnan(o[0, 3, 1]).all()


def test_memory_is_linear_in_the_length():
    t, d = 4096, 32
    shapes = [jax.ShapeDtypeStruct((1, t, n, d), jnp.float32) for n in (2, 1, 1, 2)]
    step = jax.jit(
        lambda q, k, v, do: jax.vjp(
            lambda *x: attention(*x, segment_ids=jnp.ones((1, t), jnp.int32)), q, k, v
        )[1](do)
    )
    compiled = step.lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < t * t  # not even one byte per pair


# ---- splash
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "t, d, private", [(100, 64, False), pytest.param(1000, 64, True, marks=pytest.mark.slow)]
)
def test_splash_interpreted_equals_the_plain_softmax(t, d, private, monkeypatch):
    # each key/value head on a core of its own; blocks of queries larger than those of keys in a
    # product
    if private:
        two_cores = types.SimpleNamespace(tpu_info=types.SimpleNamespace(num_cores=2))
        monkeypatch.setattr(splash, "compile_target", lambda: two_cores)
        monkeypatch.setattr(splash, "BLOCK", 128)
        monkeypatch.setattr(splash, "LONG_BLOCK", 256)
        assert splash.block_size(1024, d, 4) == 256
        assert splash.block_size(1024, 256, 4) == splash.block_size(768, d, 4) == 128
    else:  # a JAX without the backward kernels' name
        monkeypatch.delattr(
            "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel._splash_attention_bwd"
        )
        monkeypatch.setattr(splash, "PARTS_OF_DQ", 0)  # and the kernels of long rows
    arrays = inputs(2, t, 4, 2, d)
    segment_ids = np.stack([np.repeat((1, 2, 0), (40, t - 50, 10)), np.ones(t, int)])
    got = output_and_gradients(
        lambda *x: attention(*x, segment_ids=segment_ids, implementation="splash"), *arrays
    )
    assert_near(
        got, oracle_output_and_gradients(*arrays, causal(2, t, segment_ids)), tolerance(t + d)
    )


def test_splash_rounds_no_scale():
    """112^-1/2 is no bfloat16 number. The scaled queries and their gradient are rounded once."""
    scale, rounded = 112**-0.5, lambda x: (x.astype(jnp.float32) * scale).astype(jnp.bfloat16)
    q, k, v, do = inputs(1, 2, 1, 1, 112, dtype=jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def logsumexp_and_dq(q, scale):
        settings = dict(scale=scale, causal=True, interpret=True)
        o, logsumexp = splash.forward(q, k, v, None, None, **settings)
        return logsumexp, splash.backward(q, k, v, None, None, o, logsumexp, do, **settings)[0]

    logsumexp, dq = logsumexp_and_dq(rounded(q), 1.0)
    got_logsumexp, got_dq = logsumexp_and_dq(q, scale)
    np.testing.assert_array_equal(got_logsumexp, logsumexp)
    np.testing.assert_array_equal(got_dq, rounded(dq))


@pytest.mark.slow
def test_splash_compiles_for_tpu(v6e):
    """The kernels, not the blockwise form, are in the program that the TPU compiler accepts,
    whether named or chosen.
    """
    t, n, m, d = 4000, 4, 2, 256  # the longest blocks of the widest heads
    shapes = [
        jax.ShapeDtypeStruct((2, t, heads, d), jnp.bfloat16, sharding=v6e) for heads in (n, m, m, n)
    ]
    segment_ids = jax.ShapeDtypeStruct((2, t), jnp.int32, sharding=v6e)

    @functools.partial(jax.jit, static_argnums=5)
    def step(q, k, v, do, segment_ids, named):
        o, pullback = jax.vjp(
            lambda *x: attention(*x, segment_ids=segment_ids, implementation=named), q, k, v
        )
        return o, pullback(do)

    with compiling_for("tpu"):
        named, chosen = (step.lower(*shapes, segment_ids, name) for name in ("splash", None))
    for text in (named.as_text(), chosen.compile().as_text()):
        assert text.count("tpu_custom_call") >= 2  # forward, backward


@pytest.fixture(scope="module")
def v6e():
    """Sharding on one described (not attached) TPU v6e."""
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v6e-4"
    )
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


# ---- what cannot be
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, name",
    [
        (dict(implementation="flash"), ValueError, "implementation"),
        (dict(segment_ids=np.ones((1, 7), int)), ValueError, "segment_ids"),
        (dict(k=jnp.zeros((1, 9, 2, 4)), v=jnp.zeros((1, 9, 2, 4))), ValueError, "k"),
        (dict(q=jnp.zeros((1, 8, 3, 4))), ValueError, "heads"),
    ],
)
def test_errors_name_the_argument(change, error, name):
    arguments = (
        dict(q=jnp.zeros((1, 8, 4, 4)), k=jnp.zeros((1, 8, 2, 4)), v=jnp.zeros((1, 8, 2, 4)))
        | change
    )
    with pytest.raises(error, match=name):
        attention(**arguments)
