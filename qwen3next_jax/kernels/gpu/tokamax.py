"""Imports the kernels of the library tokamax, and says whether these kernels can run here
(docs/gpu.md). tokamax has kernels in two languages: Mosaic, for Hopper GPUs, and Triton, for GPUs
from Ampere on.

The processes of a run have to compile the same program, so all processes agree on whether the
kernels can run.
"""

import importlib
import importlib.metadata
import os
import re

import jax

from qwen3next_jax.kernels import self_test
from qwen3next_jax.ops.compile_target import compile_target

# The kernels have no public names in tokamax, so another release may not have them. Only this
# release is accepted.
RELEASE = "0.0.17"
# What jax-triton 0.4 needs. An older Triton, such as that of torch 2.11, compiles none of tokamax's
# kernels.
MIN_TRITON = (3, 7)


def import_tokamax_operator(name: str):
    """Imports and returns a module of tokamax's operators, such as
    "ragged_dot.pallas_mosaic_gpu_common".
    """
    # Triton 3.9 warns where this is not set, since its next release changes the default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return importlib.import_module(f"tokamax._src.ops.{name}")


def mosaic_unsupported_reason() -> str:
    """Returns why tokamax's Mosaic kernels cannot run in this run; "" if they can."""
    return (
        self_test.agree_on_reason(
            "tokamax", _missing_package_reason("tokamax", RELEASE) or _old_jax_reason()
        )
        or self_test.unsupported_chip_reason()
    )


def triton_unsupported_reason() -> str:
    """Returns why tokamax's Triton kernels cannot run in this run; "" if they can."""
    return self_test.agree_on_reason(
        "tokamax's Triton kernels",
        _missing_package_reason("tokamax", RELEASE)
        or _missing_package_reason("jax-triton")
        or _missing_package_reason("triton")
        or _old_triton_reason()
        or _old_chip_reason(),
    )


def _missing_package_reason(package: str, only_release: str = "") -> str:
    """Returns why a package cannot be used; "" if it can. `only_release` is the only accepted
    release; "" accepts any release.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        needed = f"{only_release} (the extra gpu)" if only_release else "the extra gpu"
        return f"without {package}, which is not installed: expected {needed}"
    return (
        f"with {package} {found}: expected {only_release}"
        if only_release not in ("", found)
        else ""
    )


def _old_jax_reason() -> str:
    if jax.__version_info__ >= (0, 12):
        return ""
    return (
        f"with jax {jax.__version__}, where -accumulator * x gives zeros on an H100: expected 0.12"
    )


def _old_triton_reason() -> str:
    found = importlib.metadata.version("triton")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= MIN_TRITON:
        return ""
    least = ".".join(map(str, MIN_TRITON))
    return f"with triton {found}: expected {least} or later (the extra gpu)"


def _old_chip_reason() -> str:
    if compile_target().platform == "cpu":  # as `self_test.unsupported_chip_reason`
        return ""
    chip = compute_capability()
    return "" if chip >= 8 else f"on a GPU of compute capability {chip}: expected 8.0 or more"


def compute_capability() -> float:
    """Returns the compute capability of this process's first GPU, such as 9.0 for an H100; 0 if the
    process has no GPU.
    """
    return float(getattr(jax.local_devices()[0], "compute_capability", 0) or 0)
