"""Cuts a long text into parts that get the same token ids as in the whole text.

The tokenizers library encodes a text on one core, and needs about a hundred bytes of memory per
byte of text. A long document is therefore encoded in parts. A document is cut only after line ends
or at a single space between words, and only under two conditions:
  - No token spans the cut: the pre-tokenizer splits texts at such places, or the model is a BPE
    without a token that holds characters of both sides of such a cut.
  - The characters around the cut get the same ids with the cut and without it. The cut changes ids
    if a normalizer strips the text, or if a token beside the cut takes the space at the cut. If the
    tokenizer puts a space before every text, neither part holds the space at the cut.
"""

import functools
import re
from collections.abc import Iterable, Iterator

import tokenizers

from qwen3next_jax.common.errors import warn
from qwen3next_jax.data.added_tokens import panic_as_user_error

LONGEST = 1 << 17  # characters of a part, unless its text has no place for a cut
_AROUND = 256  # characters on each side of a cut that are compared
_SEARCHED = 1 << 12  # characters before the end of a part in which a cut is looked for
_TRIED = 16  # of the places there

# Few white characters around a cut after line ends, so that what is compared holds other ones too.
_LINE_ENDS = re.compile(r"(?<=\S)(?:[ \t]{0,8}\r?\n){1,8}(?=[ \t]{0,64}\S)")
# The same with the white characters before the next line's text. Some tokenizers keep the last of
# them with that text, and all others with the line end.
_INDENTED = re.compile(r"(?<=\S)(?:[ \t]{0,8}\r?\n){1,8}[ \t]{1,64}(?=\S)")
_SPACE = re.compile(r"(?<=\w) (?=\w)")
_SAID = 1 << 23  # if a text has so many characters without a place for a cut, a note tells the user
# What a piece, or a token, holds that has characters of both sides. Byte-level vocabularies write Ċ
# for the line end and Ġ for the space, vocabularies of SentencePiece ▁ for the space.
_OVER_LINE_END, _OVER_SPACE = re.compile("[\nĊ][^\nĊ]"), re.compile("[^ Ġ▁][ Ġ▁]")
_PROBE = ("one", "Two", "3", "four", "5x", "é", "中", "ж", "x", "Yy", "77")


@functools.cache
def _warn_uncut_text() -> None:
    warn(
        f"a document has more than {_SAID >> 20} million characters without a place where a cut is "
        "known to change no token: they are tokenized as a whole, which takes 100 bytes of memory "
        "or more for each; divide the document if memory runs out"
    )


class Cutter:
    """Cuts texts for one tokenizer.

    Args:
      tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer

    def cut(self, text: Iterable[str]) -> Iterator[str]:
        """Cuts a text, and yields its parts in order.

        Args:
          text: the text, in pieces of any length.
        """
        rest, searched = "", 0
        for piece in text:
            rest += piece
            while len(rest) > searched + LONGEST + _AROUND:
                end, start = self._find_cut(rest, searched, searched + LONGEST) or (0, 0)
                if end:
                    yield rest[:end]
                    rest, searched = rest[start:], 0
                else:
                    searched += LONGEST
                    if searched >= _SAID:
                        _warn_uncut_text()
        yield rest

    def _find_cut(self, text: str, first: int, stop: int) -> tuple[int, int] | None:
        """Returns a cut as (end of the left part, start of the right part); None if no cut keeps
        the ids.
        """
        for pattern, cuts in self._cut_patterns:
            places = list(pattern.finditer(text, max(first, stop - _SEARCHED), stop))
            for place in places[: -_TRIED - 1 : -1]:
                for before, after in cuts:
                    end, start = place.end() + before, place.end() + after
                    if self._keeps_ids(text, end, start):
                        return end, start
        return None

    def _keeps_ids(self, text: str, end: int, start: int) -> bool:
        left, right = text[max(0, end - _AROUND) : end], text[end : end + _AROUND]
        return self._token_ids(left + right) == self._token_ids(left) + self._token_ids(
            right[start - end :]
        )

    def _token_ids(self, text: str) -> list[int]:
        with panic_as_user_error():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _cut_patterns(self) -> list[tuple[re.Pattern[str], list[tuple[int, int]]]]:
        """The places at which a text may be cut: for each pattern, the cuts to try at a match. A
        cut is (end of the left part, start of the right part), counted from the end of the match.
        """
        line_ends = []
        if self._no_token_spans("\n", _OVER_LINE_END):
            line_ends = [(_LINE_ENDS, [(0, 0)]), (_INDENTED, [(-1, -1), (0, 0)])]
        spaces = [(_SPACE, [(-1, -1), (-1, 0)])] if self._no_token_spans(" ", _OVER_SPACE) else []
        return line_ends + spaces

    def _no_token_spans(self, between: str, over: re.Pattern[str]) -> bool:
        """Whether no token holds characters of both sides of a cut at the text `between`. The
        pattern `over` matches a string with characters of both sides of the cut.
        """
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
