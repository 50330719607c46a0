"""Calls of Pallas kernels on a TPU, with 64-bit numbers switched on or off."""

import jax
from jax.experimental import pallas as pl


def pallas_call(kernel, **settings):
    """Returns a function that calls `kernel`, as `pl.pallas_call` does, with 32-bit indices. The
    TPU's compiler takes no 64-bit index, which a kernel has by default under jax_enable_x64; from
    some, it aborts the process.
    """
    call = pl.pallas_call(kernel, **settings)

    def call_with_32_bit_indices(*inputs):
        with jax.enable_x64(False):
            return call(*inputs)

    return call_with_32_bit_indices
