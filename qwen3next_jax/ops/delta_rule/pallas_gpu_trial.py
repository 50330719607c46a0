"""May the default take the kernels for Hopper GPUs on this process's GPU? `kernel_trial.py` says
how that is found out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.ops import kernel_trial
from qwen3next_jax.ops.delta_rule import chunk_math, chunked, pallas_gpu

AVOID = "--config.model.delta_rule=chunked avoids it"
# of two results of bfloat16 operands, relative L2; both are within 0.5 % (outputs) and 2 %
# (gradients) of float64's
APART = 0.03


def takes(
    x: chunk_math.Inputs, normalize: bool, erase: bool, axis_name: str | None, named: bool
) -> bool:
    """Whether the kernels run this call: named, they do, or this raises NotImplementedError;
    else where they may, and it says once what it decided and why.
    """
    why = pallas_gpu.refusal(x.q, x.k, x.v)
    if axis_name is not None:
        why = why or "over a mesh axis: there is no kernel for it"
    if named:
        if why:
            raise NotImplementedError(f"implementation='pallas_gpu' {why}; use 'chunked'")
        return True
    if x.q.shape[1] <= pallas_gpu.C // 2:  # the XLA form cuts shorter rows into shorter chunks
        return False
    split = pallas_gpu.Problem.of(x, normalize=normalize, erase=erase).pieces > 1
    return kernel_trial.takes(trial(x.q.shape[3], x.v.shape[3], normalize, erase, split), why)


def trial(
    key: int, value: int, normalize: bool, erase: bool, split: bool, interpret: bool = False
) -> kernel_trial.Trial:
    kind = key, value, normalize, erase, split
    parts = "", "_tiles", "_chunks", "_states", "_gradients"
    modules = tuple(pallas_gpu.__name__ + part for part in parts)
    return kernel_trial.Trial(
        "gated delta rule", AVOID, kind, modules, functools.partial(worst, *kind, interpret), APART
    )


def worst(
    key: int, value: int, normalize: bool, erase: bool, split: bool, interpret: bool
) -> tuple[str, float]:
    """The output or gradient in which the two forms differ most, and its relative L2 difference:
    three chunks, each a piece or all one, two documents and padding, two value heads a key head.
    """
    rng = np.random.default_rng(0)
    time, heads = 2 * pallas_gpu.C + 6, 2
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
        settings |= dict(size=pallas_gpu.C, normalize_qk=normalize, erase=erase)
        o, final, *saved = form.forward(x, initial, None, save=True, **settings)
        return o, final, *form.backward(x, *saved, do, dfinal, **settings)

    got = jax.jit(
        functools.partial(results, pallas_gpu, interpret=interpret, pieces=3 if split else 1)
    )()
    want = jax.jit(functools.partial(results, chunked, parallel=False))()
    return kernel_trial.worst_of(
        ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "gradient of the initial state"),
        got,
        want,
    )
