"""The experts' kernels on GPUs, without a GPU. XLA's products stand in for tokamax's kernels. They
check the arrays by the rule of JAX's own copies, as tokamax's kernels do when they are lowered, and
write NaN where the kernels write nothing. With tokamax installed, its kernels are lowered as well.
"""

import enum
import functools
import importlib.metadata
import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.mosaic.gpu.launch_context import TileTransform

from benchmarks.kernels.experts_precision import by_token, errors, exact, inputs
from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import grouped_matmul as kernels
from qwen3next_jax.kernels.gpu import tokamax
from qwen3next_jax.model.expert_parallelism import local_moe
from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.ops.grouped_matmul import XLA_IMPLEMENTATIONS
from qwen3next_jax.ops.routed_experts.layout import _tile_size_and_counts
from tests.traced import operations

TRITON = "without triton, which is not installed: expected the extra gpu"
OLD = "on a GPU of compute capability 8.0: expected 9.0 (H100, H200)"
# D, I: the released model's experts, those of configs/small.py, and those of Qwen3-30B-A3B
WIDTHS = ((2048, 512), (512, 256), (2048, 768))


def in_whole_tiles(*arrays):
    """Raises what tokamax's Mosaic kernels raise for arrays that its copies do not take."""
    for array in arrays:
        TileTransform((8, 64)).transform_gmem_shape(array.shape[-2:])


def undefined_after(sizes, y):
    return jnp.where(jnp.arange(y.shape[0])[:, None] < jnp.sum(sizes), y, jnp.nan)


def rows(x, w, sizes):
    y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype)
    return undefined_after(sizes, y)


def weights(x, dy, sizes, dtype):
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])
    is_in = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])
    x_ERD = jnp.where(is_in[..., None], x, 0)
    return jnp.einsum("erd,rf->edf", x_ERD, dy, preferred_element_type=jnp.float32).astype(dtype)


def mosaic_rows(x, w, sizes, dtype, config):
    in_whole_tiles(x, w, jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), dtype))
    return rows(x, w, sizes)


def mosaic_weights(x, dy, sizes, dtype, config):
    # Rows of no group are multiplied by zero.
    in_whole_tiles(x.T, dy, jax.ShapeDtypeStruct((x.shape[1], dy.shape[1]), dtype))
    return weights(x, dy, sizes, dtype)


def triton_weights(x, dy, *, group_sizes, out_dtype, **_):
    # Rows of no group are not read.
    x, dy = (jnp.where(jnp.isnan(undefined_after(group_sizes, a)), 0, a) for a in (x, dy))
    return weights(x, dy, group_sizes, out_dtype)


@pytest.fixture
def stand_ins(monkeypatch):
    """A function that lets a run use tokamax's kernels of both languages, or of those that have no
    reason against them.
    """
    config = lambda **settings: tuple(settings.items())
    dimension = enum.Enum("MatmulDimension", "M N")
    modules = {
        "ragged_dot.pallas_mosaic_gpu_common": dict(Config=config, MatmulDimension=dimension),
        "ragged_dot.pallas_mosaic_gpu_kernel_sm90": dict(
            ragged_dot_kernel=mosaic_rows, ragged_contracting_dim_dot_kernel=mosaic_weights
        ),
        "ragged_dot.triton": dict(
            Config=config,
            _ragged_dot=lambda x, w, *, group_sizes, **_: rows(x, w, group_sizes),
            _ragged_contracting_dim_dot=triton_weights,
        ),
    }

    def use(no_mosaic: str = "", no_triton: str = ""):
        monkeypatch.setattr(
            tokamax, "import_tokamax_operator", lambda n: types.SimpleNamespace(**modules[n])
        )
        monkeypatch.setattr(tokamax, "mosaic_unsupported_reason", lambda: no_mosaic)
        monkeypatch.setattr(tokamax, "triton_unsupported_reason", lambda: no_triton)
        monkeypatch.setattr(
            kernels, "is_default", lambda x, w: not kernels.unsupported_reason(x, w)
        )

    return use


@pytest.mark.parametrize("no_mosaic, no_triton", [("", ""), ("", TRITON), (OLD, "")])
def test_the_self_test_passes_right_kernels(stand_ins, no_mosaic, no_triton):
    stand_ins(no_mosaic, no_triton)
    name, error = kernels.max_error(192, 64)
    assert error <= kernels.TOLERANCE / 2, (name, error)


def test_the_self_test_refuses_shifted_groups(stand_ins, monkeypatch):
    stand_ins()
    right = kernels.unmasked_matmul
    monkeypatch.setattr(kernels, "unmasked_matmul", lambda x, w, s: right(x, w, s.at[0].add(-1)))
    assert kernels.max_error(64, 64)[1] > 2 * kernels.TOLERANCE


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400_000), st.integers(1, 600), st.integers(1, 450_000))
def test_every_layout_of_a_gpu_consists_of_whole_tiles(choices, experts, capacity):
    with compiling_for("gpu"):
        size, tiles, _ = _tile_size_and_counts(choices, experts, capacity)
    in_whole_tiles(jax.ShapeDtypeStruct((64, tiles * size), jnp.bfloat16))


def test_rows_that_are_no_whole_tiles_are_padded(stand_ins):
    stand_ins(no_triton=TRITON)
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    x, w, dy = shape(203, 128), shape(4, 128, 64), shape(203, 64)
    sizes = shape(4, dtype=jnp.int32)
    assert jax.eval_shape(kernels.matmul, x, w, sizes).shape == dy.shape
    dx, dw = jax.eval_shape(kernels.gradients, x, w, sizes, dy)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)


def shapes(tokens, choices, experts, width, inner):
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    return (
        shape(tokens, width),
        shape(tokens, choices),
        shape(tokens, choices, dtype=jnp.int32),
        shape(experts, width, 2, inner),
        shape(experts, inner, width),
    )


def with_gradients(run, x, weight, expert, gate_up, down):
    y, pullback = jax.vjp(lambda *a: run(a[0], a[1], expert, *a[2:]), x, weight, gate_up, down)
    return y, pullback(y)


LAYERS = {  # tokens, choices, experts, (D, I)
    "released, 64 experts": (32768, 10, 64, WIDTHS[0]),
    "small": (65536, 2, 16, WIDTHS[1]),
    "Qwen3-30B-A3B": (16384, 8, 128, WIDTHS[2]),
    "few rows": (72, 2, 16, WIDTHS[1]),
}


@pytest.mark.parametrize("no_triton", ["", TRITON])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_kernels_take_what_layers_hand_to_them(stand_ins, layer, no_triton):
    stand_ins(no_triton=no_triton)
    tokens, choices, experts, widths = LAYERS[layer]
    given = shapes(tokens, choices, experts, *widths)
    with compiling_for("gpu"):
        jaxpr = jax.make_jaxpr(functools.partial(with_gradients, local_moe))(*given)
    # hidden layer and result; for the gradients the hidden layer again, da and dx
    assert len(operations(jaxpr, "ragged_dot_general")) >= 5


@pytest.mark.parametrize(
    "no_mosaic, no_triton, room", [("", "", None), ("", TRITON, 64), (OLD, "", 64)]
)
def test_routed_experts_equal_the_reference(stand_ins, no_mosaic, no_triton, room):
    """Experts without rows, tiles that are not full, rows of no expert; with little room, a loop
    computes the rest.
    """
    stand_ins(no_mosaic, no_triton)
    given = inputs(tokens=160, choices=2, width=128, experts=6, hidden=64)
    expert = jnp.where(given[2] == 3, 9, given[2])  # 9: an expert of another device
    given = (*given[:2], expert, *given[3:])
    with compiling_for("gpu"):
        run = jax.jit(functools.partial(by_token, room=room, pieces=2, keep=1))
        got = run(*given)
    for part, error in errors(got, exact(*given)).items():
        assert error < (0.02 if part == "dweight" else 0.01), part


@pytest.mark.parametrize(
    "no_mosaic, no_triton, change, reason",
    [
        (OLD, TRITON, {}, f"{OLD}; Triton's run {TRITON}"),
        ("without tokamax", "without tokamax", {}, "without tokamax"),
        ("", TRITON, dict(widths=(96, 64)), "has matrices of (96, 64): expected multiples of 64"),
        ("", "", dict(dtype=jnp.float32), "has rows of float32 and matrices of float32"),
    ],
)
def test_one_line_says_why_experts_run_without_kernels(
    monkeypatch, capsys, no_mosaic, no_triton, change, reason
):
    monkeypatch.setattr(tokamax, "mosaic_unsupported_reason", lambda: no_mosaic)
    monkeypatch.setattr(tokamax, "triton_unsupported_reason", lambda: no_triton)
    self_test._print_first_time.cache_clear()
    call = dict(widths=(128, 64), dtype=jnp.bfloat16) | change
    d, f = call["widths"]
    x, w = (jax.ShapeDtypeStruct(s, call["dtype"]) for s in ((256, d), (4, d, f)))
    assert not kernels.is_default(x, [w, w])
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize("failing, enabled", [(("triton",), True), (("triton", "mosaic"), False)])
def test_mosaic_computes_dw_where_tritons_fails(monkeypatch, failing, enabled):
    monkeypatch.setattr(tokamax, "mosaic_unsupported_reason", lambda: "")
    monkeypatch.setattr(tokamax, "triton_unsupported_reason", lambda: "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(self_test, "_agreed_outcomes", {})
    fails = lambda device, test, folder: "failed" if test.call_kind[2] in failing else ""
    monkeypatch.setattr(self_test, "_stored_or_new_failure", fails)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 128), (4, 128, 64)))
    found = []
    (decision,) = implementations.trace_and_record(
        lambda: found.append(
            implementations.choose_implementation(
                "grouped_matmul", None, XLA_IMPLEMENTATIONS, x=x, weights=[w]
            )
        )
    )
    assert found[-1].is_kernel == decision.is_kernel == enabled
    if enabled:
        assert (
            "gradients of the experts' weights to take several times as long" in decision.why_chosen
        )
        assert kernels._choose_kernels(128, 64)[:2] == ("mosaic", "mosaic")


def test_few_rows_are_no_reason_for_a_warning(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 128), (4, 128, 64)))
    (decision,) = implementations.trace_and_record(
        lambda: implementations.choose_implementation(
            "grouped_matmul", None, XLA_IMPLEMENTATIONS, x=x, weights=[w]
        )
    )
    assert "has 64 rows" in decision.why_no_kernels
    assert decision.slowness_warning == ""


def test_a_call_waits_for_no_process_that_lacks_tokamax(monkeypatch):
    """The other process has told that tokamax is missing there: no test runs."""
    monkeypatch.setattr(tokamax, "_missing_package_reason", lambda *_: "")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = {"tokamax": "without tokamax (process 1)"}
    monkeypatch.setattr(
        self_test, "_failure_in_any_process", lambda question, find: told.get(question[1], find())
    )
    assert tokamax.mosaic_unsupported_reason() == told["tokamax"]


@pytest.mark.parametrize("release, refused", [("3.6.0", True), ("3.9.0", False), ("3.10", False)])
def test_a_triton_too_old_for_tokamax_is_named(monkeypatch, release, refused):
    monkeypatch.setattr(tokamax, "_missing_package_reason", lambda *_: "")
    monkeypatch.setattr(tokamax, "_old_chip_reason", lambda: "")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: release)
    reason = tokamax.triton_unsupported_reason()
    assert (f"with triton {release}: expected 3.7" in reason) == bool(reason) == refused


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
@pytest.mark.parametrize("widths", WIDTHS)
def test_tokamax_kernels_are_lowered_for_a_layer(monkeypatch, widths):
    from jax.extend import backend

    chip = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    monkeypatch.setattr(backend, "get_default_device", lambda: chip)
    monkeypatch.setattr(tokamax, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(self_test, "kernels_run_by_default", lambda test, refusal: not refusal)
    monkeypatch.setattr(self_test, "unsupported_chip_reason", lambda: "")
    if importlib.util.find_spec("jax_triton") is not None:
        from jax_triton import triton_lib

        monkeypatch.setattr(
            triton_lib.triton_kernel_call_lib, "get_compute_capability", lambda device: 90
        )
    d, i = widths
    given = shapes(4096, 2, 16, d, i)
    with compiling_for("gpu"):
        traced = jax.jit(functools.partial(with_gradients, local_moe)).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
