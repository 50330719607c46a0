"""Compares ratios of linear to full attention layers on text and on recall, in models of 8 layers:
5 ratios × 2 seeds × 2 tasks (text, recall).

    uv run qwen3next sweep configs/sweeps/ratio.py --workers=2

Time: 18 minutes on a 2-core AMD EPYC without accelerator.
Result: the model without attention layers has the lowest loss on text; recall needs attention in at
least one of four layers (docs/notes/studies.md).

The text is the corpus of configs/tiny.py. Recall is measured on models of the same size trained on
multi-query associative recall, because a model trained on one megabyte of text recalls nothing.
"""

LAYERS = {
    "model.num_hidden_layers": 8,
    "model.hidden_size": 64,
    "model.head_dim": 32,
    "model.num_attention_heads": 2,
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 2,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 32,
    "model.num_experts": 0,
    "model.intermediate_size": 128,
    "model.mtp_depth": 0,
    "model.rope_theta": 10_000.0,
}


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": LAYERS
        | {
            "eval.sample_tokens": 0,
            "checkpoint.every": 100,
            "train.log_every": 20,
            "telemetry.diagnostics_every": 0,
        },
        "match": "parameters",
        "x": "ratio",
        "axes": {
            "ratio": ["0:1", "1:1", "3:1", "7:1", "1:0"],
            "task": {
                "text": {"train.steps": 300, "eval.every": 300, "eval.suites": ("position",)},
                "recall": {
                    "data.source": "mqar",
                    "data.synthetic.pairs": 8,
                    "model.vocab_size": 64,
                    "train.steps": 600,
                    "train.batch_size": 64,
                    "train.sequence_length": 32,
                    "eval.every": 600,
                    "eval.suites": ("mqar",),
                },
            },
            "train.seed": [0, 1],
        },
    }
