"""Manages the folder of a run: `run.json`, which is written before the first step and compared at
every resume; the lock of the folder; and `--restart`.

    WORKDIR/run.json       configuration, data, tokenizer, code, processes, devices, parent, and
                           every allowed change since the first start
    WORKDIR/tokenizer/     a copy of the tokenizer, if it came from a file
    WORKDIR/before-TIME/   the files that `--restart` moved; before-TIME.partial/ during the move

A folder belongs to a run once it has a checkpoint or an event about a step. Until then a new run
may replace the run.json in it. From then on a process can train in the folder only if it has the
run's settings (apart from allowed changes), data and tokenizer, and none of the run's records is
missing. So no run overwrites the files of another.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import (
    UserError,
    check_format,
    require,
    require_path,
    similar_folder,
    warn,
)
from qwen3next_jax.common.events import has_events_file, iterate_events
from qwen3next_jax.common.storage import BucketPath, StoreError
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

# The settings that may differ at a resume: a prefix of a key in run.json → the reason. The run logs
# these changes. Any other difference is an error.
MAY_CHANGE = {
    "config.name": "it is only a label",
    "config.data.path": (
        "the files may have moved: their content is checked by the data's fingerprint"
    ),
    "config.data.tokenizer": "its content is checked by its own fingerprint",
    "config.data.prepared_dir": "the rows in it are checked by the data's fingerprint",
    "config.train.steps": (
        "a longer or shorter run; the learning-rate schedule changes from that step on"
    ),
    "config.train.stages": (
        "later stages; for the current stage only its number of steps, "
        "which may not fall below the number taken"
    ),
    "config.train.log_every": "only how often metrics are written",
    "config.train.hooks": "actions besides the steps",
    "config.train.on_hook_error": "the reaction to errors in hooks",
    "config.train.remat": "it trades memory for time; gradients are equal up to rounding",
    "config.train.step_timeout": "the watchdog",
    "config.train.compile_timeout": "the watchdog",
    "config.guards.on_spike": "the reaction to later spikes",
    "config.guards.spike_z": "the threshold for later spikes",
    "config.guards.max_skips": "the number of skipped updates that ends the run",
    "config.parallel.slice_gradients": "the rounding of gradients between slices",
    "config.parallel": "the sharding of arrays; values are equal up to the order of sums",
    "config.telemetry": "only the display of the run",
    "config.profile": "only what is traced",
    "config.checkpoint": "when checkpoints are saved, and which are kept",
    "config.eval": "measurements during training",
    "code": "other versions may round differently",
    "processes": "the order of the data does not depend on it",
    "devices": "values are equal up to the order of sums",
}
# Events that a process may write before it has taken a step that updates a parameter.
_UNTRAINED_EVENTS = {
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
# Names of the files and folders of a run.
_RUN_FILES = (
    "run.json",
    "metrics.jsonl",
    "checkpoints",
    "damaged",
    "dumps",
    "eval",
    "frozen",
    "profile",
    "report.html",
    "tensorboard",
    "tokenizer",
    "wandb_id",
)
_RESTART_ADVICE = "start anew with --restart, which moves the old files to WORKDIR/before-TIME"
_PARTIAL = ".partial"  # the suffix of before-TIME until all files are moved
_PARTIAL_NAME = re.compile(r"before-\d{8}-\d{6}(-\d+)?\.partial")
_CONTROL = "".join(map(chr, range(32)))  # Google Cloud Storage refuses some of them in names
_SCHEMES = (("gs",), ("s3",), ("az",), ("hf",))  # folders of / that etils takes for buckets
# The format of run.json, and of all that lies beside it. Raise it when a folder that was written
# before a change would be read wrongly after it.
_FORMAT = 4


class RunLock:
    """A file lock that lets one process at a time write to a run's folder. Use it as a context
    manager. The operating system releases the lock whenever the process ends.
    """

    def __init__(self, workdir: pathlib.Path):
        self._workdir, self._file = workdir, None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._file is not None:
            self._file.close()

    def run_locked(self, function: Callable[[], Any]) -> Any:
        """Takes the lock and returns `function()`. The lock is released at the end of the `with`
        block, or if `function` raises.

        Raises:
          UserError: another process has the lock, or the folder cannot be written to.
        """
        self._acquire()
        try:
            return function()
        except BaseException:
            self._file.close()
            raise

    def _acquire(self) -> None:
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            self._file = (self._workdir / "lock").open("a")
        except OSError as error:
            raise not_writable(self._workdir, error) from error
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
    """A difference between the record of a run and the run that resumes.

    Attributes:
      name: the key in the record, such as "config.train.steps" or "code".
      old: the recorded value; None if the record has no such key.
      new: the value of the run that resumes; None if it has no such key.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} → {self.new!r}"


def may_change(name: str) -> bool:
    """Whether a run may resume with another value of `name` ("config.train.steps", "code", …)."""
    return any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_CHANGE)


def open_run(
    workdir: pathlib.Path,
    config: Config,
    data_fingerprints: list[str],
    tokenizer_fingerprint: str,
    parent: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Change]]:
    """Checks whether this run may start or resume in `workdir`. Writes nothing.

    Args:
      workdir: the folder of the run.
      config: the configuration of this start.
      data_fingerprints: one fingerprint for each stage, of the data of the stage.
      tokenizer_fingerprint: the fingerprint of the tokenizer.
      parent: the record of the run that this run begins with; None if there is none.
      source: the result of `origin.find_source` for a new run.

    Returns:
      The new content of run.json ({} if it does not change), and the changes since the last start.

    Raises:
      UserError: the folder holds a run with another configuration, data or tokenizer (the message
        names the first difference), or a run without one of its records.
    """
    import jax

    from qwen3next_jax.model.layer_properties import versions

    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    # Each entry has the fields of a `stages.DataCursor`.
    data = [{"fingerprint": fingerprint} for fingerprint in data_fingerprints]
    now = {
        "config": _as_json(config),
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
    if not has_events_file(workdir / "metrics.jsonl"):
        warn(
            f"{workdir / 'metrics.jsonl'} is missing: a new one begins at the step at which the "
            "run resumes"
        )
    if not changes:
        return {}, []
    # A resumed run does not read its parent again.
    kept = ("parent", "merged", "source", "id")
    unchanged = {name: before[name] for name in kept if name in before}
    return now | unchanged | {
        "changes": before.get("changes", []) + [[*change] for change in changes]
    }, changes


def check_settings(workdir: pathlib.Path, config: Config) -> None:
    """Checks `config` as `open_run` does, without the data and the tokenizer.

    Raises:
      UserError: as `open_run` raises it.
    """
    if (before := trained_run(workdir)) is not None:
        _checked_changes(workdir, before, {"config": _as_json(config)})


def is_trained(workdir: pathlib.Path) -> bool:
    """Whether a run has taken steps in the folder: whether the folder has a checkpoint, or an event
    about a step that updated parameters.
    """
    return bool(saved_steps(workdir)) or any(
        event["event"] not in _UNTRAINED_EVENTS
        for _, event in iterate_events(workdir / "metrics.jsonl")
    )


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps that have a folder in `workdir`/checkpoints, valid or not, ascending."""
    folder = workdir / "checkpoints"
    if not isinstance(folder, BucketPath) and not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if is_step_name(p.name))


def complete_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in `workdir` that have a manifest, in ascending order,
    as integers.
    """
    checkpoints = workdir / "checkpoints"
    if isinstance(checkpoints, BucketPath):  # one listing instead of a request for each step
        found = checkpoints.glob("*/manifest.json")
        return sorted(int(p.parent.name) for p in found if is_step_name(p.parent.name))
    return [s for s in saved_steps(workdir) if (checkpoints / str(s) / "manifest.json").exists()]


def is_step_name(name: str) -> bool:
    """Whether a folder's name is a step in decimal digits without leading zeros: "7", but neither
    "007" nor "²".
    """
    return re.fullmatch("0|[1-9][0-9]{0,17}", name) is not None


def check_checkpoints_not_lost(workdir: pathlib.Path) -> None:
    """Checks that the run in `workdir` never had a checkpoint. Call this function if no valid
    checkpoint was found: if the run had one, a start at step 0 would overwrite the record of its
    steps.

    Raises:
      UserError: the run had a checkpoint.
    """
    complete = complete_steps(workdir)
    recorded = [
        event["step"]
        for _, event in iterate_events(workdir / "metrics.jsonl")
        if event["event"] == "checkpoint"
    ]
    if complete or recorded:
        state = "is damaged" if complete else "is missing"
        raise UserError(
            f"{workdir}: the run was saved, last after step {max(complete + recorded)}, but every "
            f"checkpoint {state}: put "
            f"{workdir / 'checkpoints'} back (is a disk not mounted?), give another --workdir, or "
            f"{_RESTART_ADVICE}"
        )


def trained_run(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the content of run.json if a run has taken steps in the folder, otherwise None.

    Raises:
      UserError: run.json, or metrics.jsonl together with the checkpoints, is missing.
    """
    record = (workdir / "run.json").exists()
    if not is_trained(workdir):
        # A start writes this event before run.json.
        started = any(
            event["event"] == "start" for _, event in iterate_events(workdir / "metrics.jsonl")
        )
        if record and not started:
            raise UserError(
                f"{workdir}: it has the run.json of a run, but neither its checkpoints nor its "
                f"metrics.jsonl: put them back, give another --workdir, or {_RESTART_ADVICE}"
            )
        return None
    if not record:
        raise UserError(
            f"{workdir}: it has checkpoints or the metrics.jsonl of a run, but no run.json, which "
            "names the run's model, data and tokenizer: put it back, give another --workdir, or "
            f"{_RESTART_ADVICE}"
        )
    return read_run(workdir)


def _checked_changes(
    workdir: pathlib.Path, before: dict[str, Any], now: dict[str, Any]
) -> list[Change]:
    """Compares two records of a run.

    Args:
      before: run.json of the run in `workdir`.
      now: the record of this start; "data" and "tokenizer" may be missing.

    Returns:
      The differences, all of them allowed.

    Raises:
      UserError: a difference is not allowed.
    """
    where = f"{workdir / 'run.json'}: config"
    check_trusted(before["config"], where)
    trained = from_dict(Config, before["config"], where)
    step = max(saved_steps(workdir), default=0)
    before = before | {"config": _as_json(trained)}
    if "data" in now:  # compares the data of the stages that have begun
        cursors = recorded_cursors(before)
        pairs = [
            (old.fingerprint, new["fingerprint"])
            for stage, old, new in zip(resolve_stages(trained), cursors, now["data"])
            if old and stage.steps_before < max(step, 1)
        ]
        old_data, new_data = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        before, now = before | {"data": old_data}, now | {"data": new_data}
    old, new = (
        flatten(_with_numbered_stages({name: record.get(name) for name in now}))
        for record in (before, now)
    )
    changes = [
        Change(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        # `versions.check_versions` compares the versions.
        and not name.startswith("versions.")
    ]
    # Another tokenizer also changes the data's fingerprint, so it is reported first.
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


def _with_numbered_stages(record: dict[str, Any]) -> dict[str, Any]:
    """Returns `record` with `train.stages` as a dict: index of a stage → the settings that the
    stage overrides. `flatten` can then give each of these settings a name.
    """
    train = record["config"]["train"]
    stages = {
        str(i): {name: value for name, value in stage.items() if value is not None}
        for i, stage in enumerate(train["stages"])
    }
    return record | {"config": record["config"] | {"train": train | {"stages": stages}}}


def _check_stages(
    workdir: pathlib.Path, old: Sequence[ResolvedStage], new: Sequence[ResolvedStage], step: int
) -> None:
    """Checks that the stages that have begun are unchanged. Only the number of steps of the current
    stage and the settings in MAY_CHANGE may differ.

    Args:
      old: the recorded stages.
      new: the stages of this start.
      step: the number of steps that the run has taken.

    Raises:
      UserError: a stage that has begun differs, or the current stage has fewer steps than the run
        has taken in it.
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
                f"{where}, but train.stages ends before it: only later stages may change"
            )
        is_over = i + 1 < len(old) and stage.last_step < step
        ends = new[i].last_step
        if is_over and ends != stage.last_step:
            raise UserError(
                f"{where}, not {new[i].steps}: train.stages[{i}].steps = {stage.steps} "
                "cannot change"
            )
        if not is_over and i + 1 < len(new) and ends < step:
            raise UserError(f"{where}, not {new[i].steps}: give it at least that many")
        for name, old_value, new_value in zip(
            ("schedule_start", *itertools.chain(*STAGE_SETTINGS.values())),
            _stage_settings(stage),
            _stage_settings(new[i]),
        ):
            if old_value != new_value and f"config.train.{name}" not in MAY_CHANGE:
                raise UserError(
                    f"{where} with {name} = {old_value!r}, not {new_value!r}: give another "
                    "--workdir, or the old value"
                )


def _stage_settings(stage: ResolvedStage) -> list[Any]:
    """Returns `schedule_start` of the stage, and then the values of the settings in
    `STAGE_SETTINGS`, in the order of that table.
    """
    return [
        stage.schedule_start,
        *(
            getattr(getattr(stage, group), name)
            for group, names in STAGE_SETTINGS.items()
            for name in names
        ),
    ]


def move_aside(workdir: pathlib.Path) -> None:
    """Moves all files of a run into `workdir`/before-TIME. If the process is killed during the
    move, before-TIME.partial remains, and the next call moves the remaining files
    (`is_restart_unfinished`).

    Raises:
      UserError: the folder cannot be written to, or a file would replace another one.
    """
    if isinstance(workdir, BucketPath):
        from qwen3next_jax.runs import bucket_restart

        bucket_restart.move_aside(workdir)
        return
    partial = _partial_move(workdir)
    if partial is None and not run_files(workdir):
        return
    try:
        if partial is None:
            stamp = time.strftime("before-%Y%m%d-%H%M%S")
            names = (f"{stamp}-{n}" if n else stamp for n in itertools.count())
            name = next(name for name in names if not os.path.lexists(workdir / name))
            partial = workdir / (name + _PARTIAL)
            partial.mkdir()
            fsync(workdir)
        for name in run_files(workdir):
            require(
                not os.path.lexists(partial / name),
                f"{workdir}: {name} is there and also in {partial.name}, to which a restart moves "
                f"it: rename {partial.name}, or give another --workdir",
            )
            (workdir / name).rename(partial / name)
        fsync(partial)
        partial.rename(workdir / partial.name.removesuffix(_PARTIAL))
        fsync(workdir)
    except OSError as error:
        raise not_writable(workdir, error) from error


def require_run_path(where: str, workdir: pathlib.Path | BucketPath) -> None:
    """Raises a UserError that begins with `where` if Orbax cannot write checkpoints to the folder
    of a run: because of its name, or because the paths in it would be too long.
    """
    # longer than any path that a run writes, so that no later save fails
    require_path(where, workdir.absolute() / "checkpoints" / ("0" * 200))
    if isinstance(workdir, BucketPath):
        names, forbidden = workdir.key.split("/"), "?#" + _CONTROL
    else:
        names, forbidden = workdir.absolute().parts[1:], "\\"
    # TensorStore, which writes the arrays, gives these another meaning in a path.
    wrong = next((c for c in "".join(names) if c in forbidden), "")
    require(not wrong, f"{where}: the path holds {wrong!r}: give a folder without it")
    # Orbax takes these paths of a file system for buckets.
    is_bucket = "gs:" in names or not isinstance(workdir, BucketPath) and names[:1] in _SCHEMES
    require(not is_bucket, f"{where}: Orbax takes it for a bucket: give another folder")


def is_restart_unfinished(workdir: pathlib.Path) -> bool:
    """Whether a process was killed in `move_aside`. The remaining files belong to the old run, so
    the next start moves them too, with or without --restart.
    """
    if isinstance(workdir, BucketPath):
        from qwen3next_jax.runs import bucket_restart

        return bucket_restart.is_unfinished(workdir)
    return _partial_move(workdir) is not None


def _partial_move(workdir: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of an unfinished `move_aside`; None if there is none."""
    partial_moves = [
        path for path in workdir.glob(f"before-*{_PARTIAL}") if _PARTIAL_NAME.fullmatch(path.name)
    ]
    return min(partial_moves, default=None)


def run_files(workdir: pathlib.Path) -> dict[str, tuple[Any, int]]:
    """Returns name → (device, inode) for each file or folder of the run in `workdir`. Device and
    inode identify a file, and do not change when it is moved. In a bucket, returns the version of
    run.json alone.
    """
    if isinstance(workdir, BucketPath):
        entry = (workdir / "run.json").entry()  # `move_aside` deletes it last
        return {"run.json": (entry.version, 0)} if entry else {}
    identities = {}
    for name in _RUN_FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            stat = (workdir / name).lstat()
            identities[name] = (stat.st_dev, stat.st_ino)
    return identities


def read_config(workdir: pathlib.Path) -> Config:
    """Returns the configuration of the run in `workdir`.

    Raises:
      UserError: run.json is missing or damaged, or names code of a package that is not trusted.
    """
    return config_of(read_run(workdir), workdir)


def config_of(record: dict[str, Any], workdir: pathlib.Path) -> Config:
    """Returns the configuration in `record`, the content of run.json in `workdir`.

    Raises:
      UserError: a setting is wrong, or names code of a package that is not trusted.
    """
    values, where = record["config"], f"{workdir / 'run.json'}: config"
    check_trusted(values, where)
    return from_dict(Config, values, where)


def read_run(workdir: pathlib.Path) -> dict[str, Any]:
    """Verifies the digest and the format of run.json, and returns its content without them.

    Raises:
      UserError: the file is missing or damaged, or another version wrote it.
    """
    path = workdir / "run.json"
    try:
        record = json_files.read(path)
        intact = record.pop("digest") == digests.sha256_json(record)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{workdir}: not the folder of a run (it has no run.json){similar_folder(workdir)}"
        ) from error
    except StoreError:
        raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}): restore it, or give another --workdir"
        ) from error
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise UserError(
            f"{path}: damaged, or changed by hand: restore it, or give another --workdir"
        )
    check_format(path, record.pop("format", None), _FORMAT)
    return record


def run_id(workdir: pathlib.Path) -> str | None:
    """Returns the id of the run in `workdir`; None if run.json cannot be read."""
    try:
        return read_run(workdir)["id"]
    except StoreError:
        raise
    except UserError:
        return None


def write_run_record(
    workdir: pathlib.Path, description: dict[str, Any], tokenizer: Any, new: bool
) -> None:
    """Writes run.json and a copy of the tokenizer, before the first step.

    Args:
      workdir: the folder of the run.
      description: the content of run.json; {} if run.json does not change.
      tokenizer: the tokenizer of the run. If it came from a file, it is copied, so that the run no
        longer needs that file.
      new: whether the run has no checkpoint yet. If so, a copy of a tokenizer that is already in
        the folder is from an earlier start that took no step, and is replaced.
    """
    from qwen3next_jax.data.tokens import HuggingFaceTokenizer

    if description:
        write_run(workdir, description)
    copy = workdir / "tokenizer"
    if isinstance(copy, BucketPath):
        if new:
            copy.remove_tree()
        if isinstance(tokenizer, HuggingFaceTokenizer) and not copy.exists():
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save(folder)
                # tokenizer.json is the last: without it there is no copy
                for file in sorted(pathlib.Path(folder).iterdir(), key=lambda f: -len(f.name)):
                    (copy / file.name).write_bytes(file.read_bytes())
        return
    if new:
        shutil.rmtree(copy, ignore_errors=True)
    if isinstance(tokenizer, HuggingFaceTokenizer) and not copy.exists():
        partial = workdir / "tokenizer.partial"
        partial.mkdir(exist_ok=True)
        tokenizer.save(partial)
        partial.rename(workdir / "tokenizer")


def add_to_run_record(workdir: pathlib.Path, values: dict[str, Any]) -> None:
    """Replaces these entries of run.json. Does not write the file if it already has them."""
    record = read_run(workdir)
    if {name: record.get(name) for name in values} != values:
        write_run(workdir, record | values)


def write_run(workdir: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes run.json atomically, with its format and a digest of its content.

    Raises:
      UserError: the file cannot be written.
    """
    path = workdir / "run.json"
    temporary = path.with_suffix(".tmp")
    content = {"format": _FORMAT} | record
    content |= {"digest": digests.sha256_json(content)}
    try:
        if isinstance(path, BucketPath):
            path.write_text(json.dumps(content, indent=2))
            return
        with temporary.open("w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            # Without this, a power failure may leave an empty file, and the run could not resume.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise not_writable(workdir, error) from error


def not_writable(workdir: pathlib.Path, error: OSError, flag: str = "--workdir") -> UserError:
    """Returns the UserError that says that the run's folder, which `flag` named, cannot be written
    to, because of `error`.
    """
    return UserError(
        f"{flag}={workdir}: cannot be written to ({error.strerror}): give another folder"
    )


def _as_json(config: Config) -> dict[str, Any]:
    """Returns the settings as run.json holds them: as nested dicts of JSON values, with the kind of
    every layer in `model.layer_types`.
    """
    settings = json.loads(json.dumps(to_dict(config)))
    settings["model"]["layer_types"] = list(config.model.pattern)
    return settings
