"""Finding a model by path, the folder of a run or a Hugging Face directory, and putting it on a
mesh, of several processes too.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig, to_dict
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer
from qwen3next_jax.interop.hf_config import read_hf_config
from qwen3next_jax.interop.huggingface import load_hf, stamp_hf
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.processes import distributed
from qwen3next_jax.processes.launch import Launch
from qwen3next_jax.runs.checkpoint import load_trained
from qwen3next_jax.runs.folder import config_of, read_config, read_run
from qwen3next_jax.sharding.mesh import check_divides, compute_mesh, make_mesh


class LoadedModel(NamedTuple):
    """tokenizer is None where a Hugging Face directory brings none; step is None there, too.

    mesh: on which the parameters lie, as `Qwen3Next.features` takes it: None for one device.
    identity: a text that names these very weights.
    """

    model: Qwen3Next
    tokenizer: Tokenizer | None
    step: int | None
    mesh: Mesh | None
    identity: str


def load_model(
    path: str | pathlib.Path,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    dtype: str | None = "float32",
    devices: Sequence[Any] | None = None,
) -> LoadedModel:
    """Loads a run's newest checkpoint (or the one after `step` steps), or the model in a Hugging
    Face directory.

    Args:
      mesh: the devices that share it; None: the mesh of the run, and for a Hugging Face
        directory all devices as `data`. Every process reads what its devices hold; several of
        them call this together.
      dtype: of a Hugging Face directory's parameters, as `load_hf` takes it; None: what its
        config.json says. A run's are float32.
      devices: those that the mesh takes; None for all that JAX finds.

    Raises:
      UserError: `path` is neither, or what is there is damaged, or the mesh does not fit the
      devices or the model.
    """
    folder = epath.Path(path)
    if (folder / "run.json").exists():
        record = read_run(folder)
        config = config_of(record, folder)
        places = _mesh(
            f"{path}: the mesh of its run does not fit here",
            config.model,
            mesh,
            config.parallel.mesh,
            devices,
        )
        model, config, step, identity = load_trained(folder, step, places, record)
        own = folder / "tokenizer"
        data = dataclasses.replace(config.data, tokenizer=str(own)) if own.exists() else config.data
        tokenizer = source_of(data).tokenizer_of(data, config.model.vocab_size)
        if tokenizer.fingerprint != record["tokenizer"]:
            raise UserError(
                f"{data.tokenizer}: not the tokenizer that {path} was trained with (its "
                "fingerprint differs from that in run.json): damaged, or another; restore it"
            )
        return LoadedModel(model, tokenizer, step, places, identity)
    if (folder / "config.json").exists():
        if step is not None:
            raise UserError(
                f"{path}: a Hugging Face directory holds one model, so --step={step} means "
                "nothing here"
            )
        tokenizer = folder / "tokenizer.json"
        config = read_hf_config(folder)
        places = _mesh(str(path), config, mesh, MeshConfig(), devices)
        identity = stamp_hf(folder)  # before they are read: if they change now, it is not theirs
        model = load_hf(folder, dtype or config.dtype, places)
        found = (
            load_tokenizer(str(tokenizer), model.config.vocab_size) if tokenizer.exists() else None
        )
        return LoadedModel(model, found, None, places, identity)
    reason = "no such folder" if not folder.exists() else "it has neither run.json nor config.json"
    raise UserError(f"{path}: neither the folder of a run nor a Hugging Face directory ({reason})")


@contextlib.contextmanager
def joined(launch: Launch | None, path: str | pathlib.Path) -> Iterator[None]:
    """Joins the other processes of a command that loads the model at `path`; the first of them
    alone prints.
    """
    folder = pathlib.Path(path)
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


def _mesh(
    where: str,
    model: ModelConfig,
    given: MeshConfig | None,
    otherwise: MeshConfig,
    devices: Sequence[Any] | None,
) -> Mesh | None:
    try:
        mesh = make_mesh(ParallelConfig(mesh=given or otherwise), devices)
        # Rows and tokens are filled up to what the axes divide; heads and widths are not.
        rows = mesh.shape["data"] * mesh.shape["expert"]
        check_divides(model, rows, 1024 * mesh.shape["context"], mesh, *split_sizes(model))
    except UserError as error:
        raise UserError(
            f"--mesh: {error}"
            if given
            else f"{where} ({error}); choose another with --mesh, such as --mesh=data=-1 for all "
            "devices there are"
        ) from error
    return compute_mesh(mesh)
