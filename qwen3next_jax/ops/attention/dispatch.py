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
    """(o [B, T, N, D], logsumexp of each row's scores [B, N, T] in float32) from q, k, v,
    segment_ids, kv_segment_ids.
    """
    return _choose(options, inputs, "forward", *inputs)


def backward(options: Options, inputs, o, logsumexp_BNT, do):
    """(dq, dk, dv). With the o and logsumexp of a softmax over more keys than these: their part
    of its gradients.
    """
    return _choose(options, inputs, "backward", *inputs, o, logsumexp_BNT, do)


def _choose(options, inputs, name, *args):
    form = lambda module, **more: functools.partial(
        getattr(module, name), scale=options.scale, causal=options.causal, **more
    )
    if options.implementation == "splash":
        return jax.lax.platform_dependent(
            *args, cpu=form(splash, interpret=True), default=form(splash, interpret=False)
        )
    platforms = dict(cpu=form(xla, block=xla.CPU_BLOCK), default=form(xla, block=xla.GPU_BLOCK))
    if options.implementation is None and inputs[0].shape[1] >= splash.LANES:
        platforms["tpu"] = form(splash, interpret=False)
    if options.implementation == "tokamax":
        from qwen3next_jax.ops.attention import pallas_gpu

        platforms["cuda"] = form(pallas_gpu)
    return jax.lax.platform_dependent(*args, **platforms)
