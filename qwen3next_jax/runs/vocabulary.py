"""The vocabulary of a model that leaves it to the tokenizer of its data."""

from typing import Any


def fill_from_tokenizer(values: dict[str, Any]) -> None:
    """Sets `model.vocab_size` and `model.eos_token_id` in the nested dict `values` to those of the
    tokenizer, where `model.vocab_size` is 0 and the run trains on text. The tokenizer is
    `data.tokenizer`, or, where that is not given, the one that `train.init_from` brings.

    Raises:
      UserError: the tokenizer cannot be used.
    """
    model = values.get("model", {})
    data = values.get("data", {})
    if model.get("vocab_size") != 0 or data.get("source", "text") != "text":
        return
    # These take their time to load.
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.runs.preflight import tokenizer_of_model

    init_from = values.get("train", {}).get("init_from", "")
    tokenizer = load_tokenizer(data.get("tokenizer") or tokenizer_of_model(init_from))
    model["vocab_size"] = tokenizer.vocab_size
    model["eos_token_id"] = tokenizer.eos_id
