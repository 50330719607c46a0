r"""Which kernels, in which tiles, multiply the experts fastest on this GPU: y, dx and dw of one
product of a mixture of experts, at the shapes of three models.

    uv run --extra gpu python benchmarks/gpu/tune_experts.py [--only=released] [--rounds=5]
    uv run python benchmarks/gpu/tune_experts.py --tiny
    .gpu/bin/python benchmarks/gpu/tune_experts.py --compile
    .gpu/bin/python benchmarks/gpu/tune_experts.py --published=nvidia_h100_80gb_hbm3

Candidates: tokamax's Mosaic kernels (Hopper), its Triton kernels (with jax-triton), the examples
that JAX has in jax.experimental.pallas.ops.gpu (Hopper), the form "blocked" of this project,
`jax.lax.ragged_dot` in XLA, which is cuDNN's where XLA finds it, and TransformerEngine's grouped
product if it is installed. For each are printed the least milliseconds, the TFLOP/s of the rows
that experts have, and the relative L2 error of the first and the last group against float32. The
last lines are what belongs into `mosaic_product_settings`, `triton_product_settings` and
`triton_weight_gradient_settings` of qwen3next_jax/kernels/gpu/grouped_matmul.py. It takes some
minutes.

--tiny runs the same code on small arrays; a CPU then runs what it can and lowers the kernels for
CUDA, if tokamax is installed. --compile compiles all kernels for a described H100, in the
environment of benchmarks/gpu/experts_passes.py, and prints what ptxas says of registers, spills and
shared memory. --published prints what tokamax ships of its authors' measurements on a chip: a
folder of tokamax/data/autotuning.
"""

import concurrent.futures
import functools
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time
from typing import NamedTuple

from benchmarks import harness


class Problem(NamedTuple):
    """One product. `rows` are the choices of all tokens."""

    name: str
    rows: int
    width: int
    out: int
    experts: int


PROBLEMS = (
    Problem("released, gate and up", 327_680, 2048, 1024, 64),
    Problem("released, down", 327_680, 512, 2048, 64),
    Problem("small, gate and up", 131_072, 512, 256, 16),
    Problem("small, down", 131_072, 128, 512, 16),
    Problem("Qwen3-30B-A3B, gate and up", 262_144, 2048, 1536, 128),
    Problem("Qwen3-30B-A3B, down", 262_144, 768, 2048, 128),
)
TINY = (Problem("tiny", 1024, 128, 64, 4), Problem("tiny, wide", 1024, 64, 192, 4))
PASSES = ("y", "dx", "dw")
TILE = 256  # rows of a tile of the layout: an expert has a multiple of it


def arrays(problem: Problem):
    """x, w, the rows of each expert, and dy; a balanced router's counts, in whole tiles, one expert
    without rows, and rows of no expert at the end.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    tile = min(TILE, problem.rows // problem.experts // 2)
    counts = np.random.default_rng(0).multinomial(
        problem.rows - tile * problem.experts, np.full(problem.experts, 1 / problem.experts)
    )
    sizes = (-(-counts // tile) * tile).astype(np.int32)
    sizes[1] = 0
    rows = -(-problem.rows // tile) * tile
    assert sizes.sum() < rows
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(
            keys,
            (
                (rows, problem.width),
                (problem.experts, problem.width, problem.out),
                (rows, problem.out),
            ),
        )
    )
    return x, w, jnp.asarray(sizes), dy


def mosaic_settings(which: str):
    """Settings of tokamax's Mosaic kernels: those that are fastest in its own measurements, and
    wider tiles, which read less for the same product.
    """
    orders = {
        "y": ((4, True, "N", 8), (4, True, "M", 1), (4, False, "M", 1), (2, False, "M", 1)),
        "dw": ((4, False, "M", 1), (2, False, "M", 1)),  # the kernel reads no order
    }
    for block_m, block_n, block_k in ((128, 64, 128), (128, 128, 64), (64, 64, 128)):
        for stages, persistent, minor, width in orders["dw" if which == "dw" else "y"]:
            yield dict(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_stages=stages,
                persistent=persistent,
                grid_minor_dim=minor,
                grid_tile_width=width,
            )


def triton_settings(which: str):
    """Settings of tokamax's Triton kernels: those that are fastest in its own measurements."""
    for block_m, block_n, block_k, warps, stages in (
        (128, 128, 32, 4, 4),
        (128, 256, 32, 8, 5),
        (128, 256, 64, 8, 3),
        (256, 128, 32, 8, 5),
        (64, 256, 32, 4, 5),
        (256, 64, 64, 4, 3),
        (256, 256, 32, 8, 5),
    ):
        yield dict(
            block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages
        )


def mosaic(which: str, settings, x, w, sizes, dy):
    from qwen3next_jax.kernels.gpu import grouped_matmul, tokamax

    sm90 = tokamax.import_tokamax_operator("ragged_dot.pallas_mosaic_gpu_kernel_sm90")
    config = grouped_matmul.mosaic_config(**settings)
    if which == "y":
        return sm90.ragged_dot_kernel(x, w, sizes, x.dtype, config)
    if which == "dx":
        return sm90.ragged_dot_kernel(dy, w.swapaxes(1, 2), sizes, x.dtype, config)
    return sm90.ragged_contracting_dim_dot_kernel(x, dy, sizes, w.dtype, config)


def triton(which: str, settings, x, w, sizes, dy):
    import jax

    from qwen3next_jax.kernels.gpu import tokamax

    module = tokamax.import_tokamax_operator("ragged_dot.triton")
    common = dict(
        group_sizes=sizes,
        precision=(jax.lax.Precision.DEFAULT,) * 2,
        out_dtype=x.dtype,
        config=module.Config(**settings),
    )
    if which == "dw":
        return module._ragged_contracting_dim_dot(x, dy, **common)
    operands = (x, w) if which == "y" else (dy, w.swapaxes(1, 2))
    return module._ragged_dot(*operands, split_k_intermediate_dtype=None, **common)


def pallas_settings(which: str):
    for block_m, block_n, block_k, stages in (
        (128, 128, 64, 4),
        (128, 128, 128, 3),
        (64, 128, 64, 5),
    ):
        for grid_block_n in (1, 8):
            yield dict(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                max_concurrent_steps=stages,
                grid_block_n=grid_block_n,
            )


def pallas(which: str, settings, x, w, sizes, dy):
    """The kernels that JAX itself has as examples. For dx it reads w as it is; for dw it reads no
    transposed copy of x.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    common = dict(group_sizes=sizes, **settings)
    if which == "dw":
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(x, dy, **common)
    return ragged_dot_mgpu.ragged_dot(
        x if which == "y" else dy, w, transpose_rhs=which == "dx", **common
    )


def by_xla(implementation: str, which: str, x, w, sizes, dy):
    import jax

    from qwen3next_jax import ops

    run = lambda x, w: ops.grouped_matmul(x, w, sizes, implementation=implementation)
    if which == "y":
        return run(x, w)
    return jax.vjp(run, x, w)[1](dy)[0 if which == "dx" else 1]


def transformer_engine(which: str, x, w, sizes, dy):
    """Written by TransformerEngine's documentation, never run."""
    from transformer_engine.jax import cpp_extensions as te

    lhs, rhs, dims = {
        "y": (x, w, ((1,), (1,))),
        "dx": (dy, w, ((1,), (2,))),
        "dw": (x, dy, ((0,), (0,))),
    }[which]
    return te.grouped_gemm(lhs, rhs, sizes, contracting_dims=dims)


def candidates(which: str, kernels_only: bool):
    """(name, settings, function) of everything that may compute `which`."""
    has = lambda name: importlib.util.find_spec(name) is not None
    if has("tokamax"):
        for settings in mosaic_settings(which):
            yield "mosaic", settings, functools.partial(mosaic, which, settings)
    if has("tokamax") and has("jax_triton"):
        for settings in triton_settings(which):
            yield "triton", settings, functools.partial(triton, which, settings)
    for settings in pallas_settings(which):
        yield "pallas", settings, functools.partial(pallas, which, settings)
    if kernels_only:
        return
    for name in ("blocked", "ragged_dot"):
        yield name, {}, functools.partial(by_xla, name, which)
    if has("transformer_engine"):
        yield "TransformerEngine", {}, functools.partial(transformer_engine, which)


def error(which: str, got, x, w, sizes, dy) -> float:
    """The relative L2 error of the first and the last group against float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    ends = np.cumsum(np.asarray(sizes))
    worst = 0.0
    for e in (0, len(ends) - 1):
        rows = slice(int(ends[e] - sizes[e]), int(ends[e]))
        x_, w_, dy_ = (a.astype(jnp.float32) for a in (x[rows], w[e], dy[rows]))
        a, b = {"y": (x_, w_), "dx": (dy_, w_.T), "dw": (x_.T, dy_)}[which]
        want = jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
        mine = (got[e] if which == "dw" else got[rows]).astype(jnp.float32)
        worst = max(worst, float(jnp.linalg.norm(mine - want) / jnp.linalg.norm(want)))
    return worst


def milliseconds(run, given, rounds: int) -> float:
    import jax

    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run(*given))
        times.append(1e3 * (time.perf_counter() - begun))
        if times[0] > 100:  # hopeless
            break
    return min(times)


def measure(problem: Problem, which: str, rounds: int):
    """Prints a line for each candidate, and returns (milliseconds, name, settings) of the fastest
    that is right; None if there is none.
    """
    import jax

    given = arrays(problem)
    flops = 2 * int(given[2].sum()) * problem.width * problem.out
    on_gpu = jax.default_backend() == "gpu"
    found = []

    def compiled(name: str, function):
        """Returns the compiled candidate; None where it can only be lowered; an error."""
        try:
            if name in ("mosaic", "triton", "pallas") and not on_gpu:
                jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",))
                return None
            return jax.jit(function).lower(*given).compile()
        except Exception as failure:
            return failure

    tried = list(candidates(which, kernels_only=False))
    # Most of the time is the compilers', which threads share.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() if on_gpu else 1) as threads:
        programs = list(threads.map(lambda one: compiled(one[0], one[2]), tried))
    for (name, settings, _), run in zip(tried, programs, strict=True):
        text = " ".join(f"{key}={value}" for key, value in settings.items())
        if run is None:
            print(f"  {name:10} {text}: lowered for CUDA, not run")
            continue
        try:
            if isinstance(run, Exception):
                raise run
            wrong = error(which, run(*given), *given)
            with harness.alone():
                ms = milliseconds(run, given, rounds)
        except Exception as failure:
            reason = harness.one_line(failure)
            print(f"  {name:10} {text}: {reason}", flush=True)
            continue
        if wrong < 0.02:
            found.append((ms, name, settings))
        print(
            f"  {name:10} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s error {wrong:.1e} {text}",
            flush=True,
        )
    return min(found, key=lambda entry: entry[0], default=None)


def collect_triton_assemblies() -> list:
    """Returns a list to which every Triton kernel that is compiled from now on is appended. XLA
    would hand its assembly to the GPU's driver.
    """
    try:
        from jax_triton import triton_lib
    except ImportError:
        return []
    found, compiler = [], triton_lib.compile_ttir_to_ptx_inplace

    def compile_and_keep(*arguments):
        found.append(compiler(*arguments))
        return found[-1]

    triton_lib.compile_ttir_to_ptx_inplace = compile_and_keep
    return found


def ptxas(assembly: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly)
        file.flush()
        command = ["ptxas", "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def compile_all():
    """Prints registers, spills and shared memory of the kernels for an H100, each once: they depend
    on the tiles, hardly on the sizes.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.gpu import experts_passes

    jax.config.update("jax_platforms", "cpu")
    from qwen3next_jax.planner.topology import describe_topology

    mesh = jax.sharding.Mesh(np.array(describe_topology("h100:1x1").devices), ("data",))
    experts_passes.describe_chip()
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, rows, width, out, experts = PROBLEMS[0]
    x, w, sizes, dy = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((rows, width), jnp.bfloat16),
            ((experts, width, out), jnp.bfloat16),
            ((experts,), jnp.int32),
            ((rows, out), jnp.bfloat16),
        )
    )
    assemblies = collect_triton_assemblies()
    for which in PASSES:
        for name, settings, function in candidates(which, kernels_only=True):
            if which == "dx" and name != "pallas":  # the kernel of y
                continue
            text = " ".join(f"{key}={value}" for key, value in settings.items())
            with harness.captured_output() as said:
                try:
                    # A new function: an outer cache would keep the compiled one.
                    traced = jax.jit(lambda *a: function(*a)).trace(x, w, sizes, dy)
                    traced.lower(lowering_platforms=("cuda",)).compile()
                    failure = ""
                except Exception as reason:
                    failure = harness.one_line(reason)
            log = said()
            shared = ""
            while assemblies:
                assembly = assemblies.pop()
                log += ptxas(assembly.binary)
                shared = f", {assembly.shared_mem_bytes / 2**10:.0f} KiB of shared memory"
            used = re.findall(r"(\d+) bytes spill stores.*?Used (\d+) registers", log, re.S)
            report = ", ".join(f"{r} registers, {s} bytes spilled{shared}" for s, r in used)
            print(f"{which:2} {name:7} {text}: {failure or report or 'no report'}", flush=True)


def published(chip: str):
    """Prints TFLOP/s and settings of the fastest kernel of each kind for each call of bfloat16 with
    65,536 rows or more that tokamax's authors measured.
    """
    folder = pathlib.Path(importlib.util.find_spec("tokamax").origin).parent / "data/autotuning"
    fastest = {}
    for language, file in (
        ("mosaic", "pallas_mosaic_gpu_ragged_dot.json"),
        ("triton", "triton_ragged_dot.json"),
        ("triton", "pallas_triton_ragged_dot.json"),
    ):
        path = folder / chip / file
        for call, times in json.loads(path.read_text()).items() if path.exists() else ():
            call = json.loads(call)
            arrays = call["lhs"], call["rhs"]
            if call["return_residuals"] or not all(str(a).startswith("bf16") for a in arrays):
                continue
            (m, k), (*_, n) = (
                [int(size) for size in re.findall(r"\d+", array.partition("[")[2])]
                for array in arrays
            )
            dims = call["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0]
            which = {"[[1], [1]]": "y", "[[1], [2]]": "dx", "[[0], [0]]": "dw"}[str(dims)]
            if which == "dx":
                n = int(re.findall(r"\d+", call["rhs"])[2])
            for settings, measured in times.items():
                tflops = 2 * m * k * n / statistics.median(measured["evaluation_times_ms"]) / 1e9
                key = which, m, k, n, str(call["group_sizes"])[:40], language
                if m >= 2**16 and tflops > fastest.get(key, (0, ""))[0]:
                    fastest[key] = tflops, settings
    for (which, m, k, n, groups, language), (tflops, settings) in sorted(fastest.items()):
        print(f"{which:2} {m} x {k} x {n} {groups} {language} {tflops:4.0f} TFLOP/s {settings}")


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", default="", help="of the problems, those whose name begins so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--published", default="", metavar="CHIP")
    options = parser.parse_args()
    if options.published:
        return published(options.published)
    if options.compile:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        return compile_all()
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        from benchmarks.gpu import experts_passes

        experts_passes.describe_chip()
    print(f"{device.device_kind}, jax {jax.__version__}")
    best = {}
    for problem in TINY if options.tiny else PROBLEMS:
        if not problem.name.startswith(options.only):
            continue
        for which in PASSES:
            print(f"{problem}, {which}")
            best[problem, which] = measure(problem, which, options.rounds)
    print("fastest:")
    for (problem, which), entry in best.items():
        if entry is None:
            print(f"  {problem.name}, {which}: nothing ran right")
            continue
        ms, name, settings = entry
        summed = {"y": problem.width, "dx": problem.out, "dw": problem.rows}[which]
        print(f"  {problem.name}, {which}, sums over {summed:,}: {ms:.3f} ms by {name} {settings}")


if __name__ == "__main__":
    main()
