"""Loads a `Qwen3Next` from a Hugging Face model directory, and saves a `Qwen3Next` as such a
directory. Saved parameters keep their values, and get the names and shapes of checkpoints of the
model's family. Loading does the reverse.
"""

import collections
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop import shard_slices, tensor_rows
from qwen3next_jax.interop.arrays import TensorReader, make_array
from qwen3next_jax.interop.bucket_export import BucketExport
from qwen3next_jax.interop.checksums import require_undamaged
from qwen3next_jax.interop.families.form import Fields
from qwen3next_jax.interop.hf_config import (
    Checkpoint,
    hf_config_fields,
    open_checkpoint,
    read_hf_config,
    text_fields_as_written,
)
from qwen3next_jax.interop.layout import (
    StoredParameter,
    check_hf_form,
    constant_tensors,
    stored_parameters,
)
from qwen3next_jax.interop.shard_slices import ShardSlice
from qwen3next_jax.interop.source import read_export_source
from qwen3next_jax.interop.weights import Weights, count_and_names
from qwen3next_jax.interop.writing import LocalExport, Tensor, tensors_by_file, write_json
from qwen3next_jax.model import Qwen3Next, parameter_declarations
from qwen3next_jax.model.parameters import ParameterDeclaration
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0, run_on_all
from qwen3next_jax.sharding.rules import storage_spec

# The number of rows of embedding and head that `_check_tied_head` reads at once.
_ROWS_PER_COMPARISON = 1024


def hf_tensors(tree: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """Converts a parameter tree to Hugging Face names and shapes ([outputs, inputs]). The settings
    `config.hf_form` and `config.hf_fused_experts` select the form (`families.form.Form`).

    Args:
      tree: `nnx.state(model, nnx.Param)`, or gradients with the same structure. Nested plain dicts
        are accepted, too.
      config: the settings of the model that the tree belongs to.

    Returns:
      Tensor name → values, in the dtype of the tree.

    Raises:
      ValueError: the tree lacks a parameter of the model, or a parameter has another shape.
      UserError: the form cannot hold the model.
    """
    check_hf_form(config)
    return {
        tensor.name: np.concatenate(list(tensor.read_blocks())).reshape(tensor.shape)
        for tensor in _tensors_to_write(tree, config)
    }


def _tensors_to_write(tree: Any, config: ModelConfig, dtype: str | None = None) -> Iterator[Tensor]:
    """Yields the tensors of a parameter tree. A `Tensor` has a function that reads its values.

    Args:
      tree: see `hf_tensors`.
      config: see `hf_tensors`.
      dtype: the dtype of the stored tensors, except tensors that are always float32
        (`stored_dtype`). None: the dtypes of the tree.
    """
    leaves = {
        path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    reader = TensorReader()
    for parameter in stored_parameters(config):
        leaf = leaves.get(parameter.path)
        if leaf is None or leaf.shape != parameter.shape:
            raise ValueError(
                f"parameter {parameter.path}: expected shape {parameter.shape} by the config, "
                f"found {'nothing' if leaf is None else leaf.shape}"
            )
        tensor_dtype = leaf.dtype if dtype is None else stored_dtype(parameter.declaration, dtype)
        for layer, prefix in enumerate(parameter.layer_prefixes):
            for tensor in parameter.entry.slices:
                blocks = functools.partial(reader.row_blocks, leaf, parameter, tensor, layer)
                yield Tensor(prefix + tensor.name, tensor_dtype, tensor.shape, blocks)


def _constant_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Yields the tensors of integers that hold no parameters (`layout.constant_tensors`)."""
    for name, value in constant_tensors(config).items():
        yield Tensor(name, value.dtype, value.shape, lambda value=value: iter([value]))


def check_hf(path: str | os.PathLike) -> ModelConfig:
    """Checks the config.json of a Hugging Face directory, and the names and shapes of its tensors,
    without reading the tensors.

    Returns:
      The settings of the model.

    Raises:
      UserError: for the reasons that `load_hf` lists.
    """
    checkpoint = open_checkpoint(path)
    with checkpoint.weights:
        _check_tensors(checkpoint, stored_parameters(checkpoint.config))
    return checkpoint.config


def load_hf(path: str | os.PathLike, dtype: str = "float32", mesh: Mesh | None = None) -> Qwen3Next:
    """Loads the model in a Hugging Face directory.

    Args:
      path: a directory with config.json and model.safetensors, or with safetensors shards and their
        index. If the directory has a SHA256SUMS file, the digests of its files are checked.
      dtype: the dtype of the parameters and of the arithmetic (`model.config.dtype`), "float32"
        or "bfloat16". Norms, A_log, dt_bias, the shared expert's gate and the router are always
        float32, as in training.
      mesh: the mesh over which the parameters are sharded, as `sharding.rules` says. Each process
        reads the shards of its own devices; if the mesh spans several processes, all these
        processes must call `load_hf` together. None: all parameters are on one device.

    Raises:
      UserError: there is no config.json; the model_type or another setting is not supported;
        tensors are missing, superfluous, of another shape or not of a floating-point type; or files
        are truncated, damaged, pickled or changed while they were read. The message is one line
        that names the file and says what was expected.
    """
    _check_dtype(dtype)
    config = dataclasses.replace(read_hf_config(path), dtype=dtype)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    declarations = parameter_declarations(config)

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
    # From this directory, `save_hf` copies the vision tower and fields of JSON files.
    model.hf_source = str(to_path(path).absolute())
    return model


def _check_dtype(dtype: str) -> None:
    """Raises UserError unless `dtype` is one that `load_hf` and `save_hf` accept."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")


def stored_dtype(declared: ParameterDeclaration, dtype: str) -> np.dtype:
    """Returns the dtype of one parameter in a model, or in files, whose matrices have the dtype
    `dtype`. Vectors (such as norms and biases), the router and decay rates are always float32,
    because they are small, and because their rounding errors affect the whole model.
    """
    if len(declared.shape) == 1 or declared.kind in ("router", "rate"):
        return np.dtype(np.float32)
    return jnp.dtype(dtype)


def load_params(path: str | os.PathLike, like: Any) -> Any:
    """Loads the parameters in a Hugging Face directory onto the devices of the shardings in `like`.

    All names, shapes and digests are checked before the first parameter is read. In addition to the
    result, the host holds at most a few pieces of 64 MiB (`arrays.MAX_PIECE_BYTES`) at a time.

    Args:
      path: the directory, see `load_hf`.
      like: the dtypes and shardings of the result, as a tree of `jax.ShapeDtypeStruct` with the
        structure of `nnx.state(model, nnx.Param)`, or of nested plain dicts. The sharding None
        stands for the default device. Parameters that are not in `like`, such as "mtp", are not
        read. If the shardings span several processes, all these processes must call `load_params`
        together, and each process reads the shards of its own devices.

    Returns:
      A tree of arrays with the structure of `like`.

    Raises:
      UserError: for the reasons that `load_hf` lists.
    """
    leaves = {
        path_string(leaf_path): leaf
        for leaf_path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]
    }
    spans_processes = any(
        leaf.sharding is not None and not leaf.sharding.is_fully_addressable
        for leaf in leaves.values()
    )

    def read() -> dict[str, jax.Array]:
        checkpoint = open_checkpoint(path)
        with checkpoint.weights as weights:
            stored = stored_parameters(checkpoint.config)
            _check_tensors(checkpoint, stored)
            if spans_processes:
                process, processes = jax.process_index(), jax.process_count()
                require_undamaged(checkpoint.directory, process, processes)
            else:
                require_undamaged(checkpoint.directory)
            arrays = {
                parameter.path: _read_sharded_array(weights, parameter, leaves[parameter.path])
                for parameter in stored
                if parameter.path in leaves
            }
            weights.check_unchanged()
        return arrays

    arrays = run_on_all(read) if spans_processes else read()
    return jax.tree_util.tree_map_with_path(
        lambda leaf_path, _: arrays[path_string(leaf_path)], like
    )


def _read_sharded_array(
    weights: Weights, parameter: StoredParameter, like: jax.ShapeDtypeStruct
) -> jax.Array:
    """Reads a parameter into an array with the dtype and the sharding of `like`."""

    def read(part: ShardSlice) -> np.ndarray:
        return read_parameter_slice(weights, parameter, part, like.dtype)

    return make_array(parameter, like.dtype, like.sharding, read)


def read_parameter_slice(
    weights: Weights, parameter: StoredParameter, part: ShardSlice, dtype: np.dtype
) -> np.ndarray:
    """Reads the values of a slice of a stacked parameter. The function reads only the rows and
    columns of the parameter's tensors that the slice holds.

    Args:
      weights: the tensors of the checkpoint.
      parameter: the parameter's path, shape and tensors.
      part: the slice, with an index range for each dimension of `parameter.shape`.
      dtype: the dtype of the result.

    Raises:
      UserError: a value is not finite in `dtype`.
    """
    values = np.empty(shard_slices.shape_of(part), dtype)
    for prefix, layer_part, layer in tensor_rows.transposed_layers(parameter, part, values):
        for tensor in parameter.entry.slices:
            for run in tensor_rows.row_runs(parameter, tensor, layer_part):
                blocks = [
                    weights.read(prefix + tensor.name, run.tensor_rows, columns)
                    for columns in tensor_rows.column_ranges(parameter, tensor, layer_part)
                ]
                rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
                target = layer[run.index_in_slice]
                with np.errstate(over="ignore"):  # an overflow gives inf, which is refused below
                    tensor_rows.copy_rows(target, rows.reshape(target.shape))
                if not np.isfinite(target).all():
                    raise UserError(
                        f"{weights.directory}: tensor {prefix + tensor.name} holds values that are "
                        f"not finite (NaN, infinity, or beyond {values.dtype}): the model diverged "
                        "or was damaged; take an earlier one"
                    )
    return values


def _check_tensors(checkpoint: Checkpoint, stored: Iterable[StoredParameter]) -> None:
    """Checks the names and shapes of a checkpoint's tensors.

    Raises:
      UserError: a tensor of the parameters `stored` is missing or has another shape; the checkpoint
        has other tensors, except those of a vision tower; or the stored head differs from the
        embedding to which it is tied.
    """
    directory, weights, config = checkpoint.directory, checkpoint.weights, checkpoint.config
    names = weights.names - set(checkpoint.vision_tensors)
    expected = {
        prefix + tensor.name: tensor.shape
        for parameter in stored
        for prefix in parameter.layer_prefixes
        for tensor in parameter.entry.slices
    }
    _check_constant_tensors(checkpoint)
    names -= constant_tensors(config).keys()
    missing = expected.keys() - names
    if missing:
        raise UserError(
            f"{directory}: the weights lack {count_and_names(missing)}: expected all tensors of "
            "the model that config.json describes"
        )
    extra = names - expected.keys()
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        _check_tied_head(checkpoint)
        extra.remove("lm_head.weight")
    if extra:
        raise UserError(
            f"{directory}: the weights hold {count_and_names(extra)} beyond those of the model "
            "that config.json describes; the config may belong to another checkpoint"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise UserError(
                f"{directory}: tensor {name} has shape {list(weights.shape(name))}: "
                f"expected {list(shape)} by config.json{checkpoint.form.wrong_shape_advice(name)}"
            )


def _check_constant_tensors(checkpoint: Checkpoint) -> None:
    """Raises UserError if a tensor of integers in the checkpoint has other values than the settings
    require (`layout.constant_tensors`). A checkpoint may lack the tensors of integers.
    """
    for name, expected in constant_tensors(checkpoint.config).items():
        if name not in checkpoint.weights.names:
            continue
        found = checkpoint.weights.read_integers(name)
        if not np.array_equal(found, expected):
            raise UserError(
                f"{checkpoint.directory}: tensor {name} holds {found.ravel()[:4].tolist()} …: "
                f"expected {expected[:4].tolist()} … by config.json, as its n-grams would have "
                "other rows"
            )


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Raises UserError if the stored head differs from the embedding to which it is tied."""
    embedding = f"{checkpoint.form.trunk_prefix}embed_tokens.weight"
    for row in range(0, checkpoint.config.vocab_size, _ROWS_PER_COMPARISON):
        rows = slice(row, row + _ROWS_PER_COMPARISON)
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
    """Writes `model` as a Hugging Face directory that transformers can load. `model.config.hf_form`
    names the form of the directory.

    The directory appears complete or not at all: it is written under another name beside `out_dir`
    and renamed at the end. The host holds pieces of at most 64 MiB (`arrays.MAX_PIECE_BYTES`). If
    the model is on a mesh of several processes, all these processes must call `save_hf` together,
    and process 0 writes the files.

    Args:
      model: the model to write.
      out_dir: the path of the directory to write, which must be missing or empty.
      tokenizer: an object whose method `save(directory)` writes a tokenizer, and whose attribute
        `eos_id`, if it has one, is the end token; None: no tokenizer is written.
      dtype: the dtype of the stored weights, "float32" or "bfloat16", with the exceptions of
        `load_hf`. None: the dtypes of the model, so that `load_hf` returns the same bits.
      identity: a text that identifies the weights, such as a digest of the run's checkpoint that
        holds them. If an export with an identity is killed, the next call with the same arguments
        continues the export and keeps the complete files.
      source: the Hugging Face directory with which the model was initialised; None: the directory
        that `load_hf` read, if any. From `source`, the export copies the fields of JSON files that
        this project does not write, and the vision tower if the export is a wrapper (`hf_form`
        qwen3_5).
      vision: whether to copy the vision tower. If an export leaves out the vision tower of
        `source`, a note says so.

    Raises:
      UserError: `out_dir` exists and is not empty, the disk has too little space, `dtype` has
        another value, or the model has no Hugging Face form.
    """
    config, params = model.config, nnx.state(model, nnx.Param)
    if dtype is not None:
        _check_dtype(dtype)
    check_hf_form(config)
    if source is None and to_path(getattr(model, "hf_source", "") or os.devnull).is_dir():
        source = model.hf_source
    from_source = read_export_source(source, config, vision, out_dir)
    if from_source.directory is not None:
        require_undamaged(from_source.directory)
    files = tensors_by_file(
        [
            *_tensors_to_write(params, config, dtype),
            *_constant_tensors(config),
            *from_source.vision_tensors,
        ]
    )
    stored_as = dtype or str(params["embedding"][...].dtype)
    fields = hf_config_fields(config, stored_as, from_source.config_fields)
    if identity:
        tensors = [tensor for file in files.values() for tensor in file]
        stored = [[tensor.name, tensor.dtype.name, tensor.shape] for tensor in tensors]
        identity = digests.sha256_json([identity, fields, stored])
    spans_processes = any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))

    def on_first_process(work: Callable[[], Any]) -> Any:
        return broadcast_from_process_0(work) if spans_processes else work()

    def write_other_files(directory: pathlib.Path) -> None:
        generation = {"_from_model_config": True} | from_source.generation_fields
        generation |= _tokens_of_generation(text_fields_as_written(fields), tokenizer)
        write_json(directory / "config.json", fields)
        write_json(directory / "generation_config.json", generation)
        from_source.copy_image_files(directory)
        if tokenizer is not None:
            tokenizer.save(directory)

    out = to_path(out_dir)
    make_export = BucketExport if isinstance(out, BucketPath) else LocalExport
    with make_export(out, files, identity) as export:
        complete = on_first_process(export.begin)
        for name in files:
            if name not in complete:
                _write_weight_file(export, name, files[name], spans_processes)
        on_first_process(lambda: export.finish(write_other_files))


def _tokens_of_generation(fields: Fields, tokenizer: Any) -> Fields:
    """Returns the fields `bos_token_id` and `eos_token_id` of generation_config.json: those of
    config.json, with the end token of the tokenizer among the end tokens. The tokenizer may have
    another end token than a model with n-gram embeddings (`source.with_end_token`).

    Args:
      fields: the fields of the text model in config.json.
      tokenizer: see `save_hf`.
    """
    tokens = {name: fields[name] for name in ("bos_token_id", "eos_token_id")}
    end, own = tokens["eos_token_id"], getattr(tokenizer, "eos_id", -1)
    ends = end if isinstance(end, list) else [end]
    if own < 0 or own in ends:
        return tokens
    return tokens | {"eos_token_id": own if end is None else [*ends, own]}


def _write_weight_file(
    export: LocalExport, name: str, tensors: Sequence[Tensor], spans_processes: bool
) -> None:
    """Writes one file of weights. If the model spans several processes, process 0 writes the file,
    and all processes take part in gathering the file's blocks from the devices.
    """
    blocks = (
        block.astype(tensor.dtype, copy=False)
        for tensor in tensors
        for block in tensor.read_blocks()
    )
    if not spans_processes:
        export.write(name, blocks)
        return

    def write() -> None:
        try:
            export.write(name, blocks)
        except UserError:
            _gather_and_drop(blocks)  # the other processes gather the remaining blocks, too
            raise

    if not is_process_0():
        _gather_and_drop(blocks)
    broadcast_from_process_0(write)


def _gather_and_drop(blocks: Iterator[np.ndarray]) -> None:
    """Consumes and drops all remaining blocks, so that this process takes part in gathering the
    blocks from the devices.
    """
    collections.deque(blocks, maxlen=0)
