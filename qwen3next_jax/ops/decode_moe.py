"""Routed experts for a small batch on a CPU, as in decoding. If only a part of the experts is
likely to be chosen, only the chosen experts are computed.

R tokens, A choices per token, E experts, D model width, I expert width, C the number of tokens that
an expert processes at a time.
"""

import jax
import jax.numpy as jnp

# The least number of rows of an expert's product. A product of fewer rows takes as long, because
# reading the weights takes most of the time.
_MIN_ROWS = 4


def is_decode_batch(tokens: int, choices: int, experts: int, stacked: bool = False) -> bool:
    """Returns whether `decode_moe` should be faster on a CPU than a grouped product over rows
    sorted by expert.

    Args:
      tokens: number of tokens (R).
      choices: number of experts that each token chose (A).
      experts: number of experts (E).
      stacked: whether the arrays of weights hold the experts of several layers.
    """
    return tokens <= (64 if _is_faster_with_all_experts(tokens, choices, experts, stacked) else 24)


def decode_moe(x_RD, weight_RA, expert_RA, gate_up, down, layer=()):
    """Returns for each token the weighted sum of the SwiGLU experts that it chose. The function is
    not differentiable.

    Args:
      x_RD: [R, D], the tokens.
      weight_RA: [R, A], the router's weight of each choice.
      expert_RA: [R, A] integers, the experts that each token chose.
      gate_up: [E, D, 2, I], the gate matrix of each expert at index 0 and the up matrix at index 1.
      down: [E, I, D], the down matrix of each expert.
      layer: the tuple (index of the layer,) if gate_up and down have a leading axis of layers, else
        the empty tuple.

    Returns:
      An array [R, D] in x's dtype.
    """
    (r, a), e = expert_RA.shape, gate_up.shape[-4]
    if _is_faster_with_all_experts(r, a, e, layer):
        return _compute_all_experts(x_RD, weight_RA, expert_RA, gate_up, down)
    # The batch is padded to at least two rows: for one row XLA on CPU reads a matrix from memory at
    # half the speed.
    x_RD, weight_RA = (jnp.pad(x, ((0, max(2 - r, 0)), (0, 0))) for x in (x_RD, weight_RA))
    expert_RA = jnp.pad(expert_RA, ((0, max(2 - r, 0)), (0, 0)), mode="edge")
    used_E, weight_ER = (x.T for x in _chosen_mask_and_weights(weight_RA, expert_RA, e))
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


def _is_faster_with_all_experts(tokens, choices, experts, layer) -> bool:
    """Returns whether `decode_moe` computes all experts in one product. A single product is faster
    if the tokens are likely to choose most of the experts, because slicing one expert's weights out
    of the array takes as long as the expert's products. If the array holds the weights of several
    layers (`layer` is then true), a single product is not faster, because the weights of all
    experts of the layer would first have to be sliced out.
    """
    return tokens > 2 and 2 * tokens * choices > experts and not layer


def _compute_all_experts(x_RD, weight_RA, expert_RA, gate_up, down):
    """Computes all experts at once. Each pass computes up to C tokens of every expert. Passes run
    until the expert with the most tokens is done; in most cases one pass is enough.
    """
    (r, a), e = expert_RA.shape, len(gate_up)
    used_RE, weight_RE = _chosen_mask_and_weights(weight_RA, expert_RA, e)
    most = min(max(_MIN_ROWS, -(-2 * r * a // e)), r)

    def swiglu(x_ECD):
        hidden = jnp.einsum("ecd,edji->ecji", x_ECD, gate_up)
        return jnp.einsum("eci,eid->ecd", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down)

    if most == r:
        return jnp.einsum("erd,re->rd", swiglu(jnp.broadcast_to(x_RD, (e, *x_RD.shape))), weight_RE)
    # For each choice, the index of the token among the tokens that chose the same expert.
    number_RA = jnp.take_along_axis(jnp.cumsum(used_RE, axis=0) - 1, expert_RA, axis=1)
    order_ER = jnp.argsort(~used_RE.T, axis=1, stable=True)  # the expert's tokens come first

    def add(i, y_RD):
        y_ECD = swiglu(x_RD[jnp.take(order_ER, i * most + jnp.arange(most), axis=1, mode="clip")])
        slot_RA = number_RA - i * most
        y_RAD = weight_RA[..., None] * y_ECD[expert_RA, jnp.clip(slot_RA, 0, most - 1)]
        return y_RD + jnp.sum(
            jnp.where(((slot_RA >= 0) & (slot_RA < most))[..., None], y_RAD, 0), axis=1
        )

    return jax.lax.fori_loop(0, jnp.max(number_RA) // most + 1, add, jnp.zeros_like(x_RD))


def _chosen_mask_and_weights(weight_RA, expert_RA, experts: int):
    """Returns two arrays [R, E]: whether the token chose the expert, and the router's weight of the
    expert (0 where the token did not choose it).
    """
    chosen_RAE = expert_RA[..., None] == jnp.arange(experts)
    return jnp.any(chosen_RAE, axis=1), jnp.sum(
        jnp.where(chosen_RAE, weight_RA[..., None], 0), axis=1
    )
