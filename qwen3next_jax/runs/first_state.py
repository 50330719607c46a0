"""Makes the first state of a run: from random weights, from a Hugging Face directory, or from a
checkpoint of another run, the parent (`train.init_from = RUN` or `RUN@STEP`).

With `train.init_state = "weights"` a run begins at step 0, with a new optimizer state and the
first batch of its data. With `train.init_state = "all"` a run also takes over the parent's
optimizer state and step, and skips the rows that the parent has read (`training.stages`). If, with
`train.init_state = "all"`, a run also has the data, the batch size and the guards' window of its
parent, its steps equal the steps that the parent would take next: on CPUs bit for bit, but not on
GPUs, where the gradients of cuDNN's attention have no fixed order of sums.
"""

import dataclasses
from collections.abc import Sequence

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import DataSource
from qwen3next_jax.model.adapter_names import base_params
from qwen3next_jax.processes.distributed import run_on_all
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.facts import ParentRun, PretrainedModel
from qwen3next_jax.runs.init_from import describe_skipped_checkpoints
from qwen3next_jax.runs.record import ParentCheckpoint, run_id
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


def make_first_state(
    run: ResolvedRun, data: Sequence[DataSource], start: Start
) -> tuple[State, DataCursor]:
    """Makes the train state with which a new run begins.

    Args:
      run: the resolved run.
      data: the training data of every stage.
      start: the decision about the start.

    Returns:
      (state, cursor): the train state before the first step, sharded over the mesh of the run, and
      the place in the training data at which the run begins to read.

    Raises:
      UserError: the model in `train.init_from` is damaged, or was replaced after `start` was
        decided.
    """
    initial_model = start.facts.initial_model
    if isinstance(initial_model, ParentRun):
        return _state_from_parent(run, data, initial_model, start.parent)
    cursor = DataCursor(data[0].fingerprint, data[0].batch_size)
    if initial_model is None:
        return run.init_state(), cursor
    return _state_from_pretrained(run, initial_model), cursor


def _state_from_pretrained(run: ResolvedRun, pretrained: PretrainedModel) -> State:
    from qwen3next_jax.interop.huggingface import load_params
    from qwen3next_jax.interop.weights import modification_digest

    init_from = run.config.train.init_from

    def check_files() -> None:
        require(
            modification_digest(pretrained.folder) == pretrained.files_digest,
            f"train.init_from = {init_from}: its files were replaced since this run began with "
            "them (their sizes or times differ): put them back, or give another --workdir",
        )

    run_on_all(check_files)
    grown = base_params(run.abstract_state["params"])
    vocab_size = pretrained.model_config.vocab_size
    params = load_params(init_from, resize_abstract_vocabulary(grown, run.model, vocab_size))
    run_on_all(check_files)  # they may have been replaced while they were read
    return run.init_state(grow_vocabulary(params, grown, run.model))


def _state_from_parent(
    run: ResolvedRun, data: Sequence[DataSource], parent: ParentRun, checkpoint: ParentCheckpoint
) -> tuple[State, DataCursor]:
    """Loads the first state of a run from a checkpoint of its parent.

    Args:
      parent: the other run, as it was when `start` was decided.
      checkpoint: the checkpoint of that run.
    """
    config, parent_config, step = run.config, parent.config, checkpoint.step
    # Preparing the data may have taken hours; another run may have this path by now. If that
    # happens later, `restore` notices that the checkpoint has another digest.
    require(
        run_id(parent.folder) == checkpoint.run == parent.record.id,
        f"{parent.folder}: another run has replaced the run that this run begins with: put that "
        "one back, or start in a new --workdir",
    )
    takes_all = config.train.init_state == "all"
    inherited = _inherited_update_rules(run, parent_config) if takes_all else []
    if takes_all:  # reads the guards' state with the parent's settings, as its window may be longer
        abstract_state = abstract_train_state(
            run.model,
            config.optimizer,
            run.groups,
            inherited,
            parent_config.guards,
            run.mesh,
            config.parallel.slice_state,
        )
    else:
        abstract_state = {name: run.abstract_state[name] for name in ("params", "step")}
        if not parent_config.model.lora.rank:  # the adapters, if there are any, begin with this run
            abstract_state["params"] = base_params(abstract_state["params"])
        grown = abstract_state["params"]
        abstract_state["params"] = resize_abstract_vocabulary(
            grown, run.model, parent_config.model.vocab_size
        )
    # Only the parameters that the model has are read; a model without MTP skips `mtp`.
    with Checkpoints(parent.folder) as checkpoints:
        state = checkpoints.restore(step, abstract_state, partial=True, digest=checkpoint.manifest)
    if not takes_all:
        first = DataCursor(data[0].fingerprint, data[0].batch_size)
        return run.init_state(grow_vocabulary(state["params"], grown, run.model)), first
    new_rules = [rule for rule in run.rules if rule not in inherited]
    state |= init_sharded_rule_entries(new_rules, state["params"], run.state_shardings)
    offset = int(state["guards"]["data_offset"])
    parent_cursor, own_cursor = _parent_and_own_cursors(
        run.stages, data, step, parent.record.data, offset
    )
    same_window = (
        parent_cursor.reads_same_stream(own_cursor)
        and parent_config.guards.window == config.guards.window
    )
    state["guards"] = guards.reset_for_stage(config.guards, state["guards"], 0, same_window)
    return state, own_cursor


def _inherited_update_rules(run: ResolvedRun, parent_config: Config) -> list[UpdateRule]:
    """Returns the update rules of `run` that its parent has, too, with equal settings. From the
    parent's train state, the run takes over the entries of the returned rules. For example, if
    `train.ema` differs from the parent's, the average of the parameters begins anew.
    """
    rules_of_run, train = run.config.train.update_rules, parent_config.train
    train = dataclasses.replace(
        train, update_rules=tuple(name for name in train.update_rules if name in rules_of_run)
    )
    filtered_config = dataclasses.replace(parent_config, train=train)
    groups = make_parameter_groups(
        filtered_config.model, filtered_config.train.freeze, filtered_config.optimizer
    )
    inherited_rules = make_update_rules(filtered_config, groups)
    return [rule for rule in run.rules if rule in inherited_rules]


def describe_first_state(run: ResolvedRun, data: Sequence[DataSource], start: Start) -> str:
    """Returns a sentence, for the terminal, about the state with which a new run begins."""
    config, initial_model, parent = run.config, start.facts.initial_model, start.parent
    if initial_model is None:
        return "initializing the first state"
    beginning = f"the Hugging Face directory {config.train.init_from}"
    if parent:
        skipped = describe_skipped_checkpoints(initial_model)
        beginning = f"{parent.path} after step {parent.step}{skipped}"
    old_vocab_size = initial_model.model_config.vocab_size
    growth = ""
    if old_vocab_size < run.model.vocab_size:
        growth = (
            f"; its vocabulary of {old_vocab_size:,} grows to {run.model.vocab_size:,}: the new "
            "rows of embedding and head begin as the mean of the old ones"
        )
    text = f"beginning with {beginning}, reading {start.tokenizer_note}: its weights"
    if config.train.init_state == "weights":
        return f"{text} (step 0, new optimizer state, the first batch of the data){growth}"
    parent_cursor, own_cursor = _parent_and_own_cursors(
        run.stages, data, parent.step, initial_model.record.data
    )
    reading = (
        "continue after the rows that it read"
        if own_cursor.continues_stream
        else "differ from its data and begin with their first row"
    )
    windows = (initial_model.config.guards.window, config.guards.window)
    same_window = parent_cursor.reads_same_stream(own_cursor) and windows[0] == windows[1]
    return (
        f"{text}, optimizer and step; the data {reading}; the guards' window "
        f"{'continues' if same_window else 'starts empty'}"
    )


def _parent_and_own_cursors(
    stages: Sequence[ResolvedStage],
    data: Sequence[DataSource],
    step: int,
    parent_cursors: DataCursors,
    data_offset: int = 0,
) -> tuple[DataCursor, DataCursor]:
    """Returns (the parent's cursor, the run's cursor): the place in the training data at which the
    parent's stage of `step` began to read, and the place at which this run begins to read.

    Args:
      stages: the stages of this run.
      data: the training data of every stage of this run.
      step: the number of steps that the parent took.
      parent_cursors: for every stage of the parent, the place at which the stage began to read.
      data_offset: the number of batches that rewinds of the parent skipped.
    """
    parent_cursor = parent_cursors[stage_index_of_step(parent_cursors, step)]
    stage_data = next(
        stage_data for stage, stage_data in zip(stages, data, strict=True) if step < stage.last_step
    )
    return parent_cursor, parent_cursor.for_next_stage(step, stage_data, data_offset)
