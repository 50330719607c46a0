"""What a run takes of its devices' memory, and the one line where that is more than there is."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax
import numpy as np

from qwen3next_jax.common.errors import UserError, out_of_memory
from qwen3next_jax.runs.telemetry import device_memory
from qwen3next_jax.training.stages import ResolvedStage
from qwen3next_jax.training.state import State


def device_bytes(state: State) -> int:
    """Of the part of `state` (shapes and places) that lies on one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def check_state_fits(state: State) -> None:
    """Raises a UserError where the train state alone is larger than a device's memory. (A step
    also takes gradients and activations: what passes here may still be too large.)
    """
    needed, limit, where = device_bytes(state), device_memory()[1], "a device"
    if jax.local_devices()[0].platform == "cpu":  # its devices share the memory of their host
        needed *= jax.local_device_count()
        limit, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    if limit is not None and needed > limit:
        raise UserError(
            f"the parameters and the optimizer's state take {gigabytes(needed)}, and {where} has "
            f"{gigabytes(limit)}: split them over more devices (parallel.mesh), or make the model "
            "smaller; qwen3next plan says how much a step takes of each device of a topology"
        )


@contextlib.contextmanager
def reports_out_of_memory(stage: Callable[[], ResolvedStage]) -> Iterator[None]:
    """A `with` block in which a step of `stage()` that runs out of memory becomes a UserError,
    which says how much memory the step wanted.
    """
    try:
        yield
    except RuntimeError as error:
        if not (asked := out_of_memory(error)):
            raise
        train = stage().train
        raise UserError(
            f"out of memory ({asked}) with train.batch_size = {train.batch_size} rows of "
            f"{train.sequence_length} tokens in train.gradient_accumulation = "
            f"{train.gradient_accumulation} parts, train.remat = {train.remat!r}, on "
            f"{jax.device_count()} devices: try more parts, remat 'block', or more devices; "
            "qwen3next plan says what a step takes"
        ) from error


def gigabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
