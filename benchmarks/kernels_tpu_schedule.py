"""What the TPU kernels of attention, beside it, of the convolution and of the routed experts cost,
by the compiler's own schedule, with no TPU.

    python benchmarks/kernels_tpu_schedule.py [--topology=v5p:2x2x1] [--tokens=4096] [--heads=16]
    [--width=256] [--rotary=64]
        [--channels=8192]
    python benchmarks/kernels_tpu_schedule.py --experts=64 --rows=92160     [--topology=v5p:2x2x1]
    python benchmarks/kernels_tpu_schedule.py --budget=2048 --tokens=16384 --heads=24
        [--topology=v5p:2x2x1]

One packed row of the released model in bfloat16, forward and backward, on one device: of each
kernel the milliseconds of its bundles (a lower bound, docs/planner.md; of causal attention those
of the blocks that its mask leaves), and of the copies of its windows if every step of its grid
made them, which is what the planner prices. Cycles a register: of the convolution, for each 8 ×
128 numbers and core.

`--experts` shows the kernels of so many routed experts of the released model instead, for `--rows`
choices: forward and rows' gradients, each once with the hidden layer kept and once without, and
weights' gradients.

`--budget` shows the kernels of sparse attention (QSA) instead, with so many tokens selected by each
query and the released indexer: the choice of blocks, attention forward, and its gradients.
"""

import argparse
import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.kernels.tpu import routed_experts
from qwen3next_jax.model.layers import Context
from qwen3next_jax.ops import attention, attention_heads, causal_conv1d
from qwen3next_jax.ops.compile_target import compile_target
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.compiled import is_kernel, kernel_bytes, visited_grid_share
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.zoo import qsa


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:2x2x1")
    for name, default in {
        "tokens": 4096,
        "heads": 16,
        "key_heads": 2,
        "width": 256,
        "rotary": 64,
        "channels": 8192,
        "experts": 0,
        "rows": 92_160,
        "budget": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="schedules-")
    schedule.enable_schedule_dump(folder)
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(arguments.topology)
    chip, mesh = topology.chip, Mesh(np.array(topology.devices[:1]), ("data",))

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(
            (1, arguments.tokens, *shape), dtype, sharding=NamedSharding(mesh, PartitionSpec())
        )

    def both_ways(x, kernel, q, k, v, flat, ids):
        def run(x, kernel, q, k, v, flat):
            rotation = attention_heads.rotation_by_lane(
                *jnp.ones((2, 1, arguments.tokens, arguments.rotary // 2))
            )
            rotated = attention_heads.norm_and_rotate(
                flat, jnp.ones(arguments.width), *rotation, arguments.rotary // 2, 1e-6
            )
            o = attention(q, k, v, segment_ids=ids)
            return (
                causal_conv1d(x, kernel, activation="silu", segment_ids=ids)[0],
                o,
                rotated,
                attention_heads.gate_heads(rotated, flat),
            )

        outputs, pullback = jax.vjp(run, x, kernel, q, k, v, flat)
        return outputs, pullback(outputs)

    whole = functools.partial(
        jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()), dtype=jnp.bfloat16
    )
    heads = [
        of(n, arguments.width) for n in (arguments.heads, arguments.key_heads, arguments.key_heads)
    ]
    given = (
        of(arguments.channels),
        whole((4, arguments.channels)),
        *heads,
        of(arguments.heads * arguments.width),
        of(dtype=jnp.int32),
    )
    if arguments.experts:
        both_ways, given = experts_both_ways, of_experts(arguments.experts, arguments.rows, whole)
    if arguments.budget:
        index_q, index_k = of(4, 128), of(128)
        both_ways, given = sparse_both_ways(arguments.budget), (*heads, index_q, index_k)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        cores = compile_target().tpu.num_cores
        compiled = jax.jit(both_ways).lower(*given).compile()
    program = hlo.parse(compiled.as_text())
    schedules = schedule.read_schedules(folder, program)
    registers = arguments.tokens * arguments.channels / 1024 / cores
    print("| kernel | ms | ms of copies | cycles a register |\n|---|---|---|---|")
    for computation in program.computations.values():
        for i in computation.values():
            if is_kernel(i) and i.name in schedules:
                cycles = schedules[i.name].cycles * visited_grid_share(computation, i)
                copies = (kernel_bytes(computation, i) or schedules[i.name].copied) / (
                    chip.hbm_bandwidth / chip.devices_per_chip
                )
                each = f"{cycles / registers:.1f}" if "conv" in i.name else ""
                print(
                    f"| {i.name} | {cycles / chip.clock * 1e3:.3f} | {copies * 1e3:.3f} | {each} |"
                )


def of_experts(experts: int, rows: int, whole):
    """Returns what `experts_both_ways` takes: experts of the released model, tiles of 256 rows."""
    d, i, tiles = 2048, 512, rows // 256
    return (
        whole((rows, d)),
        whole((rows,), dtype=jnp.float32),
        whole((experts, d, 2 * i)),
        whole((experts, i, d)),
        whole((tiles,), dtype=jnp.int32),
        whole((1,), dtype=jnp.int32),
        whole((rows, d)),
    )


def experts_both_ways(*given):
    *forward, dy = given
    y, hidden = routed_experts.mlp(*forward, keep_hidden=True)
    again = routed_experts.mlp(*forward)[0]
    return (
        y,
        again,
        routed_experts.mlp_gradients(*forward, hidden, dy),
        routed_experts.mlp_gradients(*forward, None, dy)[:2],
    )


def sparse_both_ways(budget: int):
    """Returns a function of q, k, v and the indexer's queries and keys, of one row of one document:
    sparse attention and its gradients.
    """

    def run(q, k, v, index_q, index_k):
        settings = qsa.QSA.Settings(indexer_budget=budget)
        ratio, length = settings.indexer_compress_ratio, q.shape[1]
        t = jnp.arange(length, dtype=jnp.int32)[None]
        last = t[:, ratio - 1 :: ratio]
        of_rows = qsa.Blocks(
            index_k[:, ::ratio], last - ratio + 1, jnp.ones_like(last), last, t // ratio
        )
        attend = lambda q, k, v: qsa.sparse_attention(
            q, k, v, index_q, of_rows, qsa.tokens_of(Context(t)), settings
        )
        o, pullback = jax.vjp(attend, q, k, v)
        return o, pullback(o)

    return run


if __name__ == "__main__":
    main()
