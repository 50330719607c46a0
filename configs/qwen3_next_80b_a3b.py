"""The released Qwen3-Next-80B-A3B with all its dimensions, which are the defaults of `ModelConfig`:
81,324,862,720 parameters.

    uv run train.py --config=configs/qwen3_next_80b_a3b.py \\
        --config.train.init_from=PATH_TO_THE_RELEASED_WEIGHTS …

The table has settings to begin with on a TPU slice, each with --config.parallel.mesh.expert=8. The
planner (`--search --rows=…`) ranks these settings high. The settings have been compiled, but not
run; docs/notes/planner.md has the expected speed.

    slice         --config.train.batch_size   --config.train.remat   tokens a step   a device
    v5p:8x8x8     2048                        dots                   8M              16,384
    v6e:16x16     1024                        block                  4M              16,384
    tpu7x:4x4x4   512                         dots                   2M              16,384
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "qwen3_next_80b_a3b"
    config.model.bos_token_id = 151_643
    config.model.eos_token_id = 151_645

    config.train.batch_size = 512
    config.train.sequence_length = 4096
    config.train.remat = "block"
    config.train.steps = 10_000
    config.optimizer.warmup_steps = 500
    return config
