"""Contamination: the n-grams that an evaluation and prepared data share."""

import json

import numpy as np
import pytest

from qwen3next_jax.commands import verify
from qwen3next_jax.data import contamination, preparation
from qwen3next_jax.data.contamination import NGRAM, NgramIndex, find_contamination
from qwen3next_jax.data.sources import find_source_of_glob
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import load_tokenizer
from qwen3next_jax.evals.contamination import contamination_of_tasks
from tests.corpora import write_jsonl
from tests.refusals import refused

BYTES = load_tokenizer("bytes")
LETTERS = np.random.default_rng(0)


def text_of(n):
    return "".join(LETTERS.choice(list("abcdefghij klmnö∀"), n))


DOCUMENTS = ["abcdefghij" + text_of(200) + "klmnopqrst" for _ in range(40)]


@pytest.fixture
def prepared(tmp_path):
    for name, some in (("a", DOCUMENTS[:25]), ("b", DOCUMENTS[25:])):
        write_jsonl(tmp_path / f"{name}.jsonl", some)
    preparation.tokenize_source(
        find_source_of_glob(f"{tmp_path}/*.jsonl", "text"), BYTES, Store(tmp_path / "p")
    )
    return str(tmp_path / "p")


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_exactly_the_shared_ngrams_are_found(dtype, monkeypatch):
    """Compared with sets of tuples, over the edges of the pieces that are read at once."""
    monkeypatch.setattr(contamination, "_TOKENS_AT_ONCE", 50)
    random = np.random.default_rng(1)
    data = random.integers(0, 3, 400).astype(dtype)  # few different tokens: many partial matches
    texts = [data[i : i + n] for i, n in ((0, 13), (44, 13), (387, 13), (5, 12), (90, 0))]
    texts += [random.integers(0, 3, 30) for _ in range(20)]
    texts += [np.concatenate([data[100:120], [7], data[300:313]])]
    ngrams = lambda ids: [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    held = set(ngrams(data.tolist()))
    index = NgramIndex(texts)
    found = np.zeros(len(index.ngrams), bool)
    index.mark_contained(data, found)
    for text, share in zip(texts, index.contained_shares(found), strict=True):
        covered = np.zeros(len(text), bool)
        for i, ngram in enumerate(ngrams(text.tolist())):
            covered[i : i + NGRAM] |= ngram in held
        if len(text) < NGRAM:
            assert np.isnan(share)
        else:
            assert share == pytest.approx(covered.mean(), abs=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_shared_part_of_a_text_is_found(prepared, monkeypatch, workers):
    monkeypatch.setattr(contamination, "_READ_AT_ONCE", 64)
    half = DOCUMENTS[3][20:80] + text_of(60)
    over_an_end = DOCUMENTS[3][-10:] + DOCUMENTS[4][:10]  # stands nowhere, though both halves do
    texts = [DOCUMENTS[30][50:150], text_of(100), half, "short", over_an_end, DOCUMENTS[0]]
    found = find_contamination(texts, BYTES, prepared, workers)
    shares = found.contained_shares.round(2).tolist()
    assert shares[0] == shares[5] == 1.0
    assert shares[1] == shares[4] == 0.0
    assert 0.3 < shares[2] < 0.7
    assert np.isnan(shares[3])
    assert [i for i, _ in found.worst_texts()] == [0, 5, 2]


def test_all_tokens_are_compared(prepared):
    found = find_contamination([text_of(100)], BYTES, prepared)
    assert found.data_token_count == sum(len(text.encode()) + 1 for text in DOCUMENTS)


def test_no_texts_are_not_contaminated(prepared):
    assert not np.nan_to_num(find_contamination([], BYTES, prepared).contained_shares).any()


def test_verify_and_the_harness_report_it(prepared, tmp_path, capsys):
    lines = [json.dumps({"question": text}) for text in (text_of(90), DOCUMENTS[7])]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    verify.print_contamination(prepared, f"{tmp_path}/questions.jsonl", "question", "bytes")
    out = capsys.readouterr().out
    assert "1 contaminated" in out
    assert "100%  questions.jsonl:2" in out
    with refused("--tokenizer"):
        verify.print_contamination(prepared, f"{tmp_path}/questions.jsonl", "question", None)
    samples = {
        "one": [{"doc": {"question": DOCUMENTS[2][:70], "choices": [DOCUMENTS[2][70:], "no"]}}],
        "two": [{"doc": {"text": text_of(50), "answer": 3}}, {"doc": {"text": "?"}}],
    }
    found = contamination_of_tasks(samples, BYTES, prepared)
    kinds = ("contaminated", "in_part", "clean", "too_short")
    counts = {
        task: [of_task.counts_by_verdict()[kind] for kind in kinds]
        for task, of_task in found.items()
    }
    assert counts == {"one": [1, 0, 0, 0], "two": [0, 0, 1, 1]}


def test_tokens_of_another_tokenizer_are_not_compared(prepared, monkeypatch, tmp_path, capsys):
    other = type(BYTES)()
    other.fingerprint = "other"
    with refused(prepared):
        find_contamination(DOCUMENTS, other, prepared)
    (name,) = Store(prepared).names_matching("corpora/*.json")
    content = Store(prepared).read_json(name)
    content["format"] -= 1  # of another format
    Store(prepared).write_json(name, content)
    with refused(prepared):
        find_contamination(DOCUMENTS, BYTES, prepared)
    assert "qwen3next prepare" in capsys.readouterr().err
    preparation.tokenize_source(
        find_source_of_glob(f"{tmp_path}/*.jsonl", "text"), BYTES, Store(prepared)
    )
    assert find_contamination(DOCUMENTS, BYTES, prepared).contained_shares.min() == 1.0
