"""Attention over packed documents with cuDNN, for Hopper GPUs and later (docs/gpu.md).

cuDNN takes the offset and the length of each document of a row, and keeps the documents apart. All
documents of similar length are computed by one call of cuDNN (`document_ranges.py` says why); a
call without documents is skipped. XLA computes all documents of at most SHORT tokens at once,
because cuDNN's tiles of 128 tokens would be mostly empty. If every row is one document, cuDNN runs
once, without offsets.

B batch, T queries, S keys, N query heads, M key/value heads, D head width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import cudnn, document_ranges
from qwen3next_jax.kernels.gpu.document_ranges import SHORT
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.attention import xla

MAX_WIDTH = 256
# The numbers of queries and of keys must be multiples of this. Without a mask of documents, some
# releases of cuDNN give NaN if a row ends in the middle of a tile of 128 keys.
ROWS = 128
# The arrays of a call as cuDNN sees them, [documents, N, T, D], must have fewer elements than this
# number. With this many or more, the gradients of cuDNN are wrong.
TOO_LARGE = 2**31
# A call gets as many rows as keep these arrays at this many elements or fewer, but at least one
# row. The backward pass needs memory for one such array in float32 (2 GiB) and, with grouped heads,
# for two in bfloat16.
ELEMENTS = 2**29
MOST_DOCUMENTS = 2**16 - 1  # of a call, the limit of a grid's axis
# The largest allowed relative L2 difference between cuDNN and the XLA implementation. Both round
# the operands of three chained products to bfloat16.
TOLERANCE = 5 * 2.0**-9


def unsupported_reason(q, k, v, split: bool) -> str:
    """Returns why cuDNN cannot run a call; "" if it can.

    Args:
      q, k, v: the queries [B, T, N, D] and the keys and values [B, S, M, D].
      split: whether the sequence is split over a mesh axis. If the sequence is split, ring
        attention also calls cuDNN with half of a shard's tokens.
    """
    queries, keys = (x.shape[1] // (2 if split else 1) for x in (q, k))
    width = q.shape[3]
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"has q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: expected bfloat16"
    if width % 8 or width > MAX_WIDTH:
        return f"has heads of {width} channels: expected a multiple of 8, at most {MAX_WIDTH}"
    if queries % ROWS or keys % ROWS:
        return f"has {queries} queries and {keys} keys: expected multiples of {ROWS}"
    if _cudnn_elements_per_row(q) >= TOO_LARGE:
        return (
            f"has rows of {q.shape[1]} tokens of {q.shape[2]} heads of {width} channels, as which "
            f"cuDNN sees {_cudnn_elements_per_row(q):,} numbers: expected fewer than "
            f"{TOO_LARGE:,}, beyond which its gradients are wrong; split the row over `context` or "
            "the heads over `tensor`"
        )
    return cudnn.unsupported_reason()


def is_default(q, k, v, split: bool) -> bool:
    """Returns whether a call that names no implementation runs cuDNN. The call runs cuDNN if it has
    rows of at least ROWS tokens, if cuDNN supports it and if cuDNN passed its test on this GPU. For
    rows of at least ROWS tokens the function prints the decision once.
    """
    if q.shape[1] < ROWS:
        few = f"has rows of {q.shape[1]} tokens: cuDNN runs {ROWS} or more"
        implementations.record_why_default(False, f"{few} {implementations.BY_DEFAULT}")
        return False
    reason = unsupported_reason(q, k, v, split)
    return self_test.kernels_run_by_default(
        make_self_test(q.shape[3], q.shape[2] != k.shape[2]), reason
    )


def forward(q, k, v, segment_ids, kv_segment_ids, *, scale, causal, interpret=False):
    """Computes the results that `forward` of `ops.attention.dispatch` describes. For tokens of
    padding, the output o is zero and the logsumexp is `xla.UNSEEN`. If `causal` is False, the keys
    are the tokens of the row that precede the queries, so at most one document has both queries and
    keys.
    """
    run = functools.partial(_forward_of_part, scale=scale, causal=causal, interpret=interpret)
    return _run_in_parts(run, q, k, v, segment_ids, kv_segment_ids)


def backward(
    q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do, *, scale, causal, interpret=False
):
    """Computes the gradients that `backward` of `ops.attention.dispatch` describes. The gradients
    of padding are zeros.
    """
    run = functools.partial(_backward_of_part, scale=scale, causal=causal, interpret=interpret)
    o, do = o.astype(q.dtype), do.astype(q.dtype)
    return _run_in_parts(run, q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do)


def _cudnn_elements_per_row(q) -> int:
    """Returns the number of elements of the largest array that cuDNN sees for one row of q."""
    _, t, n, d = q.shape
    return max(
        (t // of.longest * of.max_documents_per_row * of.longest * n * d)
        for of in document_ranges.length_classes(t)
    )


def _run_in_parts(run, q, *arrays):
    """Returns run(q, *arrays), computed in parts along the batch axis. A part has as many rows as
    one call of cuDNN may have.
    """
    documents = max(
        q.shape[1] // of.longest * of.max_documents_per_row
        for of in document_ranges.length_classes(q.shape[1])
    )
    rows = max(1, min(ELEMENTS // _cudnn_elements_per_row(q), MOST_DOCUMENTS // documents))
    parts = [
        run(*(None if x is None else x[first : first + rows] for x in (q, *arrays)))
        for first in range(0, q.shape[0], rows)
    ]
    if len(parts) == 1:
        return parts[0]
    return tuple(jnp.concatenate(results) for results in zip(*parts))


def _forward_of_part(q, k, v, segment_ids, kv_segment_ids, *, scale, causal, interpret):
    call = functools.partial(cudnn.forward, scale=scale, causal=causal, interpret=interpret)
    if segment_ids is None:
        return call(q, k, v, None)
    result = jnp.zeros_like(q), jnp.full((q.shape[0], *q.shape[2:0:-1]), xla.UNSEEN, jnp.float32)

    def computed(q, k, v, documents, result):
        like_q = result[0].shape
        o, logsumexp = call(q, k, v, documents)
        new = o.reshape(like_q), _logsumexp_by_token(logsumexp, documents.queries)
        return _replace_where_covered(documents.queries.covered, new, result)

    if not causal:
        documents = cudnn.Documents(
            *document_ranges.ranges_of_shared_documents(segment_ids, kv_segment_ids)
        )
        return computed(q, k, v, documents, result)
    first, length = document_ranges.starts_and_lengths_by_token(segment_ids)
    for of in document_ranges.length_classes(q.shape[1]):
        ranges = document_ranges.ranges_of_class(first, length, of)
        rows = (x.reshape(-1, of.longest, *x.shape[2:]) for x in (q, k, v))
        run = functools.partial(computed, *rows, cudnn.Documents(ranges, ranges))
        result = _run_if_any_covered(ranges.covered, run, result)
    short = (length > 0) & (length <= SHORT)

    def computed_short(result):
        return _replace_where_covered(
            short, _short_documents_forward(q, k, v, segment_ids, short, scale), result
        )

    return _run_if_any_covered(short, computed_short, result)


def _backward_of_part(
    q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do, *, scale, causal, interpret
):
    call = functools.partial(cudnn.backward, scale=scale, causal=causal, interpret=interpret)
    if segment_ids is None:
        return call(q, k, v, o, logsumexp_BNT, do, None)
    result = tuple(map(jnp.zeros_like, (q, k, v)))

    def computed(q, k, v, o, do, documents, result):
        logsumexp = _logsumexp_by_document(logsumexp_BNT, documents.queries, q.shape[1])
        new = call(q, k, v, o, logsumexp, do, documents)
        new = tuple(x.reshape(like.shape) for x, like in zip(new, result))
        dq = _replace_where_covered(documents.queries.covered, new[:1], result[:1])
        return *dq, *_replace_where_covered(documents.keys.covered, new[1:], result[1:])

    if not causal:
        documents = cudnn.Documents(
            *document_ranges.ranges_of_shared_documents(segment_ids, kv_segment_ids)
        )
        return computed(q, k, v, o, do, documents, result)
    first, length = document_ranges.starts_and_lengths_by_token(segment_ids)
    for of in document_ranges.length_classes(q.shape[1]):
        ranges = document_ranges.ranges_of_class(first, length, of)
        rows = (x.reshape(-1, of.longest, *x.shape[2:]) for x in (q, k, v, o, do))
        run = functools.partial(computed, *rows, cudnn.Documents(ranges, ranges))
        result = _run_if_any_covered(ranges.covered, run, result)
    short = (length > 0) & (length <= SHORT)

    def computed_short(result):
        new = _short_documents_backward(q, k, v, segment_ids, short, o, logsumexp_BNT, do, scale)
        return _replace_where_covered(short, new, result)

    return _run_if_any_covered(short, computed_short, result)


def _run_if_any_covered(covered_BT, run, result):
    """Returns run(result) if `covered_BT` has a True, else `result`. The code is a loop of one
    iteration or none, and no `jax.lax.cond`, because XLA copies the arrays of a conditional whose
    branch is not taken.
    """
    turns = jnp.any(covered_BT).astype(jnp.int32)
    return jax.lax.fori_loop(0, turns, lambda _, result: run(result), result)


def _replace_where_covered(covered_BT, new, result):
    """Returns the arrays of `result`, with the numbers of `new` for the tokens that `covered_BT`
    marks. The arrays are [B, T, heads, D] or [B, N, T].
    """

    def merge(x, y):
        mask = covered_BT[..., None, None] if x.ndim == 4 else covered_BT[:, None]
        return jnp.where(mask, x, y)

    return tuple(map(merge, new, result))


def _logsumexp_by_token(logsumexp, ranges: document_ranges.DocumentRanges):
    """Rearranges the logsumexp of each document's tokens, [documents, N, L], into [B, N, T]."""
    return logsumexp[ranges.document_of_token, :, ranges.position_in_document].swapaxes(1, 2)


def _logsumexp_by_document(logsumexp_BNT, ranges: document_ranges.DocumentRanges, width: int):
    """Rearranges the logsumexp [B, N, T] into [documents, N, L], with UNSEEN after the last token
    of each document.
    """
    tokens = logsumexp_BNT.swapaxes(1, 2).reshape(-1, logsumexp_BNT.shape[1])
    place = jnp.arange(width)
    in_document = (place < ranges.flat_lengths[:, None])[..., None]
    at = jnp.minimum(ranges.flat_starts[:, None] + place, tokens.shape[0] - 1)
    return jnp.where(in_document, tokens[at], xla.UNSEEN).swapaxes(1, 2)


# ---- documents of at most SHORT tokens
# ---- blocks of SHORT queries see their own block of keys and the block before it


def _short_documents_forward(q, k, v, segment_ids, short_BT, scale):
    """Returns o and the logsumexp of the tokens of short documents."""
    queries, own, earlier = _short_documents_blocks(q, k, v, segment_ids, short_BT)
    settings = dict(scale=scale, block=SHORT)
    (q, ids), (k, v, kv_ids), (k0, v0, kv_ids0) = queries, own, earlier
    o, logsumexp = xla.merge_attention_over_key_sets(
        xla.forward(q, k, v, ids, kv_ids, causal=True, **settings),
        xla.forward(q, k0, v0, ids, kv_ids0, causal=False, **settings),
    )
    b, t = short_BT.shape
    logsumexp_BTN = logsumexp.swapaxes(1, 2).reshape(b, t, -1)
    return o.astype(q.dtype).reshape(b, t, *o.shape[2:]), logsumexp_BTN.swapaxes(1, 2)


def _short_documents_backward(q, k, v, segment_ids, short_BT, o, logsumexp_BNT, do, scale):
    """Returns dq, dk and dv of the tokens of short documents."""
    shapes = q.shape, k.shape, v.shape
    o, do = map(_split_into_blocks, (o, do))
    logsumexp = _split_into_blocks(logsumexp_BNT.swapaxes(1, 2)).swapaxes(1, 2)
    (q, ids), own, earlier = _short_documents_blocks(q, k, v, segment_ids, short_BT)

    def gradients(k, v, kv_ids, causal):
        return xla.backward(
            *(q, k, v, ids, kv_ids, o, logsumexp, do), scale=scale, block=SHORT, causal=causal
        )

    (dq, *dkv), (dq0, *dkv0) = gradients(*own, causal=True), gradients(*earlier, causal=False)
    back = (jnp.roll(x.reshape(shapes[1]), -SHORT, axis=1) for x in dkv0)
    dk, dv = (x.reshape(shapes[1]) + y for x, y in zip(dkv, back))
    return (dq + dq0).reshape(shapes[0]), dk, dv


def _split_into_blocks(x):
    """Splits the tokens of x [B, T, ...] into blocks, [B · T / SHORT, SHORT, ...]."""
    return x.reshape(-1, SHORT, *x.shape[2:])


def _short_documents_blocks(q, k, v, segment_ids, short_BT):
    """Returns three tuples for each block of tokens: the queries and their ids; the keys, values
    and ids; and the keys, values and ids of the preceding block of the row. No query of a block
    sees a key whose id is -1.
    """
    kv_ids = jnp.where(short_BT, segment_ids, -1)
    # Before the first block of a row comes its last block. The two share no short document.
    earlier = (jnp.roll(x, SHORT, axis=1) for x in (k, v, kv_ids))
    return (
        (_split_into_blocks(q), _split_into_blocks(jnp.where(short_BT, segment_ids, 0))),
        tuple(map(_split_into_blocks, (k, v, kv_ids))),
        tuple(map(_split_into_blocks, earlier)),
    )


# ---- the test on the user's own GPU


def make_self_test(width: int, grouped: bool) -> self_test.SelfTest:
    """Returns the self-test of calls with heads of `width` channels. `grouped`: whether several
    query heads read one key/value head.
    """
    return self_test.SelfTest(
        name="attention (cuDNN)",
        how_to_avoid=self_test.AVOID,
        call_kind=(width, grouped, cudnn.cudnn_version()),
        modules=(
            __name__,
            cudnn.__name__,
            document_ranges.__name__,
            xla.__name__,
            cudnn.ENTRY,
        ),
        max_error=functools.partial(max_error, width, grouped),
        tolerance=TOLERANCE,
        trained_on="",
        warning="gradients may differ in the last bits from run to run",
    )


def max_error(width: int, grouped: bool, kernels=None) -> tuple[str, float]:
    """Runs cuDNN and the XLA implementation in three cases: rows with padding and with documents of
    all length classes; rows of one document; keys that precede the queries in the row. Returns the
    name of the result in which cuDNN and XLA differ most, and the relative L2 difference.

    Args:
      width: D.
      grouped: whether two query heads read each key/value head.
      kernels: two functions to test instead of `forward` and `backward`; None means `forward` and
        `backward`.
    """
    rng = np.random.default_rng(0)
    t, heads = 1024, (4, 2) if grouped else (2, 2)
    array = lambda n: jnp.asarray(rng.normal(size=(3, t, n, width)), jnp.bfloat16)
    q, k, v, do = array(heads[0]), array(heads[1]), array(heads[1]), array(heads[0])
    lengths = (300, 40, 100, 200, 64, 1, 250)
    ids = np.zeros((3, t), np.int32)
    ids[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids[1] = 1
    ids[2] = np.repeat((1, 2), t // 2)
    half = lambda x, part: x[:, part * t // 2 :][:, : t // 2]
    cases = {
        "": (q, k, v, do, ids, ids, True),
        " of one document": (q, k, v, do, None, None, True),
        " of earlier keys": (
            *(half(q, 1), half(k, 0), half(v, 0), half(do, 1)),
            *(half(ids, 1), half(ids, 0), False),
        ),
    }

    def results(forward, backward, **settings):
        found = {}
        for case, (q, k, v, do, ids, kv_ids, causal) in cases.items():
            seen = jnp.ones(q.shape[:2], bool)
            if ids is not None:
                ids, kv_ids = jnp.asarray(ids), jnp.asarray(kv_ids)
                seen = ids > 0 if causal else ids == jnp.max(kv_ids, axis=1, keepdims=True)
            do = jnp.where(seen[..., None, None], do, 0)
            common = dict(scale=width**-0.5, causal=causal, **settings)
            o, logsumexp = forward(q, k, v, ids, kv_ids, **common)
            gradients = backward(q, k, v, ids, kv_ids, o, logsumexp, do, **common)
            o = jnp.where(seen[..., None, None], o, 0)
            logsumexp = jnp.where(seen[:, None], logsumexp, 0)
            named = zip(("o", "logsumexp", "dq", "dk", "dv"), (o, logsumexp, *gradients))
            found |= {name + case: x for name, x in named}
        return found

    got = jax.jit(functools.partial(results, *(kernels or (forward, backward))))()
    want = jax.jit(functools.partial(results, xla.forward, xla.backward, block=ROWS))()
    return self_test.largest_error(tuple(want), got.values(), want.values())
