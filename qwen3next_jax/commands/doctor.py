"""Checks this machine in about a minute: the chip, its driver, and the versions of the libraries.
For each operator of the model, the command shows which implementation runs it, whether the
implementation passed its test, and its speed on a standard shape, relative to the peak rates in the
chip's data sheet. The command writes no files except the results of the tests.

    qwen3next doctor

The exit code is 0 if kernels run every operator, or if there is only a CPU; 1 if an operator is
slow because it runs without kernels; 2 if something is broken.
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
        _print_untimed_operators(console)
        return ExitCode.DONE
    with console.status("compiling, testing and timing each operator"):
        results = check_operators(tested_operators(ROWS, LENGTH), jax.local_devices()[0])
    _print_results(results, console)
    return _print_verdict(results)


def _versions() -> list[str]:
    """Returns the name and version of each package in PACKAGES that is installed."""
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
class TestedOperator:
    """One operator, with the shapes that it has in a training step of the released model.

    Attributes:
      table_name: the name of the operator in the printed table.
      operator_names: the names under which the operator is looked up in `ops.implementations`.
      forward_and_backward: the function that is timed; it computes the forward and backward pass.
      argument_shapes: the shapes and dtypes of the arguments of `forward_and_backward`.
      flops: the floating-point operations that the forward and backward pass need.
      memory_bytes: the bytes that the two passes must read from and write to the device's memory.
    """

    table_name: str
    operator_names: tuple[str, ...]
    forward_and_backward: Callable[..., Any]
    argument_shapes: tuple[Any, ...]
    flops: float
    memory_bytes: float


def tested_operators(rows: int, length: int) -> list[TestedOperator]:
    """Returns the operators for `rows` rows of `length` tokens in bfloat16. The operators have the
    widths of the released model, but 64 instead of 512 experts.
    """
    return [
        _experts_operator(rows * length),
        _attention_operator(rows, length),
        _delta_rule_operator(rows, length),
        _convolution_operator(rows, length),
        _norm_and_gate_operator(rows, length),
    ]


def _bfloat16_array_spec(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _float32_array_spec(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _gradient_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the gradients of the sum of squares of the output of
    `function` with respect to all arguments.
    """
    import jax
    import jax.numpy as jnp

    def loss(*arguments):
        return jnp.sum(jnp.square(function(*arguments).astype(jnp.float32)))

    return lambda *arguments: jax.grad(loss, tuple(range(len(arguments))))(*arguments)


def _attention_operator(rows: int, length: int) -> TestedOperator:
    """Returns grouped-query attention with heads of width 256, over rows of several documents. For
    the count of FLOPs, a causal query reads half of the keys of its document on average. The
    forward pass has two matrix products, the backward pass has five.
    """
    import jax.numpy as jnp

    from qwen3next_jax import ops

    queries, keys, head = 16, 2, 256
    q, kv = (
        _bfloat16_array_spec(rows, length, queries, head),
        _bfloat16_array_spec(rows, length, keys, head),
    )
    ends = length // 2, 3 * length // 4, 7 * length // 8, length
    pairs = sum((end - begin) ** 2 for begin, end in zip((0, *ends[:-1]), ends, strict=True))

    def attention_of_documents(q, k, v):
        documents = 1 + jnp.searchsorted(jnp.asarray(ends), jnp.arange(length), side="right")
        ids = jnp.broadcast_to(documents.astype(jnp.int32), (rows, length))
        return ops.attention(q, k, v, segment_ids=ids)

    return TestedOperator(
        "attention",
        ("attention",),
        _gradient_function(attention_of_documents),
        (q, kv, kv),
        7 * rows * pairs * queries * head,
        2 * rows * length * head * (6 * queries + 8 * keys),
    )


# Key heads, value heads and width of a head of the gated delta rule.
_KEYS, _VALUES, _HEAD = 16, 32, 128


def _delta_rule_operator(rows: int, length: int) -> TestedOperator:
    """Returns the gated delta rule. For each token and value head, the recurrence decays a state of
    128 x 128, reads the state twice and writes it once.
    """
    import jax

    from qwen3next_jax import ops

    def rule(q, k, v, g, beta):
        o, _ = ops.gated_delta_rule(q, k, v, g=-jax.nn.softplus(g), beta=jax.nn.sigmoid(beta))
        return o

    q, v = (
        _bfloat16_array_spec(rows, length, _KEYS, _HEAD),
        _bfloat16_array_spec(rows, length, _VALUES, _HEAD),
    )
    gate = _float32_array_spec(rows, length, _VALUES)
    return TestedOperator(
        "gated delta rule",
        ("gated_delta_rule",),
        _gradient_function(rule),
        (q, q, v, gate, gate),
        21 * rows * length * _VALUES * _HEAD**2,
        2 * rows * length * _HEAD * (6 * _KEYS + 5 * _VALUES),
    )


def _convolution_operator(rows: int, length: int) -> TestedOperator:
    """Returns the short convolution before the delta rule, with its activation. The time of the
    convolution is limited by memory bandwidth, so no FLOPs are counted.
    """
    from qwen3next_jax import ops

    channels = (2 * _KEYS + _VALUES) * _HEAD
    return TestedOperator(
        "convolution",
        ("causal_conv1d",),
        _gradient_function(lambda x, kernel: ops.causal_conv1d(x, kernel, activation="silu")[0]),
        (_bfloat16_array_spec(rows, length, channels), _bfloat16_array_spec(4, channels)),
        0,
        2 * 5 * rows * length * channels,
    )


def _norm_and_gate_operator(rows: int, length: int) -> TestedOperator:
    """Returns the operator that normalises and gates the output of the delta rule. Memory bandwidth
    limits its time, so no FLOPs are counted.
    """
    from qwen3next_jax.ops.gated_norm import gated_norm

    width = _VALUES * _HEAD
    o = _bfloat16_array_spec(rows, length, width)
    return TestedOperator(
        "norm and gate",
        ("gated_norm",),
        _gradient_function(lambda o, z, w: gated_norm(o, z, w, eps=1e-6)),
        (o, o, _float32_array_spec(_HEAD)),
        0,
        2 * 8 * rows * length * width,
    )


def _experts_operator(tokens: int) -> TestedOperator:
    """Returns the routed experts, with three matrix products in the forward pass and six in the
    backward pass.
    """
    import jax.numpy as jnp

    from qwen3next_jax.ops.routed_experts import routed_experts, routed_experts_gradients

    d, experts, chosen, inner = 2048, 64, 10, 512

    def step(x, weight, gate_up, down):
        number = jnp.arange(tokens)[:, None] * 7 + jnp.arange(chosen) * 5
        inputs = x, weight, number % experts, gate_up, down
        y, kept = routed_experts(*inputs, capacity=tokens * chosen, keep_hidden=True)
        return routed_experts_gradients(*inputs, y, capacity=tokens * chosen, kept=kept)

    return TestedOperator(
        "experts",
        ("routed_experts", "grouped_matmul"),
        step,
        (
            _bfloat16_array_spec(tokens, d),
            _float32_array_spec(tokens, chosen),
            _bfloat16_array_spec(experts, d, 2, inner),
            _bfloat16_array_spec(experts, inner, d),
        ),
        18 * tokens * chosen * d * inner,
        2 * (9 * experts * d * inner + 4 * tokens * d),
    )


@dataclasses.dataclass(frozen=True)
class OperatorResult:
    """The result of the check of one operator.

    Attributes:
      operator: the operator that was checked.
      implementation_names: names of the implementations that ran the operator.
      reason_or_error: why these implementations were chosen, or the error that was raised.
      shortest_seconds: the shortest time of the forward and backward pass together; None if they
        were not timed.
      share_of_peak: the time that the peak rates in the chip's data sheet allow, divided by
        `shortest_seconds`; None if the peak rates or `shortest_seconds` are not known.
      exit_code: 0, SLOW or BROKEN.
    """

    operator: TestedOperator
    implementation_names: str
    reason_or_error: str
    shortest_seconds: float | None
    share_of_peak: float | None
    exit_code: int


def check_operators(operators: Sequence[TestedOperator], device: Any) -> list[OperatorResult]:
    """Traces all operators, runs the tests of their kernels, compiles the operators in parallel,
    and times one operator after the other. `device`: the device that runs them.
    """
    import jax

    from qwen3next_jax.ops.implementations import trace_and_record

    traced: dict[str, Any] = {}
    errors: dict[str, Exception] = {}

    def trace() -> None:
        traced.clear()
        errors.clear()  # of an earlier trace, with kernels that then failed their test
        for operator in operators:
            try:
                traced[operator.table_name] = jax.jit(operator.forward_and_backward).trace(
                    *operator.argument_shapes
                )
            except Exception as error:
                errors[operator.table_name] = error

    def compile_part(name: str) -> Any:
        try:
            return traced[name].lower().compile()
        except Exception as error:
            errors[name] = error

    decisions = trace_and_record(trace)
    with concurrent.futures.ThreadPoolExecutor(len(operators)) as pool:
        compiled = dict(zip(traced, pool.map(compile_part, traced), strict=True))
    seconds: dict[str, float] = {}
    for operator in operators:
        if operator.table_name in errors:
            continue
        try:
            seconds[operator.table_name] = _shortest_seconds(
                compiled[operator.table_name], operator.argument_shapes
            )
        except Exception as error:
            errors[operator.table_name] = error
    return [
        _operator_result(
            operator,
            [decision for decision in decisions if decision.operator in operator.operator_names],
            errors.get(operator.table_name),
            seconds.get(operator.table_name),
            device,
        )
        for operator in operators
    ]


def _operator_result(
    operator: TestedOperator, decisions, error: Exception | None, seconds, device
) -> OperatorResult:
    """Returns the result of an operator.

    Args:
      decisions: which implementations were chosen for the operator (`implementations.Decision`).
      error: the exception that tracing, compiling or running the operator raised; None for none.
      seconds: the measured time; None if the operator was not timed.
      device: the device on which the operator ran.
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
        return OperatorResult(
            operator, names, f"not timed, for lack of memory; {why}", None, None, code
        )
    if error is not None:
        text = f"{type(error).__name__}: {one_line(str(error))}"
        return OperatorResult(operator, names, text, None, None, BROKEN)
    return OperatorResult(
        operator, names, why, seconds, _share_of_peak(operator, seconds, device), code
    )


def _shortest_seconds(compiled, shapes) -> float:
    """Returns the shortest time of several calls of a compiled function with random arguments."""
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


def _share_of_peak(operator: TestedOperator, seconds: float, device) -> float | None:
    from qwen3next_jax.sharding.chips import find_chip

    chip = find_chip(device.device_kind)
    if chip is None:
        return None
    bandwidth = chip.hbm_bandwidth / chip.devices_per_chip
    return max(operator.flops / chip.device_flops, operator.memory_bytes / bandwidth) / seconds


def _print_results(results: Sequence[OperatorResult], console: Console) -> None:
    """Prints a table of the times, and below the table why each implementation was chosen."""
    table = Table("operator", "runs as", box=SIMPLE)
    table.add_column("forward and backward", justify="right")
    table.add_column("of the data sheet", justify="right")
    for result in results:
        table.add_row(
            result.operator.table_name,
            result.implementation_names or "–",
            "–" if result.shortest_seconds is None else f"{1e3 * result.shortest_seconds:.2f} ms",
            "–" if result.share_of_peak is None else f"{result.share_of_peak:.0%}",
        )
    console.print(table)
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.reason_or_error, []).append(result.operator.table_name)
    for why, same in names.items():
        console.print(f"{', '.join(same)}: {why}", markup=False)


def _print_verdict(results: Sequence[OperatorResult]) -> int:
    """Prints whether all kernels run, or which operators are slow or broken. Returns the
    exit code.
    """
    code = max(result.exit_code for result in results)
    names = ", ".join(result.operator.table_name for result in results if result.exit_code == code)
    print(
        {
            ExitCode.DONE: "all kernels run",
            SLOW: f"slow, because no kernels run: {names}",
            BROKEN: f"broken: {names}",
        }[code]
    )
    return code


def _print_untimed_operators(console: Console) -> None:
    """Prints a table of the operators that the command times on a machine with a GPU or TPUs."""
    console.print(
        "JAX computes on a CPU here, which runs every operator without kernels. On a GPU or a TPU "
        "this command compares"
    )
    table = Table("operator", "forward and backward on", box=SIMPLE)
    table.add_column("TFLOP", justify="right")
    table.add_column("GB", justify="right")
    for part in tested_operators(ROWS, LENGTH):
        table.add_row(
            part.table_name,
            ", ".join(f"{x.dtype} {list(x.shape)}" for x in part.argument_shapes[:2]),
            f"{part.flops / 1e12:.2f}",
            f"{part.memory_bytes / 1e9:.2f}",
        )
    console.print(table)
    console.print("with the time that the chip's data sheet allows for these operations and bytes.")
