"""What mixtures of experts have beside the released model's (SwiGLU experts, softmax scores, a
gated shared expert): the group `model.moe`.
"""

import dataclasses
from typing import Any, Literal

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.registry import EXPERTS, check_name, resolve


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """DeepSeek-V3's router (2412.19437, section 2.1.2), setting by setting, under the names of
    its `config.json` where it has them. Several shared experts are one that is as wide as all of
    them: `model.shared_expert_intermediate_size`.
    """

    # what an expert computes, and the shared one
    experts: str = "swiglu"
    # what makes a token's scores of its router logits
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    # Experts are chosen by score + bias and weighed by the score. No gradient moves the bias: after
    # a step, `train.router_bias_rate` is added to that of every expert that got less than its
    # share, and taken from the others' (2408.15664).
    router_bias: bool = False
    # Experts lie in groups. A token's experts are chosen from the `topk_group` groups whose two
    # best scores have the largest sums.
    n_group: int = 1
    topk_group: int = 1
    # multiplies the weights of the chosen experts
    routed_scaling_factor: float = 1.0
    # off: the shared expert's output is added as it is
    shared_expert_gate: bool = True

    def __post_init__(self):
        check_bounds(
            self,
            "model.moe",
            {"at least 1": "n_group topk_group", "a positive number": "routed_scaling_factor"},
        )

    def mixture(self) -> Any:
        """The class that `experts` names."""
        return resolve(EXPERTS, self.experts, "model.moe.experts")

    def check(self, model: Any) -> None:
        """Raises UserError where `model`, the settings that this is a group of, has no use for
        them, or sizes that do not fit.
        """
        check_name(EXPERTS, self.experts, "model.moe.experts")
        for field in dataclasses.fields(self):
            value, used = getattr(self, field.name), model.has_experts
            used &= field.name != "shared_expert_gate" or model.shared_expert_intermediate_size > 0
            require(
                used or value == field.default,
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
