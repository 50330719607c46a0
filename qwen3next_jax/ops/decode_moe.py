"""Routed experts for a small batch, such as cached decoding has, on a CPU: only the experts that
some token chose are computed.
"""

import jax
import jax.numpy as jnp

_ROWS = 4  # a product of fewer takes as long: that of reading the weights


def is_decode_batch(tokens: int, choices: int, experts: int, stacked: bool = False) -> bool:
    """Whether `decode_moe` is faster than sorting the choices of so many tokens. `stacked`:
    whether the weights hold the experts of several layers.
    """
    return tokens <= (64 if _together(tokens, choices, experts, stacked) else 24)


def decode_moe(x_RD, weight_RA, expert_RA, gate_up, down, layer=()):
    """Each token through the experts that it chose.

    Args:
      x: [R, D]. weight: [R, A]. expert: [R, A] integers, a token's choices. gate_up: [E, D, 2,
      I]. down: [E, I, D]. layer: (number of the layer,) where gate_up and down hold the experts
      of several, in front.

    Returns:
      [R, D], the sum of each token's choices, weighted. Not differentiable.
    """
    (r, a), e = expert_RA.shape, gate_up.shape[-4]
    if _together(r, a, e, layer):
        return _all_at_once(x_RD, weight_RA, expert_RA, gate_up, down)
    # Two rows at least, as XLA on CPU reads a matrix from memory at half the rate for one.
    x_RD, weight_RA = (jnp.pad(x, ((0, max(2 - r, 0)), (0, 0))) for x in (x_RD, weight_RA))
    expert_RA = jnp.pad(expert_RA, ((0, max(2 - r, 0)), (0, 0)), mode="edge")
    used_E, weight_ER = (x.T for x in _by_expert(weight_RA, expert_RA, e))
    count, order = a, expert_RA[0]
    if r > 1:
        used_E = jnp.any(used_E, axis=1)
        count, order = jnp.sum(used_E), jnp.argsort(~used_E, stable=True)

    def add(i, y_RD):
        k = order[i]
        hidden = jnp.einsum("rd,dci->rci", x_RD, gate_up[*layer, k])
        return (
            y_RD
            + (jax.nn.silu(hidden[:, 0]) * hidden[:, 1] * weight_ER[k][:, None]) @ down[*layer, k]
        )

    return jax.lax.fori_loop(0, count, add, jnp.zeros_like(x_RD))[:r]


def _together(tokens, choices, experts, layer) -> bool:
    """Whether all experts are read: where most are used, as cutting one out takes as long as its
    products. Not of a stack of layers, whose weights would be cut out whole.
    """
    return tokens > 2 and 2 * tokens * choices > experts and not layer


def _all_at_once(x_RD, weight_RA, expert_RA, gate_up, down):
    """Up to C tokens of each expert together, in as many passes as the one with most tokens
    needs: one, mostly.
    """
    (r, a), e = expert_RA.shape, len(gate_up)
    used_RE, weight_RE = _by_expert(weight_RA, expert_RA, e)
    most = min(max(_ROWS, -(-2 * r * a // e)), r)

    def swiglu(x_ECD):
        hidden = jnp.einsum("ecd,edji->ecji", x_ECD, gate_up)
        return jnp.einsum("eci,eid->ecd", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down)

    if most == r:
        return jnp.einsum("erd,re->rd", swiglu(jnp.broadcast_to(x_RD, (e, *x_RD.shape))), weight_RE)
    # of a token among those of the expert
    number_RA = jnp.take_along_axis(jnp.cumsum(used_RE, axis=0) - 1, expert_RA, axis=1)
    order_ER = jnp.argsort(~used_RE.T, axis=1, stable=True)  # those first

    def add(i, y_RD):
        y_ECD = swiglu(x_RD[jnp.take(order_ER, i * most + jnp.arange(most), axis=1, mode="clip")])
        slot_RA = number_RA - i * most
        y_RAD = weight_RA[..., None] * y_ECD[expert_RA, jnp.clip(slot_RA, 0, most - 1)]
        return y_RD + jnp.sum(
            jnp.where(((slot_RA >= 0) & (slot_RA < most))[..., None], y_RAD, 0), axis=1
        )

    return jax.lax.fori_loop(0, jnp.max(number_RA) // most + 1, add, jnp.zeros_like(x_RD))


def _by_expert(weight_RA, expert_RA, experts: int):
    """[R, E]: whether a token chose the expert, and its weight."""
    chosen_RAE = expert_RA[..., None] == jnp.arange(experts)
    return jnp.any(chosen_RAE, axis=1), jnp.sum(
        jnp.where(chosen_RAE, weight_RA[..., None], 0), axis=1
    )
