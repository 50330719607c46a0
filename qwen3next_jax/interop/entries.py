"""How one parameter is stored in the tensors of a Hugging Face checkpoint, as data.

A parameter here is [inputs…, outputs…], and the layers of a stack share one array. A Hugging Face
tensor is [outputs, inputs], and each layer (and each expert) has its own. Every parameter of a
layer is a transposition of its tensors: once its axes are moved, it is (tensors…, rows…, columns…),
and each tensor is one slice of that array, flattened to the tensor's own shape. The rows of a
tensor may have another order. Import and export read the same entry, so they cannot disagree.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.config import ModelConfig


class TensorSlice(NamedTuple):
    """One tensor of a parameter.

    Attributes:
      index: where the tensor lies in the transposed parameter.
      name: the tensor's name after the prefix of its layer ("self_attn.q_proj.weight").
      shape: the tensor's shape in the file.
      row_order: row i of the tensor is row `row_order[i]` of the slice; None: the same order.
    """

    index: tuple[int | slice, ...]
    name: str
    shape: tuple[int, ...]
    row_order: np.ndarray | None = None


class Entry(NamedTuple):
    """The tensors of one parameter of one layer.

    Attributes:
      path: of the parameter within its module, with slashes ("mixer/q_proj" within a layer).
      axes: the transposition after which each tensor is a slice of the leading axes.
      slices: the tensors.
      fused: for a parameter of the experts, the one tensor that holds all of them in checkpoints
        with fused experts (`ModelConfig.hf_fused_experts`); None: there is no such tensor.
    """

    path: str
    axes: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    fused: TensorSlice | None = None


# The entries of one module, whose sizes are in the settings.
Entries = Callable[[ModelConfig], Iterator[Entry]]


def one(
    path: str,
    name: str,
    axes: tuple[int, ...],
    tensor_shape: tuple[int, ...],
    row_order: np.ndarray | None = None,
) -> Entry:
    """A parameter that is one tensor."""
    return Entry(path, axes, (TensorSlice((), name, tensor_shape, row_order),))


def vector(path: str, name: str, width: int) -> Entry:
    """A parameter of one dimension that is one tensor of the same shape."""
    return one(path, name, (0,), (width,))


def below(part: str, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The entries of a module as entries of the layer that has the module under the name `part`."""
    return (entry._replace(path=f"{part}/{entry.path}") for entry in entries)


def swiglu(path: str, name: str, width: int, hidden: int) -> Iterator[Entry]:
    """The entries of a SwiGLU MLP.

    Args:
      path: what the names of its parameters begin with ("shared_", or nothing).
      name: what the names of its tensors begin with ("mlp").
      width: of its input and output.
      hidden: its width inside.
    """
    gate_and_up = (
        TensorSlice((0,), f"{name}.gate_proj.weight", (hidden, width)),
        TensorSlice((1,), f"{name}.up_proj.weight", (hidden, width)),
    )
    yield Entry(f"{path}gate_up", (1, 2, 0), gate_and_up)
    yield one(f"{path}down", f"{name}.down_proj.weight", (1, 0), (width, hidden))
