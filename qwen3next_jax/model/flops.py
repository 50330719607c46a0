"""Floating-point operations and parameters, counted from the parameters' declarations. MFU, the
planner and sweeps use these counts.

"Model FLOPs" are the operations of the matrix products that the mathematics of one training step
needs, forward and backward, whatever the program does to compute them:

- A product of [m, k] and [k, n] has 2·m·k·n operations. Its backward pass has two products of the
  same size, so a step has 3 times the operations of the forward pass.
- In causal attention a query reads (T + 1)/2 keys on average. Queries in packed documents read
  fewer keys, but the count does not consider that.
- Each mixer counts its own products that have no parameter (`Mixer.forward_flops`). The gated delta
  rule is counted by its recurrence over tokens: S ← e^g S + β k (v − Sᵀk)ᵀ and Sᵀq, three products
  of K·V multiplications and additions for each token and value head. The chunked form executes more
  operations, by the choice of the kernel, and recomputation (remat) executes more, by the choice of
  the program. Neither raises the MFU.
- Of the routed experts only the chosen ones count.

The count leaves out everything that is not a matrix product (norms, activations, softmax, the
depthwise convolution, rotary embedding, the embedding lookup, the optimizer): less than 1 % of the
released model's operations.
"""

from typing import NamedTuple

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.language_model import declared
from qwen3next_jax.model.parameters import Declared

BACKWARD_OVER_FORWARD = 2


class ParameterCounts(NamedTuple):
    """Numbers of parameters.

    Attributes:
      total: parameters of the whole model.
      embeddings: parameters of the input table and the output head.
      mtp: parameters of the multi-token prediction module.
      active: parameters of the trunk that one token uses, without embeddings (the "A3B" in the
        released model's name).
    """

    total: int
    embeddings: int
    mtp: int
    active: int


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of one training token, forward and backward, in a row of `sequence_length`
    tokens.
    """
    return (1 + BACKWARD_OVER_FORWARD) * sum(
        forward_flops_per_token(config, sequence_length).values()
    )


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Model FLOPs of one token's forward pass, by part: each mixer by name, "router", "experts"
    (the chosen ones), "mlp" (dense and shared), "residual" (the mixes of several streams),
    "embedding" (projections of a layer's own embedding), "head", and "mtp" with all of its module
    and its head, once per depth.
    """
    head = 2.0 * config.hidden_size * config.vocab_size  # also where the embedding is tied to it
    parts = {"head": head, "mtp": config.mtp_depth * head}
    for path, parameter in declared(config).items():
        if parameter.letters and parameter.kind != "head":
            part = _part(config, path, parameter)
            parts[part] = parts.get(part, 0.0) + 2 * used_by_token(config, parameter) * (
                config.mtp_depth if part == "mtp" else 1
            )
    for mixer in config.mixers:
        parts[mixer] = parts.get(mixer, 0.0) + mixer_class(mixer).forward_flops(
            config, sequence_length
        )
    if config.mtp_depth:
        parts["mtp"] += config.mtp_depth * mixer_class(config.full_mixer).forward_flops(
            config, sequence_length
        )
    return parts


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """The numbers of parameters of the model of this configuration."""
    total = embeddings = mtp = active = 0
    for path, parameter in declared(config).items():
        total += parameter.size
        if parameter.kind in ("embedding", "head"):
            embeddings += parameter.size
        elif path.startswith("mtp/"):
            mtp += parameter.size
        else:
            active += used_by_token(config, parameter)
    return ParameterCounts(total, embeddings, mtp, active)


def used_by_token(config: ModelConfig, parameter: Declared) -> int:
    """The number of the parameter's elements that one token uses."""
    chosen = min(parameter.experts, config.num_experts_per_tok) if parameter.experts > 1 else 1
    return parameter.size // parameter.experts * chosen


def _part(config: ModelConfig, path: str, parameter: Declared) -> str:
    group, *place = path.split("/")
    if group == "mtp":
        return "mtp"
    if parameter.kind == "router" or parameter.experts > 1:
        return "router" if parameter.kind == "router" else "experts"
    if group != "layers" or place[1] in ("mixer_norm", "mlp_norm"):
        return "residual"
    mixer = config.mixers[config.stacks[int(place[0])][0]]
    return mixer if place[1] == "mixer" else place[1]
