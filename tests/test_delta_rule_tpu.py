"""The kernels through the real TPU compiler, for described chips: no TPU is needed.

The released model's shape by default, one a chip; `-m slow` adds head widths 64 and 256 and longer sequences. One process a
chip, because the compiler reads its environment once.
"""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from qwen3next_jax.ops.delta_rule.tiling import Tiling

ROOT = pathlib.Path(__file__).parents[1]
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def compiles(chip, *flags):
    command = [
        sys.executable,
        "benchmarks/delta_rule_tpu_schedule.py",
        "--compile_only",
        "--chip",
        chip,
        *map(str, flags),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("HBM temporaries") == 2  # forward, and forward with backward


@needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_at_the_released_shape(chip):
    compiles(chip)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("flags", [("--time", 8192), ("--width", 64), ("--width", 256), ("--key_heads", 32)], ids=str)
def test_compiles_at_other_shapes(chip, flags):
    compiles(chip, *flags)


def test_tiling_fits_its_budget_or_says_so():
    choose = lambda heads=32, share=2, vmem=128 * 2**20, cores=1: Tiling.choose(heads, share, 64, 128, 128, 2, vmem, cores)
    small = choose(vmem=16 * 2**20)
    assert small.block < choose().block == 32
    assert small.vmem_bytes <= 16 * 2**20 and 32 % small.block == small.block % 2 == 0
    assert choose(cores=2).block == 16 and choose(heads=2, cores=2).block == 2
    with pytest.raises(ValueError, match="use implementation='chunked'"):
        choose(share=32, vmem=2**20)
    with pytest.raises(ValueError, match="even multiple of the 2 that share"):
        Tiling(3, 2, 64, 128, 128, 2)
