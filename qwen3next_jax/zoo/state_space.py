"""State-space models: S4D, Mamba (S6) and Mamba-2.

Letters: B batch, T time, D model, G key heads, H value heads, K/V widths of a key and of a value.
In S4D and Mamba: H heads of V channels (the models have no heads; the mesh axis `tensor` splits the
channels by head), N numbers in the state of a channel (in S4D: complex numbers, each of which
stands for itself and its conjugate), R rank of the projection that computes Δ, P = 2 halves of the
output projection of S4D.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.gated_deltanet import DECAY_INITS, log_uniform_dt_bias
from qwen3next_jax.model.layers import Context, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.sharding.rules import activation_spec, per_shard
from qwen3next_jax.zoo.ops import low_memory_linear_scan
from qwen3next_jax.zoo.projections import project_to_float32
from qwen3next_jax.zoo.references import (
    causal_convolution,
    outer_product_recurrence,
    project_out,
    queries_keys_values_gate,
    rms_norm,
)

EXAMPLES = {
    "mamba": {"linear_mixer": "mamba"},
    "mamba2": {"linear_mixer": "mamba2"},
    "s4d": {"linear_mixer": "s4d"},
}


class ChannelStateMixer(Mixer):
    """The base class of mixers with a small state for each of linear_num_value_heads ×
    linear_value_head_dim channels.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # number of real numbers in the state of a channel; in S4D the state has half as many
        # complex numbers, each of which stands for a pair of conjugate numbers
        state_size: Annotated[int, "at least 1"] = 16

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of writing and reading the states of all channels."""
        channels = config.linear_num_value_heads * config.linear_value_head_dim
        return 4 * channels * cls.settings(config).state_size

    @staticmethod
    def sizes_split_by_tensor(config):
        return {"linear_num_value_heads": config.linear_num_value_heads}


class Mamba(ChannelStateMixer):
    """Mamba (S6, 2312.00752, algorithm 2). Every channel has a state h [N], whose decay and update
    depend on the token.

    From the layer's input u: x = SiLU(conv(W u)) and z = W' u for each channel. From x: the step
    Δ = softplus(W₂ W₁ x + b), and the vectors B and C [N]. Then h ← e^{−Δ e^{A_log}} h + Δ x B,
    and y = (C·h + D x) SiLU(z), with a learned A_log [N] and D for each channel. The convolution of
    the published Mamba models has a bias; the convolution of this class has none.

    Diagnostics: step [H], the mean of Δ over the tokens and the channels of each head.
    """

    switches_read = ("linear_conv_kernel_dim",)

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        d, h, v = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
        n = self.settings(c).state_size
        rank = -(-d // 16)
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
        self.dt_bias = make.parameter(
            lambda shape: log_uniform_dt_bias(make.rngs.params, shape),
            (h, v),
            "value_heads .",
            kind="rate",
        )
        self.a_log = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.log(jnp.arange(1.0, n + 1)), shape),
            (h, v, n),
            "value_heads . .",
            kind="rate",
        )
        self.skip = make.parameter(jnp.ones, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def __call__(self, x_BTD, context, cache=None):
        xz_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        x_BTHV, z_BTHV = jnp.split(xz_BTHC, 2, axis=-1)
        x_BTHV, conv_state = self._convolve(x_BTHV, context, cache and cache["conv"])
        step_BTHV, b_BTN, c_BTN = self._project_to_step_b_and_c(x_BTHV)
        y_BTHV, state_BHVN = self._scan(
            x_BTHV, step_BTHV, b_BTN, c_BTN, context, cache and cache["state"]
        )
        y_BTHV = (y_BTHV + self.skip[...] * x_BTHV) * jax.nn.silu(z_BTHV.astype(jnp.float32))
        y_BTD = jnp.einsum(
            "bthv,hvd->btd", y_BTHV.astype(x_BTD.dtype), self.out_proj[...].astype(x_BTD.dtype)
        )
        diagnostics = {}
        if context.options.collect_stats:
            diagnostics = {"step": token_mean(jnp.mean(step_BTHV, axis=-1), context.stats_mask)}
        return y_BTD, diagnostics, cache and {"conv": conv_state, "state": state_BHVN}

    def _convolve(self, x_BTHV, context: Context, state):
        """Applies the convolution and the SiLU to x. Returns the outputs [B, T, H, V] and the
        inputs that the convolution of the next tokens needs. `state` holds the inputs of the
        convolution before the row; None means zeros.
        """
        rows = activation_spec("batch", context.logical_time_axis, "heads")
        first = activation_spec("batch", None, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)

        def convolve(x, kernel, segment_ids, state):
            return causal_conv1d(
                x,
                kernel,
                activation="silu",
                initial_state=state,
                segment_ids=segment_ids,
                axis_name=context.mesh_time_axis,
            )

        in_specs = (rows, activation_spec(None, "heads"), tokens, first)
        return per_shard(convolve, context.mesh, in_specs, (rows, first))(
            x_BTHV, self.conv_kernel[...].astype(x_BTHV.dtype), context.segment_ids, state
        )

    def _project_to_step_b_and_c(self, x_BTHV):
        """Computes, from the x of every channel, the step Δ [B, T, H, V] in float32, and the
        vectors B [B, T, N] and C [B, T, N].
        """
        n = self.settings(self.config).state_size
        rank = self.step_up.shape[0]
        low_b_c = jnp.einsum("bthv,hvr->btr", x_BTHV, self.x_proj[...].astype(x_BTHV.dtype))
        low_BTR, b_BTN, c_BTN = jnp.split(low_b_c, (rank, rank + n), axis=-1)
        step_BTHV = jnp.einsum(
            "btr,rhv->bthv",
            low_BTR,
            self.step_up[...].astype(x_BTHV.dtype),
            preferred_element_type=jnp.float32,
        )
        return jax.nn.softplus(step_BTHV + self.dt_bias[...]), b_BTN, c_BTN

    def _scan(self, x_BTHV, step_BTHV, b_BTN, c_BTN, context: Context, state_BHVN):
        """Runs the recurrence. Returns C·h of every token, [B, T, H, V], and the last h,
        [B, H, V, N].
        """

        def run(x, step, b, c, a_log, segment_ids, state):
            def expand(inputs):
                x, step, b, _ = inputs
                log_decay = -step[..., None] * jnp.exp(a_log)
                return log_decay, (step * x)[..., None] * b[:, :, None, None]

            def read(h, inputs):
                return jnp.einsum("bthvn,btn->bthv", h, inputs[3])

            inputs = [y.astype(jnp.float32) for y in (x, step, b, c)]
            if state is None:
                state = jnp.zeros((x.shape[0], *a_log.shape), jnp.float32)
            return low_memory_linear_scan(
                expand,
                read,
                inputs,
                state,
                segment_ids=segment_ids,
                axis_name=context.mesh_time_axis,
            )

        rows = activation_spec("batch", context.logical_time_axis, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)
        heads = activation_spec("heads")
        states = activation_spec("batch", "heads")
        in_specs = (rows, rows, tokens, tokens, heads, tokens, states)
        return per_shard(run, context.mesh, in_specs, (rows, states))(
            x_BTHV, step_BTHV, b_BTN, c_BTN, self.a_log[...], context.segment_ids, state_BHVN
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        channels = (config.linear_num_value_heads, config.linear_value_head_dim)
        window = config.linear_conv_kernel_dim - 1
        return {
            "conv": jnp.zeros((batch, window, *channels), config.dtype),
            "state": jnp.zeros((batch, *channels, cls.settings(config).state_size)),
        }

    @staticmethod
    def halo(config):
        return config.linear_conv_kernel_dim - 1


class S4D(ChannelStateMixer):
    """S4D (2206.11893, equations 3–5). Every channel has a complex state h [N], whose complex decay
    is learned and does not depend on the token.

    h ← e^{Δ A} h + (e^{Δ A} − 1) / A · x, y = 2 Re(C·h) + D x, where x is a projection of the
    layer's input, and A [N], C [N], Δ and D are parameters of each channel. The sum y passes
    through a GELU and a projection with two halves; the mixer's output is the first half times the
    sigmoid of the second half. Entry n of A starts at −½ + i π n ("S4D-Lin"). N is
    `mixer.state_size` / 2; the factor 2 in y adds the conjugate of each number of the state.

    Diagnostics: half_life [H], ln 2 / (Δ · −Re A) in tokens, the longest in each head.
    """

    def __init__(self, config, make, layer_indices):
        c = config
        d, h, v = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
        n = self.settings(c).state_size // 2
        self.in_proj = make.matrix((d, h, v), "embed -> value_heads .")

        def normal(shape):
            return jax.random.normal(make.rngs.params(), shape)

        def log_uniform(shape):
            return jax.random.uniform(
                make.rngs.params(), shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)
            )

        self.log_step = make.parameter(log_uniform, (h, v), "value_heads .", kind="rate")
        self.a_log = make.parameter(
            lambda shape: jnp.full(shape, jnp.log(0.5)), (h, v, n), "value_heads . .", kind="rate"
        )
        self.a_imag = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.pi * jnp.arange(n), shape),
            (h, v, n),
            "value_heads . .",
            kind="rate",
        )
        # C, with its real and imaginary parts in the last dimension
        self.read = make.parameter(
            normal, (h, v, n, 2), "value_heads . . .", kind="vector", uses_model_dtype=False
        )
        self.skip = make.parameter(normal, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, 2, d), "value_heads . -> * embed")

    def __call__(self, x_BTD, context, cache=None):
        x_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, self.in_proj[...].astype(x_BTD.dtype)).astype(
            jnp.float32
        )
        y_BTHV, state_BHVN = self._scan(x_BTHV, context, cache and cache["state"])
        y_BTHV = jax.nn.gelu(y_BTHV).astype(x_BTD.dtype)
        y_BTPD = jnp.einsum("bthv,hvpd->btpd", y_BTHV, self.out_proj[...].astype(x_BTD.dtype))
        diagnostics = {}
        if context.options.collect_stats:
            rate_HVN = jnp.exp(self.a_log[...] + self.log_step[...][..., None])
            diagnostics = {"half_life": jnp.log(2) / jnp.min(rate_HVN, axis=(-2, -1))}
        y_BTD = y_BTPD[:, :, 0] * jax.nn.sigmoid(y_BTPD[:, :, 1])
        return y_BTD, diagnostics, cache and {"state": state_BHVN}

    def _scan(self, x_BTHV, context: Context, state_BHVN):
        """Runs the recurrence. Returns 2 Re(C·h) + D x of every token, [B, T, H, V], and the last
        h, complex [B, H, V, N].
        """

        def run(x, log_step, a_log, a_imag, c, skip, segment_ids, state):
            a = jax.lax.complex(-jnp.exp(a_log), a_imag)
            rate = jnp.exp(log_step)[..., None] * a
            write = jnp.expm1(rate) / a

            def read(h, x):
                weight = jax.lax.complex(c[..., 0], c[..., 1])
                return 2 * jnp.einsum("bthvn,hvn->bthv", h, weight).real + skip * x

            if state is None:
                state = jnp.zeros((x.shape[0], *a.shape), a.dtype)
            return low_memory_linear_scan(
                lambda x: (rate, write * x[..., None]),
                read,
                x,
                state,
                segment_ids=segment_ids,
                axis_name=context.mesh_time_axis,
            )

        rows = activation_spec("batch", context.logical_time_axis, "heads")
        heads = activation_spec("heads")
        states = activation_spec("batch", "heads")
        in_specs = (
            rows,
            *(heads,) * 5,
            activation_spec("batch", context.logical_time_axis),
            states,
        )
        parameters = (self.log_step, self.a_log, self.a_imag, self.read, self.skip)
        return per_shard(run, context.mesh, in_specs, (rows, states))(
            x_BTHV,
            *(parameter[...].astype(jnp.float32) for parameter in parameters),
            context.segment_ids,
            state_BHVN,
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        channels = (config.linear_num_value_heads, config.linear_value_head_dim)
        pairs = cls.settings(config).state_size // 2
        return {"state": jnp.zeros((batch, *channels, pairs), jnp.complex64)}

    @classmethod
    def check(cls, config):
        state_size = cls.settings(config).state_size
        require(
            state_size % 2 == 0,
            f"model.mixer.state_size = {state_size} with the mixer 's4d': expected an even number, "
            "as a channel keeps pairs of conjugates",
        )


class Mamba2(Recurrent):
    """Mamba-2 (2405.21060, state-space duality) in the notation of attention: the paper's C is q,
    its B is k, its x is v, and its groups are the G key heads.

    Δ = softplus(w u + b) for the layer's input u, S ← e^{−Δ e^A} S + Δ k vᵀ, o = Sᵀq + D v, with a
    learned A and D for each head. RMSNorm of o · SiLU(z) over the heads of a group follows, where z
    is the output gate. The convolution of the published Mamba-2 models has a bias; the convolution
    of this class has none.
    """

    switches_read = (*Recurrent.switches_read, "decay_init")
    normalize_qk = False

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        self.make_convolution(make)
        self.step_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        init_a_log, init_dt_bias = DECAY_INITS[c.decay_init]
        self.a_log = make.parameter(
            lambda shape: init_a_log(make.rngs.params(), shape), (h,), "value_heads", kind="rate"
        )
        self.dt_bias = make.parameter(
            lambda shape: init_dt_bias(make.rngs.params, shape), (h,), "value_heads", kind="rate"
        )
        self.skip = make.parameter(jnp.ones, (h,), "value_heads", kind="rate")
        self.make_output(make, per_head=True)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        step_BTH = jax.nn.softplus(project_to_float32(x_BTD, self.step_proj) + self.dt_bias[...])
        qkv, gate = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(
            qkv, gate, log_decay=-jnp.exp(self.a_log[...]) * step_BTH, beta=step_BTH
        )

    def recurrence_parameters(self):
        return (self.skip[...],)

    def recurrence(self, heads, state):
        (skip_H,) = heads.recurrence_parameters
        # `gated_delta_rule` divides by √K
        q_BTGK = heads.q * heads.q.shape[-1] ** 0.5
        o_BTHV, states = super().recurrence(heads._replace(q=q_BTGK), state)
        return o_BTHV + (skip_H[:, None] * heads.v).astype(o_BTHV.dtype), states

    def norm_and_gate(self, o_BTHV, norm_HV, gate_BTGRV):
        groups = (*o_BTHV.shape[:2], self.config.linear_num_key_heads, -1)
        y = o_BTHV.astype(jnp.float32).reshape(groups) * jax.nn.silu(gate_BTGRV.astype(jnp.float32))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return (y.reshape(o_BTHV.shape) * norm_HV).astype(o_BTHV.dtype)

    @classmethod
    def uses_delta_term(cls, config):
        return False


def mamba_reference(config, params, x):
    x, z = jnp.split(jnp.einsum("td,dhc->thc", x, params["in_proj"]), 2, axis=-1)
    x = jax.nn.silu(causal_convolution(x, params["conv_kernel"]))
    rank, n = len(params["step_up"]), params["a_log"].shape[-1]
    low_b_c = jnp.einsum("thv,hvr->tr", x, params["x_proj"])
    low, b, c = jnp.split(low_b_c, np.cumsum([rank, n]), axis=-1)
    dt = jax.nn.softplus(jnp.einsum("tr,rhv->thv", low, params["step_up"]) + params["dt_bias"])

    def step(h, token):
        x, b, c, dt = token
        h = jnp.exp(-dt[..., None] * jnp.exp(params["a_log"])) * h + (dt * x)[..., None] * b
        return h, h @ c + params["skip"] * x

    _, y = jax.lax.scan(step, jnp.zeros(params["a_log"].shape), (x, b, c, dt))
    return project_out(params, y * jax.nn.silu(z))


def mamba2_reference(config, params, x):
    q, k, v, gate = queries_keys_values_gate(config, params, x, convolved=True)
    step = jax.nn.softplus(x @ params["step_proj"] + params["dt_bias"])
    o = outer_product_recurrence(q, k, v, -jnp.exp(params["a_log"]) * step, step)
    y = (o + params["skip"][:, None] * v) * jax.nn.silu(gate)
    groups = (len(x), config.linear_num_key_heads, -1)
    y = rms_norm(config, y.reshape(groups)).reshape(y.shape)
    return project_out(params, y * params["norm"])


def s4d_reference(config, params, x):
    """Computes S4D as a convolution: y_t = Σ_l κ_l x_{t−l} + D x_t with the kernel
    κ_l = 2 Re Σ_n C_n (e^{Δ A_n} − 1) / A_n e^{l Δ A_n}.
    """
    x = jnp.einsum("td,dhv->thv", x, params["in_proj"])
    a = jax.lax.complex(-jnp.exp(params["a_log"]), params["a_imag"])
    step = jnp.exp(params["log_step"])[..., None]
    read = jax.lax.complex(params["read"][..., 0], params["read"][..., 1])
    weight = read * (jnp.exp(step * a) - 1) / a
    powers = jnp.exp(jnp.arange(len(x))[:, None, None, None] * step * a)
    kernel = 2 * jnp.einsum("hvn,lhvn->lhv", weight, powers).real
    y = jnp.stack([jnp.einsum("lhv,lhv->hv", kernel[: t + 1], x[t::-1]) for t in range(len(x))])
    y = jax.nn.gelu(y + params["skip"] * x)
    value, gate = jnp.moveaxis(jnp.einsum("thv,hvpd->tpd", y, params["out_proj"]), 1, 0)
    return value * jax.nn.sigmoid(gate)


REFERENCES = {"mamba": mamba_reference, "mamba2": mamba2_reference, "s4d": s4d_reference}
