"""One pass of the gated delta rule, forward or backward, by the implementation that was chosen.

The custom gradients of `api` and `context` are made of these passes.
"""

import functools
from typing import NamedTuple

from qwen3next_jax.ops.delta_rule import chunked
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs, chunk_size
from qwen3next_jax.ops.implementations import Chosen, Form, choose


def chunked_form(platforms: tuple[str, ...], limits: chunked.BlockLimits) -> Form:
    """The state passes from chunk to chunk, block by block of chunks."""
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


class Options(NamedTuple):
    chosen: Chosen
    normalize_qk: bool
    erase: bool

    def run(self, name: str, x: Inputs, *arguments, **settings):
        return self.chosen.function(name)(
            x,
            *arguments,
            size=chunk_size(x),
            normalize_qk=self.normalize_qk,
            erase=self.erase,
            **settings,
        )


def options(
    implementation: str | None, x: Inputs, normalize_qk: bool, erase: bool, axis_name: str | None
) -> Options:
    """With the implementation that runs every pass over `x`.

    Raises:
      NotImplementedError: the named implementation cannot run it here.
    """
    chosen = choose(
        "gated_delta_rule",
        implementation,
        FORMS,
        x=x,
        normalize_qk=normalize_qk,
        erase=erase,
        split=axis_name is not None,
    )
    return Options(chosen, normalize_qk, erase)


def forward(options: Options, x: Inputs, initial_state, inverses, *, save: bool):
    """`chunked.forward` or its like."""
    return options.run("forward", x, initial_state, inverses, save=save)


def affine_map(options: Options, x: Inputs, initial_state):
    """`chunked.affine_map` or its like."""
    return options.run("affine_map", x, initial_state)


def backward(options: Options, x: Inputs, states, inverses, do, dfinal):
    """`chunked.backward` or its like."""
    return options.run("backward", x, states, inverses, do, dfinal)
