"""Recurrences that are no matrix products: linear, and in the max-plus algebra."""
from qwen3next_jax.ops.scans.scans import expanded_scan, linear_scan, max_plus_scan

__all__ = ["expanded_scan", "linear_scan", "max_plus_scan"]
