"""What an export takes over from the Hugging Face directory that its model began with: fields of JSON files, the vision tower."""

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.errors import require
from qwen3next_jax.interop.hf_config import VISION, read_hf_config
from qwen3next_jax.interop.weights import Weights, read_json

_OF_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json")


class Source:
    """The directory at `path`. `config`: of its text model; `fields`: of its config.json.

    Raises:
      UserError: it is none that `load_hf` reads (headers only are looked at here).
    """

    def __init__(self, path: str | os.PathLike):
        self.directory, self.config = pathlib.Path(path), read_hf_config(path)
        self.fields = read_json(self.directory / "config.json")
        self._weights = Weights(self.directory)
        self.vision = sorted(name for name in self._weights.names if name.startswith(VISION))

    def check_fits(self, config: ModelConfig) -> None:
        """Raises UserError where its vision tower cannot belong to a text model of this `config`."""
        for name in ("hidden_size", "vocab_size"):
            theirs, ours = getattr(self.config, name), getattr(config, name)
            require(theirs == ours, f"{self.directory}: its {name} is {theirs}, the model's {ours}: expected the checkpoint that the model "
                                    "began with")

    def vision_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, self._weights.read(name).reshape(self._weights.shape(name))) for name in self.vision)

    def generation_fields(self) -> dict[str, Any]:
        file = self.directory / "generation_config.json"
        return read_json(file) if file.exists() else {}

    def copy_image_files(self, directory: pathlib.Path) -> None:
        for name in _OF_IMAGES:
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, directory / name)
