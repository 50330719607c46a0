"""Every implementation of the gated delta rule against the float64 recurrence, outputs and all
gradients.

python tests/kernels/test_delta_rule.py chunked pallas_tpu      prints the errors of the hard inputs
"""

import functools
import itertools
import re
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip, head_pairs
from qwen3next_jax.kernels.tpu import delta_rule_tiling as tiling
from qwen3next_jax.ops import gated_delta_rule
from qwen3next_jax.ops.compile_target import compiling_for
from qwen3next_jax.ops.delta_rule import chunked, dispatch
from tests.refusals import refused

FORMS = ("chunked", "associative", "pallas_tpu")
# The associative form is a variant of the chunked one: where these have the cases, it is slow.
every_form = pytest.mark.parametrize(
    "implementation",
    ["chunked", pytest.param("associative", marks=pytest.mark.slow), "pallas_tpu"],
)
CHUNK = 64


def problem(batch=1, time=2 * CHUNK + 2, groups=1, heads=2, key=16, value=40, seed=0):
    """Inputs in float64, and cotangents of o and of the final state."""
    rng = np.random.default_rng(seed)
    a = lambda *shape: rng.normal(size=shape)
    inputs = dict(
        q=a(batch, time, groups, key),
        k=a(batch, time, groups, key),
        v=a(batch, time, heads, value),
        g=-np.exp(a(batch, time, heads)),
        beta=1 / (1 + np.exp(-a(batch, time, heads))),
        initial_state=a(batch, heads, key, value),
    )
    return inputs, (a(batch, time, heads, value), a(batch, heads, key, value))


@functools.partial(jax.jit, static_argnames=("implementation", "delta_term", "normalize_qk"))
def _run(arrays, cotangents, segment_ids, **settings):
    out, pullback = jax.vjp(
        lambda p: gated_delta_rule(**p, segment_ids=segment_ids, **settings), arrays
    )
    (gradients,) = pullback(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out)))
    return dict(o=out[0], final=out[1]) | {f"d{n}": x for n, x in gradients.items()}


def outputs_and_gradients(inputs, cotangents, dtype, segment_ids=None, **settings):
    """o, the final state and the gradient of every input, as float64 numpy arrays. `dtype` is
    that of q, k and v.
    """
    wide = jnp.promote_types(jnp.float32, dtype)
    with jax.enable_x64(dtype == jnp.float64):
        arrays = {n: jnp.asarray(x, dtype if n in "qkv" else wide) for n, x in inputs.items()}
        ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        results = _run(arrays, tuple(jnp.asarray(c, wide) for c in cotangents), ids, **settings)
    return {n: np.asarray(x, np.float64) for n, x in results.items()}


def rounded(inputs, cotangents, dtype):
    """What a form with inputs of `dtype` is given, in float64: the oracle must see the same
    numbers.
    """
    to = lambda x, d: np.asarray(jnp.asarray(x, d), np.float64)
    inputs = {n: to(x, dtype if n in "qkv" else jnp.float32) for n, x in inputs.items()}
    return inputs, (to(cotangents[0], dtype), to(cotangents[1], jnp.float32))


def error(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def errors(inputs, cotangents, implementation, dtype, **settings):
    """Relative L2 errors against the recurrence in float64, of outputs and gradients."""
    if dtype != jnp.float64:
        inputs, cotangents = rounded(inputs, cotangents, dtype)
    want = outputs_and_gradients(
        inputs, cotangents, jnp.float64, implementation="recurrent", **settings
    )
    got = outputs_and_gradients(
        inputs, cotangents, dtype, implementation=implementation, **settings
    )
    floor = 1e-12 * np.linalg.norm(want["dv"]) + 1e-30  # of dg, which may be zero as a whole
    sizes = {
        name: max(np.linalg.norm(x), floor if name == "dg" else 1e-30) for name, x in want.items()
    }
    return {name: np.linalg.norm(got[name] - want[name]) / size for name, size in sizes.items()}


def check(inputs, cotangents, implementation, dtype, bar, gradient_bar, case="", **settings):
    """The bars are those of outputs and of gradients. case: what an error is called."""
    for name, found in errors(inputs, cotangents, implementation, dtype, **settings).items():
        assert found <= (bar if name in ("o", "final") else gradient_bar), (case, name, found)


# float64: rounding of sums over 64 rows times the condition of L. float32 and bfloat16: the
# project's bars.
BARS = {jnp.float64: (1e-12, 1e-11), jnp.float32: (1e-4, 1e-4), jnp.bfloat16: (5e-3, 2e-2)}


def adversarial(name):
    """Inputs of one named hard case: (inputs, cotangents, bfloat16 bars or None)."""
    inputs, cotangents = problem(time=2 * CHUNK, key=64, value=64)
    bars = None
    if name.startswith("identical"):
        inputs["k"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape).copy()
        inputs["beta"] = np.full_like(inputs["beta"], float(name.split()[1]))
        inputs["g"] *= 1e-2
        if inputs["beta"].flat[0] > 1:
            bars = (1e-2, 3e-2)
        if inputs["beta"].flat[0] == 2:  # later writes correct no error of an earlier one
            bars = (2e-2, 6e-2)
    elif name.startswith("period 4"):
        inputs["k"] = np.tile(inputs["k"][:, :4], (1, CHUNK // 2, 1, 1))
        inputs["g"] *= 1e-2
        if name.endswith("beta 2"):
            inputs["beta"] = np.full_like(inputs["beta"], 2.0)
            bars = (1e-2, 3e-2)
    elif name == "no decay":
        inputs["g"] = np.zeros_like(inputs["g"])
    elif name == "g -20":
        inputs["g"] = np.full_like(inputs["g"], -20.0)
    elif name == "one g -1000":
        inputs["g"] *= 1e-2
        inputs["g"][:, CHUNK // 2] = -1000.0
    elif name == "beta 0 or 1":
        inputs["beta"] = 1 / (1 + np.exp(-30 * np.sign(inputs["beta"] - 0.5)))
    return inputs, cotangents, bars


CASES = (
    "identical 0.99",
    "identical 1.9",
    "identical 2",
    "period 4",
    "period 4, beta 2",
    "no decay",
    "g -20",
    "one g -1000",
    "beta 0 or 1",
)


@every_form
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_hard_inputs(dtype, implementation):
    for name in CASES:
        inputs, cotangents, bars = adversarial(name)
        limits = bars if bars and dtype == jnp.bfloat16 else BARS[dtype]
        check(inputs, cotangents, implementation, dtype, *limits, case=name)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ("chunked", "pallas_tpu"))
def test_strong_decay_costs_no_more_than_the_docstring_says(implementation):
    inputs, cotangents, _ = adversarial("no decay")
    inputs["g"][:] = -0.01
    inputs["g"][:, :32] = -10000 / 3
    total = 32 * 10000 / 3
    check(inputs, cotangents, implementation, jnp.float32, total * 3e-7, total * 3e-7)


@pytest.mark.parametrize(
    "implementation, settings",
    [
        ("chunked", dict()),
        pytest.param("chunked", dict(delta_term=False), marks=pytest.mark.slow),
        pytest.param("chunked", dict(normalize_qk=False), marks=pytest.mark.slow),
        # the norms lie outside the state's pass, in which these two differ
        pytest.param("associative", dict(delta_term=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exact_in_float64(settings, implementation):
    inputs, cotangents = problem(batch=2, groups=2, heads=6)
    if settings.get("normalize_qk") is False:
        inputs |= dict(q=inputs["q"] / 4, k=inputs["k"] / 4)
    ids = np.array([[1] * 64 + [2] * 10 + [4] + [5] * 40 + [0] * 15, [2] * 30 + [3] * 100])
    check(
        inputs,
        cotangents,
        implementation,
        jnp.float64,
        *BARS[jnp.float64],
        segment_ids=ids,
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, settings",
    [
        (jnp.float64, dict()),
        (jnp.bfloat16, dict(delta_term=False)),
    ],
    ids=str,
)
def test_pieces_of_a_long_sequence(dtype, settings, monkeypatch):
    inputs, cotangents = problem(batch=2, time=2 * CHUNK + 7)
    two = 2 * inputs["v"][:, :CHUNK].size
    # two pieces of two, the last padded
    limits = chunked.BlockLimits(single_chunk_multiply_adds=two * CHUNK, block_elements=two)
    forms = dispatch.chunked_implementation(("cpu",), limits), *dispatch.XLA_IMPLEMENTATIONS[1:]
    monkeypatch.setattr(dispatch, "XLA_IMPLEMENTATIONS", forms)
    # a document that starts with a piece, and one that goes on
    ids = np.array([[1] * 60 + [2] * 68 + [3] * 7, [2] * 130 + [0] * 5])
    check(inputs, cotangents, "chunked", dtype, *BARS[dtype], segment_ids=ids, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups, heads, settings",
    [
        (2, 2, dict(delta_term=False)),
        (1, 3, dict(normalize_qk=False)),
    ],
    ids=str,
)
def test_kernel_without_erasing_or_norm(groups, heads, settings):
    """With a key head each, and with one for three."""
    inputs, cotangents = problem(time=CHUNK + 3, groups=groups, heads=heads)
    inputs |= dict(q=inputs["q"] / 4, k=inputs["k"] / 4)
    check(inputs, cotangents, "pallas_tpu", jnp.float32, *BARS[jnp.float32], **settings)


def grid_and_block(inputs):
    p = tiling.Problem(
        jnp.asarray(inputs["q"], jnp.float32), jnp.asarray(inputs["v"], jnp.float32), CHUNK
    )
    return p.grid, p.block_value_heads


@pytest.mark.slow
def test_kernel_with_many_heads(monkeypatch):
    """Four head pairs in one step, of which the substitutions go in threes here; four value heads a
    key head.
    """
    monkeypatch.setattr(chip, "vmem_bytes", lambda: 128 * 2**20)
    monkeypatch.setattr(head_pairs, "PAIRS_AT_ONCE", 3)
    inputs, cotangents = problem(time=CHUNK, groups=2, heads=8)
    assert grid_and_block(inputs) == ((1, 1, 1), 8)
    check(inputs, cotangents, "pallas_tpu", jnp.float32, *BARS[jnp.float32])


@pytest.mark.slow
def test_two_blocks_race_nowhere(monkeypatch):
    """Two rows, two blocks of heads, three chunks, documents, in the interpreter of TPU memory:
    every buffer starts as NaN.
    """
    call = tiling.Problem.call_kernel
    interpreter = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan"
    )
    monkeypatch.setattr(
        tiling.Problem,
        "call_kernel",
        lambda self, *arguments: call(self, *arguments[:-1], interpreter),
    )
    monkeypatch.setattr(chip, "vmem_bytes", lambda: 5 * 2**20)
    inputs, cotangents = problem(batch=2, time=2 * CHUNK + 2, groups=2, heads=4)
    assert grid_and_block(inputs) == ((2, 2, 3), 2)
    ids = np.array([[1] * 20 + [3] + [4] * 44 + [6] * 60 + [0] * 5, [2] * 64 + [5] * 66])
    check(inputs, cotangents, "pallas_tpu", jnp.float32, *BARS[jnp.float32], segment_ids=ids)


@st.composite
def layouts(draw):
    """A [1, 100] row of document ids: lengths from one token up, gaps in the ids, padding at the
    end.
    """
    ids, current = [], 0
    while len(ids) < 100 and (not ids or draw(st.booleans())):
        current += draw(st.integers(1, 3))
        ids += [current] * draw(st.sampled_from([1, 2, 31, 32, 64]))
    ids = ids[:100]
    return np.array([ids + [0] * (100 - len(ids))])


@pytest.mark.slow
@hypothesis.settings(max_examples=9, deadline=None, derandomize=True)
@hypothesis.given(ids=layouts(), implementation=st.sampled_from(FORMS))
@hypothesis.example(ids=np.zeros((1, 100), int), implementation="pallas_tpu")
@hypothesis.example(ids=np.array([[1] * 64 + [2] * 36]), implementation="pallas_tpu")
def test_documents(ids, implementation):
    check(*problem(time=100), implementation, jnp.float32, *BARS[jnp.float32], segment_ids=ids)


@every_form
def test_packed_documents_equal_separate_ones(implementation):
    """Each document is compared with what the recurrence gives for it alone."""
    lengths, time = (50, 50, 1), 110
    inputs, cotangents = problem(time=time)
    ids = np.array(
        [sum(([i + 1] * n for i, n in enumerate(lengths)), []) + [0] * (time - sum(lengths))]
    )
    packed = outputs_and_gradients(
        inputs, cotangents, jnp.float32, implementation=implementation, segment_ids=ids
    )
    start = 0
    for i, length in enumerate(lengths):
        rows = slice(start, start + length)
        one = {n: x[:, rows] for n, x in inputs.items() if n != "initial_state"}
        first, last = i == 0, i == len(lengths) - 1
        one["initial_state"] = inputs["initial_state"] * first
        alone = outputs_and_gradients(
            one,
            (cotangents[0][:, rows], cotangents[1] * last),
            jnp.float32,
            implementation="recurrent",
        )
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert error(packed[name][:, rows], alone[name]) < 1e-4, (i, name)
        if first:
            assert error(packed["dinitial_state"], alone["dinitial_state"]) < 1e-4
        start += length
    assert error(packed["final"], alone["final"]) < 1e-4
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not packed[name][:, start:].any(), name  # padding: zeros, exactly


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ("chunked", "pallas_tpu"))
def test_two_halves_chained_by_the_state_are_the_whole(implementation):
    """And the whole, a chunk and one token, is what the recurrence gives."""
    inputs, (do, dfinal) = problem(time=CHUNK + 1)
    check(inputs, (do, dfinal), implementation, jnp.float32, *BARS[jnp.float32])
    run = functools.partial(outputs_and_gradients, dtype=jnp.float32, implementation=implementation)
    cut = lambda rows, state: (
        {n: x[:, rows] for n, x in inputs.items() if n != "initial_state"}
        | dict(initial_state=state)
    )
    early, late = slice(0, 15), slice(15, None)
    state = run(cut(early, inputs["initial_state"]), (do[:, early], dfinal))["final"]
    second = run(cut(late, state), (do[:, late], dfinal))
    first = run(cut(early, inputs["initial_state"]), (do[:, early], second["dinitial_state"]))
    halves = {
        n: np.concatenate([first[n], second[n]], axis=1)
        for n in ("o", "dq", "dk", "dv", "dg", "dbeta")
    }
    for name, x in run(inputs, (do, dfinal)).items():
        assert (
            error(
                (halves | dict(final=second["final"], dinitial_state=first["dinitial_state"]))[
                    name
                ],
                x,
            )
            < 2e-5
        ), name


@pytest.mark.parametrize("implementation", ("chunked", "pallas_tpu"))
def test_the_future_never_changes_the_past(implementation):
    # a shape that other tests compile
    inputs, cotangents = problem(time=2 * CHUNK, key=64, value=64)
    run = lambda p: outputs_and_gradients(
        p, cotangents, jnp.bfloat16, implementation=implementation
    )
    before = run(inputs)
    for name, x in run(inputs).items():
        np.testing.assert_array_equal(x, before[name])
    changed = {n: x.copy() for n, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 30:] *= 0.5
    np.testing.assert_array_equal(run(changed)["o"][:, :30], before["o"][:, :30])


# None is the chunked form here, of which the associative is a variant
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ("pallas_tpu", None))
def test_x64_changes_nothing_for_float32(implementation):
    inputs, cotangents = problem(time=15)  # a length that other tests compile
    want = outputs_and_gradients(
        inputs, cotangents, jnp.float32, implementation=implementation or "chunked"
    )
    with jax.enable_x64(True):
        arrays, cotangents = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float32), (inputs, cotangents)
        )
        got = _run(arrays, cotangents, None, implementation=implementation)
    for name, x in got.items():
        assert x.dtype == jnp.float32, name
        assert error(np.asarray(x), want[name]) < 1e-5, name


def check_growth(implementation, dtype, period, time=32_768, width=16):
    """β = 2, no decay, and few keys that repeat. The values are a linear function M of the keys,
    so that the state never comes farther from M than it began.

    Rounding to bfloat16 changes the state by 2^-9 in each chunk, in directions that no two share.
    """
    allowed = 1e-9 if dtype == jnp.float64 else 2 * np.sqrt(time / CHUNK) * 2**-9
    rng = np.random.default_rng(0)
    keys, values, queries, start = (
        rng.normal(size=(n, width)) for n in (period, period, time, width)
    )
    keys, values = (x.astype(dtype).astype(np.float64) for x in (keys, values))
    unit = keys / np.sqrt(np.sum(keys**2, axis=1, keepdims=True) + 1e-6)
    m = np.linalg.lstsq(unit, values)[0]
    wide = jnp.promote_types(jnp.float32, dtype)
    with jax.enable_x64(dtype == jnp.float64):
        row = lambda x: jnp.asarray(np.tile(x, (time // len(x), 1))[None, :, None], dtype)
        o, final = jax.jit(functools.partial(gated_delta_rule, implementation=implementation))(
            row(queries),
            row(keys),
            row(values),
            g=jnp.zeros((1, time, 1), wide),
            beta=jnp.full((1, time, 1), 2, wide),
            initial_state=jnp.asarray(start[None, None], wide),
        )
        o, final = np.float64(o), np.float64(final)
    before = np.linalg.norm(start - m)
    assert np.linalg.norm(final - m) <= (1 + allowed) * before
    largest = np.max(np.linalg.norm(o, axis=-1)) * width**0.5  # a query has length 1
    assert largest <= (1 + allowed) * (before + np.linalg.norm(m))


@pytest.mark.parametrize(
    "implementation, dtype",
    [
        ("chunked", jnp.float64),
        ("chunked", jnp.bfloat16),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name, dtype in (
                ("associative", jnp.bfloat16),
                ("pallas_tpu", jnp.bfloat16),
            )
        ),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_nothing_grows_with_an_eigenvalue_of_minus_one(implementation, dtype):
    for period in (1, 4):
        check_growth(implementation, dtype, period)


@pytest.mark.slow
def test_long_sequence():
    inputs, cotangents = problem(time=32768, groups=1, heads=1, key=8, value=8)
    inputs["g"] *= 1e-3
    check(inputs, cotangents, "chunked", jnp.float32, *BARS[jnp.float32])


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(implementation="triton"), ValueError, "implementation='triton': expected one of"),
        (
            dict(k=jnp.zeros((1, 8, 2, 4))),
            ValueError,
            r"k has shape \(1, 8, 2, 4\): expected \[B = 1, T = 8, G = 2, K = 3\]$",
        ),
        (dict.fromkeys("qk", jnp.zeros((1, 8, 3, 3))), ValueError, "v has 4 heads and q 3"),
        (
            dict(g=jnp.zeros((1, 8))),
            ValueError,
            r"g has shape \(1, 8\): expected \[B = 1, T = 8, H = 4\]",
        ),
        (dict(beta=jnp.zeros((1, 8, 4), jnp.int32)), ValueError, "beta has dtype int32"),
        (
            dict(initial_state=jnp.zeros((1, 4, 4, 4))),
            ValueError,
            r"initial_state has shape .* expected \[B = 1, H = 4, K = 3, V = 4\]",
        ),
        (dict(segment_ids=jnp.ones((1, 7), int)), ValueError, "segment_ids has shape"),
        *(
            (
                dict.fromkeys("qk", jnp.zeros(shape)),
                ValueError,
                f"q has shape {re.escape(str(shape))}: expected .*, nothing empty",
            )
            for shape in ((1, 8, 0, 3), (1, 8, 2, 0))
        ),
        *(
            (
                dict(v=jnp.zeros(shape)),
                ValueError,
                f"v has shape {re.escape(str(shape))}: expected .*, nothing empty",
            )
            for shape in ((1, 8, 0, 4), (1, 8, 4, 0))
        ),
        (
            dict(v=jnp.zeros((1, 8, 4, 4), jnp.float8_e4m3fn)),
            ValueError,
            "v has dtype float8_e4m3fn: expected float32, bfloat16 or",
        ),
        (dict(q=jnp.zeros((1, 8, 2, 3), jnp.float16)), ValueError, "q has dtype float16"),
    ],
)
def test_bad_input_is_named(change, kind, message):
    q, g = jnp.zeros((1, 8, 2, 3)), jnp.zeros((1, 8, 4))
    arguments = dict(q=q, k=q, v=jnp.zeros((1, 8, 4, 4)), g=g, beta=g) | change
    with pytest.raises(kind, match=message):
        gated_delta_rule(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def abstract(groups, heads, width, dtype=jnp.float32):
    """Arguments of the rule, shapes and types alone."""
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct((1, 64, *s), dtype)
    q = shape(groups, width, dtype=dtype)
    return dict(q=q, k=q, v=shape(heads, width, dtype=dtype), g=shape(heads), beta=shape(heads))


@pytest.mark.parametrize("shape", [(1, 16, 128), (1, 4, 256), (1, 8, 256, jnp.bfloat16)], ids=str)
def test_xla_runs_where_no_block_fits(shape):
    arguments = abstract(*shape)
    run = lambda form: jax.eval_shape(
        jax.grad(lambda a: gated_delta_rule(**a, implementation=form)[0].astype(float).sum()),
        arguments,
    )
    assert run(None) == arguments
    with refused("implementation='pallas_tpu'", "VMEM", "'chunked'", error=NotImplementedError):
        run("pallas_tpu")


def test_a_tpu_takes_kernels_that_fit():
    def traced(*shape):
        with compiling_for("tpu"):
            return str(jax.make_jaxpr(lambda a: gated_delta_rule(**a)[0])(abstract(*shape)))

    assert "gated_delta_rule_forward" in traced(1, 2, 128)
    assert "gated_delta_rule_forward" not in traced(1, 16, 128)


def test_a_gpu_takes_xlas_form_for_narrow_heads():
    """Heads of 32 channels are narrower than a tile of the kernels."""
    inputs, _ = problem(time=2 * CHUNK, key=32, value=32)
    with compiling_for("gpu"):
        jaxpr = jax.make_jaxpr(lambda: gated_delta_rule(**inputs)[0])()
    assert "pallas_call" not in str(jaxpr)


def test_the_kernel_takes_numpys_float64_as_jax_does():
    inputs, _ = problem(time=4)
    assert (
        jax.eval_shape(lambda: gated_delta_rule(**inputs, implementation="pallas_tpu"))[0].dtype
        == jnp.float32
    )


def test_the_kernel_refuses_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with refused("implementation='pallas_tpu'", "gpu", error=NotImplementedError):
        gated_delta_rule(**problem(time=4)[0], implementation="pallas_tpu")


def test_the_kernel_refuses_float64():
    with jax.enable_x64(True):
        x = jnp.zeros((1, 8, 1, 4), jnp.float64)
        with refused("float64", error=NotImplementedError):
            gated_delta_rule(x, x, x, g=x[..., 0], beta=x[..., 0], implementation="pallas_tpu")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(), None),
        *(
            (dict(g=np.full((1, 4, 2), g)), "g is positive or not finite")
            for g in (0.1, -np.inf, np.nan)
        ),
        (dict(segment_ids=np.array([[1, 0, 0, 2]])), "segment_ids are out of order"),
        (dict(segment_ids=np.array([[2, 1, 1, 0]])), "segment_ids are out of order"),
    ],
    ids=str,
)
def test_values_are_checked_where_nans_are_debugged(change, message):
    inputs, _ = problem(time=4)
    arguments = (
        {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
        | dict(segment_ids=np.array([[1, 1, 2, 0]]))
        | change
    )
    run = lambda: jax.block_until_ready(
        jax.jit(lambda a: gated_delta_rule(**a, implementation="recurrent"))(arguments)
    )
    run()  # says nothing otherwise
    with jax.debug_nans(True):
        if message is None:
            run()
        else:
            # JAX wraps what a callback raises
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                run()
                jax.effects_barrier()


if __name__ == "__main__":
    for dtype, name, implementation in itertools.product(
        (jnp.float32, jnp.bfloat16), CASES, sys.argv[1:]
    ):
        found = errors(*adversarial(name)[:2], implementation, dtype)
        print(
            f"{dtype.__name__:8} {name:14} {implementation:11}",
            *(f"{n} {x:.1e}" for n, x in found.items()),
            flush=True,
        )
