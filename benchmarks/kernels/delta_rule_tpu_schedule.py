"""The TPU compiler's own static schedule of the gated delta rule, beside tokamax's nearest
kernel, with no TPU.

    python benchmarks/kernels/delta_rule_tpu_schedule.py --chip v6e [--key_heads 16] [--time 4096]
    [--context 4] uv run --isolated --group test --with tokamax==0.0.17 python
    benchmarks/kernels/delta_rule_tpu_schedule.py --key_heads 32 --peer

libtpu carries the real compiler; `jax.experimental.topologies` describes the chip to it, and it
dumps the final bundles of every kernel. One bundle issues per cycle when nothing waits for
memory, so bundles of a loop x its trips are a lower bound of its cycles. Printed per program:
cycles of the kernels and of XLA's parts around them, spill stores, HBM temporaries, occupancy of
the bundles by matrix-unit pushes and multiplies, and the floor that its arithmetic sets.

The peer, `kimi_delta_attention`, carries one decay per key channel where ours has one per head:
more work than this problem needs. It is given the same problem, the gate broadcast, with the
documents left out for both.

With --context the sequence is split over that many chips, `--time` tokens each; the figures are
one chip's.
"""

import argparse
import functools
import glob
import os
import re
import sys
import tempfile

from benchmarks import harness

TOPOLOGY = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
ACCELERATOR = {
    "v4": "v4-8",
    "v5e": "v5litepod-16",
    "v5p": "v5p-8",
    "v6e": "v6e-16",
    "tpu7x": "tpu7x-8",
}


def programs(arguments):
    """Name -> (function, abstract arguments): forward and forward + backward, as a projection
    would hand the tensors over.
    """
    import jax
    import jax.numpy as jnp

    from qwen3next_jax.ops import gated_delta_rule

    heads, groups, time, width = (
        arguments.value_heads,
        arguments.key_heads,
        arguments.time,
        arguments.width,
    )
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, time, *s), dtype)
    inputs = (
        shape(groups * width),
        shape(groups * width),
        shape(heads * width),
        shape(heads, dtype=jnp.float32),
        shape(heads, dtype=jnp.float32),
    )

    def ours(q, k, v, g, beta):
        cut = lambda x, n: x.reshape(1, time, n, width)
        axis_name = "context" if arguments.context > 1 else None
        o, _ = gated_delta_rule(
            cut(q, groups), cut(k, groups), cut(v, heads), g=g, beta=beta, axis_name=axis_name
        )
        return o.reshape(v.shape)

    def peer(q, k, v, g, beta):
        from tokamax._src.ops.kda import api

        first = lambda x, n: jnp.moveaxis(x.reshape(1, time, n, width), 2, 0)
        gate = jnp.broadcast_to(jnp.moveaxis(g, 2, 0)[..., None], (heads, 1, time, width))
        wide = lambda x: jnp.repeat(first(x, groups), heads // groups, axis=0)
        o, _ = api.kimi_delta_attention(
            wide(q),
            wide(k),
            first(v, heads),
            gate,
            jnp.moveaxis(beta, 2, 0),
            use_qk_l2norm=True,
            implementation="mosaic",
        )
        return jnp.moveaxis(o, 0, 2).reshape(v.shape)

    def both_ways(f, *inputs):
        *inputs, do = inputs
        o, pullback = jax.vjp(f, *inputs)
        return o, pullback(do)

    found = {}
    for name, f in ({"ours": ours} | ({"tokamax KDA": peer} if arguments.peer else {})).items():
        found[f"{name}, forward"] = (f, inputs)
        found[f"{name}, forward + backward"] = (
            functools.partial(both_ways, f),
            (*inputs, inputs[2]),
        )
    return found


def described(chip: str):
    """The devices of a chip that need not be there. Before anything else of JAX: its compiler
    reads the environment once.
    """
    os.environ |= dict(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE=ACCELERATOR[chip],
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[chip]).devices


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--chip", choices=TOPOLOGY, default="v6e")
    parser.add_argument("--key_heads", type=int, default=16)
    parser.add_argument("--value_heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--time", type=int, default=4096)
    parser.add_argument(
        "--context",
        type=int,
        choices=(1, 2, 4),
        default=1,
        help="chips over which the sequence is split",
    )
    parser.add_argument("--peer", action="store_true", help="also tokamax's kimi_delta_attention")
    parser.add_argument(
        "--compile_only", action="store_true", help="no dump: only that the compiler takes it"
    )
    arguments = parser.parse_args()
    if arguments.peer and arguments.context > 1:
        parser.error("--peer does not split the sequence: leave --context out")
    return arguments


def main():
    arguments = parse()
    dump = tempfile.mkdtemp(prefix="bundles-")
    if not arguments.compile_only:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    devices = described(arguments.chip)
    import jax
    import numpy as np

    if arguments.peer:
        import tokamax  # noqa: F401  defines the flag
        from absl import flags

        flags.FLAGS([sys.argv[0], "--tokamax_cross_compile=true"])
    mesh, spec = (
        jax.sharding.Mesh(np.array(devices[: arguments.context]), ("context",)),
        jax.sharding.PartitionSpec(None, "context"),
    )
    split = lambda f: (
        f
        if arguments.context == 1
        else jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    here = jax.sharding.NamedSharding(mesh, spec)
    seen: set[str] = set()
    for name, (f, inputs) in programs(arguments).items():
        placed = [
            jax.ShapeDtypeStruct(
                (1, arguments.context * arguments.time, *x.shape[2:]), x.dtype, sharding=here
            )
            for x in inputs
        ]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(split(f)).lower(*placed).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
        calls = compiled.as_text().count("tpu_custom_call")
        print(
            f"{name} on {devices[0].device_kind}: {calls} kernels, HBM temporaries "
            f"{temporary:.0f} MiB"
        )
        files = sorted(set(glob.glob(f"{dump}/*final_bundles.txt")) - seen)
        seen |= set(files)
        if not arguments.compile_only:
            show_schedule(name, files, arguments)


def show_schedule(name: str, files: list[str], arguments: argparse.Namespace) -> None:
    """Prints the cycles of a program's kernels and of XLA's parts, from the bundles of each."""
    from qwen3next_jax.planner.schedule import count_cycles, read_loops

    kernels = rest = worst = 0
    for path in files:
        program = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", os.path.basename(path))
        if program.startswith("<") or program == "TLP" or "schedule-analysis" in path:
            continue
        with open(path, errors="replace") as file:
            text = file.read()
        loops, total = read_loops(text)
        if not re.search(r"entry bundle: %\S+ = custom-call\(", text):
            rest += count_cycles(loops, total)
            continue
        spills = len(re.findall(r"vst \[vmem:\[#allocation\d+_spill", text))
        kernels, worst = kernels + count_cycles(loops, total), max(worst, spills)
        inner = max(loops, key=lambda l: l.matrix_instructions)
        unstated = (
            " (a loop with matrix work has no stated trips)"
            if any(l.matrix_instructions and not l.trips for l in loops)
            else ""
        )
        print(
            f"  {program}: {count_cycles(loops, total) / 1e6:.3f} M cycles, "
            f"{inner.bundle_count} bundles x {inner.trips} trips, "
            f"{inner.matrix_instructions / inner.bundle_count:.2f} matrix-unit issues a bundle, "
            f"{spills} spill stores{unstated}"
        )
    print(
        f"  kernels {kernels / 1e6:.3f} + XLA's parts {rest / 1e6:.3f} M cycles, {worst} "
        "spill stores in the largest"
    )
    if name.startswith("ours") and arguments.chip == "v6e":
        # docs/delta_rule.md, width 128
        per_token = 163_840 + (475_136 if "backward" in name else 0)
        floor = (
            per_token
            * arguments.time
            * arguments.value_heads
            * (arguments.width / 128) ** 2
            / 524_288
        )
        print(f"  arithmetic floor {floor / 1e6:.3f} M cycles (918 TFLOP/s at 1.75 GHz)")


if __name__ == "__main__":
    main()
