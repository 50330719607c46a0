"""Attention in which an indexer chooses the blocks of keys that each query sees, computed by
kernels, with a custom gradient to queries, keys and values. `zoo/qsa.py` has the formulas, and two
implementations in XLA, which run where no kernel does.

Letters: B batch, T tokens, N query heads, M key/value heads, K head width, H heads of the indexer,
I their width, G blocks of a row.
"""

import functools
from typing import NamedTuple

import jax

from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.implementations import ChosenImplementation


class TokensAndBlocks(NamedTuple):
    """The tokens and the complete blocks of every row.

    Attributes:
      position: [B, T] int32, the position of each token in its document.
      segment: [B, T] int32, the segment id of each token's document; 0 for padding.
      complete_blocks_before: [B, T] int32, the number of complete blocks in the row that end before
        the token. For a token of a complete block, complete_blocks_before is the index of the
        block.
      block_indexer_key: [B, G, I], the pooled key of each block.
      block_end_position: [B, G] int32, the position of each block's last token.
      block_segment: [B, G] int32, the segment id of each block's document; 0 after the last block.
    """

    position: jax.Array
    segment: jax.Array
    complete_blocks_before: jax.Array
    block_indexer_key: jax.Array
    block_end_position: jax.Array
    block_segment: jax.Array


def indexed_attention(
    chosen: ChosenImplementation,
    ratio: int,
    count: int,
    rows: TokensAndBlocks,
    index_q_BTHI: jax.Array,
    q_BTNK: jax.Array,
    k_BTMK: jax.Array,
    v_BTMK: jax.Array,
) -> jax.Array:
    """Returns o [B, T, N, K] in v's dtype: attention of each query to the keys that it sees, with
    the softmax in float32. No gradient passes to the indexer.

    Args:
      chosen: the kernels that run the call.
      ratio: number of tokens of a block.
      count: the number of blocks that a query selects.
      rows: the tokens and blocks.
      index_q_BTHI: the indexer's queries.
      q_BTNK, k_BTMK, v_BTMK: attention's queries, keys and values.
    """
    rows, index_q_BTHI = jax.lax.stop_gradient((rows, index_q_BTHI))
    selection = save_for_backward(
        chosen.function_named("choose_blocks")(count, rows, index_q_BTHI), "attention"
    )
    return _attention_of_selection(
        (chosen, ratio), rows, selection, index_q_BTHI, q_BTNK, k_BTMK, v_BTMK
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_of_selection(chosen_and_ratio, *arrays):
    return _attention_forward(chosen_and_ratio, *arrays)[0]


def _attention_forward(chosen_and_ratio, *arrays):
    chosen, ratio = chosen_and_ratio
    results = chosen.function_named("forward")(ratio, *arrays)
    o_BTNK, logsumexp_BNT = save_for_backward(results, "attention")
    return o_BTNK, (arrays, o_BTNK, logsumexp_BNT)


def _attention_backward(chosen_and_ratio, saved, do_BTNK):
    (chosen, ratio), (arrays, o_BTNK, logsumexp_BNT) = chosen_and_ratio, saved
    function = chosen.function_named("backward")
    return None, None, None, *function(ratio, *arrays, o_BTNK, logsumexp_BNT, do_BTNK)


_attention_of_selection.defvjp(_attention_forward, _attention_backward)
