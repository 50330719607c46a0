"""Gated DeltaNet (2412.06464), the recurrent layer of Qwen3-Next.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key
head, K/V their widths, C = 2K + RV channels of one key head that pass the convolution, W
convolution width.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.hf_entries import Entry, Slice, one, vector
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import Inputs, Recurrent
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.sharding.rules import constrain


class GatedDeltaNet(Recurrent):
    """Projections → causal convolution + SiLU → gated delta rule → gated norm → projection;
    diagnostics: see `Recurrent`.

    The input projection keeps the released checkpoint's grouping: one slab [q | k | v | z] per
    key head, so that sharding G keeps every value head beside its key head. An ablated part (see
    `ModelConfig`) has no parameters.
    """

    names_kept = True
    switches = (
        *Recurrent.switches,
        "decay_gate",
        "decay_init",
        "erase",
        "beta_gate",
        "linear_output_gate",
    )

    def __init__(self, config: ModelConfig, make: Make, layers: tuple[int, ...]):
        self.config = c = config
        d, g, h = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads
        r, k, v = h // g, c.linear_key_head_dim, c.linear_value_head_dim
        slab = (("q", k), ("k", k), ("v", r * v, r)) + (("z", r * v, r),) * c.linear_output_gate
        self.in_proj_qkvz = make.matrix(
            (d, g, sum(width for _, width, *_ in slab)), "embed -> key_heads .", parts=slab
        )
        if c.beta_gate or c.decay_gate:
            gates = (("b", r, r),) * c.beta_gate + (("a", r, r),) * c.decay_gate
            self.in_proj_ba = make.matrix(
                (d, g, len(gates) * r), "embed -> key_heads .", parts=gates
            )
        self.make_convolution(make)
        if c.decay_gate:
            a_log, dt_bias = START_OF_DECAY[c.decay_init]
            self.a_log = make.parameter(
                lambda shape: a_log(make.rngs.params(), shape), (h,), "value_heads", kind="rate"
            )
            self.dt_bias = make.parameter(
                lambda shape: dt_bias(make.rngs.params, shape), (h,), "value_heads", kind="rate"
            )
        self.make_output(make)

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        c = self.config
        shape, r = (
            (*x_BTD.shape[:2], c.linear_num_value_heads),
            c.linear_num_value_heads // c.linear_num_key_heads,
        )
        k, v = c.linear_key_head_dim, r * c.linear_value_head_dim
        slab_DGC = self.in_proj_qkvz[...].astype(x_BTD.dtype)
        if context.time and self.flattens():  # no cache
            # One product for each: their arrays then go to the kernels as they are, where parts of
            # one would be copied.
            parts = (
                x_BTD @ part_DGC.reshape(part_DGC.shape[0], -1)
                for part_DGC in jnp.split(slab_DGC, (k, 2 * k, 2 * k + v), axis=-1)
            )
            *mixed_BTGC, z_BTGRV = (
                constrain(part, context.mesh, "batch", context.time, "heads") for part in parts
            )
        else:
            qkvz_BTGC = constrain(
                jnp.einsum("btd,dgc->btgc", x_BTD, slab_DGC),
                context.mesh,
                "batch",
                context.time,
                "heads",
                None,
            )
            mixed_BTGC, z_BTGRV = jnp.split(qkvz_BTGC, (2 * k + v,), axis=-1)
        g_BTH = beta_BTH = None
        if c.beta_gate or c.decay_gate:
            ba_BTGR2 = jnp.einsum(
                "btd,dgr->btgr",
                x_BTD,
                self.in_proj_ba[...].astype(x_BTD.dtype),
                preferred_element_type=jnp.float32,
            )
        if c.beta_gate:
            beta_BTH = jax.nn.sigmoid(ba_BTGR2[..., :r]).reshape(shape)
        if c.decay_gate:
            decay_rate_H = jnp.exp(self.a_log[...].astype(jnp.float32))
            g_BTH = -decay_rate_H * jax.nn.softplus(
                ba_BTGR2[..., -r:].reshape(shape) + self.dt_bias[...].astype(jnp.float32)
            )
        return Inputs(mixed_BTGC, z_BTGRV if c.linear_output_gate else None, g_BTH, beta_BTH)

    @classmethod
    def erases(cls, config: ModelConfig) -> bool:
        return config.erase

    @staticmethod
    def hf_entries(config: ModelConfig) -> Iterator[Entry]:
        c, d, w = config, config.hidden_size, config.linear_conv_kernel_dim
        g, h, k, v = (
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
        )
        r = h // g
        channels = 2 * k + r * v
        grouped = np.arange(g * channels).reshape(g, channels)
        all_q_all_k_all_v = np.concatenate(
            [part.ravel() for part in np.split(grouped, (k, 2 * k), axis=1)]
        )
        if c.hf_form == "qwen3_next":
            yield one(
                "in_proj_qkvz",
                "linear_attn.in_proj_qkvz.weight",
                (1, 2, 0),
                (g * (channels + r * v), d),
            )
            yield one("in_proj_ba", "linear_attn.in_proj_ba.weight", (1, 2, 0), (g * 2 * r, d))
        else:
            every = slice(None)
            yield Entry(
                "in_proj_qkvz",
                (1, 2, 0),
                (
                    Slice(
                        (every, slice(channels)),
                        "linear_attn.in_proj_qkv.weight",
                        (g * channels, d),
                        all_q_all_k_all_v,
                    ),
                    Slice(
                        (every, slice(channels, None)), "linear_attn.in_proj_z.weight", (h * v, d)
                    ),
                ),
            )
            yield Entry(
                "in_proj_ba",
                (1, 2, 0),
                (
                    Slice((every, slice(r)), "linear_attn.in_proj_b.weight", (h, d)),
                    Slice((every, slice(r, None)), "linear_attn.in_proj_a.weight", (h, d)),
                ),
            )
        yield one(
            "conv_kernel",
            "linear_attn.conv1d.weight",
            (1, 2, 0),
            (g * channels, 1, w),
            row_order=all_q_all_k_all_v,
        )
        yield vector("a_log", "linear_attn.A_log", h)
        yield vector("dt_bias", "linear_attn.dt_bias", h)
        yield vector("norm", "linear_attn.norm.weight", v)
        yield one("out_proj", "linear_attn.out_proj.weight", (2, 0, 1), (d, h * v))


def uniform_rate(lowest: float):
    return lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=lowest, maxval=16.0))


def _log_uniform_step(new_key, shape: tuple[int, ...]) -> jax.Array:
    dt = jnp.exp(jax.random.uniform(new_key(), shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))  # softplus of this bias is dt


# Start values of (A_log, dt_bias); see `ModelConfig.decay_init`. The lowest A is kept off 0, whose
# logarithm is not finite.
START_OF_DECAY = {
    "ones": (uniform_rate(0.01), lambda new_key, shape: jnp.ones(shape)),
    "log_uniform": (uniform_rate(1e-4), _log_uniform_step),
}
