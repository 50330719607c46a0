"""Reads the static schedules that the TPU compiler makes of a program's kernels and fusions: the
cycles that they take, and the bytes that they copy.

The compiler can write the final instruction bundles (VLIW instructions) of each kernel and fusion
to text files. The chip issues at most one bundle per cycle, so the number of bundles in a loop
times the number of its trips is a lower bound of the loop's cycles, if every trip issues all
bundles. A trip may skip bundles: a product goes through its contracted dimension in steps, and
writes its result in the last step. `count_skipped_bundles` counts the skipped bundles, and their
number is subtracted.
"""

import math
import os
import pathlib
import re
from typing import NamedTuple

from qwen3next_jax.planner.hlo import FREE, Computation, Instruction, Program, parse_shapes

# The compiler's text of an instruction contains these words if two cores share its work.
_CORE = "megacore core id"


class Schedule(NamedTuple):
    """The schedule of one run of an instruction.

    Attributes:
      cycles: number of bundles, each counted as often as it runs.
      copied_bytes: bytes that a kernel would copy between HBM and VMEM if every grid step copied
        the blocks of all operands. (A real kernel does not copy a block again that stays the same.)
      states_all_trips: whether the compiler states the number of trips of every loop with matrix
        work. If `states_all_trips` is false, `cycles` is too small.
      cores: number of cores that share the work; `cycles` are the cycles of one core.
    """

    cycles: float
    copied_bytes: float
    states_all_trips: bool
    cores: int = 1


class Loop(NamedTuple):
    """A loop of a schedule.

    Attributes:
      first_address, last_address: addresses of its first and last bundle.
      bundle_count: number of bundles in its body.
      trips: how often its body runs; 0 if the compiler does not state it.
      matrix_instructions: number of matrix-unit instructions in its body.
    """

    first_address: int
    last_address: int
    bundle_count: int
    trips: int
    matrix_instructions: int


def enable_schedule_dump(folder: str | pathlib.Path) -> None:
    """Makes the compiler write its final bundles into `folder`. Call this function before libtpu is
    loaded, because libtpu reads its options only once.
    """
    options = (
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    )
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        (os.environ.get("LIBTPU_INIT_ARGS", ""), *options)
    ).strip()


def read_schedules(folder: str | pathlib.Path, program: Program) -> dict[str, Schedule]:
    """Reads the schedules that the compiler wrote to `folder`.

    Returns:
      {name of an instruction: its schedule}. The compiler writes the schedule of only one of
      several equal instructions; the result has this schedule for each of the equal instructions.
    """
    schedules: dict[str, Schedule] = {}
    for path in pathlib.Path(folder).glob("*final_bundles.txt"):
        text = path.read_text(errors="replace")
        entry = re.search(r"entry bundle: %(\S+) = ([\w\-]+)\(", text)
        if entry:
            loops, total = read_loops(text)
            is_kernel = entry.group(2) == "custom-call"
            schedules[entry.group(1)] = Schedule(
                count_cycles(loops, total) - count_skipped_bundles(text, loops),
                _bytes_copied_by_kernel(text, loops) if is_kernel else 0.0,
                all(loop.trips or not loop.matrix_instructions for loop in loops),
                2 if _CORE in text else 1,
            )
    signatures = {
        instruction.name: _schedule_signature(program, computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.called_computations or instruction.opcode not in FREE
    }
    by_signature = {
        signature: schedules[name] for name, signature in signatures.items() if name in schedules
    }
    for name, signature in signatures.items():
        if name not in schedules and signature in by_signature:
            schedules[name] = by_signature[signature]
    return schedules


def _schedule_signature(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple:
    """Returns the opcode of an instruction, the name of its kernel, the shapes of its result and of
    its operands, and the instructions inside it. Instructions with equal signatures share one
    schedule.
    """
    inner, kernel = [], ""
    if instruction.opcode == "fusion":
        inner = [program.computations[name] for name in instruction.called_computations]
    if instruction.opcode == "custom-call":
        kernel = re.sub(r"[.\d].*", "", instruction.name)
    return (
        instruction.opcode,
        kernel,
        instruction.shapes,
        tuple(computation[name].shapes for name in instruction.operands),
        tuple((i.opcode, i.shapes) for c in inner for i in c.values()),
    )


def _bytes_copied_by_kernel(text: str, loops: list[Loop]) -> float:
    """Returns `Schedule.copied_bytes` of a kernel, computed from the block sizes ("window shapes")
    in the header of the compiler's text.
    """
    header = text[: text.find("entry bundle")]
    windows = sum(
        s.bytes
        for window in re.findall(r"The window shape is (\w+\[[\d,]*\]), while", header)
        for s in parse_shapes(window)
    )
    outer = [loop for loop in loops if not any(_is_inside(loop, other) for other in loops)]
    return windows * max((loop.trips for loop in outer), default=1) * (2 if _CORE in header else 1)


def read_loops(text: str) -> tuple[list[Loop], int]:
    """Reads the compiler's text of final bundles. Returns the loops, each before the loops inside
    it, and the number of bundles.
    """
    addresses: list[int] = []
    matrix: dict[int, int] = {}  # {address: the bundle's matrix-unit instructions}
    jumps: list[tuple[int, str]] = []  # (address, region that it jumps to)
    regions: dict[str, int] = {}  # {region: address of its first bundle}
    exit_tests: dict[int, int] = {}  # {address of a loop's exit test: trips}
    for line in text.splitlines():
        bundle = re.match(r"\s*(0x[0-9a-f]+|0)\s.*\{", line)
        if not bundle:
            continue
        address = int(bundle.group(1), 16)
        addresses.append(address)
        matrix[address] = len(re.findall(r"\bvmat(?:mul|push|prep)", line))
        for counter, bound in re.findall(
            r"scmp\.\w+\.s32\.totalorder (%\S+), (\d+) /\* loop exit test", line
        ):
            step = re.search(re.escape(counter) + r" = sadd\.s32 (\d+), ", text)
            exit_tests[address] = math.ceil(int(bound) / (int(step.group(1)) if step else 1))
        for region in re.findall(r"Start region (\d+)", line):
            regions[region] = address
        for region in re.findall(r"sbr\.rel .*?target = \$region(\d+)", line):
            jumps.append((address, region))
    # A backward jump ends a loop. Inner loops come first here, so that each loop gets its own exit
    # test, and not the exit test of a loop inside it.
    back = [(regions[r], a) for a, r in jumps if r in regions and regions[r] <= a]
    loops = []
    for start, end in sorted(back, key=lambda span: span[1] - span[0]):
        test = max((a for a in exit_tests if start <= a <= end), default=None)
        body = [a for a in addresses if start <= a <= end]
        trips = exit_tests.pop(test, 0)
        loops.append(Loop(start, end, len(body), trips, sum(matrix[a] for a in body)))
    return sorted(loops, key=lambda loop: (loop.first_address, -loop.last_address)), len(addresses)


def count_skipped_bundles(text: str, loops: list[Loop]) -> float:
    """Returns the number of bundles that `count_cycles` counts although a run does not issue them:
    a jump skips these bundles unless a loop's index has its last value.

    A skipped part counts only if the predicate of its jump compares one or several indices with
    constants, because only then does the text say how often the part runs. If a part runs only
    where an index is 7, the loop over this index has at least 8 steps, so the part runs in at most
    one of 8 steps.
    """
    skipped = 0.0
    for start, end, share in _parts_that_jumps_skip(text):
        around = [
            loop for loop in loops if loop.first_address <= start and end <= loop.last_address + 1
        ]
        inside = [loop for loop in loops if start <= loop.first_address and loop.last_address < end]
        if around and not inside:
            trips = math.prod(max(loop.trips, 1) for loop in around)
            skipped += (end - start) * trips * (1 - share)
    return skipped


def _parts_that_jumps_skip(text: str) -> list[tuple[int, int, float]]:
    """Finds the parts of a schedule that have no matrix-unit instruction and that a jump skips
    unless indices have their last values. Returns for each part the address of its first bundle,
    the address after its last bundle, and the largest share of the steps in which it can run.
    """
    delay = 5  # a jump takes effect after the four bundles behind it
    address, starts, jumps, matrix = 0, {}, [], []
    for line in text.splitlines():
        if bundle := re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
            address = int(bundle.group(1), 16)
        if "vmat" in line and re.search(r"\bvmat(?:mul|push|prep)", line):
            matrix.append(address)
        if " region " in line:
            for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
                starts[region] = address
        if "sbr.rel" not in line:
            continue
        for no, predicate, region in re.findall(
            r"sbr\.rel \((!?)(%\S+)\) target = \$region(\d+)", line
        ):
            jumps.append((address + delay, no, predicate, region))
    parts = []
    for start, no, predicate, region in jumps:
        end = starts.get(region, 0)
        if end > start and not any(start <= a < end for a in matrix):
            share = 1.0 / _steps_per_conditional_run(text, predicate, "eq" if no else "ne")
            if share < 1:
                parts.append((start, end, share))
    return parts


def _steps_per_conditional_run(text: str, predicate: str, comparison: str) -> int:
    """Returns the largest n for which the text says that a predicate holds in at most one of n
    steps; 1 if the text does not say how often it holds.
    """
    compared = re.search(
        re.escape(predicate) + rf" = scmp\.{comparison}\.s32\.totalorder (%\S+), (\d+)", text
    )
    if not compared:
        return 1
    if last := int(compared.group(2)):
        return last + 1
    # An index minus its last value is 0, or the bits of several of these are.
    steps, pending = 1, [compared.group(1)]
    while pending:
        value = re.escape(pending.pop())
        if minus := re.search(value + r" = sadd\.s32 (\d+), ", text):
            steps *= max(2**32 - int(minus.group(1)), 0) % 2**31 + 1
        elif either := re.search(value + r" = sor\.u32 (%\S+), (%\S+?)\b", text):
            pending += either.groups()
    return steps


def count_cycles(loops: list[Loop], total: int) -> int:
    """Returns the number of bundles that one run issues. A bundle in a loop counts once for each
    trip of the loop. A loop whose number of trips is not stated counts as one trip.

    Args:
      loops: all loops of the schedule.
      total: number of bundles in the schedule.
    """

    def issued(loop: Loop) -> int:
        """Returns the number of bundles that all trips of a loop issue."""
        inside = [x for x in loops if _is_inside(x, loop)]
        children = [x for x in inside if not any(_is_inside(x, y) for y in inside)]
        return max(loop.trips, 1) * (
            loop.bundle_count + sum(issued(x) - x.bundle_count for x in children)
        )

    outer = [x for x in loops if not any(_is_inside(x, y) for y in loops)]
    return total + sum(issued(x) - x.bundle_count for x in outer)


def _is_inside(a: Loop, b: Loop) -> bool:
    """Returns whether loop `a` is inside loop `b`."""
    return a is not b and b.first_address <= a.first_address and a.last_address <= b.last_address
