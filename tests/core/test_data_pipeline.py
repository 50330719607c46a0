"""From files to batches: nothing lost, one integer to resume from, any number of hosts, damage
is noticed.
"""

import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data import rows
from qwen3next_jax.data.packing import Documents, Packer
from qwen3next_jax.data.pipeline import TextData
from qwen3next_jax.data.row_groups import HELDOUT, TRAIN
from tests.corpora import TEXTS, write_jsonl
from tests.refusals import refused

T, B = 64, 4


@pytest.fixture
def config(tmp_path):
    write_jsonl(tmp_path / "texts" / "a.jsonl", TEXTS[:90])
    write_jsonl(tmp_path / "texts" / "b.jsonl", TEXTS[90:])
    return DataConfig(
        path=f"{tmp_path}/texts/*.jsonl", prepared_dir=f"{tmp_path}/prepared", heldout_fraction=0.1
    )


def load(config, **changes):
    return TextData(DataConfig(**(vars(config) | changes)), T, B)


def shards(config):
    return sorted(pathlib.Path(config.prepared_dir).glob("rows/*/*.array_record"))


def take(batches, n):
    return [
        {name: array.copy() for name, array in batch.items()}
        for batch in itertools.islice(batches, n)
    ]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        for name in ("tokens", "segment_ids"):
            np.testing.assert_array_equal(batch[name], other[name])


def pieces_of(batch):
    """The runs of equal segment id in every row of a batch, as bytes/256 token tuples."""
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, segments.max(initial=0) + 1):
            yield tuple(tokens[segments == segment].tolist())


def stored_rows(data):
    """All rows of both sides."""
    readers = [p.rows[side] for p in data._prepared for side in (TRAIN, HELDOUT)]
    return [reader[i] for reader in readers for i in range(len(reader))]


def pieces_by_document(rows):
    """Pieces of a document may stand in any rows; its record number collects them."""
    texts = {}
    for row in rows:
        for segment, origin in enumerate(row.document_origins, start=1):
            texts.setdefault(origin, []).append(bytes_of(row.tokens[row.segment_ids == segment]))
    return texts


DOCUMENTS = [text.encode() + b"\0" for text in TEXTS]


def test_rows_hold_every_document_once(config):
    texts = pieces_by_document(stored_rows(load(config)))
    assert sorted(sorted(b"".join(parts)) for parts in texts.values()) == sorted(
        map(sorted, DOCUMENTS)
    )


def test_segments_are_in_order_and_padding_is_zero(config):
    for row in stored_rows(load(config)):
        assert (row.tokens[row.segment_ids == 0] == 0).all()
        assert (np.diff(np.trim_zeros(row.segment_ids)) >= 0).all()


def test_most_short_documents_stay_whole(config):
    texts = pieces_by_document(stored_rows(load(config)))
    short = {document for document in DOCUMENTS if len(document) <= T}
    whole = {parts[0] for parts in texts.values() if len(parts) == 1}
    assert len(short) > 10
    assert len(whole & short) > 0.8 * len(short)


def test_figures_of_data_are_those_of_its_documents(config):
    figures = load(config).describe()
    assert figures["documents"] == len(DOCUMENTS)
    assert figures["tokens"] == sum(map(len, DOCUMENTS))
    assert figures["bytes"] == sum(len(document) - 1 for document in DOCUMENTS)
    assert figures["padding_share"] < 0.05
    assert json.loads(json.dumps(figures)) == figures


def bytes_of(tokens):
    """Tokens of the byte tokenizer as bytes, the end of the document as 0."""
    return bytes((tokens % 256).tolist())


def test_epochs_are_permutations_in_different_orders(config):
    data = load(config)
    seen = [
        row.tobytes()
        for batch in take(data.batches(0), 2 * data.rows // B + 1)
        for row in batch["tokens"]
    ]
    first, second = seen[: data.rows], seen[data.rows : 2 * data.rows]
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(set(first)) == data.rows > 20


def test_resume_and_repetition_give_the_same_batches(config):
    data = load(config)
    straight = take(data.batches(0), 25)
    assert straight[0]["tokens"].dtype == straight[0]["segment_ids"].dtype == np.int32
    assert straight[0]["tokens"].shape == straight[0]["segment_ids"].shape == (B, T)
    assert_same(take(data.batches(5), 20), straight[5:])
    assert_same(take(load(config).batches(0), 25), straight)
    assert any(
        (a["tokens"] != b["tokens"]).any()
        for a, b in zip(straight, take(load(config, seed=1).batches(0), 25), strict=True)
    )


@pytest.mark.parametrize("shares", [([0, 1], [2, 3]), ([0, 2], [1], [3])])
def test_hosts_share_the_same_batches(config, shares):
    data = load(config)
    for start, stream in (
        (3, data.batches),
        (None, lambda _, **share: data.heldout_batches(**share)),
    ):
        whole = take(stream(start), 6)
        for share in shares:
            assert_same(
                take(stream(start, share=share), 6),
                [{name: v[share] for name, v in batch.items()} for batch in whole],
            )


def test_heldout_is_fixed_disjoint_and_padded_with_empty_rows(config):
    data = load(config)
    batches = take(data.heldout_batches(), 100)
    assert_same(take(load(config).heldout_batches(), 100), batches)
    filled = np.concatenate([batch["segment_ids"].any(axis=1) for batch in batches])
    assert filled.sum() == data.heldout_rows
    assert filled[: data.heldout_rows].all()
    assert all(batch["tokens"].shape == (B, T) for batch in batches)
    assert_same(take(data.heldout_batches(B), 100), batches[:1])
    train = {
        piece for batch in take(data.batches(0), data.rows // B + 1) for piece in pieces_of(batch)
    }
    heldout = {piece for batch in batches for piece in pieces_of(batch) if len(piece) > 8}
    assert heldout
    assert not heldout & train


def test_document_names_say_where_the_rows_come_from(config):
    data = load(config)
    batch, names = next(data.batches(2)), data.document_names_of_batch(2)
    assert [len(n) for n in names] == batch["segment_ids"].max(axis=1).tolist()
    lines = {
        f"{name}.jsonl:{i + 1}": text
        for name, texts in (("a", TEXTS[:90]), ("b", TEXTS[90:]))
        for i, text in enumerate(texts)
    }
    for row, row_names in enumerate(names):
        for segment, name in enumerate(row_names, start=1):
            piece = batch["tokens"][row][batch["segment_ids"][row] == segment]
            assert bytes(piece[piece < 256].tolist()) in lines[name].encode()


def test_mixture_shares(config, tmp_path):
    write_jsonl(tmp_path / "zeros.jsonl", ["0" * 200] * 20)
    mixed = load(config, path=f"{config.path}, {tmp_path}/zeros.jsonl", weights="3,1")
    batches = take(mixed.batches(0), 100)
    zeros = np.concatenate([(batch["tokens"] == ord("0")).mean(axis=1) > 0.5 for batch in batches])
    assert abs(zeros.mean() - 0.25) < 0.01
    # evenly, not in blocks
    assert all(abs(zeros[i : i + 40].mean() - 0.25) <= 0.05 for i in range(0, 400, 40))
    by_size = load(config, path=f"{config.path}, {tmp_path}/zeros.jsonl")
    shares = [part["weight"] for part in by_size.describe()["sources"]]
    np.testing.assert_allclose(
        shares, [part["rows"] / by_size.rows for part in by_size.describe()["sources"]]
    )
    assert len({mixed.fingerprint, by_size.fingerprint, load(config).fingerprint}) == 3


# ---- faults


def test_no_flipped_bit_changes_a_batch_silently(config):
    data = load(config)
    reader = data._prepared[0].rows[TRAIN]
    good_rows = [reader[i] for i in range(len(reader))]
    path = next(p for p in shards(config) if p.name.startswith("train"))
    good = path.read_bytes()
    used = np.flatnonzero(np.frombuffer(good, np.uint8))  # between records, files are mostly empty
    random, detected = np.random.default_rng(0), 0
    for _ in range(60):
        position, bit = int(random.choice(used)), int(random.integers(8))
        path.write_bytes(
            good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
        )
        try:
            damaged = load(config)._prepared[0].rows[TRAIN]
            for i, row in enumerate(good_rows):
                np.testing.assert_array_equal(damaged[i].tokens, row.tokens)
                np.testing.assert_array_equal(damaged[i].segment_ids, row.segment_ids)
        except UserError as error:
            detected += 1
            assert str(path) in str(error)
            assert str(error).isprintable()
    assert detected >= 20  # the rest hits bytes that carry nothing


def test_damage_in_read_ahead_reaches_the_caller(config, monkeypatch):
    monkeypatch.setattr(rows, "_CHUNK_TOKENS", 1)  # so that opening does not read the damaged row
    load(config)
    path = next(p for p in shards(config) if p.name.startswith("train"))
    good = path.read_bytes()
    middle = good.rstrip(b"\0").find(b"\0" * 64) // 2  # inside the records, which stand first
    path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    data = load(config)
    with refused("train-00000.array_record"):
        take(data.batches(0), data.rows // B + 1)


def test_missing_or_short_shards_and_damaged_metadata_are_named(config):
    load(config)
    path = shards(config)[0]
    good, metadata = path.read_bytes(), path.parent / "metadata.json"
    path.unlink()
    with refused(path.name):
        load(config)
    path.write_bytes(good[:-100])
    with refused(path.name, len(good) - 100):
        load(config)
    other = shards(config)[1].read_bytes()
    assert len(other) == len(good)  # ArrayRecord fills whole blocks, so the size alone tells little
    path.write_bytes(other)
    with refused(path.name):
        reader = load(config)._prepared[0].rows[HELDOUT if "heldout" in path.name else TRAIN]
        [reader[i] for i in range(len(reader))]
    path.write_bytes(good)
    text = metadata.read_text()
    for bad in (text.replace('"seed": 0', '"seed": 8'), text[:50], ""):
        metadata.write_text(bad)
        with refused("metadata.json"):
            load(config)
    metadata.unlink()
    with refused("metadata.json"):
        load(config)
    shutil.rmtree(path.parent)
    load(config)


def test_a_full_disk_is_an_error(tmp_path):
    (tmp_path / "train-00000.array_record").symlink_to("/dev/full")
    writer = rows.RowWriter(tmp_path, "train", np.dtype(np.uint16), T)
    packer = Packer(T, 0)
    list(packer.add(Documents(np.arange(100), np.array([100]), 0, np.array([0]))))
    with refused(tmp_path):
        for some in packer.finish():
            writer.write(some)
        writer.close()


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_rows_go_over_several_records_and_shards(config, monkeypatch, per_chunk):
    one = take(load(config).batches(0), 30)
    monkeypatch.setattr(rows, "_SHARD_BYTES", 7 * 2 * T)
    monkeypatch.setattr(rows, "_CHUNK_TOKENS", per_chunk * T)
    elsewhere = DataConfig(**(vars(config) | {"prepared_dir": config.prepared_dir + "_several"}))
    several = TextData(elsewhere, T, B)
    assert len(shards(elsewhere)) > 5
    assert_same(take(several.batches(0), 30), one)


def test_unusable_places_are_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with refused("data.prepared_dir"):
        load(config, prepared_dir=f"{tmp_path}/file/below")
    with refused("data.prepared_dir"):
        load(config, prepared_dir="http://host/prepared")
    with refused("absent"):
        load(config, path=f"{config.path},{tmp_path}/absent/*.txt")
    with refused("257", "100"):
        TextData(config, T, B, vocab_size=100)


def test_a_small_source_has_its_least_rows(config, tmp_path):
    write_jsonl(tmp_path / "small.jsonl", TEXTS[:20])
    both = load(config, path=f"large={config.path},small={tmp_path}/small.jsonl")
    assert both.heldout_sources == ["large", "small"]
    held = len(both.heldout_places_by_source(None, 0)["small"])
    assert held >= 1
    assert not both.heldout_places_by_source(1, 0)["small"]
    places = both.heldout_places_by_source(1, held + 5)
    assert places["large"][0] == 0
    assert len(places["large"]) == held + 5
    assert len(places["small"]) == held
    read = [row for batch in both.heldout_batches(1, least=held + 5) for row in batch["tokens"]]
    every = [row for batch in both.heldout_batches() for row in batch["tokens"]]
    where = both.heldout_places_by_source(None, 0)
    for source, own in places.items():
        np.testing.assert_array_equal(
            [read[i] for i in own], [every[i] for i in where[source][: held + 5]]
        )
