"""May the default take a kernel on a chip of which few were seen?

Before the first use each kind of call is tried once on the user's own device, on a tiny input,
against the form in XLA alone; what came out is remembered by chip, JAX and the kernels' sources.
That it failed is not: the device may have been full. Where several processes run one program, a
kernel that one of them refuses is refused by all.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np

RIGHT, FAILED = "right", "failed where it was tried on this GPU"
FOLDER = pathlib.Path(os.path.expanduser("~/.cache/qwen3next_jax/kernels"))
AVOID = f"a file {FOLDER}/avoid avoids all such kernels"
# seconds for the other processes to come to their trial of the same kind, and to compile it
PATIENCE = 1800
_known: dict = {}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One kind of call, and how to compare a tiny one with the form in XLA alone.

    Args:
      name: of the operator. avoid: what to write to have XLA's form.
      kind: all that decides which program runs: widths, settings.
      modules: names of those whose sources the kernels are; loaded where there is a trial, since
      a library's may not be there. worst: runs both; the output or gradient in which they differ
      most, and its relative L2 difference (`worst_of`). bar: how large that may be.
      ran: on what hardware it ran, by itself and in training steps (docs/gpu.md says which form
      of it); empty: in no whole step.
    """

    name: str
    avoid: str
    kind: tuple
    modules: tuple[str, ...]
    worst: Callable[[], tuple[str, float]]
    bar: float
    ran: str = "an H200, jax 0.11.2"


def takes(trial: Trial, refusal: str = "") -> bool:
    """Whether the default runs the kernels; says once what was decided and why. `refusal`: what
    is known without a trial.
    """
    why = refusal or verdict(jax.local_devices()[0], trial)
    ran = f"which ran on {trial.ran}" if trial.ran else "which never ran a whole step"
    say(
        f"{trial.name}: XLA's form, no kernel: the call {why}"
        if why
        else f"{trial.name}: the kernels for Hopper GPUs, {ran}: {trial.avoid}"
    )
    return not why


def hopper_refusal() -> str:
    """Why kernels for Hopper GPUs do not run in this process, or in another of the run; empty
    where they do, or are interpreted.
    """
    platform = jax.default_backend()
    chip = (
        "9.0"
        if platform == "cpu"
        else getattr(jax.local_devices()[0], "compute_capability", "unknown")
    )
    why = (
        "" if chip == "9.0" else f"on a GPU of compute capability {chip}: expected 9.0 (H100, H200)"
    )
    if platform not in ("gpu", "cpu"):
        why = f"on {platform}: expected a GPU, or a CPU to interpret it"
    return why if jax.process_count() == 1 else _agreed("chip", lambda: why)


@functools.cache
def say(line: str):
    print(line, file=sys.stderr, flush=True)


def worst_of(names, got, want) -> tuple[str, float]:
    """The array in which two forms' results differ most, and its relative L2 difference."""
    apart = {}
    for name, a, b in zip(names, got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32).reshape(np.shape(a))
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        apart[name] = difference if np.isfinite(difference) else np.inf
    return max(apart.items(), key=lambda item: item[1])


def verdict(device, trial: Trial, folder: pathlib.Path = FOLDER) -> str:
    """Empty where the kernels gave what the XLA form gives, in all processes; else what they
    did.
    """
    return _agreed((trial.name, trial.kind), lambda: _remembered(device, trial, folder))


def _agreed(call, find: Callable[[], str]) -> str:
    """What `find()` gives, once for each call, or where it is empty what it gives in another
    process.
    """
    if call not in _known:
        _known[call] = _of_all(hashlib.sha256(repr(call).encode()).hexdigest()[:16], find())
    return _known[call]


def _of_all(key: str, found: str) -> str:
    if jax.process_count() == 1:
        return found
    # the store that the processes met in, which has no public name
    from jax._src import distributed

    said, me = distributed.global_state.client, jax.process_index()
    said.key_value_set(
        f"qwen3next_jax/kernel_trial/{key}/{me}", found or RIGHT, allow_overwrite=True
    )
    for process in range(jax.process_count()):
        try:
            other = said.blocking_key_value_get(
                f"qwen3next_jax/kernel_trial/{key}/{process}", 1000 * PATIENCE
            )
        except jax.errors.JaxRuntimeError:
            other = f"has no verdict in {PATIENCE} s"
        if other != RIGHT:
            return found or f"{other} (process {process})"
    return ""


def _remembered(device, trial: Trial, folder: pathlib.Path) -> str:
    if (folder / "avoid").exists():
        return f"may take none, by {folder}/avoid"
    sources = b"".join(
        pathlib.Path(importlib.import_module(name).__file__).read_bytes() for name in trial.modules
    )
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    kind = device.device_kind, versions, hashlib.sha256(sources).hexdigest(), trial.name, trial.kind
    file = folder / (hashlib.sha256(repr(kind).encode()).hexdigest()[:16] + ".txt")
    try:
        if found := file.read_text():  # empty: another process is writing it
            return found.removeprefix(RIGHT)
    except OSError:
        pass
    found = []
    # the caller may be tracing
    thread = threading.Thread(target=lambda: found.append(_try(device, trial)))
    thread.start()
    thread.join()
    if not found[0].startswith(FAILED):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(found[0] or RIGHT)
        except OSError:  # then the next process tries again
            pass
    return found[0]


def _try(device, trial: Trial) -> str:
    try:
        with jax.default_device(device):
            name, apart = trial.worst()
    except Exception as error:
        return f"{FAILED} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if apart <= trial.bar:
        return ""
    return (
        f"gave another {name} than XLA where it was tried on this GPU ({apart:.2g} apart, at most "
        f"{trial.bar})"
    )
