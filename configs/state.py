"""Tasks that need a state (`data/state_tasks.py`): two layers of width 64 must keep one over rows
of 64 tokens, and are measured on rows of 512. The task makes its rows on the fly.

    uv run train.py --config=configs/state.py --config.data.source=parity

Other tasks: modular_addition, s3, a5, s5, state_recall.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "state"

    model = config.model
    model.vocab_size = 128
    model.hidden_size = 64
    model.num_hidden_layers = 2
    model.full_attention_interval = 2
    model.num_attention_heads = 2
    model.num_key_value_heads = 2
    model.head_dim = 32
    model.linear_num_key_heads = 4
    model.linear_num_value_heads = 4
    model.linear_key_head_dim = 16
    model.linear_value_head_dim = 16
    model.num_experts = 0
    model.intermediate_size = 128
    model.mtp_depth = 0
    model.rope_theta = 10_000.0
    model.max_position_embeddings = 512
    model.dtype = "float32"

    config.data.source = "parity"

    config.train.steps = 1000
    config.train.batch_size = 64
    config.train.sequence_length = 64
    config.train.log_every = 50
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.0
    config.checkpoint.every = 500
    config.eval.every = 500
    config.eval.sample_tokens = 0
    config.eval.suites = ("state",)
    config.eval.suite_lengths = (64, 128, 256, 512)
    return config
