"""Muon (Jordan 2024; 2502.16982). Muon's direction for a matrix is the matrix's momentum after
Newton–Schulz iterations. The iterations orthogonalise the momentum: they bring all of its singular
values to about 1.

A parameter may hold several matrices, and its declaration says which. Muon orthogonalises each
layer, each expert and each part of a fused projection separately; with `muon.per_head`, each head
as well. Only parameters of the kind "matrix" get Muon's direction. All other parameters
(embeddings, output head, router, convolutions, norms, biases, …) get AdamW's direction.

On a mesh, every matrix is orthogonalised on a single device, and the devices share the matrices.
All matrices of equal shape (up to transposition) whose parameters are split in the same way are
stacked. During the iterations the mesh splits the axis of the stack instead of the rows and columns
of the matrices. For each mesh axis that splits rows or columns, the resharding costs one all-to-all
before the iterations and one after them.
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
from qwen3next_jax.model.parameters import ParameterDeclaration, ParameterPart
from qwen3next_jax.sharding.rules import SLICE, storage_spec
from qwen3next_jax.training.optimizers import adamw

# Jordan's coefficients: an iteration replaces x by a x + b (x xᵀ) x + c (x xᵀ)² x.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The root mean square of the elements of Muon's direction. The elements of AdamW's direction have
# about the same root mean square, so both optimizers can use the same learning rate (2502.16982).
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """The state of Muon.

    Attributes:
      count: the number of updates so far.
      momentum: the running mean of the gradients, a tree with the structure of the parameters.
    """

    count: jax.Array
    momentum: Any


def direction(
    config: OptimizerConfig, declared: Mapping[str, ParameterDeclaration], mesh: Mesh | None
) -> optax.GradientTransformation:
    """Returns the transformation of gradients to Muon's direction for parameters of the kind
    "matrix", and to AdamW's direction for all others. The arguments are explained in
    `training.optimizer.make_optimizer`.
    """

    def label(path, _):
        return "muon" if declared[path_string(path)].kind == "matrix" else "adamw"

    return optax.partition(
        {"muon": _muon(config, declared, mesh), "adamw": adamw.direction(config, declared, mesh)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


def rate_over_width(
    declared: ParameterDeclaration, input_growth: float, output_growth: float
) -> float:
    """Returns the factor of the learning rate, as `adamw.rate_over_width` does. For matrices, the
    factor makes the spectral norm of an update proportional to √(out / in) (2310.17813, condition
    1); the spectral norm of Muon's direction is proportional to √max(in, out).
    """
    if declared.kind != "matrix":
        return adamw.rate_over_width(declared, input_growth, output_growth)

    def size(letter):
        return math.prod(n for n, role in zip(declared.shape, declared.dim_roles) if role == letter)

    rows, columns = size("i"), size("o")
    if declared.parts:
        columns = columns // declared.shape[-1] * max(_part_widths(declared, per_head=False))
    norm_growth = math.sqrt(max(rows, columns) / max(rows / input_growth, columns / output_growth))
    return math.sqrt(output_growth / input_growth) / norm_growth


def _muon(
    config: OptimizerConfig, declared: Mapping[str, ParameterDeclaration], mesh: Mesh | None
) -> optax.GradientTransformation:
    """Returns the transformation of gradients to Muon's direction. All parameters have to be
    of the kind "matrix".
    """
    beta, dtype = config.muon.momentum, adamw.mean_dtype(config)

    def update(grads, state, params=None):
        momentum, count = optax.tree.update_moment(grads, state.momentum, beta, 1), state.count + 1
        # Nesterov's momentum: the running mean after one more step, if that step had the same
        # gradient. As in Adam, both terms are divided by 1 - beta^n, because the mean starts at 0.
        nesterov = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(momentum, beta, count + 1),
            optax.tree.bias_correction(grads, beta, count),
        )
        stored_momentum = optax.tree.cast(momentum, dtype)
        return orthogonalised(nesterov, declared, config, mesh), MuonState(count, stored_momentum)

    def init(params):
        zeros = optax.tree.zeros_like(params, dtype=dtype)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    return optax.GradientTransformation(init, update)


def orthogonalised(
    tree: Any,
    declared: Mapping[str, ParameterDeclaration],
    config: OptimizerConfig,
    mesh: Mesh | None,
) -> Any:
    """Orthogonalises every matrix in the arrays of `tree`, and scales the results. The elements of
    the result for a matrix of full rank have a root mean square of about UPDATE_RMS.

    Args:
      tree: gradients or momenta, at the paths of their parameters. All parameters in `tree` are of
        the kind "matrix"; each array may hold several matrices.
      declared: path of a parameter → its declaration.
      config: the settings of the optimizer.
      mesh: the devices that share the work; None: one device.

    Returns:
      A tree with the structure, shapes and dtypes of `tree`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    declarations = [declared[path_string(path)] for path, _ in leaves]
    per_head = config.muon.per_head
    widths_of_leaves = [_part_widths(parameter, per_head) for parameter in declarations]
    parts = [
        part
        for (_, leaf), widths in zip(leaves, widths_of_leaves, strict=True)
        for part in jnp.split(leaf, _split_points(widths), axis=-1)
    ]
    layouts = [
        _layout(parameter, width, per_head, mesh)
        for parameter, widths in zip(declarations, widths_of_leaves, strict=True)
        for width in widths
    ]

    groups: dict[tuple, list[int]] = {}  # parts whose matrices go into one stack
    for i, layout in enumerate(layouts):
        groups.setdefault(layout.stack_key, []).append(i)
    for group in groups.values():
        stacks = [layouts[i].stack(parts[i]) for i in group]
        stack = jnp.concatenate(stacks, axis=-3)
        stack = _orthogonalise_on_mesh(stack, layouts[group[0]].spec, config, mesh)
        sizes = [stack.shape[-3] for stack in stacks]
        results = jnp.split(stack, _split_points(sizes), axis=-3)
        for i, result in zip(group, results, strict=True):
            parts[i] = layouts[i].unstack(result)
    remaining = iter(parts)
    return jax.tree.unflatten(
        structure,
        [
            jnp.concatenate([next(remaining) for _ in widths], axis=-1)
            for widths in widths_of_leaves
        ],
    )


def _part_widths(declared: ParameterDeclaration, per_head: bool) -> list[int]:
    """Returns the widths of the parts into which `orthogonalised` splits a parameter's last
    dimension: one part for each of the matrices that lie side by side in it. With `per_head`, each
    of the heads that lie side by side in such a matrix becomes a part.
    """
    widths = []
    for part in declared.parts or (ParameterPart("", declared.shape[-1]),):
        pieces = part.heads if per_head else 1
        widths += [part.width // pieces] * pieces
    return widths


class StackLayout(NamedTuple):
    """How the array of a part is reshaped to a stack [*S, M, m, n] of its matrices [m, n], m ≤ n.
    The array's other dimensions (layers, experts, heads, …) number the matrices. Of the dimensions
    that number the matrices, S are those that the mesh splits, and M is the product of the sizes of
    the rest.

    Attributes:
      order: the numbers of the array's dimensions, in the order in which the stack has them.
      sizes: the sizes of the array's dimensions, in this order.
      shape: the shape of the stack before the last two dimensions are transposed (if they are).
      transposed: whether the last two dimensions are transposed, so that m ≤ n.
      spec: the partition spec of the stack, which follows from the parameter's.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    spec: P

    def stack(self, x: jax.Array) -> jax.Array:
        """Reshapes the array of a part to the stack."""
        x = x.transpose(self.order).reshape(self.shape)
        return x.mT if self.transposed else x

    def unstack(self, x: jax.Array) -> jax.Array:
        """Reshapes the stack back to the array of the part."""
        x = (x.mT if self.transposed else x).reshape(self.sizes)
        return x.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def stack_key(self) -> tuple:
        """A key that two layouts share if their matrices can go into one stack."""
        return self.shape[:-3], tuple(sorted(self.shape[-2:])), tuple(self.spec)


def _layout(
    declared: ParameterDeclaration, width: int, per_head: bool, mesh: Mesh | None
) -> StackLayout:
    """Returns the layout of a part that is `width` wide along the parameter's last dimension. In
    the product that uses the parameter, the dimensions that the product sums over become the rows
    of a matrix, and the dimensions of the product's result become its columns.
    """
    shape, num_stack_dims = declared.stack_shape + declared.shape, len(declared.stack_shape)
    spec = (None,) * len(shape) if mesh is None else storage_spec(declared, shape, mesh)
    shape = (*shape[:-1], width)

    def dims_with(letter):
        axes = zip(declared.axes, declared.dim_roles, strict=True)
        return [
            dim
            for dim, (axis, axis_letter) in enumerate(axes, num_stack_dims)
            if axis_letter == letter and not (per_head and axis and axis.endswith("_heads"))
        ]

    rows, columns = dims_with("i"), dims_with("o")
    batch = [dim for dim in range(len(shape)) if dim not in rows + columns]
    split, unsplit = [dim for dim in batch if spec[dim]], [dim for dim in batch if not spec[dim]]
    order = (*split, *unsplit, *rows, *columns)
    m, n = (math.prod(shape[dim] for dim in dims) for dims in (rows, columns))
    # Where several dimensions are merged into one, a partition spec can describe a split of the
    # first of them only. If the mesh splits another one (such as the width of heads), it is
    # gathered.
    matrix_spec = [spec[dims[0]] if dims else None for dims in (rows, columns)]
    return StackLayout(
        order,
        tuple(shape[dim] for dim in order),
        (*(shape[dim] for dim in split), math.prod(shape[dim] for dim in unsplit), m, n),
        m > n,
        P(*(spec[dim] for dim in split), None, *(matrix_spec[::-1] if m > n else matrix_spec)),
    )


def _orthogonalise_on_mesh(
    stack: jax.Array, spec: P, config: OptimizerConfig, mesh: Mesh | None
) -> jax.Array:
    """Applies `_orthogonalise` to a stack [*S, M, m, n] whose M matrices are shared by the devices.

    The mesh axes that split rows and columns are moved to M one at a time; each move is an
    all-to-all. A mesh axis along which the devices hold copies of the stack splits M, too, during
    the iterations, which costs an all-gather after the iterations. The mesh axis `slice` is an
    exception: an all-gather along `slice` would cross the network between slices.
    """
    if mesh is None:
        return _orthogonalise(stack, config)
    *split, _, rows, columns = (
        (entry,) if isinstance(entry, str) else entry or () for entry in spec
    )
    used_axes = {axis for axes in (*split, rows, columns) for axis in axes}
    replicated = (axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis != SLICE)
    moving = [
        *columns[::-1],
        *rows[::-1],
        *(axis for axis in replicated if axis not in used_axes),
    ]
    # The partition spec after each move: the first is `spec` itself, and with the last every device
    # holds whole matrices.
    specs = [
        P(
            *split,
            tuple(moving[:i]),
            tuple(axis for axis in rows if axis not in moving[:i]),
            tuple(axis for axis in columns if axis not in moving[:i]),
        )
        for i in range(len(moving) + 1)
    ]
    num_matrices = stack.shape[-3]
    padding = -num_matrices % math.prod(mesh.shape[axis] for axis in moving)
    stack = jnp.pad(stack, [(0, 0)] * len(split) + [(0, padding), (0, 0), (0, 0)])
    for spec_after_move in specs:
        sharding = NamedSharding(mesh, spec_after_move)
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    stack = _orthogonalise(stack, config)
    for spec_after_move in reversed(specs):
        sharding = NamedSharding(mesh, spec_after_move)
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    return stack[..., :num_matrices, :, :]


def _orthogonalise(stack: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Applies Newton–Schulz iterations to each matrix [m, n] of the stack, and multiplies the
    result by UPDATE_RMS √max(m, n).

    optax's Muon performs the iterations. The momentum of optax's Muon is set to 0, so that it
    orthogonalises the given matrices themselves and not a running mean of them.
    """
    # The coefficients are repeated for every iteration because optax then runs the iterations as a
    # `lax.scan`, which compiles in a fraction of the time that its loop over one set of
    # coefficients takes.
    newton_schulz = optax.contrib.scale_by_muon(
        (COEFFICIENTS,) * config.muon.steps, config.muon.steps, 0.0, config.eps, nesterov=False
    )

    def orthogonalise(x):
        x = x.astype(config.muon.dtype)
        with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
            return newton_schulz.update(x, newton_schulz.init(x))[0].astype(stack.dtype)

    for _ in stack.shape[:-2]:
        orthogonalise = jax.vmap(orthogonalise)
    return UPDATE_RMS * math.sqrt(max(stack.shape[-2:])) * orthogonalise(stack)


def _split_points(widths: Iterable[int]) -> list[int]:
    """Returns the indices at which `jnp.split` splits an axis into pieces of `widths`."""
    return list(itertools.accumulate(widths))[:-1]
