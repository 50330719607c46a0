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

import pytest  # noqa: E402

from qwen3next_jax.common.errors import UserError  # noqa: E402

# Tracing makes millions of small objects that die by themselves; Python's usual looks for cycles
# among them are a fifth of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)


PACKAGE = pathlib.Path(__file__).parents[1] / "qwen3next_jax"
# Folders that an installation may lack, and what a test file imports that needs them.
PLUGINS = {
    "kernels": (
        "qwen3next_jax.kernels",
        "benchmarks.experts_precision",
        "from test_delta_rule import",
    ),
    "zoo": ("qwen3next_jax.zoo", "from test_block import", "import channel_delta_rule"),
}
MISSING = tuple(name for name in PLUGINS if not (PACKAGE / name).exists())
collect_ignore = [
    path.name
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py"))
    if any(needed in path.read_text() for name in MISSING for needed in PLUGINS[name])
]


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        rooms = ", ".join(f"qwen3next_jax/{name}" for name in MISSING)
        left_out = ", ".join(collect_ignore)
        terminalreporter.line(f"{rooms}: missing, which these need: {left_out}")


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
