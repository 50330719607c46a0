"""Describes, as data, how one parameter is stored in the tensors of a Hugging Face checkpoint.

A parameter of this project has the shape [inputs…, outputs…], and the parameters of all layers of a
stack share one array. A Hugging Face tensor has the shape [outputs, inputs], and each layer (or
each expert of each layer) has a tensor of its own. A `ParameterEntry` describes the conversion:
transpose the parameter of one layer to [tensors…, rows…, columns…]; each tensor is then a slice of
the result, reshaped to the tensor's shape. The tensor may have the rows of the slice in another
order. Import and export use the same `ParameterEntry`, so they cannot disagree.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.config import ModelConfig


class TensorSlice(NamedTuple):
    """The slice of a parameter that one tensor holds.

    Attributes:
      index_in_layer: the index of the slice in the transposed parameter of one layer.
      name: the tensor's name without the prefix of its layer ("self_attn.q_proj.weight").
      shape: the tensor's shape in the file.
      row_order: row i of the tensor is row `row_order[i]` of the slice. None: the rows of tensor
        and slice have the same order.
    """

    index_in_layer: tuple[int | slice, ...]
    name: str
    shape: tuple[int, ...]
    row_order: np.ndarray | None = None


class ParameterEntry(NamedTuple):
    """The tensors that hold one parameter of one layer.

    Attributes:
      path: the parameter's path in its module, with slashes ("mixer/q_proj" in a layer).
      transpose_axes: the permutation of the parameter's axes (in the sense of `numpy.transpose`)
        after which each tensor is a slice along the leading axes.
      slices: the slice that each tensor holds.
      all_experts_slice: the single tensor that holds the parameter of all experts, in checkpoints
        with fused experts (`ModelConfig.hf_fused_experts`); None: there is no such tensor.
    """

    path: str
    transpose_axes: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    all_experts_slice: TensorSlice | None = None


# A function from a model's settings to the entries of one of its modules.
EntryFunction = Callable[[ModelConfig], Iterator[ParameterEntry]]


def one_tensor_entry(
    path: str,
    name: str,
    axes: tuple[int, ...],
    tensor_shape: tuple[int, ...],
    row_order: np.ndarray | None = None,
) -> ParameterEntry:
    """Returns the entry of a parameter that a single tensor holds. `ParameterEntry` and
    `TensorSlice` explain the arguments.
    """
    return ParameterEntry(path, axes, (TensorSlice((), name, tensor_shape, row_order),))


def vector_entry(path: str, name: str, width: int) -> ParameterEntry:
    """Returns the entry of a parameter [width] that a single tensor [width] holds."""
    return one_tensor_entry(path, name, (0,), (width,))


def entries_under_module(
    module: str, entries: Iterator[ParameterEntry]
) -> Iterator[ParameterEntry]:
    """Returns `entries` with "MODULE/" before each path. The given paths begin in a submodule of a
    layer, the new paths in the layer.
    """
    return (entry._replace(path=f"{module}/{entry.path}") for entry in entries)


def swiglu_entries(
    path_prefix: str, name_prefix: str, width: int, hidden: int
) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a SwiGLU MLP.

    Args:
      path_prefix: the beginning of the paths of the MLP's parameters, such as "shared_"; may be "".
      name_prefix: the beginning of the names of the MLP's tensors, such as "mlp".
      width: the width of the MLP's input and output.
      hidden: the width of the MLP's hidden layer.
    """
    gate_and_up = (
        TensorSlice((0,), f"{name_prefix}.gate_proj.weight", (hidden, width)),
        TensorSlice((1,), f"{name_prefix}.up_proj.weight", (hidden, width)),
    )
    yield ParameterEntry(f"{path_prefix}gate_up", (1, 2, 0), gate_and_up)
    yield one_tensor_entry(
        f"{path_prefix}down", f"{name_prefix}.down_proj.weight", (1, 0), (width, hidden)
    )
