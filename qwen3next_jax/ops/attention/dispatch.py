"""One pass of attention, forward or backward, by the implementation asked for or the platform's.

The custom gradients of `api` and `ring` are made of these two. Letters as in `xla`.
"""

import functools
from typing import NamedTuple

import jax

from qwen3next_jax.ops.attention import splash, xla


class Options(NamedTuple):
    implementation: str | None
    scale: float
    causal: bool = True  # False: every query sees all keys of its segment


def forward(options: Options, *inputs):
    """(o [B, T, N, D], logsumexp of each row's scores [B, N, T] in float32) from q, k, v, segment_ids, kv_segment_ids, q_positions."""
    return _choose(options, inputs, xla.forward, splash.forward, *inputs)


def backward(options: Options, inputs, o, logsumexp_BNT, do):
    """(dq, dk, dv). With the o and logsumexp of a softmax over more keys than these: their part of its gradients."""
    return _choose(options, inputs, xla.backward, splash.backward, *inputs, o, logsumexp_BNT, do)


def _choose(options, inputs, in_xla, in_splash, *args):
    settings = dict(scale=options.scale, causal=options.causal)
    on_cpu, elsewhere = (functools.partial(in_xla, block=block, **settings) for block in (xla.CPU_BLOCK, xla.GPU_BLOCK))
    interpreted, on_tpu = (functools.partial(in_splash, interpret=interpret, **settings) for interpret in (True, False))
    if options.implementation == "splash":
        return jax.lax.platform_dependent(*args, cpu=interpreted, default=on_tpu)
    q, *_, q_positions = inputs
    if options.implementation is None and q_positions is None and q.shape[1] >= splash.LANES:
        return jax.lax.platform_dependent(*args, cpu=on_cpu, tpu=on_tpu, default=elsewhere)
    return jax.lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
