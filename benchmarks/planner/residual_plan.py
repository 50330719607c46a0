"""Passes over the residual streams of Qwen3.8-Flash-Next, counted in the program that the TPU
compiler makes, in XLA alone and with the kernels (kernels/tpu/residual_streams.py).

    python benchmarks/planner/residual_plan.py [--topology=v5p:2x2x1] [--tokens=4096]
        [--by_instruction] [--implementations=xla,pallas_tpu]

A pass is one read or one write of all streams of all tokens, in bfloat16. The program is a chain
of blocks, each with its mix and its addition to the streams; every block is one product with a
[D, D] matrix. The bytes of a block are the difference of three blocks and two. The first number
of passes counts all bytes, also those of the product (its input, its output and the matrix), of the
gate's matrices and of what the mix saves. The second counts only arrays as large as the streams of
all tokens: an instruction counts with the sizes of such operands and results, and at most with its
bytes. The backward pass recomputes what the forward pass does not save. Milliseconds of a block are
by the cost model `roofline`, and by the compiler's schedule of every fusion and kernel
(`schedule`). No TPU takes part.
"""

import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import harness
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.zoo.gated_residual import StreamMix
from qwen3next_jax.zoo.ops import residual_streams

CONFIG = ModelConfig(hidden_size=2560, block=BlockConfig(placement="gated_residual"))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--by_instruction", action="store_true", help="list what moves the bytes")
    parser.add_argument("--implementations", default="xla,pallas_tpu")
    args = parser.parse_args()
    args.schedules = tempfile.mkdtemp(prefix="schedules-")
    schedule.enable_schedule_dump(args.schedules)
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(args.topology)
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=-1)), topology.devices)
    print(f"{args.topology}, {args.tokens} tokens a chip, for one block:")
    harness.print_header("", "passes", "of the streams", "ms (roofline)", "ms (schedule)")
    for implementation in args.implementations.split(","):
        for backward in (False, True):
            one, two = (_count(n, backward, implementation, args, mesh, topology) for n in (2, 3))
            passes, streams, roofline, scheduled = (b - a for a, b in zip(one, two))
            name = f"{implementation}, forward" + " and backward" * backward
            harness.print_row(
                name,
                f"{passes:.1f}",
                f"{streams:.1f}",
                f"{roofline * 1e3:.2f}",
                f"{scheduled * 1e3:.2f}",
            )


def _count(blocks: int, backward: bool, implementation: str, args, mesh, topology):
    """Returns the passes over everything and over the streams, and the seconds by both cost
    models, of a chain of blocks.
    """
    graph, params = nnx.split(nnx.eval_shape(lambda: StreamMix(CONFIG, Make(CONFIG, nnx.Rngs(0)))))
    d, s = CONFIG.hidden_size, CONFIG.streams.hc_count

    def chain(params, matrices, h):
        for own, matrix in zip(params, matrices):
            mix = nnx.merge(graph, own)
            x, a, h = mix.block_input_and_factors(h, Context(None, mesh=mesh))
            h = residual_streams.add_to_streams(h, x @ matrix, a, mesh)
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
    choose = residual_streams.choose_implementation
    named = lambda operator, _, forms, **call: choose(operator, implementation, forms, **call)
    with (
        mock.patch.object(residual_streams, "choose_implementation", named),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        if backward:
            lowered = jax.jit(both).lower(params, matrices, h, h)
        else:
            lowered = jax.jit(chain).lower(params, matrices, h)
    program = hlo.parse_program(lowered.compile({"optimization_level": "O1"}).as_text())
    bytes_of_streams = args.tokens * s * d * 2
    entry, large = program.computations[program.entry_computation], {}

    def source(instruction):
        shapes = [f"{x.dtype}{list(x.dims)}" for x in instruction.shapes]
        name = f"{instruction.name} {instruction.op_name} {shapes}"
        operands = [entry[o] for o in instruction.operands if o in entry]
        arrays = [x.bytes for i in (instruction, *operands) for x in i.shapes]
        large[name] = sum(n for n in arrays if n >= bytes_of_streams)
        return name

    estimates = [
        estimate_time(program, mesh, topology.chip, topology.shape, schedules, model, source)
        for model, schedules in (
            ("roofline", {}),
            ("schedule", schedule.read_schedules(args.schedules, program)),
        )
    ]
    moved = {name: cost.hbm_bytes for name, cost in estimates[0].cost_by_function.items()}
    if args.by_instruction and blocks == 3:
        for name, cost in estimates[1].cost_by_function.items():
            if moved[name] > 1e7:
                print(f"{moved[name] / 1e6:7.0f} MB {cost.seconds * 1e3:6.2f} ms  {name}")
    return (
        sum(moved.values()) / bytes_of_streams,
        sum(min(large[name], moved[name]) for name in moved) / bytes_of_streams,
        *(estimate.seconds for estimate in estimates),
    )


if __name__ == "__main__":
    main()
