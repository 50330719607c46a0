"""Checks whether a run fits in the memory of its devices, and reports a lack of memory."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import UserError, out_of_memory_message
from qwen3next_jax.config.remat import parse_remat
from qwen3next_jax.runs.telemetry import device_memory_peak_and_limit
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, num_shards
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage
from qwen3next_jax.training.state import State


def bytes_per_device(state: State) -> int:
    """Returns the number of bytes of `state` that one device holds. The leaves of `state` may be
    abstract arrays with a shape, dtype and sharding.
    """
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def check_state_fits(state: State) -> None:
    """Checks that the train state fits in the memory of a device. Because a step also needs memory
    for gradients and activations, a run that passes this check may still run out of memory.

    Raises:
      UserError: the state is larger than the memory.
    """
    _check_fits(
        bytes_per_device(state),
        "the parameters and the optimizer's state take",
        "split them over more devices (parallel.mesh), or make the model smaller",
    )


def check_activations_fit(run: ResolvedRun, stage: ResolvedStage) -> None:
    """Checks that the train state and `minimum_activation_bytes` fit in the memory of a device.

    Raises:
      UserError: the state and the activations are larger than the memory.
    """
    train = stage.train
    _check_fits(
        bytes_per_device(run.abstract_state) + minimum_activation_bytes(run, stage),
        f"train.batch_size = {train.batch_size} rows of {train.sequence_length} tokens in "
        f"train.gradient_accumulation = {train.gradient_accumulation} parts: the train state and "
        "the layers' inputs alone take",
        "give fewer rows, more parts or more devices",
    )


def minimum_activation_bytes(run: ResolvedRun, stage: ResolvedStage) -> int:
    """Returns a lower bound for the bytes of activations that the backward pass of a micro-batch
    needs on a device: the bytes of the inputs of all layers. If `train.remat` offloads the inputs
    of the layers, the bound is 0. With frozen parameters the bound is 0, too, because layers
    without gradients keep no inputs.
    """
    saved = parse_remat(stage.train.remat)
    if saved.policy == "offload" or "input" in saved.offloaded_to_host or stage.train.freeze:
        return 0
    mesh = run.mesh
    shards = num_shards(mesh, *ROWS) * num_shards(mesh, CONTEXT)
    tokens = -(-stage.tokens_per_step // (stage.micro_batches * shards))
    width = run.model.hidden_size * jnp.dtype(run.model.dtype).itemsize
    return tokens * width * run.model.num_hidden_layers


def _check_fits(needed_bytes: int, message_start: str, advice: str) -> None:
    """Raises UserError if `needed_bytes` do not fit in the memory of a device."""
    limit, where = device_memory_peak_and_limit()[1], "a device"
    if jax.local_devices()[0].platform == "cpu":  # CPU devices share the memory of their host
        needed_bytes *= jax.local_device_count()
        limit, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    if limit is not None and needed_bytes > limit:
        raise UserError(
            f"{message_start} {format_bytes(needed_bytes)}, and {where} has {format_bytes(limit)}: "
            f"{advice}; qwen3next plan shows the memory of a step on each device of a topology"
        )


@contextlib.contextmanager
def reports_out_of_memory(get_stage: Callable[[], ResolvedStage]) -> Iterator[None]:
    """Turns XLA's out-of-memory error inside the `with` block into a UserError. The message of the
    UserError has XLA's message and the settings of the current stage, which the function
    `get_stage` returns.
    """
    try:
        yield
    except RuntimeError as error:
        if not (asked := out_of_memory_message(error)):
            raise
        train = get_stage().train
        raise UserError(
            f"out of memory ({asked}) with train.batch_size = {train.batch_size} rows of "
            f"{train.sequence_length} tokens in train.gradient_accumulation = "
            f"{train.gradient_accumulation} parts, train.remat = {train.remat!r}, on "
            f"{jax.device_count()} devices: try more parts, remat 'block', or more devices; "
            "qwen3next plan shows what a step needs"
        ) from error


def format_bytes(size: float) -> str:
    """Formats a size in bytes as kB, MB or GB."""
    if size < 1e5:
        return f"{size / 1e3:,.1f} kB"
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
