"""Times one training step of this project on one GPU: the seconds of the step, and of each kernel.

    uv run --extra gpu python benchmarks/gpu/step.py --shape=period [--json=FILE]
    uv run --extra gpu python benchmarks/gpu/step.py --shape=period --flags
    python benchmarks/gpu/step.py --shape=small --tiny      on a CPU; its times say nothing

`--shape`: a name of `shapes.SHAPES`. Parameters and both moments of AdamW are float32, products
bfloat16; one device, no MTP, no remat. The tokens are random, so that the router spreads them
evenly. `--set train.remat=block` and the like change settings of the run.

Printed and written to --json: which implementation runs each operator, and why, as a run says it;
the median seconds of a step after three others, each synchronised;
the device's peak memory; the seconds from the start of the process to the end of the first step;
the kernels of a step by kind (`measuring.GROUPS`) and the longest by name. Only one process of the
machine times at a time (a file lock); others may compile meanwhile.

`--flags` times the step with each set of XLA flags in `FLAGS`, each in a process of its own.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.gpu import measuring, shapes

# Sets of XLA's flags beside its own choice, which with jax 0.12 has CUDA graphs ("command buffers")
# of everything but loops, autotuning at level 4 and Triton beside cuBLAS. NVIDIA's images for JAX
# and MaxText's scripts set the scheduler and the products, marin no command buffers.
FLAGS = {
    "XLA's defaults": "",
    "latency hiding scheduler": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "products by cuBLAS alone": "--xla_gpu_enable_triton_gemm=false",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "command buffers of loops, too": "--xla_gpu_enable_command_buffer=+WHILE",
    "products of one operand merged": "--xla_gpu_dot_merger_threshold_mb=1024",
    "bfloat16 wherever the program says so": "--xla_allow_excess_precision=false",
    "no autotuning": "--xla_gpu_autotune_level=0",
    "every tile tried": "--xla_gpu_exhaustive_tiling_search=true",
}


def settings_of(shape: shapes.Shape) -> dict:
    """Returns the settings of a run whose steps are those of `shape`, as a nested dict."""
    from qwen3next_jax.config import default_config

    settings = {f"model.{name}": value for name, value in shape.model.items()}
    settings |= {
        "name": "step",
        "model.mtp_depth": 0,
        "model.max_position_embeddings": max(shape.length, 32_768),
        "train.batch_size": shape.rows,
        "train.sequence_length": shape.length,
        "train.gradient_accumulation": shape.micro_batches,
    }
    values = default_config()
    for name, value in (settings | dict(shape.ours)).items():
        *groups, field = name.split(".")
        group = values
        for part in groups:
            group = group[part]
        group[field] = value
    return values


def config_of(shape: shapes.Shape, overrides: Sequence[str] = ()):
    """Returns the `Config` of `settings_of` with the settings `overrides`, each NAME=VALUE."""
    from qwen3next_jax.config import Config, from_dict
    from qwen3next_jax.config.files import apply_overrides

    values = settings_of(shape)
    apply_overrides(values, [tuple(part.partition("=")[::2]) for part in overrides])
    return from_dict(Config, values)


def batch_of(shape: shapes.Shape) -> dict:
    """Returns random tokens and the documents of one step, as NumPy arrays [B, T]."""
    import numpy as np

    size = shape.rows, shape.length
    tokens = np.random.default_rng(0).integers(0, shape.model["vocab_size"], size)
    row = np.repeat(np.arange(1, shape.documents + 1), shape.document_lengths)
    return {
        "tokens": tokens.astype(np.int32),
        "segment_ids": np.broadcast_to(row, size).astype(np.int32),
    }


def flops_of(shape: shapes.Shape) -> float:
    """Returns the model FLOPs of a step (`qwen3next_jax.model.flops`). In rows of several
    documents a query reads the keys of its own document alone.
    """
    from qwen3next_jax.model.flops import flops_per_token

    model = config_of(shape).model
    lengths = shape.document_lengths
    return shape.rows * sum(length * flops_per_token(model, length) for length in lengths)


def peak_flops(kind: str) -> float:
    """Returns the peak FLOP/s of a device by its data sheet; 0 if it is not known."""
    from qwen3next_jax.sharding.chips import find_chip

    chip = find_chip(kind)
    return chip.bf16_flops if chip else 0.0


def profile(step, times: int = 2) -> dict[str, tuple[float, float]]:
    """Returns kernel → (milliseconds, calls) of one step, by JAX's profiler. On a CPU, which has
    no kernels, XLA's operations take their place. If the profiler fails, says so and returns {}.
    """
    try:
        return _profile(step, times)
    except Exception as error:
        print(f"error: no profile: {harness.one_line(error)}", file=sys.stderr)
        return {}


def _profile(step, times: int) -> dict[str, tuple[float, float]]:
    import jax

    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                step()
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
            for event in _kernels(planes):
                milliseconds, calls = found.get(event.name, (0.0, 0.0))
                found[event.name] = (
                    milliseconds + 1e-6 * event.duration_ns / times,
                    calls + 1 / times,
                )
    return found


def _kernels(planes):
    """Yields the events that ran on a device."""
    gpus = [plane for plane in planes if "GPU" in plane.name]
    for plane in gpus or planes:
        for line in plane.lines:
            for event in line.events:
                if line.name.startswith("Stream") if gpus else _is_operation(event):
                    yield event


def _is_operation(event) -> bool:
    return any(name == "hlo_op" for name, _ in event.stats)


def measure(shape: shapes.Shape, options: argparse.Namespace) -> dict:
    """Compiles and times the step; returns what is written."""
    import jax

    from qwen3next_jax.commands import process_setup
    from qwen3next_jax.ops.implementations import trace_and_record
    from qwen3next_jax.sharding.mesh import single_device_mesh
    from qwen3next_jax.training.loop import make_train_step
    from qwen3next_jax.training.resolve import resolve_run

    process_setup.keep_freed_memory()
    process_setup.enable_compilation_cache()  # as train.py does
    config = config_of(shape, options.set)
    run = resolve_run(config, single_device_mesh())
    state = run.init_state()
    batch = jax.device_put(batch_of(shape), run.batch_sharding)
    step = make_train_step(run, *run.stages)
    # Tests the kernels first, side by side, as a run does.
    decisions = trace_and_record(lambda: step.trace(state, batch))
    operators = [
        f"{d.operator}: {d.implementation}: "
        + (f"the call {d.why_no_kernels}" if d.why_no_kernels else d.why_chosen)
        for d in decisions
    ]
    print("\n".join(operators), flush=True)
    device, metrics = jax.devices()[0], {}

    def one():
        nonlocal state, metrics
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    one()
    result = {
        "side": "this project",
        "device": device.device_kind,
        "versions": f"jax {jax.__version__}",
        "operators": operators,
        "first_step_seconds": time.time() - measuring.STARTED,
        "loss_of_first_step": float(metrics["loss"]),
    }
    if options.first_step_alone:
        return result
    with harness.alone():
        median, seconds = harness.median_seconds(one, options.rounds)
        print(f"{median:.4f} s a step", flush=True)  # known even if the profiler ends the process
        stats = device.memory_stats() or {}
        kernels = profile(one)
    flops, peak = flops_of(shape), peak_flops(device.device_kind)
    return result | {
        "seconds": median,
        "all_seconds": seconds,
        "flops": flops,
        "mfu": flops / median / peak if peak else None,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "loss": float(metrics["loss"]),
        "profile": measuring.report(kernels),
    }


def with_flags(options: argparse.Namespace) -> int:
    """Times the step with every set of `FLAGS`; prints a table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(FLAGS.items()):
            file = pathlib.Path(folder) / f"{number}.json"
            given = [word for word in sys.argv[1:] if word != "--flags"]
            command = [sys.executable, __file__, *given, f"--json={file}"]
            before = os.environ.get("XLA_FLAGS", "")
            environment = os.environ | {"XLA_FLAGS": f"{before} {flags}".strip()}
            print(f"\n{name}: {flags}", flush=True)
            code = subprocess.run(command, env=environment).returncode
            found = json.loads(file.read_text()) if file.exists() else {}
            failed = found.get("failed", f"code {code}" if "seconds" not in found else "")
            rows.append((name, flags, found, failed))
    print()
    harness.print_header("", "flags", "s a step", "first step, s", "GiB")
    for name, flags, found, failed in rows:
        if failed:
            harness.print_row(name, f"`{flags}`", f"failed: {failed}", "", "")
            continue
        memory = f"{found['peak_bytes'] / 2**30:.1f}" if found["peak_bytes"] else ""
        first = f"{found['first_step_seconds']:.0f}"
        harness.print_row(name, f"`{flags}`", f"{found['seconds']:.4f}", first, memory)
    return int(any(failed for *_, failed in rows))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--shape", required=True, choices=shapes.SHAPES)
    parser.add_argument("--json", type=pathlib.Path, help="the file to write")
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed")
    parser.add_argument("--set", nargs="*", default=[], help="settings: train.remat=block …")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flags", action="store_true", help="compare sets of XLA's flags")
    parser.add_argument("--first_step_alone", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    # The largest shapes need more than the three quarters of an H100 that JAX takes by itself.
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ".92")
    if options.flags:
        return with_flags(options)
    shape = shapes.SHAPES[options.shape]
    if options.tiny:
        shape = shapes.tiny(shape)
    try:
        result = measure(shape, options)
    except Exception as error:
        traceback.print_exc()
        result = {"side": "this project", "failed": harness.one_line(error)}
    result = {"shape": options.shape, "tokens": shape.tokens} | result
    if options.json:
        harness.write_json(options.json, result)
    print(measuring.summary(result), flush=True)
    return int("failed" in result)


if __name__ == "__main__":
    sys.exit(main())
