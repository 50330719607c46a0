"""The platform that the program which is being traced will be compiled for, and on a TPU the chip.

Operators choose their implementation by it while they are traced (`implementations.choose`), so
that nothing of another platform is traced.
"""

import contextlib
from typing import NamedTuple

import jax

# It is part of the key of JAX's caches, so a function is traced again for another platform.
_platform = jax.make_user_context(None)


class CompileTarget(NamedTuple):
    """A platform and how it is known.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      described: whether an abstract mesh or `compiling_for` names the platform; this process may
        have no such device to test kernels on.
    """

    platform: str
    described: bool

    @property
    def tpu(self):
        """JAX's `TpuInfo`, with figures of one core of the chip; None on another platform, or if
        the chip is not known.
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
        """Bytes of HBM of the whole chip; None if they are not known."""
        chip = self.tpu
        return None if chip is None else chip.hbm_capacity_bytes * chip.num_cores


def compile_target() -> CompileTarget:
    """The target of the current trace: the first of these that is set: `compiling_for`; the device
    of the abstract mesh (`jax.sharding.use_abstract_mesh` sets it, and `shard_map` inside itself);
    `jax.default_device`; JAX's default backend.
    """
    if _platform.value is not None:
        return CompileTarget(_platform.value, described=True)
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        platform = _platform_of(device)
        return CompileTarget(platform, described=platform != jax.default_backend())
    device = jax.config.jax_default_device
    if device is not None:
        return CompileTarget(_our_name(getattr(device, "platform", device)), described=False)
    return CompileTarget(_our_name(jax.default_backend()), described=False)


@contextlib.contextmanager
def compiling_for(platform: str):
    """A context in which functions are traced for `platform` ("cpu", "gpu" or "tpu"), whatever this
    machine is. Use it around `lower(lowering_platforms=…)` and `jax.export` for another platform.
    """
    with _platform(_our_name(platform)):
        yield


def _platform_of(device) -> str:
    """The platform of an abstract device. In older JAX such a device has only a kind, such as "TPU
    v5" or "NVIDIA H100".
    """
    if hasattr(device, "platform"):
        return _our_name(device.platform)
    return {"TPU": "tpu", "NVIDIA": "gpu"}.get(device.device_kind.split()[0], "cpu")


def _our_name(platform: str) -> str:
    """The name "gpu" for JAX's "cuda" and "rocm"."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
