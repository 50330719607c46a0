"""The experts of a few tokens, such as cached decoding has, on a CPU."""

import jax
import jax.numpy as jnp

FEW_TOKENS = 24  # up to which this is faster than sorting the choices


def used_experts(x_RD, weight_RA, expert_RA, gate_up, down, layer=()):
    """All tokens through every expert that any of them chose, one after another, so that its weights are read once.

    Args:
      x: [R, D]. weight: [R, A]. expert: [R, A] integers, a token's choices. gate_up: [E, D, 2, I]. down: [E, I, D].
      layer: (number of the layer,) where gate_up and down hold the experts of several, in front.

    Returns:
      [R, D], the sum of each token's choices, weighted. Not differentiable.
    """
    # Two rows at least, as XLA on CPU reads a matrix from memory at half the rate for one.
    r, e = x_RD.shape[0], gate_up.shape[-4]
    x_RD, weight_RA = (jnp.pad(x, ((0, max(2 - r, 0)), (0, 0))) for x in (x_RD, weight_RA))
    expert_RA = jnp.pad(expert_RA, ((0, max(2 - r, 0)), (0, 0)), mode="edge")
    chosen_RAE = expert_RA[..., None] == jnp.arange(e)
    weight_ER = jnp.sum(jnp.where(chosen_RAE, weight_RA[..., None], 0), axis=1).T
    count, order = expert_RA.shape[1], expert_RA[0]
    if r > 1:
        used_E = jnp.any(chosen_RAE, axis=(0, 1))
        count, order = jnp.sum(used_E), jnp.argsort(~used_E, stable=True)

    def add(i, y_RD):
        k = order[i]
        hidden = jnp.einsum("rd,dci->rci", x_RD, gate_up[*layer, k])
        return y_RD + (jax.nn.silu(hidden[:, 0]) * hidden[:, 1] * weight_ER[k][:, None]) @ down[*layer, k]
    return jax.lax.fori_loop(0, count, add, jnp.zeros_like(x_RD))[:r]
