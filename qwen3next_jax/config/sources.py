"""What a run can be trained on: the names of `data.source`. docs/extending.md adds one."""

DATA_SOURCES = {
    "text": "qwen3next_jax.data.pipeline:TrainData",
    "mqar": "qwen3next_jax.data.synthetic:SyntheticData",
    "induction": "qwen3next_jax.data.synthetic:SyntheticData",
    "copy": "qwen3next_jax.data.synthetic:SyntheticData",
    "backcopy": "qwen3next_jax.data.synthetic:SyntheticData",
}
