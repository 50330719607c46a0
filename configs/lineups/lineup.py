"""What the line-ups share: a published model as settings of this project. Each file names what
the published model has and this one lacks; `benchmarks/model/lineups.py` prints the parameters of
all beside the published numbers.
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
    """The default run of a model that differs from Qwen3-Next in these settings, and in what few
    others share with it.
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
