"""The vocabulary of a model that leaves it to the tokenizer of its data."""

import pathlib
from typing import Any

from qwen3next_jax.runs.folder import restart_has_begun, trained_run


def fill_from_tokenizer(values: dict[str, Any], workdir: pathlib.Path | None = None) -> None:
    """Sets `model.vocab_size` and `model.eos_token_id` in the nested dict `values`, where
    `model.vocab_size` is 0 and the run trains on text.

    They are those of the run in `workdir`, if one has begun there: it does not need the tokenizer
    or the parent that it began with any more. Otherwise they are those of the tokenizer that
    `data.tokenizer` names, or, where that is not given, that `train.init_from` brings.

    Args:
      workdir: the folder of a run that may go on; None where a new one begins.

    Raises:
      UserError: the tokenizer cannot be used, `train.init_from` names nothing that is there, or
        what the run in `workdir` wrote is not complete.
    """
    model = values.get("model", {})
    data = values.get("data", {})
    if model.get("vocab_size") != 0 or data.get("source", "text") != "text":
        return
    begun = trained_run(workdir) if workdir and not restart_has_begun(workdir) else None
    if begun is not None:
        trained = begun["config"]["model"]
        model["vocab_size"] = trained["vocab_size"]
        model["eos_token_id"] = trained["eos_token_id"]
        return
    # These take their time to load.
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.runs.preflight import tokenizer_of_model

    init_from = values.get("train", {}).get("init_from", "")
    tokenizer = load_tokenizer(data.get("tokenizer") or tokenizer_of_model(init_from))
    model["vocab_size"] = tokenizer.vocab_size
    model["eos_token_id"] = tokenizer.eos_id
