"""The kernels through the real TPU compiler, for described chips: no TPU is needed.

The released model's shape, head widths 64 and 256 and longer sequences on every chip, small
problems that take other ways through the kernels, and the forward pass alone. One process a chip,
for the compiler reads its environment once:

    # prints the number of kernels in the program of each of these CASES
    python -m tests.kernels.test_delta_rule_tpu v6e released "share 4"
"""

import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.kernels.tpu.delta_rule_tiling import Tiling
from qwen3next_jax.ops import gated_delta_rule
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[2]
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

RELEASED = {"released": dict(time=4096, key_heads=16, value_heads=32)}
# The chips differ in the memory that a block of heads may fill; the widest heads fill the most.
EVERYWHERE = RELEASED | {"256 wide": RELEASED["released"] | dict(width=256, value_width=256)}
LARGE = {
    "8192 tokens": RELEASED["released"] | dict(time=8192),
    "64 wide": RELEASED["released"] | dict(width=64, value_width=64),
    "32 key heads": RELEASED["released"] | dict(key_heads=32),
}
SMALL = {
    "share 3, documents and first state": dict(value_heads=6, documents=True, first_state=True),
    "K 64, V 256, q float32": dict(width=64, value_width=256, key_dtype="float32"),
    "float32, x64": dict(dtype="float32", x64=True),
    "1 head, chunk 16, float32": dict(
        key_heads=1, value_heads=1, width=32, value_width=32, dtype="float32"
    ),
    "no delta term, no norm": dict(delta_term=False, normalize_qk=False),
    "chunk 32": dict(time=32),
    "share 4": dict(value_heads=8),
    "3 heads": dict(key_heads=3, value_heads=3),
    "9 heads, share 3": dict(key_heads=3, value_heads=9, documents=True),
    "K 256, V 64, v float32": dict(
        width=256, value_width=64, dtype="float32", key_dtype="bfloat16"
    ),
    "no norm, float32": dict(normalize_qk=False, dtype="float32"),
    "no delta term, documents": dict(delta_term=False, documents=True, first_state=True),
}
CASES = EVERYWHERE | LARGE | SMALL


def run(*command):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@needs_compiler
@pytest.mark.slow
def test_the_forward_pass_alone_compiles():
    done = run("benchmarks/kernels/delta_rule_tpu_schedule.py", "--compile_only", "--chip", "v6e")
    assert done.returncode == 0, done.stderr[-2000:]
    forward, both = done.stdout.splitlines()
    assert ": 1 kernels, " in forward
    assert ": 2 kernels, " in both


def check_kernels(chip, cases):
    """Every case compiles to two kernels, one each way, in one process."""
    done = run("-m", "tests.kernels.test_delta_rule_tpu", chip, *cases)
    printed = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())
    assert printed == dict.fromkeys(cases, "2"), done.stderr[-2000:]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles(chip):
    check_kernels(chip, EVERYWHERE)


# The chips with the most memory and with the least.
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", ["v6e", "v4"])
def test_other_problems_compile(chip):
    check_kernels(chip, LARGE | SMALL)


def compile_case(
    device,
    time=128,
    key_heads=2,
    value_heads=4,
    width=128,
    value_width=128,
    dtype="bfloat16",
    key_dtype=None,
    documents=False,
    first_state=False,
    x64=False,
    **settings,
):
    """The number of kernels in the program of outputs and gradients."""
    mesh = jax.sharding.Mesh(np.array([device]), ("all",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct((1, *s), jnp.dtype(dtype), sharding=here)
    q, v = (
        shape(time, key_heads, width, dtype=key_dtype or dtype),
        shape(time, value_heads, value_width),
    )
    arguments = dict(
        q=q, k=q, v=v, **dict.fromkeys(("g", "beta"), shape(time, value_heads, dtype="float32"))
    )
    state = shape(value_heads, width, value_width, dtype="float32")
    if first_state:
        arguments["initial_state"] = state
    ids = shape(time, dtype="int32") if documents else None

    def both_ways(arguments, ids, cotangents):
        out, pullback = jax.vjp(
            lambda a: gated_delta_rule(**a, segment_ids=ids, **settings), arguments
        )
        return out, pullback(cotangents)

    with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return (
            jax.jit(both_ways)
            .lower(arguments, ids, (v, state))
            .compile()
            .as_text()
            .count("tpu_custom_call")
        )


def main(chip, *names):
    from benchmarks.kernels.delta_rule_tpu_schedule import described

    device = described(chip)[0]
    for name in names:
        try:
            found = compile_case(device, **CASES[name])
        except Exception as error:  # the next case says more than a process that ends here
            found = " ".join(str(error).split())[:1000]
        print(f"{name}: {found}", flush=True)


@pytest.mark.parametrize("wide", ["qk_itemsize", "v_itemsize"])
def test_tiling_fits_its_budget_or_says_so(wide):
    sizes = dict(
        heads_per_key=2, chunk_size=64, key_width=128, value_width=128, qk_itemsize=2, v_itemsize=2
    )
    choose = lambda heads=32, vmem=128 * 2**20, cores=1, **others: Tiling.choose(
        heads, vmem=vmem, cores=cores, **sizes | others
    )
    small = choose(vmem=16 * 2**20)
    assert small.block_value_heads < choose().block_value_heads == 32
    assert small.needed_vmem_bytes <= 16 * 2**20
    assert 32 % small.block_value_heads == small.block_value_heads % 2 == 0
    assert choose(cores=2).block_value_heads == 16
    assert choose(heads=2, cores=2).block_value_heads == 2
    assert choose(**{wide: 4}).needed_vmem_bytes > choose().needed_vmem_bytes
    with refused("1048576", error=NotImplementedError):
        choose(heads_per_key=32, vmem=2**20)
    with refused("2", error=ValueError):
        Tiling(3, **sizes)


if __name__ == "__main__":
    main(*sys.argv[1:])
