"""Locks the folder of a run, and records the start in it."""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from qwen3next_jax.common.errors import require, warn
from qwen3next_jax.common.version import code_version
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.model.layer_properties import part_versions
from qwen3next_jax.processes.distributed import (
    broadcast_from_process_0,
    check_shared_folder,
    is_process_0,
    run_on_all,
)
from qwen3next_jax.runs.changes import Machines, compare_data, compare_machines
from qwen3next_jax.runs.checks import check_code
from qwen3next_jax.runs.facts import ParentRun, PretrainedModel, read_facts
from qwen3next_jax.runs.record import BaseModel, Change, Parent, RunRecord, settings_as_json
from qwen3next_jax.runs.start import Start, decide
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import DataCursors


@contextlib.contextmanager
def lock_folder(start: Start, data: Sequence[Data], store: RunStore) -> Iterator[Start]:
    """Locks the folder of a run until the end of the `with` block, and moves an old run in it aside
    if the start says so. Compares the data, the code and the devices with run.json.

    The folder is read again under the lock. If it, or the model in `train.init_from`, has changed
    since the decision, because preparing the data can take hours, the start is decided again.
    Process 0 does this for all processes.

    Args:
      start: the decision about the start.
      data: the training data of every stage.
      store: the store of the run.

    Yields:
      The start, with all changes since the last one.

    Raises:
      UserError: another process trains in the folder, or it has the files of another run.
    """
    with store:
        yield _lock_and_decide_again(start, data, store)


def _lock_and_decide_again(start: Start, data: Sequence[Data], store: RunStore) -> Start:
    decided = start

    def compare() -> dict[str, Any]:
        nonlocal decided
        if start.facts.restart or store.is_restart_unfinished():
            store.move_aside()
        decided = _decide_again(start)
        folder, tokens = decided.facts.folder, decided.facts.tokens
        tokenizer = data[0].tokenizer.fingerprint
        require(
            tokens is None or tokens.ours.fingerprint == tokenizer,
            f"train.init_from = {start.given.train.init_from}: its tokenizer was replaced while "
            "the data were prepared with the one before: start again",
        )
        changes = list(decided.changes)
        if record := folder.trained_record():
            compare_data(folder, record, [rows.fingerprint for rows in data], tokenizer)
            changes = sorted([*changes, *compare_machines(record, _machines())])
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

    found = broadcast_from_process_0(lambda: store.run_locked(compare))
    if found["is_changed"]:  # process 0 has read the folders again; now the others do
        decided = run_on_all(lambda: decided if is_process_0() else _decide_again(start))
    check_shared_folder(store.workdir, start.config.parallel.start_timeout)
    parent = found["parent"]
    return dataclasses.replace(
        decided,
        parent=parent and Parent(**parent),
        changes=tuple(Change(*change) for change in found["changes"]),
    )


def _decide_again(start: Start) -> Start:
    """Reads the facts again, and returns `start` if they are the same, or else a new decision."""
    facts = read_facts(start.given, start.workdir, writes_telemetry=is_process_0())
    if facts == start.facts:
        return start
    again = decide(start.given, facts)
    check_code(again)
    return again


def make_record(
    start: Start, run: ResolvedRun, cursors: DataCursors, tokenizer: str
) -> RunRecord | None:
    """Returns the new content of run.json; None if it does not change.

    Args:
      start: the result of `lock_folder`.
      run: the run.
      cursors: for every stage, the place in the training data at which it begins to read.
      tokenizer: the fingerprint of the tokenizer.
    """
    before = start.facts.folder.trained_record()
    if before and not start.changes:
        return None
    now = RunRecord(
        config=settings_as_json(run.config),
        data=tuple(cursors),
        tokenizer=tokenizer,
        versions=part_versions(run.model),
        source=base_model(start.facts.source),
        id=uuid.uuid4().hex,
        parent=start.parent,
        **_machines()._asdict(),
    )
    if before is None:
        return now
    return dataclasses.replace(
        now,
        source=before.source,
        id=before.id,
        parent=before.parent,  # a resumed run does not read its parent again
        merged=before.merged,
        changes=before.changes + start.changes,
    )


def base_model(source: ParentRun | PretrainedModel | None) -> BaseModel | None:
    """Returns the base model of a run that begins with `source`. The folder of a parent need not be
    kept, so its base model is recorded, without the stamp of its files.
    """
    if isinstance(source, PretrainedModel):
        return BaseModel(str(source.folder.absolute()), source.model.hf_form, source.files)
    base = source and source.record.source
    return base and dataclasses.replace(base, files="")


def _machines() -> Machines:
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    return Machines(code_version(), jax.process_count(), devices)
