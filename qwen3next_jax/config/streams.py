"""The settings `model.streams`: several residual streams (`model.block.placement` =
"gated_residual").
"""

import dataclasses

from qwen3next_jax.config.bounds import check_bounds


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """Settings of the residual streams. They have the names of the fields of transformers'
    `config.json` for `qwen4_exp`, which calls the streams hyper-connections (hc).
    """

    # number of residual streams; each is as wide as the model
    hc_count: int = 4
    # rank of the two matrices of the gate that mixes the streams into a block's input
    hc_lowrank: int = 320

    def __post_init__(self):
        check_bounds(self, "model.streams", {"at least 1": "hc_count hc_lowrank"})
