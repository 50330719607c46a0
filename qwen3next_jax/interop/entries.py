"""How one parameter is stored in the tensors of a Hugging Face checkpoint, as data.

A parameter of this project has the shape [inputs…, outputs…], and all layers of a stack share one
array. A Hugging Face tensor has the shape [outputs, inputs], and each layer (and each expert) has
its own. An `Entry` says how to get from one to the other: transpose the parameter of one layer to
(tensors…, rows…, columns…); each tensor is then a slice of it, flattened to the tensor's shape. A
tensor may list its rows in another order. Import and export read the same entry, so they cannot
disagree.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.config import ModelConfig


class TensorSlice(NamedTuple):
    """The slice of a parameter that one tensor holds.

    Attributes:
      index: the index of the slice in the transposed parameter of one layer.
      name: the tensor's name without the prefix of its layer ("self_attn.q_proj.weight").
      shape: the tensor's shape in the file.
      row_order: row i of the tensor is row `row_order[i]` of the slice; None: the rows of both
        have the same order.
    """

    index: tuple[int | slice, ...]
    name: str
    shape: tuple[int, ...]
    row_order: np.ndarray | None = None


class Entry(NamedTuple):
    """The tensors that hold one parameter of one layer.

    Attributes:
      path: the parameter's path in its module, with slashes ("mixer/q_proj" in a layer).
      axes: the permutation of the parameter's axes (as of `numpy.transpose`) after which each
        tensor is a slice along the leading axes.
      slices: the slice that each tensor holds.
      fused: the slice of the one tensor that holds the parameter of all experts, in checkpoints
        with fused experts (`ModelConfig.hf_fused_experts`); None: there is no such tensor.
    """

    path: str
    axes: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    fused: TensorSlice | None = None


# A function from a model's settings to the entries of one of its modules.
Entries = Callable[[ModelConfig], Iterator[Entry]]


def one_tensor(
    path: str,
    name: str,
    axes: tuple[int, ...],
    tensor_shape: tuple[int, ...],
    row_order: np.ndarray | None = None,
) -> Entry:
    """The entry of a parameter that a single tensor holds; `Entry` and `TensorSlice` explain the
    arguments.
    """
    return Entry(path, axes, (TensorSlice((), name, tensor_shape, row_order),))


# The former name, which mixers outside of this package import.
one = one_tensor


def vector(path: str, name: str, width: int) -> Entry:
    """The entry of a parameter [width] that a single tensor [width] holds."""
    return one_tensor(path, name, (0,), (width,))


def under_module(module: str, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The entries of a layer's submodule `module`, with their paths in the layer."""
    return (entry._replace(path=f"{module}/{entry.path}") for entry in entries)


def swiglu(path_prefix: str, name_prefix: str, width: int, hidden: int) -> Iterator[Entry]:
    """The entries of a SwiGLU MLP.

    Args:
      path_prefix: what the paths of its parameters begin with ("shared_" or "").
      name_prefix: what the names of its tensors begin with ("mlp").
      width: the width of its input and of its output.
      hidden: the width of its hidden layer.
    """
    gate_and_up = (
        TensorSlice((0,), f"{name_prefix}.gate_proj.weight", (hidden, width)),
        TensorSlice((1,), f"{name_prefix}.up_proj.weight", (hidden, width)),
    )
    yield Entry(f"{path_prefix}gate_up", (1, 2, 0), gate_and_up)
    yield one_tensor(
        f"{path_prefix}down", f"{name_prefix}.down_proj.weight", (1, 0), (width, hidden)
    )
