"""Two operators that run before and after the attention of a gated attention layer.
`norm_and_rotate` normalises queries or keys (RMS norm), rotates them (rotary position embedding)
and splits them into heads. `gate_heads` gates the outputs of the heads and concatenates them.

In each pass, forward and backward, the kernels of both operators read their inputs once and write
their outputs once.

B batch, T time, N heads of K channels, C = N · K channels of all heads, L = LANES.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import accumulation_dtype
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)

LANES = 128  # only the first LANES channels of a head may rotate


def kernels_norm_rotate_and_gate(time: int, width: int, rotary: int, dtype) -> bool:
    """Returns whether `norm_and_rotate` and `gate_heads` run kernels for these sizes on the
    platform that the program is compiled for. If the result is False, both operators run in XLA
    alone.

    Args:
      time: number of tokens in a row (T).
      width: number of channels of a head (K).
      rotary: number of channels of a head that rotate.
      dtype: dtype of the arrays.
    """
    return _choose_implementation(time, width, rotary, dtype).is_kernel


def norm_and_rotate(x, weight, cos, sin, half: int, eps: float):
    """Applies an RMS norm to each head, then rotary position embedding
    (https://arxiv.org/abs/2104.09864), which rotates channel i together with channel half + i.

    Args:
      x: [B, T, C], the projected queries or keys.
      weight: [K], the weight of the norm.
      cos, sin: [B, T, L], the results of `cosine_and_sine_by_lane`.
      half: half the number of channels that rotate.
      eps: number added to the mean square.

    Returns:
      An array [B, N, T, K] in x's dtype, computed in float32.
    """
    chosen = _choose_implementation(x.shape[1], weight.shape[0], 2 * half, x.dtype)
    return _differentiable_norm_and_rotate(chosen, eps, half, x, weight, cos, sin)


def gate_heads(o, gate):
    """Returns o · sigmoid(gate) with the heads concatenated, [B, T, C] in o's dtype, computed in
    float32.

    Args:
      o: [B, N, T, K], the outputs of the heads.
      gate: [B, T, C], the gates before the sigmoid.
    """
    chosen = _choose_implementation(o.shape[2], o.shape[3], LANES, gate.dtype)
    return _differentiable_gate(chosen, o, gate)


def cosine_and_sine_by_lane(cos, sin):
    """Returns two arrays [B, T, L], the cosine and the sine for each of the first L channels of a
    head, from the cosines and sines of the angles, [B, T, half] each. Channels that do not rotate
    have cosine 1 and sine 0. The rotation of a channel is cos · channel + sin · partner, where the
    partner is the other channel of the rotated pair. So the array of sines has −sin(angle) for the
    first half of the channels that rotate, and sin(angle) for the second half.
    """
    rest = (0, 0), (0, 0), (0, LANES - 2 * cos.shape[2])
    return (
        jnp.pad(jnp.concatenate((cos, cos), axis=-1), rest, constant_values=1),
        jnp.pad(jnp.concatenate((-sin, sin), axis=-1), rest),
    )


def _choose_implementation(time: int, width: int, rotary: int, dtype) -> ChosenImplementation:
    return choose_implementation(
        "attention_heads",
        None,
        XLA_IMPLEMENTATIONS,
        time=time,
        width=width,
        rotary=rotary,
        dtype=dtype,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable_norm_and_rotate(chosen, eps, half, x, weight, cos, sin):
    return chosen.function_named("norm_and_rotate")(eps, half, x, weight, cos, sin)


def _norm_and_rotate_backward(chosen, eps, half, inputs, dy):
    dx, dweight = chosen.function_named("norm_and_rotate_gradients")(eps, half, *inputs, dy)
    return dx, dweight, None, None


_differentiable_norm_and_rotate.defvjp(
    lambda chosen, eps, half, *inputs: (
        _differentiable_norm_and_rotate(chosen, eps, half, *inputs),
        inputs,
    ),
    _norm_and_rotate_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_gate(chosen, o, gate):
    return chosen.function_named("gate")(o, gate)


_differentiable_gate.defvjp(
    lambda chosen, *inputs: (_differentiable_gate(chosen, *inputs), inputs),
    lambda chosen, inputs, dy: chosen.function_named("gate_gradients")(*inputs, dy),
)


# ---- in XLA alone


def _norm_and_rotate_in_xla(eps, half, x, weight, cos, sin):
    heads = (
        x.astype(accumulation_dtype(x)).reshape(*x.shape[:2], -1, weight.shape[0]).swapaxes(1, 2)
    )
    heads = (
        heads * jax.lax.rsqrt(jnp.mean(jnp.square(heads), axis=-1, keepdims=True) + eps) * weight
    )
    first, second = heads[..., :half], heads[..., half : 2 * half]
    partner = jnp.concatenate(
        (second, first, jnp.zeros_like(heads[..., 2 * half : LANES])), axis=-1
    )
    rotated = heads[..., :LANES] * cos[:, None] + partner * sin[:, None]
    return jnp.concatenate((rotated, heads[..., LANES:]), axis=-1).astype(x.dtype)


def _gate_in_xla(o, gate):
    sigmoid = jax.nn.sigmoid(
        gate.reshape(*gate.shape[:2], *o.shape[1::2]).astype(accumulation_dtype(o))
    )
    return (
        (o.swapaxes(1, 2).astype(accumulation_dtype(o)) * sigmoid)
        .astype(o.dtype)
        .reshape(gate.shape)
    )


def _norm_and_rotate_gradients_in_xla(eps, half, x, weight, cos, sin, dy):
    forward = lambda x, weight: _norm_and_rotate_in_xla(eps, half, x, weight, cos, sin)
    return jax.vjp(forward, x, weight)[1](dy)


def _gate_gradients_in_xla(o, gate, dy):
    return jax.vjp(_gate_in_xla, o, gate)[1](dy)


XLA_IMPLEMENTATIONS = (
    XlaImplementation(
        "xla",
        ("cpu", "gpu", "tpu"),
        dict(
            norm_and_rotate=_norm_and_rotate_in_xla,
            norm_and_rotate_gradients=_norm_and_rotate_gradients_in_xla,
            gate=_gate_in_xla,
            gate_gradients=_gate_gradients_in_xla,
        ),
    ),
)
