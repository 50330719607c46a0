"""The settings `model.lora`: low-rank adapters beside the matrices of a model."""

import dataclasses

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """LoRA (2106.09685): a matrix W becomes W + (alpha / rank) · A · B, and training changes only A
    and B. Each part of a fused projection has its own A and B; so have each expert, and the gate
    and up matrices of an MLP.
    """

    # number of columns of A and of rows of B; 0: no adapters
    rank: int = 0
    # A · B is multiplied by alpha / rank
    alpha: float = 16.0
    # the matrices that get adapters, each entry as conditions such as "kind=matrix name=*/mixer/*"
    # (docs/adapting.md)
    targets: tuple[str, ...] = ("kind=matrix",)

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))
        check_bounds(self, "model.lora", {"0 or more": "rank", "a positive number": "alpha"})
        require(bool(self.targets), "model.lora.targets is empty: expected at least one entry")
        for name in ("alpha", "targets"):
            default = getattr(LoRAConfig, name)
            require(
                self.rank > 0 or getattr(self, name) == default,
                f"model.lora.{name} is set, but model.lora.rank = 0 makes no adapters: set the "
                "rank, or leave it out",
            )
