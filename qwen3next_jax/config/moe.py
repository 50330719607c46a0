"""The settings `model.moe`: experts, routers and shared experts. The released model has the
defaults: SwiGLU experts, softmax scores and a gated shared expert.
"""

import dataclasses
from typing import Any, Literal

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.registry import EXPERTS, check_name, resolve


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The kind of the experts, and the features of DeepSeek-V3's router (2412.19437, section
    2.1.2), with one setting per feature. The settings that are also in DeepSeek-V3's `config.json`
    have the names of that file. Several shared experts are equivalent to one shared expert with the
    sum of their widths, so `model.shared_expert_intermediate_size` is this sum.
    """

    # what each routed expert computes: a name of EXPERTS in config/registry.py. The shared expert
    # computes the same, except that it is a SwiGLU with "clipped_swiglu"
    experts: str = "swiglu"
    # the function that turns a token's router logits into scores of the experts
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    # whether the router has a bias per expert (2408.15664): it chooses experts by score + bias and
    # weighs their outputs by the score alone. No gradient moves the bias: after each step it
    # changes to even out the load, as train.router_bias_update says
    router_bias: bool = False
    # number of groups of equal size into which the experts are divided
    n_group: int = 1
    # number of groups from which a token's experts are chosen. The router chooses the groups with
    # the largest sum of their two highest scores (of score + bias, with router_bias)
    topk_group: int = 1
    # factor by which the weights of the chosen experts are multiplied
    routed_scaling_factor: float = 1.0
    # whether a sigmoid gate scales the shared expert's output; off: it is added unscaled
    shared_expert_gate: bool = True

    def __post_init__(self):
        check_bounds(
            self,
            "model.moe",
            {"at least 1": "n_group topk_group", "a positive number": "routed_scaling_factor"},
        )

    def mixture_class(self) -> Any:
        """Returns the class of the mixture of experts that the setting `experts` names."""
        return resolve(EXPERTS, self.experts, "model.moe.experts")

    def check_fits_model(self, model: Any) -> None:
        """Checks these settings against `model`, the ModelConfig to which they belong.

        Raises:
          UserError: a setting has no effect in the model, or does not fit the number of experts.
        """
        check_name(EXPERTS, self.experts, "model.moe.experts")
        for field in dataclasses.fields(self):
            value, has_effect = getattr(self, field.name), model.has_experts
            if field.name == "shared_expert_gate":
                has_effect &= model.shared_expert_intermediate_size > 0
            require(
                has_effect or value == field.default,
                f"model.moe.{field.name} = {value!r}: no layer of this model reads it: expected "
                f"{field.default!r}",
            )
        experts, groups, chosen = model.num_experts, self.n_group, self.topk_group
        require(
            groups == 1 or experts % groups == 0 and experts // groups >= 2,
            f"model.moe.n_group = {groups}: expected a divisor of model.num_experts = {experts}, "
            "with two experts or more a group",
        )
        require(
            chosen <= groups,
            f"model.moe.topk_group = {chosen}: expected 1 … model.moe.n_group = {groups}",
        )
        require(
            groups == 1 or model.num_experts_per_tok <= chosen * experts // groups,
            f"model.num_experts_per_tok = {model.num_experts_per_tok}: expected at most the "
            f"{chosen * experts // groups} experts of "
            f"model.moe.topk_group = {chosen} groups",
        )
