"""Ranks combinations of mesh, batch size, remat policy and number of micro-batches for a slice by
formulas, before anything is compiled.

The formulas are rough: they leave out what the compiler adds or saves. The ranking only decides
which combinations are worth compiling.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import (
    MESH_AXES,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.expert_parallelism import (
    CAPACITY_FACTOR,
    GATHERED_SHARDS,
    overlap_chunk_count,
)
from qwen3next_jax.model.flops import forward_flops_per_token, parameter_counts
from qwen3next_jax.model.layer_properties import mesh_requirements
from qwen3next_jax.model.remat import keeps_expert_hidden
from qwen3next_jax.planner.between_slices import (
    DENSE_EFFICIENCY,
    GROUPED_EFFICIENCY,
    bytes_between_slices,
    seconds_between_slices,
)
from qwen3next_jax.planner.calibrated import busiest_link_seconds, rates_of_chip
from qwen3next_jax.planner.compiled import Collective
from qwen3next_jax.planner.ideal import intermediate_bytes_per_token
from qwen3next_jax.planner.planning import check_expert_exchange_supported
from qwen3next_jax.planner.roofline import Network
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.mesh import check_mesh_divides, make_mesh, mesh_text

MICRO_BATCHES = (1, 2, 4, 8)
# The collectives of one layer in a pass over one micro-batch: the released model's step of 48
# layers has 2,592.
COLLECTIVES_PER_LAYER = 54
EXPERT_SIZES = (1, 2, 4, 8)  # 1: FSDP alone
# The search considers meshes that split rows over the axis `context` if rows have more tokens than
# this, or if there are fewer rows than devices.
LONG_ROWS = 32_768
# {value of `train.remat`: the share of the forward pass that the backward pass computes again}. The
# FLOPs of the experts and of the heads do not count in this share. The last two also compute
# attention again, for which a tenth stands.
RECOMPUTED = {
    "none": 0.0,
    "dots keep=experts": 0.2,
    "dots": 0.2,
    "block": 1.0,
    "keep=router": 1.1,
    "offload": 1.1,
}
# The share of the network's time that overlaps with compute (docs/notes/planner.md).
OVERLAPPED = 0.5
# The share of an expert's forward FLOPs that its backward pass computes again, unless the remat
# policy keeps the hidden layer: gate and up, two of the three products.
EXPERTS_RECOMPUTED = 2 / 3
# Muon holds this many float32 copies of the matrices while it updates them: the momentum that it
# orthogonalises, the stacks of matrices before and after they move to other devices, and the
# iterations' result.
MUON_COPIES = 4
# How often a saved activation is read from or written to HBM. The scan over layers reads and writes
# it once when it stores it in the array of all layers, and once when it takes it out.
STACK_MOVES = 4
# The results are cached, because hundreds of candidates have the same model.
_counts, _flops = functools.cache(parameter_counts), functools.cache(forward_flops_per_token)


class Candidate(NamedTuple):
    """A choice of mesh, batch size, remat policy and number of micro-batches, with its estimated
    cost.

    Attributes:
      train: the training settings with the chosen batch size, remat policy and micro-batches.
      mesh: the chosen mesh.
      hbm_bytes: estimated bytes of HBM that one device needs; infinite if the mesh does not divide
        the model or the batch, or needs a collective that the compiler lacks.
      step_seconds: estimated seconds of a step; infinite if `hbm_bytes` is.
      unusable_reason: why the candidate cannot be used; "" if it can.
    """

    train: TrainConfig
    mesh: MeshConfig
    hbm_bytes: float
    step_seconds: float
    unusable_reason: str

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """{mesh axis: size}."""
        return dataclasses.asdict(self.mesh)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens of one step on all devices."""
        return self.train.batch_size * self.train.sequence_length

    @property
    def description(self) -> str:
        """A line of text that describes the candidate."""
        t = self.train
        k = t.gradient_accumulation
        return (
            f"{mesh_text(self.mesh_sizes)}, {t.batch_size:,} rows, remat {t.remat}, {k} "
            f"micro-batch{'es' if k > 1 else ''}"
        )


def rank_candidates(
    model: ModelConfig,
    train: TrainConfig,
    topology: Topology,
    fixed: Mapping[str, int] | None = None,
    batch_sizes: Sequence[int] = (),
    parallel: ParallelConfig = ParallelConfig(),
    optimizer: OptimizerConfig = OptimizerConfig(),
) -> list[Candidate]:
    """Ranks every combination of mesh, batch size, remat policy and number of micro-batches.

    The list begins with the candidates that should fit in memory, sorted by seconds per token. Of
    the fitting candidates with the same mesh and batch size, the list has only the fastest, because
    each compilation takes minutes. All candidates that should not fit follow, sorted by bytes.

    Args:
      model: the model.
      train: the training settings; each candidate replaces the batch size, the remat policy and the
        number of micro-batches.
      topology: the devices.
      fixed: mesh axis → size that this axis has in all candidates; None means that no axis is
        fixed.
      parallel: what slices exchange, and whether they share the optimizer's state; its mesh is
        ignored.
      batch_sizes: batch sizes to choose from; () means the batch size of `train`.
      optimizer: the optimizer, whose state takes memory.
    """
    found = []
    for batch in batch_sizes or (train.batch_size,):
        train_of_batch = dataclasses.replace(train, batch_size=batch, gradient_accumulation=1)
        for mesh in _possible_meshes(model, train_of_batch, topology, fixed or {}):
            tried = []
            for remat, micro_batches in itertools.product(RECOMPUTED, MICRO_BATCHES):
                if batch % micro_batches:
                    continue
                settings = dataclasses.replace(
                    train_of_batch, remat=remat, gradient_accumulation=micro_batches
                )
                estimate = _estimate_candidate(model, settings, mesh, topology, parallel, optimizer)
                tried.append(Candidate(settings, mesh, *estimate))
            fitting = [c for c in tried if not c.unusable_reason]
            found += sorted(fitting, key=lambda c: c.step_seconds)[:1]
            found += [c for c in tried if c.unusable_reason]
    fitting = sorted(
        (c for c in found if not c.unusable_reason),
        key=lambda c: c.step_seconds / c.tokens_per_step,
    )
    return fitting + sorted((c for c in found if c.unusable_reason), key=lambda c: c.hbm_bytes)


def candidates_to_compile(fitting: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns the candidates that a search compiles, at most `count`, in the order of `fitting`.
    For each size of the axis `expert` in EXPERT_SIZES, the function takes the first candidate
    without tensor parallelism, and then the first of the remaining candidates. The formulas are too
    rough to decide between expert parallelism and FSDP alone.
    """
    first: dict[int, int] = {}
    for i, candidate in enumerate(fitting):
        if candidate.mesh.tensor == 1:
            first.setdefault(candidate.mesh.expert, i)
    taken = [first[size] for size in EXPERT_SIZES if size in first][:count]
    others = [i for i in range(len(fitting)) if i not in taken]
    return [fitting[i] for i in sorted(taken + others[: count - len(taken)])]


def _possible_meshes(
    model: ModelConfig, train: TrainConfig, topology: Topology, fixed: Mapping[str, int]
) -> list[MeshConfig]:
    """Returns the meshes of the topology's devices in which the axes of `fixed` have the given
    sizes. An axis that is neither in `fixed` nor `data` gets powers of two, because other sizes
    rarely divide the heads. `data` takes the remaining devices.
    """
    slices = fixed.get("slice") or topology.slices
    devices = len(topology.devices) // slices
    powers = [2**i for i in range(devices.bit_length())]
    shards_needed = max(
        -(-train.sequence_length // LONG_ROWS), -(-len(topology.devices) // train.batch_size)
    )
    largest = MeshConfig(
        expert=max(model.num_experts, 1),
        context=2 * shards_needed - 1,
        tensor=model.num_attention_heads,
    )
    sizes = [
        [fixed[axis]] if axis in fixed else [n for n in powers if n <= getattr(largest, axis)]
        for axis in MESH_AXES[2:]
    ]
    meshes = [
        MeshConfig(slices, devices // math.prod(rest), *rest)
        for rest in itertools.product(*sizes)
        if devices % math.prod(rest) == 0
    ]
    fixed_sizes = {**fixed, "slice": slices}.items()
    return [mesh for mesh in meshes if dataclasses.asdict(mesh).items() >= fixed_sizes]


def _estimate_candidate(
    model: ModelConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    topology: Topology,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
) -> tuple[float, float, str]:
    """Returns (bytes, seconds, reason) of a `Candidate`."""
    sizes = dataclasses.asdict(mesh)
    try:
        check_mesh_divides(
            model,
            train.batch_size // train.gradient_accumulation,
            train.sequence_length,
            AbstractMesh(tuple(sizes.values()), tuple(sizes)),
            *mesh_requirements(model),
        )
        check_expert_exchange_supported(sizes, topology)
    except UserError as error:
        return float("inf"), float("inf"), str(error)
    size = estimated_hbm_bytes(model, train, mesh, parallel, optimizer)
    seconds = estimated_step_seconds(model, train, mesh, topology)
    if mesh.slice > 1:
        # The estimate assumes that nothing overlaps with this.
        sent = bytes_between_slices(_stored_parameters(model, mesh), mesh.slice, parallel)
        seconds += seconds_between_slices(sent, topology.chip)
    usable = topology.chip.usable_hbm_per_device
    reason = f"about {size / 2**30:.0f} GiB of {usable / 2**30:.0f} GiB" if size > usable else ""
    return size, seconds, reason


def estimated_hbm_bytes(
    model: ModelConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    parallel: ParallelConfig = ParallelConfig(),
    optimizer: OptimizerConfig = OptimizerConfig(),
) -> float:
    """Returns the estimated bytes of HBM that one device needs: the bytes of the parameters, the
    optimizer's state and the gradients, plus the temporary bytes of the forward and backward pass
    or of the update with Muon, whichever are more. The forward and backward pass needs the saved
    activations; the gathered embedding and head with their gradients; and the arrays that are
    needed while one period of layers is computed, which are its gathered weights and the
    activations of one layer.
    """
    tokens = _micro_batch_tokens(train, mesh)
    in_moments, in_update = _optimizer_bytes_per_parameter(model, optimizer)
    # The parameter, the optimizer's moments, the gradient, and, with several
    # micro-batches, the sum of the gradients.
    moments = in_moments / (mesh.slice if parallel.slice_state == "sharded" else 1)
    sum_of_gradients = 4 if train.gradient_accumulation > 1 else 0
    state = (8 + moments + sum_of_gradients) * _stored_parameters(model, mesh)
    # Two copies in float32 that are split over the axis `tensor`, and two copies in bfloat16 that
    # are not split.
    embedding_and_head = model.vocab_size * model.hidden_size * (8 / mesh.tensor + 4)
    saved = 0.0 if train.remat == "offload" else _saved_activation_bytes(model, train, mesh)
    weights = (
        2 * _gathered_parameters(model, mesh) / model.num_hidden_layers * len(model.layer_stacks)
    )
    one_pass = (
        saved + embedding_and_head + 3 * weights + 2 * intermediate_bytes_per_token(model) * tokens
    )
    return state + max(one_pass, in_update * _stored_parameters(model, mesh))


@functools.cache
def _optimizer_bytes_per_parameter(
    model: ModelConfig, optimizer: OptimizerConfig
) -> tuple[float, float]:
    """Returns two averages over the model, in bytes per parameter: the bytes that an optimizer
    keeps (its moments), and the temporary bytes of its update. AdamW has two moments: the mean of
    the gradients and the mean of their squares. Muon has the first moment for each matrix, and both
    moments for all other parameters.
    """
    mean = 2.0 if optimizer.mean_dtype == "bfloat16" else 4.0
    if optimizer.name != "muon":
        return 4.0 + mean, 0.0
    matrices = sum(p.size for p in parameter_declarations(model).values() if p.kind == "matrix")
    share = matrices / _counts(model).total
    return mean + 4.0 * (1 - share), 4.0 * MUON_COPIES * share


def _saved_activation_bytes(model: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> float:
    """Returns the bytes that the layers save for the backward pass, in HBM or in the host's
    memory.
    """
    remat = train.remat
    operands = intermediate_bytes_per_token(
        model, experts=False
    )  # of a token in one layer, without its MLP
    # The gathered rows are saved only if the experts gather all rows at once.
    rows = 2 * model.hidden_size * mesh.expert * _gathers_all_rows_at_once(model, train, mesh)
    # Gate and up of every row for which the experts have room.
    width = 2 * model.moe_intermediate_size * model.num_experts_per_tok if model.has_experts else 0
    hidden = 2 * width * CAPACITY_FACTOR / mesh.tensor
    attention_layers = sum("attention" in name for name in model.mixers)
    attention = (
        2 * model.num_attention_heads * model.head_dim * attention_layers / model.num_hidden_layers
    )
    per_token = {
        "none": operands + rows + hidden,
        "dots keep=experts": operands / 2 + rows + hidden,
        "dots": operands / 2 + rows,
        "block": 2 * model.hidden_size + attention,
        "keep=router": 2 * model.hidden_size,  # what the router saves is some percent of that
        "offload": 2 * model.hidden_size,
    }[remat]
    weights = (
        2 * _gathered_parameters(model, mesh) if remat == "none" and _device_count(mesh) > 1 else 0
    )
    return per_token * model.num_hidden_layers * _micro_batch_tokens(train, mesh) + weights


def _gathers_all_rows_at_once(model: ModelConfig, train: TrainConfig, mesh: MeshConfig) -> bool:
    """Returns whether each device gathers the rows of all shards of the axis `expert` at once, not
    in chunks. A remat policy can save the gathered rows only if the result is True. Returns False
    if there is nothing to gather.
    """
    n = mesh.expert
    tokens = int(_micro_batch_tokens(train, mesh))
    return (
        model.has_experts
        and 1 < n <= GATHERED_SHARDS
        and overlap_chunk_count(tokens, model.num_experts_per_tok, model.num_experts // n) == 1
    )


def estimated_step_seconds(
    model: ModelConfig, train: TrainConfig, mesh: MeshConfig, topology: Topology
) -> float:
    """Returns the estimated seconds of a step. The estimate is the sum of three times: the time of
    the matrix products at realistic rates, the time of writing and reading the saved activations
    (with "offload" also on the link from the host, because the backward pass waits for a layer's
    input), and the time of the network traffic that does not overlap with compute. If the time of
    all network traffic is longer than the sum of the three times, the estimate is the time of all
    network traffic. Traffic takes the links that the mesh axes have on the torus
    (`roofline.Network`); axes that lie along the same dimension share its links.
    """
    chip = topology.chip
    tokens = _micro_batch_tokens(train, mesh)
    micro_batches = train.gradient_accumulation
    flops = _flops(model, train.sequence_length)
    grouped, heads = flops.get("experts", 0.0), flops["head"]
    dense = sum(flops.values()) - grouped
    # With several micro-batches, the step begins with one more forward pass, which counts the
    # tokens of each expert.
    passes = 4 if micro_batches > 1 else 3
    recomputed = RECOMPUTED[train.remat] * (dense - heads)
    products = (dense * passes + recomputed) / DENSE_EFFICIENCY
    expert_passes = passes + (0 if keeps_expert_hidden(train.remat) else EXPERTS_RECOMPUTED)
    products += grouped * expert_passes / GROUPED_EFFICIENCY
    compute = products * tokens * micro_batches / mesh.tensor / chip.device_flops
    saved = micro_batches * _saved_activation_bytes(model, train, mesh)
    hbm = STACK_MOVES * saved / (chip.hbm_bandwidth / chip.devices_per_chip)
    if train.remat == "offload":
        hbm += saved / rates_of_chip(chip).host_bandwidth
    if _device_count(mesh) == 1:
        return compute + hbm
    # In each micro-batch, the weights are gathered in bfloat16 once (twice if the backward pass
    # gathers them again), and the gradients are reduce-scattered once. A mesh that splits the
    # weights over no other axis than `tensor` gathers none.
    weights = 0.0
    if max(mesh.data, mesh.context, mesh.expert) > 1:
        passes_over_weights = 2 if train.remat == "none" else 3
        weights = micro_batches * 2 * _gathered_parameters(model, mesh) * passes_over_weights
    layers, hidden = model.num_hidden_layers, 2 * model.hidden_size * tokens * micro_batches
    saves_rows = train.remat in ("none", "dots", "dots keep=experts") and _gathers_all_rows_at_once(
        model, train, mesh
    )
    exchanges = 4 if saves_rows else 5
    experts = exchanges * layers * hidden * (mesh.expert - 1) if model.has_experts else 0
    tensor = 8 * layers * hidden * (mesh.tensor - 1) / mesh.tensor
    # A weight is gathered over several axes, the longest last, which sends the most.
    longest = max(("data", "context", "expert"), key=lambda axis: getattr(mesh, axis))
    sent = [(longest, weights), ("expert", experts), ("tensor", tensor)]
    links = _links_of_mesh(topology, mesh)
    seconds = collections.Counter()
    for axis, size in sent:
        gather = Collective("all-gather", (axis,), getattr(mesh, axis), size, 1)
        seconds[(axis,)] += links.collective_seconds(gather, None)
    rates = rates_of_chip(chip)
    network = busiest_link_seconds(links, seconds) / rates.reached_link_share
    network += rates.collective_start_seconds * COLLECTIVES_PER_LAYER * layers * micro_batches
    return max(compute + hbm + (1 - OVERLAPPED) * network, network)


@functools.cache
def _links_of_mesh(topology: Topology, mesh: MeshConfig) -> Network:
    """Returns the links on which the axes of a mesh send."""
    placed = make_mesh(ParallelConfig(mesh=mesh), topology.devices)
    return Network(placed, topology.chip, topology.shape)


def _device_count(mesh: MeshConfig) -> int:
    """Returns the number of devices of a mesh."""
    return math.prod(dataclasses.astuple(mesh))


def _stored_parameters(model: ModelConfig, mesh: MeshConfig) -> float:
    """Returns the number of parameters that one device stores."""
    return _counts(model).total / (_device_count(mesh) / mesh.slice)


def _micro_batch_tokens(train: TrainConfig, mesh: MeshConfig) -> float:
    """Returns the number of tokens of one device in one micro-batch."""
    return (
        train.batch_size
        * train.sequence_length
        / train.gradient_accumulation
        / (_device_count(mesh) / mesh.tensor)
    )


def _gathered_parameters(model: ModelConfig, mesh: MeshConfig) -> float:
    """Returns the number of parameters that one device gathers in a pass. The experts stay split
    over the axis `expert`, and all parameters stay split over the axis `tensor`.
    """
    experts = _expert_parameters(model)
    return (_counts(model).total - experts + experts / mesh.expert) / mesh.tensor


@functools.cache
def _expert_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of all routed experts."""
    return sum(p.size for p in parameter_declarations(model).values() if p.num_experts > 1)
