"""Starts runs in the process of the test, as a user's script does (`runs.train.train`).

A run uses as many of the virtual devices as its mesh has. Runs whose update steps have equal
settings share one compiled step, because tracing takes half of the time of a step.
"""

import dataclasses
import math

import jax

from qwen3next_jax.config import MESH_AXES, Config, TelemetryConfig
from qwen3next_jax.runs import dry_run as runs_dry_run
from qwen3next_jax.runs import train as runs_train
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training import loop
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run

_steps = {}  # settings of an update step → the step
# Settings of `train` that the update step does not read, with values to replace them.
_NOT_READ_BY_STEP = {
    "seed": 0,
    "log_every": 1,
    "hooks": (),
    "on_hook_error": "stop",
    "init_from": "",
    "init_state": "weights",
    "step_timeout": 0.0,
    "compile_timeout": 0.0,
}


def shared_step(run, stage, **options):
    """As `loop.make_train_step`, but runs and stages with equal settings get the same step."""
    train = dataclasses.replace(stage.train, **_NOT_READ_BY_STEP)
    if stage.optimizer.schedule == "constant":  # it needs only the length of the warm-up
        steps = max(min(stage.optimizer.warmup_steps, train.steps), 1)
        train = dataclasses.replace(train, steps=steps)
    settings = (run.model, train, stage.optimizer, stage.schedule_start, run.config.guards)
    key = (*settings, run.config.parallel, run.mesh, *options.items())
    if key not in _steps:
        _steps[key] = loop.make_train_step(run, stage, **options)
    return _steps[key]


def train(config: Config, workdir, restart: bool = False, **options):
    """Calls `runs.train.train` with as many devices as the mesh of `config` has. By default nothing
    measures the layers, which would compile one more program for the last step of each run.
    """
    if config.telemetry == TelemetryConfig():
        telemetry = TelemetryConfig(diagnostics_every=0)
        config = dataclasses.replace(config, telemetry=telemetry)
    num_devices = math.prod(max(getattr(config.parallel.mesh, axis), 1) for axis in MESH_AXES)
    options = {"devices": jax.devices()[:num_devices], "make_step": shared_step} | options
    return runs_train.train(prepare_start(config, workdir, restart), **options)


def dry_run(config: Config, workdir, restart: bool = False):
    """Calls `runs.dry_run.dry_run` with one device."""
    start = prepare_start(config, workdir, restart)
    return runs_dry_run.dry_run(start, devices=jax.devices()[:1])


def resolved(config: Config, mesh=None) -> ResolvedRun:
    """Resolves `config` for `mesh`; None: one device."""
    return resolve_run(config, single_device_mesh() if mesh is None else mesh)


def step_of(config: Config, mesh=None):
    """The update step of a run with a single stage, on `mesh`; None: one device."""
    run = resolved(config, mesh)
    return loop.make_train_step(run, *run.stages)
