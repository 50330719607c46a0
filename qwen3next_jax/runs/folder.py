"""What a run is: `run.json`, written before its first step and compared at every resume.

    WORKDIR/run.json       configuration, data, tokenizer, code, processes, devices, parent, and
    every allowed change since WORKDIR/tokenizer/     a copy of the tokenizer, if it came from a
    file
    WORKDIR/before-TIME/   what `--restart` moved out of the way; before-TIME.partial/ while it
    moves it

A folder belongs to a run from its first checkpoint or its first event about a step on. Before
that whatever its run.json says has trained nothing, and the folder is as good as new. After that
nothing of it may be missing: what a run wrote is never taken for another's, nor written over.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import UserError, require, warn
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.common.version import code_version
from qwen3next_jax.config import Config, from_dict, to_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.training.stages import (
    STAGE_SETTINGS,
    ResolvedStage,
    recorded_cursors,
    resolve_stages,
)

# What may differ when a run goes on, and why; it is logged. Any other difference would make it
# another run.
MAY_CHANGE = {
    "config.name": "names nothing inside the run",
    "config.data.path": (
        "the files may have moved: their content is checked by the data's fingerprint"
    ),
    "config.data.tokenizer": "its content is checked by its own fingerprint",
    "config.data.prepared_dir": "the rows in it are checked by the data's fingerprint",
    "config.train.steps": (
        "a longer or shorter run; the learning-rate schedule changes from there on"
    ),
    "config.train.stages": (
        "those to come; of one that has begun only the number of its steps, "
        "to no less than are taken"
    ),
    "config.train.log_every": "what is written down",
    "config.train.hooks": "what a run does besides its steps",
    "config.train.on_hook_error": "what it does when that fails",
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
# Of a process that has taken no step, or whose steps changed nothing.
_UNTRAINED = {
    "start",
    "stop",
    "stage",
    "changed",
    "damaged",
    "save_failed",
    "skip",
    "spike",
    "profile",
}
_WRITTEN = (
    "run.json",
    "metrics.jsonl",
    "checkpoints",
    "damaged",
    "dumps",
    "eval",
    "profile",
    "report.html",
    "tensorboard",
    "tokenizer",
    "wandb_id",
)
_RESTART = "start anew with --restart, which keeps what is there in WORKDIR/before-TIME"
_PARTIAL = ".partial"  # ends the name of before-TIME until all is in it
_MOVE = re.compile(r"before-\d{8}-\d{6}(-\d+)?\.partial")
_FORMAT = 2  # of run.json; 1 had no such field, and could stand in a folder without metrics.jsonl


class RunLock:
    """Sees to it that one run at a time writes to a folder. The system lets go of it when the
    process ends, however.
    """

    def __init__(self, workdir: pathlib.Path):
        self._workdir, self._file = workdir, None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._file is not None:
            self._file.close()

    def held(self, work: Callable[[], Any]) -> Any:
        """`work()` with the lock, which is then kept until the `with` block's end, or let go if
        `work` raises.

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
            raise unwritable(self._workdir, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{self._workdir}: another process is training in it: wait for it, end it, or "
                "give another --workdir"
            ) from error
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


def open_run(
    workdir: pathlib.Path,
    config: Config,
    data_fingerprints: list[str],
    tokenizer_fingerprint: str,
    parent: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Change]]:
    """Whether this run may start, or go on, in `workdir`; writes nothing. → (what run.json is to
    hold, or {} where it stays as it is; the allowed changes since the run before).

    Args:
      data_fingerprints: of every stage's data.
      parent: of the run that it begins with, where it begins with one.
      source: what `origin.find_source` says of a new run.

    Raises:
      UserError: the folder holds a run with another configuration, data or tokenizer (the first
        difference is named), or one of which a part is missing.
    """
    import jax

    from qwen3next_jax.model.block import versions

    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    # see `stages.DataCursor`
    data = [{"fingerprint": fingerprint} for fingerprint in data_fingerprints]
    now = {
        "format": _FORMAT,
        "config": _plain(config),
        "data": data,
        "tokenizer": tokenizer_fingerprint,
        "code": code_version(),
        "versions": versions(config.model),
        "processes": jax.process_count(),
        "devices": devices,
    } | ({"parent": parent} if parent else {})
    before = trained_run(workdir)
    if before is None:
        return now | (source or {}) | {"id": uuid.uuid4().hex, "changes": []}, []
    changes = _checked_changes(workdir, before, now)
    if not (workdir / "metrics.jsonl").exists():
        warn(
            f"{workdir / 'metrics.jsonl'} is missing: a new one begins at the step from which the "
            "run goes on"
        )
    if not changes and "format" in before:
        return {}, []
    # the parent is not looked at again
    kept = {name: before[name] for name in ("parent", "source", "id") if name in before}
    return now | kept | {
        "changes": before.get("changes", []) + [[*change] for change in changes]
    }, changes


def check_settings(workdir: pathlib.Path, config: Config) -> None:
    """Raises the UserError that `open_run` would raise for `config`, as far as that is known
    before data are opened.
    """
    if (before := trained_run(workdir)) is not None:
        _checked_changes(workdir, before, {"config": _plain(config)})


def is_trained(workdir: pathlib.Path) -> bool:
    """Whether a run has taken steps in the folder: it has a checkpoint, or an event about one of
    its steps.
    """
    return bool(saved_steps(workdir)) or any(
        event["event"] not in _UNTRAINED for _, event in iterate_events(workdir / "metrics.jsonl")
    )


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Steps that have a folder in `workdir`/checkpoints, ascending; whether they are whole is
    another question.
    """
    folder = workdir / "checkpoints"
    return (
        sorted(int(p.name) for p in folder.iterdir() if names_step(p.name))
        if folder.is_dir()
        else []
    )


def names_step(name: str) -> bool:
    """Whether a folder of this name holds what was saved after a step: digits, as Python writes
    a number (neither "007" nor "²").
    """
    return re.fullmatch("0|[1-9][0-9]{0,17}", name) is not None


def check_nothing_lost(workdir: pathlib.Path) -> None:
    """Raises UserError where a run without a whole checkpoint has had one: to begin again would
    write over its record.
    """
    sealed = [
        step
        for step in saved_steps(workdir)
        if (workdir / "checkpoints" / str(step) / "manifest.json").exists()
    ]
    told = [
        event["step"]
        for _, event in iterate_events(workdir / "metrics.jsonl")
        if event["event"] == "checkpoint"
    ]
    if sealed or told:
        what = "is damaged" if sealed else "is gone"
        raise UserError(
            f"{workdir}: the run has been saved, last after step {max(sealed + told)}, but every "
            f"checkpoint {what}: put "
            f"{workdir / 'checkpoints'} back (is a disk not mounted?), give another --workdir, or "
            f"{_RESTART}"
        )


def trained_run(workdir: pathlib.Path) -> dict[str, Any] | None:
    """run.json of a folder in which a run has taken steps, None of any other.

    Raises:
      UserError: it, or the run's other record, is missing.
    """
    record = (workdir / "run.json").exists()
    if not is_trained(workdir):
        # written before run.json
        started = any(
            event["event"] == "start" for _, event in iterate_events(workdir / "metrics.jsonl")
        )
        if record and not started and read_run(workdir).get("format"):
            raise UserError(
                f"{workdir}: it holds the run.json of a run, but neither its checkpoints nor its "
                f"metrics.jsonl: put them back, give another --workdir, or {_RESTART}"
            )
        return None
    if not record:
        raise UserError(
            f"{workdir}: it holds checkpoints or the record of a run, but not the run.json that "
            "says of which model, "
            f"data and tokenizer: put it back, give another --workdir, or {_RESTART}"
        )
    return read_run(workdir)


def _checked_changes(
    workdir: pathlib.Path, before: dict[str, Any], now: dict[str, Any]
) -> list[Change]:
    where = f"{workdir / 'run.json'}: config"
    check_trusted(before["config"], where)
    # Settings that the run's code did not have yet stand at their defaults, which keep what was
    # computed before them.
    trained, step = (
        from_dict(Config, before["config"], where),
        max(saved_steps(workdir), default=0),
    )
    before = before | {"config": _plain(trained)}
    if "data" in now:  # of the stages that have begun
        cursors = recorded_cursors(before, trained.train.batch_size)
        pairs = [
            (old.fingerprint, new["fingerprint"])
            for stage, old, new in zip(resolve_stages(trained), cursors, now["data"])
            if old and stage.steps_before < max(step, 1)
        ]
        old_data, new_data = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        before, now = before | {"data": old_data}, now | {"data": new_data}
    old, new = (
        flatten(_by_number({name: record.get(name) for name in now})) for record in (before, now)
    )
    changes = [
        Change(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        # `versions.check_versions` compares the versions
        and name != "format"
        and not name.startswith("versions.")
    ]
    # which changes the data's fingerprint, too
    changes.sort(key=lambda change: change.name != "tokenizer")
    for change in changes:
        if change.name in ("data", "tokenizer"):
            raise UserError(
                f"{workdir} holds a run on other {'data' if change.name == 'data' else 'tokens'} "
                f"({change.name} "
                f"fingerprint {str(change.old)[:12]}, now {change.new[:12]}): give another "
                f"--workdir, or the old {'files' if change.name == 'data' else 'tokenizer'}"
            )
        if not may_change(change.name):
            name = change.name.removeprefix("config.")
            raise UserError(
                f"{workdir} holds a run with {name} = {change.old!r}, not {change.new!r}: give "
                "another --workdir, or the old value"
            )
    now_stages = resolve_stages(from_dict(Config, now["config"]))
    _check_stages(workdir, resolve_stages(trained), now_stages, step)
    return changes


def _by_number(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with the stages' settings, where they are given, as leaves of their own."""
    train = record["config"]["train"]
    stages = {
        str(i): {name: value for name, value in stage.items() if value is not None}
        for i, stage in enumerate(train["stages"])
    }
    return record | {"config": record["config"] | {"train": train | {"stages": stages}}}


def _check_stages(
    workdir: pathlib.Path, old: Sequence[ResolvedStage], new: Sequence[ResolvedStage], step: int
) -> None:
    """Raises UserError where a stage that has begun by `step` is another one now. `old` are the
    stages of the run as it was trained.
    """
    for i, stage in enumerate(old):
        if stage.steps_before >= max(step, 1):
            return
        where = (
            f"{workdir}: {f'stage {stage.name}' if stage.name else 'its only stage'} has taken "
            f"{min(step, stage.last_step) - stage.steps_before} steps"
        )
        if i == len(new):
            raise UserError(
                f"{where}, but train.stages ends before it: only what comes after it may change"
            )
        over = i + 1 < len(old) and stage.last_step < step
        ends = new[i].last_step
        if over and ends != stage.last_step:
            raise UserError(
                f"{where}, not {new[i].steps}: train.stages[{i}].steps = {stage.steps} stays"
            )
        if not over and i + 1 < len(new) and ends < step:
            raise UserError(f"{where}, not {new[i].steps}: give it as many at least")
        for name, was, becomes in zip(
            ("schedule_start", *itertools.chain(*STAGE_SETTINGS.values())),
            _settings(stage),
            _settings(new[i]),
        ):
            if was != becomes and f"config.train.{name}" not in MAY_CHANGE:
                raise UserError(
                    f"{where} with {name} = {was!r}, not {becomes!r}: give another --workdir, or "
                    "the old value"
                )


def _settings(stage: ResolvedStage) -> list[Any]:
    return [
        stage.schedule_start,
        *(
            getattr(getattr(stage, group), name)
            for group, names in STAGE_SETTINGS.items()
            for name in names
        ),
    ]


def move_aside(workdir: pathlib.Path) -> None:
    """Moves all that a run wrote into `workdir`/before-TIME. A process that is killed meanwhile
    leaves before-TIME.partial, and the next call moves the rest (see `restart_has_begun`).

    Raises:
      UserError: the folder cannot be written to, or a file would take the place of another one.
    """
    partial = _partial_move(workdir)
    if partial is None and not written(workdir):
        return
    try:
        if partial is None:
            stamp = time.strftime("before-%Y%m%d-%H%M%S")
            names = (f"{stamp}-{n}" if n else stamp for n in itertools.count())
            name = next(name for name in names if not os.path.lexists(workdir / name))
            partial = workdir / (name + _PARTIAL)
            partial.mkdir()
            fsync(workdir)
        for name in written(workdir):
            require(
                not os.path.lexists(partial / name),
                f"{workdir}: {name} is there, and in {partial.name} as well, where a restart moves "
                f"it: rename {partial.name}, or give another --workdir",
            )
            (workdir / name).rename(partial / name)
        fsync(partial)
        partial.rename(workdir / partial.name.removesuffix(_PARTIAL))
        fsync(workdir)
    except OSError as error:
        raise unwritable(workdir, error) from error


def restart_has_begun(workdir: pathlib.Path) -> bool:
    """Whether a process was killed while it moved a run aside. What is left in the folder belongs
    to that run: the next start moves it as well, whether it is told to restart or not.
    """
    return _partial_move(workdir) is not None


def _partial_move(workdir: pathlib.Path) -> pathlib.Path | None:
    """The folder of a move that was cut short; another program's folder is none."""
    found = [path for path in workdir.glob(f"before-*{_PARTIAL}") if _MOVE.fullmatch(path.name)]
    return min(found, default=None)


def written(workdir: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Name of each file or folder of a run in `workdir` → its device and inode, which stay the
    same when it is moved.
    """
    found = {}
    for name in _WRITTEN:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            stat = (workdir / name).lstat()
            found[name] = (stat.st_dev, stat.st_ino)
    return found


def read_config(workdir: pathlib.Path) -> Config:
    """The configuration of the run in `workdir`."""
    return config_of(read_run(workdir), workdir)


def config_of(record: dict[str, Any], workdir: pathlib.Path) -> Config:
    """The configuration in `record`, the run.json of `workdir`."""
    values, where = record["config"], f"{workdir / 'run.json'}: config"
    check_trusted(values, where)
    return from_dict(Config, values, where)


def read_run(workdir: pathlib.Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = workdir / "run.json"
    if not path.exists():
        raise UserError(f"{workdir}: not the folder of a run (it has no run.json)")
    try:
        record = json_files.read(path)
        intact = record.pop("digest") == digests.sha256_json(record)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}): restore it, or give another --workdir"
        ) from error
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise UserError(
            f"{path}: damaged, or changed by hand: what it says of the run cannot be relied on; "
            "restore it, or give another --workdir"
        )
    return record


def run_id(workdir: pathlib.Path) -> str | None:
    """The id with which run.json was made; "" where older code made it, None where there is none
    to read.
    """
    try:
        return read_run(workdir).get("id", "")
    except UserError:
        return None


def write_run_record(
    workdir: pathlib.Path, description: dict[str, Any], tokenizer: Any, new: bool
) -> None:
    """Writes down what the run is, before its first step: `description` as run.json (if it is
    not empty), and a copy of a tokenizer that came from a file, with which the run can be used
    wherever it or the file goes. `new`: one that is there is of a start that came to nothing.
    """
    from qwen3next_jax.data.tokens import HuggingFaceTokenizer

    if description:
        write_run(workdir, description)
    if new:
        shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
    if isinstance(tokenizer, HuggingFaceTokenizer) and not (workdir / "tokenizer").exists():
        partial = workdir / "tokenizer.partial"
        partial.mkdir(exist_ok=True)
        tokenizer.save(partial)
        partial.rename(workdir / "tokenizer")


def write_run(workdir: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes run.json in one piece, with a digest of its content.

    Raises:
      UserError: it cannot be written.
    """
    path = workdir / "run.json"
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w") as file:
            json.dump(record | {"digest": digests.sha256_json(record)}, file, indent=2)
            file.flush()
            # else a power failure may leave an empty one, and the run could not go on
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(workdir, error) from error


def unwritable(workdir: pathlib.Path, error: OSError) -> UserError:
    """What to raise where the run's folder cannot be written to."""
    return UserError(
        f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder"
    )


def _plain(config: Config) -> dict[str, Any]:
    plain = json.loads(json.dumps(to_dict(config)))
    plain["model"]["layer_types"] = list(config.model.pattern)  # however the file spells it
    return plain
