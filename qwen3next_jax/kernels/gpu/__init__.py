"""Kernels for Hopper GPUs (sm_90a): Pallas (Mosaic GPU) kernels, and calls of the kernels of the
library tokamax. Attention by cuDNN is for Hopper GPUs and later.
"""
