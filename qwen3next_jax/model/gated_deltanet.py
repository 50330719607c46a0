"""Gated DeltaNet (2412.06464), the recurrent layer of Qwen3-Next.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key head, K/V their widths,
C = 2K + RV channels of one key head that pass the convolution, W convolution width.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, normal, rms_norm_plain, token_mean
from qwen3next_jax.ops import causal_conv1d, gated_delta_rule
from qwen3next_jax.parallel.rules import activation_spec, constrain, local, time_axis


class GatedDeltaNet(nnx.Module):
    """Projections → causal convolution + SiLU → gated delta rule → gated norm → projection.

    The input projection keeps the released checkpoint's grouping: one slab [q | k | v | z] per key head, so that
    sharding G keeps every value head beside its key head. An ablated part (see `ModelConfig`) has no parameters.

    Diagnostics, per value head [H]: half_life = -ln 2 / mean g, the tokens over which the mean decay halves the state; beta,
    mean write strength; state_norm, ‖S‖_F after the last token, mean over rows. Means are over the counted tokens.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stack: tuple[int, ...] = (), dtype=jnp.float32):
        c, std = config, config.initializer_range
        self.config = config
        d, g, h = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads
        r, k, v = h // g, c.linear_key_head_dim, c.linear_value_head_dim
        self.in_proj_qkvz = normal(rngs, (*stack, d, g, 2 * k + (1 + c.linear_output_gate) * r * v), std, dtype)
        if c.beta_gate or c.decay_gate:
            self.in_proj_ba = normal(rngs, (*stack, d, g, (c.beta_gate + c.decay_gate) * r), std, dtype)
        if c.short_convolution:
            self.conv_kernel = normal(rngs, (*stack, c.linear_conv_kernel_dim, g, 2 * k + r * v), std, dtype)
        if c.decay_gate:
            a_log, dt_bias = _initial_decay(rngs, (*stack, h), c.decay_init)
            self.a_log, self.dt_bias = nnx.Param(a_log), nnx.Param(dt_bias)
        self.norm = nnx.Param(jnp.ones((*stack, v), dtype))
        self.out_proj = normal(rngs, (*stack, h, v, d), std, dtype)

    def __call__(self, x_BTD: jax.Array, context: Context, cache: dict | None = None) -> tuple[jax.Array, dict, dict | None]:
        """x [B, T, D] → ([B, T, D], diagnostics, with a cache also the cache after these tokens)."""
        c, dtype = self.config, x_BTD.dtype
        k, v, h = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_num_value_heads
        b, t, g = *x_BTD.shape[:2], c.linear_num_key_heads
        r = h // g

        qkvz_BTGC = jnp.einsum("btd,dgc->btgc", x_BTD, self.in_proj_qkvz[...].astype(dtype))
        qkvz_BTGC = constrain(qkvz_BTGC, context.mesh, "batch", "time", "heads", None)
        beta_BTH, g_BTH = self._gates(x_BTD)

        mixed_BTGC, z_BTGRV = jnp.split(qkvz_BTGC, (2 * k + r * v,), axis=-1)
        o_BTHV, conv_state, state = self._recurrence(mixed_BTGC, g_BTH, beta_BTH, context, cache)

        o_BTHV = rms_norm_plain(o_BTHV, self.norm[...], c.rms_norm_eps)
        if c.linear_output_gate:
            gate_BTHV = jax.nn.silu(z_BTGRV.reshape(b, t, h, v).astype(jnp.float32))
            o_BTHV = (o_BTHV.astype(jnp.float32) * gate_BTHV).astype(dtype)
        o_BTHV = constrain(o_BTHV, context.mesh, "batch", "time", "heads", None)
        y_BTD = jnp.einsum("bthv,hvd->btd", o_BTHV, self.out_proj[...].astype(dtype))
        diagnostics = {}
        if context.diagnose:
            diagnostics = {"beta": token_mean(beta_BTH, context.counted),
                           "state_norm": jnp.mean(jnp.linalg.norm(state, axis=(-2, -1)), axis=0)}
            if c.decay_gate:
                diagnostics["half_life"] = -math.log(2) / jnp.minimum(token_mean(g_BTH, context.counted), -1e-12)
        return y_BTD, diagnostics, None if cache is None else {"conv": conv_state, "state": state}

    def _gates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(write strength β, log decay g), each [B, T, H] float32."""
        c, r = self.config, self.config.linear_num_value_heads // self.config.linear_num_key_heads
        shape = (*x_BTD.shape[:2], c.linear_num_value_heads)
        beta_BTH, g_BTH = jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        if not (c.beta_gate or c.decay_gate):
            return beta_BTH, g_BTH
        ba_BTGR2 = jnp.einsum("btd,dgr->btgr", x_BTD, self.in_proj_ba[...].astype(x_BTD.dtype), preferred_element_type=jnp.float32)
        if c.beta_gate:
            beta_BTH = jax.nn.sigmoid(ba_BTGR2[..., :r]).reshape(shape)
        if c.decay_gate:
            decay_rate_H = jnp.exp(self.a_log[...].astype(jnp.float32))
            g_BTH = -decay_rate_H * jax.nn.softplus(ba_BTGR2[..., -r:].reshape(shape) + self.dt_bias[...].astype(jnp.float32))
        return beta_BTH, g_BTH

    def _recurrence(self, mixed_BTGC, g_BTH, beta_BTH, context: Context, cache: dict | None):
        """Convolution and delta rule, key heads split over `tensor` with their value heads → (o [B, T, H, V], states of both)."""
        c = self.config
        k, v = c.linear_key_head_dim, c.linear_value_head_dim
        kernel_WGC = self.conv_kernel[...].astype(mixed_BTGC.dtype) if c.short_convolution else jnp.zeros((1, *mixed_BTGC.shape[2:]))
        axis = time_axis(context.mesh)
        conv_state, state = (None, None) if cache is None else (cache["conv"], cache["state"])

        def run(mixed_BTGC, kernel_WGC, g_BTH, beta_BTH, segment_ids):
            if c.short_convolution:
                mixed_BTGC, conv = causal_conv1d(
                    mixed_BTGC, kernel_WGC, activation="silu", initial_state=conv_state, segment_ids=segment_ids,
                    axis_name=axis)
            else:
                mixed_BTGC, conv = jax.nn.silu(mixed_BTGC), mixed_BTGC[:, :0]
            q_BTGK, k_BTGK, v_BTGRV = jnp.split(mixed_BTGC, (k, 2 * k), axis=-1)
            o_BTHV, final = gated_delta_rule(
                q_BTGK, k_BTGK, v_BTGRV.reshape(*g_BTH.shape, v), g=g_BTH, beta=beta_BTH, initial_state=state,
                segment_ids=segment_ids, erase=c.erase, axis_name=axis)
            return o_BTHV, conv, final

        wide, narrow = activation_spec("batch", "time", "heads", None), activation_spec("batch", "time", "heads")
        states = (activation_spec("batch", None, "heads", None), activation_spec("batch", "heads", None, None))
        in_specs = (wide, activation_spec(None, "heads", None), narrow, narrow, activation_spec("batch", "time"))
        return local(run, context.mesh, in_specs, (wide, *states))(
            mixed_BTGC, kernel_WGC, g_BTH, beta_BTH, context.segment_ids)

    @staticmethod
    def init_cache(config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Cache before the first token: constant size, whatever `length`."""
        c = config
        g, h, k, v = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        channels = (g, 2 * k + h // g * v)
        return {"conv": jnp.zeros((batch, c.linear_conv_kernel_dim - 1 if c.short_convolution else 0, *channels), c.dtype),
                "state": jnp.zeros((batch, h, k, v), jnp.float32)}


def _initial_decay(rngs: nnx.Rngs, shape: tuple[int, ...], kind: str) -> tuple[jax.Array, jax.Array]:
    """Start values of (A_log, dt_bias); see `ModelConfig.decay_init`."""
    if kind == "ones":
        a = jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=16.0)
        return jnp.log(a), jnp.ones(shape)
    # The lowest A is kept off 0, whose logarithm is not finite.
    a = jax.random.uniform(rngs.params(), shape, minval=1e-4, maxval=16.0)
    log_dt = jax.random.uniform(rngs.params(), shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1))
    dt = jnp.exp(log_dt)
    return jnp.log(a), dt + jnp.log(-jnp.expm1(-dt))  # softplus of this bias is dt
