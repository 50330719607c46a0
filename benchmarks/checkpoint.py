"""How fast checkpoints are verified and restored, and what a save in the background costs the loop.

    uv run python benchmarks/checkpoint.py [--gigabytes=1] [--steps=40]

First a state of that size is saved, compared bit for bit with what is restored, and timed (files
in the page cache). Then configs/tiny.py trains with a save in the middle: the time beyond that
of the same number of steps without one, in steps.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.commands import process_setup
from qwen3next_jax.config import CheckpointConfig, Config, from_dict
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

ROOT = pathlib.Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    process_setup.keep_freed_memory()
    process_setup.enable_compilation_cache()
    if options.gigabytes:
        throughput(options.gigabytes, options.repeats)
    if options.steps:
        cost_of_a_save(options.steps, options.repeats)


def throughput(gigabytes: float, repeats: int) -> None:
    rng = np.random.default_rng(0)
    arrays = 16
    state = {
        f"w{i}": jnp.asarray(
            rng.standard_normal(int(gigabytes * 1e9 / 4 / arrays), dtype=np.float32)
        )
        for i in range(arrays)
    }
    size = sum(leaf.nbytes for leaf in state.values()) / 1e9
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), state
    )
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        with Checkpoints(pathlib.Path(folder), CheckpointConfig()) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            ((_, _, saved),) = checkpoints.events()
        print(
            f"state of {size:.2f} GB; saved and sealed in {saved['seconds']:.2f} s "
            f"({size / saved['seconds']:.2f} GB/s)"
        )
        verify, both = [], []
        for _ in range(repeats):
            begun = time.perf_counter()
            assert manifest.find_damage(pathlib.Path(folder) / "checkpoints" / "1") is None
            verify.append(time.perf_counter() - begun)
            with Checkpoints(pathlib.Path(folder)) as checkpoints:
                begun = time.perf_counter()
                restored = jax.block_until_ready(checkpoints.restore(1, abstract))
                both.append(time.perf_counter() - begun)
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            del restored
    print(
        f"verify: {size / min(verify):.2f} GB/s; restore with verify: {size / min(both):.2f} GB/s "
        f"(best of {repeats})"
    )


def cost_of_a_save(steps: int, repeats: int) -> None:
    import sys

    sys.path.insert(0, str(ROOT))
    from configs import tiny

    config = from_dict(Config, tiny.get_config().to_dict())
    run = resolve_run(config, single_device_mesh())
    state = run.init_state()
    step = make_train_step(run, *run.stages)
    rng = np.random.default_rng(0)
    shape = (config.train.batch_size, config.train.sequence_length)
    batch = {
        "tokens": rng.integers(0, 256, shape).astype(np.int32),
        "segment_ids": np.ones(shape, np.int32),
    }
    for _ in range(3):
        state, values = step(state, batch)
    costs, calls = [], []
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder,
        Checkpoints(pathlib.Path(folder), CheckpointConfig()) as checkpoints,
    ):
        for repeat in range(repeats):
            seconds = {}
            for saves in (False, True):
                jax.block_until_ready(state)
                begun = time.perf_counter()
                for i in range(steps):
                    state, values = step(state, batch)
                    jax.block_until_ready(values)
                    checkpoints.events()
                    if saves and i == 3:
                        called = time.perf_counter()
                        checkpoints.save(repeat, state)
                        calls.append(time.perf_counter() - called)
                seconds[saves] = time.perf_counter() - begun
                checkpoints.wait()
            costs.append((seconds[True] - seconds[False]) / (seconds[False] / steps))
    one = seconds[False] / steps
    print(
        f"a step of configs/tiny.py: {one:.3f} s; a save holds the loop for "
        f"{statistics.median(calls):.3f} s and costs "
        f"{statistics.median(costs):.2f} steps in all (median of {repeats}; "
        f"{', '.join(f'{c:.2f}' for c in costs)})"
    )


if __name__ == "__main__":
    main()
