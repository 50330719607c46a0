"""What recurrent mixers on the gated delta rule share: short convolution, split, recurrence, output norm and gate, cache.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key head, K/V their widths,
C = 2K + RV channels of one key head that pass the convolution, W convolution width.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, keeping_inputs, rms_norm_plain, token_mean
from qwen3next_jax.model.mixers.base import Mixer
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops import causal_conv1d, gated_delta_rule
from qwen3next_jax.ops.pallas_gated_norm import gated_norm
from qwen3next_jax.ops.tpu import tpu
from qwen3next_jax.parallel.rules import activation_spec, constrain, local


class Inputs(NamedTuple):
    """What a recurrent mixer makes of its input, before convolution and recurrence.

    mixed: [B, T, G, 2K + RV], query, key and values of each key head; or flat, all heads' queries, keys and values: [B, T, GK],
      [B, T, GK], [B, T, HV], where the mixer `flattens`.
    gate: [B, T, G, RV] or flat, of the output, or None.
    g, beta: [B, T, H] float32, log decay ≤ 0 (None: nothing is forgotten) and write strength (None: 1).
    """

    mixed: jax.Array | list[jax.Array]
    gate: jax.Array | None = None
    g: jax.Array | None = None
    beta: jax.Array | None = None


class Recurrent(Mixer):
    """Inputs → causal convolution + SiLU → gated delta rule → norm per head, SiLU gate → projection.

    A new mixer makes its input projections in `__init__`, beside `make_convolution` and `make_output`, and implements `inputs`. The
    sizes are the `linear_*` settings; heads are split over `tensor` by key head.

    Diagnostics, per value head [H]: half_life = -ln 2 / mean g, the tokens over which the mean decay halves the state; beta,
    mean write strength; state_norm, ‖S‖_F after the last token, mean over rows. Means are over the counted tokens.
    """

    settings = ("short_convolution", "delta_rule")
    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        raise NotImplementedError

    def make_convolution(self, make: Make) -> None:
        c = make.config
        k, v = c.linear_key_head_dim, c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
        if c.short_convolution:
            self.conv_kernel = make.matrix((c.linear_conv_kernel_dim, c.linear_num_key_heads, 2 * k + v), ". key_heads channels",
                                           kind="convolution", parts=(("q", k), ("k", k), ("v", v)))

    def make_output(self, make: Make) -> None:
        """The norm of each head and the projection back to the model's width."""
        c = make.config
        self.norm = make.norm(c.linear_value_head_dim, plain=True)
        self.out_proj = make.matrix((c.linear_num_value_heads, c.linear_value_head_dim, c.hidden_size), "value_heads . -> embed")

    def __call__(self, x_BTD: jax.Array, context: Context, cache: dict | None = None) -> tuple[jax.Array, dict, dict | None]:
        """x [B, T, D] → ([B, T, D], diagnostics, with a cache also the cache after these tokens)."""
        c, dtype = self.config, x_BTD.dtype
        mixed_BTGC, gate_BTGRV, g_BTH, beta_BTH = inputs = self.inputs(x_BTD, context)
        shape = (*x_BTD.shape[:2], c.linear_num_value_heads)
        g_BTH = jnp.zeros(shape, jnp.float32) if g_BTH is None else g_BTH
        beta_BTH = jnp.ones(shape, jnp.float32) if beta_BTH is None else beta_BTH
        flat = isinstance(mixed_BTGC, list)
        if flat:
            o_BTC, state = self._flat_recurrence(inputs._replace(g=g_BTH, beta=beta_BTH), context)
            y_BTD, conv_state = o_BTC @ self.out_proj[...].astype(dtype).reshape(o_BTC.shape[2], -1), None
        else:
            o_BTHV, conv_state, state = self._recurrence(mixed_BTGC, g_BTH, beta_BTH, context, cache)

        def project(o_BTHV, norm_V, gate_BTGRV, out_proj_HVD):
            o_BTHV = rms_norm_plain(o_BTHV, norm_V, c.rms_norm_eps)
            if gate_BTGRV is not None:
                gate_BTHV = jax.nn.silu(gate_BTGRV.reshape(o_BTHV.shape).astype(jnp.float32))
                o_BTHV = (o_BTHV.astype(jnp.float32) * gate_BTHV).astype(dtype)
            o_BTHV = constrain(o_BTHV, context.mesh, "batch", context.time, "heads", None)
            return jnp.einsum("bthv,hvd->btd", o_BTHV, out_proj_HVD.astype(dtype))

        if not flat:
            y_BTD = keeping_inputs(project, o_BTHV, self.norm[...], gate_BTGRV, self.out_proj[...])
        diagnostics = {}
        if context.diagnose:
            diagnostics = {"beta": token_mean(beta_BTH, context.counted),
                           "state_norm": jnp.mean(jnp.linalg.norm(state, axis=(-2, -1)), axis=0)}
            if inputs.g is not None:
                diagnostics["half_life"] = -math.log(2) / jnp.minimum(token_mean(g_BTH, context.counted), -1e-12)
        return y_BTD, diagnostics, None if cache is None else {"conv": conv_state, "state": state}

    def flattens(self) -> bool:
        """Whether what passes between its kernels is flat: where a TPU is compiled for, and each head has whole lanes."""
        c = self.config
        lanes = c.linear_key_head_dim % 128 == c.linear_value_head_dim % 128 == 0
        return bool(tpu()) and c.short_convolution and c.linear_output_gate and lanes

    def _flat_recurrence(self, inputs: Inputs, context: Context) -> tuple[jax.Array, jax.Array]:
        """Convolution, delta rule, norm and gate with heads side by side in the last axis → ([B, T, H·V], final state)."""
        c, (q, k, v) = self.config, inputs.mixed
        widths = c.linear_key_head_dim, 2 * c.linear_key_head_dim

        def run(q, k, v, kernel_WGC, g_BTH, beta_BTH, gate, norm_V, segment_ids):
            split = (part.reshape(part.shape[0], -1) for part in jnp.split(kernel_WGC, widths, axis=-1))
            heads = g_BTH.shape[2] * c.linear_num_key_heads // c.linear_num_value_heads, g_BTH.shape[2]
            q, k, v = (causal_conv1d(x, kernel, activation="silu", segment_ids=segment_ids, axis_name=context.time_axis)[0]
                       .reshape(*x.shape[:2], n, -1) for x, kernel, n in zip((q, k, v), split, (heads[0], *heads)))
            o_BTHV, final = gated_delta_rule(q, k, v, g=g_BTH, beta=beta_BTH, segment_ids=segment_ids, erase=self.erases(c),
                                             implementation=c.named_delta_rule, axis_name=context.time_axis)
            return gated_norm(o_BTHV.reshape(gate.shape), gate, norm_V, c.rms_norm_eps), final

        spec = functools.partial(activation_spec, "batch")
        narrow, tokens = spec(context.time, "heads"), spec(context.time)
        in_specs = (narrow,) * 3 + (activation_spec(None, "heads", None), narrow, narrow, narrow, activation_spec(None), tokens)
        return local(run, context.mesh, in_specs, (narrow, spec("heads", None, None)))(
            q, k, v, self.conv_kernel[...].astype(q.dtype), inputs.g, inputs.beta, inputs.gate, self.norm[...], context.segment_ids)

    def _recurrence(self, mixed_BTGC, g_BTH, beta_BTH, context: Context, cache: dict | None):
        """Convolution and delta rule, key heads split over `tensor` with their value heads → (o [B, T, H, V], states of both)."""
        c = self.config
        k, v = c.linear_key_head_dim, c.linear_value_head_dim
        kernel_WGC = self.conv_kernel[...].astype(mixed_BTGC.dtype) if c.short_convolution else jnp.zeros((1, *mixed_BTGC.shape[2:]))
        conv_state, state = (None, None) if cache is None else (cache["conv"], cache["state"])

        def run(mixed_BTGC, kernel_WGC, g_BTH, beta_BTH, segment_ids, conv_state, state):
            if c.short_convolution:
                mixed_BTGC, conv = keeping_inputs(
                    lambda mixed, kernel, state: causal_conv1d(mixed, kernel, activation="silu", initial_state=state,
                                                               segment_ids=segment_ids, axis_name=context.time_axis),
                    mixed_BTGC, kernel_WGC, conv_state)
            else:
                mixed_BTGC, conv = jax.nn.silu(mixed_BTGC), mixed_BTGC[:, :0]
            q_BTGK, k_BTGK, v_BTGRV = jnp.split(mixed_BTGC, (k, 2 * k), axis=-1)
            o_BTHV, final = gated_delta_rule(
                q_BTGK, k_BTGK, v_BTGRV.reshape(*g_BTH.shape, v), g=g_BTH, beta=beta_BTH, initial_state=state,
                segment_ids=segment_ids, erase=self.erases(c), implementation=c.named_delta_rule, axis_name=context.time_axis)
            return o_BTHV, conv, final

        spec = functools.partial(activation_spec, "batch")
        wide, narrow, tokens = spec(context.time, "heads", None), spec(context.time, "heads"), spec(context.time)
        states = (spec(None, "heads", None), spec("heads", None, None))
        in_specs = (wide, activation_spec(None, "heads", None), narrow, narrow, tokens, *states)
        return local(run, context.mesh, in_specs, (wide, *states))(
            mixed_BTGC, kernel_WGC, g_BTH, beta_BTH, context.segment_ids, conv_state, state)

    @staticmethod
    def init_cache(config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Cache before the first token: constant size, whatever `length`."""
        c = config
        g, h, k, v = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        channels = (g, 2 * k + h // g * v)
        return {"conv": jnp.zeros((batch, c.linear_conv_kernel_dim - 1 if c.short_convolution else 0, *channels), c.dtype),
                "state": jnp.zeros((batch, h, k, v), jnp.float32)}

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """The token recurrence: decay, erase (where it does), write and read, each a product of K·V per value head."""
        products = 3 if cls.erases(config) else 2
        return 2 * products * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim

    @classmethod
    def erases(cls, config: ModelConfig) -> bool:
        """Whether the write replaces what the state says of the key (the delta rule), or is added to it."""
        return True

    @staticmethod
    def splits(config: ModelConfig) -> dict[str, int]:
        return {"linear_num_key_heads": config.linear_num_key_heads}

    @staticmethod
    def halo(config: ModelConfig) -> int:
        return config.linear_conv_kernel_dim - 1 if config.short_convolution else 0
