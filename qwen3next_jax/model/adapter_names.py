"""Distinguishes the parameters of LoRA adapters (`model.adapters`) from all other parameters by the
paths of the parameters. The path of an adapter's parameter has a component that ends in SUFFIX:
"layers/0/mixer/k_proj_lora/a".
"""

import dataclasses

from qwen3next_jax.config import LoRAConfig, ModelConfig

SUFFIX = "_lora"


def is_adapter(path: str) -> bool:
    """Whether the parameter with this path is the matrix A or B of a LoRA adapter."""
    return any(name.endswith(SUFFIX) for name in path.split("/"))


def config_without_adapters(config: ModelConfig) -> ModelConfig:
    """Returns `config` with LoRA off: the settings of the same model without adapters."""
    return dataclasses.replace(config, lora=LoRAConfig())


def base_params(params: dict) -> dict:
    """Returns `params`, a nested dict of parameters, without the parameters of adapters."""
    return {
        name: base_params(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if not str(name).endswith(SUFFIX)
    }


def join_base_and_adapters(base: dict, params: dict) -> dict:
    """Returns a nested dict of all parameters: the adapters from `params`, which has all
    parameters, and all other parameters from `base`, which has no adapters.
    """

    def chosen(name, value):
        if str(name).endswith(SUFFIX):
            return value
        return join_base_and_adapters(base[name], value) if isinstance(value, dict) else base[name]

    return {name: chosen(name, value) for name, value in params.items()}
