"""Finds the texts of an evaluation that occur in prepared data, by n-grams of tokens.

An n-gram is a run of 13 consecutive tokens. Brown et al., "Language Models are Few-Shot Learners"
(2020), appendix C, https://arxiv.org/abs/2005.14165, compare n-grams of at most 13 words. Touvron
et al., "Llama 2" (2023), section A.6, https://arxiv.org/abs/2307.09288, compare n-grams of tokens,
which needs no decoding of the data. This module takes the length 13 from Brown et al., and takes
n-grams of tokens, the measure and its limits from Touvron et al. The measure is the share of a
text's tokens that are part of an n-gram found in the data. A text is contaminated if at least 80 %
of its tokens are part of n-grams found in the data, and clean if fewer than 20 % are.

A tokenizer may split the edges of a text in another way when the text stands inside a document.
Therefore the first and last tokens of a text may count as not found even if the data contain the
text.

Letters: N, the number of tokens; G, the number of different n-grams of all texts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from qwen3next_jax.common.errors import UserError, require, warn
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokenized_parts import (
    FORMAT,
    TokenizedPart,
    find_part_by_key,
    open_part_tokens,
)
from qwen3next_jax.data.tokens import DifferentIds, Tokenizer, same_token_ids
from qwen3next_jax.data.workers import run_in_workers, usable_cores

NGRAM = 13  # tokens
CONTAMINATED, CLEAN = 0.8, 0.2  # shares of a text's tokens
_MULTIPLIER = 0x9E3779B97F4A7C15  # an odd number whose bits look random: 2^64 / golden ratio
_TOKENS_AT_ONCE = 1 << 15  # so that the arrays of hashes stay in the cache of a core
_READ_AT_ONCE = 1 << 24  # tokens between two reports of progress
_MOST_BITS = 26


@dataclasses.dataclass(frozen=True)
class Contamination:
    """How much of each text of an evaluation occurs in prepared data.

    Attributes:
      contained_shares: float64 [texts], the share of each text's tokens that are part of an n-gram
        found in the data; NaN for texts of fewer than `NGRAM` tokens, which have no n-gram.
      data_token_count: number of tokens of the data.
    """

    contained_shares: np.ndarray
    data_token_count: int

    def counts_by_verdict(self) -> dict[str, int]:
        """Returns the number of texts, and how many of them are contaminated, contaminated in part,
        clean, and too short to tell.
        """
        return {
            "texts": len(self.contained_shares),
            "contaminated": int((self.contained_shares >= CONTAMINATED).sum()),
            "in_part": int(
                ((CLEAN <= self.contained_shares) & (self.contained_shares < CONTAMINATED)).sum()
            ),
            "clean": int((self.contained_shares < CLEAN).sum()),
            "too_short": int(np.isnan(self.contained_shares).sum()),
        }

    def summary(self) -> str:
        """Returns the counts of contaminated and clean texts as a line of text."""
        counts = self.counts_by_verdict()
        return (
            f"{counts['texts']:,} texts against {self.data_token_count:,} tokens: "
            f"{counts['contaminated']:,} contaminated (at least {CONTAMINATED:.0%} of a text's "
            f"tokens lie in {NGRAM}-grams that the data contain), {counts['in_part']:,} in part, "
            f"{counts['clean']:,} clean (less than {CLEAN:.0%}), {counts['too_short']:,} too short "
            f"to tell (fewer than {NGRAM} tokens)"
        )

    def worst_texts(self, count: int = 10) -> list[tuple[int, float]]:
        """Returns (index, share) of the `count` texts with the largest shares, except the clean
        texts among them.
        """
        order = np.argsort(-np.nan_to_num(self.contained_shares), kind="stable")[:count]
        return [
            (int(i), float(self.contained_shares[i]))
            for i in order
            if self.contained_shares[i] >= CLEAN
        ]


def find_contamination(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    prepared_dir: str,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Contamination:
    """Compares texts with all tokens in a folder of prepared data, in one pass over the tokens.

    Args:
      texts: the texts of an evaluation.
      tokenizer: the tokenizer of the data.
      prepared_dir: the folder, `data.prepared_dir`.
      workers: number of processes; None: one per usable core.
      progress: called with (what is read, bytes read, bytes in all).

    Raises:
      UserError: the folder holds no tokens of this tokenizer, or its tokens are damaged.
    """
    store = Store(prepared_dir)
    parts = find_tokenized_parts(store, tokenizer)
    try:
        documents = tokenizer.encode_documents(texts)
    except DifferentIds:
        documents = tokenizer.slower_tokenizer.encode_documents(texts)
    index = NgramIndex([ids[:-1] for ids in documents])  # without the end token
    found = np.zeros(len(index.ngrams), bool)
    read = [0] * len(parts)

    def show(item: int, tokens: int) -> None:
        read[item] = tokens
        size = 4 if tokenizer.vocab_size > 1 << 16 else 2
        progress(prepared_dir, size * sum(read), size * sum(part.tokens for part in parts))

    scan = functools.partial(_contained_ngrams, index=index, store=store)
    for item, numbers in run_in_workers(scan, parts, workers or usable_cores(), show):
        found[numbers] = True
        show(item, parts[item].tokens)
    return Contamination(index.contained_shares(found), sum(part.tokens for part in parts))


def find_tokenized_parts(store: Store, tokenizer: Tokenizer) -> list[TokenizedPart]:
    """Returns the tokenized parts of all sources that were prepared with this tokenizer, each part
    once.

    Raises:
      UserError: no source was prepared with this tokenizer, or a part is missing.
    """
    keys: dict[str, None] = {}
    older = 0
    for name in store.names_matching("corpora/*.json"):
        content = store.read_json(name)
        if content.get("format") != FORMAT:
            older += 1
        elif same_token_ids(content["tokenizer"], tokenizer.fingerprint):
            keys |= {key: None for *_, key in content["parts"]}
    if older:
        warn(
            f"{store.root}: {older} lists of prepared files are of an older version, which gave "
            "some texts other tokens, and are left out: run qwen3next prepare once more on them"
        )
    require(bool(keys), f"{store.root}: it holds no tokens that this tokenizer made")
    parts = [find_part_by_key(store, key) for key in keys]
    if None in parts:
        raise UserError(
            f"{store.root}: the part {list(keys)[parts.index(None)]} is missing: run qwen3next "
            "prepare again"
        )
    return parts


def _contained_ngrams(
    part: TokenizedPart, progress: Callable[[int], None], index: "NgramIndex", store: Store
) -> np.ndarray:
    """Returns the indices in `index.ngrams` of the n-grams that a part contains, int64 [found]."""
    tokens, _ = open_part_tokens(store, part)
    found = np.zeros(len(index.ngrams), bool)
    for start in range(0, len(tokens), _READ_AT_ONCE):
        index.mark_contained(tokens[start : start + _READ_AT_ONCE + NGRAM - 1], found)
        progress(min(start + _READ_AT_ONCE, len(tokens)))
    return np.flatnonzero(found)


class NgramIndex:
    """The n-grams of some texts, as hashes of 64 bits. Two different n-grams have the same hash
    with a probability of 2^-64, so a pass over 15 trillion tokens with a million n-grams reports,
    on average, fewer than one n-gram that the data do not contain.

    Args:
      texts: the tokens of each text, int [n].

    Attributes:
      ngrams: uint64 [G], the different hashes, ascending.
    """

    def __init__(self, texts: Sequence[np.ndarray]):
        self._lengths = [len(ids) for ids in texts]
        hashes = [ngram_hashes(ids) for ids in texts]
        self.ngrams = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))
        self._numbers = [np.searchsorted(self.ngrams, h) for h in hashes]
        # Most n-grams of the data are in no text. This table, whose index is the first bits of a
        # hash, excludes nearly all of them without a search.
        self._shift = np.uint64(64 - min(_MOST_BITS, len(self.ngrams).bit_length() + 6))
        self._table = np.zeros(1 << (64 - int(self._shift)), bool)
        self._table[self.ngrams >> self._shift] = True

    def mark_contained(self, tokens: np.ndarray, found: np.ndarray) -> None:
        """Sets `found`, bool [G], to true for each n-gram that occurs in `tokens`, int [N]."""
        if not len(self.ngrams):
            return
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            hashes = ngram_hashes(tokens[start : start + _TOKENS_AT_ONCE + NGRAM - 1])
            hashes = hashes[self._table[hashes >> self._shift]]
            numbers = np.minimum(np.searchsorted(self.ngrams, hashes), len(self.ngrams) - 1)
            found[numbers[self.ngrams[numbers] == hashes]] = True

    def contained_shares(self, found: np.ndarray) -> np.ndarray:
        """Returns the share of each text's tokens that are part of an n-gram found in the data,
        float64 [texts]; NaN for texts without n-grams. `found`: bool [G], whether each n-gram was
        found.
        """
        shares = np.full(len(self._lengths), np.nan)
        for i, (length, numbers) in enumerate(zip(self._lengths, self._numbers, strict=True)):
            if len(numbers):
                starts = np.zeros(length, np.int64)
                starts[: len(numbers)] = found[numbers]
                # A token lies in a found n-gram if one begins at most NGRAM - 1 tokens before it.
                begun = np.cumsum(starts)
                begun[NGRAM:] -= begun[:-NGRAM].copy()
                shares[i] = (begun > 0).mean()
        return shares


def ngram_hashes(tokens: np.ndarray) -> np.ndarray:
    """Returns a hash of each run of `NGRAM` tokens, uint64 [max(0, N - NGRAM + 1)]: a polynomial
    modulo 2^64. `tokens` is int [N].
    """
    if len(tokens) < NGRAM:
        return np.zeros(0, np.uint64)
    power = [np.uint64(pow(_MULTIPLIER, k, 1 << 64)) for k in range(5)]
    one = (tokens.astype(np.uint64) + np.uint64(1)) * power[1]
    two = one[:-1] * power[1] + one[1:]
    four = two[:-2] * power[2] + two[2:]
    eight = four[:-4] * power[4] + four[4:]
    twelve = eight[:-4] * power[4] + four[8:]
    return twelve[:-1] * power[1] + one[12:]
