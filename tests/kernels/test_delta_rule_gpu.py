"""The kernels for Hopper GPUs, interpreted on CPU, against the float64 recurrence. No test here
says that a GPU computes the same.

python tests/kernels/test_delta_rule_gpu.py      prints the errors of the hard inputs, in percent
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_delta_rule import (
    BARS,
    CASES,
    CHUNK,
    _run,
    adversarial,
    check,
    check_growth,
    error,
    errors,
    outputs_and_gradients,
    problem,
    rounded,
)

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import delta_rule as pallas_gpu
from qwen3next_jax.kernels.gpu import (
    delta_rule_passes,
    delta_rule_problem,
    delta_rule_self_test,
    kernel_call,
)
from qwen3next_jax.ops import gated_delta_rule
from qwen3next_jax.ops.delta_rule import chunked
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def races_are_errors():
    """Also between copies and what reads or writes beside them; memory that nothing was written
    to holds NaN.
    """
    with pytest.MonkeyPatch.context() as patch:
        interpreter = plgpu.InterpretGPUParams(detect_races=True, on_race="raise")
        patch.setattr(kernel_call, "INTERPRETER", interpreter)
        yield


BFLOAT16 = functools.partial(check, implementation="pallas_gpu", dtype=jnp.bfloat16)


@pytest.mark.slow
def test_hard_inputs():
    # as the test below has ids, one program serves both
    one_document = np.ones((1, 2 * CHUNK), int)
    for name in CASES:
        inputs, cotangents, bars = adversarial(name)
        bar, gradient_bar = bars or BARS[jnp.bfloat16]
        BFLOAT16(
            inputs,
            cotangents,
            bar=bar,
            gradient_bar=gradient_bar,
            segment_ids=one_document,
            case=name,
        )


@pytest.mark.slow
def test_nothing_grows_with_an_eigenvalue_of_minus_one():
    check_growth("pallas_gpu", jnp.bfloat16, period=4, time=2048, width=64)


@pytest.mark.slow
def test_documents_and_padding():
    """A document that starts inside a chunk, one that ends with it, one of a token; padding has
    no gradient; two heads share their keys.
    """
    inputs, cotangents = problem(time=2 * CHUNK, key=64, value=64)
    ids = np.array([[1] * 20 + [3] + [4] * 43 + [6] * 50 + [0] * 14])
    BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2, segment_ids=ids)
    found = outputs_and_gradients(
        inputs, cotangents, jnp.bfloat16, ids, implementation="pallas_gpu"
    )
    assert not any(found[name][0, -14:].any() for name in ("o", "dq", "dk", "dv", "dg", "dbeta"))


@pytest.fixture
def split_into(monkeypatch):
    """Makes the passes of the state split the work as the argument says."""

    def split_into(pieces: int, warpgroups: int = 1):
        split = delta_rule_problem.WorkSplit(pieces, warpgroups)
        monkeypatch.setattr(pallas_gpu.Problem, "best_work_split", lambda p: split)
        _run.clear_cache()

    yield split_into
    _run.clear_cache()


def slowly_decaying(**sizes):
    """What `problem` returns, with gates so weak that a state matters 300 tokens later."""
    inputs, cotangents = problem(**sizes)
    return inputs | dict(g=1e-2 * inputs["g"]), cotangents


def test_a_row_in_three_pieces_forward():
    inputs, cotangents = slowly_decaying(time=3 * CHUNK, key=64, value=64, heads=1)
    inputs, _ = rounded(inputs, cotangents, jnp.bfloat16)
    with jax.enable_x64(True):
        want = gated_delta_rule(**inputs, implementation="recurrent")
    q, k, v = (jnp.asarray(inputs[name], jnp.bfloat16) for name in "qkv")
    g, beta, state = (jnp.float32(inputs[name]) for name in ("g", "beta", "initial_state"))
    got = delta_rule_passes.forward(
        Inputs(q, k, v, g, beta),
        state,
        None,
        Settings(CHUNK, normalize_qk=True, delta_term=True),
        save=False,
        interpret=True,
        split=delta_rule_problem.WorkSplit(3, 1),
    )
    for x, y in zip(got, want):
        assert error(np.float64(x), np.float64(y)) <= BARS[jnp.bfloat16][0]


@pytest.mark.parametrize("split", [(1, 1), (1, 2), (3, 1)])
def test_gradients_have_the_shapes_of_inputs(split):
    split = delta_rule_problem.WorkSplit(*split)
    settings = Settings(CHUNK, normalize_qk=True, delta_term=True)

    def outputs(q, k, v, g, beta, state):
        inputs = Inputs(q, k, v, g, beta, None)
        return delta_rule_passes.forward(inputs, state, None, settings, save=True, split=split)

    def gradients(q, k, v, g, beta, state):
        inputs = Inputs(q, k, v, g, beta, None)
        out, final, states, inverses = outputs(q, k, v, g, beta, state)
        return delta_rule_passes.backward(
            inputs, states, inverses, out, final, settings, split=split
        )

    keys, values = (
        jax.ShapeDtypeStruct((1, 3 * CHUNK, heads, 128), jnp.bfloat16) for heads in (1, 2)
    )
    gates = jax.ShapeDtypeStruct((1, 3 * CHUNK, 2), jnp.float32)
    state = jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.float32)
    arguments = keys, keys, values, gates, gates, state
    found = jax.eval_shape(gradients, *arguments)
    assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in arguments]


DOCUMENTS = {
    "one document": [],
    "documents end with pieces": [CHUNK, 3 * CHUNK],
    "documents end in pieces": [CHUNK + 3, CHUNK + 4, 2 * CHUNK + 40],
    "a document spans the second piece": [CHUNK - 5, 4 * CHUNK + 1],
}


@pytest.mark.slow
def test_documents_of_a_row_in_three_pieces(split_into):
    """Pieces of one, two and two chunks, and padding at the end."""
    time = 5 * CHUNK - 7
    inputs, cotangents = slowly_decaying(time=time, key=64, value=64)
    split_into(3)
    for name, starts in DOCUMENTS.items():
        ids = np.searchsorted(starts, np.arange(time), side="right")[None] + 1
        ids[0, -4:] = 0
        BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2, segment_ids=ids, case=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, pieces",
    [
        (dict(key=128, value=64, heads=3), 4),  # three columns of maps, the fourth has no meaning
        (dict(key=64, value=128, batch=2), 3),
        (dict(key=256, value=64, heads=1), 3),
    ],
    ids=str,
)
def test_widths_and_rows_of_a_batch_in_pieces(sizes, pieces, split_into):
    inputs, cotangents = slowly_decaying(time=4 * CHUNK, **sizes)
    split_into(pieces)
    BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2)


@pytest.mark.slow
def test_identical_keys_in_pieces_as_in_whole_rows(split_into):
    """With beta = 1.9 a whole row of five chunks is further from the recurrence than the bars allow
    two chunks to be (1.2 % in o, 1.6 % in dq). The composed states add a rounding of the size that
    each chunk already has, so the errors at most double.
    """
    inputs, cotangents = slowly_decaying(time=5 * CHUNK, key=64, value=64)
    inputs["k"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape).copy()
    inputs["beta"] = np.full_like(inputs["beta"], 1.9)
    whole = errors(inputs, cotangents, "pallas_gpu", jnp.bfloat16)
    split_into(3)
    in_pieces = errors(inputs, cotangents, "pallas_gpu", jnp.bfloat16)
    for name, found in in_pieces.items():
        assert found <= 2 * whole[name], (name, found, whole[name])


@pytest.mark.slow
def test_blocks_of_two_tiles(split_into):
    inputs, cotangents = slowly_decaying(time=3 * CHUNK, key=64, value=128)
    split_into(1, warpgroups=2)
    BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2)


@pytest.mark.parametrize(
    "batch, tokens, heads, split",
    [
        (1, 32_768, 4, (17, 1)),
        (1, 32_768, 16, (5, 1)),
        (1, 32_768, 32, (3, 1)),
        (1, 8_192, 32, (1, 1)),
        (2, 16_384, 32, (1, 1)),
        (4, 8_192, 32, (1, 2)),
        (8, 4_096, 16, (1, 2)),
        (32, 2_048, 8, (1, 2)),
        (1, 4_096, 4, (1, 1)),
        (1, 32_768 + 64, 4, (17, 1)),
    ],
)
def test_long_rows_of_few_heads_go_in_pieces(batch, tokens, heads, split):
    p = pallas_gpu.Problem(batch, tokens // CHUNK, heads, heads, 128, 128, 128, True, True)
    assert p.best_work_split() == split
    # Both calls run all their blocks at the same time.
    blocks = (
        p.value_tile_count + (split[0] - 2) * p.blocks_per_map,
        (split[0] - 1) * p.value_tile_count,
    )
    assert split[0] == 1 or batch * heads * max(blocks) <= delta_rule_problem.PROCESSORS


@pytest.mark.slow
def test_the_second_piece_of_a_row_writes_in_place():
    """Into the arrays that the first call wrote to: o and the states, then both parts of dV and the
    gradients of the states.
    """
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, v, state = shaped(1, 192, 1, 64), shaped(1, 192, 2, 64), shaped(1, 2, 64, 64)
    gates = shaped(1, 192, 2)
    settings, split = Settings(CHUNK, True, True), delta_rule_problem.WorkSplit(3, 1)

    def both(x, state):
        o, final, *saved = delta_rule_passes.forward(
            x, state, None, settings, save=True, split=split
        )
        return delta_rule_passes.backward(x, *saved, o, final, settings, split=split)

    traced = jax.jit(both).trace(Inputs(q, q, v, gates, gates), state)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == 7
    aliases = re.findall(r"output_operand_aliases = \[(.*?)\], result", lowered)
    assert sorted(x.count("operand_index") for x in aliases) == [2, 3]


@pytest.mark.slow
def test_rows_of_a_batch_the_future_repetition_and_x64(monkeypatch):
    inputs, cotangents = problem(batch=2, time=CHUNK + 9, groups=1, heads=3, key=64, value=128)
    ids = np.array([[1] * 20 + [3] + [4] * 43 + [6] * 5 + [0] * 4, [2] * 64 + [5] * 9])
    BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2, segment_ids=ids)
    run = lambda p: outputs_and_gradients(
        p, cotangents, jnp.bfloat16, ids, implementation="pallas_gpu"
    )
    before, changed = run(inputs), {n: x.copy() for n, x in inputs.items()}
    for name in "qkv":
        changed[name][:, 30:] *= 0.5
    np.testing.assert_array_equal(run(changed)["o"][:, :30], before["o"][:, :30])
    for name, x in run(inputs).items():
        np.testing.assert_array_equal(x, before[name])
    with jax.enable_x64(True):
        to = lambda n, x: jnp.asarray(x, jnp.bfloat16 if n in "qkv" else jnp.float32)
        arrays = {n: to(n, x) for n, x in inputs.items()}
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(self_test, "unsupported_chip_reason", lambda: "")
        # Lowered for a GPU alone: the interpreter has no loop inside a branch with 64-bit numbers
        # on.
        lowered = (
            _run.trace(
                arrays,
                tuple(map(jnp.float32, cotangents)),
                jnp.asarray(ids),
                implementation="pallas_gpu",
            )
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert lowered.count("@mosaic_gpu") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, settings",
    [
        (dict(time=1, key=64, value=64), dict()),
        (dict(time=CHUNK + 1, key=64, value=256, groups=2), dict(delta_term=False)),
        (dict(time=CHUNK, key=256, value=64), dict(delta_term=False, normalize_qk=False)),
        (dict(time=2 * CHUNK + 1, key=256, value=256, heads=1), dict()),
        (dict(time=3 * CHUNK, key=128, value=128, heads=4), dict()),
        (dict(time=CHUNK + 1, key=42, value=84), dict()),  # padded to 64 and 128
        (dict(time=CHUNK - 1, key=96, value=40, heads=1), dict(normalize_qk=False)),
    ],
    ids=str,
)
def test_widths_lengths_and_settings(sizes, settings):
    inputs, cotangents = problem(**sizes)
    if settings.get("normalize_qk") is False:
        inputs |= dict(q=inputs["q"] / 8, k=inputs["k"] / 8)
    BFLOAT16(inputs, cotangents, bar=5e-3, gradient_bar=2e-2, **settings)


@pytest.mark.slow
def test_two_halves_chained_by_the_state_are_the_whole():
    inputs, (do, dfinal) = problem(time=CHUNK + 40, key=64, value=64)
    run = functools.partial(outputs_and_gradients, dtype=jnp.bfloat16, implementation="pallas_gpu")
    cut = lambda rows, state: (
        {n: x[:, rows] for n, x in inputs.items() if n != "initial_state"}
        | dict(initial_state=state)
    )
    early, late = slice(0, CHUNK), slice(CHUNK, None)
    state = run(cut(early, inputs["initial_state"]), (do[:, early], dfinal))["final"]
    second = run(cut(late, state), (do[:, late], dfinal))
    first = run(cut(early, inputs["initial_state"]), (do[:, early], second["dinitial_state"]))
    for name, x in run(inputs, (do, dfinal)).items():
        got = dict(final=second["final"], dinitial_state=first["dinitial_state"]).get(name)
        assert (
            error(np.concatenate([first[name], second[name]], axis=1) if got is None else got, x)
            < 1e-3
        ), name


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(v=jnp.float32),
            "has q, k, v of bfloat16, bfloat16, float32: expected bfloat16; use 'chunked'",
        ),
        (dict(width=32), r"has heads of 32 and 32 channels: expected 33 to 256 .*; use 'chunked'"),
        (dict(width=257), r"has heads of 257 and 257 channels: expected 33 to 256 .*"),
        (dict(axis_name="context"), "over a mesh axis: there is no kernel for it; use 'chunked'"),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_refused(change, message):
    width = change.pop("width", 64)
    q, numbers = jnp.zeros((1, 8, 1, width), jnp.bfloat16), jnp.zeros((1, 8, 1))
    with pytest.raises(NotImplementedError, match=f"implementation='pallas_gpu' {message}"):
        gated_delta_rule(
            q,
            q,
            q.astype(change.pop("v", q.dtype)),
            g=numbers,
            beta=numbers,
            implementation="pallas_gpu",
            **change,
        )


@pytest.mark.parametrize("chip", ["8.0", "10.0"])
def test_other_chips_have_no_kernel(chip, monkeypatch, capsys):
    self_test._print_first_time.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=chip)]
    )
    q, numbers = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.zeros((1, 64, 1))
    with refused("implementation='pallas_gpu'", chip, "H100", error=NotImplementedError):
        gated_delta_rule(q, q, q, g=numbers, beta=numbers, implementation="pallas_gpu")
    for _ in range(2):
        jax.eval_shape(functools.partial(gated_delta_rule, g=numbers, beta=numbers), q, q, q)
    (line,) = capsys.readouterr().err.splitlines()
    assert chip in line
    assert "H100" in line


def plant(monkeypatch, spoiled=None, error=None):
    """The XLA form in the kernels' place, one of its gradients a tenth too large."""

    def forward(*arguments, split, interpret=False, **settings):
        if error is not None:
            raise error
        return chunked.forward(*arguments, parallel=False, **settings)

    def backward(*arguments, split, interpret=False, **settings):
        gradients = chunked.backward(*arguments, parallel=False, **settings)
        return tuple(x * 1.1 if i == spoiled else x for i, x in enumerate(gradients))

    monkeypatch.setattr(delta_rule_passes, "forward", forward)
    monkeypatch.setattr(delta_rule_passes, "backward", backward)


@pytest.mark.slow
def test_a_wrong_kernel_is_refused_and_remembered(monkeypatch, tmp_path):
    """In the middle of a trace, as a training step asks."""

    def verdict(folder):
        split = delta_rule_problem.WorkSplit(1, 1)
        found, test = [], delta_rule_self_test.make_self_test(64, 64, True, True, split)
        jax.eval_shape(
            lambda x: (
                found.append(self_test.find_failure(jax.devices()[0], test, tmp_path / folder)) or x
            ),
            0,
        )
        self_test._agreed_outcomes.clear()
        return found[0]

    plant(monkeypatch)
    assert verdict("right") == ""
    plant(monkeypatch, spoiled=1)
    assert verdict("right") == ""  # as remembered
    for _ in range(2):
        assert re.match(
            r"gave another dk than XLA where it was tried on this GPU "
            r"\(0\.1 apart, at most 0\.03\)",
            verdict("wrong"),
        )
    plant(monkeypatch, error=RuntimeError("no ptxas\nanywhere"))
    assert (
        verdict("broken")
        == "failed where it was tried on this GPU (RuntimeError: no ptxas anywhere)"
    )
    plant(monkeypatch)
    assert verdict("broken") == ""  # the next process tries again
    (tmp_path / "right" / "avoid").touch()
    assert f"{tmp_path}/right/avoid" in verdict("right")
    (tmp_path / "right" / "avoid").unlink()

    # Of two processes, what one of them refuses both refuse.
    said = types.SimpleNamespace(
        store={},
        key_value_set=lambda key, text, allow_overwrite: said.store.update({key: text}),
        blocking_key_value_get=lambda key, _: said.store.get(key, said.other),
    )
    monkeypatch.setattr(distributed.global_state, "client", said)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for said.other, right, wrong in (
        ("passed", "", "gave another dk"),
        ("gave another o", "gave another o (process 1)", "gave another dk"),
    ):
        assert verdict("right") == right
        assert list(said.store.values()) == ["passed"]
        assert verdict("wrong").startswith(wrong)
        assert list(said.store.values())[0].startswith("gave another dk")


@pytest.mark.slow
def test_a_gpu_takes_kernels_that_were_right(monkeypatch, capsys):
    """Two forward, three backward, of one shape and dtype with the XLA form's results."""
    self_test._print_first_time.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pallas_gpu, "unsupported_reason", lambda *_, **__: "")
    q, v = (jax.ShapeDtypeStruct((1, 64, heads, 64), jnp.bfloat16) for heads in (1, 3))
    numbers, ids = (
        jax.ShapeDtypeStruct((1, 64, 3), jnp.float32),
        jax.ShapeDtypeStruct((1, 64), jnp.int32),
    )

    def kernels(verdict, transformed, **named):
        monkeypatch.setattr(self_test, "find_failure", lambda *_: verdict)

        def f(q, v, g, ids):
            o, _ = gated_delta_rule(q, q, v, g=g, beta=-g, segment_ids=ids, **named)
            return jnp.sum(o.astype(jnp.float32))

        return (
            jax.jit(transformed(f))
            .trace(q, v, numbers, ids)
            .lower(lowering_platforms=("cuda",))
            .as_text()
            .count("@mosaic_gpu")
        )

    gradient, as_it_is = functools.partial(jax.grad, argnums=(0, 1, 2)), lambda f: f
    assert kernels("", gradient) == 5
    assert kernels("", as_it_is, implementation="pallas_gpu") == 2
    assert kernels("gave another dk", as_it_is) == 0 == kernels("gave another dk", as_it_is)
    used, refused = capsys.readouterr().err.splitlines()
    assert "--config.model.delta_rule=chunked" in used
    assert refused.endswith("gave another dk")


if __name__ == "__main__":
    for case in CASES:
        found = errors(*adversarial(case)[:2], "pallas_gpu", jnp.bfloat16)
        print(case, *(f"{name} {100 * x:.2f}" for name, x in found.items()))
