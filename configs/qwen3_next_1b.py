"""Qwen3-Next at a size that one GPU of 80 GB, or one node of eight, pretrains: the released heads
and widths (2,048 wide, 16/2 attention heads of 256, 16/32 recurrent heads of 128, experts 512
wide), two periods instead of twelve, and 32 experts instead of 512, of which a token takes 4.

    uv run --extra gpu train.py --config=configs/qwen3_next_1b.py \\
        --config.data.path='my/texts/**/*.jsonl' --config.data.tokenizer=tokenizer.json

The tokenizer has at most 65,536 tokens. On eight GPUs, where all eight micro-batches of a step are
computed at the same time:

    uv run --extra gpu train.py --config=configs/qwen3_next_1b.py \\
        --config.train.gradient_accumulation=1 --config.data.path='my/texts/**/*.jsonl' \\
        --config.data.tokenizer=tokenizer.json
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "qwen3_next_1b"

    model = config.model
    model.vocab_size = 65_536
    model.num_hidden_layers = 8
    model.num_experts = 32
    model.num_experts_per_tok = 4
    model.max_position_embeddings = 32_768
    model.mtp_depth = 0
    model.decay_init = "log_uniform"

    config.train.steps = 76_000  # 20 billion tokens
    config.train.batch_size = 64
    config.train.sequence_length = 4096
    config.train.gradient_accumulation = 8
    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 2_000
    config.checkpoint.every = 1_000
    config.eval.every = 1_000
    return config
