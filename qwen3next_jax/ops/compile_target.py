"""Finds the platform for which the program that is being traced will be compiled, and for a TPU
also the chip.

While operators are traced, they choose their implementation by the platform that the program is
compiled for (`implementations.choose_implementation`). So JAX traces no code for other platforms.
"""

import contextlib
from typing import NamedTuple

import jax

# A "user context" of JAX. Its value is part of the key of JAX's caches, so JAX traces a function
# again for another platform.
_platform = jax.make_user_context(None)


class CompileTarget(NamedTuple):
    """The platform that a program is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      may_lack_device: True if `compiling_for` names the platform, or if an abstract mesh names
        another platform than this process's default. If `may_lack_device` is True, kernels cannot
        be tested, because the process may have no device of the platform.
    """

    platform: str
    may_lack_device: bool

    @property
    def tpu_info(self):
        """JAX's `TpuInfo`, which describes one core of the chip. `tpu_info` is None if the platform
        is no TPU, or if JAX does not know the chip.
        """
        if self.platform != "tpu":
            return None
        # The import takes a second, so it is done only for a TPU.
        from jax.experimental.pallas import tpu

        try:
            return tpu.get_tpu_info()
        except ValueError:
            return None

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of HBM of all cores of a TPU chip; None if `tpu_info` is None."""
        chip = self.tpu_info
        return None if chip is None else chip.hbm_capacity_bytes * chip.num_cores


def compile_target() -> CompileTarget:
    """Returns the target of the current trace. The target comes from the first setting of this list
    that is set:

    1. the context `compiling_for`;
    2. the device of the abstract mesh, which `jax.sharding.use_abstract_mesh` sets, and which
       `shard_map` sets for its body;
    3. `jax.default_device`;
    4. JAX's default backend.
    """
    if _platform.value is not None:
        return CompileTarget(_platform.value, may_lack_device=True)
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        platform = _platform_of_device(device)
        return CompileTarget(platform, may_lack_device=platform != jax.default_backend())
    device = jax.config.jax_default_device
    if device is not None:
        return CompileTarget(
            _platform_name(getattr(device, "platform", device)), may_lack_device=False
        )
    return CompileTarget(_platform_name(jax.default_backend()), may_lack_device=False)


@contextlib.contextmanager
def compiling_for(platform: str):
    """Returns a context in which operators choose their implementations for `platform` ("cpu",
    "gpu" or "tpu"), whatever devices this machine has. Use this context around
    `lower(lowering_platforms=…)` and `jax.export` for another platform.
    """
    with _platform(_platform_name(platform)):
        yield


def _platform_of_device(device) -> str:
    """Returns the platform of an abstract device. In older versions of JAX, an abstract device has
    only a kind, such as "TPU v5" or "NVIDIA H100".
    """
    if hasattr(device, "platform"):
        return _platform_name(device.platform)
    return {"TPU": "tpu", "NVIDIA": "gpu"}.get(device.device_kind.split()[0], "cpu")


def _platform_name(platform: str) -> str:
    """Returns "gpu" for JAX's names "cuda" and "rocm", and any other name unchanged."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
