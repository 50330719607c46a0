"""Compares layers on tasks that need a state (`data/state_tasks.py`): one layer of attention; one
recurrent layer with the write strength β in (0, 1) or in (0, 2), or with two writes a token (Gated
DeltaProduct); two layers of one kind, and one of each.

    uv run qwen3next sweep configs/sweeps/state.py --workers=2

Size: 10 models × 4 tasks × 3 seeds, 120 points of about 30 CPU seconds each. docs/state.md has the
results of those that were run. `--emit` prints a command for each point. Another model is one more
line of MODELS; another task, such as a5, one more of TASKS.
"""

LINEAR, FULL = "linear_attention", "full_attention"


def layers(*kinds, **settings):
    """Returns the settings of a model with these layers."""
    named = {f"model.{name}": value for name, value in settings.items()}
    return {"model.num_hidden_layers": len(kinds), "model.layer_types": kinds} | named


# Attention reads none of these switches of configs/state.py, and a model without a reader refuses
# another value than the default.
NO_RECURRENCE = {"beta_range": 1, "decay_gate": True, "short_convolution": True}
# state_recall asks for the two tokens that followed a key. A convolution over three tokens shows
# both of them the key.
THREE_TOKENS = {"short_convolution": True, "linear_conv_kernel_dim": 3}
MODELS = {
    "attention": layers(FULL, **NO_RECURRENCE),
    "recurrent, beta 1": layers(LINEAR, beta_range=1),
    "recurrent, beta 2": layers(LINEAR),
    "2 writes, beta 2": layers(LINEAR, linear_mixer="gated_deltaproduct"),
    # What configs/state.py leaves out of Qwen3-Next's recurrent layer.
    "with decay, beta 2": layers(LINEAR, decay_gate=True, decay_init="log_uniform"),
    "with convolution, beta 2": layers(LINEAR, short_convolution=True),
    "2 of attention": layers(FULL, FULL, **NO_RECURRENCE),
    "2 recurrent, beta 2": layers(LINEAR, LINEAR, **THREE_TOKENS),
    "1 of each, beta 1": layers(LINEAR, FULL, beta_range=1, **THREE_TOKENS),
    "1 of each, beta 2": layers(LINEAR, FULL, **THREE_TOKENS),
}


def short_first(short, long):
    """Returns the settings of a run of `short` steps on rows of 8 tokens, then `long` steps on rows
    of 32.
    """
    stages = ({"steps": short, "sequence_length": 8, "batch_size": 128}, {"steps": long})
    return {"train.steps": short + long, "train.stages": stages}


TASKS = {
    "parity": {"data.source": "parity"},
    "s3": {"data.source": "s3"} | short_first(200, 500),
    "modular_addition": {"data.source": "modular_addition"} | short_first(400, 1000),
    # Four keys with two values each, and recurrent layers whose keys have two numbers: a head can
    # hold at most two keys apart.
    "state_recall": {
        "data.source": "state_recall",
        "data.synthetic.pairs": 4,
        "model.vocab_size": 32,
        "model.linear_key_head_dim": 2,
        "model.linear_value_head_dim": 8,
        "train.steps": 900,
        "train.stages": (
            {"steps": 500, "sequence_length": 20, "batch_size": 64},
            {"steps": 400},
        ),
    },
}


def get_sweep():
    return {
        "base": "configs/state.py",
        "set": {"telemetry.diagnostics_every": 0, "eval.every": 1000, "checkpoint.every": 1000},
        "x": "model",
        "axes": {"model": MODELS, "task": TASKS, "train.seed": [0, 1, 2]},
    }
