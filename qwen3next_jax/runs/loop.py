"""The training run, as a story: data, state, resume, stages, end."""

import dataclasses
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import Batch, Data, source_of
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals import evaluation
from qwen3next_jax.inference.decode import check_request, complete
from qwen3next_jax.interop.huggingface import check_hf, load_params
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.processes.distributed import (
    BatchShare,
    StopVote,
    check_shared,
    is_leader,
    process_0_first,
    broadcast_from_process_0,
    run_on_all,
)
from qwen3next_jax.processes.watchdog import Signals, Watchdog
from qwen3next_jax.reporting.events import each_event, ended_badly
from qwen3next_jax.reporting.figures import main_values, named, record
from qwen3next_jax.runs import branching, preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.display import Display, PreparationProgress, title
from qwen3next_jax.runs.folder import RunLock, move_aside, open_run, read_run, saved_steps, seal
from qwen3next_jax.runs.incidents import Halted, Incidents, write_dump
from qwen3next_jax.runs.profiling import Profiler
from qwen3next_jax.runs.telemetry import MetricsFile, Throughput, open_metrics, surroundings
from qwen3next_jax.sharding.mesh import check_divides, make_mesh
from qwen3next_jax.training import stages
from qwen3next_jax.training.diagnostics import make_diagnostics_step, summarise
from qwen3next_jax.training.guards import NON_FINITE, renewed
from qwen3next_jax.training.stages import Reading, Readings, data_offset_of, parts_of
from qwen3next_jax.training.step import (
    State,
    abstract_model,
    abstract_train_state,
    batch_sharding,
    compute_mesh,
    init_state,
    make_train_step,
)

MAX_REWINDS = 3  # to one checkpoint


def train(config: Config, workdir: pathlib.Path, restart: bool = False) -> int:
    """Trains until `train.steps`, from the newest checkpoint in `workdir` or from the start.
    Returns the exit code.

    `restart`: what is in `workdir` is moved into a folder in it, and training starts anew.
    """
    begun = time.time()
    # Devices
    first = is_leader()  # the process that records and shows the run
    mesh = make_mesh(config.parallel)
    abstract_state = abstract_train_state(config, mesh)
    run_on_all(lambda: check_start(config, mesh, workdir, restart))

    # Data
    with PreparationProgress() as progress:
        data = process_0_first(lambda: stages.open_stages(config, progress if first else None))
    tokenizer, fingerprints = data[0].tokenizer, [rows.fingerprint for rows in data]
    run_on_all(
        lambda: None,
        {"data fingerprint": " ".join(fingerprints), "tokenizer": tokenizer.fingerprint},
    )
    # a sample that cannot be drawn should not wait for the first evaluation
    if config.eval.sample_tokens:
        check_request(
            config.model,
            [tokenizer.encode(config.eval.sample_prompt)],
            config.eval.sample_tokens,
            0.7,
        )
    lock = RunLock(workdir)

    def open_folder():
        if restart:
            move_aside(workdir)
        parent = preflight.find_parent(config, workdir)
        return parent, *open_run(workdir, config, fingerprints, tokenizer.fingerprint, parent)

    parent, description, changes = broadcast_from_process_0(lambda: lock.held(open_folder))
    check_shared(workdir, config.parallel.start_timeout)

    with (
        lock,
        Checkpoints(
            workdir, config.checkpoint, [part.last for part in parts_of(config)]
        ) as checkpoints,
    ):
        # State: resume, or start
        first_step = checkpoints.newest_good_step() or 0
        if first_step >= config.train.steps:
            trouble = broadcast_from_process_0(
                lambda: ended_badly(
                    (event for _, event in each_event(workdir / "metrics.jsonl")), first_step
                )
            )
            return _at_last_step(
                config,
                workdir,
                first_step,
                trouble,
                f"{workdir}: already trained to step {first_step} of {config.train.steps}.",
                tokenizer,
            )
        checkpoints.begin(first_step)
        check_shared(checkpoints.directory, config.parallel.start_timeout)
        if first:  # either can take minutes, and the display needs the state
            if first_step:
                beginning = f"restoring step {first_step}"
            else:
                beginning = branching.describe(config, data, parent)
            print(f"{workdir}: {beginning}", flush=True)
        if new := not first_step:
            state, begins = start_state(config, mesh, data, parent)
        else:
            state, begins = (
                checkpoints.restore(first_step, abstract_state),
                stages.first_of(stages.recorded(read_run(workdir), config)),
            )
        first_step = int(state["step"])  # that of its parent in a branch with the whole state
        readings = stages.read_on(config, data, begins)
        if description:
            description["data"] = [reading and reading._asdict() for reading in readings]

        # Stages
        headline = title(
            config,
            mesh,
            state,
            data[0].describe()["title"],
            first_step,
            parent["path"] if new and first_step else "",
        )
        with (
            Display(headline, config, first_step, first) as display,
            open_metrics(config, workdir, first_step, display) as metrics,
            Signals(display.say) as signals,
            Watchdog(workdir, jax.process_index()) as watchdog,
            Profiler(config.profile, workdir, metrics.write) as profiler,
        ):
            metrics.start(first_step, begun, **surroundings())
            broadcast_from_process_0(lambda: seal(workdir, description, tokenizer, new))
            if new and first_step:  # from here on the branch does not need its parent
                checkpoints.save(first_step, state)
                checkpoints.wait()
            run = _Run(
                config,
                mesh,
                data,
                readings,
                parent,
                checkpoints=checkpoints,
                metrics=metrics,
                display=display,
                profiler=profiler,
                watchdog=watchdog,
            )
            if changes:
                metrics.write("changed", first_step, changes=[[*change] for change in changes])
                display.say(
                    "\n".join(f"changed since the run before: {change}" for change in changes)
                )
            while True:
                try:
                    step, heldout = run.loop(state, first_step, signals)
                    break
                except Halted as halt:
                    watchdog.allow(config.train.compile_timeout, "a rewind or a dump", halt.step)
                    rewound = run.rewind(halt)
                    if rewound is None:
                        return run.stop(halt, workdir)
                    first_step, state = rewound
            checkpoints.wait()
            run.incidents.tell(checkpoints)
            saved = broadcast_from_process_0(lambda: step in checkpoints.steps())
            if run.trouble:
                metrics.write("stop", step, reason=run.trouble, exit_code=int(ExitCode.DIVERGED))

    # End
    if not saved:
        return _ended(
            ExitCode.NOT_SAVED,
            f"step {step} could not be saved in {workdir} (see above): the same command goes on "
            "from the checkpoint before; make room first",
        )
    if step < config.train.steps:
        return _ended(
            ExitCode.INTERRUPTED,
            f"Interrupted: saved after step {step} of {config.train.steps} in {workdir}. The same "
            "command goes on from there.",
        )
    return _at_last_step(
        config, workdir, step, run.trouble, f"Trained {step} steps: held-out {heldout}.", tokenizer
    )


def _at_last_step(
    config: Config, workdir: pathlib.Path, step: int, trouble: str, done: str, tokenizer: Tokenizer
) -> ExitCode:
    """Ends a run that has reached its last step: badly where there is `trouble`, else with what
    is `done` and what comes next.
    """
    if trouble:
        return _ended(
            ExitCode.DIVERGED,
            f"{workdir}: diverged by step {step}, its last: {trouble}. {_advice(config)}",
        )
    folder = shlex.quote(str(workdir))
    generate = (
        f", or uv run qwen3next generate --model={folder} "
        f"--prompt={shlex.quote(config.eval.sample_prompt)}"
    )
    return _ended(
        ExitCode.DONE,
        f"{done} Checkpoints and metrics.jsonl are in {workdir}; next: uv run eval.py "
        f"--workdir={folder}" + generate * tokenizer.reads_text,
    )


def _advice(config: Config) -> str:
    return (
        f"A lower optimizer.learning_rate (now {config.optimizer.learning_rate}) in a new "
        "--workdir may help"
    )


def _ended(code: ExitCode, text: str) -> ExitCode:
    """→ `code`, after `text` on the terminal."""
    if is_leader():
        good = code in (ExitCode.DONE, ExitCode.INTERRUPTED)
        print(text if good else f"error: {text}", file=sys.stdout if good else sys.stderr)
    return code


class _Run:
    """The loop with what it reads and writes. `enter` makes ready for a stage: `part`, `data`,
    `share` and what is compiled for it.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        all_data: Sequence[Data],
        readings: Readings,
        parent: preflight.Parent | None,
        *,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        display: Display,
        profiler: Profiler,
        watchdog: Watchdog,
    ):
        self.config, self.mesh, self.all_data, self.readings, self.parent = (
            config,
            mesh,
            all_data,
            readings,
            parent,
        )
        self.checkpoints, self.metrics, self.display, self.profiler, self.watchdog = (
            checkpoints,
            metrics,
            display,
            profiler,
            watchdog,
        )
        self.graphdef, _ = abstract_model(config)
        self.tokenizer, self.part = all_data[0].tokenizer, None
        subject = evaluation.Subject(
            config.model,
            self.graphdef,
            self.tokenizer,
            lambda: self.data,
            evaluation.Options(config.eval.rows),
            compute_mesh(mesh),
        )
        self.heldout = evaluation.make(("heldout",), subject)["heldout"]
        self.suites = evaluation.make(
            config.eval.suites,
            dataclasses.replace(subject, options=evaluation.options_of(config.eval)),
        )
        self.votes, self.incidents = StopVote(), Incidents(config.guards, metrics)
        self.heldout_figure, self.heldout_loss = "", 0.0
        self.trouble = ""  # why the last step is no good end
        self.rewinds: dict[int, int] = {}  # how often to which step

    def enter(self, step: int, state: State) -> Iterator[Batch]:
        """Makes ready for the stage of `step`, before which `state` stands. → its batches from
        there on.
        """
        before, number = (stages.stage_of(self.readings, s) for s in (step - 1, step))
        reading, part = self.readings[number], parts_of(self.config)[number]
        config = part.config
        if before != number:
            held, was = state["guards"], self.readings[before]
            state["guards"] = renewed(
                config.guards,
                held,
                data_offset_of(int(held["data_offset"]), was, reading),
                was.like(reading),
            )
        if part != self.part:
            self.part, self.data = part, self.all_data[number]
            self.train_step = make_train_step(config, self.mesh, part.schedule_from)
            self.diagnostics_step = make_diagnostics_step(
                config, self.graphdef, compute_mesh(self.mesh)
            )
            self.throughput = Throughput(self.config, part, self.data.describe()["bits_per_nat"])
            self.share = BatchShare(batch_sharding(self.mesh), config.train.batch_size)
        if part.name and step == reading.step + 1:
            shape = {
                "batch_size": config.train.batch_size,
                "sequence_length": config.train.sequence_length,
            }
            self.metrics.write(
                "stage", step, stage=part.name, steps=part.last - part.first, **shape
            )
        return self.data.batches(
            reading.batch(step, int(state["guards"]["data_offset"])), self.share.rows
        )

    def loop(self, state: State, first_step: int, signals: Signals) -> tuple[int, str]:
        """→ (steps taken in all, last held-out figure)."""
        config = self.config
        self.incidents.restart(first_step)
        values: dict[str, Any] = {}
        since, waited, last_logged = time.perf_counter(), 0.0, first_step
        for step in range(first_step + 1, config.train.steps + 1):
            if first := step == first_step + 1 or step > self.part.last:
                batches = self.enter(step, state)
            self.watchdog.allow(
                config.train.compile_timeout if first else config.train.step_timeout, "a step", step
            )
            asked = time.perf_counter()
            batch = self.share.spread(next(batches))
            waited += time.perf_counter() - asked
            # read once: a signal after this line is for the next step
            vote = self.votes.cast(signals.caught)
            self.profiler.before(step, values)
            before, (state, values) = values, self.train_step(state, batch)
            self.profiler.after(step, values)
            # One step runs while the next is handed over; more would only make the display and a
            # signal late.
            jax.block_until_ready(before)
            self.incidents.look(step - 1, before, state)
            self.display.step(step - 1)
            self.incidents.tell(self.checkpoints)

            stop = bool(vote)
            last = step == self.part.last  # of its stage
            saves = stop or last or step % config.checkpoint.every == 0
            if step % config.train.log_every == 0 or saves:  # what is saved has been looked at
                values = jax.device_get(values)
                self.incidents.look(step, values, state)
                self.display.step(step)
                now = time.perf_counter()
                self._log(step, values, now - since, waited, step - last_logged)
                since, waited, last_logged = now, 0.0, step
            elif first:  # the compilation is not part of any speed
                jax.block_until_ready(values)
                since, waited, last_logged = time.perf_counter(), 0.0, step
            self.watchdog.allow(config.train.compile_timeout, "an evaluation or a save", step)
            begun = time.perf_counter()
            if (
                config.telemetry.diagnostics_every
                and step % config.telemetry.diagnostics_every == 0
            ):
                self._diagnose(step, state, batch, values)
            if step % config.eval.every == 0 or last:
                self._evaluate(step, state)
            if saves:
                self.checkpoints.save(step, state)
            since += time.perf_counter() - begun
            if stop:
                return step, self.heldout_figure
        self.trouble = self._trouble(values, state)
        return config.train.steps, self.heldout_figure

    def _trouble(self, values: dict[str, Any], state: State) -> str:
        """Whether the run diverged when the guards had too few steps left to end it; `values`
        are of the last step.
        """
        if int(values["verdict"]) & NON_FINITE:
            return (
                f"the last {int(state['guards']['skipped_in_a_row'])} updates were skipped, as "
                "loss or gradient were not finite"
            )
        return (
            "" if math.isfinite(self.heldout_loss) else f"the held-out loss is {self.heldout_loss}"
        )

    def _log(
        self, step: int, values: dict[str, Any], seconds: float, waited: float, steps: int
    ) -> None:
        load = values.get("expert_load")
        record = {
            name: float(value)
            for name, value in values.items()
            if name not in ("expert_load", "grad_norms", "verdict")
        }
        if load is not None:
            record |= {
                "busiest_expert": float(np.max(load)),
                "idle_experts": int(np.sum(load == 0)),
            }
        self.metrics.write(
            "train",
            step,
            **record,
            **self.throughput.measure(step, record["loss"], steps, seconds, waited),
        )

    def rewind(self, halt: Halted) -> tuple[int, State] | None:
        """→ (step, state) of the newest good checkpoint, from which the data go on behind the
        batch of the spike; None where the run is to end.
        """
        if not halt.spike or self.config.guards.on_spike != "rewind":
            return None
        self.checkpoints.wait()
        step = self.checkpoints.newest_good_step() or 0
        self.rewinds[step] = self.rewinds.get(step, 0) + 1
        if self.rewinds[step] > MAX_REWINDS:
            return None
        offset = stages.rewound(
            self.readings, halt.step, int(halt.state["guards"]["data_offset"]), step
        )
        # a device may not have room for two states
        jax.tree.map(lambda leaf: leaf.delete(), halt.state)
        state = (
            self.checkpoints.restore(step, abstract_train_state(self.config, self.mesh))
            if step
            else start_state(self.config, self.mesh, self.all_data, self.parent)[0]
        )
        self.checkpoints.begin(step)
        before = state["guards"]["data_offset"]
        state["guards"]["data_offset"] = jax.device_put(np.int32(offset), before.sharding)
        self.metrics.rewind(step)
        self.metrics.write(
            "rewind", halt.step, to_step=step, data_offset=offset, reason=halt.reason
        )
        return step, state

    def stop(self, halt: Halted, workdir: pathlib.Path) -> int:
        """Ends a halted run with a dump of what the step met. → exit code."""
        reading = self.readings[stages.stage_of(self.readings, halt.step)]
        index = reading.batch(halt.step, int(halt.state["guards"]["data_offset"]))
        folder, documents = write_dump(workdir, self.config, self.data, index, halt)
        self.metrics.write(
            "stop",
            halt.step,
            reason=halt.reason,
            exit_code=int(ExitCode.DIVERGED),
            dump=str(folder),
            documents=documents,
        )
        names = sorted({name for row in documents for name in row})
        return _ended(
            ExitCode.DIVERGED,
            f"stopped at step {halt.step}: {halt.reason}. Its batch holds {', '.join(names[:8])}"
            f"{', …' * (len(names) > 8)}. Saved for a look: uv run qwen3next replay "
            f"{shlex.quote(str(folder))}. {_advice(self.config)}, or guards.on_spike",
        )

    def _diagnose(
        self, step: int, state: State, batch: dict[str, jax.Array], values: dict[str, Any]
    ) -> None:
        measured = jax.device_get(
            (
                self.diagnostics_step(state["params"], batch),
                values["grad_norms"],
                values.get("expert_load"),
            )
        )
        self.metrics.write("diagnostics", step, **summarise(self.config, *measured))

    def _evaluate(self, step: int, state: State) -> None:
        values = self.heldout.run(state["params"])
        self.heldout_loss = values["loss"]
        self.heldout_figure = "  ".join(
            f"{value.label} {value}"
            for value in main_values(named(values, self.heldout.figures))[:1]
        )
        self.metrics.write("heldout", step, **record(values, self.heldout.figures))
        for name, suite in self.suites.items():
            self.metrics.write(
                "suite", step, suite=name, **record(suite.run(state["params"]), suite.figures)
            )
        if self.config.eval.sample_tokens:
            self.metrics.write("sample", step, text=self._sample(state["params"]))

    def _sample(self, params: dict) -> str:
        config, tokenizer = self.config.eval, self.tokenizer
        new = complete(
            nnx.merge(self.graphdef, params),
            [tokenizer.encode(config.sample_prompt)],
            max_new_tokens=config.sample_tokens,
            temperature=0.7,
            stop_ids=(tokenizer.eos_id,),
            mesh=compute_mesh(self.mesh),
        )[0]
        return config.sample_prompt + tokenizer.decode(new)


def check_start(config: Config, mesh: Mesh, workdir: pathlib.Path, restart: bool = False) -> None:
    """Raises UserError for all that can be told before data are prepared: what `preflight` looks
    at, every stage's batches on `mesh`, suites, the tensors of `init_from`.
    """
    preflight.check(config, workdir, restart)
    for part in parts_of(config):
        check_divides(part.config, mesh, *split_sizes(config.model))
    evaluation.check(
        config.eval.suites,
        evaluation.options_of(config.eval),
        config.model,
        source_of(config.data).tokenizer_of(config.data, config.model.vocab_size),
    )
    if (
        config.train.init_from
        and not preflight.names_run(config.train.init_from)
        and (restart or not saved_steps(workdir))
    ):
        check_hf(config.train.init_from)


def start_state(
    config: Config, mesh: Mesh, data: Sequence[Data], parent: preflight.Parent | None = None
) -> tuple[State, Reading]:
    """(the state before the first step: random weights, or what `train.init_from` names; what
    that step reads).
    """
    if parent:
        return branching.start_state(config, mesh, data, parent)
    reading = Reading(data[0].fingerprint, data[0].batch_size)
    if not config.train.init_from:
        return init_state(config, mesh), reading
    preflight.check_structure(config)
    return init_state(
        config,
        mesh,
        load_params(config.train.init_from, abstract_train_state(config, mesh)["params"]),
    ), reading
