"""One pass of the gated delta rule, forward or backward, by the implementation asked for or the platform's.

The custom gradients of `api` and `context` are made of these two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule import chunked, pallas_tpu, tiling


@dataclasses.dataclass(frozen=True)
class Options:
    implementation: str | None
    normalize_qk: bool
    erase: bool


def forward(options: Options, size: int, save: bool, *arguments):
    """`chunked.forward` or its like, in chunks of `size` tokens."""
    return _run(options, chunked.forward, chunked.forward_in_pieces, pallas_tpu.forward, dict(size=size, save=save), *arguments)


def affine_map(options: Options, size: int, *arguments):
    """`chunked.affine_map` or its like."""
    return _run(options, chunked.affine_map, None, pallas_tpu.affine_map, dict(size=size), *arguments)


def backward(options: Options, size: int, *arguments):
    """`chunked.backward` or its like."""
    return _run(options, chunked.backward, chunked.backward_in_pieces, pallas_tpu.backward, dict(size=size), *arguments)


def _run(options: Options, whole, in_pieces, kernel, settings, *arguments):
    """Of the XLA forms the one in pieces, where there is one and the state is passed chunk by chunk."""
    settings = settings | dict(normalize_qk=options.normalize_qk, erase=options.erase)
    parallel = options.implementation == "associative"
    if parallel or in_pieces is None:
        platforms = {"default": functools.partial(whole, parallel=parallel, **settings)}
    else:
        platforms = {"cpu": functools.partial(in_pieces, pieces=chunked.CPU_PIECES, **settings),
                     "default": functools.partial(in_pieces, pieces=chunked.PIECES, **settings)}
    compiled = functools.partial(kernel, interpret=False, **settings)
    interpreted = functools.partial(kernel, interpret=True, **settings)
    if options.implementation == "pallas_tpu":
        return jax.lax.platform_dependent(*arguments, tpu=compiled, cpu=interpreted)
    if options.implementation is None and _kernel_takes(settings["size"], *arguments[:6]):
        platforms["tpu"] = compiled
    return jax.lax.platform_dependent(*arguments, **platforms)


def _kernel_takes(size: int, q, k, v, *others) -> bool:
    """Of shapes, dtypes and the chip alone, so that every pass over a problem decides alike: the kernels' inverses are not XLA's."""
    return not any(x.dtype == jnp.float64 for x in (q, k, v, *others) if x is not None) and tiling.fits(q, v, size)


def chunk_size(q, v) -> int:
    """64 tokens; 16 for float32 heads of at most 32 channels, where work within a chunk (8 C d) outweighs the state's (6 d²): a
    training step of configs/tiny.py took 0.57 s instead of 0.66 on 2 CPU cores. The power of two that holds a shorter
    sequence. One length for every platform, since the residuals' shapes may not depend on the platform. In bfloat16 every
    chunk rounds the state once more as an operand, so there it stays 64."""
    narrow = max(q.shape[-1], v.shape[-1]) <= 32
    longest = 16 if narrow and v.dtype == jnp.float32 else 64
    return min(longest, max(16, 1 << (q.shape[1] - 1).bit_length()))
