"""The least that a step on this mesh needs: products, bytes through HBM, and exchange, each at
its peak and all beside each other.

    ideal = max(products / peak, HBM bytes / bandwidth, bytes over each group of mesh axes /
    their links)

- products: the model's FLOPs (`model/flops.py`): nothing is computed again.
- HBM: of each weight as it is used, in the model's dtype, six passes (gathered for the forward
  and for the backward, read in both, its
  gradient written and read); of the state as it is stored seven passes in float32 (parameter and
  two moments there and back, the gradient); of each token's intermediate values in a layer
  (`layer_bytes`) four (written and read, gradients too).
- exchange: every weight gathered twice and its gradient scattered once, in the model's dtype;
  rows of tokens to their experts and back,
  forward and backward: to all shards up to `GATHERED_SHARDS`, beyond to those that hold one of
  the token's experts; over `tensor` four sums of a layer's rows. What `context` exchanges is
  left out.

Real products reach less than the peak: `realistic` takes 75 % of it for dense and 60 % for
grouped ones.
"""

import math
from typing import NamedTuple

import jax

from qwen3next_jax.config import ModelConfig, TrainConfig
from qwen3next_jax.model.expert_parallelism import GATHERED_SHARDS
from qwen3next_jax.model.flops import BACKWARD_OVER_FORWARD, forward_flops_per_token
from qwen3next_jax.model.language_model import declared
from qwen3next_jax.planner.compiled import Collective
from qwen3next_jax.planner.roofline import COMPUTE, HBM, Network
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.rules import EXPERT, TENSOR, axes_to_gather, storage_spec, compute_spec

DENSE_EFFICIENCY, GROUPED_EFFICIENCY = 0.75, 0.60  # realistic shares of the peak


class IdealTime(NamedTuple):
    """Seconds of one step. bound: of each thing it needs, longest first; seconds: the longest;
    realistic: so with products at DENSE and GROUPED.
    """

    seconds: float
    realistic: float
    bound: dict[str, float]


def ideal_time(
    m: ModelConfig, train: TrainConfig, topology: Topology, mesh: jax.sharding.Mesh
) -> IdealTime:
    """The bounds of a step of the model `m` with the batches of `train`."""
    chip = topology.chip
    tokens = train.batch_size * train.sequence_length / mesh.size * mesh.shape[TENSOR]
    passes = train.gradient_accumulation
    parts = {
        name: (1 + BACKWARD_OVER_FORWARD) * flops * tokens / mesh.shape[TENSOR] / chip.device_flops
        for name, flops in forward_flops_per_token(m, train.sequence_length).items()
    }
    compute, grouped = sum(parts.values()), parts.get("experts", 0.0)
    network, bound = Network(mesh, chip, topology.shape), {COMPUTE: compute}
    layers, rows = m.num_hidden_layers + m.mtp_depth, 2.0 * tokens * m.hidden_size

    def send(axes, kind, size, group):
        name = "network " + "+".join(axes)
        bound[name] = bound.get(name, 0.0) + network.seconds(
            Collective(kind, axes, group, size, 1), None
        )

    used = stored = 0.0
    for parameter in declared(m).values():
        shape = parameter.stack + parameter.shape
        storage, use = storage_spec(parameter, shape, mesh), compute_spec(parameter, shape, mesh)
        here = math.prod(jax.sharding.NamedSharding(mesh, storage).shard_shape(shape))
        stored += here
        for axis in (axis for axes in axes_to_gather(storage, use) for axis in reversed(axes)):
            send(
                (axis,),
                "all-gather",
                passes * 3 * 2.0 * here * (mesh.shape[axis] - 1),
                mesh.shape[axis],
            )
            here *= mesh.shape[axis]
        used += here
    n = mesh.shape[EXPERT]
    if m.has_experts and n > 1:
        e, a = m.num_experts, m.num_experts_per_tok
        visited = n * (1 - math.comb(e - e // n, a) / math.comb(e, a)) * (n - 1) / n
        to_all = n <= GATHERED_SHARDS
        send(
            (EXPERT,),
            "all-gather" if to_all else "all-to-all",
            4 * layers * rows * (n - 1 if to_all else visited),
            n,
        )
    if (n := mesh.shape[TENSOR]) > 1:
        send((TENSOR,), "all-reduce", 4 * layers * rows * 2 * (n - 1) / n, n)
    moved = (
        6 * 2 * used * passes
        + 7 * 4 * stored
        + 4 * layers * tokens * layer_bytes(m) / mesh.shape[TENSOR]
    )
    bound[HBM] = moved * chip.devices_per_chip / chip.hbm_bandwidth
    realistic = (compute - grouped) / DENSE_EFFICIENCY + grouped / GROUPED_EFFICIENCY
    bound = dict(sorted(bound.items(), key=lambda item: -item[1]))
    return IdealTime(max(bound.values()), max(realistic, *bound.values()), bound)


def layer_bytes(m: ModelConfig, experts: bool = True) -> float:
    """Of one token's intermediate values in a recurrent layer, in bfloat16: operands of every
    product, the experts' included.
    """
    mixer = 3 * (
        m.linear_num_key_heads * m.linear_key_head_dim
        + m.linear_num_value_heads * m.linear_value_head_dim
    )
    mlp = (
        m.num_experts_per_tok * (2 * m.hidden_size + 3 * m.moe_intermediate_size)
        if m.num_experts
        else 3 * m.intermediate_size
    )
    return 2 * (4 * m.hidden_size + 2 * mixer + mlp * experts)
