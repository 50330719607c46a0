"""Sparse attention (QSA) by the TPU kernels, interpreted: the selected blocks, the outputs and the
gradients, against a float64 oracle that goes through the queries one by one, and against XLA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.kernels.tpu import indexed_attention as tpu_kernels
from qwen3next_jax.model.layers import Context, document_positions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.ops.implementations import choose_implementation
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.zoo import qsa
from tests.models import drawn

HEADS, KEY_HEADS, WIDTH, INDEX_HEADS = 4, 2, 128, 2
# Documents of two rows; the last entry of a row is its padding.
PACKED = (1, 2, 140, 100, 30, 27), (150, 3, 1, 60, 86, 0)


def problem(lengths, ratio, budget, dtype, ties=True):
    """Returns the arguments of `qsa.block_sparse_attention`, and the gradient of its result. With
    `ties`, the indexer's numbers are few small integers, so that its scores are exact, and often
    equal.
    """
    rng = np.random.default_rng(0)
    segments = np.stack([np.repeat([*range(1, len(n)), 0], n) for n in lengths]).astype(np.int32)
    rows, tokens = segments.shape
    context = Context(document_positions(jnp.asarray(segments)), jnp.asarray(segments))
    place = np.asarray(context.positions)
    draw = lambda *shape: rng.normal(size=(rows, *shape))
    index_q, block_k = draw(tokens, INDEX_HEADS, WIDTH), draw(tokens // ratio, WIDTH)
    if ties:
        index_q, block_k = np.round(0.3 * index_q), np.round(0.3 * block_k)
    ends = ((place + 1) % ratio == 0) & (segments > 0)
    count = tokens // ratio
    last = np.stack([np.pad(np.flatnonzero(e), (0, count - e.sum())) for e in ends])
    there = np.arange(count) < ends.sum(1, keepdims=True)
    of_row = lambda x: np.take_along_axis(x, last, axis=1).astype(np.int32)
    row_blocks = qsa.CompleteBlocks(
        jnp.asarray(block_k, dtype),
        of_row(place) - (ratio - 1),
        np.where(there, of_row(segments), 0),
        last.astype(np.int32),
        (np.cumsum(ends, axis=1) - ends).astype(np.int32),
    )
    settings = qsa.QSA.Settings(
        indexer_n_heads=INDEX_HEADS,
        indexer_head_dim=WIDTH,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
    )
    heads = (draw(tokens, n, WIDTH) for n in (HEADS, KEY_HEADS, KEY_HEADS))
    q, k, v, index_q = (jnp.asarray(x, dtype) for x in (*heads, index_q))
    do = draw(tokens, HEADS, WIDTH) * (segments > 0)[..., None, None]
    given = (
        q,
        k,
        v,
        index_q,
        jax.tree.map(jnp.asarray, row_blocks),
        qsa.query_and_key_positions(context),
        settings,
    )
    return given, jnp.asarray(do, dtype)


def seen_by_oracle(index_q, row_blocks, tokens, settings):
    """Returns [B, T, T] bool, query by query."""
    ratio = settings.indexer_compress_ratio
    index_q, block_k = (np.asarray(x, np.float64) for x in (index_q, row_blocks.pooled_key))
    place, segment = np.asarray(tokens.query_position), np.asarray(tokens.query_segment)
    seen = np.zeros((*place.shape, place.shape[1]), bool)
    for b, t in zip(*np.nonzero(segment)):
        start, complete = t - place[b, t], (place[b, t] + 1) // ratio
        first = int(np.sum((place[b, :start] + 1) % ratio == 0, where=segment[b, :start] > 0))
        products = np.maximum(block_k[b, first : first + complete] @ index_q[b, t].T, 0)
        best = np.argsort(-products.sum(axis=1), kind="stable")
        for number in best[: settings.indexer_budget // ratio]:
            seen[b, t, start + number * ratio : start + (number + 1) * ratio] = True
        seen[b, t, start + complete * ratio : t + 1] = True
    return seen


def attention_by_oracle(seen, q, k, v):
    k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
    s = jnp.einsum("btnk,bsnk->bnts", q, k) * WIDTH**-0.5
    p = jnp.exp(jnp.where(seen[:, None], s, -jnp.inf))
    total = jnp.sum(p, axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnk->btnk", p / jnp.where(total > 0, total, 1), v)


def outputs_and_gradients(attend, qkv, do):
    @jax.jit
    def run(qkv, do):
        o, pullback = jax.vjp(attend, *qkv)
        return o, *pullback(do)

    return [np.asarray(x, np.float64) for x in run(qkv, do)]


def errors(got, want, counted):
    """Returns {name: relative L2 error}; of the outputs only those of counted tokens."""
    got[0], want[0] = (x * counted[..., None, None] for x in (got[0], want[0]))
    return {
        name: np.linalg.norm(a - b) / np.linalg.norm(b)
        for name, a, b in zip(("o", "dq", "dk", "dv"), got, want)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths, ratio, budget, dtype, tiles",
    [
        # three tiles of each row, so that the grid has a row with half of its steps
        (PACKED[:1], 3, 24, jnp.float32, (128,)),
        (PACKED, 3, 24, jnp.bfloat16, (128,)),
        (PACKED, 1, 7, jnp.float32, (256, 128)),
        (PACKED, 4, 400, jnp.float32, (256, 128)),  # rows shorter than the budget
        (((500, 12), (3, 509)), 4, 64, jnp.float32, (128,)),  # four tiles
        (((402, 0), (401, 1)), 5, 65, jnp.float32, (512, 256, 128)),  # no last block
    ],
)
def test_results_and_gradients_are_those_of_the_formulas(
    lengths, ratio, budget, dtype, tiles, monkeypatch
):
    """float32: sums over the channels and over the keys, and some 30 roundings beside them.
    bfloat16: 5 roundings in a row (the probabilities, the output, whose product with its gradient
    enters the scores' gradient, the scores' gradient, the result, the gradient of the output).
    """
    monkeypatch.setattr(tpu_kernels, "TILES", tiles)
    monkeypatch.setattr(tpu_kernels, "CHUNK", 128)  # the work on padding takes most of the time
    (*qkv, index_q, row_blocks, tokens, settings), do = problem(lengths, ratio, budget, dtype)
    rest = index_q, row_blocks, tokens, settings
    attend = lambda *qkv: qsa.block_sparse_attention(*qkv, *rest, implementation="pallas_tpu")
    got = outputs_and_gradients(attend, qkv, do)
    seen = seen_by_oracle(*rest)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (qkv, do))
        oracle = functools.partial(attention_by_oracle, seen)
        want = outputs_and_gradients(oracle, *exact)
    found = errors(got, want, np.asarray(tokens.query_segment) > 0)
    terms = WIDTH + seen.shape[1] + 30
    bound = {jnp.float32: terms**0.5 * 2**-24, jnp.bfloat16: 5**0.5 * 2**-8}[dtype]
    assert max(found.values()) < bound, found


@pytest.mark.slow
@pytest.mark.parametrize("ties", [True, False])
def test_the_kernels_select_what_xla_selects(ties, monkeypatch):
    """The keys and values are one-hot, so that the outputs show which keys a query sees."""
    monkeypatch.setattr(tpu_kernels, "TILES", (128,))
    (*_, index_q, row_blocks, tokens, settings), _ = problem(PACKED, 3, 24, jnp.float32, ties)
    rows, time = tokens.query_position.shape
    number = jnp.eye(384, dtype=jnp.float32)[None, :time, None].repeat(rows, axis=0)
    parts = jnp.split(number, 3, axis=-1)
    q = jnp.zeros((rows, time, 1, WIDTH))
    seen = {}
    for name in ("pallas_tpu", "masked"):
        o = [
            jax.jit(
                lambda v: qsa.block_sparse_attention(
                    q, q, v, index_q, row_blocks, tokens, settings, implementation=name
                )
            )(v)
            for v in parts
        ]
        seen[name] = np.concatenate(o, axis=-1)[:, :, 0] > 0
    counted = np.asarray(tokens.query_segment) > 0
    np.testing.assert_array_equal(seen["pallas_tpu"][counted], seen["masked"][counted])
    if ties:
        oracle = seen_by_oracle(index_q, row_blocks, tokens, settings)
        np.testing.assert_array_equal(seen["masked"][counted][:, :time], oracle[counted])


@pytest.mark.slow
def test_devices_run_kernels_on_their_own_part(monkeypatch):
    """Four shards of `tensor` have fewer key heads than shards."""
    (*qkv, index_q, row_blocks, tokens, settings), do = problem(PACKED, 3, 24, jnp.float32)
    one = functools.partial(qsa.block_sparse_attention, implementation="masked")
    attend = lambda *qkv: one(*qkv, index_q, row_blocks, tokens, settings)
    want = outputs_and_gradients(attend, qkv, do)
    monkeypatch.setattr(
        qsa,
        "choose_implementation",
        lambda operator, _, *forms, **call: choose_implementation(
            operator, "pallas_tpu", *forms, **call
        ),
    )
    config = ModelConfig(
        hidden_size=32,
        full_mixer="qsa",
        mixer={name: x for name, x in vars(settings).items() if "indexer" in name},
    )
    mixer = drawn(lambda: qsa.QSA(config, Make(config, nnx.Rngs(0)), (0,)))
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, tensor=4)), jax.devices()[:8])
    context = Context(tokens.query_position, tokens.query_segment, mesh=mesh)
    split = lambda *qkv: mixer._sparse_attention_on_each_device(*qkv, index_q, row_blocks, context)
    found = errors(
        outputs_and_gradients(split, qkv, do), want, np.asarray(tokens.query_segment) > 0
    )
    assert max(found.values()) < (WIDTH + 300 + 30) ** 0.5 * 2**-24, found


@pytest.mark.parametrize("width, cached, runs", [(128, False, 4), (128, True, 0), (64, False, 0)])
def test_a_tpu_takes_the_kernels_that_fit(width, cached, runs):
    """Not for keys of a cache, nor for heads of 64."""
    (*qkv, index_q, row_blocks, tokens, settings), do = problem(PACKED, 3, 24, jnp.float32)

    def run(qkv, do):
        attend = lambda *qkv: qsa.block_sparse_attention(
            *qkv, index_q, row_blocks, tokens, settings, cached=cached
        )
        return jax.vjp(attend, *qkv)[1](do)

    arguments = jax.tree.map(lambda x: x[..., :width], (qkv, do))
    with compiling_for("tpu"):
        assert str(jax.make_jaxpr(run)(*arguments)).count("name=indexed_attention_") == runs
    assert "indexed_attention_" not in str(jax.make_jaxpr(run)(*arguments))


def test_calls_without_a_kernel_are_refused():
    call = dict(tokens=16_384, heads=24, key_heads=2, width=256, index_heads=4, index_width=128)
    call |= dict(blocks=4096, dtype=jnp.dtype(jnp.bfloat16))
    for changes, words in (
        ({"width": 64}, "has heads of 64"),
        ({"index_width": 64}, "an indexer's heads of 64"),
        ({"dtype": jnp.dtype(jnp.float16)}, "has float16"),
        ({"tokens": 3, "blocks": 0}, "has no block"),
        ({"blocks": 65_536}, "bytes of VMEM"),  # of the smallest chip
    ):
        assert words in tpu_kernels.unsupported_reason(**call | changes)
