"""What a row of `validation.py` would be predicted with the attention blocks of the measured
program, where those differ from this project's.

    python benchmarks/attention_blocks.py hunyuan3_v5p

Compiles the attention kernels of one layer for one device, once with this project's blocks and once
with the published ones, and prices both by the cost model "calibrated". A layer runs the forward
kernel twice, because the backward pass computes it again, and the kernels of the backward pass
once. The whole step is not compiled again, so what is printed is the row's prediction plus the
difference of all layers. No TPU takes part.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.validation import PLANS, ROWS
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh

# row → the published settings sa_block_*: the number of queries, and of keys, in a block, and of
# the keys that one product takes
BLOCKS = {"hunyuan3_v5p": 2048, "qwen3_235b_tpu7x_64": 2048}


def main() -> None:
    names = sys.argv[1:]
    if len(names) == 3 and names[1] in ("forward", "backward"):  # started by `in_a_process`
        name, kind, block = names
        print(json.dumps(seconds(name, kind, int(block))))
        return
    if not names or set(names) - set(BLOCKS):
        sys.exit(f"usage: attention_blocks.py ROW …; rows: {', '.join(BLOCKS)}")
    print("| row | blocks | forward of a layer | backward | predicted step |")
    print("|---|---|---|---|---|")
    for name in names:
        row = ROWS[name]
        layers = row.model["num_hidden_layers"] + row.model["mtp_depth"]
        plan = json.loads((PLANS / f"{name}.json").read_text())
        step, own = plan["estimates"]["calibrated"]["step_seconds"], None
        for block in (0, BLOCKS[name]):
            forward, backward = (
                in_a_process(name, kind, block) for kind in ("forward", "backward")
            )
            of_step = layers * (2 * forward + backward)
            own = of_step if own is None else own
            error = (step + of_step - own) / np.mean(row.measured) - 1
            print(
                f"| {row.number} | {block or 'of this project'} | {forward * 1e3:.2f} ms | "
                f"{backward * 1e3:.2f} ms | {step + of_step - own:.3f} s ({error:+.1%}) |"
            )


def in_a_process(name: str, kind: str, block: int) -> float:
    """As `seconds`, in a new process, in which nothing was compiled with other blocks before."""
    command = [sys.executable, __file__, name, kind, str(block)]
    return json.loads(subprocess.check_output(command))


def seconds(name: str, kind: str, block: int) -> float:
    """Returns the predicted seconds of the attention kernels of one layer.

    Args:
      name: one of ROWS.
      kind: "forward" or "backward".
      block: the tokens of a block; 0: those of this project.
    """
    row = ROWS[name]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="schedules-"))
    schedule.enable_schedule_dump(folder)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    if block:
        splash_attention.BLOCK = splash_attention.LONG_BLOCK = block
    if row.kernels and row.kernels.two_backward_kernels:
        splash_attention.PARTS_OF_DQ = 0
    topology = describe_topology(row.topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    heads, key_heads, width = (
        row.model[setting] for setting in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((row.rows, *shape), dtype, sharding=sharding)

    queries, keys = (of(row.tokens, n, width) for n in (heads, key_heads))
    ids, sums = of(row.tokens, dtype=jnp.int32), of(heads, row.tokens, dtype=jnp.float32)
    settings = dict(scale=width**-0.5, causal=True)
    run, inputs = {
        "forward": (
            lambda q, k, v, ids: splash_attention.forward(q, k, v, ids, ids, **settings),
            (queries, keys, keys, ids),
        ),
        "backward": (
            lambda q, k, v, ids, o, lse, do: splash_attention.backward(
                q, k, v, ids, ids, o, lse, do, **settings
            ),
            (queries, keys, keys, ids, queries, sums, queries),
        ),
    }[kind]
    options = dict(option.split("=") for option in row.options.split(",") if "vmem" in option)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(run).lower(*inputs).compile(compiler_options=options)
    program = hlo.parse(compiled.as_text())
    all_devices = ParallelConfig(mesh=MeshConfig(data=len(topology.devices)))
    estimate = estimate_time(
        program,
        make_mesh(all_devices, topology.devices),
        topology.chip,
        topology.shape,
        schedule.read_schedules(folder, program),
        "calibrated",
        lambda instruction: "kernels" if "splash" in instruction.name else "rest",
    )
    return estimate.by_source["kernels"].seconds


if __name__ == "__main__":
    main()
