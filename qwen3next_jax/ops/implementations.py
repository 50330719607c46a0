"""Chooses the implementation of an operator that runs a call.

There are two kinds of implementations. A "form" uses XLA alone; the operator's own module lists its
forms in a tuple `FORMS`. An operator may also have kernels, which the plugin package
`qwen3next_jax.kernels` lists by operator. If a call names an implementation, `choose` returns it,
or raises an error that says why it cannot run. If a call names none, `choose` returns the best one
for the platform that the program is compiled for (`compile_target`). If the plugin is not
installed, every operator runs one of its forms.
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
    """Raised when the named implementation cannot run a call. Its message is one line for a
    user.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """An implementation of an operator that uses XLA alone.

    Attributes:
      name: name of the form, which the operator's argument `implementation` takes. Several forms of
        an operator may have one name.
      platforms: platforms on which the form is the default if no kernel runs. A call that names the
        form can run on every platform: it runs the form of that name that lists the platform, or,
        if there is none, the last form of that name.
      functions: the form's functions by name, such as "forward" and "backward".
    """

    name: str
    platforms: tuple[str, ...]
    functions: Mapping[str, Callable]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operator's kernels for one platform. A call that names them can also run them on a CPU,
    which interprets them.

    Attributes:
      operator: name of the operator in the plugin's table.
      name: name of the kernels, which the operator's argument `implementation` takes.
      platform: "tpu" or "gpu".
      module: import string of the module that has the operator's functions, each with an argument
        `interpret`. The module also has a function `supports(**call)`, which returns "" or the
        reason why the kernels cannot run a call. It may have a function `is_default(**call)`, which
        returns whether a call that names no implementation runs the kernels; in a module without
        `is_default`, every such call that the kernels support runs them.
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

    def is_default(self, call: Mapping[str, Any]) -> bool:
        """Returns whether a call that names no implementation runs these kernels. `call` holds the
        arguments that `supports` of the module takes.
        """
        module = self.load()
        if hasattr(module, "is_default"):
            return module.is_default(**call)
        return not module.supports(**call)

    def refusal(self, platform: str, call: Mapping[str, Any]) -> str:
        """Returns why a call that names these kernels cannot run on `platform`; "" if it can."""
        if platform not in (self.platform, "cpu"):
            return f"on {platform}: expected {_PLATFORMS[self.platform]}, or a CPU to interpret it"
        return self.load().supports(**call)


class Chosen(NamedTuple):
    """The implementation that runs the forward and the backward pass of one call. It is hashable,
    so that a function with a custom gradient can take it as a static argument.

    Attributes:
      implementation: the form or the kernels.
      interpret: whether a CPU interprets the kernels.
    """

    implementation: Form | Kernel
    interpret: bool = False

    @property
    def name(self) -> str:
        """The name of the form or of the kernels."""
        return self.implementation.name

    @property
    def is_kernel(self) -> bool:
        """Whether the implementation is kernels, not a form."""
        return isinstance(self.implementation, Kernel)

    def function(self, name: str) -> Callable:
        """Returns the implementation's function called `name`, such as "forward"."""
        if isinstance(self.implementation, Form):
            return self.implementation.functions[name]
        function = getattr(self.implementation.load(), name)
        return functools.partial(function, interpret=True) if self.interpret else function

    def constant(self, name: str, default):
        """Returns the constant called `name` of the kernels' module. Returns `default` if the
        module has no such constant, or if the implementation is a form.
        """
        return getattr(self.implementation.load(), name, default) if self.is_kernel else default


def choose(operator: str, named: str | None, forms: tuple[Form, ...], **call) -> Chosen:
    """Returns the implementation that runs one call.

    Args:
      operator: name of the operator in the plugin's table.
      named: name of the implementation that the caller asks for; None asks for the best one.
      forms: the operator's forms. The message of `Unsupported` recommends the first one.
      call: the arrays and settings of the call, which the function `supports` of the operator's
        kernels takes.

    Raises:
      Unsupported: the named implementation cannot run this call, or the plugin that has it is
        missing. This is a NotImplementedError.
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
    # No kernel is the default on a CPU, so the plugin is not imported there.
    if platform != "cpu":
        for kernel in kernels(operator).values():
            if kernel.platform == platform and kernel.is_default(call):
                return Chosen(kernel)
    return Chosen(next((form for form in forms if platform in form.platforms), forms[0]))


@functools.cache
def kernels(operator: str) -> dict[str, Kernel]:
    """Returns the plugin's kernels for an operator by name; an empty dict if there is no plugin."""
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
    """Returns the path of the plugin's folder for a message, and says there if it is missing."""
    folder = KERNELS.replace(".", "/")
    spec = importlib.util.find_spec(KERNELS)
    missing = spec is None or spec.origin is None
    return f"{folder}, which is missing" if missing else folder
