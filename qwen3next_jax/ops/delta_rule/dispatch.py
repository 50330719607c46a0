"""Lists the XLA implementations of the gated delta rule and chooses the implementation that runs a
call.

The functions with custom gradients in `api.py` and `context.py` call the passes of the chosen
implementation.
"""

import functools
from typing import NamedTuple

from qwen3next_jax.ops.delta_rule import chunked
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings, choose_chunk_size
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)


def chunked_implementation(
    platforms: tuple[str, ...], limits: chunked.BlockLimits
) -> XlaImplementation:
    """Returns the implementation "chunked" for `platforms`. The implementation carries the state
    from chunk to chunk, and computes as many chunks at a time as `limits` allows.
    """
    functions = dict(
        forward=functools.partial(chunked.forward_in_blocks, limits=limits),
        backward=functools.partial(chunked.backward_in_blocks, limits=limits),
        affine_map=functools.partial(chunked.affine_map, parallel=False),
    )
    return XlaImplementation("chunked", platforms, functions)


XLA_IMPLEMENTATIONS = (
    chunked_implementation(("cpu",), chunked.CPU_LIMITS),
    chunked_implementation(("gpu", "tpu"), chunked.LIMITS),
    XlaImplementation(
        "associative",
        (),
        {
            name: functools.partial(getattr(chunked, name), parallel=True)
            for name in ("forward", "backward", "affine_map")
        },
    ),
    # This implementation has no passes: `api.py` and `context.py` call `reference.recurrent`, and
    # JAX differentiates it.
    XlaImplementation("recurrent", (), {}),
)


class Operator(NamedTuple):
    """The implementation that runs all passes of one call, and the call's settings.

    An operator is hashable, so that a function with a custom gradient can take it as a static
    argument. The methods of an operator take and return the same as the methods of
    `interface.Implementation`, but without the argument `settings`.
    """

    chosen_implementation: ChosenImplementation
    settings: Settings

    def forward(self, x: Inputs, initial_state, inverses, *, save: bool):
        run = self.chosen_implementation.function_named("forward")
        return run(x, initial_state, inverses, self.settings, save=save)

    def affine_map(self, x: Inputs, initial_state):
        return self.chosen_implementation.function_named("affine_map")(
            x, initial_state, self.settings
        )

    def backward(self, x: Inputs, states, inverses, do, dfinal):
        run = self.chosen_implementation.function_named("backward")
        return run(x, states, inverses, do, dfinal, self.settings)


def choose_operator(
    implementation: str | None,
    x: Inputs,
    normalize_qk: bool,
    delta_term: bool,
    axis_name: str | None,
) -> Operator:
    """Returns the operator with the named implementation. If `implementation` is None, the operator
    has the best implementation for `x` on the platform that the program is compiled for.

    Raises:
      NotImplementedError: the named implementation cannot run `x` on this platform.
    """
    settings = Settings(choose_chunk_size(x), normalize_qk, delta_term)
    chosen = choose_implementation(
        "gated_delta_rule",
        implementation,
        XLA_IMPLEMENTATIONS,
        x=x,
        settings=settings,
        split=axis_name is not None,
    )
    return Operator(chosen, settings)
