"""Checks for models whose attention masks are not causal. With a mask that is not causal, each
token sees the first tokens of its document (a prefix) or the whole document, including later
tokens. A token that earlier tokens see cannot be a target of training, evaluation or decoding. The
method `Mixer.noncausal_prefix_tokens` returns how many tokens at the start of a document are
visible to earlier tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import document_positions


def noncausal_prefix_tokens(config: ModelConfig) -> float:
    """Returns how many tokens at the start of a document are visible to earlier tokens: the
    largest `Mixer.noncausal_prefix_tokens` of the model's mixers. The number is 0 for a causal
    model.
    """
    names = dict.fromkeys(name for name, _ in config.mixers_and_sparsity)
    return max(mixer_class(name).noncausal_prefix_tokens(config) for name in names)


def mask_seen_targets(config: ModelConfig, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns `batch` with a `target_mask` [B, T] that excludes the tokens that the model sees
    before it predicts them; `batch` itself if the model is causal.

    Args:
      config: the settings of the model.
      batch: segment_ids [B, T], and target_mask [B, T] if the batch has one.

    Raises:
      UserError: the model sees every token before it predicts it.
    """
    ahead = noncausal_prefix_tokens(config)
    if ahead == math.inf:
        raise UserError(
            f"{_mask_text(config)}: every token sees the one that it is to predict, so that there "
            "is nothing to learn: expected a causal mask, or a prefix, to train and to evaluate"
        )
    if ahead == 0:
        return batch
    after_prefix = document_positions(jnp.asarray(batch["segment_ids"])) >= ahead
    return batch | {
        "target_mask": after_prefix & batch["target_mask"]
        if "target_mask" in batch
        else after_prefix
    }


def check_causal_for_scoring(config: ModelConfig) -> None:
    """Raises UserError if the model is not causal. A model that is not causal sees some tokens
    before it predicts them, so the scores of these tokens would mean nothing.
    """
    require(
        noncausal_prefix_tokens(config) == 0,
        f"{_mask_text(config)}: tokens may read the token that they must predict: expected a "
        "causal mask, or the evaluation heldout, which leaves the prefix out",
    )


def check_rows_exceed_prefix(config: ModelConfig, length: int) -> None:
    """Raises UserError if a row of `length` tokens is not longer than the mask's prefix, so that
    the row has no token to predict.
    """
    ahead = noncausal_prefix_tokens(config)
    require(
        ahead in (0, math.inf) or ahead < length,
        f"{_mask_text(config)}: a row of {length} tokens (train.sequence_length) has none after "
        f"the prefix of {ahead}, and so nothing to predict: expected a prefix of less than "
        f"{length}",
    )


def why_no_targets(config: ModelConfig) -> str:
    """Returns the reason why no token of a batch is a target, and what the user can do, as the last
    part of an error message.
    """
    ahead = noncausal_prefix_tokens(config)
    if ahead:
        return (
            f"with {_mask_text(config)} none of its documents is longer than the prefix of {ahead} "
            "tokens: expected longer documents, or a shorter prefix"
        )
    return "expected documents of two tokens or more, some of which count as targets"


def check_prompts_hold_prefix(config: ModelConfig, prompts: Sequence, chunk: int) -> None:
    """Raises UserError if decoding cannot process the mask's prefix in one call of the model, as
    the mask requires, or if a prompt is not longer than the prefix.

    Args:
      config: the settings of the model.
      prompts: the tokens of each prompt. All tokens of a prompt but the last go through the model
        before decoding begins.
      chunk: the number of a prompt's tokens that go through the model in one call.
    """
    ahead = noncausal_prefix_tokens(config)
    if ahead in (0, math.inf):
        return
    require(
        ahead <= chunk,
        f"{_mask_text(config)}: a prompt goes through the model {chunk} tokens at a time, and the "
        f"prefix must go at once: expected at most {chunk} tokens of prefix to generate",
    )
    for i, prompt in enumerate(prompts):
        require(
            len(prompt) > ahead,
            f"prompt {i} has {len(prompt)} tokens with {_mask_text(config)}: expected the whole "
            "prefix and one token more",
        )


def _mask_text(config: ModelConfig) -> str:
    """Returns the settings of the group model.mixer as a user writes them, such as
    "model.mixer.window = 64". If the group has no settings, the function returns "the mask".
    """
    return (
        ", ".join(f"model.mixer.{name} = {value!r}" for name, value in config.mixer.items())
        or "the mask"
    )
