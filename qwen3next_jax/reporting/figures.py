"""The old place and the old name of `common.metrics.Metric`: evaluations that users wrote for
earlier versions import `Figure` from here.
"""

from qwen3next_jax.common.metrics import Metric as Figure

__all__ = ["Figure"]
