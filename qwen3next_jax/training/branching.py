"""How a run begins with another one (`train.init_from = RUN` or `RUN@STEP`): with its weights, or with its whole state.

The weights alone begin a run like any other: step 0, the data from their first batch. The whole state (`train.init_state = "all"`) keeps
optimizer and step as well, and, where the data are the same (one fingerprint), goes on behind the rows that the parent took; where
the batch size and the guards' window are the same, too, every bit is that of the parent's own continuation.
"""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.training.checkpoint import Checkpoints
from qwen3next_jax.training.fingerprint import read_config, read_run
from qwen3next_jax.training.guards import init_guards
from qwen3next_jax.training.preflight import Parent
from qwen3next_jax.training.step import State, abstract_train_state, init_state


def start_state(config: Config, mesh: Mesh, data: Data, parent: Parent) -> State:
    """The state before the first step of a run that begins with `parent`, read onto `mesh` as it lies there.

    Raises:
      UserError: the checkpoint is damaged, or of another structure.
    """
    folder, step = pathlib.Path(parent["path"]), parent["step"]
    abstract, theirs = abstract_train_state(config, mesh), read_config(folder)
    whole = config.train.init_state == "all"
    wanted = abstract_train_state(dataclasses.replace(config, guards=theirs.guards), mesh) if whole else abstract
    with Checkpoints(folder) as checkpoints:  # what the model does not have, such as mtp where it is left out, is not read
        state = checkpoints.restore(step, {name: wanted[name] for name in (wanted if whole else ("params", "step"))}, whole=False)
    if not whole:
        return init_state(config, mesh, state["params"])
    same_data, same_guards = _alike(config, data, parent)
    if not same_guards:
        held, batch_size = state["guards"], config.train.batch_size
        rows = (step + int(held["data_offset"])) * theirs.train.batch_size if same_data else 0
        # The optimizer counts its own updates, which are the steps less those that were skipped: the count stays.
        guards = init_guards(config.guards) | {name: held[name] for name in ("skipped", "spikes")}
        guards["data_offset"] = guards["data_offset"] + (-(-rows // batch_size) - step)
        state["guards"] = jax.device_put(guards, jax.tree.map(lambda leaf: leaf.sharding, abstract["guards"]))
    return state


def describe(config: Config, data: Data, parent: Parent | None) -> str:
    """How a run begins, in words."""
    if not parent:
        return "making the first state"
    text = f"beginning with {parent['path']} after step {parent['step']}: its weights"
    if read_run(pathlib.Path(parent["path"]))["tokenizer"] != data.tokenizer.fingerprint:
        text += ", which know OTHER TOKENS than those of this tokenizer"
    if config.train.init_state == "weights":
        return f"{text} (step 0, a new optimizer, the data from their first batch)"
    same_data, same_guards = _alike(config, data, parent)
    rows = "behind the rows that it took" if same_data else "from their first batch, as they are others"
    return f"{text}, optimizer and step; the data {rows}; the guards' window {'goes on' if same_guards else 'begins anew'}"


def _alike(config: Config, data: Data, parent: Parent) -> tuple[bool, bool]:
    """Whether the data are those of the parent, and whether its guards can go on: losses and gradients are of the same kind."""
    run, theirs = read_run(pathlib.Path(parent["path"])), read_config(pathlib.Path(parent["path"]))
    same_data = run["data"] == data.fingerprint
    return same_data, (same_data and theirs.train.batch_size == config.train.batch_size
                       and theirs.guards.window == config.guards.window)
