"""Gated attention without positions, for some layers of a model whose others have them (SmolLM3,
Llama 4; 2501.18795).
"""

from qwen3next_jax.model.mixers.gated_attention import GatedAttention


class NoPEAttention(GatedAttention):
    """`GatedAttention` whose queries and keys are not rotated."""

    switches = ("attention_output_gate", "qk_norm")
    weights_of = GatedAttention
    hf_entries = None

    def placed(self, x_BTNK, positions_BT):
        return x_BTNK
