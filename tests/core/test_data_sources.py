"""Finding and reading documents: formats, globs, remote paths, the default corpus, and every
mistake in the files.
"""

import collections
import gzip
import hashlib
import importlib
import json
import os
import unicodedata

import etils.epath.backend
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data import readers, sources, tokenized_parts
from qwen3next_jax.data import text as texts
from qwen3next_jax.data.readers import (
    Part,
    document_name,
    file_parts,
    part_digest,
    read_documents,
    read_records,
)
from qwen3next_jax.data.sources import content_digest, find_source_of_glob
from tests.corpora import jsonl
from tests.refusals import refused

TEXTS = ["first\n", "zweites: größe\r\n", "третий 😀"]


def read(path, text_field="text"):
    source = find_source_of_glob(str(path), text_field)
    return [
        (document_name(source, d.file_index, d.index_in_file), d.text)
        for d in read_documents(source)
    ]


def write_parquet(path, columns):
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    pyarrow.parquet.write_table(table, path)


def zst(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write_arrow(path, table, has_footer=False):
    new = pyarrow.ipc.new_file if has_footer else pyarrow.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _two_streams(path):
    write_arrow(path, pyarrow.table({"text": TEXTS[:1]}))
    first = path.read_bytes()
    write_arrow(path, pyarrow.table({"text": TEXTS[1:]}))
    path.write_bytes(first + path.read_bytes())


def _arrow_with_offsets(path, offsets):
    """Writes an Arrow file of two texts that begin and end at `offsets`, also where no text is."""
    write_arrow(path, pyarrow.table({"text": ["abcd", "efgh"]}))
    good, bad = (np.array(ends, "<i4").tobytes() for ends in ([0, 4, 8], offsets))
    assert good in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(good, bad))


def _in_struct(arrays, names):
    return pyarrow.table({"content": pyarrow.StructArray.from_arrays(arrays, names)})


ARRAY = json.dumps([{"id": i, "text": text} for i, text in enumerate(TEXTS)], indent=1).encode()
DICTIONARY = pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
VIEW = pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.string_view())})
FORMATS = {
    "a.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + jsonl(TEXTS)),
    "a.ndjson": lambda path: path.write_bytes(jsonl(TEXTS)),
    "lines.json": lambda path: path.write_bytes(jsonl(TEXTS)),
    "array.json": lambda path: path.write_bytes(ARRAY),
    "array.json.gz": lambda path: path.write_bytes(gzip.compress(ARRAY)),
    "array.JSON.zst": lambda path: path.write_bytes(zst(ARRAY)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "a.jsonl.zst": lambda path: path.write_bytes(zst(jsonl(TEXTS))),
    "frames.ndjson.zst": lambda path: path.write_bytes(
        zst(jsonl(TEXTS[:1])) + zst(jsonl(TEXTS[1:]))
    ),
    "a.parquet": lambda path: write_parquet(path, {"text": TEXTS, "id": [0, 1, 2]}),
    "large.parquet": lambda path: write_parquet(
        path, {"text": pyarrow.array(TEXTS, pyarrow.large_string())}
    ),
    "dictionary.parquet": lambda path: pyarrow.parquet.write_table(DICTIONARY, path),
    "view.parquet": lambda path: pyarrow.parquet.write_table(VIEW, path),
    "stream.arrow": lambda path: write_arrow(path, pyarrow.table({"text": TEXTS})),
    "dictionary.arrow": lambda path: write_arrow(path, DICTIONARY),
    "view.arrow": lambda path: write_arrow(path, VIEW),
    "footer.arrow": lambda path: write_arrow(path, pyarrow.table({"text": TEXTS}), True),
    "streams.arrow": lambda path: _two_streams(path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(name, tmp_path):
    FORMATS[name](tmp_path / name)
    assert read(tmp_path / name) == [(f"{name}:{i + 1}", text) for i, text in enumerate(TEXTS)]


NESTED = [{"id": i, "content": {"text": text, "lang": "xx"}} for i, text in enumerate(TEXTS)]
NESTED_FORMATS = {
    "a.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, NESTED))),
    "a.json": lambda path: path.write_text(json.dumps(NESTED)),
    "long.jsonl": lambda path: path.write_text(
        "\n".join(json.dumps(record | {"filler": "x" * texts.LONG}) for record in NESTED)
    ),
    "a.parquet": lambda path: write_parquet(path, pyarrow.Table.from_pylist(NESTED)),
    "dictionary.parquet": lambda path: pyarrow.parquet.write_table(
        _in_struct([DICTIONARY["text"].combine_chunks()], ["text"]), path, row_group_size=2
    ),
    "a.arrow": lambda path: write_arrow(path, pyarrow.Table.from_pylist(NESTED)),
}


@pytest.mark.parametrize("name", NESTED_FORMATS)
def test_a_dotted_field_is_inside_an_object(name, tmp_path):
    NESTED_FORMATS[name](tmp_path / name)
    assert [text for _, text in read(tmp_path / name, "content.text")] == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_name_with_dots_comes_before_a_path(name, tmp_path):
    records = [record | {"content.text": "its own"} for record in NESTED]
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps(records[0]))
    else:
        write_parquet(tmp_path / name, pyarrow.Table.from_pylist(records[:1]))
    assert [text for _, text in read(tmp_path / name, "content.text")] == ["its own"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_struct_that_is_null_has_no_text(name, tmp_path):
    type_ = pyarrow.struct([("text", pyarrow.string())])
    table = pyarrow.table({"content": pyarrow.array([{"text": "x"}, None], type_)})
    (write_parquet if name == "a.parquet" else write_arrow)(tmp_path / name, table)
    with refused("row 2", "'content.text'"):
        read(tmp_path / name, "content.text")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_path_to_two_fields_is_refused(name, tmp_path):
    table = _in_struct([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    (write_parquet if name == "a.parquet" else write_arrow)(tmp_path / name, table)
    with refused(tmp_path / name, "two", "'content.text'"):
        read(tmp_path / name, "content.text")


@pytest.mark.parametrize(
    "record, field, says",
    [
        ({"content": {"text": "x"}}, "content", ["content.text"]),
        ({"content": {"text": "x"}}, "text", ["'content' (with 'text')"]),
        ({"content": {"text": "x"}}, "content.body", ["'content' has 'text'"]),
        ({"content": [{"text": "x"}]}, "content.text", ["'content' is a list"]),
        ({"content": "x"}, "content.text", ["'content' is of type str"]),
    ],
)
def test_a_path_without_text_says_what_is_there(record, field, says, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError) as raised:
        read(tmp_path / "a.jsonl", field)
    assert all(part in str(raised.value) for part in ["a.jsonl:1", *says])


def test_a_column_path_through_a_list_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", pyarrow.table({"content": [[{"text": "x"}]]}))
    with refused("a.parquet", "'content'", "list"):
        read(tmp_path / "a.parquet", "content.text")


def test_text_files_and_blank_lines(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.md").write_bytes(text.encode())
    assert read(tmp_path / "*.md") == [(f"{i}.md", text) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS).replace(b"\n", b"\n\n", 1))
    assert [name for name, _ in read(tmp_path / "a.jsonl")] == [f"a.jsonl:{i}" for i in (1, 3, 4)]
    write_parquet(tmp_path / "b.parquet", {"content": TEXTS})
    assert [text for _, text in read(tmp_path / "b.parquet", "content")] == TEXTS


def test_globs_are_recursive_and_sorted(tmp_path, monkeypatch):
    for where in ("one", "two/deeper"):
        for name in ("b/x.txt", "a.txt", "b/c/[1].txt", "note.log"):
            file = tmp_path / where / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name)
    expected = ["a.txt", "b/c/[1].txt", "b/x.txt"]
    assert [name for name, _ in read(tmp_path / "one/**/*.txt")] == expected
    assert [name for name, _ in read(tmp_path / "two/deeper/**/*.txt")] == expected
    # exact name before glob
    assert [text for _, text in read(tmp_path / "one/b/c/[1].txt")] == ["b/c/[1].txt"]
    monkeypatch.chdir(tmp_path / "one")
    assert (
        [name for name, _ in read("**/*.txt")]
        == [name for name, _ in read("./**/*.txt")]
        == expected
    )


def test_a_glob_that_enters_no_folder_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "in/b.txt", "**.md"):
        (tmp_path / name).write_text(name)
    with refused("**.txt"):
        read(tmp_path / "**.txt")
    assert [text for _, text in read(tmp_path / "**.md")] == ["**.md"]


def test_a_folder_is_its_text_files(tmp_path, capsys):
    for name in ("[1]/a.txt", "[1]/b/c.MD", "[1]/image.png", "[1]/.hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "[1]") == [("a.txt", "[1]/a.txt"), ("b/c.MD", "[1]/b/c.MD")]
    assert ".png" in capsys.readouterr().err


def test_text_outside_utf8_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": "\xfe"}\n{"text": "\\ud800x"}\n' + jsonl(["good"])
    )
    strings = pyarrow.StringArray.from_buffers(
        2, pyarrow.array([0, 1, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"x\xffy")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "d.parquet")
    texts = {
        policy: [
            d.text for d in read_documents(find_source_of_glob(str(tmp_path / "*"), "text", policy))
        ]
        for policy in ("skip", "replace")
    }
    assert texts == {
        "skip": ["fine", "good", "x"],
        "replace": ["a\ufffdb", "fine", "\ufffd", "\ufffdx", "good", "x", "\ufffdy"],
    }
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("4 not UTF-8" in line for line in told)
    assert all(name in told[0] for name in ("a.txt", "c.jsonl:1", "c.jsonl:2", "d.parquet:2"))
    with refused("data.on_bad_text = skip"):
        read(tmp_path / "*")


TEXT = (
    "größe e\u0301 ก็ 한글 \uac00\u11a8 😀\U0001f469\u200d\U0001f4bb "
    '\u2000x\x85\x1c\\u00e9 \\ " \x7f'
)
LINES = [  # JSON lines with the text in the field "größe"
    *(
        json.dumps({"a": [1, {"b": text}], "größe": text * 3, "text": 1}, ensure_ascii=escaped)
        for text in (TEXT, TEXT.replace(" ", ""), "", "\n\t ", "😀" * 5, "\\\\u00e9\\")
        for escaped in (True, False)
    ),
    r'{"gr\u00F6\u00dfe": "\u0061\u0022\u005c\uD83D\ude00\ud7ff\ue000", "gröse": 0}',
    '\ufeff{"größe": "a\U0001f600"}',
    '{"größe": "first", "größe": "last"}',
    '{"größe": "\x7f\x80\x9f\xa0\xff\u2028"}',
    # faults
    r'{"größe": "\ud83d"}',
    r'{"größe": "\ude00\ud83d", "b": "\ud83d\u0061"}',
    r'{"größe": "a\u0000b"}',
    r'{"größe": "a", "b": \u0031}',
    r'{"größe": "\u12"}',
    r'{"größe": "\x41"}',
    '{"größe": "a\tb"}',
    '{"größe": "a"',
    '{"größe": "a"}\xa0',
    '{"größe": ["a"]}',
    '{"gröse": "a"}',
    '{"größe": null}',
    '["größe"]',
    "   ",
    '{"größe": "a\xe9b"}'.encode("latin-1"),
    '{"größe": "a"}'.encode() + b"\xe2\x82",
    '{"größe": "a", "b": "\ud83d"}'.encode("utf-8", "surrogatepass"),
]


def _read_line(path, policy):
    """What becomes of a file of one line: (text, hash, size and type of the text, bad records), or
    the error.
    """
    (file,) = find_source_of_glob(str(path), "größe").files
    bad = readers.BadRecords(policy, "stop" if policy == "stop" else "skip")
    try:
        (record,) = read_records(file, file_parts(file)[0], "größe", bad)
    except UserError as error:
        return str(error), None
    found = record.text
    if not found:
        return (found, bad.counts, bad.first), None
    whole = found.decode() if isinstance(found, bytes) else found
    words = " ".join(unicodedata.normalize("NFC", whole).split())
    expected = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")
    assert tokenized_parts.text_hash(found) == expected
    assert texts.byte_count(found) == len(whole.encode())
    return (whole, bad.counts, bad.first), type(found)


@pytest.mark.parametrize("policy", ["stop", "skip", "replace"])
def test_a_long_record_is_read_as_a_short_one(policy, tmp_path, monkeypatch):
    """It gives the same text, hash and size, or the same error, wherever its pieces end."""
    path, kinds = tmp_path / "a.jsonl", collections.Counter()
    for line in LINES:
        path.write_bytes(line if isinstance(line, bytes) else line.encode())
        short, kind = _read_line(path, policy)
        assert kind is not bytes
        for length in (1, 2, 3, 7, 64):
            with monkeypatch.context() as patch:
                patch.setattr(texts, "_PIECE", length)
                patch.setattr(texts, "LONG", 1)
                patch.setattr(readers, "LONG", 1)
                long, kind = _read_line(path, policy)
            assert long == short, (line, length)
            kinds[kind] += 1
    assert kinds[bytes] > 60


def test_empty_files_among_others_are_skipped(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("x = 1\n")
    assert read(tmp_path / "*.py") == [("a.py", "x = 1\n")]


def large_file(path):
    texts = [f"document {i} " * (i % 7) for i in range(60)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=9)
    else:
        path.write_bytes(jsonl(texts))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_the_parts_of_a_file_are_the_file(tmp_path, monkeypatch, name):
    path = large_file(tmp_path / name)
    whole = read(path)
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    assert read(path) == whole


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_parts_of_a_file_have_digests_of_their_own(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    (file,) = find_source_of_glob(str(large_file(tmp_path / name)), "text").files
    found = file_parts(file)
    assert len(found) > 5
    assert len({part_digest(file, part, "text") for part in found}) == len(found)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_reading_a_part_goes_forward(tmp_path, monkeypatch, name):
    """As progress displays show it."""
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    (file,) = find_source_of_glob(str(large_file(tmp_path / name)), "text").files
    for part in file_parts(file):
        positions = [record.bytes_read for record in read_records(file, part, "text", None)]
        assert positions == sorted(positions)
        assert 0 < positions[-1] <= file.size


def test_a_text_file_has_one_part(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    (file,) = find_source_of_glob(str(large_file(tmp_path / "a.txt")), "text").files
    assert file_parts(file) == [Part(0, file.size)]


def test_appended_lines_change_the_last_part(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    path = large_file(tmp_path / "a.jsonl")

    def digests():
        (file,) = find_source_of_glob(str(path), "text").files
        found = file_parts(file)
        assert sum(part.stop - part.start for part in found) == file.size
        return [part_digest(file, part, "text") for part in found]

    before = digests()
    path.write_bytes(path.read_bytes() + jsonl(["more"]))
    assert digests()[: len(before) - 1] == before[:-1]


def test_a_bad_line_of_a_part_has_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_PART_BYTES", 400)
    path = large_file(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b"broken")
    with refused("a.jsonl:61"):
        read(path)


def test_the_default_corpus_is_the_standard_library():
    source = find_source_of_glob("", "text")
    labels = [file.relative_path for file in source.files]
    assert labels == sorted(labels)
    assert {"os.py", "json/decoder.py"} <= set(labels)
    for label in labels:
        assert label.endswith(".py")
        assert "sysconfigdata" not in label
        assert not {"site-packages", "test", "tests", "idle_test", "__pycache__"} & set(
            label.split("/")
        )
    assert 5_000_000 < source.size < 20_000_000


class FakeBucket(MemoryFileSystem):
    """Objects of a bucket, in memory, under gs://."""

    protocol = ("gs", "gcs")
    store, pseudo_dirs = {}, [""]

    def __init__(self, *args, finalize_on_close=True, **kwargs):
        super().__init__(*args, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("gs://").removeprefix("gcs://").strip("/")


@pytest.fixture
def no_cached_filesystem():
    """etils keeps the first file system that it has opened for gs:// until the process ends."""
    cached = type(etils.epath.backend.fsspec_backend)._get_filesystem
    cached.cache_clear()
    yield
    cached.cache_clear()


def test_remote_paths_are_read_and_globbed(monkeypatch, no_cached_filesystem):
    registry = importlib.import_module("fsspec.registry")._registry
    monkeypatch.setitem(registry, "gs", FakeBucket)
    monkeypatch.setitem(registry, "gcs", FakeBucket)
    bucket = FakeBucket()
    bucket.pipe(
        {
            "/bucket/data/a.txt": b"one",
            "/bucket/data/deep/b.jsonl": jsonl(["two"]),
            "/bucket/other.txt": b"no",
        }
    )
    assert read("gs://bucket/data/**") == [("a.txt", "one"), ("deep/b.jsonl:1", "two")]
    assert content_digest(find_source_of_glob("gs://bucket/data/a.txt", "text").files[0])
    with refused("gs://bucket/absent/*.txt"):
        find_source_of_glob("gs://bucket/absent/*.txt", "text")
    with refused("http://host/a.txt"):
        find_source_of_glob("http://host/a.txt", "text")

    def unreachable(*_, **__):
        raise type("ConnectError", (Exception,), {})("Name or service\nnot known")

    (file,) = find_source_of_glob("gs://bucket/data/a.txt", "text").files
    with monkeypatch.context() as patch, refused("gs://bucket/data/*"):
        patch.setattr(FakeBucket, "glob", unreachable)
        find_source_of_glob("gs://bucket/data/*", "text")

    def not_installed(*_, **__):
        raise ImportError("Install gcsfs to access GCS")

    with monkeypatch.context() as patch, refused("--extra remote"):
        patch.setattr(FakeBucket, "glob", not_installed)
        find_source_of_glob("gs://bucket/data/*", "text")
    with monkeypatch.context() as patch, refused("a.txt"):
        patch.setattr(FakeBucket, "_open", unreachable)
        patch.setattr(FakeBucket, "cat_file", unreachable)
        list(read_documents(sources.Source("a", (file,), "text")))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


def _surrogate(path):
    path.write_bytes(b'{"text": "fine"}\n{"text": "\\ud800"}\n')


BAD = {
    "text.txt": (lambda p: p.write_bytes(b"abc\xffdef"), ["UTF-8", "3", "0xff"]),
    "empty.txt": (lambda p: p.write_bytes(b""), []),
    "empty.jsonl": (lambda p: p.write_bytes(b"\n"), []),
    "broken.jsonl": (lambda p: p.write_bytes(jsonl(["a"]) + b'{"text": \n'), [":2", "JSON"]),
    "cut.jsonl": (lambda p: p.write_bytes(jsonl(["a", "b"])[:-4]), [":2", "JSON"]),
    "list.jsonl": (lambda p: p.write_bytes(b"[1]\n"), [":1", "JSON"]),
    "field.jsonl": (
        lambda p: p.write_bytes(b'{"texts": "a", "id": 1}\n'),
        [":1", "'text'", "'texts'", "'id'", "data.text_field"],
    ),
    "type.jsonl": (
        lambda p: p.write_bytes(jsonl(["a"]) + b'{"text": 3}\n'),
        [":2"],
    ),
    "bytes.jsonl": (
        lambda p: p.write_bytes(jsonl(["a"]) + b'{"text": "\xff"}\n'),
        ["UTF-8", len(jsonl(["a"])) + 10],
    ),
    "surrogate.jsonl": (_surrogate, [":2"]),
    "broken.jsonl.gz": (
        lambda p: p.write_bytes(gzip.compress(jsonl(TEXTS))[:-12]),
        [],
    ),
    "broken.jsonl.zst": (lambda p: p.write_bytes(zst(jsonl(TEXTS))[:-12]), []),
    "plain.jsonl.zst": (lambda p: p.write_bytes(jsonl(TEXTS)), []),
    "text.json": (lambda p: p.write_bytes(b"just text"), [":1", "JSON"]),
    "cut.json": (lambda p: p.write_bytes(ARRAY[:-3]), [":3", "JSON", "3"]),
    "open.json": (lambda p: p.write_bytes(ARRAY[:-1]), ["3"]),
    "two.json": (lambda p: p.write_bytes(ARRAY + b"\n" + ARRAY), [":4", "3"]),
    "pointer.txt": (lambda p: p.write_bytes(LFS_POINTER), ["git lfs pull"]),
    "broken.arrow": (lambda p: p.write_bytes(b"nothing of use"), []),
    "cut.arrow": (
        lambda p: (
            write_arrow(p, pyarrow.table({"text": TEXTS})),
            p.write_bytes(p.read_bytes()[:-8]),
        ),
        [],
    ),
    "memory.arrow": (lambda p: _arrow_with_offsets(p, [0, 4, 60]), []),
    "order.arrow": (lambda p: _arrow_with_offsets(p, [0, 6, 2]), []),
    "negative.arrow": (lambda p: _arrow_with_offsets(p, [-4, 1, 8]), []),
    "index.arrow": (
        lambda p: write_arrow(p, pyarrow.table({"text": _beyond_its_dictionary()})),
        [],
    ),
    "plain.jsonl.gz": (lambda p: p.write_bytes(jsonl(TEXTS)), []),
    "broken.parquet": (
        lambda p: p.write_bytes(b"PAR1 nothing of use PAR1"),
        [],
    ),
    "deep.jsonl": (
        lambda p: p.write_bytes(b'{"text": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
        [":1"],
    ),
    "long.jsonl": (
        lambda p: p.write_bytes(b'{"text": "a", "x": ' + b"1" * 5000 + b"}"),
        [":1", "4300"],
    ),
    "fifo.txt": (os.mkfifo, []),
    "twice.parquet": (
        lambda p: pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays(
                [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
            ),
            p,
        ),
        ["'text'"],
    ),
    "column.parquet": (
        lambda p: write_parquet(p, {"texts": ["a"]}),
        ["'text'", "'texts'"],
    ),
    "type.parquet": (lambda p: write_parquet(p, {"text": [1, 2]}), ["int64"]),
    "null.parquet": (lambda p: write_parquet(p, {"text": ["a", None]}), ["2"]),
    "empty.parquet": (
        lambda p: write_parquet(p, {"text": pyarrow.array([], pyarrow.string())}),
        [],
    ),
}


def _beyond_its_dictionary():
    indices, texts = pyarrow.array([0, 7], pyarrow.int32()), pyarrow.array(["a"])
    return pyarrow.DictionaryArray.from_arrays(indices, texts, safe=False)


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_in_one_line(name, tmp_path):
    write, names = BAD[name]
    write(tmp_path / name)
    with refused(tmp_path / name, *names):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_flipped_bytes_in_arrow_files_are_refused(name, tmp_path):
    """With `replace`, text that is damaged is read: none but that of the file."""
    path = tmp_path / name
    texts = {"text": [f"document {i} " * 20 for i in range(50)]}
    write_parquet(path, texts) if name == "a.parquet" else write_arrow(path, pyarrow.table(texts))
    good = path.read_bytes()
    detected = 0
    for position in range(0, len(good), max(1, len(good) // 40)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
        try:
            source = find_source_of_glob(str(path), "text", on_bad_text="replace")
            assert sum(len(document.text) for document in read_documents(source)) < 2 * 11_800
        except UserError:
            detected += 1
    assert detected > 0


def test_paths_that_match_nothing_say_what_is_there(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "nothing").mkdir()
    for path, expected in {
        "text/a.txt": ["'text'", "'texts'"],
        "texts/*.md": ["texts"],
        "nothing/": ["nothing/**/*.log"],
    }.items():
        with refused(path, *expected):
            find_source_of_glob(os.path.join(tmp_path, path), "text")


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    source = find_source_of_glob(str(tmp_path / "a.txt"), "text")
    (tmp_path / "a.txt").unlink()  # vanished between listing and reading
    with refused("a.txt"):
        list(read_documents(source))
    with refused("a.txt"):
        sources.content_digest(source.files[0])
