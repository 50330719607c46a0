"""The old place and name of `common.metrics.Metric`, for evaluations outside this package."""

from qwen3next_jax.common.metrics import Metric as Figure

__all__ = ["Figure"]
