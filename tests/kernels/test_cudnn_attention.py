"""Attention by cuDNN without a GPU: the documents' offsets and lengths, the calls that they make
(computed in JAX, with NaN where cuDNN leaves a result undefined), and what refuses a call.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import attention as cudnn_attention
from qwen3next_jax.kernels.gpu import cudnn, document_ranges
from qwen3next_jax.kernels.gpu.document_ranges import SHORT
from qwen3next_jax.ops import attention
from qwen3next_jax.ops.attention import xla
from qwen3next_jax.ops.compile_target import compiling_for
from tests.kernels.test_attention import assert_near, inputs, output_and_gradients, tolerance

KERNELS = cudnn_attention.forward, cudnn_attention.backward
T = 512
BOUND = document_ranges.length_classes(T)[0].longer_than  # the longest length of the second class
# Each row's documents, one after the other; the rest of the row is padding.
ROWS = (
    (T,),
    (SHORT,) * (T // SHORT),
    (1,) * T,
    (SHORT + 1, 1, 1, BOUND + 1, BOUND, 2, 3),
    (SHORT + 1,) * (T // (SHORT + 1)),  # as many as a class can have
    (BOUND + 1,) * 3,
    (1, BOUND + 1, BOUND + 1, BOUND + 1),
    (),
    (SHORT - 1, SHORT + 2, SHORT, 5),
)


def ids_of(rows, length: int) -> np.ndarray:
    """Segment ids [rows, length]; ids grow by more than one now and then."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, documents in zip(ids, rows):
        row[: sum(documents)] = np.repeat(1 + 2 * np.arange(len(documents)), documents)
    return ids


@pytest.mark.parametrize("length", [128, T, 384, 128 * 11, 4096])
def test_classes_cover_every_length_once(length):
    classes = document_ranges.length_classes(length)
    assert [c.longest for c in classes] == [length, *(c.longer_than for c in classes[:-1])]
    assert classes[-1].longer_than == SHORT
    assert not any(length % c.longest for c in classes)


def test_ranges_list_every_document_once():
    """Lengths and offsets, the same by document, and the same by token."""
    ids = ids_of(ROWS, T)
    first, length = document_ranges.starts_and_lengths_by_token(jnp.asarray(ids))
    found = []
    for of in document_ranges.length_classes(T):
        ranges = jax.tree.map(np.asarray, document_ranges.ranges_of_class(first, length, of))
        width = of.longest
        assert ranges.starts_in_row.shape == (len(ROWS) * T // width, of.max_documents_per_row + 1)
        used = ranges.lengths >= 0
        assert np.array_equal(ranges.starts_in_row[:, :-1] >= 0, used)
        assert np.all(ranges.starts_in_row[:, -1] == -1)
        begins = (ranges.starts_in_row[:, :-1] + width * np.arange(len(used))[:, None])[used]
        counts = ranges.lengths[used]
        np.testing.assert_array_equal(ranges.flat_starts[: len(begins)], begins)
        np.testing.assert_array_equal(ranges.flat_lengths[: len(begins)], counts)
        assert not np.any(ranges.flat_lengths[len(begins) :])
        tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(begins, counts)])
        np.testing.assert_array_equal(np.flatnonzero(ranges.covered), tokens)
        by_token = ranges.flat_starts[ranges.document_of_token] + ranges.position_in_document
        np.testing.assert_array_equal(by_token.reshape(-1)[tokens], tokens)
        found += zip(begins.tolist(), counts.tolist())
    expected = [
        (row * T + begin, n)
        for row, documents in enumerate(ROWS)
        for begin, n in zip(np.cumsum((0, *documents)), documents)
        if n > SHORT
    ]
    assert sorted(found) == expected


def test_shared_documents_end_the_keys_and_begin_the_queries():
    rows = (1, 1, 2, 2), (3, 3, 3, 3), (1, 1, 0, 0), (1, 2, 4, 4)
    later = (2, 4, 4, 0), (4, 4, 5, 5), (0, 0, 0, 0), (4, 4, 4, 4)
    queries, keys = document_ranges.ranges_of_shared_documents(
        jnp.asarray(later), jnp.asarray(rows)
    )
    np.testing.assert_array_equal(queries.lengths, [[1, -1], [-1, -1], [-1, -1], [4, -1]])
    np.testing.assert_array_equal(queries.starts_in_row[:, 0], [0, -1, -1, 0])
    np.testing.assert_array_equal(keys.lengths, [[2, -1], [-1, -1], [-1, -1], [2, -1]])
    np.testing.assert_array_equal(keys.starts_in_row[:, 0], [2, -1, -1, 2])


def test_packed_documents_are_separate_documents():
    """Documents of all classes in one row, grouped heads, padding; each alone in float32."""
    rows = ROWS[3], ROWS[-1]  # the last has a document of SHORT tokens across two blocks
    q, k, v, do = inputs(2, T, 4, 2, 8, dtype=jnp.bfloat16)
    ids = ids_of(rows, T)
    run = lambda *x: attention(*x, segment_ids=ids, implementation="cudnn")
    packed = output_and_gradients(run, q, k, v, do)
    separate = [np.zeros(x.shape) for x in (q, q, k, v)]
    wide = [x.astype(jnp.float32) for x in (q, k, v, do)]
    for row, documents in enumerate(rows):
        edges = np.cumsum((0, *documents))
        for a, b in zip(edges, edges[1:]):
            alone = output_and_gradients(plain, *(x[row : row + 1, a:b] for x in wide))
            for whole, part in zip(separate, alone):
                whole[row, a:b] = part[0]
    assert_near(packed, separate, tolerance(T, jnp.bfloat16))
    for x in packed:
        np.testing.assert_array_equal(np.asarray(x)[ids == 0], 0)


def plain(q, k, v):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), v)


def test_queries_see_all_earlier_keys_of_their_document():
    """One row whose document goes on from the keys to the queries, and one without such a
    document, whose queries see nothing.
    """
    q, k, v, do = inputs(2, 128, 4, 2, 8, dtype=jnp.bfloat16)
    ids = jnp.asarray(ids_of(((70, 58), (128,)), 128) + [[3], [5]])
    kv_ids = jnp.asarray(ids_of(((30, 98), (128,)), 128)) + 1

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(forward, backward):
        settings = dict(scale=8**-0.5, causal=False)
        o, logsumexp = forward(q, k, v, ids, kv_ids, **settings)
        return logsumexp, o, *backward(q, k, v, ids, kv_ids, o, logsumexp, do, **settings)

    form = (functools.partial(f, interpret=True) for f in KERNELS)
    (got_sum, *got), (sums, *want) = (
        results(*form),
        results(*(functools.partial(f, block=128) for f in (xla.forward, xla.backward))),
    )
    np.testing.assert_allclose(got_sum, sums, rtol=1e-5)
    assert np.all(np.asarray(sums)[0, :, :70] < 10)
    assert np.all(np.asarray(sums)[1] == xla.UNSEEN)
    assert_near(got, want, tolerance(128, jnp.bfloat16))


def test_a_large_batch_is_computed_in_parts(monkeypatch):
    arrays = inputs(3, 128, 2, 1, 8, dtype=jnp.bfloat16)
    run = lambda *x: attention(*x, implementation="cudnn")
    whole = output_and_gradients(run, *arrays)
    monkeypatch.setattr(
        cudnn_attention, "ELEMENTS", 2 * cudnn_attention._cudnn_elements_per_row(arrays[0])
    )
    calls = []
    one = cudnn.forward
    monkeypatch.setattr(
        cudnn, "forward", lambda q, *x, **y: calls.append(len(q)) or one(q, *x, **y)
    )
    parts = output_and_gradients(lambda *x: run(*x), *arrays)
    assert calls == [2, 1]
    assert_near(parts, [np.asarray(x, np.float32) for x in whole], 0)


# ---- what a GPU would get


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A process that can lower calls of cuDNN, which ask for the GPU's release and capability."""
    monkeypatch.setattr(cudnn, "unsupported_reason", lambda: "")
    entry = cudnn._cudnn_module()
    monkeypatch.setattr(entry, "check_cudnn_version", lambda: cudnn.MIN_CUDNN)
    monkeypatch.setattr(entry, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(entry, "is_cuda_compute_capability_equal", lambda capability: False)


def shapes(t: int, spec=None, n=4, m=2, d=256):
    return [jax.ShapeDtypeStruct((2, t, heads, d), jnp.bfloat16) for heads in (n, m, m, n)]


def calls_of(f, *arguments) -> collections.Counter:
    """(target, mask, documents of a row) of the calls of cuDNN in the program for a GPU."""
    with compiling_for("gpu"):
        text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    target = r"custom_call @__cudnn\$fmha(\w+)\(.*?"
    config = r"mask_type\\22: \\22(\w+)\\22.*?max_seg_per_batch\\22: (\d+)"
    return collections.Counter(re.findall(target + config, text))


def step(q, k, v, do, ids, axis_name=None):
    run = lambda *x: attention(*x, segment_ids=ids, implementation="cudnn", axis_name=axis_name)
    return output_and_gradients(run, q, k, v, do)


@pytest.mark.skipif(jax.__version_info__ < cudnn.MIN_JAX, reason="calls of another JAX")
def test_the_program_for_a_gpu_calls_cudnn(on_a_gpu):
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    both = lambda mask, documents, count: {
        ("Softmax", mask, documents): count,
        ("SoftmaxBackward", mask, documents): count,
    }
    assert calls_of(step, *shapes(T), ids) == both("PADDING_CAUSAL", "4", 1) | {
        key: 1 for key in both("PADDING_CAUSAL", "2", 1)
    }
    assert calls_of(lambda *x: step(*x, None), *shapes(T)) == both("CAUSAL", "1", 1)


@pytest.mark.skipif(jax.__version_info__ < cudnn.MIN_JAX, reason="calls of another JAX")
def test_each_shard_of_a_mesh_calls_cudnn(on_a_gpu):
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    spec = P("data", "context")
    sharded = jax.shard_map(
        functools.partial(step, axis_name="context"),
        mesh=mesh,
        in_specs=(spec,) * 5,
        out_specs=(spec,) * 4,
        check_vma=False,
    )
    ids = jax.ShapeDtypeStruct((2, 2 * T), jnp.int32)
    found = calls_of(sharded, *shapes(2 * T), ids)
    # the keys of the shard, and two pairs of a block of queries and one of earlier keys
    assert found["Softmax", "PADDING_CAUSAL", "4"]
    assert found["SoftmaxBackward", "PADDING", "2"] == 2


def test_a_gpu_runs_cudnn_that_passed(on_a_gpu, monkeypatch, capsys):
    program = lambda t: str(jax.make_jaxpr(lambda q: attention(q, q, q))(shapes(t)[0]))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(self_test, "find_failure", lambda *_: "")
    assert "dot_product_attention" in program(128)
    assert "cuDNN" in capsys.readouterr().err
    assert "dot_product_attention" not in program(129)
    assert "129" in capsys.readouterr().err
    monkeypatch.setattr(self_test, "find_failure", lambda *_: "gave another dq")
    assert "dot_product_attention" not in program(256)
    assert "dq" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape, dtype, split, words",
    [
        ((1, 256, 2, 64), jnp.float32, False, "bfloat16"),
        ((1, 256, 2, 60), jnp.bfloat16, False, "multiple of 8"),
        ((1, 256, 2, 264), jnp.bfloat16, False, "at most 256"),
        ((1, 192, 2, 64), jnp.bfloat16, False, "multiples of 128"),
        ((1, 128, 2, 64), jnp.bfloat16, True, "multiples of 128"),
        ((1, 2**17, 16, 256), jnp.bfloat16, False, "gradients are wrong"),
        ((64, 2**16, 16, 256), jnp.bfloat16, False, ""),
    ],
)
def test_what_cudnn_does_not_take_is_said(shape, dtype, split, words):
    q = jax.ShapeDtypeStruct(shape, dtype)
    reason = cudnn_attention.unsupported_reason(q, q, q, split)
    assert words in reason
    assert bool(reason) == bool(words)


def test_another_signature_or_release_is_refused_in_one_line(on_a_gpu, monkeypatch):
    monkeypatch.undo()
    chip = [collections.namedtuple("Device", "compute_capability")("9.0")]
    monkeypatch.setattr(jax, "local_devices", lambda: chip)
    entry = cudnn._cudnn_module()
    monkeypatch.setattr(entry, "check_cudnn_version", lambda: 90500)
    if jax.__version_info__ >= cudnn.MIN_JAX:
        assert (
            cudnn._unsupported_reason_of_process()
            == "with cuDNN 90500: expected 90600 or later (the extra gpu)"
        )
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
        assert "xla_gpu_deterministic_ops" in cudnn._unsupported_reason_of_process()
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
        assert "cuDNN 90500" in cudnn._unsupported_reason_of_process()
        monkeypatch.setattr(entry, "dot_product_attention", lambda query, key, value: None)
        assert "is another (dot_product_attention)" in cudnn._unsupported_reason_of_process()
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert "mixes documents up" in cudnn._unsupported_reason_of_process()
    chip[:] = [collections.namedtuple("Device", "compute_capability")("8.9")]
    assert "8.9: expected 9.0" in cudnn._unsupported_reason_of_process()


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
def test_the_self_test_refuses_mixed_documents(grouped):
    """The same calls in JAX are right; XLA's form without the ids is not."""
    right = tuple(functools.partial(f, interpret=True) for f in KERNELS)
    name, error = cudnn_attention.max_error(16, grouped, right)
    assert error <= cudnn_attention.TOLERANCE / 2, (name, error)
    form = lambda run: (
        lambda q, k, v, ids, kv_ids, *rest, **settings: run(
            q, k, v, None, None, *rest, block=128, **settings
        )
    )
    _, error = cudnn_attention.max_error(16, grouped, (form(xla.forward), form(xla.backward)))
    assert error > 2 * cudnn_attention.TOLERANCE
