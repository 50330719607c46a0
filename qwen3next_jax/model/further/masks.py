"""What a mask that shows later tokens (`mixer.mask`) asks of training, evaluation and decoding."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import document_positions


def mask_prefix_targets(config: ModelConfig, batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` whose `target_mask` leaves out the tokens that the model has seen when it predicts
    them.

    Raises:
      UserError: it has seen all of them.
    """
    mask, prefix = config.mixer.mask, config.mixer.prefix_tokens
    require(
        mask != "bidirectional",
        "model.mixer.mask = 'bidirectional': every token sees the one that it is to predict, so "
        "that there is nothing to learn: expected 'causal' or 'prefix' to train and to evaluate",
    )
    if mask == "causal":
        return batch
    behind = document_positions(jnp.asarray(batch["segment_ids"])) >= prefix
    return batch | {
        "target_mask": behind & batch["target_mask"] if "target_mask" in batch else behind
    }


def check_prompts(config: ModelConfig, prompts: Sequence, chunk: int) -> None:
    """Raises UserError where the prefix of a prompt does not go through the model at once,
    `chunk` tokens and all but the last.
    """
    prefix = config.mixer.prefix_tokens
    require(
        prefix <= chunk,
        f"model.mixer.prefix_tokens = {prefix}: a prompt goes through the model {chunk} tokens at "
        f"a time, and the prefix must go at once: expected at most {chunk} to generate",
    )
    for i, prompt in enumerate(prompts):
        require(
            not prefix or len(prompt) > prefix,
            f"prompt {i} has {len(prompt)} tokens with model.mixer.prefix_tokens = {prefix}: "
            "expected the whole prefix and one token more",
        )
