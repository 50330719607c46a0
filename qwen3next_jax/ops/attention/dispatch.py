"""One pass of attention, forward or backward, by the implementation that was chosen.

The custom gradients of `api` and `ring` are made of these passes.
"""

import functools
from typing import NamedTuple

from qwen3next_jax.ops.attention import xla
from qwen3next_jax.ops.implementations import Chosen, Form


def _blockwise(block: int):
    return dict(
        forward=functools.partial(xla.forward, block=block),
        backward=functools.partial(xla.backward, block=block),
    )


FORMS = (
    Form("xla", ("cpu",), _blockwise(xla.CPU_BLOCK)),
    Form("xla", ("gpu", "tpu"), _blockwise(xla.GPU_BLOCK)),
)


class Options(NamedTuple):
    chosen: Chosen
    scale: float
    causal: bool = True  # False: every query sees all keys of its segment

    @property
    def saved_axes(self) -> tuple[int, ...]:
        """The order in which the output's axes [B, T, N, D] are saved for the backward pass: as
        the kernels lay them out, so that saving copies nothing.
        """
        return self.chosen.constant("SAVED_AXES", (0, 1, 2, 3))


def forward(options: Options, *inputs):
    """(o [B, T, N, D], logsumexp of each row's scores [B, N, T] in float32) from q, k, v,
    segment_ids, kv_segment_ids.
    """
    run = options.chosen.function("forward")
    return run(*inputs, scale=options.scale, causal=options.causal)


def backward(options: Options, inputs, o, logsumexp_BNT, do):
    """(dq, dk, dv). With the o and logsumexp of a softmax over more keys than these: their part
    of its gradients.
    """
    run = options.chosen.function("backward")
    return run(*inputs, o, logsumexp_BNT, do, scale=options.scale, causal=options.causal)
