"""Files are tokenized in parts: what is finished is taken by whoever needs it, kills lose nothing
that was finished, and the bytes are always the same.
"""

import contextlib
import dataclasses
import errno
import gzip
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pyarrow
import pytest
import tokenizers

from qwen3next_jax.commands.verify import verify
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data import (
    fast_bpe,
    pipeline,
    preparation,
    readers,
    row_groups,
    rows,
    store,
    tokenized_parts,
)
from qwen3next_jax.data.datatrove_step import PrepareShare
from qwen3next_jax.data.digest_cache import DigestCache
from qwen3next_jax.data.pipeline import TextData, find_sources
from qwen3next_jax.data.preparation import Share, Unfinished, prepare, tokenize_source
from qwen3next_jax.data.row_groups import HELDOUT, TRAIN, RowRecipe
from qwen3next_jax.data.sources import NothingFound, find_source_of_glob
from qwen3next_jax.data.store import Store, write_json_with_digest
from qwen3next_jax.data.text import LONG
from qwen3next_jax.data.tokens import DifferentIds, load_tokenizer
from tests.corpora import TEXTS, jsonl, write_jsonl
from tests.refusals import refused

ROOT = pathlib.Path(preparation.__file__).parents[2]
BYTES = load_tokenizer("bytes")


@pytest.fixture
def texts(tmp_path):
    for i, name in enumerate("abcd"):
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl", TEXTS[35 * i : 35 * (i + 1)])
    return f"{tmp_path}/texts/*.jsonl"


def run(path, prepared_dir, length=64, fraction=0.1, seed=0, **arguments):
    recipe = RowRecipe(length, fraction, seed)
    return prepare([find_source_of_glob(path, "text")], BYTES, recipe, prepared_dir, **arguments)[0]


def all_rows(prepared):
    return {
        side: [tuple(reader[i].tokens.tolist()) for i in range(len(reader))]
        for side, reader in prepared.rows.items()
    }


def files(folder, *patterns):
    """Every file but the caches of digests and the indexes, which hold times, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(pathlib.Path(folder).rglob("*"))
        if path.is_file() and path.parent.name not in ("digests", "indexes")
    }


@pytest.fixture
def tokenized(monkeypatch):
    """The number of records in each part that is tokenized from now on."""
    found = []
    encode = type(BYTES).encode_documents

    def counted(self, texts):
        found.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(type(BYTES), "encode_documents", counted)
    return found


# ---- parts


def test_rows_of_other_kinds_share_tokens(texts, tmp_path, tokenized):
    """Rows of another length, seed or share."""
    found = [
        run(texts, tmp_path / "p", **other)
        for other in ({}, {"length": 32}, {"seed": 1}, {"fraction": 0.2})
    ]
    assert tokenized == [35] * 4
    assert len({prepared.fingerprint for prepared in found}) == 4


def test_an_appended_file_costs_its_own_tokens(texts, tmp_path, tokenized):
    first = run(texts, tmp_path / "p")
    write_jsonl(tmp_path / "texts" / "e.jsonl", TEXTS[140:])
    appended = run(texts, tmp_path / "p")
    assert tokenized == [35] * 4 + [10]
    in_one_go = run(texts, tmp_path / "q")
    assert all_rows(appended) == all_rows(in_one_go)
    assert first.fingerprint != appended.fingerprint == in_one_go.fingerprint


def test_moved_texts_are_not_tokenized_again(texts, tmp_path, tokenized):
    first = run(texts, tmp_path / "p")
    (tmp_path / "texts").rename(tmp_path / "moved")
    del tokenized[:]
    moved = run(f"{tmp_path}/moved/*.jsonl", tmp_path / "p")
    assert tokenized == []
    assert moved.fingerprint == first.fingerprint


def test_a_changed_file_is_tokenized_again(texts, tmp_path, tokenized):
    first = run(texts, tmp_path / "p")
    file = tmp_path / "texts" / "b.jsonl"
    file.write_text(file.read_text().replace("import", "export"))
    del tokenized[:]
    assert run(texts, tmp_path / "p").fingerprint != first.fingerprint
    assert tokenized == [35]


@pytest.mark.slow
def test_workers_prepare_the_same_bytes(texts, tmp_path, monkeypatch):
    whole = run(texts, tmp_path / "whole")
    monkeypatch.setattr(readers, "_PART_BYTES", 1500)
    one = run(texts, tmp_path / "one", workers=1)
    assert len(list((tmp_path / "one").glob("tokens/*/*.tokens"))) > 8
    assert all_rows(one) == all_rows(whole)
    origins = lambda p: [p.rows[TRAIN][i].document_origins for i in range(len(p.rows[TRAIN]))]
    assert origins(one) == origins(whole)  # lines are counted over the parts of a file
    monkeypatch.setattr(preparation, "_BYTES_PER_WORKER", 1)
    monkeypatch.setattr(preparation, "_TOKENS_PER_WORKER", 1)
    monkeypatch.setattr(row_groups, "_GROUP_TOKENS", 4000)
    two = run(texts, tmp_path / "two", workers=2)
    assert len(two.row_folders) > 3
    groups = run(texts, tmp_path / "groups", workers=1)
    assert files(tmp_path / "two") == files(tmp_path / "groups")
    pieces = lambda p: sorted(
        (origin, tuple(row.tokens[row.segment_ids == segment].tolist()))
        for reader in p.rows.values()
        for row in (reader[i] for i in range(len(reader)))
        for segment, origin in enumerate(row.document_origins, start=1)
    )
    total = lambda p: sum(len(tokens) for _, tokens in pieces(p))
    assert (
        total(groups)
        == total(one)
        == groups.statistics[TRAIN].tokens + (groups.statistics[HELDOUT].tokens)
    )


@pytest.mark.parametrize("count", [1, 150])
def test_packing_in_pieces_changes_nothing(count, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:count])  # a single document is divided
    run(f"{tmp_path}/a.jsonl", tmp_path / "p")
    monkeypatch.setattr(row_groups, "_TOKENS_AT_ONCE", 500)
    run(f"{tmp_path}/a.jsonl", tmp_path / "q")
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_ranks_share_the_work(texts, tmp_path):
    with pytest.raises(Unfinished) as unfinished:
        run(texts, tmp_path / "p", share=Share(0, 3))
    assert (unfinished.value.missing, unfinished.value.parts) == (2, 4)
    with pytest.raises(Unfinished):
        run(texts, tmp_path / "p", share=Share(2, 3))
    run(texts, tmp_path / "p", share=Share(1, 3))  # the last one packs
    run(texts, tmp_path / "q")
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_ranks_that_pack_at_once_begin_with_different_rows(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(row_groups, "_GROUP_TOKENS", 2000)
    source = find_source_of_glob(texts, "text")
    tokenize_source(source, BYTES, Store(tmp_path / "p"))
    packed, documents = [], row_groups._documents_of_group

    def packs(group, *rest):
        packed.append((rank, group.first_part))
        if len(packed) == 1:  # meanwhile, the other rank packs everything that is missing
            other_rank()
        yield from documents(group, *rest)

    def other_rank():
        nonlocal rank
        rank = 1
        run(texts, tmp_path / "p", share=Share(1, 2))
        rank = 0

    monkeypatch.setattr(row_groups, "_documents_of_group", packs)
    rank = 0
    run(texts, tmp_path / "p", share=Share(0, 2))
    groups = len(list((tmp_path / "p" / "rows").iterdir()))
    of_1 = [first for rank, first in packed if rank == 1]
    assert groups == len(of_1) == 4
    assert len(packed) == groups + 1
    assert packed[0] == (0, 0)
    assert of_1 == [1, 3, 2, 0]
    monkeypatch.undo()
    monkeypatch.setattr(row_groups, "_GROUP_TOKENS", 2000)
    run(texts, tmp_path / "q")
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_the_last_rank_packs(texts, tmp_path, monkeypatch):
    """Rank 1 makes its parts after rank 0 has looked for finished ones."""
    make, unpacked = tokenized_parts.tokenize_part, []

    def make_while_rank_1_runs(*arguments):
        monkeypatch.setattr(tokenized_parts, "tokenize_part", make)
        with pytest.raises(Unfinished) as error:
            run(texts, tmp_path / "p", share=Share(1, 2))
        unpacked.append(error.value.missing)
        return make(*arguments)

    monkeypatch.setattr(tokenized_parts, "tokenize_part", make_while_rank_1_runs)
    run(texts, tmp_path / "p", share=Share(0, 2))
    assert unpacked == [2]
    run(texts, tmp_path / "q")
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_tasks_of_datatrove_share_the_work(texts, tmp_path):
    config = DataConfig(path=texts, prepared_dir=f"{tmp_path}/p", heldout_fraction=0.1)
    step = PrepareShare(config, 64)
    step(None, 1, 3)
    assert len(list((tmp_path / "p").glob("tokens/*/*.json"))) == 1
    try:
        from datatrove.executor import LocalPipelineExecutor
    except ImportError:  # the same calls
        for rank in range(2):
            step(None, rank, 2)
    else:
        LocalPipelineExecutor([step], tasks=2, workers=2, logging_dir=f"{tmp_path}/logs").run()
    run(texts, tmp_path / "q")
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_the_text_is_not_needed_any_more(texts, tmp_path, capsys):
    config = DataConfig(path=texts, prepared_dir=f"{tmp_path}/p", heldout_fraction=0.1)
    before = TextData(config, 64, 4)
    shutil.rmtree(tmp_path / "texts")
    after = TextData(config, 64, 4)
    assert after.fingerprint == before.fingerprint
    assert after.document_names_of_batch(0) == before.document_names_of_batch(0)
    assert texts in capsys.readouterr().err
    TextData(config, 32, 4)  # not even for rows of another length
    with refused("'texts'", error=NothingFound):
        TextData(DataConfig(path=texts, prepared_dir=f"{tmp_path}/other"), 64, 4)
    next((tmp_path / "p").glob("tokens/*/*.json")).unlink()
    assert TextData(config, 64, 4).fingerprint == before.fingerprint  # its rows are all there
    with refused("corpora/"):
        TextData(config, 16, 4)


def test_digests_are_kept_until_files_change(texts, tmp_path, monkeypatch):
    from qwen3next_jax.data import digest_cache

    monkeypatch.setattr(digest_cache, "_SMALLEST", 0)
    for file in find_source_of_glob(texts, "text").files:
        os.utime(file.path, (1, 1))
    read, digest = [], readers.part_digest
    monkeypatch.setattr(
        readers, "part_digest", lambda f, *rest: read.append(f.relative_path) or digest(f, *rest)
    )
    before = run(texts, tmp_path / "p")
    assert sorted(set(read)) == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    del read[:]
    assert run(texts, tmp_path / "p").fingerprint == before.fingerprint
    assert read == []
    file = tmp_path / "texts" / "b.jsonl"
    file.write_text(file.read_text().replace("import", "export"))  # same size, now
    assert run(texts, tmp_path / "p").fingerprint != before.fingerprint
    assert set(read) == {"b.jsonl"}
    del read[:]
    run(texts, tmp_path / "p")
    assert set(read) == {"b.jsonl"}  # changed too recently to trust its modification time


# ---- the split


def test_lines_that_are_no_digests_are_left_out(texts, tmp_path):
    (folder := tmp_path / "p" / "digests").mkdir(parents=True)
    lines = ["null", "[[1], 2]", "[1, 2, 3]", '["a"]', "[" * 10**5, "{}", '["kept", "digest"]']
    (folder / "a.jsonl").write_text("\n".join(lines))
    cache = DigestCache(Store(tmp_path / "p"), find_source_of_glob(texts, "text"))
    assert cache._known == {"kept": "digest"}


@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_neither_side_of_a_small_corpus_is_empty(tmp_path, count, fraction):
    write_jsonl(tmp_path / "few.jsonl", TEXTS[:count])
    prepared = run(f"{tmp_path}/few.jsonl", tmp_path / "p", fraction=fraction)
    statistics = prepared.statistics
    assert statistics[TRAIN].documents
    assert statistics[HELDOUT].documents
    together = {}
    for side in (TRAIN, HELDOUT):  # in which order a document is cut into pieces is random
        reader = prepared.rows[side]
        for row in (reader[i] for i in range(len(reader))):
            for segment, (_, record) in enumerate(row.document_origins, start=1):
                piece = row.tokens[row.segment_ids == segment]
                together.setdefault(record, []).extend(piece[piece < 256].tolist())
    assert [sorted(together[i]) for i in range(count)] == [
        sorted(t.encode()) for t in TEXTS[:count]
    ]
    by_hash = [tokenized_parts.text_hash(text) / 2**64 < fraction for text in TEXTS[:count]]
    in_all = statistics[TRAIN].documents + statistics[HELDOUT].documents
    if any(by_hash) and count > 1:
        assert in_all == count  # none is cut
    assert sum(s.text_bytes for s in statistics.values()) == sum(
        len(text.encode()) for text in TEXTS[:count]
    )


def test_a_single_document_gives_its_share(tmp_path):
    for text, fraction, expected in (("a" * 1000, 0.02, (981, 21)), ("ab", 0.99, (2, 2))):
        (tmp_path / "book.txt").write_text(text)
        found = run(f"{tmp_path}/book.txt", tmp_path / "p", fraction=fraction).statistics
        assert (found[TRAIN].tokens, found[HELDOUT].tokens) == expected
    (tmp_path / "book.txt").write_text("a")
    with refused("book.txt"):
        run(f"{tmp_path}/book.txt", tmp_path / "p")


def test_variants_of_a_document_stay_together(texts, tmp_path):
    """The same text, with other white space, or decomposed: in another glob."""
    for name, change in {
        "same": lambda text: text,
        "spaces": lambda text: "\r\n " + text.replace(" ", "\t\n"),
        "decomposed": lambda text: unicodedata.normalize("NFD", text),
    }.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [change(text) for text in TEXTS])
    globs = [texts, *(f"{tmp_path}/{name}.jsonl" for name in ("same", "spaces", "decomposed"))]
    prepared = prepare(
        [find_source_of_glob(glob, "text") for glob in globs],
        BYTES,
        RowRecipe(64, 0.3, 0),
        tmp_path / "p",
    )
    heldout = []
    for one in prepared:
        reader = one.rows[HELDOUT]
        origins = {o for i in range(len(reader)) for o in reader[i].document_origins}
        heldout.append({35 * file + record for file, record in origins})
    in_first = set(range(140))  # the files of the first glob lack the last texts
    assert heldout[0] == heldout[1] & in_first
    assert heldout[1] == heldout[2] == heldout[3]
    assert 20 < len(heldout[0]) < 70
    assert sum(TEXTS[i] != unicodedata.normalize("NFD", TEXTS[i]) for i in heldout[0]) > 10


def test_a_small_glob_without_held_out_documents_says_so(texts, tmp_path, capsys):
    trained = next(t for t in TEXTS if tokenized_parts.text_hash(t) / 2**64 > 0.5)
    heldout = next(t for t in TEXTS if tokenized_parts.text_hash(t) / 2**64 < 0.1)
    for name, text in (("trained", trained), ("heldout", heldout)):
        write_jsonl(tmp_path / f"{name}.jsonl", [text])
    config = DataConfig(
        path=f"{texts},{tmp_path}/trained.jsonl,{tmp_path}/heldout.jsonl",
        prepared_dir=f"{tmp_path}/p",
        heldout_fraction=0.1,
    )
    data = TextData(config, 64, 4)
    assert "trained.jsonl" in capsys.readouterr().err
    documents = [
        [p.statistics[side].documents for side in (TRAIN, HELDOUT)] for p in data._prepared
    ]
    assert documents[0][1] > 3
    assert documents[1:] == [[1, 0], [1, 1]]
    assert len(list(data.heldout_batches())) == -(-data.heldout_rows // 4)


# ---- bad records


BAD = {
    "not UTF-8: left out": b'{"text": "\xff"}',
    "broken JSON: left out": b'{"text": ',
    "no such field: left out": b'{"texts": "a"}',
    "no text: left out": b'{"text": null}',
    "NUL: left out": b'{"text": "a\\u0000b"}',
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_stop_or_are_left_out_and_counted(kind, tmp_path, capsys):
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:100]]
    lines = [*good[:70], BAD[kind], b"", b'{"text": ""}', *good[70:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with refused("a.jsonl:71"):
        run(f"{tmp_path}/a.jsonl", tmp_path / "p")
    config = DataConfig(
        path=f"{tmp_path}/a.jsonl", prepared_dir=f"{tmp_path}/p", bad_records="skip"
    )
    data = TextData(config, 64, 4)
    (facts,) = data.describe()["sources"]
    assert facts["bad_records"] == {kind: 1}
    assert facts["empty_documents"] == 1
    assert data.describe()["documents"] == 100
    assert "a.jsonl:71" in capsys.readouterr().err
    manifest = json.loads(next((tmp_path / "p").glob("tokens/*/*.json")).read_text())
    assert manifest["bad_first"] == [[70, kind]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, BAD[kind], BAD[kind]]))
    with refused("3", "data.bad_records_limit = 0.01"):
        TextData(config, 64, 4)


def test_blank_texts_are_left_out_and_counted(tmp_path):
    blank = ["", " ", "\n\t\n", "\u3000\u00a0"]
    (tmp_path / "a.jsonl").write_bytes(jsonl([*TEXTS[:50], *blank, *TEXTS[50:100]]))
    (tmp_path / "b.txt").write_text("\n\n")
    (tmp_path / "c.txt").write_bytes(b"text" + b" " * LONG)
    (tmp_path / "d.txt").write_bytes(b"\n" * LONG)
    config = DataConfig(path=f"{tmp_path}/*", prepared_dir=f"{tmp_path}-p")
    facts = TextData(config, 64, 4).describe()
    assert facts["documents"] == 101
    assert facts["sources"][0]["empty_documents"] == 6
    assert "6 blank" in facts["title"]
    with refused(tmp_path / "b.txt"):
        run(f"{tmp_path}/b.txt", tmp_path / "p")


def test_an_object_over_several_lines_is_named(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=2))
    with refused("a.json:1"):
        run(f"{tmp_path}/a.json", tmp_path / "p")


def test_what_stands_before_damaged_compression_is_read(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS))[:-1000])
    config = DataConfig(path=f"{tmp_path}/a.jsonl.gz", prepared_dir=f"{tmp_path}/p")
    with refused("a.jsonl.gz"):
        TextData(config, 64, 4)
    data = TextData(dataclasses.replace(config, bad_records="skip"), 64, 4)
    (facts,) = data.describe()["sources"]
    assert facts["bad_records"] == {"damaged compression: left out": 1}
    assert 50 < facts["documents"] < 150


# ---- libraries


def test_other_rows_give_another_fingerprint(texts, tmp_path, monkeypatch):
    """As when numpy, grain or array_record is replaced by a version that gives other rows."""
    config = DataConfig(path=texts, prepared_dir=f"{tmp_path}/p", heldout_fraction=0.1)
    before = TextData(config, 64, 4).fingerprint
    assert TextData(config, 64, 4).fingerprint == before
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_shuffle_seed", lambda seed, source: 1)
        assert TextData(config, 64, 4).fingerprint != before
    decode = rows.RowReader._decode_row

    def shifted(*arguments):
        row = decode(*arguments)
        return row._replace(tokens=np.roll(row.tokens, 1))

    monkeypatch.setattr(rows.RowReader, "_decode_row", shifted)
    assert TextData(config, 64, 4).fingerprint != before


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.0, 0.3, 0.2), tuple(range(1, 9)), (1e-4, 1)])
def test_rows_of_streams_are_those_of_the_mix(weights):
    mix = pipeline.mix_streams(weights)
    counts = [0] * len(weights)
    for row in range(400):
        assert pipeline.row_counts_of_streams(weights, row) == counts
        counts[mix[row][0]] += 1


# ---- the tokenizer


def test_lossy_tokenizers_give_no_bits_per_byte(texts, tmp_path, capsys):
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    lossy.add_special_tokens(["<unk>", "</s>"])
    lossy.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in "bytes", str(tmp_path):
        config = DataConfig(path=texts, tokenizer=tokenizer, prepared_dir=str(tmp_path / "p"))
        for _ in range(2):  # the second time from the index
            data = TextData(config, 64, 4)
            is_counted = data.describe()["bits_per_nat"] is not None
            assert is_counted == data.token_byte_counts.any() == (tokenizer == "bytes")
            assert ("bits per byte" in capsys.readouterr().err) != is_counted


def test_what_an_older_mapping_prepared_is_made_anew(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized_parts, "FORMAT", tokenized_parts.FORMAT - 1)
    config = DataConfig(path=texts, prepared_dir=f"{tmp_path}/p", heldout_fraction=0.1)
    TextData(config, 64, 4)
    monkeypatch.undo()
    assert len(list((tmp_path / "p").glob("tokens/*/*.json"))) == 4
    TextData(config, 64, 4)
    assert len(list((tmp_path / "p").glob("tokens/*/*.json"))) == 8
    shutil.rmtree(tmp_path / "texts")
    TextData(config, 64, 4)
    monkeypatch.setattr(tokenized_parts, "FORMAT", tokenized_parts.FORMAT + 1)
    with refused(tmp_path):
        TextData(config, 64, 4)


# ---- faults


def test_killed_preparations_go_on_and_give_the_same_bytes(texts, tmp_path, monkeypatch):
    """The command, with two workers, killed at random moments; a worker killed; the last time
    with another number of ranks.
    """
    monkeypatch.setattr(readers, "_PART_BYTES", 1500)
    run(texts, tmp_path / "undisturbed")
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        "from qwen3next_jax.data import preparation, readers, store, tokenized_parts\n"
        "from qwen3next_jax.data.tokens import load_tokenizer\n"
        "readers._PART_BYTES = 1500\n"
        "preparation._BYTES_PER_WORKER = 1\n"
        "rename = store.pathlib.Path.replace\n"
        "source = preparation.sources.find_source_of_glob(sys.argv[1], 'text')\n"
        "def slowly(*a):\n    time.sleep(0.1)\n    return rename(*a)\n"
        "store.pathlib.Path.replace = slowly\n"
        "preparation.prepare([source], load_tokenizer('bytes'),\n"
        "    preparation.RowRecipe(64, 0.1, 0), sys.argv[2], workers=int(sys.argv[3]))\n"
    )
    made = lambda: len(list((tmp_path / "p").glob("tokens/*/*.json")))
    command = [sys.executable, str(slow), texts, str(tmp_path / "p")]
    rng, kills = random.Random(0), 0
    for workers in ("1", "2", "1"):
        before = made()
        process = subprocess.Popen(
            [*command, workers], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        while made() < before + 2 and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    assert 4 <= made()
    with contextlib.suppress(Unfinished):
        run(texts, tmp_path / "p", share=Share(0, 7))
    run(texts, tmp_path / "p")
    for leftover in (tmp_path / "p" / ".partial").iterdir():  # of a process that is no more
        os.utime(leftover, (1, 1))
    run(texts, tmp_path / "p")
    assert files(tmp_path / "p") == files(tmp_path / "undisturbed")


def test_leftovers_stay_until_their_lease_has_run_out(texts, tmp_path):
    run(texts, tmp_path / "p")
    partial = tmp_path / "p" / ".partial"
    (partial / "file").write_text("")
    (partial / "folder").mkdir()
    (partial / "folder" / "train-00000.array_record").write_text("")
    run(texts, tmp_path / "p")
    assert len(list(partial.iterdir())) == 2
    long_ago = time.time() - store.LEASE_SECONDS - 5
    os.utime(partial / "file", (long_ago, long_ago))
    os.utime(partial / "folder", (long_ago, long_ago))  # but a shard was just written to
    run(texts, tmp_path / "p")
    assert [path.name for path in partial.iterdir()] == ["folder"]
    os.utime(partial / "folder" / "train-00000.array_record", (long_ago, long_ago))
    run(texts, tmp_path / "p")
    assert not list(partial.iterdir())


def test_a_dead_worker_is_named(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_BYTES_PER_WORKER", 1)
    (tmp_path / "texts" / "e.jsonl").write_text("broken\n")
    with refused("e.jsonl:1"):
        run(texts, tmp_path / "p", workers=2)
    (tmp_path / "texts" / "e.jsonl").unlink()

    class Fatal(type(BYTES)):
        def __reduce__(self):  # when a worker unpickles the tokenizer
            return os._exit, (9,)

    source = find_source_of_glob(texts, "text")
    with refused(9):
        prepare([source], Fatal(), RowRecipe(64, 0.1, 0), tmp_path / "q", workers=2)


def test_damaged_parts_are_named(texts, tmp_path):
    run(texts, tmp_path / "p")
    manifest = next((tmp_path / "p").glob("tokens/*/*.json"))
    tokens = manifest.with_suffix(".tokens")
    good, text = tokens.read_bytes(), manifest.read_text()
    for bad in (good[:-3], b"x" + good[1:]):
        tokens.write_bytes(bad)
        with refused(tokens):
            run(texts, tmp_path / "p", length=32)
    tokens.unlink()
    with refused(tokens):
        run(texts, tmp_path / "p", length=32)
    manifest.write_text(text.replace('"documents": 35', '"documents": 34'))  # edited by hand
    with refused(manifest):
        run(texts, tmp_path / "p", length=32)
    other = next(m for m in (tmp_path / "p").glob("tokens/*/*.json") if m != manifest)
    manifest.write_text(other.read_text())
    with refused(manifest, other.stem):
        run(texts, tmp_path / "p", length=32)
    manifest.unlink()
    run(texts, tmp_path / "p", length=32)
    assert tokens.read_bytes() == good
    assert manifest.read_text() == text


def test_a_full_disk_leaves_nothing(texts, tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.durable, "fsync", full)
    with refused(tmp_path):
        run(texts, tmp_path / "p")
    assert files(tmp_path / "p") == {}


def test_a_file_that_changes_leaves_nothing(texts, tmp_path, monkeypatch):
    source = find_source_of_glob(texts, "text")
    monkeypatch.setattr(
        tokenized_parts.readers,
        "read_records",
        lambda file, *rest: file.path.write_text("{}") and iter(()),
    )
    with refused(".jsonl"):
        prepare([source], BYTES, RowRecipe(64, 0.1, 0), tmp_path / "p")
    assert files(tmp_path / "p") == {}


def test_two_preparations_at_once_do_no_harm(texts, tmp_path):
    def other_process_is_faster(*_):
        run(texts, tmp_path / "p")

    slow = run(texts, tmp_path / "p", progress=other_process_is_faster)
    assert all_rows(slow) == all_rows(run(texts, tmp_path / "q"))
    assert files(tmp_path / "p") == files(tmp_path / "q")


def test_rows_of_another_folder_are_refused(texts, tmp_path):
    first, second = (run(texts, tmp_path / "p", seed=seed).common_row_folder for seed in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    with refused(first, second.name):
        run(texts, tmp_path / "p")


# ---- the reader


@pytest.fixture
def indexed(texts, tmp_path, monkeypatch):
    """(configuration, data in several groups of rows, names of groups whose metadata are read)."""
    (tmp_path / "texts" / "a.jsonl").open("a").write('{"text": ""}\n{"text": null}\n')
    config = DataConfig(
        path=texts,
        prepared_dir=f"{tmp_path}/p",
        heldout_fraction=0.1,
        bad_records="skip",
        bad_records_limit=1.0,
    )
    monkeypatch.setattr(row_groups, "_GROUP_TOKENS", 4000)
    monkeypatch.setattr(rows, "_SHARD_BYTES", 5 * 2 * 64)
    read = []
    read_group_metadata = row_groups.read_group_metadata
    monkeypatch.setattr(
        row_groups,
        "read_group_metadata",
        lambda path: read.append(path.name) or read_group_metadata(path),
    )
    data = TextData(config, 64, 4)
    folders = sorted(path.name for path in (tmp_path / "p" / "rows").iterdir())
    assert sorted(read) == folders
    assert len(folders) > 3
    del read[:]
    return config, data, read


def test_an_index_opens_unchanged_rows(indexed, monkeypatch):
    """It says all that the manifests say."""
    config, before, read = indexed
    monkeypatch.setattr(
        tokenized_parts, "find_part_by_key", None
    )  # no manifest of a part is read, either
    after = TextData(config, 64, 4)
    assert read == []
    assert after.describe() == before.describe()
    assert after.fingerprint == before.fingerprint
    assert all_rows(after._prepared[0]) == all_rows(before._prepared[0])
    assert after.document_names_of_batch(1) == before.document_names_of_batch(1)


def test_an_index_that_may_be_wrong_is_not_used(indexed, tmp_path):
    """The manifests are read again, once."""
    config, before, read = indexed
    folders = sorted((tmp_path / "p" / "rows").iterdir())
    (index,) = (tmp_path / "p" / "indexes").iterdir()
    good = index.read_bytes()
    for change in (
        lambda: os.utime(folders[0] / "train-00000.array_record", (1, 1)),
        lambda: os.utime(folders[0] / "metadata.json", (1, 1)),
        lambda: index.write_bytes(good[:-100]),
        lambda: index.write_bytes(good[:900] + bytes([good[900] ^ 1]) + good[901:]),
        lambda: shutil.rmtree(folders[0]),  # and packed again
    ):
        change()
        assert TextData(config, 64, 4).fingerprint == before.fingerprint
        assert sorted(read) == [folder.name for folder in folders], change
        del read[:]
        assert TextData(config, 64, 4).fingerprint == before.fingerprint
        assert read == []


def test_an_index_does_not_hide_bad_records(indexed):
    with refused("a.jsonl:37", "bad_records_limit = 0.001"):
        TextData(dataclasses.replace(indexed[0], bad_records_limit=0.001), 64, 4)


def test_an_index_does_not_hide_new_texts(indexed, tmp_path):
    config, before, _ = indexed
    with (tmp_path / "texts" / "b.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert TextData(config, 64, 4).fingerprint != before.fingerprint


def _change_record(path, **changes):
    """Writes other values to a JSON file, with the digest of what it then holds."""
    content = json.loads(path.read_text()) | changes
    content.pop("digest")
    store.write_json_with_digest(path, content)


def _exchange(folder, pattern):
    first, second = sorted(folder.glob(pattern))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def test_exchanged_indexes_open_no_other_rows(tmp_path):
    configs = []
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", TEXTS[70 * i : 70 * (i + 1)])
        configs.append(DataConfig(path=f"{tmp_path}/{i}.jsonl", prepared_dir=f"{tmp_path}/p"))
    before = [TextData(config, 64, 4).fingerprint for config in configs]
    _exchange(tmp_path / "p", "indexes/*")
    assert [TextData(config, 64, 4).fingerprint for config in configs] == before


SPOILT = {
    "an index, flipped": ("indexes/*", lambda path: _flip(path)),
    "a list of parts, flipped": ("corpora/*", lambda path: _flip(path)),
    "lists of parts, exchanged": (
        "corpora/*",
        lambda path: _exchange(path.parents[1], "corpora/*"),
    ),
    "indexes, exchanged": ("indexes/*", lambda path: _exchange(path.parents[1], "indexes/*")),
    "shards, removed": (
        "rows/*/metadata.json",
        lambda path: [file.unlink() for file in path.parent.glob("*.array_record")],
    ),
    "rows, removed": ("rows/*", shutil.rmtree),
    "no shards": (
        "rows/*/metadata.json",
        lambda path: _change_record(path, shards={"train": [], "heldout": []}),
    ),
    "shards of no split": ("rows/*/metadata.json", lambda path: _change_record(path, shards=[])),
    "no statistics": ("rows/*/metadata.json", lambda path: _change_record(path, statistics={})),
    "rows of no length": (
        "rows/*/metadata.json",
        lambda path: _change_record(path, row_length=10**30),
    ),
    "a part's manifest, removed": ("tokens/*/*.json", lambda path: path.unlink()),
    "a part's manifest without entries": (
        "tokens/*/*.json",
        lambda path: _change_record(path, bad_first=[1]),
    ),
}


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Prepared data of two sources."""
    folder = tmp_path_factory.mktemp("two_sources")
    for i in range(2):
        write_jsonl(folder / f"{i}.jsonl", TEXTS[70 * i : 70 * (i + 1)])
        TextData(DataConfig(path=f"{folder}/{i}.jsonl", prepared_dir=f"{folder}/p"), 64, 4)
    assert not any(damage for _, damage in verify(folder / "p"))
    return folder / "p"


@pytest.mark.parametrize("name", SPOILT)
def test_verify_finds_every_change(name, two_sources, tmp_path):
    shutil.copytree(two_sources, tmp_path / "p")
    pattern, spoil = SPOILT[name]
    spoil(sorted((tmp_path / "p").glob(pattern))[0])
    damages = [damage for _, damage in verify(tmp_path / "p") if damage]
    assert damages
    assert all(damage.isprintable() for damage in damages)


def test_another_shard_of_the_same_size_is_noticed(tmp_path):
    """Also by a run that starts: its index does not fit, and its shards are opened anew."""
    configs = []
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", [f"{i} {'ab'[i] * 40}" for _ in range(50)])
        configs.append(DataConfig(path=f"{tmp_path}/{i}.jsonl", prepared_dir=f"{tmp_path}/p"))
    before = [TextData(config, 64, 4) for config in configs]
    shards = [next(data._prepared[0].rows[TRAIN].table.shard_paths()) for data in before]
    contents = [pathlib.Path(shard).read_bytes() for shard in shards]
    assert len(contents[0]) == len(contents[1])
    assert before[0].rows == before[1].rows
    pathlib.Path(shards[0]).write_bytes(contents[1])
    with refused(shards[0]):
        TextData(configs[0], 64, 4)
    assert [damage for _, damage in verify(tmp_path / "p") if damage]


@pytest.mark.parametrize("ending", ["jsonl", "jsonlines", "txt"])
def test_json_lines_of_other_names_are_said(ending, tmp_path, capsys):
    write_jsonl(tmp_path / f"a.{ending}", TEXTS[:50])
    run(f"{tmp_path}/a.{ending}", tmp_path / "p")
    assert (f"a.{ending}" in capsys.readouterr().err) == (ending != "jsonl")


@pytest.mark.parametrize("second", ["a.jsonl", "link.jsonl", "b.jsonl"])
def test_a_file_of_two_globs_is_said(second, tmp_path, capsys):
    for name, some in (("a.jsonl", TEXTS[:60]), ("b.jsonl", TEXTS[60:])):
        write_jsonl(tmp_path / name, some)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    path = f"{tmp_path}/a.*,{tmp_path}/{second}"
    find_sources(DataConfig(path=path, prepared_dir=f"{tmp_path}/p"), load_tokenizer("bytes"))
    assert (second in capsys.readouterr().err) == (second != "b.jsonl")


def test_files_of_two_globs_are_resolved_once(tmp_path, monkeypatch):
    for size, name in enumerate(("a1.txt", "a2.txt", "b1.txt", "b2.txt"), start=1):
        (tmp_path / name).write_text("x" * size)
    resolved, resolve = [], os.path.realpath
    count = lambda path, **options: resolved.append(os.fspath(path)) or resolve(path, **options)
    monkeypatch.setattr(os.path, "realpath", count)
    path = f"{tmp_path}/a*,{tmp_path}/b*"
    find_sources(DataConfig(path=path, prepared_dir=f"{tmp_path}/p"), load_tokenizer("bytes"))
    assert resolved.count(f"{tmp_path}/b2.txt") == 1


@pytest.mark.parametrize("checksum", [True, False])
def test_compressed_text_without_checksums_is_said(checksum, tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write((tmp_path / "a.jsonl").read_bytes())
    frame = bytearray(sink.getvalue().to_pybytes())
    assert not frame[4] & 4
    if checksum:  # a wrong one
        frame[4] |= 4
        frame += b"1234"
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    with refused("a.jsonl.zst") if checksum else contextlib.nullcontext():
        run(f"{tmp_path}/a.jsonl.zst", tmp_path / "p")
    assert (".zst" in capsys.readouterr().err) != checksum


def test_few_shards_are_open_at_once(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_SHARD_BYTES", 2 * 2 * 64)  # two rows each
    monkeypatch.setattr(rows, "_MOST_OPEN", 8)
    prepared = run(texts, tmp_path / "p")
    reader = prepared.rows[TRAIN]
    assert len(list(prepared.common_row_folder.glob("train-*"))) > 50
    rows._open.clear()
    descriptors = lambda: len(list(pathlib.Path("/proc/self/fd").iterdir()))
    before = descriptors()
    seen = [tuple(reader[i].tokens.tolist()) for i in range(len(reader))]
    assert 0 < descriptors() - before <= 8
    assert seen == [tuple(reader[i].tokens.tolist()) for i in range(len(reader))]
    del reader, prepared
    assert descriptors() <= before


def test_an_unreadable_shard_blames_no_limit(texts, tmp_path, monkeypatch):
    reader = run(texts, tmp_path / "p").rows[TRAIN]

    def fail(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(pathlib.Path, "open", fail)
    with pytest.raises(UserError) as caught:
        reader[0]
    assert "ulimit" not in str(caught.value)


def test_too_many_open_files_is_not_damage(texts, tmp_path):
    reader = run(texts, tmp_path / "p").rows[TRAIN]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(p.name) for p in pathlib.Path("/proc/self/fd").iterdir())
    spare = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 2, limits[1]))
        try:
            while True:
                spare.append(open("/dev/null"))
        except OSError:
            pass
        with refused("ulimit -n"):
            reader[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in spare:
            file.close()
    reader[0]


# ---- the command


@pytest.fixture
def command(texts, tmp_path):
    """Runs `prepare` with flags; the last line that it prints says whether it loaded JAX."""
    script = (
        "import sys\n"
        "from qwen3next_jax import __main__\n"
        "try:\n    __main__.main()\n"
        "finally:\n    print('with JAX' if 'jax' in sys.modules else 'without JAX')\n"
    )
    flags = [
        f"--config={ROOT}/configs/tiny.py",
        f"--config.data.path={texts}",
        f"--config.data.prepared_dir={tmp_path}/p",
    ]

    def run_command(*more):
        return subprocess.run(
            [sys.executable, "-c", script, "prepare", *flags, *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run_command


def test_train_takes_the_rows_of_the_command(texts, tmp_path, command):
    first = command("--rank=0", "--of=2")
    assert first.returncode == 0, first.stderr
    assert "2 of 4" in first.stdout, first.stderr
    done = command("--workers=1")
    assert done.returncode == 0, done.stderr
    assert all(run.stdout.splitlines()[-1] == "without JAX" for run in (first, done))
    config = DataConfig(path=texts, prepared_dir=f"{tmp_path}/p", heldout_fraction=0.05)

    def never(*_):
        raise AssertionError("prepared again")

    data = TextData(config, 256, 4, progress=never)
    assert data._prepared[0].fingerprint in done.stdout


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--rank=2", "--of=2"], "--rank=2"),
        (["--config.data.source=mqar", "--config.data.path="], "mqar"),
    ],
    ids=["rank", "task"],
)
def test_the_command_refuses_what_it_cannot_prepare(command, flags, name):
    done = command(*flags)
    assert done.returncode == 2
    assert name in done.stderr


def test_progress_is_reported(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized_parts, "_BATCH_CHARACTERS", 1000)
    seen = []
    run(texts, tmp_path / "p", progress=lambda *figures: seen.append(figures))
    source = find_source_of_glob(texts, "text")
    done = [read for name, read, total in seen if (name, total) == (texts, source.size)]
    assert len(done) > 10
    assert done == sorted(done)
    assert done[-1] == source.size
    assert seen[-1][1] == seen[-1][2]
    assert "rows of 64" in seen[-1][0]
    assert tokenize_source(source, BYTES, Store(tmp_path / "p")).digest


# ---- two libraries that tokenize


def test_parts_where_tiktoken_differs_use_the_tokenizer(texts, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tiktoken")
    small = tokenizers.Tokenizer(tokenizers.models.BPE())
    small.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<x>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    small.train_from_iterator(TEXTS, trainer)
    small.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert "tiktoken" in tokenizer.library_versions
    source, recipe = find_source_of_glob(texts, "text"), RowRecipe(64, 0.1, 0)
    (fast,) = prepare([source], tokenizer, recipe, tmp_path / "p")
    (slow,) = prepare([source], tokenizer.slower_tokenizer, recipe, tmp_path / "q")
    assert fast.fingerprint == slow.fingerprint
    compare, calls = type(tokenizer)._check_same_ids, []

    def differs_in_the_second_file(self, text):
        calls.append(text)
        if len(calls) == 2:
            raise DifferentIds
        compare(self, text)

    monkeypatch.setattr(type(tokenizer), "_check_same_ids", differs_in_the_second_file)
    (mixed,) = prepare([source], tokenizer, recipe, tmp_path / "r")
    assert mixed.fingerprint == fast.fingerprint
    assert len(calls) == 4
    prepare([source], tokenizer, recipe, tmp_path / "r")
    assert len(calls) == 4
    keys = [{p.name for p in (tmp_path / f).glob("tokens/*/*.json")} for f in ("p", "r")]
    assert len(keys[0] & keys[1]) == 3
    assert len(keys[1]) == 4
    monkeypatch.setattr(preparation, "_WORTH_TIKTOKEN", 1)
    prepare([source], tokenizer.slower_tokenizer, recipe, tmp_path / "s")
    assert "tiktoken" not in capsys.readouterr().err
    monkeypatch.setattr(fast_bpe, "tiktoken_version", lambda: None)
    prepare([source], load_tokenizer(str(tmp_path)), recipe, tmp_path / "t")
    assert "tiktoken" in capsys.readouterr().err
    # Where tiktoken would not help, nothing is said.
    np.save(tmp_path / "tokens.npy", np.resize(np.array([5, 6, 7, 0], np.uint16), 400))
    of_tokens = find_source_of_glob(str(tmp_path / "tokens.npy"), "text")
    prepare([of_tokens], load_tokenizer(str(tmp_path)), recipe, tmp_path / "v")
    assert "tiktoken" not in capsys.readouterr().err


def test_what_an_older_version_prepared_is_no_damage(texts, tmp_path):
    run(texts, tmp_path / "p")
    manifest = next((tmp_path / "p").glob("tokens/*/*.json"))
    content = json.loads(manifest.read_text())
    del content["digest"], content["miscounted_bytes"]
    write_json_with_digest(manifest, content)
    (tmp_path / "p" / "indexes" / "0.npz").write_bytes(b"")
    found = dict(verify(tmp_path / "p"))
    assert not any(found.values())
    assert sum("older version" in name for name in found) >= 2
