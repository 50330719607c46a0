"""Reads the files of a run in its folder. `runs.store` writes them.

A folder belongs to a run once it has a checkpoint or an event about a step. As long as a folder
belongs to no run, a new run may replace the run.json in it. In a folder that belongs to a run, a
process can train only with the settings (apart from allowed changes), data and tokenizer of this
run, and only if there are run.json and either a checkpoint or metrics.jsonl. So no run overwrites
the files of another.
"""

import dataclasses
import pathlib
import re

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import has_events_file, heldout_losses, iterate_events
from qwen3next_jax.common.storage import BucketPath, StoreError, folders_with_file
from qwen3next_jax.runs.record import RunRecord, read_record

# Events that a process may write before it has taken a step that updates a parameter.
_EVENTS_BEFORE_TRAINING = {
    "start",
    "operators",
    "stop",
    "stage",
    "changed",
    "damaged",
    "save_failed",
    "skip",
    "spike",
    "profile",
}
_RESTART_ADVICE = "start anew with --restart, which moves the old files to WORKDIR/before-TIME"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """What is in the folder of a run.

    Attributes:
      path: the folder.
      record: the content of run.json; None if there is no such file, or it cannot be read.
      record_fault: why run.json cannot be read; "" if the file can be read, or is missing.
      saved_steps: the steps whose checkpoints are saved (see `runs.checkpoint`), ascending.
      complete_steps: the steps whose checkpoints are complete, ascending.
      has_started: whether the folder has a checkpoint, or an event "start".
      has_trained: whether the folder has a checkpoint, or an event about a step that updated
        parameters.
      has_events: whether there is a metrics.jsonl.
    """

    path: pathlib.Path | BucketPath
    record: RunRecord | None = None
    record_fault: str = ""
    saved_steps: tuple[int, ...] = ()
    complete_steps: tuple[int, ...] = ()
    has_started: bool = False
    has_trained: bool = False
    has_events: bool = False

    def record_if_trained(self) -> RunRecord | None:
        """Returns the content of run.json if a run has trained in the folder; None if no run has.

        Raises:
          UserError: a run has trained, but run.json is missing or damaged; or the folder has the
            run.json of a run, but neither its checkpoints nor its metrics.jsonl.
        """
        has_record = bool(self.record or self.record_fault)
        if not self.has_trained:
            if has_record and not self.has_started:
                raise UserError(
                    f"{self.path}: it has the run.json of a run, but neither its checkpoints nor "
                    "its metrics.jsonl: put them back, give another --workdir, or "
                    f"{_RESTART_ADVICE}"
                )
            return None
        if not has_record:
            raise UserError(
                f"{self.path}: it has checkpoints or the metrics.jsonl of a run, but no run.json, "
                "which names the run's model, data and tokenizer: put it back, give another "
                f"--workdir, or {_RESTART_ADVICE}"
            )
        if self.record_fault:
            raise UserError(self.record_fault)
        return self.record


def read_folder(workdir: pathlib.Path | BucketPath) -> RunFolder:
    """Reads the folder of a run, which may be empty or missing."""
    record, record_fault = None, ""
    if (workdir / "run.json").exists():
        try:
            record = read_record(workdir)
        except StoreError:
            raise
        except UserError as error:  # it only matters if a run has trained here
            record_fault = str(error)
    saved = tuple(saved_steps(workdir))
    has_started = has_trained = bool(saved)
    if not saved:  # events are read only where checkpoints do not say it
        for _, event in iterate_events(workdir / "metrics.jsonl"):
            # A start writes its event before run.json.
            has_started = has_started or event["event"] == "start"
            if event["event"] not in _EVENTS_BEFORE_TRAINING:
                has_trained = True
                break
    return RunFolder(
        workdir,
        record,
        record_fault,
        saved,
        tuple(complete_steps(workdir)),
        has_started,
        has_trained,
        has_events_file(workdir / "metrics.jsonl"),
    )


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps that have a folder in `workdir`/checkpoints, in ascending order."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if is_step_name(name))


def complete_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps whose checkpoints in `workdir` have a manifest, in ascending order."""
    folders = folders_with_file(workdir / "checkpoints", "manifest.json")
    return sorted(int(folder.name) for folder in folders if is_step_name(folder.name))


def best_step(workdir: pathlib.Path) -> int:
    """Returns the step of the complete checkpoint with the lowest held-out loss. Of two checkpoints
    with equal losses, the function takes the earlier one.

    Raises:
      UserError: no complete checkpoint was evaluated.
    """
    losses = heldout_losses(event for _, event in iterate_events(workdir / "metrics.jsonl"))
    steps = complete_steps(workdir)
    best = min((step for step in steps if step in losses), key=losses.get, default=None)
    if best is None:
        raise UserError(
            f"{workdir}: no best checkpoint, because none of its checkpoints "
            f"({', '.join(map(str, steps)) or 'there are none'}) has a held-out loss in its "
            "metrics.jsonl: give the number of a step"
        )
    return best


def is_step_name(name: str) -> bool:
    """Whether a folder's name is a step in decimal digits without leading zeros: "7", but neither
    "007" nor "²".
    """
    return re.fullmatch("0|[1-9][0-9]{0,17}", name) is not None


def describe_lost_checkpoints(workdir: pathlib.Path) -> str:
    """Returns a part of an error message about a run without a valid checkpoint: that the run had
    checkpoints, and where they have to be; "" if the run never had a checkpoint.
    """
    complete = complete_steps(workdir)
    recorded = [
        event["step"]
        for _, event in iterate_events(workdir / "metrics.jsonl")
        if event["event"] == "checkpoint"
    ]
    if not complete and not recorded:
        return ""
    return (
        f"the run was saved, last after step {max(complete + recorded)}, but every checkpoint "
        f"{'is damaged' if complete else 'is missing'}: put {workdir / 'checkpoints'} back (is a "
        "disk not mounted?)"
    )


def check_checkpoints_not_lost(workdir: pathlib.Path) -> None:
    """Checks that the run in `workdir` never had a checkpoint. Call this function if the run has no
    valid checkpoint. If the run had a checkpoint before, the checkpoint was lost, and a start at
    step 0 would overwrite the record of the run's steps.

    Raises:
      UserError: the run had a checkpoint.
    """
    if lost := describe_lost_checkpoints(workdir):
        raise UserError(f"{workdir}: {lost}, give another --workdir, or {_RESTART_ADVICE}")
