"""Byte-level BPE by tiktoken, which is several times as fast as the tokenizers library.

Both apply the same merges, but by different rules: `tokenizers` merges the pairs that its list
names, tiktoken any two neighbours that together are a token. For the usual vocabularies the ids are
the same, which nobody proves: `HuggingFaceTokenizer` compares a sample of every batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# What ByteLevel(use_regex=True) splits by: GPT-2's pattern.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Differs(Exception):
    """tiktoken gives a text other ids than the tokenizer itself."""


def version() -> str | None:
    """The version of tiktoken; None where it is not installed."""
    try:
        import tiktoken
    except ImportError:
        return None
    return tiktoken.__version__


class Table(NamedTuple):
    """What a tiktoken.Encoding is made of."""

    pattern: str
    ranks: dict[bytes, int]

    def encoding(self) -> Any:
        """A tiktoken.Encoding without special tokens; it takes a second for 150,000 tokens."""
        import tiktoken

        try:
            return tiktoken.Encoding(
                "tokenizer.json",
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens={},
            )
        except ValueError as error:  # a pattern that it cannot read
            raise Differs from error


def table(tokenizer: Mapping[str, Any], bytes_of: Mapping[str, int]) -> Table | None:
    """The table of a tokenizer; None if it is no byte-level BPE whose ids are in the order of its
    merges, or if tiktoken is not installed.

    Args:
      tokenizer: the content of a tokenizer.json.
      bytes_of: the byte that each character of a vocabulary's tokens stands for.
    """
    model = tokenizer["model"]
    pattern = _pattern(tokenizer.get("pre_tokenizer") or {})
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    is_plain = model.get("type") == "BPE" and not any(model.get(option) for option in options)
    if pattern is None or not is_plain or version() is None:
        return None
    added = {token["content"] for token in tokenizer["added_tokens"]}
    ranks = {}
    for token, i in model["vocab"].items():
        if not set(token) <= bytes_of.keys():
            if token in added:
                continue
            return None
        ranks[bytes(bytes_of[character] for character in token)] = i
    merged = ["".join(m) if isinstance(m, list) else m.replace(" ", "") for m in model["merges"]]
    ids = [model["vocab"].get(token, -1) for token in merged]
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    return Table(pattern, ranks) if has_all_bytes and ids == sorted(ids) else None


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The expression that splits a text; None if this is done in another way."""
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_PATTERN if steps[0].get("use_regex", True) else None
    split = steps[0]
    wanted = {"type": "Split", "behavior": "Isolated", "invert": False}
    if len(steps) > 2 or steps[1].get("use_regex", True):
        return None
    if any(split.get(key) != value for key, value in wanted.items()):
        return None
    return split["pattern"].get("Regex")
