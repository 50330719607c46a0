"""Chooses the implementation of an operator that runs a call.

There are two kinds of implementations. An XLA implementation uses XLA alone; the operator's own
module lists its XLA implementations in a tuple `XLA_IMPLEMENTATIONS`. An operator may also have
kernels, which the plugin package `qwen3next_jax.kernels` lists by operator. If a call names an
implementation, `choose_implementation` returns this implementation, or raises an error that says
why the implementation cannot run. If a call names no implementation, `choose_implementation`
returns the best implementation for the platform that the program is compiled for
(`compile_target`). If the plugin is not installed, every operator runs an XLA implementation.

`trace_and_record` traces a function, and returns the implementations that `choose_implementation`
chose during the trace, with the reasons. Some kernels are used only after they have passed a test
on the chip. While `trace_and_record` traces a function, kernels are assumed to pass their tests.
After the trace the tests run in parallel; if a test fails, the function is traced again without the
kernels that failed.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax

from qwen3next_jax.ops.compile_target import compile_target

KERNELS = "qwen3next_jax.kernels"
_PLATFORMS = {"tpu": "a TPU", "gpu": "a GPU", "cpu": "a CPU"}
# Every reason of kernels that failed their test contains these words.
WHERE_TRIED = "where it was tried on this GPU"
NO_MEMORY = "too little of its memory was free"  # why such a test could not run
# the last words of a refusal if the kernels could run the call, but are not its default
BY_DEFAULT = "by default"
# The operators that take most of a step if they run without kernels on a GPU or a TPU, as the
# subject and the verb of a sentence.
_SLOW_WITHOUT_KERNELS = {
    "attention": "attention runs",
    "gated_delta_rule": "the gated delta rule runs",
    "grouped_matmul": "experts run",
    "routed_experts": "experts run",
}


class Unsupported(NotImplementedError):
    """The named implementation cannot run a call. The message is one line for a user."""


@dataclasses.dataclass(frozen=True, eq=False)
class XlaImplementation:
    """An implementation of an operator that uses XLA alone.

    Attributes:
      name: name of the implementation, for the operator's argument `implementation`. Several XLA
        implementations of an operator may have the same name.
      platforms: platforms on which the implementation is the default if no kernel runs. A call that
        names the implementation can run on every platform: it runs the implementation with this
        name whose `platforms` include the call's platform, or, if there is none, the last
        implementation with this name.
      functions: the implementation's functions by name, such as "forward" and "backward".
    """

    name: str
    platforms: tuple[str, ...]
    functions: Mapping[str, Callable]


@dataclasses.dataclass(frozen=True)
class KernelImplementation:
    """An operator's kernels for one platform. A call that names the kernels can also run on a CPU,
    which interprets the kernels.

    Attributes:
      operator: name of the operator in the plugin's table.
      name: name of the kernels, for the operator's argument `implementation`.
      platform: "tpu" or "gpu".
      module: import string of the module that has the operator's functions, each with an argument
        `interpret`. The module also has a function `unsupported_reason(**call)`, which returns ""
        or the reason why the kernels cannot run a call. The module may have a function
        `is_default(**call)`, which returns whether a call that names no implementation runs the
        kernels. Without `is_default`, a call that names no implementation runs the kernels if they
        support the call.
    """

    operator: str
    name: str
    platform: str
    module: str

    def load(self) -> ModuleType:
        """Imports the module and returns it. Raises an ImportError that quotes the plugin's entry
        if the import fails.
        """
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(
                f"{KERNELS} lists {self.module} as {self.name!r} of {self.operator}, but its "
                f"import failed ({type(error).__name__}: {error})"
            ) from error

    def runs_by_default(self, call: Mapping[str, Any]) -> bool:
        """Returns whether a call that names no implementation runs these kernels. `call` holds the
        arguments that `unsupported_reason` of the module takes.
        """
        module = self.load()
        if hasattr(module, "is_default"):
            return module.is_default(**call)
        return not module.unsupported_reason(**call)

    def unsupported_reason(self, platform: str, call: Mapping[str, Any]) -> str:
        """Returns why a call that names these kernels cannot run on `platform`; "" if it can."""
        if platform not in (self.platform, "cpu"):
            return f"on {platform}: expected {_PLATFORMS[self.platform]}, or a CPU to interpret it"
        return self.load().unsupported_reason(**call)


class ChosenImplementation(NamedTuple):
    """The implementation that runs the forward and the backward pass of one call. The tuple is
    hashable, so that a function with a custom gradient can take it as a static argument.

    Attributes:
      implementation: the XLA implementation or the kernels.
      interpret: whether a CPU interprets the kernels.
    """

    implementation: XlaImplementation | KernelImplementation
    interpret: bool = False

    @property
    def name(self) -> str:
        """The name of the XLA implementation or of the kernels."""
        return self.implementation.name

    @property
    def is_kernel(self) -> bool:
        """Whether the implementation runs kernels, and not XLA alone."""
        return isinstance(self.implementation, KernelImplementation)

    def function_named(self, name: str) -> Callable:
        """Returns the implementation's function called `name`, such as "forward"."""
        if isinstance(self.implementation, XlaImplementation):
            return self.implementation.functions[name]
        function = getattr(self.implementation.load(), name)
        if self.interpret:
            return functools.partial(function, interpret=True)
        return function

    def constant_named(self, name: str, default):
        """Returns the constant called `name` of the kernels' module. Returns `default` if the
        kernels' module has no constant of this name, or if the implementation uses XLA alone.
        """
        return getattr(self.implementation.load(), name, default) if self.is_kernel else default


def choose_implementation(
    operator: str, named: str | None, xla_implementations: tuple[XlaImplementation, ...], **call
) -> ChosenImplementation:
    """Returns the implementation that runs one call.

    Args:
      operator: name of the operator in the plugin's table.
      named: name of the implementation that the caller asks for; None asks for the best one.
      xla_implementations: the operator's implementations that use XLA alone. The message of
        `Unsupported` recommends the first of these implementations.
      call: the arrays and settings of the call, which the function `unsupported_reason` of the
        operator's kernels takes.

    Raises:
      Unsupported: the named implementation cannot run this call, or the plugin with its kernels is
        missing. `Unsupported` is a NotImplementedError.
      ImportError: the plugin lists a module that cannot be imported.
    """
    platform = compile_target().platform
    if named is not None:
        chosen = _named_implementation(operator, named, xla_implementations, platform, call)
        _record_decision(operator, call, chosen, "named by the caller")
        return chosen
    # No kernel is the default on a CPU, so the plugin is not imported there.
    reason = f"the default on {_PLATFORMS.get(platform, platform)}"
    refusal = ""
    if platform != "cpu":
        for kernel in kernels_by_name(operator).values():
            if kernel.platform != platform:
                continue
            _state.reason = _state.refusal = ""
            if kernel.runs_by_default(call):
                chosen = ChosenImplementation(kernel)
                _record_decision(operator, call, chosen, _state.reason or reason)
                return chosen
            if is_recording_decisions():
                refusal = refusal or _state.refusal or kernel.load().unsupported_reason(**call)
                refusal = refusal or f"is not one that {kernel.name} runs {BY_DEFAULT}"
    chosen = ChosenImplementation(
        next(
            (xla for xla in xla_implementations if platform in xla.platforms),
            xla_implementations[0],
        )
    )
    _record_decision(operator, call, chosen, reason, refusal)
    return chosen


def _named_implementation(
    operator, named, xla_implementations, platform, call
) -> ChosenImplementation:
    """Returns the result of `choose_implementation` for a call that names an implementation."""
    same_name = [xla for xla in xla_implementations if xla.name == named]
    if same_name:
        return ChosenImplementation(
            next((f for f in same_name if platform in f.platforms), same_name[-1])
        )
    kernel, refusal = (
        kernels_by_name(operator).get(named),
        "is not in the folder " + _kernels_folder_text(),
    )
    if kernel is not None:
        refusal = kernel.unsupported_reason(platform, call)
    if refusal:
        raise Unsupported(
            f"implementation={named!r} {refusal}; use {xla_implementations[0].name!r}"
        )
    return ChosenImplementation(kernel, interpret=platform == "cpu")


@functools.cache
def kernels_by_name(operator: str) -> dict[str, KernelImplementation]:
    """Returns the plugin's kernels for an operator by name; an empty dict if there is no plugin."""
    try:
        table = getattr(importlib.import_module(KERNELS), "KERNELS", {})
    except ModuleNotFoundError as error:
        if error.name != KERNELS:
            raise
        table = {}
    return {
        name: KernelImplementation(operator, name, platform, module)
        for name, (platform, module) in table.get(operator, {}).items()
    }


def _kernels_folder_text() -> str:
    """Returns the path of the plugin's folder, for a message. If the folder is missing, the text
    says so.
    """
    folder = KERNELS.replace(".", "/")
    spec = importlib.util.find_spec(KERNELS)
    missing = spec is None or spec.origin is None
    return f"{folder}, which is missing" if missing else folder


# ---- What was decided, and tests of kernels


@dataclasses.dataclass(frozen=True)
class Decision:
    """What runs one operator in a traced function, and why.

    Attributes:
      operator: name of the operator.
      implementation: name of the XLA implementation or of the kernels.
      is_kernel: whether the operator runs kernels.
      why_chosen: why the implementation runs.
      why_no_kernels: why the kernels for this platform do not run, as a clause whose subject is the
        call; "" if the kernels run, if the platform has no kernels or if the caller named the
        implementation.
      shapes_and_dtypes: the shapes and dtypes of the first call for which this was decided.
    """

    operator: str
    implementation: str
    is_kernel: bool
    why_chosen: str
    why_no_kernels: str
    shapes_and_dtypes: str

    @property
    def slowness_warning(self) -> str:
        """A warning for users if the platform has kernels for the operator, but the operator runs
        without kernels and slows down a step; else "". There is no warning for a call that the
        kernels never run by default, such as a call with rows that are too short.
        """
        slow = _SLOW_WITHOUT_KERNELS.get(self.operator, "")
        if not slow or not self.why_no_kernels or self.why_no_kernels.endswith(BY_DEFAULT):
            return ""
        longer = "a step several times as long" if slow == "experts run" else "it to take longer"
        return f"{slow} without kernels: expect {longer}"


class _ThreadState(threading.local):
    """The records of one thread that traces a function.

    Attributes:
      decisions: (operator, implementation, reason, refusal) → decision; None while
        `trace_and_record` does not run in this thread.
      tests: kind of call → the postponed test of the kernels for this kind of call; the test
        returns "" or what went wrong.
      reason, refusal: why the kernels that `choose_implementation` considered last are, or are not,
        the default.
    """

    def __init__(self):
        self.decisions: dict[tuple, Decision] | None = None
        self.tests: dict[Hashable, Callable[[], str]] = {}
        self.reason = self.refusal = ""


_state = _ThreadState()


def trace_and_record(trace: Callable[[], object]) -> tuple[Decision, ...]:
    """Calls `trace()`, which traces a function, and returns the decisions that this thread made
    during the trace, each decision once. The tests of kernels are postponed during the trace; they
    run in parallel after the trace has ended. If a test fails, JAX's caches of traced functions are
    cleared, and `trace()` is called again without the kernels that failed; an error of the first
    `trace()` is ignored, because it may come from these kernels. If no test fails, an error of
    `trace()` is raised.
    """
    while True:
        error = None
        with _recording_decisions():
            try:
                trace()
            except Exception as raised:
                error = raised
            decisions, tests = tuple(_state.decisions.values()), tuple(_state.tests.values())
        failures = []
        if tests:
            with concurrent.futures.ThreadPoolExecutor(len(tests)) as pool:
                failures = [reason for reason in pool.map(lambda test: test(), tests) if reason]
        if failures:
            jax.clear_caches()
        elif error is not None:
            raise error
        else:
            return decisions


def postpone_kernel_test(kind: Hashable, test: Callable[[], str]) -> bool:
    """Postpones the test of a call's kernels if `trace_and_record` is running in this thread.
    Returns whether the test is postponed. If the test is not postponed, the caller has to run the
    test at once.

    Args:
      kind: everything on which the outcome of the test depends. Only one test of each kind runs.
      test: returns "" if the kernels passed, otherwise what went wrong. The function has to store
        the outcome, so that later calls of `choose_implementation` know the outcome.
    """
    if is_recording_decisions():
        _state.tests.setdefault(kind, test)
    return is_recording_decisions()


def record_why_default(enabled: bool, reason: str) -> None:
    """Records why kernels run a call by default (if `enabled`), or why they do not. The function
    `is_default` of a kernels' module calls `record_why_default`. If kernels do not run, `reason` is
    a clause whose subject is the call, such as "has rows of 8 tokens".
    """
    if enabled:
        _state.reason = reason
    else:
        _state.refusal = _state.refusal or reason


def is_recording_decisions() -> bool:
    """Whether this thread is tracing a function for `trace_and_record`."""
    return _state.decisions is not None


@contextlib.contextmanager
def _recording_decisions() -> Iterator[None]:
    _state.decisions, _state.tests = {}, {}
    try:
        yield
    finally:
        _state.decisions, _state.tests = None, {}


def _record_decision(
    operator, call, chosen: ChosenImplementation, reason: str, refusal: str = ""
) -> None:
    if not is_recording_decisions():
        return
    kind = operator, chosen.name, reason, refusal
    if kind not in _state.decisions:
        _state.decisions[kind] = Decision(
            operator, chosen.name, chosen.is_kernel, reason, refusal, _shapes_and_dtypes_text(call)
        )


def _shapes_and_dtypes_text(call: Mapping[str, Any]) -> str:
    """Returns the dtypes and shapes of the first three arrays of a call, such as "bfloat16
    [8, 4096, 256]".
    """
    leaves = jax.tree.leaves(list(call.values()))
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    return ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays[:3])
