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

import importlib.util  # noqa: E402

# Tracing makes millions of small objects that die by themselves; Python's usual looks for cycles
# among them are a fifth of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 100)


# Without the plugin, whose folder may be deleted, these cannot be imported.
KERNELS = "qwen3next_jax.kernels", "benchmarks.experts_precision", "from test_delta_rule import"
without_kernels = importlib.util.find_spec("qwen3next_jax.kernels") is None
collect_ignore = [
    path.name
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py"))
    if without_kernels and any(name in path.read_text() for name in KERNELS)
]


def pytest_terminal_summary(terminalreporter):
    if collect_ignore:
        left_out = ", ".join(collect_ignore)
        terminalreporter.line(f"qwen3next_jax/kernels is missing, which these need: {left_out}")
