"""The forward and the backward pass of attention by the chosen implementation.

The custom gradients of `api` and `ring` are made of these passes.

B batch, T queries, S keys, N query heads, M key/value heads, D head width.
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
    """What is static in one call; hashable.

    Attributes:
      scale: of the scores.
      causal: whether a query sees only keys up to its own; otherwise all keys of its segment.
    """

    chosen: Chosen
    scale: float
    causal: bool = True

    @property
    def saved_axes(self) -> tuple[int, ...]:
        """The order of axes in which the output [B, T, N, D] is saved for the backward pass: that
        of the kernels, so that saving copies nothing.
        """
        return self.chosen.constant("SAVED_AXES", (0, 1, 2, 3))


def forward(options: Options, *inputs):
    """o [B, T, N, D] in q's dtype, and the logsumexp of each query's scores [B, N, T] in float32.

    Args:
      inputs: q [B, T, N, D], k and v [B, S, M, D], segment_ids [B, T] and kv_segment_ids [B, S],
        both or neither None.
    """
    run = options.chosen.function("forward")
    return run(*inputs, scale=options.scale, causal=options.causal)


def backward(options: Options, inputs, o, logsumexp_BNT, do):
    """dq, dk and dv in the shapes of q, k and v.

    Args:
      inputs: as in `forward`. do: [B, T, N, D].
      o, logsumexp_BNT: what `forward` returned. Those of a softmax over further keys give these
        keys' part of its gradients.
    """
    run = options.chosen.function("backward")
    return run(*inputs, o, logsumexp_BNT, do, scale=options.scale, causal=options.causal)
