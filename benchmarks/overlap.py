"""How much of the gathers of weights the TPU compiler hides behind products, by its level: eight
layers of two products in a scan of four.

    python benchmarks/overlap.py [--topology=v5p:8x8x8] [--mesh=data=64,expert=8]
    [--levels=O1,default]

Each layer's two matrices are stored over `data` and gathered where they are used, forward and
again backward, as the model's are; a row of 4,096 tokens a chip. Milliseconds by the planner's
roofline model, with the program's own compiler options. No TPU takes part.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.model.remat import rematerialized
from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh

TOKENS, WIDTH, HIDDEN = 4096, 2048, 16_384
ROWS = P(("data", "expert"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:8x8x8")
    parser.add_argument("--mesh", default="data=64,expert=8")
    parser.add_argument("--levels", default="O1,default")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    topology = describe_topology(arguments.topology)
    sizes = {
        axis: int(size) for axis, size in (part.split("=") for part in arguments.mesh.split(","))
    }
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(**sizes)), topology.devices)

    def layer(weights, x):
        def local(x, up, down):
            up, down = (
                jax.lax.all_gather(up, "data", axis=0, tiled=True),
                jax.lax.all_gather(down, "data", axis=1, tiled=True),
            )
            return x + jax.nn.relu(jax.nn.relu(x @ up) @ down)

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(ROWS, P("data"), P(None, "data")),
            out_specs=ROWS,
            check_vma=False,
        )(x, *weights)

    def loss(x, weights):
        def period(x, pair):
            for i in range(2):
                x = rematerialized(layer, "block", looped=True)(
                    jax.tree.map(lambda w, i=i: w[i], pair), x
                )
            return x, None

        return jnp.sum(jax.lax.scan(period, x, weights)[0].astype(jnp.float32))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = (
        array(P(None, None, "data"), 4, 2, WIDTH, HIDDEN),
        array(P(None, None, None, "data"), 4, 2, HIDDEN, WIDTH),
    )
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(
        array(ROWS, TOKENS * mesh.size, WIDTH), weights
    )
    for level in arguments.levels.split(","):
        options = compiler_options(ParallelConfig(), mesh) | (
            {} if level == "default" else {"optimization_level": level}
        )
        e = estimate_time(
            hlo.parse(lowered.compile(options).as_text()),
            mesh,
            topology.chip,
            topology.shape,
            cost_model="roofline",
        )
        print(
            f"{level}: {1e3 * e.seconds:.2f} ms; "
            + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in e.bound.items())
        )


if __name__ == "__main__":
    main()
