"""Calls cuDNN's attention, forward and backward, and says whether cuDNN can run here. On a CPU, JAX
alone computes the results of cuDNN's attention.

JAX has no public function for packed rows, so the calls go through `jax._src`. Before a call, this
module compares the signatures of JAX's private functions with the signatures that the module was
written for. The results of cuDNN are undefined for tokens that belong to no document.

R rows, L queries and S keys of a row, N query heads, K key/value heads, D head width, M documents
of a row (1 if a call has no documents).
"""

import importlib
import inspect
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu.document_ranges import DocumentRanges
from qwen3next_jax.ops.compile_target import compile_target

ENTRY = "jax._src.cudnn.fused_attention_stablehlo"
# Before 0.12, grouped heads read the keys of other documents (jax pull request 39521).
MIN_JAX = (0, 12)
MIN_CUDNN = 90600  # 9.6, the first that takes documents with grouped heads
# the arguments with which the calls were written
_SIGNATURES = {
    "dot_product_attention": (
        "query key value bias mask q_seqlen kv_seqlen q_offsets kv_offsets fp8_params "
        "score_mod_args scale mask_type seed dropout_rate qkv_layout sliding_window_length "
        "score_mod use_fp8 return_residual"
    ),
    "_dot_product_attention_bwd_rule": (
        "scale seed dropout_rate variadic_args mask_type layout sliding_window_length score_mod "
        "cudnn_version return_residual res grad_output"
    ),
}


class Documents(NamedTuple):
    """The documents of the queries and the documents of the keys of one call, both in the same
    order.
    """

    queries: DocumentRanges
    keys: DocumentRanges


def unsupported_reason() -> str:
    """Returns why cuDNN's attention cannot run in this process or in another process of the same
    run. Returns "" if cuDNN can run, or if the program is compiled for a CPU, which runs the
    same computation in JAX.
    """
    target = compile_target()
    if target.platform == "cpu":
        return ""
    if target.may_lack_device:
        return "for a GPU that is not here: expected a GPU whose cuDNN says what it can run"
    return self_test.agree_on_reason("cudnn", _unsupported_reason_of_process())


def cudnn_version() -> int:
    """Returns the release of cuDNN that JAX has loaded, as a number such as 90600; 0 if JAX has
    loaded no cuDNN.
    """
    try:
        return _cudnn_module().check_cudnn_version()
    except (ImportError, AttributeError, RuntimeError):
        return 0


def _unsupported_reason_of_process() -> str:
    chip = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if not chip[:1].isdigit() or float(chip) < 9:
        return f"on a GPU of compute capability {chip}: expected 9.0 or later (H100, H200, B200)"
    if jax.__version_info__ < MIN_JAX:
        return f"with jax {jax.__version__}, which mixes documents up: expected 0.12"
    try:
        entry = _cudnn_module()
        changed = [
            name
            for name, arguments in _SIGNATURES.items()
            if " ".join(inspect.signature(getattr(entry, name)).parameters) != arguments
        ]
    except (ImportError, AttributeError) as error:
        changed = [str(error)]
    if changed:
        return f"with jax {jax.__version__}, whose {ENTRY} is another ({', '.join(changed)})"
    if re.search(r"xla_gpu_deterministic_ops(?!=(false|0))", os.environ.get("XLA_FLAGS", "")):
        return "with xla_gpu_deterministic_ops in XLA_FLAGS: cuDNN would hold all scores in memory"
    if (found := cudnn_version()) < MIN_CUDNN:
        return f"with cuDNN {found or 'missing'}: expected {MIN_CUDNN} or later (the extra gpu)"
    return ""


def _cudnn_module():
    return importlib.import_module(ENTRY)


def forward(q, k, v, documents: Documents | None, *, scale: float, causal: bool, interpret: bool):
    """Returns o [R, L, N, D] and the logsumexp of each query's scores, float32 [R · M, N, L]. The
    first axis of the logsumexp counts the documents of all rows in order, or the rows if
    `documents` is None; the last axis counts the queries of a document. o and the logsumexp are
    undefined for tokens that belong to no document.

    Args:
      q: [R, L, N, D] in bfloat16.
      k, v: [R, S, K, D].
      documents: the queries and keys of the documents; None: each row is one document.
      scale: factor of the scores.
      causal: whether a query sees only the keys of its document up to its own position in the
        document.
      interpret: whether to compute the results in JAX instead of cuDNN.
    """
    if interpret:
        return _interpreted_forward(q, k, v, documents, scale, causal)
    entry = _cudnn_module()
    return entry.dot_product_attention(
        q,
        k,
        v,
        **({} if documents is None else _length_and_offset_arguments(documents)),
        scale=scale,
        mask_type=_mask_type(documents, causal),
        return_residual=True,
    )


def backward(
    q,
    k,
    v,
    o,
    logsumexp,
    do,
    documents: Documents | None,
    *,
    scale: float,
    causal: bool,
    interpret: bool,
):
    """Returns dq, dk and dv. Other arguments are those of `forward`.

    Args:
      o, logsumexp: the results of `forward`, or the results of a softmax over k and more keys, in
        the same shapes. With more keys, dq is the part that comes from k.
      do: [R, L, N, D], the gradient of o.
    """
    if interpret:
        return _interpreted_backward(q, k, v, o, logsumexp, do, documents, scale, causal)
    entry = _cudnn_module()
    none = jnp.zeros(0, q.dtype)  # stands for an argument that is not given
    given = {} if documents is None else _length_and_offset_arguments(documents)
    ranges = (
        given.get(name, none) for name in ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
    )
    return entry._dot_product_attention_bwd_rule(
        scale,
        42,  # seed of a dropout that is not used
        0.0,
        (False, False),  # no bias
        _mask_type(documents, causal),
        entry.AttentionLayout.BTNH.value,
        None,
        None,
        entry.check_cudnn_version(),
        False,
        (q, k, v, none, *ranges, none, none, (), logsumexp, o),
        do,
    )[:3]


def _length_and_offset_arguments(documents: Documents) -> dict[str, jax.Array]:
    return {
        "q_seqlen": documents.queries.lengths,
        "kv_seqlen": documents.keys.lengths,
        "q_offsets": documents.queries.starts_in_row,
        "kv_offsets": documents.keys.starts_in_row,
    }


def _mask_type(documents, causal: bool):
    if documents is None:
        return _cudnn_module().MaskType.CAUSAL if causal else _cudnn_module().MaskType.NO_MASK
    return _cudnn_module().MaskType.PADDING_CAUSAL if causal else _cudnn_module().MaskType.PADDING


# ---- the same in JAX, from the lengths and offsets alone


def _interpreted_forward(q, k, v, documents, scale, causal):
    at_q, at_k = _token_indices(q, k, documents)
    s = _masked_scores(q, k, at_q, at_k, scale, causal)
    logsumexp = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - logsumexp[..., None])
    o = jnp.einsum("xnls,xsnd->xlnd", p, _gather_tokens(v, at_k, q.shape[2]))
    # Numbers that cuDNN leaves undefined become NaN here, so that a test sees every use of them.
    undefined = jnp.where((at_q >= 0)[:, None], logsumexp, jnp.nan)
    return _scatter_tokens(o, at_q, q), undefined


def _interpreted_backward(q, k, v, o, logsumexp, do, documents, scale, causal):
    at_q, at_k = _token_indices(q, k, documents)
    heads = q.shape[2]
    keys, values = _gather_tokens(k, at_k, heads), _gather_tokens(v, at_k, heads)
    queries, outputs, gradients = (_gather_tokens(x, at_q, heads) for x in (q, o, do))
    s = _masked_scores(q, k, at_q, at_k, scale, causal)
    p = jnp.where(s > -jnp.inf, jnp.exp(s - logsumexp[..., None]), 0)
    dp = jnp.einsum("xlnd,xsnd->xnls", gradients, values)
    ds = p * (dp - jnp.einsum("xlnd,xlnd->xnl", outputs, gradients)[..., None]) * scale
    dq = jnp.einsum("xnls,xsnd->xlnd", ds, keys)
    dk = jnp.einsum("xnls,xlnd->xsnd", ds, queries)
    dv = jnp.einsum("xnls,xlnd->xsnd", p, gradients)
    dk, dv = (x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3) for x in (dk, dv))
    return _scatter_tokens(dq, at_q, q), _scatter_tokens(dk, at_k, k), _scatter_tokens(dv, at_k, v)


def _token_indices(q, k, documents):
    """Returns two arrays of indices among the tokens of all rows: the queries of each document,
    [R · M, L], and the keys of each document, [R · M, S]. After the last token of a document, the
    index is -1.
    """

    def tokens(x, ranges):
        rows, width = x.shape[:2]
        row = width * jnp.arange(rows)[:, None]
        if ranges is None:
            return row + jnp.arange(width)
        used = ranges.lengths.reshape(-1) >= 0
        order = jnp.argsort(~used, stable=True)
        begin = (ranges.starts_in_row[:, :-1] + row).reshape(-1)[order][:, None]
        count = jnp.where(used, ranges.lengths.reshape(-1), 0)[order][:, None]
        place = jnp.arange(width)
        return jnp.where(place < count, begin + place, -1)

    queries, keys = (None, None) if documents is None else documents
    return tokens(q, queries), tokens(k, keys)


def _gather_tokens(x, at, heads: int):
    """Returns the tokens of x [R, L, K, D] with the indices `at`, for each of `heads` query heads,
    in float32; zeros where `at` is -1.
    """
    flat = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
    gathered = jnp.where((at >= 0)[..., None, None], flat[at], 0)
    return jnp.repeat(gathered, heads // x.shape[2], axis=2)


def _scatter_tokens(values, at, like):
    """Returns an array of the shape and dtype of `like`, with `values` in the tokens with the
    indices `at`, and NaN in all other tokens.
    """
    flat = jnp.full((like.shape[0] * like.shape[1], *like.shape[2:]), jnp.nan, like.dtype)
    index = jnp.where(at >= 0, at, flat.shape[0])
    return flat.at[index].set(values.astype(like.dtype), mode="drop").reshape(like.shape)


def _masked_scores(q, k, at_q, at_k, scale, causal):
    """Returns the scores [R · M, N, L, S] of each document's queries and keys, -inf where a query
    does not see a key.
    """
    heads = q.shape[2]
    s = (
        jnp.einsum(
            "xlnd,xsnd->xnls", _gather_tokens(q, at_q, heads), _gather_tokens(k, at_k, heads)
        )
        * scale
    )
    seen = (at_q >= 0)[:, :, None] & (at_k >= 0)[:, None]
    if causal:
        seen &= jnp.arange(at_k.shape[1]) <= jnp.arange(at_q.shape[1])[:, None]
    return jnp.where(seen[:, None], s, -jnp.inf)
