"""The delta rule with a decay for each key channel, computed token by token: the implementation
"recurrent". Tests compare the chunked implementation with the recurrent implementation.

Letters: B batch, T time, H heads, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.zoo.ops.channel_delta_rule.chunked import TokenArrays


def recurrent(x: TokenArrays, initial_state, *, delta_term: bool, reads_before_write: bool):
    """Runs the recurrence in the dtype of the state. JAX differentiates the code.

    Args:
      x: the arrays of the call.
      initial_state: [B, H, K, V].
      delta_term: whether the write has the delta term -S^T e (e is k if there is no erase_key).
      reads_before_write: whether a token reads the state before its own decay and write.

    Returns:
      o [B, T, H, V] and the final state [B, H, K, V], both in the dtype of the state.
    """

    def step(state_BHKV, token):
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, value_decay_BHV, erase_BHK = token
        read = lambda state: jnp.sum(state * q_BHK[..., None], axis=-2)
        o_BHV = read(state_BHKV)
        state_BHKV = state_BHKV * jnp.exp(g_BHK)[..., None]
        if value_decay_BHV is not None:
            state_BHKV = state_BHKV * jnp.exp(value_decay_BHV)[..., None, :]
        erase_BHK = k_BHK if erase_BHK is None else erase_BHK
        write_BHV = (
            v_BHV - jnp.sum(state_BHKV * erase_BHK[..., None], axis=-2) if delta_term else v_BHV
        )
        state_BHKV = state_BHKV + (beta_BH[..., None] * k_BHK)[..., None] * write_BHV[..., None, :]
        return state_BHKV, o_BHV if reads_before_write else read(state_BHKV)

    tokens = jax.tree.map(
        lambda array: jnp.moveaxis(array.astype(initial_state.dtype), 1, 0), x.repeat_key_heads()
    )
    state, o_TBHV = jax.lax.scan(step, initial_state, tokens)
    return jnp.moveaxis(o_TBHV, 0, 1), state
