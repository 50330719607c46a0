"""The output head with its loss, forward and backward, on a described TPU slice: milliseconds
and bytes through HBM of its parts.

    python benchmarks/head_plan.py [--topology=v5p:8x8x8] [--mesh=data=64,expert=8] [--rows=4096]
    [--width=2048] [--vocabulary=151936]
        [--level=O1]

`--rows` are of one device; the head lies over the mesh and is gathered, as a train step's; its
gradient goes back there. By the planner's cost models (docs/planner.md). No TPU takes part.
"""

import argparse
import tempfile
import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.ops import linear_cross_entropy
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import COST_MODELS, estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import TOKENS, P, gather_in_shard, storage_spec


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:8x8x8")
    parser.add_argument("--mesh", default="data=64,expert=8")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument(
        "--level", default="O1", help='optimization level of the compiler; "" for its default'
    )
    arguments = parser.parse_args()
    dumped = tempfile.mkdtemp(prefix="schedules-")
    schedule.enable_schedule_dump(dumped)
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(arguments.topology)
    sizes = {"data": 1} | {
        axis: int(size) for axis, size in (part.split("=") for part in arguments.mesh.split(","))
    }
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**sizes)), topology.devices)
    declared, shape = (
        types.SimpleNamespace(axes=("embed", "vocab")),
        (arguments.width, arguments.vocabulary),
    )
    stored, rows = storage_spec(declared, shape, mesh), P(TOKENS)

    def step(x, w, targets, weights):
        def head(x, w):
            w = gather_in_shard(w.astype(x.dtype), declared, shape, mesh)
            return linear_cross_entropy(x, w, targets, weights)

        (loss, figures), gradients = jax.value_and_grad(head, argnums=(0, 1), has_aux=True)(x, w)
        return loss[None], figures, gradients

    def array(spec, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    r = arguments.rows * mesh.size
    inputs = (
        array(rows, jnp.bfloat16, r, arguments.width),
        array(stored, jnp.float32, *shape),
        array(rows, jnp.int32, r),
        array(rows, jnp.float32, r),
    )
    local = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(rows, stored, rows, rows),
        out_specs=(rows, rows, (rows, stored)),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(local).trace(*inputs).lower()
    options = compiler_options(ParallelConfig(), mesh) | (
        {"optimization_level": arguments.level} if arguments.level else {}
    )
    program = hlo.parse(lowered.compile(options).as_text())
    schedules = schedule.read_schedules(dumped, program)

    def part(instruction):
        return f"{instruction.name} {[f'{s.dtype}{list(s.dims)}' for s in instruction.shapes][:2]}"

    for cost_model in reversed(COST_MODELS):
        e = estimate_time(program, mesh, topology.chip, topology.shape, schedules, cost_model, part)
        print(
            f"cost model {cost_model}: {e.seconds * 1e3:.2f} ms, {e.hbm_bytes / 1e9:.1f} GB, "
            f"{e.flops / 1e12:.2f} TFLOP; "
            + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in e.bound.items())
        )
    print("| ms | GB | TFLOP | |\n|---|---|---|---|")
    for name, p in e.by_source.items():
        if p.seconds >= 1e-4:
            print(
                f"| {p.seconds * 1e3:.2f} | {p.hbm_bytes / 1e9:.2f} | {p.flops / 1e12:.2f} | "
                f"{name} |"
            )


if __name__ == "__main__":
    main()
