"""What row 3 of `validation.py` would be predicted with the attention blocks of the measured
program, which are larger than this project's.

    python benchmarks/attention_blocks.py

Compiles the attention kernels of one layer for one device, once with this project's blocks and once
with the published ones, and prices both by the cost model "calibrated". A layer runs the forward
kernel twice, because the backward pass computes it again, and the kernels of the backward pass
once. The whole step is not compiled again, so what is printed is the row's prediction plus the
difference of all layers. No TPU takes part.
"""

import argparse
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

from benchmarks.validation import PLANS, ROWS, fingerprint
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.kernels.tpu import splash_attention
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh

NAME = "hunyuan3_v5p"
# the published settings sa_block_*: the number of queries, and of keys, in a block, and of the keys
# that one product takes
BLOCK = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # given by `in_a_process`
    arguments = parser.parse_args()
    if arguments.one:
        kind, block = arguments.one
        print(json.dumps(seconds(kind, int(block))))
        return
    row, path = ROWS[NAME], PLANS / f"{NAME}.json"
    plan = json.loads(path.read_text()) if path.exists() else {}
    if plan.get("fingerprint") != fingerprint(row):
        parser.error(
            f"{path.name} is missing or stale: python benchmarks/validation.py --compile={NAME}"
        )
    layers = row.model["num_hidden_layers"] + row.model["mtp_depth"]
    step, own = plan["estimates"]["calibrated"]["step_seconds"], None
    print("| blocks | forward of a layer | backward | predicted step |")
    print("|---|---|---|---|")
    for block in (0, BLOCK):
        forward, backward = in_a_process("forward", block), in_a_process("backward", block)
        of_step = layers * (2 * forward + backward)
        own = of_step if own is None else own
        error = (step + of_step - own) / np.mean(row.measured) - 1
        print(
            f"| {block or 'of this project'} | {forward * 1e3:.2f} ms | {backward * 1e3:.2f} ms | "
            f"{step + of_step - own:.3f} s ({error:+.1%}) |"
        )


def in_a_process(kind: str, block: int) -> float:
    """As `seconds`, in a new process, in which nothing was compiled with other blocks before."""
    command = [sys.executable, __file__, "--one", kind, str(block)]
    return json.loads(subprocess.check_output(command))


def seconds(kind: str, block: int) -> float:
    """Returns the predicted seconds of the attention kernels of one layer.

    Args:
      kind: "forward" or "backward".
      block: the tokens of a block; 0: those of this project.
    """
    row = ROWS[NAME]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="schedules-"))
    schedule.enable_schedule_dump(folder)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    if block:
        splash_attention.BLOCK = splash_attention.LONG_BLOCK = block
    splash_attention.PARTS_OF_DQ = 0  # two backward kernels, as in the row's program
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
