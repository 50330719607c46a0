"""Decides whether a model can use weights that were trained in another model. For example, a model
whose attention has a Λ-shaped window can use the weights of a model with gated attention.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config.registry import MIXERS, resolve

# Settings that determine the length of the longest text. Weights can be used with other values of
# these settings, unless the class of a mixer or of the position embedding lists them in its
# attribute `settings_fixed_by_weights`.
CONTEXT_LENGTH_SETTINGS = frozenset(("max_position_embeddings", "yarn_factor"))


def settings_incompatible_with_weights(model: Any, trained: Any) -> tuple[str, ...]:
    """Returns the settings that prevent `model` from using the weights of `trained`.

    The classes of mixers declare which differences are harmless: `Mixer.loads_weights_of` is
    another mixer with the same weights, and `Mixer.settings_free_after_training` lists settings
    that change how a model uses its weights but not what the weights mean. This function imports
    mixers, and with them JAX, only if the models differ in their mixers, in settings of mixers, or
    in the length of the longest text.

    Args:
      model: the ModelConfig of the model that will use the weights.
      trained: the ModelConfig of the model that was trained.

    Returns:
      Names of settings of ModelConfig, a subset of `model.differing_settings(trained)`; () if the
      model can use the weights.
    """
    differ = model.differing_settings(trained)
    harmless = {"block"} if _same_but_rope_scaling(model, trained) else set()
    if "layer_types" in differ and _same_weights_per_layer(model, trained):
        harmless.add("layer_types")
    if "mixer" in differ and _mixer_settings_of_weights(model) == _mixer_settings_of_weights(
        trained
    ):
        harmless.add("mixer")
    if CONTEXT_LENGTH_SETTINGS.intersection(differ):
        harmless |= CONTEXT_LENGTH_SETTINGS - _settings_weights_depend_on(model)
    return tuple(name for name in differ if name not in harmless)


def _same_but_rope_scaling(model: Any, trained: Any) -> bool:
    """Whether both models have the same settings `model.block`, except for `rope_scaling`."""
    return model.block == dataclasses.replace(trained.block, rope_scaling=model.block.rope_scaling)


def _same_weights_per_layer(model: Any, trained: Any) -> bool:
    """Whether each layer has a mixer with the same weights in both models, and both models have the
    same `layer_stacks`.
    """

    def weights(config):
        names = (*config.mixers, config.full_mixer) if config.mtp_depth else config.mixers
        classes = [resolve(MIXERS, name, "mixer") for name in names]
        return [cls.loads_weights_of or cls for cls in classes], config.layer_stacks

    return weights(model) == weights(trained)


def _mixer_settings_of_weights(config: Any) -> set[tuple[str, Any]]:
    """Returns (name, value) of every setting of the model's mixers that determines the shape or the
    meaning of weights.
    """
    items = set()
    for name in {name for name, _ in config.mixers_and_sparsity}:
        mixer = resolve(MIXERS, name, "mixer")
        settings = config.mixer.settings_for(mixer.Settings)
        items |= {
            item
            for item in vars(settings).items()
            if item[0] not in mixer.settings_free_after_training
        }
    return items


def _settings_weights_depend_on(model: Any) -> frozenset[str]:
    """Returns the settings that determine what trained weights mean: the model's mixers and its
    position embedding list these settings in `settings_fixed_by_weights`.
    """
    modules = [resolve(MIXERS, name, "mixer") for name, _ in model.mixers_and_sparsity]
    modules.append(model.block.import_part("positions"))
    return frozenset(name for module in modules for name in module.settings_fixed_by_weights)
