"""Text generation for evaluations: a batch of prompts, each continued until a stop string."""

from collections.abc import Sequence

import numpy as np

from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.inference.decode import concatenate_pieces, generate
from qwen3next_jax.model import Qwen3Next


def generate_until(
    model: Qwen3Next,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    stops: Sequence[Sequence[str]],
    *,
    rows: int,
    **options,
) -> list[str]:
    """Generates a continuation of each prompt.

    A continuation ends before the first of its stop strings, at the end token of the tokenizer, or
    at the limit `max_new_tokens`. Decoding of the batch ends when every row has a stop string or
    has ended.

    Args:
      prompts: int arrays of token ids, at least one and at most `rows`.
      stops: for each prompt, its stop strings.
      rows: the number of rows that are decoded. The last prompt is repeated to fill the batch, so
        that batches of all sizes run the same compiled program.
      options: further arguments of `inference.decode.generate`, such as `max_new_tokens`.

    Returns:
      The new text of each prompt, without the stop string.
    """
    filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
    pieces: list[list[np.ndarray]] = []
    texts = [""] * len(prompts)
    for piece in generate(model, filled, stop_ids=(tokenizer.eos_id,), **options):
        pieces.append(piece)
        tokens_of_rows = concatenate_pieces(pieces, rows)[: len(prompts)]
        texts = [tokenizer.decode(tokens) for tokens in tokens_of_rows]
        if all(
            # A row that got no new tokens has reached the end of its document.
            not len(new_tokens) or any(stop in text for stop in row_stops)
            for new_tokens, text, row_stops in zip(piece, texts, stops)
        ):
            break
    return [_text_before(text, row_stops) for text, row_stops in zip(texts, stops)]


def _text_before(text: str, stops: Sequence[str]) -> str:
    """Returns the part of `text` before the first occurrence of any of the stop strings."""
    return min((text.split(stop)[0] for stop in stops), key=len, default=text)
