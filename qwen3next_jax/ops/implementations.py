"""The choice of the implementation of an operator that runs a call.

An operator has forms, written in XLA alone and listed in a table beside its API. It may have
kernels, which the plugin package `qwen3next_jax.kernels` lists by operator. `choose` takes the
named one, or raises and says why that one cannot run. For a call that names none, it takes the best
one for the platform that the program is compiled for (`compile_target`). Without the plugin the
library runs the forms in XLA.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from qwen3next_jax.ops.compile_target import compile_target

KERNELS = "qwen3next_jax.kernels"
_PLATFORMS = {"tpu": "a TPU", "gpu": "a GPU"}


class Unsupported(NotImplementedError):
    """The named implementation cannot run this call; the message is one line for a user."""


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """An operator in XLA alone.

    Attributes:
      name: as the operator's `implementation=` takes it.
      platforms: on which it is the default if no kernel runs. If named, it runs on every platform;
        of several forms with that name the one for the platform runs, else the last one.
      functions: by name, such as "forward" and "backward".
    """

    name: str
    platforms: tuple[str, ...]
    functions: Mapping[str, Callable]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operator's kernels for one platform. If named, they also run interpreted on a CPU.

    Attributes:
      operator: its name in the plugin's table.
      name: as the operator's `implementation=` takes it.
      platform: "tpu" or "gpu".
      module: the import string of a module with the operator's functions, each with an argument
        `interpret`, and a function `supports(**call)`, which returns why the kernels cannot run a
        call, or "". It may have a function `is_default(**call)`, which returns whether a call that
        names no implementation runs the kernels; without it every call that they support does.
    """

    operator: str
    name: str
    platform: str
    module: str

    def load(self) -> ModuleType:
        """The module, imported. Raises ImportError, with the plugin's entry, if that fails."""
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(
                f"{KERNELS} lists {self.module} as {self.name!r} of {self.operator}, but its "
                f"import failed ({type(error).__name__}: {error})"
            ) from error

    def is_default(self, call: Mapping[str, Any]) -> bool:
        """Whether a call that names no implementation runs these kernels."""
        module = self.load()
        if hasattr(module, "is_default"):
            return module.is_default(**call)
        return not module.supports(**call)

    def refusal(self, platform: str, call: Mapping[str, Any]) -> str:
        """Why a call that names these kernels cannot run on `platform`; "" where it can."""
        if platform not in (self.platform, "cpu"):
            return f"on {platform}: expected {_PLATFORMS[self.platform]}, or a CPU to interpret it"
        return self.load().supports(**call)


class Chosen(NamedTuple):
    """The implementation that runs one call, forward and backward. It is hashable, so that a custom
    gradient can take it as a static argument.
    """

    implementation: Form | Kernel
    interpret: bool = False

    @property
    def name(self) -> str:
        return self.implementation.name

    @property
    def is_kernel(self) -> bool:
        return isinstance(self.implementation, Kernel)

    def function(self, name: str) -> Callable:
        """The implementation's function of that name, such as "forward"."""
        if isinstance(self.implementation, Form):
            return self.implementation.functions[name]
        function = getattr(self.implementation.load(), name)
        return functools.partial(function, interpret=True) if self.interpret else function

    def constant(self, name: str, default):
        """The constant of a kernel's module; `default` if it has none, and for forms in XLA."""
        return getattr(self.implementation.load(), name, default) if self.is_kernel else default


def choose(operator: str, named: str | None, forms: tuple[Form, ...], **call) -> Chosen:
    """The implementation for one call.

    Args:
      operator: its name in the plugin's table.
      named: the caller's `implementation`; None for the best.
      forms: those in XLA. The error message recommends the first.
      call: arrays and settings, as `supports` of the operator's kernels takes them.

    Raises:
      Unsupported: a NotImplementedError: the named implementation cannot run this call, or the
        plugin that has it is missing.
      ImportError: the plugin lists a module that cannot be imported.
    """
    platform = compile_target().platform
    if named is not None:
        same_name = [form for form in forms if form.name == named]
        if same_name:
            return Chosen(next((f for f in same_name if platform in f.platforms), same_name[-1]))
        kernel, refusal = kernels(operator).get(named), "is not in the folder " + _folder()
        if kernel is not None:
            refusal = kernel.refusal(platform, call)
        if refusal:
            raise Unsupported(f"implementation={named!r} {refusal}; use {forms[0].name!r}")
        return Chosen(kernel, interpret=platform == "cpu")
    # No kernel is the default on a CPU, so the plugin is not even imported there.
    if platform != "cpu":
        for kernel in kernels(operator).values():
            if kernel.platform == platform and kernel.is_default(call):
                return Chosen(kernel)
    return Chosen(next((form for form in forms if platform in form.platforms), forms[0]))


@functools.cache
def kernels(operator: str) -> dict[str, Kernel]:
    """The plugin's kernels of an operator by name; empty where the plugin is missing."""
    try:
        table = getattr(importlib.import_module(KERNELS), "KERNELS", {})
    except ModuleNotFoundError as error:
        if error.name != KERNELS:
            raise
        table = {}
    return {
        name: Kernel(operator, name, platform, module)
        for name, (platform, module) in table.get(operator, {}).items()
    }


def _folder() -> str:
    folder = KERNELS.replace(".", "/")
    spec = importlib.util.find_spec(KERNELS)
    missing = spec is None or spec.origin is None
    return f"{folder}, which is missing" if missing else folder
