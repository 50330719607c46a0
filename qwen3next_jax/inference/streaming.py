"""Turns tokens into text one at a time, to show generated text while it is generated."""

from qwen3next_jax.data.tokens import Tokenizer


class DecodeStream:
    """Decodes tokens incrementally. It returns text as soon as the text is complete, and never
    half a UTF-8 character.

    To continue a prompt, add the prompt's tokens first and ignore the text that they return: some
    tokenizers decode the first token of a text differently.
    """

    # A character has at most 4 bytes and a token at least one. So a longer tail that cannot be
    # decoded is invalid, not an unfinished character.
    _LONGEST_TAIL = 8

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # The tokens of the text returned last. Some tokenizers decode a token differently after
        # others, so new tokens are decoded together with these.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Adds a token and returns the text that it completes, which may be empty."""
        self._pending.append(int(token))
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._LONGEST_TAIL:
            return ""
        return self._release(text)

    def end(self) -> str:
        """Returns the remaining text; an unfinished character becomes U+FFFD."""
        return self._release(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(shown) :]

    def _release(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text
