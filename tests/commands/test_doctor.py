"""`qwen3next doctor`: what it finds, and its exit code."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from qwen3next_jax import kernels as plugin
from qwen3next_jax.commands import doctor
from qwen3next_jax.common import installation
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.implementations import XlaImplementation, choose_implementation


def test_every_part_traces_and_asks_for_its_operators():
    results = doctor.tested_operators(1, 128)
    for part in results:
        decisions = implementations.trace_and_record(
            lambda: jax.jit(part.forward_and_backward).trace(*part.argument_shapes)
        )
        found = {decision.operator for decision in decisions}
        assert found >= {part.operator_names[-1]}, part.table_name
        assert part.memory_bytes > 0, part.table_name


@pytest.fixture
def kernel(monkeypatch):
    """The module of the kernels of an operator "doubled", on what looks like a GPU."""
    module = types.SimpleNamespace(unsupported_reason=lambda x: "", run=lambda x: 2 * x)
    monkeypatch.setitem(plugin.KERNELS, "doubled", {"kernel": ("gpu", "doubled_kernel")})
    monkeypatch.setitem(sys.modules, "doubled_kernel", module)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    implementations.kernels_by_name.cache_clear()
    yield module
    implementations.kernels_by_name.cache_clear()


FORMS = (XlaImplementation("xla", ("cpu", "gpu"), {"run": lambda x: x + x}),)


def part():
    """Returns a part with a function of its own, which JAX has not traced yet."""
    return doctor.TestedOperator(
        "double",
        ("doubled",),
        lambda x: choose_implementation("doubled", None, FORMS, x=x).function_named("run")(x),
        (jax.ShapeDtypeStruct((1024,), jnp.float32),),
        flops=0,
        memory_bytes=8 * 1024,
    )


def no_memory(x):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")


@pytest.mark.parametrize(
    "change, code, why",
    [
        ({}, 0, "the default on a GPU"),
        (
            {"unsupported_reason": lambda x: "has an odd size"},
            1,
            "without kernels: the call has an odd size",
        ),
        (
            {"unsupported_reason": lambda x: f"failed {implementations.WHERE_TRIED}"},
            2,
            "failed where",
        ),
        (
            {
                "unsupported_reason": lambda x: (
                    f"failed {implementations.WHERE_TRIED}: {implementations.NO_MEMORY}"
                )
            },
            1,
            implementations.NO_MEMORY,
        ),
        ({"run": no_memory}, 0, "not timed, for lack of memory; the default on a GPU"),
        ({"run": lambda x: x @ x[:2]}, 2, "TypeError: "),
    ],
)
def test_the_exit_code_says_what_is_wrong(kernel, capsys, change, code, why):
    vars(kernel).update(change)
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    (result,) = doctor.check_operators([part()], device)
    assert doctor._print_verdict([result]) == result.exit_code == code
    assert why in result.reason_or_error
    assert (result.share_of_peak is None) == (result.shortest_seconds is None) == ("run" in change)
    assert ("double" in capsys.readouterr().out) == (code > 0)


def test_a_second_trace_forgets_the_first_error(kernel, monkeypatch):
    failing = [no_memory]

    def function(x):
        return failing.pop()(x) if failing else x + x

    twice = lambda trace: (trace(), trace())[:0]
    monkeypatch.setattr(implementations, "trace_and_record", twice)
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    (result,) = doctor.check_operators(
        [dataclasses.replace(part(), forward_and_backward=function)], device
    )
    assert result.exit_code == 0
    assert result.shortest_seconds is not None


@pytest.mark.parametrize(
    "environment, plugin_found, devices, library, platform, says",
    [
        ({}, False, True, True, "cpu", "--extra gpu"),
        ({"LD_LIBRARY_PATH": "/opt/cuda"}, True, True, True, "cpu", "LD_LIBRARY_PATH=/opt/cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, True, True, "cpu", "CUDA_VISIBLE_DEVICES hides"),
        ({}, True, False, True, "cpu", "--gpus=all"),
        ({}, True, True, True, "cpu", "nvidia-smi shows"),
        ({"JAX_PLATFORMS": "cpu"}, True, True, True, "cpu", ""),
        ({"JAX_PLATFORMS": "cuda,cpu"}, True, True, True, "cpu", "nvidia-smi shows"),
        ({}, True, True, True, "gpu", ""),
        ({}, True, True, False, "cpu", "/usr/local/nvidia/lib64"),
    ],
)
def test_a_gpu_that_jax_does_not_use_is_named(
    monkeypatch, tmp_path, environment, plugin_found, devices, library, platform, says
):
    driver, device = tmp_path / "version", tmp_path / "nvidia0"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release")
    if devices:
        device.touch()
    monkeypatch.setattr(installation, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(installation, "GPU_DEVICES", (device,))
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: plugin_found or None)
    monkeypatch.setattr(installation, "has_cuda_driver_library", lambda: library)
    installation.exclude_absent_tpu_from_jax(
        environment
    )  # as every command begins; libtpu is there
    line = installation.unused_gpu_message(environment, platform)
    assert bool(line) == bool(says)
    assert says in line
    assert not line or "driver 580.82.07" in line


def test_a_gpu_without_driver_is_missed_where_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "NVIDIA_DRIVER", tmp_path / "absent")
    assert installation.unused_gpu_message({}, "cpu") == ""
    asked = installation.unused_gpu_message({"JAX_PLATFORMS": "cuda,cpu"}, "cpu")
    assert "JAX_PLATFORMS=cuda,cpu" in asked
    assert str(tmp_path / "absent") in asked
