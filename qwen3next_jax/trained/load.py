"""Loads a model from the folder of a run or from a Hugging Face directory, on a mesh of one or
several processes.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, require, similar_folder_hint
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig, to_dict
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer
from qwen3next_jax.interop.hf_config import read_hf_config
from qwen3next_jax.interop.huggingface import load_hf
from qwen3next_jax.interop.weights import modification_digest
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.layer_properties import mesh_requirements
from qwen3next_jax.processes import distributed
from qwen3next_jax.processes.launch import Launch
from qwen3next_jax.runs.checkpoint import StepChoice, load_trained
from qwen3next_jax.runs.record import RunRecord, read_config, read_record
from qwen3next_jax.sharding.mesh import check_mesh_divides, make_mesh, mesh_unless_single_device
from qwen3next_jax.sharding.rules import ROWS, num_shards


class LoadedModel(NamedTuple):
    """A model with its tokenizer.

    Attributes:
      model: the model with its parameters.
      tokenizer: the model's tokenizer; None if a Hugging Face directory has none.
      step: number of steps for which the model was trained; None for a Hugging Face directory.
      mesh: the mesh over which the parameters are sharded; None for one device.
      weights_identity: text that identifies the weights. For a run, `weights_identity` is the
        digest of the checkpoint's manifest, followed by " ema" for the moving average. For a
        Hugging Face directory, `weights_identity` is the result of
        `interop.weights.modification_digest`.
    """

    model: Qwen3Next
    tokenizer: Tokenizer | None
    step: int | None
    mesh: Mesh | None
    weights_identity: str


def load_model(
    path: str | pathlib.Path,
    step: StepChoice = None,
    mesh: MeshConfig | None = None,
    dtype: str | None = "float32",
    devices: Sequence[Any] | None = None,
    ema: bool = False,
) -> LoadedModel:
    """Loads a model from a run or a Hugging Face directory. If there are several processes, all
    must call this function, and each reads the shards of its own devices.

    Args:
      path: the folder of a run, or a Hugging Face directory.
      step: for a run, the number of steps after which the checkpoint was saved; "best" for the
        checkpoint with the lowest held-out loss; None for the newest valid checkpoint.
      mesh: sizes of the mesh's axes; None for the sizes of the run, or, for a Hugging Face
        directory, for all devices along `data`.
      dtype: dtype of the parameters that are loaded from a Hugging Face directory; None for the
        dtype in its config.json. The parameters of a run are float32.
      devices: the devices of the mesh; None: all that JAX finds.
      ema: for a run, whether to load the moving average of its parameters (`train.ema`).

    Raises:
      UserError: `path` is neither a run nor a Hugging Face directory, its files are damaged, `ema`
        is true but the run has no moving average, or the mesh does not fit the devices or the
        model.
    """
    folder = to_path(path)
    if (folder / "run.json").exists():
        record = read_record(folder)
        config = record.read_config(folder)
        param_mesh = mesh_of_params(
            f"{path}: the mesh of its run does not fit these devices",
            config.model,
            mesh,
            config.parallel.mesh,
            devices,
        )
        model, step, identity = load_trained(folder, step, param_mesh, record, ema=ema)
        tokenizer = tokenizer_of_run(folder, record)
        identity += " ema" * ema
        return LoadedModel(model, tokenizer, step, param_mesh, identity)
    if (folder / "config.json").exists():
        if step is not None:
            raise UserError(
                f"{path}: a Hugging Face directory has no steps: leave out --step={step}"
            )
        require(
            not ema,
            f"{path}: a Hugging Face directory has one set of parameters and no average beside it: "
            "leave out --ema",
        )
        tokenizer_file = folder / "tokenizer.json"
        config = read_hf_config(folder)
        param_mesh = mesh_of_params(str(path), config, mesh, MeshConfig(), devices)
        # The stamp is made before the weights are read. If a file changes in between, the stamp
        # does not match the new file.
        identity = modification_digest(folder)
        model = load_hf(folder, dtype or config.dtype, param_mesh)
        tokenizer = None
        if tokenizer_file.exists():
            tokenizer = load_tokenizer(str(tokenizer_file), model.config.vocab_size)
        return LoadedModel(model, tokenizer, None, param_mesh, identity)
    reason = "no such folder" if not folder.exists() else "it has neither run.json nor config.json"
    raise UserError(
        f"{path}: neither the folder of a run nor a Hugging Face directory ({reason})"
        f"{similar_folder_hint(folder)}"
    )


def describe_ema_choice(ema: bool) -> str:
    """Returns text for messages: which parameters of a run with `train.ema` were loaded."""
    return "the average of its parameters (--ema)" if ema else "not the average (--noema)"


def tokenizer_of_run(folder: pathlib.Path, record: RunRecord) -> Tokenizer:
    """Loads the tokenizer of the run in `folder`. `record`: the content of its run.json.

    Raises:
      UserError: the tokenizer's file is not the one with which the run was trained.
    """
    config = record.read_config(folder)
    copy, data = folder / "tokenizer", config.data
    if copy.exists():
        data = dataclasses.replace(data, tokenizer=str(copy))
    tokenizer = data_source_class(data).tokenizer_of(data, config.model.vocab_size)
    if tokenizer.fingerprint != record.tokenizer:
        raise UserError(
            f"{data.tokenizer}: not the tokenizer that {folder} was trained with (its fingerprint "
            "differs from that in run.json): restore the original file"
        )
    return tokenizer


@contextlib.contextmanager
def distributed_command(launch: Launch | None, path: str | pathlib.Path) -> Iterator[None]:
    """Context manager that starts JAX's distributed runtime for a command that loads the model at
    `path`. Within the `with` block only process 0 prints.

    Args:
      launch: the coordinator's address and the index of this process; None: there is one process.
      path: the folder of a run, or a Hugging Face directory.
    """
    folder = to_path(path)
    if (folder / "run.json").exists():
        config = read_config(folder)
        parallel, settings = config.parallel, to_dict(config)
    else:
        parallel, settings = ParallelConfig(), {}
    with distributed.distributed_run(launch, parallel, settings):
        if distributed.is_process_0():
            yield
            return
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield


def mesh_of_params(
    where: str,
    model: ModelConfig,
    user_mesh: MeshConfig | None,
    default: MeshConfig,
    devices: Sequence[Any] | None,
) -> Mesh | None:
    """Returns the mesh over which the parameters are sharded; None for one device.

    Args:
      where: the beginning of the error message if the default mesh does not fit.
      user_mesh: the value of --mesh; None if it is not given.
      default: the mesh if --mesh is not given.
      devices: the devices of the mesh; None: all that JAX finds.

    Raises:
      UserError: the mesh does not fit the devices or the model.
    """
    try:
        mesh = make_mesh(ParallelConfig(mesh=user_mesh or default), devices)
        # Callers pad rows and tokens to multiples of the axes' sizes, so the numbers given here are
        # such multiples. Heads and widths are not padded, so their numbers are checked.
        rows = num_shards(mesh, *ROWS)
        check_mesh_divides(
            model, rows, 1024 * mesh.shape["context"], mesh, *mesh_requirements(model)
        )
    except UserError as error:
        raise UserError(
            f"--mesh: {error}"
            if user_mesh
            else f"{where} ({error}); choose another with --mesh, such as --mesh=data=-1 for all "
            "devices"
        ) from error
    return mesh_unless_single_device(mesh)
