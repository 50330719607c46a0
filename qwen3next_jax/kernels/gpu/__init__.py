"""Mosaic kernels for Hopper GPUs (sm_90a), and those of tokamax."""
