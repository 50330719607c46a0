"""The rules by which arrays are split over the mesh. `LOGICAL_AXES` maps the logical axes of
parameters to mesh axes, and `ACTIVATIONS` maps the logical axes of activations.

Each parameter declares a logical axis for each of its dimensions (`model.parameters`). A mesh axis
splits a dimension in one of two ways. A compute axis splits the dimension at all times: each device
computes with its own part. A storage axis splits the dimension only between uses, to save memory
(FSDP, ZeRO-3: 1910.02054): the parameter is gathered over the storage axis just before its use. A
parameter's dimension of stacked layers is never split, because a scan over the layers would gather
all layers at once.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.errors import UserError, did_you_mean
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import MESH_AXES, SliceState
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.gathering import all_gather

SLICE, DATA, EXPERT, CONTEXT, TENSOR = MESH_AXES
ROWS = (SLICE, DATA, EXPERT)  # the mesh axes that split the rows of a batch
TOKENS = (*ROWS, CONTEXT)  # the mesh axes that split the tokens of a batch
TOKENS_OF_SLICE = (DATA, EXPERT, CONTEXT)  # the axes of TOKENS that lie within a slice
FSDP = TOKENS_OF_SLICE  # the mesh axes that split parameters for storage


class MeshAxes(NamedTuple):
    """The mesh axes that split a dimension of a parameter.

    Attributes:
      compute: mesh axes that split the dimension while the model computes with it.
      storage: mesh axes that also split the dimension between uses. The axis with the most devices
        is the outermost axis, so it is gathered last.
    """

    compute: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()


# {logical axis: the mesh axes that may split it}. A mesh axis splits a dimension only if its size
# divides the dimension, and if it splits no earlier dimension of the same parameter.
LOGICAL_AXES: dict[str | None, MeshAxes] = {
    # the model's width in most parameters; compute axes split other dimensions of these parameters
    "embed": MeshAxes(storage=FSDP),
    # the model's width as the output of a projection, or in vectors of this width
    "embed_out": MeshAxes(storage=(TENSOR,)),
    "vocab": MeshAxes(compute=(TENSOR,)),
    "query_heads": MeshAxes(compute=(TENSOR,)),
    "key_value_heads": MeshAxes(compute=(TENSOR,)),
    # width of a head; it is split only if `tensor` does not divide the number of heads
    "head_width": MeshAxes(storage=(TENSOR,)),
    # heads of recurrent layers; the value heads of a key head stay on its device
    "key_heads": MeshAxes(compute=(TENSOR,)),
    "value_heads": MeshAxes(compute=(TENSOR,)),
    # channels of a convolution
    "channels": MeshAxes(storage=FSDP),
    "experts": MeshAxes(compute=(EXPERT,)),
    "router": MeshAxes(storage=(TENSOR,)),
    # rows and width of a table of which a batch uses only some rows (`sharding.row_tables`)
    "table_rows": MeshAxes(compute=TOKENS_OF_SLICE),
    "table_width": MeshAxes(compute=(TENSOR,)),
    "mlp": MeshAxes(compute=(TENSOR,)),
    # width of an expert, in its output matrix. The storage axes split this dimension, because a TPU
    # would copy the gathered matrix to another layout if they split the last one
    "mlp_in": MeshAxes(compute=(TENSOR,), storage=FSDP),
    None: MeshAxes(),
}


class ShardedParam(Protocol):
    """The fields of a parameter's declaration (`model.parameters.ParameterDeclaration`) that
    sharding reads.
    """

    axes: tuple[str | None, ...]
    uses_model_dtype: bool
    gathered_by: str


# logical axis of an activation → the mesh axes that split it
ACTIVATIONS = {
    "batch": ROWS,
    "time": CONTEXT,
    "heads": TENSOR,
    "time_rows": (CONTEXT, TENSOR),
    None: None,
}


def check_logical_axes(axes: tuple[str | None, ...]) -> None:
    """Raises ValueError if `LOGICAL_AXES` lacks one of `axes`."""
    for axis in axes:
        if axis not in LOGICAL_AXES:
            raise ValueError(
                f"no logical axis {axis!r} in "
                f"sharding/rules.py{did_you_mean(str(axis), filter(None, LOGICAL_AXES))}: "
                f"expected one of {', '.join(filter(None, LOGICAL_AXES))}"
            )


def storage_spec(declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of a parameter, and of its optimizer state, between uses: both the
    compute axes and the storage axes split it.

    Args:
      declared: the parameter's declaration. The declared logical axes are those of the last
        dimensions of `shape`.
      shape: the global shape of the parameter, with the dimension of stacked layers first, if it
        has one.
      mesh: the devices.
    """
    dims = []
    for axis in declared.axes:
        compute, storage = LOGICAL_AXES[axis]
        dims.append((*compute, *sorted(storage, key=mesh.shape.get, reverse=True)))
    return _partition_spec(dims, shape, mesh)


def state_spec_shared_by_slices(declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of an array of the optimizer's state if the slices share this
    state: `storage_spec` with `slice` added at the first dimension whose shards `slice` divides.
    `slice` may split the dimension of stacked layers, because no scan reads the optimizer's state.
    If `slice` divides no dimension, every slice has the whole array.
    """
    entries = [mesh_axes_of_entry(entry) for entry in storage_spec(declared, shape, mesh)]
    for dim, (axes, size) in enumerate(zip(entries, shape)):
        if mesh.shape[SLICE] > 1 and size % num_shards(mesh, *axes, SLICE) == 0:
            entries[dim] = (*axes, SLICE)
            break
    return P(*entries)


def compute_spec(declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of a parameter while the model computes with it: the parameter is
    gathered over its storage axes, and only its compute axes split it. It takes the arguments of
    `storage_spec`.
    """
    return _partition_spec([LOGICAL_AXES[axis].compute for axis in declared.axes], shape, mesh)


def _partition_spec(dims: list[tuple[str, ...]], shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of an array of this shape. `dims` lists the candidate mesh axes of
    each of the array's last dimensions. A candidate axis splits a dimension if it has more than one
    device, splits no earlier dimension, and its size, times the sizes of the axes that already
    split the dimension, divides the dimension.
    """
    entries: list[tuple[str, ...]] = []
    for axes, size in zip([()] * (len(shape) - len(dims)) + dims, shape):
        entry: tuple[str, ...] = ()
        for axis in axes:
            is_free = mesh.shape[axis] > 1 and axis not in sum(entries, ())
            if is_free and size % num_shards(mesh, axis, *entry) == 0:
                entry += (axis,)
        entries.append(entry)
    return P(*entries)


def mesh_axes_of_entry(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec, outermost first."""
    return (entry,) if isinstance(entry, str) else entry or ()


def activation_spec(*names: str | None) -> P:
    """Returns the PartitionSpec of an activation whose dimensions have the logical axes `names`."""
    return P(*(ACTIVATIONS[name] for name in names))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of tokens and segment ids [B, T] on `mesh`."""
    return NamedSharding(mesh, activation_spec("batch", "time"))


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """Constrains the sharding of an activation `x`, whose dimensions have the logical axes `names`.
    Dimensions of `x` without a name, after the named dimensions, are not split. Returns `x` itself
    if there is no mesh.
    """
    if mesh is None:
        return x
    spec = _spec_without_manual_axes(activation_spec(*names), mesh)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def non_manual_axes(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the mesh axes among `axes` that are not manual axes of a surrounding `shard_map`.
    Only `slice` is ever a manual axis: in the part of a train step in which each slice computes its
    own gradients (`sharding.slices`).
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    return tuple(axis for axis in axes if types[axis] != AxisType.Manual)


def _spec_without_manual_axes(spec: P, mesh: Mesh | AbstractMesh) -> P:
    return P(*(non_manual_axes(mesh, mesh_axes_of_entry(entry)) for entry in spec))


def num_shards(mesh: Mesh | None, *axes: str) -> int:
    """Returns the number of shards into which these mesh axes together split a dimension; 1 without
    a mesh. Manual axes of a surrounding `shard_map` do not count (`non_manual_axes`).
    """
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in non_manual_axes(mesh, axes))


def per_shard(f: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps `f` in `jax.shard_map`, so that each device calls `f` on its own shards. Functions that
    XLA's partitioner cannot split, such as kernels, need this wrapper. Returns `f` itself if there
    is no mesh.

    Args:
      f: the function of the shards.
      mesh: the devices, or None.
      in_specs, out_specs: the PartitionSpecs of the arguments and results.
    """
    if mesh is None:
        return f
    in_specs, out_specs = jax.tree.map(
        lambda spec: _spec_without_manual_axes(spec, mesh),
        (in_specs, out_specs),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(non_manual_axes(mesh, mesh.axis_names)),
        check_vma=False,
    )


def gather_params(params: Any, mesh: Mesh | None, dtype: Any) -> Any:
    """Gathers parameters over their storage axes before a layer uses them outside of `shard_map`.

    Parameters declared with `uses_model_dtype` are cast to `dtype` before they are gathered. The
    gradients are reduce-scattered back to the storage sharding. A parameter declared with
    gathered_by="operator" is cast but not gathered; the operator that uses the parameter gathers it
    (`gather_in_shard`).

    Args:
      params: a tree of `nnx.Param` with declarations. Without a mesh, `params` is returned
        unchanged.
      mesh: the devices, or None.
      dtype: the dtype of the model's products.
    """
    if mesh is None:
        return params

    def gather(variable):
        declared, leaf = variable.declared, variable[...]
        to = jnp.dtype(dtype) if declared.uses_model_dtype else leaf.dtype
        if declared.gathered_by == "operator":
            return variable.replace(leaf.astype(to))
        specs = _gather_steps(
            storage_spec(declared, leaf.shape, mesh), compute_spec(declared, leaf.shape, mesh)
        )
        steps = tuple(NamedSharding(mesh, spec) for spec in specs)
        return variable.replace(save_for_backward(_cast_and_gather(leaf, to, steps, leaf.dtype)))

    return jax.tree.map(gather, params, is_leaf=lambda leaf: hasattr(leaf, "declared"))


def gather_in_shard(
    x: jax.Array, declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh, whole: bool = False
) -> jax.Array:
    """Gathers one parameter before its use inside `per_shard`. The gradient is a reduce-scatter.

    Args:
      x: this device's shard of the parameter, which is split by `storage_spec`.
      declared: the parameter's declaration.
      shape: the global shape of the parameter.
      mesh: the devices.
      whole: whether to gather over the compute axes too, so that every device has the whole
        parameter.
    """
    spec_in_use = P(*(None,) * len(shape)) if whole else compute_spec(declared, shape, mesh)
    for dim, axes in enumerate(axes_to_gather(storage_spec(declared, shape, mesh), spec_in_use)):
        for axis in reversed(axes):
            x = all_gather(x, axis, dim)
    return save_for_backward(x)


def axes_to_gather(storage: P, use: P) -> list[tuple[str, ...]]:
    """Returns, for each dimension, the mesh axes that split it in `storage` but not in `use`, outer
    axes first.
    """
    return [
        mesh_axes_of_entry(stored)[len(mesh_axes_of_entry(used)) :]
        for stored, used in zip(storage, use)
    ]


def _gather_steps(storage: P, use: P) -> list[P]:
    """Returns the PartitionSpecs from `storage` to `use`, in the order in which a parameter takes
    them while it is gathered. Each spec has one mesh axis less than the spec before it; inner axes
    are removed first.

    The axes are gathered one by one because the TPU compiler handles some larger gathers badly. If
    one gather went over several axes that together span all dimensions of a torus, the compiler
    would replace the gather by a sum of zero-padded parts, and the reduce-scatter of the gradient
    by a sum of whole arrays. A sum sends twice the bytes of the gather or reduce-scatter that it
    replaces.
    """
    specs = [storage]
    for dim, axes in enumerate(axes_to_gather(storage, use)):
        for _ in axes:
            entries = list(specs[-1])
            entries[dim] = mesh_axes_of_entry(entries[dim])[:-1]
            specs.append(P(*entries))
    return specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _cast_and_gather(x, dtype, steps, own_dtype):
    """Casts `x` to `dtype` and gives it the shardings `steps`, one after another. `own_dtype`: the
    dtype of `x` and of its gradient.
    """
    x = x.astype(dtype)
    # The first constraint is the storage sharding. Without it the partitioner may gather before
    # the cast, which sends twice the bytes.
    for sharding in steps:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def _cast_and_gather_backward(dtype, steps, own_dtype, _, dy):
    for sharding in reversed(steps[:-1] or steps):
        dy = jax.lax.with_sharding_constraint(dy, sharding)
    return (dy.astype(own_dtype),)


_cast_and_gather.defvjp(
    lambda x, *static: (_cast_and_gather(x, *static), None), _cast_and_gather_backward
)


def tree_shardings(
    tree: Any,
    declared: Mapping[str, ShardedParam],
    mesh: Mesh,
    slice_state: SliceState = "replicated",
) -> Any:
    """Returns the NamedSharding of every leaf of a train state or of a tree of parameters.

    A leaf whose path ends in the path of a parameter, such as a moment of the optimizer, is split
    like the parameter. All other leaves, such as the number of the step, are copied to every
    device. If `slice_state` is "sharded", `slice` also splits the leaves of the entry "opt_state".

    Args:
      tree: a tree whose leaves are arrays or `jax.ShapeDtypeStruct`s.
      declared: {path of a parameter, such as "layers/0/mixer/q_proj": its declaration}.

    Raises:
      UserError: an array belongs to no parameter.
    """

    def leaf_sharding(path, leaf):
        names = path_string(path).split("/")
        suffixes = ("/".join(names[i:]) for i in range(len(names)))
        parameter = next((declared[name] for name in suffixes if name in declared), None)
        if parameter is not None:
            shared = slice_state == "sharded" and names[0] == "opt_state"
            spec = state_spec_shared_by_slices if shared else storage_spec
            return NamedSharding(mesh, spec(parameter, leaf.shape, mesh))
        if leaf.ndim and names[0] != "guards":
            raise UserError(
                f"{path_string(path)}: follows no declared parameter: the path of an array that an "
                "optimizer or an update rule keeps must end in the path of a parameter, unless it "
                "is a scalar"
            )
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)
