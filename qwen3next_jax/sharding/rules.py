"""What lies where on the mesh: one table from the logical axes of parameters to mesh axes, one
for activations.

A parameter is declared with the logical axis of each dimension (`model.parameters`). Some mesh
axes split it while computing, others only to store less (FSDP, ZeRO-3: 1910.02054): gathered
just before use. The axis of stacked layers is never split: a scan would gather it whole.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.errors import did_you_mean
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.gathering import all_gather

# what is split over which mesh axes; rows: of a batch
ROWS, CONTEXT, EXPERT, TENSOR = ("data", "expert"), "context", "expert", "tensor"
FSDP = TOKENS = (*ROWS, CONTEXT)

# Over what a dimension is split while computing, and over what besides between steps: of these the
# longest is outermost, and so gathered last, when an array is largest. Dimensions take, from the
# first on, those of their axes that divide them and that none before has taken.
LOGICAL_AXES: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed": ((), FSDP),  # the model's width, where the other dimensions are split while computing
    "embed_out": ((), (TENSOR,)),  # the model's width where it is what a product gives
    "vocab": ((TENSOR,), ()),
    "query_heads": ((TENSOR,), ()),
    "key_value_heads": ((TENSOR,), ()),
    # where `tensor` exceeds the number of heads, which then stay whole
    "head_width": ((), (TENSOR,)),
    "key_heads": ((TENSOR,), ()),  # their value heads come along
    "value_heads": ((TENSOR,), ()),
    "channels": ((), FSDP),  # of a convolution
    "experts": ((EXPERT,), ()),
    "router": ((), (TENSOR,)),
    "mlp": ((TENSOR,), ()),
    # of experts: gathered along their last dimension, a TPU would copy the whole to another layout
    "mlp_in": ((TENSOR,), FSDP),
    None: ((), ()),
}


class ShardedParam(Protocol):
    """What the rules read of a parameter's declaration (`model.parameters.Declared`)."""

    axes: tuple[str | None, ...]
    operand: bool
    gathered: str


ACTIVATIONS = {
    "batch": ROWS,
    "time": CONTEXT,
    "heads": TENSOR,
    "time_rows": (CONTEXT, TENSOR),
    None: None,
}


def check_logical_axes(axes: tuple[str | None, ...]) -> None:
    """Raises ValueError where one of `axes` is not in the table."""
    for axis in axes:
        if axis not in LOGICAL_AXES:
            raise ValueError(
                f"no logical axis {axis!r} in "
                f"sharding/rules.py{did_you_mean(str(axis), filter(None, LOGICAL_AXES))}: "
                f"expected one of {', '.join(filter(None, LOGICAL_AXES))}"
            )


def storage_spec(declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How a parameter (or its optimizer state) of this declaration lies on the mesh between
    steps.
    """
    return _spec(
        [
            (
                *LOGICAL_AXES[axis][0],
                *sorted(LOGICAL_AXES[axis][1], key=mesh.shape.get, reverse=True),
            )
            for axis in declared.axes
        ],
        shape,
        mesh,
    )


def compute_spec(declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How it lies while computing: the storage axes gathered."""
    return _spec([LOGICAL_AXES[axis][0] for axis in declared.axes], shape, mesh)


def _spec(dims: list[tuple[str, ...]], shape: tuple[int, ...], mesh: Mesh) -> P:
    """`dims` for the last dimensions of `shape`, each with those of its axes that divide it and
    that none before has taken.
    """
    entries: list[tuple[str, ...]] = []
    for axes, size in zip([()] * (len(shape) - len(dims)) + dims, shape):
        kept: tuple[str, ...] = ()
        for axis in axes:
            if (
                mesh.shape[axis] > 1
                and axis not in sum(entries, ())
                and size % num_shards(mesh, axis, *kept) == 0
            ):
                kept += (axis,)
        entries.append(kept)
    return P(*entries)


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def activation_spec(*names: str | None) -> P:
    """PartitionSpec of an activation whose dimensions carry these logical names."""
    return P(*(ACTIVATIONS[name] for name in names))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where tokens and segment ids [B, T] lie on `mesh`."""
    return NamedSharding(mesh, activation_spec("batch", "time"))


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """Tells the partitioner where activation `x` lies; nothing without a mesh."""
    return (
        x
        if mesh is None
        else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(*names)))
    )


def num_shards(mesh: Mesh | None, *axes: str) -> int:
    """Into how many parts these axes of the mesh split something; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def per_shard(f: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each device's own part, for what the partitioner cannot split (kernels); `f` itself
    without a mesh.
    """
    if mesh is None:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather_params(params: Any, mesh: Mesh | None, dtype: Any) -> Any:
    """Parameters (declared variables) as they are used: operands cast to `dtype`, then gathered
    over their storage axes. Gradients go back to where the parameters lie. Nothing happens
    without a mesh.
    """
    if mesh is None:
        return params

    def one(variable):
        declared, leaf = variable.declared, variable[...]
        to = jnp.dtype(dtype) if declared.operand else leaf.dtype
        if declared.gathered == "operator":
            return variable.replace(leaf.astype(to))
        specs = _gather_steps(
            storage_spec(declared, leaf.shape, mesh), compute_spec(declared, leaf.shape, mesh)
        )
        return variable.replace(
            save_for_backward(
                _gather(leaf, to, tuple(NamedSharding(mesh, spec) for spec in specs), leaf.dtype)
            )
        )

    return jax.tree.map(one, params, is_leaf=lambda leaf: hasattr(leaf, "declared"))


def gather_in_shard(
    x: jax.Array, declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh, whole: bool = False
) -> jax.Array:
    """Inside `local`: this device's stored part of a parameter of global `shape`, gathered for
    use; `whole`: over `tensor` too. Its gradient is a reduce-scatter by construction.
    """
    used = P(*(None,) * len(shape)) if whole else compute_spec(declared, shape, mesh)
    for dim, axes in enumerate(axes_to_gather(storage_spec(declared, shape, mesh), used)):
        for axis in reversed(axes):
            x = all_gather(x, axis, dim)
    return save_for_backward(x)


def axes_to_gather(storage: P, use: P) -> list[tuple[str, ...]]:
    """Per dimension the axes, outer ones first, that split it in `storage` and not in `use`."""
    return [_axes(stored)[len(_axes(used)) :] for stored, used in zip(storage, use)]


def _gather_steps(storage: P, use: P) -> list[P]:
    """From `storage` to `use`, one mesh axis less at a time, inner ones first. Over several axes
    at once that together span all dimensions of a torus the TPU compiler sums zero-padded parts
    instead of gathering (and sums instead of reduce-scattering): twice the bytes.
    """
    specs = [storage]
    for dim, axes in enumerate(axes_to_gather(storage, use)):
        for _ in axes:
            entries = list(specs[-1])
            entries[dim] = _axes(entries[dim])[:-1]
            specs.append(P(*entries))
    return specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x, dtype, stages, own_dtype):
    x = x.astype(dtype)
    # where it lies first, or the partitioner may gather before the cast: twice the bytes
    for sharding in stages:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def _gather_backward(dtype, stages, own_dtype, _, dy):
    for sharding in reversed(stages[:-1] or stages):
        dy = jax.lax.with_sharding_constraint(dy, sharding)
    return (dy.astype(own_dtype),)


_gather.defvjp(lambda x, *static: (_gather(x, *static), None), _gather_backward)


def tree_shardings(tree: Any, declared: Mapping[str, ShardedParam], mesh: Mesh) -> Any:
    """NamedSharding of every leaf (array or shape) of a train state or of a tree of parameters.

    Args:
      declared: of every parameter, by its path ("layers/0/mixer/q_proj"). What follows a
      parameter (moments, …) lies as it does and has
        its path behind a prefix of its own; anything else must be small: counters and guards,
        which every device holds.

    Raises:
      ValueError: a leaf of `params` or `opt_state` follows no parameter and is no scalar.
    """

    def one(path, leaf):
        *groups, _ = names = path_string(path).split("/")
        followed = next(
            (
                declared[name]
                for i in range(len(names))
                if (name := "/".join(names[i:])) in declared
            ),
            None,
        )
        if followed is None and leaf.ndim and groups[0] != "guards":
            raise ValueError(
                f"{path_string(path)}: follows no declared parameter: what an optimizer keeps for "
                "one must have its path"
            )
        return NamedSharding(
            mesh, P() if followed is None else storage_spec(followed, leaf.shape, mesh)
        )

    return jax.tree_util.tree_map_with_path(one, tree)
