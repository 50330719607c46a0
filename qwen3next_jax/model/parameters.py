"""Declarations of parameters. The code that makes a parameter also declares its kind, its logical
axes and the role of each of its dimensions:

    self.q_proj = make.matrix(
        (d, heads, 2 * k),
        "embed -> query_heads head_width",
        parts=(("query", k), ("gate", k)),
    )

The declaration is stored as metadata of the `nnx.Param`. Sharding (`sharding.rules`), weight decay
and Muon (`training.optimizers`), parameter counts and FLOPs (`flops`), the planner's memory
estimate and the diagnostics read declarations, so they do not depend on the names of parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.sharding.rules import check_logical_axes

# The kind of a parameter. It decides about weight decay and the optimizer:
# - matrix: an operand of a matrix product inside a layer. It decays, and Muon updates it.
# - embedding, head, router, convolution, vector: weight decay applies. Muon leaves these parameters
#   to AdamW.
# - norm: the weight of a norm. Weight decay applies if `optimizer.decay_norm_weights` is set.
# - rate: the rate of a decay, a bias, or a constant. It never decays, because weight decay would
#   pull it away from its start value. It is stored in float32.
# - balance: the bias of a router. It is updated from the experts' load (`training.router_bias`),
#   not by a gradient, and never decays. It is stored in float32.
# - indexer: belongs to an indexer of sparse attention. A loss of its own trains it, or it is
#   frozen. It never decays.
ParameterKind = Literal[
    "matrix",
    "embedding",
    "head",
    "router",
    "convolution",
    "vector",
    "norm",
    "rate",
    "balance",
    "indexer",
]


class ParameterPart(NamedTuple):
    """One of several matrices side by side along a parameter's last dimension.

    Attributes:
      name: the name of the matrix, such as "query".
      width: the number of columns of the matrix.
      heads: the number of heads that lie side by side in these columns, such as the value heads of
        a key head; it divides `width`. `heads` is 1 if the heads have a dimension of their own.
    """

    name: str
    width: int
    heads: int = 1


@dataclasses.dataclass(frozen=True)
class ParameterDeclaration:
    """The declaration of one parameter.

    Attributes:
      kind: the kind of the parameter (see `ParameterKind`).
      shape: the shape of the parameter of one layer.
      stack_shape: the number of stacked layers, (layers,), whose parameters one array holds; () for
        one layer. The array has the shape `stack_shape` + `shape`.
      axes: for each dimension of `shape` its logical axis, a key of `sharding.rules.LOGICAL_AXES`,
        or None if no mesh axis ever splits the dimension.
      dim_roles: for each dimension of `shape` a letter, its role in the matrix product that uses
        the parameter. "i": input, the product sums over the dimension. "o": output, the result has
        the dimension. "p": the dimension is an index of matrices with the same input (gate and up).
        "b": the dimension is an index of experts, and a token uses some. `dim_roles` is "" if
        no product uses the parameter.
      parts: the matrices that lie side by side along the last dimension; () for a single matrix.
      uses_model_dtype: whether the parameter is cast to the model's dtype before it is gathered and
        used; otherwise it is used in the dtype in which it is stored.
      gathered_by: "layer": the parameter is gathered over its storage axes (`sharding.rules`)
        before its layer runs. "operator": the operator that uses the parameter gathers it.
    """

    kind: ParameterKind
    shape: tuple[int, ...]
    stack_shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dim_roles: str = ""
    parts: tuple[ParameterPart, ...] = ()
    uses_model_dtype: bool = True
    gathered_by: Literal["layer", "operator"] = "layer"

    @property
    def writes_to_residual(self) -> bool:
        """Whether the parameter is the last matrix of a mixer or an MLP, whose output is added to
        the residual stream.
        """
        results = [axis for axis, letter in zip(self.axes, self.dim_roles) if letter == "o"]
        return self.kind == "matrix" and results == ["embed"]

    @property
    def size(self) -> int:
        """The number of elements of the parameter, over all stacked layers."""
        return math.prod(self.stack_shape + self.shape)

    @property
    def num_experts(self) -> int:
        """The number of experts whose matrices the parameter holds; 1 for a parameter that belongs
        to no routed expert.
        """
        return math.prod(size for size, letter in zip(self.shape, self.dim_roles) if letter == "b")

    def decays(self, norm_weights: bool) -> bool:
        """Whether weight decay applies to the parameter. `norm_weights`: whether weight decay
        applies to the weights of norms.
        """
        return self.kind not in ("rate", "balance", "indexer") and (
            norm_weights or self.kind != "norm"
        )


class Make:
    """Makes the parameters of one layer, or of several layers with the same structure. Each
    parameter of several layers is one array, in which the layers are stacked.

    Args:
      config: the model's settings.
      rngs: the source of the random start values.
      stack_shape: the number of stacked layers, (layers,), the first dimension of every parameter;
        () for one layer.
      dtype: the dtype of the parameters. The kinds "rate" and "balance" are always float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        stack_shape: tuple[int, ...] = (),
        dtype: Any = jnp.float32,
    ):
        self.config, self.rngs, self.stack_shape, self.dtype = config, rngs, stack_shape, dtype

    def stacked(self, *stack_shape: int) -> "Make":
        """Returns a `Make` with the same settings that makes the parameters of stacked layers:
        `stacked(layers)`, or `stacked()` for one layer.
        """
        return Make(self.config, self.rngs, stack_shape, self.dtype)

    def matrix(
        self, shape: Sequence[int], dims: str, *, kind: ParameterKind = "matrix", **decisions: Any
    ) -> nnx.Param:
        """Makes a parameter whose start values are drawn from N(0, initializer_range²). The
        arguments are those of `parameter`, without `initializer`.
        """

        def initializer(shape):
            return self.config.initializer_range * jax.random.normal(
                self.rngs.params(), shape, jnp.float32
            )

        return self.parameter(initializer, shape, dims, kind=kind, **decisions)

    def norm(self, width: int, *, plain: bool = False) -> nnx.Param:
        """Makes the weight [width] of a norm that `layers.rms_norm` applies. With `plain`, the norm
        is `layers.rms_norm_plain`, whose weight starts at 1 with every setting.
        """
        if self.config.block.norm != "rms" and not plain:
            return self.config.block.import_part("norm").weight(self, width)
        initializer = jnp.ones if plain or not self.config.zero_centered_norm else jnp.zeros
        return self.parameter(initializer, (width,), ".", kind="norm")

    def parameter(
        self,
        initializer: Callable[[tuple[int, ...]], jax.Array],
        shape: Sequence[int],
        dims: str,
        *,
        kind: ParameterKind,
        parts: Sequence[tuple[str, int] | tuple[str, int, int]] = (),
        uses_model_dtype: bool | None = None,
        gathered_by: Literal["layer", "operator"] = "layer",
    ) -> nnx.Param:
        """Makes a parameter with its declaration. If `model.depth_scaled_init` is on, the start
        value of a matrix that writes to the residual stream is divided by √(2 · layers).

        Args:
          initializer: function (shape, with the dimension of stacked layers) → the start value.
          shape: the shape of the parameter of one layer.
          dims: one word for each dimension: its logical axis, or "." for a dimension without
            logical axis. In "embed -> query_heads head_width", the product sums over the dimensions
            before "->", and its result has the dimensions after "->". If `dims` has no "->", no
            product uses the parameter. In "experts | embed -> * mlp", the dimensions before "|" are
            indices of experts, and "*" is an index of matrices with the same input.
          kind: the kind of the parameter (see `ParameterKind`).
          parts: tuples with the fields of `ParameterPart`, as in `ParameterDeclaration`.
          uses_model_dtype: as in `ParameterDeclaration`; None: True for the kinds "matrix",
            "convolution", "head" and "vector", else False.
          gathered_by: as in `ParameterDeclaration`.

        Raises:
          ValueError: `dims` or `parts` does not fit `shape`, or `dims` names an axis that
            `sharding.rules` does not have.
        """
        axes, dim_roles = _parse_dims(dims)
        check_logical_axes(axes)
        shape, parts = tuple(shape), tuple(ParameterPart(*part) for part in parts)
        if len(axes) != len(shape):
            raise ValueError(
                f"{dims!r} names {len(axes)} dimensions of a parameter of shape {shape}: expected "
                "one name for each"
            )
        if kind == "matrix" and not {"i", "o"} <= set(dim_roles):
            raise ValueError(
                f'{dims!r} of a matrix: expected dimensions before and after "->", or another kind'
            )
        if parts and sum(part.width for part in parts) != shape[-1]:
            raise ValueError(
                f"parts {parts} of a parameter of shape {shape}: expected their widths to sum to "
                f"{shape[-1]}"
            )
        if any(part.width % part.heads for part in parts):
            raise ValueError(
                f"parts {parts} of a parameter of shape {shape}: expected each part's number of "
                "heads to divide its width"
            )
        if uses_model_dtype is None:
            uses_model_dtype = kind in ("matrix", "convolution", "head", "vector")
        declared = ParameterDeclaration(
            kind, shape, self.stack_shape, axes, dim_roles, parts, uses_model_dtype, gathered_by
        )
        dtype = jnp.float32 if kind in ("rate", "balance") else self.dtype
        value = initializer((*self.stack_shape, *shape))
        if self.config.depth_scaled_init and declared.writes_to_residual:
            value = value / math.sqrt(2 * self.config.num_hidden_layers)
        return nnx.Param(value.astype(dtype), declared=declared)


def _parse_dims(dims: str) -> tuple[tuple[str | None, ...], str]:
    """Parses the argument `dims` of `Make.parameter`, such as "embed -> query_heads head_width".
    Returns the fields (axes, dim_roles) of `ParameterDeclaration`.
    """
    axes, roles, role = [], [], "i"
    for word in dims.split():
        if word == "->":
            role = "o"
        elif word == "|":
            roles = ["b"] * len(axes)
        else:
            axes.append(None if word in (".", "*") else word)
            roles.append("p" if word == "*" else role)
    return tuple(axes), "".join(roles) if "->" in dims.split() else ""


def check_declared(model: nnx.Module) -> None:
    """Raises ValueError if a parameter of `model` has no declaration. The message names the
    parameter and the class of its module.
    """
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param) and "declared" not in value.get_metadata():
                raise ValueError(
                    f"parameter {'/'.join(map(str, (*path, name)))} of "
                    f"{type(module).__module__}:{type(module).__name__} is "
                    "not declared: make it with model.parameters.Make, so that its shape, axes "
                    "and kind are decided"
                )


def declared_tree(params: nnx.State) -> dict:
    """Returns the declarations of `params` as nested dicts: `nnx.to_pure_dict(params)` with each
    array replaced by the `ParameterDeclaration` of its parameter.
    """
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.declared, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
    )
