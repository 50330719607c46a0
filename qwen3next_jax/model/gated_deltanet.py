"""Gated DeltaNet (2412.06464), the recurrent layer of Qwen3-Next.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key
head, K/V widths of a key and of a value, C channels of one key head.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make, ParameterPart
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent, write_strength
from qwen3next_jax.ops.gated_norm import GATES
from qwen3next_jax.sharding.rules import constrain


class GatedDeltaNet(Recurrent):
    """Gated DeltaNet: projections → causal convolution + SiLU → gated delta rule → norm and gate →
    output projection. `Recurrent` explains the diagnostics.

    For each token x, with the sigmoid σ: q, k and v are projections of x, followed by the
    convolution and SiLU, and z = W_z x. For each value head, the write strength is
    β = `model.beta_range` · σ(w_b x), and the logarithm of the decay is
    g = -e^{A_log} softplus(w_a x + dt_bias). `ops.gated_delta_rule` computes o from q, k, v, β and
    g, with q and k scaled to length 1. The output is y = W_out (RMSNorm(o) ⊙ SiLU(z)), with the
    elementwise product ⊙. If `model.output_gate_type` is "sigmoid", σ(z) replaces SiLU(z).

    The input projections are grouped as in the released checkpoint: each key head has one matrix [q
    | k | v | z] and one matrix [b | a]. So a value head stays on the device of its key head when
    the key heads are split over devices. An ablation switch of `ModelConfig` removes a part of the
    mixer together with the part's parameters.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # epsilon of the norm of the heads' outputs; 0: rms_norm_eps
        output_norm_eps: Annotated[float, "0 or more"] = 0.0

    marks_saved_results = True
    switches_read = (
        *Recurrent.switches_read,
        "decay_gate",
        "decay_init",
        "delta_term",
        "beta_gate",
        "beta_range",
        "linear_output_gate",
        "output_gate_type",
    )

    def __init__(self, config: ModelConfig, make: Make, layer_indices: tuple[int, ...]):
        self.config = c = config
        d, g, h = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads
        r = h // g
        qkvz = list(self.qkv_parts(c))
        if c.linear_output_gate:
            qkvz.append(ParameterPart("z", r * c.linear_value_head_dim, r))
        self.in_proj_qkvz = make.matrix(
            (d, g, sum(part.width for part in qkvz)), "embed -> key_heads .", parts=qkvz
        )
        if gates := self.beta_and_decay_parts(c):
            self.in_proj_ba = make.matrix(
                (d, g, sum(part.width for part in gates)), "embed -> key_heads .", parts=gates
            )
        self.make_convolution(make)
        if c.decay_gate:
            init_a_log, init_dt_bias = DECAY_INITS[c.decay_init]
            self.a_log = make.parameter(
                lambda shape: init_a_log(make.rngs.params(), shape),
                (h,),
                "value_heads",
                kind="rate",
            )
            self.dt_bias = make.parameter(
                lambda shape: init_dt_bias(make.rngs.params, shape),
                (h,),
                "value_heads",
                kind="rate",
            )
        self.make_output(make)

    @classmethod
    def beta_and_decay_parts(cls, config: ModelConfig) -> tuple[ParameterPart, ...]:
        """Returns the parts of the matrix `in_proj_ba` for one key head: "b" for the write strength
        and "a" for the decay. A part that is ablated is left out.
        """
        r = config.linear_num_value_heads // config.linear_num_key_heads
        are_there = {"b": config.beta_gate, "a": config.decay_gate}
        return tuple(ParameterPart(name, r, r) for name, is_there in are_there.items() if is_there)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        qkv, z = self._project_qkvz(x_BTD, context)
        g_BTH, beta_BTH = self._decay_and_beta(x_BTD)
        return ProjectedInputs(qkv, z if self.config.linear_output_gate else None, g_BTH, beta_BTH)

    def _project_qkvz(self, x_BTD: jax.Array, context: Context):
        """Returns the fields `qkv` and `output_gate` of `ProjectedInputs`. Without a cache, both
        fields are in the concatenated layout (`model.recurrent`) if the mixer uses this layout.
        """
        q, k, v = self.qkv_channel_counts(self.config)
        weight_DGC = self.in_proj_qkvz[...].astype(x_BTD.dtype)
        if (
            context.logical_time_axis and self.concatenates_heads()
        ):  # with a cache, context.logical_time_axis is None
            # Each of q, k, v and z is computed by a product of its own, so that the kernels read
            # the results as they are. Slices of a single product's result would be copied first.
            parts = (
                x_BTD @ part_DGC.reshape(part_DGC.shape[0], -1)
                for part_DGC in jnp.split(weight_DGC, (q, q + k, q + k + v), axis=-1)
            )
            *qkv, z = (
                constrain(part, context.mesh, "batch", context.logical_time_axis, "heads")
                for part in parts
            )
            return qkv, z
        qkvz_BTGC = constrain(
            jnp.einsum("btd,dgc->btgc", x_BTD, weight_DGC),
            context.mesh,
            "batch",
            context.logical_time_axis,
            "heads",
            None,
        )
        return jnp.split(qkvz_BTGC, (q + k + v,), axis=-1)

    def _decay_and_beta(self, x_BTD: jax.Array):
        """Returns (log decay, write strength), each float32 [B, T, H]. The value of an ablated gate
        is None.
        """
        c = self.config
        shape = (*x_BTD.shape[:2], c.linear_num_value_heads)
        r = c.linear_num_value_heads // c.linear_num_key_heads
        g_BTH = beta_BTH = None
        if c.beta_gate or c.decay_gate:
            ba_BTGC = jnp.einsum(
                "btd,dgr->btgr",
                x_BTD,
                self.in_proj_ba[...].astype(x_BTD.dtype),
                preferred_element_type=jnp.float32,
            )
        if c.beta_gate:
            b_BTGC = ba_BTGC[..., :-r] if c.decay_gate else ba_BTGC
            beta_BTH = write_strength(b_BTGC, c).reshape(*x_BTD.shape[:2], -1)
        if c.decay_gate:
            decay_rate_H = jnp.exp(self.a_log[...].astype(jnp.float32))
            g_BTH = -decay_rate_H * jax.nn.softplus(
                ba_BTGC[..., -r:].reshape(shape) + self.dt_bias[...].astype(jnp.float32)
            )
        return g_BTH, beta_BTH

    def gate_activation(self, gate: jax.Array) -> jax.Array:
        return GATES[self.config.output_gate_type](gate)

    @property
    def output_norm_eps(self) -> float:
        return self.settings(self.config).output_norm_eps or super().output_norm_eps

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        require(
            config.beta_gate or config.beta_range == 1,
            f"model.beta_range = {config.beta_range} with model.beta_gate = False: β is 1, and "
            "beta_range has no effect: expected 1",
        )

    @classmethod
    def uses_delta_term(cls, config: ModelConfig) -> bool:
        return config.delta_term


def log_of_uniform(lowest: float) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """Returns a function (key, shape) → ln A, for random A uniform between `lowest` and 16."""
    return lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=lowest, maxval=16.0))


def log_uniform_dt_bias(new_key: Callable[[], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Returns a random bias [*shape] whose softplus is log-uniform between 0.001 and 0.1.
    `new_key`: makes a random key.
    """
    dt = jnp.exp(jax.random.uniform(new_key(), shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


# {value of `ModelConfig.decay_init`: (function that draws A_log, function that draws dt_bias)}. The
# lowest A is above 0 because the logarithm of 0 is not finite.
DECAY_INITS = {
    "ones": (log_of_uniform(0.01), lambda new_key, shape: jnp.ones(shape)),
    "log_uniform": (log_of_uniform(1e-4), log_uniform_dt_bias),
}
