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

from jax.sharding import Mesh

from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.runs import preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.folder import read_config, read_run
from qwen3next_jax.runs.preflight import Parent, compare_tokens
from qwen3next_jax.training.guards import renewed
from qwen3next_jax.training.stages import Reading, Readings, parts_of, recorded, stage_of
from qwen3next_jax.training.step import State, abstract_train_state, init_state


def start_state(
    config: Config, mesh: Mesh, data: Sequence[Data], parent: Parent
) -> tuple[State, Reading]:
    """(the state before the first step of a run that begins with `parent`, read onto `mesh` as
    it lies there; what that step reads).

    Raises:
      UserError: the checkpoint is damaged, or of another structure.
    """
    folder, step = pathlib.Path(parent["path"]), parent["step"]
    # Read before the checkpoint, which is then found to be the one of `parent` and of this run.
    run, theirs = read_run(folder), read_config(folder)
    abstract = abstract_train_state(config, mesh)
    whole = config.train.init_state == "all"
    wanted = (
        abstract_train_state(dataclasses.replace(config, guards=theirs.guards), mesh)
        if whole
        else abstract
    )
    # what the model does not have, such as mtp where it is left out, is not read
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.restore(
            step,
            {name: wanted[name] for name in (wanted if whole else ("params", "step"))},
            whole=False,
            digest=parent["manifest"],
        )
    if not whole:
        return init_state(config, mesh, state["params"]), Reading(
            data[0].fingerprint, data[0].batch_size
        )
    offset = int(state["guards"]["data_offset"])
    before, now = _readings(config, data, step, recorded(run, theirs), offset)
    same_window = before.like(now) and theirs.guards.window == config.guards.window
    return state | {"guards": renewed(config.guards, state["guards"], 0, same_window)}, now


def describe(config: Config, data: Sequence[Data], parent: Parent | None) -> str:
    """How a run begins, in words."""
    if not config.train.init_from:
        return "making the first state"
    run, theirs, beginning = None, None, f"the Hugging Face directory {config.train.init_from}"
    if parent:
        folder = pathlib.Path(parent["path"])
        run, theirs = read_run(folder), read_config(folder)
        older = preflight.passed_over(config.train.init_from, parent)
        beginning = f"{parent['path']} after step {parent['step']}{older}"
    text = f"beginning with {beginning}, reading {compare_tokens(config)}: its weights"
    if config.train.init_state == "weights":
        return f"{text} (step 0, a new optimizer, the data from their first batch)"
    before, now = _readings(config, data, parent["step"], recorded(run, theirs))
    rows = (
        "go on behind the rows that it took"
        if now.row or now.starts.keys() & {now.fingerprint, *now.streams}
        else ("begin with their first row, as they are others")
    )
    same_window = before.like(now) and theirs.guards.window == config.guards.window
    return (
        f"{text}, optimizer and step; the data {rows}; the guards' window "
        f"{'goes on' if same_window else 'begins anew'}"
    )


def _readings(
    config: Config, data: Sequence[Data], step: int, readings: Readings, data_offset: int = 0
) -> tuple[Reading, Reading]:
    """What the parent, of these `readings`, read until `step`, and what this run reads first."""
    before = readings[stage_of(readings, step)]
    now = next(rows for part, rows in zip(parts_of(config), data, strict=True) if step < part.last)
    return before, before.then(step, now, data_offset)
