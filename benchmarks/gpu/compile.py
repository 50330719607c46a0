r"""A training step, or its operators one by one, compiled for H100s with no GPU: what fits, and
what is computed.

    python benchmarks/gpu/compile.py --shape=period [--top=12] [--passes=30]
    python benchmarks/gpu/compile.py --config=configs/small.py [--gpus=8] [--mesh=expert=8]
        [--set train.remat=block]
    python benchmarks/gpu/compile.py --config=configs/small.py --operators
    python benchmarks/gpu/compile.py --kernels [--only=convolution] [--tokens=4096] [--key_heads=16]
        [--value_heads=16] [--key=128] [--value=128] [--pieces=0] [--warpgroups=1]

XLA's CUDA plugin compiles for a described chip and touches no driver. It needs an environment
apart, since a process with the plugin looks for GPUs, and a `ptxas` of CUDA 13 on the PATH (the
wheel nvidia-cuda-nvcc brings one):

    uv venv .gpu -p 3.12
    uv pip install --python .gpu/bin/python -e . jax==0.12.0.1 jaxlib==0.12.0.1 \
        jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc \
        tokamax==0.0.17 jax-triton==0.4.1 triton==3.9.0
    .gpu/bin/python benchmarks/gpu/compile.py --shape=small

Printed: seconds to trace, to lower and to compile (a start whose compiled program is stored traces
and lowers again); memory of the arguments (the state) and of everything else
(temporaries), without what cuDNN's attention works in; FLOPs of all products, a loop of unstated
length counted once; the largest array; the collectives, and how many of them are asynchronous; with
--top what shares the temporaries' memory at its fullest, by shape. Then XLA's work by kind: how
many kernels run in a step, the bytes that they read and write, and the least time of these bytes at
the H100's 3.35 TB/s. --passes lists the longest by kind and by function of this package. Kernels,
attention by cuDNN and products are listed with their bytes alone. With --kernels, of all kernels
but cuDNN's: what ptxas says of registers and spills, what it says of performance that is lost, and
the shared memory of a block; and by count of the delta rule's copies and products, bytes between
memory and chip and FLOPs. What no compiler says is a time. The kernels are compiled by nvJitLink
where it is installed (the extra `gpu` brings it), otherwise by `ptxas`: the two give different
registers.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import io
import itertools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import harness
from benchmarks.gpu import experts_passes, operators, step
from benchmarks.gpu.shapes import SHAPES

NAMES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


def largest_arrays(folder: str, top: int):
    """(GiB, places, shape) of what shares the memory of the fullest moment, from XLA's own
    report of one program.
    """
    unit = {"GiB": 1.0, "MiB": 2.0**-10, "KiB": 2.0**-20, "B": 2.0**-30}
    size, count = collections.Counter(), collections.Counter()
    report = max(glob.glob(f"{folder}/*memory-usage-report.txt"), key=os.path.getsize)
    with open(report) as lines:
        for line in lines:
            if m := re.match(
                r"\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(GiB|MiB|KiB|B);\s*\d+;\s*\d+; (.*)", line
            ):
                shape = re.sub(r"^\d+×", "", m[3].split(", ")[-1].strip())
                size[shape] += float(m[1]) * unit[m[2]]
                count[shape] += 1
    return [(gib, count[shape], shape) for shape, gib in size.most_common(top)]


# opcode of what a fusion is for → kind; the first that the fusion has counts
KINDS = (
    (("dot", "convolution"), "products in fusions"),
    (("sort",), "sorts"),
    (("scatter", "gather"), "gathers, scatters"),
    (("reduce", "reduce-window"), "reductions"),
    (("dynamic-update-slice",), "writes into stacked arrays"),
    (("dynamic-slice",), "reads of stacked arrays"),
)


class Work(NamedTuple):
    """One instruction that runs as a kernel of its own.

    Attributes:
      kind: what it is.
      source: the function of this package from which it was compiled.
      results: shapes of its results, as text.
      times: how often it runs in a step.
      bytes: what it reads and writes in a step.
    """

    kind: str
    source: str
    results: str
    times: float
    bytes: float


def work(program) -> list[Work]:
    """Returns what a step runs, one entry for each instruction of the program that is no loop, no
    collective, and moves data.
    """
    from qwen3next_jax.planner import compiled

    fused = {
        id(program.computations[name])
        for _, i, _ in program.walk()
        if i.opcode in ("fusion", "fusion-start", "custom-call")
        for name in i.called_computations
    }
    found = []
    for computation, instruction, times in program.walk():
        if id(computation) in fused or collective(instruction):
            continue
        if instruction.opcode == "fusion-start":  # its own shapes have the operands, too
            root = program.computations[instruction.called_computations[0]].root
            instruction = dataclasses.replace(instruction, opcode="fusion", shapes=root.shapes)
        moved = times * compiled.hbm_bytes(program, computation, instruction)
        if not moved:
            continue
        results = ", ".join(f"{s.dtype}{list(s.dims)}".replace(" ", "") for s in instruction.shapes)
        source = program.source_function(instruction)
        found.append(Work(kind_of(program, instruction), source, results[:90], times, moved))
    return found


def collective(instruction) -> bool:
    return instruction.opcode.removesuffix("-start").removesuffix("-done") in NAMES


def kind_of(program, instruction) -> str:
    """Returns what an instruction is, for the table."""
    op = instruction.opcode
    if op == "custom-call":
        target = instruction.attribute("custom_call_target")
        if "mosaic" in target or "triton" in target:
            return "kernels"
        return "products" if "cublas" in target else f"calls of {target.strip('"')}"
    if op != "fusion":
        kinds = {"dot": "products", "copy": "copies", "copy-start": "copies", "transpose": "copies"}
        return kinds.get(op, op)
    if instruction.name.startswith("gemm_fusion"):
        return "products"
    inside = [
        i for name in instruction.called_computations for i in program.computations[name].values()
    ]
    opcodes = {i.opcode for i in inside}
    for names, kind in KINDS:
        if opcodes & set(names):
            return kind
    if opcodes <= {"parameter", "convert", "bitcast", "tuple"}:
        return "casts"
    if opcodes <= {"parameter", "copy", "transpose", "bitcast", "convert", "reshape", "tuple"}:
        return "copies"
    return "loops over memory"


def show_work(program, longest: int) -> None:
    """Prints the work by kind, and the longest by kind and function."""
    found = work(program)

    def line(name, of):
        size = sum(w.bytes for w in of)
        count = sum(w.times for w in of)
        ms = 1e3 * size / experts_passes.BANDWIDTH
        print(f"  {count:7.0f} x {size / 1e9:7.1f} GB {ms:6.1f} ms  {name}")

    def grouped(key):
        groups = {}
        for w in found:
            groups.setdefault(key(w), []).append(w)
        return sorted(groups.items(), key=lambda item: -sum(w.bytes for w in item[1]))

    print("by kind: kernels in a step, bytes read and written, ms at 3.35 TB/s")
    line("all", found)
    for kind, of in grouped(lambda w: w.kind):
        line(kind, of)
    if longest:
        print("the longest, by kind and function, with the results of the longest")
    for (kind, source), of in grouped(lambda w: (w.kind, w.source))[:longest]:
        line(f"{kind}: {source}: {max(of, key=lambda w: w.bytes).results}", of)


def show(name: str, trace: Callable, options: argparse.Namespace) -> None:
    """Compiles a program and prints what the compiler made of it. `trace` returns the program as
    JAX traced it.
    """
    from qwen3next_jax.ops.compile_target import compiling_for
    from qwen3next_jax.planner import compiled as programs
    from qwen3next_jax.planner import hlo, planning

    folder = os.environ["XLA_FLAGS"].rpartition("--xla_dump_to=")[2]
    for file in glob.glob(f"{folder}/*"):
        os.remove(file)
    times = [time.time()]
    with compiling_for("gpu"):
        traced = trace()
    times.append(time.time())
    lowered = traced.lower(lowering_platforms=("cuda",))
    times.append(time.time())
    compiled = lowered.compile(planning.FAST_GPU_COMPILE)
    times.append(time.time())
    tracing, lowering, compiling = (after - before for before, after in itertools.pairwise(times))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if options.hlo:
        options.hlo.write_text(text)
    program = hlo.parse_program(text)
    sizes = [s.bytes for computation, instruction, _ in program.walk() for s in instruction.shapes]
    print(
        f"{name}: traced in {tracing:.1f} s, lowered in {lowering:.1f} s, compiled in "
        f"{compiling:.0f} s, arguments "
        f"{memory.argument_size_in_bytes / 2**30:.2f} GiB, "
        f"temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB, products "
        f"{programs.gpu_program_flops(program) / 1e12:.2f} TFLOP, "
        f"largest array {max(sizes) / 2**30:.2f} GiB",
        flush=True,
    )
    for gib, places, shape in largest_arrays(folder, options.top):
        print(f"  {gib:6.2f} GiB in {places:2} places  {shape}")
    show_work(program, options.passes)
    show_collectives(program)


def show_collectives(program) -> None:
    """Prints how many collectives a step runs, the bytes of their results, and how many of them
    have products or kernels to run beside: scheduled between their start and their end.
    """
    found: dict = {}
    began: dict = {}  # name of a start → products and kernels of its computation until then
    before: dict = {}  # computation → products and kernels until now
    for computation, instruction, times in program.walk():
        place = id(computation)
        if not collective(instruction):
            if kind_of(program, instruction) in ("products", "products in fusions", "kernels"):
                before[place] = before.get(place, 0) + 1
            continue
        if instruction.opcode.endswith("-start"):
            began[place, instruction.name] = before.get(place, 0)
            continue
        beside = False
        if instruction.opcode.endswith("-done"):
            beside = before.get(place, 0) > began[place, instruction.operands[0]]
        name = instruction.opcode.removesuffix("-done")
        count, size, overlapped = found.get(name, (0.0, 0.0, 0.0))
        size += times * sum(s.bytes for s in instruction.shapes)
        found[name] = count + times, size, overlapped + times * beside
    for name, (count, size, overlapped) in sorted(found.items()):
        print(
            f"  {count:7.0f} x {size / 1e9:7.1f} GB  {name}, {overlapped:.0f} of them beside "
            "products or kernels"
        )


def kernel_counts(key_heads: int, value_heads: int, key: int, value: int, split):
    """{pass: (bytes a token that the kernels copy, all heads; products of 64 x 64 x 64 a chunk
    and value head)}, by hand from kernels/gpu/delta_rule*.py, residuals saved. A copy that
    another block made before may come out of the L2 cache.
    """
    keys, values, share = key // 64, value // 64, value_heads // key_heads
    tile, rows, numbers = 64 * 64 * 2, 8 * 64 * 4, 6 * 64 * 4
    chunk = (2 * keys * tile) / share + rows + numbers + tile  # q and k; P
    # q, k, P and the inverse once for two tiles of the value, or one where there are processors;
    # then v or dO. Maps of the forward pass need neither q nor P.
    passed = lambda blocks, n, read: blocks * (read * tile + rows + numbers) + n * tile
    scan = passed(values // split.warpgroups_per_block, values, 2 * keys + 3)
    blocks, mapped_share = (
        -(-(keys + values) // 2),
        max(0, split.pieces_per_row - 2) / split.pieces_per_row,
    )
    maps = lambda read: mapped_share * passed(blocks, 2 * blocks, read)
    states = keys * values * tile
    forward = chunk + 2 * tile + scan + values * tile + maps(keys + 2)
    backward = chunk + scan + 2 * values * tile + states + maps(2 * keys + 3)
    again = (values - 1) * keys * tile + 64 * 4  # what has to make room
    gradients = (
        (2 * keys + 4 * values + 2) * tile
        + rows
        + numbers
        + 2 * states
        + again
        + 2 * keys * tile
        + 512
    )
    a_token = lambda x: x * value_heads / 64
    # three passes each, in products of 64 x 64 x 64
    ladder = 3 * (3 * 2 / 4 + 1 / 4 + 3 / 16 + 1 / 4 + 1 / 4)
    mapped_tiles = mapped_share * 2 * blocks
    computed = 3 * keys / share + ladder + values * (4 * keys + 4) + mapped_tiles * (3 * keys + 2)
    state_back = (values + mapped_tiles) * (3 * keys + 4)
    # by both warpgroups of a block: E, and what is summed over pairs
    twice = (keys > 2) * (keys * values + 2 * values + 2)
    back = 3 * keys / share + state_back + 5 * keys * values + 6 * values + 6 * keys + 2 + twice
    return {
        "forward": (a_token(forward + states), computed),
        "forward alone": (a_token(forward), computed),
        "backward": (a_token(backward + gradients), back),
    }


class Program(NamedTuple):
    """A kernel, or kernels, to be compiled.

    Attributes:
      function: what calls them.
      shapes: its arguments.
      count: for the line that is printed: bytes and FLOPs by hand, "" if nobody counted them.
    """

    function: Callable
    shapes: tuple
    count: str = ""


def delta_rule_programs(options, shaped) -> dict[str, Program]:
    """The delta rule's kernels: forward with residuals, and backward."""
    import jax
    import jax.numpy as jnp

    from qwen3next_jax.kernels.gpu import delta_rule as pallas_gpu
    from qwen3next_jax.kernels.gpu.delta_rule_problem import WorkSplit
    from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

    t, g, h, k, v = (
        getattr(options, name) for name in ("tokens", "key_heads", "value_heads", "key", "value")
    )
    keys, values = shaped(1, t, g, k), shaped(1, t, h, v)
    numbers, ids = shaped(1, t, h, dtype=jnp.float32), shaped(1, t, dtype=jnp.int32)
    x = Inputs(keys, keys, values, numbers, numbers, ids)
    state = shaped(1, h, k, v, dtype=jnp.float32)
    settings = Settings(64, normalize_qk=True, delta_term=True)
    split = WorkSplit(options.pieces, options.warpgroups) if options.pieces else None
    split = pallas_gpu.Problem.of_call(x, settings, split).work_split
    common = dict(settings=settings, interpret=False, split=split)
    forward = functools.partial(pallas_gpu.forward, inverses=None, save=True, **common)
    saved = [shaped(*y.shape, dtype=y.dtype) for y in jax.eval_shape(forward, x, state)[2:]]
    backward = functools.partial(pallas_gpu.backward, **common)
    if options.only in "delta rule":
        print(
            f"{t} tokens, {g} key heads of {k}, {h} value heads of {v}, "
            f"in {split.pieces_per_row} piece(s), "
            f"{split.warpgroups_per_block} tile(s) a block of whole rows"
        )
    counts = kernel_counts(g, h, k, v, split)

    def text(name: str, more: str = "") -> str:
        moved, multiplied = counts[name]
        flops = multiplied * 2 * 64**3 / 64
        return f", {moved:,.0f} bytes a token{more}, {flops:,.0f} FLOP a token and value head"

    alone = f" ({counts['forward alone'][0]:,.0f} where no gradient is asked for)"
    return {
        "delta rule, forward": Program(forward, (x, state), text("forward", alone)),
        "delta rule, backward": Program(backward, (x, *saved, values, state), text("backward")),
    }


def other_programs(options, shaped) -> dict[str, Program]:
    """The kernels beside the delta rule, and tokamax's for products of two rows a token with the
    experts of configs/small.py.
    """
    import jax.numpy as jnp

    from qwen3next_jax.kernels.gpu import causal_conv1d as convolution
    from qwen3next_jax.kernels.gpu import gated_norm as norm
    from qwen3next_jax.kernels.gpu import grouped_matmul as products

    t, values = options.tokens, options.value_heads * options.value
    channels = 2 * options.key_heads * options.key + values
    of_experts = shaped(2 * t, 512), shaped(16, 512, 256), shaped(16, dtype=jnp.int32)
    convolved = (
        shaped(1, 3, channels),
        shaped(1, t, channels),
        shaped(4, channels),
        shaped(1, t + 3, dtype=jnp.int32),
    )
    normed = shaped(1, t, values), shaped(1, t, values), shaped(options.value)
    return {
        "convolution, forward": Program(functools.partial(convolution.forward, "silu"), convolved),
        "convolution, backward": Program(
            functools.partial(convolution.backward, "silu"), (*convolved, convolved[1])
        ),
        "norm and gate, forward": Program(functools.partial(norm.forward, 1e-6), normed),
        "norm and gate, backward": Program(
            functools.partial(norm.backward, 1e-6), (*normed, normed[0])
        ),
        "grouped products, forward": Program(products.matmul, of_experts),
        "grouped products, backward": Program(
            products.gradients, (*of_experts, shaped(2 * t, 256))
        ),
    }


def show_kernels(options, place) -> None:
    """Compiles the kernels for a row of the sizes of `options`, and prints what the compilers say
    of each.
    """
    import jax
    import jax.numpy as jnp

    def shaped(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    programs = delta_rule_programs(options, shaped) | other_programs(options, shaped)
    for name, program in programs.items():
        if options.only in name:
            show_kernel(name.removeprefix("delta rule, "), program)


def show_kernel(name: str, program: Program) -> None:
    import jax

    resources = io.StringIO()
    with contextlib.redirect_stdout(resources):
        traced = jax.jit(program.function).trace(*program.shapes)
        begun = time.time()
        lowered = traced.lower(lowering_platforms=("cuda",))
        lowering = time.time() - begun
    shared = re.findall(r"smem_scratch_bytes=(\d+)", resources.getvalue())
    begun = time.time()
    with harness.captured_output() as said:
        compiled = lowered.compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(
        f"{name}: lowered in {lowering:.1f} s, compiled in {time.time() - begun:.0f} s, "
        f"temporaries {temporaries:.0f} MiB{program.count}",
        flush=True,
    )
    account = (
        r"((?:ptxas info +: \(C\d+\) Potential Performance Loss: [^\n]*\n)*)"
        r"(?:ptxas warning[^\n]*\n)?(?:ptxas info +: 0 bytes gmem\n)?"
        r"ptxas info +: Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for.*?"
        r"(\d+) bytes spill stores.*?Used (\d+) registers"
    )
    accounts = re.findall(account, said(), re.S)
    if len(shared) != len(accounts):  # a kernel that was compiled before has no account
        shared = ["unknown"] * len(accounts)
    for (losses, kernel, spilled, registers), size in zip(accounts, shared):
        print(
            f"  {kernel}: {registers} registers, {spilled} bytes spilled, {size} bytes of "
            "shared memory"
        )
        for loss in re.findall(r"Loss: (.*)", losses):
            print(f"    {loss}")


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=SHAPES, help="a step of SHAPES")
    what.add_argument("--config", default="configs/small.py", help="the step of a config")
    parser.add_argument("--gpus", type=int, default=1, help="H100s of one host")
    parser.add_argument("--mesh", default="", help="AXIS=SIZE,…; default: all GPUs along `data`")
    parser.add_argument(
        "--set", nargs="*", default=[], help="settings of the config: train.remat=block …"
    )
    parser.add_argument(
        "--xla_forms", action="store_true", help="no kernels: as on a GPU that is no Hopper"
    )
    parser.add_argument(
        "--operators", action="store_true", help="one layer's operators instead of the whole step"
    )
    parser.add_argument("--only", default="", help="of the operators or kernels, those so named")
    parser.add_argument("--top", type=int, default=0, help="arrays of the fullest moment")
    parser.add_argument("--passes", type=int, default=0, help="kinds and functions")
    parser.add_argument("--hlo", type=pathlib.Path, help="file for the text of the program")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="the kernels instead of the step, for a row of these sizes",
    )
    for name, size in (
        ("tokens", 4096),
        ("key_heads", 16),
        ("value_heads", 16),
        ("key", 128),
        ("value", 128),
        ("pieces", 0),
        ("warpgroups", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def main():
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}",
        }
        if options.kernels:
            os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
        compile_all(options)


def config_of(options: argparse.Namespace):
    """Returns the `Config` that is compiled, for the mesh of the options."""
    from qwen3next_jax.config import Config, MeshConfig, from_dict
    from qwen3next_jax.config.files import apply_overrides, load_config_file

    if options.shape:
        values = step.settings_of(SHAPES[options.shape])
    else:
        values = load_config_file(pathlib.Path(options.config))
    apply_overrides(values, [tuple(part.partition("=")[::2]) for part in options.set])
    config = from_dict(Config, values)
    sizes = dict(part.split("=") for part in options.mesh.split(",") if part)
    sizes = {axis: int(size) for axis, size in sizes.items()} or {"data": options.gpus}
    mesh = MeshConfig(**{"data": 1} | sizes)
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, mesh=mesh))


def compile_all(options: argparse.Namespace) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from qwen3next_jax.planner.planning import abstract_batch
    from qwen3next_jax.planner.topology import describe_topology
    from qwen3next_jax.sharding.mesh import make_mesh
    from qwen3next_jax.training.loop import make_train_step
    from qwen3next_jax.training.resolve import resolve_run

    topology = describe_topology(f"h100:1x{options.gpus}")
    config = config_of(options)
    mesh = make_mesh(config.parallel, topology.devices)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if not options.xla_forms:
        experts_passes.describe_chip()
    if options.kernels:
        return show_kernels(options, place)
    if options.operators:
        for name, (function, *arrays) in operators.operators(config, place).items():
            if options.only in name:
                show(name, functools.partial(jax.jit(function).trace, *arrays), options)
        return
    run = resolve_run(config, mesh)
    (stage,) = run.stages
    train_step = make_train_step(run, stage)
    show(
        f"step of {options.shape or config.name}, {config.train.batch_size} x "
        f"{config.train.sequence_length} tokens in {config.train.gradient_accumulation} parts, "
        f"remat {config.train.remat}, on {options.gpus} x H100 ({options.mesh or 'along data'})",
        functools.partial(train_step.trace, run.abstract_state, abstract_batch(run, stage)),
        options,
    )


if __name__ == "__main__":
    main()
