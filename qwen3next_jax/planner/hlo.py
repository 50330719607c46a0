"""Parses the text of a compiled XLA program (`compiled.as_text()`): its computations, instructions
and loops.

The text is the program of one device after partitioning and optimization. For a TPU it is also
scheduled: the instructions of a computation are listed in the order in which they start. This file
only parses; `compiled.py` and `roofline.py` compute memory, traffic and time from the result.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "f8e4m3b11fnuz": 8,
    "f4e2m1fn": 4,
    "f8e8m0fnu": 8,
    "bf16": 16,
    "c64": 64,
    "c128": 128,
} | {f"{kind}{bits}": bits for kind in "suf" for bits in (1, 2, 4, 8, 16, 32, 64)}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations|true_computation|"
    r"false_computation|async_wrapped)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
# Opcodes that move no data. They only name other values, or parts of them.
FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
        "add-dependency",
    )
)
# Targets of custom calls that move no data either: the TPU compiler makes no code of them. They
# stand for memory that is written later, neighbouring arrays as one, or a promise about indices.
FREE_TARGETS = frozenset(('"AllocateBuffer"', '"ConcatBitcast"', '"AssumeGatherIndicesInBound"'))
# Opcodes, besides `while`, that run the computations they name.
CALLERS = frozenset(("fusion", "call", "conditional", "custom-call", "async-start", "call-start"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dtype, dimensions and layout of one array. `layout` is the text in braces after the
    dimensions, such as "{1,0:T(8,128)}".
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """The bytes of the elements, without padding."""
        return self.elements * _BITS[self.dtype] / 8

    @property
    def in_hbm(self) -> bool:
        """Whether the array is in HBM. The layout of an array in another memory, such as VMEM,
        contains "S(n)" with the number n of that memory.
        """
        return "S(" not in self.layout

    @property
    def in_host_memory(self) -> bool:
        """Whether the array is in the memory of the host."""
        return "S(5)" in self.layout


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: the name, unique in the computation, without "%".
      opcode: XLA's name of the operation, such as "dot".
      shapes: the arrays of the result; a tuple may have several.
      operands: names of the instructions whose results it takes.
      literal: for a parameter, its number; for a constant, its value; both as text.
      attributes: the text after the operands.
      is_root: whether its result is the result of the computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def called_computations(self) -> tuple[str, ...]:
        """The names of the computations that the instruction calls, in the order of the text."""
        names = []
        for group, single in _CALLED.findall(self.attributes):
            names += [n.strip().lstrip("%") for n in group.split(",")] if group else [single]
        return tuple(names)

    def attribute(self, name: str) -> str:
        """The value of the attribute `name={...}` or `name=word`; "" if there is none."""
        m = re.search(
            rf"(?:^|[ ,]){name}=(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\"[^\"]*\"|[^\s,]+)",
            self.attributes,
        )
        return m.group(1) if m else ""

    @property
    def op_name(self) -> str:
        """The operation of the traced program from which the instruction was compiled, such as
        `jit(train_step)/…/dot_general`; "" if it is unknown.
        """
        m = re.search(r'op_name="([^"]*)"', self.attributes)
        return m.group(1) if m else ""

    @property
    def bytes(self) -> float:
        """The bytes of all arrays of the result."""
        return sum(s.bytes for s in self.shapes)


class Computation(dict[str, Instruction]):
    """A computation: a dict from the names of its instructions to the instructions, in the order of
    the text.
    """

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next(i for i in self.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, sorted by their numbers."""
        return sorted(
            (i for i in self.values() if i.opcode == "parameter"), key=lambda i: int(i.literal)
        )

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """{name of an instruction: the instructions that take its result as an operand}."""
        users: dict[str, list[Instruction]] = {name: [] for name in self}
        for instruction in self.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users


class InstructionRun(NamedTuple):
    """One instruction that `Program.walk` yields, its computation, and how often it runs in one run
    of the program.
    """

    computation: Computation
    instruction: Instruction
    run_count: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program.

    Attributes:
      computations: {name: computation}.
      entry_computation: name of the computation that runs first.
      function_by_stack_frame: {id of a stack frame: the innermost function of this package on that
        stack, as "file function"}.
    """

    computations: dict[str, Computation]
    entry_computation: str
    function_by_stack_frame: dict[int, str] = dataclasses.field(default_factory=dict)

    def source_function(self, instruction: Instruction) -> str:
        """Returns the function of this package from whose code an instruction was compiled, as
        "file function"; "?" if it is unknown.

        The program records a stack frame for most instructions. For a fusion without a stack frame,
        the method returns the function of a matrix product inside the fusion, or else of the first
        instruction inside the fusion that has a frame. For a custom call or an asynchronous call
        without a frame, it returns the instruction's own name. For any other instruction without a
        frame, it returns the function of the first operand.
        """
        candidates = [instruction]
        if instruction.opcode == "fusion":
            inside = [
                i
                for name in instruction.called_computations
                for i in self.computations[name].values()
            ]
            candidates += sorted(inside, key=lambda i: i.opcode not in ("dot", "convolution"))
        for candidate in candidates:
            frame = re.search(r"stack_frame_id=(\d+)", candidate.attributes)
            function = self.function_by_stack_frame.get(int(frame.group(1)), "?") if frame else "?"
            if function != "?":
                return function
        if instruction.opcode in ("custom-call", "call-start"):
            return re.sub(r"\.(cloned|call-start|\d+)", "", instruction.name)
        if instruction.operands and instruction.operands[0] in self._instruction_by_name:
            return self.source_function(self._instruction_by_name[instruction.operands[0]])
        return "?"

    @functools.cached_property
    def _instruction_by_name(self) -> dict[str, Instruction]:
        """{name: instruction} of all computations."""
        return {
            name: i for computation in self.computations.values() for name, i in computation.items()
        }

    def loop_trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns how often the body of the `while` instruction `loop` runs; None if the program
        does not tell.

        Either the compiler states the number, or the method computes it from the loop's counter:
        from its first value, its step, and the bound with which the loop's condition compares it.
        """
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if stated:
            return int(stated.group(1))
        condition, body = (
            self.computations[loop.attribute(k).lstrip("%")] for k in ("condition", "body")
        )
        before, after = (
            _tuple_elements(computation, loop.operands[0]),
            _tuple_elements(body, body.root.name),
        )
        if before is None or after is None or condition.root.opcode != "compare":
            return None

        def constant(inside: Computation, name: str) -> int | None:
            """Returns the value of an integer constant, or of an element of the loop's tuple that
            no trip changes; None for any other value.
            """
            instruction = _defining_instruction(inside, name)
            if instruction.opcode == "get-tuple-element":
                i = int(instruction.attribute("index"))
                instruction = instruction if self.may_change_carried_element(body, i) else before[i]
            literal = instruction.literal if instruction.opcode == "constant" else ""
            return int(literal) if re.fullmatch(r"-?\d+", literal) else None

        counter, bound = condition.root.operands
        direction = condition.root.attribute("direction")
        if constant(condition, bound) is None:
            counter, bound, direction = (
                bound,
                counter,
                {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction),
            )
        counter, bound = _defining_instruction(condition, counter), constant(condition, bound)
        if (
            counter.opcode != "get-tuple-element"
            or bound is None
            or direction not in ("LT", "LE", "GT", "GE")
        ):
            return None
        index = int(counter.attribute("index"))
        step = next(
            (
                constant(body, name)
                for name in after[index].operands
                if constant(body, name) is not None
            ),
            None,
        )
        start = int(before[index].literal) if before[index].opcode == "constant" else None
        if start is None or not step or after[index].opcode != "add":
            return None
        end = bound
        if direction in ("LE", "GE"):  # the loop also runs at the bound
            end += 1 if step > 0 else -1
        return max(-(-(end - start) // step), 0)

    def may_change_carried_element(self, body: Computation, index: int) -> bool:
        """Returns whether a trip of a loop with this body may change element `index` of the tuple
        that the loop carries. Returns False only if the body returns the element that it received.
        """
        after = _tuple_elements(body, body.root.name)
        return (
            after is None
            or after[index].opcode != "get-tuple-element"
            or int(after[index].attribute("index")) != index
        )

    def walk(self, name: str | None = None, times: float = 1) -> Iterator["InstructionRun"]:
        """Yields every instruction that runs in the computation `name` (by default the entry) and
        in the computations that it calls, with the number of times that the instruction runs. A
        loop with an unknown number of trips counts as one trip (see `loops_of_unknown_length`). All
        branches of a conditional count.

        Args:
          times: how often the computation itself runs.
        """
        computation = self.computations[name or self.entry_computation]
        for instruction in computation.values():
            yield InstructionRun(computation, instruction, times)
            inner = times
            called = instruction.called_computations
            if instruction.opcode == "while":
                called = (instruction.attribute("body").lstrip("%"),)
                inner = times * (self.loop_trips(computation, instruction) or 1)
            elif instruction.opcode not in CALLERS:
                continue  # skip, e.g., the function that a reduce applies to elements
            for callee in called:
                yield from self.walk(callee, inner)

    def loops_of_unknown_length(self) -> list[str]:
        """Returns the names (`op_name`), without repetition, of the loops with an unknown number of
        trips.
        """
        return list(
            dict.fromkeys(
                s.instruction.op_name or s.instruction.name
                for s in self.walk()
                if s.instruction.opcode == "while"
                and self.loop_trips(s.computation, s.instruction) is None
            )
        )


def _defining_instruction(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that computes the value `name`. If `name` is a copy, a bitcast or an
    optimization barrier, returns the instruction that computes the operand of `name`.
    """
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast", "opt-barrier", "copy-done", "copy-start"):
        instruction = computation[instruction.operands[0]]
    return instruction


def _tuple_elements(computation: Computation, name: str) -> list[Instruction] | None:
    """Returns the instructions that compute the elements of the tuple `name`; None if no `tuple`
    instruction computes `name`.
    """
    instruction = _defining_instruction(computation, name)
    return (
        [_defining_instruction(computation, n) for n in instruction.operands]
        if instruction.opcode == "tuple"
        else None
    )


def parse_program(text: str) -> Program:
    """Parses the text of an HLO module."""
    # Removes the code of the kernels, which is megabytes of base64.
    text = re.sub(r'"(?:body|debug_locations)": ?"[^"]*"', '""', text)
    computations: dict[str, Computation] = {}
    entry, current, pending = "", None, ""

    def finish() -> None:
        if pending and (instruction := _parse_instruction(pending)):
            current[instruction.name] = instruction

    for line in text.splitlines():
        if current is None:
            m = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if m:
                current = computations[m.group(2)] = Computation()
                entry = m.group(2) if m.group(1) else entry
        elif line == "}" or line.startswith("}, execution_thread="):
            finish()
            current, pending = None, ""
        elif re.match(r"\s+(?:ROOT )?%", line):
            finish()
            pending = line
        else:  # a further line of the pending instruction
            pending += " " + line
    return Program(computations, entry, _parse_functions_by_stack_frame(text))


def _parse_functions_by_stack_frame(text: str) -> dict[int, str]:
    """Reads `Program.function_by_stack_frame` from the tables of stack frames in the text."""

    def numbered(name):
        section = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return (
            {
                int(line.split(" ", 1)[0]): line.split(" ", 1)[1].strip('"')
                for line in section.group(1).splitlines()
            }
            if section
            else {}
        )

    files, functions = numbered("FileNames"), numbered("FunctionNames")
    locations, frames = (
        {
            i: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
            for i, line in numbered(name).items()
        }
        for name in ("FileLocations", "StackFrames")
    )
    found: dict[int, str] = {}
    for i in sorted(frames):
        location = locations[frames[i]["file_location_id"]]
        file = files[location["file_name_id"]]
        function = functions[location["function_name_id"]].replace(".<locals>", "")
        found[i] = (
            f"{file.rpartition('/')[2].removesuffix('.py')} {function}"
            if "qwen3next_jax/" in file
            else found.get(frames[i]["parent_frame_id"], "?")
        )
    return found


def _parse_instruction(line: str) -> Instruction | None:
    """Parses the text of one instruction. Returns None if `line` is no instruction."""
    m = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if not m:
        return None
    start = m.end()
    end = _closing_parenthesis(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    paren = line.index("(", end)
    close = _closing_parenthesis(line, paren)
    inside = line[paren + 1 : close]
    opcode = line[end:paren].strip()
    operands = (
        () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", inside))
    )
    return Instruction(
        name=m.group(2),
        opcode=opcode,
        shapes=parse_shapes(line[start:end]),
        operands=operands,
        literal=inside,
        attributes=line[close + 1 :].lstrip(", "),
        is_root=bool(m.group(1)),
    )


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the shapes of the arrays in the text of a type, such as "(f32[8,128]{1,0},
    s32[])".
    """
    return tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _closing_parenthesis(line: str, opening: int) -> int:
    """Returns the index of the parenthesis that closes the parenthesis at index `opening`."""
    depth = 0
    for m in re.finditer(r"[()]", line[opening:]):
        depth += 1 if m.group() == "(" else -1
        if depth == 0:
            return opening + m.start()
    raise ValueError(f"unbalanced parentheses in {line[:80]!r}")


# ---- FLOPs of products ----


def product_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs (2 × multiply-adds) of a `dot` or a `convolution`; 0 for any other
    instruction. In a program for a TPU, every matrix product is a `dot` or a `convolution`.
    """
    if instruction.opcode == "dot":
        left = computation[instruction.operands[0]].shapes[0].dims
        contracted = [
            int(d)
            for d in instruction.attribute("lhs_contracting_dims").strip("{}").split(",")
            if d
        ]
        return 2.0 * instruction.shapes[0].elements * math.prod(left[d] for d in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return 0.0


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs (2 × multiply-adds) of a `convolution`. Products with padding do not
    count.
    """
    left, right, out = instruction.attribute("dim_labels").replace("->", "_").split("_")
    input_dims, kernel_dims = (
        computation[name].shapes[0].dims for name in instruction.operands[:2]
    )
    result = instruction.shapes[0].dims
    window = dict(part.split("=") for part in instruction.attribute("window").strip("{}").split())
    spatial = [c for c in left if c.isdigit()]
    pairs = 1
    for axis, label in enumerate(sorted(spatial)):

        def of(name, default, axis=axis):
            return window[name].split("x")[axis] if name in window else default

        low_padding = int(of("pad", "0_0").split("_")[0])
        pairs *= _position_pairs_without_padding(
            input_dims[left.index(label)],
            kernel_dims[right.index(label)],
            result[out.index(label)],
            stride=int(of("stride", "1")),
            low_padding=low_padding,
            input_dilation=int(of("lhs_dilate", "1")),
            kernel_dilation=int(of("rhs_dilate", "1")),
        )
    channel_pairs = result[out.index("f")] * kernel_dims[right.index("i")]
    return 2.0 * result[out.index("b")] * channel_pairs * pairs


@functools.cache
def _position_pairs_without_padding(
    input_size: int,
    kernel_size: int,
    output_size: int,
    *,
    stride: int,
    low_padding: int,
    input_dilation: int,
    kernel_dilation: int,
) -> int:
    """Returns how many pairs (output position, kernel position) along one dimension of a
    convolution read an element of the input. A pair that is not counted reads padding, or a zero
    that dilation inserts. If XLA expresses a batch dimension as a spatial dimension with strides
    and dilation, there is one pair per element.

    Args:
      input_size, kernel_size, output_size: sizes of the input, the kernel and the output.
      stride: distance between the windows of neighbouring outputs.
      low_padding: amount of padding before the input.
      input_dilation, kernel_dilation: distance between neighbouring elements of the input and of
        the kernel; 1 without dilation.
    """
    read_position = (
        np.arange(output_size)[:, None] * stride
        - low_padding
        + np.arange(kernel_size) * kernel_dilation
    )
    return int(
        np.sum(
            (read_position >= 0)
            & (read_position <= (input_size - 1) * input_dilation)
            & (read_position % input_dilation == 0)
        )
    )
