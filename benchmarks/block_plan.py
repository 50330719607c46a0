"""One layer of the released model on a described TPU slice: milliseconds and bytes through HBM of its parts, by the planner's rules.

    python benchmarks/block_plan.py [--topology=v5p:2x2x2] [--mesh=expert=8] [--experts=512] [--tokens=4096] [--level=O1]
        [--by=part|instruction] [--hlo=FILE]

The layer (Gated DeltaNet and experts, rematerialised) runs forward, again, and backward, as inside a train step: one row of
`--tokens` a chip, parameters lying as on the mesh, gradients coming out so. What the compiler started early runs beside the rest:
its bytes count, and its time where it is waited for. `--hlo` reads the program from FILE, or writes it there. No TPU takes part.
"""

import argparse
import collections
import pathlib
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.model.block import Block
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.remat import rematerialized
from qwen3next_jax.parallel.mesh import make_mesh
from qwen3next_jax.parallel.rules import activation_spec, constrain, gather, storage_spec
from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.roofline import Network, _Simulation
from qwen3next_jax.planner.topology import describe


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--mesh", default="expert=8")
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="of one chip")
    parser.add_argument("--level", default="O1", help='optimization level of the compiler; "" for its default')
    parser.add_argument("--by", choices=("part", "instruction"), default="part")
    parser.add_argument("--hlo", type=pathlib.Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    topology = describe(arguments.topology)
    sizes = {"data": 1} | {axis: int(size) for axis, size in (part.split("=") for part in arguments.mesh.split(","))}
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**sizes)), topology.devices)
    if arguments.hlo and arguments.hlo.exists():
        text = arguments.hlo.read_text()
    else:
        compiled = compile_layer(ModelConfig(num_experts=arguments.experts), mesh, arguments.tokens, arguments.level)
        print(f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB")
        text = compiled.as_text()
        if arguments.hlo:
            arguments.hlo.write_text(text)
    program = hlo.parse(text)
    simulation = _Parts(program, Network(mesh, topology.chip, topology.shape), topology.chip, text, arguments.by == "instruction")
    seconds, counts = simulation.run(program.entry)
    waits = {name: value for name, value in counts.items() if isinstance(name, str) and name not in ("flops", "bytes")}
    print(f"{arguments.topology} {arguments.mesh}, {arguments.experts} experts, {arguments.tokens} tokens a chip: "
          f"{seconds * 1e3:.2f} ms, {counts['bytes'] / 1e9:.2f} GB, {counts['flops'] / 1e12:.2f} TFLOP; "
          + ", ".join(f"{name} {1e3 * value:.2f}" for name, value in sorted(waits.items(), key=lambda item: -item[1])))
    parts: dict = collections.defaultdict(collections.Counter)
    for key, value in counts.items():
        if isinstance(key, tuple):
            parts[key[1]][key[0]] += value
    for name, value in waits.items():
        known = sum(part[name] for part in parts.values())
        if name.startswith("network") or value - known > 1e-6:
            parts[f"({name}: collectives, and what was started early)"] = collections.Counter({"seconds": value - known})
    parts["(started early)"]["bytes"] = counts["bytes"] - sum(part["bytes"] for part in parts.values())
    print("| ms | GB | TFLOP | |\n|---|---|---|---|")
    for name, part in sorted(parts.items(), key=lambda item: (-round(1e5 * item[1]["seconds"]), -item[1]["bytes"])):
        if part["seconds"] >= 5e-6 or part["bytes"] >= 5e6:
            print(f"| {part['seconds'] * 1e3:.2f} | {part['bytes'] / 1e9:.2f} | {part['flops'] / 1e12:.2f} | {name} |")


def compile_layer(config: ModelConfig, mesh, tokens: int, level: str):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Block(config, "gated_deltanet", True, Make(config, nnx.Rngs(0)), (0,))))
    params = jax.tree.map(lambda p: p.replace(jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(
        mesh, storage_spec(p.declared, p.shape, mesh)))), params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    spread = mesh if mesh.size > 1 else None

    def apply(params, x):
        x, aux, _ = nnx.merge(graphdef, gather(params, spread, config.dtype))(x, context(x), None)
        return constrain(x, spread, "batch", "time", None), {name: aux[name] for name in ("load", "probability", "z", "tokens")}

    def context(x):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        return Context(positions, jnp.ones_like(positions), counted=positions >= 0, mesh=spread)

    def step(params, x, dy, daux):
        # As the layer scan does, the forward runs for its output and the backward starts from what it kept.
        (y, aux), pullback = jax.vjp(rematerialized(apply, "block"), params, x)
        dy, y = jax.lax.optimization_barrier((dy, y))
        return y, aux, pullback((dy, daux))

    rows = NamedSharding(mesh, activation_spec("batch", "time", None))
    shape = mesh.shape["data"] * mesh.shape["expert"], tokens * mesh.shape["context"] * mesh.shape["tensor"], config.hidden_size
    x = jax.ShapeDtypeStruct(shape, config.dtype, sharding=rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        _, aux = jax.eval_shape(apply, params, x)
        lowered = jax.jit(step).lower(params, x, x, aux)
    return lowered.compile({"optimization_level": level} if level else None)


class _Parts(_Simulation):
    """Counts, beside those of the planner, (what, part) for each part: "seconds", "flops", "bytes" and what it waits for."""

    def __init__(self, program, network, chip, text: str, instructions: bool):
        super().__init__(program, network, chip)
        self.instructions = instructions
        self.functions = _functions(text)

    def _work(self, computation, instruction, add):
        def add_to_part(seconds, counts):
            frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
            part = self.functions.get(int(frame.group(1)) if frame else 0, "?")
            if self.instructions:
                part += f" | {instruction.name} {instruction.op_name} {[f'{s.dtype}{list(s.dims)}' for s in instruction.shapes]}"
            own = {(name, part): value for name, value in counts.items()} | {("seconds", part): seconds}
            add(seconds, counts + collections.Counter(own))
        super()._work(computation, instruction, add_to_part)


def _functions(text: str) -> dict[int, str]:
    """Of each stack frame of a module the innermost function of this package, as "file function"."""
    def section(name):
        return re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE).group(1).splitlines()

    def numbered(name):
        return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1].strip('"') for line in section(name)}

    files, functions = numbered("FileNames"), numbered("FunctionNames")
    fields = lambda name: {i: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)} for i, line in numbered(name).items()}
    locations, frames, found = fields("FileLocations"), fields("StackFrames"), {}
    for i in sorted(frames):
        location = locations[frames[i]["file_location_id"]]
        file = files[location["file_name_id"]]
        ours = "qwen3next_jax/" in file
        found[i] = (f"{pathlib.Path(file).stem} {functions[location['function_name_id']]}" if ours
                    else found.get(frames[i]["parent_frame_id"], "?"))
    return found


if __name__ == "__main__":
    main()
