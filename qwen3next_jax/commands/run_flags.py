"""Defines and parses the flags that select a run, a checkpoint, processes and devices: `--workdir`,
`--step`, `--ema`, `--dtype`, `--mesh`, `--coordinator`, `--processes`, `--process`.
"""

import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from absl import flags

from qwen3next_jax.common.errors import UserError, did_you_mean, require_path
from qwen3next_jax.common.installation import has_tpu_chips
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.config import MESH_AXES, MeshConfig
from qwen3next_jax.processes.launch import Launch, find_launch


def define_workdir_flag(default_from_config: bool) -> Callable[..., pathlib.Path]:
    """Defines `--workdir`.

    Returns:
      A function (name) that returns the path. If the flag is not given, the path is runs/NAME,
      where `name` is the name of the configuration.
    """
    flags.DEFINE_string(
        "workdir",
        None,
        "folder of the run"
        + (" (default: runs/<name of the config>)" if default_from_config else ""),
    )
    return workdir_flag_or_default


def workdir_flag_or_default(name: str | None = None) -> pathlib.Path | BucketPath:
    """Returns the value of `--workdir`, or runs/`name` if the flag is not given."""
    if (path := flags.FLAGS["workdir"].value) is not None:
        require_path(f"--workdir={path}", path)
        return to_path(path, "--workdir=")
    if name is None:
        raise UserError(
            "--workdir is missing: expected the folder of a run, such as --workdir=runs/tiny"
        )
    require_path(f"name = {name[:120]!r}", name)
    return pathlib.Path("runs") / name


def define_launch_flags() -> Callable[[], Launch | None]:
    """Defines `--coordinator`, `--processes` and `--process`.

    Returns:
      A function that returns this process's `Launch`, from the flags or from the environment
      variables of SLURM, Open MPI or a TPU slice; None if the run has a single process.
    """
    coordinator = flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0, where the processes of a run meet; SLURM, "
        "Open MPI and TPU slices set it",
    )
    processes = flags.DEFINE_integer(
        "processes", None, "number of processes of the run", lower_bound=1
    )
    process = flags.DEFINE_integer("process", None, "number of this process, from 0", lower_bound=0)

    def get() -> Launch | None:
        return find_launch(
            os.environ, coordinator.value, processes.value, process.value, has_tpu_chips()
        )

    return get


class LoadingFlags(NamedTuple):
    """The values of the flags that `define_loading_flags` defines, with which `trained.load` loads
    a model. A field other than `ema` is None if its flag is not given.
    """

    step: int | Literal["best"] | None
    mesh: MeshConfig | None
    dtype: str | None
    launch: Launch | None
    ema: bool


@functools.cache  # several commands in one process may define these flags
def define_loading_flags() -> Callable[[], LoadingFlags]:
    """Defines `--step`, `--ema`, `--mesh`, `--dtype` and the flags of `define_launch_flags`.
    Returns a function that returns the values of the flags.
    """
    step = flags.DEFINE_string(
        "step",
        None,
        "of a run: the checkpoint after so many steps, or best: the one with the lowest held-out "
        "loss (default: the newest)",
    )
    ema = flags.DEFINE_bool(
        "ema", False, "of a run: the moving average of its parameters (train.ema), not the newest"
    )
    mesh = define_mesh_flag()
    dtype = flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "of a Hugging Face directory's weights, read or written (norms, "
        "A_log, dt_bias, routers, shared experts' gates: always float32)",
    )
    get_launch = define_launch_flags()

    def get() -> LoadingFlags:
        sizes = parse_mesh_flag(mesh.value)
        return LoadingFlags(
            parse_step_flag(step.value),
            MeshConfig(**sizes) if sizes else None,
            dtype.value,
            get_launch(),
            ema.value,
        )

    return get


def parse_step_flag(text: str | None) -> int | Literal["best"] | None:
    """Returns the value of `--step`: a number of steps, "best", or None if the flag is not given.

    Raises:
      UserError: `text` is neither a number of steps nor "best".
    """
    if text is None or text == "best":
        return text
    if not re.fullmatch("[0-9]{1,18}", text):
        raise UserError(f"--step={text}: expected a number of steps, such as 500, or best")
    return int(text)


@functools.cache
def define_mesh_flag() -> flags.FlagHolder:
    """Defines `--mesh`, whose text `parse_mesh_flag` reads."""
    return flags.DEFINE_string(
        "mesh",
        None,
        "devices along each axis, such as data=2,tensor=4 (default: as the configuration or the "
        "run says; of a Hugging Face directory all devices as data; of a search any)",
    )


def parse_mesh_flag(text: str | None) -> dict[str, int]:
    """Returns axis → size, from the text of `--mesh`, such as "data=64,expert=8"; {} for None.

    Raises:
      UserError: an axis does not exist or is given twice, or a size is not a number.
    """
    sizes: dict[str, int] = {}
    for part in [] if text is None else text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or not re.fullmatch("-?[0-9]{1,9}", size):
            raise UserError(
                f"--mesh={text}: {part!r} is not AXIS=SIZE with one of "
                f"{', '.join(MESH_AXES)}{did_you_mean(axis, MESH_AXES)}"
            )
        if axis in sizes:
            raise UserError(f"--mesh={text}: {axis} is given twice")
        sizes[axis] = int(size)
    return sizes
