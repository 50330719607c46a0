"""Passes over the residual streams of Qwen3.8-Flash-Next, counted in the program that XLA compiles
for a TPU.

    python benchmarks/residual_plan.py [--topology=v5p:2x2x1] [--tokens=4096] [--by_instruction]

A pass is one read or one write of all streams of all tokens, in bfloat16. The program is a chain
of blocks, each with its mix and its addition to the streams; every block is one product with a
[D, D] matrix. The bytes of a block are the difference between two blocks and one. The bytes of the
product itself (its input, its output and the matrix) are counted, too. The backward pass recomputes
what the forward pass does not save. No TPU takes part.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import COST_MODELS, estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.zoo.gated_residual import StreamMix

CONFIG = ModelConfig(hidden_size=2560, block=BlockConfig(placement="gated_residual"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--by_instruction", action="store_true", help="list what moves the bytes")
    args = parser.parse_args()
    schedule.enable_schedule_dump(tempfile.mkdtemp(prefix="schedules-"))
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(args.topology)
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=-1)), topology.devices)
    size = args.tokens * CONFIG.streams.hc_count * CONFIG.hidden_size * 2
    passes, seconds = {}, {}
    for backward in (False, True):
        one, two = (_estimate(n, backward, args, mesh, topology) for n in (1, 2))
        passes[backward] = (two.hbm_bytes - one.hbm_bytes) / size
        seconds[backward] = two.seconds - one.seconds
    print(
        f"{args.topology}, {args.tokens} tokens a chip: forward {passes[False]:.1f} passes, "
        f"{seconds[False] * 1e3:.2f} ms a block; forward and backward {passes[True]:.1f} passes, "
        f"{seconds[True] * 1e3:.2f} ms"
    )


def _estimate(blocks: int, backward: bool, args, mesh, topology):
    graph, params = nnx.split(nnx.eval_shape(lambda: StreamMix(CONFIG, Make(CONFIG, nnx.Rngs(0)))))
    d, s = CONFIG.hidden_size, CONFIG.streams.hc_count

    def chain(params, matrices, h):
        for own, matrix in zip(params, matrices):
            mix = nnx.merge(graph, own)
            x, a = mix.mix(h)
            h = mix.write(h, x @ matrix, a)
        return h

    def both(params, matrices, h, dh):
        y, pullback = jax.vjp(chain, params, matrices, h)
        dh, y = jax.lax.optimization_barrier((dh, y))
        return y, pullback(dh)

    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=everywhere)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    shape = (mesh.size, args.tokens, s * d)
    h = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows)
    params = [jax.tree.map(whole, params)] * blocks
    matrices = [whole(jax.ShapeDtypeStruct((d, d), jnp.bfloat16))] * blocks
    if backward:
        lowered = jax.jit(both).lower(params, matrices, h, h)
    else:
        lowered = jax.jit(chain).lower(params, matrices, h)
    program = hlo.parse(lowered.compile({"optimization_level": "O1"}).as_text())

    def source(instruction):
        shapes = [f"{x.dtype}{list(x.dims)}" for x in instruction.shapes]
        return f"{instruction.name} {instruction.op_name} {shapes}"

    estimate = estimate_time(
        program, mesh, topology.chip, topology.shape, {}, COST_MODELS[1], source
    )
    if args.by_instruction and blocks == 2:
        for name, cost in estimate.by_source.items():
            if cost.hbm_bytes > 1e7:
                print(f"{cost.hbm_bytes / 1e6:7.0f} MB {cost.seconds * 1e3:6.2f} ms  {name}")
    return estimate


if __name__ == "__main__":
    main()
