"""Properties of a model's layers that depend on the classes of the mixers: the settings that the
layers read, the sizes that a mesh must divide, the versions of their mathematics, and their caches.
"""

import operator
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.config.model import ABLATIONS
from qwen3next_jax.config.registry import MIXERS, resolve
from qwen3next_jax.model.mixer import Mixer

# the ablation switches that every decoder layer reads, whatever its mixer
BLOCK_SWITCHES = ("zero_centered_norm",)


def mixer_class(name: str) -> type[Mixer]:
    """Returns the class of the mixer called `name`: a name of `config.registry.MIXERS`, or an
    import string.

    Raises:
      UserError: the class cannot be imported.
    """
    return resolve(MIXERS, name, "mixer")


def check_mixers(config: ModelConfig) -> None:
    """Raises UserError if a mixer refuses the settings, or if a setting that only some mixers read
    differs from its default and no layer of the model reads it.
    """
    classes = {name: mixer_class(name) for name, _ in config.mixers_and_sparsity}
    for mixer in classes.values():
        mixer.check(config)
    settings_read = {
        setting for mixer in classes.values() for setting in mixer.switches_read
    } | set(BLOCK_SWITCHES)
    other_settings = (
        "output_gate_type",
        "beta_range",
        "delta_rule",
        "yarn_factor",
        "block.rope_scaling",
    )
    for setting in (*ABLATIONS, *other_settings):
        value, default = map(operator.attrgetter(setting), (config, ModelConfig()))
        require(
            value == default or setting in settings_read,
            f"model.{setting} = {value!r}: no layer of this model reads it (its mixers: "
            f"{', '.join(classes)}): expected {default!r}",
        )


# {setting: the switch that turns off the part of a mixer that reads the setting}. If no mixer of
# the model reads such a setting, `training.unused_settings` refuses a run whose user gives the
# setting. A model's own config file may contain the setting.
READ_BY_PART = {"decay_init": "decay_gate", "linear_conv_kernel_dim": "short_convolution"}


def settings_unused_by_mixers(config: ModelConfig) -> dict[str, str]:
    """Returns {setting: reason, as text} for the settings of `READ_BY_PART` that no layer of the
    model reads.
    """
    classes = {name: mixer_class(name) for name, _ in config.mixers_and_sparsity}
    return {
        setting: f"no mixer of the model ({', '.join(classes)}) reads it"
        + (f" with model.{switch} = False" if not getattr(config, switch) else "")
        for setting, switch in READ_BY_PART.items()
        if not any(
            setting in mixer.switches_read
            and (switch not in mixer.switches_read or getattr(config, switch))
            for mixer in classes.values()
        )
    }


def has_indexer(config: ModelConfig) -> bool:
    """Whether a mixer of the model has an indexer that is trained with a loss of its own."""
    return any(mixer_class(name).has_indexer_loss for name, _ in config.mixers_and_sparsity)


def partial_ablation_lines(config: ModelConfig) -> list[str]:
    """Returns a line of text for each ablation that has an effect in some layers only; the line
    names these layers. An ablation is a setting of `config.model.ABLATIONS` that is switched off.
    """
    lines = []
    for setting in config.ablated:
        reached = [
            setting in (*mixer_class(name).switches_read, *BLOCK_SWITCHES) for name in config.mixers
        ]
        if all(reached):
            continue
        if not any(reached):
            lines.append(f"model.{setting} = False reaches multi-token prediction alone")
            continue
        layers = []
        for wanted in (True, False):
            numbers = [i for i, found in enumerate(reached) if found == wanted]
            mixers = ", ".join(dict.fromkeys(config.mixers[i] for i in numbers))
            layers.append(f"{_ranges_text(numbers)} ({mixers})")
        lines.append(f"model.{setting} = False reaches layers {layers[0]}, not {layers[1]}")
    return lines


def _ranges_text(layer_numbers: list[int]) -> str:
    """Returns ascending numbers as text: [0, 1, 2, 4] is "0-2, 4"."""
    runs: list[list[int]] = []
    for number in layer_numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def part_versions(config: ModelConfig) -> dict[str, int]:
    """Returns {name: version of the mathematics (`Mixer.version`)} for the model's mixers, the
    parts that `config.block` names, and the experts. Examples of names: "gdn2" (a mixer)
    and "block.norm = rms" (a part of `config.block`). A part without a declared version has
    version 1.
    """
    parts = {name: mixer_class(name) for name, _ in config.mixers_and_sparsity}
    unread = {"mlp": not config.has_dense_mlps, "rope_scaling": config.yarn_factor == 1}
    for setting in vars(config.block):
        if not unread.get(setting):
            name = getattr(config.block, setting)
            parts[f"block.{setting} = {name}"] = config.block.import_part(setting)
    if config.has_experts:
        parts[f"moe.experts = {config.moe.experts}"] = config.moe.mixture_class()
    return {name: getattr(part, "version", 1) for name, part in parts.items()}


def mesh_requirements(config: ModelConfig) -> tuple[dict[str, int], int, list[str]]:
    """Returns what the layers require of a mesh, as the last three arguments of
    `sharding.mesh.check_mesh_divides`: {setting: value that the size of `tensor` must divide}; the
    largest number of tokens that a layer reads from the neighbour's part of a row; and the names of
    the parts that need whole rows on one device.
    """
    mixers = {name: mixer_class(name) for name, _ in config.mixers_and_sparsity}
    splits = {
        setting: size
        for mixer in mixers.values()
        for setting, size in mixer.sizes_split_by_tensor(config).items()
    }
    whole_rows = [f"the mixer {name!r}" for name, mixer in mixers.items() if mixer.needs_whole_rows]
    if config.ple.layer_ids and config.ple.embedding_class().needs_whole_rows:
        whole_rows.append(f"the embedding {config.ple.embedding!r} of model.ple.layer_ids")
    return splits, max(mixer.halo(config) for mixer in mixers.values()), whole_rows


def empty_layer_cache(config: ModelConfig, layer: int, batch: int, length: int) -> dict[str, Any]:
    """Returns the cache of one layer before the first token: the arrays of the mixer's cache, and
    under "embedding" the cache of the layer's embedding, if it has one.

    Args:
      config: the model's settings.
      layer: the number of the layer, from 0.
      batch: the number of rows.
      length: the number of slots.
    """
    cache = mixer_class(config.mixers[layer]).init_cache(config, batch, length)
    if config.ple.embedding_index(layer) is None:
        return cache
    return cache | {"embedding": config.ple.embedding_class().init_cache(config, batch)}
