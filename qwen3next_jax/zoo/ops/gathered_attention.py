"""Attention in which every query reads its own list of blocks of keys. For T queries with X
gathered keys each, the work is proportional to T × X, and the memory to T.

Letters: B batch, T queries, S keys, C queries of a chunk, J blocks of a query, R the largest number
of tokens in a block, X = J · R gathered tokens of a query, N query heads, M key/value heads (query
head n reads head n // (N // M)), H = N // M, K head width.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks

GATHERED_QUERIES_PER_CHUNK = (
    32  # number of queries, of all rows of the batch together, whose keys are gathered at once
)
_HIDDEN = -1e30  # score of a gathered token that the query does not see


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def gathered_attention(
    q_BTNK: jax.Array,
    k_BSMK: jax.Array,
    v_BSMK: jax.Array,
    start_BTJ: jax.Array,
    size_BTJ: jax.Array,
    width: int,
) -> jax.Array:
    """Returns o [B, T, N, K] in v's dtype: softmax(q·k / √K) v over the keys of each query's
    blocks, with a float32 softmax. A query without keys has o = 0.

    The backward pass gathers the keys again and adds the gradients of keys and values to float32
    arrays [B, S, M, K]. The number of queries whose keys are gathered at once does not depend on T.

    Args:
      q_BTNK: the queries.
      k_BSMK, v_BSMK: the keys and values.
      start_BTJ: int32, the index of the first key of each of the query's blocks.
      size_BTJ: int32, the number of keys of the block that the query sees, 0 to `width`. The blocks
        of a query do not overlap in the keys that the query sees.
      width: R, the largest number of keys in a block.
    """
    return _gathered_attention_forward(q_BTNK, k_BSMK, v_BSMK, start_BTJ, size_BTJ, width)[0]


def token_indices_and_mask(start_BCJ: jax.Array, size_BCJ: jax.Array, width: int, keys: int):
    """Lists the tokens of each query's blocks. Returns the indices of the tokens [B, C, X], clipped
    to 0 … `keys` - 1, and [B, C, X] bool: whether the query sees the token.
    """
    step_R = jnp.arange(width, dtype=start_BCJ.dtype)
    shape = (*start_BCJ.shape[:2], -1)
    token_BCJR = jnp.clip(start_BCJ[..., None] + step_R, 0, keys - 1)
    return token_BCJR.reshape(shape), (step_R < size_BCJ[..., None]).reshape(shape)


def take_entries(x_BSx: jax.Array, index_BCX: jax.Array) -> jax.Array:
    """Returns [B, C, X, …]: for each row of the batch, the entries of x [B, S, …] at the row's
    indices.
    """
    return jax.vmap(lambda x, index: x[index])(x_BSx, index_BCX)


def gathered_scores(q_BCMHK: jax.Array, k_BCXMK: jax.Array, seen_BCX: jax.Array) -> jax.Array:
    """Returns K^-1/2 q·k of each query and its gathered keys, [B, C, M, H, X] float32. The score of
    a key that the query does not see is a large negative number.
    """
    s_BCMHX = jnp.einsum("bcmhk,bcxmk->bcmhx", q_BCMHK, k_BCXMK, preferred_element_type=jnp.float32)
    return jnp.where(seen_BCX[:, :, None, None], s_BCMHX * q_BCMHK.shape[-1] ** -0.5, _HIDDEN)


def queries_per_chunk(rows: int, time: int) -> int:
    """Returns C, the number of queries of each row in a chunk. The batch has `rows` rows of `time`
    queries.
    """
    return min(max(GATHERED_QUERIES_PER_CHUNK // rows, 1), time)


def _split_query_heads(x_BTNK: jax.Array, groups: int) -> jax.Array:
    """Reshapes x [B, T, N, …] to [B, T, M, H, …], with M = `groups`."""
    return x_BTNK.reshape(*x_BTNK.shape[:2], groups, -1, *x_BTNK.shape[3:])


def _gathered_attention_forward(q_BTNK, k_BSMK, v_BSMK, start_BTJ, size_BTJ, width):
    """Returns o [B, T, N, K], and the tuple of arrays that the backward pass needs."""
    rows, time = q_BTNK.shape[:2]
    keys, groups = k_BSMK.shape[1:3]

    def attend(carry, inputs):
        q_BCMHK, start_BCJ, size_BCJ = inputs
        token_BCX, seen_BCX = token_indices_and_mask(start_BCJ, size_BCJ, width, keys)
        s_BCMHX = gathered_scores(q_BCMHK, take_entries(k_BSMK, token_BCX), seen_BCX)
        largest_BCMH1 = jnp.max(s_BCMHX, axis=-1, keepdims=True)
        p_BCMHX = jnp.where(seen_BCX[:, :, None, None], jnp.exp(s_BCMHX - largest_BCMH1), 0)
        total_BCMH1 = jnp.sum(p_BCMHX, axis=-1, keepdims=True)
        o_BCMHK = jnp.einsum(
            "bcmhx,bcxmk->bcmhk",
            (p_BCMHX / jnp.maximum(total_BCMH1, 1e-30)).astype(v_BSMK.dtype),
            take_entries(v_BSMK, token_BCX),
            preferred_element_type=jnp.float32,
        )
        logsumexp_BCMH = (largest_BCMH1 + jnp.log(jnp.maximum(total_BCMH1, 1e-30)))[..., 0]
        return carry, (o_BCMHK.astype(v_BSMK.dtype), logsumexp_BCMH)

    inputs = (_split_query_heads(q_BTNK, groups), start_BTJ, size_BTJ)
    chunks = blocks.to_chunks(inputs, 1, queries_per_chunk(rows, time))
    _, results = blocks.scan_or_call_once(attend, None, chunks)
    o_BTMHK, logsumexp_BTMH = blocks.from_chunks(results, 1, time)
    o_BTNK = o_BTMHK.reshape(*q_BTNK.shape[:3], -1)
    return o_BTNK, (q_BTNK, k_BSMK, v_BSMK, start_BTJ, size_BTJ, o_BTNK, logsumexp_BTMH)


def _gathered_attention_backward(width, saved, do_BTNK):
    """Returns the gradients of q, k and v, and None for the integer arguments start_BTJ and
    size_BTJ.
    """
    q_BTNK, k_BSMK, v_BSMK, start_BTJ, size_BTJ, o_BTNK, logsumexp_BTMH = saved
    rows, time = q_BTNK.shape[:2]
    keys, groups = k_BSMK.shape[1:3]
    row_B11 = jnp.arange(rows)[:, None, None]
    scale = q_BTNK.shape[-1] ** -0.5
    delta_BTN = jnp.sum(o_BTNK.astype(jnp.float32) * do_BTNK.astype(jnp.float32), axis=-1)

    def differentiate(carry, inputs):
        dk_BSMK, dv_BSMK = carry
        q_BCMHK, do_BCMHK, delta_BCMH, logsumexp_BCMH, start_BCJ, size_BCJ = inputs
        token_BCX, seen_BCX = token_indices_and_mask(start_BCJ, size_BCJ, width, keys)
        k_BCXMK, v_BCXMK = (take_entries(x, token_BCX) for x in (k_BSMK, v_BSMK))
        s_BCMHX = gathered_scores(q_BCMHK, k_BCXMK, seen_BCX)
        p_BCMHX = jnp.where(
            seen_BCX[:, :, None, None], jnp.exp(s_BCMHX - logsumexp_BCMH[..., None]), 0
        )
        dp_BCMHX = jnp.einsum(
            "bcmhk,bcxmk->bcmhx", do_BCMHK, v_BCXMK, preferred_element_type=jnp.float32
        )
        ds_BCMHX = (p_BCMHX * (dp_BCMHX - delta_BCMH[..., None]) * scale).astype(q_BTNK.dtype)
        dq_BCMHK, dk_BCXMK, dv_BCXMK = (
            jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)
            for dims, a, b in (
                ("bcmhx,bcxmk->bcmhk", ds_BCMHX, k_BCXMK),
                ("bcmhx,bcmhk->bcxmk", ds_BCMHX, q_BCMHK),
                ("bcmhx,bcmhk->bcxmk", p_BCMHX.astype(do_BCMHK.dtype), do_BCMHK),
            )
        )
        carry = tuple(
            total.at[row_B11, token_BCX].add(part)
            for total, part in ((dk_BSMK, dk_BCXMK), (dv_BSMK, dv_BCXMK))
        )
        return carry, dq_BCMHK.astype(q_BTNK.dtype)

    grouped = (_split_query_heads(x, groups) for x in (q_BTNK, do_BTNK, delta_BTN))
    inputs = (*grouped, logsumexp_BTMH, start_BTJ, size_BTJ)
    chunks = blocks.to_chunks(inputs, 1, queries_per_chunk(rows, time))
    zero = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_BSMK, v_BSMK))
    (dk_BSMK, dv_BSMK), dq = blocks.scan_or_call_once(differentiate, zero, chunks)
    dq_BTNK = blocks.from_chunks(dq, 1, time).reshape(q_BTNK.shape)
    return dq_BTNK, dk_BSMK.astype(k_BSMK.dtype), dv_BSMK.astype(v_BSMK.dtype), None, None


gathered_attention.defvjp(_gathered_attention_forward, _gathered_attention_backward)
