"""All settings of a run, as frozen dataclasses with defaults and checks of the values."""

from qwen3next_jax.config.lora import LoRAConfig
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.config.model import FULL, LINEAR, ModelConfig
from qwen3next_jax.config.reading import from_dict, to_dict
from qwen3next_jax.config.run import (
    MESH_AXES,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    GuardConfig,
    MeshConfig,
    MuonConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
    ProfileConfig,
    SliceState,
    Stage,
    SyntheticConfig,
    TelemetryConfig,
    TrainConfig,
    default_config,
)

__all__ = [
    "FULL",
    "LINEAR",
    "MESH_AXES",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GuardConfig",
    "LoRAConfig",
    "MeshConfig",
    "MixerConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterGroup",
    "ProfileConfig",
    "SliceState",
    "Stage",
    "SyntheticConfig",
    "TelemetryConfig",
    "TrainConfig",
    "default_config",
    "from_dict",
    "to_dict",
]
