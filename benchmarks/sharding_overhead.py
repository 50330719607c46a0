"""What the sharded program costs on one device: a train step with the mesh's constraints and
`shard_map`s, against one without.

`train.py` on one device runs the program without (`sharding.mesh.compute_mesh`); here both are
compiled and run in turns on the same batch, after giving the same loss.

    uv run python benchmarks/sharding_overhead.py [--config=configs/tiny.py] [--steps=60]
"""

import argparse
import runpy
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.commands import process_setup
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training import resolve
from qwen3next_jax.training.loop import make_train_step

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--steps", type=int, default=60, help="of each of the two")
    arguments = parser.parse_args()
    config = from_dict(Config, runpy.run_path(arguments.config)["get_config"]().to_dict())
    shape, mesh = (config.train.batch_size, config.train.sequence_length), single_device_mesh()
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "segment_ids": jnp.ones(shape, jnp.int32)}

    def compiled():
        run = resolve.resolve_run(config, mesh)
        return make_train_step(run, *run.stages).lower(run.init_state(), batch).compile()

    steps = {"unsharded": compiled()}
    with mock.patch.object(resolve, "compute_mesh", lambda mesh: mesh):
        steps["sharded"] = compiled()
    print(
        {
            name: f"{step.as_text().count(chr(10)):,} lines of compiled program"
            for name, step in steps.items()
        }
    )
    states = {name: resolve.resolve_run(config, mesh).init_state() for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARM_UP + arguments.steps):
        losses = {}
        for name in list(steps) if i % 2 else list(steps)[::-1]:
            begun = time.perf_counter()
            states[name], values = steps[name](states[name], batch)
            jax.block_until_ready(states[name])
            times[name].append(time.perf_counter() - begun)
            losses[name] = values["loss"]
        if i == 0:
            np.testing.assert_allclose(losses["sharded"], losses["unsharded"], rtol=1e-5)
    measured = {name: values[WARM_UP:] for name, values in times.items()}
    base = statistics.median(measured["unsharded"])
    quarters = statistics.quantiles(
        [b - a for a, b in zip(measured["unsharded"], measured["sharded"])], n=4
    )
    print(
        f"unsharded step {base:.4f} s (median of {arguments.steps}); the sharded one takes "
        f"{quarters[1] / base:+.2%} "
        f"(middle half of the pairs: {quarters[0] / base:+.2%} … {quarters[2] / base:+.2%})"
    )


if __name__ == "__main__":
    process_setup.enable_compilation_cache()
    main()
