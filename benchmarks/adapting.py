"""What freezing and LoRA cost and save: the memory of the compiled train step, and its time.

Each row is a train step of configs/tiny.py with other trained parameters. "state" is the memory of
parameters and optimizer state, which the step takes and returns; "temporary" is what it needs
besides (activations, gradients, merged matrices), by `compiled.memory_analysis()`. The time is the
median of the steps, which run in turns.

    uv run python benchmarks/adapting.py [--remat=none] [--steps=7]
"""

import argparse
import dataclasses
import pathlib
import runpy
import statistics
import time

import jax
import numpy as np

from qwen3next_jax.config import Config, LoRAConfig, from_dict
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "tiny.py"
WARM_UP = 2
MIXERS = ("kind=matrix name=layers/*/mixer/* name!=*_ba",)
# name of a row → (train.freeze, model.lora)
ROWS = {
    "all parameters": ((), LoRAConfig()),
    "all but layers 0-1 and the embedding": (("layer=0-1", "embedding"), LoRAConfig()),
    "the last layer and the head": (("layer!=3 name!=head",), LoRAConfig()),
    "norms": (("kind!=norm",), LoRAConfig()),
    "LoRA, rank 8, mixers": ((), LoRAConfig(rank=8, targets=MIXERS)),
    "LoRA, rank 4, all matrices": ((), LoRAConfig(rank=4)),
}


class Row:
    """A compiled train step with its state."""

    def __init__(self, config: Config, freeze: tuple[str, ...], lora: LoRAConfig, remat: str):
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, lora=lora),
            train=dataclasses.replace(config.train, freeze=freeze, remat=remat),
        )
        run = resolve_run(config, single_device_mesh())
        shape = (config.train.batch_size, config.train.sequence_length)
        tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape)
        self.batch = jax.device_put(
            {"tokens": tokens.astype(np.int32), "segment_ids": np.ones(shape, np.int32)},
            run.batch_sharding,
        )
        self.state = run.init_state()
        self.step = make_train_step(run, *run.stages).lower(self.state, self.batch).compile()
        self.trained = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_main))
        memory = self.step.memory_analysis()
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))
        self.temporary_bytes = memory.temp_size_in_bytes
        self.seconds: list[float] = []

    def run(self) -> None:
        """Does a step and measures its time."""
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--remat", default="none")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    values = runpy.run_path(str(CONFIG))["get_config"]().to_dict()
    config = from_dict(Config, values)
    rows = {name: Row(config, *row, arguments.remat) for name, row in ROWS.items()}
    for _ in range(WARM_UP + arguments.steps):
        for row in rows.values():
            row.run()
    print("| trained | numbers | state, MB | temporary, MB | step, ms |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        milliseconds = 1000 * statistics.median(row.seconds[WARM_UP:])
        print(
            f"| {name} | {row.trained:,} | {row.state_bytes / 1e6:.1f} | "
            f"{row.temporary_bytes / 1e6:.1f} | {milliseconds:.0f} |"
        )
    print(f"{jax.devices()[0].device_kind}, {jax.device_count()} device, remat {arguments.remat}")


if __name__ == "__main__":
    main()
