"""The text model of the released Qwen3.5-0.8B with all its dimensions: dense, with tied embeddings,
752,393,024 parameters and 20,452,864 of multi-token prediction.

To continue training from the released weights, downloaded to the folder QWEN3_5_0P8B, and to export
the result in the released format, with the vision tower of that folder:

    uv run train.py --config=configs/qwen3_5_0p8b.py --config.train.init_from=QWEN3_5_0P8B \\
        --config.data.path='my/texts/**/*.jsonl'
    uv run qwen3next export --workdir=runs/qwen3_5_0p8b --out=hf/continued --dtype=bfloat16

docs/families.md describes the formats that can be read and written.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "qwen3_5_0p8b"

    model = config.model
    model.vocab_size = 248_320
    model.hidden_size = 1024
    model.num_hidden_layers = 24
    model.num_attention_heads = 8
    model.num_key_value_heads = 2
    model.linear_num_key_heads = 16
    model.linear_num_value_heads = 16
    model.num_experts = 0
    model.intermediate_size = 3584
    model.tie_word_embeddings = True
    model.hf_form = "qwen3_5_text"
    model.eos_token_id = 248_044

    config.train.steps = 5_000
    config.train.batch_size = 64
    config.train.sequence_length = 4096
    config.train.remat = "block"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 100
    return config
