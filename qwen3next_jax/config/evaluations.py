"""The evaluations that `eval.suites` and `eval.py --suite` may name; docs/extending.md adds one."""

EVALUATIONS = {
    "heldout": "qwen3next_jax.evals.heldout:Heldout",
    "position": "qwen3next_jax.evals.perplexity:Position",
    "mqar": "qwen3next_jax.evals.recall:AssociativeRecall",
    "induction": "qwen3next_jax.evals.recall:Induction",
    "copy": "qwen3next_jax.evals.recall:Copy",
    "niah": "qwen3next_jax.evals.recall:Needles",
    "sinks": "qwen3next_jax.evals.sinks:Sinks",
}
