"""The Qwen3-Next model: parameters in `flax.nnx` modules, arithmetic in plain JAX."""

from qwen3next_jax.model.language_model import Features, Output, Qwen3Next, parameter_declarations

__all__ = ["Features", "Output", "Qwen3Next", "parameter_declarations"]
