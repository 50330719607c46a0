"""Attention to a key-value cache. A single array holds the caches of several layers. The cache of a
layer has one slot for each token of a row.

R layers, B batch, T queries, S slots, C slots per block, N query heads, M key/value heads, D head
width, X = M · D, L = T · N / M queries (of all tokens and heads) per key/value head.
"""

import jax
import jax.numpy as jnp

_FEW_QUERIES = 8
# The number of slots read at once. The first number is for a chunk of a prompt. The second one is
# for at most _FEW_QUERIES queries, whose scores take little memory.
_BLOCK, _BLOCK_OF_FEW = 256, 2048
# The score of a slot that a query may not attend to. It is finite, so that the output of a query at
# a negative position (padding), which attends to no slot, stays finite.
_HIDDEN = -1e30


def write_to_cache(cache: jax.Array, new: jax.Array, layer, start: jax.Array) -> jax.Array:
    """Returns the cache with `new` written into slots start, start + 1, … of `layer`. If the old
    cache is not used again, XLA writes into the memory of the old cache.

    Args:
      cache: [R, B, S, M, D], the caches of all layers.
      new: [B, T, M, D], the keys or values of the new tokens.
      layer: index of the layer.
      start: [B] integers of at most S - T, the slot of the first new token of each row. Tokens
        whose slot is negative are dropped. If n tokens are dropped, the n slots after the slot of
        the last token hold undefined values.
    """

    def row(b, cache):
        own_TMD = new[b]
        if new.shape[1] > 1:
            own_TMD = own_TMD.take(
                jnp.arange(len(own_TMD)) - jnp.minimum(start[b], 0), axis=0, mode="clip"
            )
        return jax.lax.dynamic_update_slice(
            cache, own_TMD[None, None].astype(cache.dtype), (layer, b, start[b].clip(0), 0, 0)
        )

    # Without the barrier XLA on CPU repeats the write for each operation that reads the result, and
    # copies the cache twice each time.
    return jax.lax.optimization_barrier(
        jax.lax.fori_loop(0, len(new), row, cache) if len(new) > 1 else row(0, cache)
    )


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, layer, positions: jax.Array
) -> jax.Array:
    """Returns softmax(D^-1/2 q kᵀ) v, where a query at position p attends to the slots 0 … p of
    `layer`. The softmax is in float32.

    Args:
      q: [B, T, N, D], the queries.
      k, v: [R, B, S, M, D], the cached keys and values, with N % M == 0. k and v may be the same
        array.
      layer: index of the layer.
      positions: [B, T] integers, the position of each query. A query at a negative position is
        padding; its output is finite but has no meaning.

    Returns:
      An array [B, T, N, D] in q's dtype.
    """
    (b, t, n, d), (r, _, s, m, _) = q.shape, k.shape
    if t > _FEW_QUERIES:
        return _attend_blockwise(q, k, v, layer, positions, min(s, _BLOCK), d**-0.5)
    # If a product had the heads as a batch axis, XLA would copy the keys and values into an order
    # with heads first. Instead each query gets the width of all key heads, with zeros outside its
    # own head, so that the product reads the cache in the order in which it is stored. If the cache
    # holds a single layer in float32 or float64, the dtype of the softmax, all slots are read at
    # once, because no part of the cache has to be cut out or cast.
    own_M1M1 = jnp.eye(m, dtype=q.dtype)[:, None, :, None]
    q_BTNX = (q.reshape(b, t, m, n // m, 1, d) * own_M1M1).reshape(b, t, n, m * d)
    k, v = (x.reshape(r, b, s, 1, m * d) for x in (k, v))
    if r == 1 and k.dtype == jnp.promote_types(jnp.float32, k.dtype):
        o_BTNX = _attend_to_all_slots(
            q_BTNX, *(x.reshape(b, s, m * d) for x in (k, v)), positions, d**-0.5
        )
    else:
        o_BTNX = _attend_blockwise(q_BTNX, k, v, layer, positions, min(s, _BLOCK_OF_FEW), d**-0.5)
    return jnp.sum(o_BTNX.reshape(b, t, m, n // m, m, d) * own_M1M1, axis=-2).reshape(q.shape)


def _attend_to_all_slots(q_BTNX, k_BSX, v_BSX, positions_BT, scale):
    """Computes attention to all slots at once. The arrays have no axis of key heads. An axis of key
    heads of size 1, as in `_attend_blockwise`, would make the function take two thirds more time.
    """
    q_BLX = q_BTNX.reshape(len(q_BTNX), -1, q_BTNX.shape[-1])
    position_BL1 = jnp.repeat(positions_BT, q_BTNX.shape[2], axis=1)[..., None]
    s_BLS = jnp.einsum("blx,bsx->bls", q_BLX, k_BSX) * scale
    s_BLS = jnp.where(jnp.arange(k_BSX.shape[1]) <= position_BL1, s_BLS, _HIDDEN)
    p_BLS = jnp.exp(s_BLS - jnp.max(s_BLS, axis=-1, keepdims=True))
    o_BLX = jnp.einsum("bls,bsx->blx", p_BLS, v_BSX) / jnp.sum(p_BLS, axis=-1, keepdims=True)
    return o_BLX.astype(q_BTNX.dtype).reshape(q_BTNX.shape)


def _attend_blockwise(q, k, v, layer, positions_BT, size, scale):
    """Computes attention with online softmax, `size` slots at a time. Only the blocks of slots up
    to the largest position are read.
    """
    (b, t, n, d), (r, _, s, m, _) = q.shape, k.shape
    wide = jnp.promote_types(jnp.float32, q.dtype)
    q_BMLD = q.reshape(b, t, m, n // m, d).swapaxes(1, 2).reshape(b, m, -1, d)
    position_BL1 = jnp.repeat(positions_BT, n // m, axis=1)[..., None]

    def block(j, carry):
        o_BMLD, largest_BML, total_BML = carry
        start = jnp.minimum(j * size, s - size)
        # The last three axes are flattened for the slice, because XLA on CPU copies slices with
        # short inner axes at half the speed.
        k_BMCD, v_BMCD = (
            jax.lax.dynamic_slice(
                x.reshape(r, b, s * m * d), (layer, 0, start * m * d), (1, b, size * m * d)
            )
            .reshape(b, size, m, d)
            .swapaxes(1, 2)
            for x in (k, v)
        )
        slot_C = start + jnp.arange(size)
        # The last block may overlap with the block before it; a slot counts only once.
        seen_BLC = (slot_C >= j * size) & (slot_C <= position_BL1)
        s_BMLC = jnp.einsum("bmld,bmcd->bmlc", q_BMLD, k_BMCD, preferred_element_type=wide) * scale
        s_BMLC = jnp.where(seen_BLC[:, None], s_BMLC, _HIDDEN)
        new_BML = jnp.maximum(largest_BML, jnp.max(s_BMLC, axis=-1))
        p_BMLC, rescale_BML = jnp.exp(s_BMLC - new_BML[..., None]), jnp.exp(largest_BML - new_BML)
        o_BMLD = o_BMLD * rescale_BML[..., None] + jnp.einsum(
            "bmlc,bmcd->bmld", p_BMLC.astype(v.dtype), v_BMCD, preferred_element_type=wide
        )
        return o_BMLD, new_BML, total_BML * rescale_BML + jnp.sum(p_BMLC, axis=-1)

    carry = (
        jnp.zeros(q_BMLD.shape, wide),
        jnp.full(q_BMLD.shape[:-1], _HIDDEN, wide),
        jnp.zeros(q_BMLD.shape[:-1], wide),
    )
    last = jnp.minimum(jnp.max(positions_BT), s - 1) // size + 1
    o_BMLD, _, total_BML = jax.lax.fori_loop(0, last, block, carry)
    # The total is less than 1 only for a query that may attend to no slot.
    o_BMLD = o_BMLD / jnp.maximum(total_BML, 1)[..., None]
    return o_BMLD.astype(q.dtype).reshape(b, m, t, n // m, d).swapaxes(1, 2).reshape(q.shape)
