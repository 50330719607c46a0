"""Packing: no token lost or doubled, rows full, documents whole where possible."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_jax.common import digests
from qwen3next_jax.data.packing import Documents, Packer


def pack(lengths, row_length, buffered_tokens, seed=0, at_once=1):
    """Packs documents whose tokens are all different numbers, so that every token can be traced.

    Returns:
      (the rows: for each piece its tokens, part and record; the packer).
    """
    packer = Packer(row_length, seed, buffered_tokens)
    batches, first = [], 0
    for i in range(0, len(lengths), at_once):
        ends = np.cumsum(lengths[i : i + at_once])
        tokens = np.arange(first, first + ends[-1])
        batches += packer.add(Documents(tokens, ends, i, np.arange(len(ends))))
        first += ends[-1]
    rows = []
    for batch in [*batches, *packer.finish()]:
        pieces = list(
            zip(
                [batch.tokens[s : s + n] for s, n in zip(batch.piece_starts, batch.piece_lengths)],
                batch.part_indices.tolist(),
                batch.record_indices.tolist(),
            )
        )
        rows += [
            pieces[a:b]
            for a, b in zip([0, *batch.row_ends_in_pieces[:-1]], batch.row_ends_in_pieces)
        ]
    return rows, packer


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=120),
    row_length=st.integers(1, 33),
    buffered=st.sampled_from([1, 300, 10**6]),
    seed=st.integers(0, 5),
    at_once=st.integers(1, 50),
)
def test_nothing_is_lost_or_doubled_and_rows_are_full(lengths, row_length, buffered, seed, at_once):
    rows, packer = pack(lengths, row_length, buffered, seed, at_once)
    pieces = [piece for row in rows for piece in row]
    found = np.sort(np.concatenate([np.zeros(0, int), *(tokens for tokens, *_ in pieces)]))
    np.testing.assert_array_equal(found, np.arange(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    cut = set()
    for tokens, part, record in pieces:  # each is a run of its own document
        assert starts[part + record] <= tokens[0]
        assert tokens[-1] < starts[part + record + 1]
        np.testing.assert_array_equal(np.diff(tokens), 1)
        if len(tokens) < lengths[part + record]:
            cut.add(part + record)
    sizes = [sum(len(tokens) for tokens, *_ in row) for row in rows]
    assert all(size <= row_length for size in sizes)
    assert sum(size < row_length - row_length / 32 for size in sizes) <= 1  # the very last row
    assert packer.cut_documents == len(cut)
    # How many documents are added at once does not matter.
    one_by_one, _ = pack(lengths, row_length, buffered, seed)
    assert [[p[0].tolist() for p in row] for row in rows] == [
        [p[0].tolist() for p in row] for row in one_by_one
    ]


def test_documents_stay_whole_where_rows_can_still_be_filled():
    random = np.random.default_rng(0)
    short = random.integers(1, 300, 2000).tolist()
    rows, packer = pack(short, row_length=1024, buffered_tokens=10**6)
    assert packer.cut_documents <= 1  # at most at the end, where nothing small is left
    padding = sum(1024 - sum(len(p[0]) for p in row) for row in rows) / (1024 * len(rows))
    assert padding < 0.01
    _, packer = pack([512] * 64 + [256] * 64 + [1024] * 7, row_length=1024, buffered_tokens=10**6)
    assert packer.cut_documents == 0


def test_documents_that_fit_badly_are_cut_rather_than_padded():
    # kept whole, 40 % would be padding
    rows, packer = pack([600] * 500, row_length=1000, buffered_tokens=10**6)
    assert len(rows) == 300
    assert 0 < packer.cut_documents < 500


def test_order_depends_on_the_seed_alone():
    def tokens(seed):
        return [
            piece[0].tolist() for row in pack(list(range(1, 60)), 40, 200, seed)[0] for piece in row
        ]

    assert tokens(1) == tokens(1) != tokens(2)


def test_memory_is_bounded():
    packer = Packer(row_length=64, seed=0, buffered_tokens=4096)
    for i in range(2000):
        list(packer.add(Documents(np.zeros(50, np.int32), np.array([50]), i, np.array([0]))))
        assert packer._buffered == sum(map(len, packer._tokens)) < 4096 + 50


def test_the_order_of_rows_stays_as_it_was():
    """The rows are compared by a digest of their pieces: groups that are packed now, and those
    that a folder holds already, become the rows of one run.
    """
    lengths = np.random.default_rng(7).integers(1, 400, 900).tolist()
    rows, packer = pack(lengths, 128, 20_000, seed=3, at_once=40)
    found = [[(int(tokens[0]), len(tokens)) for tokens, *_ in row] for row in rows]
    assert (len(rows), packer.cut_documents) == (1451, 648)
    assert digests.sha256_json(found)[:16] == "300cbb66237424c5"
