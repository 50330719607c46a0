"""Imports the kernels for Hopper GPUs of the library tokamax, and says whether they can run here
(docs/gpu.md).
"""

import importlib
import importlib.metadata
import importlib.util

import jax

from qwen3next_jax.kernels import self_test

# The kernels have no public names in tokamax, so another release may not have them. Only this
# release is accepted.
RELEASE = "0.0.17"


def module(name: str):
    """Imports and returns a module of tokamax's operators, such as
    "ragged_dot.pallas_mosaic_gpu_common".
    """
    return importlib.import_module(f"tokamax._src.ops.{name}")


def unsupported() -> str:
    """Returns why tokamax's kernels cannot run in this process; "" if they can."""
    if importlib.util.find_spec("tokamax") is None:
        return f"without tokamax, which is not installed: expected {RELEASE} (the extra gpu)"
    if (found := importlib.metadata.version("tokamax")) != RELEASE:
        return f"with tokamax {found}: expected {RELEASE}"
    if jax.__version_info__ < (0, 12):
        return (
            f"with jax {jax.__version__}, where -accumulator * x gives zeros on an H100: expected "
            "0.12"
        )
    return self_test.unsupported_chip()
