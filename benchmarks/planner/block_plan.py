"""One layer of a model on a described TPU slice: milliseconds and bytes through HBM of its
parts, by the planner's cost models (docs/planner.md).

    python benchmarks/planner/block_plan.py [--config=configs/qwen3_next_80b_a3b.py]
    [--topology=v5p:2x2x2] [--mesh=expert=8] [--rows=1]
        [--tokens=4096] [--mixer=gated_deltanet] [--layers=1] [--remat=block] [--level=O1]
        [--options=NAME=VALUE,…] [--by=part|instruction]
        [--cost_model=schedule|roofline|calibrated] [--hlo=FOLDER] [--json=FILE]

The layer (a mixer and experts, with the config's residual form) runs forward and backward, as
inside a train step: `--layers` of them are the body of a scan of two trips, over `--rows` rows of
`--tokens` a chip, parameters lying as on the mesh, gradients coming out so. What the compiler
started early runs beside the rest: its bytes count, and its time where it is waited for. `--hlo`
reads the program and its schedules from FOLDER, or writes them there. `--json` writes the figures
of all cost models, which `flash_plan.py` reads. No TPU takes part.
"""

import argparse
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks import harness
from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.config.registry import MIXERS
from qwen3next_jax.model.layers import Context, ForwardOptions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.remat import keeps_expert_hidden, rematerialized
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.compiled import kernels_of_unknown_cost
from qwen3next_jax.planner.estimate import COST_MODELS, estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.compiler_options import compiler_options, options_text
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import activation_spec, constrain, gather_params, storage_spec

PERIODS = 2  # trips of the loop over layers


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        default=harness.ROOT / "configs/qwen3_next_80b_a3b.py",
    )
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--mesh", default="expert=8")
    parser.add_argument("--rows", type=int, default=1, help="of one chip")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row on one chip")
    parser.add_argument("--mixer", choices=MIXERS, default="gated_deltanet", metavar="NAME")
    parser.add_argument(
        "--layers", type=int, default=1, help="one after another, as in a period of the model"
    )
    parser.add_argument("--remat", default="block")
    parser.add_argument(
        "--level", default="O1", help='optimization level of the compiler; "" for its default'
    )
    parser.add_argument("--options", default="", help="as config.parallel.compiler_options")
    parser.add_argument("--by", choices=("part", "instruction"), default="part")
    parser.add_argument("--cost_model", choices=COST_MODELS, default=COST_MODELS[0])
    parser.add_argument("--hlo", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if not arguments.config.is_file():
        parser.error(f"--config={arguments.config}: no such file")
    return arguments


def main():
    arguments = parse()
    dumped = arguments.hlo or pathlib.Path(tempfile.mkdtemp(prefix="schedules-"))
    schedule.enable_schedule_dump(dumped)
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(arguments.topology)
    sizes = {"data": 1} | {
        axis: int(size) for axis, size in (part.split("=") for part in arguments.mesh.split(","))
    }
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**sizes)), topology.devices)
    if (dumped / "program.hlo").exists():
        text = (dumped / "program.hlo").read_text()
    else:
        options = compiler_options(ParallelConfig(compiler_options=arguments.options), mesh)
        config = harness.load_config(arguments.config).model
        compiled = compile_layer(
            config,
            arguments.mixer,
            mesh,
            arguments.rows,
            arguments.tokens,
            arguments.layers,
            arguments.remat,
            options | ({"optimization_level": arguments.level} if arguments.level else {}),
        )
        print(options_text(options))
        print(f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB")
        text = compiled.as_text()
        (dumped / "program.hlo").write_text(text)
    program = hlo.parse_program(text)
    schedules = schedule.read_schedules(dumped, program)

    def part(instruction):
        shapes = [f"{s.dtype}{list(s.dims)}" for s in instruction.shapes]
        return program.source_function(
            instruction
        ) + f" | {instruction.name} {instruction.op_name} {shapes}" * (
            arguments.by == "instruction"
        )

    figures, unknown = {}, kernels_of_unknown_cost(program, schedules)
    for cost_model in COST_MODELS:
        e = estimate_time(program, mesh, topology.chip, topology.shape, schedules, cost_model, part)
        print(
            f"{arguments.config.stem}, {arguments.mixer}, {arguments.topology} {arguments.mesh}, "
            f"{arguments.rows} × {arguments.tokens} tokens a chip, {PERIODS} × {arguments.layers} "
            f"layers, cost model {cost_model}: "
            f"{e.seconds * 1e3:.2f} ms, {e.hbm_bytes / 1e9:.2f} GB, {e.flops / 1e12:.2f} TFLOP; "
            + ", ".join(
                f"{name} {1e3 * seconds:.2f}" for name, seconds in e.seconds_by_resource.items()
            )
        )
        figures[cost_model] = {
            "seconds": e.seconds,
            "hbm_bytes": e.hbm_bytes,
            "flops": e.flops,
            "bound_seconds": e.seconds_by_resource,
            "parts": {name: cost._asdict() for name, cost in e.cost_by_function.items()},
        }
    if arguments.json:
        record = {
            **{
                name: str(value)
                for name, value in vars(arguments).items()
                if value is not None and name not in ("json", "hlo")
            },
            "layers_in_all": PERIODS * arguments.layers,
            "kernels_of_unknown_cost": list(unknown),
            "estimates": figures,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print("kernels of unknown cost:", unknown)
    e = estimate_time(
        program, mesh, topology.chip, topology.shape, schedules, arguments.cost_model, part
    )
    harness.print_header("ms", "GB", "TFLOP", "")
    for name, p in e.cost_by_function.items():
        if p.seconds >= 5e-6 or p.hbm_bytes >= 5e6:
            harness.print_row(
                f"{p.seconds * 1e3:.2f}", f"{p.hbm_bytes / 1e9:.2f}", f"{p.flops / 1e12:.2f}", name
            )


def compile_layer(
    config: ModelConfig,
    mixer: str,
    mesh,
    rows: int,
    tokens: int,
    layers: int,
    remat: str,
    options: dict[str, str],
):
    placement = config.block.import_part("placement")

    def block():
        return placement(
            config, mixer, True, Make(config, nnx.Rngs(0)).stacked(PERIODS), (0,) * PERIODS
        )

    graphdef, params = nnx.split(nnx.eval_shape(block))
    params = jax.tree.map(
        lambda p: p.replace(
            jax.ShapeDtypeStruct(
                p.shape,
                p.dtype,
                sharding=NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)),
            )
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    spread = mesh if mesh.size > 1 else None

    def apply(params, x):
        x, aux, _ = nnx.merge(graphdef, gather_params(params, spread, config.dtype))(
            x, context(x), None
        )
        return constrain(x, spread, "batch", "time", None), {
            name: aux[name] for name in ("load", "probability", "z", "tokens")
        }

    def context(x):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        return Context(
            positions,
            jnp.ones_like(positions),
            stats_mask=positions >= 0,
            mesh=spread,
            options=ForwardOptions(keep_expert_hidden=keeps_expert_hidden(remat)),
        )

    def step(params, x, dy, daux):
        def period(x, params):
            auxes = []
            for layer in params:
                x, aux = rematerialized(apply, remat, looped=True)(layer, x)
                auxes.append(aux)
            return x, auxes

        def run(params, x):
            return jax.lax.scan(period, x, params)

        (y, aux), pullback = jax.vjp(run, params, x)
        dy, y = jax.lax.optimization_barrier((dy, y))
        return y, aux, pullback((dy, daux))

    spread_rows = NamedSharding(mesh, activation_spec("batch", "time", None))
    shape = (
        rows * mesh.shape["data"] * mesh.shape["expert"],
        tokens * mesh.shape["context"] * mesh.shape["tensor"],
        config.hidden_size,
    )
    shape = jax.eval_shape(
        lambda x: placement.residual_from_embeddings(x, config),
        jax.ShapeDtypeStruct(shape, config.dtype),
    ).shape
    x = jax.ShapeDtypeStruct(shape, config.dtype, sharding=spread_rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        _, aux = jax.eval_shape(
            apply, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params), x
        )
        aux = jax.tree.map(lambda a: jax.ShapeDtypeStruct((PERIODS, *a.shape), a.dtype), aux)
        lowered = jax.jit(step).lower([params] * layers, x, x, [aux] * layers)
    return lowered.compile(options)


if __name__ == "__main__":
    main()
