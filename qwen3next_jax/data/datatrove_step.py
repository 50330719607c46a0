"""Preparation as a step of a datatrove pipeline, which brings schedulers for many machines.

    from datatrove.executor import SlurmPipelineExecutor
    from qwen3next_jax.data.datatrove_step import PrepareShare

    step = PrepareShare(config.data, config.train.sequence_length)
    SlurmPipelineExecutor([step], tasks=512, time="12:00:00", partition="cpu").run()

A step is a function, so nothing here imports datatrove. `LocalPipelineExecutor` and
`RayPipelineExecutor` run it as well. datatrove runs a task again that failed; the units that the
task had finished are there, with whatever number of tasks it is run again.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.pipeline import TrainData, find_sources
from qwen3next_jax.data.preparation import Recipe, Share, Unfinished, prepare


@dataclasses.dataclass(frozen=True)
class PrepareShare:
    """Task `rank` of `world_size` makes every world_size-th unit, with one core. The task that
    finds all units finished packs the rows.
    """

    config: DataConfig
    sequence_length: int

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Args: `data`: documents of the steps before it, which it does not read."""
        tokenizer = TrainData.tokenizer_of(self.config, None)
        recipe = Recipe(self.sequence_length, self.config.heldout_fraction, self.config.seed)
        try:
            prepare(
                find_sources(self.config, tokenizer),
                tokenizer,
                recipe,
                self.config.prepared_dir,
                workers=1,
                share=Share(rank, world_size),
            )
        except Unfinished:
            pass  # another task packs
