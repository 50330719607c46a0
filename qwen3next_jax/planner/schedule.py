"""The TPU compiler's own static schedule of a program's kernels and fusions: cycles, and bytes
of their copies.

The compiler dumps the final bundles of each; one bundle issues per cycle where nothing waits for
memory, so bundles of a loop times its trips are a lower bound of its cycles.
"""

import math
import os
import pathlib
import re
from typing import NamedTuple

from qwen3next_jax.planner.hlo import FREE, Computation, Instruction, Program, parse_shapes

_CORE = "megacore core id"  # what a program of a chip asks for whose two cores share its work


class Schedule(NamedTuple):
    """Of one run. cycles: bundles, each as often as its loops run. copied: bytes of the windows
    of a kernel that are copied if every trip copies each; a window that stays is copied once.
    whole: whether every loop with matrix work states its trips, without which the cycles are too
    few.
    """

    cycles: float
    copied: float
    whole: bool


class Loop(NamedTuple):
    start: int
    end: int
    bundles: int
    trips: int  # 0 where the compiler does not state them
    matrix: int  # matrix-unit issues in the body


def enable_schedule_dump(folder: str | pathlib.Path) -> None:
    """Makes the compiler leave its final bundles in `folder`. Before libtpu is loaded, which
    reads this once.
    """
    asked = (
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    )
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        (os.environ.get("LIBTPU_INIT_ARGS", ""), *asked)
    ).strip()


def read_schedules(folder: str | pathlib.Path, program: Program) -> dict[str, Schedule]:
    """Of the instructions of `program` those that were dumped to `folder`, by name; of several
    alike the compiler dumps one.
    """
    found, twins = {}, {}
    for path in pathlib.Path(folder).glob("*final_bundles.txt"):
        text = path.read_text(errors="replace")
        entry = re.search(r"entry bundle: %(\S+) = ([\w\-]+)\(", text)
        if entry:
            loops, total = read_loops(text)
            kernel = entry.group(2) == "custom-call"
            found[entry.group(1)] = Schedule(
                cycles(loops, total),
                _copied_bytes(text, loops) if kernel else 0.0,
                all(loop.trips or not loop.matrix for loop in loops),
            )
    scheduled = [
        (c, i)
        for c in program.computations.values()
        for i in c.values()
        if i.called or i.opcode not in FREE
    ]
    for computation, instruction in scheduled:
        if instruction.name in found:
            twins[_signature(program, computation, instruction)] = found[instruction.name]
    for computation, instruction in scheduled:
        if instruction.name not in found and (
            twin := twins.get(_signature(program, computation, instruction))
        ):
            found[instruction.name] = twin
    return found


def _signature(program: Program, computation: Computation, instruction: Instruction) -> tuple:
    """What two instructions share that the compiler makes one program of."""
    inner = (
        [program.computations[name] for name in instruction.called]
        if instruction.opcode == "fusion"
        else []
    )
    return (
        instruction.opcode,
        re.sub(r"[.\d].*", "", instruction.name) if instruction.opcode == "custom-call" else "",
        instruction.shapes,
        tuple(computation[name].shapes for name in instruction.operands),
        tuple((i.opcode, i.shapes) for c in inner for i in c.values()),
    )


def _copied_bytes(text: str, loops: list[Loop]) -> float:
    header = text[: text.find("entry bundle")]
    windows = sum(
        s.bytes
        for window in re.findall(r"The window shape is (\w+\[[\d,]*\]), while", header)
        for s in parse_shapes(window)
    )
    outer = [loop for loop in loops if not any(_within(loop, other) for other in loops)]
    return windows * max((loop.trips for loop in outer), default=1) * (2 if _CORE in header else 1)


def read_loops(text: str) -> tuple[list[Loop], int]:
    """The loops of one dump of final bundles, outer ones first, and the number of bundles."""
    bundles, matrix, jumps, heads, tests = [], {}, [], {}, {}
    for line in text.splitlines():
        m = re.match(r"\s*(0x[0-9a-f]+|0)\s.*\{", line)
        if not m:
            continue
        address = int(m.group(1), 16)
        bundles.append(address)
        matrix[address] = len(re.findall(r"\bvmat(?:mul|push|prep)", line))
        for counter, bound in re.findall(
            r"scmp\.\w+\.s32\.totalorder (%\S+), (\d+) /\* loop exit test", line
        ):
            step = re.search(re.escape(counter) + r" = sadd\.s32 (\d+), ", text)
            tests[address] = math.ceil(int(bound) / (int(step.group(1)) if step else 1))
        heads.update({region: address for region in re.findall(r"Start region (\d+)", line)})
        jumps += [
            (address, region) for region in re.findall(r"sbr\.rel .*?target = \$region(\d+)", line)
        ]
    spans = sorted(
        ((heads[r], a) for a, r in jumps if heads.get(r, a + 1) <= a), key=lambda s: s[1] - s[0]
    )
    loops = []
    for start, end in spans:  # an inner loop claims its exit test first
        test = max((a for a in tests if start <= a <= end), default=None)
        body = [a for a in bundles if start <= a <= end]
        loops.append(Loop(start, end, len(body), tests.pop(test, 0), sum(matrix[a] for a in body)))
    return sorted(loops, key=lambda loop: (loop.start, -loop.end)), len(bundles)


def cycles(loops: list[Loop], total: int) -> int:
    """Bundles issued by one launch: every body times its trips (once where unstated), nesting
    respected.
    """

    def issued(loop: Loop) -> int:
        inner = [x for x in loops if _within(x, loop)]
        inner = [x for x in inner if not any(_within(x, y) for y in inner)]
        return max(loop.trips, 1) * (loop.bundles + sum(issued(x) - x.bundles for x in inner))

    outer = [x for x in loops if not any(_within(x, y) for y in loops)]
    return total + sum(issued(x) - x.bundles for x in outer)


def _within(a: Loop, b: Loop) -> bool:
    return a is not b and b.start <= a.start and a.end <= b.end
