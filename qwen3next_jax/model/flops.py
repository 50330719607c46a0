"""Floating-point operations and parameters, counted from the configuration: one formula for MFU, planner and sweeps.

"Model FLOPs" are the products that the mathematics of one training step needs, forward and backward, whatever the
program does to get them:

- a product of [m, k] and [k, n] is 2·m·k·n; the backward of a product is two of the same size, so a step is 3 × forward;
- causal attention reads (T + 1)/2 keys per query. Packed documents read fewer, which is not taken off;
- the gated delta rule is its token recurrence: per token and value head S ← e^g S + β k (v − Sᵀk)ᵀ and Sᵀq, three
  products of K·V. The chunked form executes more (8·C/d of 6 for chunks of C): that is the kernel's choice, as
  recomputation (remat) is the program's, and neither raises the MFU;
- of the experts, only the chosen ones.

Left out: whatever is no product (norms, activations, softmax, the depthwise convolution, rotary embedding, the embedding
lookup, the optimizer), under 1 % of the released model.
"""

from typing import NamedTuple

from qwen3next_jax.config import FULL, LINEAR, ModelConfig

BACKWARD_OVER_FORWARD = 2


class ForwardFlops(NamedTuple):
    """Forward FLOPs per token by part. Each part is the sum over its layers; MTP holds all of its module and its head."""

    recurrent: float  # the mixers of linear-attention layers: projections and delta rule
    attention: float  # the mixers of full-attention layers: projections, scores and values
    router: float
    experts: float  # chosen experts
    shared_expert: float
    dense_mlp: float
    head: float
    mtp: float

    @property
    def total(self) -> float:
        return sum(self)


class ParameterCounts(NamedTuple):
    """total: of the whole model. embeddings: input table and output head. mtp: the multi-token prediction module.
    active: what one token passes in the trunk, embeddings left out (the "A3B" of the released model's name)."""

    total: int
    embeddings: int
    mtp: int
    active: int


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of one training token, forward and backward, in rows of `sequence_length` tokens."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops_per_token(config, sequence_length).total


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> ForwardFlops:
    """Model FLOPs of one token's forward pass, by part."""
    c, d = config, config.hidden_size
    linear, full = c.layer_types.count(LINEAR), c.layer_types.count(FULL)
    sparse = sum(has_experts for _, has_experts in c.layer_kinds)
    attention = 2 * _attention_weights(c) + 2 * (sequence_length + 1) * c.num_attention_heads * c.head_dim
    recurrence = (6 if c.erase else 4) * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    router, shared = 2 * d * c.num_experts, 2 * _shared_expert_weights(c)
    experts = 2 * c.num_experts_per_tok * _expert_weights(c)
    head = 2 * d * c.vocab_size
    dense = 2 * 3 * d * c.intermediate_size
    mtp_mlp = router + shared + experts if c.num_experts else dense
    return ForwardFlops(
        recurrent=linear * (2 * _recurrent_weights(c) + recurrence),
        attention=full * attention,
        router=sparse * router,
        experts=sparse * experts,
        shared_expert=sparse * shared,
        dense_mlp=(c.num_hidden_layers - sparse) * dense,
        head=head,
        mtp=c.mtp_depth * (2 * 2 * d * d + attention + mtp_mlp + head),
    )


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """How many parameters the model of this configuration has."""
    c, d = config, config.hidden_size
    embeddings = c.vocab_size * d * (1 if c.tie_word_embeddings else 2)
    total = active = 0
    for kind, has_experts in c.layer_kinds:
        mixer = _recurrent_parameters(c) if kind == LINEAR else _attention_parameters(c)
        per_layer, per_token = _mlp_parameters(c, has_experts)
        total += mixer + per_layer + 2 * d
        active += mixer + per_token + 2 * d
    mtp = 0
    if c.mtp_depth:
        mtp = _attention_parameters(c) + _mlp_parameters(c, c.num_experts > 0)[0] + 2 * d + 2 * d * d + 3 * d
    return ParameterCounts(total + d + embeddings + mtp, embeddings, mtp, active + d)


def _recurrent_weights(c: ModelConfig) -> int:
    """Elements of the matrices of one Gated DeltaNet mixer."""
    values = c.linear_num_value_heads * c.linear_value_head_dim
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    gates = (c.beta_gate + c.decay_gate) * c.linear_num_value_heads
    return c.hidden_size * (2 * keys + (1 + c.linear_output_gate) * values + gates + values)


def _recurrent_parameters(c: ModelConfig) -> int:
    values = c.linear_num_value_heads * c.linear_value_head_dim
    channels = 2 * c.linear_num_key_heads * c.linear_key_head_dim + values
    convolution = c.short_convolution * c.linear_conv_kernel_dim * channels
    return _recurrent_weights(c) + convolution + c.decay_gate * 2 * c.linear_num_value_heads + c.linear_value_head_dim


def _attention_weights(c: ModelConfig) -> int:
    """Elements of the matrices of one gated attention mixer: query and gate, key, value, output."""
    return c.hidden_size * c.head_dim * ((2 + c.attention_output_gate) * c.num_attention_heads + 2 * c.num_key_value_heads)


def _attention_parameters(c: ModelConfig) -> int:
    return _attention_weights(c) + c.qk_norm * 2 * c.head_dim


def _expert_weights(c: ModelConfig) -> int:
    return 3 * c.hidden_size * c.moe_intermediate_size


def _shared_expert_weights(c: ModelConfig) -> int:
    s = c.shared_expert_intermediate_size
    return 3 * c.hidden_size * s + (c.hidden_size if s else 0)


def _mlp_parameters(c: ModelConfig, has_experts: bool) -> tuple[int, int]:
    """(of the layer's MLP, of which one token passes)."""
    if not has_experts:
        dense = 3 * c.hidden_size * c.intermediate_size
        return dense, dense
    common = c.hidden_size * c.num_experts + _shared_expert_weights(c)
    return common + c.num_experts * _expert_weights(c), common + c.num_experts_per_tok * _expert_weights(c)
