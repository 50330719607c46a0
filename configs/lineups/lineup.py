"""Shared code of the line-ups; a line-up describes a published model with the settings of this
project. The file of a line-up names the features of the published model that this project lacks.
`benchmarks/model/lineups.py` prints each line-up's number of parameters and the published number.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config

# Sigmoid scores and a bias that the load moves (DeepSeek-V3's router), a shared expert without a
# gate.
LIKE_DEEPSEEK = {"scoring_func": "sigmoid", "router_bias": True, "shared_expert_gate": False}


def lineup(
    name: str,
    block: dict | None = None,
    mixer: dict | None = None,
    moe: dict | None = None,
    **model,
) -> ConfigDict:
    """Returns the config of a run with default settings. The model has the given settings, without
    the features of Qwen3-Next that most published models lack.
    """
    config = ConfigDict(default_config())
    config.name = name
    others = {
        "attention_output_gate": False,
        "zero_centered_norm": False,
        "mtp_depth": 0,
        "partial_rotary_factor": 1.0,
        "num_experts": 0,
    }
    config.model.update(others | model)
    config.model.block.update(block or {})
    config.model.mixer.update(mixer or {})
    config.model.moe.update(moe or {})
    config.train.sequence_length = 4096
    config.train.remat = "block"
    return config
