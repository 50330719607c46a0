"""`channel_delta_rule` with a decay on both axes of the state and without the delta term: S ←
Diag(e^{g}) S Diag(e^{g'}) + β k vᵀ. The state is computed chunk by chunk, and JAX differentiates
the code.

The decay of the values uses the same levels of pairs of rows as the decay of the keys (see
`decay_levels`). At each level, the value of row j first decays from row j to the end of the block
of row j. Then the decayed values are summed with the weights q·k of the pairs. Finally the sum
decays from the start of the next block to row i. Therefore each level multiplies its weights by
values that were decayed for this level, and no matrix of all pairs is computed.

Letters: B batch, H heads, C chunk length, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule.chunk_math import HIGHEST, MatrixProducts, row_dot_products
from qwen3next_jax.zoo.ops.channel_delta_rule import decay_levels
from qwen3next_jax.zoo.ops.channel_delta_rule.chunked import TokenArrays, product_of_split_operands


def chunked_with_value_decay(x: TokenArrays, initial_state, *, size: int, reads_before_write: bool):
    """Returns o [B, T, H, V] in the state's dtype, and the final state [B, H, K, V].

    Args:
      x: the arrays of the call.
      initial_state: [B, H, K, V].
      size: number of tokens of a chunk.
      reads_before_write: whether a token reads the state before its own decay and write.
    """
    dtype, dots = initial_state.dtype, MatrixProducts(x.v.dtype, may_copy_transpose=True)

    @jax.checkpoint  # the backward pass recomputes all but `state_BHKV` and `chunk`
    def step(state_BHKV, chunk: TokenArrays):
        q, k, v, g, beta, value_log_decay = (
            jnp.moveaxis(array.astype(dtype), 1, 2) for array in chunk.repeat_key_heads()[:6]
        )
        v = beta[..., None] * v
        key_decays, value_decays = (
            jax.tree.map(jnp.exp, decay_levels.decay_exponents(decay, reads_before_write))
            for decay in (g, value_log_decay)
        )
        o = value_decays.query_from_start * dots.nn(q * key_decays.query_from_start, state_BHKV)
        if not reads_before_write:
            o = o + row_dot_products(q, k) * v
        for level in range(len(key_decays.by_level)):
            reads, keys, values = (
                q * key_decays.query_by_level[level],
                k * key_decays.by_level[level],
                v * value_decays.by_level[level],
            )
            o = o + value_decays.query_by_level[level] * decay_levels.level_products_times_values(
                reads, keys, values, level, dots
            )
        carry = jnp.swapaxes(key_decays.total, -1, -2) * value_decays.total
        state_BHKV = carry * state_BHKV + product_of_split_operands(
            dots.tn, k * key_decays.to_end, v * value_decays.to_end, dots, -2, -2
        )
        return state_BHKV, jnp.moveaxis(o, 2, 1)

    final, o = blocks.scan_or_call_once(step, initial_state, blocks.to_chunks(x, 1, size))
    return blocks.from_chunks(o, 1, x.v.shape[1]), final


def run_across_shards(run, axis_name: str, x: TokenArrays, initial_state, reads_before_write: bool):
    """Runs `run` on a row that is split over the mesh axis `axis_name`, for states that decay on
    both axes. A loop over the earlier shards computes the state that enters this shard.

    Args:
      run: function (inputs, initial state) → (outputs, final state) of one shard.
      x: the inputs of this shard.
      initial_state: the state before the row; only the first shard uses it.
      reads_before_write: whether a token reads the state before its own decay and write.

    Returns:
      (the outputs of this shard, the final state of the whole row).
    """
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    dtype = initial_state.dtype
    o, leaving = run(x, jnp.where(shard == 0, initial_state, 0))
    g, value_log_decay = (decay.astype(dtype) for decay in (x.log_decay, x.value_log_decay))
    carry = (
        jnp.exp(jnp.sum(g, axis=1))[..., None]
        * jnp.exp(jnp.sum(value_log_decay, axis=1))[..., None, :]
    )
    carries, written = jax.lax.all_gather((carry, leaving), axis_name)
    entering = jnp.zeros_like(leaving)
    for earlier in range(shards - 1):
        entering = jnp.where(
            earlier < shard, carries[earlier] * entering + written[earlier], entering
        )

    def since_start(decay):
        total = jnp.cumsum(decay, axis=1)
        return jnp.exp(
            jnp.pad(total[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)])
            if reads_before_write
            else total
        )

    q = x.repeat_key_heads().q.astype(dtype) * since_start(g)
    o = o + since_start(value_log_decay) * jnp.einsum(
        "bthk,bhkv->bthv", q, entering, precision=HIGHEST
    )
    return o, jax.lax.psum(jnp.where(shard == shards - 1, carry * entering + leaving, 0), axis_name)
