"""The clock of a run: how long its steps take."""

import time


class Clock:
    """Measures how long steps take, without the time that hooks take. A lap is one measurement,
    over one or several steps.

    Attributes:
      data_wait: the seconds of the current lap during which the loop waited for batches.
    """

    def __init__(self):
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._last_step = 0
        self.data_wait = 0.0

    def restart(self, step: int) -> None:
        """Begins a new lap now. `step` is the last step that has ended."""
        self._since = time.perf_counter()
        self._last_step = step
        self.data_wait = 0.0

    def lap(self, step: int) -> tuple[int, float, float]:
        """Ends the current lap now, and begins the next lap. `step` is the last step that has
        ended.

        Returns:
          (steps, seconds, seconds of waiting for data) of the lap that ended.
        """
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        lap = (step - self._last_step, now - self._since, self.data_wait)
        self._since = now
        self._last_step = step
        self.data_wait = 0.0
        return lap

    def pause(self) -> None:
        """Stops the clock until `resume`."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Starts the clock again after `pause`."""
        self._since += time.perf_counter() - self._paused_at
        self._paused_at = None
