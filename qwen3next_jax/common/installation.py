"""Tells how this project was installed, so that messages name commands that work. In a checkout,
`uv run` makes the environment; an installed package has its command on the PATH. This module also
tells whether JAX finds TPU chips on this machine, or only their compiler.
"""

import ctypes
import importlib.util
import pathlib
import re
from collections.abc import Mapping, MutableMapping

# The environment variable that holds what `exclude_absent_tpu_from_jax` has put into JAX_PLATFORMS,
# for this process and those that it starts.
_OWN_CHOICE = "QWEN3NEXT_JAX_PLATFORMS"
_IN_CHECKOUT = (pathlib.Path(__file__).parents[2] / "pyproject.toml").exists()
# The device files of NVIDIA's GPUs, of the same in WSL, and of AMD's.
GPU_DEVICES = tuple(map(pathlib.Path, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
NVIDIA_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# JAX's plugins for NVIDIA GPUs, the one of the extra "gpu" first.
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def command_line_start(verb: str) -> str:
    """Returns the beginning of a command line, such as "uv run qwen3next eval"."""
    return f"uv run qwen3next {verb}" if _IN_CHECKOUT else f"qwen3next {verb}"


def how_to_install(extra: str) -> str:
    """Returns advice that installs the packages of an extra of pyproject.toml."""
    if _IN_CHECKOUT:
        return f"use `uv run --extra {extra} …`, or run `pip install -e '.[{extra}]'`"
    return f"run `pip install 'qwen3next-jax[{extra}]'`"


def has_tpu_chips() -> bool:
    """Whether this machine may have TPU chips: it has a device file of a kind that TPUs use."""
    return any(pathlib.Path("/dev").glob("accel[0-9]*")) or any(
        pathlib.Path("/dev/vfio").glob("[0-9]*")
    )


def exclude_absent_tpu_from_jax(environment: MutableMapping[str, str]) -> None:
    """Makes JAX leave out TPUs on a machine that has libtpu, the TPU's compiler, but no TPU.
    Otherwise libtpu would print errors on a machine without TPUs, although nothing is wrong.

    Call it before JAX is imported. The function changes nothing if the user has chosen platforms
    with JAX_PLATFORMS. Child processes inherit the choice.

    Args:
      environment: the environment variables of the process, `os.environ`.
    """
    is_chosen = "JAX_PLATFORMS" in environment or "JAX_FORCE_TPU_INIT" in environment
    if is_chosen or has_tpu_chips() or importlib.util.find_spec("libtpu") is None:
        return
    if not any(map(pathlib.Path.exists, GPU_DEVICES)):
        if nvidia_driver_release():  # `unused_gpu_message` says what is missing
            return
        platforms = "cpu"
    elif importlib.util.find_spec("jax_cuda13_plugin"):
        platforms = "cuda,cpu"
    else:
        return
    environment["JAX_PLATFORMS"] = environment[_OWN_CHOICE] = platforms


def user_chose_jax_platforms(platforms: str, environment: Mapping[str, str]) -> bool:
    """Whether the user, and not the function `exclude_absent_tpu_from_jax`, has chosen `platforms`,
    a value of JAX_PLATFORMS.

    Args:
      environment: the environment variables of the process, `os.environ`.
    """
    return platforms != environment.get(_OWN_CHOICE)


def nvidia_driver_release() -> str:
    """Returns the release of the NVIDIA driver of this machine; "" if it has none."""
    try:
        text = NVIDIA_DRIVER.read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", text)
    return found[1] if found else "of an unknown release"


def has_cuda_driver_library() -> bool:
    """Whether the loader finds the library of the NVIDIA driver, which CUDA's plugin opens."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def unused_gpu_message(environment: Mapping[str, str], platform: str) -> str:
    """Returns one line if JAX computes on the CPU although the machine has an NVIDIA GPU or
    JAX_PLATFORMS names CUDA first; otherwise "". If JAX_PLATFORMS names another platform first, the
    user does not want the GPU, and the result is "".

    Args:
      environment: the environment variables of the process, `os.environ`.
      platform: JAX's default backend.
    """
    chosen = environment.get("JAX_PLATFORMS", "")
    if not user_chose_jax_platforms(chosen, environment):
        chosen = ""
    chosen = chosen or environment.get("JAX_PLATFORM_NAME", "")
    wants_other = chosen.split(",")[0] not in ("", "cuda", "gpu")
    if platform != "cpu" or wants_other:
        return ""
    driver = nvidia_driver_release()
    if not driver:
        if not chosen:
            return ""
        return f"JAX_PLATFORMS={chosen} asks for a GPU: there is no NVIDIA driver ({NVIDIA_DRIVER})"
    found = f"this machine has an NVIDIA GPU (driver {driver}), but JAX computes on the CPU"
    if not any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        return f"{found}: it has no CUDA plugin; {how_to_install('gpu')}"
    if not any(map(pathlib.Path.exists, GPU_DEVICES)):
        return f"{found}: there is no device file /dev/nvidia0; a container needs --gpus=all"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"{found}: CUDA_VISIBLE_DEVICES hides the GPU; unset it"
    if not has_cuda_driver_library():
        return (
            f"{found}: the loader finds no libcuda.so.1; add its folder to LD_LIBRARY_PATH "
            "(on GKE /usr/local/nvidia/lib64)"
        )
    if path := environment.get("LD_LIBRARY_PATH"):
        return (
            f"{found}: its plugin finds no GPU; LD_LIBRARY_PATH={path} may give it other CUDA "
            "libraries than its own: unset it. nvidia-smi shows whether the driver works"
        )
    return (
        f"{found}: its plugin finds no GPU. nvidia-smi shows whether the driver works; CUDA 13 "
        "needs a driver of 580 or later"
    )
