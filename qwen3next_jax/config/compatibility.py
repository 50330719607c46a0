"""Whether the weights of one model may be read by another, such as those of gated attention under
a Λ-shaped window.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config.registry import MIXERS, resolve

# How far a text may reach. Weights serve under other values, unless a mixer or the positions of
# the model name the setting in their `meaning`.
REACH = frozenset(("max_position_embeddings", "yarn_factor"))


def weights_differ(model: Any, trained: Any) -> tuple[str, ...]:
    """The settings in which `model` cannot take the weights of `trained` (both ModelConfig), of
    `model.differs(trained)`.

    A mixer says in `Mixer.weights_of` whose weights are its own, too, and in `Mixer.read_time`
    which settings change how weights are read, and not what they mean. Mixers are imported, and
    JAX with them, only where a setting that they declare differs.
    """
    differ = model.differs(trained)
    free = {"block"} if _same_but_rotations(model, trained) else set()
    if "layer_types" in differ and _same_layers(model, trained):
        free.add("layer_types")
    if "mixer" in differ and _weight_settings(model) == _weight_settings(trained):
        free.add("mixer")
    if REACH.intersection(differ):
        free |= REACH - _meaning(model)
    return tuple(name for name in differ if name not in free)


def _same_but_rotations(model: Any, trained: Any) -> bool:
    return model.block == dataclasses.replace(trained.block, rope_scaling=model.block.rope_scaling)


def _same_layers(model: Any, trained: Any) -> bool:
    def spelled(config):
        names = (*config.mixers, *(config.full_mixer,) * (config.mtp_depth > 0))
        classes = [resolve(MIXERS, name, "mixer") for name in names]
        return [cls.weights_of or cls for cls in classes], config.stacks

    return spelled(model) == spelled(trained)


def _weight_settings(config: Any) -> set[tuple[str, Any]]:
    """(name, value) of every setting of the model's mixers that gives their weights a meaning."""
    found = set()
    for name in {name for name, _ in config.layer_kinds}:
        mixer = resolve(MIXERS, name, "mixer")
        settings = config.mixer.read(mixer.Settings)
        found |= {item for item in vars(settings).items() if item[0] not in mixer.read_time}
    return found


def _meaning(model: Any) -> frozenset[str]:
    """The settings that give parameters of `model` their meaning, as its modules declare them."""
    modules = [resolve(MIXERS, name, "mixer") for name, _ in model.layer_kinds]
    modules.append(model.block.of("positions"))
    return frozenset(name for module in modules for name in module.meaning)
