"""Muon (Jordan 2024; 2502.16982): the momentum of every matrix, with its singular values made
about 1 by Newton–Schulz iterations.

What a matrix is stands in the declarations: each part of a fused slab, each layer, each expert
is orthogonalised alone, with `muon.per_head` each head of them, too. Parameters that are no
matrices (embeddings, head, router, convolutions, norms, vectors, rates) get AdamW's direction.

On a mesh every device orthogonalises whole matrices, its share of them: those of one shape, over
all parameters, layers and experts, are stacked, and the stack's own axis is split instead of
rows and columns (an all-to-all per mesh axis, there and back).
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.model.parameters import Declared, Part
from qwen3next_jax.sharding.rules import storage_spec
from qwen3next_jax.training.optimizers import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, (x xᵀ) x, (x xᵀ)² x: Jordan's
# of a matrix's elements, about that of AdamW's updates, so that both learn at one rate (2502.16982)
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """count: updates so far; momentum: running mean of the gradients, shaped like the
    parameters.
    """

    count: jax.Array
    momentum: Any


def direction(
    config: OptimizerConfig, declared: Mapping[str, Declared], mesh: Mesh | None
) -> optax.GradientTransformation:
    """See `training.optimizer.make_optimizer`."""

    def label(path, _):
        return "muon" if declared[path_string(path)].kind == "matrix" else "adamw"

    return optax.partition(
        {"muon": _muon(config, declared, mesh), "adamw": adamw.direction(config, declared, mesh)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


def _muon(
    config: OptimizerConfig, declared: Mapping[str, Declared], mesh: Mesh | None
) -> optax.GradientTransformation:
    beta = config.muon.momentum

    def update(grads, state, params=None):
        momentum, count = optax.tree.update_moment(grads, state.momentum, beta, 1), state.count + 1
        # Nesterov's: the mean after one more step with the same gradient. Both are corrected for
        # their start at 0.
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(momentum, beta, count + 1),
            optax.tree.bias_correction(grads, beta, count),
        )
        return orthogonalised(ahead, declared, config, mesh), MuonState(count, momentum)

    return optax.GradientTransformation(
        lambda params: MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params)), update
    )


def orthogonalised(
    tree: Any, declared: Mapping[str, Declared], config: OptimizerConfig, mesh: Mesh | None
) -> Any:
    """`tree` (arrays of declared matrices, or gradients, momenta of them) with every matrix
    orthogonalised, of root mean square about UPDATE_RMS where it has full rank.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    slabs = [declared[path_string(path)] for path, _ in leaves]
    per_head = config.muon.per_head
    widths = [_widths(slab, per_head) for slab in slabs]
    parts = [
        part
        for (_, x), of_slab in zip(leaves, widths)
        for part in jnp.split(x, _ends(of_slab), axis=-1)
    ]
    layouts = [
        _layout(slab, width, per_head, mesh)
        for slab, of_slab in zip(slabs, widths)
        for width in of_slab
    ]

    alike: dict[tuple, list[int]] = {}
    for i, layout in enumerate(layouts):
        alike.setdefault(layout.alike, []).append(i)
    for group in alike.values():
        stacks = [layouts[i].stack(parts[i]) for i in group]
        done = _spread(jnp.concatenate(stacks, axis=-3), layouts[group[0]].spec, config, mesh)
        for i, stack in zip(
            group, jnp.split(done, _ends(stack.shape[-3] for stack in stacks), axis=-3), strict=True
        ):
            parts[i] = layouts[i].unstack(stack)
    rest = iter(parts)
    return jax.tree.unflatten(
        structure,
        [jnp.concatenate([next(rest) for _ in of_slab], axis=-1) for of_slab in widths],
    )


def _widths(declared: Declared, per_head: bool) -> list[int]:
    """Where a parameter is cut along its last dimension into parts that hold whole matrices; with
    `per_head` heads that lie side by side in a part are apart.
    """
    widths = []
    for part in declared.parts or (Part("", declared.shape[-1]),):
        pieces = part.heads if per_head else 1
        widths += [part.width // pieces] * pieces
    return widths


class Layout(NamedTuple):
    """How the array of a part becomes a stack [*S, M, m, n] of its matrices, m ≤ n: S are those
    dimensions of layers, experts, heads, … that the mesh splits, M all the others.

    order: the array's dimensions as the stack has them; sizes: of these; shape: the stack's
    before m and n are exchanged; turned: whether they are; spec: how the stack lies on the mesh
    where the parameter does.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    turned: bool
    spec: P

    def stack(self, x: jax.Array) -> jax.Array:
        x = x.transpose(self.order).reshape(self.shape)
        return x.mT if self.turned else x

    def unstack(self, x: jax.Array) -> jax.Array:
        x = (x.mT if self.turned else x).reshape(self.sizes)
        return x.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def alike(self) -> tuple:
        """The same for parts whose matrices go into one stack."""
        return self.shape[:-3], tuple(sorted(self.shape[-2:])), tuple(self.spec)


def _layout(declared: Declared, width: int, per_head: bool, mesh: Mesh | None) -> Layout:
    """Of the part `width` wide along the last dimension. Dimensions that a product sums over are
    rows, those it keeps columns.
    """
    shape, ahead = declared.stack + declared.shape, len(declared.stack)
    spec = (None,) * len(shape) if mesh is None else storage_spec(declared, shape, mesh)
    shape = (*shape[:-1], width)

    def of(letter):
        return [
            d
            for d, (axis, own) in enumerate(
                zip(declared.axes, declared.letters, strict=True), ahead
            )
            if own == letter and not (per_head and axis and axis.endswith("_heads"))
        ]

    rows, columns = of("i"), of("o")
    batch = [d for d in range(len(shape)) if d not in rows + columns]
    split, whole = [d for d in batch if spec[d]], [d for d in batch if not spec[d]]
    order = (*split, *whole, *rows, *columns)
    m, n = (math.prod(shape[d] for d in dims) for dims in (rows, columns))
    # Of several dimensions that become one, the first can stay split; others (widths of heads,
    # sometimes) are gathered.
    lies = [spec[dims[0]] if dims else None for dims in (rows, columns)]
    return Layout(
        order,
        tuple(shape[d] for d in order),
        (*(shape[d] for d in split), math.prod(shape[d] for d in whole), m, n),
        m > n,
        P(*(spec[d] for d in split), None, *(lies[::-1] if m > n else lies)),
    )


def _spread(stack: jax.Array, spec: P, config: OptimizerConfig, mesh: Mesh | None) -> jax.Array:
    """`_orthogonal` of a stack [*S, M, m, n], each device with its share of M: axes that split
    rows and columns move to M one at a time, which is an all-to-all each, and devices that hold
    the same take different matrices of it.
    """
    if mesh is None:
        return _orthogonal(stack, config)
    *split, _, rows, columns = (
        (entry,) if isinstance(entry, str) else entry or () for entry in spec
    )
    taken = {axis for axes in (*split, rows, columns) for axis in axes}
    moving = [
        *columns[::-1],
        *rows[::-1],
        *(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in taken),
    ]
    stages = [
        P(
            *split,
            tuple(moving[:i]),
            tuple(axis for axis in rows if axis not in moving[:i]),
            tuple(axis for axis in columns if axis not in moving[:i]),
        )
        for i in range(len(moving) + 1)
    ]
    m = stack.shape[-3]
    short = -m % math.prod(mesh.shape[axis] for axis in moving)
    stack = jnp.pad(stack, [(0, 0)] * len(split) + [(0, short), (0, 0), (0, 0)])
    for stage in stages:
        stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, stage))
    stack = _orthogonal(stack, config)
    for stage in reversed(stages):
        stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, stage))
    return stack[..., :m, :, :]


def _orthogonal(stack: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Newton–Schulz iterations of each matrix [m, n] of the stack, times UPDATE_RMS √max(m, n).
    optax's own, of a mean over one gradient, which is that gradient.
    """
    # Coefficients for every step make it a loop, which compiles in a fraction of the time.
    own = optax.contrib.scale_by_muon(
        (COEFFICIENTS,) * config.muon.steps, config.muon.steps, 0.0, config.eps, nesterov=False
    )

    def one(x):
        x = x.astype(config.muon.dtype)
        with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
            return own.update(x, own.init(x))[0].astype(stack.dtype)

    for _ in stack.shape[:-2]:
        one = jax.vmap(one)
    return UPDATE_RMS * math.sqrt(max(stack.shape[-2:])) * one(stack)


def _ends(widths: Iterable[int]) -> list[int]:
    """Where to split what has pieces of these widths."""
    return list(itertools.accumulate(widths))[:-1]
