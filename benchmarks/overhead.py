"""What watching and guarding a run costs: share of a step's time, at default settings.

Two train steps run in turns on the same batches: a bare one (gradients, clipping, AdamW, loss)
and the real one (guards that judge and may skip, gradient norms by layer, router load). What the
loop adds is timed by itself and spread over the steps between: a "train" event every
`train.log_every` steps, drawn on a terminal, and the diagnostics every
`telemetry.diagnostics_every` steps. Both steps must first give the same loss.

    uv run python benchmarks/overhead.py [--config=configs/tiny.py] [--steps=60]
"""

import argparse
import io
import pathlib
import runpy
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from qwen3next_jax.commands import process_setup
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.model import declared
from qwen3next_jax.runs.display import Display
from qwen3next_jax.runs.incidents import Incidents
from qwen3next_jax.runs.telemetry import MetricsFile, Throughput
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.diagnostics import make_diagnostics_step, summarise
from qwen3next_jax.training.gradients import make_gradients
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run

WARM_UP, REPEATS = 3, 5


def bare_step(run: ResolvedRun):
    """(params, opt_state), batch → the same after one step, and the loss."""
    (stage,) = run.stages
    gradients = make_gradients(run, stage)
    schedule = learning_rate_schedule(stage.optimizer, stage.train.steps)
    optimizer = make_optimizer(stage.optimizer, declared(run.model), schedule)

    def step(state, batch):
        grads, parts, *_ = gradients(state[0], batch)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), parts["loss"]

    return jax.jit(step, donate_argnums=0)


def seconds(work) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--steps", type=int, default=60, help="of each of the two")
    arguments = parser.parse_args()
    config = from_dict(Config, runpy.run_path(arguments.config)["get_config"]().to_dict())
    shape = (config.train.batch_size, config.train.sequence_length)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": jnp.asarray(rng.integers(0, config.model.vocab_size, shape), jnp.int32),
        "segment_ids": jnp.ones(shape, jnp.int32),
    }

    run = resolve_run(config, single_device_mesh())
    bare, real = bare_step(run), make_train_step(run, *run.stages)
    state = run.init_state()
    bare_state = jax.tree.map(jnp.copy, (state["params"], state["opt_state"]))
    with tempfile.TemporaryDirectory() as folder:
        display = Display(
            "overhead",
            run.stages,
            0,
            console=Console(file=io.StringIO(), force_terminal=True, width=120),
        )
        metrics = MetricsFile(pathlib.Path(folder) / "metrics.jsonl", 0, [display])
        incidents, throughput = (
            Incidents(config.guards, config.model, (), metrics),
            Throughput(run, *run.stages, 1.0),
        )
        times: dict[str, list[float]] = {"bare": [], "real": [], "look": []}
        with display, metrics:
            for step in range(1, WARM_UP + arguments.steps + 1):
                begun = time.perf_counter()
                bare_state, loss = bare(bare_state, batch)
                jax.block_until_ready(bare_state)
                middle = time.perf_counter()
                state, values = real(state, batch)
                jax.block_until_ready(state)
                end = time.perf_counter()
                incidents.check(step, values, state)
                display.step(step)
                for name, value in (
                    ("bare", middle - begun),
                    ("real", end - middle),
                    ("look", time.perf_counter() - end),
                ):
                    times[name].append(value)
                if step == 1:
                    np.testing.assert_allclose(values["loss"], loss, rtol=1e-5)

            def log():
                fetched = jax.device_get(values)
                record = {
                    name: float(value)
                    for name, value in fetched.items()
                    if np.ndim(value) == 0 and not isinstance(value, dict)
                }
                metrics.write(
                    "train",
                    step,
                    **record,
                    busiest_expert=1.0,
                    **throughput.measure(step, record["loss"], 10, 4.0, 0.1),
                )
                display._live.refresh()

            (stage,) = run.stages
            diagnose = make_diagnostics_step(run.model, run.graphdef, stage.micro_batches)

            def diagnostics():
                measured = jax.device_get(
                    (
                        diagnose(state["params"], batch),
                        values["grad_norms"],
                        values.get("expert_load"),
                    )
                )
                metrics.write("diagnostics", step, **summarise(*measured))

            diagnostics()
            logging, diagnosing = (
                [seconds(work) for _ in range(REPEATS)] for work in (log, diagnostics)
            )

    median = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    bare = median["bare"]
    spread = statistics.quantiles(
        [b - a for a, b in zip(times["bare"][WARM_UP:], times["real"][WARM_UP:])], n=4
    )
    rows = [
        (
            "guards, norms by layer, metrics: in the compiled step",
            statistics.median(
                b - a for a, b in zip(times["bare"][WARM_UP:], times["real"][WARM_UP:])
            ),
        ),
        ("guards and display on the host, every step", median["look"]),
        (
            f"a train event, every {config.train.log_every} steps",
            statistics.median(logging) / config.train.log_every,
        ),
        (
            f"diagnostics ({statistics.median(diagnosing):.3f} s), every "
            f"{config.telemetry.diagnostics_every} steps",
            statistics.median(diagnosing) / max(config.telemetry.diagnostics_every, 1),
        ),
    ]
    print(f"bare step {bare:.4f} s (median of {arguments.steps}, in turns with the real one)")
    for name, value in rows:
        print(f"{name:<58} {1e3 * value:8.3f} ms  {value / bare:7.2%}")
    total = sum(value for _, value in rows)
    print(
        f"{'in all':<58} {1e3 * total:8.3f} ms  {total / bare:7.2%}   "
        f"(middle half of the pairs: {spread[0] / bare:.2%} … {spread[2] / bare:.2%})"
    )


if __name__ == "__main__":
    process_setup.enable_compilation_cache()
    main()
