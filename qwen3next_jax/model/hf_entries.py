"""How a layer's parameters are stored in Hugging Face checkpoints. Each layer's file holds its
own entries; `interop` reads them.

Parameters here are [in…, out…] and stacked; Hugging Face tensors are [out, in] and one per layer
(and expert). An entry is data: the axes that lead to a tensor, its name and shape (read and
written by `interop.layout`).
"""

from typing import NamedTuple

import numpy as np


class Slice(NamedTuple):
    """One tensor: where it lies in the transposed parameter, its name after the layer's prefix,
    its shape.

    row_order: its row i is row row_order[i] of what lies there; None when they agree.
    """

    index: tuple[int | slice, ...]
    name: str
    shape: tuple[int, ...]
    row_order: np.ndarray | None = None


class Entry(NamedTuple):
    """One parameter of one layer.

    path: within the layer (or the model), with slashes. axes: the transposition after which its
    tensors are slices of the leading axes. slices: its tensors. fused: of experts, the single
    tensor that some checkpoints store instead (`ModelConfig.hf_fused_experts`); else None.
    """

    path: str
    axes: tuple[int, ...]
    slices: tuple[Slice, ...]
    fused: Slice | None = None


def one(
    path: str,
    name: str,
    axes: tuple[int, ...],
    tensor_shape: tuple[int, ...],
    row_order: np.ndarray | None = None,
) -> Entry:
    """A parameter that is one tensor."""
    return Entry(path, axes, (Slice((), name, tensor_shape, row_order),))


def vector(path: str, name: str, width: int) -> Entry:
    return one(path, name, (0,), (width,))
