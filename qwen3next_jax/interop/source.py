"""Reads the data that an export copies from its source. The source is the Hugging Face directory
with which the model was initialised. The copied data are the vision tower of the source, and the
fields of its JSON files that this project does not write.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import require, warn
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.families import FORMS
from qwen3next_jax.interop.families.form import Fields
from qwen3next_jax.interop.hf_config import open_checkpoint, read_hf_config
from qwen3next_jax.interop.weights import Weights, count_and_names, read_json
from qwen3next_jax.interop.writing import Tensor

# Files that describe how images are prepared for the vision tower. save_pretrained of transformers
# 5 writes processor_config.json; released models have the other two.
_IMAGE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class ExportSource(NamedTuple):
    """The data that an export copies from the checkpoint with which the model was initialised.

    Attributes:
      directory: the checkpoint's directory; None: there is no such checkpoint.
      config_fields: the fields of the checkpoint's config.json.
      generation_fields: the fields of the checkpoint's generation_config.json.
      vision_tensors: the tensors of the checkpoint's vision tower; () if the export does not copy
        the vision tower.
    """

    directory: pathlib.Path | None = None
    config_fields: Fields | None = None
    generation_fields: Fields = {}
    vision_tensors: tuple[Tensor, ...] = ()

    def copy_image_files(self, directory: pathlib.Path) -> None:
        """Copies the files that describe how images are prepared to `directory`, if the export
        copies the vision tower.
        """
        for name in _IMAGE_FILES if self.vision_tensors else ():
            if (self.directory / name).exists():
                (directory / name).write_bytes((self.directory / name).read_bytes())


def read_export_source(
    path: str | os.PathLike | None, config: ModelConfig, vision: bool, out: str | os.PathLike
) -> ExportSource:
    """Reads what an export copies from the Hugging Face directory with which the model began:
    fields of its JSON files and, with `vision`, the vision tower. Prints a note if the export
    does not copy the source's vision tower, or is a wrapper without a vision tower.

    Args:
      path: the directory with which the model was initialised; None: there is no such directory.
      config: the model's settings.
      vision: whether to copy the vision tower, if the form of the export is a wrapper (a text model
        with a vision tower). No other form has a vision tower.
      out: the path of the export, which notes name.

    Raises:
      UserError: `load_hf` would refuse the directory, or its text model has another hidden size or
        vocabulary than the model.
    """
    is_wrapper = bool(FORMS[config.hf_form].text_config_group)
    without_tower = (
        f"{out}: a {config.hf_form} without a vision tower: only its text model can be used"
    )
    if path is None:
        if is_wrapper:
            warn(without_tower, "note")
        return ExportSource()
    checkpoint = open_checkpoint(path)
    directory, weights = checkpoint.directory, checkpoint.weights
    for name in ("hidden_size", "vocab_size"):
        in_source, in_model = getattr(checkpoint.config, name), getattr(config, name)
        require(
            in_source == in_model,
            f"{directory}: its {name} is {in_source}, the model's "
            f"{in_model}: expected the checkpoint from which the model was initialised",
        )
    names = checkpoint.vision_tensors
    copied = names if is_wrapper and vision else []
    if names and not copied:
        warn(
            f"{out}: the vision tower of {directory} ({count_and_names(names, 1)}) is not copied",
            "note",
        )
    if is_wrapper and not copied:
        warn(without_tower, "note")
    generation = directory / "generation_config.json"
    return ExportSource(
        directory,
        checkpoint.config_fields,
        read_json(generation) if generation.exists() else {},
        tuple(_unchanged_tensor(weights, name) for name in copied),
    )


def _unchanged_tensor(weights: Weights, name: str) -> Tensor:
    """Returns a tensor of the source that is written with the same values, dtype and shape."""
    shape = weights.shape(name)
    return Tensor(
        name, weights.dtype(name), shape, functools.partial(_whole_tensor_block, weights, name)
    )


def _whole_tensor_block(weights: Weights, name: str) -> Iterator[np.ndarray]:
    yield weights.read(name)


def with_end_token(config: ModelConfig, eos_id: int) -> ModelConfig:
    """Returns the settings of a trained model with the end token of its tokenizer: a run ends
    documents with this token, whatever `eos_token_id` its configuration has.

    The result is `config` itself if the tokenizer has no end token, as in a synthetic task, or if
    the model has n-gram embeddings, because `eos_token_id` determines the rows of n-grams.

    Args:
      config: the model's settings.
      eos_id: the tokenizer's end token; -1: none.
    """
    if eos_id < 0 or config.ple.layer_ids:
        return config
    return dataclasses.replace(config, eos_token_id=eos_id)


def config_for_export(
    config: ModelConfig, form: str | None, source: pathlib.Path | None, recorded_form: str = ""
) -> ModelConfig:
    """Returns `config` with new values of the settings that decide how an export stores the model:
    `hf_form` names the form, and `hf_fused_experts` is taken from `source`.

    Args:
      config: the model's settings.
      form: the value of `hf_form`; None: the form of `source`, or `config.hf_form` if there is no
        source.
      source: the Hugging Face directory with which the model was initialised; None: there is no
        such directory.
      recorded_form: the form of `source` that the run has recorded; "": unknown. If `source` does
        not exist, the message recommends this form.

    Raises:
      UserError: `form` is None and the directory `source` does not exist.
    """
    if source is None or (form and not (source / "config.json").is_file()):
        return dataclasses.replace(config, hf_form=form or config.hf_form)
    require(
        (source / "config.json").is_file(),
        f"{source}: not found, and an export takes its form from the Hugging Face directory from "
        "which its model was initialised: give --source=DIR, or "
        f"--form{recorded_form and '=' + recorded_form}",
    )
    source_config = read_hf_config(source)
    return dataclasses.replace(
        config,
        hf_form=form or source_config.hf_form,
        hf_fused_experts=source_config.hf_fused_experts,
    )
