"""Counts of parameters and of floating-point operations (FLOPs), computed from the parameters'
declarations. The MFU, the planner and sweeps use them.

"Model FLOPs" are the operations of the matrix products that the mathematics of one training step
needs, forward and backward, whatever the program does to compute them:

- A product of [m, k] and [k, n] has 2·m·k·n operations. Its backward pass has two products of the
  same size, so a step has 3 times the operations of the forward pass.
- In causal attention a query reads (T + 1)/2 keys on average. In rows with several documents,
  queries read fewer keys; the count ignores that.
- Each mixer counts its products between activations (`Mixer.activation_flops`). The gated delta
  rule is counted as a recurrence over tokens: S ← e^g S + β k (v − Sᵀk)ᵀ and Sᵀq. These are three
  products of K·V multiplications and additions for each token and value head. The chunked algorithm
  and recomputation (remat) execute more operations. The count does not include the additional
  operations, so they do not raise the MFU.
- Of the routed experts only the chosen ones count.
- Adapters (`model.lora`) do not count: the count is that of the model with merged matrices.

The count leaves out everything that is not a matrix product: norms, activations, softmax, the
depthwise convolution, rotary embedding, the embedding lookup, the optimizer. In the released model
these are less than 1 % of the operations.
"""

from typing import NamedTuple

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.adapter_names import without_adapters
from qwen3next_jax.model.language_model import declared
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.parameters import Declared

BACKWARD_OVER_FORWARD = 2


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a model. "The trunk" is the model without the MTP module.

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
    """Returns the model FLOPs of one training token, forward and backward, in a row of
    `sequence_length` tokens.
    """
    return (1 + BACKWARD_OVER_FORWARD) * sum(
        forward_flops_per_token(config, sequence_length).values()
    )


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Returns the model FLOPs of one token's forward pass, for each part of the model.

    Returns:
      {name of the part: FLOPs}. The names are the mixers' names, and "router", "experts" (the
      routed experts that a token chooses), "mlp" (dense MLPs and the shared expert), "residual"
      (what a residual stream that is wider than the model computes), "embedding" (the projections
      of `model.ple`),
      "head", and "mtp" (all of the MTP module and its use of the head, once per depth).
    """
    head = 2.0 * config.hidden_size * config.vocab_size  # the same if the embedding is the head
    parts = {"head": head, "mtp": config.mtp_depth * head}
    for path, parameter in declared(without_adapters(config)).items():
        if parameter.letters and parameter.kind != "head":
            part = _part(config, path, parameter)
            parts[part] = parts.get(part, 0.0) + 2 * used_by_token(config, parameter) * (
                config.mtp_depth if part == "mtp" else 1
            )
    for mixer in config.mixers:
        parts[mixer] = parts.get(mixer, 0.0) + mixer_class(mixer).activation_flops(
            config, sequence_length
        )
    placement = config.block.import_part("placement")
    of_residual = placement.residual_flops(config, config.num_hidden_layers)
    if of_residual:
        parts["residual"] = parts.get("residual", 0.0) + of_residual
    if config.mtp_depth:
        mixer = mixer_class(config.full_mixer).activation_flops(config, sequence_length)
        parts["mtp"] += config.mtp_depth * (mixer + placement.residual_flops(config, 1))
    return parts


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts the parameters of a model with these settings, without making any array."""
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
    """Returns how many elements of the parameter one token uses."""
    chosen = min(parameter.experts, config.num_experts_per_tok) if parameter.experts > 1 else 1
    return parameter.size // parameter.experts * chosen


def _part(config: ModelConfig, path: str, parameter: Declared) -> str:
    """Returns the part of the model to which a parameter belongs, by the name that
    `forward_flops_per_token` uses.
    """
    group, *place = path.split("/")
    if group == "mtp":
        return "mtp"
    if parameter.kind == "router" or parameter.experts > 1:
        return "router" if parameter.kind == "router" else "experts"
    if group != "layers" or place[1] in ("mixer_norm", "mlp_norm"):
        return "residual"
    mixer = config.mixers[config.layer_stacks[int(place[0])][0]]
    return mixer if place[1] == "mixer" else place[1]
