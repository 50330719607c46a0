"""Models of the same parameters: what weights trained as one of them may be read as, such as
gated attention under a Λ-shaped window.
"""

import dataclasses
from typing import Any

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
    return tuple(
        name for name in model.differs(trained) if name not in ours or ours[name] != theirs[name]
    )
