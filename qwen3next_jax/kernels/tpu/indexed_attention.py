"""TPU kernels of attention in which an indexer chooses the blocks of keys that each query sees
(`zoo.ops.indexed_attention`): the choice of the blocks, attention to the chosen blocks, and the
gradients of attention.

No scores go through HBM. The kernel that chooses the blocks writes two numbers for each query: the
lowest score among the selected blocks, and the index of a block, before which blocks with exactly
the lowest score are selected. The attention kernels compute the indexer's scores of a tile again,
compare the scores with the two numbers of each query, and use the resulting mask for all heads. All
kernels compute a score by the same products and sums, so that they get exactly the same score.

Tiles are computed transposed: keys lie along the sublanes and queries along the lanes. So an array
with one number for each query is a single row, which all sublanes share, and a sum over keys adds
registers.

Letters: B batch, T tokens (padded to whole tiles), N query heads, M key/value heads, K head width,
H heads of the indexer, I width of an indexer's head, G blocks (padded to whole chunks), C queries
of a tile, S keys of a tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.pallas_call import pallas_call

TILES = 512, 256, 128  # numbers of tokens in a tile; the first that VMEM holds is used
CHUNK = 512  # the number of blocks that are scored at once in the choice; G is a multiple
CHUNKS_AT_ONCE = 4  # the largest number of chunks whose keys are copied to VMEM at once
UNROLLED = 2  # the number of heads that a step of a loop computes, so that their products overlap
HIDDEN = -1e30  # added to the score of a key that the query does not see
LEAST = -1e29  # a query's largest score before its first key: exp(HIDDEN - LEAST) is 0
LAST = 2**31 - 1  # the largest int32

# The rows of the arrays that describe the queries, the keys and the blocks.
# For a query: its position, its segment, the position after its last complete block, and the two
# numbers of the choice. For a key: its position, its segment, the number of its block, and the
# position of the block's last token (LAST if the block is not complete). For a block: the position
# of its last token, and its segment.
POSITION, SEGMENT, TAIL, LOWEST, CUT = range(5)
NUMBER, END = 2, 3
ROWS = 8  # the sublanes of a register, so also the number of rows of these arrays

_NT = (((1,), (1,)), ((), ()))  # x yᵀ
_NN = (((1,), (0,)), ((), ()))  # x y


class _CallSizes(NamedTuple):
    """The sizes of a call.

    Attributes:
      tokens_per_row: number of tokens of a row, before it is padded.
      query_heads, key_heads, head_width: N, M and K.
      indexer_heads, indexer_width: H and I.
      itemsize: bytes of a number of the queries.
    """

    tokens_per_row: int
    query_heads: int
    key_heads: int
    head_width: int
    indexer_heads: int
    indexer_width: int
    itemsize: int

    @property
    def tile_tokens(self) -> int:
        """The number of queries, and of keys, in a tile."""
        small = (
            t
            for t in TILES
            if t <= self.tokens_per_row and self.needed_vmem_bytes(t) <= chip.vmem_budget_bytes()
        )
        return next(small, TILES[-1])

    @property
    def padded_tokens(self) -> int:
        """T: the number of tokens of a row after it is padded to whole tiles."""
        return -(-self.tokens_per_row // self.tile_tokens) * self.tile_tokens

    def needed_vmem_bytes(self, tile: int) -> int:
        """Returns the bytes of VMEM that the kernel of dq needs. The other attention kernels need
        less.
        """
        queries, keys = self.query_heads * self.head_width, self.key_heads * self.head_width
        per_token = queries * (4 * self.itemsize + 4)  # q, do, dq twice, and its sum in float32
        per_token += 2 * 3 * keys * self.itemsize  # k, its transpose, v
        per_token += 2 * (self.indexer_heads + 1) * self.indexer_width * self.itemsize
        per_token += 2 * 4 * (2 * ROWS + 2 * self.query_heads)
        return tile * per_token + (3 + 3 * UNROLLED) * 4 * tile**2


def _sizes_of_call(index_q, q, k) -> _CallSizes:
    return _CallSizes(
        q.shape[1], q.shape[2], k.shape[2], q.shape[3], *index_q.shape[2:], q.dtype.itemsize
    )


def unsupported_reason(
    tokens: int, heads: int, key_heads: int, width: int, index_heads: int, index_width: int,
    blocks: int, dtype,
) -> str:  # fmt: skip
    """Returns why the kernels cannot run a call of the operator on the chip; "" if they can.

    Args:
      tokens: number of tokens of a row (T).
      heads, key_heads, width: N, M and K.
      index_heads, index_width: H and I.
      blocks: number of blocks of a row (G).
      dtype: dtype of the queries, keys and values, and of the indexer's queries and keys.
    """
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"has {dtype}: expected bfloat16 or float32"
    if width % LANES or index_width % LANES:
        return (
            f"has heads of {width} and an indexer's heads of {index_width}: expected multiples of "
            f"{LANES}"
        )
    if not blocks:
        return f"has no block in rows of {tokens} tokens: expected at least one"
    itemsize = jnp.dtype(dtype).itemsize
    sizes = _CallSizes(tokens, heads, key_heads, width, index_heads, index_width, itemsize)
    needed = max(
        sizes.needed_vmem_bytes(TILES[-1]),
        _vmem_bytes_of_choice(TILES[-1], blocks, index_width, itemsize),
    )
    if needed > chip.vmem_budget_bytes():
        return f"needs {needed} bytes of VMEM of {int(chip.vmem_budget_bytes())}"
    return ""


def _vmem_bytes_of_choice(tile: int, blocks: int, index_width: int, itemsize: int) -> int:
    """Returns the bytes of VMEM that the choice of blocks needs for tiles of `tile` queries."""
    scores = 4 * tile * (-(-blocks // CHUNK) * CHUNK)
    streamed = 2 * CHUNK * CHUNKS_AT_ONCE * (index_width * itemsize + 4 * ROWS)
    return scores + streamed + 4 * 4 * CHUNK * tile


# ---- what the kernels share


def _dot(a, b, dims):
    """Returns the product of a and b with the dimension numbers `dims`, in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _indexer_score_bits(index_k_SI, index_q):
    """Returns the bits of the indexer's scores [S, C] as integers. The integers have the same order
    as the scores, because scores are not negative.
    """
    width, total_SC = index_k_SI.shape[1], 0.0
    for start in range(0, index_q.shape[1], width):
        q_CI = index_q[:, start : start + width]
        total_SC += jnp.maximum(_dot(index_k_SI, q_CI, _NT), 0.0)
    bits_SC = jax.lax.bitcast_convert_type(total_SC * width**-0.5, jnp.int32)
    return jnp.maximum(bits_SC, 0)  # -0.0 is negative as an integer


def _write_visibility_bias(index_q, queries, index_k, keys, bias):
    """Writes to `bias` [S, C]: 0 where the query sees the key, HIDDEN where it does not. Returns
    whether some query of the tile sees some key.
    """
    position, segment, tail, lowest, cut = (queries[row : row + 1] for row in range(5))
    columns = keys[...].T
    key_column = lambda row: columns[:, row : row + 1]
    bits_SC = _indexer_score_bits(index_k[...], index_q)
    selected_SC = (bits_SC > lowest) | ((bits_SC == lowest) & (key_column(NUMBER) < cut))
    seen_SC = selected_SC & (key_column(END) <= position)
    seen_SC |= (key_column(POSITION) >= tail) & (key_column(POSITION) <= position)
    bias[...] = jnp.where(seen_SC & (key_column(SEGMENT) == segment), 0.0, HIDDEN)
    return jnp.max(bias[...]) == 0.0


def _aligned_part_slice(index, size: int):
    """Returns the slice of part `index` of an axis whose parts have `size` entries."""
    return pl.ds(pl.multiple_of(index * size, size), size)


def _for_each_head(sizes: _CallSizes, body) -> None:
    """Runs body(index of the head, slice of the head's channels, slice of its key/value head's
    channels) for every query head.
    """
    readers = sizes.query_heads // sizes.key_heads

    def step(n, _):
        body(
            n,
            _aligned_part_slice(n, sizes.head_width),
            _aligned_part_slice(n // readers, sizes.head_width),
        )
        return 0

    unroll = UNROLLED if sizes.query_heads % UNROLLED == 0 else 1
    jax.lax.fori_loop(0, sizes.query_heads, step, 0, unroll=unroll)


# A causal grid has one step for each pair of a tile of queries and a tile of keys that is not
# after it. It is the half of a square, folded into a rectangle: its row r has the pairs of the
# tile r of queries (or keys) and then those of tile n - 1 - r, which are n + 1 in all.


def _causal_step_tiles_by_query(n: int, r, c):
    """Returns three things for step c in row r of a grid that visits all tiles of keys of a tile of
    queries before the next tile of queries: the index of the tile of queries, the index of the tile
    of keys, and whether the step is the first step with this pair of tiles. (If n is odd, the
    middle row of the grid has each pair twice.)
    """
    second = c > r
    i = jnp.where(second, n - 1 - r, r)
    return i, jnp.where(second, c - r - 1, c), ~second | (n - 1 - r != r)


def _causal_step_tiles_by_key(n: int, r, c):
    """Returns the same as `_causal_step_tiles_by_query`, but for a grid that visits all tiles of
    queries of a tile of keys before the next tile of keys.
    """
    second = c >= n - r
    j = jnp.where(second, n - 1 - r, r)
    return jnp.where(second, j + c - (n - r), j + c), j, ~second | (n - 1 - r != r)


def _call_attention_kernel(
    body, sizes: _CallSizes, tiles, limits_BZ, inputs, outputs, scratch, products, interpret
):
    """Runs an attention kernel over a grid with the axes (rows of the batch, rows of the causal
    grid, steps of a row of the causal grid), and returns the outputs of the kernel.

    Args:
      body: the kernel.
      tiles: `_causal_step_tiles_by_query` or `_causal_step_tiles_by_key`.
      limits_BZ: [B, n] int32: for each tile of queries the first tile of keys that the queries see,
        or for each tile of keys the last tile of queries that see the keys.
      inputs: pairs (array, kind); the kind says by which tile the array is cut: "i" (queries) or
        "j" (keys) along axis 1, "-i" or "-j" along axis 2.
      outputs: pairs (shape and dtype, kind).
      scratch: the shapes of scratch memory.
      products: number of matrix products of K · C · S multiply-adds for each head and tile.
      interpret: whether a CPU interprets the kernel.
    """
    n, tile = sizes.padded_tokens // sizes.tile_tokens, sizes.tile_tokens
    batch = limits_BZ.shape[0]

    def spec(x, kind, **options):
        axis = 2 if kind[0] == "-" else 1

        def index(b, r, c, limits):
            i, j, _ = tiles(n, r, c)
            # A grid step without work keeps the block of a step that has work, so nothing is read.
            if tiles is _causal_step_tiles_by_query:
                j = jnp.maximum(j, limits[b * n + i])
            else:
                i = jnp.minimum(i, limits[b * n + j])
            part = i if kind[-1] == "i" else j
            return (b, 0, part) if axis == 2 else (b, part, 0)

        shape = (None, x.shape[1], tile) if axis == 2 else (None, tile, x.shape[2])
        return pl.BlockSpec(shape, index, **options)

    # The queries of a causal row change twice; a second buffer for them would fill VMEM.
    kept = "i" if tiles is _causal_step_tiles_by_query else "j"
    single = lambda kind: {"pipeline_mode": pl.Buffered(1)} if kind == kept else {}
    read = sum(x.size * x.dtype.itemsize for x, kind in inputs if kind[-1] == kept)
    again = sum(x.size * x.dtype.itemsize for x, kind in inputs if kind[-1] != kept) * (n + 1) // 2
    written = sum(x.size * x.dtype.itemsize for x, _ in outputs)
    pairs = batch * ((n + 1) // 2) * (n + 1) * tile**2
    index_products = sizes.indexer_heads * sizes.indexer_width
    return pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, (n + 1) // 2, n + 1),
            in_specs=[spec(x, kind, **single(kind)) for x, kind in inputs],
            out_specs=[spec(x, kind) for x, kind in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[x for x, _ in outputs],
        interpret=interpret,
        name=f"indexed_attention{getattr(body, 'func', body).__name__.removesuffix('_kernel')}",
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (products * sizes.query_heads * sizes.head_width + index_products),
            transcendentals=pairs * sizes.query_heads,
            bytes_accessed=read + again + written,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes(),
        ),
    )(limits_BZ.reshape(-1), *(x for x, _ in inputs))


def _merge_heads(x_BTNK):
    """Returns [B, T, N · K]."""
    return x_BTNK.reshape(*x_BTNK.shape[:2], -1)


def _split_heads(sizes: _CallSizes, x_BTX):
    """The reverse of `_merge_heads`, without the tokens that padding added."""
    return x_BTX.reshape(*x_BTX.shape[:2], -1, sizes.head_width)[:, : sizes.tokens_per_row]


def _swap_tokens_and_channels(x_BTX):
    return x_BTX.swapaxes(1, 2)


def _pad_end(x, size: int, axis: int = 1):
    """Returns x with zeros at the end of `axis`, so that the axis has `size` entries."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)


def _stack_as_padded_rows(size: int, *arrays_BX, filler: int):
    """Returns [B, ROWS, size] int32: the arrays [B, X] as rows, and `filler` elsewhere."""
    rows = jnp.stack(arrays_BX, axis=1).astype(jnp.int32)
    beyond = (0, 0), (0, ROWS - rows.shape[1]), (0, size - rows.shape[2])
    return jnp.pad(rows, beyond, constant_values=filler)


def _document_starts(segment_BT):
    """Returns [B, T], the index of the first token of each token's document."""
    index = jax.lax.broadcasted_iota(jnp.int32, segment_BT.shape, 1)
    before = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jax.lax.cummax(jnp.where(segment_BT != before, index, 0), axis=1)


def _mask_inputs_and_limits(sizes: _CallSizes, ratio: int, rows, chosen, index_q):
    """Returns four arguments for `_call_attention_kernel`. The first two are inputs from which a
    kernel computes the mask of a tile: the inputs about queries, and the inputs about keys. The
    last two are limits, [B, tiles] int32: for each tile of queries the first tile of keys in the
    documents of the queries, and for each tile of keys the last tile of queries in the documents of
    the keys.
    """
    count = rows.block_indexer_key.shape[1]
    tail = (rows.position + 1) // ratio * ratio
    queries = _stack_as_padded_rows(
        sizes.padded_tokens, rows.position, rows.segment, tail, *chosen, filler=-2
    )
    inside = rows.complete_blocks_before < count
    number = jnp.minimum(rows.complete_blocks_before, count - 1)
    take = jax.vmap(lambda x, i: x[i])
    complete = inside & (take(rows.block_segment, number) == rows.segment) & (rows.segment > 0)
    end = jnp.where(complete, take(rows.block_end_position, number), LAST)
    keys = _stack_as_padded_rows(
        sizes.padded_tokens, rows.position, rows.segment, number, end, filler=-1
    )
    token_k = _pad_end(take(rows.block_indexer_key, number), sizes.padded_tokens)
    start = _document_starts(rows.segment)
    stop = sizes.tokens_per_row - 1 - _document_starts(rows.segment[:, ::-1])[:, ::-1]
    # Padding is a document of its own.
    beyond = jnp.arange(sizes.tokens_per_row, sizes.padded_tokens, dtype=jnp.int32)
    beyond = jnp.broadcast_to(beyond, (start.shape[0], beyond.size))
    start, stop = (jnp.concatenate((x, beyond), axis=1) for x in (start, stop))
    return (
        ((_pad_end(_merge_heads(index_q), sizes.padded_tokens), "i"), (queries, "-i")),
        ((token_k, "j"), (keys, "-j")),
        start[:, :: sizes.tile_tokens] // sizes.tile_tokens,
        stop[:, sizes.tile_tokens - 1 :: sizes.tile_tokens] // sizes.tile_tokens,
    )


# ---- attention


def forward(ratio: int, rows, chosen, index_q, q, k, v, *, interpret: bool = False):
    """Returns o [B, T, N, K] and the logsumexp of each query's scores [B, N, T] float32.

    Args:
      ratio: number of tokens of a block.
      rows: the `TokensAndBlocks` of `zoo.ops.indexed_attention`.
      chosen: the results of `choose_blocks`.
      index_q: [B, T, H, I], the indexer's queries.
      q: [B, T, N, K].
      k, v: [B, T, M, K].
      interpret: whether a CPU interprets the kernel.
    """
    sizes = _sizes_of_call(index_q, q, k)
    of_queries, of_keys, first, _ = _mask_inputs_and_limits(sizes, ratio, rows, chosen, index_q)
    q, k, v = (_pad_end(_merge_heads(x), sizes.padded_tokens) for x in (q, k, v))
    shape, tile = jax.ShapeDtypeStruct, sizes.tile_tokens
    o, logsumexp = _call_attention_kernel(
        functools.partial(_forward_kernel, sizes),
        sizes,
        _causal_step_tiles_by_query,
        first,
        ((q, "i"), *of_queries, (k, "j"), (_swap_tokens_and_channels(v), "-j"), *of_keys),
        (
            (shape(q.shape, v.dtype), "i"),
            (shape((q.shape[0], sizes.query_heads, q.shape[1]), jnp.float32), "-i"),
        ),
        (
            pltpu.VMEM((q.shape[2], tile), jnp.float32),
            pltpu.VMEM((sizes.query_heads, tile), jnp.float32),
            pltpu.VMEM((sizes.query_heads, tile), jnp.float32),
            pltpu.VMEM((tile, tile), jnp.float32),
        ),
        2,
        interpret,
    )
    return _split_heads(sizes, o), logsumexp[..., : sizes.tokens_per_row]


class _ForwardRefs(NamedTuple):
    """The references of `_forward_kernel`."""

    first_key_tile: Any  # the first tile of keys that each tile of queries sees
    q: Any  # [C, N · K]
    indexer_q: Any  # [C, H · I], the indexer's queries
    query_mask_rows: Any  # [ROWS, C] int32, what `_write_visibility_bias` reads of queries
    k: Any  # [S, M · K]
    v_transposed: Any  # [M · K, S]
    indexer_k: Any  # [S, I], the keys of the indexer's blocks
    key_mask_rows: Any  # [ROWS, S] int32, what `_write_visibility_bias` reads of keys
    o: Any  # output [C, N · K]
    logsumexp: Any  # output [N, C]
    weighted_value_sums: Any  # scratch [N · K, C], of each query the sum of exponentials · values
    largest_scores: Any  # scratch [N, C], the largest score of each query
    exponential_sums: Any  # scratch [N, C], of each query the sum of exponentials
    visibility_bias: Any  # scratch [S, C], 0 or HIDDEN


def _forward_kernel(sizes, *refs):
    """Adds a tile of keys to the attention of a tile of queries."""
    refs = _ForwardRefs(*refs)
    n, (b, r, c) = pl.num_programs(2) - 1, (pl.program_id(axis) for axis in range(3))
    i, j, is_new = _causal_step_tiles_by_query(n, r, c)

    @pl.when(is_new & (j == 0))
    def _():
        refs.weighted_value_sums[...] = jnp.zeros_like(refs.weighted_value_sums)
        refs.largest_scores[...] = jnp.full_like(refs.largest_scores, LEAST)
        refs.exponential_sums[...] = jnp.zeros_like(refs.exponential_sums)

    def head(number, own, of_keys):
        row = pl.ds(number, 1)
        s_SC = (
            _dot(refs.k[:, of_keys], refs.q[:, own], _NT) * sizes.head_width**-0.5
            + refs.visibility_bias[...]
        )
        before_1C = refs.largest_scores[row, :]
        largest_1C = jnp.maximum(before_1C, jnp.max(s_SC, axis=0, keepdims=True))
        p_SC = jnp.exp(s_SC - largest_1C)
        kept_1C = jnp.exp(before_1C - largest_1C)
        refs.largest_scores[row, :] = largest_1C
        refs.exponential_sums[row, :] = kept_1C * refs.exponential_sums[row, :] + jnp.sum(
            p_SC, axis=0, keepdims=True
        )
        refs.weighted_value_sums[own, :] = kept_1C * refs.weighted_value_sums[own, :] + _dot(
            refs.v_transposed[of_keys, :], p_SC.astype(refs.v_transposed.dtype), _NN
        )

    @pl.when(is_new & (j >= refs.first_key_tile[b * n + i]))
    def _():
        @pl.when(
            _write_visibility_bias(
                refs.indexer_q,
                refs.query_mask_rows,
                refs.indexer_k,
                refs.key_mask_rows,
                refs.visibility_bias,
            )
        )
        def _():
            _for_each_head(sizes, head)

    @pl.when(is_new & (j == i))
    def _():
        refs.exponential_sums[...] = jnp.maximum(refs.exponential_sums[...], 1e-30)
        refs.logsumexp[...] = refs.largest_scores[...] + jnp.log(refs.exponential_sums[...])

        def write(number, own, _):
            refs.o[:, own] = (
                refs.weighted_value_sums[own, :] / refs.exponential_sums[pl.ds(number, 1), :]
            ).T.astype(refs.o.dtype)

        _for_each_head(sizes, write)


def backward(
    ratio: int, rows, chosen, index_q, q, k, v, o, logsumexp_BNT, do, *, interpret: bool = False
):
    """Returns the gradients of q, k and v.

    Args:
      ratio, rows, chosen, index_q, q, k, v: the arguments of `forward`.
      o, logsumexp_BNT: the results of `forward`.
      do: [B, T, N, K], the gradient of o.
      interpret: whether a CPU interprets the kernels.
    """
    product = o.astype(jnp.float32) * do.astype(jnp.float32)
    delta_BNT = jnp.sum(product, axis=-1).swapaxes(1, 2)
    sizes = _sizes_of_call(index_q, q, k)
    mask_of_queries, mask_of_keys, first, last = _mask_inputs_and_limits(
        sizes, ratio, rows, chosen, index_q
    )
    q, k, v, do = (
        _pad_end(_merge_heads(x), sizes.padded_tokens) for x in (q, k, v, do.astype(q.dtype))
    )
    query_inputs = (
        (q, "i"),
        (do, "i"),
        (_pad_end(logsumexp_BNT, sizes.padded_tokens, 2), "-i"),
        (_pad_end(delta_BNT, sizes.padded_tokens, 2), "-i"),
        *mask_of_queries,
    )
    key_inputs = (k, "j"), (v, "j"), *mask_of_keys
    shape, vmem, tile = jax.ShapeDtypeStruct, pltpu.VMEM, sizes.tile_tokens
    bias = vmem((tile, tile), jnp.float32)
    (dq,) = _call_attention_kernel(
        functools.partial(_dq_kernel, sizes),
        sizes,
        _causal_step_tiles_by_query,
        first,
        (*query_inputs, *key_inputs, (_swap_tokens_and_channels(k), "-j")),
        ((shape(q.shape, q.dtype), "i"),),
        (vmem((q.shape[2], tile), jnp.float32), bias),
        3,
        interpret,
    )
    dk, dv = _call_attention_kernel(
        functools.partial(_dkv_kernel, sizes),
        sizes,
        _causal_step_tiles_by_key,
        last,
        (*query_inputs, *key_inputs),
        ((shape(k.shape, k.dtype), "j"), (shape(v.shape, v.dtype), "j")),
        (vmem((tile, k.shape[2]), jnp.float32), vmem((tile, v.shape[2]), jnp.float32), bias),
        4,
        interpret,
    )
    return tuple(_split_heads(sizes, x) for x in (dq, dk, dv))


def _attention_probabilities(sizes, q, k, bias, logsumexp, number, own, of_keys):
    """Returns the attention weights p [S, C] of a head, computed from the logsumexp of the tile's
    queries.
    """
    s_SC = _dot(k[:, of_keys], q[:, own], _NT) * sizes.head_width**-0.5 + bias[...]
    return jnp.exp(s_SC - logsumexp[pl.ds(number, 1), :])


class _DqRefs(NamedTuple):
    """The references of `_dq_kernel`."""

    first_key_tile: Any  # the first tile of keys that each tile of queries sees
    q: Any  # [C, N · K]
    do: Any  # [C, N · K]
    logsumexp: Any  # [N, C]
    delta: Any  # [N, C], the inner products of o and do
    indexer_q: Any  # [C, H · I], the indexer's queries
    query_mask_rows: Any  # [ROWS, C] int32, what `_write_visibility_bias` reads of queries
    k: Any  # [S, M · K]
    v: Any  # [S, M · K]
    indexer_k: Any  # [S, I], the keys of the indexer's blocks
    key_mask_rows: Any  # [ROWS, S] int32, what `_write_visibility_bias` reads of keys
    k_transposed: Any  # [M · K, S]
    dq: Any  # output [C, N · K]
    dq_sum: Any  # scratch [N · K, C]
    visibility_bias: Any  # scratch [S, C], 0 or HIDDEN


def _dq_kernel(sizes, *refs):
    """Adds the part of a tile of keys to the gradient of a tile of queries, `dq_sum`."""
    refs = _DqRefs(*refs)
    n, (b, r, c) = pl.num_programs(2) - 1, (pl.program_id(axis) for axis in range(3))
    i, j, is_new = _causal_step_tiles_by_query(n, r, c)

    @pl.when(is_new & (j == 0))
    def _():
        refs.dq_sum[...] = jnp.zeros_like(refs.dq_sum)

    def head(number, own, of_keys):
        p_SC = _attention_probabilities(
            sizes, refs.q, refs.k, refs.visibility_bias, refs.logsumexp, number, own, of_keys
        )
        dp_SC = _dot(refs.v[:, of_keys], refs.do[:, own], _NT)
        ds_SC = (p_SC * (dp_SC - refs.delta[pl.ds(number, 1), :])).astype(refs.q.dtype)
        refs.dq_sum[own, :] += _dot(refs.k_transposed[of_keys, :], ds_SC, _NN)

    @pl.when(is_new & (j >= refs.first_key_tile[b * n + i]))
    def _():
        @pl.when(
            _write_visibility_bias(
                refs.indexer_q,
                refs.query_mask_rows,
                refs.indexer_k,
                refs.key_mask_rows,
                refs.visibility_bias,
            )
        )
        def _():
            _for_each_head(sizes, head)

    @pl.when(is_new & (j == i))
    def _():
        def write(_, own, __):
            refs.dq[:, own] = (refs.dq_sum[own, :] * sizes.head_width**-0.5).T.astype(refs.dq.dtype)

        _for_each_head(sizes, write)


class _DkvRefs(NamedTuple):
    """The references of `_dkv_kernel`."""

    last_query_tile: Any  # the last tile of queries that sees each tile of keys
    q: Any  # [C, N · K]
    do: Any  # [C, N · K]
    logsumexp: Any  # [N, C]
    delta: Any  # [N, C], the inner products of o and do
    indexer_q: Any  # [C, H · I], the indexer's queries
    query_mask_rows: Any  # [ROWS, C] int32, what `_write_visibility_bias` reads of queries
    k: Any  # [S, M · K]
    v: Any  # [S, M · K]
    indexer_k: Any  # [S, I], the keys of the indexer's blocks
    key_mask_rows: Any  # [ROWS, S] int32, what `_write_visibility_bias` reads of keys
    dk: Any  # output [S, M · K]
    dv: Any  # output [S, M · K]
    dk_sum: Any  # scratch [S, M · K]
    dv_sum: Any  # scratch [S, M · K]
    visibility_bias: Any  # scratch [S, C], 0 or HIDDEN


def _dkv_kernel(sizes, *refs):
    """Adds the part of a tile of queries to the gradients of a tile of keys and values."""
    refs = _DkvRefs(*refs)
    n, (b, r, c) = pl.num_programs(2) - 1, (pl.program_id(axis) for axis in range(3))
    i, j, is_new = _causal_step_tiles_by_key(n, r, c)

    @pl.when(is_new & (i == j))
    def _():
        refs.dk_sum[...] = jnp.zeros_like(refs.dk_sum)
        refs.dv_sum[...] = jnp.zeros_like(refs.dv_sum)

    def head(number, own, of_keys):
        p_SC = _attention_probabilities(
            sizes, refs.q, refs.k, refs.visibility_bias, refs.logsumexp, number, own, of_keys
        )
        refs.dv_sum[:, of_keys] += _dot(p_SC.astype(refs.do.dtype), refs.do[:, own], _NN)
        dp_SC = _dot(refs.v[:, of_keys], refs.do[:, own], _NT)
        ds_SC = (p_SC * (dp_SC - refs.delta[pl.ds(number, 1), :])).astype(refs.q.dtype)
        refs.dk_sum[:, of_keys] += _dot(ds_SC, refs.q[:, own], _NN)

    @pl.when(is_new & (i <= refs.last_query_tile[b * n + j]))
    def _():
        @pl.when(
            _write_visibility_bias(
                refs.indexer_q,
                refs.query_mask_rows,
                refs.indexer_k,
                refs.key_mask_rows,
                refs.visibility_bias,
            )
        )
        def _():
            _for_each_head(sizes, head)

    @pl.when(is_new & (i == n - 1))
    def _():
        refs.dk[...] = (refs.dk_sum[...] * sizes.head_width**-0.5).astype(refs.dk.dtype)
        refs.dv[...] = refs.dv_sum[...].astype(refs.dv.dtype)


# ---- the choice


def choose_blocks(number_chosen: int, rows, index_q, *, interpret: bool = False):
    """Returns two arrays [B, T] int32 for each query: the lowest score among the blocks that the
    query selects, as bits, and the index of a block, before which blocks with exactly the lowest
    score are selected.

    Args:
      number_chosen: the number of blocks that a query selects.
      rows: the `TokensAndBlocks` of `zoo.ops.indexed_attention`.
      index_q: [B, T, H, I], the indexer's queries.
      interpret: whether a CPU interprets the kernel.
    """
    (batch, count, width), tokens = rows.block_indexer_key.shape, index_q.shape[1]
    memory = lambda tile: _vmem_bytes_of_choice(tile, count, width, index_q.dtype.itemsize)
    small = (t for t in TILES if t <= tokens and memory(t) <= chip.vmem_budget_bytes())
    tile = next(small, TILES[-1])
    tiles, chunks = -(-tokens // tile), -(-count // CHUNK)
    at_once = next(n for n in range(CHUNKS_AT_ONCE, 0, -1) if chunks % n == 0)
    size, padded, all_queries = at_once * CHUNK, chunks * CHUNK, tiles * tile
    beyond = ((0, 0), (0, padded - count))
    block_k = jnp.pad(rows.block_indexer_key, (*beyond, (0, 0)))
    blocks = _stack_as_padded_rows(
        padded,
        rows.block_end_position,
        jnp.where(rows.block_segment > 0, rows.block_segment, -1),
        filler=-1,
    )
    flat = _pad_end(_merge_heads(index_q), all_queries)
    queries = _stack_as_padded_rows(all_queries, rows.position, rows.segment, filler=-2)

    # For each tile of queries, the first block of the document of its first query, and the block of
    # its last query. `number` never decreases along a row: it counts the complete blocks before a
    # token.
    number = jnp.pad(rows.complete_blocks_before, ((0, 0), (0, all_queries - tokens)), mode="edge")
    start = _pad_end(_document_starts(rows.segment), all_queries)
    first = jnp.take_along_axis(number, start[:, ::tile], axis=1)
    last = number[:, tile - 1 :: tile]
    ranges = jnp.clip(jnp.stack((first, last), axis=-1), 0, count - 1).reshape(-1)

    def block(b, t, g, ranges):
        at = 2 * (b * tiles + t)
        return jnp.clip(g, ranges[at] // size, ranges[at + 1] // size)

    pairs = batch * all_queries * padded // 2
    lowest, cut = pallas_call(
        functools.partial(_choice_kernel, number_chosen),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, tiles, chunks // at_once),
            in_specs=[
                pl.BlockSpec((None, tile, flat.shape[2]), lambda b, t, g, _: (b, t, 0)),
                pl.BlockSpec((None, ROWS, tile), lambda b, t, g, _: (b, 0, t)),
                pl.BlockSpec((None, size, width), lambda *at: (at[0], block(*at), 0)),
                pl.BlockSpec((None, ROWS, size), lambda *at: (at[0], 0, block(*at))),
            ],
            out_specs=[pl.BlockSpec((None, 1, tile), lambda b, t, g, _: (b, 0, t))] * 2,
            scratch_shapes=(pltpu.VMEM((padded, tile), jnp.int32),),
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, 1, all_queries), jnp.int32)] * 2,
        interpret=interpret,
        name="indexed_attention_choice",
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * flat.shape[2],
            transcendentals=0,
            bytes_accessed=flat.size * flat.dtype.itemsize
            + tiles * block_k.size * block_k.dtype.itemsize // 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes(),
        ),
    )(ranges, flat, queries, block_k, blocks)
    return lowest[:, 0, :tokens], cut[:, 0, :tokens]


class _ChoiceRefs(NamedTuple):
    """The references of `_choice_kernel`."""

    block_ranges: Any  # for each tile of queries the first and the last block of its documents
    indexer_q: Any  # [C, H · I]
    query_mask_rows: Any  # [ROWS, C] int32
    block_keys: Any  # the blocks' keys, of some chunks
    block_mask_rows: Any  # [ROWS, …] int32, of the same blocks
    lowest_score_bits: Any  # output [1, C], the lowest score that a query selects, as bits
    tie_end_block: Any  # output [1, C], the block at which its selection of this score ends
    score_bits: Any  # scratch [G, C]


def _choice_kernel(number_chosen, *refs):
    """Scores some chunks of blocks for a tile of queries. For each block, the kernel writes to
    `score_bits` [G, C] the score's bits, or -1 if the query does not see the block. The last step
    finds the lowest selected score, and the index of the block before which blocks with exactly the
    lowest score are selected.
    """
    refs = _ChoiceRefs(*refs)
    b, t, g = (pl.program_id(axis) for axis in range(3))
    at = 2 * (b * pl.num_programs(1) + t)
    first, last = refs.block_ranges[at] // CHUNK, refs.block_ranges[at + 1] // CHUNK
    at_once = refs.block_keys.shape[0] // CHUNK

    for part in range(at_once):
        chunk = g * at_once + part

        @pl.when((chunk >= first) & (chunk <= last))
        def _(part=part, chunk=chunk):
            here = slice(part * CHUNK, (part + 1) * CHUNK)
            columns = refs.block_mask_rows[:, here].T
            visible = (
                columns[:, POSITION : POSITION + 1] <= refs.query_mask_rows[POSITION : POSITION + 1]
            ) & (columns[:, SEGMENT : SEGMENT + 1] == refs.query_mask_rows[SEGMENT : SEGMENT + 1])
            score = _indexer_score_bits(refs.block_keys[here], refs.indexer_q)
            refs.score_bits[_aligned_part_slice(chunk, CHUNK), :] = jnp.where(visible, score, -1)

    def count(condition):
        """Returns [1, C], the number of blocks for which condition(bits, number) is true."""

        def add(chunk, total):
            here = refs.score_bits[_aligned_part_slice(chunk, CHUNK), :]
            number = chunk * CHUNK + jax.lax.broadcasted_iota(jnp.int32, here.shape, 0)
            ones = jnp.where(condition(here, number), 1, 0)
            return total + jnp.sum(ones.reshape(-1, ROWS, ones.shape[1]), axis=0)

        zero = jnp.zeros((ROWS, refs.score_bits.shape[1]), jnp.int32)
        total = jax.lax.fori_loop(first, last + 1, add, zero)
        return jnp.sum(total, axis=0, keepdims=True)

    def largest(num_bits: int, holds):
        """Returns [1, C], the largest number of `num_bits` bits for which `holds` is true. The
        condition `holds` is true for 0; if it is true for a number, it is true for all smaller
        numbers.
        """

        def step(bit, found):
            larger = found | jnp.left_shift(1, num_bits - 1 - bit)
            return jnp.where(holds(larger), larger, found)

        return jax.lax.fori_loop(
            0, num_bits, step, jnp.zeros((1, refs.score_bits.shape[1]), jnp.int32)
        )

    @pl.when(g == pl.num_programs(2) - 1)
    def _():
        refs.lowest_score_bits[...] = jnp.zeros_like(refs.lowest_score_bits)
        refs.tie_end_block[...] = jnp.full_like(refs.tie_end_block, LAST)

        @pl.when(refs.block_ranges[at + 1] - refs.block_ranges[at] >= number_chosen)
        def _():
            refs.lowest_score_bits[...] = largest(
                31, lambda x: count(lambda here, _: here >= x) >= number_chosen
            )
            room = number_chosen - count(lambda here, _: here > refs.lowest_score_bits[...])
            equal = count(lambda here, _: here == refs.lowest_score_bits[...])

            @pl.when(jnp.max(jnp.where(equal > room, 1, 0)) == 1)
            def _():
                tied = lambda x: count(
                    lambda here, number: (here == refs.lowest_score_bits[...]) & (number < x)
                )
                found = largest(refs.score_bits.shape[0].bit_length(), lambda x: tied(x) <= room)
                refs.tie_end_block[...] = jnp.where(equal > room, found, LAST)
