"""What a model says after a text, up to a stop string: rows of a batch decoded together."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.inference.decode import BLOCK, STOPPED, generate
from qwen3next_jax.model import Qwen3Next


def continued(model: Qwen3Next, tokenizer: Tokenizer, prompts: Sequence[np.ndarray], stops: Sequence[Sequence[str]], *, rows: int,
              max_new_tokens: int, temperature: float = 0.0, seed: int = 0, mesh: Mesh | None = None) -> list[str]:
    """The text after each prompt, up to the end of a document or the first of its stop strings.

    Args:
      prompts: at most `rows` of them; what is missing is filled up, so that batches of all sizes run one compiled program.
      stops: of each prompt, the strings before which its text ends. Decoding ends when every row has met one.
      max_new_tokens, temperature, seed, mesh: as of `generate`.
    """
    filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
    steps: list[np.ndarray] = []

    def texts() -> list[str]:
        columns = np.array(steps, np.int32).reshape(-1, rows).T[:len(prompts)]
        return [tokenizer.decode(column[column != STOPPED]) for column in columns]

    def ended() -> bool:
        return all(token == STOPPED or any(stop in text for stop in of) for token, text, of in zip(steps[-1], texts(), stops))

    for tokens_B in generate(model, filled, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
                             stop_ids=(tokenizer.eos_id,), mesh=mesh):
        steps.append(tokens_B)
        if (len(steps) + 1) % BLOCK == 0 and ended():  # where a block of `generate` ends: 1, 3, 7, 15, 23 …
            break
    return [min((text.split(stop)[0] for stop in of), key=len, default=text) for text, of in zip(texts(), stops)]
