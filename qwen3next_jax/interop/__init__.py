"""Exchange with other codebases: Hugging Face directories (config.json, safetensors, tokenizer)."""
