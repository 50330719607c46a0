"""What the program that is being traced will be compiled for: a platform, and of a TPU its chip.

Operators choose an implementation by it while they are traced (`implementations.choose`), so that
nothing of another platform is ever traced.
"""

import contextlib
from typing import NamedTuple

import jax

# Part of the key of JAX's caches: a function is traced anew for another platform.
_platform = jax.make_user_context(None)


class CompileTarget(NamedTuple):
    """platform: "cpu", "gpu" or "tpu". described: whether an abstract mesh or `compiling_for` names
    the platform, and not the devices of this process; its kernels then cannot be tried here.
    """

    platform: str
    described: bool

    @property
    def tpu(self):
        """JAX's `TpuInfo` of the chip, figures of one core; None for another platform, and where
        the chip is not known.
        """
        if self.platform != "tpu":
            return None
        from jax.experimental.pallas import tpu  # takes a second: only where a TPU is the target

        try:
            return tpu.get_tpu_info()
        except ValueError:
            return None

    @property
    def memory_bytes(self) -> int | None:
        """Of the whole chip's HBM; None where it is not known."""
        chip = self.tpu
        return None if chip is None else chip.hbm_capacity_bytes * chip.num_cores


def compile_target() -> CompileTarget:
    """The target of the trace that runs now.

    In this order: what `compiling_for` says; the device that the abstract mesh describes (set by
    `jax.sharding.use_abstract_mesh`, and inside `shard_map`); `jax.default_device`; the platform
    that JAX runs on by default.
    """
    if _platform.value is not None:
        return CompileTarget(_platform.value, described=True)
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        platform = _platform_of(device)
        return CompileTarget(platform, described=platform != jax.default_backend())
    device = jax.config.jax_default_device
    if device is not None:
        return CompileTarget(_named(getattr(device, "platform", device)), described=False)
    return CompileTarget(_named(jax.default_backend()), described=False)


@contextlib.contextmanager
def compiling_for(platform: str):
    """What is traced inside will be compiled for `platform` ("cpu", "gpu" or "tpu"), on whatever
    machine this is: say so before you trace a function for
    `lower(lowering_platforms=…)` or `jax.export` to another platform.
    """
    with _platform(_named(platform)):
        yield


def _platform_of(device) -> str:
    """Of an abstract device; older JAX gives its kind alone ("TPU v5", "NVIDIA H100")."""
    if hasattr(device, "platform"):
        return _named(device.platform)
    return {"TPU": "tpu", "NVIDIA": "gpu"}.get(device.device_kind.split()[0], "cpu")


def _named(platform: str) -> str:
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
