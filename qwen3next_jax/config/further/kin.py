"""Models of the same parameters: what weights trained as one of them may be read as, such as
gated attention under a Λ-shaped window.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config.registry import MIXERS, resolve

# Mixers whose parameters are gated attention's, one for one.
KIN = frozenset(
    (
        "gated_attention",
        "nope_attention",
        "masked_attention",
        "rerope",
        "leaky_rerope",
        "dynamic_ntk",
        "lambda_window",
        "parallel_windows",
        "selected_tokens",
    )
)
# Of `model.mixer`: how keys are read, not what they are. The mask says which of T5's buckets stand
# for what.
READING = frozenset(
    ("window", "first_tokens", "stretch", "contexts", "selected", "mask", "prefix_tokens")
)
# How far a text may reach. Weights serve under other values, unless a mixer or the positions of
# the model name the setting in their `meaning`.
REACH = frozenset(("max_position_embeddings", "yarn_factor"))


def weights_differ(model: Any, trained: Any) -> tuple[str, ...]:
    """The settings in which `model` cannot take the weights of `trained` (both ModelConfig), of
    `model.differs(trained)`.
    """

    def spelled(c):
        mixers = tuple(
            "gated_attention" if name in KIN else name for name in (*c.mixers, c.full_mixer)
        )
        reading = READING - {"mask"} if "t5_bias" in (*c.mixers, c.full_mixer) else READING
        group = dataclasses.replace(
            c.mixer, **{name: getattr(trained.mixer, name) for name in reading}
        )
        return {
            "layer_types": (mixers if c.mtp_depth else mixers[:-1], c.stacks),
            "mixer": group,
            "block": dataclasses.replace(c.block, rope_scaling=trained.block.rope_scaling),
        }

    ours, theirs = spelled(model), spelled(trained)
    differ = model.differs(trained)
    # the modules are imported, and JAX with them, only where they have to be asked
    free = REACH - _meaning(model) if REACH.intersection(differ) else REACH
    return tuple(
        name
        for name in differ
        if name not in free and (name not in ours or ours[name] != theirs[name])
    )


def _meaning(model: Any) -> frozenset[str]:
    """The settings that give parameters of `model` their meaning, as its modules declare them."""
    modules = [resolve(MIXERS, name, "mixer") for name, _ in model.layer_kinds]
    modules.append(model.block.of("positions"))
    return frozenset(name for module in modules for name in module.meaning)
