"""What lies between attention's projections and its kernels: queries and keys are normed, rotated
and split into heads; the heads' outputs are gated and joined side by side.

With kernels each is one pass over memory each way.

B batch, T time, N heads of K channels, C = N · K side by side, L lanes.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import wide
from qwen3next_jax.ops.implementations import Chosen, Form, choose

LANES = 128  # channels of a head that may rotate


def has_kernels(time: int, width: int, rotary: int, dtype) -> bool:
    """Whether kernels run on rows of `time` tokens with heads of `width` channels, `rotary` of them
    rotated: a layer then passes heads side by side to them.
    """
    return _choose(time, width, rotary, dtype).is_kernel


def norm_and_rotate(x, weight, cos, sin, half: int, eps: float):
    """x [B, T, C] → [B, N, T, K]: each head over its root mean square, times the weight [K],
    rotated (2104.09864), channel i with channel half + i; float32 inside.

    Args:
      cos, sin: [B, T, L], as `rotation_by_lane` gives them.
    """
    chosen = _choose(x.shape[1], weight.shape[0], 2 * half, x.dtype)
    return _norm_and_rotate_operator(chosen, eps, half, x, weight, cos, sin)


def gate_heads(o, gate):
    """o [B, N, T, K] · sigmoid(gate [B, T, C]) → [B, T, C], float32 inside."""
    chosen = _choose(o.shape[2], o.shape[3], LANES, gate.dtype)
    return _gate_operator(chosen, o, gate)


def rotation_by_lane(cos, sin):
    """Cosines and sines [B, T, half] for every lane [B, T, L]: 1 and 0 for lanes that do not
    rotate, sines with the sign that a channel's partner gets.
    """
    rest = (*cos.shape[:2], LANES - 2 * cos.shape[2])
    return (
        jnp.concatenate((cos, cos, jnp.ones(rest)), axis=-1),
        jnp.concatenate((-sin, sin, jnp.zeros(rest)), axis=-1),
    )


def _choose(time: int, width: int, rotary: int, dtype) -> Chosen:
    return choose(
        "attention_heads", None, FORMS, time=time, width=width, rotary=rotary, dtype=dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _norm_and_rotate_operator(chosen, eps, half, x, weight, cos, sin):
    return chosen.function("norm_and_rotate")(eps, half, x, weight, cos, sin)


def _norm_and_rotate_backward(chosen, eps, half, inputs, dy):
    dx, dweight = chosen.function("norm_and_rotate_gradients")(eps, half, *inputs, dy)
    return dx, dweight, None, None


_norm_and_rotate_operator.defvjp(
    lambda chosen, eps, half, *inputs: (
        _norm_and_rotate_operator(chosen, eps, half, *inputs),
        inputs,
    ),
    _norm_and_rotate_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gate_operator(chosen, o, gate):
    return chosen.function("gate")(o, gate)


_gate_operator.defvjp(
    lambda chosen, *inputs: (_gate_operator(chosen, *inputs), inputs),
    lambda chosen, inputs, dy: chosen.function("gate_gradients")(*inputs, dy),
)


# ---- in XLA alone


def _norm_and_rotate(eps, half, x, weight, cos, sin):
    heads = x.astype(wide(x)).reshape(*x.shape[:2], -1, weight.shape[0]).swapaxes(1, 2)
    heads = (
        heads * jax.lax.rsqrt(jnp.mean(jnp.square(heads), axis=-1, keepdims=True) + eps) * weight
    )
    first, second = heads[..., :half], heads[..., half : 2 * half]
    partner = jnp.concatenate(
        (second, first, jnp.zeros_like(heads[..., 2 * half : LANES])), axis=-1
    )
    rotated = heads[..., :LANES] * cos[:, None] + partner * sin[:, None]
    return jnp.concatenate((rotated, heads[..., LANES:]), axis=-1).astype(x.dtype)


def _gate(o, gate):
    opening = jax.nn.sigmoid(gate.reshape(*gate.shape[:2], *o.shape[1::2]).astype(wide(o)))
    return (o.swapaxes(1, 2).astype(wide(o)) * opening).astype(o.dtype).reshape(gate.shape)


def _norm_and_rotate_gradients(eps, half, x, weight, cos, sin, dy):
    forward = lambda x, weight: _norm_and_rotate(eps, half, x, weight, cos, sin)
    return jax.vjp(forward, x, weight)[1](dy)


def _gate_gradients(o, gate, dy):
    return jax.vjp(_gate, o, gate)[1](dy)


FORMS = (
    Form(
        "xla",
        ("cpu", "gpu", "tpu"),
        dict(
            norm_and_rotate=_norm_and_rotate,
            norm_and_rotate_gradients=_norm_and_rotate_gradients,
            gate=_gate,
            gate_gradients=_gate_gradients,
        ),
    ),
)
