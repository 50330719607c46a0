"""Exchange with other codebases: Hugging Face directories (config.json, safetensors, tokenizer).

huggingface      load_hf, save_hf, hf_tensors: what the other rooms use
hf_config        config.json ↔ ModelConfig
families/        what differs between families: fields, tensors, refusals; one file each
entries, layout  which tensors hold which parameters
shard_slices, tensor_rows, arrays
                 from the rows of a tensor to a device's shard and back, a piece at a time
weights, checksums, source
                 what is read: safetensors files, SHA256SUMS, the checkpoint that a model began with
writing          a directory that appears whole or not at all
"""
