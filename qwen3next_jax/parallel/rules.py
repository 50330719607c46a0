"""What lies where on the mesh: one ordered table for parameters (and what follows them), one for activations.

A rule names a parameter by the end of its path and gives, per dimension, the mesh axes that split it. A tuple of axes splits
only to store less (FSDP, ZeRO-3: 1910.02054) and is gathered just before use; a plain name stays split while computing. The
axis of stacked layers is never split: a scan over it would gather it whole.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FSDP = ("data", "expert", "context")
EXPERT_FSDP = ("data", "context")  # `expert` splits experts by number
STORED = ("tensor",)  # by parameters that compute whole on every `tensor` shard


class Rule(NamedTuple):
    """`pattern` is searched in the path; `dims` are the axes of the parameter's own dimensions (stacked layers lead, unsplit).
    `operand`: a matmul operand, which is gathered in the model's dtype; everything else is used in its own. `early` False: it is
    gathered inside the `local` part that uses it, by `gather_local`."""

    pattern: str
    dims: tuple
    operand: bool = True
    early: bool = True


PARAMETERS: tuple[Rule, ...] = (
    Rule(r"embedding$", ("tensor", FSDP), operand=False, early=False),  # its gradient adds up rows: in float32
    Rule(r"head$", (FSDP, "tensor"), early=False),
    # gated attention; key/value heads stay whole where `tensor` exceeds their number
    Rule(r"mixer/q_proj$", (FSDP, "tensor", None)),
    Rule(r"mixer/[kv]_proj$", (FSDP, "tensor", STORED)),
    Rule(r"mixer/o_proj$", ("tensor", None, FSDP)),
    # Gated DeltaNet, by key head: its value heads come along
    Rule(r"mixer/in_proj_(qkvz|ba)$", (FSDP, "tensor", None)),
    Rule(r"mixer/conv_kernel$", (None, "tensor", FSDP)),
    Rule(r"mixer/(a_log|dt_bias)$", ("tensor",), operand=False),
    Rule(r"mixer/out_proj$", ("tensor", None, FSDP)),
    # experts and dense MLPs
    Rule(r"mlp/router$", (FSDP, STORED), operand=False, early=False),
    Rule(r"mlp/expert_gate_up$", ("expert", EXPERT_FSDP, None, "tensor"), early=False),
    Rule(r"mlp/expert_down$", ("expert", "tensor", EXPERT_FSDP), early=False),
    Rule(r"mlp/(shared_)?gate_up$", (FSDP, None, "tensor")),
    Rule(r"mlp/(shared_)?down$", ("tensor", FSDP)),
    Rule(r"mlp/shared_gate$", (None,)),
    Rule(r"mtp/fc$", (FSDP, STORED)),
    # replicated: a few vectors, and the counters of the train state and its guards
    Rule(r"norm$", (None,), operand=False),
    Rule(r"(^step|/count|^guards/\w+)$", (), operand=False),
)

ACTIVATIONS = {"batch": ("data", "expert"), "time": "context", "heads": "tensor", "time_rows": ("context", "tensor"), None: None}


def rule_for(path: str) -> Rule:
    """The first rule of the table that matches `path` ("layers/0/mixer/q_proj").

    Raises:
      KeyError: none does; every parameter must be decided on.
    """
    for rule in PARAMETERS:
        if re.search(rule.pattern, path):
            return rule
    raise KeyError(f"{path}: no rule of parallel/rules.py says how to split it")


def storage_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How the parameter (or its optimizer state) of `path` lies on the mesh between steps."""
    return _spec(rule_for(path).dims, shape, mesh)


def use_spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How it lies while computing: the storage axes gathered."""
    return _spec(tuple(None if isinstance(axes, tuple) else axes for axes in rule_for(path).dims), shape, mesh)


def _spec(dims: tuple, shape: tuple[int, ...], mesh: Mesh) -> P:
    """`dims` for the last dimensions of `shape`, each with those of its axes that divide it and that none before has taken."""
    entries: list = []
    taken: set[str] = set()
    for axes, size in zip((None,) * (len(shape) - len(dims)) + dims, shape):
        kept: list[str] = []
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if mesh.shape[axis] > 1 and axis not in taken and size % (mesh.shape[axis] * math.prod(mesh.shape[a] for a in kept)) == 0:
                kept.append(axis)
        taken.update(kept)
        entries.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    return P(*entries)


def activation_spec(*names: str | None) -> P:
    """PartitionSpec of an activation whose dimensions carry these logical names."""
    return P(*(ACTIVATIONS[name] for name in names))


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """Tells the partitioner where activation `x` lies; nothing without a mesh."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(*names)))


def time_axis(mesh: Mesh | None) -> str | None:
    """The mesh axis that splits the tokens of a row, for operators that look back; None where none does."""
    return "context" if mesh is not None and mesh.shape["context"] > 1 else None


def local(f: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each device's own part, for what the partitioner cannot split (kernels); `f` itself without a mesh."""
    if mesh is None:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather(tree: Any, prefix: str, mesh: Mesh | None, dtype: Any) -> Any:
    """Parameters as they are used: operands cast to `dtype`, then gathered over their storage axes. Gradients go back to where
    the parameters lie. `prefix`/path in `tree` is matched with the table; nothing happens without a mesh."""
    if mesh is None:
        return tree

    def one(path, leaf):
        name = path_string(path, prefix)
        to = jnp.dtype(dtype) if rule_for(name).operand else leaf.dtype
        if not rule_for(name).early:
            return leaf.astype(to)
        specs = _stages(storage_spec(name, leaf.shape, mesh), use_spec(name, leaf.shape, mesh))
        return _gather(leaf, to, tuple(NamedSharding(mesh, spec) for spec in specs), leaf.dtype)
    return jax.tree_util.tree_map_with_path(one, tree)


def gather_local(x: jax.Array, path: str, shape: tuple[int, ...], mesh: Mesh, whole: bool = False) -> jax.Array:
    """Inside `local`: this device's stored part of the parameter of `path` and global `shape`, gathered for use; `whole`: over
    `tensor` too. Its gradient is a reduce-scatter by construction."""
    used = P(*(None,) * len(shape)) if whole else use_spec(path, shape, mesh)
    for dim, axes in enumerate(_axes_to_gather(storage_spec(path, shape, mesh), used)):
        for axis in reversed(axes):
            x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def _axes_to_gather(storage: P, use: P) -> list[tuple[str, ...]]:
    """Per dimension the axes, outer ones first, that split it in `storage` and not in `use`."""
    return [() if stored == used else (stored,) if isinstance(stored, str) else stored for stored, used in zip(storage, use)]


def _stages(storage: P, use: P) -> list[P]:
    """From `storage` to `use`, one mesh axis less at a time, inner ones first. Over several axes at once that together span all
    dimensions of a torus the TPU compiler sums zero-padded parts instead of gathering (and sums instead of reduce-scattering):
    twice the bytes."""
    specs = [storage]
    for dim, axes in enumerate(_axes_to_gather(storage, use)):
        for left in reversed(range(len(axes))):
            entries = list(specs[-1])
            entries[dim] = axes[:left] if left > 1 else axes[0] if left else use[dim]
            specs.append(P(*entries))
    return specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x, dtype, stages, own_dtype):
    x = x.astype(dtype)
    for sharding in stages:  # where it lies first, or the partitioner may gather before the cast: twice the bytes
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def _gather_backward(dtype, stages, own_dtype, _, dy):
    for sharding in reversed(stages[:-1] or stages):
        dy = jax.lax.with_sharding_constraint(dy, sharding)
    return (dy.astype(own_dtype),)


_gather.defvjp(lambda x, *static: (_gather(x, *static), None), _gather_backward)


def path_string(path: tuple, prefix: str = "") -> str:
    """"layers/0/mixer/q_proj" of a key path of nested dicts, lists or nnx states."""
    parts = [str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))) for key in path]
    return "/".join(([prefix] if prefix else []) + [part for part in parts if part != "value"])


def shardings(tree: Any, mesh: Mesh) -> Any:
    """NamedSharding of every leaf (array or shape) of a train state or of a tree of parameters, by the table."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, storage_spec(path_string(path), leaf.shape, mesh)), tree)
