"""Branches: runs that begin with the weights or the whole state of another run, the parent
(`train.init_from = RUN` or `RUN@STEP`).

With `train.init_state = "weights"` a branch begins at step 0, with a new optimizer state and the
first batch of its data. With "all" it takes over the optimizer state and the step, too, and skips
the rows that the parent has read (`training.stages`). If the branch also has the data, the batch
size and the guards' window of its parent, its steps equal the steps that the parent would take: on
CPUs bit for bit; on GPUs the gradients of cuDNN's attention have no fixed order of sums.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.model.adapter_names import base_params
from qwen3next_jax.runs import preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.folder import config_of, read_config, read_run
from qwen3next_jax.runs.preflight import Parent, compare_tokens
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.training import guards
from qwen3next_jax.training.parameter_groups import make_parameter_groups
from qwen3next_jax.training.resolve import ResolvedRun, make_update_rules
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    recorded_cursors,
    stage_number,
)
from qwen3next_jax.training.state import State, abstract_train_state, start_rules
from qwen3next_jax.training.update_rules import UpdateRule
from qwen3next_jax.training.vocabulary import grow_vocabulary, with_vocabulary


def state_from_parent(
    run: ResolvedRun, data: Sequence[Data], parent: Parent
) -> tuple[State, DataCursor]:
    """Loads the first state of a branch.

    Args:
      run: the branch.
      data: the training data of every stage of the branch.
      parent: the record of the parent and its checkpoint.

    Returns:
      The train state before the first step, sharded over the mesh of the run; and a `DataCursor`,
      the place in the training data at which the branch begins to read.

    Raises:
      UserError: the checkpoint of `parent` is damaged, or its parameters have other shapes.
    """
    config = run.config
    folder = to_path(parent["path"])
    step = parent["step"]
    # The record is read before the checkpoint. `restore` later compares the checkpoint with the
    # digest in `parent`, so it notices if another run has replaced the parent in between.
    record = read_run(folder)
    theirs = config_of(record, folder)
    # Preparing the data may have taken hours; another run may have this path by now.
    require(
        record["id"] == parent["run"],
        f"{folder}: another run has replaced the run that this run begins with: put that one back, "
        "or start in a new --workdir",
    )
    preflight.compare_structure(run.model, theirs.model, config.train.init_from)
    check_parent_versions(folder, record, run.model.mtp_depth)
    takes_all = config.train.init_state == "all"
    inherited = _inherited_rules(run, theirs) if takes_all else []
    if takes_all:  # reads the guards' state with the parent's settings, as its window may be longer
        wanted = abstract_train_state(
            run.model,
            config.optimizer,
            run.groups,
            inherited,
            theirs.guards,
            run.mesh,
            config.parallel.slice_state,
        )
    else:
        wanted = {name: run.abstract_state[name] for name in ("params", "step")}
        if not theirs.model.lora.rank:  # the adapters, if there are any, begin with this run
            wanted["params"] = base_params(wanted["params"])
        grown = wanted["params"]
        wanted["params"] = with_vocabulary(grown, run.model, theirs.model.vocab_size)
    # Only the parameters that the model has are read; a model without MTP skips `mtp`.
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.restore(step, wanted, partial=True, digest=parent["manifest"])
    if not takes_all:
        first = DataCursor(data[0].fingerprint, data[0].batch_size)
        return run.init_state(grow_vocabulary(state["params"], grown, run.model)), first
    new_rules = [rule for rule in run.rules if rule not in inherited]
    state |= start_rules(new_rules, state["params"], run.state_shardings)
    offset = int(state["guards"]["data_offset"])
    their_cursors = recorded_cursors(record)
    before, now = _cursors(run.stages, data, step, their_cursors, offset)
    same_window = before.same_stream(now) and theirs.guards.window == config.guards.window
    state["guards"] = guards.reset(config.guards, state["guards"], 0, same_window)
    return state, now


def _inherited_rules(run: ResolvedRun, theirs: Config) -> list[UpdateRule]:
    """Returns the update rules of `run` that its parent has with equal settings. Their entries of
    the train state are taken over. An average with another decay rate, for example, begins anew.
    """
    ours = run.config.train.update_rules
    both = tuple(name for name in theirs.train.update_rules if name in ours)
    theirs = dataclasses.replace(theirs, train=dataclasses.replace(theirs.train, update_rules=both))
    groups = make_parameter_groups(theirs.model, theirs.train.freeze, theirs.optimizer)
    their_rules = make_update_rules(theirs, groups)
    return [rule for rule in run.rules if rule in their_rules]


def check_parent_versions(folder: pathlib.Path, record: dict[str, Any], mtp_depth: int) -> None:
    """Checks that this code computes the modules of a parent's model in the same way as the code
    with which the parent was trained.

    Args:
      folder: the folder of the parent.
      record: the content of the parent's run.json.
      mtp_depth: `model.mtp_depth` of the run that begins.

    Raises:
      UserError: a module that the run takes over has another version in this code.
    """
    theirs = config_of(record, folder).model
    shared_depth = min(theirs.mtp_depth, mtp_depth)
    check_versions(folder, record, dataclasses.replace(theirs, mtp_depth=shared_depth))


def describe(run: ResolvedRun, data: Sequence[Data], parent: Parent | None) -> str:
    """Returns a sentence, for the terminal, about the state with which a new run begins.

    Args:
      data: the training data of every stage of the run.
      parent: the record of the run in `train.init_from`; None if it names no run.
    """
    config = run.config
    if not config.train.init_from:
        return "initializing the first state"
    beginning = f"the Hugging Face directory {config.train.init_from}"
    if parent:
        older = preflight.describe_damaged_checkpoints(config.train.init_from, parent)
        beginning = f"{parent['path']} after step {parent['step']}{older}"
    tokens = compare_tokens(config.data, run.model.vocab_size, config.train.init_from)
    before = preflight.source_model(config.train.init_from, parent).vocab_size
    growth = ""
    if before < run.model.vocab_size:
        growth = (
            f"; its vocabulary of {before:,} grows to {run.model.vocab_size:,}: the new rows of "
            "embedding and head begin as the mean of the old ones"
        )
    text = f"beginning with {beginning}, reading {tokens}: its weights"
    if config.train.init_state == "weights":
        return f"{text} (step 0, new optimizer state, the first batch of the data){growth}"
    folder = to_path(parent["path"])
    theirs = read_config(folder)
    their_cursors = recorded_cursors(read_run(folder))
    before, now = _cursors(run.stages, data, parent["step"], their_cursors)
    continues_stream = now.row or now.starts.keys() & {now.fingerprint, *now.streams}
    rows = (
        "continue after the rows that it read"
        if continues_stream
        else "differ from its data and begin with their first row"
    )
    same_window = before.same_stream(now) and theirs.guards.window == config.guards.window
    return (
        f"{text}, optimizer and step; the data {rows}; the guards' window "
        f"{'continues' if same_window else 'starts empty'}"
    )


def _cursors(
    stages: Sequence[ResolvedStage],
    data: Sequence[Data],
    step: int,
    theirs: DataCursors,
    data_offset: int = 0,
) -> tuple[DataCursor, DataCursor]:
    """Returns two `DataCursor`s, places in the training data: the place of the parent's stage at
    `step`, and the place at which this run begins to read.

    Args:
      stages: the stages of this run.
      data: the training data of every stage of this run.
      step: the number of steps that the parent took.
      theirs: for each stage of the parent, its recorded `DataCursor`.
      data_offset: the number of batches that rewinds of the parent skipped.
    """
    before = theirs[stage_number(theirs, step)]
    rows = next(rows for stage, rows in zip(stages, data, strict=True) if step < stage.last_step)
    return before, before.advance(step, rows, data_offset)
