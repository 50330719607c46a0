"""A run's folder: its configuration, its checkpoints (Orbax, written in the background), and reading them back.

    WORKDIR/run.json              configuration and data fingerprint of the run, written once
    WORKDIR/checkpoints/STEP/     train state after STEP steps, sealed by a manifest of digests
    WORKDIR/damaged/              checkpoints that were found damaged on resume
"""

import json
import logging
import os
import pathlib
import sys
import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from qwen3next_jax.config import Config, from_dict, to_dict
from qwen3next_jax.errors import UserError
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.training import manifest
from qwen3next_jax.training.step import State, abstract_model, init_state

# Settings that may differ when a run goes on; any other difference would make it another run.
MAY_CHANGE = ("name", "train.steps", "train.log_every", "train.remat", "data.prepared_dir", "checkpoint", "eval", "parallel",
              "telemetry", "profile")

# Orbax reports every directory it touches at the level of a warning.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class Checkpoints:
    """The checkpoints of one run. Saving returns at once; leaving the `with` block waits for the last save.

    A checkpoint counts once it is sealed (see `manifest`): a damaged or unsealed one is passed over, and said to be.
    """

    def __init__(self, workdir: pathlib.Path, keep_last: int | None = None):
        """`keep_last` None opens them for reading."""
        self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._writing = keep_last is not None
        options = ocp.CheckpointManagerOptions(max_to_keep=keep_last, create=self._writing, read_only=not self._writing)
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._unsealed: int | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.wait()
        self._manager.close()

    def wait(self) -> None:
        """Returns once the last save is complete and sealed."""
        self._manager.wait_until_finished()
        self.seal_finished()

    def newest_good_step(self) -> int | None:
        """The newest step whose checkpoint is whole; newer damaged ones are reported on standard error and, when
        training goes on, moved to WORKDIR/damaged."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            damage = manifest.find_damage(self.directory / str(step))
            if damage is None:
                return step
            print(f"warning: {self.directory / str(step)} is passed over: {damage}", file=sys.stderr)
            if self._writing:
                self._move_aside(step)
        return None

    def save(self, step: int, state: State) -> None:
        if step in self._manager.all_steps():
            return
        self.wait()
        self._manager.save(step, args=ocp.args.StandardSave(with_text_keys(state)))
        self._unsealed = step

    def seal_finished(self) -> None:
        """Seals the last save if it has ended; costs nothing where there is none. Call it now and then."""
        if self._unsealed is not None and not self._manager.is_saving_in_progress():
            manifest.seal(self.directory / str(self._unsealed))
            self._unsealed = None

    def restore(self, step: int, abstract_state: State) -> State:
        """The state saved after `step` steps, in the structure, dtypes and shardings of `abstract_state`.

        Raises:
          UserError: there is no such checkpoint, it is damaged, or it belongs to another model.
        """
        where = self.directory / str(step)
        if step not in self._manager.all_steps():
            known = ", ".join(map(str, sorted(self._manager.all_steps()))) or "none"
            raise UserError(f"{where}: no such checkpoint; saved steps: {known}")
        if damage := manifest.find_damage(where):
            raise UserError(f"{where}: damaged: {damage}")
        try:
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(with_text_keys(abstract_state)))
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(f"{where}: not a checkpoint of this model ({reason})") from error
        return with_keys_of(restored, abstract_state)

    def _move_aside(self, step: int) -> None:
        target = self.directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        os.rename(self.directory / str(step), target)
        self._manager.reload()


def with_text_keys(state: Any) -> Any:
    """nnx numbers the entries of a List with ints; Orbax keeps only text keys, so both sides of it see text."""
    if type(state) is dict:
        return {str(key): with_text_keys(value) for key, value in state.items()}
    if isinstance(state, tuple):
        values = [with_text_keys(value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return state


def with_keys_of(restored: Any, pattern: Any) -> Any:
    """Undoes `with_text_keys`, key by key: as text "10" sorts before "2", so the order of leaves is not the same."""
    if type(pattern) is dict:
        return {key: with_keys_of(restored[str(key)], value) for key, value in pattern.items()}
    if isinstance(pattern, tuple):
        values = [with_keys_of(a, b) for a, b in zip(restored, pattern, strict=True)]
        return type(pattern)(*values) if hasattr(pattern, "_fields") else tuple(values)
    return restored


def abstract_state(config: Config) -> State:
    """Shapes and dtypes of the train state, placed on the default device."""
    _, params = abstract_model(config)
    shapes = jax.eval_shape(lambda: init_state(config, jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), params)))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)


def open_run(workdir: pathlib.Path, config: Config, data_fingerprint: str) -> None:
    """Starts the folder of a run, or checks that the one there is of this very run.

    Raises:
      UserError: the folder holds a run with another configuration or other data (the first differing setting is named).
    """
    record = {"config": json.loads(json.dumps(to_dict(config))), "data_fingerprint": data_fingerprint}
    path = workdir / "run.json"
    if not path.exists():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            _write_json(path, record)
        except OSError as error:
            raise UserError(f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder") from error
        return
    before = _read_run(workdir)
    for name, old, new in _differences(before["config"], record["config"]):
        if not any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_CHANGE):
            raise UserError(f"{workdir} holds a run with {name} = {old!r}, not {new!r}: give another --workdir, or the old value")
    if before["data_fingerprint"] != data_fingerprint:
        raise UserError(f"{workdir} holds a run on other data (fingerprint {before['data_fingerprint'][:12]}, now "
                        f"{data_fingerprint[:12]}): give another --workdir, or the old files")
    _write_json(path, record)


def read_config(workdir: pathlib.Path) -> Config:
    """The configuration of the run in `workdir`."""
    return from_dict(Config, _read_run(workdir)["config"], f"{workdir / 'run.json'}: config")


def load_trained(workdir: pathlib.Path, step: int | None = None) -> tuple[Qwen3Next, Config, int]:
    """(model, configuration, step) of a run's newest checkpoint, or of the one after `step` steps."""
    config = read_config(workdir)
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_good_step() if step is None else step
        if step is None:
            raise UserError(f"{workdir}: no whole checkpoint; let the run reach its first one (checkpoint.every = {config.checkpoint.every})")
        params = checkpoints.restore(step, abstract_state(config))["params"]
    graphdef, _ = abstract_model(config)
    # Restored arrays are committed to their device; committed and uncommitted inputs are different programs to jit.
    return nnx.merge(graphdef, jax.device_put(jax.device_get(params))), config, step


def _read_run(workdir: pathlib.Path) -> dict[str, Any]:
    path = workdir / "run.json"
    if not path.exists():
        raise UserError(f"{workdir}: not the folder of a run (it has no run.json)")
    try:
        record = json.loads(path.read_text())
        record["config"], record["data_fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged or foreign (expected JSON with config and data_fingerprint)") from error
    return record


def _write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2))
    os.replace(temporary, path)


def _differences(old: Any, new: Any, name: str = ""):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new
