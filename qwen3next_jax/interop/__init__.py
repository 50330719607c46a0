"""Reads and writes other codebases' files: Hugging Face directories (config.json, safetensors).

huggingface      load_hf, save_hf, hf_tensors: the functions that the other rooms call
hf_config        converts config.json to a ModelConfig and back
families/        what differs between families of models (fields, tensors, refusals); a file each
entries, layout  which tensors hold which parameters
shard_slices, tensor_rows, arrays
                 copy between rows of tensors and shards on devices, piece by piece
weights, checksums, source
                 read safetensors files, SHA256SUMS, and the checkpoint that a model was
                 initialised from
writing          writes a directory that appears complete or not at all
"""
