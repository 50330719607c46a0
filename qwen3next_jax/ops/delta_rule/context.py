"""The gated delta rule over a sequence that is split over a mesh axis.

Let S be the state before a shard's first token. The state after the shard's last token is
S' = U + M S, and the shard's outputs are o = o0 + r S, where U, M, o0 and r do not depend on S. The
steps are:

    1. Every shard computes U, M, r and the inverses of its chunks in one pass (`affine_map`). 2.
    The shards exchange and compose their maps U + M S. The composition gives S of each shard. 3.
    Every shard runs the forward pass of the implementation from S, with the inverses of step 1. 4.
    In the backward pass, the maps dS = M^T dS' + r^T dO are composed from the last shard to the
    first. The composition gives each shard dS', the gradient of S'.
    5. Every shard runs the backward pass of the implementation from dS'.

docs/notes/many_devices.md lists the costs. If a document starts inside a shard, the shard's M is
zero, because the decay across the start of a document is zero. If a document starts at the first
token of a shard, `chunked.zero_state_unless_continued` sets the shard's M and S to zero.

B batch, H value heads, K key width, V value width.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import associative, chunked, reference
from qwen3next_jax.ops.delta_rule.chunk_math import MatrixProducts
from qwen3next_jax.ops.delta_rule.dispatch import Operator
from qwen3next_jax.ops.delta_rule.interface import Inputs


def last_segment_id_before_shard(segment_ids, axis_name: str):
    """Returns [B], the largest document id in the shards before this shard, but at least 1.

    Args:
      segment_ids: [B, T], the ids of this shard.
      axis_name: name of the mesh axis over which T is split.
    """
    # [shards, B]
    largest = jax.lax.all_gather(jnp.max(segment_ids, axis=1).astype(jnp.int32), axis_name)
    earlier = jnp.arange(largest.shape[0]) < jax.lax.axis_index(axis_name)
    return jnp.maximum(jnp.max(jnp.where(earlier[:, None], largest, 0), axis=0), 1)


def gated_delta_rule_over_axis(
    operator: Operator, axis_name: str, x: Inputs, initial_state, before
):
    """Returns o [B, T, H, V] of this shard and the final state of the whole row, [B, H, K, V].

    Args:
      operator: the implementation and the settings.
      axis_name: name of the mesh axis over which T is split.
      x: this shard's inputs. `x.signed_segment_ids` was computed with `before`
        (`chunk_math.signed_segment_ids`).
      initial_state: [B, H, K, V], the state before the row. Only the first shard uses this state.
      before: [B], the result of `last_segment_id_before_shard`; None if a row is one document.
    """
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    initial_state = jnp.where(shard == 0, initial_state, 0)
    continues = (
        None if x.signed_segment_ids is None else jnp.abs(x.signed_segment_ids[:, 0]) == before
    )
    run = (
        _recurrent_over_axis
        if operator.chosen_implementation.name == "recurrent"
        else _delta_rule_over_axis
    )
    o, final = run(operator, axis_name, x, initial_state, continues)
    return o, jax.lax.psum(jnp.where(shard == shards - 1, final, 0), axis_name)


def _recurrent_over_axis(operator: Operator, axis_name, x: Inputs, initial_state, continues):
    """Computes the same as `_delta_rule_over_axis`, but with the recurrence of `reference`,
    which JAX differentiates.
    """
    settings = operator.settings
    pass_over = functools.partial(
        reference.recurrent, normalize_qk=settings.normalize_qk, delta_term=settings.delta_term
    )
    batch, heads, width, _ = initial_state.shape
    identity = jnp.broadcast_to(
        jnp.eye(width, dtype=initial_state.dtype), (batch, heads, width, width)
    )
    _, u = pass_over(x, initial_state)
    _, m = pass_over(x._replace(v=jnp.zeros((*x.v.shape[:3], width), x.v.dtype)), identity)
    return pass_over(x, initial_state + _state_entering_shard(axis_name, continues, m, u))


# ---- composition over the shards


def _state_entering_shard(axis_name, continues, m_BHKK, u_BHKV):
    """Returns the state [B, H, K, V] before this shard's first token, computed as if the state
    before the first shard were zero. The result is zero if a document starts at the first token of
    this shard.
    """
    m_BHKK = chunked.zero_state_unless_continued(continues, m_BHKK)
    state_BHKV = compose_maps_over_shards(axis_name, m_BHKK, u_BHKV, reverse=False)
    return chunked.zero_state_unless_continued(continues, state_BHKV)


def compose_maps_over_shards(axis_name, m_BHKK, u_BHKV, reverse: bool):
    """Composes the maps of all n shards. Returns the state [B, H, K, V] that enters this shard if
    zeros enter the first shard (with `reverse`, the last shard).

    Each shard composes the maps of all shards for its share of the heads, so no product is computed
    twice. Two all-to-all exchanges bring each shard K (K + 2 V) numbers per head. An all-gather of
    the maps would bring each shard (n - 1) K (K + V) numbers per head.

    Args:
      axis_name: name of the mesh axis.
      m_BHKK: [B, H, K, K], M of this shard.
      u_BHKV: [B, H, K, V], U of this shard.
      reverse: whether the state is carried from the last shard to the first.
    """
    shards = jax.lax.axis_size(axis_name)
    batch, heads, key, value = u_BHKV.shape
    count = batch * heads
    maps = jnp.concatenate([m_BHKK, u_BHKV], axis=-1).reshape(count, key, -1)
    maps = jnp.pad(maps, ((0, -count % shards), (0, 0), (0, 0))).reshape(
        shards, -1, *maps.shape[1:]
    )
    maps = jax.lax.all_to_all(maps, axis_name, 0, 0)  # [shards, heads of this one, K, K + V]
    m, u = jnp.split(maps, [key], axis=-1)
    entering, _ = associative.states_before_each_map(
        (m, u), jnp.zeros_like(u[0]), MatrixProducts(u.dtype), reverse
    )
    entering = jax.lax.all_to_all(entering, axis_name, 0, 0)
    return entering.reshape(-1, key, value)[:count].reshape(u_BHKV.shape)


# ---- the custom gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule_over_axis(operator: Operator, axis_name, *arguments):
    """Returns o and the state after this shard. Its backward pass is written out below."""
    return _outputs_and_residuals(operator, axis_name, False, *arguments)[0]


def _over_axis_forward(operator: Operator, axis_name, *arguments):
    return blocks.save_for_backward(_outputs_and_residuals(operator, axis_name, True, *arguments))


def _outputs_and_residuals(
    operator: Operator, axis_name, save: bool, x: Inputs, initial_state, continues
):
    """Returns the pair (o, the state after this shard), and the residuals for the backward pass."""
    u, m, r, inverses = operator.affine_map(x, initial_state)
    state = initial_state + _state_entering_shard(axis_name, continues, m, u)
    o, final, states, inverses = operator.forward(x, state, inverses, save=save)
    return (o, final), (x, initial_state[:0], continues, states, inverses, r, m)


def _over_axis_backward(operator: Operator, axis_name, residuals, cotangents):
    x, initial_state, continues, states, inverses, r, m = residuals
    do, dfinal = cotangents
    transposed = jnp.swapaxes(chunked.zero_state_unless_continued(continues, m), -1, -2)
    du = chunked.zero_state_unless_continued(
        continues, chunked.state_gradient_from_outputs(r, do).astype(m.dtype)
    ) + MatrixProducts(m.dtype).nn(transposed, dfinal)
    dleaving = dfinal + compose_maps_over_shards(axis_name, transposed, du, reverse=True)
    *gradients, dinitial = operator.backward(x, states, inverses, do, dleaving)
    return x.cast_gradients(gradients), dinitial.astype(initial_state.dtype), None


_delta_rule_over_axis.defvjp(_over_axis_forward, _over_axis_backward)
