"""Mamba (S6, 2312.00752, algorithm 2): every channel has a small state of its own whose decay
and write the token chooses.

Letters: B batch, T time, D model, H heads of V channels (only to be split over `tensor`), N
numbers a channel keeps, R rank of Δ.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.mixers.gated_deltanet import START_OF_DECAY
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.ops.scans import expanded_scan
from qwen3next_jax.sharding.rules import activation_spec, local


class Mamba(Mixer):
    """x = SiLU(conv(W x)), Δ = softplus(W₂ W₁ x + b), h ← e^{−Δ e^A} h + Δ x B, y = C h + D x,
    gated by SiLU(z). Of linear_num_value_heads × linear_value_head_dim channels. The released
    models' convolution has a bias; this one has none.
    """

    switches = ("linear_conv_kernel_dim",)

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # numbers that a channel keeps
        state_size: int = 16

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "state_size"})

    def __init__(self, config, make, layers):
        self.config = c = config
        d, h, v, n, rank = (
            c.hidden_size,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
            self.settings(c).state_size,
            -(-c.hidden_size // 16),
        )
        self.in_proj = make.matrix(
            (d, h, 2 * v), "embed -> value_heads .", parts=(("x", v), ("z", v))
        )
        self.conv_kernel = make.matrix(
            (c.linear_conv_kernel_dim, h, v), ". value_heads channels", kind="convolution"
        )
        self.x_proj = make.matrix(
            (h, v, rank + 2 * n), "value_heads . -> .", parts=(("step", rank), ("b", n), ("c", n))
        )
        self.step_up = make.matrix((rank, h, v), ". -> value_heads .")
        log_uniform = START_OF_DECAY["log_uniform"][1]
        self.dt_bias = make.parameter(
            lambda shape: log_uniform(make.rngs.params, shape), (h, v), "value_heads .", kind="rate"
        )
        one_to_n = lambda shape: jnp.broadcast_to(jnp.log(jnp.arange(1.0, n + 1)), shape)
        self.a_log = make.parameter(one_to_n, (h, v, n), "value_heads . .", kind="rate")
        self.skip = make.parameter(jnp.ones, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def __call__(self, x_BTD, context, cache=None):
        dtype, weight = x_BTD.dtype, lambda name: getattr(self, name)[...].astype(x_BTD.dtype)
        rows, first, heads = (
            activation_spec(*axes)
            for axes in (("batch", context.time, "heads"), ("batch", None, "heads"), ("heads",))
        )
        tokens, state = activation_spec("batch", context.time), activation_spec("batch", "heads")
        x_BTHV, z_BTHV = jnp.split(
            jnp.einsum("btd,dhc->bthc", x_BTD, weight("in_proj")), 2, axis=-1
        )

        def convolve(x, kernel, ids, before):
            return causal_conv1d(
                x,
                kernel,
                activation="silu",
                initial_state=before,
                segment_ids=ids,
                axis_name=context.time_axis,
            )

        x_BTHV, conv = local(
            convolve,
            context.mesh,
            (rows, activation_spec(None, "heads"), tokens, first),
            (rows, first),
        )(x_BTHV, weight("conv_kernel"), context.segment_ids, cache and cache["conv"])
        n, rank = self.settings(self.config).state_size, self.step_up.shape[0]
        low, b_BTN, c_BTN = jnp.split(
            jnp.einsum("bthv,hvr->btr", x_BTHV, weight("x_proj")), (rank, rank + n), axis=-1
        )
        step_BTHV = jnp.einsum(
            "btr,rhv->bthv", low, weight("step_up"), preferred_element_type=jnp.float32
        )
        step_BTHV = jax.nn.softplus(step_BTHV + self.dt_bias[...])

        def run(x, step, b, c, a_log, ids, before):
            def expand(inputs):
                x, step, b, _ = inputs
                return -step[..., None] * jnp.exp(a_log), (step * x)[..., None] * b[
                    :, :, None, None
                ]

            read = lambda h, inputs: jnp.einsum("bthvn,btn->bthv", h, inputs[3])
            inputs = [y.astype(jnp.float32) for y in (x, step, b, c)]
            before = (
                jnp.zeros((x.shape[0], *a_log.shape), jnp.float32) if before is None else before
            )
            return expanded_scan(
                expand, read, inputs, before, segment_ids=ids, axis_name=context.time_axis
            )

        y_BTHV, state_BHVN = local(
            run, context.mesh, (rows, rows, tokens, tokens, heads, tokens, state), (rows, state)
        )(
            x_BTHV,
            step_BTHV,
            b_BTN,
            c_BTN,
            self.a_log[...],
            context.segment_ids,
            cache and cache["state"],
        )
        y_BTHV = (y_BTHV + self.skip[...] * x_BTHV) * jax.nn.silu(z_BTHV.astype(jnp.float32))
        y_BTD = jnp.einsum("bthv,hvd->btd", y_BTHV.astype(dtype), weight("out_proj"))
        diagnostics = (
            {"step": token_mean(jnp.mean(step_BTHV, axis=-1), context.counted)}
            if context.diagnose
            else {}
        )
        return y_BTD, diagnostics, cache and {"conv": conv, "state": state_BHVN}

    @classmethod
    def init_cache(cls, config, batch, length):
        channels = (config.linear_num_value_heads, config.linear_value_head_dim)
        return {
            "conv": jnp.zeros((batch, config.linear_conv_kernel_dim - 1, *channels), config.dtype),
            "state": jnp.zeros((batch, *channels, cls.settings(config).state_size)),
        }

    @classmethod
    def forward_flops(cls, config, length):
        """Write and read of every channel's state."""
        return (
            4
            * config.linear_num_value_heads
            * config.linear_value_head_dim
            * cls.settings(config).state_size
        )

    @classmethod
    def splits(cls, config):
        return {"linear_num_value_heads": config.linear_num_value_heads}

    @classmethod
    def halo(cls, config):
        return config.linear_conv_kernel_dim - 1
