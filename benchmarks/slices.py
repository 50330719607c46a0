"""Shows what crosses between TPU slices in a compiled train step, and what hides it, or prices it
for 1 to 8 slices. No TPU takes part.

    python benchmarks/slices.py [--topology=v6e:2x2] [--slices=2] [--layers=8] [--released]
        [--mesh=expert=2] [--micro_batches=1] [--state=replicated] [--gradients=float32]
    python benchmarks/slices.py --table

The model is small, of the released kind; with --released the released one with this number of
layers. The step is compiled at level O1. The times are those of the planner's roofline model, at
the network's peaks. `--table` compiles nothing: it adds the price of the exchange
(planner/between_slices.py) to the planned step of the whole released model on one slice, as if
nothing hid it.
"""

import argparse
import dataclasses
import json
import math
import pathlib

import jax

from qwen3next_jax.commands.run_flags import read_mesh
from qwen3next_jax.config import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.model.flops import parameter_counts
from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.between_slices import between_slices, crossing_bytes, crossing_seconds
from qwen3next_jax.planner.compiled import (
    num_slices,
    program_collectives,
    read_transfer,
    shard_bytes,
    transfer_between_slices,
)
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.planning import compile_step, lower_step, traffic
from qwen3next_jax.planner.topology import Topology, describe_topology
from qwen3next_jax.sharding.chips import CHIPS
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run

SMALL = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    num_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    mtp_depth=0,
)
# A gradient of the models here has more bytes on a device; counts, norms and metrics have fewer.
SMALLEST_GRADIENT = 4096
# Slices, with the plan of the released model on one of them at the compiler's default level.
TABLE = {
    "v5p:8x8x8": "docs/planner/v5p_8x8x8_16k_default.json",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v6e:2x2")
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--released", action="store_true")
    parser.add_argument("--mesh", default="expert=2")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--state", default="replicated")
    parser.add_argument("--gradients", default="float32")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.table:
        print_table()
        return
    topology = describe_topology(arguments.topology, arguments.slices)
    model = ModelConfig(mtp_depth=0) if arguments.released else SMALL
    config = Config(
        model=dataclasses.replace(model, num_hidden_layers=arguments.layers),
        train=TrainConfig(
            batch_size=2 * len(topology.devices) * arguments.micro_batches,
            sequence_length=1024,
            gradient_accumulation=arguments.micro_batches,
            remat="block",
        ),
        parallel=ParallelConfig(
            mesh=MeshConfig(**read_mesh(arguments.mesh)),
            slice_state=arguments.state,
            slice_gradients=arguments.gradients,
        ),
    )
    run = resolve_run(config, make_mesh(config.parallel, topology.devices))
    compiled, failure = compile_step(lower_step(run, topology), topology, "O1")
    if compiled is None:
        raise SystemExit(failure)
    show(hlo.parse(compiled.as_text()), run, topology)


def show(program: hlo.Program, run: ResolvedRun, topology: Topology) -> None:
    """Prints what crosses between the slices of a compiled train step, and when."""
    mesh, parallel, chip = run.mesh, run.config.parallel, topology.chip
    parameters = parameter_counts(run.model).total
    print(f"{topology.title}, mesh {dict(mesh.shape)}, {parameters:,} parameters")
    for (axes, kind), (size, count) in traffic(tuple(program_collectives(program, mesh))).items():
        print(f"  {'+'.join(axes)} {kind}: {count:,.0f} times, {size / 1e6:,.4f} MB a device")
    stored = shard_bytes(run.abstract_state["params"]) / 4
    expected = crossing_bytes(stored, num_slices(mesh), parallel)
    large, small, loops = [], [], 0
    for step in program.walk():
        if step.instruction.opcode != "send" or not transfer_between_slices(step.instruction):
            continue
        sent = read_transfer(step.computation, step.instruction, mesh, step.times)
        loops += step.times > 1
        (large if sent.sent >= SMALLEST_GRADIENT else small).append(sent.total)
    print(f"gradients (and updates) by the shapes of parameters: {expected / 1e6:,.4f} MB")
    print(
        f"between slices: {len(large)} arrays of {SMALLEST_GRADIENT:,} bytes or more, "
        f"{sum(large) / 1e6:,.4f} MB; {len(small)} smaller ones, {sum(small) / 1e3:,.3f} kB; "
        f"{loops} of them in loops"
    )
    estimate = estimate_time(program, mesh, chip, topology.shape)
    total = crossing_seconds(sum(large) + sum(small), chip)
    waited = estimate.bound.get("network slice", 0.0)
    print(
        f"the step takes {1e3 * estimate.seconds:.3f} ms; what crosses takes {1e3 * total:.3f} ms, "
        f"and the step waits {1e3 * waited:.3f} ms of them"
    )
    print("the schedule of the step: what lies between the start and the end of each transfer")
    instructions = list(program.computations[program.entry].values())
    places = {}
    for place, instruction in enumerate(instructions):
        if transfer := transfer_between_slices(instruction):
            places.setdefault(transfer.name, {})[instruction.opcode] = place
    names = {i.name: n for n, i in enumerate(instructions)}
    for instruction in instructions:
        if instruction.opcode != "recv-done" or instruction.operands[0] not in names:
            continue
        received = instructions[names[instruction.operands[0]]]
        transfer = transfer_between_slices(received)
        start, end = places[transfer.name]["send"], names[instruction.name]
        between = instructions[start + 1 : end]
        whiles = [i.op_name for i in between if i.opcode == "while"]
        size = received.shapes[0].bytes
        if size >= SMALLEST_GRADIENT:
            backward = sum("transpose(" in name for name in whiles)
            print(
                f"  {transfer.kind} {size / 1e6:9.4f} MB: starts at {start} of "
                f"{len(instructions)}, ends at {end}; {backward} loops of the backward pass and "
                f"{sum(i.opcode == 'fusion' for i in between)} fusions between"
            )


def print_table() -> None:
    """Prints the price of 1, 2, 4 and 8 slices for the released model."""
    print(
        "slices of | number | rows | GB sent a chip | exchange, s (bfloat16) | step, s (bfloat16) "
        "| tokens/s of one slice times number, % (bfloat16) | hidden from rows (bfloat16)"
    )
    for name, file in TABLE.items():
        plan = json.loads(pathlib.Path(file).read_text())
        rows, alone = plan["batch_size"], plan["step_seconds"]
        kind, _, grid = name.partition(":")
        shape = tuple(map(int, grid.split("x")))
        chips, chip = math.prod(shape), CHIPS[kind]
        model, train = ModelConfig(), TrainConfig(batch_size=rows, sequence_length=4096)
        stored = parameter_counts(model).total / chips
        for slices in (1, 2, 4, 8):
            topology = Topology(name, chip, shape, (), slices)
            mesh = jax.sharding.AbstractMesh(
                (slices, chips // 8, 8, 1, 1), ("slice", "data", "expert", "context", "tensor")
            )
            found = [
                between_slices(
                    model, train, ParallelConfig(slice_gradients=dtype), topology, mesh, stored
                )
                for dtype in ("float32", "bfloat16")
            ]
            steps = [alone + crossing.seconds for crossing in found]
            print(
                f"{name} | {slices} | {rows * slices:,} | {found[0].bytes / 1e9:.3f} | "
                f"{found[0].seconds:.3f} ({found[1].seconds:.3f}) | "
                f"{steps[0]:.3f} ({steps[1]:.3f}) | "
                f"{alone / steps[0]:.1%} ({alone / steps[1]:.1%}) | "
                f"{found[0].hidden_from_rows:,} ({found[1].hidden_from_rows:,})"
            )


if __name__ == "__main__":
    main()
