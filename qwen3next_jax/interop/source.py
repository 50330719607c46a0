"""What an export takes over from the Hugging Face directory that its model began with: fields of
JSON files, and the vision tower.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import require, warn
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.families import FORMS
from qwen3next_jax.interop.families.form import Fields
from qwen3next_jax.interop.hf_config import open_checkpoint, read_hf_config
from qwen3next_jax.interop.weights import Weights, name_some, read_json
from qwen3next_jax.interop.writing import Tensor

# How images are prepared for the vision tower.
_IMAGE_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")


class Source(NamedTuple):
    """The checkpoint that a model began with, as far as its export needs it.

    Attributes:
      directory: None: there is none.
      fields: of its config.json.
      generation: the fields of its generation_config.json.
      vision_tensors: the tensors of its vision tower that the export takes over.
    """

    directory: pathlib.Path | None = None
    fields: Fields | None = None
    generation: Fields = {}
    vision_tensors: tuple[Tensor, ...] = ()

    def copy_image_files(self, directory: pathlib.Path) -> None:
        """Copies what belongs to a vision tower that the export takes over."""
        for name in _IMAGE_FILES if self.vision_tensors else ():
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, directory / name)


def read_source(
    path: str | os.PathLike | None, config: ModelConfig, vision: bool, out: str | os.PathLike
) -> Source:
    """What an export takes over. A note says what it leaves out, and that a wrapper has no vision
    tower.

    Args:
      path: the directory that the model began with; None: there is none.
      config: the model's settings.
      vision: whether a wrapper takes the vision tower over.
      out: where the export will be, for notes.

    Raises:
      UserError: `load_hf` would not read the directory, or its tower is another text model's.
    """
    is_wrapper = bool(FORMS[config.hf_form].text_group)
    without_tower = (
        f"{out}: a {config.hf_form} without its vision tower: read it as a text model alone"
    )
    if path is None:
        if is_wrapper:
            warn(without_tower, "note")
        return Source()
    checkpoint = open_checkpoint(path)
    directory, weights = checkpoint.directory, checkpoint.weights
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(checkpoint.config, name), getattr(config, name)
        require(
            theirs == ours,
            f"{directory}: its {name} is {theirs}, the model's "
            f"{ours}: expected the checkpoint that the model began with",
        )
    names = checkpoint.vision_tensors
    taken = names if is_wrapper and vision else []
    if names and not taken:
        warn(f"{out}: the vision tower of {directory} ({name_some(names, 1)}) is left out", "note")
    if is_wrapper and not taken:
        warn(without_tower, "note")
    generation = directory / "generation_config.json"
    return Source(
        directory,
        checkpoint.fields,
        read_json(generation) if generation.exists() else {},
        tuple(_copy_of(weights, name) for name in taken),
    )


def _copy_of(weights: Weights, name: str) -> Tensor:
    """A tensor as it is in the source."""
    shape = weights.shape(name)
    return Tensor(name, weights.dtype(name), shape, functools.partial(_all_rows, weights, name))


def _all_rows(weights: Weights, name: str) -> Iterator[np.ndarray]:
    yield weights.read(name)


def in_form(
    config: ModelConfig, form: str | None, source: pathlib.Path | None, recorded_form: str = ""
) -> ModelConfig:
    """`config` for an export in the form `form`, with experts fused where they are in `source`.

    Args:
      config: the model's settings.
      form: a value of `model.hf_form`; None: the form of `source`.
      source: the Hugging Face directory that the model began with; None: there is none, and the
        form is the config's own.
      recorded_form: that of `source`, where a record says it, for the message when it is gone.

    Raises:
      UserError: `source` is not there, and nothing else says the form.
    """
    if source is None or (form and not (source / "config.json").is_file()):
        return dataclasses.replace(config, hf_form=form or config.hf_form)
    require(
        (source / "config.json").is_file(),
        f"{source}: not there, and an export has the form of the Hugging Face directory that its "
        f"model began with: give --source=DIR, or --form{recorded_form and '=' + recorded_form}",
    )
    theirs = read_hf_config(source)
    return dataclasses.replace(
        config, hf_form=form or theirs.hf_form, hf_fused_experts=theirs.hf_fused_experts
    )
