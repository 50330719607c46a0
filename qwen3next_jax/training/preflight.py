"""What can be told of a start before JAX is loaded and before anything is read at length: a mistake should cost a second.

train.py asks this first where there is one process; `train` asks it again, of all processes together.
"""

import pathlib

from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.errors import UserError
from qwen3next_jax.training.fingerprint import check_settings, saved_steps


def check(config: Config, workdir: pathlib.Path, restart: bool = False) -> None:
    """Looks at the folder of the run, the source of its data (a tokenizer, the globs of `data.path`) and whether `train.init_from` is there.

    Raises:
      UserError: one of them is not as it should be.
    """
    if not restart:
        check_settings(workdir, config)
    if config.train.init_from and (restart or not saved_steps(workdir)):  # a run that goes on needs it no more
        directory = pathlib.Path(config.train.init_from)
        if not (directory / "config.json").is_file():
            reason = "it has no config.json" if directory.is_dir() else "no such folder"
            raise UserError(f"train.init_from = {directory}: {reason}: expected a Hugging Face model directory (config.json and *.safetensors)")
    source_of(config.data).check(config.data, config.train.sequence_length, config.model.vocab_size)
