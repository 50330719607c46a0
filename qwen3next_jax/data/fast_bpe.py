"""Byte-level BPE by tiktoken; tiktoken is several times as fast as the tokenizers library.

tiktoken and the tokenizers library merge tokens by different rules: `tokenizers` merges the pairs
in its list of merges; tiktoken merges any two neighbours whose concatenation is a token. Both merge
the pair of the lowest rank first. They give the same ids if the merges make every token of
tiktoken's table from the token's own bytes. For if two neighbours have become X and Y, only merges
inside of X and Y were made, and these are also made if the bytes of XY stand alone. Alone they
become XY, so XY is a pair in the list of merges.

Two things are not covered. The libraries may split a text in different ways before merging, because
their regular expressions are of different libraries; and if several merges make one token,
`tokenizers` ranks each of them, but tiktoken has one rank for the token. So `HuggingFaceTokenizer`
compares the ids of both libraries for a sample of the texts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from qwen3next_jax.data.added_tokens import is_unmatchable
from qwen3next_jax.data.tokens import DifferentIds

# GPT-2's pattern. ByteLevel(use_regex=True) splits texts by it.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WHITE_SPACE = r"|\s+(?!\S)|\s+"  # how the patterns of the usual vocabularies end
# UTF-8 has no others. Vocabularies of the GPT-NeoX kind lack some of the rest.
_BYTES_OF_TEXT = (*range(0xC0), *range(0xC2, 0xF5))
# (behavior, invert) of a Split whose pieces are the matches of its pattern. They are the same where
# the pattern matches all of a text, as the usual ones do.
_SPLITS = (("Isolated", False), ("Removed", True))


def tiktoken_version() -> str | None:
    """Returns the version of tiktoken; None if it is not installed."""
    try:
        import tiktoken
    except ImportError:
        return None
    return tiktoken.__version__


class TiktokenTable(NamedTuple):
    """The arguments of the constructor of tiktoken.Encoding.

    Attributes:
      pattern: regular expression that splits a text before merging.
      ranks: the bytes of each token → its id.
    """

    pattern: str
    ranks: dict[bytes, int]

    def encoding(self) -> Any:
        """Returns a tiktoken.Encoding without special tokens. tiktoken takes a second to make an
        Encoding of 150,000 tokens.

        Raises:
          DifferentIds: tiktoken cannot read `pattern`.
        """
        import tiktoken

        try:
            return tiktoken.Encoding(
                "tokenizer.json",
                pat_str=_faster_pattern(self.pattern),
                mergeable_ranks=self.ranks,
                special_tokens={},
            )
        except ValueError as error:  # tiktoken cannot read the pattern
            raise DifferentIds from error


def tiktoken_table(
    tokenizer: Mapping[str, Any], bytes_of: Mapping[str, int], added: Collection[str]
) -> TiktokenTable | None:
    """Returns the `TiktokenTable` of a tokenizer. Returns None if tiktoken cannot give the ids of
    the tokenizer: the tokenizer is not a plain byte-level BPE, lacks a token for a byte, has ids in
    another order than its merges, or has merges of which tiktoken could make another token.

    Args:
      tokenizer: the content of a tokenizer.json.
      bytes_of: character in the vocabulary's tokens → the byte that it stands for.
      added: the added tokens, which are cut out of a text before it is split.
    """
    model = tokenizer["model"]
    pattern = _split_pattern(tokenizer.get("pre_tokenizer") or {})
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    is_plain = model.get("type") == "BPE" and not any(model.get(option) for option in options)
    if pattern is None or not is_plain:
        return None
    pairs = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    listed = {*pairs}
    ranks, bytes_of_token = {}, {}
    for token, i in model["vocab"].items():
        if is_unmatchable(token):
            continue
        if not set(token) <= bytes_of.keys():
            if token in added:
                continue
            return None
        bytes_of_token[token] = bytes(bytes_of[character] for character in token)
        ranks[bytes_of_token[token]] = i
    whole_texts_first = model.get("ignore_merges")
    for token in _tokens_without_merges(model["vocab"], pairs, bytes_of_token):
        if not whole_texts_first or token in added:
            del ranks[bytes_of_token[token]]
        elif not all(pair in listed for pair in _halves(token) if bytes_of_token.keys() >= {*pair}):
            return None  # a piece that is the token has its id, but a longer one may not contain it
    ids = [model["vocab"].get(left + right, -1) for left, right in pairs]
    has_all_bytes = all(bytes([byte]) in ranks for byte in _BYTES_OF_TEXT)
    return TiktokenTable(pattern, ranks) if has_all_bytes and ids == sorted(ids) else None


def _tokens_without_merges(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], tokens: Iterable[str]
) -> list[str]:
    """Returns those of `tokens` that the merges of a BPE do not make from the token's bytes."""
    model = tokenizers.models.BPE(vocabulary, merges)
    return [t for t in tokens if [one.id for one in model.tokenize(t)] != [vocabulary[t]]]


def _halves(token: str) -> list[tuple[str, str]]:
    return [(token[:i], token[i:]) for i in range(1, len(token))]


def _faster_pattern(pattern: str) -> str:
    """Returns a pattern with the same matches as `pattern`, which tiktoken finds faster.

    If a pattern has a look-ahead, tiktoken tries the pattern's alternatives one after the other.
    tiktoken tries all alternatives of a group without a look-ahead at once. The last alternative,
    `\\s+`, can match only a single white-space character, so `\\s` matches the same.
    """
    if not pattern.endswith(_WHITE_SPACE):
        return pattern
    return rf"(?:{pattern.removesuffix(_WHITE_SPACE)})|\s+(?!\S)|\s"


def _split_pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Returns the regular expression by which the tokenizer splits a text; None if it splits
    texts in a way that `TiktokenTable` cannot express.
    """
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_PATTERN if steps[0].get("use_regex", True) else None
    split = steps[0]
    if len(steps) > 2 or steps[1].get("use_regex", True) or split.get("type") != "Split":
        return None
    if (split.get("behavior"), split.get("invert")) not in _SPLITS:
        return None
    return split["pattern"].get("Regex")
