"""Attention to a key-value cache. An array holds the caches of several equal layers, with a slot
for each token of a row.

R layers, B batch, T queries, S slots, C slots of a block, N query heads, M key/value heads, D head
width, X = M · D, L queries of a key/value head.
"""

import jax
import jax.numpy as jnp

_FEW_QUERIES = 8
# Slots read at once, for a chunk of a prompt and for few queries, whose scores are few.
_BLOCK, _BLOCK_OF_FEW = 256, 2048
_HIDDEN = -1e30  # finite, so that a query before the first slot stays finite


def write(cache: jax.Array, new: jax.Array, layer, start: jax.Array) -> jax.Array:
    """The cache with `new` in slots start, start + 1, … of `layer`; in place where the old cache is
    not used again.

    Args:
      cache: [R, B, S, M, D]. new: [B, T, M, D].
      start: [B]; start + T must not exceed S. Tokens whose slot is below 0 are dropped, and as many
        slots after the last token then hold undefined values.
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

    # Without the barrier XLA on CPU repeats the write for each of its readers, with two copies of
    # the cache each time.
    return jax.lax.optimization_barrier(
        jax.lax.fori_loop(0, len(new), row, cache) if len(new) > 1 else row(0, cache)
    )


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, layer, positions: jax.Array
) -> jax.Array:
    """softmax(D^-1/2 q kᵀ) v over the slots 0 … p of `layer`, for a query at p, with float32
    softmax; only blocks in use are read.

    Args:
      q: [B, T, N, D]. k, v: [R, B, S, M, D] with N % M == 0; they may be the same array.
      positions: [B, T], p of each query.

    Returns:
      [B, T, N, D] in q's dtype.
    """
    (b, t, n, d), (r, _, s, m, _) = q.shape, k.shape
    if t > _FEW_QUERIES:
        return _blockwise(q, k, v, layer, positions, min(s, _BLOCK), d**-0.5)
    # A product with a batch axis of heads would copy keys and values with heads first. So each
    # query has the width of all key heads, with zeros outside its own, and the cache is read as it
    # lies. A single layer of the softmax's dtype is read all at once, as nothing of it is copied.
    own_M1M1 = jnp.eye(m, dtype=q.dtype)[:, None, :, None]
    q_BTNX = (q.reshape(b, t, m, n // m, 1, d) * own_M1M1).reshape(b, t, n, m * d)
    k, v = (x.reshape(r, b, s, 1, m * d) for x in (k, v))
    if r == 1 and k.dtype == jnp.promote_types(jnp.float32, k.dtype):
        o_BTNX = _all_slots(q_BTNX, *(x.reshape(b, s, m * d) for x in (k, v)), positions, d**-0.5)
    else:
        o_BTNX = _blockwise(q_BTNX, k, v, layer, positions, min(s, _BLOCK_OF_FEW), d**-0.5)
    return jnp.sum(o_BTNX.reshape(b, t, m, n // m, m, d) * own_M1M1, axis=-2).reshape(q.shape)


def _all_slots(q_BTNX, k_BSX, v_BSX, positions_BT, scale):
    """Attention to all slots at once. It has no axis of one key head, as `_blockwise` does, which
    would cost two thirds more time.
    """
    q_BLX = q_BTNX.reshape(len(q_BTNX), -1, q_BTNX.shape[-1])
    position_BL1 = jnp.repeat(positions_BT, q_BTNX.shape[2], axis=1)[..., None]
    s_BLS = jnp.einsum("blx,bsx->bls", q_BLX, k_BSX) * scale
    s_BLS = jnp.where(jnp.arange(k_BSX.shape[1]) <= position_BL1, s_BLS, _HIDDEN)
    p_BLS = jnp.exp(s_BLS - jnp.max(s_BLS, axis=-1, keepdims=True))
    o_BLX = jnp.einsum("bls,bsx->blx", p_BLS, v_BSX) / jnp.sum(p_BLS, axis=-1, keepdims=True)
    return o_BLX.astype(q_BTNX.dtype).reshape(q_BTNX.shape)


def _blockwise(q, k, v, layer, positions_BT, size, scale):
    """Attention to the slots up to the last position, `size` at a time, with online softmax."""
    (b, t, n, d), (r, _, s, m, _) = q.shape, k.shape
    wide = jnp.promote_types(jnp.float32, q.dtype)
    q_BMLD = q.reshape(b, t, m, n // m, d).swapaxes(1, 2).reshape(b, m, -1, d)
    position_BL1 = jnp.repeat(positions_BT, n // m, axis=1)[..., None]

    def block(j, carry):
        o_BMLD, largest_BML, total_BML = carry
        start = jnp.minimum(j * size, s - size)
        # The slice is flat, as XLA on CPU copies short inner dimensions at half the rate.
        k_BMCD, v_BMCD = (
            jax.lax.dynamic_slice(
                x.reshape(r, b, s * m * d), (layer, 0, start * m * d), (1, b, size * m * d)
            )
            .reshape(b, size, m, d)
            .swapaxes(1, 2)
            for x in (k, v)
        )
        slot_C = start + jnp.arange(size)
        # The last block overlaps with the one before.
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
    o_BMLD = o_BMLD / jnp.maximum(total_BML, 1)[..., None]  # less than 1 only where nothing is seen
    return o_BMLD.astype(q.dtype).reshape(b, m, t, n // m, d).swapaxes(1, 2).reshape(q.shape)
