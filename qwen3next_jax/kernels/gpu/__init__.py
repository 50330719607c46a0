"""Kernels for Hopper GPUs (sm_90a): this project's Mosaic kernels, and calls of tokamax's
kernels.
"""
