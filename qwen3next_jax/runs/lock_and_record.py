"""Locks the folder of a run, and makes the record of the run's start, which run.json holds."""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from qwen3next_jax.common.errors import require, warn
from qwen3next_jax.common.version import code_version
from qwen3next_jax.data.pipeline import DataSource
from qwen3next_jax.model.layer_properties import part_versions
from qwen3next_jax.processes.distributed import (
    broadcast_from_process_0,
    check_shared_folder,
    is_process_0,
    run_on_all,
)
from qwen3next_jax.runs.changes import CodeAndDevices, compare_code_and_devices, compare_data
from qwen3next_jax.runs.checks import check_versions_of_weights
from qwen3next_jax.runs.facts import ParentRun, PretrainedModel, read_facts
from qwen3next_jax.runs.record import (
    BaseModel,
    Change,
    ParentCheckpoint,
    RunRecord,
    settings_as_json,
)
from qwen3next_jax.runs.start import Start, decide_start
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import DataCursors


@contextlib.contextmanager
def lock_folder(start: Start, data: Sequence[DataSource], store: RunStore) -> Iterator[Start]:
    """Locks the folder of a run until the end of the `with` block. With `--restart`, or if an
    earlier `--restart` did not finish, moves the files of the old run to WORKDIR/before-TIME.
    Compares the data, the code and the devices of this start with those in run.json.

    Preparing the data can take hours, during which the folder or the model in `train.init_from` may
    change. So once the folder is locked, the function reads the folder and the model again, and
    decides again how the run starts if one of them has changed. Process 0 locks, moves and compares
    for all processes.

    Args:
      start: the decision about the start.
      data: the training data of every stage.
      store: the store of the run.

    Yields:
      The decision about how the run starts, with all changes since the last start.

    Raises:
      UserError: another process trains in the folder, or the folder has the files of another run.
    """
    with store:
        yield _lock_and_decide_again(start, data, store)


def _lock_and_decide_again(start: Start, data: Sequence[DataSource], store: RunStore) -> Start:
    decided = start

    def decide_and_compare() -> dict[str, Any]:
        nonlocal decided
        if start.facts.restart or store.has_unfinished_move():
            store.move_old_run_aside()
        decided = _decide_again(start)
        folder, tokenizers = decided.facts.folder, decided.facts.tokenizers
        tokenizer = data[0].tokenizer.fingerprint
        require(
            tokenizers is None or tokenizers.run_tokenizer.fingerprint == tokenizer,
            f"train.init_from = {start.given_config.train.init_from}: its tokenizer was replaced "
            "while the data were prepared with the one before: start again",
        )
        changes = list(decided.changes)
        if record := folder.record_if_trained():
            compare_data(folder, record, [stage_data.fingerprint for stage_data in data], tokenizer)
            machines = compare_code_and_devices(record, _present_code_and_devices())
            changes = sorted([*changes, *machines])
            if not folder.has_events:
                warn(
                    f"{folder.path / 'metrics.jsonl'} is missing: a new one begins at the step at "
                    "which the run resumes"
                )
        return {
            "is_changed": decided is not start,
            "parent": decided.parent and dataclasses.asdict(decided.parent),
            "changes": changes,
        }

    found = broadcast_from_process_0(lambda: store.run_locked(decide_and_compare))
    if found["is_changed"]:  # process 0 has read the folders again; now the others do
        decided = run_on_all(lambda: decided if is_process_0() else _decide_again(start))
    check_shared_folder(store.workdir, start.config.parallel.start_timeout)
    parent = found["parent"]
    return dataclasses.replace(
        decided,
        parent=parent and ParentCheckpoint(**parent),
        changes=tuple(Change(*change) for change in found["changes"]),
    )


def _decide_again(start: Start) -> Start:
    """Reads again what the start of the run depends on. Returns `start` if nothing has changed, or
    else a new decision.
    """
    facts = read_facts(start.given_config, start.workdir, writes_telemetry=is_process_0())
    if facts == start.facts:
        return start
    again = decide_start(start.given_config, facts)
    check_versions_of_weights(again)
    return again


def make_record(
    start: Start, run: ResolvedRun, cursors: DataCursors, tokenizer_fingerprint: str
) -> RunRecord | None:
    """Returns the new content of run.json; None if the file stays as it is.

    Args:
      start: the result of `lock_folder`.
      run: the resolved run.
      cursors: for every stage, the place in the training data at which the stage begins to read.
      tokenizer_fingerprint: the fingerprint of the tokenizer.
    """
    old_record = start.facts.folder.record_if_trained()
    if old_record and not start.changes:
        return None
    new_record = RunRecord(
        config=settings_as_json(run.config),
        data=tuple(cursors),
        tokenizer=tokenizer_fingerprint,
        versions=part_versions(run.model),
        source=base_model_record(start.facts.initial_model),
        id=uuid.uuid4().hex,
        parent=start.parent,
        **_present_code_and_devices()._asdict(),
    )
    if old_record is None:
        return new_record
    return dataclasses.replace(
        new_record,
        source=old_record.source,
        id=old_record.id,
        parent=old_record.parent,  # a resumed run does not read its parent again
        merged=old_record.merged,
        changes=old_record.changes + start.changes,
    )


def base_model_record(initial_model: ParentRun | PretrainedModel | None) -> BaseModel | None:
    """Returns the Hugging Face directory with which the weights of a run began, as run.json records
    it. A run that begins with a parent run copies the parent's entry, because the user may delete
    the parent; the entry `files`, which only the first run of a chain of parents needs, is left
    out.
    """
    if isinstance(initial_model, PretrainedModel):
        return BaseModel(
            str(initial_model.folder.absolute()),
            initial_model.model_config.hf_form,
            initial_model.files_digest,
        )
    base = initial_model and initial_model.record.source
    return base and dataclasses.replace(base, files="")


def _present_code_and_devices() -> CodeAndDevices:
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    return CodeAndDevices(code_version(), jax.process_count(), devices)
