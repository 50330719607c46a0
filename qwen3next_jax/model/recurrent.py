"""The base class of recurrent mixers. `Recurrent` implements the short convolution, the recurrence,
the norm and gate of the output, and the cache. Subclasses add the input projections.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key head,
K/V widths of a key and of a value, C channels of one key head that pass through the convolution
(2K + RV in most mixers), W convolution width. In the concatenated layout, all heads lie side by
side in the last axis: [B, T, GK] in place of [B, T, G, K].
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, call_saving_only_inputs, rms_norm_plain, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.parameters import Make, ParameterPart
from qwen3next_jax.ops import causal_conv1d, gated_delta_rule
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.gated_norm import gated_norm
from qwen3next_jax.ops.preferences import prefers_concatenated_heads
from qwen3next_jax.sharding.rules import activation_spec, constrain, per_shard

# With a cache, up to this many tokens are computed one by one. The chunked algorithm would pad them
# to a whole chunk; for one token that is four times the work.
FEW_TOKENS = 8


class ProjectedInputs(NamedTuple):
    """The results of a mixer's input projections, before convolution and recurrence.

    qkv: [B, T, G, C], query, key and values of each key head (`Recurrent.qkv_channel_counts`). In
      the concatenated layout, qkv is a list [q [B, T, GK], k [B, T, GK], v [B, T, HV]].
    output_gate: the gate of the output before its activation, [B, T, G, RV] ([B, T, HV] in the
      concatenated layout); None: there is no gate.
    log_decay: g, the logarithm of the decay, ≤ 0, float32 [B, T, H], or [B, T, H, K] if every key
      channel has its own decay. None: no decay.
    beta: the write strength β, float32 [B, T, H]. `beta` has one more axis if a mixer overrides
      `recurrence` and reads several numbers for each head. None: 1 everywhere.
    """

    qkv: jax.Array | list[jax.Array]
    output_gate: jax.Array | None = None
    log_decay: jax.Array | None = None
    beta: jax.Array | None = None


class RecurrenceInputs(NamedTuple):
    """The inputs of `Recurrent.recurrence`, computed by projections and convolution. On a mesh the
    arrays hold the heads of one device.

    q, k: queries and keys, [B, T, G, K].
    v: values, [B, T, H, V].
    log_decay, beta: as in `ProjectedInputs`, but never None.
    recurrence_parameters: the arrays that the method `recurrence_parameters` of the mixer returns.
    segment_ids, axis_name: the arguments of `ops.gated_delta_rule` with these names.
    return_all_states: as in `ForwardOptions`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    recurrence_parameters: tuple[jax.Array, ...]
    segment_ids: jax.Array | None
    axis_name: str | None
    return_all_states: bool


class Recurrent(Mixer):
    """A recurrent mixer: input projections → causal convolution + SiLU → gated delta rule → norm of
    each head, SiLU gate → output projection.

    A subclass makes its input projections in `__init__`, where it also calls `make_convolution` and
    `make_output`, and implements `project_inputs`. It may override

      qkv_channel_counts: the numbers of channels of q, k and v, which pass through the convolution;
      uses_delta_term: whether a write replaces the value that the state holds for the key;
      recurrence: the operator, by default `ops.gated_delta_rule`;
      recurrence_parameters: the parameters that `recurrence` reads;
      norm_and_gate: the norm and the gate of the output;
      output_norm_eps: the epsilon of the norm of the output;
      has_convolution_and_silu: whether q, k and v pass through a convolution and a SiLU;
      normalize_qk: whether q and k are scaled to length 1;
      gate_activation: the activation of the output gate.

    The settings `linear_*` give the sizes. The mesh axis `tensor` splits key heads, each with its
    value heads.

    Diagnostics, one number for each value head [H]:
      half_life: -ln 2 / mean log decay, the number of tokens in which the mean decay halves the
        state;
      beta: the mean write strength;
      state_norm: ‖S‖_F of the state S after the last token, averaged over rows.
    The means of log decay and write strength are taken over the tokens that count
    (`Context.stats_mask`).
    """

    switches_read = ("short_convolution", "linear_conv_kernel_dim", "delta_rule")
    has_convolution_and_silu: ClassVar[bool] = True
    normalize_qk: ClassVar[bool] = True
    gate_activation = staticmethod(jax.nn.silu)

    # ---- what a subclass implements or overrides

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        """Projects the mixer's input x [B, T, D] to the inputs of convolution and recurrence."""
        raise NotImplementedError

    @classmethod
    def qkv_channel_counts(cls, config: ModelConfig) -> tuple[int, int, int]:
        """Returns the numbers of channels of a key head's query, of its key, and of the values of
        all its value heads together.
        """
        r = config.linear_num_value_heads // config.linear_num_key_heads
        key = config.linear_key_head_dim
        return key, key, r * config.linear_value_head_dim

    @classmethod
    def uses_delta_term(cls, config: ModelConfig) -> bool:
        """Whether a write replaces the value that the state holds for the key, as in the delta
        rule. If a write replaces nothing, it is added to the state.
        """
        return True

    def recurrence(
        self, heads: RecurrenceInputs, state: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the recurrence over the tokens of each row.

        Args:
          heads: queries, keys, values, decay, write strength and the other inputs of the
            recurrence.
            The gate of the output is not among the inputs: `norm_and_gate` applies the gate.
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
            g=heads.log_decay,
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

    def recurrence_parameters(self) -> tuple[jax.Array, ...]:
        """Returns the parameters that `recurrence` reads. The first axis of each parameter is that
        of the value heads or of the key heads, [H or G, …].
        """
        return ()

    @property
    def output_norm_eps(self) -> float:
        """The epsilon that the norm of the output adds to the mean square."""
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
        gate_BTHV = self.gate_activation(gate_BTGRV.reshape(o_BTHV.shape).astype(jnp.float32))
        return (o_BTHV.astype(jnp.float32) * gate_BTHV).astype(dtype)

    # ---- parameters

    @classmethod
    def qkv_parts(cls, config: ModelConfig) -> tuple[ParameterPart, ParameterPart, ParameterPart]:
        """Returns the parts q, k and v of a projection; for each key head, the columns of q, k and
        v lie side by side.
        """
        q, k, v = cls.qkv_channel_counts(config)
        return (
            ParameterPart("q", q),
            ParameterPart("k", k, k // config.linear_key_head_dim),
            ParameterPart("v", v, v // config.linear_value_head_dim),
        )

    def make_projection(self, make: Make, gate: bool = True) -> None:
        """Makes one matrix [q | k | v | gate] for each key head, so that a value head stays on the
        device of its key head when key heads are split over devices. `gate`: whether the matrix has
        columns for the gate.
        """
        c = make.config
        r = c.linear_num_value_heads // c.linear_num_key_heads
        parts = list(self.qkv_parts(c))
        if gate:
            parts.append(ParameterPart("gate", r * c.linear_value_head_dim, r))
        shape = (c.hidden_size, c.linear_num_key_heads, sum(part.width for part in parts))
        self.in_proj = make.matrix(shape, "embed -> key_heads .", parts=parts)

    def project_qkv_and_gate(
        self, x_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the fields `qkv` and `output_gate` of `ProjectedInputs`, computed with the matrix
        that `make_projection` made.
        """
        x_BTGC = jnp.einsum("btd,dgc->btgc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        x_BTGC = constrain(x_BTGC, context.mesh, "batch", context.logical_time_axis, "heads", None)
        return tuple(jnp.split(x_BTGC, (sum(self.qkv_channel_counts(self.config)),), axis=-1))

    def make_convolution(self, make: Make) -> None:
        """Makes the kernel of the short convolution, unless `model.short_convolution` is off."""
        c = make.config
        if c.short_convolution:
            self.conv_kernel = make.matrix(
                (c.linear_conv_kernel_dim, c.linear_num_key_heads, sum(self.qkv_channel_counts(c))),
                ". key_heads channels",
                kind="convolution",
                parts=self.qkv_parts(c),
            )

    def make_output(self, make: Make, per_head: bool = False) -> None:
        """Makes the weight of the output norm and the output projection. With `per_head`, each head
        has a norm weight of its own; otherwise all heads share one weight.
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
        inputs = save_for_backward(self.project_inputs(x_BTD, context))
        has_decay = inputs.log_decay is not None
        inputs = self._fill_missing_decay_and_beta(inputs, x_BTD.shape[:2])
        if isinstance(inputs.qkv, list):
            o_BTC, state = self.fused_recurrence(inputs, context)
            y_BTD = o_BTC @ self.out_proj[...].astype(x_BTD.dtype).reshape(o_BTC.shape[2], -1)
            states = {"state": state}
            conv_state = None
        else:
            o_BTHV, states, conv_state = self._convolution_and_recurrence(inputs, context, cache)
            y_BTD = self._norm_gate_and_project(o_BTHV, inputs.output_gate, context)
        diagnostics = {}
        if context.options.collect_stats:
            diagnostics = _diagnostics(inputs, has_decay, states["state"], context)
        return y_BTD, diagnostics, None if cache is None else {"conv": conv_state} | states

    def _fill_missing_decay_and_beta(
        self, inputs: ProjectedInputs, batch_time: tuple[int, int]
    ) -> ProjectedInputs:
        """Returns `inputs` with a missing log decay replaced by 0, and a missing β by 1."""
        shape = (*batch_time, self.config.linear_num_value_heads)
        if inputs.log_decay is None:
            inputs = inputs._replace(log_decay=jnp.zeros(shape, jnp.float32))
        if inputs.beta is None:
            inputs = inputs._replace(beta=jnp.ones(shape, jnp.float32))
        return inputs

    def _convolution_and_recurrence(
        self, inputs: ProjectedInputs, context: Context, cache: dict | None
    ):
        """Runs the convolution and the recurrence. Each device computes its own key heads with
        their value heads and, if rows are split, its own tokens.

        Returns:
          (o [B, T, H, V], states of the recurrence, state of the convolution).
        """
        conv_state = states = None
        if cache is not None:
            conv_state = cache["conv"]
            states = {name: x for name, x in cache.items() if name != "conv"}
        if self.uses_convolution(self.config):
            kernel_WGC = self.conv_kernel[...].astype(inputs.qkv.dtype)
        else:
            kernel_WGC = jnp.zeros((1, *inputs.qkv.shape[2:]))

        def run(qkv_BTGC, kernel_WGC, g_BTH, beta_BTH, weights, segment_ids, conv_state, states):
            qkv_BTGC, conv_state = self._convolve(
                qkv_BTGC, kernel_WGC, segment_ids, conv_state, context
            )
            q_BTGK, k_BTGK, v_BTHV = self._split_qkv(qkv_BTGC, heads=g_BTH.shape[2])
            heads = RecurrenceInputs(
                q_BTGK,
                k_BTGK,
                v_BTHV,
                g_BTH,
                beta_BTH,
                weights,
                segment_ids,
                context.mesh_time_axis,
                context.options.return_all_states,
            )
            o_BTHV, states = self.recurrence(heads, states)
            return o_BTHV, states, conv_state

        spec = functools.partial(activation_spec, "batch")
        by_key_head = spec(context.logical_time_axis, "heads", None)
        by_value_head = spec(context.logical_time_axis, "heads")
        in_specs = (
            by_key_head,
            activation_spec(None, "heads", None),
            by_value_head,
            by_value_head,
            activation_spec("heads"),
            spec(context.logical_time_axis),
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
            inputs.log_decay,
            inputs.beta,
            self.recurrence_parameters(),
            context.segment_ids,
            conv_state,
            states,
        )

    def _convolve(self, qkv_BTGC, kernel_WGC, segment_ids, conv_state, context: Context):
        """Applies the convolution and SiLU to one device's heads.

        Returns:
          (q, k and v side by side [B, T, G, C]; the last W - 1 inputs of the convolution, which are
          its state). With `context.options.return_all_states`, the state has an axis T after B,
          with the state after each token.
        """
        before_and_here_BSGC = None
        if context.options.return_all_states:
            before_and_here_BSGC = jnp.concatenate((conv_state, qkv_BTGC), axis=1)
        if self.uses_convolution(self.config):

            def convolve(qkv, kernel, state):
                return causal_conv1d(
                    qkv,
                    kernel,
                    activation="silu",
                    initial_state=state,
                    segment_ids=segment_ids,
                    axis_name=context.mesh_time_axis,
                )

            out_BTGC, state = call_saving_only_inputs(convolve, qkv_BTGC, kernel_WGC, conv_state)
            out_BTGC = save_for_backward(out_BTGC, "convolution")
        else:
            out_BTGC = jax.nn.silu(qkv_BTGC) if self.has_convolution_and_silu else qkv_BTGC
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
        q, k, _ = self.qkv_channel_counts(self.config)
        q_BTGK, k_BTGK, v_BTGRV = jnp.split(qkv_BTGC, (q, q + k), axis=-1)
        return q_BTGK, k_BTGK, v_BTGRV.reshape(*v_BTGRV.shape[:2], heads, -1)

    def _norm_gate_and_project(
        self, o_BTHV: jax.Array, gate_BTGRV: jax.Array | None, context: Context
    ):
        """Applies the norm, the gate and the projection back to the model's width: [B, T, D]."""

        def norm_gate_and_project(o_BTHV, norm, gate_BTGRV, out_proj_HVD):
            dtype = o_BTHV.dtype
            o_BTHV = self.norm_and_gate(o_BTHV, norm, gate_BTGRV)
            o_BTHV = constrain(
                o_BTHV, context.mesh, "batch", context.logical_time_axis, "heads", None
            )
            return jnp.einsum("bthv,hvd->btd", o_BTHV, out_proj_HVD.astype(dtype))

        return call_saving_only_inputs(
            norm_gate_and_project, o_BTHV, self.norm[...], gate_BTGRV, self.out_proj[...]
        )

    # ---- the same with the heads side by side in the last axis

    def concatenates_heads(self) -> bool:
        """Whether arrays between the layer's kernels have all heads side by side in their last
        axis. The mixer uses this layout on a GPU, and on a TPU if the width of each head is a
        multiple of 128 lanes. A layer without a short convolution or without an output gate keeps
        an axis for the heads.
        """
        c = self.config
        return (
            c.short_convolution
            and c.linear_output_gate
            and prefers_concatenated_heads(c.linear_key_head_dim, c.linear_value_head_dim)
        )

    def fused_recurrence(
        self, inputs: ProjectedInputs, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Applies convolution, delta rule, norm and gate in the concatenated layout.

        Args:
          inputs: inputs in the concatenated layout; `log_decay` and `beta` are not None.
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
                    axis_name=context.mesh_time_axis,
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
                axis_name=context.mesh_time_axis,
            )
            o_BTC = gated_norm(
                o_BTHV.reshape(gate.shape), gate, norm_V, self.output_norm_eps, c.output_gate_type
            )
            return save_for_backward(o_BTC, "gated"), final_state

        spec = functools.partial(activation_spec, "batch")
        by_head = spec(context.logical_time_axis, "heads")
        in_specs = (
            by_head,
            by_head,
            by_head,
            activation_spec(None, "heads", None),
            by_head,
            by_head,
            by_head,
            activation_spec(None),
            spec(context.logical_time_axis),
        )
        out_specs = (by_head, spec("heads", None, None))
        return per_shard(run, context.mesh, in_specs, out_specs)(
            *inputs.qkv,
            self.conv_kernel[...].astype(inputs.qkv[0].dtype),
            inputs.log_decay,
            inputs.beta,
            inputs.output_gate,
            self.norm[...],
            context.segment_ids,
        )

    # ---- the rest of the mixer's interface

    def call_returning_all_states(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict, dict]:
        """See `Mixer.call_returning_all_states`. A mixer that overrides `recurrence` processes one
        token at a time, because its operator may return only the last state. Mixers that do not
        override `recurrence` process all tokens at once.
        """
        if type(self).recurrence is not Recurrent.recurrence:
            return super().call_returning_all_states(x_BTD, context, cache)
        return self(x_BTD, context, cache)

    @classmethod
    def uses_convolution(cls, config: ModelConfig) -> bool:
        """Whether a model with these settings has a convolution before the recurrence."""
        return cls.has_convolution_and_silu and config.short_convolution

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Returns the cache before the first token. The size of the cache does not depend on
        `length`.
        """
        c = config
        window = c.linear_conv_kernel_dim - 1 if cls.uses_convolution(c) else 0
        state = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        return {
            "conv": jnp.zeros(
                (batch, window, c.linear_num_key_heads, sum(cls.qkv_channel_counts(c))), c.dtype
            ),
            "state": jnp.zeros(state, jnp.float32),
        }

    @classmethod
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs per token of the recurrence. Each value head reads the state for the
        delta term (if there is one), writes to the state, and reads the output from the state. Each
        read or write of the state is K·V multiplications and additions.
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
    def sizes_split_by_tensor(config: ModelConfig) -> dict[str, int]:
        return {"linear_num_key_heads": config.linear_num_key_heads}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        return config.linear_conv_kernel_dim - 1 if cls.uses_convolution(config) else 0


def write_strength(logit: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the write strength β, between 0 and `model.beta_range`, from its logit."""
    return config.beta_range * jax.nn.sigmoid(logit)


def _diagnostics(
    inputs: ProjectedInputs, has_decay: bool, state_BHKV: jax.Array, context: Context
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
        mean_decay_H = jnp.minimum(mean_over_tokens(inputs.log_decay), -1e-12)
        diagnostics["half_life"] = -math.log(2) / mean_decay_H
    return diagnostics
