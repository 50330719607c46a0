r"""The routed experts of one layer, forward and backward, compiled for a described H100 without a
GPU: kernels, and passes over memory beside them.

    .gpu/bin/python benchmarks/gpu/experts_passes.py [--tokens 32768 --width 2048 --experts 64
        --choices 10 --expert_width 512] [--keep_hidden] [--no_kernels] [--list]

XLA's CUDA plugin compiles for a described chip. It needs an environment of its own, since a process
with the plugin looks for GPUs, and a `ptxas` of CUDA 13 on the PATH:

    uv venv .gpu -p 3.12
    uv pip install --python .gpu/bin/python -e . jax==0.12.0.1 jaxlib==0.12.0.1 \
        jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc \
        tokamax==0.0.17 jax-triton==0.4.1 triton==3.9.0

The defaults are one layer of the released model with 64 of its 512 experts, for 8 rows of 4,096
tokens.

A pass is an operation that is no kernel and no product, and that reads or writes an array of at
least half as many elements as the experts' hidden activation [rows, expert width] has. Printed are,
for the forward and the backward pass: the kernels, the passes, the bytes that the passes read and
write (an operand that a gather reads counts as much as the gather returns), those bytes at the
3.35 TB/s of an H100's data sheet, the products that XLA computes, the memory of temporaries. No
time is measured.
"""

import os

from benchmarks import harness

BANDWIDTH = 3.35e12  # bytes a second, an H100's data sheet
KERNELS = {"mosaic_gpu_v2": "Mosaic kernel", "triton_kernel_call_ffi": "Triton kernel"}
MOVES = ("fusion", "copy", "transpose", "gather", "scatter", "select", "reduce", "concatenate")


def passes(program, elements: int):
    """Returns a list of (name, times, bytes read, bytes written, shapes) of the passes over memory
    of at least `elements` elements; and how often each kind of kernel and product runs.
    """
    fused = {
        id(program.computations[name])
        for _, i, _ in program.walk()
        if i.opcode == "fusion"
        for name in i.called_computations
    }
    found, others = [], {}
    for computation, i, times in program.walk():
        if id(computation) in fused:
            continue
        inner = [x for name in i.called_computations for x in program.computations[name].values()]
        calls = [x for x in (i, *inner) if x.opcode == "custom-call"]
        is_product = "gemm" in i.name or any("gemm" in x.attributes for x in calls)
        if is_product or i.opcode == "custom-call" or (i.opcode == "fusion" and calls):
            name = calls[0].attribute("custom_call_target").strip('"') if calls else ""
            label = "product" if is_product else KERNELS.get(name)
            if label:
                others[label] = others.get(label, 0) + times
            continue
        if i.opcode not in MOVES:
            continue
        read = [
            shape
            for operand in i.operands
            if operand in computation
            for shape in computation[operand].shapes
        ]
        largest = max((s.elements for s in (*read, *i.shapes)), default=0)
        if largest < elements:
            continue
        # A gather reads as many elements as it returns, not its whole operand.
        wrote = sum(s.bytes for s in i.shapes)
        reads = sum(s.bytes for s in read)
        if reads < wrote and any(x.opcode == "gather" for x in inner):
            reads = max(reads, wrote)
        shapes = " ".join(f"{s.dtype}{list(s.dims)}" for s in i.shapes)
        sources = " ".join(f"{s.dtype}{list(s.dims)}" for s in read if s.elements >= elements)
        found.append((i.name, times, reads, wrote, f"{sources} -> {shapes}  {i.op_name[-70:]}"))
    return found, others


def describe_chip():
    """Lets all kernels be traced and lowered for an H100 in a process without a GPU, as where they
    passed their tests.
    """
    import importlib
    import types

    import jax
    from jax.extend import backend

    from qwen3next_jax.kernels import self_test
    from qwen3next_jax.kernels.gpu import cudnn, tokamax

    def kernels_run_by_default(test, unsupported=""):
        self_test.print_once(f"{test.name}: {unsupported or 'kernels'}")
        return not unsupported

    self_test.kernels_run_by_default = kernels_run_by_default
    self_test.unsupported_chip_reason = lambda: ""
    cudnn.unsupported_reason = lambda: ""
    attention = importlib.import_module(cudnn.ENTRY)
    attention.check_compute_capability = lambda capability: True
    attention.check_cudnn_version = lambda: cudnn.MIN_CUDNN
    tokamax.compute_capability = lambda: 9.0
    chip = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    backend.get_default_device = lambda: chip
    jax.devices = lambda: [chip]
    try:
        from jax_triton import triton_lib
    except ImportError:
        return
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda device: 90


def main():
    parser = harness.arguments(__doc__)
    for name, size in (
        ("tokens", 32768),
        ("width", 2048),
        ("experts", 64),
        ("choices", 10),
        ("expert_width", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--keep_hidden", action="store_true", help="as with remat=kept")
    parser.add_argument("--no_kernels", action="store_true", help="XLA's form")
    parser.add_argument("--float32", action="store_true", help="tokens and weights in float32")
    parser.add_argument("--list", action="store_true", help="print every pass")
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    count(options)


def count(options):
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    import numpy as np

    from qwen3next_jax.model.expert_implementations import choose_expert_implementation
    from qwen3next_jax.ops.compile_target import compiling_for
    from qwen3next_jax.planner import hlo, planning
    from qwen3next_jax.planner.topology import describe_topology

    mesh = jax.sharding.Mesh(np.array(describe_topology("h100:1x1").devices), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if not options.no_kernels:
        describe_chip()
    n, d, e, a, i = (
        getattr(options, name) for name in ("tokens", "width", "experts", "choices", "expert_width")
    )
    dtype = jnp.dtype(jnp.float32 if options.float32 else jnp.bfloat16)

    def shaped(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    inputs = shaped(n, d), shaped(n, a), shaped(e, d, 2, i), shaped(e, i, d)
    experts = shaped(n, a, dtype=jnp.int32)

    def form(x, weight, gate_up, down, expert):
        run = choose_expert_implementation(
            None,
            dtype,
            in_tiles=False,
            few_tokens=False,
            layer=None,
            keep_hidden=options.keep_hidden,
        )
        return run(x, weight, expert, gate_up, down)

    def forward(x, weight, gate_up, down, expert):
        """As in a scan over layers, which hands the saved arrays to a loop of its own."""
        return jax.vjp(lambda *p: form(*p, expert), x, weight, gate_up, down)

    def backward(pullback, dy):
        return pullback(dy)

    with compiling_for("gpu"):
        traced = jax.jit(forward).trace(*inputs, experts)
        saved = jax.tree.map(lambda s: shaped(*s.shape, dtype=s.dtype), traced.out_info[1])
        programs = {
            "forward": traced,
            "backward": jax.jit(backward).trace(saved, shaped(n, d)),
        }
    for name, traced in programs.items():
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(planning.FAST_GPU_COMPILE)
        found, others = passes(hlo.parse_program(compiled.as_text()), n * a * i // 2)
        times = sum(t for _, t, *_ in found)
        read = sum(t * r for _, t, r, *_ in found)
        wrote = sum(t * w for _, t, _, w, _ in found)
        print(
            f"{name}: {times:.0f} passes that read {read / 1e9:.1f} GB and write "
            f"{wrote / 1e9:.1f} GB ({1e3 * (read + wrote) / BANDWIDTH:.1f} ms at 3.35 TB/s), "
            f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB"
        )
        for label, times in sorted(others.items()):
            print(f"  {times:4.0f} x {label}")
        if options.list:
            for label, times, read, wrote, shapes in found:
                print(
                    f"  {times:4.0f} x {read / 1e9:5.2f} + {wrote / 1e9:5.2f} GB {label} {shapes}"
                )


if __name__ == "__main__":
    main()
