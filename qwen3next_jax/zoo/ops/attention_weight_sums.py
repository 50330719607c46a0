"""The sum of the attention weights in linear attention, by which some models divide the output."""

import jax.numpy as jnp

from qwen3next_jax.zoo.ops.scans import linear_scan


def attention_weight_sums(
    q, k, *, g, beta, initial_state=None, segment_ids=None, axis_name: str | None = None
):
    """Computes o_t = z_t · q_t with z_t = e^{g_t} z_{t-1} + β_t k_t. o_t is the sum of the weights
    of linear attention: `gated_delta_rule(delta_term=False, normalize_qk=False)` returns the sum of
    the values with these weights, times K^{-1/2}.

    Args:
      q, k: [B, T, G, K] queries and keys; head h reads key head h // (H // G).
      g: [B, T, H] log decay, ≤ 0.
      beta: [B, T, H] weights of the keys.
      initial_state: [B, H, K] or None for zeros.
      segment_ids, axis_name: as in `linear_scan`.

    Returns:
      o [B, T, H] float32; the last z [B, H, K] float32.
    """
    repeats = g.shape[2] // k.shape[2]
    q_BTHK, k_BTHK = (jnp.repeat(x.astype(jnp.float32), repeats, axis=2) for x in (q, k))
    z_BTHK, _, last_BHK = linear_scan(
        g[..., None],
        beta[..., None] * k_BTHK,
        initial_state=initial_state,
        segment_ids=segment_ids,
        axis_name=axis_name,
    )
    return jnp.sum(z_BTHK * q_BTHK, axis=-1), last_BHK
