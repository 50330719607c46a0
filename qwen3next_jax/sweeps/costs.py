"""Counts parameters, FLOPs and cache sizes from the settings of a run, without running its
model.
"""

from typing import NamedTuple

from qwen3next_jax.config import Config, ModelConfig
from qwen3next_jax.inference.cache import cache_bytes_by_kind
from qwen3next_jax.model.flops import flops_per_token, parameter_counts
from qwen3next_jax.training.stages import resolve_stages

# The length in tokens for which the cache is counted. Bytes per token do not depend on it, because
# the attention cache grows linearly.
_CACHE_LENGTH = 1024


class Costs(NamedTuple):
    """Costs of a run.

    Attributes:
      parameters: number of parameters of the model.
      tokens: number of tokens of the whole run, padding included.
      flops_per_token: FLOPs of the forward and backward pass per token, averaged over all tokens of
        the run.
      cache_bytes_per_token: bytes that the attention cache of one sequence needs for each token.
      state_bytes: bytes of the recurrent states of one sequence, which do not grow with the length
        of the sequence.
    """

    parameters: int
    tokens: int
    flops_per_token: float
    cache_bytes_per_token: float
    state_bytes: float


def count_costs(config: Config) -> Costs:
    """Counts the costs of training through all stages of `config`, and of decoding one sequence."""
    model, stages = config.model, resolve_stages(config)
    tokens = sum(stage.tokens_per_step * stage.steps for stage in stages)
    flops = sum(
        flops_per_token(model, stage.sequence_length) * stage.tokens_per_step * stage.steps
        for stage in stages
    )
    cache = cache_bytes_by_kind(model, 1, _CACHE_LENGTH)
    return Costs(
        parameters=parameter_counts(model).total,
        tokens=tokens,
        flops_per_token=flops / tokens,
        cache_bytes_per_token=cache["slots"] / _CACHE_LENGTH,
        state_bytes=cache["state"],
    )


def parameters_or_flops_per_token(model: ModelConfig, sequence_length: int, quantity: str) -> float:
    """Returns the number of parameters of a model, or its FLOPs per token (forward and backward).

    Args:
      sequence_length: number of tokens per row, on which the FLOPs depend.
      quantity: the number to return: "parameters" or "flops".
    """
    if quantity == "parameters":
        return parameter_counts(model).total
    return flops_per_token(model, sequence_length)
