"""Feed-forward layers: the dense SwiGLU MLP, and the mixture of experts with a gated shared expert.

Letters: B batch, T time, D model, R = B·T tokens, A choices per token, E experts, I expert width.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.expert_implementations import choose_expert_implementation, count_choices
from qwen3next_jax.model.layers import Context, call_saving_only_inputs, token_mean
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.router import (
    normalized_scores,
    rank_experts,
    required_bias_histogram,
    score_experts,
)
from qwen3next_jax.model.row_groups import merge_rows
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.decode_moe import is_decode_batch
from qwen3next_jax.ops.preferences import float32_product_precision, prefers_expert_tiles
from qwen3next_jax.ops.top_k import top_k
from qwen3next_jax.sharding.rules import (
    EXPERT,
    TENSOR,
    TOKENS,
    activation_spec,
    gather_in_shard,
    non_manual_axes,
    num_shards,
    per_shard,
    storage_spec,
)


class DenseMLP(nnx.Module):
    """The dense SwiGLU MLP: down(silu(gate x) · up x)."""

    def __init__(self, config: ModelConfig, make: Make):
        d, i = config.hidden_size, config.intermediate_size
        self.gate_up = make.matrix((d, 2, i), "embed -> * mlp")
        self.down = make.matrix((i, d), "mlp -> embed")

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        return _swiglu_mlp(x_BTD, self.gate_up[...], self.down[...]), {}


class SparseMoE(nnx.Module):
    """The mixture of experts: Σ_e p_e · SwiGLU_e(x) over a token's chosen experts e, plus σ(w·x) ·
    SwiGLU_shared(x). No token is ever dropped. `MoEConfig` has settings for routers of other
    models.

    A subclass with experts of another kind (`moe.experts`) makes the parameters of its experts
    (`make_experts`, `make_shared_expert`), chooses the function that computes the routed experts
    (`choose_expert_implementation`), and computes the shared expert (`shared_expert_output`).

    A token counts if `Context.stats_mask` marks it. The first entries of the auxiliary output are
    sums (not means) over the tokens that count, so that the sums of micro-batches and devices can
    be added:
      load [E]: how often each expert was chosen;
      probability [E]: each expert's router probability;
      z []: logsumexp(logits)²;
      tokens []: the number of tokens that count;
      required_bias [E, BINS]: the result of `router.required_bias_histogram`, if the router has a
        bias and `ForwardOptions.count_required_bias` is set.
    Two entries of the auxiliary output are not sums:
      router_logits [B, T, E]: the router's logits of all tokens;
      expert_ids [B, T, A] int16: the experts of all tokens, if `ForwardOptions.record_routing` is
        set.
    The diagnostics are means over the tokens that count:
      router_entropy []: the entropy of a token's probabilities, divided by ln E;
      router_z []: logsumexp(logits)².
    """

    expert_parameter_names: tuple[str, ...] = ("expert_gate_up", "expert_down")
    choose_expert_implementation = staticmethod(choose_expert_implementation)
    logit_bias: nnx.Param | None = None  # [E], added to the router's logits

    def __init__(self, config: ModelConfig, make: Make):
        self.config = c = config
        d, e = c.hidden_size, c.num_experts
        self.router = make.matrix((d, e), "embed -> router", kind="router", gathered_by="operator")
        if c.moe.router_bias:
            self.router_bias = make.parameter(jnp.zeros, (e,), ".", kind="balance")
        self.make_experts(make, d, e, c.moe_intermediate_size)
        if c.shared_expert_intermediate_size:
            self.make_shared_expert(make, d, c.shared_expert_intermediate_size)
            if c.moe.shared_expert_gate:
                self.shared_gate = make.matrix((d,), ". ->", kind="vector")

    def make_experts(self, make: Make, d: int, e: int, i: int) -> None:
        """Makes the parameters that `expert_parameter_names` names.

        Args:
          d: width of the model.
          e: number of experts.
          i: width of an expert.
        """
        self.expert_gate_up = make.matrix(
            (e, d, 2, i), "experts | embed -> * mlp", gathered_by="operator"
        )
        self.expert_down = make.matrix(
            (e, i, d), "experts | mlp_in -> embed", gathered_by="operator"
        )

    def make_shared_expert(self, make: Make, d: int, i: int) -> None:
        self.shared_gate_up = make.matrix((d, 2, i), "embed -> * mlp")
        self.shared_down = make.matrix((i, d), "mlp -> embed")

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        """Applies the layer: x [B, T, D] → (y [B, T, D], the auxiliary output)."""
        (y_BTD,), aux = self.apply_to_row_groups([x_BTD], [context])
        return y_BTD, aux

    def apply_to_row_groups(
        self, xs_BTD: Sequence[jax.Array], contexts: Sequence[Context]
    ) -> tuple[Sequence[jax.Array], dict]:
        """Applies the layer to one or more groups of rows (`model.row_groups`). The routed experts
        process all groups together.

        Args:
          xs_BTD: the rows of each group.
          contexts: the context of each group.

        Returns:
          The outputs [B, T, D], one for each group; the auxiliary output.
        """
        context = contexts[0]
        mesh = context.mesh
        dtype = xs_BTD[0].dtype
        parameters = _RouterAndExpertWeights(
            self.router, [getattr(self, n) for n in self.expert_parameter_names]
        )
        stored = parameters.map(lambda p: (p.declared, p.shape))
        specs = None
        if mesh is not None:
            specs = stored.map(lambda declared: storage_spec(*declared, mesh))
        weights = _RouterAndExpertWeights(
            self.router[...], [p[...].astype(dtype) for p in parameters.experts]
        )
        # in decoding, the weights may hold all stacked layers (see `layer_stack`)
        one_layer = len(parameters.experts[0].declared.shape)
        layer = context.layer_in_stack if weights.experts[0].ndim > one_layer else None
        biases = _RouterBiases(
            self.router_bias[...] if self.config.moe.router_bias else None,
            None if self.logit_bias is None else self.logit_bias[...],
        )
        tokens = activation_spec("batch", context.logical_time_axis)
        routed = per_shard(
            functools.partial(
                _routed_experts,
                self.config,
                mesh,
                self.choose_expert_implementation,
                stored,
                layer,
                context.options.count_required_bias,
                context.options.keep_expert_hidden,
            ),
            mesh,
            (tokens, specs, tokens, tokens, P()),
            (tokens, P(), tokens, tokens),
        )
        stats_masks = [c.stats_mask for c in contexts]
        replayed = [c.replayed_expert_ids for c in contexts]
        ys_BTD, statistics, logits, expert_ids = routed(
            xs_BTD, weights, stats_masks, replayed, biases
        )
        if self.config.shared_expert_intermediate_size:
            ys_BTD = [
                y_BTD + self._gated_shared_expert_output(x_BTD)
                for x_BTD, y_BTD in zip(xs_BTD, ys_BTD)
            ]
        aux = statistics | {"router_logits": merge_rows(logits, context)}
        if context.options.record_routing:
            aux["expert_ids"] = merge_rows(expert_ids, context)
        if context.options.collect_stats:
            aux["diagnostics"] = _router_diagnostics(
                self.config, aux["router_logits"], context.stats_mask
            )
        return ys_BTD, aux

    def shared_expert_output(self, x_BTD: jax.Array) -> jax.Array:
        """Computes the output of the shared expert [B, T, D], before its gate."""
        return _swiglu_mlp(x_BTD, self.shared_gate_up[...], self.shared_down[...])

    def _gated_shared_expert_output(self, x_BTD):
        """Computes the output of the shared expert [B, T, D]. The output is multiplied by the
        shared expert's gate, unless the setting `moe.shared_expert_gate` is off.
        """
        shared_BTD = self.shared_expert_output(x_BTD)
        if not self.config.moe.shared_expert_gate:
            return shared_BTD
        openness_BT1 = jax.nn.sigmoid(
            (x_BTD @ self.shared_gate[...].astype(x_BTD.dtype))[..., None].astype(jnp.float32)
        )
        return openness_BT1.astype(x_BTD.dtype) * shared_BTD


class _RouterAndExpertWeights(NamedTuple):
    """The weights of a mixture of experts. The method `map` replaces each weight, for example by
    its declaration.

    Attributes:
      router: the router's matrix [D, E].
      experts: the expert weights, in the order of `SparseMoE.expert_parameter_names`. The expert
        weights of SwiGLU are gate and up [E, D, 2, I] ([E, D, 2·I] after `_gather_weights` with
        `flat`) and down [E, I, D]. In decoding a dimension of stacked layers may come first.
    """

    router: Any
    experts: Sequence[Any]

    def map(self, f: Callable) -> "_RouterAndExpertWeights":
        return _RouterAndExpertWeights(f(self.router), [f(weight) for weight in self.experts])


class _RouterBiases(NamedTuple):
    """The biases of a router, each [E] or None.

    Attributes:
      choice: the bias that is added to a token's scores when its experts are chosen. The weights of
        the chosen experts are computed without the bias `choice` (`MoEConfig.router_bias`).
      logit: the bias that is added to the router's logits.
    """

    choice: jax.Array | None
    logit: jax.Array | None


def _routed_experts(
    config: ModelConfig,
    mesh: Mesh | None,
    choose_implementation: Callable,
    stored: _RouterAndExpertWeights,
    layer: jax.Array | int | None,
    counts_required_bias: bool,
    keep_hidden: bool,
    xs_BTD: Sequence[jax.Array],
    weights: _RouterAndExpertWeights,
    stats_masks: Sequence[jax.Array | None],
    replayed: Sequence[jax.Array | None],
    biases: _RouterBiases,
) -> tuple[list[jax.Array], dict[str, jax.Array], list[jax.Array], list[jax.Array]]:
    """Routes one device's tokens and computes their experts. It is called inside `shard_map`.

    Args:
      config: the model's settings.
      mesh: the devices; None: one device.
      choose_implementation: a function that chooses the function that computes the experts, such as
        `expert_implementations.choose_expert_implementation`.
      stored: (declaration, shape) of each weight in `weights`.
      layer: the index of the layer in the stack, if `weights` holds all stacked layers; else None.
      counts_required_bias: as `ForwardOptions.count_required_bias`.
      keep_hidden: as `ForwardOptions.keep_expert_hidden`.
      xs_BTD: the rows of each group.
      weights: this device's shards of the weights.
      stats_masks: for each group the mask of the tokens that count.
      replayed: for each group the experts to use in place of the router's
        (`Context.replayed_expert_ids`).
      biases: the router's biases.

    Returns:
      The outputs of the routed experts [B, T, D], one for each group; the router statistics, summed
      over all devices; for each group the router logits [B, T, E]; for each group the experts
      [B, T, A] int16 of its tokens.
    """
    dtype = xs_BTD[0].dtype
    split = num_shards(mesh, EXPERT) > 1
    in_tiles = split or prefers_expert_tiles()
    tokens = sum(x_BTD.shape[0] * x_BTD.shape[1] for x_BTD in xs_BTD)
    few_tokens = is_decode_batch(
        tokens, config.num_experts_per_tok, config.num_experts, stacked=layer is not None
    )
    if layer is not None and (in_tiles or not few_tokens):
        weights = weights._replace(experts=[weight[layer] for weight in weights.experts])
        layer = None
    weights = _gather_weights(weights, stored, mesh, flat=in_tiles)
    if split:
        # The barrier makes sure that the weights are gathered before the tokens are exchanged. If
        # both collectives ran at once, each would slow the other down, and so would their
        # gradients.
        first_BTD, *experts = jax.lax.optimization_barrier((xs_BTD[0], *weights.experts))
        xs_BTD = [first_BTD, *xs_BTD[1:]]
        weights = weights._replace(experts=experts)

    choices = []
    statistics = []
    logits = []
    expert_ids = []
    for x_BTD, mask_BT, replayed_BTA in zip(xs_BTD, stats_masks, replayed):
        x_RD = x_BTD.reshape(-1, config.hidden_size)
        logits_RE = _router_logits(x_RD, weights.router)
        if biases.logit is not None:
            logits_RE += biases.logit
        replayed_RA = None
        if replayed_BTA is not None:
            replayed_RA = replayed_BTA.reshape(-1, config.num_experts_per_tok)
        share_RE, weight_RA, expert_RA = choose_experts(
            config, logits_RE, biases.choice, replayed_RA
        )
        choices.append((x_RD, weight_RA.astype(dtype), expert_RA))
        counted_R = _mask_as_floats(mask_BT, len(x_RD))
        statistics.append(_router_statistics(logits_RE, share_RE, expert_RA, counted_R))
        if counts_required_bias and biases.choice is not None:
            statistics[-1]["required_bias"] = required_bias_histogram(
                score_experts(config.moe, logits_RE)[0],
                biases.choice,
                config.num_experts_per_tok,
                counted_R,
            )
        logits.append(logits_RE.reshape(*x_BTD.shape[:2], -1))
        expert_ids.append(expert_RA.astype(jnp.int16).reshape(*x_BTD.shape[:2], -1))

    run = choose_implementation(
        mesh,
        dtype,
        in_tiles=in_tiles,
        few_tokens=few_tokens,
        layer=layer,
        keep_hidden=keep_hidden,
    )
    x_RD, weight_RA, expert_RA = map(jnp.concatenate, zip(*choices))
    y_RD = run(x_RD, weight_RA, expert_RA, *weights.experts)
    statistics = jax.tree.map(lambda first, *more: sum(more, first), *statistics)
    if mesh is not None:
        y_RD = jax.lax.psum(y_RD, TENSOR)  # each shard holds a part of every expert's width
        statistics = jax.lax.psum(statistics, non_manual_axes(mesh, TOKENS))
    ys_RD = jnp.split(y_RD, len(xs_BTD))
    return (
        [y_RD.reshape(x_BTD.shape) for x_BTD, y_RD in zip(xs_BTD, ys_RD)],
        statistics,
        logits,
        expert_ids,
    )


def _gather_weights(
    weights: _RouterAndExpertWeights,
    declarations_and_shapes: _RouterAndExpertWeights,
    mesh: Mesh | None,
    flat: bool,
) -> _RouterAndExpertWeights:
    """Gathers this device's shards of the weights over their storage axes (`sharding.rules`). With
    `flat`, gate and up are reshaped to [E, D, 2·I] before they are gathered. The tiled computation
    reads this layout. If the reshape came after the gather, a TPU would copy the gathered weights.
    """
    if flat:
        first, *others = weights.experts
        weights = weights._replace(experts=[first.reshape(*first.shape[:2], -1), *others])
    if mesh is None:
        return weights

    def gathered(weight, declaration_and_shape):
        declared, shape = declaration_and_shape
        return gather_in_shard(weight, declared, shape, mesh)

    return _RouterAndExpertWeights(
        gathered(weights.router, declarations_and_shapes.router),
        [gathered(*pair) for pair in zip(weights.experts, declarations_and_shapes.experts)],
    )


def _router_logits(x_RD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """Computes the router's logits [R, E] in float32. In bfloat16, rounding errors would decide
    between experts with nearly equal logits.
    """
    precision = float32_product_precision(x_RD.dtype)

    def product(x_RD, w_DE):
        return jnp.dot(x_RD.astype(jnp.float32), w_DE.astype(jnp.float32), precision=precision)

    return save_for_backward(call_saving_only_inputs(product, x_RD, router_DE))


def choose_experts(
    config: ModelConfig,
    logits_RE: jax.Array,
    bias_E: jax.Array | None = None,
    replayed_RA: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses each token's experts.

    Args:
      config: the model's settings.
      logits_RE: the router's logits.
      bias_E: a bias that takes part in the choice of the experts, but not in their weights
        (`MoEConfig.router_bias`); or None.
      replayed_RA: the experts that the tokens use in place of the experts with the largest scores
        (router replay, 2510.11370); a token with -1 uses the experts with the largest scores. The
        weights are always computed from `logits_RE`, so gradients reach the scores of the replayed
        experts. None: no token has replayed experts.

    Returns:
      Each expert's share of a token's scores, [R, E]; the weights [R, A] of the chosen experts; the
      numbers [R, A] of the chosen experts.
    """
    score_RE, share_RE = score_experts(config.moe, logits_RE)
    rank_RE = rank_experts(config.moe, score_RE, bias_E)
    weight_RA, expert_RA = top_k(rank_RE, config.num_experts_per_tok, name="router")
    if replayed_RA is not None:
        expert_RA = jnp.where(replayed_RA < 0, expert_RA, replayed_RA.astype(expert_RA.dtype))
    if replayed_RA is not None or rank_RE is not score_RE:
        weight_RA = jnp.take_along_axis(score_RE, expert_RA, axis=-1)
    if config.norm_topk_prob:
        weight_RA = normalized_scores(weight_RA)
    if config.moe.routed_scaling_factor != 1:
        weight_RA = weight_RA * config.moe.routed_scaling_factor
    return share_RE, weight_RA, expert_RA


def _swiglu_mlp(x: jax.Array, gate_up_D2I: jax.Array, down_ID: jax.Array) -> jax.Array:
    gate_up = save_for_backward(
        jnp.einsum("...d,dci->...ci", x, gate_up_D2I.astype(x.dtype)), "gate_up"
    )
    return _swiglu_activation(gate_up) @ down_ID.astype(x.dtype)


def _silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def _swiglu_activation(gate_up_2I: jax.Array) -> jax.Array:
    """Returns silu(gate) · up, [..., I], of the two halves gate and up of the input [..., 2, I].
    Only the input is saved for the backward pass. The gradients of the two halves are written side
    by side; autodiff would pad each gradient to the shape of both and add them up.
    """
    return _silu_times(gate_up_2I[..., 0, :], gate_up_2I[..., 1, :])


def _swiglu_activation_backward(gate_up_2I, dy_I):
    _, pullback = jax.vjp(_silu_times, gate_up_2I[..., 0, :], gate_up_2I[..., 1, :])
    return (jnp.stack(pullback(dy_I), axis=-2),)


_swiglu_activation.defvjp(
    lambda gate_up_2I: (_swiglu_activation(gate_up_2I), gate_up_2I), _swiglu_activation_backward
)


def _router_diagnostics(config: ModelConfig, logits_BTE, counted_BT) -> dict[str, jax.Array]:
    """Returns the diagnostics of `SparseMoE`. `counted_BT`: the mask of the tokens that count;
    None: all count.
    """
    entropy_BT = jnp.sum(jax.scipy.special.entr(score_experts(config.moe, logits_BTE)[1]), axis=-1)
    z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    return {
        "router_entropy": token_mean(entropy_BT, counted_BT)
        / math.log(max(logits_BTE.shape[-1], 2)),
        "router_z": token_mean(z_BT, counted_BT),
    }


def _mask_as_floats(mask_BT: jax.Array | None, tokens: int) -> jax.Array:
    """Returns the mask [B, T] as float32 [R]. Without a mask, it returns `tokens` ones."""
    if mask_BT is None:
        return jnp.ones(tokens, jnp.float32)
    return mask_BT.reshape(-1).astype(jnp.float32)


def _router_statistics(logits_RE, probability_RE, expert_RA, counted_R) -> dict[str, jax.Array]:
    """Returns the sums load, probability, z and tokens that `SparseMoE` describes. `counted_R`: 1
    for a token that counts, else 0.
    """
    a = expert_RA.shape[1]
    z_R = jnp.square(jax.nn.logsumexp(logits_RE, axis=-1))
    return {
        "load": count_choices(expert_RA.reshape(-1), logits_RE.shape[-1], jnp.repeat(counted_R, a)),
        "probability": counted_R @ probability_RE,
        "z": counted_R @ z_R,
        "tokens": jnp.sum(counted_R),
    }
