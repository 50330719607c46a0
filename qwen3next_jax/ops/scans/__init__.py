"""Recurrences that are no matrix products: linear, in the max-plus algebra, and any other."""

from qwen3next_jax.ops.scans.scans import expanded_scan, linear_scan, max_plus_scan, token_scan

__all__ = ["expanded_scan", "linear_scan", "max_plus_scan", "token_scan"]
