"""Tests of kernels on a GPU that are put off while a step is traced, with stand-in kernels."""

import sys
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from qwen3next_jax import kernels as plugin
from qwen3next_jax.kernels import self_test
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.implementations import (
    XlaImplementation,
    choose_implementation,
    trace_and_record,
)

FORMS = (XlaImplementation("xla", ("cpu", "gpu"), {"run": lambda x: x}),)


@pytest.fixture
def operators(monkeypatch, tmp_path):
    """Adds operators "attention" and "b" with a kernel each that doubles x. The results of their
    tests are the values of the returned dict: functions that return an error.
    """
    results = {}

    def kernel(operator):
        def is_default(x):
            test = self_test.SelfTest(
                operator, "", (x.shape,), (), lambda: ("y", results[operator]()), tolerance=0.5
            )
            return self_test.kernels_run_by_default(test)

        return types.SimpleNamespace(
            unsupported_reason=lambda x: "", is_default=is_default, run=lambda x: 2 * x
        )

    for operator in ("attention", "b"):
        monkeypatch.setitem(plugin.KERNELS, operator, {"kernel": ("gpu", f"{operator}_kernel")})
        monkeypatch.setitem(sys.modules, f"{operator}_kernel", kernel(operator))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(self_test, "FOLDER", tmp_path)
    monkeypatch.setattr(self_test, "_agreed_outcomes", {})
    self_test._print_first_time.cache_clear()
    implementations.kernels_by_name.cache_clear()
    yield results
    implementations.kernels_by_name.cache_clear()


def step():
    """Returns a new function that calls both operators, jitted."""

    def call(operator, x):
        return choose_implementation(operator, None, FORMS, x=x).function_named("run")(x)

    return jax.jit(lambda x: call("attention", x) + call("b", x))


def traced(function, x=jnp.ones(3)):
    """Returns operator → (implementation, reason or refusal, consequence), and the result."""
    decisions = trace_and_record(lambda: function.trace(x))
    return {
        d.operator: (d.implementation, d.why_no_kernels or d.why_chosen, d.slowness_warning)
        for d in decisions
    }, float(function(x)[0])


def test_outcomes_of_self_tests_are_stored(operators, capsys):
    both_run = threading.Barrier(2)
    operators["attention"] = operators["b"] = lambda: both_run.wait(timeout=20) * 0.0
    found, result = traced(step())
    assert [name for name, _, _ in found.values()] == ["kernel", "kernel"]
    assert result == 4
    assert len(capsys.readouterr().err.splitlines()) == 2

    def fails():
        raise AssertionError("a stored outcome needs no test")

    operators["attention"] = operators["b"] = fails
    self_test._agreed_outcomes.clear()  # as in a new process
    assert traced(step()) == (found, result)
    assert not capsys.readouterr().err  # the run shows the decisions in its head


def test_a_failed_kernel_is_traced_around(operators, capsys):
    operators["attention"], operators["b"] = lambda: 1.0, lambda: 0.0
    found, result = traced(step())
    name, refusal, consequence = found["attention"]
    assert name == "xla"
    assert found["b"][0] == "kernel"
    assert result == 1 + 2
    assert "another y" in refusal
    assert "attention" in consequence


def test_an_error_of_an_untested_kernel_is_no_end(operators, monkeypatch):
    """The test fails for the same reason, and the step is traced without the kernel."""

    def broken(x):
        raise ImportError("libcudnn.so.9")

    monkeypatch.setattr(sys.modules["attention_kernel"], "run", broken)
    operators["attention"], operators["b"] = lambda: broken(0), lambda: 0.0
    found, result = traced(step())
    assert found["attention"][0] == "xla"
    assert "libcudnn" in found["attention"][1]
    assert found["b"][0] == "kernel"
    assert result == 1 + 2


def test_a_library_that_cannot_be_imported_fails_the_test(tmp_path):
    test = self_test.SelfTest("a", "", (), ("no_such_library",), lambda: ("y", 0.0), 0.5)
    device = types.SimpleNamespace(device_kind="H100")
    failure = self_test.find_failure(device, test, tmp_path)
    assert "no_such_library" in failure
    assert implementations.WHERE_TRIED in failure


def test_an_error_that_is_no_kernels_ends_the_trace(operators):
    operators["attention"] = operators["b"] = lambda: 0.0
    function = step()

    def trace():
        function.trace(jnp.ones(3))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_and_record(trace)


def test_a_test_without_memory_runs_again(operators, tmp_path):
    def no_memory():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

    operators["attention"], operators["b"] = no_memory, lambda: 0.0
    found, _ = traced(step())
    assert found["attention"][1].endswith("too little of its memory was free")
    operators["attention"] = lambda: 0.0
    self_test._agreed_outcomes.clear()
    assert traced(step())[0]["attention"][0] == "kernel"


def test_what_a_caller_names_has_no_consequence(operators):
    function = jax.jit(
        lambda x: choose_implementation("attention", "xla", FORMS, x=x).function_named("run")(x),
    )
    assert traced(function) == ({"attention": ("xla", "named by the caller", "")}, 1.0)


def test_kernels_that_raise_when_traced_fail_and_xla_runs(operators, monkeypatch):
    def raises(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sys.modules["attention_kernel"], "run", raises)
    operators["attention"], operators["b"] = raises, lambda: 0.0
    found, result = traced(step())
    assert (found["attention"][0], found["b"][0], result) == ("xla", "kernel", 1 + 2)
    assert "no such kernel" in found["attention"][1]


def test_an_error_of_a_trace_is_raised(operators):
    operators["attention"] = operators["b"] = lambda: 0.0

    def trace():
        step().trace(jnp.ones(3))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_and_record(trace)


def test_a_line_not_printed_while_recording_is_printed_later(capsys):
    with implementations._recording_decisions():
        self_test.print_once("a line")
    for _ in range(2):
        self_test.print_once("a line")
    assert capsys.readouterr().err == "a line\n"


def test_a_trace_that_fails_leaves_nothing_recording(operators):
    with pytest.raises(ZeroDivisionError):
        trace_and_record(lambda: 1 / 0)
    assert not implementations.is_recording_decisions()
