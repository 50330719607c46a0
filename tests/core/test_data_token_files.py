"""Files of tokens that other codebases wrote: the documents and the split of their text, and every
mistake in one line.
"""

import json
import shutil
import struct

import numpy as np
import pytest

from qwen3next_jax.data import token_files
from qwen3next_jax.data.preparation import prepare, tokenize_source
from qwen3next_jax.data.row_groups import RowRecipe
from qwen3next_jax.data.sources import find_source_of_glob
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import load_tokenizer
from tests.corpora import write_jsonl
from tests.refusals import refused

BYTES = load_tokenizer("bytes")
TEXTS = [f"document {i} größe " * (1 + i % 5) for i in range(60)]
ENCODED = [ids.astype(np.uint16) for ids in BYTES.encode_documents(TEXTS)]
ALL = np.concatenate(ENCODED)


def megatron(folder, sequences=ENCODED, documents=None, dtype=8):
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64) * 2
    ends = np.arange(len(sequences) + 1) if documents is None else np.array(documents)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype, len(sequences), len(ends))
    tables = lengths.tobytes() + starts.tobytes() + ends.astype(np.int64).tobytes()
    (folder / "a.idx").write_bytes(header + tables)
    np.concatenate(sequences).tofile(folder / "a.bin")


def llm_c(folder, magic=20240520, tokens=ALL):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(ALL)
    (folder / "a.bin").write_bytes(header.tobytes() + tokens.tobytes())


def datatrove(folder):
    ALL.tofile(folder / "a.ds")
    np.cumsum([len(ids) for ids in ENCODED]).astype(np.uint64).tofile(folder / "a.ds.index")
    (folder / "a.ds.metadata").write_text("tokenizer")


def levanter(folder, ends=None, data=ALL, finished=True):
    """As levanter's own code does: arrays of 2^54 entries, in shards of compressed chunks."""
    tensorstore = pytest.importorskip("tensorstore")
    ends = np.cumsum([len(ids) for ids in ENCODED]) if ends is None else np.array(ends)
    chunks = {"name": "blosc", "configuration": {"clevel": 5}}
    sharding = {"chunk_shape": [16], "codecs": [chunks]}
    for name, values in (
        ("data", data.astype(np.int32)),
        ("offsets", np.concatenate([[len(ends)], ends]).astype(np.int64)),
    ):
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/input_ids/{name}/"},
            "metadata": {
                "shape": [2**54],
                "data_type": values.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [256]}},
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            },
        }
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        array[: len(values)].write(values).result()
    (folder / "shard_ledger.json").write_text(json.dumps({"is_finished": finished}))


def write_levanter_offsets(folder, ends):
    """Writes the number of documents and their ends over those that `levanter` wrote."""
    tensorstore = pytest.importorskip("tensorstore")
    store = {"driver": "file", "path": f"{folder}/input_ids/offsets/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    array[: len(ends)].write(np.array(ends, np.int64)).result()


FORMATS = {
    "levanter": levanter,
    "megatron": megatron,
    "megatron without end tokens": lambda f: megatron(f, [ids[:-1] for ids in ENCODED]),
    "megatron, documents of two sequences": lambda f: megatron(
        f,
        [half for ids in ENCODED for half in (ids[:3], ids[3:])],
        range(0, 2 * len(ENCODED) + 1, 2),
    ),
    "llm.c": llm_c,
    "llm.c of 32 bits": lambda f: llm_c(f, 20240801, ALL.astype(np.uint32)),
    "olmo": lambda f: ALL.tofile(f / "a.npy"),
    "numpy": lambda f: np.save(f / "a.npy", ALL),
    "datatrove": datatrove,
}


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_give_the_rows_of_their_text(name, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_READ_AT_ONCE", 100)
    (tmp_path / "tokens").mkdir()
    FORMATS[name](tmp_path / "tokens")
    write_jsonl(tmp_path / "text.jsonl", TEXTS)
    prepared = [
        prepare(
            [find_source_of_glob(f"{tmp_path}/{glob}", "text")],
            BYTES,
            RowRecipe(64, 0.2, 0),
            tmp_path / "p",
        )
        for glob in (f"tokens/{'shard_*' if name == 'levanter' else '*'}", "text.jsonl")
    ]
    assert prepared[0][0].fingerprint == prepared[1][0].fingerprint
    assert prepared[0][0].statistics == prepared[1][0].statistics


def _short(path):
    path.write_bytes(path.read_bytes()[:-5])


def _set_chunk(path, length):
    record = json.loads(path.read_text())
    record["chunk_grid"]["configuration"]["chunk_shape"] = [length]
    record["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    path.write_text(json.dumps(record))


def _npy(folder, header):
    length = len(header).to_bytes(2, "little")
    (folder / "a.npy").write_bytes(b"\x93NUMPY\1\0" + length + header.encode() + ALL.tobytes())


_HEADER = "{'descr': '<u2', 'fortran_order': False, 'shape': %s}"


def _cut_levanter(folder):
    (folder / "input_ids" / "data" / "zarr.json").unlink()


MISTAKES = {
    "levanter, not finished": (
        lambda f: levanter(f, finished=False),
        lambda f: None,
        ("shard_ledger.json",),
    ),
    "levanter, cut short": (levanter, _cut_levanter, ("input_ids",)),
    "levanter, a chunk is missing": (
        levanter,
        lambda f: (f / "input_ids" / "data" / "c" / "2").unlink(),
        ("data/c/2",),
    ),
    "levanter, no chunks": (
        levanter,
        lambda f: shutil.rmtree(f / "input_ids" / "data" / "c"),
        ("data/c/0",),
    ),
    "levanter, a short chunk": (
        levanter,
        lambda f: _short(f / "input_ids" / "data" / "c" / "2"),
        ("input_ids/data",),
    ),
    "levanter, negative offsets": (
        lambda f: levanter(f, [-5, len(ALL)]),
        lambda f: None,
        ("2",),
    ),
    "levanter, no documents": (lambda f: levanter(f, []), lambda f: None, ("offsets/c/0",)),
    "levanter, offsets beyond the data": (
        lambda f: levanter(f, [10**12]),
        lambda f: None,
        ("data/c/",),
    ),
    "levanter, a long chunk": (
        levanter,
        lambda f: _set_chunk(f / "input_ids" / "data" / "zarr.json", 10**12),
        ("input_ids/data",),
    ),
    "levanter, offsets": (lambda f: levanter(f, [5, 3]), lambda f: None, ("2", "3")),
    "no .bin": (megatron, lambda f: (f / "a.bin").unlink(), ("a.idx", "a.bin")),
    "no index": (datatrove, lambda f: (f / "a.ds.index").unlink(), ("a.ds.index",)),
    "odd bytes": (megatron, lambda f: _short(f / "a.bin"), ("2",)),
    "short index": (megatron, lambda f: _short(f / "a.idx"), ("a.idx",)),
    "no index of Megatron": (megatron, lambda f: (f / "a.idx").write_bytes(b"x"), ()),
    "floats": (lambda f: megatron(f, dtype=6), lambda f: None, ()),
    "short": (llm_c, lambda f: (f / "a.bin").write_bytes((f / "a.bin").read_bytes()[:-4]), ()),
    "another .bin": (lambda f: ALL.tofile(f / "a.bin"), lambda f: None, ("llm.c",)),
    "short .ds": (datatrove, lambda f: ALL[:-4].tofile(f / "a.ds"), ()),
    "beyond the vocabulary": (
        lambda f: (np.concatenate([ALL[:100], [300], ALL]).astype(np.uint16)).tofile(f / "a.npy"),
        lambda f: None,
        ("100", "300", "257"),
    ),
    "no documents": (
        lambda f: ALL[ALL < 256].tofile(f / "a.npy"),
        lambda f: None,
        ("256",),
    ),
    "no documents in the index": (
        lambda f: megatron(f, documents=[0]),
        lambda f: None,
        ("0",),
    ),
    "documents of sequences that are not there": (
        lambda f: megatron(f, documents=[0, 5, 61]),
        lambda f: None,
        ("60",),
    ),
    "documents that leave out the last sequence": (
        lambda f: megatron(f, documents=[0, 5, 59]),
        lambda f: None,
        ("2",),
    ),
    "ends out of order": (
        datatrove,
        lambda f: np.array([9, 7, len(ALL)], np.uint64).tofile(f / "a.ds.index"),
        ("3",),
    ),
    "four bytes": (
        lambda f: ALL.astype(np.uint32).tofile(f / "a.npy"),
        lambda f: None,
        ("4", "uint16"),
    ),
    "two in one": (
        lambda f: megatron(f, [np.concatenate(ENCODED[:2]), *ENCODED[2:]]),
        lambda f: None,
        (),
    ),
    **{
        f"a header of {name}": (
            lambda f, header=header: _npy(f, header),
            lambda f: None,
            ("a.npy",),
        )
        for name, header in {
            "10**30 tokens": _HEADER % f"({10**30},)",
            "a truth value": _HEADER % "(True,)",
            "brackets": "((((",
        }.items()
    },
    "a matrix": (
        lambda f: np.save(f / "a.npy", np.zeros((2, 2))),
        lambda f: None,
        ("float64 [2, 2]",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, tmp_path):
    write, spoil, names = MISTAKES[name]
    (tmp_path / "tokens").mkdir()
    write(tmp_path / "tokens")
    spoil(tmp_path / "tokens")
    with refused(*names):
        tokenize_source(
            find_source_of_glob(f"{tmp_path}/tokens/*", "text"), BYTES, Store(tmp_path / "p")
        )
