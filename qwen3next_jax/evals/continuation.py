"""What a model says after a text, up to a stop string: rows of a batch decoded together."""

from collections.abc import Sequence

import numpy as np

from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.inference.decode import generate, joined
from qwen3next_jax.model import Qwen3Next


def continued(
    model: Qwen3Next,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    stops: Sequence[Sequence[str]],
    *,
    rows: int,
    **options,
) -> list[str]:
    """The text after each prompt, up to the end of a document or the first of its stop strings.

    Args:
      prompts: at most `rows` of them; what is missing is filled up, so that batches of all sizes
      run one compiled program. stops: of each prompt, the strings before which its text ends.
      Decoding ends when every row has met one. options: as of `generate`.
    """
    filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
    pieces: list[list[np.ndarray]] = []
    texts: list[str] = []
    for piece in generate(model, filled, stop_ids=(tokenizer.eos_id,), **options):
        pieces.append(piece)
        texts = [tokenizer.decode(tokens) for tokens in joined(pieces, rows)[: len(prompts)]]
        # none new: it has ended
        if all(
            not len(new) or any(stop in text for stop in of)
            for new, text, of in zip(piece, texts, stops)
        ):
            break
    texts = texts or [""] * len(prompts)
    return [
        min((text.split(stop)[0] for stop in of), key=len, default=text)
        for text, of in zip(texts, stops)
    ]
