"""The group `model.streams`: residual streams, where `model.block.placement` has several."""

import dataclasses

from qwen3next_jax.config.bounds import check_bounds


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """Settings of hyper-connections, under the names of transformers' `config.json` for
    `qwen4_exp`.
    """

    # residual streams, each as wide as the model
    hc_count: int = 4
    # rank of the low-rank weights that mix the streams into a block's input
    hc_lowrank: int = 320

    def __post_init__(self):
        check_bounds(self, "model.streams", {"at least 1": "hc_count hc_lowrank"})
