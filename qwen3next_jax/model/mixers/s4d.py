"""S4D (2206.11893): every channel a small state whose decay is complex, constant and learned.

Letters: B batch, T time, D model, H heads of V channels (only to be split over `tensor`), N
pairs of conjugate numbers a channel keeps.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.ops.scans import expanded_scan
from qwen3next_jax.sharding.rules import activation_spec, local


class S4D(Mixer):
    """h ← e^{Δ A} h + (e^{Δ A} − 1) / A · x, y = 2 Re(C h) + D x, x = W x, GELU, and a
    projection whose one half gates the other (σ). A starts at −½ + i π n ("S4D-Lin"). Of
    linear_num_value_heads × linear_value_head_dim channels, `mixer.state_size` / 2 pairs each.

    Diagnostics, per head [H]: half_life, ln 2 / (Δ · −Re A), the longest of its channels.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # numbers that a channel keeps, in complex pairs
        state_size: int = 16

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "state_size"})

    def __init__(self, config, make, layers):
        c = config
        d, h, v, n = (
            c.hidden_size,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
            self.settings(c).state_size // 2,
        )
        self.in_proj = make.matrix((d, h, v), "embed -> value_heads .")
        normal = lambda shape: jax.random.normal(make.rngs.params(), shape)
        step = lambda shape: jax.random.uniform(
            make.rngs.params(), shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)
        )
        self.log_step = make.parameter(step, (h, v), "value_heads .", kind="rate")
        self.a_log = make.parameter(
            lambda shape: jnp.full(shape, jnp.log(0.5)), (h, v, n), "value_heads . .", kind="rate"
        )
        turns = lambda shape: jnp.broadcast_to(jnp.pi * jnp.arange(n), shape)
        self.a_imag = make.parameter(turns, (h, v, n), "value_heads . .", kind="rate")
        # real and imaginary part
        self.read = make.parameter(
            normal, (h, v, n, 2), "value_heads . . .", kind="vector", operand=False
        )
        self.skip = make.parameter(normal, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, 2, d), "value_heads . -> * embed")

    def __call__(self, x_BTD, context, cache=None):
        rows, heads, state = (
            activation_spec(*axes)
            for axes in (("batch", context.time, "heads"), ("heads",), ("batch", "heads"))
        )

        def run(x, log_step, a_log, a_imag, c, skip, ids, before):
            a = jax.lax.complex(-jnp.exp(a_log), a_imag)
            rate = jnp.exp(log_step)[..., None] * a
            write = jnp.expm1(rate) / a
            read = lambda h, x: (
                2 * jnp.einsum("bthvn,hvn->bthv", h, jax.lax.complex(c[..., 0], c[..., 1])).real
                + skip * x
            )
            before = jnp.zeros((x.shape[0], *a.shape), a.dtype) if before is None else before
            return expanded_scan(
                lambda x: (rate, write * x[..., None]),
                read,
                x,
                before,
                segment_ids=ids,
                axis_name=context.time_axis,
            )

        x_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, self.in_proj[...].astype(x_BTD.dtype)).astype(
            jnp.float32
        )
        in_specs = (rows, *(heads,) * 5, activation_spec("batch", context.time), state)
        weights = (
            x[...].astype(jnp.float32)
            for x in (self.log_step, self.a_log, self.a_imag, self.read, self.skip)
        )
        y_BTHV, state_BHVN = local(run, context.mesh, in_specs, (rows, state))(
            x_BTHV, *weights, context.segment_ids, cache and cache["state"]
        )
        y_BTHV = jax.nn.gelu(y_BTHV).astype(x_BTD.dtype)
        y_BTPD = jnp.einsum("bthv,hvpd->btpd", y_BTHV, self.out_proj[...].astype(x_BTD.dtype))
        half_life = jnp.log(2) / jnp.min(
            jnp.exp(self.a_log[...] + self.log_step[...][..., None]), axis=(-2, -1)
        )
        diagnostics = {"half_life": half_life} if context.diagnose else {}
        return (
            y_BTPD[:, :, 0] * jax.nn.sigmoid(y_BTPD[:, :, 1]),
            diagnostics,
            cache and {"state": state_BHVN},
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        channels = (config.linear_num_value_heads, config.linear_value_head_dim)
        return {
            "state": jnp.zeros(
                (batch, *channels, cls.settings(config).state_size // 2), jnp.complex64
            )
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
    def check(cls, config):
        require(
            cls.settings(config).state_size % 2 == 0,
            f"model.mixer.state_size = {cls.settings(config).state_size} with the mixer 's4d': "
            "expected an even number, as a channel keeps pairs of conjugates",
        )

    @classmethod
    def splits(cls, config):
        return {"linear_num_value_heads": config.linear_num_value_heads}
