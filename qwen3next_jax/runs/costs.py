"""What a run costs, counted from its settings: nothing is computed."""

from collections.abc import Sequence
from typing import NamedTuple

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.inference.cache import cache_bytes
from qwen3next_jax.model.flops import flops_per_token, parameter_counts
from qwen3next_jax.training.stages import ResolvedStage

_CACHE_LENGTH = 1024  # the attention cache grows linearly; this length shows by how much


class Costs(NamedTuple):
    """parameters: all of them. tokens: of the whole run, padding included. flops_per_token:
    forward and backward, the mean over these tokens. cache_bytes_per_token and state_bytes: what
    decoding keeps of one row.
    """

    parameters: int
    tokens: int
    flops_per_token: float
    cache_bytes_per_token: float
    state_bytes: float


def count_costs(model: ModelConfig, stages: Sequence[ResolvedStage]) -> Costs:
    tokens = sum(stage.tokens_per_step * stage.steps for stage in stages)
    flops = sum(
        flops_per_token(model, stage.sequence_length) * stage.tokens_per_step * stage.steps
        for stage in stages
    )
    cache = cache_bytes(model, 1, _CACHE_LENGTH)
    return Costs(
        parameters=parameter_counts(model).total,
        tokens=tokens,
        flops_per_token=flops / tokens,
        cache_bytes_per_token=cache["slots"] / _CACHE_LENGTH,
        state_bytes=cache["state"],
    )


def model_size(model: ModelConfig, sequence_length: int, what: str) -> float:
    """How many "parameters" a model has, or "flops" per token of rows of this length."""
    if what == "parameters":
        return parameter_counts(model).total
    return flops_per_token(model, sequence_length)
