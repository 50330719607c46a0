"""Reads the tokens that end a text from the files beside a model's weights."""

from etils import epath

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, as_user_error, short_repr
from qwen3next_jax.common.storage import to_path


def read_end_token_ids(folder: epath.PathLike, vocab_size: int) -> set[int]:
    """Returns the ids in the field `eos_token_id` of config.json and generation_config.json in
    `folder`.

    In each file the field `eos_token_id` may be missing, an id, or a list of ids. For the folder of
    a run, which has neither file, the result is empty.

    Raises:
      UserError: a file cannot be read, or an id is not in the vocabulary.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = to_path(folder) / name
        if not file.exists():
            continue
        with as_user_error(f"{file}: cannot be read", OSError, ValueError):
            fields = json_files.read(file)
        inner = fields.get("text_config")
        if fields.get("eos_token_id") is None and isinstance(inner, dict):
            fields = inner
        ids = fields.get("eos_token_id")
        if ids is None:
            ids = []
        elif not isinstance(ids, list):
            ids = [ids]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise UserError(
                f"{file}: eos_token_id = {short_repr(ids)}: expected a token's number, 0 … "
                f"{vocab_size - 1}, or a list of them"
            )
        found |= set(ids)
    return found
