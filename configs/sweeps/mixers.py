"""Compares six mixers as the recurrent layers of a 3:1 hybrid of 4 layers, with all other settings
equal: 6 mixers × 2 tasks (text, recall) × 3 seeds.

    uv run qwen3next sweep configs/sweeps/mixers.py

Time: 61 minutes on a 2-core AMD EPYC without accelerator.
Result: Gated DeltaNet and Mamba-2 have the lowest loss on text, KDA has the best recall
(docs/notes/studies.md).

Five of the six mixers are forms of one recurrence. The decay of the state is constant (retnet), per
head (mamba2, gated_deltanet) or per key channel (gla, kda). A write is added to the state (retnet,
mamba2, gla) or replaces the value that the state holds for the key (gated_deltanet, kda). The sixth
mixer is attention in a sliding window, whose keys and values are as many numbers as a recurrent
state has, 16 × 64 = 2 × 16 × 32.
"""

LAYERS = {
    "model.num_hidden_layers": 4,
    "model.hidden_size": 64,
    "model.head_dim": 32,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 2,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 32,
    "model.num_experts": 0,
    "model.mtp_depth": 0,
    "model.rope_theta": 10_000.0,
}
# Mixer → width of the MLPs, with which all have as many parameters, within 0.3 %, and FLOPs per
# token, within 2 %.
WIDTHS = {
    "gated_deltanet": 140,
    "kda": 128,
    "retnet": 143,
    "mamba2": 140,
    "gla": 137,
    "sliding_window": 143,
}


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": LAYERS
        | {
            "eval.sample_tokens": 0,
            "eval.every": 600,
            "checkpoint.every": 600,
            "train.log_every": 50,
            "telemetry.diagnostics_every": 0,
        },
        "x": "mixer",
        "axes": {
            "train.seed": [0, 1, 2],
            "mixer": {
                name: {"model.linear_mixer": name, "model.intermediate_size": width}
                | ({"model.mixer.window": 16} if name == "sliding_window" else {})
                for name, width in WIDTHS.items()
            },
            "task": {
                "text": {"train.steps": 200, "train.sequence_length": 128},
                "recall": {
                    "data.source": "mqar",
                    "data.synthetic.pairs": 8,
                    "model.vocab_size": 64,
                    "train.steps": 600,
                    "train.batch_size": 32,
                    "train.sequence_length": 32,
                },
            },
        },
    }
