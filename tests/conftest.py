"""Shared by all tests: the CPU platform with eight virtual devices, and a persistent compilation cache."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is compilation, and LLVM's optimisations are a third of that.
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
                           + " --xla_force_host_platform_device_count=8")

import pathlib  # noqa: E402

import jax  # noqa: E402

# Programs compiled by one run of the suite are read back by the next.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parents[1] / "runs" / "test_compilation_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
