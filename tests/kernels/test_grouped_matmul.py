"""Grouped matmul and the grouped SwiGLU against one float64 matmul per group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import grouped_matmul as gpu_kernels
from qwen3next_jax.kernels.gpu import tokamax
from qwen3next_jax.ops import expert_mlp, grouped_matmul
from qwen3next_jax.ops.compile_target import compiling_for

IMPLEMENTATIONS = ("blocked", "ragged_dot")
EPSILON = {jnp.float32: 2.0**-24, jnp.bfloat16: 2.0**-9}


def per_group(x, w, group_sizes, dy):
    """y, dx, dw in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((x.shape[0], w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    edges = np.cumsum([0, *group_sizes])
    for e, (a, b) in enumerate(zip(edges, edges[1:])):
        y[a:b], dx[a:b], dw[e] = x[a:b] @ w[e], dy[a:b] @ w[e].T, x[a:b].T @ dy[a:b]
    return y, dx, dw


def swiglu_per_group(x, gate_up, down, group_sizes, dy):
    """y, dx, dgate_up, ddown in float64."""
    flat = np.asarray(gate_up, np.float64).reshape(*gate_up.shape[:2], -1)
    hidden, _, _ = per_group(x, flat, group_sizes, np.zeros((x.shape[0], flat.shape[2])))
    gate, up = np.split(hidden, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    y, da, ddown = per_group(gate * s * up, down, group_sizes, dy)
    dhidden = np.concatenate([da * up * s * (1 + gate * (1 - s)), da * gate * s], axis=1)
    _, dx, dflat = per_group(x, flat, group_sizes, dhidden)
    return y, dx, dflat.reshape(gate_up.shape), ddown


def random(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s) / s[-2] ** 0.5, dtype) for s in shapes)


@jax.jit(static_argnames=("implementation",))
def matmul_and_gradients(x, w, group_sizes, dy, implementation=None):
    y, pullback = jax.vjp(
        lambda x, w: grouped_matmul(x, w, group_sizes, implementation=implementation), x, w
    )
    return y, *pullback(dy)


@jax.jit(static_argnames=("implementation",))
def mlp_and_gradients(x, gate_up, down, group_sizes, dy, implementation=None):
    y, pullback = jax.vjp(
        lambda *a: expert_mlp(*a, group_sizes, implementation=implementation), x, gate_up, down
    )
    return y, *pullback(dy)


def assert_near(got, expected, unit):
    """Relative L2 error within a few roundings of the operands; exact zeros stay exact zeros."""
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        assert np.linalg.norm(a - b) <= 16 * unit * np.linalg.norm(b)
        np.testing.assert_array_equal(a[b == 0], 0)


CASES = {  # mostly of one shape, which compiles once
    "even": (192, [32] * 6),
    "uneven": (192, [3, 100, 67, 1, 20, 1]),
    "empty groups": (192, [0, 70, 0, 0, 122, 0]),
    "one group has all": (192, [0, 192, 0, 0, 0, 0]),
    "unused tail": (192, [10, 0, 65, 0, 0, 1]),
    "no rows used": (192, [0] * 6),
    "fewer rows than a block": (5, [2, 0, 3]),
    "a single row": (1, [0, 1]),
    "more groups than rows": (3, [0, 0, 1, 0, 2, 0, 0]),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_one_matmul_per_group(implementation):
    """Of one shape, which compiles once. The other shapes are those of the MLP below, which has
    these products.
    """
    for rows, sizes in CASES.values():
        if rows == 192:
            x, w, dy = random((rows, 6), (len(sizes), 6, 10), (rows, 10))
            got = matmul_and_gradients(x, w, jnp.asarray(sizes), dy, implementation)
            assert_near(got, per_group(x, w, sizes, dy), EPSILON[jnp.float32])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows, sizes", CASES.values(), ids=CASES.keys())
def test_expert_mlp_equals_one_swiglu_per_group(rows, sizes, implementation):
    x, gate_up, down, dy = random((rows, 6), (len(sizes), 6, 2, 4), (len(sizes), 4, 6), (rows, 6))
    got = mlp_and_gradients(x, gate_up, down, jnp.asarray(sizes), dy, implementation)
    assert_near(got, swiglu_per_group(x, gate_up, down, sizes, dy), EPSILON[jnp.float32])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=4, max_size=4).filter(lambda sizes: sum(sizes) <= 500)
)
def test_any_group_sizes(sizes):
    x, gate_up, down, dy = random((500, 6), (4, 6, 2, 4), (4, 4, 6), (500, 6))
    got = mlp_and_gradients(x, gate_up, down, jnp.asarray(sizes), dy)
    assert_near(got, swiglu_per_group(x, gate_up, down, sizes, dy), EPSILON[jnp.float32])


@pytest.mark.slow
def test_weights_too_large_for_one_batch_of_blocks():
    """One matrix is nearly a third of what a batch of blocks may copy: batches of 3, and groups
    that cross them.
    """
    x, gate_up, down, dy = random((64, 400), (7, 400, 2, 400), (7, 400, 400), (64, 400))
    for sizes in (
        (0, 40, 0, 0, 3, 20, 0),
        (9,) * 7,
        (0, 0, 0, 0, 0, 0, 64),
        (60, 0, 1, 1, 1, 0, 1),
    ):
        got = mlp_and_gradients(x, gate_up, down, jnp.asarray(sizes), dy, "blocked")
        assert_near(got, swiglu_per_group(x, gate_up, down, sizes, dy), EPSILON[jnp.float32])


@pytest.mark.slow
def test_bfloat16():
    sizes = [3, 130, 0, 60]
    x, gate_up, down, dy = random(
        (200, 32), (4, 32, 2, 16), (4, 16, 32), (200, 32), dtype=jnp.bfloat16
    )
    for implementation in IMPLEMENTATIONS:
        got = mlp_and_gradients(x, gate_up, down, jnp.asarray(sizes), dy, implementation)
        assert all(a.dtype == jnp.bfloat16 for a in got)
        assert_near(got, swiglu_per_group(x, gate_up, down, sizes, dy), EPSILON[jnp.bfloat16] / 2)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_each_row_is_computed_once(platform):
    """What None takes does not grow with the number of groups, by which XLA's ragged_dot
    multiplies there.
    """

    def lowered(implementation):
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 32), (32, 32, 32))]
        f = jax.jit(lambda *a: grouped_matmul(*a, implementation=implementation))
        with compiling_for(platform):
            traced = f.trace(*shapes, jax.ShapeDtypeStruct((32,), jnp.int32))
        return traced.lower(lowering_platforms=(platform,))

    useful = 2 * 4096 * 32 * 32
    # blocks of 128 rows (CPU) or 64, one more for each group
    assert lowered(None).cost_analysis()["flops"] < 2.2 * useful
    # On CUDA it is one operation, whose price appears when XLA expands it.
    assert "ragged_dot" not in lowered(None).as_text()
    assert platform == "cuda" or lowered("ragged_dot").cost_analysis()["flops"] > 16 * useful


def test_a_gpu_takes_kernels_that_passed_their_test(monkeypatch, capsys):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 64), (4, 64, 128))]
    lowered = lambda: (
        jax.jit(lambda *a: grouped_matmul(*a))
        .trace(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_kernels, "matmul", lambda x, w, sizes: jnp.cbrt(x @ w[0]))
    monkeypatch.setattr(tokamax, "triton_unsupported_reason", lambda: "without it")
    monkeypatch.setattr(tokamax, "mosaic_unsupported_reason", lambda: "without it")
    assert "cbrt" not in lowered()
    assert "grouped products" in capsys.readouterr().err
    monkeypatch.setattr(tokamax, "mosaic_unsupported_reason", lambda: "")
    monkeypatch.setattr(self_test, "find_failure", lambda *_: "")
    assert "cbrt" in lowered()
    assert "grouped products" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(implementation="dense"), "implementation"),
        (dict(x=jnp.zeros((0, 6))), "x has"),
        (dict(w=jnp.zeros((3, 5, 4))), "w has"),
        (dict(group_sizes=jnp.zeros((2,), int)), "group_sizes"),
        (dict(group_sizes=jnp.zeros((3,))), "group_sizes"),
    ],
)
def test_errors_name_the_argument(change, name):
    arguments = (
        dict(x=jnp.zeros((8, 6)), w=jnp.zeros((3, 6, 4)), group_sizes=jnp.zeros((3,), int)) | change
    )
    with pytest.raises(ValueError, match=name):
        grouped_matmul(**arguments)


@pytest.mark.parametrize(
    "gate_up, down, name", [((3, 6, 4), (3, 4, 6), "gate_up"), ((3, 6, 2, 4), (3, 6, 4), "down")]
)
def test_expert_mlp_errors_name_the_argument(gate_up, down, name):
    with pytest.raises(ValueError, match=name):
        expert_mlp(jnp.zeros((8, 6)), jnp.zeros(gate_up), jnp.zeros(down), jnp.zeros((3,), int))
