"""Preparation as a step of a datatrove pipeline; datatrove has schedulers for many machines.

    from datatrove.executor import SlurmPipelineExecutor
    from qwen3next_jax.data.datatrove_step import PrepareShare

    step = PrepareShare(config.data, config.train.sequence_length)
    SlurmPipelineExecutor([step], tasks=512, time="12:00:00", partition="cpu").run()

To datatrove, a step is any callable, so this module does not import datatrove. datatrove's
`LocalPipelineExecutor` and `RayPipelineExecutor` also run this step. When datatrove runs a failed
task again, the task keeps the finished parts and makes only the missing parts, even if the number
of tasks has changed.
"""

import dataclasses
from typing import Any

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.pipeline import TextData, find_sources
from qwen3next_jax.data.preparation import RowRecipe, Share, Unfinished, prepare


@dataclasses.dataclass(frozen=True)
class PrepareShare:
    """A datatrove step that prepares the data of `config`.

    Task `rank` of `world_size` tasks tokenizes the parts `rank`, `rank + world_size`, …, with one
    core. A task then packs the rows if the parts of all tasks are finished.

    Attributes:
      config: settings of the data.
      sequence_length: number of tokens of a row.
    """

    config: DataConfig
    sequence_length: int

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Runs one task.

        Args:
          data: the documents of earlier steps, which this step ignores.
          rank: number of this task, from 0.
          world_size: number of tasks.
        """
        tokenizer = TextData.tokenizer_of(self.config, None)
        recipe = RowRecipe(self.sequence_length, self.config.heldout_fraction, self.config.seed)
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
            pass  # a task that finds all parts packs
