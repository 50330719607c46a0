"""Hugging Face model directories ↔ `Qwen3Next`: the same numbers under the names and shapes of
the released checkpoint.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, short
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop import boxes
from qwen3next_jax.interop.arrays import Reader, build
from qwen3next_jax.interop.hf_config import (
    VISION,
    format_hf_config,
    model_directory,
    read_hf_config,
    text_of,
)
from qwen3next_jax.interop.layout import Parameter, check_hf_form, parameters, trunk
from qwen3next_jax.interop.source import source_of
from qwen3next_jax.interop.weights import Weights, is_file_name, name_some, weight_files
from qwen3next_jax.interop.writing import DIGESTS, Tensor, Unfinished, files_of, write_json
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.parameters import Declared
from qwen3next_jax.processes.distributed import is_leader, broadcast_from_process_0, run_on_all
from qwen3next_jax.sharding.rules import storage_spec


def hf_tensors(tree: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """A parameter tree under Hugging Face names and in Hugging Face shapes ([out, in]), as
    `config.hf_form` and `config.hf_fused_experts` have them.

    Args:
      tree: `nnx.state(model, nnx.Param)`, gradients of that structure, or either as nested plain
      dicts. config: of the model the tree belongs to.

    Raises:
      ValueError: the tree lacks a parameter that `config` calls for, or has it in another shape.
    """
    return {
        tensor.name: np.concatenate(list(tensor.blocks())).reshape(tensor.shape)
        for tensor in _tensors(tree, config)
    }


def _tensors(tree: Any, config: ModelConfig, dtype: str | None = None) -> Iterator[Tensor]:
    leaves = {
        path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    reader = Reader()
    for parameter in parameters(config):
        leaf = leaves.get(parameter.path)
        if leaf is None or leaf.shape != parameter.shape:
            raise ValueError(
                f"parameter {parameter.path}: expected shape {parameter.shape} by the config, "
                f"found {'nothing' if leaf is None else leaf.shape}"
            )
        kept = leaf.dtype if dtype is None else stored_dtype(parameter.declared, dtype)
        for layer, prefix in enumerate(parameter.prefixes):
            for part in parameter.entry.slices:
                blocks = functools.partial(reader.blocks, leaf, parameter, part, layer)
                yield Tensor(prefix + part.name, kept, part.shape, blocks)


def check_hf(path: str | os.PathLike) -> ModelConfig:
    """The architecture of a Hugging Face directory, whose tensors are compared with it, without
    reading them (headers only).

    Raises:
      UserError: see `load_hf`.
    """
    config = read_hf_config(path)
    _check_tensors(Weights(model_directory(path)), list(parameters(config)), config)
    return config


def load_hf(path: str | os.PathLike, dtype: str = "float32", mesh: Mesh | None = None) -> Qwen3Next:
    """The model in a Hugging Face directory.

    Args:
      path: holds config.json and model.safetensors, or shards with their index. A SHA256SUMS
      file there is checked. dtype: "float32" or "bfloat16", of the parameters and of the
      arithmetic (`model.config.dtype`).
        Norms, A_log, dt_bias, the shared expert's gate and the router are float32 in either, as
        training keeps them.
      mesh: over which the parameters are split, as `sharding.rules` says; each process reads
      what its devices hold. None: one device.
        On a mesh of several processes all of them call this together.

    Raises:
      UserError: one line naming the file and what was expected: no config.json, another
      model_type or a setting that is
        not supported; tensors missing, left over, misshapen or not floating point; files
        truncated, damaged, pickled or changed while they are read.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    config = dataclasses.replace(read_hf_config(path), dtype=dtype)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    kept = declared(config)

    def kept_as(leaf, shape):
        parameter = kept[path_string(leaf)]
        place = mesh and NamedSharding(mesh, storage_spec(parameter, shape.shape, mesh))
        return jax.ShapeDtypeStruct(
            shape.shape, stored_dtype(parameter, config.dtype), sharding=place
        )

    model = nnx.merge(graph, load_params(path, jax.tree_util.tree_map_with_path(kept_as, shapes)))
    model.hf_source = str(pathlib.Path(path).absolute())  # of what `save_hf` takes over
    return model


def stored_dtype(declared: Declared, dtype: str) -> np.dtype:
    """What a parameter is kept in, in a model and in files of `dtype`: what steers everything
    else and weighs nothing is float32.
    """
    return (
        np.dtype(np.float32)
        if len(declared.shape) == 1 or declared.kind in ("router", "rate")
        else jnp.dtype(dtype)
    )


def load_params(path: str | os.PathLike, like: Any) -> Any:
    """The parameters in a Hugging Face directory, straight to where they shall lie.

    Args:
      like: tree of `jax.ShapeDtypeStruct` with the structure of `nnx.state(model, nnx.Param)` or
      of plain dicts: dtypes, and shardings
        (None: the default device). What it lacks, such as mtp, is not read. Where it spans
        several processes all of them call this together, and each reads what its own devices
        hold.

    The host holds pieces of at most 64 MiB (`arrays.PIECE`) beside what is kept. Everything is
    checked before the first is read.

    Raises:
      UserError: see `load_hf`.
    """
    leaves = {
        path_string(leaf): shape for leaf, shape in jax.tree_util.tree_flatten_with_path(like)[0]
    }
    spread = any(
        leaf.sharding is not None and not leaf.sharding.is_fully_addressable
        for leaf in leaves.values()
    )

    def read() -> dict[str, jax.Array]:
        directory = model_directory(path)
        with Weights(directory) as weights:
            config = read_hf_config(path)
            wanted = list(parameters(config))
            _check_tensors(weights, wanted, config)
            _check_digests(
                directory, *((jax.process_index(), jax.process_count()) if spread else ())
            )
            arrays = {
                parameter.path: build(
                    parameter,
                    leaf.dtype,
                    leaf.sharding,
                    lambda box: read_box(weights, parameter, box, leaf.dtype),
                )
                for parameter in wanted
                if (leaf := leaves.get(parameter.path)) is not None
            }
            weights.check_unchanged()
        return arrays

    arrays = run_on_all(read) if spread else read()
    return jax.tree_util.tree_map_with_path(lambda leaf, _: arrays[path_string(leaf)], like)


def read_box(weights: Weights, parameter: Parameter, box: boxes.Box, dtype: np.dtype) -> np.ndarray:
    """The values in a box of a stacked parameter; of its tensors, the rows and columns in the
    box are read, and nothing else.
    """
    array = np.empty(boxes.shape_of(box), dtype)
    for prefix, own, layer in boxes.layers(parameter, box, array):
        for part in parameter.entry.slices:
            for run in boxes.runs(parameter, part, own):
                rows = [
                    weights.read(prefix + part.name, run.rows, side)
                    for side in boxes.columns(parameter, part, own)
                ]
                rows = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)
                with np.errstate(over="ignore"):  # told below
                    boxes.copy(place := layer[run.place], rows.reshape(place.shape))
                if not np.isfinite(place).all():
                    raise UserError(
                        f"{weights.directory}: tensor {prefix + part.name} holds values that are "
                        "not finite (NaN, infinity, or "
                        f"beyond {array.dtype}): the model diverged or was damaged; take an "
                        "earlier one"
                    )
    return array


def _check_tensors(weights: Weights, wanted: list[Parameter], config: ModelConfig) -> None:
    names = {
        name
        for name in weights.names
        if config.hf_form == "qwen3_next" or not name.startswith(VISION)
    }
    expected = {
        prefix + part.name: part.shape
        for parameter in wanted
        for prefix in parameter.prefixes
        for part in parameter.entry.slices
    }
    missing, extra = expected.keys() - names, names - expected.keys()
    if missing:
        raise UserError(
            f"{weights.directory}: the weights lack {name_some(missing)}; expected all that "
            "config.json calls for"
        )
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra -= {"lm_head.weight"}
        embedding = f"{trunk(config)}embed_tokens.weight"
        tables = (
            (weights.read(name, slice(row, row + 1024)) for name in ("lm_head.weight", embedding))
            for row in range(0, config.vocab_size, 1024)
        )
        if not all(np.array_equal(*rows) for rows in tables):
            raise UserError(
                f"{weights.directory}: config.json says tie_word_embeddings, but lm_head.weight "
                f"differs from {embedding}: expected them equal, or tie_word_embeddings: false"
            )
    if extra:
        raise UserError(
            f"{weights.directory}: the weights hold {name_some(extra)} beyond those config.json "
            "calls for; the config may belong to another checkpoint"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise UserError(
                f"{weights.directory}: tensor {name} has shape {list(weights.shape(name))}: "
                f"expected {list(shape)} by config.json"
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
    host holds pieces of at most 64 MiB (`arrays.PIECE`). A model on a mesh of several processes
    is written by the first; all of them call this together.

    Args:
      out_dir: must not exist yet, or be empty.
      tokenizer: anything with `save(directory)`, or None.
      dtype: "float32" or "bfloat16", of the weights, with the exceptions of `load_hf`; None: as
      they are, so that `load_hf` of the
        result has the same bits.
      identity: a text that names these weights, such as a digest of the checkpoint they come
      from. With it, an export that was killed is
        gone on with: what is whole of the files is kept.
      source: the Hugging Face directory that the model began with, from which further fields of
      its JSON files, and to a wrapper
        (`hf_form` qwen3_5) the vision tower, are taken over. None: the one that `load_hf` read,
        if any.
      vision: False leaves the tower out. What is left out is said in a note.

    Raises:
      UserError: `out_dir` is there and not empty, the disk has no room, or the model lacks a
      part that transformers' has.
    """
    config, params = model.config, nnx.state(model, nnx.Param)
    check_hf_form(config)
    began = getattr(model, "hf_source", "")
    origin = source_of(source or (began if os.path.isdir(began) else None), config, vision, out_dir)
    if origin.directory is not None:
        _check_digests(origin.directory)
    files = files_of([*_tensors(params, config, dtype), *origin.tower])
    fields = format_hf_config(config, dtype or str(params["embedding"][...].dtype), origin.fields)
    identity = identity and digests.of_json(
        [
            identity,
            fields,
            [[t.name, t.dtype.name, t.shape] for file in files.values() for t in file],
        ]
    )
    spread = any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))

    def rest(directory: pathlib.Path) -> None:
        write_json(directory / "config.json", fields)
        write_json(
            directory / "generation_config.json",
            {"_from_model_config": True}
            | origin.generation
            | {name: text_of(fields)[name] for name in ("bos_token_id", "eos_token_id")},
        )
        origin.copy_image_files(directory)
        if tokenizer is not None:
            tokenizer.save(directory)

    def write(name: str, blocks: Iterator[np.ndarray]) -> None:
        try:
            unfinished.write(name, blocks)
        except UserError:
            if spread:  # the other processes read on, and need this one for it
                collections.deque(blocks, maxlen=0)
            raise

    said = broadcast_from_process_0 if spread else lambda work: work()
    with Unfinished(pathlib.Path(out_dir), files, identity) as unfinished:
        kept = said(unfinished.begin)
        for name in [name for name in files if name not in kept]:
            blocks = (
                block.astype(tensor.dtype, copy=False)
                for tensor in files[name]
                for block in tensor.blocks()
            )
            if spread and not is_leader():
                collections.deque(blocks, maxlen=0)
            said(lambda: write(name, blocks))
        said(lambda: unfinished.finish(rest))


def _check_digests(directory: pathlib.Path, process: int = 0, processes: int = 1) -> None:
    """Compares the files with SHA256SUMS where there is one: safetensors alone does not notice a
    flipped bit. Each of several processes looks at its share of them.
    """
    for name, damage in verify_hf(directory, process, processes):
        if damage:
            raise UserError(
                f"{directory / name}: {damage}: damaged, or changed after export; copy it again, "
                f"or delete {DIGESTS} if the change is meant"
            )


def verify_hf(
    directory: pathlib.Path, process: int = 0, processes: int = 1
) -> Iterator[tuple[str, str | None]]:
    """`(file, what is wrong with it or None)` of every file that SHA256SUMS names and of every
    weight file; nothing where there is no SHA256SUMS. Files are digested on all cores; of
    several processes each takes its share.
    """
    if not (directory / DIGESTS).exists():
        return
    try:
        with json_files.open_regular(directory / DIGESTS) as file:
            lines = [
                line.split(maxsplit=1) for line in file.read().decode(errors="replace").splitlines()
            ]
    except OSError as error:
        raise UserError(f"{directory / DIGESTS}: cannot be read ({error.strerror})") from error
    recorded = {words[1].lstrip("*"): words[0] for words in lines if len(words) == 2}
    for name in list(recorded):
        path = pathlib.PurePath(name)
        if path.is_absolute() or ".." in path.parts:
            wrong = "which is outside this folder"
        elif not all(map(is_file_name, path.parts)):
            wrong = "which is no name of a file"
        else:
            continue
        del recorded[name]
        yield DIGESTS, f"it names {short(name)}, {wrong}"
    for file in weight_files(directory):
        if file.name not in recorded:
            yield file.name, f"{DIGESTS} does not name it"
    files = {name: directory / name for name in sorted(recorded)[process::processes]}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(
            lambda file: digests.of_file(file) if os.path.isfile(file) else None, files.values()
        )
        for name, digest in zip(files, found, strict=True):
            if digest is None:
                yield name, f"missing, although {DIGESTS} names it"
            else:
                yield (
                    name,
                    None
                    if digest == recorded[name]
                    else f"SHA-256 is {digest[:12]}…, {DIGESTS} says {recorded[name][:12]}…",
                )
