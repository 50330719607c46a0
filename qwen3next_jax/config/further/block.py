"""The rest of a block beside the released model's: norms and where they stand, dense MLPs,
positions. The group `model.block`.
"""

import dataclasses
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.tables import check_name, resolve

PLACEMENTS = {  # of the norms around mixer and MLP, N; f is either of them
    "pre": "qwen3next_jax.model.block:Block",  # x + f(N(x))
    "post": "qwen3next_jax.model.further.placements:Post",  # N(x + f(x))
    "olmo2": "qwen3next_jax.model.further.placements:Olmo2",  # x + N(f(x))
    "sandwich": "qwen3next_jax.model.further.placements:Sandwich",  # x + N'(f(N(x)))
    "deep": "qwen3next_jax.model.further.placements:Deep",  # N(α x + f(x))
}
MLPS = {  # dense ones; experts are SwiGLU in every model
    "swiglu": "qwen3next_jax.model.moe:DenseMLP",
    "geglu": "qwen3next_jax.model.further.mlps:GeGLU",
    "gelu": "qwen3next_jax.model.further.mlps:GELU",
    "relu": "qwen3next_jax.model.further.mlps:ReLU",
    "relu2": "qwen3next_jax.model.further.mlps:SquaredReLU",
    "none": "qwen3next_jax.model.further.mlps:NoMLP",
}
NORMS = {  # of every norm but recurrent layers' own
    "rms": "qwen3next_jax.model.layers:rms_norm",
    "layer": "qwen3next_jax.model.further.norms:LayerNorm",  # less the mean, and with a bias
}
POSITIONS = {  # added to the embeddings; rotations are mixers' own
    "none": "qwen3next_jax.model.further.positions:NoPositions",
    "sinusoidal": "qwen3next_jax.model.further.positions:Sinusoidal",
    "learned": "qwen3next_jax.model.further.positions:Learned",
}
ROPE_SCALINGS = {  # how rotations reach `yarn_factor` times as far
    "yarn": "qwen3next_jax.model.layers:yarn",
    "linear": "qwen3next_jax.model.further.rotations:linear",
    "ntk": "qwen3next_jax.model.further.rotations:ntk",
    "truncated": "qwen3next_jax.model.further.rotations:truncated",
}
TABLES = {
    "placement": PLACEMENTS,
    "mlp": MLPS,
    "norm": NORMS,
    "positions": POSITIONS,
    "rope_scaling": ROPE_SCALINGS,
}


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What a block is made of beside its mixer: lines of the tables above. A model that differs
    here has no Hugging Face form.
    """

    placement: str = "pre"
    norm: str = "rms"
    mlp: str = "swiglu"
    positions: str = "none"
    rope_scaling: str = "yarn"

    def of(self, setting: str) -> Any:
        """What the setting's name stands for."""
        return resolve(TABLES[setting], getattr(self, setting), f"model.block.{setting}")

    def check(self, model: Any) -> None:
        """Raises UserError where `model`, the ModelConfig, does not read a setting, or has no
        such line.
        """
        for setting, table in TABLES.items():
            check_name(table, getattr(self, setting), f"model.block.{setting}")
        require(
            self.mlp == "swiglu" or model.has_dense_mlps,
            f"model.block.mlp = {self.mlp!r}: every layer has experts, which are SwiGLU: expected "
            "'swiglu', or layers without experts (model.num_experts = 0, model.mlp_only_layers)",
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
