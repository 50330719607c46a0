"""`channel_delta_rule` over a sequence that is split over a mesh axis. The state after a shard is
an affine function of the state S that enters the shard.

The state after the shard is S' = U + M S, and the outputs are o = o₀ + r S. One pass over the shard
computes U, M, o₀ and r. To compute M and r, the pass adds K columns to the state, which are the
identity matrix at the start of the shard, and K channels of zeros to v. The final state of the
added columns is M, and their outputs are r. Then `ops.delta_rule.context.compose_maps_over_shards`
composes the maps S ↦ U + M S of all shards. JAX differentiates these steps. If a document starts in
the shard, the state S does not reach the end of the shard, and M is 0.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import HIGHEST
from qwen3next_jax.ops.delta_rule.context import compose_maps_over_shards
from qwen3next_jax.zoo.ops.channel_delta_rule.chunked import TokenArrays


def run_across_shards(run, axis_name: str, x: TokenArrays, initial_state):
    """Runs `run` on a row that is split over the mesh axis `axis_name`. Returns o [B, T, H, V] of
    this shard, and the final state [B, H, K, V] of the whole row.

    Args:
      run: function (inputs, initial state) → (o, final state) for the tokens of one shard.
      axis_name: name of the mesh axis over which T is split.
      x: the arrays of this shard.
      initial_state: [B, H, K, V], the state before the row. Only the first shard uses it.
    """
    shard, last = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name) - 1
    (*_, key, value), dtype = initial_state.shape, initial_state.dtype
    identity = jnp.broadcast_to(jnp.eye(key, dtype=dtype), (*initial_state.shape[:-1], key))
    state = jnp.concatenate([jnp.where(shard == 0, initial_state, 0), identity], axis=-1)
    o, final = run(x._replace(v=jnp.pad(x.v, [(0, 0)] * 3 + [(0, key)])), state)
    u, m = final[..., :value], final[..., value:]
    entering = compose_maps_over_shards(axis_name, m, u, reverse=False)
    o = o[..., :value] + jnp.einsum("bthk,bhkv->bthv", o[..., value:], entering, precision=HIGHEST)
    final = u + jnp.einsum("bhjk,bhkv->bhjv", m, entering, precision=HIGHEST)
    return o, jax.lax.psum(jnp.where(shard == last, final, 0), axis_name)
