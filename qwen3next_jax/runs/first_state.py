"""Makes the first state of a run: from random weights, from a Hugging Face directory, or from a
checkpoint of another run, the parent (`train.init_from = RUN` or `RUN@STEP`).

With `train.init_state = "weights"` a run begins at step 0, with a new optimizer state and the
first batch of its data. With "all" it takes over the optimizer state and the step, too, and skips
the rows that the parent has read (`training.stages`). If the run also has the data, the batch
size and the guards' window of its parent, its steps equal the steps that the parent would take: on
CPUs bit for bit; on GPUs the gradients of cuDNN's attention have no fixed order of sums.
"""

import dataclasses
from collections.abc import Sequence

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.model.adapter_names import base_params
from qwen3next_jax.processes.distributed import run_on_all
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.facts import ParentRun, PretrainedModel
from qwen3next_jax.runs.init_from import describe_skipped
from qwen3next_jax.runs.record import Parent, run_id
from qwen3next_jax.runs.start import Start
from qwen3next_jax.training import guards
from qwen3next_jax.training.parameter_groups import make_parameter_groups
from qwen3next_jax.training.resolve import ResolvedRun, make_update_rules
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    stage_index_of_step,
)
from qwen3next_jax.training.state import State, abstract_train_state, init_sharded_rule_entries
from qwen3next_jax.training.update_rules import UpdateRule
from qwen3next_jax.training.vocabulary import grow_vocabulary, resize_abstract_vocabulary


def first_state(run: ResolvedRun, data: Sequence[Data], start: Start) -> tuple[State, DataCursor]:
    """Makes the first state of a run.

    Args:
      run: the run.
      data: the training data of every stage.
      start: the decision about the start.

    Returns:
      The train state before the first step, sharded over the mesh of the run; and a `DataCursor`,
      the place in the training data at which the run begins to read.

    Raises:
      UserError: the model in `train.init_from` was replaced since the decision, or is damaged.
    """
    source = start.facts.source
    if isinstance(source, ParentRun):
        return _state_from_parent(run, data, source, start.parent)
    cursor = DataCursor(data[0].fingerprint, data[0].batch_size)
    if source is None:
        return run.init_state(), cursor
    return _state_from_pretrained(run, source), cursor


def _state_from_pretrained(run: ResolvedRun, source: PretrainedModel) -> State:
    from qwen3next_jax.interop.huggingface import load_params
    from qwen3next_jax.interop.weights import modification_digest

    init_from = run.config.train.init_from

    def check_files() -> None:
        require(
            modification_digest(source.folder) == source.files,
            f"train.init_from = {init_from}: its files were replaced since this run began with "
            "them (their sizes or times differ): put them back, or give another --workdir",
        )

    run_on_all(check_files)
    grown = base_params(run.abstract_state["params"])
    params = load_params(
        init_from, resize_abstract_vocabulary(grown, run.model, source.model.vocab_size)
    )
    run_on_all(check_files)  # they may have been replaced while they were read
    return run.init_state(grow_vocabulary(params, grown, run.model))


def _state_from_parent(
    run: ResolvedRun, data: Sequence[Data], source: ParentRun, parent: Parent
) -> tuple[State, DataCursor]:
    """Loads the first state from a checkpoint of another run.

    Args:
      source: the other run.
      parent: the checkpoint.
    """
    config, theirs, step = run.config, source.config, parent.step
    # Preparing the data may have taken hours; another run may have this path by now. If that
    # happens later, `restore` notices that the checkpoint has another digest.
    require(
        run_id(source.folder) == parent.run == source.record.id,
        f"{source.folder}: another run has replaced the run that this run begins with: put that "
        "one back, or start in a new --workdir",
    )
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
        wanted["params"] = resize_abstract_vocabulary(grown, run.model, theirs.model.vocab_size)
    # Only the parameters that the model has are read; a model without MTP skips `mtp`.
    with Checkpoints(source.folder) as checkpoints:
        state = checkpoints.restore(step, wanted, partial=True, digest=parent.manifest)
    if not takes_all:
        first = DataCursor(data[0].fingerprint, data[0].batch_size)
        return run.init_state(grow_vocabulary(state["params"], grown, run.model)), first
    new_rules = [rule for rule in run.rules if rule not in inherited]
    state |= init_sharded_rule_entries(new_rules, state["params"], run.state_shardings)
    offset = int(state["guards"]["data_offset"])
    before, now = _cursors(run.stages, data, step, source.record.data, offset)
    same_window = before.reads_same_stream(now) and theirs.guards.window == config.guards.window
    state["guards"] = guards.reset_for_stage(config.guards, state["guards"], 0, same_window)
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


def describe_first_state(run: ResolvedRun, data: Sequence[Data], start: Start) -> str:
    """Returns a sentence, for the terminal, about the state with which a new run begins."""
    config, source, parent = run.config, start.facts.source, start.parent
    if source is None:
        return "initializing the first state"
    beginning = f"the Hugging Face directory {config.train.init_from}"
    if parent:
        beginning = f"{parent.path} after step {parent.step}{describe_skipped(source)}"
    before = source.model.vocab_size
    growth = ""
    if before < run.model.vocab_size:
        growth = (
            f"; its vocabulary of {before:,} grows to {run.model.vocab_size:,}: the new rows of "
            "embedding and head begin as the mean of the old ones"
        )
    text = f"beginning with {beginning}, reading {start.tokens}: its weights"
    if config.train.init_state == "weights":
        return f"{text} (step 0, new optimizer state, the first batch of the data){growth}"
    before, now = _cursors(run.stages, data, parent.step, source.record.data)
    rows = (
        "continue after the rows that it read"
        if now.continues_stream
        else "differ from its data and begin with their first row"
    )
    same_window = (
        before.reads_same_stream(now) and source.config.guards.window == config.guards.window
    )
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
    before = theirs[stage_index_of_step(theirs, step)]
    rows = next(rows for stage, rows in zip(stages, data, strict=True) if step < stage.last_step)
    return before, before.for_next_stage(step, rows, data_offset)
