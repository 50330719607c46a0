"""Predicts the traffic between TPU slices: the bytes that a chip sends, the time that they take,
and the smallest batch whose backward pass is long enough to hide this time.

    replicated state:  an all-reduce of the gradients, 2 (S - 1)/S · n · b bytes
    sharded state:     a reduce-scatter of the gradients and an all-gather of the updates,
                       (S - 1)/S · n · (b + 4) bytes

Here S is the number of slices, n the number of parameters that a device stores, and b the bytes of
one number in the dtype `parallel.slice_gradients`. The bytes do not depend on the batch size; the
time of the backward pass is proportional to the batch size.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.model.flops import BACKWARD_OVER_FORWARD, forward_flops_per_token
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.chips import CHIPS, Chip
from qwen3next_jax.sharding.rules import ROWS, SLICE, TENSOR

# the shares of the peak that dense products, and grouped products of experts, realistically reach
DENSE_EFFICIENCY, GROUPED_EFFICIENCY = 0.75, 0.60


class SliceTraffic(NamedTuple):
    """The traffic between slices in one step, for one device. (In the planner's JSON, the fields
    have the same names.)

    Attributes:
      bytes: the bytes that leave the device.
      seconds: the time that these bytes take at the peak rate of the network between slices.
      hidden_from_rows: the smallest number of rows of a batch with which the backward pass of the
        last micro-batch takes as long as this traffic, at realistic rates of its products.
    """

    bytes: float
    seconds: float
    hidden_from_rows: int


def bytes_between_slices(stored: float, slices: int, parallel: ParallelConfig) -> float:
    """Returns the bytes that a device sends to other slices in a step.

    Args:
      stored: number of parameters that the device stores.
      slices: number of slices.
    """
    gradient = jnp.dtype(parallel.slice_gradients).itemsize
    both_ways = gradient + (4 if parallel.slice_state == "sharded" else gradient)
    return (slices - 1) / slices * stored * both_ways


def seconds_between_slices(sent: float, chip: Chip) -> float:
    """Returns the seconds in which a device sends `sent` bytes to other slices.

    Raises:
      UserError: the bandwidth between slices of this chip is not known.
    """
    if not chip.inter_slice_bandwidth:
        known = ", ".join(name for name, c in CHIPS.items() if c.inter_slice_bandwidth)
        raise UserError(
            f"--slices: the bandwidth between slices of {chip.name} is not published: expected one "
            f"of {known}"
        )
    return sent * chip.devices_per_chip / chip.inter_slice_bandwidth


def predict_slice_traffic(
    model: ModelConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    topology: Topology,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    stored: float,
) -> SliceTraffic:
    """Returns the traffic between the slices of `mesh`.

    Args:
      stored: number of parameters that a device stores.
    """
    sent = bytes_between_slices(stored, mesh.shape[SLICE], parallel)
    seconds = seconds_between_slices(sent, topology.chip)
    flops = forward_flops_per_token(model, train.sequence_length)
    grouped = flops.get("experts", 0.0)
    dense = sum(flops.values()) - grouped
    token_seconds = (
        BACKWARD_OVER_FORWARD
        * (dense / DENSE_EFFICIENCY + grouped / GROUPED_EFFICIENCY)
        / mesh.shape[TENSOR]
        / topology.chip.device_flops
    )
    tokens = seconds / token_seconds * mesh.size / mesh.shape[TENSOR]
    rows = tokens / train.sequence_length * train.gradient_accumulation
    step = math.prod(mesh.shape[axis] for axis in ROWS) * train.gradient_accumulation
    return SliceTraffic(sent, seconds, math.ceil(rows / step) * step)
