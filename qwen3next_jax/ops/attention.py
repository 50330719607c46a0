"""Causal grouped-query attention over packed documents, in memory linear in the length.

Letters: B batch, T queries, S keys, N query heads, M key/value heads (query head n reads head n // (N // M)), H = N // M
query heads of a group, D head width, C queries or keys of a block, L = H · C rows of a query block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("xla", "splash", "cudnn")
_CPU_BLOCK = 64  # of queries and of keys: the scores of a block stay in cache; measured with benchmarks/attention.py
_GPU_BLOCK = 512
_FEW_QUERIES = 8  # of cached decoding: their scores fit in memory whole
_SPLASH_BLOCK = 512
_LANES = 128
_HIDDEN = -1e30  # score of a pair that does not attend; finite, so that a row without keys stays finite
_CUDNN_LIMIT = 2**31  # elements; above it cuDNN's gradients are silently wrong


class _Options(NamedTuple):
    implementation: str | None
    scale: float


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: jax.Array | None = None,
              kv_segment_ids: jax.Array | None = None, q_positions: jax.Array | None = None, scale: float | None = None,
              implementation: str | None = None) -> jax.Array:
    """softmax(scale · q kᵀ) v over the keys 0 … p of a query at position p, with float32 softmax.

    Args:
      q: [B, T, N, D].
      k, v: [B, S, M, D] with N % M == 0.
      segment_ids: [B, T] integers or None: positive and non-decreasing along T, one id per document, 0 for padding at the
        end. A query sees keys of its own segment only.
      kv_segment_ids: [B, S], the same for keys; None where S = T means `segment_ids`.
      q_positions: [B, T] index of each query on the key axis (cached decoding); None means 0 … T−1.
      scale: of the scores; None means D^-1/2.
      implementation: "xla" (blockwise, or at once for few `q_positions`), "splash" (TPU; on CPU it runs interpreted; no
        `q_positions`), "cudnn" (GPU; no `q_positions`, no segments; chosen only by name), or None: "splash" on TPU where
        it applies, "xla" elsewhere.

    Returns:
      o: [B, T, N, D] in q's dtype. Padding rows hold something finite and give no gradient to other rows.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
      NotImplementedError: the named implementation cannot run this problem.
    """
    _check(q, k, v, segment_ids, kv_segment_ids, q_positions, implementation)
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if implementation in ("splash", "cudnn") and q_positions is not None:
        raise NotImplementedError(f"q_positions with implementation={implementation!r}: use \"xla\" for cached decoding")
    if implementation == "cudnn":
        return _cudnn(q, k, v, segment_ids, scale)
    options = _Options(implementation, scale)
    return _operator(options, q, k, v, segment_ids, kv_segment_ids, q_positions)


def _check(q, k, v, segment_ids, kv_segment_ids, q_positions, implementation):
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}, or None")
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {q.shape}: expected [B, T, N, D], nothing empty")
    b, t, n, d = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (b, d) or 0 in k.shape:
        raise ValueError(f"k has shape {k.shape}: expected [B, S, M, D] with B = {b}, D = {d}, as in q")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {v.shape}: expected k's, {k.shape}")
    if n % k.shape[2]:
        raise ValueError(f"q has {n} heads and k {k.shape[2]}: expected query heads to be a multiple of key heads")
    s = k.shape[1]
    if q_positions is None and s != t:
        raise ValueError(f"k has {s} keys for {t} queries: expected q_positions [B, T] to place the queries")
    if segment_ids is not None and kv_segment_ids is None and s != t:
        raise ValueError(f"k has {s} keys for {t} queries: expected kv_segment_ids [B, S] beside segment_ids")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids given: expected segment_ids beside it")
    for name, x, shape in (("segment_ids", segment_ids, (b, t)), ("kv_segment_ids", kv_segment_ids, (b, s)),
                           ("q_positions", q_positions, (b, t))):
        if x is not None and (x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: expected integers of shape {list(shape)}")


# ---- one custom gradient outside, the choice of platform inside forward and inside backward ----------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operator(options, q, k, v, segment_ids, kv_segment_ids, q_positions):
    return _forward(options, q, k, v, segment_ids, kv_segment_ids, q_positions)[0]


def _operator_forward(options, *inputs):
    o, logsumexp_BNT = _forward(options, *inputs)
    return o, (inputs, o, logsumexp_BNT)


def _operator_backward(options, residuals, do):
    inputs, *rest = residuals
    gradients = _choose(options, inputs, _xla_backward, _splash_backward, *inputs, *rest, do)
    return (*gradients, None, None, None)


_operator.defvjp(_operator_forward, _operator_backward)


def _forward(options, *inputs):
    """(o, logsumexp of each row's scores [B, N, T] in float32)."""
    return _choose(options, inputs, _xla_forward, _splash_forward, *inputs)


def _choose(options, inputs, xla, splash, *args):
    on_cpu, elsewhere = (functools.partial(xla, options.scale, block) for block in (_CPU_BLOCK, _GPU_BLOCK))
    interpreted, on_tpu = (functools.partial(splash, options.scale, interpret) for interpret in (True, False))
    if options.implementation == "splash":
        return jax.lax.platform_dependent(*args, cpu=interpreted, default=on_tpu)
    q, *_, q_positions = inputs
    if options.implementation is None and q_positions is None and q.shape[1] >= _LANES:
        return jax.lax.platform_dependent(*args, cpu=on_cpu, tpu=on_tpu, default=elsewhere)
    return jax.lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


# ---- in XLA: few queries at once, else blockwise with online softmax, https://arxiv.org/abs/2205.14135 -----------


def _plan(block, q, k, segment_ids, kv_segment_ids, q_positions):
    """Block sizes (queries, keys) and the padded positions and segments of both axes."""
    (b, t), s = q.shape[:2], k.shape[1]
    size_q, size_k = min(t, block), min(s, block)
    if q_positions is None:
        q_positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    position = _blocks(q_positions, size_q, 1)
    segment = None if segment_ids is None else _blocks(segment_ids, size_q, 1)
    kv_segment = None if segment_ids is None else _blocks(kv_segment_ids, size_k, 1)
    return size_q, size_k, position, segment, kv_segment


def _blocks(x, size, axis):
    """Pads `axis` with zeros to a multiple of `size`, splits it into blocks and moves the block axis to the front."""
    count = -(-x.shape[axis] // size)
    x = jnp.pad(x, [(0, count * size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1:]), axis, 0)


def _join(x, length, axis):
    """The inverse of `_blocks`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2:])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _query_blocks(q_BTND, groups, size):
    """[B, T, N, D] → [n, B, M, L, D]."""
    b, t, n, d = q_BTND.shape
    q_BMHTD = q_BTND.reshape(b, t, groups, n // groups, d).transpose(0, 2, 3, 1, 4)
    blocks = _blocks(q_BMHTD, size, 3)
    return blocks.reshape(*blocks.shape[:3], -1, d)


def _from_query_blocks(blocks, t, n):
    """[n, B, M, L, D] → [B, T, N, D]."""
    count, b, m, rows, d = blocks.shape
    x_BMHTD = _join(blocks.reshape(count, b, m, n // m, -1, d), t, 3)
    return x_BMHTD.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)


def _visible(position_BC, segment_BC, kv_segment_BC, first_key, size_k):
    """[B, 1, 1, C, C] mask of one block."""
    key = first_key + jnp.arange(size_k, dtype=jnp.int32)
    mask = key[None, None] <= position_BC[:, :, None]
    if segment_BC is not None:
        mask &= segment_BC[:, :, None] == kv_segment_BC[:, None]
    return mask[:, None, None]


def _scores(scale, q_BMLD, k_BMCD, mask):
    s_BMLC = jnp.einsum("bmld,bmcd->bmlc", q_BMLD, k_BMCD, preferred_element_type=_wide(q_BMLD)) * scale
    b, _, _, c, keys = mask.shape
    grouped = s_BMLC.reshape(b, s_BMLC.shape[1], -1, c, keys)
    return jnp.where(mask, grouped, _HIDDEN).reshape(s_BMLC.shape)


def _wide(x):
    return jnp.promote_types(jnp.float32, x.dtype)


def _key_range(position_BC, segment_BC, kv_segments, size_k, keys):
    """[first, last) key blocks that any query of this block sees."""
    last = jnp.minimum(jnp.max(position_BC), keys - 1) // size_k + 1
    if segment_BC is None:
        return 0, last
    kv_BS = jnp.moveaxis(kv_segments, 0, 1).reshape(segment_BC.shape[0], -1)[:, :keys]
    first_B1 = segment_BC[:, :1]
    before_BS = jnp.where(first_B1 > 0, (kv_BS > 0) & (kv_BS < first_B1), kv_BS > 0)
    return jnp.min(jnp.sum(before_BS, axis=1)) // size_k, last


def _add(blocks, j, term):
    """blocks[j] += term, in place; `.at[j].add` would be a scatter."""
    return jax.lax.dynamic_update_index_in_dim(blocks, blocks[j] + term, j, 0)


def _finish(o, largest, total):
    """(o, logsumexp) from Σ p v [..., D], the largest score and Σ p [...] of each row, where p = exp(score − largest)."""
    seen = largest > _HIDDEN / 2
    # A row that sees no key gets +inf in effect: its weights are 0 in the backward pass.
    return jnp.where(seen[..., None], o / total[..., None], 0), jnp.where(seen, largest + jnp.log(total), -_HIDDEN)


def _few_queries_forward(scale, q, k, v, segment_ids, kv_segment_ids, q_positions):
    """Reads the cache once, as it lies: a query is spread over the width of all key heads, zero outside its own (X = M · D),
    as a batch over heads would copy the whole cache with heads first."""
    (b, t, n, d), (s, m) = q.shape, k.shape[1:3]
    own_M1M1 = jnp.eye(m, dtype=q.dtype)[:, None, :, None]
    q_BLX = (q.reshape(b, t, m, n // m, 1, d) * own_M1M1).reshape(b, t * n, m * d)
    s_BLS = jnp.einsum("blx,bsx->bls", q_BLX, k.reshape(b, s, m * d), preferred_element_type=_wide(q)) * scale
    mask_BTS = jnp.arange(s, dtype=jnp.int32) <= q_positions[..., None]
    if segment_ids is not None:
        mask_BTS &= segment_ids[..., None] == kv_segment_ids[:, None]
    s_BTNS = jnp.where(mask_BTS[:, :, None], s_BLS.reshape(b, t, n, s), _HIDDEN)
    largest_BTN = jnp.max(s_BTNS, axis=-1)
    p_BTNS = jnp.exp(s_BTNS - largest_BTN[..., None])
    o_BLX = jnp.einsum("bls,bsx->blx", p_BTNS.astype(v.dtype).reshape(b, t * n, s), v.reshape(b, s, m * d),
                       preferred_element_type=_wide(q))
    o_BTND = jnp.sum(o_BLX.reshape(b, t, m, n // m, m, d) * own_M1M1, axis=-2).reshape(q.shape)
    o_BTND, logsumexp_BTN = _finish(o_BTND, largest_BTN, jnp.sum(p_BTNS, axis=-1))
    return o_BTND.astype(q.dtype), logsumexp_BTN.swapaxes(1, 2)


def _xla_forward(scale, block, q, k, v, segment_ids, kv_segment_ids, q_positions):
    if q_positions is not None and q.shape[1] <= _FEW_QUERIES:
        return _few_queries_forward(scale, q, k, v, segment_ids, kv_segment_ids, q_positions)
    size_q, size_k, position, segment, kv_segment = _plan(block, q, k, segment_ids, kv_segment_ids, q_positions)
    (b, t, n, d), (s, m) = q.shape, k.shape[1:3]
    k_blocks, v_blocks = (_blocks(x.swapaxes(1, 2), size_k, 2) for x in (k, v))
    wide = _wide(q)

    def query_block(inputs):
        q_BMLD, position_BC, segment_BC = inputs

        def key_block(j, carry):
            o_BMLD, largest_BML, total_BML = carry
            mask = _visible(position_BC, segment_BC, None if kv_segment is None else kv_segment[j], j * size_k, size_k)
            s_BMLC = _scores(scale, q_BMLD, k_blocks[j], mask)
            new_BML = jnp.maximum(largest_BML, jnp.max(s_BMLC, axis=-1))
            p_BMLC = jnp.exp(s_BMLC - new_BML[..., None])
            shrink_BML = jnp.exp(largest_BML - new_BML)
            o_BMLD = o_BMLD * shrink_BML[..., None] + jnp.einsum(
                "bmlc,bmcd->bmld", p_BMLC.astype(v.dtype), v_blocks[j], preferred_element_type=wide)
            return o_BMLD, new_BML, total_BML * shrink_BML + jnp.sum(p_BMLC, axis=-1)

        zero = (jnp.zeros(q_BMLD.shape, wide), jnp.full(q_BMLD.shape[:-1], _HIDDEN, wide), jnp.zeros(q_BMLD.shape[:-1], wide))
        if size_k >= s:
            o_BMLD, largest_BML, total_BML = key_block(0, zero)
        else:
            first, last = _key_range(position_BC, segment_BC, kv_segment, size_k, s)
            o_BMLD, largest_BML, total_BML = jax.lax.fori_loop(first, last, key_block, zero)
        o_BMLD, logsumexp_BML = _finish(o_BMLD, largest_BML, total_BML)
        return o_BMLD.astype(q.dtype), logsumexp_BML

    blocks = (_query_blocks(q, m, size_q), position, segment)
    if position.shape[0] == 1:
        o, logsumexp = jax.tree.map(lambda x: x[None], query_block(jax.tree.map(lambda x: x[0], blocks)))
    else:
        o, logsumexp = jax.lax.map(query_block, blocks)
    logsumexp_BTN = _from_query_blocks(logsumexp[..., None], t, n)[..., 0]
    return _from_query_blocks(o, t, n), logsumexp_BTN.swapaxes(1, 2)


def _xla_backward(scale, block, q, k, v, segment_ids, kv_segment_ids, q_positions, o, logsumexp_BNT, do):
    size_q, size_k, position, segment, kv_segment = _plan(block, q, k, segment_ids, kv_segment_ids, q_positions)
    (b, t, n, d), (s, m) = q.shape, k.shape[1:3]
    k_blocks, v_blocks = (_blocks(x.swapaxes(1, 2), size_k, 2) for x in (k, v))
    wide = _wide(q)
    delta_BTN = jnp.sum(o.astype(wide) * do.astype(wide), axis=-1)

    def query_block(carry, inputs):
        q_BMLD, do_BMLD, logsumexp_BML1, delta_BML1, position_BC, segment_BC = inputs

        def key_block(j, carry):
            dq_BMLD, dk_blocks, dv_blocks = carry
            mask = _visible(position_BC, segment_BC, None if kv_segment is None else kv_segment[j], j * size_k, size_k)
            p_BMLC = jnp.exp(_scores(scale, q_BMLD, k_blocks[j], mask) - logsumexp_BML1)
            dp_BMLC = jnp.einsum("bmld,bmcd->bmlc", do_BMLD, v_blocks[j], preferred_element_type=wide)
            ds_BMLC = (p_BMLC * (dp_BMLC - delta_BML1) * scale).astype(q.dtype)
            dv_BMCD = jnp.einsum("bmlc,bmld->bmcd", p_BMLC.astype(q.dtype), do_BMLD, preferred_element_type=wide)
            dk_BMCD = jnp.einsum("bmlc,bmld->bmcd", ds_BMLC, q_BMLD, preferred_element_type=wide)
            dq_BMLD += jnp.einsum("bmlc,bmcd->bmld", ds_BMLC, k_blocks[j], preferred_element_type=wide)
            return dq_BMLD, _add(dk_blocks, j, dk_BMCD), _add(dv_blocks, j, dv_BMCD)

        zero = (jnp.zeros(q_BMLD.shape, wide), *carry)
        if size_k >= s:
            dq_BMLD, *carry = key_block(0, zero)
        else:
            dq_BMLD, *carry = jax.lax.fori_loop(*_key_range(position_BC, segment_BC, kv_segment, size_k, s), key_block, zero)
        return tuple(carry), dq_BMLD.astype(q.dtype)

    logsumexp_BTN1 = logsumexp_BNT.swapaxes(1, 2)[..., None]
    blocks = (*(_query_blocks(x, m, size_q) for x in (q, do, logsumexp_BTN1, delta_BTN[..., None])), position, segment)
    zero = jnp.zeros(k_blocks.shape, wide), jnp.zeros(k_blocks.shape, wide)
    if position.shape[0] == 1:
        carry, dq = query_block(zero, jax.tree.map(lambda x: x[0], blocks))
        dq = dq[None]
    else:
        carry, dq = jax.lax.scan(query_block, zero, blocks)
    dk, dv = (_join(x, s, 2).swapaxes(1, 2).astype(k.dtype) for x in carry)
    return _from_query_blocks(dq, t, n), dk, dv


# ---- splash attention, the TPU kernels that come with JAX ---------------------------------------------------------


def _splash_kernel(heads: int, length: int, interpret: bool, save_residuals: bool):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    block = min(_SPLASH_BLOCK, length)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    return splash_attention_kernel.make_splash_mha(
        mask, block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, block)), head_shards=1, q_seq_shards=1,
        interpret=interpret, save_residuals=save_residuals)


def _splash_length(t: int) -> int:
    """`t` padded to whole lanes, and to whole blocks where there are several."""
    lanes = -(-t // _LANES) * _LANES
    return lanes if lanes <= _SPLASH_BLOCK else -(-t // _SPLASH_BLOCK) * _SPLASH_BLOCK


def _to_splash(x_BTND):
    """[B, T, N, D] → [B, N, T, D], both last axes padded."""
    b, t, n, d = x_BTND.shape
    return jnp.pad(x_BTND.swapaxes(1, 2), ((0, 0), (0, 0), (0, _splash_length(t) - t), (0, -d % _LANES)))


def _from_splash(x_BNTD, like):
    return x_BNTD[:, :, :like.shape[1], :like.shape[3]].swapaxes(1, 2).astype(like.dtype)


def _splash_segments(segment_ids, kv_segment_ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    if segment_ids is None:
        return None
    padding = ((0, 0), (0, _splash_length(segment_ids.shape[1]) - segment_ids.shape[1]))
    return splash_attention_kernel.SegmentIds(*(jnp.pad(x.astype(jnp.int32), padding)
                                                for x in (segment_ids, kv_segment_ids)))


def _splash_forward(scale, interpret, q, k, v, segment_ids, kv_segment_ids, q_positions):
    t, n = q.shape[1:3]
    kernel = _splash_kernel(n, _splash_length(t), interpret, save_residuals=True)
    inputs = _to_splash(q * jnp.asarray(scale, q.dtype)), _to_splash(k), _to_splash(v)
    o, (logsumexp,) = jax.vmap(kernel)(*inputs, _splash_segments(segment_ids, kv_segment_ids))
    return _from_splash(o, q), logsumexp[:, :, :t].astype(_wide(q))


def _splash_backward(scale, interpret, q, k, v, segment_ids, kv_segment_ids, q_positions, o, logsumexp_BNT, do):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    t, n = q.shape[1:3]
    length = _splash_length(t)
    kernel = _splash_kernel(n, length, interpret, save_residuals=False)
    options = {name: value for name, value in kernel.kwargs.items()}

    def one_row(q, k, v, segments, o, logsumexp, do):
        # The public call would run the forward kernel again to rebuild these residuals.
        residuals = (q, k, v, segments, None, o, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
        gradients = splash_attention_kernel._splash_attention_bwd(res=residuals, do=do, **options)
        return gradients[3:6]

    logsumexp = jnp.pad(logsumexp_BNT.astype(jnp.float32), ((0, 0), (0, 0), (0, length - t)))
    dq, dk, dv = jax.vmap(one_row)(_to_splash(q * jnp.asarray(scale, q.dtype)), _to_splash(k), _to_splash(v),
                                   _splash_segments(segment_ids, kv_segment_ids), _to_splash(o), logsumexp, _to_splash(do))
    return _from_splash(dq * scale, q), _from_splash(dk, k), _from_splash(dv, v)


# ---- cuDNN --------------------------------------------------------------------------------------------------------


def _cudnn(q, k, v, segment_ids, scale):
    if segment_ids is not None:
        raise NotImplementedError('segment_ids with implementation="cudnn" need a [T, T] mask: use "xla"')
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f'implementation="cudnn" needs a GPU, the default backend is {jax.default_backend()!r}')
    if max(q.size, k.size) > _CUDNN_LIMIT:
        raise NotImplementedError(f'implementation="cudnn" with {max(q.size, k.size)} elements in q or k: gradients of '
                                  f'cuDNN attention are silently wrong above {_CUDNN_LIMIT}; use "xla"')
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="cudnn")
