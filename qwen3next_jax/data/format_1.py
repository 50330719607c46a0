"""Opens rows that older code prepared: one folder `<fingerprint>/` holds all rows of a source.

The fingerprint is a digest of the source's files and of the settings. It is computed as the older
code computed it, so a run that began with such rows continues with them. Nothing writes this format
any more.
"""

import dataclasses
import json
import re

from qwen3next_jax.common import digests
from qwen3next_jax.data import sources
from qwen3next_jax.data.digest_cache import DigestCache
from qwen3next_jax.data.readers import Part
from qwen3next_jax.data.row_groups import Recipe, Statistics, read_metadata, renamed
from qwen3next_jax.data.rows import RowTable
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import Tokenizer

_FOLDER = re.compile("[0-9a-f]{20}")


def find(
    source: Source, tokenizer: Tokenizer, recipe: Recipe, store: Store
) -> tuple[str, dict[str, Statistics], dict[str, RowTable]] | None:
    """Finds the rows of `source`.

    Returns:
      (name of the folder, statistics of each split, shards of each split); None if there is no
      such folder.

    Raises:
      UserError: the folder is damaged, or holds the rows of another source.
    """
    if tokenizer.parse_tokens or source.bad_records != "stop" or source.chat:
        return None  # format 1 does not have these settings
    if tokenizer.libraries:
        return None  # the code that wrote format 1 gave some texts other tokens
    wanted = {"tokenizer": tokenizer.fingerprint, "files": len(source.files)}
    wanted |= dataclasses.asdict(recipe)
    folders = folder_names(store)
    if source.text_is_gone or not folders:
        return None
    name = fingerprint(source, _contents(source, store), tokenizer, recipe)
    if name not in folders:
        return None
    directory = store.path(name)
    content = read_metadata(directory)
    # Some folders of format 1 record only these inputs to the fingerprint, not the fingerprint.
    for key, value in wanted.items():
        if content.get(key, value) != value:
            raise renamed(directory, f"{key} = {content[key]!r}, not {value!r}")
    statistics = {side: Statistics(**counts) for side, counts in content["statistics"].items()}
    tables = {
        side: RowTable.of(side, [directory], [content], [0], []) for side in content["shards"]
    }
    return name, statistics, tables


def folder_names(store: Store) -> list[str]:
    """Returns the names of all folders of format 1, sorted."""
    return [name for name in store.names("*") if _FOLDER.fullmatch(name)]


def _contents(source: Source, store: Store) -> list[str]:
    """Returns the digest of every file of `source`, in their order."""
    cache = DigestCache(store, source)
    found = []
    for file in source.files:
        part = Part(0, file.size)
        digest = cache.get(file, part) or sources.content_digest(file)
        cache.add(file, part, digest)
        found.append(digest)
    return found


def fingerprint(source: Source, contents: list[str], tokenizer: Tokenizer, recipe: Recipe) -> str:
    """Returns a digest (20 hexadecimal digits) of everything that determines the rows.

    Args:
      source: the source; its settings and the names and sizes of its files count.
      contents: digest of each file.
      tokenizer: the tokenizer; its fingerprint counts.
      recipe: the recipe of the rows.
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
