"""Packing: no token lost or doubled, rows full, documents whole where possible."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_jax.data.packing import Packer


def pack(lengths, row_length, buffered_tokens, seed=0):
    """Packs documents whose tokens are all different numbers, so that every token can be traced."""
    packer = Packer(row_length, seed, buffered_tokens)
    rows, first = [], 0
    for i, n in enumerate(lengths):
        rows += packer.add(np.arange(first, first + n), i, 0)
        first += n
    return [*rows, *packer.finish()], packer


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=120),
    row_length=st.integers(1, 33),
    buffered=st.sampled_from([1, 300, 10**6]),
    seed=st.integers(0, 5),
)
def test_nothing_is_lost_or_doubled_and_rows_are_full(lengths, row_length, buffered, seed):
    rows, packer = pack(lengths, row_length, buffered, seed)
    pieces = [piece for row in rows for piece in row]
    found = np.sort(np.concatenate([np.zeros(0, int), *(piece.tokens for piece in pieces)]))
    np.testing.assert_array_equal(found, np.arange(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    # each is a run of its own document, and says truly whether it is all of it
    for piece in pieces:
        assert starts[piece.file] <= piece.tokens[0] and piece.tokens[-1] < starts[piece.file + 1]
        np.testing.assert_array_equal(np.diff(piece.tokens), 1)
        assert piece.whole == (len(piece.tokens) == lengths[piece.file])
    sizes = [sum(len(piece.tokens) for piece in row) for row in rows]
    assert all(size <= row_length for size in sizes)
    assert sum(size < row_length - row_length / 32 for size in sizes) <= 1  # the very last row
    assert packer.cut_documents == len({piece.file for piece in pieces if not piece.whole})


def test_documents_stay_whole_where_rows_can_still_be_filled():
    random = np.random.default_rng(0)
    short = random.integers(1, 300, 2000).tolist()
    rows, packer = pack(short, row_length=1024, buffered_tokens=10**6)
    assert packer.cut_documents <= 1  # at most at the end, where nothing small is left
    padding = sum(1024 - sum(len(p.tokens) for p in row) for row in rows) / (1024 * len(rows))
    assert padding < 0.01
    _, packer = pack([512] * 64 + [256] * 64 + [1024] * 7, row_length=1024, buffered_tokens=10**6)
    assert packer.cut_documents == 0


def test_documents_that_fit_badly_are_cut_rather_than_padded():
    # kept whole, 40 % would be padding
    rows, packer = pack([600] * 500, row_length=1000, buffered_tokens=10**6)
    assert len(rows) == 300 and 0 < packer.cut_documents < 500


def test_order_depends_on_the_seed_alone():
    def tokens(seed):
        return [
            piece.tokens.tolist()
            for row in pack(list(range(1, 60)), 40, 200, seed)[0]
            for piece in row
        ]

    assert tokens(1) == tokens(1) != tokens(2)


def test_memory_is_bounded():
    packer = Packer(row_length=64, seed=0, buffered_tokens=4096)
    for i in range(2000):
        list(packer.add(np.zeros(50, np.int32), i, 0))
        assert packer._buffered < 4096 + 50
