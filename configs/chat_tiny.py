"""The model of configs/tiny.py learns to chat. Training starts from the weights of the run
runs/base; examples/chat_data.py writes the conversations. The vocabulary has two tokens more than
that of configs/tiny.py, for the chat format.

    uv run train.py --config=configs/tiny.py --config.name=base --config.train.steps=60
    uv run examples/chat_data.py
    uv run train.py --config=configs/chat_tiny.py
    echo "Capital of Peru?" | uv run qwen3next generate --model=runs/chat_tiny --chat

docs/adapting.md shows the output of these commands.
"""

from ml_collections import ConfigDict

from configs.tiny import get_config as tiny


def get_config() -> ConfigDict:
    config = tiny()
    config.name = "chat_tiny"
    config.model.vocab_size = 0  # what the tokenizer has; it also names the end token

    config.data.path = "runs/chat_data/conversations.jsonl"
    config.data.messages_field = "messages"
    config.data.tokenizer = "runs/chat_data/tokenizer"

    config.train.init_from = "runs/base"
    config.train.steps = 150
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 10
    config.checkpoint.every = 75
    config.eval.every = 75
    config.eval.sample_prompt = (
        "<|im_start|>user\nCapital of Peru?<|im_end|>\n<|im_start|>assistant\n"
    )
    config.eval.sample_tokens = 40
    return config
