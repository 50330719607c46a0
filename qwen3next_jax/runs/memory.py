"""Computes the memory that the train state needs on a device, and turns a lack of memory into an
error in one line.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import UserError, out_of_memory_message
from qwen3next_jax.config.remat import parse_remat
from qwen3next_jax.runs.telemetry import device_memory
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, num_shards
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage
from qwen3next_jax.training.state import State


def device_bytes(state: State) -> int:
    """Returns the bytes of `state` on one device. The leaves of `state` may be abstract arrays with
    a shape, dtype and sharding.
    """
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def check_state_fits(state: State) -> None:
    """Checks that the train state fits in the memory of a device. A step also needs gradients and
    activations, so a run that passes this check may still run out of memory.

    Raises:
      UserError: the state is larger than the memory.
    """
    _check_fits(
        device_bytes(state),
        "the parameters and the optimizer's state take",
        "split them over more devices (parallel.mesh), or make the model smaller",
    )


def check_activations_fit(run: ResolvedRun, stage: ResolvedStage) -> None:
    """Checks that the train state and the activations that a step needs at least
    (`activation_bytes`) fit in the memory of a device.

    Raises:
      UserError: they are larger than the memory.
    """
    train = stage.train
    _check_fits(
        device_bytes(run.abstract_state) + activation_bytes(run, stage),
        f"train.batch_size = {train.batch_size} rows of {train.sequence_length} tokens in "
        f"train.gradient_accumulation = {train.gradient_accumulation} parts: the train state and "
        "the layers' inputs alone take",
        "give fewer rows, more parts or more devices",
    )


def activation_bytes(run: ResolvedRun, stage: ResolvedStage) -> int:
    """Returns a lower bound of the bytes that the backward pass of a micro-batch needs on a device:
    the inputs of all layers, which it keeps with every `train.remat` that does not offload them.
    With frozen parameters the bound is 0: layers without gradients keep no inputs.
    """
    saved = parse_remat(stage.train.remat)
    if saved.policy == "offload" or "input" in saved.offload or stage.train.freeze:
        return 0
    mesh = run.mesh
    shards = num_shards(mesh, *ROWS) * num_shards(mesh, CONTEXT)
    tokens = -(-stage.tokens_per_step // (stage.micro_batches * shards))
    width = run.model.hidden_size * jnp.dtype(run.model.dtype).itemsize
    return tokens * width * run.model.num_hidden_layers


def _check_fits(needed: int, what: str, advice: str) -> None:
    """Raises UserError if `needed` bytes do not fit in the memory of a device."""
    limit, where = device_memory()[1], "a device"
    if jax.local_devices()[0].platform == "cpu":  # CPU devices share the memory of their host
        needed *= jax.local_device_count()
        limit, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    if limit is not None and needed > limit:
        raise UserError(
            f"{what} {gigabytes(needed)}, and {where} has {gigabytes(limit)}: {advice}; qwen3next "
            "plan shows the memory of a step on each device of a topology"
        )


@contextlib.contextmanager
def reports_out_of_memory(stage: Callable[[], ResolvedStage]) -> Iterator[None]:
    """Turns XLA's out-of-memory error inside the `with` block into a UserError. Its message has
    XLA's message and the settings of the current stage, which the function `stage` returns.
    """
    try:
        yield
    except RuntimeError as error:
        if not (asked := out_of_memory_message(error)):
            raise
        train = stage().train
        raise UserError(
            f"out of memory ({asked}) with train.batch_size = {train.batch_size} rows of "
            f"{train.sequence_length} tokens in train.gradient_accumulation = "
            f"{train.gradient_accumulation} parts, train.remat = {train.remat!r}, on "
            f"{jax.device_count()} devices: try more parts, remat 'block', or more devices; "
            "qwen3next plan shows what a step needs"
        ) from error


def gigabytes(size: float) -> str:
    """Formats a size in bytes as kB, MB or GB."""
    if size < 1e5:
        return f"{size / 1e3:,.1f} kB"
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
