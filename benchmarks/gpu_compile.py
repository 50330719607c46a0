r"""The train step of a config, or its operators one by one, compiled for H100s with no GPU: what
fits, and what is computed.

    python benchmarks/gpu_compile.py --config configs/small.py [--gpus 8] [--top 12]
    python benchmarks/gpu_compile.py --config configs/small.py --operators
    python benchmarks/gpu_compile.py --kernels [--only convolution] [--tokens 4096] [--key_heads
    16] [--value_heads 16]
        [--key 128] [--value 128] [--pieces 0] [--warpgroups 1]

XLA's CUDA plugin compiles for a described chip and touches no driver. It needs an environment
apart, since a process with the plugin looks for GPUs, and a `ptxas` of CUDA 13 on the PATH (the
wheel nvidia-cuda-nvcc brings one):

    uv venv .gpu -p 3.12
    uv pip install --python .gpu/bin/python -e . jax==0.12.0.1 jaxlib==0.12.0.1
    jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 \
        tokamax==0.0.17
    .gpu/bin/python benchmarks/gpu_compile.py

Printed: seconds to compile, memory of the arguments (the state) and of everything else
(temporaries), FLOPs of all products, a loop of unstated length counted once, the largest array,
XLA's own passes over memory (fusions and copies that are neither product nor kernel) and what
they write, the collectives, and with --top what shares the temporaries' memory at its fullest,
by shape. With --kernels, of all kernels: what ptxas says of registers and spills, what it says
of performance that is lost, and the shared memory of a block; and by count of the delta rule's
copies and products, bytes between memory and chip and FLOPs. What no compiler says is a time.
The kernels are compiled by nvJitLink where it is installed (the extra `gpu` brings it), otherwise
by `ptxas`: the two give different registers.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import importlib
import io
import os
import re
import runpy
import tempfile
import time

COLLECTIVES = re.compile(
    r"= \S+ "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(?:-start)?\("
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


def passes(program) -> tuple[float, float]:
    """How many fusions and copies run that are neither product nor kernel, and the bytes that
    they write.
    """
    fused = {
        id(program.computations[name])
        for _, i, _ in program.walk()
        if i.opcode == "fusion"
        for name in i.called
    }
    own = [
        (times, times * i.bytes)
        for computation, i, times in program.walk()
        if id(computation) not in fused
        and i.opcode in ("fusion", "fusion-start", "copy", "transpose")
        and not i.name.startswith("gemm_fusion")
    ]
    return sum(times for times, _ in own), sum(size for _, size in own)


def show(name: str, lowered, top: int):
    from qwen3next_jax.planner import compiled as programs
    from qwen3next_jax.planner import hlo, planning

    folder = os.environ["XLA_FLAGS"].rpartition("--xla_dump_to=")[2]
    for file in glob.glob(f"{folder}/*"):
        os.remove(file)
    begun = time.time()
    compiled = lowered.compile(planning.FAST_GPU_COMPILE)
    seconds, memory, text = time.time() - begun, compiled.memory_analysis(), compiled.as_text()
    program = hlo.parse(text)
    sizes = [s.bytes for computation, instruction, _ in program.walk() for s in instruction.shapes]
    count, written = passes(program)
    print(
        f"{name}: compiled in {seconds:.0f} s, arguments "
        f"{memory.argument_size_in_bytes / 2**30:.2f} GiB, "
        f"temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB, products "
        f"{programs.gpu_flops(program) / 1e12:.2f} TFLOP, "
        f"largest array {max(sizes) / 2**30:.2f} GiB, {count:.0f} passes that write "
        f"{written / 1e9:.1f} GB, "
        f"collectives {dict(collections.Counter(COLLECTIVES.findall(text)))}",
        flush=True,
    )
    for gib, places, shape in largest_arrays(folder, top):
        print(f"  {gib:6.2f} GiB in {places:2} places  {shape}")


def operators(config, place):
    """{name: (function, shapes)}: forward and backward of one layer's operators at the config's
    sizes, in bfloat16, and of the whole recurrent layer, which computes again what a step does.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from qwen3next_jax import ops
    from qwen3next_jax.model import remat
    from qwen3next_jax.model.block import mixer_class
    from qwen3next_jax.model.layers import Context, document_positions
    from qwen3next_jax.model.parameters import Make
    from qwen3next_jax.ops.gated_norm import gated_norm

    m, b, t = config.model, config.train.batch_size, config.train.sequence_length

    def shaped(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    def with_gradients(f):
        def run(differentiated, others, dy):
            y, pullback = jax.vjp(lambda *a: f(*a, *others), *differentiated)
            return y, pullback(dy)

        return run

    rows, g, h = b * t * m.num_experts_per_tok, m.linear_num_key_heads, m.linear_num_value_heads
    k, v = m.linear_key_head_dim, m.linear_value_head_dim
    e, d, i, n, q = (
        m.num_experts,
        m.hidden_size,
        m.moe_intermediate_size,
        m.num_attention_heads,
        m.head_dim,
    )
    float_bth, ids = shaped(b, t, h, dtype=jnp.float32), shaped(b, t, dtype=jnp.int32)
    channels = 2 * k + h // g * v
    graph, params = nnx.split(
        nnx.eval_shape(lambda: mixer_class("gated_deltanet")(m, Make(m, nnx.Rngs(0)), (0,)))
    )
    layer = remat.rematerialized(
        lambda params, x, ids: nnx.merge(graph, params)(x, Context(document_positions(ids), ids))[
            0
        ],
        "kept",
    )
    return {
        "experts": (
            with_gradients(ops.expert_mlp),
            (shaped(rows, d), shaped(e, d, 2, i), shaped(e, i, d)),
            (shaped(e, dtype=jnp.int32),),
            shaped(rows, d),
        ),
        "attention": (
            with_gradients(lambda q, k, v, ids: ops.attention(q, k, v, segment_ids=ids)),
            (shaped(b, t, n, q), *[shaped(b, t, m.num_key_value_heads, q)] * 2),
            (ids,),
            shaped(b, t, n, q),
        ),
        "delta rule": (
            with_gradients(
                lambda q, k, v, g, beta, ids: ops.gated_delta_rule(
                    q, k, v, g=g, beta=beta, segment_ids=ids
                )[0]
            ),
            (shaped(b, t, g, k), shaped(b, t, g, k), shaped(b, t, h, v), float_bth, float_bth),
            (ids,),
            shaped(b, t, h, v),
        ),
        "convolution": (
            with_gradients(lambda x, w, ids: ops.causal_conv1d(x, w, segment_ids=ids)[0]),
            (shaped(b, t, g, channels), shaped(m.linear_conv_kernel_dim, g, channels)),
            (ids,),
            shaped(b, t, g, channels),
        ),
        "norm and gate": (
            with_gradients(lambda o, gate, weight: gated_norm(o, gate, weight, m.rms_norm_eps)),
            (shaped(b, t, h * v), shaped(b, t, h * v), shaped(v, dtype=jnp.float32)),
            (),
            shaped(b, t, h * v),
        ),
        "cross-entropy": (
            with_gradients(
                lambda x, w, targets, weights: ops.linear_cross_entropy(x, w, targets, weights)[0]
            ),
            (shaped(b * t, d), shaped(d, m.vocab_size, dtype=jnp.float32)),
            (shaped(b * t, dtype=jnp.int32), shaped(b * t, dtype=jnp.float32)),
            shaped(dtype=jnp.float32),
        ),
        "recurrent layer": (
            with_gradients(layer),
            (jax.tree.map(lambda p: shaped(*p.shape, dtype=p.dtype), params), shaped(b, t, d)),
            (ids,),
            shaped(b, t, d),
        ),
    }


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
    scan = passed(values // split.warpgroups, values, 2 * keys + 3)
    blocks, mapped_share = -(-(keys + values) // 2), max(0, split.pieces - 2) / split.pieces
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


def show_kernels(options, place):
    """Forward with residuals, and backward: the delta rule's, those of convolution, norm and
    gate beside it, and tokamax's for products of two rows a token with the experts of
    configs/small.py.
    """
    import jax
    import jax.numpy as jnp

    from qwen3next_jax.kernels.gpu import causal_conv1d as convolution
    from qwen3next_jax.kernels.gpu import delta_rule as pallas_gpu
    from qwen3next_jax.kernels.gpu import gated_norm as norm
    from qwen3next_jax.kernels.gpu import grouped_matmul as products
    from qwen3next_jax.kernels.gpu.delta_rule_problem import Split
    from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

    t, g, h, k, v = (
        getattr(options, name) for name in ("tokens", "key_heads", "value_heads", "key", "value")
    )
    shaped = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype, sharding=place)
    keys, values, numbers = (
        shaped(1, t, g, k),
        shaped(1, t, h, v),
        shaped(1, t, h, dtype=jnp.float32),
    )
    x, state = (
        Inputs(keys, keys, values, numbers, numbers, shaped(1, t, dtype=jnp.int32)),
        shaped(1, h, k, v, dtype=jnp.float32),
    )
    settings = Settings(64, normalize_qk=True, erase=True)
    split = Split(options.pieces, options.warpgroups) if options.pieces else None
    split = pallas_gpu.Problem.of(x, settings, split).split
    common = dict(settings=settings, interpret=False, split=split)
    forward = functools.partial(pallas_gpu.forward, inverses=None, save=True, **common)
    saved = [
        jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=place)
        for y in jax.eval_shape(forward, x, state)[2:]
    ]
    backward = functools.partial(pallas_gpu.backward, **common)
    if options.only in "delta rule":
        print(
            f"{t} tokens, {g} key heads of {k}, {h} value heads of {v}, in {split.pieces} piece(s)"
            f", {split.warpgroups} tile(s) a block of whole rows"
        )
    counts = kernel_counts(g, h, k, v, split)
    of_experts = shaped(2 * t, 512), shaped(16, 512, 256), shaped(16, dtype=jnp.int32)
    d = 2 * g * k + h * v
    convolved = shaped(1, 3, d), shaped(1, t, d), shaped(4, d), shaped(1, t + 3, dtype=jnp.int32)
    normed = shaped(1, t, h * v), shaped(1, t, h * v), shaped(v)
    for name, function, shapes in (
        ("forward", forward, (x, state)),
        ("backward", backward, (x, *saved, values, state)),
        ("convolution, forward", functools.partial(convolution.forward, "silu"), convolved),
        (
            "convolution, backward",
            functools.partial(convolution.backward, "silu"),
            (*convolved, convolved[1]),
        ),
        ("norm and gate, forward", functools.partial(norm.forward, 1e-6), normed),
        ("norm and gate, backward", functools.partial(norm.backward, 1e-6), (*normed, normed[0])),
        ("grouped products, forward", products.matmul, of_experts),
        ("grouped products, backward", products.gradients, (*of_experts, shaped(2 * t, 256))),
    ):
        if options.only not in (f"delta rule, {name}" if name in counts else name):
            continue
        resources = io.StringIO()
        with contextlib.redirect_stdout(resources):
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        shared = re.findall(r"smem_scratch_bytes=(\d+)", resources.getvalue())
        begun, said = time.time(), tempfile.TemporaryFile(mode="w+")
        before = [os.dup(1), os.dup(2)]
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        try:
            compiled = lowered.compile()
        finally:
            for stream, file in zip((1, 2), before):
                os.dup2(file, stream)
        temporaries, count = compiled.memory_analysis().temp_size_in_bytes / 2**20, ""
        if name in counts:
            moved, multiplied = counts[name]
            alone = (
                f" ({counts['forward alone'][0]:,.0f} where no gradient is asked for)"
                if name == "forward"
                else ""
            )
            count = (
                f", {moved:,.0f} bytes a token{alone}, {multiplied * 2 * 64**3 / 64:,.0f} FLOP a "
                "token and value head"
            )
        print(
            f"{name}: compiled in {time.time() - begun:.0f} s, temporaries {temporaries:.0f} "
            f"MiB{count}",
            flush=True,
        )
        said.seek(0)
        text = said.read()
        account = (
            r"((?:ptxas info +: \(C\d+\) Potential Performance Loss: [^\n]*\n)*)"
            r"(?:ptxas warning[^\n]*\n)?(?:ptxas info +: 0 bytes gmem\n)?"
            r"ptxas info +: Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for.*?"
            r"(\d+) bytes spill stores.*?Used (\d+) registers"
        )
        accounts = re.findall(account, text, re.S)
        if len(shared) != len(accounts):  # a kernel that was compiled before has no account
            shared = ["unknown"] * len(accounts)
        for (losses, kernel, spilled, registers), size in zip(accounts, shared):
            print(
                f"  {kernel}: {registers} registers, {spilled} bytes spilled, {size} bytes of "
                "shared memory"
            )
            for loss in re.findall(r"Loss: (.*)", losses):
                print(f"    {loss}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/small.py")
    parser.add_argument(
        "--gpus", type=int, default=1, help="H100s of one host, all along the mesh's `data` axis"
    )
    parser.add_argument("--remat", default="", help="instead of the config's train.remat")
    parser.add_argument(
        "--with_kernels",
        action="store_true",
        help="as where all kernels were right when first tried; the memory that cuDNN's attention "
        "works in is not counted",
    )
    parser.add_argument(
        "--operators", action="store_true", help="one layer's operators instead of the whole step"
    )
    parser.add_argument("--only", default="", help="of the operators or kernels, those so named")
    parser.add_argument("--top", type=int, default=0)
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_RESOURCES": "1",
            "XLA_FLAGS": f"--xla_dump_to={folder}",
        }
        compile_all(options)


def compile_all(options):
    import jax

    jax.config.update("jax_platforms", "cpu")
    from qwen3next_jax.config import Config, MeshConfig, from_dict
    from qwen3next_jax.kernels import self_test
    from qwen3next_jax.kernels.gpu import cudnn
    from qwen3next_jax.ops.compile_target import compiling_for
    from qwen3next_jax.planner.planning import abstract_batch
    from qwen3next_jax.planner.topology import describe_topology
    from qwen3next_jax.sharding.mesh import make_mesh
    from qwen3next_jax.training.loop import make_train_step
    from qwen3next_jax.training.resolve import resolve_run

    topology = describe_topology(f"h100:1x{options.gpus}")
    config = from_dict(Config, runpy.run_path(options.config)["get_config"]().to_dict())
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, mesh=MeshConfig(data=options.gpus))
    )
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, remat=options.remat or config.train.remat)
    )
    mesh = make_mesh(config.parallel, topology.devices)
    if options.with_kernels:
        self_test.unsupported_chip = lambda: ""
        cudnn.unsupported = lambda: ""
        importlib.import_module(cudnn.ENTRY).check_compute_capability = lambda capability: True
        self_test.is_enabled = lambda test, unsupported="": (
            self_test.say(f"{test.name}: {unsupported or 'kernels'}") or not unsupported
        )
    if options.kernels:
        return show_kernels(options, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    if options.operators:
        for name, (function, *shapes) in operators(
            config, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        ).items():
            if options.only in name:
                with compiling_for("gpu"):
                    traced = jax.jit(function).trace(*shapes)
                show(name, traced.lower(lowering_platforms=("cuda",)), options.top)
        return
    run = resolve_run(config, mesh)
    (stage,) = run.stages
    step = make_train_step(run, stage)
    with compiling_for("gpu"):
        traced = step.trace(run.abstract_state, abstract_batch(run, stage))
    show(
        f"step of {options.config}, remat {config.train.remat}, on {options.gpus} x H100",
        traced.lower(lowering_platforms=("cuda",)),
        options.top,
    )


if __name__ == "__main__":
    main()
