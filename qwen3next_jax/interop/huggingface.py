"""Hugging Face model directories ↔ `Qwen3Next`: the same numbers under the names and shapes of
the released checkpoint.
"""

import collections
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, as_user_error
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop import shard_slices, tensor_rows
from qwen3next_jax.interop.arrays import TensorReader, make_array
from qwen3next_jax.interop.checksums import require_undamaged
from qwen3next_jax.interop.hf_config import (
    Checkpoint,
    format_hf_config,
    open_checkpoint,
    read_hf_config,
    text_group,
)
from qwen3next_jax.interop.layout import Parameter, check_hf_form, constants, parameters
from qwen3next_jax.interop.shard_slices import ShardSlice
from qwen3next_jax.interop.source import read_source
from qwen3next_jax.interop.weights import Weights, name_some, some, weight_files
from qwen3next_jax.interop.writing import PartialExport, Tensor, files_of, write_json
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.parameters import Declared
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_leader, run_on_all
from qwen3next_jax.sharding.rules import storage_spec

_ROWS_COMPARED = 1024  # of two tables, at a time


def hf_tensors(tree: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """A parameter tree under Hugging Face names and in Hugging Face shapes ([out, in]), in the form
    that `config.hf_form` and `config.hf_fused_experts` name.

    Args:
      tree: `nnx.state(model, nnx.Param)`, gradients of that structure, or either as nested plain
        dicts.
      config: of the model that the tree belongs to.

    Raises:
      ValueError: the tree lacks a parameter that `config` calls for, or has it in another shape.
      UserError: the model has no such form.
    """
    check_hf_form(config)
    return {
        tensor.name: np.concatenate(list(tensor.blocks())).reshape(tensor.shape)
        for tensor in _tensors(tree, config)
    }


def _tensors(tree: Any, config: ModelConfig, dtype: str | None = None) -> Iterator[Tensor]:
    """The tensors of a parameter tree, each with a function that reads its values."""
    leaves = {
        path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    reader = TensorReader()
    for parameter in parameters(config):
        leaf = leaves.get(parameter.path)
        if leaf is None or leaf.shape != parameter.shape:
            raise ValueError(
                f"parameter {parameter.path}: expected shape {parameter.shape} by the config, "
                f"found {'nothing' if leaf is None else leaf.shape}"
            )
        written = leaf.dtype if dtype is None else stored_dtype(parameter.declared, dtype)
        for layer, prefix in enumerate(parameter.prefixes):
            for tensor in parameter.entry.slices:
                blocks = functools.partial(reader.blocks, leaf, parameter, tensor, layer)
                yield Tensor(prefix + tensor.name, written, tensor.shape, blocks)


def _constants(config: ModelConfig) -> Iterator[Tensor]:
    """The tensors that hold no parameters."""
    for name, value in constants(config).items():
        yield Tensor(name, value.dtype, value.shape, lambda value=value: iter([value]))


def check_hf(path: str | os.PathLike) -> ModelConfig:
    """The settings of the model in a Hugging Face directory. Names and shapes of its tensors are
    checked, and no tensor is read.

    Raises:
      UserError: see `load_hf`.
    """
    checkpoint = open_checkpoint(path)
    with checkpoint.weights:
        _check_tensors(checkpoint, parameters(checkpoint.config))
    return checkpoint.config


def stamp_hf(path: str | os.PathLike) -> str:
    """A text that is another one once a file of the model in a Hugging Face directory was
    replaced: of the names, sizes and times of config.json and the weights. Nothing is read.

    Raises:
      UserError: one of them is not there.
    """
    directory = pathlib.Path(path)
    files = [directory / "config.json", *weight_files(directory)]
    with as_user_error(f"{directory}: its files cannot be looked at", OSError):
        found = [(file.name, file.stat()) for file in files]
    return digests.sha256_json([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])


def load_hf(path: str | os.PathLike, dtype: str = "float32", mesh: Mesh | None = None) -> Qwen3Next:
    """The model in a Hugging Face directory.

    Args:
      path: of a directory with config.json and model.safetensors, or shards with their index. A
        SHA256SUMS file there is checked.
      dtype: "float32" or "bfloat16", of the parameters and of the arithmetic
        (`model.config.dtype`). Norms, A_log, dt_bias, the shared expert's gate and the router are
        float32 in either, as in training.
      mesh: over which the parameters are split, as `sharding.rules` says; each process reads what
        its devices hold. None: one device. On a mesh of several processes all of them call this
        together.

    Raises:
      UserError: one line naming the file and what was expected: no config.json, another
        model_type or a setting that is not supported; tensors missing, left over, misshapen or
        not floating point; files truncated, damaged, pickled or changed while they are read.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    config = dataclasses.replace(read_hf_config(path), dtype=dtype)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    declarations = declared(config)

    def abstract(leaf_path, leaf):
        parameter = declarations[path_string(leaf_path)]
        sharding = None
        if mesh is not None:
            sharding = NamedSharding(mesh, storage_spec(parameter, leaf.shape, mesh))
        return jax.ShapeDtypeStruct(
            leaf.shape, stored_dtype(parameter, config.dtype), sharding=sharding
        )

    params = load_params(path, jax.tree_util.tree_map_with_path(abstract, shapes))
    model = nnx.merge(graph, params)
    # `save_hf` takes further fields of its JSON files from there
    model.hf_source = str(pathlib.Path(path).absolute())
    return model


def stored_dtype(declared: Declared, dtype: str) -> np.dtype:
    """The dtype of a parameter in a model and in files of `dtype`. Vectors, the router and rates
    weigh little and steer everything else: they are float32.
    """
    if len(declared.shape) == 1 or declared.kind in ("router", "rate"):
        return np.dtype(np.float32)
    return jnp.dtype(dtype)


def load_params(path: str | os.PathLike, like: Any) -> Any:
    """The parameters in a Hugging Face directory, on the devices where they shall be.

    Everything is checked before the first parameter is read. The host holds pieces of at most
    64 MiB (`arrays.MAX_PIECE_BYTES`) beside the result.

    Args:
      path: see `load_hf`.
      like: tree of `jax.ShapeDtypeStruct` with the structure of `nnx.state(model, nnx.Param)` or
        of plain dicts: dtypes, and shardings (None: the default device). What it lacks, such as
        mtp, is not read. Where it spans several processes, all of them call this together, and
        each reads what its own devices hold.

    Raises:
      UserError: see `load_hf`.
    """
    leaves = {
        path_string(leaf): shape for leaf, shape in jax.tree_util.tree_flatten_with_path(like)[0]
    }
    spans_processes = any(
        leaf.sharding is not None and not leaf.sharding.is_fully_addressable
        for leaf in leaves.values()
    )

    def read() -> dict[str, jax.Array]:
        checkpoint = open_checkpoint(path)
        with checkpoint.weights as weights:
            wanted = parameters(checkpoint.config)
            _check_tensors(checkpoint, wanted)
            if spans_processes:
                process, processes = jax.process_index(), jax.process_count()
                require_undamaged(checkpoint.directory, process, processes)
            else:
                require_undamaged(checkpoint.directory)
            arrays = {
                parameter.path: _read_array(weights, parameter, leaves[parameter.path])
                for parameter in wanted
                if parameter.path in leaves
            }
            weights.check_unchanged()
        return arrays

    arrays = run_on_all(read) if spans_processes else read()
    return jax.tree_util.tree_map_with_path(lambda leaf, _: arrays[path_string(leaf)], like)


def _read_array(weights: Weights, parameter: Parameter, like: jax.ShapeDtypeStruct) -> jax.Array:
    def read(part: ShardSlice) -> np.ndarray:
        return read_parameter_slice(weights, parameter, part, like.dtype)

    return make_array(parameter, like.dtype, like.sharding, read)


def read_parameter_slice(
    weights: Weights, parameter: Parameter, part: ShardSlice, dtype: np.dtype
) -> np.ndarray:
    """The values in a slice of a stacked parameter. Of its tensors, the rows and columns in the
    slice are read, and nothing else.

    Raises:
      UserError: a value is not finite.
    """
    values = np.empty(shard_slices.shape_of(part), dtype)
    for prefix, own, layer in tensor_rows.layers(parameter, part, values):
        for tensor in parameter.entry.slices:
            for run in tensor_rows.runs(parameter, tensor, own):
                blocks = [
                    weights.read(prefix + tensor.name, run.rows, columns)
                    for columns in tensor_rows.columns(parameter, tensor, own)
                ]
                rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
                target = layer[run.index]
                with np.errstate(over="ignore"):  # an overflow is infinite, and refused below
                    tensor_rows.copy(target, rows.reshape(target.shape))
                if not np.isfinite(target).all():
                    raise UserError(
                        f"{weights.directory}: tensor {prefix + tensor.name} holds values that are "
                        f"not finite (NaN, infinity, or beyond {values.dtype}): the model diverged "
                        "or was damaged; take an earlier one"
                    )
    return values


def _check_tensors(checkpoint: Checkpoint, wanted: Iterable[Parameter]) -> None:
    """Raises UserError unless the checkpoint has the tensors of the parameters, in their shapes,
    and no others beside a vision tower.
    """
    directory, weights, config = checkpoint.directory, checkpoint.weights, checkpoint.config
    names = weights.names - set(checkpoint.vision_tensors)
    expected = {
        prefix + tensor.name: tensor.shape
        for parameter in wanted
        for prefix in parameter.prefixes
        for tensor in parameter.entry.slices
    }
    _check_constants(checkpoint)
    names -= constants(config).keys()
    missing = expected.keys() - names
    if missing:
        raise UserError(
            f"{directory}: the weights lack {name_some(missing)}; expected all that "
            "config.json calls for"
        )
    extra = names - expected.keys()
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        _check_tied_head(checkpoint)
        extra.remove("lm_head.weight")
    if extra:
        raise UserError(
            f"{directory}: the weights hold {name_some(extra)} beyond those config.json "
            "calls for; the config may belong to another checkpoint"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise UserError(
                f"{directory}: tensor {name} has shape {list(weights.shape(name))}: "
                f"expected {list(shape)} by config.json"
            )


def _check_constants(checkpoint: Checkpoint) -> None:
    """Raises UserError where the checkpoint holds other numbers than its settings ask for. It may
    leave them out.
    """
    for name, expected in constants(checkpoint.config).items():
        if name not in checkpoint.weights.names:
            continue
        found = checkpoint.weights.read_integers(name)
        if not np.array_equal(found, expected):
            raise UserError(
                f"{checkpoint.directory}: tensor {name} holds {some(found.ravel().astype(str))}: "
                f"expected {some(expected.astype(str))} by config.json, as its n-grams would have "
                "other rows"
            )


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Raises UserError where the head of tied weights is stored, and differs from the embedding."""
    embedding = f"{checkpoint.form.trunk}embed_tokens.weight"
    for row in range(0, checkpoint.config.vocab_size, _ROWS_COMPARED):
        rows = slice(row, row + _ROWS_COMPARED)
        head_rows = checkpoint.weights.read("lm_head.weight", rows)
        if not np.array_equal(head_rows, checkpoint.weights.read(embedding, rows)):
            raise UserError(
                f"{checkpoint.directory}: config.json says tie_word_embeddings, but lm_head.weight "
                f"differs from {embedding}: expected them equal, or tie_word_embeddings: false"
            )


def save_hf(
    model: Qwen3Next,
    out_dir: str | os.PathLike,
    tokenizer: Any = None,
    *,
    dtype: str | None = None,
    identity: str | None = None,
    source: str | os.PathLike | None = None,
    vision: bool = True,
) -> None:
    """Writes `model` as a Hugging Face directory of the form `model.config.hf_form`, which
    transformers loads.

    The directory appears whole or not at all: it is written beside its place and renamed. The
    host holds pieces of at most 64 MiB (`arrays.MAX_PIECE_BYTES`). A model on a mesh of several
    processes is written by the first; all of them call this together.

    Args:
      model: what is written.
      out_dir: must not exist yet, or be empty.
      tokenizer: anything with `save(directory)`, or None.
      dtype: "float32" or "bfloat16", of the weights, with the exceptions of `load_hf`; None: as
        they are, so that `load_hf` of the result has the same bits.
      identity: a text that names these weights, such as a digest of the checkpoint they come
        from. With it, the next call continues an export that was killed: it keeps the files that
        are complete.
      source: the Hugging Face directory that the model began with, from which further fields of
        its JSON files, and to a wrapper (`hf_form` qwen3_5) the vision tower, are taken over.
        None: the one that `load_hf` read, if any.
      vision: False leaves the tower out. A note says what is left out.

    Raises:
      UserError: `out_dir` is there and not empty, the disk has no room, or the model has no
        Hugging Face form.
    """
    config, params = model.config, nnx.state(model, nnx.Param)
    check_hf_form(config)
    if source is None and os.path.isdir(getattr(model, "hf_source", "")):
        source = model.hf_source
    origin = read_source(source, config, vision, out_dir)
    if origin.directory is not None:
        require_undamaged(origin.directory)
    files = files_of(
        [*_tensors(params, config, dtype), *_constants(config), *origin.vision_tensors]
    )
    fields = format_hf_config(config, dtype or str(params["embedding"][...].dtype), origin.fields)
    if identity:
        written = [[t.name, t.dtype.name, t.shape] for file in files.values() for t in file]
        identity = digests.sha256_json([identity, fields, written])
    spans_processes = any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))

    def write_other_files(directory: pathlib.Path) -> None:
        tokens = {name: text_group(fields)[name] for name in ("bos_token_id", "eos_token_id")}
        generation = {"_from_model_config": True} | origin.generation | tokens
        write_json(directory / "config.json", fields)
        write_json(directory / "generation_config.json", generation)
        origin.copy_image_files(directory)
        if tokenizer is not None:
            tokenizer.save(directory)

    def write(name: str, blocks: Iterator[np.ndarray]) -> None:
        try:
            export.write(name, blocks)
        except UserError:
            if spans_processes:  # the other processes read on, and need this one for it
                collections.deque(blocks, maxlen=0)
            raise

    on_first_process = broadcast_from_process_0 if spans_processes else lambda work: work()
    with PartialExport(pathlib.Path(out_dir), files, identity) as export:
        complete = on_first_process(export.begin)
        for name in files:
            if name in complete:
                continue
            blocks = (
                block.astype(tensor.dtype, copy=False)
                for tensor in files[name]
                for block in tensor.blocks()
            )
            if spans_processes and not is_leader():
                collections.deque(blocks, maxlen=0)
            on_first_process(lambda: write(name, blocks))
        on_first_process(lambda: export.finish(write_other_files))
