"""Exchange with other codebases: Hugging Face directories (config.json, safetensors, tokenizer)."""

from qwen3next_jax.interop.huggingface import hf_tensors, iter_hf_params, load_hf, read_hf_config, save_hf

__all__ = ["hf_tensors", "iter_hf_params", "load_hf", "read_hf_config", "save_hf"]
