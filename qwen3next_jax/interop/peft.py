"""Writes the adapters of a model (`model.lora`) as PEFT's adapter_model.safetensors and
adapter_config.json.

PEFT adapts a module of transformers with one pair: lora_A [r, in] and lora_B [out, r], and adds
(lora_alpha / r) · lora_B · lora_A to the module's weight [out, in]. In this project, each part of a
fused projection has its own pair of matrices A and B. A module of n adapted parts gets the rank n ·
rank in PEFT: lora_A stacks the A of all parts, and lora_B has a block for the B of each part and is
0 outside of these blocks. `rank_pattern` and `alpha_pattern` in adapter_config.json have the ranks
and alphas of the modules.

PEFT cannot adapt transformers' experts in this way, and transformers has no multi-token prediction
module; `require_peft_modules` refuses adapters of experts and of the multi-token prediction module.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from qwen3next_jax.common.errors import as_user_error, require
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.common.trees import leaves_by_path
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import TensorSlice
from qwen3next_jax.interop.families import FORMS
from qwen3next_jax.interop.layout import StoredParameter, check_hf_form, stored_parameters
from qwen3next_jax.interop.tensor_rows import tensor_row_indices_in_layer
from qwen3next_jax.interop.writing import require_empty_folder
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.adapter_names import SUFFIX, config_without_adapters, is_adapter

# The forms whose models transformers builds of modules that PEFT can adapt.
FORMS_WITH_MODULES = ("qwen3_next", "qwen3_5_text", "qwen3_5", "olmo_hybrid")
LoraPair = tuple[np.ndarray, np.ndarray]


def save_adapter(
    config: ModelConfig,
    adapters: Mapping[str, Any],
    out: pathlib.Path | BucketPath,
    base: str,
    digest: str,
) -> int:
    """Writes the adapters of a model to the folder `out`, which must be new or empty.

    Args:
      config: the settings of the model.
      adapters: the matrices A and B of all adapters, as a nested dict of NumPy arrays.
      out: the folder to write.
      base: the name or path of the model without adapters, for `base_model_name_or_path`.
      digest: a digest that identifies the weights of the model without adapters, for the metadata
        of the file.

    Returns:
      The number of adapted modules.

    Raises:
      UserError: transformers has no modules for some of the adapters, or `out` is a folder that is
        not empty or cannot be written.
    """
    require_peft_modules(config)
    require_empty_folder(out)
    require(
        not (isinstance(out, BucketPath) and out.file_infos()),
        f"{out}: already there: expected a new or empty folder; choose another, or remove it first",
    )
    scale = config.lora.alpha / config.lora.rank
    tensors, ranks = {}, {}
    for module, (a, b) in _lora_pairs(config, leaves_by_path(adapters)).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b)
        ranks[module] = len(a)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": ranks,
        "alpha_pattern": {module: scale * rank for module, rank in ranks.items()},
    }
    # Not `save_file`, which makes a file that only its owner can read.
    weights = safetensors.numpy.save(tensors, {"format": "pt", "base_digest": digest})
    with as_user_error(f"{out}: cannot be written: make room, or give another folder", OSError):
        _write_folder(out, weights, json.dumps(fields, indent=1))
    return len(ranks)


def _write_folder(out: pathlib.Path | BucketPath, weights: bytes, config: str) -> None:
    """Writes adapter_model.safetensors and adapter_config.json. A folder on a disk appears with
    both files or not at all; in a bucket, adapter_config.json appears last.
    """
    partial = out
    if not isinstance(out, BucketPath):
        out = out.resolve()  # a directory cannot replace a link
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    (partial / "adapter_model.safetensors").write_bytes(weights)
    (partial / "adapter_config.json").write_text(config)
    if not isinstance(out, BucketPath):
        os.replace(partial, out)


def require_peft_modules(config: ModelConfig) -> None:
    """Checks that transformers has a module for each adapter of the model.

    Raises:
      UserError: transformers has no module for some adapters. The message names the adapters
        without a module, or the form of the model if PEFT can adapt no module of the form.
    """
    plain = config_without_adapters(config)
    require(
        config.lora.rank > 0,
        "this model has no adapters (model.lora.rank = 0): leave --adapter out",
    )
    require(
        config.hf_form in FORMS_WITH_MODULES,
        f"PEFT adapts no modules of the form {config.hf_form}: leave --adapter out, which exports "
        f"the merged weights (PEFT has modules in {', '.join(FORMS_WITH_MODULES)})",
    )
    check_hf_form(plain)
    form_mixers = FORMS[config.hf_form].mixer_entries.keys()
    other_mixers = {mixer for mixer, _ in config.mixers_and_sparsity} - form_mixers
    require(
        not other_mixers,
        f"transformers has no modules of the mixers {', '.join(sorted(other_mixers))}: leave "
        "--adapter out",
    )
    refused = [
        parameter.path
        for parameter in stored_parameters(plain)
        if parameter.path in _adapted_paths(config)
        and (parameter.path.startswith("mtp/") or parameter.declaration.num_experts > 1)
    ]
    require(
        not refused,
        f"transformers has no module for the adapters of {', '.join(refused)} (experts are one "
        "array, and there is no multi-token prediction): leave --adapter out, which exports the "
        "merged weights, or train with other model.lora.targets",
    )


def _adapted_paths(config: ModelConfig) -> set[str]:
    """Returns the paths of the parameters that have adapters."""
    return {
        path.partition(SUFFIX + "/")[0]
        for path in parameter_declarations(config)
        if is_adapter(path)
    }


def _lora_pairs(config: ModelConfig, adapters: Mapping[str, np.ndarray]) -> dict[str, LoraPair]:
    """Returns name of a module → (lora_A, lora_B)."""
    pairs = {}
    for parameter in stored_parameters(config_without_adapters(config)):
        adapters_by_range = _adapters_by_column_range(parameter, adapters)
        for layer, prefix in enumerate(parameter.layer_prefixes if adapters_by_range else ()):
            adapters_of_layer = {
                columns: tuple(x[layer] if parameter.declaration.stack_shape else x for x in pair)
                for columns, pair in adapters_by_range.items()
            }
            for tensor in parameter.entry.slices:
                if (pair := _lora_pair_of_tensor(parameter, tensor, adapters_of_layer)) is not None:
                    pairs[prefix + tensor.name.removesuffix(".weight")] = pair
    return pairs


def _adapters_by_column_range(
    parameter: StoredParameter, adapters: Mapping[str, np.ndarray]
) -> dict[tuple[int, int], LoraPair]:
    """Returns the adapters of a parameter: (first column, last column + 1) of each adapted part →
    the part's matrices A and B.
    """
    prefix, begin, found = parameter.path + SUFFIX, 0, {}
    columns = parameter.declaration.parts or (("", parameter.declaration.shape[-1]),)
    for name, width, *_ in columns:
        own = f"{prefix}/{name}" if name else prefix
        if f"{own}/a" in adapters:
            found[begin, begin + width] = adapters[f"{own}/a"], adapters[f"{own}/b"]
        begin += width
    return found


def _lora_pair_of_tensor(
    parameter: StoredParameter,
    tensor: TensorSlice,
    adapters_by_range: Mapping[tuple[int, int], LoraPair],
) -> LoraPair | None:
    """Returns lora_A and lora_B of the module whose weight is `tensor`, for one layer; None if the
    tensor holds no adapted part. `adapters_by_range` is what `_adapters_by_column_range` returns,
    for this layer alone.
    """
    shape, letters = parameter.declaration.shape, parameter.declaration.dim_roles
    axes, rows = parameter.entry.transpose_axes, tensor_row_indices_in_layer(parameter, tensor)
    inputs = [axis for axis in axes if letters[axis] == "i"]
    row_axes = [axis for axis in axes if letters[axis] != "i"]
    assert list(axes) == row_axes + inputs, f"{tensor.name}: its columns are not the inputs"
    # for each row of the tensor: the index of that row on the last axis of the parameter
    column = np.broadcast_to(np.arange(shape[-1]), [shape[axis] for axis in sorted(row_axes)])
    column = column.transpose(np.argsort(np.argsort(row_axes))).ravel()[rows]
    lora_a, lora_b = [], []
    for (begin, end), (a, b) in adapters_by_range.items():
        is_own = (begin <= column) & (column < end)
        if not is_own.any():
            continue
        lora_a.append(_lora_a_of_tensor(parameter, tensor, a).T)
        lora_b.append(np.zeros((len(column), b.shape[0]), b.dtype))
        whole = np.zeros([shape[axis] for axis in sorted(row_axes)] + [b.shape[0]], b.dtype)
        whole[..., begin:end, :] = np.moveaxis(b, 0, -1)
        order = (*np.argsort(np.argsort(row_axes)), len(row_axes))
        lora_b[-1][:] = whole.transpose(order).reshape(-1, b.shape[0])[rows]
    if not lora_a:
        return None
    return np.concatenate(lora_a, axis=0), np.concatenate(lora_b, axis=1)


def _lora_a_of_tensor(parameter: StoredParameter, tensor: TensorSlice, a: np.ndarray) -> np.ndarray:
    """Returns the matrix A [in, rank] of a tensor, with the inputs in the order of the tensor's
    columns. If the parameter stacks several matrices with the same input (gate and up), the tensor
    holds one of the stacked matrices.
    """
    letters, axes = parameter.declaration.dim_roles, parameter.entry.transpose_axes
    names = [axis for letter in "ip" for axis in range(len(letters)) if letters[axis] == letter]
    for position, axis in enumerate(axes):
        if letters[axis] == "p":
            a = a.take(tensor.index_in_layer[position], axis=names.index(axis))
            names.remove(axis)
    order = [names.index(axis) for axis in axes if letters[axis] == "i"]
    return a.transpose(*order, len(order)).reshape(-1, a.shape[-1])
