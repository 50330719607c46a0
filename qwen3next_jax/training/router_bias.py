"""The update rules of router biases, which balance the load of the experts without a balance loss
(`train.router_bias_update`). The rules for router biases depend on which experts the batch's tokens
chose, and on no gradient.

    sign      Each bias moves by a fixed step towards an even load (2408.15664).
    quantile  Each bias becomes the one with which its expert would have got its share of the
              batch's tokens (Kimi K3's report, section 2.3.3, equations 13 and 14).

Letters: L layers with experts (the layer of the multi-token prediction module is last), E experts,
M bins of a histogram.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import Config, ModelConfig
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.router import required_bias_range
from qwen3next_jax.training.parameter_groups import ParameterGroups
from qwen3next_jax.training.update_rules import StepInput, UpdateRule


@dataclasses.dataclass(frozen=True)
class BalanceBySign(UpdateRule):
    """The update rule that applies `balance_by_sign` with the rate `train.router_bias_rate`."""

    model_config: ModelConfig

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        load_LE, rate = metrics["expert_load"], step.stage.train.router_bias_rate
        params = balance_by_sign(self.model_config, after["params"], load_LE, rate)
        return after | {"params": params}, metrics


@dataclasses.dataclass(frozen=True)
class BalanceByQuantile(UpdateRule):
    """The update rule that applies `balance_by_quantile`. The rule removes the counts
    "required_bias" from the metrics, because they are a large array.
    """

    model_config: ModelConfig

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        metrics = dict(metrics)
        params = balance_by_quantile(
            self.model_config, after["params"], metrics.pop("required_bias")
        )
        return after | {"params": params}, metrics


def make_rule(config: Config, groups: ParameterGroups) -> UpdateRule | None:
    """Returns the rule that `train.router_bias_update` names; None if no router has a bias."""
    if not config.model.moe.router_bias:
        return None
    if config.train.router_bias_update == "quantile":
        return BalanceByQuantile(config.model)
    return BalanceBySign(config.model)


def balance_by_sign(model: ModelConfig, params: dict, load_LE: jax.Array, rate: float) -> dict:
    """Returns the parameters with `rate` added to the bias of each expert whose load in the batch
    is below the mean load, and subtracted from the bias of each expert whose load is above it.

    Args:
      model: the model's settings; its routers have a bias.
      params: the model's parameters.
      load_LE: `loss.expert_load` of the whole batch.
      rate: the size of the change (`train.router_bias_rate`).
    """
    # Differences below 5e-7 count as 0. Loads are sums of float32 quotients, so experts that were
    # chosen equally often may have loads that differ by rounding.
    direction_LE = jnp.sign(jnp.round((jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE) * 1e6))
    return _map_router_biases(
        model, params, lambda bias_LE, rows: bias_LE + rate * direction_LE[rows]
    )


def balance_by_quantile(model: ModelConfig, params: dict, counts_LEM: jax.Array) -> dict:
    """Returns the parameters with the router biases that `quantile_biases` computes.

    Args:
      model: the model's settings; its routers have a bias.
      params: the model's parameters.
      counts_LEM: the counts of `router.required_bias_histogram` over the whole batch.
    """
    share = model.num_experts_per_tok / model.num_experts
    return _map_router_biases(
        model, params, lambda bias_LE, rows: quantile_biases(counts_LEM[rows], bias_LE, share)
    )


def quantile_biases(counts_LEM: jax.Array, bias_LE: jax.Array, share: float) -> jax.Array:
    """Returns the biases [L, E] with which each expert would have been chosen by the share `share`
    of the tokens. The function subtracts the mean over the experts from the biases, which changes
    no token's choice.

    The function assumes that the tokens are evenly spread within each bin of the histogram, so the
    error of a bias is less than the width of a bin. Layers without tokens keep their biases.

    Args:
      counts_LEM: the counts of `router.required_bias_histogram`.
      bias_LE: the biases with which the tokens were counted.
      share: the share of the tokens that each expert is to get, 0 … 1.
    """
    low_L1, high_L1 = required_bias_range(bias_LE)
    width_L1 = (high_L1 - low_L1) / counts_LEM.shape[-1]
    up_to_LEM = jnp.cumsum(counts_LEM, axis=-1)
    tokens_LE = up_to_LEM[..., -1]
    wanted_LE = share * tokens_LE
    bin_LE1 = jnp.argmax(up_to_LEM >= wanted_LE[..., None], axis=-1, keepdims=True)
    count_LE, total_LE = (
        jnp.take_along_axis(x, bin_LE1, axis=-1)[..., 0] for x in (counts_LEM, up_to_LEM)
    )
    within_LE = (wanted_LE - (total_LE - count_LE)) / jnp.maximum(count_LE, 1)
    new_LE = low_L1 + width_L1 * (bin_LE1[..., 0] + within_LE)
    new_LE -= jnp.mean(new_LE, axis=-1, keepdims=True)
    return jnp.where(tokens_LE > 0, new_LE, bias_LE)


def _map_router_biases(
    model: ModelConfig, params: dict, update: Callable[[jax.Array, jax.Array], jax.Array]
) -> dict:
    """Returns the parameters with the router biases that `update` computes.

    Args:
      update: a function (biases of some layers [n, E], numbers of these layers among the layers
        with experts [n]) → new biases [n, E].
    """
    sparse = [layer for layer, (_, experts) in enumerate(model.mixers_and_sparsity) if experts]

    def new(path, leaf):
        name = path_string(path)
        group, block, *_ = name.split("/") + [""]
        if parameter_declarations(model)[name].kind != "balance":
            return leaf
        layers = (model.num_hidden_layers,) if group == "mtp" else model.layer_stacks[int(block)]
        rows = jnp.array([sparse.index(layer) for layer in layers])
        return update(leaf.reshape(len(layers), -1), rows).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(new, params)
