"""The settings `model.streams`, for models whose residual stream is wider than `model.hidden_size`
(`model.block.placement` = "gated_residual", "mhc" or "attention_residual").
"""

import dataclasses

from qwen3next_jax.config.bounds import check_bounds


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """Settings of the residual streams. STREAM_SETTINGS in config/registry.py lists the settings
    that each placement reads. `hc_count` and `hc_lowrank` are named after the fields of
    transformers' `config.json` for `qwen4_exp`, which calls the streams hyper-connections (hc).
    """

    # number of residual streams; each is as wide as the model
    hc_count: int = 4
    # rank of the two matrices of the gate that mixes the streams into a block's input
    hc_lowrank: int = 320
    # placement "mhc": how often the matrix that mixes the streams is divided by the sums of its
    # columns and then by the sums of its rows (Sinkhorn)
    sinkhorn_iterations: int = 20
    # placement "attention_residual": number of layers of a block, whose outputs are summed up; the
    # last block may have fewer
    block_layers: int = 4

    def __post_init__(self):
        check_bounds(
            self,
            "model.streams",
            {"at least 1": "hc_count hc_lowrank sinkhorn_iterations block_layers"},
        )
