"""Converts tokens to text one at a time, so that text can be shown while it is generated."""

from qwen3next_jax.data.tokens import Tokenizer


class DecodeStream:
    """Decodes the tokens of one text incrementally. `add` returns text as soon as the characters
    are complete, and never a part of a UTF-8 character.

    Some tokenizers decode a token differently if it is the first token of a text. To decode the
    continuation of a prompt, add the prompt's tokens first and ignore the text that `add` returns
    for them.
    """

    # A character has at most 4 bytes, and a token has at least one byte. So a longer sequence of
    # tokens that cannot be decoded is invalid, and not an unfinished character.
    _LONGEST_TAIL = 8

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # The tokens of the text that was returned last. New tokens are decoded together with these,
        # because some tokenizers decode a token differently after others.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Adds a token and returns the text that the token completes, which may be ""."""
        self._pending.append(int(token))
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._LONGEST_TAIL:
            return ""
        return self._mark_as_shown(text)

    def end(self) -> str:
        """Returns the remaining text; an unfinished character becomes U+FFFD."""
        return self._mark_as_shown(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(shown) :]

    def _mark_as_shown(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text
