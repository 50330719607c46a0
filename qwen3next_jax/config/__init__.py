"""Every setting of a run: frozen dataclasses, the only home of defaults and of validation."""

from qwen3next_jax.config.model import FULL, LINEAR, ModelConfig
from qwen3next_jax.config.reading import default_config, from_dict, to_dict
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
    ProfileConfig,
    Stage,
    SyntheticConfig,
    TelemetryConfig,
    TrainConfig,
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
    "MeshConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "Stage",
    "SyntheticConfig",
    "TelemetryConfig",
    "TrainConfig",
    "default_config",
    "from_dict",
    "to_dict",
]
