"""Which meshes, batches, remat policies and micro-batches to try on a slice: ranked by
arithmetic, before anything is compiled.

The arithmetic is rough (it leaves out what the compiler adds or saves) and only decides what is
worth a compile.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MESH_AXES, Config, MeshConfig, ModelConfig, TrainConfig
from qwen3next_jax.model import declared
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.model.expert_parallelism import GATHERED_SHARDS, overlap_chunks
from qwen3next_jax.model.flops import forward_flops_per_token, parameter_counts
from qwen3next_jax.planner.ideal import DENSE_EFFICIENCY, GROUPED_EFFICIENCY, layer_bytes
from qwen3next_jax.planner.planning import check_expert_exchange
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.mesh import check_divides, mesh_text

MICRO_BATCHES = (1, 2, 4, 8)
# tokens a device; rows are split over `context` where they are longer than this, or fewer than
# devices
LONG_ROWS = 32_768
# `train.remat` → share of the forward pass, without experts and heads, that the backward computes
# again.
RECOMPUTED = {"none": 0.0, "dots": 0.2, "block": 1.0, "offload": 1.0}
HIDDEN = 0.5  # of the network, beside compute (docs/pod_step.md)
# times that HBM moves what a layer scan keeps: out of its place into the stack, and back
STACKED = 4
# of one model for hundreds of candidates
_counts, _flops = functools.cache(parameter_counts), functools.cache(forward_flops_per_token)


class Candidate(NamedTuple):
    """A configuration with its estimated bytes of HBM and seconds a step on one device; `reason`
    where it is out.
    """

    config: Config
    bytes: float
    seconds: float
    reason: str

    @property
    def sizes(self) -> dict[str, int]:
        return dataclasses.asdict(self.config.parallel.mesh)

    @property
    def tokens(self) -> int:
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def label(self) -> str:
        t = self.config.train
        k = t.gradient_accumulation
        return (
            f"{mesh_text(self.sizes)}, {t.batch_size:,} rows, remat {t.remat}, {k} "
            f"micro-batch{'es' if k > 1 else ''}"
        )


def rank_candidates(
    config: Config,
    topology: Topology,
    fixed: Mapping[str, int] | None = None,
    rows: Sequence[int] = (),
) -> list[Candidate]:
    """Every mesh × rows a step × remat policy × micro-batches: those that should fit first,
    fastest for each token first, then the others, smallest first. Of those that should fit each
    mesh and number of rows has its fastest alone: compiles take minutes.

    Args:
      fixed: sizes of the axes that every mesh has alike. What `config` says of mesh, remat and
      micro-batches does not count. rows: to choose among; () leaves the configuration's.
    """
    found = []
    for batch in rows or (config.train.batch_size,):
        config = dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, batch_size=batch, gradient_accumulation=1),
        )
        meshes = _meshes(config.model, config.train, len(topology.devices), fixed or {})
        for mesh in meshes:
            tried = []
            for remat, k in itertools.product(RECOMPUTED, MICRO_BATCHES):
                if batch % k == 0:
                    train = dataclasses.replace(config.train, remat=remat, gradient_accumulation=k)
                    parallel = dataclasses.replace(config.parallel, mesh=mesh)
                    one = dataclasses.replace(config, train=train, parallel=parallel)
                    tried.append(Candidate(one, *_estimate(config.model, train, mesh, topology)))
            found += sorted((c for c in tried if not c.reason), key=lambda c: c.seconds)[:1] + [
                c for c in tried if c.reason
            ]
    return sorted(
        found, key=lambda c: (bool(c.reason), c.seconds / c.tokens if not c.reason else c.bytes)
    )


def _meshes(
    model: ModelConfig, train: TrainConfig, devices: int, fixed: Mapping[str, int]
) -> list[MeshConfig]:
    """Those of `devices`. Other axes than the first take powers of two: nothing else divides the
    heads.
    """
    powers = [2**i for i in range(devices.bit_length())]
    longest = max(-(-train.sequence_length // LONG_ROWS), -(-devices // train.batch_size))
    most = MeshConfig(
        expert=max(model.num_experts, 1),
        context=2 * longest - 1,
        tensor=model.num_attention_heads,
    )
    sizes = [
        [fixed[axis]] if axis in fixed else [n for n in powers if n <= getattr(most, axis)]
        for axis in MESH_AXES[1:]
    ]
    meshes = [
        MeshConfig(devices // math.prod(rest), *rest)
        for rest in itertools.product(*sizes)
        if devices % math.prod(rest) == 0
    ]
    return [
        mesh for mesh in meshes if all(getattr(mesh, axis) == size for axis, size in fixed.items())
    ]


def _estimate(
    model: ModelConfig, train: TrainConfig, mesh: MeshConfig, topology: Topology
) -> tuple[float, float, str]:
    """(bytes, seconds, reason) of a `Candidate`."""
    sizes = dataclasses.asdict(mesh)
    try:
        check_divides(
            model,
            train.batch_size // train.gradient_accumulation,
            train.sequence_length,
            AbstractMesh(tuple(sizes.values()), tuple(sizes)),
            *split_sizes(model),
        )
        check_expert_exchange(sizes, topology)
    except UserError as error:
        return float("inf"), float("inf"), str(error)
    size = estimated_bytes(model, train, mesh)
    seconds = estimated_seconds(model, train, mesh, topology)
    usable = topology.chip.usable_hbm
    reason = f"about {size / 2**30:.0f} GiB of {usable / 2**30:.0f} GiB" if size > usable else ""
    return size, seconds, reason


def estimated_bytes(m: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> float:
    """State, gradients, saved activations, the gathered embedding and head with their gradients,
    and the largest working set: a period's gathered weights and one layer's tokens.
    """
    devices = _devices(mesh)
    tokens = _micro_batch_tokens(train, mesh)
    # Float32: parameter, two moments, gradient; a second one where micro-batches add up.
    state = (16 + 4 * (train.gradient_accumulation > 1)) * _counts(m).total / devices
    # float32, split over `tensor`; bfloat16, whole
    ends = m.vocab_size * m.hidden_size * (8 / mesh.tensor + 4)
    saved = 0.0 if train.remat == "offload" else _kept(m, train, mesh)
    weights = 2 * _gathered(m, mesh) / m.num_hidden_layers * len(m.stacks)
    return state + saved + ends + 3 * weights + 2 * layer_bytes(m) * tokens


def _kept(m: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> float:
    """Bytes that the layers keep for the backward pass, wherever they lie."""
    remat = train.remat
    operands = layer_bytes(m, experts=False)
    # else the experts keep their input alone
    rows = 2 * m.hidden_size * mesh.expert * _at_once(m, train, mesh)
    attention = (
        2
        * m.num_attention_heads
        * m.head_dim
        * sum("attention" in name for name in m.mixers)
        / m.num_hidden_layers
    )
    per_token = {
        "none": operands + rows,
        "dots": operands / 2 + rows,
        "block": 2 * m.hidden_size + attention,
        "offload": 2 * m.hidden_size,
    }[remat]
    weights = 2 * _gathered(m, mesh) if remat == "none" and _devices(mesh) > 1 else 0
    return per_token * m.num_hidden_layers * _micro_batch_tokens(train, mesh) + weights


def _at_once(m: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> bool:
    """Whether the experts gather all rows of a micro-batch at once, and so may keep them."""
    n = mesh.expert
    tokens = int(_micro_batch_tokens(train, mesh))
    return (
        m.has_experts
        and 1 < n <= GATHERED_SHARDS
        and overlap_chunks(tokens, m.num_experts_per_tok, m.num_experts // n) == 1
    )


def estimated_seconds(
    m: ModelConfig, train: TrainConfig, mesh: MeshConfig, topology: Topology
) -> float:
    """Products at realistic rates, what is kept there and back, and the part of the network that
    is not hidden, with one torus dimension an axis.
    """
    chip = topology.chip
    devices = _devices(mesh)
    tokens = _micro_batch_tokens(train, mesh)
    k = train.gradient_accumulation
    parts = _flops(m, train.sequence_length)
    grouped, heads = parts.get("experts", 0.0), parts["head"]
    dense = sum(parts.values()) - grouped
    passes = 3 + (k > 1)  # the load is counted first
    products = (
        dense * passes + RECOMPUTED[train.remat] * (dense - heads)
    ) / DENSE_EFFICIENCY + grouped * passes / GROUPED_EFFICIENCY
    compute = products * tokens * k / mesh.tensor / chip.device_flops
    moved = k * STACKED * _kept(m, train, mesh) / (chip.hbm_bandwidth / chip.devices_per_chip)
    # gathered for each pass, gradients once, in bfloat16
    weights = k * 2 * _gathered(m, mesh) * (2 if train.remat == "none" else 3)
    layers, residual = m.num_hidden_layers, 2 * m.hidden_size * tokens * k
    exchanges = 5 - (train.remat in ("none", "dots") and _at_once(m, train, mesh))
    experts = exchanges * layers * residual * (mesh.expert - 1) if m.has_experts else 0
    split = 8 * layers * residual * (mesh.tensor - 1) / mesh.tensor
    network = (
        (weights + experts + split) / (2 * chip.link_bandwidth / chip.devices_per_chip)
        if devices > 1
        else 0.0
    )
    return max(compute + moved + (1 - HIDDEN) * network, network)


def _devices(mesh: MeshConfig) -> int:
    return math.prod(dataclasses.astuple(mesh))


def _micro_batch_tokens(train: TrainConfig, mesh: MeshConfig) -> float:
    """Of one device in one micro-batch."""
    return (
        train.batch_size
        * train.sequence_length
        / train.gradient_accumulation
        / (_devices(mesh) / mesh.tensor)
    )


def _gathered(m: ModelConfig, mesh: MeshConfig) -> float:
    """Parameters that one device gathers in a pass: experts stay split over `expert`, everything
    over `tensor`.
    """
    experts = _expert_weights(m)
    return (_counts(m).total - experts + experts / mesh.expert) / mesh.tensor


@functools.cache
def _expert_weights(m: ModelConfig) -> int:
    return sum(p.size for p in declared(m).values() if p.experts > 1)
