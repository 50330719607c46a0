"""What can be told of a start before JAX is loaded and before anything is read at length: a mistake should cost a second.

train.py asks this first where there is one process; `train` asks it again, of all processes together.
"""

import pathlib

from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.errors import UserError
from qwen3next_jax.interop.hf_config import read_hf_config
from qwen3next_jax.training.fingerprint import check_settings, saved_steps

# Model settings that may differ from those of `train.init_from`: they change no parameter's shape or meaning.
NOT_STRUCTURE = {"dtype", "mtp_depth", "decay_init", "initializer_range", "max_position_embeddings",
                 "delta_rule", "bos_token_id", "eos_token_id"}


def check(config: Config, workdir: pathlib.Path, restart: bool = False) -> None:
    """Looks at the folder of the run, the source of its data (a tokenizer, the globs of `data.path`) and the architecture of
    `train.init_from`.

    Raises:
      UserError: one of them is not as it should be.
    """
    if not restart:
        check_settings(workdir, config)
    if config.train.init_from and (restart or not saved_steps(workdir)):  # a run that goes on needs it no more
        check_structure(config)
    source_of(config.data).check(config.data, config.train.sequence_length, config.model.vocab_size)


def check_structure(config: Config) -> None:
    """Raises UserError unless the model in `train.init_from` is that of the configuration."""
    found_config = read_hf_config(config.train.init_from)
    for name in config.model.differs(found_config):
        if name not in NOT_STRUCTURE and (name != "intermediate_size" or config.model.has_dense_mlps):
            wanted, found = (c.mixers if name == "layer_types" else getattr(c, name) for c in (config.model, found_config))
            raise UserError(f"train.init_from = {config.train.init_from}: its {name} is {found}, model.{name} = {wanted}; "
                            "set the one in the config to the other")
    if config.model.mtp_depth and not found_config.mtp_depth:
        raise UserError(f"train.init_from = {config.train.init_from}: it has no mtp.* tensors; set model.mtp_depth = 0")
