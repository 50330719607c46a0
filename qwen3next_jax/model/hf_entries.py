"""How a layer's parameters are stored in Hugging Face checkpoints. Each layer's file holds its own entries; `interop` reads them.

Parameters here are [in…, out…] and stacked; Hugging Face tensors are [out, in] and one per layer (and expert). An entry is data: the
axes that lead to a tensor, its name and shape. Reading and writing are the two directions over the same entries.
"""

from typing import NamedTuple

import numpy as np


class Slice(NamedTuple):
    """One tensor: where it lies in the transposed parameter, its name after the layer's prefix, its shape."""

    index: tuple[int, ...]
    name: str
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """One parameter of one layer.

    path: within the layer (or the model), with slashes.
    axes: the transposition after which its tensors are slices of the leading axes.
    slices: its tensors as the released checkpoint stores them.
    fused: the single tensor that newer transformers versions may store instead, or None.
    row_order: row i of the tensor is row row_order[i] of the parameter; None when they agree.
    """

    path: str
    axes: tuple[int, ...]
    slices: tuple[Slice, ...]
    fused: Slice | None = None
    row_order: np.ndarray | None = None

    def to_tensor(self, parameter: np.ndarray, part: Slice) -> np.ndarray:
        """The tensor `part` of one layer's `parameter`, contiguous."""
        tensor = np.ascontiguousarray(parameter.transpose(self.axes)[part.index]).reshape(part.shape)
        return tensor if self.row_order is None else tensor[self.row_order]

    def from_tensor(self, tensor: np.ndarray, part: Slice, parameter: np.ndarray) -> None:
        """Writes the tensor `part` into its place in one layer's `parameter`."""
        if self.row_order is not None:
            tensor = tensor[np.argsort(self.row_order)]
        target = parameter.transpose(self.axes)  # a view
        target[part.index] = tensor.reshape(target[part.index].shape)


def one(path: str, name: str, axes: tuple[int, ...], tensor_shape: tuple[int, ...], row_order: np.ndarray | None = None) -> Entry:
    """A parameter that is one tensor."""
    return Entry(path, axes, (Slice((), name, tensor_shape),), row_order=row_order)


def vector(path: str, name: str, width: int) -> Entry:
    return one(path, name, (0,), (width,))
