"""Decides whether a model can use weights that were trained as another model. For example, a model
whose attention has a Λ-shaped window can use the weights of gated attention.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config.registry import MIXERS, resolve

# Settings that determine the length of the longest text. Weights can be used with other values of
# these settings, unless the class of a mixer or of the position embedding lists them in its
# attribute `settings_fixed_by_weights`.
CONTEXT_LENGTH_SETTINGS = frozenset(("max_position_embeddings", "yarn_factor"))


def weights_differ(model: Any, trained: Any) -> tuple[str, ...]:
    """Returns the settings that prevent `model` from using weights that were trained as `trained`.

    The classes of mixers declare which differences are harmless: `Mixer.loads_weights_of` is
    another mixer with the same weights, and `Mixer.settings_free_after_training` lists settings
    that change how a model uses its weights but not what the weights mean. This function imports
    mixers, and with them JAX, only if the models differ in their mixers, in settings of mixers, or
    in the length of the longest text.

    Args:
      model: the ModelConfig of the model that is to use the weights.
      trained: the ModelConfig of the model that was trained.

    Returns:
      Names of settings of ModelConfig, a subset of `model.differs(trained)`; () if the model can
      use the weights.
    """
    differ = model.differs(trained)
    harmless = {"block"} if _same_but_rope_scaling(model, trained) else set()
    if "layer_types" in differ and _same_weights_per_layer(model, trained):
        harmless.add("layer_types")
    if "mixer" in differ and _weight_settings(model) == _weight_settings(trained):
        harmless.add("mixer")
    if CONTEXT_LENGTH_SETTINGS.intersection(differ):
        harmless |= CONTEXT_LENGTH_SETTINGS - _settings_with_meaning(model)
    return tuple(name for name in differ if name not in harmless)


def _same_but_rope_scaling(model: Any, trained: Any) -> bool:
    """Whether the settings `model.block` of both models are the same, except for `rope_scaling`."""
    return model.block == dataclasses.replace(trained.block, rope_scaling=model.block.rope_scaling)


def _same_weights_per_layer(model: Any, trained: Any) -> bool:
    """Whether each layer has a mixer with the same weights in both models, and both stack their
    layers in the same way.
    """

    def weights(config):
        names = (*config.mixers, config.full_mixer) if config.mtp_depth else config.mixers
        classes = [resolve(MIXERS, name, "mixer") for name in names]
        return [cls.loads_weights_of or cls for cls in classes], config.stacks

    return weights(model) == weights(trained)


def _weight_settings(config: Any) -> set[tuple[str, Any]]:
    """Returns (name, value) for each setting of the model's mixers that determines what the weights
    mean.
    """
    items = set()
    for name in {name for name, _ in config.layer_kinds}:
        mixer = resolve(MIXERS, name, "mixer")
        settings = config.mixer.read(mixer.Settings)
        items |= {
            item
            for item in vars(settings).items()
            if item[0] not in mixer.settings_free_after_training
        }
    return items


def _settings_with_meaning(model: Any) -> frozenset[str]:
    """Returns the settings that the model's mixers and its position embedding list in
    `settings_fixed_by_weights`: with another value of such a setting, the weights would mean
    something else.
    """
    modules = [resolve(MIXERS, name, "mixer") for name, _ in model.layer_kinds]
    modules.append(model.block.resolve("positions"))
    return frozenset(name for module in modules for name in module.settings_fixed_by_weights)
