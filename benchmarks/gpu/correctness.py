"""Are the kernels right on this GPU? Each kind of call, compiled and run, beside the recurrence in
float64 on the CPU (the gated delta rule) and beside XLA's form on the device (all kernels).

    uv run --extra gpu python benchmarks/gpu/correctness.py [--widths]
    python benchmarks/gpu/correctness.py --interpret      on a CPU, tiny and interpreted

The first compares heads of 128, --widths those of 64, 128 and 256 for keys and values. Exit code 1:
a call is wrong or fails.
"""

import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Callable

from benchmarks import harness

# XLA interprets kernels in threads that wait for each other: one a device of the CPU at least.
INTERPRETER = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
}
# Relative L2 errors against float64: 2^-8 is bfloat16's rounding, which o has once.
BARS = {"o": 0.01, "final": 0.01}
GRADIENT_BAR = 0.03

Errors = dict[str, tuple[float, float]]  # array → (relative L2 error, the largest allowed)


def inputs(key: int, value: int):
    """Returns arrays of a small call of the delta rule, as training has them, and dO."""
    import jax
    import jax.numpy as jnp

    batch, time_, groups, heads = 1, 130, 1, 2
    keys = iter(jax.random.split(jax.random.key(0), 6))
    make = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)
    numbers = lambda: make(batch, time_, heads, dtype=jnp.float32)
    x = dict(
        q=make(batch, time_, groups, key),
        k=make(batch, time_, groups, key),
        v=make(batch, time_, heads, value),
        g=-jnp.exp(numbers() - 2),
        beta=jax.nn.sigmoid(numbers()),
    )
    return x, make(batch, time_, heads, value)


def delta_rule(implementation: str, x: dict, do) -> dict:
    """Returns the results and the gradients by name."""
    import jax
    import jax.numpy as jnp

    from qwen3next_jax.ops import gated_delta_rule

    f = lambda x: gated_delta_rule(**x, implementation=implementation)
    (o, final), pullback = jax.vjp(f, x)
    (gradients,) = pullback((do.astype(o.dtype), jnp.ones_like(final)))
    return dict(o=o, final=final) | gradients


def against_float64(key: int, value: int) -> Errors:
    """Compares the delta rule's kernels with the recurrence."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, do = inputs(key, value)
    kernels = jax.jit(functools.partial(delta_rule, "pallas_gpu"))
    got = jax.tree.map(lambda a: np.asarray(a, np.float64), kernels(x, do))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, do))
        want = jax.jit(functools.partial(delta_rule, "recurrent"))(*wide)
    want = {name: np.asarray(array) for name, array in want.items()}
    error = lambda name: float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name]))
    return {name: (error(name), BARS.get(name, GRADIENT_BAR)) for name in want}


def against_xla(max_error: Callable, tolerance: float, *arguments) -> Errors:
    """The array that is furthest from XLA's form, by a kernel's own test."""
    name, error = max_error(*arguments)
    return {name: (error, tolerance)}


def calls(widths: bool, interpret: bool) -> dict[str, Callable[[], Errors]]:
    """Returns every kind of call by its name."""
    from qwen3next_jax.kernels.gpu import causal_conv1d, delta_rule_self_test, gated_norm
    from qwen3next_jax.kernels.gpu.delta_rule_problem import WorkSplit

    rule = functools.partial(
        against_xla, delta_rule_self_test.max_error, delta_rule_self_test.TOLERANCE
    )
    width = 64 if interpret else 128
    pairs = [(k, v) for k in (64, 128, 256) for v in (64, 128, 256)] if widths else [(width, width)]
    found = {}
    for key, value in pairs:
        name = f"delta rule, K {key} V {value}"
        found[f"{name}, float64"] = functools.partial(against_float64, key, value)
        pieces = functools.partial(rule, key, value, True, True, WorkSplit(3, 1), interpret)
        found[f"{name}, XLA, a row in pieces"] = pieces
    if not interpret:
        for what, normalize, delta_term, split in (
            ("without norms", False, True, WorkSplit(1, 1)),
            ("without erasing", True, False, WorkSplit(1, 1)),
            ("two tiles a block", True, True, WorkSplit(1, 2)),
        ):
            call = functools.partial(rule, width, width, normalize, delta_term, split, interpret)
            found[f"delta rule, XLA, {what}"] = call
    convolution = (causal_conv1d.max_error, causal_conv1d.TOLERANCE)
    found["convolution, XLA"] = functools.partial(
        against_xla, *convolution, "silu", "bfloat16", 4, interpret
    )
    found["norm and gate, XLA"] = functools.partial(
        against_xla, gated_norm.max_error, gated_norm.TOLERANCE, 1e-6, 128, interpret
    )
    return found


def judge(errors: Errors) -> tuple[bool, str]:
    """Returns whether all are within their bars, and a sentence."""
    right = all(error <= bar for error, bar in errors.values())
    said = ", ".join(
        f"{name} {error:.2%}" + ("" if error <= bar else f" (at most {bar:.0%})")
        for name, (error, bar) in errors.items()
    )
    return right, f"{'right' if right else 'WRONG'}: apart {said}"


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--widths", action="store_true", help="all widths of heads")
    parser.add_argument("--interpret", action="store_true", help="on a CPU")
    options = parser.parse_args()
    if options.interpret:
        os.environ |= INTERPRETER
    import jax

    device = jax.devices()[0]
    if not options.interpret and getattr(device, "compute_capability", "") != "9.0":
        print(
            f"error: the first device is {device.device_kind}: expected an H100 or H200, and jax "
            "with its CUDA plugin (uv run --extra gpu); --interpret runs this code on a CPU",
            file=sys.stderr,
        )
        return 2
    # Nearly all of the time is the compiler's, which threads share.
    threads = 1 if options.interpret else os.cpu_count()
    all_right, begun = True, time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        wanted = calls(options.widths, options.interpret)
        results = {pool.submit(call): name for name, call in wanted.items()}
        for result in concurrent.futures.as_completed(results):
            try:
                right, said = judge(result.result())
            except Exception as error:
                right, said = False, f"failed: {harness.one_line(error)}"
            all_right &= right
            seconds = time.perf_counter() - begun
            print(f"{results[result]}: {said}; after {seconds:.0f} s", flush=True)
    print(f"{device.device_kind}, jax {jax.__version__}")
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
