"""Shared by all tests: the CPU platform with eight virtual devices, and a persistent compilation
cache.
"""

import gc
import os
import pathlib

# Programs compiled by one test are read back by the next, and by the processes that tests start.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parents[1] / "runs" / "test_compilation_cache"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is compilation, and LLVM's optimisations are a third of that. A
# program in one part, not in 32 for as many cores, and without LLVM's expensive passes takes
# another eighth less (13 % of five tests of the delta rule, in CPU time).
EIGHT_DEVICES = " --xla_force_host_platform_device_count=8"
QUICK = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK + EIGHT_DEVICES

import jax  # noqa: E402

jax.devices()  # the flags are read now
# processes that tests start see one device
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(EIGHT_DEVICES, "")

import dataclasses  # noqa: E402
import math  # noqa: E402

import pytest  # noqa: E402

from qwen3next_jax.common.errors import UserError  # noqa: E402
from qwen3next_jax.runs import load, loop  # noqa: E402
from qwen3next_jax.sharding import mesh  # noqa: E402
from qwen3next_jax.training import step  # noqa: E402

# Tracing makes millions of small objects that die by themselves; Python's usual looks for cycles
# among them are a fifth of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def as_many_devices_as_asked_for():
    """A run in this process takes as many of the virtual devices as its mesh names: one, unless
    the config says more.
    """

    def make_mesh(config, devices=None):
        wanted = math.prod(max(getattr(config.mesh, axis), 1) for axis in mesh.MESH_AXES)
        return mesh.make_mesh(config, jax.devices()[:wanted] if devices is None else devices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", make_mesh)
        patch.setattr(load, "make_mesh", make_mesh)
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_of_equal_settings_are_traced_once():
    """Runs of this process, undisturbed, killed, resumed, branched off, share the jitted step,
    half of whose cost is tracing.
    """
    made, unread = (
        {},
        dict(
            seed=0,
            log_every=1,
            init_from="",
            init_state="weights",
            step_timeout=0.0,
            compile_timeout=0.0,
        ),
    )

    def make_train_step(config, mesh, begins=0):
        settings = (
            config.model,
            dataclasses.replace(config.train, **unread),
            config.optimizer,
            config.guards,
            config.parallel,
            mesh,
            begins,
            step.total_loss,
        )
        if settings not in made:
            made[settings] = step.make_train_step(config, mesh, begins)
        return made[settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", make_train_step)
        yield


PACKAGE = pathlib.Path(__file__).parents[1] / "qwen3next_jax"
PLUGINS = ("zoo",)  # folders that an installation may lack
MISSING = tuple(name for name in PLUGINS if not (PACKAGE / name).exists())
OF_PLUGINS = {"zoo": ["test_block.py", "test_hyena.py", "test_mixer_settings.py"]}
collect_ignore = [file for name in MISSING for file in OF_PLUGINS[name]]


def _skips_what_is_missing():
    """A test that asks for a part of a folder that was removed is skipped with the error's line."""
    try:
        return (yield)
    except UserError as error:
        if not any(f"does not have qwen3next_jax/{name}" in str(error) for name in MISSING):
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skips_what_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skips_what_is_missing())
