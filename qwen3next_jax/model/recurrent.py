"""The base class of recurrent mixers. It has the short convolution, the recurrence, the norm and
gate of the output, and the cache. Subclasses add the input projections.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key head,
K/V widths of a key and of a value, C channels of one key head that pass through the convolution
(2K + RV in most mixers), W convolution width. The fused layout has all heads side by side in the
last axis: [B, T, GK] in place of [B, T, G, K].
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, keeping_inputs, rms_norm_plain, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.parameters import Make, Part
from qwen3next_jax.ops import causal_conv1d, gated_delta_rule
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.gated_norm import gated_norm
from qwen3next_jax.ops.preferences import prefers_concatenated_heads
from qwen3next_jax.sharding.rules import activation_spec, constrain, per_shard

# With a cache, up to this many tokens are computed one by one. The chunked algorithm would pad them
# to a whole chunk; for one token that is four times the work.
FEW_TOKENS = 8


class Inputs(NamedTuple):
    """The results of a mixer's input projections, before convolution and recurrence.

    qkv: [B, T, G, C], query, key and values of each key head (`Recurrent.channels`). In the fused
      layout it is a list [q [B, T, GK], k [B, T, GK], v [B, T, HV]] instead.
    gate: the gate of the output before its activation, [B, T, G, RV] ([B, T, HV] in the fused
      layout); None: there is no gate.
    g: the logarithm of the decay, ≤ 0, float32 [B, T, H], or [B, T, H, K] if every key channel has
      its own decay. None: no decay.
    beta: the write strength, float32 [B, T, H]. It may have one more axis if the mixer overrides
      `recurrence` and reads several numbers for each head. None: 1 everywhere.
    """

    qkv: jax.Array | list[jax.Array]
    gate: jax.Array | None = None
    g: jax.Array | None = None
    beta: jax.Array | None = None


class Heads(NamedTuple):
    """The inputs of `Recurrent.recurrence` after the convolution. On a mesh they hold one device's
    heads.

    q, k: queries and keys, [B, T, G, K].
    v: values, [B, T, H, V].
    g, beta: as in `Inputs`, but never None.
    weights: the arrays of the mixer's `head_weights`.
    segment_ids, axis_name: the arguments of `ops.gated_delta_rule` with these names.
    return_all_states: as in `Context`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    weights: tuple[jax.Array, ...]
    segment_ids: jax.Array | None
    axis_name: str | None
    return_all_states: bool


class Recurrent(Mixer):
    """A recurrent mixer: input projections → causal convolution + SiLU → gated delta rule → norm of
    each head, SiLU gate → output projection.

    A subclass makes its input projections in `__init__`, where it also calls `make_convolution` and
    `make_output`, and implements `inputs`. It may override

      channels: the widths of q, k and v that pass through the convolution;
      uses_delta_term: whether a write replaces the value that the state holds for the key;
      recurrence: the operator, by default `ops.gated_delta_rule`;
      head_weights: the parameters that `recurrence` reads;
      norm_and_gate: the norm and the gate of the output;
      output_norm_eps: the epsilon of that norm;
      convolved: whether there are a convolution and a SiLU after it;
      normalize_qk: whether q and k are scaled to length 1;
      activation: the activation of the output gate.

    The settings `linear_*` give the sizes. The mesh axis `tensor` splits key heads, each with its
    value heads.

    Diagnostics, one number for each value head [H]:
      half_life: -ln 2 / mean g, the number of tokens in which the mean decay halves the state;
      beta: the mean write strength;
      state_norm: ‖S‖_F after the last token, averaged over rows.
    The means of g and β are taken over the tokens that count (`Context.stats_mask`).
    """

    switches = ("short_convolution", "linear_conv_kernel_dim", "delta_rule")
    convolved: ClassVar[bool] = True
    normalize_qk: ClassVar[bool] = True
    activation = staticmethod(jax.nn.silu)

    # ---- what a subclass implements or overrides

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        """Computes the inputs of convolution and recurrence from the mixer's input [B, T, D]."""
        raise NotImplementedError

    @classmethod
    def channels(cls, config: ModelConfig) -> tuple[int, int, int]:
        """Returns the numbers of channels of one key head: of its query, of its key, and of the
        values of all its value heads.
        """
        r = config.linear_num_value_heads // config.linear_num_key_heads
        key = config.linear_key_head_dim
        return key, key, r * config.linear_value_head_dim

    @classmethod
    def uses_delta_term(cls, config: ModelConfig) -> bool:
        """Whether a write replaces the value that the state holds for the key (the delta rule). If
        not, the write is added to the state.
        """
        return True

    def recurrence(
        self, heads: Heads, state: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the recurrence over the tokens of each row.

        Args:
          heads: queries, keys, values, decay and write strength, and what else the recurrence
            reads. The gate of the output is not among them: `norm_and_gate` applies it.
          state: {name: state before these tokens}, with the names of `init_cache`; None: all states
            are 0.

        Returns:
          o [B, T, H, V]; {name: state after these tokens} with the same names, such as "state": S
          [B, H, K, V]. With `heads.return_all_states`, the states after every token, [B, T, …].
        """
        few_tokens = state is not None and heads.q.shape[1] <= FEW_TOKENS
        o_BTHV, final_state = gated_delta_rule(
            heads.q,
            heads.k,
            heads.v,
            g=heads.g,
            beta=heads.beta,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            normalize_qk=self.normalize_qk,
            delta_term=self.uses_delta_term(self.config),
            implementation="recurrent" if few_tokens else self.config.delta_rule_implementation,
            axis_name=heads.axis_name,
            return_all_states=heads.return_all_states,
        )
        return o_BTHV, {"state": final_state}

    def head_weights(self) -> tuple[jax.Array, ...]:
        """Returns the parameters that `recurrence` reads. Their first axis has the value heads or
        the key heads, [H or G, …].
        """
        return ()

    @property
    def output_norm_eps(self) -> float:
        """The number that the norm of the output adds to the mean square."""
        return self.config.rms_norm_eps

    def norm_and_gate(
        self, o_BTHV: jax.Array, norm: jax.Array, gate_BTGRV: jax.Array | None
    ) -> jax.Array:
        """Applies the norm and the gate to the output of the recurrence.

        Args:
          o_BTHV: the output of the recurrence.
          norm: the weight of the norm.
          gate_BTGRV: the gate before its activation; None: there is no gate.

        Returns:
          [B, T, H, V].
        """
        dtype = o_BTHV.dtype
        o_BTHV = rms_norm_plain(o_BTHV, norm, self.output_norm_eps)
        if gate_BTGRV is None:
            return o_BTHV
        gate_BTHV = self.activation(gate_BTGRV.reshape(o_BTHV.shape).astype(jnp.float32))
        return (o_BTHV.astype(jnp.float32) * gate_BTHV).astype(dtype)

    # ---- parameters

    @classmethod
    def qkv_parts(cls, config: ModelConfig) -> tuple[Part, Part, Part]:
        """Returns the declarations of q, k and v side by side, for a matrix of one key head."""
        q, k, v = cls.channels(config)
        return (
            Part("q", q),
            Part("k", k, k // config.linear_key_head_dim),
            Part("v", v, v // config.linear_value_head_dim),
        )

    def make_projection(self, make: Make, gate: bool = True) -> None:
        """Makes one matrix [q | k | v | gate] for each key head, so that every value head stays on
        the device of its key head when G is split over devices. `gate`: whether the matrix has the
        columns of the gate.
        """
        c = make.config
        r = c.linear_num_value_heads // c.linear_num_key_heads
        parts = list(self.qkv_parts(c))
        if gate:
            parts.append(Part("gate", r * c.linear_value_head_dim, r))
        shape = (c.hidden_size, c.linear_num_key_heads, sum(part.width for part in parts))
        self.in_proj = make.matrix(shape, "embed -> key_heads .", parts=parts)

    def project(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Computes the fields `qkv` and `gate` of `Inputs` with the matrix of `make_projection`."""
        x_BTGC = jnp.einsum("btd,dgc->btgc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        x_BTGC = constrain(x_BTGC, context.mesh, "batch", context.time, "heads", None)
        return tuple(jnp.split(x_BTGC, (sum(self.channels(self.config)),), axis=-1))

    def make_convolution(self, make: Make) -> None:
        """Makes the kernel of the short convolution, unless `model.short_convolution` is off."""
        c = make.config
        if c.short_convolution:
            self.conv_kernel = make.matrix(
                (c.linear_conv_kernel_dim, c.linear_num_key_heads, sum(self.channels(c))),
                ". key_heads channels",
                kind="convolution",
                parts=self.qkv_parts(c),
            )

    def make_output(self, make: Make, per_head: bool = False) -> None:
        """Makes the weight of the output norm and the projection back to the model's width. All
        heads share the norm's weight, unless `per_head`: then each head has its own.
        """
        c = make.config
        h, v = c.linear_num_value_heads, c.linear_value_head_dim
        if per_head:
            self.norm = make.parameter(jnp.ones, (h, v), "value_heads .", kind="norm")
        else:
            self.norm = make.norm(v, plain=True)
        self.out_proj = make.matrix((h, v, c.hidden_size), "value_heads . -> embed")

    # ---- the layer

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict, dict | None]:
        """Applies the mixer to x [B, T, D]. Returns (y [B, T, D], diagnostics, the cache after
        these tokens or None).
        """
        inputs = save_for_backward(self.inputs(x_BTD, context))
        has_decay = inputs.g is not None
        inputs = self._without_none(inputs, x_BTD.shape[:2])
        if isinstance(inputs.qkv, list):
            o_BTC, state = self.fused_recurrence(inputs, context)
            y_BTD = o_BTC @ self.out_proj[...].astype(x_BTD.dtype).reshape(o_BTC.shape[2], -1)
            states = {"state": state}
            conv_state = None
        else:
            o_BTHV, states, conv_state = self._convolution_and_recurrence(inputs, context, cache)
            y_BTD = self._output(o_BTHV, inputs.gate, context)
        diagnostics = {}
        if context.options.collect_stats:
            diagnostics = _diagnostics(inputs, has_decay, states["state"], context)
        return y_BTD, diagnostics, None if cache is None else {"conv": conv_state} | states

    def _without_none(self, inputs: Inputs, batch_time: tuple[int, int]) -> Inputs:
        """Returns `inputs` with arrays in place of None: g = 0 and β = 1."""
        shape = (*batch_time, self.config.linear_num_value_heads)
        if inputs.g is None:
            inputs = inputs._replace(g=jnp.zeros(shape, jnp.float32))
        if inputs.beta is None:
            inputs = inputs._replace(beta=jnp.ones(shape, jnp.float32))
        return inputs

    def _convolution_and_recurrence(self, inputs: Inputs, context: Context, cache: dict | None):
        """Runs the convolution and the recurrence on each device, for the device's own key heads
        with their value heads and, if rows are split, for its own tokens.

        Returns:
          (o [B, T, H, V], states of the recurrence, state of the convolution).
        """
        conv_state = states = None
        if cache is not None:
            conv_state = cache["conv"]
            states = {name: x for name, x in cache.items() if name != "conv"}
        if self.convolves(self.config):
            kernel_WGC = self.conv_kernel[...].astype(inputs.qkv.dtype)
        else:
            kernel_WGC = jnp.zeros((1, *inputs.qkv.shape[2:]))

        def run(qkv_BTGC, kernel_WGC, g_BTH, beta_BTH, weights, segment_ids, conv_state, states):
            qkv_BTGC, conv_state = self._convolve(
                qkv_BTGC, kernel_WGC, segment_ids, conv_state, context
            )
            q_BTGK, k_BTGK, v_BTHV = self._split_qkv(qkv_BTGC, heads=g_BTH.shape[2])
            heads = Heads(
                q_BTGK,
                k_BTGK,
                v_BTHV,
                g_BTH,
                beta_BTH,
                weights,
                segment_ids,
                context.time_axis,
                context.options.return_all_states,
            )
            o_BTHV, states = self.recurrence(heads, states)
            return o_BTHV, states, conv_state

        spec = functools.partial(activation_spec, "batch")
        by_key_head = spec(context.time, "heads", None)
        by_value_head = spec(context.time, "heads")
        in_specs = (
            by_key_head,
            activation_spec(None, "heads", None),
            by_value_head,
            by_value_head,
            activation_spec("heads"),
            spec(context.time),
            spec(None, "heads", None),
            spec("heads"),
        )
        if context.options.return_all_states:
            out_specs = (by_key_head, spec(None, "heads"), spec(None, None, "heads", None))
        else:
            out_specs = (by_key_head, spec("heads"), spec(None, "heads", None))
        return per_shard(run, context.mesh, in_specs, out_specs)(
            inputs.qkv,
            kernel_WGC,
            inputs.g,
            inputs.beta,
            self.head_weights(),
            context.segment_ids,
            conv_state,
            states,
        )

    def _convolve(self, qkv_BTGC, kernel_WGC, segment_ids, conv_state, context: Context):
        """Applies the convolution and SiLU to one device's heads.

        Returns:
          (q, k and v side by side [B, T, G, C]; the state of the convolution, its last W - 1
          inputs). With `context.options.return_all_states`, the state has an axis T after B: it is
          the state after each token.
        """
        before_and_here_BSGC = None
        if context.options.return_all_states:
            before_and_here_BSGC = jnp.concatenate((conv_state, qkv_BTGC), axis=1)
        if self.convolves(self.config):

            def convolve(qkv, kernel, state):
                return causal_conv1d(
                    qkv,
                    kernel,
                    activation="silu",
                    initial_state=state,
                    segment_ids=segment_ids,
                    axis_name=context.time_axis,
                )

            out_BTGC, state = keeping_inputs(convolve, qkv_BTGC, kernel_WGC, conv_state)
            out_BTGC = save_for_backward(out_BTGC, "convolution")
        else:
            out_BTGC = jax.nn.silu(qkv_BTGC) if self.convolved else qkv_BTGC
            state = qkv_BTGC[:, :0]
        if context.options.return_all_states:
            width = kernel_WGC.shape[0]
            state = jnp.stack(
                [
                    before_and_here_BSGC[:, t : t + width - 1]
                    for t in range(1, qkv_BTGC.shape[1] + 1)
                ],
                axis=1,
            )
        return out_BTGC, state

    def _split_qkv(self, qkv_BTGC: jax.Array, heads: int):
        """Splits [B, T, G, C] into q [B, T, G, K], k [B, T, G, K] and v [B, T, H, V]."""
        q, k, _ = self.channels(self.config)
        q_BTGK, k_BTGK, v_BTGRV = jnp.split(qkv_BTGC, (q, q + k), axis=-1)
        return q_BTGK, k_BTGK, v_BTGRV.reshape(*v_BTGRV.shape[:2], heads, -1)

    def _output(self, o_BTHV: jax.Array, gate_BTGRV: jax.Array | None, context: Context):
        """Applies the norm, the gate and the projection back to the model's width: [B, T, D]."""

        def norm_gate_and_project(o_BTHV, norm, gate_BTGRV, out_proj_HVD):
            dtype = o_BTHV.dtype
            o_BTHV = self.norm_and_gate(o_BTHV, norm, gate_BTGRV)
            o_BTHV = constrain(o_BTHV, context.mesh, "batch", context.time, "heads", None)
            return jnp.einsum("bthv,hvd->btd", o_BTHV, out_proj_HVD.astype(dtype))

        return keeping_inputs(
            norm_gate_and_project, o_BTHV, self.norm[...], gate_BTGRV, self.out_proj[...]
        )

    # ---- the same with the heads side by side in the last axis

    def uses_fused_layout(self) -> bool:
        """Whether the layer uses the fused layout between its kernels. It does on a GPU, and on a
        TPU if the width of each head is a multiple of 128 lanes, provided that the short
        convolution and the output gate exist.
        """
        c = self.config
        return (
            c.short_convolution
            and c.linear_output_gate
            and prefers_concatenated_heads(c.linear_key_head_dim, c.linear_value_head_dim)
        )

    def fused_recurrence(self, inputs: Inputs, context: Context) -> tuple[jax.Array, jax.Array]:
        """Applies the convolution, the delta rule, the norm and the gate in the fused layout.

        Args:
          inputs: inputs in the fused layout, with g and beta that are not None.
          context: the inputs that all layers of the forward pass share.

        Returns:
          o [B, T, HV]; the final state [B, H, K, V].
        """
        c = self.config
        k = c.linear_key_head_dim

        def run(q, k_, v, kernel_WGC, g_BTH, beta_BTH, gate, norm_V, segment_ids):
            value_heads = g_BTH.shape[2]
            key_heads = value_heads * c.linear_num_key_heads // c.linear_num_value_heads

            def convolve(x, kernel_WGC, heads):
                y, _ = causal_conv1d(
                    x,
                    kernel_WGC.reshape(kernel_WGC.shape[0], -1),
                    activation="silu",
                    segment_ids=segment_ids,
                    axis_name=context.time_axis,
                )
                return save_for_backward(y, "convolution").reshape(*x.shape[:2], heads, -1)

            kernel_q, kernel_k, kernel_v = jnp.split(kernel_WGC, (k, 2 * k), axis=-1)
            o_BTHV, final_state = gated_delta_rule(
                convolve(q, kernel_q, key_heads),
                convolve(k_, kernel_k, key_heads),
                convolve(v, kernel_v, value_heads),
                g=g_BTH,
                beta=beta_BTH,
                segment_ids=segment_ids,
                delta_term=self.uses_delta_term(c),
                implementation=c.delta_rule_implementation,
                axis_name=context.time_axis,
            )
            o_BTC = gated_norm(
                o_BTHV.reshape(gate.shape), gate, norm_V, self.output_norm_eps, c.output_gate_type
            )
            return save_for_backward(o_BTC, "gated"), final_state

        spec = functools.partial(activation_spec, "batch")
        by_head = spec(context.time, "heads")
        in_specs = (
            by_head,
            by_head,
            by_head,
            activation_spec(None, "heads", None),
            by_head,
            by_head,
            by_head,
            activation_spec(None),
            spec(context.time),
        )
        out_specs = (by_head, spec("heads", None, None))
        return per_shard(run, context.mesh, in_specs, out_specs)(
            *inputs.qkv,
            self.conv_kernel[...].astype(inputs.qkv[0].dtype),
            inputs.g,
            inputs.beta,
            inputs.gate,
            self.norm[...],
            context.segment_ids,
        )

    # ---- the rest of the mixer's interface

    def each_token(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict, dict]:
        """See `Mixer.each_token`. A mixer that overrides `recurrence` processes one token at a
        time, because its operator may return only the last state. All others process the tokens at
        once.
        """
        if type(self).recurrence is not Recurrent.recurrence:
            return super().each_token(x_BTD, context, cache)
        return self(x_BTD, context, cache)

    @classmethod
    def convolves(cls, config: ModelConfig) -> bool:
        """Whether a model with these settings has a convolution before the recurrence."""
        return cls.convolved and config.short_convolution

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Returns the cache before the first token. Its size does not depend on `length`."""
        c = config
        window = c.linear_conv_kernel_dim - 1 if cls.convolves(c) else 0
        state = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        return {
            "conv": jnp.zeros(
                (batch, window, c.linear_num_key_heads, sum(cls.channels(c))), c.dtype
            ),
            "state": jnp.zeros(state, jnp.float32),
        }

    @classmethod
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs of the recurrence for one token. Each value head reads the state for
        the delta term (if there is one), writes to it, and reads the output from it. Each of these
        is K·V multiplications and additions.
        """
        products = 3 if cls.uses_delta_term(config) else 2
        return (
            2
            * products
            * config.linear_num_value_heads
            * config.linear_key_head_dim
            * config.linear_value_head_dim
        )

    @staticmethod
    def splits(config: ModelConfig) -> dict[str, int]:
        return {"linear_num_key_heads": config.linear_num_key_heads}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        return config.linear_conv_kernel_dim - 1 if cls.convolves(config) else 0


def write_strength(logit: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the write strength β between 0 and `model.beta_range`."""
    return config.beta_range * jax.nn.sigmoid(logit)


def _diagnostics(
    inputs: Inputs, has_decay: bool, state_BHKV: jax.Array, context: Context
) -> dict[str, Any]:
    """Computes the diagnostics of `Recurrent`; there is no `half_life` if the mixer has no
    decay.
    """

    def mean_over_tokens(x):
        x_BTH = x if x.ndim == 3 else jnp.mean(x, axis=-1)
        return token_mean(x_BTH, context.stats_mask)

    diagnostics = {
        "beta": mean_over_tokens(inputs.beta),
        "state_norm": jnp.mean(jnp.linalg.norm(state_BHKV, axis=(-2, -1)), axis=0),
    }
    if has_decay:
        mean_decay_H = jnp.minimum(mean_over_tokens(inputs.g), -1e-12)
        diagnostics["half_life"] = -math.log(2) / mean_decay_H
    return diagnostics
