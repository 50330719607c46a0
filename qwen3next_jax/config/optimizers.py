"""Optimizers by name, as import strings: `optimizer.name` names a line of this table.

An optimizer is one file of `training/optimizers/` and one line here (docs/extending.md). A group
of settings of its own stands in `OptimizerConfig` under its name.
"""

OPTIMIZERS = {
    "adamw": "qwen3next_jax.training.optimizers.adamw:direction",
    "muon": "qwen3next_jax.training.optimizers.muon:direction",
}
