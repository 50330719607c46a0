"""What the first documents of a source say about all of it."""

import dataclasses

from qwen3next_jax.data import estimate as estimates
from qwen3next_jax.data import readers
from qwen3next_jax.data.estimate import estimate_size
from qwen3next_jax.data.sources import find_source_of_glob
from qwen3next_jax.data.tokens import load_tokenizer
from tests.refusals import refused


def test_a_source_of_bad_records_counts_them(tmp_path):
    for name, records in (("a.jsonl", 300), ("b.jsonl", 20)):
        (tmp_path / name).write_text('{"other": "x"}\n' * records)
    source = dataclasses.replace(
        find_source_of_glob(f"{tmp_path}/*.jsonl", "text"), bad_records="skip"
    )
    with refused("320 no such field"):
        estimate_size(source, load_tokenizer("bytes"))


def test_the_first_document_may_come_late(tmp_path, monkeypatch):
    """In the last part of a file, after more bad records than an estimate reads."""
    monkeypatch.setattr(estimates, "_SAMPLE_BYTES", 100)
    monkeypatch.setattr(readers, "_PART_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"other": "x"}\n' * 300 + '{"text": "y"}\n')
    source = dataclasses.replace(
        find_source_of_glob(f"{tmp_path}/a.jsonl", "text"), bad_records="skip"
    )
    assert 0.9 < estimate_size(source, load_tokenizer("bytes")).documents <= 1.1
