"""Pallas (Mosaic) kernels for TPUs, and calls of splash attention, whose kernels come with JAX."""
