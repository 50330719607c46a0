"""Declarations of parameters. The code that makes a parameter also declares what the rest of the
code must know about it:

    self.q_proj = make.matrix(
        (d, heads, 2 * k),
        "embed -> query_heads head_width",
        parts=(("query", k), ("gate", k)),
    )

The declaration is stored as metadata of the `nnx.Param`. Its readers do not depend on the
parameter's name: sharding (`sharding.rules`), weight decay and Muon (`training.optimizers`),
parameter counts and FLOPs (`flops`), the planner's memory estimate, and diagnostics.
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
Kind = Literal[
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


class Part(NamedTuple):
    """One of several matrices side by side along a parameter's last dimension.

    Attributes:
      name: the name of the matrix, such as "query".
      width: the number of columns of the matrix.
      heads: the number of heads that lie side by side in these columns, such as the value heads of
        a key head; a divisor of `width`. 1 if the heads have a dimension of their own.
    """

    name: str
    width: int
    heads: int = 1


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declaration of one parameter.

    Attributes:
      kind: the kind of the parameter (see `Kind`).
      shape: the shape of the parameter of one layer.
      stack: the shape of the stack of layers that the parameter holds; its dimensions stand before
        the dimensions in `shape`.
      axes: for each dimension of `shape` its logical axis, a key of `sharding.rules.LOGICAL_AXES`,
        or None if no mesh axis ever splits the dimension.
      letters: for each dimension of `shape` a letter, its role in the product that uses the
        parameter. "i": the product sums over the dimension. "o": the dimension is one of the
        product's result. "p": the dimension numbers matrices with the same input (gate and up).
        "b": the dimension numbers matrices (experts), and a token uses some of them. "": no product
        uses the parameter.
      parts: the matrices that lie side by side along the last dimension; () for a single matrix.
      operand: whether the parameter is cast to the model's dtype before it is gathered and used;
        otherwise it is used in the dtype in which it is stored.
      gathered: where the parameter is gathered over its storage axes (`sharding.rules`): before its
        layer runs ("layer"), or inside the operator that uses it ("operator").
    """

    kind: Kind
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    axes: tuple[str | None, ...]
    letters: str = ""
    parts: tuple[Part, ...] = ()
    operand: bool = True
    gathered: Literal["layer", "operator"] = "layer"

    @property
    def writes_to_residual(self) -> bool:
        """Whether the parameter is a matrix whose product has the width of the residual stream: the
        last matrix of a mixer or an MLP.
        """
        results = [axis for axis, letter in zip(self.axes, self.letters) if letter == "o"]
        return self.kind == "matrix" and results == ["embed"]

    @property
    def size(self) -> int:
        """The number of elements, over all stacked layers."""
        return math.prod(self.stack + self.shape)

    @property
    def experts(self) -> int:
        """The number of experts whose matrices the parameter holds; 1 for a parameter that is not
        split into experts.
        """
        return math.prod(size for size, letter in zip(self.shape, self.letters) if letter == "b")

    def decays(self, norm_weights: bool) -> bool:
        """Whether weight decay applies to the parameter. `norm_weights`: whether it applies to the
        weights of norms.
        """
        return self.kind not in ("rate", "balance", "indexer") and (
            norm_weights or self.kind != "norm"
        )


class Make:
    """Makes the parameters of one layer, or of several layers with the same structure, whose
    parameters are then stacked in one array each.

    Args:
      config: the model's settings.
      rngs: the source of the random start values.
      stack: the shape of the stack of layers, which is put before every parameter's own shape; ():
        one layer.
      dtype: the dtype of the parameters. The kinds "rate" and "balance" are always float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        stack: tuple[int, ...] = (),
        dtype: Any = jnp.float32,
    ):
        self.config, self.rngs, self.stack, self.dtype = config, rngs, stack, dtype

    def stacked(self, *stack: int) -> "Make":
        """Returns a `Make` with the same settings, for a stack of layers of the shape `stack`."""
        return Make(self.config, self.rngs, stack, self.dtype)

    def matrix(
        self, shape: Sequence[int], dims: str, *, kind: Kind = "matrix", **decisions: Any
    ) -> nnx.Param:
        """Makes a parameter with start values from N(0, initializer_range²). It takes the arguments
        of `parameter`, except `start`.
        """

        def start(shape):
            return self.config.initializer_range * jax.random.normal(
                self.rngs.params(), shape, jnp.float32
            )

        return self.parameter(start, shape, dims, kind=kind, **decisions)

    def norm(self, width: int, *, plain: bool = False) -> nnx.Param:
        """Makes the weight [width] of `layers.rms_norm`. With `plain` it is the weight of
        `layers.rms_norm_plain` instead, which starts at 1 whatever the model's settings are.
        """
        if self.config.block.norm != "rms" and not plain:
            return self.config.block.import_part("norm").weight(self, width)
        start = jnp.ones if plain or not self.config.zero_centered_norm else jnp.zeros
        return self.parameter(start, (width,), ".", kind="norm")

    def parameter(
        self,
        start: Callable[[tuple[int, ...]], jax.Array],
        shape: Sequence[int],
        dims: str,
        *,
        kind: Kind,
        parts: Sequence[tuple[str, int] | tuple[str, int, int]] = (),
        operand: bool | None = None,
        gathered: Literal["layer", "operator"] = "layer",
    ) -> nnx.Param:
        """Makes a parameter with its declaration. With `model.depth_scaled_init` the start value of
        a matrix that writes to the residual stream is divided by √(2 · layers).

        Args:
          start: function (shape, including the stack's dimensions) → the start value.
          shape: the shape of the parameter of one layer.
          dims: one word for each dimension: its logical axis, or "." for none. The word "->"
            separates the dimensions that the product sums over from the dimensions of its result:
            "embed -> query_heads head_width". Without "->" no product uses the parameter.
            Dimensions before "|" number experts, and "*" is a dimension that numbers matrices with
            the same input: "experts | embed -> * mlp".
          kind: the kind of the parameter (see `Kind`).
          parts: tuples with the fields of `Part`, as in `Declared`.
          operand: as in `Declared`; None: True for the kinds "matrix", "convolution", "head" and
            "vector", else False.
          gathered: as in `Declared`.

        Raises:
          ValueError: `dims` or `parts` does not fit `shape`, or `dims` names an axis that
            `sharding.rules` does not have.
        """
        axes, letters = _parsed(dims)
        check_logical_axes(axes)
        shape, parts = tuple(shape), tuple(Part(*part) for part in parts)
        if len(axes) != len(shape):
            raise ValueError(
                f"{dims!r} names {len(axes)} dimensions of a parameter of shape {shape}: expected "
                "one name for each"
            )
        if kind == "matrix" and not {"i", "o"} <= set(letters):
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
        operand = (
            kind in ("matrix", "convolution", "head", "vector") if operand is None else operand
        )
        declared = Declared(kind, shape, self.stack, axes, letters, parts, operand, gathered)
        dtype = jnp.float32 if kind in ("rate", "balance") else self.dtype
        value = start((*self.stack, *shape))
        if self.config.depth_scaled_init and declared.writes_to_residual:
            value = value / math.sqrt(2 * self.config.num_hidden_layers)
        return nnx.Param(value.astype(dtype), declared=declared)


def _parsed(dims: str) -> tuple[tuple[str | None, ...], str]:
    """Returns (axes, letters) of `Declared`, parsed from the argument `dims` of
    `Make.parameter`.
    """
    axes, letters, letter = [], [], "i"
    for word in dims.split():
        if word == "->":
            letter = "o"
        elif word == "|":
            letters = ["b"] * len(axes)
        else:
            axes.append(None if word in (".", "*") else word)
            letters.append("p" if word == "*" else letter)
    return tuple(axes), "".join(letters) if "->" in dims.split() else ""


def check_declared(model: nnx.Module) -> None:
    """Raises ValueError if a parameter of `model` has no declaration. The error names the parameter
    and the class that made it.
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
    """Returns the declarations as nested dicts: `nnx.to_pure_dict(params)` with each parameter's
    `Declared` in place of its array.
    """
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.declared, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
    )
