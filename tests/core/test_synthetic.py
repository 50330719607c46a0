"""Synthetic tasks: what each row promises, and the same rows wherever and whenever they are
made.
"""

import itertools

import numpy as np
import pytest

from qwen3next_jax.config import DataConfig, SyntheticConfig
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.synthetic import SEPARATOR, TaskRows
from tests.refusals import refused


def rows(task, length=64, vocab=64, count=50, seed=0, split=0, **options):
    made = TaskRows(task, length, vocab, SyntheticConfig(**options), seed, split)
    return [made[i] for i in range(count)]


@pytest.mark.parametrize("pairs, length", [(1, 4), (4, 32), (8, 64), (16, 64)])
def test_mqar_asks_every_key_once(pairs, length):
    for tokens, targets in rows("mqar", length, pairs=pairs):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        stored = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert len(stored) == len(set(stored.values())) == pairs
        assert max(stored) < 32 <= min(stored.values())
        answers = np.flatnonzero(targets)
        assert len(answers) == pairs
        assert {tokens[a - 1]: tokens[a] for a in answers} == stored
        elsewhere = np.delete(np.arange(length), np.r_[0 : 2 * pairs : 2, answers - 1])
        assert (tokens[elsewhere] >= 32).all()  # nothing else looks like a key


def test_mqar_asks_near_keys_more_often():
    """By a power law; uniform distances would be 12 on average."""
    distances = [
        answer - 8 for _, targets in rows("mqar", 32, pairs=4) for answer in np.flatnonzero(targets)
    ]
    assert np.mean(distances) < 10


def test_induction_asks_what_followed_the_last_token():
    for tokens, targets in rows("induction"):
        (first,) = np.flatnonzero(tokens[:-2] == tokens[-2])
        assert tokens[-1] == tokens[first + 1]
        assert np.flatnonzero(targets).tolist() == [63]


def test_copy_asks_for_all_of_its_text():
    for tokens, targets in rows("copy"):
        np.testing.assert_array_equal(tokens[targets], tokens[1 : 1 + targets.sum()])
        assert (tokens[~targets][1:-1] != SEPARATOR).all()
        assert targets.sum() == 31


def test_backcopy_repeats_the_token_before_last():
    copied = 0
    task = TaskRows("backcopy", 64, 64, SyntheticConfig(), 0, 0)
    for i in range(50):
        tokens, targets = task[i]
        after = np.flatnonzero(task._chain[1][tokens[1:-1]]) + 2
        np.testing.assert_array_equal(tokens[after], tokens[after - 2])
        copied += len(after)
        assert tokens[0] == SEPARATOR
        assert targets[1:].all()
        assert not targets[0]
    assert copied > 100


def test_rows_depend_on_seed_split_and_index_alone():
    base = rows("mqar")
    for again, row in zip(rows("mqar"), base, strict=True):
        np.testing.assert_array_equal(again.tokens, row.tokens)
    for other in (rows("mqar", seed=1), rows("mqar", split=1)):
        assert all((a.tokens != b.tokens).any() for a, b in zip(other, base, strict=True))
    assert len({row.tokens.tobytes() for row in base}) == len(base)


def test_batches_resume_by_step_and_are_shared_by_hosts():
    def batches(start, count, **share):
        data = open_data(DataConfig(source="mqar", synthetic=SyntheticConfig(pairs=4)), 32, 4, 64)
        return list(itertools.islice(data.batches(start, **share), count))

    straight = batches(0, 6)
    assert {name: (v.shape, v.dtype.name) for name, v in straight[0].items()} == {
        "tokens": ((4, 32), "int32"),
        "segment_ids": ((4, 32), "int32"),
        "target_mask": ((4, 32), "bool"),
    }
    joined = [
        {name: np.concatenate([a[name], b[name]]) for name in a}
        for a, b in zip(batches(2, 4, share=[0, 1]), batches(2, 4, share=[2, 3]))
    ]
    for a, b in zip(joined, straight[2:], strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize(
    "length, vocab, names",
    [
        (30, 64, ("30", "32", "8")),
        (64, 16, ("model.vocab_size = 16", "18")),
    ],
)
def test_rows_too_small_for_the_task_are_refused(length, vocab, names):
    with refused(*names):
        open_data(DataConfig(source="mqar"), length, 4, vocab)
