"""The small reference model: 104 million parameters; a token uses 44 million. It needs one
accelerator.

    uv run train.py --config=configs/small.py --config.data.path='my/texts/**/*.jsonl' \\
        --config.data.tokenizer=tokenizer.json

Without data.path, the model trains on the bytes of the Python standard library's source code.

Time: a step of 65,536 tokens took 0.206 s on one H200 with the kernels and 0.395 s without kernels
(docs/notes/gpu.md), so 5,000 steps take 17 to 33 minutes.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "small"

    model = config.model
    model.vocab_size = 32_768
    model.hidden_size = 512
    model.num_hidden_layers = 12
    model.num_attention_heads = 8
    model.num_key_value_heads = 2
    model.head_dim = 128
    model.max_position_embeddings = 32_768
    model.linear_num_key_heads = 4
    model.linear_num_value_heads = 8
    model.linear_key_head_dim = 128
    model.linear_value_head_dim = 128
    model.num_experts = 16
    model.num_experts_per_tok = 2
    model.moe_intermediate_size = 128
    model.shared_expert_intermediate_size = 128
    model.decay_init = "log_uniform"

    config.train.steps = 5_000
    config.train.batch_size = 32
    config.train.sequence_length = 2_048
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 200
    return config
