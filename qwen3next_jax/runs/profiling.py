"""Records a trace of a few steps for xprof (`--config.profile.steps=10:13`). With the setting
`profile.memory` the profiler also writes a profile of the devices' memory after the traced steps.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from qwen3next_jax.config import ProfileConfig


class Profiler:
    """Traces the steps in `config.range` into WORKDIR/profile. Use it as a context manager."""

    def __init__(
        self, config: ProfileConfig, workdir: pathlib.Path, write_event: Callable[..., None]
    ):
        """Makes a profiler that calls `write_event("profile", step, folder=…)` once the files are
        written.
        """
        self._config, self._folder, self._write_event = config, workdir / "profile", write_event
        self._running = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._running:  # the run ends before the last step of the range
            jax.profiler.stop_trace()

    def before_step(self, step: int, pending: Any) -> None:
        """Starts the trace if `step` is the first step to trace. The training loop must call this
        method before each step.

        Args:
          pending: the arrays that earlier steps compute; the method first waits for them, so that
            the trace does not include the earlier steps.
        """
        if step in self._config.traced_steps and not self._running:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after_dispatch(self, step: int, pending: Any) -> None:
        """Stops the trace if `step` is the last step to trace. The training loop must call this
        method after it has dispatched each step.

        Args:
          pending: the arrays that the step computes; the method first waits for them, so that the
            trace includes the whole step.
        """
        if self._running and step + 1 not in self._config.traced_steps:
            jax.block_until_ready(pending)
            jax.profiler.stop_trace()
            self._running = False
            if self._config.memory:
                jax.profiler.save_device_memory_profile(
                    str(self._folder / f"memory_{step}_{jax.process_index()}.prof")
                )
            self._write_event("profile", step, folder=str(self._folder))
