"""Titans' long-term memory (2501.00663, equations 9–14), a linear one: a surprise has momentum,
and the memory forgets.

Letters: B batch, T time, H value heads, K/V widths.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixers.recurrent import Inputs, Recurrent, through, unit
from qwen3next_jax.model.mixers.ttt import by_block, stepped


class Titans(Recurrent):
    """P ← η P − θ ∇½‖Mᵀk − v‖², M ← (1 − α) M + P, o = Mᵀq, with q and k of length 1 and α, η, 1
    − α = σ(W x + b). The gradient is taken at the M of the start of each `mixer.block` tokens of
    a document; θ = σ(w x + b) / mixer.block, so that a block of equal keys does not overshoot.
    Blocks of one token without momentum are Gated DeltaNet's. Its diagnostic beta is the mean of
    η and θ.
    """

    switches = ("short_convolution", "linear_conv_kernel_dim")

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # tokens of a document whose gradients are taken at one state
        block: int = 16

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "block"})

    def __init__(self, config, make, layers):
        self.config = c = config
        h, parts = c.linear_num_value_heads, (("kept", 1), ("momentum", 1), ("rate", 1))
        self.make_projection(make, gate=False)
        self.make_convolution(make)
        self.gates_proj = make.matrix((c.hidden_size, h, 3), "embed -> value_heads .", parts=parts)
        start = lambda shape: jnp.broadcast_to(jnp.array([4.0, 0.0, 2.0]), shape)
        self.gates_bias = make.parameter(start, (h, 3), "value_heads .", kind="rate")
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        logits_BTH3 = through(x_BTD, self.gates_proj) + self.gates_bias[...]
        momentum_rate = jax.nn.sigmoid(logits_BTH3[..., 1:]) / jnp.array(
            [1, self.settings(self.config).block]
        )
        return Inputs(
            self.project(x_BTD, context)[0],
            g=jax.nn.log_sigmoid(logits_BTH3[..., 0]),
            beta=momentum_rate,
        )

    def recurrence(self, heads, state):
        def step(state, token):
            q, k, v, gates_BH3 = token
            kept, momentum, rate = (gates_BH3[..., i, None, None] for i in range(3))
            surprise = (
                k[..., None] * (jnp.einsum("bhkv,bhk->bhv", state["start"], k) - v)[..., None, :]
            )
            p = momentum * state["momentum"] - rate * surprise
            m = kept * state["state"] + p
            return stepped(
                state | {"momentum": p}, m, self.settings(self.config).block
            ), jnp.einsum("bhkv,bhk->bhv", m, q)

        gates = jnp.concatenate([jnp.exp(heads.g)[..., None], heads.beta], axis=-1)
        return by_block(step, heads._replace(q=unit(heads.q), k=unit(heads.k)), gates, state)

    @classmethod
    def init_cache(cls, config, batch, length):
        cache = super().init_cache(config, batch, length)
        empty = cache["state"]
        return cache | {"start": empty, "momentum": empty, "count": jnp.zeros(empty.shape[:2])}
