"""The test that the gated delta rule's kernels for Hopper GPUs must pass on this process's GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import delta_rule
from qwen3next_jax.ops.delta_rule import chunk_math, chunked

AVOID = "--config.model.delta_rule=chunked avoids it"
# of two results of bfloat16 operands, relative L2; both are within 0.5 % (outputs) and 2 %
# (gradients) of float64's
TOLERANCE = 0.03


def test(
    key: int, value: int, normalize: bool, erase: bool, split: bool, interpret: bool = False
) -> self_test.SelfTest:
    kind = key, value, normalize, erase, split
    parts = "", "_tiles", "_chunks", "_states", "_gradients"
    modules = tuple(delta_rule.__name__ + part for part in parts)
    return self_test.SelfTest(
        "gated delta rule",
        AVOID,
        kind,
        modules,
        functools.partial(max_error, *kind, interpret),
        TOLERANCE,
    )


def max_error(
    key: int, value: int, normalize: bool, erase: bool, split: bool, interpret: bool
) -> tuple[str, float]:
    """The output or gradient in which the two forms differ most, and its relative L2 difference:
    three chunks, each a piece or all one, two documents and padding, two value heads a key head.
    """
    rng = np.random.default_rng(0)
    time, heads = 2 * delta_rule.C + 6, 2
    array = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v, do = (
        array(1, time, 1, key),
        array(1, time, 1, key),
        array(1, time, heads, value),
        array(1, time, heads, value),
    )
    scale = 1 if normalize else key**-0.5
    segments = chunk_math.encode_segments(jnp.asarray([[1] * 40 + [2] * (time - 44) + [0] * 4]))
    live = segments[:, :, None] > 0
    g, beta = (
        jnp.where(live, f(array(1, time, heads, dtype=jnp.float32)), 0)
        for f in (lambda x: -jnp.exp(x), jax.nn.sigmoid)
    )
    x = chunk_math.Inputs(q * scale, k * scale, v, g, beta, segments)
    initial, dfinal = (array(1, heads, key, value, dtype=jnp.float32) for _ in range(2))

    def results(form, **settings):
        settings |= dict(size=delta_rule.C, normalize_qk=normalize, erase=erase)
        o, final, *saved = form.forward(x, initial, None, save=True, **settings)
        return o, final, *form.backward(x, *saved, do, dfinal, **settings)

    got = jax.jit(
        functools.partial(results, delta_rule, interpret=interpret, pieces=3 if split else 1)
    )()
    want = jax.jit(functools.partial(results, chunked, parallel=False))()
    return self_test.largest_error(
        ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "gradient of the initial state"),
        got,
        want,
    )
