"""Compares run.json with the settings, data, code and devices of the process that starts or resumes
the run. MAY_CHANGE lists what may differ when a run resumes.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import Config
from qwen3next_jax.runs.folder import RunFolder
from qwen3next_jax.runs.record import Change, ParentCheckpoint, RunRecord, settings_as_json
from qwen3next_jax.training.stages import STAGE_SETTINGS, ResolvedStage, resolve_stages

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


class CodeAndDevices(NamedTuple):
    """The code and the devices of a process that trains. The fields have the same names as in
    `RunRecord`.

    Attributes:
      code: the version of the code.
      processes: the number of processes of the run.
      devices: the number and the kind of the devices of all processes, as text.
    """

    code: str
    processes: int
    devices: str


def may_change(name: str) -> bool:
    """Whether a run may resume with another value of `name` ("config.train.steps", "code", …)."""
    return any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_CHANGE)


def compare_settings(
    folder: RunFolder, record: RunRecord, config: Config, parent: ParentCheckpoint | None
) -> list[Change]:
    """Compares the settings in run.json with those of the process that starts or resumes the run.

    Args:
      folder: the folder of the run.
      record: its run.json.
      config: the settings of this start.
      parent: the checkpoint of another run with which this start would begin; None if it begins
        with none, or resumes from a checkpoint of its own.

    Returns:
      The settings that differ; a run may resume with the new value of each of them.

    Raises:
      UserError: a setting differs that may not change.
    """
    trained = record.read_config(folder.path)
    before, now = ({"config": settings_as_json(one)} for one in (trained, config))
    if parent:
        before["parent"] = record.parent and dataclasses.asdict(record.parent)
        now["parent"] = dataclasses.asdict(parent)
    changes = _differences(*(_with_numbered_stages(one) for one in (before, now)))
    for change in changes:
        name = change.name.removeprefix("config.")
        require(
            may_change(change.name),
            f"{folder.path} holds a run with {name} = {change.old!r}, not {change.new!r}: give "
            "another --workdir, or the old value",
        )
    step = max(folder.saved_steps, default=0)
    _check_begun_stages(folder.path, resolve_stages(trained), resolve_stages(config), step)
    return changes


def compare_data(
    folder: RunFolder,
    record: RunRecord,
    data_fingerprints: Sequence[str],
    tokenizer_fingerprint: str,
) -> None:
    """Compares the data in run.json with those of the process that resumes the run, for the stages
    that have begun.

    Args:
      folder, record: as for `compare_settings`.
      data_fingerprints: for every stage, the fingerprint of its data.
      tokenizer_fingerprint: the fingerprint of the tokenizer.

    Raises:
      UserError: the tokenizer or the data differ.
    """
    # Another tokenizer also changes the data's fingerprint, so it is reported first.
    pairs = [("tokens", "tokenizer", record.tokenizer, tokenizer_fingerprint)]
    step = max(folder.saved_steps, default=0)
    stages = resolve_stages(record.read_config(folder.path))
    pairs += [
        ("data", "files", cursor.fingerprint, now)
        for stage, cursor, now in zip(stages, record.data, data_fingerprints)
        if cursor and stage.steps_before < max(step, 1)
    ]
    for what, old_ones, old, now in pairs:
        name = "data" if what == "data" else "tokenizer"
        require(
            old == now,
            f"{folder.path} holds a run on other {what} ({name} fingerprint {old[:12]}, now "
            f"{now[:12]}): give another --workdir, or the old {old_ones}",
        )


def compare_code_and_devices(record: RunRecord, current: CodeAndDevices) -> list[Change]:
    """Returns what differs between the code and the devices of run.json and those of this start,
    `current`. A run may resume with other code and on other devices.
    """
    before = {field: getattr(record, field) for field in CodeAndDevices._fields}
    return _differences(before, current._asdict())


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    old, new = flatten(before), flatten(now)
    return [
        Change(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _with_numbered_stages(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with the list `train.stages` as a dict: index of a stage → the settings
    that the stage overrides. From the returned dict, `flatten` makes a separate name for each
    setting of a stage.
    """
    train = record["config"]["train"]
    stages = {
        str(i): {name: value for name, value in stage.items() if value is not None}
        for i, stage in enumerate(train["stages"])
    }
    return record | {"config": record["config"] | {"train": train | {"stages": stages}}}


def _check_begun_stages(
    workdir: pathlib.Path, old: Sequence[ResolvedStage], new: Sequence[ResolvedStage], step: int
) -> None:
    """Checks that every stage that has begun is equal to the stage in run.json. Only the number of
    steps of the current stage and the settings in MAY_CHANGE may differ.

    Args:
      old: the recorded stages.
      new: the stages of this start.
      step: the number of steps that the run has taken.

    Raises:
      UserError: a stage that has begun differs from that in run.json, or the current stage has
        fewer steps than the run has taken in it.
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
    """Returns the values of `schedule_start` and of the settings in the table `STAGE_SETTINGS`, in
    the order of the table.
    """
    return [
        stage.schedule_start,
        *(
            getattr(getattr(stage, group), name)
            for group, names in STAGE_SETTINGS.items()
            for name in names
        ),
    ]
