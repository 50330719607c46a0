"""Reads and writes models in the format of Hugging Face: directories with a config.json and
safetensors files.

huggingface      defines load_hf, save_hf and hf_tensors; other packages call them
hf_config        converts a config.json to a ModelConfig and back
families/        has one file per family of models: the fields of its config.json, its tensors,
                 and the models that it refuses
entries, layout  say which tensors hold which parameters
shard_slices, tensor_rows, arrays
                 copy values, piece by piece, between the rows of tensors and the shards on devices
weights          reads safetensors files
checksums        compares files with a SHA256SUMS file
source           reads the files that an export copies from the checkpoint with which its model was
                 initialised
writing          writes a directory that appears complete or not at all
"""
