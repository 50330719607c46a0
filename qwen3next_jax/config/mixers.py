"""Token mixers by name, as import strings: `model.layer_types`, `model.linear_mixer` and
`model.full_mixer` name lines of this table.

A mixer is one file of `model/mixers/` and one line here (docs/extending.md); those beside the
released model's are in `further/`.
"""

from qwen3next_jax.config.further.mixers import FURTHER_MIXERS

MIXERS = {
    "gated_deltanet": "qwen3next_jax.model.mixers.gated_deltanet:GatedDeltaNet",
    "gated_attention": "qwen3next_jax.model.mixers.gated_attention:GatedAttention",
} | FURTHER_MIXERS
