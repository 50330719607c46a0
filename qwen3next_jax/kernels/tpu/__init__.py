"""Mosaic kernels for TPUs, and splash attention, which comes with JAX."""
