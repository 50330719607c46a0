"""Reads the costs of a compiled program: memory by purpose, collectives by mesh axis, FLOPs and HBM
traffic.

All numbers are for one device and one run of the program. An instruction in a loop counts once for
each trip of the loop.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qwen3next_jax.ops.implementations import kernels_by_name
from qwen3next_jax.planner.hlo import (
    FREE,
    FREE_TARGETS,
    Computation,
    Instruction,
    Program,
    Shape,
    product_flops,
)
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.sharding.mesh import slice_number
from qwen3next_jax.sharding.rules import DATA, SLICE

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# {XLA's name of a precision: the number of bfloat16 passes in which the matrix unit computes a
# product of float32 operands}
_PASSES = {"high": 3, "highest": 6}


class Collective(NamedTuple):
    """One collective instruction of the program.

    Attributes:
      kind: one of COLLECTIVES.
      axes: the mesh axes over which the devices exchange data, in the mesh's order. For a
        permutation, `axes` are the axes along which source and target differ in at least one pair.
      group_size: number of devices that exchange data with each other. For a permutation,
        `group_size` is the number of devices that send or receive.
      sent_bytes: bytes that leave each device when the collective runs once, with the best
        algorithm on a ring of n devices. For an operand of S bytes on each device, `sent_bytes` is
        (n - 1) S for all-gather, (n - 1)/n S for reduce-scatter and all-to-all, 2 (n - 1)/n S for
        all-reduce, and S for a permutation or a broadcast. For a ragged all-to-all, S is the size
        of the smaller of its two buffers (input and output), because the larger one has additional
        room for an uneven load.
      run_count: how often the collective runs in one run of the program.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    sent_bytes: float
    run_count: float

    @property
    def total_sent_bytes(self) -> float:
        """The bytes that the collective sends from each device in one run of the program."""
        return self.sent_bytes * self.run_count


class Memory(NamedTuple):
    """Bytes of HBM on one device.

    Attributes:
      parameters, optimizer: the device's shards of the parameters and of the optimizer's state.
      gradients: arrays that the scans over layers in the backward pass fill with gradients, one
        layer per trip.
      activations: arrays that the scans over layers in the forward pass fill for the backward pass,
        one layer per trip.
      temporaries: everything else that the program needs while it runs.
      other: the batch, the outputs, padding in the layouts of parameters and optimizer state, and
        the program's code.
      peak: the sum of all fields above.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    temporaries: float
    other: float
    peak: float


# ---- collectives ----


def collective_kind(instruction: Instruction) -> str:
    """Returns the entry of COLLECTIVES that names the instruction's opcode, without the ending
    "-start" of an asynchronous collective; "" if there is no such entry.
    """
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


class SliceTransfer(NamedTuple):
    """A collective between TPU slices. The program of a slice hands its data to the host (`send`),
    and takes the result of the collective from the host (`recv`); in between, the hosts of all
    slices exchange the data (the "megascale" runtime).

    Attributes:
      rendezvous_name: a name that the `send` and the `recv` of a transfer have in common.
      collective_kind: one of COLLECTIVES.
    """

    rendezvous_name: str
    collective_kind: str


def parse_slice_transfer(instruction: Instruction) -> SliceTransfer | None:
    """Returns the transfer that a `send` or `recv` begins; None for every other instruction."""
    if instruction.opcode not in ("send", "recv"):
        return None
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    name = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', instruction.attributes)
    if not kind or not name:
        return None
    return SliceTransfer(name.group(1), kind.group(1).lower().replace("_", "-"))


def read_slice_transfer(
    computation: Computation, send: Instruction, mesh: jax.sharding.Mesh, times: float = 1
) -> Collective:
    """Returns the `Collective` for the `send` of a transfer between slices.

    Args:
      times: how often the instruction runs in one run of the program.
    """
    kind = parse_slice_transfer(send).collective_kind
    slices = num_slices(mesh)
    sent = computation[send.operands[0]].bytes * _sent_bytes_factor(kind, slices)
    return Collective(kind, (SLICE if mesh.shape[SLICE] > 1 else DATA,), slices, sent, times)


def num_slices(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of TPU slices to which the devices of a mesh belong."""
    return len({slice_number(device) for device in mesh.devices.flat})


def _sent_bytes_factor(kind: str, group_size: int) -> float:
    """Returns the bytes that leave each of `group_size` devices in a collective, as a multiple of
    the bytes of the collective's operands (see `Collective.sent_bytes`).
    """
    shares = {
        "all-gather": group_size - 1,
        "all-reduce": 2 * (group_size - 1) / group_size,
        "collective-broadcast": 1,
        "collective-permute": 1,
    }
    return shares.get(kind, (group_size - 1) / group_size)


def fused_collective(
    program: Program, instruction: Instruction
) -> tuple[Computation, Instruction] | None:
    """Returns the collective inside a fusion, and the computation that contains it; None if there
    is none, or if the instruction is not a fusion.
    """
    if instruction.opcode != "fusion":
        return None
    inner = program.computations[instruction.called_computations[0]]
    return next(((inner, i) for i in inner.values() if collective_kind(i)), None)


def _is_reduce_scatter(computation: Computation, reduction: Instruction) -> bool:
    """Returns whether every result of a computation is a slice of the result of the all-reduce
    `reduction`. The TPU compiler expresses a reduce-scatter as a fusion of an all-reduce with
    slices of its result, and runs the fusion as a reduce-scatter ("AllReduceScatterFusion").
    """
    root = computation.root
    for name in root.operands if root.opcode == "tuple" else (root.name,):
        sliced = computation[name]
        while sliced.opcode == "bitcast":
            sliced = computation[sliced.operands[0]]
        if sliced.opcode != "dynamic-slice":
            return False
        source = computation[sliced.operands[0]]
        while source.opcode in ("bitcast", "get-tuple-element"):
            source = computation[source.operands[0]]
        if source is not reduction:
            return False
    return True


def read_collective(
    computation: Computation, instruction: Instruction, mesh: jax.sharding.Mesh, times: float = 1
) -> Collective:
    """Returns the `Collective` for an instruction whose `collective_kind` is not "".

    Args:
      computation: the computation that contains the instruction.
      instruction: the collective, or the start of an asynchronous one.
      mesh: the mesh that the program was compiled for.
      times: how often the instruction runs in one run of the program.
    """
    kind = collective_kind(instruction)
    if kind == "all-reduce" and _is_reduce_scatter(computation, instruction):
        kind = "reduce-scatter"
    sizes = [computation[name].bytes for name in instruction.operands]
    size = min(sizes[:2]) if kind == "ragged-all-to-all" else sum(sizes)
    if kind == "collective-permute":
        pairs = permuted_pairs(instruction)
        axes, group = _axes_that_differ(mesh, pairs), len(np.unique(pairs))
        sent = size if len(pairs) else 0.0
    else:
        axes, group = _replica_group_axes(instruction.attributes, mesh)
        sent = size * _sent_bytes_factor(kind, group)
    return Collective(kind, axes, group, sent, times)


def permuted_pairs(instruction: Instruction) -> np.ndarray:
    """Returns the (source, target) pairs [n, 2] of a collective-permute, without the pairs whose
    source and target are the same device.
    """
    text = instruction.attribute("source_target_pairs")
    pairs = np.array(
        [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)\}", text)]
    ).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def program_collectives(program: Program, mesh: jax.sharding.Mesh) -> list[Collective]:
    """Returns the collectives whose `sent_bytes` is not 0, in the order of the program. Collectives
    inside fusions and loops are included.
    """
    found = []
    for step in program.walk():
        if collective_kind(step.instruction):
            found.append(read_collective(step.computation, step.instruction, mesh, step.run_count))
        elif step.instruction.opcode == "send" and parse_slice_transfer(step.instruction):
            found.append(
                read_slice_transfer(step.computation, step.instruction, mesh, step.run_count)
            )
    return [c for c in found if c.sent_bytes]


def parse_replica_groups(text: str) -> np.ndarray | None:
    """Reads the `replica_groups=` attribute of an instruction.

    Returns:
      [groups, devices], the devices of each group; None if one group has all devices.

    The attribute has one of these forms:

        {{0,1},{2,3}}                       lists of devices
        [2,2]<=[4], [2,2]<=[2,2]T(1,0)      an iota, reshaped and transposed
        mesh['x'=2,'y'=4] {'y':(2)2}        axes of a named mesh: here the second factor of y
    """
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        groups, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(order) if order else devices).reshape(groups)
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*)\))? \{([^}]*)\}", text
    )
    if named:
        return _groups_of_named_mesh(*named.groups())
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text)
    groups = re.findall(r"\{([\d,]+)\}", listed.group(1)) if listed else []
    return np.array([[int(n) for n in group.split(",")] for group in groups]) if groups else None


def _groups_of_named_mesh(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Returns [groups, devices] for groups along axes of a named mesh.

    Args:
      mesh: names and sizes of the mesh's axes, such as "'x'=2,'y'=4".
      device_ids: the ids of the mesh's devices. If `device_ids` is None or does not have one id for
        each device, the ids are 0, 1, ….
      axes: the axes along which the groups lie, such as "'y':(2)2". 'y':(before)size means that the
        axis y is split into three factors, before · size · rest, and that the groups lie along the
        second factor.
    """
    dims = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    total = math.prod(dims.values())
    listed = [int(n) for n in re.findall(r"\d+", device_ids or "")]
    devices = np.array(listed if len(listed) == total else range(total))
    chosen = {
        name: (int(before or 1), int(size or dims[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    }
    shape, inside = [], []
    for name, size in dims.items():
        before, factor = chosen.get(name, (1, 1))
        inside.append(len(shape) + 1)
        shape += [before, factor, size // before // factor]
    outside = [d for d in range(len(shape)) if d not in inside]
    group_size = math.prod(factor for _, factor in chosen.values())
    return devices.reshape(shape).transpose(outside + inside).reshape(-1, group_size)


def _replica_group_axes(text: str, mesh: jax.sharding.Mesh) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which the first replica group in an instruction's attributes
    `text` lies, and the number of devices in this group. All groups of a collective are assumed to
    be alike.
    """
    groups = parse_replica_groups(text)
    # A program for several TPU slices is that of one slice, and numbers the devices of a slice.
    first = np.arange(mesh.size // num_slices(mesh)) if groups is None else groups[0]
    return _axes_that_differ(
        mesh, np.stack((np.broadcast_to(first[:1], first.shape), first), axis=1)
    ), len(first)


def _axes_that_differ(mesh: jax.sharding.Mesh, pairs: np.ndarray) -> tuple[str, ...]:
    """Returns the mesh axes along which the two devices of at least one pair differ.

    Args:
      pairs: [n, 2], positions of the devices in the mesh's order.
    """
    coordinates = np.unravel_index(pairs, mesh.devices.shape)
    return tuple(
        name for name, c in zip(mesh.axis_names, coordinates) if np.any(c[:, 0] != c[:, 1])
    )


# ---- work ----


def instruction_flops(
    program: Program, computation: Computation, instruction: Instruction
) -> float:
    """Returns the FLOPs of the matrix products in one run of an instruction, each multiplied by the
    number of passes (`_PASSES`) that its precision needs. Elementwise operations count 0.

    The FLOPs of a fusion are the sum over the instructions inside it. Loops and conditionals count
    0; the instructions that they run are counted in their own computations. `_kernel_flops` gives
    the FLOPs of kernels; a kernel whose FLOPs are unknown counts 0.
    """
    if instruction.opcode == "fusion":
        return sum(
            instruction_flops(program, program.computations[name], inner)
            for name in instruction.called_computations
            for inner in program.computations[name].values()
        )
    if instruction.opcode == "custom-call":
        return _kernel_flops(computation, instruction) or 0.0
    precision = re.search(r"operand_precision=\{(\w+)", instruction.attributes)
    return product_flops(computation, instruction) * _PASSES.get(
        precision.group(1) if precision else "", 1
    )


def _kernel_flops(computation: Computation, instruction: Instruction) -> float | None:
    """Returns the FLOPs of one run of a kernel; None if they are unknown. The FLOPs are the number
    that the kernel states, or come from a formula for splash attention and for the kernels of the
    gated delta rule.
    """
    stated = _cost_stated_by_kernel(instruction, "flops")
    if stated is not None:
        return stated
    splash = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", instruction.name)
    # kernels/tpu/splash_attention.py puts the kind of mask into the name of a scope around the
    # call.
    mask = re.search(r"\bsplash_(causal|full)\b", instruction.op_name)
    if splash and mask:
        queries, keys = _attention_operand_shapes(computation, instruction)[:2]
        # The backward pass in one kernel is "dkv" with three results: dq, dk and dv.
        dkv = 5 if len(instruction.shapes) == 3 else 4
        products = {"fwd": 2, "dkv": dkv, "dq": 3}[splash.group(1)]
        visited = 0.5 if mask.group(1) == "causal" else 1.0
        return products * 2.0 * math.prod(queries.dims) * keys.dims[-2] * visited
    if rule := parse_delta_rule_call(computation, instruction):
        return _delta_rule_flops(rule)
    # Kernels whose results are all integers, such as the offsets of ragged_dot, have no products.
    return 0.0 if all(s.dtype[0] in "su" for s in instruction.shapes) else None


def _cost_stated_by_kernel(instruction: Instruction, name: str) -> float | None:
    """Returns one number of the cost estimate that a kernel states; None if the kernel does not
    state this number. If the compiler fused a kernel with an update in place, for example of an
    array that a scan fills, it writes the kernel's estimate in another layout.
    """
    estimate = re.search(r'"cost_estimate":\s*\{([^}]*)\}', instruction.attributes)
    number = estimate and re.search(rf'"{name}":\s*"?(\d+)', estimate.group(1))
    return float(number.group(1)) if number else None


def _attention_operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    """Returns the shapes of the operands of an attention kernel that have an axis of channels: the
    queries, the keys, the values and so on, in this order.
    """
    arrays = [s for name in instruction.operands for s in computation[name].shapes]
    return [s for s in arrays if s.dtype in ("bf16", "f32") and len(s.dims) >= 3 and s.dims[-1] > 1]


def _delta_rule_flops(rule: "DeltaRuleCall") -> float:
    """Returns the FLOPs of a kernel of the gated delta rule (docs/delta_rule.md). The FLOPs for
    computing the inverse matrices do not count, so a kernel that gets the inverse matrices as an
    input counts as many FLOPs as a kernel that computes them.
    """
    key, value, chunk = rule.key_width, rule.value_width, rule.chunk_tokens
    if rule.pass_name == "map":
        per_token = 6 * key * (key + value) + 2 * chunk * (4 * key + value)
    elif rule.pass_name == "backward":
        per_token = 14 * key * value + 10 * chunk * (key + value)
    else:
        per_token = 6 * key * value + 4 * chunk * (key + value)
    return rule.tokens * rule.heads * per_token


def gpu_program_flops(program: Program) -> float:
    """Returns the FLOPs (2 × multiply-adds) of all matrix products of a program for a GPU: products
    of XLA and cuBLAS, and tokamax's grouped products without the padding of tiles. A loop whose
    number of trips the program does not state counts as one trip.
    """
    return sum(
        times * _gpu_product_flops(computation, instruction)
        for computation, instruction, times in program.walk()
    )


def _gpu_product_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of one run of an instruction of a GPU program; 0 if it is no matrix
    product.
    """
    if instruction.opcode != "custom-call":
        return product_flops(computation, instruction)
    operands = [computation[name] for name in instruction.operands]
    dims = [operand.shapes[0].dims for operand in operands if operand.shapes]
    contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"\]', instruction.attributes)
    if "matmul" in instruction.attribute("custom_call_target") and contracted:
        return 2.0 * instruction.shapes[0].elements * dims[0][int(contracted[1])]
    if "ragged_dot_sm90" in instruction.op_name:  # operands [R, D], [E, D, F]
        return 2.0 * instruction.shapes[0].elements * dims[0][1]
    if "ragged_contracting_dim_dot_sm90" in instruction.op_name:  # …, …, [D, R], [R, F]
        return 2.0 * math.prod(dims[2]) * dims[3][1]
    return 0.0


def is_tpu_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction calls a TPU kernel, that is, a Mosaic program. Pallas compiles
    kernels for TPUs to Mosaic.
    """
    return instruction.attribute("custom_call_target") == '"tpu_custom_call"'


def visited_grid_step_share(computation: Computation, instruction: Instruction) -> float:
    """Returns the share of a kernel's grid steps that do any work. The share is 1 for all kernels
    except causal splash attention, which computes only the blocks on the diagonal and below it.
    """
    if "splash_m" not in instruction.name or "splash_causal" not in instruction.op_name:
        return 1.0
    blocks = _attention_block_count(_attention_operand_shapes(computation, instruction)[0])
    return (blocks + 1) / (2 * blocks)


def _attention_block_count(x: Shape) -> int:
    """Returns the number of blocks into which splash attention divides queries or keys
    [..., T, D].
    """
    block_size = kernels_by_name("attention")["splash"].load().block_size
    return -(-x.dims[-2] // block_size(*x.dims[-2:], 2 if x.dtype == "bf16" else 4))


def kernel_hbm_bytes(computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that a kernel reads from and writes to HBM: the number that the kernel
    states or, for splash attention, the result of a formula; 0 if the bytes are unknown.

    The grid of splash attention goes through the pairs (block of queries, block of keys) that the
    mask does not exclude. Within a row of pairs, the kernel keeps one of the two blocks in VMEM and
    reads the other from HBM. The forward kernel and the kernel of dq read blocks of keys and
    values; the kernel of dk and dv reads blocks of queries and of the output's gradient. The
    formula counts every other array once.
    """
    stated = _cost_stated_by_kernel(instruction, "bytes_accessed")
    if stated is not None:
        return stated
    splash = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", instruction.name)
    if not splash:
        return 0.0
    arrays = _attention_operand_shapes(computation, instruction)
    kept, read = (arrays[0], arrays[1]) if splash.group(1) != "dkv" else (arrays[1], arrays[0])
    # Query heads that share a key head read its keys separately.
    heads = math.prod(arrays[0].dims[:-2])
    visits = _attention_block_count(kept) * visited_grid_step_share(computation, instruction)
    again = 2 * heads * visits * (read.bytes / math.prod(read.dims[:-2]))
    once = sum(_bytes_in_hbm(computation[name].shapes) for name in instruction.operands)
    return again - 2 * read.bytes + once + _bytes_in_hbm(instruction.shapes)


def kernels_of_unknown_cost(
    program: Program, schedules: Mapping[str, Schedule] | None = None
) -> list[str]:
    """Returns the names, without repetition, of the TPU kernels whose FLOPs and cycles are unknown:
    `_kernel_flops` returns None, and there is no schedule whose `states_all_trips` is true. A name
    is the kernel's `op_name` in the traced program or, if the compiled program does not record it,
    the name of the instruction.

    Args:
      schedules: {name of an instruction: its schedule}; None if there are no schedules.
    """
    names = {}
    for computation, instruction, _ in program.walk():
        schedule = (schedules or {}).get(instruction.name)
        is_known = (
            schedule
            and schedule.states_all_trips
            or _kernel_flops(computation, instruction) is not None
        )
        if is_tpu_kernel(instruction) and not is_known:
            names[instruction.op_name or instruction.name] = None
    return list(names)


class DeltaRuleCall(NamedTuple):
    """A call of one of the kernels of the gated delta rule (`kernels/tpu/delta_rule.py`).

    Attributes:
      pass_name: "forward", "forward with known inverses" (which gets the inverses as an input),
        "map" or "backward".
      tokens: number of tokens in all rows of the batch together.
      heads: number of value heads.
      key_width, value_width: widths of a head's keys and values.
      chunk_tokens: number of tokens in a chunk.
    """

    pass_name: str
    tokens: int
    heads: int
    key_width: int
    value_width: int
    chunk_tokens: int


def parse_delta_rule_call(
    computation: Computation, instruction: Instruction
) -> DeltaRuleCall | None:
    """Parses a call of a delta rule kernel; returns None for any other instruction."""
    kernel = re.search(r"gated_delta_rule_(forward|map|backward)", instruction.name)
    if instruction.opcode != "custom-call" or not kernel:
        return None
    # The first operands are q, k and v [B, T, heads · width] and the running sum of the log decay
    # [B, chunks, blocks, …].
    arrays = [computation[name].shapes[0] for name in instruction.operands]
    (batch, time, _), chunks = arrays[2].dims, arrays[3].dims[1]
    # The float32 result with four dimensions is the state.
    _, heads, key, value = next(
        s.dims for s in instruction.shapes if s.dtype == "f32" and len(s.dims) == 4
    )
    chunk = time // chunks
    inverses = chunks, batch, heads // 2, chunk, 2 * chunk
    name = kernel.group(1)
    if name == "forward" and any(a.dims == inverses for a in arrays):
        name = "forward with known inverses"
    return DeltaRuleCall(
        name,
        tokens=batch * time,
        heads=heads,
        key_width=key,
        value_width=value,
        chunk_tokens=chunk,
    )


def hbm_bytes(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that one run of an instruction reads from HBM and writes to HBM. Call this
    function for a whole fusion, not for an instruction inside it, because values inside a fusion
    are not stored in HBM.

    For a slice, a gather, a scatter, or an update in place, only the part that is read or updated
    counts, once as read and once as written. Arrays in other memories, such as VMEM, do not count.
    """
    op = instruction.opcode
    if op in FREE or op in ("while", "conditional", "call") or op.endswith(("-done", "-update")):
        return 0.0
    if op == "custom-call" and instruction.attribute("custom_call_target") in FREE_TARGETS:
        return 0.0
    if op.endswith("-start") and op.removesuffix("-start") in ("copy", "slice", "dynamic-slice"):
        source = computation[instruction.operands[0]].shapes[0]
        # The shapes of the result are target, source, … for a copy. For a slice they are those of
        # the operands (the source and the indices), and then the target.
        target = instruction.shapes[0 if op == "copy-start" else len(instruction.operands)]
        moved = min(source.bytes, target.bytes)
        return moved * (source.in_hbm + target.in_hbm)
    operands = [computation[name] for name in instruction.operands]
    if op == "fusion":
        inner = program.computations[instruction.called_computations[0]]
        reads = sum(_fusion_bytes_read(inner, parameter) for parameter in inner.parameters)
        return reads + _fusion_bytes_written(inner, inner.root, instruction.shapes)
    if op in ("dynamic-slice", "slice", "gather"):
        return 2 * _bytes_in_hbm(instruction.shapes)
    if op in ("dynamic-update-slice", "dynamic-update-slice-start"):
        update, target = operands[1].shapes[0], operands[0].shapes[0]
        return update.bytes * (update.in_hbm + target.in_hbm)
    if op == "scatter":
        arrays = len(operands) // 2
        updates = [shape for o in operands[arrays + 1 :] for shape in o.shapes]
        return _bytes_in_hbm(operands[arrays].shapes) + 3 * _bytes_in_hbm(updates)
    return sum(_bytes_in_hbm(o.shapes) for o in operands) + _bytes_in_hbm(instruction.shapes)


def host_transfer_bytes(computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that an asynchronous copy moves between the device and the memory of its
    host; 0 for a copy within the device.
    """
    operands = [shape for name in instruction.operands for shape in computation[name].shapes]
    arrays = [s for s in (*operands, *instruction.shapes) if s.elements > 1]
    if not any(s.in_host_memory for s in arrays):
        return 0.0
    # The smallest array that is not in the host's memory is what moves: an update, or a slice.
    return min((s.bytes for s in arrays if not s.in_host_memory), default=0.0)


def _bytes_in_hbm(shapes: Sequence[Shape]) -> float:
    """Returns the bytes of the arrays that are in HBM."""
    return sum(s.bytes for s in shapes if s.in_hbm)


def _fusion_bytes_read(inner: Computation, parameter: Instruction) -> float:
    """Returns the bytes that a fusion reads from HBM for one of its parameters. If the fusion only
    slices or gathers the parameter, scatters into it, or updates it in place, only the slices
    count.
    """
    if not parameter.shapes or not all(s.in_hbm for s in parameter.shapes):
        return 0.0
    touched, pending = 0.0, [parameter]
    while pending:
        value = pending.pop()
        for user in inner.users[value.name]:
            if user.opcode == "bitcast":
                pending.append(user)
            elif (
                user.opcode in ("dynamic-slice", "slice", "gather")
                and user.operands[0] == value.name
            ):
                touched += user.bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue  # in place: the rest is not read
            elif user.opcode == "scatter" and user.operands[0] == value.name:
                touched += _scattered_bytes(inner, user)
            else:
                return parameter.bytes
    return min(touched, parameter.bytes)


def _scattered_bytes(inner: Computation, scatter: Instruction) -> float:
    """Returns the bytes that a scatter changes."""
    return sum(inner[name].bytes for name in scatter.operands[len(scatter.operands) // 2 + 1 :])


def _fusion_bytes_written(inner: Computation, root: Instruction, results: Sequence[Shape]) -> float:
    """Returns the bytes that a fusion writes to HBM.

    Args:
      inner: the computation of the fusion.
      root: the instruction in `inner` that computes the results.
      results: the shapes of the results.
    """
    while root.opcode == "bitcast":
        root = inner[root.operands[0]]
    if root.opcode == "tuple":
        return sum(
            _fusion_bytes_written(inner, inner[name], (result,))
            for name, result in zip(root.operands, results)
        )
    if root.opcode == "dynamic-update-slice":
        return inner[root.operands[1]].bytes if all(r.in_hbm for r in results) else 0
    if root.opcode == "scatter":
        target = inner[root.operands[0]]
        while target.opcode == "bitcast":
            target = inner[target.operands[0]]
        # An array that the fusion makes is written whole.
        if target.opcode == "parameter":
            return _scattered_bytes(inner, root) if all(r.in_hbm for r in results) else 0
    return _bytes_in_hbm(results)


# ---- memory ----


def shard_bytes(tree: Any) -> float:
    """Returns the bytes of one device's shards of all leaves of a tree. The leaves are arrays or
    `jax.ShapeDtypeStruct`s with shardings.
    """
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def memory_use(compiled: Any, program: Program, params: Any, opt_state: Any) -> Memory:
    """Returns the HBM that a compiled train step uses.

    Args:
      compiled: the step as `jax.stages.Compiled`.
      program: the same step, parsed.
      params, opt_state: the state that the step updates in place, as trees of shapes with
        shardings; `opt_state` includes the average of the parameters (`train.ema`).
    """
    stats = compiled.memory_analysis()
    parameters, optimizer = shard_bytes(params), shard_bytes(opt_state)
    persistent = (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    )
    activations, gradients = _scan_stacked_bytes(program)
    temporary = _temporary_bytes(stats, persistent)
    gradients = min(gradients, temporary)
    activations = min(activations, temporary - gradients)
    other = persistent - parameters - optimizer + stats.generated_code_size_in_bytes
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        activations=activations,
        temporaries=temporary - gradients - activations,
        other=other,
        peak=persistent + temporary + stats.generated_code_size_in_bytes,
    )


def _temporary_bytes(stats: Any, kept: float) -> float:
    """Returns the bytes of HBM that a program needs in addition to its arguments and outputs, which
    take `kept` bytes.

    The compiler compares the total of all allocations in HBM with the chip's memory.
    `temp_size_in_bytes` can be several GiB too large (docs/notes/planner.md), so the function uses
    it only if the version of jaxlib does not report the total of all allocations.
    """
    allocated = getattr(stats, "total_allocation_bytes", 0)
    return allocated - kept if allocated > kept else float(stats.temp_size_in_bytes)


def _scan_stacked_bytes(program: Program) -> tuple[float, float]:
    """Returns the bytes in HBM of the arrays of which each trip of a loop fills one slice, as two
    sums: over the loops of the forward pass, and over the loops of the backward pass.

    In the forward pass, a scan over layers fills the arrays that its backward scan reads. In the
    backward pass, a scan over layers fills the gradients of the parameters. The name of a backward
    scan contains "transpose(". The arrays of an inner loop exist only during one trip of the outer
    loop, so they count once.
    """
    forward = backward = 0.0
    for step in program.walk():
        if step.instruction.opcode != "while":
            continue
        trips = program.loop_trips(step.computation, step.instruction)
        body = program.computations[step.instruction.attribute("body").lstrip("%")]
        for i, shape in enumerate(step.instruction.shapes):
            if (
                trips
                and trips > 1
                and shape.dims[:1] == (trips,)
                and shape.in_hbm
                and program.may_change_carried_element(body, i)
            ):
                if "transpose(" in step.instruction.op_name:
                    backward += shape.bytes
                else:
                    forward += shape.bytes
    return forward, backward
