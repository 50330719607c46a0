"""Recurrent networks whose new state is a nonlinear function of the old state: the simple recurrent
network (Elman, 1990) and long short-term memory (LSTM). The state after a token can only be
computed from the state before it, so the tokens are computed one after another. If a row is split
over shards, each shard waits for the final state of the shard before it.

Letters: B batch, T time, D model, H groups of V channels, C = V · number of gates of a cell.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.sharding.rules import activation_spec, per_shard
from qwen3next_jax.zoo.ops import token_scan
from qwen3next_jax.zoo.references import project_out

EXAMPLES = {"rnn": {"linear_mixer": "rnn"}, "lstm": {"linear_mixer": "lstm"}}


class RecurrentNetwork(Mixer):
    """The base class of `RNN` and `LSTM`. A state has linear_num_value_heads groups of
    linear_value_head_dim channels. Each group has its own recurrent matrix U, so that the mesh axis
    `tensor` can split the groups; with one group, U is a full matrix as in the original networks.
    The output is a projection of the state "h" to the model's width.

    A subclass declares the names of the gates and states of its cell (`gate_names`, `state_names`),
    and computes the cell in `cell`.

    Diagnostics: state_norm [H], ‖h‖ of each group after the last token, averaged over rows.
    """

    gate_names: tuple[str, ...]
    state_names: tuple[str, ...]

    def cell(self, state: dict[str, jax.Array], x_BHC: jax.Array) -> dict[str, jax.Array]:
        """Computes the states after one token.

        Args:
          state: name of a state → its value before the token, [B, H, V].
          x_BHC: W x + U h + b, the inputs of all gates side by side.

        Returns:
          Name of a state → its value after the token.
        """
        raise NotImplementedError

    def initial_bias(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the initial value of the bias b. `shape` is [H, C] or, for stacked layers,
        [layers, H, C].
        """
        return jnp.zeros(shape)

    def __init__(self, config, make, layer_indices):
        d, h, v = config.hidden_size, config.linear_num_value_heads, config.linear_value_head_dim
        width = len(self.gate_names) * v
        self.in_proj = make.matrix(
            (d, h, width), "embed -> value_heads .", parts=[(name, v) for name in self.gate_names]
        )
        self.recurrent = make.parameter(
            lambda shape: jax.random.normal(make.rngs.params(), shape) * v**-0.5,
            (h, v, width),
            "value_heads . .",
            kind="vector",
            uses_model_dtype=False,
        )
        self.bias = make.parameter(self.initial_bias, (h, width), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def __call__(self, x_BTD, context, cache=None):
        rows = activation_spec("batch", context.logical_time_axis, "heads")
        first = activation_spec("batch", "heads")
        heads = activation_spec("heads")
        tokens = activation_spec("batch", context.logical_time_axis)

        def run(x_BTHC, u_HVC, bias_HC, segment_ids, state):
            def step(state, x_BHC):
                after = self.cell(state, x_BHC + jnp.einsum("bhv,hvc->bhc", state["h"], u_HVC))
                return after, after["h"]

            if state is None:
                shape = (x_BTHC.shape[0], *u_HVC.shape[:2])
                state = {name: jnp.zeros(shape, jnp.float32) for name in self.state_names}
            return token_scan(
                step,
                x_BTHC.astype(jnp.float32) + bias_HC,
                state,
                segment_ids=segment_ids,
                axis_name=context.mesh_time_axis,
            )

        x_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        h_BTHV, state = per_shard(
            run, context.mesh, (rows, heads, heads, tokens, first), (rows, first)
        )(
            x_BTHC,
            self.recurrent[...].astype(jnp.float32),
            self.bias[...],
            context.segment_ids,
            cache,
        )
        y_BTD = jnp.einsum(
            "bthv,hvd->btd", h_BTHV.astype(x_BTD.dtype), self.out_proj[...].astype(x_BTD.dtype)
        )
        diagnostics = {}
        if context.options.collect_stats:
            norm_BH = jnp.linalg.norm(state["h"], axis=-1)
            diagnostics = {"state_norm": jnp.mean(norm_BH, axis=0)}
        return y_BTD, diagnostics, cache and state

    @classmethod
    def init_cache(cls, config, batch, length):
        shape = (batch, config.linear_num_value_heads, config.linear_value_head_dim)
        return {name: jnp.zeros(shape) for name in cls.state_names}

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of the product U h."""
        return (
            2
            * config.linear_num_value_heads
            * len(cls.gate_names)
            * config.linear_value_head_dim**2
        )

    @staticmethod
    def sizes_split_by_tensor(config):
        return {"linear_num_value_heads": config.linear_num_value_heads}


class RNN(RecurrentNetwork):
    """The simple recurrent network (Elman, 1990): h ← tanh(W x + U h + b)."""

    gate_names = ("input",)
    state_names = ("h",)

    def cell(self, state, x_BHC):
        return {"h": jnp.tanh(x_BHC)}


class LSTM(RecurrentNetwork):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997; with the forget gate of Gers et
    al., 2000).

    i, f, g, o = W x + U h + b; c ← σ(f) c + σ(i) tanh(g); h ← σ(o) tanh(c). The bias of the forget
    gate f starts at 1, all other biases at 0.
    """

    gate_names = ("input", "forget", "new", "output")
    state_names = ("h", "c")

    def initial_bias(self, shape):
        one_gate = shape[-1] // len(self.gate_names)
        return jnp.broadcast_to(jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), one_gate), shape)

    def cell(self, state, x_BHC):
        i, f, g, o = jnp.split(x_BHC, 4, axis=-1)
        c = jax.nn.sigmoid(f) * state["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}


def rnn_reference(config, params, x):
    def step(h, row):
        h = jnp.tanh(row + jnp.einsum("hv,hvc->hc", h, params["recurrent"]))
        return h, h

    x = jnp.einsum("td,dhc->thc", x, params["in_proj"]) + params["bias"]
    empty = jnp.zeros(params["out_proj"].shape[:2])
    return project_out(params, jax.lax.scan(step, empty, x)[1])


def lstm_reference(config, params, x):
    def step(carry, row):
        h, c = carry
        i, f, g, o = jnp.split(row + jnp.einsum("hv,hvc->hc", h, params["recurrent"]), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    x = jnp.einsum("td,dhc->thc", x, params["in_proj"]) + params["bias"]
    empty = jnp.zeros(params["out_proj"].shape[:2])
    return project_out(params, jax.lax.scan(step, (empty, empty), x)[1])


REFERENCES = {"rnn": rnn_reference, "lstm": lstm_reference}
