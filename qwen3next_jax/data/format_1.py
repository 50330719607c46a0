"""Opens rows that older code prepared: one folder `<fingerprint>/` holds all rows of a source.

Their fingerprint is a digest of the files, so it is the same as when they were prepared, and a
run that began with them continues with them. Nothing writes this format any more.
"""

import dataclasses
import json
import re

from qwen3next_jax.common import digests
from qwen3next_jax.data import sources
from qwen3next_jax.data.digest_cache import DigestCache
from qwen3next_jax.data.readers import Part
from qwen3next_jax.data.row_groups import Recipe, Statistics, read_metadata, renamed
from qwen3next_jax.data.rows import RowFolder, Shard
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import Tokenizer

_FOLDER = re.compile("[0-9a-f]{20}")


def find(
    source: Source, tokenizer: Tokenizer, recipe: Recipe, store: Store
) -> tuple[str, dict[str, Statistics], dict[str, RowFolder]] | None:
    """The rows of `source`: name of their folder, statistics and shards of each split; None if
    there are none.

    Raises:
      UserError: the folder is damaged, or holds the rows of another source.
    """
    if tokenizer.parse_tokens or source.bad_records != "stop":  # it knew no such settings
        return None
    wanted = {"tokenizer": tokenizer.fingerprint, "files": len(source.files)}
    wanted |= dataclasses.asdict(recipe)
    folders = [name for name in store.names("*") if _FOLDER.fullmatch(name)]
    if source.text_is_gone or not folders:
        return None
    name = fingerprint(source, _contents(source, store), tokenizer, recipe)
    if name not in folders:
        return None
    directory = store.path(name)
    content = read_metadata(directory)
    # Some of these folders do not record their fingerprint, but these inputs to it.
    for key, value in wanted.items():
        if content.get(key, value) != value:
            raise renamed(directory, f"{key} = {content[key]!r}, not {value!r}")
    statistics = {side: Statistics(**counts) for side, counts in content["statistics"].items()}
    shards = {
        side: RowFolder(directory, content["dtype"], tuple(Shard(**shard) for shard in shards))
        for side, shards in content["shards"].items()
    }
    return name, statistics, shards


def _contents(source: Source, store: Store) -> list[str]:
    """The digest of every file."""
    cache = DigestCache(store, source)
    found = []
    for file in source.files:
        part = Part(0, file.size)
        digest = cache.get(file, part) or sources.content_digest(file)
        cache.add(file, part, digest)
        found.append(digest)
    return found


def fingerprint(source: Source, contents: list[str], tokenizer: Tokenizer, recipe: Recipe) -> str:
    """Digest (20 hexadecimal digits) of everything that determines the rows: files, the digests
    of their `contents`, tokenizer, recipe.
    """
    parts = {
        "format": 1,
        "files": [
            (file.label, file.size, digest)
            for file, digest in zip(source.files, contents, strict=True)
        ],
        "text_field": source.text_field,
        **({} if source.on_bad_text == "stop" else {"on_bad_text": source.on_bad_text}),
        "tokenizer": tokenizer.fingerprint,
        **dataclasses.asdict(recipe),
    }
    return digests.sha256(json.dumps(parts))[:20]
