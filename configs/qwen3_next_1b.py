"""Qwen3-Next at a size that one GPU of 80 GB, or one node of eight, pretrains: the released heads
and widths (2,048 wide, 16/2 attention heads of 256, 16/32 recurrent heads of 128, experts 512
wide), two periods instead of twelve, and 32 experts instead of 512. Each token chooses 4 of them.
1,356,320,896 parameters; a token uses 383 million beside the embeddings.

    uv run --extra gpu train.py --config=configs/qwen3_next_1b.py \\
        --config.data.path='my/texts/**/*.jsonl' --config.data.tokenizer=tokenizer.json

The tokenizer has at most 65,536 tokens. A step is 262,144 of them, in eight parts one after the
other; on eight GPUs, all at once, with --config.train.gradient_accumulation=1. AdamW keeps float32
weights and moments.

Memory, as compiled for H100s: 53.2 GiB on one GPU, 29.5 GiB on each of eight.
Time: it has not been run. By its 3.36 GFLOP a token, a day on one H100 is 6.4 billion tokens at
25 % of the peak and 8.9 billion at 35 %; on eight, if they scale, 51 and 71 billion. So the 20
billion of train.steps would take 2.2 to 3.1 days, and 7 to 9 hours.
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
