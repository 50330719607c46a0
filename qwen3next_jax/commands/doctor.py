"""Checks this machine in about a minute: the chip, its driver, the versions of the libraries, and
for each operator of the model what runs it, whether it passed its test, and its time on a standard
shape as a share of what the chip's data sheet allows. It writes no file but outcomes of tests.

    qwen3next doctor

It exits with 0 if kernels run every operator, or if there is only a CPU; with 1 if something runs
without kernels and is slow; with 2 if something is broken.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from qwen3next_jax.commands import process_setup
from qwen3next_jax.common.errors import ExitCode, one_line, out_of_memory_message
from qwen3next_jax.common.installation import (
    CUDA_PLUGINS,
    nvidia_driver_release,
    unused_gpu_message,
)

SLOW, BROKEN = 1, 2  # exit codes
PACKAGES = (
    *("jax", "jaxlib", *CUDA_PLUGINS, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("tokamax", "jax-triton", "triton", "nvidia-cuda-nvcc", "nvidia-nvjitlink", "libtpu"),
)
ROWS, LENGTH = 4, 4096  # the standard shape: rows of a batch, and their tokens
_REPEATS = 5


def main() -> int:
    import jax

    console = Console(highlight=False)
    if not console.is_terminal:  # a program may read the lines, so they must not be wrapped
        console.width = 10_000
    say = functools.partial(console.print, markup=False)
    say(f"python     {sys.version.split()[0]}")
    say(f"libraries  {', '.join(_versions())}")
    if driver := nvidia_driver_release():
        say(f"driver     {driver} (NVIDIA)")
    process_setup.enable_compilation_cache()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter if JAX_PLATFORMS names none it has
        reason = (
            unused_gpu_message(os.environ, "cpu") or one_line(str(error)) or "see JAX_PLATFORMS"
        )
        say(f"broken: JAX finds no device: {reason}")
        return BROKEN
    say(f"devices    {_describe_devices(devices)}")
    if line := unused_gpu_message(os.environ, jax.default_backend()):
        say(f"broken: {line}")
        return BROKEN
    if jax.default_backend() == "cpu":
        _print_plan(console)
        return ExitCode.DONE
    with console.status("compiling, testing and timing each operator"):
        results = check_parts(tested_parts(ROWS, LENGTH), jax.local_devices()[0])
    _print_results(results, console)
    return _verdict(results)


def _versions() -> list[str]:
    """Returns the installed ones of PACKAGES, each with its release."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _describe_devices(devices: Sequence[Any]) -> str:
    first = devices[0]
    details = []
    if chip := getattr(first, "compute_capability", ""):
        details.append(f"compute capability {chip}")
    if memory := (first.memory_stats() or {}).get("bytes_limit"):
        details.append(f"{memory / 2**30:.1f} GiB for JAX")
    text = f"{len(devices)} × {first.device_kind}"
    return f"{text} ({', '.join(details)})" if details else text


@dataclasses.dataclass(frozen=True)
class TestedPart:
    """One operator, as a layer of the released model calls it in a training step.

    Attributes:
      name: the name in the table.
      operators: the names under which it asks for an implementation.
      function: the forward and the backward pass.
      shapes: the shapes and dtypes of its arguments.
      flops: the floating-point operations that the two passes need.
      bytes: the bytes that they have to read from and write to the memory.
    """

    name: str
    operators: tuple[str, ...]
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    flops: float
    bytes: float


def tested_parts(rows: int, length: int) -> list[TestedPart]:
    """Returns the operators, with the released model's widths, 64 of its 512 experts, and `rows`
    rows of `length` tokens in bfloat16.
    """
    return [
        _experts_part(rows * length),
        _attention_part(rows, length),
        _delta_rule_part(rows, length),
        _convolution_part(rows, length),
        _norm_and_gate_part(rows, length),
    ]


def _bfloat16_shape(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _float32_shape(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that returns the gradients of the sum of the outputs' squares."""
    import jax
    import jax.numpy as jnp

    def loss(*arguments):
        return jnp.sum(jnp.square(function(*arguments).astype(jnp.float32)))

    return lambda *arguments: jax.grad(loss, tuple(range(len(arguments))))(*arguments)


def _attention_part(rows: int, length: int) -> TestedPart:
    """Grouped heads of 256, in rows of several documents, as in training. A causal query reads half
    of the keys of its document; the backward pass has five products, the forward pass two.
    """
    import jax.numpy as jnp

    from qwen3next_jax import ops

    queries, keys, head = 16, 2, 256
    q, kv = _bfloat16_shape(rows, length, queries, head), _bfloat16_shape(rows, length, keys, head)
    ends = length // 2, 3 * length // 4, 7 * length // 8, length
    pairs = sum((end - begin) ** 2 for begin, end in zip((0, *ends[:-1]), ends, strict=True))

    def attention_of_documents(q, k, v):
        documents = 1 + jnp.searchsorted(jnp.asarray(ends), jnp.arange(length), side="right")
        ids = jnp.broadcast_to(documents.astype(jnp.int32), (rows, length))
        return ops.attention(q, k, v, segment_ids=ids)

    return TestedPart(
        "attention",
        ("attention",),
        _with_gradients(attention_of_documents),
        (q, kv, kv),
        7 * rows * pairs * queries * head,
        2 * rows * length * head * (6 * queries + 8 * keys),
    )


# Key heads, value heads and width of a head of the gated delta rule.
_KEYS, _VALUES, _HEAD = 16, 32, 128


def _delta_rule_part(rows: int, length: int) -> TestedPart:
    """Per token and value head the recurrence decays a state of 128 x 128, reads it twice and
    writes it once.
    """
    import jax

    from qwen3next_jax import ops

    def rule(q, k, v, g, beta):
        o, _ = ops.gated_delta_rule(q, k, v, g=-jax.nn.softplus(g), beta=jax.nn.sigmoid(beta))
        return o

    q, v = (
        _bfloat16_shape(rows, length, _KEYS, _HEAD),
        _bfloat16_shape(rows, length, _VALUES, _HEAD),
    )
    gate = _float32_shape(rows, length, _VALUES)
    return TestedPart(
        "gated delta rule",
        ("gated_delta_rule",),
        _with_gradients(rule),
        (q, q, v, gate, gate),
        21 * rows * length * _VALUES * _HEAD**2,
        2 * rows * length * _HEAD * (6 * _KEYS + 5 * _VALUES),
    )


def _convolution_part(rows: int, length: int) -> TestedPart:
    """The convolution before the delta rule, with its activation. It only passes over memory."""
    from qwen3next_jax import ops

    channels = (2 * _KEYS + _VALUES) * _HEAD
    return TestedPart(
        "convolution",
        ("causal_conv1d",),
        _with_gradients(lambda x, kernel: ops.causal_conv1d(x, kernel, activation="silu")[0]),
        (_bfloat16_shape(rows, length, channels), _bfloat16_shape(4, channels)),
        0,
        2 * 5 * rows * length * channels,
    )


def _norm_and_gate_part(rows: int, length: int) -> TestedPart:
    """The norm and gate after the delta rule. They only pass over memory."""
    from qwen3next_jax.ops.gated_norm import gated_norm

    width = _VALUES * _HEAD
    o = _bfloat16_shape(rows, length, width)
    return TestedPart(
        "norm and gate",
        ("gated_norm",),
        _with_gradients(lambda o, z, w: gated_norm(o, z, w, eps=1e-6)),
        (o, o, _float32_shape(_HEAD)),
        0,
        2 * 8 * rows * length * width,
    )


def _experts_part(tokens: int) -> TestedPart:
    """Routed experts: three products forward, six backward."""
    import jax.numpy as jnp

    from qwen3next_jax.ops.routed_experts import routed_experts, routed_experts_gradients

    d, experts, chosen, inner = 2048, 64, 10, 512

    def step(x, weight, gate_up, down):
        number = jnp.arange(tokens)[:, None] * 7 + jnp.arange(chosen) * 5
        inputs = x, weight, number % experts, gate_up, down
        y, kept = routed_experts(*inputs, capacity=tokens * chosen, keep_hidden=True)
        return routed_experts_gradients(*inputs, y, capacity=tokens * chosen, kept=kept)

    return TestedPart(
        "experts",
        ("routed_experts", "grouped_matmul"),
        step,
        (
            _bfloat16_shape(tokens, d),
            _float32_shape(tokens, chosen),
            _bfloat16_shape(experts, d, 2, inner),
            _bfloat16_shape(experts, inner, d),
        ),
        18 * tokens * chosen * d * inner,
        2 * (9 * experts * d * inner + 4 * tokens * d),
    )


@dataclasses.dataclass(frozen=True)
class PartResult:
    """What the check of one operator found.

    Attributes:
      part: the operator.
      runs_as: names of the implementations that ran it.
      why: why they ran it, or the error.
      seconds: the shortest time of its two passes; None if they were not timed.
      share: the time that the chip's data sheet allows, divided by `seconds`; None if it is not
        known.
      code: 0, SLOW or BROKEN.
    """

    part: TestedPart
    runs_as: str
    why: str
    seconds: float | None
    share: float | None
    code: int


def check_parts(parts: Sequence[TestedPart], device: Any) -> list[PartResult]:
    """Traces all parts, runs the tests of their kernels, compiles the parts side by side, and times
    one after the other on `device`.
    """
    import jax

    from qwen3next_jax.ops.implementations import trace_and_record

    traced: dict[str, Any] = {}
    errors: dict[str, Exception] = {}

    def trace() -> None:
        traced.clear()
        errors.clear()  # of an earlier trace, with kernels that then failed their test
        for part in parts:
            try:
                traced[part.name] = jax.jit(part.function).trace(*part.shapes)
            except Exception as error:
                errors[part.name] = error

    def compile_part(name: str) -> Any:
        try:
            return traced[name].lower().compile()
        except Exception as error:
            errors[name] = error

    decisions = trace_and_record(trace)
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        compiled = dict(zip(traced, pool.map(compile_part, traced), strict=True))
    seconds: dict[str, float] = {}
    for part in parts:
        if part.name in errors:
            continue
        try:
            seconds[part.name] = _shortest_seconds(compiled[part.name], part.shapes)
        except Exception as error:
            errors[part.name] = error
    return [
        _result(
            part,
            [decision for decision in decisions if decision.operator in part.operators],
            errors.get(part.name),
            seconds.get(part.name),
            device,
        )
        for part in parts
    ]


def _result(part: TestedPart, decisions, error: Exception | None, seconds, device) -> PartResult:
    """Returns the result of a part.

    Args:
      decisions: the decisions on its operators (`implementations.Decision`).
      error: what its trace, compilation or run raised; None if nothing.
      seconds: its time; None if it was not timed.
      device: the device that was timed.
    """
    from qwen3next_jax.ops.implementations import NO_MEMORY, WHERE_TRIED

    names = ", ".join(dict.fromkeys(decision.implementation for decision in decisions))
    if any(decision.is_kernel for decision in decisions):
        # Of the experts' operators, one has the kernels and the other calls it.
        decisions = [decision for decision in decisions if decision.is_kernel]
    code = ExitCode.DONE
    if any(decision.why_no_kernels for decision in decisions):
        code = SLOW
    failed = [
        decision.why_no_kernels for decision in decisions if WHERE_TRIED in decision.why_no_kernels
    ]
    if any(NO_MEMORY not in refusal for refusal in failed):
        code = BROKEN
    reasons = dict.fromkeys(
        f"{decision.slowness_warning or 'it runs without kernels'}: "
        f"the call {decision.why_no_kernels}"
        if decision.why_no_kernels
        else decision.why_chosen
        for decision in decisions
    )
    why = "; ".join(reasons)
    if error is not None and out_of_memory_message(error):
        return PartResult(part, names, f"not timed, for lack of memory; {why}", None, None, code)
    if error is not None:
        text = f"{type(error).__name__}: {one_line(str(error))}"
        return PartResult(part, names, text, None, None, BROKEN)
    return PartResult(part, names, why, seconds, _share_of_peak(part, seconds, device), code)


def _shortest_seconds(compiled, shapes) -> float:
    """Returns the shortest time of some calls of a compiled function with random arguments."""
    import jax

    keys = jax.random.split(jax.random.key(0), len(shapes))
    arguments = [
        0.1 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)
    ]
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times)


def _share_of_peak(part: TestedPart, seconds: float, device) -> float | None:
    from qwen3next_jax.sharding.chips import find_chip

    chip = find_chip(device.device_kind)
    if chip is None:
        return None
    bandwidth = chip.hbm_bandwidth / chip.devices_per_chip
    return max(part.flops / chip.device_flops, part.bytes / bandwidth) / seconds


def _print_results(results: Sequence[PartResult], console: Console) -> None:
    """Prints a table of the times, and below it why each implementation runs."""
    table = Table("operator", "runs as", box=SIMPLE)
    table.add_column("forward and backward", justify="right")
    table.add_column("of the data sheet", justify="right")
    for result in results:
        table.add_row(
            result.part.name,
            result.runs_as or "–",
            "–" if result.seconds is None else f"{1e3 * result.seconds:.2f} ms",
            "–" if result.share is None else f"{result.share:.0%}",
        )
    console.print(table)
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.why, []).append(result.part.name)
    for why, same in names.items():
        console.print(f"{', '.join(same)}: {why}", markup=False)


def _verdict(results: Sequence[PartResult]) -> int:
    """Prints the verdict, and returns the exit code."""
    code = max(result.code for result in results)
    names = ", ".join(result.part.name for result in results if result.code == code)
    print(
        {
            ExitCode.DONE: "all kernels run",
            SLOW: f"slow, because no kernels run: {names}",
            BROKEN: f"broken: {names}",
        }[code]
    )
    return code


def _print_plan(console: Console) -> None:
    """Prints what the command compares on a machine with a GPU or TPUs."""
    console.print(
        "JAX computes on a CPU here, which runs every operator without kernels. On a GPU or a TPU "
        "this command compares"
    )
    table = Table("operator", "forward and backward on", box=SIMPLE)
    table.add_column("TFLOP", justify="right")
    table.add_column("GB", justify="right")
    for part in tested_parts(ROWS, LENGTH):
        table.add_row(
            part.name,
            ", ".join(f"{x.dtype} {list(x.shape)}" for x in part.shapes[:2]),
            f"{part.flops / 1e12:.2f}",
            f"{part.bytes / 1e9:.2f}",
        )
    console.print(table)
    console.print("with the time that the chip's data sheet allows for these operations and bytes.")
