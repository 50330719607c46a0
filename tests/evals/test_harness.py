"""What lm-evaluation-harness gets: log-likelihoods of continuations and of whole texts, and texts.
The tests are skipped without lm-evaluation-harness, the extra "evals".
"""

import dataclasses
import types

import jax
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.data.tokens import ByteTokenizer
from tests.models import HYBRID, drawn_model

pytest.importorskip("lm_eval.api.model")

END = ByteTokenizer.eos_id
MAX_LENGTH = 16


@pytest.fixture(scope="module")
def model():
    return drawn_model(dataclasses.replace(HYBRID, vocab_size=257))


@pytest.fixture(scope="module")
def harness(model):
    from qwen3next_jax.evals.harness import HarnessModel

    return HarnessModel(model, ByteTokenizer(), max_length=MAX_LENGTH, batch_size=2)


@pytest.fixture(scope="module")
def log_p(model):
    """Returns a function (context ids, continuation ids) → the log-probability of the continuation,
    in one pass over both.
    """
    graphdef, params = nnx.split(model)
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens).logits)

    def of(context, continuation):
        ids = [*context, *continuation]
        row = np.pad(ids, (0, 32 - len(ids)))[None].astype(np.int32)
        log_p_TV = jax.nn.log_softmax(forward(params, row)[0])
        places = range(len(context), len(ids))
        return float(sum(log_p_TV[t - 1, ids[t]] for t in places))

    return of


def requests(*arguments):
    return [types.SimpleNamespace(args=one) for one in arguments]


@pytest.mark.parametrize(
    ("context", "continuation", "context_ids", "scored"),
    [
        ("ab", "cd", b"ab", b"cd"),
        ("ab ", "cd", b"ab", b" cd"),  # the harness moves spaces
        ("", "cd", [END], b"cd"),
        (" ", "cd", [END], b" cd"),
        ("ab", "", b"ab", b""),
        ("0123456789abcdefgh", "xy", b"3456789abcdefgh", b"xy"),
    ],
)
def test_a_continuation_is_scored_after_its_context(
    harness, log_p, context, continuation, context_ids, scored
):
    ((value, _),) = harness.loglikelihood(requests((context, continuation)))
    assert value == pytest.approx(log_p(context_ids, scored), rel=1e-4, abs=1e-5)


def test_a_long_text_is_scored_once(harness, log_p):
    text = b"a text that is longer than a window"
    ids = [END, *text]
    expected = sum(
        log_p(ids[max(0, last - MAX_LENGTH - 1) : first], ids[first:last])
        for first, last in ((1, 17), (17, 33), (33, 36))
    )
    (value,) = harness.loglikelihood_rolling(requests((text.decode(),)))
    assert value == pytest.approx(expected, rel=1e-4)


def test_an_empty_text_is_certain(harness):
    assert harness.loglikelihood_rolling(requests(("",))) == [0]
