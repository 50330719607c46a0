"""The implementations of the gated delta rule in XLA, and the choice of one for a call.

The custom gradients of `api` and `context` are made of the passes of the chosen implementation.
"""

import functools
from typing import NamedTuple

from qwen3next_jax.ops.delta_rule import chunked
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings, chunk_size
from qwen3next_jax.ops.implementations import Chosen, Form, choose


def chunked_form(platforms: tuple[str, ...], limits: chunked.BlockLimits) -> Form:
    """The state passes from chunk to chunk; the sequence is taken a block of chunks at a time."""
    functions = dict(
        forward=functools.partial(chunked.forward_in_blocks, limits=limits),
        backward=functools.partial(chunked.backward_in_blocks, limits=limits),
        affine_map=functools.partial(chunked.affine_map, parallel=False),
    )
    return Form("chunked", platforms, functions)


FORMS = (
    chunked_form(("cpu",), chunked.CPU_LIMITS),
    chunked_form(("gpu", "tpu"), chunked.LIMITS),
    Form(
        "associative",
        (),
        {
            name: functools.partial(getattr(chunked, name), parallel=True)
            for name in ("forward", "backward", "affine_map")
        },
    ),
    Form("recurrent", (), {}),  # by autodiff of `reference.recurrent`, in `api` and `context`
)


class Operator(NamedTuple):
    """The implementation that runs every pass of one call, and the call's settings.

    Hashable, so that a custom gradient takes it as a static argument. The methods have the
    arguments and results of `interface.Implementation`.
    """

    chosen: Chosen
    settings: Settings

    def forward(self, x: Inputs, initial_state, inverses, *, save: bool):
        run = self.chosen.function("forward")
        return run(x, initial_state, inverses, self.settings, save=save)

    def affine_map(self, x: Inputs, initial_state):
        return self.chosen.function("affine_map")(x, initial_state, self.settings)

    def backward(self, x: Inputs, states, inverses, do, dfinal):
        run = self.chosen.function("backward")
        return run(x, states, inverses, do, dfinal, self.settings)


def choose_operator(
    implementation: str | None, x: Inputs, normalize_qk: bool, erase: bool, axis_name: str | None
) -> Operator:
    """The named implementation, or the best for `x` on the platform that is compiled for.

    Raises:
      NotImplementedError: the named implementation cannot run `x` here.
    """
    settings = Settings(chunk_size(x), normalize_qk, erase)
    chosen = choose(
        "gated_delta_rule",
        implementation,
        FORMS,
        x=x,
        settings=settings,
        split=axis_name is not None,
    )
    return Operator(chosen, settings)
