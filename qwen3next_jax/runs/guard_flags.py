"""Reacts to the flags that the guards in the train step set. After every step the host reads the
flags, writes an event for each flag, and ends the run if it diverges. The dump of a halted run
holds the inputs of the step at which the run ended.

    WORKDIR/dumps/STEP/
      dump.json        reason, documents, code, versions, configuration
      batch.npz        the batch of the step
      state/           the train state before the step (Orbax)
      manifest.json    digests

`qwen3next replay DUMP` runs the step of the dump again.
"""

import dataclasses
import io
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import UserError, check_format_number, require
from qwen3next_jax.common.storage import remove_tree
from qwen3next_jax.common.version import code_version
from qwen3next_jax.config import Config, GuardConfig, ModelConfig, from_dict, to_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.data.pipeline import DataSource
from qwen3next_jax.model.layer_properties import part_versions
from qwen3next_jax.model.visible_targets import why_no_targets
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.store.arrays import read_arrays, write_arrays
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.runs.versions import check_module_versions
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.gradients import Batch
from qwen3next_jax.training.guards import HALTED, NO_TARGETS, NON_FINITE, SKIPPED, SPIKE
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import DataCursors
from qwen3next_jax.training.state import State

_DUMP_FORMAT = 3  # of dump.json


class RunHalted(Exception):
    """The guards ended the run at `step`.

    Attributes:
      reason: why the guards ended the run, as text.
      is_spike: whether a loss spike ended the run.
      state: the train state when the run ended. No parameter was updated in `step` or in the steps
        after it.
    """

    def __init__(self, step: int, reason: str, is_spike: bool, state: State):
        super().__init__(reason)
        self.step, self.reason, self.is_spike, self.state = step, reason, is_spike, state


class GuardFlags:
    """Reads the flags of every step, and writes an event for each flag that is set."""

    def __init__(
        self, guards: GuardConfig, model: ModelConfig, cursors: DataCursors, metrics: MetricsFile
    ):
        """Makes a reader of flags.

        Args:
          guards: the settings of the guards.
          model: the model of the run.
          cursors: for every stage of the run, the place in the training data at which the stage
            begins to read.
          metrics: the metrics.jsonl to which events are written.
        """
        self._config = guards
        self._model = model
        self._first_steps = {cursor.step + 1 for cursor in cursors if cursor}
        self._metrics = metrics

    def check(self, step: int, values: dict[str, Any], state: State) -> None:
        """Reads the flags of a step, and writes events about them.

        Args:
          step: the number of the step. The devices must have finished this step.
          values: the metrics of the step.
          state: the train state after the step, which becomes an attribute of `RunHalted`.

        Raises:
          RunHalted: the guards ended the run at this step.
          UserError: the first batch of a stage has no token to predict. All processes raise this
            error, because all of them have the same flags.
        """
        flags = int(values["flags"])
        if not flags:
            return
        if flags & NO_TARGETS:
            self._report_no_targets(step, values)
        if not flags & (NON_FINITE | SPIKE | HALTED):
            return
        reason = self._describe(flags, values)
        numbers = {
            name: float(values[name])
            for name in ("total_loss", "grad_norm", "loss_z", "grad_norm_z")
        }
        if flags & SPIKE:
            self._metrics.write(
                "spike", step, reason=reason, skipped=bool(flags & SKIPPED), **numbers
            )
        if flags & SKIPPED:
            self._metrics.write(
                "skip", step, reason=reason, skipped=int(values["skipped"]), **numbers
            )
        if flags & HALTED:
            is_spike = bool(flags & SPIKE and self._config.on_spike in ("rewind", "stop"))
            if not is_spike:
                reason += f", the last of {self._config.max_skips} skipped updates in a row"
            raise RunHalted(step, reason, is_spike, state)

    def _report_no_targets(self, step: int, values: dict[str, Any]) -> None:
        """Reports that the batch of a step has no token to predict, and that its update was
        skipped.

        Raises:
          UserError: the batch is the first of a stage. Such a stage would train on nothing, and the
            likely cause is its settings. If a later batch of a stage has no token to predict, its
            documents may be the cause, so the method only writes an event.
        """
        reason = f"its batch has no token to predict: {why_no_targets(self._model)}"
        require(step not in self._first_steps, f"step {step}: {reason}")
        self._metrics.write("no_targets", step, reason=reason, skipped=int(values["skipped"]))

    def _describe(self, flags: int, values: dict[str, Any]) -> str:
        """Describes the loss and gradient norm that set `flags`."""
        if flags & NON_FINITE:
            return (
                f"loss {float(values['total_loss']):.4g}, gradient norm "
                f"{float(values['grad_norm']):.4g}: not finite"
            )
        return (
            f"spike: loss {float(values['total_loss']):.4g} (z {float(values['loss_z']):.1f}), "
            f"gradient norm {float(values['grad_norm']):.4g} (z {float(values['grad_norm_z']):.1f})"
        )


@dataclasses.dataclass(frozen=True)
class Dump:
    """The inputs of one training step, on one device.

    Attributes:
      run: the resolved run, on a mesh of one device.
      state: the train state before the step.
      batch: the batch of the step.
      step: the number of the step.
      reason: why the guards ended the run at this step.
      document_names: for every row of the batch, the names of its documents.
    """

    run: ResolvedRun
    state: State
    batch: Batch
    step: int
    reason: str
    document_names: list[list[str]]


def write_dump(
    store: RunStore, config: Config, data: DataSource, index: int, halt: RunHalted
) -> tuple[pathlib.Path, list[list[str]]]:
    """Writes the inputs of the halted step to WORKDIR/dumps/STEP. All processes must call this
    function: they write the train state together, and process 0 writes the other files.

    Args:
      config: the configuration of the run.
      data: the training data of the stage.
      index: the index of the batch in `data`.

    Returns:
      (the folder of the dump, the names of the documents of every row).
    """
    folder = store.dump_folder(halt.step)
    documents = data.document_names_of_batch(index)

    def write_batch() -> None:
        # An earlier dump of this step has the same content.
        remove_tree(folder)
        folder.mkdir(parents=True)
        batches, content = data.batches(index), io.BytesIO()
        np.savez(content, **next(batches))
        (folder / "batch.npz").write_bytes(content.getvalue())
        batches.close()

    broadcast_from_process_0(write_batch)
    write_arrays(folder / "state", _state_before_halt(halt))
    if is_process_0():
        record = {
            "format": _DUMP_FORMAT,
            "step": halt.step,
            "reason": halt.reason,
            "documents": documents,
            "code": code_version(),
            "versions": part_versions(config.model),
            "config": to_dict(config),
        }
        (folder / "dump.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        store.write_manifest(folder)
    return folder, documents


def _state_before_halt(halt: RunHalted) -> State:
    """Returns the train state before the halted step. The updates of the halted step and of the
    steps after it were skipped. So the halted step and the steps after it changed only counts and
    the flag `halted`. This function restores the counts `step` and `skipped` and the flag `halted`.
    The counts `spikes` and `skipped_in_a_row`, on which no update depends, may still include the
    halted step and the steps after it.
    """
    step, guards = halt.state["step"], halt.state["guards"]
    before = jnp.full_like(step, halt.step - 1)
    guards = guards | {
        "skipped": guards["skipped"] - (step - before),
        "halted": jnp.zeros_like(guards["halted"]),
    }
    return halt.state | {"step": before, "guards": guards}


def read_dump(folder: pathlib.Path) -> Dump:
    """Reads a dump that `write_dump` wrote.

    Raises:
      UserError: `folder` is not a dump or is damaged, or this code has other versions of the
        model's modules than the code that wrote the dump.
    """
    if not (folder / "dump.json").is_file():
        raise UserError(
            f"{folder}: not a dump of a step (it has no dump.json): expected a folder such as "
            "WORKDIR/dumps/STEP"
        )
    if damage := manifest.find_damage(folder):
        raise UserError(f"{folder}: damaged: {damage}")
    record = json.loads((folder / "dump.json").read_text())
    check_format_number(folder / "dump.json", record.get("format"), _DUMP_FORMAT)
    check_trusted(record["config"], f"{folder / 'dump.json'}: config")
    config = from_dict(Config, record["config"])
    check_module_versions(folder, record["versions"], record["code"], config.model)
    run = resolve_run(config, single_device_mesh())
    state = read_arrays(folder.absolute() / "state", run.abstract_state)
    batch = dict(np.load(io.BytesIO((folder / "batch.npz").read_bytes())))
    return Dump(
        run,
        state=jax.device_put(jax.device_get(state)),
        batch=batch,
        step=record["step"],
        reason=record["reason"],
        document_names=record["documents"],
    )
