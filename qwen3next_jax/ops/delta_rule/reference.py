"""The gated delta rule computed token by token with the recurrence of the paper. Tests compare
every other implementation with this recurrence, and decoding of a few tokens at a time runs it.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
equation 10.

B batch, T time, G key heads, H value heads, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule import chunk_math
from qwen3next_jax.ops.delta_rule.interface import Inputs


def recurrent(
    x: Inputs,
    initial_state,
    *,
    normalize_qk: bool,
    delta_term: bool,
    return_all_states: bool = False,
):
    """Runs the recurrence in the wider of the dtypes of q and `initial_state`, but at least in
    float32. The recurrence has no custom gradient; JAX differentiates the code.

    Args:
      x: the arrays with a time axis.
      initial_state: [B, H, K, V].
      normalize_qk: whether q and k are L2-normalised.
      delta_term: whether the write has the delta term -S^T k.
      return_all_states: whether to return the state after each token.

    Returns:
      o: [B, T, H, V] in v's dtype.
      state: [B, H, K, V], the state after the last token; with `return_all_states` [B, T, H, K, V],
        the state after each token.
    """
    q, k, v, g, beta, segments = x
    dtype = jnp.result_type(jnp.float32, q.dtype, initial_state.dtype)
    heads, (batch, time) = v.shape[2], q.shape[:2]
    q, k = q.astype(dtype), k.astype(dtype)
    q_scale, k_scale = chunk_math.query_and_key_scales(q, k, normalize_qk)
    q_BTHK, k_BTHK = (
        jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q * q_scale, k * k_scale)
    )
    if segments is None:
        new_BT = jnp.zeros((batch, time), bool)
        live_BT = jnp.ones((batch, time), bool)
    else:
        ids = jnp.abs(segments)
        new_BT = ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
        live_BT = segments > 0

    def step(state_BHKV, token):
        q_BHK, k_BHK, v_BHV, g_BH, beta_BH, new_B, live_B = token
        state_BHKV = jnp.where(new_B[:, None, None, None], 0, state_BHKV)
        state_BHKV = state_BHKV * jnp.exp(g_BH)[..., None, None]
        write_BHV = v_BHV
        if delta_term:
            write_BHV = v_BHV - jnp.sum(state_BHKV * k_BHK[..., None], axis=-2)
        state_BHKV = state_BHKV + (beta_BH[..., None] * k_BHK)[..., None] * write_BHV[..., None, :]
        o_BHV = jnp.sum(state_BHKV * q_BHK[..., None], axis=-2)
        return state_BHKV, (
            jnp.where(live_B[:, None, None], o_BHV, 0),
            state_BHKV if return_all_states else None,
        )

    tokens = (q_BTHK, k_BTHK, v.astype(dtype), g.astype(dtype), beta.astype(dtype), new_BT, live_BT)
    # Without the barrier, XLA on a CPU fuses the scaling of q and k into the loop, and repeats it
    # there for every element of the state.
    tokens = jax.lax.optimization_barrier(jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    state, (o_TBHV, states) = jax.lax.scan(step, initial_state.astype(dtype), tokens)
    o = jnp.moveaxis(o_TBHV, 0, 1).astype(v.dtype)
    return o, jnp.moveaxis(states, 0, 1) if return_all_states else state
