"""Where a long text is cut, so that its parts get the ids that they have in the whole text.

The tokenizers library encodes a text on one core, and needs about a hundred bytes of memory per
byte of text. A long document is therefore encoded in parts. It is cut at a single line end or at a
single space between words, and there only if both of these hold:
  - The model sees the two sides apart: the tokenizer splits texts there, or the model is a BPE
    without a token that has characters of both sides. Otherwise the document is encoded whole.
  - The characters around the cut get the same ids with the cut and without it. This fails where a
    normalizer strips a text, where a token beside the cut takes its space, or where every text gets
    a space before it. In the last case the space at which the text is cut is left out.
"""

import functools
import re
from collections.abc import Iterable, Iterator

import tokenizers

from qwen3next_jax.data.added_tokens import panic_as_user_error

LONGEST = 1 << 17  # characters of a part, unless its text has no place for a cut
_AROUND = 256  # characters on each side of a cut that are compared
_SEARCHED = 1 << 12  # characters before the end of a part in which a cut is looked for
_TRIED = 16  # of the places there

_LINE_END, _SPACE = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\w) (?=\w)")
# What a piece, or a token, holds that has characters of both sides. Byte-level vocabularies write Ċ
# for the line end and Ġ for the space, vocabularies of SentencePiece ▁ for the space.
_OVER_LINE_END, _OVER_SPACE = re.compile("[\nĊ][^\nĊ]"), re.compile("[^ Ġ▁][ Ġ▁]")
_PROBE = ("one", "Two", "3", "four", "5x", "é", "中", "ж", "x", "Yy", "77")


class Cutter:
    """Cuts texts for one tokenizer.

    Args:
      tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer

    def cut(self, text: Iterable[str]) -> Iterator[str]:
        """Yields the parts of a text that are tokenized one by one.

        Args:
          text: the text, in pieces of any length.
        """
        rest, searched = "", 0
        for piece in text:
            rest += piece
            while len(rest) > searched + LONGEST + _AROUND:
                end, start = self._find(rest, searched, searched + LONGEST) or (0, 0)
                if end:
                    yield rest[:end]
                    rest, searched = rest[start:], 0
                else:
                    searched += LONGEST
        yield rest

    def _find(self, text: str, first: int, stop: int) -> tuple[int, int] | None:
        """Returns (end of the left part, start of the right part), or None."""
        for pattern, cuts in self._kinds:
            places = list(pattern.finditer(text, max(first, stop - _SEARCHED), stop))
            for place in places[: -_TRIED - 1 : -1]:
                for before, after in cuts:
                    end, start = place.start() + before, place.start() + after
                    if self._agrees(text, end, start):
                        return end, start
        return None

    def _agrees(self, text: str, end: int, start: int) -> bool:
        left, right = text[max(0, end - _AROUND) : end], text[end : end + _AROUND]
        return self._ids(left + right) == self._ids(left) + self._ids(right[start - end :])

    def _ids(self, text: str) -> list[int]:
        with panic_as_user_error():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _kinds(self) -> list[tuple[re.Pattern[str], list[tuple[int, int]]]]:
        """The kinds of places at which texts are cut: a pattern, and the ways to cut its match that
        are tried, as (characters of it that go to the left part, that are not in the right part).
        """
        line_ends = [(_LINE_END, [(1, 1)])] if self._are_apart("\n", _OVER_LINE_END) else []
        spaces = [(_SPACE, [(0, 0), (0, 1)])] if self._are_apart(" ", _OVER_SPACE) else []
        return line_ends + spaces

    def _are_apart(self, between: str, over: re.Pattern[str]) -> bool:
        """Whether the model never sees characters of both sides of a cut together."""
        text = between.join(_PROBE)
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer:
            text = normalizer.normalize_str(text)
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter else [text]
        if not any(map(over.search, pieces)):
            return True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        is_bpe = isinstance(self._tokenizer.model, tokenizers.models.BPE)
        return is_bpe and not any(map(over.search, vocabulary))
