"""What an export takes over from the Hugging Face directory that its model began with: fields of
JSON files, the vision tower.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import require, warn
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.hf_config import VISION, read_hf_config
from qwen3next_jax.interop.weights import Weights, name_some, read_json
from qwen3next_jax.interop.writing import Tensor

_OF_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json")


class Source(NamedTuple):
    """directory: None where there is none. fields, generation: of its config.json and
    generation_config.json. tower: the tensors of its vision tower, if the export has them.
    """

    directory: pathlib.Path | None = None
    fields: dict[str, Any] | None = None
    generation: dict[str, Any] = {}
    tower: tuple[Tensor, ...] = ()

    def copy_image_files(self, directory: pathlib.Path) -> None:
        """Of a source whose tower is taken over: how images come before it."""
        for name in _OF_IMAGES if self.tower else ():
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, directory / name)


def source_of(
    path: str | os.PathLike | None, config: ModelConfig, vision: bool, out: str | os.PathLike
) -> Source:
    """What the export of a model of this `config` to `out` takes over from the directory at
    `path` (None: nothing). Whatever is left out of it, or stays without a vision tower, is said
    in a note.

    Raises:
      UserError: `load_hf` would not read it, or its tower is of another text model.
    """
    wrapper, without = (
        config.hf_form == "qwen3_5",
        f"{out}: a qwen3_5 without its vision tower: read it as a text model alone",
    )
    if path is None:
        if wrapper:
            warn(without, "note")
        return Source()
    directory, theirs = pathlib.Path(path), read_hf_config(path)
    for name in ("hidden_size", "vocab_size"):
        require(
            getattr(theirs, name) == getattr(config, name),
            f"{directory}: its {name} is {getattr(theirs, name)}, the model's "
            f"{getattr(config, name)}: expected the checkpoint that the model began with",
        )
    weights, generation = Weights(directory), directory / "generation_config.json"
    names = sorted(name for name in weights.names if name.startswith(VISION))
    taken = names if wrapper and vision else []
    if names and not taken:
        warn(f"{out}: the vision tower of {directory} ({name_some(names, 1)}) is left out", "note")
    if wrapper and not taken:
        warn(without, "note")
    tower = tuple(
        Tensor(
            name,
            weights.read(name, slice(0)).dtype,
            weights.shape(name),
            functools.partial(_whole, weights, name),
        )
        for name in taken
    )
    return Source(
        directory,
        read_json(directory / "config.json"),
        read_json(generation) if generation.exists() else {},
        tower,
    )


def in_form(config: ModelConfig, form: str | None, source: pathlib.Path | None) -> ModelConfig:
    """`config` to be written as `form` (None: as `source` is), with experts fused where they are
    in `source`, if that is there.

    Raises:
      UserError: `source` is not there, and nothing else says the form.
    """
    if source is None or form and not (source / "config.json").is_file():
        return dataclasses.replace(config, hf_form=form or config.hf_form)
    require(
        (source / "config.json").is_file(),
        f"{source}: not there, and an export has the form of the Hugging Face directory that its "
        "model began with: give --source=DIR, or --form",
    )
    theirs = read_hf_config(source)
    return dataclasses.replace(
        config, hf_form=form or theirs.hf_form, hf_fused_experts=theirs.hf_fused_experts
    )


def _whole(weights: Weights, name: str):
    yield weights.read(name)
