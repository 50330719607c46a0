"""Compares ratios of recurrent to attention layers on tasks that need a state, a lookup, or both:
four layers of width 64, with attention in every, every second, every fourth or no layer.

    uv run qwen3next sweep configs/sweeps/state_ratio.py --workers=2

Size: 22 models × 5 tasks × 3 seeds, 330 points of 25 seconds (parity) to 90 (recall).
Result: docs/state.md.
"""

LINEAR, FULL = "linear_attention", "full_attention"
EVERY = (FULL,) * 4
EVERY_SECOND = (LINEAR, FULL) * 2
EVERY_FOURTH = (LINEAR,) * 3 + (FULL,)
NONE = (LINEAR,) * 4


def layers(kinds, **settings):
    """Returns the settings of a model with these layers."""
    settings["layer_types"] = kinds
    if LINEAR not in kinds:
        # Attention reads none of these settings of configs/state.py, and a model without a reader
        # refuses another value than the default.
        settings |= {"beta_range": 1, "decay_gate": True, "short_convolution": True}
    else:
        # A convolution over three tokens lets both values of a key read the key before them. The
        # keys have two numbers: a head can hold at most two keys apart.
        settings |= {
            "short_convolution": True,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 2,
            "linear_value_head_dim": 8,
        }
    return {f"model.{name}": value for name, value in settings.items()}


NO_POSITIONS = {"full_mixer": "nope_attention"}
TWO_WRITES = {"linear_mixer": "gated_deltaproduct"}


def recurrent(name, kinds):
    """Returns the models with recurrent layers of these kinds: β in (0, 1) or in (0, 2), one or two
    writes a token, and attention, where there is any, with or without positions.
    """
    models = {}
    for beta_range in (1, 2):
        for writes, mixer in (("", {}), (", 2 writes", TWO_WRITES)):
            model = f"{name}, beta {beta_range}{writes}"
            models[model] = layers(kinds, beta_range=beta_range, **mixer)
            if FULL in kinds:
                models[f"{model}, no positions"] = layers(
                    kinds, beta_range=beta_range, **mixer, **NO_POSITIONS
                )
    return models


MODELS = {
    "every": layers(EVERY),
    "every, no positions": layers(EVERY, **NO_POSITIONS),
    **recurrent("every second", EVERY_SECOND),
    **recurrent("every fourth", EVERY_FOURTH),
    **recurrent("none", NONE),
}
TASKS = {
    # A lookup alone: four keys with a value each, then queries.
    "recall": {
        "data.source": "mqar",
        "data.synthetic.pairs": 4,
        "model.vocab_size": 64,
        "train.steps": 800,
        "train.stages": (),
        "train.batch_size": 64,
        "eval.suites": (),
    },
    # Both: four keys with two values each; the parity of the bits decides which value is asked for.
    "state_recall": {
        "data.source": "state_recall",
        "data.synthetic.pairs": 4,
        "model.vocab_size": 32,
        "train.steps": 900,
        "train.stages": (
            {"steps": 500, "sequence_length": 20, "batch_size": 64},
            {"steps": 400},
        ),
    },
    # A state alone: permutations of three things.
    "s3": {
        "data.source": "s3",
        "train.steps": 700,
        "train.stages": ({"steps": 200, "sequence_length": 8, "batch_size": 128}, {"steps": 500}),
    },
    "parity": {"data.source": "parity"},
    "modular_addition": {
        "data.source": "modular_addition",
        "train.steps": 1400,
        "train.stages": ({"steps": 400, "sequence_length": 8, "batch_size": 128}, {"steps": 1000}),
    },
}


def get_sweep():
    return {
        "base": "configs/state.py",
        "set": {
            "model.num_hidden_layers": 4,
            "telemetry.diagnostics_every": 0,
            "eval.every": 1000,
            "checkpoint.every": 1000,
        },
        "x": "model",
        "axes": {"task": TASKS, "model": MODELS, "train.seed": [0, 1, 2]},
    }
