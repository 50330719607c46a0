"""Which parameters belong to adapters (`model.adapters`): their paths have a name with SUFFIX."""

import dataclasses

from qwen3next_jax.config import LoRAConfig, ModelConfig

SUFFIX = "_lora"


def is_adapter(path: str) -> bool:
    """Whether a parameter with this path is an A or a B."""
    return any(name.endswith(SUFFIX) for name in path.split("/"))


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Returns the settings of the model without its adapters."""
    return dataclasses.replace(config, lora=LoRAConfig())


def base_params(params: dict) -> dict:
    """Returns a nested dict of parameters without the adapters."""
    return {
        name: base_params(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if not str(name).endswith(SUFFIX)
    }


def with_adapters(base: dict, params: dict) -> dict:
    """Returns `base`, a nested dict of parameters without adapters, with the adapters of `params`,
    a nested dict of all parameters.
    """

    def chosen(name, value):
        if str(name).endswith(SUFFIX):
            return value
        return with_adapters(base[name], value) if isinstance(value, dict) else base[name]

    return {name: chosen(name, value) for name, value in params.items()}
