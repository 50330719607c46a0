"""Tasks that need a state: labels that another computation of the state gives, and their loss."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from models import SMALLEST, drawn_model

from qwen3next_jax.config import DataConfig, ModelConfig, SyntheticConfig, TrainConfig
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.state_tasks import FIRST_ID, StateRows
from qwen3next_jax.training.loss import count_tokens_and_targets, total_loss
from tests.refusals import refused

OPTIONS = SyntheticConfig(pairs=4, modulus=7)


def rows(task, length=64, vocab_size=128, count=20, options=OPTIONS):
    made = StateRows(task, length, vocab_size, options, seed=3, split=0)
    return [made[i] for i in range(count)]


@pytest.mark.parametrize(("task", "modulus"), [("parity", 2), ("modular_addition", 7)])
def test_the_label_is_the_sum_so_far(task, modulus):
    for row in rows(task):
        inputs = row.tokens - FIRST_ID
        assert set(inputs) <= set(range(modulus))
        for t in range(len(inputs) - 1):
            assert row.labels[t + 1] - FIRST_ID == sum(inputs[: t + 1]) % modulus


@pytest.mark.parametrize(("task", "things", "size"), [("s3", 3, 6), ("a5", 5, 60), ("s5", 5, 120)])
def test_the_label_is_the_product_so_far(task, things, size):
    elements = [
        element
        for element in itertools.permutations(range(things))
        if task != "a5" or round(np.linalg.det(np.eye(things)[list(element)])) == 1
    ]
    assert len(elements) == size
    for row in rows(task):
        arrangement = np.arange(things)
        for t, number in enumerate(row.tokens[:-1] - FIRST_ID):
            arrangement = np.array(elements[number])[arrangement]
            assert tuple(arrangement) == elements[row.labels[t + 1] - FIRST_ID]


@pytest.mark.parametrize(
    ("task", "max_moved", "inputs"), [("s5", 2, 11), ("s5", 3, 31), ("a5", 3, 21), ("s3", 2, 4)]
)
def test_inputs_move_few_things(task, max_moved, inputs):
    elements = list(itertools.permutations(range(3 if task == "s3" else 5)))
    if task == "a5":
        elements = [x for x in elements if round(np.linalg.det(np.eye(5)[list(x)])) == 1]
    seen = {
        number - FIRST_ID
        for row in rows(task, options=SyntheticConfig(max_moved=max_moved))
        for number in row.tokens
    }
    assert len(seen) == inputs
    for number in seen:
        assert sum(x != i for i, x in enumerate(elements[number])) <= max_moved


@pytest.mark.parametrize(("task", "changes"), [("parity", False), ("s5", True)])
def test_fingerprint_follows_the_settings_read(task, changes):
    """Only a setting that the task reads changes the fingerprint of its rows."""
    two, three = (
        open_data(DataConfig(source=task, synthetic=SyntheticConfig(max_moved=moved)), 32, 4, 128)
        for moved in (2, 3)
    )
    assert (two.fingerprint != three.fingerprint) == changes


def test_no_even_permutation_moves_two_things():
    with refused("data.synthetic.max_moved = 2", "at least 3"):
        rows("a5", options=SyntheticConfig(max_moved=2))


def test_a_key_recalls_the_value_of_the_parity():
    for row in rows("state_recall"):
        table = {row.tokens[i]: row.tokens[i + 1 : i + 3] for i in range(0, 12, 3)}
        parity = 0
        for t in range(12, len(row.tokens) - 1):
            token = row.tokens[t]
            parity ^= token == 2
            assert row.target_mask[t + 1] == (token in table)
            if token in table:
                assert row.labels[t + 1] == table[token][parity]
        assert row.target_mask.sum() > 10


def test_the_loss_is_that_of_the_labels():
    data = open_data(DataConfig(source="parity"), 16, 3, 8)
    batch = {name: jnp.asarray(x) for name, x in next(data.batches(0)).items()}
    model = drawn_model(dataclasses.replace(SMALLEST, vocab_size=8))
    loss, parts = total_loss(model, batch, TrainConfig(), count_tokens_and_targets(batch, 0))
    logits = np.asarray(model(batch["tokens"], batch["segment_ids"])[0], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = np.asarray(batch["labels"])[:, 1:]
    expected = -np.take_along_axis(log_p[:, :-1], labels[..., None], -1).mean()
    assert float(parts["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "length", "vocab_size", "names"),
    [
        ("s5", 8, 120, ["model.vocab_size = 120", "121", "120 elements"]),
        ("parity", 8, 2, ["model.vocab_size = 2", "3"]),
        ("state_recall", 13, 64, ["13 tokens", "14"]),
        ("state_recall", 64, 8, ["model.vocab_size = 8", "9", "data.synthetic.pairs"]),
    ],
)
def test_a_task_that_does_not_fit_is_refused(task, length, vocab_size, names):
    with refused(*names):
        StateRows(task, length, vocab_size, OPTIONS, seed=0, split=0)


def test_drafts_of_labels_are_refused():
    data = DataConfig(source="parity")
    with refused("model.mtp_depth = 1"):
        from qwen3next_jax.data.pipeline import data_source_class

        data_source_class(data).check_model(data, dataclasses.replace(ModelConfig(), mtp_depth=1))
