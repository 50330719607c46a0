"""What can be said of a run's data before anything is read, and before JAX is loaded."""

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.sources import check_path
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer


def check_text(config: DataConfig, vocab_size: int) -> Tokenizer:
    """Refuses a tokenizer that cannot be used, and paths that match nothing. → the tokenizer.

    Raises:
      UserError: as `load_tokenizer` and `sources.resolve`, as far as it shows without listing files.
    """
    for path in config.globs:
        check_path(path)
    return load_tokenizer(config.tokenizer, vocab_size)
