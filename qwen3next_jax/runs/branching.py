"""How a run begins with another one (`train.init_from = RUN` or `RUN@STEP`): with its weights,
or with its whole state.

The weights alone begin a run like any other: step 0, the data from their first batch. The whole
state (`train.init_state = "all"`) keeps optimizer and step as well, and reads on behind the rows
that the parent took, as the stages of a run do (`stages`); where data, batch size and the
guards' window are the same, every bit is that of the parent's own continuation.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.runs import preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.folder import config_of, read_config, read_run
from qwen3next_jax.runs.preflight import Parent, compare_tokens
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.training import guards
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    recorded_cursors,
    stage_number,
)
from qwen3next_jax.training.state import State, abstract_train_state


def start_state(run: ResolvedRun, data: Sequence[Data], parent: Parent) -> tuple[State, DataCursor]:
    """(the state before the first step of a run that begins with `parent`, read onto the mesh of
    the run; the cursor of that step).

    Raises:
      UserError: the checkpoint is damaged, or of another structure.
    """
    config = run.config
    folder = pathlib.Path(parent["path"])
    step = parent["step"]
    # Read before the checkpoint, which is then found to be the one of `parent` and of that run.
    record = read_run(folder)
    theirs = config_of(record, folder)
    # Preparing the data may have taken hours: another run may lie at this path by now.
    require(
        record.get("id", "") == parent.get("run", record.get("id", "")),
        f"{folder}: another run took the place of the one that this run begins with: put it back, "
        "or begin a new --workdir",
    )
    preflight.compare_structure(run.model, theirs.model, config.train.init_from)
    check_parent_versions(folder, record, config)
    takes_all = config.train.init_state == "all"
    if takes_all:  # the guards' window may be another one here
        wanted = abstract_train_state(run.model, config.optimizer, theirs.guards, run.mesh)
    else:
        wanted = {name: run.abstract_state[name] for name in ("params", "step")}
    # What the model does not have, such as mtp where it is left out, is not read.
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.restore(step, wanted, whole=False, digest=parent["manifest"])
    if not takes_all:
        first = DataCursor(data[0].fingerprint, data[0].batch_size)
        return run.init_state(state["params"]), first
    offset = int(state["guards"]["data_offset"])
    their_cursors = recorded_cursors(record, theirs.train.batch_size)
    before, now = _cursors(run.stages, data, step, their_cursors, offset)
    same_window = before.same_stream(now) and theirs.guards.window == config.guards.window
    state["guards"] = guards.reset(config.guards, state["guards"], 0, same_window)
    return state, now


def check_parent_versions(folder: pathlib.Path, record: dict[str, Any], config: Config) -> None:
    """Raises UserError unless what a run of `config` takes over of the run in `folder`, whose
    run.json holds `record`, was trained with the mathematics that this code has.
    """
    theirs = config_of(record, folder)
    depth = min(theirs.model.mtp_depth, config.model.mtp_depth)
    taken = dataclasses.replace(theirs, model=dataclasses.replace(theirs.model, mtp_depth=depth))
    check_versions(folder, record, taken, trains=config.train.init_state == "all")


def describe(run: ResolvedRun, data: Sequence[Data], parent: Parent | None) -> str:
    """How a run begins, in words."""
    config = run.config
    if not config.train.init_from:
        return "making the first state"
    beginning = f"the Hugging Face directory {config.train.init_from}"
    if parent:
        older = preflight.passed_over(config.train.init_from, parent)
        beginning = f"{parent['path']} after step {parent['step']}{older}"
    tokens = compare_tokens(config.data, run.model.vocab_size, config.train.init_from)
    text = f"beginning with {beginning}, reading {tokens}: its weights"
    if config.train.init_state == "weights":
        return f"{text} (step 0, a new optimizer, the data from their first batch)"
    folder = pathlib.Path(parent["path"])
    theirs = read_config(folder)
    their_cursors = recorded_cursors(read_run(folder), theirs.train.batch_size)
    before, now = _cursors(run.stages, data, parent["step"], their_cursors)
    rows = (
        "go on behind the rows that it took"
        if now.row or now.starts.keys() & {now.fingerprint, *now.streams}
        else ("begin with their first row, as they are others")
    )
    same_window = before.same_stream(now) and theirs.guards.window == config.guards.window
    return (
        f"{text}, optimizer and step; the data {rows}; the guards' window "
        f"{'goes on' if same_window else 'begins anew'}"
    )


def _cursors(
    stages: Sequence[ResolvedStage],
    data: Sequence[Data],
    step: int,
    theirs: DataCursors,
    data_offset: int = 0,
) -> tuple[DataCursor, DataCursor]:
    """(the cursor of the parent at `step`, the first cursor of this run). `theirs` are the
    parent's; its state counts `data_offset`.
    """
    before = theirs[stage_number(theirs, step)]
    rows = next(rows for stage, rows in zip(stages, data, strict=True) if step < stage.last_step)
    return before, before.advance(step, rows, data_offset)
