"""Runs the forward and the backward pass of attention with the chosen implementation.

The functions with custom gradients in `api.py` and `ring.py` call the functions of this module.

B batch, T queries, S keys, N query heads, M key/value heads, D head width.
"""

import functools
from typing import NamedTuple

from qwen3next_jax.ops.attention import xla
from qwen3next_jax.ops.implementations import ChosenImplementation, XlaImplementation


def _xla_functions_by_name(block: int):
    """Returns the functions of the implementation "xla" by name, for blocks of `block` tokens."""
    return dict(
        forward=functools.partial(xla.forward, block=block),
        backward=functools.partial(xla.backward, block=block),
    )


XLA_IMPLEMENTATIONS = (
    XlaImplementation("xla", ("cpu",), _xla_functions_by_name(xla.CPU_BLOCK)),
    XlaImplementation("xla", ("gpu", "tpu"), _xla_functions_by_name(xla.GPU_BLOCK)),
)


class AttentionOptions(NamedTuple):
    """The static settings of one call of `attention`, as a hashable tuple.

    Attributes:
      chosen_implementation: the implementation that runs the call.
      scale: factor of the scores.
      causal: whether a query attends only to its own token and the tokens before it. If `causal` is
        False, the keys are tokens of the row before the queries, and a query attends to all keys of
        its segment.
    """

    chosen_implementation: ChosenImplementation
    scale: float
    causal: bool = True

    @property
    def saved_axis_order(self) -> tuple[int, ...]:
        """The order of axes in which the output [B, T, N, D] is saved for the backward pass. The
        chosen kernels write the output in this order, so saving the output needs no copy.
        """
        return self.chosen_implementation.constant_named("SAVED_AXES", (0, 1, 2, 3))


def forward(options: AttentionOptions, *inputs):
    """Returns o [B, T, N, D] in q's dtype, and the logsumexp of each query's scores [B, N, T] in
    float32.

    Args:
      inputs: the arrays q [B, T, N, D], k and v [B, S, M, D], segment_ids [B, T] and kv_segment_ids
        [B, S], in this order. Either both arrays of ids are None, or neither array is None.
    """
    run = options.chosen_implementation.function_named("forward")
    return run(*inputs, scale=options.scale, causal=options.causal)


def backward(options: AttentionOptions, inputs, o, logsumexp_BNT, do):
    """Returns dq, dk and dv in the shapes of q, k and v.

    Args:
      inputs: the arrays that `forward` takes.
      o, logsumexp_BNT: the results of `forward`, or the results of attention to the keys in
        `inputs` and more keys. With more keys, dk and dv are still right, and dq is the part that
        comes from the keys in `inputs`.
      do: [B, T, N, D], the gradient of o.
    """
    run = options.chosen_implementation.function_named("backward")
    return run(*inputs, o, logsumexp_BNT, do, scale=options.scale, causal=options.causal)
