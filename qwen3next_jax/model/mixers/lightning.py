"""Lightning attention (MiniMax-01, 2501.08313): linear attention whose decay is a constant of
the head and the layer.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.recurrent import Additive, Inputs


class Lightning(Additive):
    """q, k, v = SiLU(W x), S ← e^{−s} S + k vᵀ, o = Sᵀq, s = 2^(−8(h+1)/H) (1 − layer/(layers −
    1 + 1e-5) + 1e-5); RMSNorm over all heads together, sigmoid gate. In multi-token prediction
    layer is layers − 1.
    """

    activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layers):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        depth = 1 - jnp.asarray(layers) / (c.num_hidden_layers - 1 + 1e-5) + 1e-5
        slopes = depth.reshape(*make.stack, 1) * 2.0 ** (-8 * (jnp.arange(h) + 1) / h)
        self.log_decay = make.parameter(
            lambda shape: jnp.broadcast_to(-slopes, shape), (h,), "value_heads", kind="rate"
        )
        self.make_output(make, per_head=True)

    def inputs(self, x_BTD, context) -> Inputs:
        mixed, gate = self.project(x_BTD, context)
        log_decay_H = jax.lax.stop_gradient(self.log_decay[...])
        return Inputs(
            jax.nn.silu(mixed),
            gate,
            g=jnp.broadcast_to(log_decay_H, (*x_BTD.shape[:2], *log_decay_H.shape)),
        )

    def finish(self, o_BTHV, norm_HV, gate_BTGRV):
        o = o_BTHV.astype(jnp.float32)
        o = (
            o
            * jax.lax.rsqrt(
                jnp.mean(o * o, axis=(-2, -1), keepdims=True) + self.config.rms_norm_eps
            )
            * norm_HV
        )
        return (o * self.activation(gate_BTGRV.reshape(o.shape).astype(jnp.float32))).astype(
            o_BTHV.dtype
        )
