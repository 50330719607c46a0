"""Computes a lower bound of the time of a step on a mesh. The bound assumes that matrix products,
HBM traffic and network traffic all run at their peak rates, and all at the same time.

    ideal = max(products / peak, HBM bytes / bandwidth, bytes over the links / their bandwidth)

Mesh axes that lie along the same dimension of the torus share its links; their times add up.

- Products: the FLOPs of the model's forward and backward pass (`model/flops.py`), without
  recomputation.
- HBM, weights: in each micro-batch, every gathered weight is read or written six times, in
  bfloat16. The forward and the backward pass each write the weight (when it is gathered) and read
  it, and the gradient of the weight is written and read.
- HBM, state: for every parameter in the device's shards, seven float32 numbers are read or written.
  The parameter and the optimizer's two moments are read and written, and the gradient is read.
- HBM, activations: the intermediate values of each token in a layer
  (`intermediate_bytes_per_token`) and their gradients are all written once and read once.
- Network, weights: in each micro-batch, every weight is gathered twice and its gradient is
  reduce-scattered once, in bfloat16.
- Network, experts: each token's hidden vector is sent to the experts and back, in the forward and
  in the backward pass. With up to `GATHERED_SHARDS` shards of the axis `expert`, the vector is sent
  to all shards; with more, only to the shards that hold one of the token's experts.
- Network, `tensor`: four all-reduces of the hidden vectors in each layer.
- Network, `slice`: what slices exchange once a step (`planner/between_slices.py`).
- The traffic over the mesh axis `context` is not counted.

Nothing reaches its peak rate. `IdealTime.realistic` is the same maximum at the rates that chips
were measured to reach with large operands (`calibrated.RATES`); a good step takes little more time.
"""

import math
from typing import NamedTuple

import jax

from qwen3next_jax.config import ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.model.expert_parallelism import GATHERED_SHARDS
from qwen3next_jax.model.flops import BACKWARD_OVER_FORWARD, forward_flops_per_token
from qwen3next_jax.model.language_model import parameter_declarations
from qwen3next_jax.planner.between_slices import bytes_between_slices, seconds_between_slices
from qwen3next_jax.planner.calibrated import busiest_link_seconds, rates_of_chip
from qwen3next_jax.planner.compiled import Collective
from qwen3next_jax.planner.roofline import COMPUTE, HBM, Network
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.rules import (
    EXPERT,
    SLICE,
    TENSOR,
    axes_to_gather,
    compute_spec,
    storage_spec,
)

# a size in FLOPs or bytes beyond every measured one, at which a chip reaches its highest rate
_LARGE = 1e18
SHARED_LINKS = "network, shared links"


class IdealTime(NamedTuple):
    """Lower bounds of the time of a step. (In the planner's JSON, the fields have the same names.)

    Attributes:
      seconds: the largest value of `bound`, a lower bound of the step's time.
      realistic: a lower bound in seconds at rates that chips were measured to reach.
      bound: {resource: seconds}, longest first. A resource is "compute", "hbm", or "network" with a
        mesh axis. If mesh axes share links, `bound` also has "network, shared links", the time for
        which the busiest links are needed.
    """

    seconds: float
    realistic: float
    bound: dict[str, float]


def ideal_time(
    model: ModelConfig,
    train: TrainConfig,
    topology: Topology,
    mesh: jax.sharding.Mesh,
    parallel: ParallelConfig = ParallelConfig(),
) -> IdealTime:
    """Returns the lower bounds for a train step of `model` on `mesh`, with the batch size
    and the micro-batches of `train`. `parallel` says what slices exchange.
    """
    chip = topology.chip
    tokens = train.batch_size * train.sequence_length / mesh.size * mesh.shape[TENSOR]
    passes = train.gradient_accumulation
    products = {
        name: (1 + BACKWARD_OVER_FORWARD) * flops * tokens / mesh.shape[TENSOR] / chip.device_flops
        for name, flops in forward_flops_per_token(model, train.sequence_length).items()
    }
    compute = sum(products.values())
    network, bound = Network(mesh, chip, topology.shape), {COMPUTE: compute}

    def add_collective(axis: str, kind: str, size: float):
        name = f"network {axis}"
        collective = Collective(kind, (axis,), mesh.shape[axis], size, 1)
        bound[name] = bound.get(name, 0.0) + network.collective_seconds(collective, None)

    # `stored` is the number of parameters in one device's shards; `used` is the number that the
    # device has after gathering them.
    used = stored = 0.0
    for parameter in parameter_declarations(model).values():
        shape = parameter.stack_shape + parameter.shape
        storage, use = storage_spec(parameter, shape, mesh), compute_spec(parameter, shape, mesh)
        size = math.prod(jax.sharding.NamedSharding(mesh, storage).shard_shape(shape))
        stored += size
        for axes in axes_to_gather(storage, use):
            for axis in reversed(axes):
                n = mesh.shape[axis]
                add_collective(axis, "all-gather", passes * 3 * 2.0 * size * (n - 1))
                size *= n
        used += size
    layers, hidden = model.num_hidden_layers + model.mtp_depth, 2.0 * tokens * model.hidden_size
    if model.has_experts and mesh.shape[EXPERT] > 1:
        add_collective(
            EXPERT, *_expert_exchange_collective(model, mesh.shape[EXPERT], 4 * layers * hidden)
        )
    if (n := mesh.shape[TENSOR]) > 1:
        add_collective(TENSOR, "all-reduce", 4 * layers * hidden * 2 * (n - 1) / n)
    if (n := mesh.shape[SLICE]) > 1:
        bound[f"network {SLICE}"] = seconds_between_slices(
            bytes_between_slices(stored, n, parallel), chip
        )
    moved = (
        6 * 2 * used * passes
        + 7 * 4 * stored
        + 4 * layers * tokens * intermediate_bytes_per_token(model) / mesh.shape[TENSOR]
    )
    bound[HBM] = moved * chip.devices_per_chip / chip.hbm_bandwidth
    over = {
        (axis,): bound[f"network {axis}"] for axis in mesh.axis_names if f"network {axis}" in bound
    }
    links = busiest_link_seconds(network, over)
    if links > max(over.values(), default=0.0):
        bound[SHARED_LINKS] = links
    rates = rates_of_chip(chip)
    realistic = max(
        compute * chip.device_flops * rates.product_curve.seconds(_LARGE) / _LARGE,
        bound[HBM]
        * chip.hbm_bandwidth
        / chip.devices_per_chip
        * rates.hbm_curve.seconds(_LARGE)
        / _LARGE,
        links / rates.reached_link_share,
    )
    bound = dict(sorted(bound.items(), key=lambda item: -item[1]))
    return IdealTime(max(bound.values()), realistic, bound)


def _expert_exchange_collective(model: ModelConfig, shards: int, size: float) -> tuple[str, float]:
    """Returns the kind of collective that carries a device's hidden vectors, `size` bytes, to the
    shards of the axis `expert`, and the bytes that leave the device.
    """
    if shards <= GATHERED_SHARDS:
        return "all-gather", size * (shards - 1)
    # the expected number of other shards that hold one of a token's experts
    experts, chosen = model.num_experts, model.num_experts_per_tok
    missed = math.comb(experts - experts // shards, chosen) / math.comb(experts, chosen)
    return "all-to-all", size * (shards * (1 - missed) * (shards - 1) / shards)


def intermediate_bytes_per_token(model: ModelConfig, experts: bool = True) -> float:
    """Returns the bytes, in bfloat16, of one token's intermediate values in a recurrent layer. The
    intermediate values are the operands of all matrix products.

    Args:
      model: the model.
      experts: whether to count the operands of the MLP, or of the experts that replace the MLP.
    """
    mixer = 3 * (
        model.linear_num_key_heads * model.linear_key_head_dim
        + model.linear_num_value_heads * model.linear_value_head_dim
    )
    mlp = 0
    if experts:
        mlp = 3 * model.intermediate_size
        if model.num_experts:
            mlp = model.num_experts_per_tok * (
                2 * model.hidden_size + 3 * model.moe_intermediate_size
            )
    return 2 * (4 * model.hidden_size + 2 * mixer + mlp)
