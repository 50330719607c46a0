"""Reads and writes models in the format of Hugging Face: directories with a config.json and
safetensors files.

huggingface      defines load_hf, save_hf and hf_tensors, which other packages call
hf_config        converts a config.json to a ModelConfig and back
families/        holds what differs between families of models (the fields of config.json, the
                 tensors, the models that are refused), in one file per family
entries, layout  say which tensors hold which parameters
shard_slices, tensor_rows, arrays
                 copy values between rows of tensors and shards on devices, piece by piece
weights          reads safetensors files
checksums        compares files with a SHA256SUMS file
source           reads the files that an export copies from the checkpoint with which its model was
                 initialised
writing          writes a directory that appears complete or not at all
"""
