"""Data parallelism between TPU slices (hybrid FSDP): each slice has all parameters, computes the
gradients of its own part of a batch, and then the gradients of all slices are added.

The network between slices has a much smaller bandwidth than the network within a slice. So each
slice first adds the gradients of all its micro-batches over its own devices. Only the summed
gradients cross the network between slices, once a step.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.sharding.rules import SLICE, non_manual_axes


def on_each_slice(compute_gradients: Callable, mesh: Mesh) -> Callable:
    """Wraps `compute_gradients` so that each slice calls it with its own rows of a batch.

    Args:
      compute_gradients: a function (params, batch, counts, mesh) → (gradients, parts of the loss).
        The function gets the mesh of its slice, on which `sharding.rules` splits nothing over the
        axis `slice`.
      mesh: the mesh of all slices.

    Returns:
      A function (params, batch, counts) → (gradients, parts of the loss). Each gradient has the
      shape [slices, *shape of its parameter]; the parts of the loss are summed over the slices.
    """

    def on_slice(params, rows, counts):
        slice_mesh = jax.sharding.get_abstract_mesh()
        grads, parts = compute_gradients(params, rows, counts, slice_mesh)
        return jax.tree.map(lambda grad: grad[None], grads), sum_over_slices(parts, slice_mesh)

    return jax.shard_map(
        on_slice,
        mesh=mesh,
        in_specs=(P(), P(SLICE), P()),
        out_specs=(P(SLICE), P()),
        axis_names={SLICE},
        check_vma=False,
    )


def sum_over_slices(tree: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Adds the arrays of `tree` over all slices, in the part of a program in which each slice
    computes its own gradients (`on_each_slice`). In all other parts of the program, the function
    returns `tree` itself.

    Args:
      mesh: the mesh of the traced part of the program; None: one device.
    """
    if mesh is None or non_manual_axes(mesh, (SLICE,)):
        return tree
    return jax.lax.psum(tree, SLICE)


def sum_gradients_over_slices(
    grads: Any, param_shardings: Any, sum_shardings: Any, dtype: Any
) -> Any:
    """Returns the sums of the gradients of all slices.

    Args:
      grads: a tree of gradients [slices, *shape of the parameter].
      param_shardings: a tree of the parameters' shardings. Each slice has split its gradients like
        the parameters.
      sum_shardings: a tree of the shardings of the sums. A sharding in `sum_shardings` may equal
        that in `param_shardings`, so that each slice gets the whole sum, or also split one
        dimension over `slice`, so that each slice gets a part of the sum.
      dtype: the dtype in which gradients cross the network between slices.
    """
    leaves, structure = jax.tree.flatten(grads)
    before_specs = [sharding.spec for sharding in jax.tree.leaves(param_shardings)]
    after_specs = [sharding.spec for sharding in jax.tree.leaves(sum_shardings)]

    def add_up(gradients):
        sums = []
        for gradient, spec in zip(gradients, after_specs):
            slice_gradient = gradient[0].astype(dtype)
            dims = [dim for dim, axes in enumerate(spec) if SLICE in (axes or ())]
            if dims:
                total_gradient = jax.lax.psum_scatter(
                    slice_gradient, SLICE, scatter_dimension=dims[0], tiled=True
                )
            else:
                total_gradient = jax.lax.psum(slice_gradient, SLICE)
            sums.append(total_gradient.astype(gradient.dtype))
        return sums

    sums = jax.shard_map(
        add_up,
        mesh=jax.tree.leaves(param_shardings)[0].mesh,
        in_specs=([P(SLICE, *spec) for spec in before_specs],),
        out_specs=after_specs,
        check_vma=False,
    )(leaves)
    return jax.tree.unflatten(structure, sums)
