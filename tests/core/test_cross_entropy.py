"""The chunked linear cross-entropy against plain float64 autodiff of logits, and its memory at a
real vocabulary.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.ops import linear_cross_entropy
from qwen3next_jax.ops.compile_target import compiling_for


def problem(rows=70, width=12, vocabulary=40, dtype=np.float32, w_dtype=None):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, width)), dtype)
    w = jnp.asarray(rng.normal(size=(width, vocabulary)), w_dtype or dtype)
    targets = jnp.asarray(rng.integers(0, vocabulary, rows), jnp.int32)
    weights = jnp.asarray(rng.random(rows) * (rng.random(rows) < 0.7), jnp.float32)
    return x, w, targets, weights


def oracle(x, w, targets, weights, seed=1.0):
    """(loss, per-row nll, logits) and gradients in x, w and weights, in float64, by hand."""
    x, w, weights = (np.asarray(a, np.float64) for a in (x, w, weights))
    logits = x @ w
    logsumexp = np.log(np.sum(np.exp(logits - logits.max(1, keepdims=True)), axis=1)) + logits.max(
        1
    )
    rows = np.arange(len(x))
    nll = logsumexp - logits[rows, targets]
    g = np.exp(logits - logsumexp[:, None])
    g[rows, targets] -= 1
    g *= seed * weights[:, None]
    return (np.sum(weights * nll), nll, logsumexp, logits), (g @ w.T, x.T @ g, seed * nll)


@pytest.mark.parametrize(
    "chunk, chip",
    [(None, None), (1, None), (32, None), (32, "v6e"), (70, None), (100, None)],
)
def test_value_gradients_and_rows(chunk, chip, monkeypatch):
    """For a narrow model v6e computes the logits anew instead of storing them."""
    if chip:
        described = types.SimpleNamespace(
            platform="tpu",
            tpu_info=types.SimpleNamespace(
                mem_bw_bytes_per_second=1.64e12, bf16_ops_per_second=9.2e14
            ),
        )
        monkeypatch.setattr("qwen3next_jax.ops.cross_entropy.compile_target", lambda: described)
    x, w, targets, weights = problem()
    (loss, nll, logsumexp, logits), gradients = oracle(x, w, targets, weights, seed=3.0)

    @jax.jit
    def f(x, w, weights):
        loss, rows = linear_cross_entropy(x, w, targets, weights, chunk=chunk)
        return 3.0 * loss, (loss, rows)

    (_, (got, rows)), got_gradients = jax.value_and_grad(f, (0, 1, 2), has_aux=True)(x, w, weights)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(rows.nll, nll, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rows.logsumexp, logsumexp, rtol=1e-6)
    np.testing.assert_array_equal(rows.correct, np.argmax(logits, axis=1) == targets)
    for a, b in zip(got_gradients, gradients, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
    np.testing.assert_allclose(
        linear_cross_entropy(x, w, targets, weights, chunk=chunk)[0], loss, rtol=1e-6
    )


@pytest.mark.parametrize("chip", [None, "v6e"])
@pytest.mark.parametrize(("z_weight", "softcap"), [(0.3, 0.0), (0.0, 2.0), (0.3, 2.0)])
def test_z_loss_and_softcap_are_those_of_autodiff(z_weight, softcap, chip, monkeypatch):
    if chip:
        described = types.SimpleNamespace(
            platform="tpu",
            tpu_info=types.SimpleNamespace(
                mem_bw_bytes_per_second=1.64e12, bf16_ops_per_second=9.2e14
            ),
        )
        monkeypatch.setattr("qwen3next_jax.ops.cross_entropy.compile_target", lambda: described)
    x, w, targets, weights = problem()

    def plain(x, w, weights):
        logits = x @ w
        if softcap:
            logits = softcap * jnp.tanh(logits / softcap)
        logsumexp = jax.scipy.special.logsumexp(logits, axis=1)
        nll = logsumexp - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return jnp.sum(weights * (nll + z_weight * logsumexp**2))

    def chunked(x, w, weights):
        return linear_cross_entropy(
            x, w, targets, weights, z_weight=z_weight, softcap=softcap, chunk=32
        )[0]

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, w, weights)]
        loss, gradients = jax.value_and_grad(plain, (0, 1, 2))(*wide)
    got, got_gradients = jax.jit(jax.value_and_grad(chunked, (0, 1, 2)))(x, w, weights)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for a, b in zip(got_gradients, gradients, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_rows(w_dtype):
    x, w, targets, weights = problem(300, 64, 200, jnp.bfloat16, w_dtype)
    w = w / 8
    (loss, *_), (dx, dw, _) = oracle(x, w.astype(jnp.bfloat16), targets, weights)
    f = lambda x, w: linear_cross_entropy(x, w, targets, weights, chunk=128)[0]
    got, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)
    assert got.dtype == jnp.float32
    assert gradients[0].dtype == jnp.bfloat16
    assert gradients[1].dtype == w_dtype
    np.testing.assert_allclose(got, loss, rtol=1e-4)
    for a, b in zip(gradients, (dx, dw)):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= 2.0**-8 * np.linalg.norm(b)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_of_weight_zero_do_not_count(platform):
    """Whatever their target is, out of range included, and with logits that would overflow an
    exp.
    """
    x, w, targets, weights = problem()
    ignored = weights == 0
    f = jax.jit(jax.grad(lambda x, targets: linear_cross_entropy(x, w, targets, weights)[0]))
    with compiling_for(platform):
        got = f(jnp.where(ignored[:, None], 1e4, x), jnp.where(ignored, -100, targets))
        np.testing.assert_array_equal(got[ignored], 0)
        np.testing.assert_array_equal(got[~ignored], f(x, targets)[~ignored])


def test_a_gpu_reads_the_same_logits_of_targets():
    x, w, targets, weights = problem()
    targets = targets.at[:3].set(jnp.array([-1, -100, w.shape[1]]))
    rows = {}
    for platform in ("cpu", "gpu"):
        with compiling_for(platform):
            f = jax.jit(functools.partial(linear_cross_entropy, chunk=32))
            rows[platform] = f(x, w, targets, weights)
    for a, b in zip(jax.tree.leaves(rows["cpu"]), jax.tree.leaves(rows["gpu"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tied_embedding_is_passed_transposed():
    x, w, targets, weights = problem()
    dw = jax.grad(lambda w: linear_cross_entropy(x, w, targets, weights)[0])(w)
    tied = jax.grad(lambda w: linear_cross_entropy(x, w.T, targets, weights)[0])(w.T)
    np.testing.assert_allclose(tied, dw.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_logits_in_memory_at_a_real_vocabulary(dtype):
    rows, width, vocabulary = 4096, 64, 151_936
    shapes = [
        jax.ShapeDtypeStruct(*a)
        for a in (
            ((rows, width), dtype),
            ((width, vocabulary), jnp.float32),
            ((rows,), jnp.int32),
            ((rows,), jnp.float32),
        )
    ]
    step = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a)[0], (0, 1)))
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * vocabulary * 4 / 2


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(x=jnp.zeros((0, 4))), "x has"),
        (dict(w=jnp.zeros((5, 9))), "w has"),
        (dict(targets=jnp.zeros((7,), int)), "targets has"),
        (dict(targets=jnp.zeros((8,))), "targets has dtype"),
        (dict(weights=jnp.zeros((8, 1))), "weights has"),
        (dict(chunk=0), "chunk"),
    ],
)
def test_errors_name_the_argument(change, name):
    arguments = (
        dict(
            x=jnp.zeros((8, 4)),
            w=jnp.zeros((4, 9)),
            targets=jnp.zeros((8,), int),
            weights=jnp.ones(8),
        )
        | change
    )
    with pytest.raises(ValueError, match=name):
        linear_cross_entropy(**arguments)
