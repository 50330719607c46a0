"""A Qwen3-Next that can be pretrained on one GPU of 80 GB, or on a node of eight: the released
heads and widths (2,048 wide, 16/2 attention heads of 256, 16/32 recurrent heads of 128, experts 512
wide), but two periods of layers instead of twelve, and 32 experts instead of 512. A token chooses 4
experts. The model has 1,356,320,896 parameters; a token uses 383 million, not counting the
embeddings.

    uv run --extra gpu train.py --config=configs/qwen3_next_1b.py \\
        --config.data.path='my/texts/**/*.jsonl' --config.data.tokenizer=tokenizer.json

The vocabulary of the tokenizer may have at most 65,536 tokens. A step processes 262,144 tokens in
eight micro-batches; on eight GPUs, --config.train.gradient_accumulation=1 processes all tokens at
once. AdamW keeps float32 weights and moments.

Memory, as compiled for H100s: 53.2 GiB on one GPU, 29.5 GiB on each of eight.
Time: this config has not been run. A token takes 3.36 GFLOP, so one H100 would process 6.4 billion
tokens a day at 25 % of its peak FLOP/s and 8.9 billion at 35 %; eight H100s, if they scale, 51 and
71 billion. The 20 billion tokens of train.steps would take 2.2 to 3.1 days on one H100, and 7 to 9
hours on eight.
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
