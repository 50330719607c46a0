"""One pass of the gated delta rule, forward or backward, by the implementation asked for or the
platform's.

The custom gradients of `api` and `context` are made of these two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule import chunked, pallas_tpu, tiling
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs


@dataclasses.dataclass(frozen=True)
class Options:
    implementation: str | None
    normalize_qk: bool
    erase: bool
    hopper: bool = False  # on a GPU, its kernels


def forward(options: Options, x: Inputs, initial_state, inverses, *, save: bool):
    """`chunked.forward` or its like."""
    return _run(
        options,
        chunked.forward,
        chunked.forward_in_pieces,
        pallas_tpu.forward,
        x,
        initial_state,
        inverses,
        save=save,
    )


def affine_map(options: Options, x: Inputs, initial_state):
    """`chunked.affine_map` or its like."""
    return _run(options, chunked.affine_map, None, pallas_tpu.affine_map, x, initial_state)


def backward(options: Options, x: Inputs, states, inverses, do, dfinal):
    """`chunked.backward` or its like."""
    return _run(
        options,
        chunked.backward,
        chunked.backward_in_pieces,
        pallas_tpu.backward,
        x,
        states,
        inverses,
        do,
        dfinal,
    )


def _run(options: Options, whole, in_pieces, kernel, *arguments, **settings):
    """Of the XLA forms the one in pieces, where there is one and the state is passed chunk by
    chunk.
    """
    x, parallel = arguments[0], options.implementation == "associative"
    settings |= dict(size=chunk_size(x), normalize_qk=options.normalize_qk, erase=options.erase)
    if parallel or in_pieces is None:
        platforms = {"default": functools.partial(whole, parallel=parallel, **settings)}
    else:
        platforms = {
            "cpu": functools.partial(in_pieces, limits=chunked.CPU_PIECES, **settings),
            "default": functools.partial(in_pieces, limits=chunked.PIECES, **settings),
        }
    if options.hopper:
        from qwen3next_jax.ops.delta_rule import pallas_gpu

        on_gpu = functools.partial(getattr(pallas_gpu, kernel.__name__), **settings)
        # the interpreter has effects, with which no branch for another platform can be
        if options.implementation == "pallas_gpu":
            return on_gpu(*arguments, interpret=jax.default_backend() == "cpu")
        platforms["cuda"] = functools.partial(on_gpu, interpret=False)
    compiled = functools.partial(kernel, interpret=False, **settings)
    interpreted = functools.partial(kernel, interpret=True, **settings)
    if options.implementation == "pallas_tpu":
        return jax.lax.platform_dependent(*arguments, tpu=compiled, cpu=interpreted)
    if options.implementation is None and _kernel_takes(settings["size"], x):
        platforms["tpu"] = compiled
    return jax.lax.platform_dependent(*arguments, **platforms)


def _kernel_takes(size: int, x: Inputs) -> bool:
    """Of shapes, dtypes and the chip alone, so that every pass over a problem decides alike: the
    kernels' inverses are not XLA's.
    """
    return not any(array.dtype == jnp.float64 for array in x if array is not None) and tiling.fits(
        x.q, x.v, size
    )


def chunk_size(x: Inputs) -> int:
    """64 tokens; 16 for float32 heads of at most 32 channels, where work within a chunk (8 C d)
    outweighs the state's (6 d²): a training step of configs/tiny.py took 0.57 s instead of 0.66
    on 2 CPU cores. The power of two that holds a shorter sequence. One length for every
    platform, since the residuals' shapes may not depend on the platform. In bfloat16 every chunk
    rounds the state once more as an operand, so there it stays 64.
    """
    narrow = max(x.q.shape[-1], x.v.shape[-1]) <= 32
    longest = 16 if narrow and x.v.dtype == jnp.float32 else 64
    return min(longest, max(16, 1 << (x.q.shape[1] - 1).bit_length()))
