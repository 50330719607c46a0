"""Floating-point operations and parameters, counted from the declarations: one formula for MFU,
planner and sweeps.

"Model FLOPs" are the products that the mathematics of one training step needs, forward and
backward, whatever the program does to get them:

- a product of [m, k] and [k, n] is 2·m·k·n; the backward of a product is two of the same size,
  so a step is 3 × forward;
- causal attention reads (T + 1)/2 keys per query. Packed documents read fewer, which is not
  taken off;
- a mixer says itself what it multiplies without a parameter (`Mixer.forward_flops`). The gated
  delta rule counts as its token recurrence: per token and value head S ← e^g S + β k (v − Sᵀk)ᵀ
  and Sᵀq, three products of K·V. The chunked form executes more (8·C/d of 6 for chunks of C):
  that is the kernel's choice, as recomputation (remat) is the program's, and neither raises the
  MFU;
- of the experts, only the chosen ones count.

Left out: whatever is no product (norms, activations, softmax, the depthwise convolution, rotary
embedding, the embedding lookup, the optimizer), under 1 % of the released model.
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
      total: of the whole model.
      embeddings: of the input table and the output head.
      mtp: of the multi-token prediction module.
      active: of what one token passes in the trunk, without embeddings (the "A3B" of the released
        model's name).
    """

    total: int
    embeddings: int
    mtp: int
    active: int


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of one training token, forward and backward, in rows of `sequence_length`
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
    head = 2.0 * config.hidden_size * config.vocab_size  # of a tied embedding, too
    parts = {"head": head, "mtp": config.mtp_depth * head}
    for path, parameter in declared(config).items():
        if parameter.letters and parameter.kind != "head":
            part = _part(config, path, parameter)
            parts[part] = parts.get(part, 0.0) + 2 * _passed(config, parameter) * (
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
    """How many parameters the model of this configuration has."""
    total = embeddings = mtp = active = 0
    for path, parameter in declared(config).items():
        total += parameter.size
        if parameter.kind in ("embedding", "head"):
            embeddings += parameter.size
        elif path.startswith("mtp/"):
            mtp += parameter.size
        else:
            active += _passed(config, parameter)
    return ParameterCounts(total, embeddings, mtp, active)


def _passed(config: ModelConfig, parameter: Declared) -> int:
    """Its elements that one token passes."""
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
