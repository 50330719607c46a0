"""Which meshes, remat policies and micro-batches to try on a slice: ranked by arithmetic, before anything is compiled.

The arithmetic is rough (it leaves out what the compiler adds or saves) and only decides what is worth a compile.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh

from qwen3next_jax.config import MESH_AXES, Config, MeshConfig, ModelConfig
from qwen3next_jax.errors import UserError
from qwen3next_jax.model import declared
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.model.flops import flops_per_token, parameter_counts
from qwen3next_jax.parallel.mesh import check_divides, mesh_text
from qwen3next_jax.planner.ideal import layer_bytes
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.planner.planning import check_exchange

MICRO_BATCHES = (1, 2, 4, 8)
LONG_ROWS = 32_768  # tokens a device; rows are split over `context` where they are longer than this, or fewer than devices
# `train.remat` → share of the forward pass that the backward computes again.
RECOMPUTED = {"none": 0.0, "dots": 0.6, "block": 1.0, "offload": 1.0}
_counts = functools.cache(parameter_counts)  # of one model for hundreds of candidates


class Candidate(NamedTuple):
    """A configuration with its estimated bytes of HBM and seconds a step on one device; `reason` where it is out."""

    config: Config
    bytes: float
    seconds: float
    reason: str

    @property
    def sizes(self) -> dict[str, int]:
        return dataclasses.asdict(self.config.parallel.mesh)

    @property
    def label(self) -> str:
        k = self.config.train.gradient_accumulation
        return f"{mesh_text(self.sizes)}, remat {self.config.train.remat}, {k} micro-batch{'es' if k > 1 else ''}"


def candidates(config: Config, topology: Topology, fixed: Mapping[str, int] | None = None) -> list[Candidate]:
    """Every mesh × remat policy × micro-batches: those that should fit first, fastest first, then the others, smallest first.

    Args:
      fixed: sizes of the axes that every mesh has alike. What `config` says of mesh, remat and micro-batches does not count.
    """
    found = []
    for mesh in _meshes(config, len(topology.devices), fixed or {}):
        for remat, k in itertools.product(RECOMPUTED, MICRO_BATCHES):
            if config.train.batch_size % k:
                continue
            train = dataclasses.replace(config.train, remat=remat, gradient_accumulation=k)
            tried = dataclasses.replace(config, train=train, parallel=dataclasses.replace(config.parallel, mesh=mesh))
            found.append(_judge(tried, topology))
    return sorted(found, key=lambda c: (bool(c.reason), c.seconds if not c.reason else c.bytes))


def _meshes(config: Config, devices: int, fixed: Mapping[str, int]) -> list[MeshConfig]:
    """Those of `devices`. Other axes than the first take powers of two: nothing else divides the heads."""
    powers = [2**i for i in range(devices.bit_length())]
    longest = max(-(-config.train.sequence_length // LONG_ROWS), -(-devices // config.train.batch_size))
    most = MeshConfig(expert=max(config.model.num_experts, 1), context=2 * longest - 1, tensor=config.model.num_attention_heads)
    sizes = [[fixed[axis]] if axis in fixed else [n for n in powers if n <= getattr(most, axis)] for axis in MESH_AXES[1:]]
    meshes = [MeshConfig(devices // math.prod(rest), *rest) for rest in itertools.product(*sizes) if devices % math.prod(rest) == 0]
    return [mesh for mesh in meshes if all(getattr(mesh, axis) == size for axis, size in fixed.items())]


def _judge(config: Config, topology: Topology) -> Candidate:
    sizes = dataclasses.asdict(config.parallel.mesh)
    try:
        check_divides(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)), *split_sizes(config.model))
        check_exchange(sizes, topology)
    except UserError as error:
        return Candidate(config, float("inf"), float("inf"), str(error))
    size, seconds = estimated_bytes(config), estimated_seconds(config, topology)
    usable = topology.chip.usable_hbm
    reason = f"about {size / 2**30:.0f} GiB of {usable / 2**30:.0f} GiB" if size > usable else ""
    return Candidate(config, size, seconds, reason)


def estimated_bytes(config: Config) -> float:
    """State, gradients, saved activations, the gathered embedding and head with their gradients, and the largest working set:
    a period's gathered weights and one layer's tokens."""
    m, train, mesh = config.model, config.train, config.parallel.mesh
    devices, tokens = _devices(mesh), _micro_batch_tokens(config)
    # Float32: parameter, two moments, gradient; a second one where micro-batches add up.
    state = (16 + 4 * (train.gradient_accumulation > 1)) * _counts(m).total / devices
    ends = m.vocab_size * m.hidden_size * (8 / mesh.tensor + 4)  # float32, split over `tensor`; bfloat16, whole
    per_layer = {"none": layer_bytes(m), "dots": layer_bytes(m, experts=False), "block": 2 * m.hidden_size, "offload": 0}
    saved = per_layer[train.remat] * m.num_hidden_layers * tokens
    weights = 2 * _gathered(m, mesh) / m.num_hidden_layers * len(m.stacks)
    return state + saved + ends + 3 * weights + 2 * layer_bytes(m) * tokens


def estimated_seconds(config: Config, topology: Topology) -> float:
    """The longer of arithmetic at the peak and of the network with one torus dimension an axis; nothing overlaps there."""
    m, train, mesh, chip = config.model, config.train, config.parallel.mesh, topology.chip
    devices, tokens, k = _devices(mesh), _micro_batch_tokens(config), train.gradient_accumulation
    passes = 3 + RECOMPUTED[train.remat] + (k > 1)  # of three: recomputation; the load that is counted first
    compute = flops_per_token(m, train.sequence_length) * tokens * k * passes / 3 / chip.device_flops
    weights = k * 8 * _gathered(m, mesh)  # gathered twice in bfloat16, gradients once in float32
    layers, residual = m.num_hidden_layers, 2 * m.hidden_size * tokens * k
    experts = 8 * layers * residual * (mesh.expert - 1) if m.has_experts else 0
    heads = 8 * layers * residual * (mesh.tensor - 1) / mesh.tensor
    network = (weights + experts + heads) / (2 * chip.link_bandwidth / chip.devices_per_chip) if devices > 1 else 0.0
    return max(compute, network)


def _devices(mesh: MeshConfig) -> int:
    return math.prod(dataclasses.astuple(mesh))


def _micro_batch_tokens(config: Config) -> float:
    """Of one device in one micro-batch."""
    train, mesh = config.train, config.parallel.mesh
    return train.batch_size * train.sequence_length / train.gradient_accumulation / (_devices(mesh) / mesh.tensor)


def _gathered(m: ModelConfig, mesh: MeshConfig) -> float:
    """Parameters that one device gathers in a pass: experts stay split over `expert`, everything over `tensor`."""
    experts = _expert_weights(m)
    return (_counts(m).total - experts + experts / mesh.expert) / mesh.tensor


@functools.cache
def _expert_weights(m: ModelConfig) -> int:
    return sum(p.size for p in declared(m).values() if p.experts > 1)
