"""Counts of parameters and of floating-point operations (FLOPs), computed from the parameters'
declarations. The MFU, the planner and sweeps use the counts of this module.

"Model FLOPs" are the operations of the matrix products that the mathematics of one training step
needs, forward and backward. Model FLOPs do not depend on how a program computes the products:

- A product of [m, k] and [k, n] has 2·m·k·n operations. Its backward pass has two products of the
  same size, so a step has 3 times the operations of the forward pass.
- In causal attention over T tokens a query reads (T + 1)/2 keys on average. The count is the same
  for rows with several documents, although the queries of these rows read fewer keys.
- Each mixer counts its products between activations (`Mixer.activation_flops`). The gated delta
  rule is counted as a recurrence over tokens: S ← e^g S + β k (v − Sᵀk)ᵀ and Sᵀq. The gated delta
  rule has three products of K·V multiplications and additions for each token and value head, where
  K and V are the widths of a key and of a value. The operations that the chunked algorithm and
  recomputation (remat) add are not counted, so they do not raise the MFU.
- Only the routed experts that a token chooses are counted.
- Adapters (`model.lora`) are not counted, as if they were merged into the matrices.

The count leaves out everything that is not a matrix product: norms, activations, softmax, the
depthwise convolution, rotary embedding, the embedding lookup, the optimizer. In the released model,
the operations that are left out are less than 1 % of all operations.
"""

from typing import NamedTuple

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.adapter_names import config_without_adapters
from qwen3next_jax.model.language_model import parameter_declarations
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.parameters import ParameterDeclaration

BACKWARD_OVER_FORWARD = 2


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a model. "The trunk" is the model without the MTP module.

    Attributes:
      total: parameters of the whole model.
      embeddings: parameters of the input table and the output head.
      mtp: parameters of the multi-token prediction module.
      active: parameters of the trunk that one token uses, without embeddings ("A3B" in the released
        model's name says that they are 3 billion).
    """

    total: int
    embeddings: int
    mtp: int
    active: int


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Returns the model FLOPs per token of the forward and the backward pass, in rows of
    `sequence_length` tokens.
    """
    return (1 + BACKWARD_OVER_FORWARD) * sum(
        forward_flops_per_token(config, sequence_length).values()
    )


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Returns the model FLOPs per token of the forward pass, for each part of the model.

    Returns:
      {name of the part: FLOPs}. The name of a part is that of a mixer, or one of the following:
        "router";
        "experts", the routed experts that a token chooses;
        "mlp", dense MLPs and the shared expert;
        "residual", the products of a residual stream that is wider than the model;
        "embedding", the projections of the n-gram embeddings (`model.ple`);
        "head";
        "mtp", the MTP module and the head at every MTP depth.
    """
    head = 2.0 * config.hidden_size * config.vocab_size  # the same if the embedding is the head
    parts = {"head": head, "mtp": config.mtp_depth * head}
    for path, parameter in parameter_declarations(config_without_adapters(config)).items():
        if parameter.dim_roles and parameter.kind != "head":
            part = _part_name(config, path, parameter)
            parts[part] = parts.get(part, 0.0) + 2 * elements_used_by_token(config, parameter) * (
                config.mtp_depth if part == "mtp" else 1
            )
    for mixer in config.mixers:
        parts[mixer] = parts.get(mixer, 0.0) + mixer_class(mixer).activation_flops(
            config, sequence_length
        )
    placement = config.block.import_part("placement")
    residual_flops = placement.residual_flops(config, config.num_hidden_layers)
    if residual_flops:
        parts["residual"] = parts.get("residual", 0.0) + residual_flops
    if config.mtp_depth:
        mixer = mixer_class(config.full_mixer).activation_flops(config, sequence_length)
        parts["mtp"] += config.mtp_depth * (mixer + placement.residual_flops(config, 1))
    return parts


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts the parameters of a model with these settings, without making any array."""
    total = embeddings = mtp = active = 0
    for path, parameter in parameter_declarations(config).items():
        total += parameter.size
        if parameter.kind in ("embedding", "head"):
            embeddings += parameter.size
        elif path.startswith("mtp/"):
            mtp += parameter.size
        else:
            active += elements_used_by_token(config, parameter)
    return ParameterCounts(total, embeddings, mtp, active)


def elements_used_by_token(config: ModelConfig, parameter: ParameterDeclaration) -> int:
    """Returns how many elements of the parameter one token uses: all of them, or those of the
    experts that a token chooses.
    """
    chosen = (
        min(parameter.num_experts, config.num_experts_per_tok) if parameter.num_experts > 1 else 1
    )
    return parameter.size // parameter.num_experts * chosen


def _part_name(config: ModelConfig, path: str, parameter: ParameterDeclaration) -> str:
    """Returns the name of the part of the model to which a parameter belongs, such as "experts";
    `forward_flops_per_token` lists the names.
    """
    group, *place = path.split("/")
    if group == "mtp":
        return "mtp"
    if parameter.kind == "router" or parameter.num_experts > 1:
        return "router" if parameter.kind == "router" else "experts"
    if group != "layers" or place[1] in ("mixer_norm", "mlp_norm"):
        return "residual"
    mixer = config.mixers[config.layer_stacks[int(place[0])][0]]
    return mixer if place[1] == "mixer" else place[1]
