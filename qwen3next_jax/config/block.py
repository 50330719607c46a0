"""The settings `model.block`: norms and their placement, dense MLPs, and positions. The released
model has the defaults.
"""

import dataclasses
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import registry
from qwen3next_jax.config.registry import SETTINGS, check_name


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The parts of a block other than its mixer; docs/block.md lists them. The value of each
    setting is a name in a table of config/registry.py. A model with values other than the defaults
    cannot be exported to a Hugging Face format, except that a model with the placement
    "gated_residual" can be exported in the format `qwen4_exp`.
    """

    # where a block applies its norms: a name of PLACEMENTS in config/registry.py
    placement: str = "pre"
    # the kind of the norms at mixers and MLPs and after the last layer: a name of NORMS
    norm: str = "rms"
    # the MLP of layers without experts: a name of MLPS
    mlp: str = "swiglu"
    # the positions that are added to the embeddings: a name of POSITIONS
    positions: str = "none"
    # how model.yarn_factor stretches rotary positions: a name of ROPE_SCALINGS
    rope_scaling: str = "yarn"

    def import_part(self, setting: str) -> Any:
        """Returns the class or function that the setting `model.block.<setting>` names, after
        importing its module.
        """
        return registry.resolve(
            SETTINGS[f"model.block.{setting}"], getattr(self, setting), f"model.block.{setting}"
        )

    def check_fits_model(self, model: Any) -> None:
        """Checks these settings against `model`, the ModelConfig to which they belong.

        Raises:
          UserError: a setting names no part, does not fit the model, or has no effect in the model.
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
            self.placement == "pre" or not model.depth_scaled_init,
            f"model.depth_scaled_init with model.block.placement = {self.placement!r}: it scales "
            "what mixers and MLPs add to the residual stream, which a norm or a gate scales again "
            "there: expected placement 'pre'",
        )
        require(
            self.rope_scaling == "yarn" or model.yarn_factor > 1 and model.rotary_dim > 0,
            f"model.block.rope_scaling = {self.rope_scaling!r} with model.yarn_factor = "
            f"{model.yarn_factor:g} and {model.rotary_dim} "
            "rotated dimensions: it has no effect: expected a factor above 1 and rotations, "
            "or 'yarn'",
        )
        require(
            model.yarn_factor == 1 or model.rotary_dim > 0,
            f"model.yarn_factor = {model.yarn_factor:g} with 0 rotated dimensions "
            "(model.head_dim × model.partial_rotary_factor): it has no effect: expected 1",
        )
        require(
            self.positions != "sinusoidal" or model.hidden_size % 2 == 0,
            f"model.block.positions = 'sinusoidal' with model.hidden_size = {model.hidden_size}: "
            "expected an even number",
        )
