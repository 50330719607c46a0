"""Norms beside RMSNorm: how the weight is made, and what is done with it."""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import keeping_inputs


class LayerNorm:
    """Less the mean, and with a bias (1607.06450). Its weight [2, D] is scale (1 + it, where
    `zero_centered_norm` says so) and bias.
    """

    @staticmethod
    def weight(make, width: int):
        centre = 0.0 if make.config.zero_centered_norm else 1.0
        return make.parameter(
            lambda shape: jnp.broadcast_to(jnp.array([[centre], [0.0]]), shape),
            (2, width),
            ". .",
            kind="norm",
        )

    @staticmethod
    def apply(x: jax.Array, weight: jax.Array, config) -> jax.Array:
        """Over the last axis, computed in float32; dtype of `x`."""

        def normalise(x, weight):
            x32, (scale, bias) = x.astype(jnp.float32), weight.astype(jnp.float32)
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
            x32 = x32 * jax.lax.rsqrt(
                jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + config.rms_norm_eps
            )
            return (x32 * (1 + scale if config.zero_centered_norm else scale) + bias).astype(
                x.dtype
            )

        return keeping_inputs(normalise, x, weight)
