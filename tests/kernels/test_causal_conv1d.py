"""The causal convolution against a loop over tokens in float64, with documents, states and
gradients.
"""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen3next_jax.kernels.gpu import causal_conv1d as gpu_kernels
from qwen3next_jax.kernels.gpu import kernel_call
from qwen3next_jax.kernels.tpu import causal_conv1d as tpu_kernels
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.ops.implementations import XlaImplementation

# its name in the package is that of the function
module = sys.modules["qwen3next_jax.ops.causal_conv1d"]
B, T, D = 3, 11, 5


def by_token(x, kernel, state, ids, activation):
    """Numpy, one output at a time. Returns y and the final state."""
    width = kernel.shape[0]
    y = np.zeros_like(x)
    final = np.zeros_like(state)
    for b in range(x.shape[0]):
        length = int((ids[b] > 0).sum())
        known = np.concatenate([state[b], x[b, :length]])
        owner = np.concatenate([np.full(width - 1, ids[b, 0]), ids[b, :length]])
        for t in range(length):
            mine = owner[t : t + width] == ids[b, t]
            z = (kernel * known[t : t + width] * mine[:, None]).sum(0)
            y[b, t] = z / (1 + np.exp(-z)) if activation == "silu" else z
        mine = owner[length:] == (ids[b, length - 1] if length else ids[b, 0])
        final[b] = known[length:] * mine[:, None]
    return y, final


def problem(width, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(B, T, D)),
        rng.normal(size=(width, D)),
        rng.normal(size=(B, width - 1, D)),
    )


LAYOUTS = {
    "whole": np.ones((B, T), int),
    "documents": np.array([[1] * 4 + [2] + [3] * 6, [2] * 1 + [5] * 7 + [0] * 3, [1] * 9 + [4, 0]]),
}


@pytest.mark.parametrize(
    "width, activation, layout",
    [
        (4, "silu", "whole"),
        (4, "silu", "documents"),
        (1, None, "documents"),
        (2, "silu", "whole"),
        (8, None, "documents"),
    ],
)
def test_matches_the_token_loop(width, activation, layout):
    x, kernel, state = problem(width)
    want_y, want_final = by_token(x, kernel, state, LAYOUTS[layout], activation)
    with jax.enable_x64(True):
        ids = None if layout == "whole" else jnp.asarray(LAYOUTS[layout])
        y, final = causal_conv1d(
            jnp.asarray(x),
            jnp.asarray(kernel),
            activation=activation,
            initial_state=jnp.asarray(state),
            segment_ids=ids,
        )
    np.testing.assert_allclose(y, want_y, atol=1e-13)
    np.testing.assert_allclose(final, want_final, atol=1e-13)


def test_gradients_match_finite_differences():
    x, kernel, state = problem(4)
    ids = LAYOUTS["documents"]
    rng = np.random.default_rng(1)
    dy, dfinal = rng.normal(size=x.shape), rng.normal(size=state.shape)
    primals, direction = (x, kernel, state), [rng.normal(size=a.shape) for a in (x, kernel, state)]

    def loss(x, kernel, state):
        y, final = by_token(x, kernel, state, ids, "silu")
        return (y * dy).sum() + (final * dfinal).sum()

    with jax.enable_x64(True):
        f = lambda x, kernel, state: causal_conv1d(
            x, kernel, initial_state=state, segment_ids=jnp.asarray(ids)
        )
        pull_back = jax.jit(lambda cotangents, *primals: jax.vjp(f, *primals)[1](cotangents))
        gradients = pull_back(*jax.tree.map(jnp.asarray, ((dy, dfinal), *primals)))
    h = 1e-5
    for i in range(3):
        shifted = lambda sign: loss(
            *(a + sign * h * d if j == i else a for j, (a, d) in enumerate(zip(primals, direction)))
        )
        want = (shifted(1) - shifted(-1)) / (2 * h)
        np.testing.assert_allclose((np.asarray(gradients[i]) * direction[i]).sum(), want, rtol=1e-7)


@pytest.mark.parametrize(
    "width, activation, time, documents",
    [(4, "silu", 48, True), (2, None, 64, False)],
)
def test_the_kernels_interpreted_match_the_products(width, activation, time, documents):
    """Blocks of 16 tokens and two columns of lanes, against the products in float64; a document
    ends on a block's edge and by it.
    """
    rng = np.random.default_rng(2)
    x, kernel, state, dy = (
        rng.normal(size=s)
        for s in ((2, time, 256), (width, 256), (2, width - 1, 256), (2, time, 256))
    )
    ids = (
        jnp.asarray(
            [[1] * 15 + [2] * 2 + [4] * (time - 20) + [0] * 3, [1] * 16 + [2] * (time - 16)]
        )
        if documents
        else None
    )

    def both_ways(dtype):
        def f(x, kernel, state):
            return causal_conv1d(
                x, kernel, activation=activation, initial_state=state, segment_ids=ids
            )[0]

        def pulled_back(dy, *primals):
            y, pullback = jax.vjp(f, *primals)
            return y, *pullback(dy)

        return jax.jit(pulled_back)(*(jnp.asarray(a, dtype) for a in (dy, x, kernel, state)))

    with jax.enable_x64(True):
        want = both_ways(jnp.float64)

    assert not tpu_kernels.unsupported_reason(jnp.zeros(x.shape, jnp.float32), kernel, activation)
    functions = {
        name: functools.partial(getattr(tpu_kernels, name), interpret=True)
        for name in ("forward", "backward")
    }
    blocks = dict.fromkeys(("FORWARD_BLOCK", "BACKWARD_BLOCK"), (16, 128))
    with (
        mock.patch.multiple(tpu_kernels, **blocks),
        mock.patch.object(
            module, "XLA_IMPLEMENTATIONS", (XlaImplementation("interpreted", ("cpu",), functions),)
        ),
    ):
        got = both_ways(jnp.float32)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation, dtype, width",
    [("silu", "bfloat16", 4), (None, "float32", 2)],
)
def test_kernels_for_hopper_interpreted(activation, dtype, width):
    """With documents and as one, with the inputs before the first and all gradients; races are
    errors.
    """
    with mock.patch.object(
        kernel_call,
        "INTERPRETER",
        plgpu.InterpretGPUParams(detect_races=True, on_race="raise"),
    ):
        name, error = gpu_kernels.max_error(activation, dtype, width, interpret=True)
    assert error < 1e-3, name


def test_two_halves_chained_by_the_state_are_the_whole():
    x, kernel, _ = problem(4)
    x = jnp.asarray(x.reshape(B, T, 1, D), jnp.float32)
    kernel = jnp.asarray(kernel.reshape(4, 1, D), jnp.float32)
    whole, final = causal_conv1d(x, kernel)
    # shorter than the kernel: part of the state is the zeros before it
    first, state = causal_conv1d(x[:, :2], kernel)
    second, last = causal_conv1d(x[:, 2:], kernel, initial_state=state)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(last, final)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kernel=jnp.zeros((4, D + 1))), r"kernel has shape \(4, 6\): expected \[W, 5\]"),
        (dict(activation="gelu"), "activation='gelu'"),
        (dict(initial_state=jnp.zeros((B, 4, D))), "initial_state has shape"),
        (dict(segment_ids=jnp.zeros((B, T + 1), int)), "segment_ids has shape"),
        (dict(segment_ids=jnp.zeros((B, T))), "segment_ids has dtype float32"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = dict(x=jnp.zeros((B, T, D)), kernel=jnp.zeros((4, D))) | change
    with pytest.raises(ValueError, match=message):
        causal_conv1d(arguments.pop("x"), arguments.pop("kernel"), **arguments)
