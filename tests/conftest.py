"""Setup of all tests: the CPU platform with eight virtual devices, a persistent compilation cache,
and skipping of tests that need a folder which is missing.
"""

import gc
import os
import pathlib
import sys

RUNS = pathlib.Path(__file__).parents[1] / "runs"
# Tests, and the processes that they start, reuse the programs that earlier tests compiled,
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(RUNS / "test_compilation_cache")
# and the bytecode of modules. Where the environment forbids Python to write it beside the sources,
# each process would read the sources of JAX again, for 6 seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(RUNS / "test_bytecode")
    sys.dont_write_bytecode = False
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is compilation, and a third of that is LLVM's optimisation, which
# these flags turn off. Without LLVM's expensive passes, and without splitting a program into 32
# parts for as many cores, five tests of the delta rule took 13 % less CPU time.
EIGHT_DEVICES = " --xla_force_host_platform_device_count=8"
FAST_COMPILATION = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FAST_COMPILATION + EIGHT_DEVICES

import jax  # noqa: E402

jax.devices()  # XLA reads the flags now
# Processes that tests start have one device.
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(EIGHT_DEVICES, "")

import pytest  # noqa: E402

from qwen3next_jax.common.errors import UserError  # noqa: E402

# Tracing makes millions of small objects without reference cycles. Python's garbage collector would
# search them for cycles so often that it took a fifth of the time of tracing.
gc.freeze()
gc.set_threshold(50_000, 20, 100)


TESTS = pathlib.Path(__file__).parent
PACKAGE = TESTS.parent / "qwen3next_jax"
# Folder that may be deleted → texts in test files that need it.
PLUGINS = {
    "kernels": (
        "qwen3next_jax.kernels",
        "benchmarks.kernels.experts_precision",
        "from test_delta_rule import",
    ),
    "zoo": ("qwen3next_jax.zoo", "from test_block import", "import channel_delta_rule"),
}
MISSING = tuple(name for name in PLUGINS if not (PACKAGE / name).exists())
collect_ignore = [
    str(path.relative_to(TESTS))
    for path in sorted(TESTS.rglob("test_*.py"))
    if any(needed in path.read_text() for name in MISSING for needed in PLUGINS[name])
]


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        folders = ", ".join(f"qwen3next_jax/{name}" for name in MISSING)
        skipped = ", ".join(collect_ignore)
        terminalreporter.line(f"{folders}: missing, so these files are skipped: {skipped}")


def _skip_if_folder_is_missing():
    """Skips a test that raises an error because a folder is missing."""
    try:
        return (yield)
    except UserError as error:
        if not any(f"does not have qwen3next_jax/{name}" in str(error) for name in MISSING):
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        if mark.args[0] in MISSING:
            pytest.skip(f"qwen3next_jax/{mark.args[0]} is missing")
    return (yield from _skip_if_folder_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skip_if_folder_is_missing())
