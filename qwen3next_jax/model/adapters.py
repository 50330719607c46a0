"""LoRA (2106.09685): low-rank adapters beside the matrices of the layers (`model.lora`).

The model uses W + s A B in place of a matrix W [in, out], with A [in, rank], B [rank, out] and
s = alpha / rank. The sum W + s A B is computed in the dtype of the parameters, layer by layer, each
time a layer runs. So the forward pass is that of a model with merged matrices, and works with every
operator and kernel. In each pass, merging costs 2 · rank · in · out operations for each matrix, and
memory for the merged matrices of one layer. The backward pass computes the gradients of the merged
matrices of one layer at a time, and from them the gradients of A and B.

A parameter may hold several matrices, as its declaration says: the matrices of stacked layers, of
experts, of gate and up, and of the parts of a fused projection. Each matrix of a parameter has an A
and a B of its own. A and B are parameters of the module that has the matrix W. The adapter of
"mixer/k_proj" has the paths "mixer/k_proj_lora/a" and "mixer/k_proj_lora/b"; the adapter of the
part "query" of "mixer/q_proj" has "mixer/q_proj_lora/query/a" and "mixer/q_proj_lora/query/b". The
start values are those of PEFT: A is uniform between ±1/√in, and B is 0.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import LoRAConfig, ModelConfig
from qwen3next_jax.model.adapter_names import SUFFIX, base_params, config_without_adapters
from qwen3next_jax.model.parameters import Make, ParameterDeclaration, ParameterPart
from qwen3next_jax.model.selection import choose_parameters, layer_and_part_counts


class Adapter(nnx.Module):
    """The matrices A and B for one parameter, or for one part of a fused projection. If the
    parameter holds several matrices (of layers, of experts, gate and up), so do A and B. The
    dimensions of A are the parameter's input dimensions and the rank; those of B are the rank and
    the parameter's output dimensions.
    """

    def __init__(self, make: Make, matrix: ParameterDeclaration, width: int, rank: int):
        """Makes A and B.

        Args:
          make: makes parameters.
          matrix: the declaration of the parameter that the adapter changes.
          width: the number of columns that the adapter changes: those of one part, or all.
          rank: the rank of A B.
        """
        shape = (*matrix.shape[:-1], width)
        dims = list(
            zip(shape, (axis or "." for axis in matrix.axes), matrix.dim_roles, strict=True)
        )
        experts, inputs, pairs, outputs = (
            [dim for dim in dims if dim[2] == letter] for letter in "bipo"
        )
        bound = 1 / math.sqrt(math.prod(size for size, _, _ in inputs))

        def start(shape):
            return jax.random.uniform(make.rngs.params(), shape, minval=-bound, maxval=bound)

        self.a = _make_adapter_matrix(make, start, experts, inputs, pairs, [(rank, ".", "o")])
        self.b = _make_adapter_matrix(make, jnp.zeros, experts, [(rank, ".", "i")], pairs, outputs)


def _make_adapter_matrix(make: Make, start, experts, inputs, pairs, outputs) -> nnx.Param:
    """Makes A or B. `start` makes the start value from a shape. `experts`, `inputs`, `pairs` and
    `outputs` are lists of dimensions, each given as (size, logical axis, role as in
    `ParameterDeclaration.dim_roles`).
    """
    dims = [axis for _, axis, _ in experts] + ["|"] * bool(experts)
    dims += [axis for _, axis, _ in inputs] + ["->"] + ["*"] * len(pairs)
    dims += [axis for _, axis, _ in outputs]
    shape = [size for size, _, _ in (*experts, *inputs, *pairs, *outputs)]
    return make.parameter(start, shape, " ".join(dims), kind="matrix")


class PartAdapters(nnx.Module):
    """The adapters of a fused projection: one attribute for each adapted part, with the name of the
    part.
    """


def add_adapters(model: nnx.Module, config: ModelConfig, make: Make) -> None:
    """Adds the adapters that `config.lora` asks for to the modules of a model.

    Args:
      model: the model without adapters.
      config: the settings of the model.
      make: makes the parameters.

    Raises:
      UserError: an entry of `model.lora.targets` is not valid, or chooses nothing; it chooses a
        parameter that is not a matrix of a layer; it chooses only some of the layers that are
        stacked in one parameter; or the rank is larger than a dimension of a chosen matrix.
    """
    parameters = {
        "/".join(map(str, (*path, name))): (module, name, value.declared)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param)
    }
    declarations = {path: declared for path, (_, _, declared) in parameters.items()}
    for path, parts in sorted(_parts_with_adapters(config, declarations).items()):
        module, name, declared = parameters[path]
        make_stacked = make.stacked(*declared.stack_shape)
        if not declared.parts:
            adapter = Adapter(make_stacked, declared, declared.shape[-1], config.lora.rank)
        else:
            adapter = PartAdapters()
            for part in parts:
                part_adapter = Adapter(make_stacked, declared, part.width, config.lora.rank)
                setattr(adapter, part.name, part_adapter)
        setattr(module, name + SUFFIX, adapter)


def _parts_with_adapters(
    config: ModelConfig, parameters: Mapping[str, ParameterDeclaration]
) -> dict[str, tuple[ParameterPart, ...]]:
    """Returns {path of a parameter: its parts that get adapters}, as `model.lora.targets` says. A
    parameter without parts gets one adapter, and its tuple is empty.
    """
    rank = config.lora.rank
    targets: dict[str, set[ParameterPart]] = {}
    for i, text in enumerate(config.lora.targets):
        setting = f"model.lora.targets[{i}]"
        for path, choice in choose_parameters(config, parameters, text, setting).items():
            declared = choice.declared
            where = f"{setting} = {text!r}: {path}"
            require(
                declared.kind == "matrix" and path.split("/")[0] in ("layers", "mtp"),
                f"{where} is no matrix of a layer (its kind is {declared.kind!r}): LoRA adapts "
                "matrices: add kind=matrix",
            )
            require(
                (choice.chosen_layer_parts == choice.chosen_layer_parts[0]).all(),
                f"{where} holds several layers, and the entry chooses some of them: expected all "
                f"{layer_and_part_counts(declared)[0]} or none",
            )
            parts = declared.parts or (ParameterPart("", declared.shape[-1]),)
            chosen = {part for part, is_in in zip(parts, choice.chosen_layer_parts[0]) if is_in}
            for part in chosen:
                smallest = min(_matrix_shape(declared, part.width))
                require(
                    rank <= smallest,
                    f"model.lora.rank = {rank}: {path} {part.name} has matrices of "
                    f"{' × '.join(map(str, _matrix_shape(declared, part.width)))}: expected at "
                    f"most {smallest}, or other model.lora.targets",
                )
            targets[path] = targets.get(path, set()) | chosen
    return {
        path: tuple(part for part in parameters[path].parts if part in chosen)
        for path, chosen in targets.items()
    }


def _matrix_shape(declared: ParameterDeclaration, width: int) -> tuple[int, int]:
    """Returns (number of inputs, number of outputs) of the matrix that consists of `width` columns
    of a parameter's last dimension.
    """
    shape = (*declared.shape[:-1], width)
    return tuple(
        math.prod(size for size, letter in zip(shape, declared.dim_roles) if letter == wanted)
        for wanted in "io"
    )


def merge_adapters(params: nnx.State, lora: LoRAConfig) -> nnx.State:
    """Adds s A B to every matrix W that has an adapter.

    Args:
      params: the parameters of a layer, of stacked layers, or of a model.
      lora: the settings of the adapters.

    Returns:
      The parameters with W + s A B in place of W; A and B themselves are unchanged.
    """
    variables = {path: variable for path, variable in _paths_and_variables(params)}

    def merged(path, variable):
        name = path_string(path)
        if f"{name}{SUFFIX}/a" in variables:
            adapters = {"": f"{name}{SUFFIX}"}
        else:
            parts = [part.name for part in variable.declared.parts]
            adapters = {part: f"{name}{SUFFIX}/{part}" for part in parts}
        pairs = {
            part: (variables[f"{prefix}/a"][...], variables[f"{prefix}/b"][...])
            for part, prefix in adapters.items()
            if f"{prefix}/a" in variables
        }
        if not pairs:
            return variable
        scale = lora.alpha / lora.rank
        return variable.replace(
            _parameter_plus_adapters(variable[...], variable.declared, pairs, scale)
        )

    return jax.tree_util.tree_map_with_path(merged, params, is_leaf=_is_parameter)


def _parameter_plus_adapters(
    w: jax.Array, declared: ParameterDeclaration, adapters_by_part: Mapping[str, Any], scale: float
) -> jax.Array:
    """Returns a parameter `w` with scale · A B added to each part that has an adapter.
    `adapters_by_part`: {name of the part: (A, B)}; the name is "" for a parameter without parts.
    """
    dims = "".join(chr(ord("a") + i) for i in range(len(declared.dim_roles)))
    dims_by_role = {
        letter: "".join(dim for dim, role in zip(dims, declared.dim_roles) if role == letter)
        for letter in "bipo"
    }
    a = dims_by_role["b"] + dims_by_role["i"] + dims_by_role["p"] + "z"
    b = dims_by_role["b"] + "z" + dims_by_role["p"] + dims_by_role["o"]
    formula = f"...{a},...{b}->...{dims}"

    def product(pair):
        return scale * jnp.einsum(formula, *pair, precision=jax.lax.Precision.HIGHEST)

    if "" in adapters_by_part:
        return w + product(adapters_by_part[""]).astype(w.dtype)
    columns, begin = [], 0
    for part in declared.parts:
        w_part = w[..., begin : begin + part.width]
        begin += part.width
        columns.append(
            w_part + product(adapters_by_part[part.name]).astype(w.dtype)
            if part.name in adapters_by_part
            else w_part
        )
    return jnp.concatenate(columns, axis=-1)


def merged_model(model: nnx.Module) -> nnx.Module:
    """Returns a model without adapters that computes the same as `model`: the products A B of the
    adapters are added to the matrices. If `model` has no adapters, the function returns `model`
    itself.
    """
    config = model.config
    if not config.lora.rank:
        return model
    plain = config_without_adapters(config)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: type(model)(plain, rngs=nnx.Rngs(0))), nnx.Param
    )
    adapted_params = nnx.state(model, nnx.Param)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, adapted_params)
    is_on_mesh = any(isinstance(sharding, NamedSharding) for sharding in jax.tree.leaves(shardings))
    merge = jax.jit(
        lambda params: merge_adapters(params, config.lora),
        out_shardings=shardings if is_on_mesh else None,
    )
    merged = merge(adapted_params)
    nnx.replace_by_pure_dict(params, base_params(nnx.to_pure_dict(merged)))
    return nnx.merge(graphdef, params)


def _is_parameter(leaf: Any) -> bool:
    return hasattr(leaf, "declared")


def _paths_and_variables(params: nnx.State) -> Iterator[tuple[str, Any]]:
    """Yields (path, `nnx.Param`) for every parameter."""
    for path, variable in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_parameter):
        yield path_string(path), variable
