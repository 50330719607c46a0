"""The RMS norm of each head, multiplied by a SiLU or sigmoid gate.

B batch, T time, H heads of V channels.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def gated_norm(o, gate, weight, eps: float, gate_type: str = "silu"):
    """Returns y = o / rms(o) · weight · f(gate), with the root mean square over the channels of
    each head. The function f is silu or sigmoid. Gated DeltaNet (https://arxiv.org/abs/2412.06464)
    normalises its outputs with this operator, which the library fla calls `FusedRMSNormGated`. For
    the gate "silu" there are kernels for TPUs and Hopper GPUs. In each pass, forward and backward,
    the kernels read their inputs once and write their outputs once. Other gates run in XLA alone.

    Args:
      o, gate: [B, T, H · V].
      weight: [V].
      eps: number added to the mean square.
      gate_type: name of f, "silu" or "sigmoid".

    Returns:
      y: [B, T, H · V] in o's dtype, computed in float32.
    """
    if gate_type != "silu":
        return jax.checkpoint(functools.partial(gated_norm_in_xla, eps, gate_type=gate_type))(
            o, gate, weight
        )
    chosen = choose_implementation(
        "gated_norm", None, XLA_IMPLEMENTATIONS, o=o, gate=gate, weight=weight, eps=eps
    )
    return _differentiable_gated_norm(chosen, eps, o, gate, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable_gated_norm(chosen: ChosenImplementation, eps, o, gate, weight):
    return chosen.function_named("forward")(eps, o, gate, weight)


def _gated_norm_backward(chosen: ChosenImplementation, eps, inputs, dy):
    return chosen.function_named("backward")(eps, *inputs, dy)


_differentiable_gated_norm.defvjp(
    lambda chosen, eps, *inputs: (_differentiable_gated_norm(chosen, eps, *inputs), inputs),
    _gated_norm_backward,
)


def gated_norm_in_xla(eps, o, gate, weight, gate_type: str = "silu"):
    """Computes `gated_norm` in XLA alone."""
    wide = jnp.promote_types(jnp.float32, o.dtype)
    heads = o.astype(wide).reshape(*o.shape[:2], -1, weight.shape[0])
    normed = (
        heads
        * jax.lax.rsqrt(jnp.mean(jnp.square(heads), axis=-1, keepdims=True) + eps)
        * weight.astype(wide)
    )
    return (normed.reshape(o.shape) * GATES[gate_type](gate.astype(wide))).astype(o.dtype)


def _backward_in_xla(eps, o, gate, weight, dy):
    """Returns the gradients of o, gate and weight for the gate "silu", given dy, the gradient of
    y.
    """
    return jax.vjp(functools.partial(gated_norm_in_xla, eps), o, gate, weight)[1](dy)


XLA_IMPLEMENTATIONS = (
    XlaImplementation(
        "xla", ("cpu", "gpu", "tpu"), dict(forward=gated_norm_in_xla, backward=_backward_in_xla)
    ),
)
