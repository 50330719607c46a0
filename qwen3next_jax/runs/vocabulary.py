"""Sets the vocabulary size of a model to that of the tokenizer if `model.vocab_size` is 0."""

import pathlib
from typing import Any

from qwen3next_jax.runs.folder import read_folder
from qwen3next_jax.runs.store import open_store


def fill_vocabulary_from_tokenizer(
    values: dict[str, Any], workdir: pathlib.Path | None = None
) -> None:
    """Sets `model.vocab_size` and `model.eos_token_id` if `model.vocab_size` is 0 and the run
    trains on text.

    A resumed run takes `vocab_size` and `eos_token_id` from its run.json; its tokenizer and its
    parent are not read. A new run takes `vocab_size` and `eos_token_id` from the tokenizer that
    `data.tokenizer` names or, if `data.tokenizer` is "", from the tokenizer of the model in
    `train.init_from`.

    Args:
      values: the settings as a nested dict; it is changed in place.
      workdir: the folder of a run that may resume; None: the run is new.

    Raises:
      UserError: the tokenizer cannot be loaded, `train.init_from` does not exist, or a file of the
        run in `workdir` is missing.
    """
    model = values.get("model", {})
    data = values.get("data", {})
    if model.get("vocab_size") != 0 or data.get("source", "text") != "text":
        return
    record = None
    if workdir and not open_store(workdir).has_unfinished_move():
        record = read_folder(workdir).record_if_trained()
    if record is not None:
        trained = record.config["model"]
        model["vocab_size"] = trained["vocab_size"]
        model["eos_token_id"] = trained["eos_token_id"]
        return
    # Imported here because these modules take long to load.
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.runs.facts import tokenizer_of_init_from

    init_from = values.get("train", {}).get("init_from", "")
    tokenizer = load_tokenizer(data.get("tokenizer") or tokenizer_of_init_from(init_from))
    model["vocab_size"] = tokenizer.vocab_size
    model["eos_token_id"] = tokenizer.eos_id
