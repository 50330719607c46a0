"""A trace of a few steps for xprof, and on request what holds the memory after them:
`--config.profile.steps=10:13`.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from qwen3next_jax.config import ProfileConfig


class Profiler:
    """Traces the steps of `config.range` that this process takes, into WORKDIR/profile. Use as a
    context manager.
    """

    def __init__(self, config: ProfileConfig, workdir: pathlib.Path, done: Callable[..., None]):
        """`done("profile", step, folder=…)` is called when the files are there."""
        self._config, self._folder, self._done = config, workdir / "profile", done
        self._running = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._running:  # the run ends inside the range
            jax.profiler.stop_trace()

    def before(self, step: int, pending: Any) -> None:
        """Call before `step`, with arrays that the steps before it are still computing."""
        if step in self._config.range and not self._running:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, pending: Any) -> None:
        """Call after `step`, with arrays that it computes."""
        if self._running and step + 1 not in self._config.range:
            jax.block_until_ready(pending)
            jax.profiler.stop_trace()
            self._running = False
            if self._config.memory:
                jax.profiler.save_device_memory_profile(
                    str(self._folder / f"memory_{step}_{jax.process_index()}.prof")
                )
            self._done("profile", step, folder=str(self._folder))
