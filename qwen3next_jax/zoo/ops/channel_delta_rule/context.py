"""The same over a sequence split over a mesh axis: a shard's tokens act on the state that enters
by an affine map.

Value columns that are zero and start at the identity give the map itself beside the values'
columns, S' = U + M S, and what the outputs take of the state, o = o₀ + r S: one pass over [S |
I] says all of a shard, the maps are composed over the shards
(`delta_rule.context.compose_over_shards`), and the gradient is that of these lines. A document that
starts in the shard has made M zero.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import HIGHEST
from qwen3next_jax.ops.delta_rule.context import compose_over_shards
from qwen3next_jax.zoo.ops.channel_delta_rule.chunked import Inputs


def across(run, axis_name: str, x: Inputs, initial_state):
    """o [B, T, H, V] of this shard and the row's final state [B, H, K, V]. run: inputs, state →
    o, state of one shard.
    """
    shard, last = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name) - 1
    (*_, key, value), dtype = initial_state.shape, initial_state.dtype
    identity = jnp.broadcast_to(jnp.eye(key, dtype=dtype), (*initial_state.shape[:-1], key))
    state = jnp.concatenate([jnp.where(shard == 0, initial_state, 0), identity], axis=-1)
    o, final = run(x._replace(v=jnp.pad(x.v, [(0, 0)] * 3 + [(0, key)])), state)
    u, m = final[..., :value], final[..., value:]
    entering = compose_over_shards(axis_name, m, u, reverse=False)
    o = o[..., :value] + jnp.einsum("bthk,bhkv->bthv", o[..., value:], entering, precision=HIGHEST)
    final = u + jnp.einsum("bhjk,bhkv->bhjv", m, entering, precision=HIGHEST)
    return o, jax.lax.psum(jnp.where(shard == last, final, 0), axis_name)
