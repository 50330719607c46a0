"""Calls of Mosaic GPU kernels. Equal calls, such as those of several layers, share one kernel.

JAX traces a kernel for every call of a new function, and then lowers every traced kernel. Lowering
takes up to some seconds a kernel, in every start, even if the compiled program is stored
(docs/notes/gpu.md). For equal calls, `run_kernel` gives JAX the same function, so JAX traces and
lowers one kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETER = plgpu.InterpretGPUParams()


class KernelCall(NamedTuple):
    """A call of a kernel without its inputs. All fields are hashable.

    Attributes:
      body: the kernel, a function of `arguments` and of the Pallas references of inputs, outputs
        and scratch memory. A function of a module: a function that a caller defines anew differs
        from call to call.
      arguments: the first arguments of `body`.
      name: name of the kernel in a compiled program.
      grid: name and size of each grid axis.
      outputs: shape and dtype of each output.
      scratch: the scratch memory and barriers.
      warpgroups: number of warpgroups of a block. If it is more than 1, "warpgroups" is the name of
        the axis that numbers them.
      interpret: whether a CPU interprets the kernel.
    """

    body: Callable
    arguments: tuple
    name: str
    grid: tuple[tuple[str, int], ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scratch: tuple[Any, ...]
    warpgroups: int = 1
    interpret: bool = False


def run_kernel(call: KernelCall, *inputs) -> tuple:
    """Runs a kernel and returns its outputs. `inputs` are arrays, or references to arrays
    (`jax.new_ref`) that the kernel changes.
    """
    return _run_shared_kernel(call, INTERPRETER if call.interpret else None, *inputs)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run_shared_kernel(call: KernelCall, interpreter, *inputs) -> tuple:
    names, sizes = zip(*call.grid)
    several = dict(num_threads=call.warpgroups, thread_name="warpgroups")
    with jax.enable_x64(False):
        return plgpu.kernel(
            functools.partial(call.body, *call.arguments),
            out_type=call.outputs,
            scratch_types=call.scratch,
            grid=sizes,
            grid_names=names,
            kernel_name=call.name,
            interpret=interpreter,
            **several if call.warpgroups > 1 else {},
        )(*inputs)
