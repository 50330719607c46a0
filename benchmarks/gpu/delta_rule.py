"""The delta rule's kernels on this GPU, by the way in which the passes of the state split the work:
milliseconds of a forward pass and of a forward and a backward pass, and how far the results are
from the XLA form.

    uv run --extra gpu python benchmarks/gpu/delta_rule.py [--only "1 x 32768"] [--rounds 10]
    python benchmarks/gpu/delta_rule.py --tiny       the same code on a CPU, interpreted: its times
                                                     say nothing

A line for each shape and split: pieces of a row, and tiles of 64 value channels that a block of a
whole row computes (`WorkSplit` of kernels/gpu/delta_rule_problem.py). The split that a call chooses
is marked with *. Milliseconds are those of the kernels by the profiler, with XLA's own kernels
around them; after "clock" stands the time of a call when calls follow one another. Then the
milliseconds of each kernel, and the array that is furthest from the XLA form (`chunked`) with its
relative L2 distance. Gates and write strengths are so weak that the state before a piece still
matters after it: with usual ones, wrong maps of pieces would not show.

The programs of a shape are compiled side by side.
"""

import collections
import concurrent.futures
import datetime
import functools
import importlib.metadata
import os
import sys

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The interpreter waits in as many threads as there are devices.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks import harness  # noqa: E402
from benchmarks.gpu import step  # noqa: E402
from qwen3next_jax.kernels import self_test  # noqa: E402
from qwen3next_jax.kernels.gpu import delta_rule_passes  # noqa: E402
from qwen3next_jax.kernels.gpu.delta_rule_problem import Problem, WorkSplit  # noqa: E402
from qwen3next_jax.kernels.gpu.delta_rule_self_test import TOLERANCE  # noqa: E402
from qwen3next_jax.ops.delta_rule import chunked  # noqa: E402
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings  # noqa: E402

# Rows, tokens of a row, key heads, value heads, channels of a head.
SHAPES = (
    (1, 32_768, 16, 32, 128),
    (4, 8_192, 16, 32, 128),
    (8, 4_096, 16, 32, 128),
    (1, 32_768, 16, 16, 128),
    (4, 8_192, 16, 16, 128),
    (8, 4_096, 16, 16, 128),
    (32, 2_048, 4, 8, 128),
)
TINY_SHAPES = ((1, 250, 1, 2, 64),)
SPLITS = WorkSplit(1, 1), WorkSplit(1, 2), WorkSplit(3, 1), WorkSplit(5, 1), WorkSplit(9, 1)
TINY_SPLITS = WorkSplit(1, 1), WorkSplit(3, 1)
NAMES = "o", "final state", "dq", "dk", "dv", "dg", "dbeta", "gradient of the initial state"
CALLS = 5  # that follow one another, so that what the host does to start one is not waited for
SETTINGS = Settings(64, normalize_qk=True, delta_term=True)


def arrays(batch, tokens, key_heads, value_heads, width):
    """Returns the inputs, the initial state, and the gradients of o and of the final state."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    make = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)
    gates = lambda: make(batch, tokens, value_heads, dtype=jnp.float32)
    state = lambda: make(batch, value_heads, width, width, dtype=jnp.float32)
    x = Inputs(
        make(batch, tokens, key_heads, width),
        make(batch, tokens, key_heads, width),
        make(batch, tokens, value_heads, width),
        -jnp.exp(gates() - 10),
        jax.nn.sigmoid(gates() - 6),
    )
    return x, state(), make(batch, tokens, value_heads, width), state()


def forward(implementation, x, state, do, dfinal, **others):
    """Returns o and the final state."""
    return implementation.forward(x, state, None, SETTINGS, save=False, **others)[:2]


def both(implementation, x, state, do, dfinal, **others):
    """Returns o, the final state and all gradients, in the order of NAMES."""
    o, final, *saved = implementation.forward(x, state, None, SETTINGS, save=True, **others)
    return o, final, *implementation.backward(x, *saved, do, dfinal, SETTINGS, **others)


def clock_milliseconds(run, rounds: int) -> float:
    """Returns the median time of a call in milliseconds."""

    def calls():
        for _ in range(CALLS):
            result = run()
        jax.block_until_ready(result)

    seconds, _ = harness.median_seconds(calls, rounds)
    return 1e3 * seconds / CALLS


def kernel_milliseconds(run) -> collections.Counter:
    """Returns the milliseconds of a call by kernel. XLA's own kernels are added up as "XLA"."""
    sums = collections.Counter()
    for kernel, (ms, _) in step.profile(lambda: jax.block_until_ready(run()), times=3).items():
        _, ours, name = kernel.partition("gated_delta_rule_")
        sums[name.removesuffix("_mosaic_gpu_kernel") if ours else "XLA"] += ms
    return sums


def compile_all(programs: dict, inputs) -> dict:
    """Returns the compiled programs by key. An error takes the place of a program that cannot be
    compiled.
    """

    def compiled(function):
        try:
            return jax.jit(function).lower(*inputs).compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(1 if TINY else 8) as threads:
        return dict(zip(programs, threads.map(compiled, programs.values())))


def time_line(label: str, run, rounds: int):
    """Prints the times of a program in one line."""
    if TINY:
        return print(f"  {label}: interpreted, not timed", flush=True)
    with harness.alone():
        clock = clock_milliseconds(run, rounds)
        kernels = kernel_milliseconds(run)
    by_name = ", ".join(f"{name} {ms:.3f}" for name, ms in kernels.most_common())
    print(f"  {label}: {kernels.total():.3f} ms, clock {clock:.3f} ({by_name})", flush=True)


def measure(shape: tuple, splits: tuple, rounds: int):
    """Prints the lines of one shape."""
    batch, tokens, key_heads, value_heads, width = shape
    print(f"{batch} x {tokens}, {key_heads}/{value_heads} heads of {width}", flush=True)
    inputs = arrays(*shape)
    best = Problem.of_call(inputs[0], SETTINGS).work_split
    chunks = -(-tokens // 64)
    splits = [s for s in dict.fromkeys((best, *splits)) if s.pieces_per_row <= chunks]
    if width == 64:  # a single tile
        splits = [s for s in splits if s.warpgroups_per_block == 1]
    programs = {
        (split, name): functools.partial(function, delta_rule_passes, split=split, interpret=TINY)
        for split in splits
        for name, function in (("forward", forward), ("forward + backward", both))
    }
    programs["XLA"] = functools.partial(both, chunked, parallel=False)
    compiled = compile_all(programs, inputs)
    xla = compiled.pop("XLA")
    want = None if isinstance(xla, Exception) else xla(*inputs)
    if want is None:
        print(f"  XLA: {harness.one_line(xla)}", flush=True)
    for (split, name), program in compiled.items():
        label = f"{'*' if split == best else ' '} {split.pieces_per_row} piece(s), "
        label += f"{split.warpgroups_per_block} tile(s) a block, {name}"
        try:
            if isinstance(program, Exception):
                raise program
            time_line(label, lambda: program(*inputs), rounds)
            got = jax.block_until_ready(program(*inputs))
        except Exception as error:
            print(f"  {label}: {harness.one_line(error)}", flush=True)
            continue
        if want is None:
            continue
        worst, apart = self_test.largest_error(NAMES[: len(got)], got, want[: len(got)])
        verdict = "" if apart <= TOLERANCE else f", WRONG: at most {TOLERANCE} is right"
        print(f"      furthest from XLA: {worst}, {apart:.2g}{verdict}", flush=True)


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", default="", help="of the shapes, those whose line begins so")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds of {CALLS} calls")
    parser.add_argument("--tiny", action="store_true", help="a small shape, interpreted on a CPU")
    options = parser.parse_args()
    if not TINY and (reason := self_test.unsupported_chip_reason() or not_on_a_gpu()):
        sys.exit(f"error: the kernels do not run {reason}; --tiny interprets them")
    try:
        linker = f"nvJitLink {importlib.metadata.version('nvidia-nvjitlink')}"
    except importlib.metadata.PackageNotFoundError:
        linker = "no package nvidia-nvjitlink"
    now = datetime.datetime.now().isoformat(timespec="minutes")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {linker}, {now}", flush=True)
    shapes, splits = (TINY_SHAPES, TINY_SPLITS) if TINY else (SHAPES, SPLITS)
    for shape in shapes:
        if f"{shape[0]} x {shape[1]}, {shape[2]}/{shape[3]}".startswith(options.only):
            measure(shape, splits, options.rounds)


def not_on_a_gpu() -> str:
    """Returns "on cpu" or the like if JAX's default device is no GPU."""
    platform = jax.default_backend()
    return "" if platform == "gpu" else f"on {platform}"


if __name__ == "__main__":
    main()
