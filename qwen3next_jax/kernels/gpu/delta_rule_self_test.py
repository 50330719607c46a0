"""The test of the gated delta rule's kernels for Hopper GPUs on this process's GPU. A call that
names no implementation runs the kernels only if they passed this test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import delta_rule_passes, kernel_call
from qwen3next_jax.kernels.gpu.delta_rule_problem import WorkSplit
from qwen3next_jax.kernels.gpu.delta_rule_tiles import C
from qwen3next_jax.ops.delta_rule import chunk_math, chunked
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings

AVOID = "--config.model.delta_rule=chunked avoids it"
# The largest allowed relative L2 difference between the kernels and the XLA implementation, which
# both multiply bfloat16 operands. Compared with float64, the outputs of either have an error of at
# most 0.5 %, and the gradients an error of at most 2 %.
TOLERANCE = 0.03


def make_self_test(
    key_width: int,
    value_width: int,
    normalize: bool,
    delta_term: bool,
    split: WorkSplit,
    interpret: bool = False,
) -> self_test.SelfTest:
    """Returns the test for calls with the given widths and settings.

    Args:
      key_width: K, the key width.
      value_width: V, the value width.
      normalize: whether q and k are L2-normalised.
      delta_term: whether the write has the delta term -S^T k.
      split: how the passes of the state split the work. All splits into more than one piece have
        the same test.
      interpret: whether a CPU interprets the kernels.
    """
    split = WorkSplit(min(split.pieces_per_row, 3), split.warpgroups_per_block)
    kind = key_width, value_width, normalize, delta_term, split
    parts = "passes", "problem", "tiles", "chunks", "states", "gradients"
    modules = (kernel_call.__name__, *(f"{__package__}.delta_rule_{part}" for part in parts))
    return self_test.SelfTest(
        "gated delta rule",
        AVOID,
        kind,
        modules,
        functools.partial(max_error, *kind, interpret),
        TOLERANCE,
        trained_on="",  # the kernels have not run as they are now
    )


def max_error(
    key_width: int,
    value_width: int,
    normalize: bool,
    delta_term: bool,
    split: WorkSplit,
    interpret: bool,
) -> tuple[str, float]:
    """Runs the kernels and the implementation "chunked" in XLA. Returns the name of the output or
    gradient in which the kernels and XLA differ most, and the relative L2 difference.

    The arrays have three chunks, two documents, padding, and one key head with two value heads. If
    rows are split, each chunk is a piece, and the decay is weak, so that the state before the
    second piece still matters after the second piece. The arguments have the same meaning as in
    `make_self_test`.
    """
    rng = np.random.default_rng(0)
    time, heads = 2 * C + 6, 2
    array = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v, do = (
        array(1, time, 1, key_width),
        array(1, time, 1, key_width),
        array(1, time, heads, value_width),
        array(1, time, heads, value_width),
    )
    scale = 1 if normalize else key_width**-0.5
    segments = chunk_math.signed_segment_ids(jnp.asarray([[1] * 40 + [2] * (time - 44) + [0] * 4]))
    decay = 0.01 if split.pieces_per_row > 1 else 1
    is_token = segments[:, :, None] > 0
    g, beta = (
        jnp.where(is_token, f(array(1, time, heads, dtype=jnp.float32)), 0)
        for f in (lambda x: -decay * jnp.exp(x), jax.nn.sigmoid)
    )
    x = Inputs(q * scale, k * scale, v, g, beta, segments)
    initial, dfinal = (array(1, heads, key_width, value_width, dtype=jnp.float32) for _ in range(2))

    settings = Settings(C, normalize, delta_term)

    def results(implementation, **others):
        o, final, *saved = implementation.forward(x, initial, None, settings, save=True, **others)
        gradients = implementation.backward(x, *saved, do, dfinal, settings, **others)
        return o, final, *gradients

    kernels = functools.partial(results, delta_rule_passes, interpret=interpret, split=split)
    got = jax.jit(kernels)()
    want = jax.jit(functools.partial(results, chunked, parallel=False))()
    return self_test.largest_error(
        ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "gradient of the initial state"),
        got,
        want,
    )
