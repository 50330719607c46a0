"""The sum of the weights by which normalised linear attention divides its output."""

import jax.numpy as jnp

from qwen3next_jax.zoo.ops.scans import linear_scan


def key_sum(q, k, *, g, beta, initial_state=None, segment_ids=None, axis_name: str | None = None):
    """o_t = z_t · q_t, z_t = e^{g_t} z_{t-1} + β_t k_t. This is the sum of the weights with which
    `gated_delta_rule(erase=False)` sums the values for positive q and k. (A value channel that is
    always 1 would yield the same sum there, with a state of K × (V + 1) numbers.)

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
