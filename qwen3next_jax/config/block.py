"""The rest of a block beside the released model's: norms and where they stand, dense MLPs,
positions. The group `model.block`.
"""

import dataclasses
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.registry import SETTINGS, check_name, resolve


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What a block is made of beside its mixer: names of the tables in `config/registry.py`. A
    model that differs here has no Hugging Face form.
    """

    # where the norms around a mixer and an MLP stand; docs/block.md lists the names of all five
    placement: str = "pre"
    # every norm but the recurrent layers' own
    norm: str = "rms"
    # of layers without experts
    mlp: str = "swiglu"
    # positions that are added to the embeddings
    positions: str = "none"
    # how rotary positions reach model.yarn_factor times as far
    rope_scaling: str = "yarn"

    def of(self, setting: str) -> Any:
        """What the setting's name stands for."""
        return resolve(
            SETTINGS[f"model.block.{setting}"], getattr(self, setting), f"model.block.{setting}"
        )

    def check(self, model: Any) -> None:
        """Raises UserError where `model`, the ModelConfig, does not read a setting, or has no
        such line.
        """
        for field in dataclasses.fields(self):
            setting = f"model.block.{field.name}"
            check_name(SETTINGS[setting], getattr(self, field.name), setting)
        require(
            self.mlp == "swiglu" or model.has_dense_mlps,
            f"model.block.mlp = {self.mlp!r}: every layer has experts, which are "
            "model.moe.experts: expected 'swiglu', or layers without experts "
            "(model.num_experts = 0, model.mlp_only_layers)",
        )
        require(
            self.rope_scaling == "yarn" or model.yarn_factor > 1 and model.rotary_dim > 0,
            f"model.block.rope_scaling = {self.rope_scaling!r} with model.yarn_factor = "
            f"{model.yarn_factor:g} and {model.rotary_dim} "
            "rotated dimensions: nothing is stretched: expected a factor above 1 and rotations, "
            "or 'yarn'",
        )
        require(
            model.yarn_factor == 1 or model.rotary_dim > 0,
            f"model.yarn_factor = {model.yarn_factor:g} with 0 rotated dimensions "
            "(model.head_dim × model.partial_rotary_factor): nothing is stretched: expected 1",
        )
        require(
            self.positions != "sinusoidal" or model.hidden_size % 2 == 0,
            f"model.block.positions = 'sinusoidal' with model.hidden_size = {model.hidden_size}: "
            "expected an even number",
        )
