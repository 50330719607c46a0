"""What the host does about the flags that the guards raise: events, the end of a run that went
wrong, and its dump.

    WORKDIR/dumps/STEP/
      dump.json        reason, documents, code, versions, configuration
      batch.npz        what the step took
      state/           what it met (Orbax)
      manifest.json    digests

`qwen3next replay DUMP` runs the offending step again.
"""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.version import code_version
from qwen3next_jax.config import Config, GuardConfig, ModelConfig, from_dict, to_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.model.block import versions
from qwen3next_jax.model.visible_targets import why_no_targets
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.checkpoint import read_arrays, write_arrays
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.gradients import Batch
from qwen3next_jax.training.guards import HALTED, NO_TARGETS, NON_FINITE, SKIPPED, SPIKE
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import DataCursors
from qwen3next_jax.training.state import State


class Halted(Exception):
    """The guards ended the run at `step`. `state` is what that step met: no update was applied
    since.
    """

    def __init__(self, step: int, reason: str, spike: bool, state: State):
        super().__init__(reason)
        self.step, self.reason, self.spike, self.state = step, reason, spike, state


class Incidents:
    """Reads the flags of every step, and writes an event where one is raised."""

    def __init__(
        self, guards: GuardConfig, model: ModelConfig, cursors: DataCursors, metrics: MetricsFile
    ):
        """`cursors`: where every stage of the run reads the data."""
        self._config = guards
        self._model = model
        self._first_steps = {cursor.step + 1 for cursor in cursors if cursor}
        self._metrics = metrics

    def look(self, step: int, values: dict[str, Any], state: State) -> None:
        """Reads the flags in `values`, the metrics of `step`, which must have ended.

        Raises:
          Halted: the guards ended the run at this step.
          UserError: the first batch of a stage has nothing to predict. All processes raise it,
            as all of them have the same flags.
        """
        flags = int(values["flags"])
        if not flags:
            return
        if flags & NO_TARGETS:
            self._without_targets(step)
        if not flags & ~NO_TARGETS:
            return
        what = self._describe(flags, values)
        numbers = {
            name: float(values[name])
            for name in ("total_loss", "grad_norm", "loss_z", "grad_norm_z")
        }
        if flags & SPIKE:
            self._metrics.write(
                "spike", step, reason=what, skipped=bool(flags & SKIPPED), **numbers
            )
        if flags & SKIPPED:
            self._metrics.write(
                "skip", step, reason=what, skipped=int(values["skipped"]), **numbers
            )
        if flags & HALTED:
            spike = bool(flags & SPIKE and self._config.on_spike in ("rewind", "stop"))
            raise Halted(
                step,
                what
                if spike
                else f"{what}, the last of {self._config.max_skips} skipped updates in a row",
                spike,
                state,
            )

    def _without_targets(self, step: int) -> None:
        """Of the first batch of a stage the settings are to blame: the run would learn nothing,
        at a loss of 0. A later one may be a matter of its documents.
        """
        reason = f"its batch has no token to predict: {why_no_targets(self._model)}"
        require(step not in self._first_steps, f"step {step}: {reason}")
        self._metrics.write("no_targets", step, reason=reason)

    def _describe(self, flags: int, values: dict[str, Any]) -> str:
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
    """What a step met: everything that is needed to take it again, on one device.

    documents: names of the documents in every row of the batch.
    """

    run: ResolvedRun
    state: State
    batch: Batch
    step: int
    reason: str
    documents: list[list[str]]


def write_dump(
    workdir: pathlib.Path, config: Config, data: Data, index: int, halt: Halted
) -> tuple[pathlib.Path, list[list[str]]]:
    """Saves what the halted step of a run of `config` met, with batch `index` of `data`, under
    WORKDIR/dumps/STEP. → (the folder, the documents of every row).

    All processes write the state, process 0 the rest.
    """
    folder = pathlib.Path(workdir).absolute() / "dumps" / str(halt.step)
    documents = data.document_names(index)

    def begin() -> None:
        # of the same step of the same run: it would be written again as it was
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        batches = data.batches(index)
        np.savez(folder / "batch.npz", **next(batches))
        batches.close()

    broadcast_from_process_0(begin)
    # The step counter went on while the host looked; everything else stood still.
    state = halt.state | {"step": jnp.full_like(halt.state["step"], halt.step - 1)}
    write_arrays(folder / "state", state)
    if is_process_0():
        record = {
            "step": halt.step,
            "reason": halt.reason,
            "documents": documents,
            "code": code_version(),
            "versions": versions(config.model),
            "config": to_dict(config),
        }
        (folder / "dump.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        manifest.write_manifest(folder)
    return folder, documents


def read_dump(folder: pathlib.Path) -> Dump:
    """Reads what `write_dump` wrote.

    Raises:
      UserError: `folder` is no dump, or a damaged one, or one of other mathematics.
    """
    if not (folder / "dump.json").is_file():
        raise UserError(
            f"{folder}: not a dump of a step (it has no dump.json): expected a folder such as "
            "WORKDIR/dumps/STEP"
        )
    if damage := manifest.find_damage(folder):
        raise UserError(f"{folder}: damaged: {damage}")
    record = json.loads((folder / "dump.json").read_text())
    check_trusted(record["config"], f"{folder / 'dump.json'}: config")
    config = from_dict(Config, record["config"])
    check_versions(folder, record, config, trains=True)
    run = resolve_run(config, single_device_mesh())
    state = read_arrays(folder.absolute() / "state", run.abstract_state)
    batch = dict(np.load(folder / "batch.npz"))
    return Dump(
        run,
        state=jax.device_put(jax.device_get(state)),
        batch=batch,
        step=record["step"],
        reason=record["reason"],
        documents=record["documents"],
    )
