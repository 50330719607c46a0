"""Runs in the test's own process, started as a user's script starts them (`runs.train.train`): on
as many of the virtual devices as their mesh names, and with update steps that runs of equal
settings share, as half of what a step costs is tracing.
"""

import dataclasses
import math

import jax

from qwen3next_jax.config import MESH_AXES, Config
from qwen3next_jax.runs import dry_run as runs_dry_run
from qwen3next_jax.runs import train as runs_train
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training import loop
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run

_steps = {}
# Settings of `train` that no update step reads.
_NOT_OF_THE_STEP = {
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
    """`loop.make_train_step`, once for all runs and stages whose step is the same."""
    train = dataclasses.replace(stage.train, **_NOT_OF_THE_STEP)
    settings = (run.model, train, stage.optimizer, stage.schedule_start, run.config.guards)
    key = (*settings, run.config.parallel, run.mesh, *options.items())
    if key not in _steps:
        _steps[key] = loop.make_train_step(run, stage, **options)
    return _steps[key]


def train(config: Config, workdir, restart: bool = False, **options):
    """`runs.train.train` on the devices that the mesh of `config` names."""
    wanted = math.prod(max(getattr(config.parallel.mesh, axis), 1) for axis in MESH_AXES)
    options = {"devices": jax.devices()[:wanted], "make_step": shared_step} | options
    return runs_train.train(config, workdir, restart, **options)


def dry_run(config: Config, workdir, restart: bool = False):
    """`runs.dry_run.dry_run` on one device."""
    return runs_dry_run.dry_run(config, workdir, restart, devices=jax.devices()[:1])


def resolved(config: Config, mesh=None) -> ResolvedRun:
    """`config` worked out for `mesh`, or one device."""
    return resolve_run(config, single_device_mesh() if mesh is None else mesh)


def step_of(config: Config, mesh=None):
    """The update step of a run of one stage."""
    run = resolved(config, mesh)
    return loop.make_train_step(run, *run.stages)
