"""What a run is: `run.json`, written at its start and compared at every resume.

    WORKDIR/run.json    configuration, data, tokenizer, code, processes, devices, and every allowed change since
"""

import fcntl
import importlib.metadata
import json
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from qwen3next_jax import digests, jsonfile
from qwen3next_jax.config import Config, from_dict, to_dict
from qwen3next_jax.errors import UserError
from qwen3next_jax.trees import flat

# What may differ when a run goes on, and why; it is logged. Any other difference would make it another run.
MAY_CHANGE = {
    "config.name": "names nothing inside the run",
    "config.data.prepared_dir": "the rows in it are checked by the data's fingerprint",
    "config.train.steps": "a longer or shorter run; the learning-rate schedule changes from there on",
    "config.train.log_every": "what is written down",
    "config.train.remat": "memory against time; the same gradients up to rounding",
    "config.train.step_timeout": "the watchdog",
    "config.train.compile_timeout": "the watchdog",
    "config.guards.on_spike": "what is done about spikes from there on",
    "config.guards.spike_z": "what counts as a spike from there on",
    "config.guards.max_skips": "when a run is given up",
    "config.parallel": "where arrays lie; the same values up to the order of sums",
    "config.telemetry": "what is shown, and where",
    "config.profile": "what is traced",
    "config.checkpoint": "when is saved, and what is kept",
    "config.eval": "what is measured on the way",
    "code": "other versions may round differently",
    "processes": "the order of the data does not depend on it",
    "devices": "the same values up to the order of sums",
}


class RunLock:
    """Sees to it that one run at a time writes to a folder. The system lets go of it when the process ends, however."""

    def __init__(self, workdir: pathlib.Path):
        self._workdir, self._file = workdir, None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._file is not None:
            self._file.close()

    def held(self, work: Callable[[], Any]) -> Any:
        """`work()` with the lock, which is then kept until the `with` block's end, or let go if `work` raises.

        Raises:
          UserError: another process holds it, or the folder cannot be written to.
        """
        self._hold()
        try:
            return work()
        except BaseException:
            self._file.close()
            raise

    def _hold(self) -> None:
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            self._file = (self._workdir / "lock").open("a")
        except OSError as error:
            raise _unwritable(self._workdir, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self._workdir}: another process is training in it: wait for it, end it, or give another "
                            "--workdir") from error
        except OSError:
            pass  # a file system without locks


class Change(NamedTuple):
    """A difference between the run as it was recorded and as it goes on."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} → {self.new!r}"


def may_change(name: str) -> bool:
    """Whether the run may go on with another value of `name` ("config.train.steps", "code", …)."""
    return any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_CHANGE)


def open_run(workdir: pathlib.Path, config: Config, data_fingerprint: str, tokenizer_fingerprint: str) -> list[Change]:
    """Starts the folder of a run, or checks that the one there is of this very run. → the allowed changes since.

    Raises:
      UserError: the folder holds a run with another configuration, data or tokenizer (the first difference is named).
    """
    now = {"config": _plain(config), "data": data_fingerprint, "tokenizer": tokenizer_fingerprint,
           "code": code_version(), "processes": jax.process_count(), "devices": _devices()}
    if not (workdir / "run.json").exists():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            write_run(workdir, now | {"changes": []})
        except OSError as error:
            raise _unwritable(workdir, error) from error
        return []
    before = read_run(workdir)
    # Settings that the run's code did not have yet stand at their defaults, which keep what was computed before them.
    before["config"] = _plain(from_dict(Config, before["config"], f"{workdir / 'run.json'}: config"))
    old, new = flat({name: before.get(name) for name in now}), flat(now)
    changes = [Change(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    changes.sort(key=lambda change: change.name != "tokenizer")  # which changes the data's fingerprint, too
    for change in changes:
        if change.name in ("data", "tokenizer"):
            raise UserError(f"{workdir} holds a run on other {'data' if change.name == 'data' else 'tokens'} ({change.name} "
                            f"fingerprint {str(change.old)[:12]}, now {change.new[:12]}): give another --workdir, or the old "
                            f"{'files' if change.name == 'data' else 'tokenizer'}")
        if not may_change(change.name):
            name = change.name.removeprefix("config.")
            raise UserError(f"{workdir} holds a run with {name} = {change.old!r}, not {change.new!r}: give another --workdir, "
                            "or the old value")
    if changes:
        try:
            write_run(workdir, now | {"changes": before.get("changes", []) + [[*change] for change in changes]})
        except OSError as error:
            raise _unwritable(workdir, error) from error
    return changes


def read_config(workdir: pathlib.Path) -> Config:
    """The configuration of the run in `workdir`."""
    return from_dict(Config, read_run(workdir)["config"], f"{workdir / 'run.json'}: config")


def read_run(workdir: pathlib.Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = workdir / "run.json"
    if not path.exists():
        raise UserError(f"{workdir}: not the folder of a run (it has no run.json)")
    try:
        record = jsonfile.read(path)
        intact = record.pop("digest") == digests.of_json(record)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): restore it, or give another --workdir") from error
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise UserError(f"{path}: damaged, or changed by hand: what it says of the run cannot be relied on; restore it, or give "
                        "another --workdir")
    return record


def write_run(workdir: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes run.json in one piece, with a digest of its content."""
    path = workdir / "run.json"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(record | {"digest": digests.of_json(record)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())  # else a power failure may leave an empty one, and the run could not go on
    os.replace(temporary, path)


def code_commit() -> str | None:
    """The commit of the checkout that the package runs from; None for an installed package."""
    return _git("rev-parse", "HEAD")


def code_version() -> str:
    """The first digits of that commit ("+": with changes), else the version of the package."""
    if commit := code_commit():
        return commit[:12] + ("" if _git("status", "--porcelain", "--untracked-files=no", "--", "qwen3next_jax") == "" else "+")
    try:
        return importlib.metadata.version("qwen3next-jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _unwritable(workdir: pathlib.Path, error: OSError) -> UserError:
    return UserError(f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder")


def _plain(config: Config) -> dict[str, Any]:
    plain = json.loads(json.dumps(to_dict(config)))
    plain["model"]["layer_types"] = list(config.model.pattern)  # however the file spells it
    return plain


def _git(*command: str) -> str | None:
    """What git says of the checkout that the package runs from; None where there is none, no git, or none that trusts it."""
    root = pathlib.Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _devices() -> str:
    return f"{jax.device_count()} × {jax.devices()[0].device_kind}"
