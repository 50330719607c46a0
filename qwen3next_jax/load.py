"""Finding a model by path: the folder of a run, or a Hugging Face directory."""

import dataclasses
import pathlib
from typing import NamedTuple

from etils import epath

from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer
from qwen3next_jax.errors import UserError
from qwen3next_jax.interop.huggingface import load_hf
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.training.checkpoint import load_trained
from qwen3next_jax.training.fingerprint import read_run


class LoadedModel(NamedTuple):
    """tokenizer is None where a Hugging Face directory brings none; step is None there, too."""

    model: Qwen3Next
    tokenizer: Tokenizer | None
    step: int | None


def load_model(path: str | pathlib.Path, step: int | None = None) -> LoadedModel:
    """Loads a run's newest checkpoint (or the one after `step` steps), or the model in a Hugging Face directory.

    Raises:
      UserError: `path` is neither, or what is there is damaged.
    """
    folder = epath.Path(path)
    if (folder / "run.json").exists():
        model, config, step = load_trained(folder, step)
        own = folder / "tokenizer"
        data = dataclasses.replace(config.data, tokenizer=str(own)) if own.exists() else config.data
        tokenizer = source_of(data).tokenizer_of(data, config.model.vocab_size)
        if tokenizer.fingerprint != read_run(folder)["tokenizer"]:
            raise UserError(f"{data.tokenizer}: not the tokenizer that {path} was trained with (its fingerprint differs from that in "
                            "run.json): damaged, or another; restore it")
        return LoadedModel(model, tokenizer, step)
    if (folder / "config.json").exists():
        if step is not None:
            raise UserError(f"{path}: a Hugging Face directory holds one model, so --step={step} means nothing here")
        tokenizer = folder / "tokenizer.json"
        model = load_hf(folder)
        found = load_tokenizer(str(tokenizer), model.config.vocab_size) if tokenizer.exists() else None
        return LoadedModel(model, found, step=None)
    reason = "no such folder" if not folder.exists() else "it has neither run.json nor config.json"
    raise UserError(f"{path}: neither the folder of a run nor a Hugging Face directory ({reason})")
