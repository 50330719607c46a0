"""Generated text as it is shown while it is being made."""

from qwen3next_jax.data.tokens import Tokenizer


class DecodeStream:
    """Incremental decoding: text leaves as soon as it is complete, never half a UTF-8 character.

    To continue a prompt, feed its ids first and drop what they return: some decoders treat a
    text's first token apart.
    """

    # A character has at most 4 bytes and a token at least one, so a longer undecodable tail is not
    # an unfinished one.
    _LONGEST_TAIL = 8

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # ids already shown, kept because some decoders join tokens to what precedes
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        self._pending.append(int(token))
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._LONGEST_TAIL:
            return ""
        return self._release(text)

    def end(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        return self._release(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(shown) :]

    def _release(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text
