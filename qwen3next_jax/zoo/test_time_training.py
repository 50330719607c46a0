"""Mixers that change their recurrent state by one step of gradient descent per token: TTT-Linear
and Titans.

Both mixers divide a document into blocks of `mixer.block` tokens. The gradients of all tokens of a
block are computed at the state before the block.

Letters: B batch, T time, D model, H value heads, K/V widths of a key and of a value.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.zoo.ops import token_scan
from qwen3next_jax.zoo.projections import l2_normalize, project_to_float32
from qwen3next_jax.zoo.references import (
    project_out,
    queries_keys_values_gate,
    rms_norm,
    unit_length,
)

EXAMPLES = {
    "ttt": {"linear_mixer": "ttt", "mixer": {"block": 4}},
    "titans": {"linear_mixer": "titans", "mixer": {"block": 4}},
}


class GradientStepMixer(Recurrent):
    """The base class of `TTT` and `Titans`. The cache has three parts: "state", the current state;
    "start", the state before the current block, at which the gradients are computed; and "count",
    the number of tokens of the current block so far.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # number of successive tokens of a document whose gradients are computed at the same state
        block: Annotated[int, "at least 1"] = 16

    def scan_tokens(self, step, heads, gates, state):
        """Applies `step` to one token after the other.

        Args:
          step: (states, (q [B, H, K], k [B, H, K], v [B, H, V], gates [B, H, …])) → (states,
            o [B, H, V]), all in float32. `states` is a dict of the parts of the cache.
          heads: queries, keys and values.
          gates: the gates of all tokens, [B, T, H, …].
          state: the states before the row, a dict of the parts of the cache; None means the states
            that `empty_states` returns.

        Returns:
          o [B, T, H, V]; the states after the row.
        """
        count = heads.v.shape[2]
        q_BTHK, k_BTHK = (
            jnp.repeat(x.astype(jnp.float32), count // x.shape[2], axis=2)
            for x in (heads.q, heads.k)
        )
        if state is None:
            empty = jnp.zeros((heads.v.shape[0], count, heads.k.shape[-1], heads.v.shape[-1]))
            state = self.empty_states(empty)
        o_BTHV, state = token_scan(
            step,
            (q_BTHK, k_BTHK, heads.v.astype(jnp.float32), gates),
            state,
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV.astype(heads.v.dtype), state

    def states_after_token(self, states, new_BHKV):
        """Returns the parts of the cache after a token, where `new_BHKV` is the new "state". After
        the last token of a block, `new_BHKV` also becomes "start", the state at which the gradients
        of the next block are computed.
        """
        count_BH = states["count"] + 1
        is_last = count_BH == self.settings(self.config).block
        start_BHKV = jnp.where(is_last[..., None, None], new_BHKV, states["start"])
        count_BH = jnp.where(is_last, 0, count_BH)
        return states | {"state": new_BHKV, "start": start_BHKV, "count": count_BH}

    @classmethod
    def empty_states(cls, empty_BHKV):
        """Returns the parts of the cache before the first token. `empty_BHKV` is an array of zeros
        [B, H, K, V].
        """
        count_BH = jnp.zeros(empty_BHKV.shape[:2])
        return {"state": empty_BHKV, "start": empty_BHKV, "count": count_BH}

    @classmethod
    def init_cache(cls, config, batch, length):
        cache = super().init_cache(config, batch, length)
        return cache | cls.empty_states(cache["state"])


class TTT(GradientStepMixer):
    """TTT-Linear (2407.04620): the state of a head is a matrix W [K, V], the weights of a linear
    model f(y; W) = y + LN(Wᵀy) that learns to map keys to values.

    W ← W − η ∇½‖f(k; W) − v‖², with the gradient at the W before the block, and o = f(q; W). The
    learning rate η = σ(w x) / K depends on the token's input x. The initial value W₀ is a
    parameter, and the cache holds W − W₀. There is no convolution and no output gate. The
    diagnostic beta is the mean of the learning rate η.
    """

    switches_read = ()
    has_convolution_and_silu = False

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h, k = c.linear_num_value_heads, c.linear_key_head_dim
        self.make_projection(make, gate=False)
        self.rate_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.start = make.parameter(
            lambda shape: 0.02 * jax.random.normal(make.rngs.params(), shape),
            (h, k, k),
            "value_heads . .",
            kind="vector",
            uses_model_dtype=False,
        )
        self.scale = make.parameter(jnp.ones, (h, k), "value_heads .", kind="norm")
        self.shift = make.parameter(jnp.zeros, (h, k), "value_heads .", kind="rate")
        self.make_output(make)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        rate_BTH = (
            jax.nn.sigmoid(project_to_float32(x_BTD, self.rate_proj))
            / self.config.linear_key_head_dim
        )
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(qkv, beta=rate_BTH)

    def recurrence_parameters(self):
        return self.start[...], self.scale[...], self.shift[...]

    def recurrence(self, heads, state):
        start_HKV, scale_HV, shift_HV = (x.astype(jnp.float32) for x in heads.recurrence_parameters)
        eps = self.config.rms_norm_eps

        def f(x_BHK, w_BHKV):  # w is W − W₀
            y = jnp.einsum("bhkv,bhk->bhv", start_HKV + w_BHKV, x_BHK)
            y = y - jnp.mean(y, axis=-1, keepdims=True)
            scaled = scale_HV * y
            scaled = scaled * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
            return x_BHK + scaled + shift_HV

        def loss(w_BHKV, k_BHK, v_BHV):
            return 0.5 * jnp.sum((f(k_BHK, w_BHKV) - v_BHV) ** 2)

        def step(states, token):
            q, k, v, rate_BH = token
            gradient = jax.grad(loss)(states["start"], k, v)
            w = states["state"] - rate_BH[..., None, None] * gradient
            return self.states_after_token(states, w), f(q, w)

        return self.scan_tokens(step, heads, heads.beta, state)

    @staticmethod
    def check(config):
        k, v = config.linear_key_head_dim, config.linear_value_head_dim
        require(
            k == v,
            f"model.linear_value_head_dim = {v} with the mixer 'ttt': expected "
            f"model.linear_key_head_dim = {k}, as what "
            "is added to a key is compared with a value",
        )


class Titans(GradientStepMixer):
    """The long-term memory of Titans (2501.00663, equations 9–14). The state of a head is a linear
    memory M [K, V], which decays, and which gradient descent with momentum changes.

    P ← η P − θ ∇½‖Mᵀk − v‖², M ← (1 − α) M + P, o = Mᵀq, where P is the momentum's sum of steps,
    and the gradient is taken at the M before the block. q and k are normalised to length 1. The
    token's input x gives the share 1 − α of the memory that is kept, the momentum η, and the
    learning rate θ: 1 − α and η are σ(W x + b), and θ = σ(w x + b) / mixer.block. The divisor
    `mixer.block` keeps the memory from overshooting if all keys of a block are equal. With blocks
    of one token and without momentum, the mixer resembles Gated DeltaNet. There is no output gate.
    The diagnostic beta is the mean of the momentum η and the learning rate θ.
    """

    switches_read = ("short_convolution", "linear_conv_kernel_dim")

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make, gate=False)
        self.make_convolution(make)
        self.gates_proj = make.matrix(
            (c.hidden_size, h, 3),
            "embed -> value_heads .",
            parts=(("kept", 1), ("momentum", 1), ("rate", 1)),
        )
        self.gates_bias = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.array([4.0, 0.0, 2.0]), shape),
            (h, 3),
            "value_heads .",
            kind="rate",
        )
        self.make_output(make)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        logits_BTH3 = project_to_float32(x_BTD, self.gates_proj) + self.gates_bias[...]
        momentum_rate_BTH2 = jax.nn.sigmoid(logits_BTH3[..., 1:]) / jnp.array(
            [1, self.settings(self.config).block]
        )
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(
            qkv, log_decay=jax.nn.log_sigmoid(logits_BTH3[..., 0]), beta=momentum_rate_BTH2
        )

    def recurrence(self, heads, state):
        def step(states, token):
            q, k, v, gates_BH3 = token
            kept, momentum, rate = (gates_BH3[..., i, None, None] for i in range(3))
            k_BHK1 = k[..., None]
            error_BHV = jnp.einsum("bhkv,bhk->bhv", states["start"], k) - v
            gradient = k_BHK1 * error_BHV[..., None, :]
            p = momentum * states["momentum"] - rate * gradient
            m = kept * states["state"] + p
            states = self.states_after_token(states | {"momentum": p}, m)
            return states, jnp.einsum("bhkv,bhk->bhv", m, q)

        gates_BTH3 = jnp.concatenate([jnp.exp(heads.log_decay)[..., None], heads.beta], axis=-1)
        heads = heads._replace(q=l2_normalize(heads.q), k=l2_normalize(heads.k))
        return self.scan_tokens(step, heads, gates_BTH3, state)

    @classmethod
    def empty_states(cls, empty_BHKV):
        return super().empty_states(empty_BHKV) | {"momentum": empty_BHKV}


def ttt_reference(config, params, x):
    """Computes TTT with one autodiff gradient per token, at the state before the token's block."""
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    block = TTT.settings(config).block

    def f(w, x):
        y = jnp.einsum("hkv,hk->hv", w, x)
        y = y - y.mean(axis=-1, keepdims=True)
        deviation = jnp.sqrt((y * y).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
        return x + params["scale"] * y / deviation + params["shift"]

    def step(carry, token):
        w, start = carry
        t, q, k, v, rate = token
        start = jnp.where(t % block == 0, w, start)
        w = w - rate[:, None, None] * jax.grad(lambda w: jnp.sum((f(w, k) - v) ** 2) / 2)(start)
        return (w, start), f(w, q)

    rate = jax.nn.sigmoid(x @ params["rate_proj"]) / k.shape[-1]
    tokens = (jnp.arange(len(x)), q, k, v, rate)
    _, o = jax.lax.scan(step, (params["start"], params["start"]), tokens)
    return project_out(params, rms_norm(config, o) * params["norm"])


def titans_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x, convolved=True)
    q, k = unit_length(q), unit_length(k)
    gates = jax.nn.sigmoid(
        jnp.einsum("td,dhg->thg", x, params["gates_proj"]) + params["gates_bias"]
    )
    block = Titans.settings(config).block

    def step(carry, token):
        m, start, past = carry
        t, q, k, v, gates = token
        kept, momentum, rate = jnp.moveaxis(gates, -1, 0)[..., None, None]
        start = jnp.where(t % block == 0, m, start)
        surprise = jax.grad(lambda m: jnp.sum((jnp.einsum("hkv,hk->hv", m, k) - v) ** 2) / 2)(start)
        past = momentum * past - rate / block * surprise
        m = kept * m + past
        return (m, start, past), jnp.einsum("hkv,hk->hv", m, q)

    empty = jnp.zeros((*k.shape[1:], v.shape[-1]))
    tokens = (jnp.arange(len(x)), q, k, v, gates)
    _, o = jax.lax.scan(step, (empty, empty, empty), tokens)
    return project_out(params, rms_norm(config, o) * params["norm"])


REFERENCES = {"ttt": ttt_reference, "titans": titans_reference}
