"""Tokenizers: same ids after export, lossless text, bytes per token, streaming, bad files."""

import json
import os
import pathlib
import re

import numpy as np
import pytest
import tokenizers
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data import cuts, huggingface_tokenizer, tokens
from qwen3next_jax.data import text as texts
from qwen3next_jax.data.tokens import END_OF_TEXT, load_tokenizer
from qwen3next_jax.inference.streaming import DecodeStream
from tests.refusals import refused

TEXT = "def größe(x):\n\treturn '∀ 😀' + x  # naïve\r\n\x00\x7f   done — ok\n"
TRAINING = [
    "def f(x):\n    return x + 1\n",
    "größe naïve ∀x 😀😀 done",
    "import os\nimport sys\n",
] * 4
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A small byte-level BPE with special tokens, as current models have."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT, "<|im_end|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens(["<think>"])
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A small tokenizer of the SentencePiece kind: ▁ for spaces, <0xXX> for bytes outside the
    vocabulary.
    """
    pieces = [chr(c) for c in range(33, 127)] + ["▁", "re", "turn", "▁return", "é"]
    vocabulary = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    merges = [("r", "e")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="never", split=False
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    path = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request):
    return load_tokenizer(
        "bytes" if request.param == "bytes" else request.getfixturevalue(request.param)
    )


def test_text_survives_and_tokens_account_for_every_byte(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_byte_counts.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_byte_counts[ids].sum() == len(TEXT.encode())
    assert tokenizer.token_byte_counts[tokenizer.eos_id] == 0


def test_documents_end_with_eos(tokenizer):
    quoted = f"a {END_OF_TEXT} </s> <|im_end|> b"
    first, second = tokenizer.encode_documents([quoted, "x"])
    assert first[-1] == second[-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in first[:-1]
    assert tokenizer.decode(first[:-1]) == quoted
    assert tokenizer.token_byte_counts[first].sum() == len(quoted)


def test_long_documents_are_tokenized_in_parts_without_loss(byte_level):
    tokenizer = load_tokenizer(byte_level)
    # These texts are longer than the parts that are tokenized at once, with and without line ends.
    text = ("naïve line of text\n" * 20_000) + "y" * 300_000
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids[:-1]) == text


def test_long_texts_get_the_same_ids(tokenizer, monkeypatch):
    for text in (TEXT, "😀" * 9, "e\u0301\n" * 5, "no line end" * 4, "x y\nz " * 9):
        (short,) = tokenizer.encode_documents([text])
        for longest, piece in ((1 << 17, 5), (7, 1), (7, 3), (7, 16)):
            with monkeypatch.context() as patch:
                patch.setattr(cuts, "LONGEST", longest)
                patch.setattr(cuts, "_AROUND", 3)
                patch.setattr(texts, "_PIECE", piece)
                for module in (tokens, huggingface_tokenizer):
                    patch.setattr(module, "_ENCODED_AT_ONCE", 10)
                long = np.concatenate(list(tokenizer.encode_long_text(text.encode())))
            np.testing.assert_array_equal(short, long)


@pytest.mark.parametrize("pieces", [TEXT, "é", "\ufffd", "😀" * 3, "a\ufffd\ufffd b"])
def test_stream_never_shows_half_a_character(tokenizer, pieces):
    stream = DecodeStream(tokenizer)
    shown = [stream.add(i) for i in tokenizer.encode(pieces)]
    assert "".join(shown) + stream.end() == pieces
    if "\ufffd" not in pieces:
        assert not any("\ufffd" in part for part in shown)


def test_stream_of_broken_bytes_ends_and_is_bounded():
    stream = DecodeStream(load_tokenizer("bytes"))
    # Each byte begins a character of three bytes, and no character is completed.
    shown = [stream.add(0xE2) for _ in range(50)]
    assert sum(map(len, shown)) >= 40
    assert "".join(shown) + stream.end() == "\ufffd" * 50


@settings(max_examples=100, deadline=None)
@given(st.one_of(any_text, st.lists(st.one_of(any_text, st.just(END_OF_TEXT))).map("".join)))
def test_exported_byte_tokenizer_gives_the_same_ids(tmp_path_factory, text):
    directory = _exported(tmp_path_factory)
    bytes_, exported = load_tokenizer("bytes"), load_tokenizer(directory)
    np.testing.assert_array_equal(bytes_.encode(text), exported.encode(text))
    assert exported.decode(bytes_.encode(text)) == text


def _exported(tmp_path_factory, cache=[]):  # noqa: B006 - one export for all examples
    if not cache:
        cache.append(tmp_path_factory.mktemp("export"))
        load_tokenizer("bytes").save(cache[0])
    return str(cache[0])


def test_export_keeps_what_the_tokenizer_is(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    np.testing.assert_array_equal(again.token_byte_counts, tokenizer.token_byte_counts)
    np.testing.assert_array_equal(again.encode(TEXT), tokenizer.encode(TEXT))
    # The tokenizers library alone, without this package, gives the same ids.
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.encode(TEXT, add_special_tokens=False).ids == tokenizer.encode(TEXT).tolist()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())[
        "eos_token"
    ] == tokenizer.decode([tokenizer.eos_id])


def test_eos_comes_from_the_config_beside_it(byte_level, tmp_path):
    target = tmp_path / "tokenizer.json"
    target.write_text(open(byte_level, encoding="utf-8").read())
    assert load_tokenizer(str(target)).eos_id == 0
    before = load_tokenizer(str(target)).fingerprint
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    assert load_tokenizer(str(target)).eos_id == 1
    assert load_tokenizer(str(target)).fingerprint != before


def test_a_missing_tokenizer_is_named(tmp_path):
    for spec, name in (("absent.json", "absent.json"), ("", "tokenizer.json")):
        with refused(tmp_path / name):
            load_tokenizer(str(tmp_path / spec))


@pytest.mark.parametrize(
    "content", [b"not json", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe", "FIFO"]
)
def test_a_damaged_tokenizer_is_named(content, tmp_path):
    path = tmp_path / "broken.json"
    os.mkfifo(path) if content == "FIFO" else path.write_bytes(content)
    with refused(path):
        load_tokenizer(str(path))


def test_a_tokenizer_fits_the_vocabulary():
    assert load_tokenizer("bytes", vocab_size=257).vocab_size == 257
    with refused("257", "256"):
        load_tokenizer("bytes", vocab_size=256)


@pytest.mark.parametrize(
    "fields, name",
    [
        (None, ""),  # nothing names the token
        ({"eos_token": "<end>"}, "'<end>'"),
        ({"eos_token": ["x"]}, "x"),
        ({"eos_token": 5}, "5"),
        ({"eos_token": {"content": ["x"]}}, "x"),
        ([1], "tokenizer_config.json"),
    ],
)
def test_an_end_token_outside_the_vocabulary_is_named(fields, name, tmp_path):
    endless = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    endless.save(str(tmp_path / "tokenizer.json"))
    if fields:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with refused(tmp_path, name):
        load_tokenizer(str(tmp_path))


def test_an_id_beyond_the_vocabulary_is_named(tmp_path):
    vocab = {"a": 0, END_OF_TEXT: 10**9}
    (tmp_path / "huge.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}})
    )
    with refused(tmp_path / "huge.json", END_OF_TEXT, 10**9):
        load_tokenizer(str(tmp_path / "huge.json"))


def test_text_has_only_named_special_tokens(byte_level, byte_fallback):
    text = "a <think>b</think> <|im_end|> </s> <unk> c"
    for path in (byte_level, byte_fallback):
        tokenizer = load_tokenizer(path)
        added = tokenizer._tokenizer.get_added_tokens_decoder()
        (ids,) = tokenizer.encode_documents([text])
        special = {i for i, token in added.items() if token.special}
        assert not special & set(ids[:-1].tolist())
        assert tokenizer.decode(ids[:-1]) == text
        assert set(added) - special <= set(ids.tolist())  # <think> is text
    special = load_tokenizer(byte_level, None, ["<|im_end|>"])
    (ids,) = special.encode_documents([text])
    assert ids.tolist().count(1) == 1
    assert special.token_byte_counts[ids].sum() == len(text.encode())
    for spec, token, names in (
        (byte_level, "<thin>", ("'<thin>'", "'<think>'")),
        (byte_level, END_OF_TEXT, (END_OF_TEXT,)),
        ("bytes", "<think>", ("'bytes'",)),
    ):
        with refused("data.parse_tokens", *names):
            load_tokenizer(spec, None, [token])


def test_tiktoken_gives_the_same_ids_or_is_not_used(byte_level, byte_fallback, tmp_path):
    pytest.importorskip("tiktoken")
    fast = load_tokenizer(byte_level, None, ["<|im_end|>"])
    slow = fast.slower_tokenizer
    assert "tiktoken" in fast.library_versions
    assert "tokenizers" in slow.library_versions
    assert load_tokenizer(byte_fallback).slower_tokenizer is None  # no byte-level BPE
    texts = [TEXT, "", TEXT * 9000, "e\u0301 <think><|im_end|> " * 50, *TRAINING]
    assert len(TEXT * 9000) > 1 << 18  # in parts
    for one, other in zip(fast.encode_documents(texts), slow.encode_documents(texts), strict=True):
        np.testing.assert_array_equal(one, other)
    assert fast.fingerprint == slow.fingerprint
    # Letters are those of ASCII alone to tiktoken.
    content = json.loads(open(byte_level, encoding="utf-8").read())
    split = {"type": "Split", "pattern": {"Regex": "[[:alpha:]]+|[^[:alpha:]]+"}}
    split |= {"behavior": "Isolated", "invert": False}
    steps = [split, content["pre_tokenizer"] | {"use_regex": False}]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    content["model"]["vocab"]["tÃ"] = len(content["model"]["vocab"])
    content["model"]["merges"].append(["t", "Ã"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    with pytest.raises(tokens.DifferentIds):
        load_tokenizer(str(tmp_path)).encode_documents(["été"])


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize(
    "merges", [[], ["h e", "e l", "h el"], ["h e", "e l", "he l"], ["h e", "e l", "he l", "h el"]]
)
def test_tiktoken_merges_as_the_tokenizer_does(byte_level, tmp_path, merges, ignore_merges):
    """Whichever merges make a token, and if none do: also in texts that no sample holds."""
    pytest.importorskip("tiktoken")
    content = json.loads(open(byte_level, encoding="utf-8").read())
    ids = {c: i for i, c in enumerate(tokens.byte_characters())}
    ids |= {t: 256 + i for i, t in enumerate(["he", "el", "hel", END_OF_TEXT, "<|im_end|>"])}
    content["model"] |= {"vocab": ids, "merges": merges, "ignore_merges": ignore_merges}
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    fast = load_tokenizer(str(tmp_path))
    texts = [*["other words"] * 9, "hel", "xhel", "helo hel", "he", "elel"]
    slow = fast.slower_tokenizer or fast
    for one, other in zip(fast.encode_documents(texts), slow.encode_documents(texts), strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.lists(any_text, max_size=5))
@settings(max_examples=50, deadline=None)
def test_tiktoken_splits_as_the_tokenizer_does(byte_level, texts):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(byte_level)
    both = zip(
        tokenizer._encode_by_tiktoken(texts), tokenizer._encode_by_tokenizers(texts), strict=True
    )
    assert all(np.array_equal(fast, slow) for fast, slow in both)


def _with_added(path, folder, special=(), others=()):
    """The tokenizer in `path` with further added tokens, in `folder`."""
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([*others])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_added_runs_of_spaces_are_one_token_in_documents(byte_level, tmp_path):
    tokenizer = load_tokenizer(_with_added(byte_level, tmp_path, others=["    "]))
    text = "def f():\n    return 1\n        x\n"
    for one in filter(None, (tokenizer, tokenizer.slower_tokenizer)):  # with tiktoken and without
        (ids,) = one.encode_documents([text])
        np.testing.assert_array_equal(ids[:-1], tokenizer.encode(text))
        assert ids.tolist().count(tokenizer.vocab_size - 1) == 3
    assert tokenizer.token_byte_counts[ids].sum() == len(text)


def test_a_named_token_gets_its_own_id_in_documents(byte_level, tmp_path):
    """Also if special tokens with lower ids are text there."""
    folder = _with_added(byte_level, tmp_path, special=["<a>", "<b>"], others=["<c>"])
    plain, named = load_tokenizer(folder), load_tokenizer(folder, None, ["<b>"])
    last = plain.vocab_size - 1
    (ids,), (parsed,) = (t.encode_documents(["<a><b><c>"]) for t in (plain, named))
    assert [i for i in ids.tolist() if i >= last - 2] == [last]
    assert [i for i in parsed.tolist() if i >= last - 2] == [last - 1, last]


def test_text_never_gives_special_tokens(tmp_path):
    pieces = ["<unk>", "</s>", "▁", *"ab</s>", "x"]
    scores = [(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    (ids,) = tokenizer.encode_documents(["a</s>b"])
    assert ids.tolist().count(tokenizer.eos_id) == 1
    assert ids[-1] == tokenizer.eos_id


def _counted(tokenizer, text):
    (ids,) = tokenizer.encode_documents([text])
    return int(tokenizer.token_byte_counts[ids].sum())


def _with_ids_of_library(content):
    """Gives the added tokens of a tokenizer.json the ids that the library gives them."""
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for token in content["added_tokens"]:
        token["id"] = library.token_to_id(token["content"])
    return content


@pytest.fixture
def with_spaces(byte_fallback):
    """A tokenizer whose ▁ stands for spaces, and whose ▁▁▁▁ for four."""
    content = json.loads(open(byte_fallback, encoding="utf-8").read())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["pre_tokenizer"] = None
    content["model"]["vocab"]["▁▁▁▁"] = len(content["model"]["vocab"])
    run = {"id": 0, "content": "▁▁▁▁", "special": False, "normalized": True}
    run |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    content["added_tokens"].append(run)
    return _with_ids_of_library(content)


def test_a_run_of_spaces_counts_its_bytes(with_spaces, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_spaces))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.token_byte_counts[tokenizer.encode("    ")].tolist() == [4]
    assert _counted(tokenizer, "a\n    b\n") == 8


def test_a_space_before_every_text_is_no_miscount(with_spaces, tmp_path):
    """No row asks for it."""
    with_spaces["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, with_spaces["normalizer"]],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_spaces))
    text = "two words"
    assert _counted(load_tokenizer(str(tmp_path)), text) == len(text) + 1
    assert tokens.miscounted_bytes(len(text) + 1, len(text)) == 0


def test_word_pieces_miscount_what_is_lost(tmp_path):
    """They write no spaces, and ## before what continues a word."""
    words = ["[UNK]", END_OF_TEXT, "two", "wo", "##rd", "##s"]
    pieces = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pieces.decoder = tokenizers.decoders.WordPiece()
    pieces.add_special_tokens(["[UNK]", END_OF_TEXT])
    pieces.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert _counted(tokenizer, "two words") == len("two words") + 1
    assert tokens.miscounted_bytes(_counted(tokenizer, "two \n\n words"), 12) > 0


@pytest.fixture
def added(byte_level, tmp_path):
    """(folder of a tokenizer, the number of its tokens)."""
    folder = _with_added(byte_level, tmp_path)
    return folder, load_tokenizer(folder).vocab_size


def _name(folder, named, **fields):
    path = pathlib.Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": named, **fields}))


def test_tokens_of_the_config_have_their_ids(added, tmp_path):
    folder, size = added
    before = load_tokenizer(folder).fingerprint
    marks = {str(size): {"content": "<m>", "special": True}, str(size + 1): {"content": "<n>"}}
    _name(folder, marks, eos_token="<m>")
    one = load_tokenizer(folder)
    assert one.encode("a<m><n>").tolist()[1:] == [size, size + 1]
    assert one.eos_id == size
    (ids,) = one.encode_documents(["a<m><n>"])
    # <m> is special, <n> is text
    assert size not in ids[:-1]
    assert size + 1 in ids
    assert one.fingerprint != before
    (tmp_path / "copy").mkdir()
    one.save(tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).fingerprint == one.fingerprint


def test_listed_tokens_have_their_ids(added):
    folder, size = added
    listed = pathlib.Path(folder) / "added_tokens.json"
    listed.write_text(json.dumps({"<n>": size + 1, "<m>": size}))
    assert load_tokenizer(folder).encode("<m><n>").tolist() == [size, size + 1]


def test_listed_tokens_that_do_not_fit_are_refused(added):
    folder, size = added
    for content, names in (
        ({"<m>": 5}, ("'<m>'", 5)),
        ({"<think>": 5}, ("'<think>'", 5, size - 1)),
        ({"<m>": size + 3}, (size,)),
        ({"<m>": "5"}, ()),
        ({"\ud800": size}, ()),
        (["<m>"], ()),
    ):
        (pathlib.Path(folder) / "added_tokens.json").write_text(json.dumps(content))
        with refused("added_tokens.json", *names):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "named", [[1], {"x": {"content": "<m>"}}, {"9": 5}, {"9": {"content": "<m>", "lstrip": 1}}]
)
def test_tokens_of_the_config_that_do_not_fit_are_refused(added, named):
    _name(added[0], named)
    with refused("tokenizer_config.json", "added_tokens_decoder"):
        load_tokenizer(added[0])


@pytest.mark.parametrize(
    ("normalizer", "text"), [("none", "a<t>"), ("lower", "a<T>"), ("NFKC", "a＜t＞")]
)
def test_special_tokens_of_normalized_text_are_found(byte_level, tmp_path, normalizer, text):
    content = json.loads(open(byte_level, encoding="utf-8").read())
    token = dict.fromkeys(FLAGS, False) | {"content": "<t>", "special": True, "normalized": True}
    content["added_tokens"].append(token | {"id": 0})
    content["normalizer"] = NORMALIZERS[normalizer]
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    assert load_tokenizer(str(tmp_path)).find_special_token(text) == "<t>"
    assert load_tokenizer(str(tmp_path)).find_special_token("a<b>") is None
    assert load_tokenizer(str(tmp_path), None, ["<t>"]).find_special_token(text) is None


def test_special_tokens_that_normalization_empties_are_nowhere(byte_level, tmp_path):
    content = json.loads(open(byte_level, encoding="utf-8").read())
    token = dict.fromkeys(FLAGS, False) | {"content": "\n", "special": True, "normalized": True}
    content["added_tokens"].append(token | {"id": 0})
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    assert load_tokenizer(str(tmp_path)).find_special_token("text") is None


def test_added_tokens_without_characters_are_unused(byte_level, tmp_path):
    content = json.loads(open(byte_level, encoding="utf-8").read())
    size = len(content["model"]["vocab"]) + 1  # with <think>
    content["added_tokens"].append({"id": size, "content": ""} | dict.fromkeys(FLAGS, False))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).vocab_size == size


def test_tokens_without_fault_make_no_message(byte_level, monkeypatch):
    """In a vocabulary of 150,000 tokens, the messages would take seconds."""
    messages, path = [], type(epath.Path(byte_level))
    count = lambda self, spec: messages.append(1) or str(self)
    monkeypatch.setattr(path, "__format__", count, raising=False)
    assert load_tokenizer(byte_level).vocab_size > len(messages) * 10


def test_other_ids_than_the_files_are_refused(byte_level, tmp_path):
    content = json.loads(open(byte_level, encoding="utf-8").read())
    content["added_tokens"][-1]["id"] += 7  # the library gives it the next free id all the same
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    token = content["added_tokens"][-1]
    with refused("tokenizer.json", token["content"], token["id"]):
        load_tokenizer(str(tmp_path))


def test_two_tokens_of_one_id_are_refused(byte_level, tmp_path):
    """Such as a letter and, because of an unused id, the token that the library adds."""
    content = json.loads(open(byte_level, encoding="utf-8").read())
    vocabulary = content["model"]["vocab"]
    vocabulary["é"] = len(vocabulary) + 1
    content["added_tokens"].append({"id": 0, "content": "<t>"} | dict.fromkeys(FLAGS, False))
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    with refused("tokenizer.json", "'é'", "<t>", vocabulary["é"]):
        load_tokenizer(str(tmp_path))


def test_ambiguous_tokenizers_are_refused(byte_level, tmp_path):
    content = json.loads(open(byte_level, encoding="utf-8").read())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content | {"model": content["model"] | {"dropout": 0.1}}))
    with refused(path):
        load_tokenizer(str(path))
    flags = dict.fromkeys(FLAGS, False) | {"normalized": True, "id": 0}
    added = [*content["added_tokens"], flags | {"content": "<A>"}, flags | {"content": "<a>"}]
    content |= {"added_tokens": added, "normalizer": NORMALIZERS["lower"]}
    path.write_text(json.dumps(_with_ids_of_library(content)))
    with refused(path, "<A>", "<a>"):
        load_tokenizer(str(path))


def test_a_text_without_a_safe_place_is_encoded_whole(byte_level, tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "LONGEST", 8)
    monkeypatch.setattr(cuts, "_AROUND", 8)

    def parts(spec, text):
        return [*load_tokenizer(spec)._cutter.cut([text])]

    text = "some words\nand more of them\n\n  and  x"
    assert len(parts(byte_level, text)) > 2
    assert "".join(parts(byte_level, text)) == text
    assert len(parts(byte_level, "x" * 99)) == len(parts(byte_level, " " * 99)) == 1
    # No piece ends where a word does: a token may hold the end of one word and the next.
    content = json.loads(open(byte_level, encoding="utf-8").read())
    content["pre_tokenizer"]["use_regex"] = False
    content["model"]["vocab"] |= {"eĠ": 900, "Ċa": 901}
    content["model"]["merges"] += [["e", "Ġ"], ["Ċ", "a"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(_with_ids_of_library(content)))
    assert parts(str(tmp_path), text) == [text]


@pytest.mark.parametrize("end", ["\r\n", "\n\n", "\n    ", ";\n\n  ", " \n"])
def test_a_long_text_is_cut_after_any_line_ends(byte_level, end, monkeypatch):
    monkeypatch.setattr(cuts, "LONGEST", 64)
    monkeypatch.setattr(cuts, "_AROUND", 32)
    monkeypatch.setattr(cuts, "_SPACE", re.compile("$."))  # no cut at a space
    text, tokenizer = f"(1,2){end}" * 100, load_tokenizer(byte_level)
    parts = list(tokenizer._cutter.cut([text]))
    assert max(map(len, parts)) <= 128
    assert "".join(parts) == text


# ---- any tokenizer

LETTERS = ["a", "b", "A", "é", "e", "\u0301", " ", "  ", "\n", "▁", "##", ".", "1", "ß", "ﬁ", "😀"]
ANY_TEXT = st.lists(
    st.sampled_from([*LETTERS, "<t>", "a b", " a", "</s>", "<0x0A>", "\n\n\n", "aa"]), max_size=14
).map("".join)
NORMALIZERS = {
    "none": None,
    "NFC": {"type": "NFC"},
    "NFKC": {"type": "NFKC"},
    "lower": {"type": "Lowercase"},
    "bert": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "spaces": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "prefix": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
}
BYTES_OF_PIECES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "use_regex": False,
    "trim_offsets": True,
}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "none": None,
    "bytes": BYTES_OF_PIECES | {"use_regex": True},
    "bytes, space": BYTES_OF_PIECES | {"add_prefix_space": True, "use_regex": True},
    "bytes, whole": BYTES_OF_PIECES,
    "pattern": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": PATTERN},
                "behavior": "Isolated",
                "invert": False,
            },
            BYTES_OF_PIECES,
        ],
    },
    "words": {"type": "WhitespaceSplit"},
    "bert": {"type": "BertPreTokenizer"},
    **{
        f"metaspace {scheme} {split}": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": split,
        }
        for scheme in ("always", "first", "never")
        for split in (True, False)
    },
}
TO_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
DECODERS = {
    "none": None,
    "bytes": BYTES_OF_PIECES,
    "wordpiece": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "metaspace": {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    },
    "pieces": {
        "type": "Sequence",
        "decoders": [TO_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}],
    },
    "pieces, strip": {
        "type": "Sequence",
        "decoders": [
            TO_SPACES,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ADDED = st.fixed_dictionaries(
    {
        "content": st.sampled_from(
            ["  ", "   ", "▁▁", "<t>", "\n\n", "a b", "</s>", "é", "A", " a", "\na", "."]
        )
    }
    | {flag: st.booleans() for flag in FLAGS}
)
PAIRS = ["a a", "a b", "▁ a", "▁ ▁", "Ġ a", "Ġ Ġ", "Ċ Ċ", "\n \n", "aa a", "b \n", "\n a", "Ã ©"]


def _model(kind: str, size: int, is_bytes: bool, byte_fallback: bool) -> dict:
    """A model with `size` tokens of more than one character."""
    characters = "".join(tokens.byte_characters()) if is_bytes else "ab\n ▁AeéI.1<>t/s"
    vocabulary = ["<unk>", *dict.fromkeys(characters)]
    if byte_fallback:
        vocabulary += [f"<0x{i:02X}>" for i in range(256)]
    pairs = [p.split(" ") for p in PAIRS[:size] if set(p) - {" "} <= {*characters}]
    longer = ["".join(pair) for pair in pairs] + ["</s>"]
    vocabulary = list(dict.fromkeys([*vocabulary, *longer]))
    ids = {token: i for i, token in enumerate(vocabulary)}
    if kind == "BPE":
        more = {"byte_fallback": byte_fallback, "unk_token": "<unk>", "fuse_unk": True}
        return {"type": kind, "vocab": ids, "merges": pairs, **more}
    if kind == "Unigram":
        scores = [[token, -1.0 - i / 7] for i, token in enumerate(vocabulary)]
        return {"type": kind, "vocab": scores, "unk_id": 0, "byte_fallback": byte_fallback}
    inner = [f"##{c}" for c in characters] if kind == "WordPiece" else ["aa", "ab", "a\n"]
    ids |= {token: len(ids) + i for i, token in enumerate(t for t in inner if t not in ids)}
    more = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "type": kind,
        "vocab": ids,
        "unk_token": "<unk>",
        **(more if kind == "WordPiece" else {}),
    }


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(["BPE", "Unigram", "WordPiece", "WordLevel"]),
    size=st.integers(0, len(PAIRS)),
    byte_fallback=st.booleans(),
    parts=st.tuples(*(st.sampled_from([*p]) for p in (NORMALIZERS, PRE_TOKENIZERS, DECODERS))),
    added=st.lists(ADDED, max_size=4, unique_by=lambda token: token["content"]),
    several=st.lists(ANY_TEXT, min_size=1, max_size=4),
)
def test_any_tokenizer_has_one_meaning(
    tmp_path_factory, kind, size, byte_fallback, parts, added, several
):
    """Documents have the ids of prompts, which are those of the library, whole or in parts; no
    special token comes from text; and bytes are those of the text wherever no text is lost.
    """
    normalizer, splitter, decoder = parts
    is_bytes = splitter.startswith("bytes") or splitter == "pattern"
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, **dict.fromkeys(FLAGS, False), **token}
            for token in [*added, {"content": END_OF_TEXT, "special": True}]
        ],
        "normalizer": NORMALIZERS[normalizer],
        "pre_tokenizer": PRE_TOKENIZERS[splitter],
        "decoder": DECODERS[decoder],
        "post_processor": None,
        "model": _model(kind, size, is_bytes, byte_fallback),
    }
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(_with_ids_of_library(content)))
    library = tokenizers.Tokenizer.from_file(str(path))
    try:
        tokenizer = load_tokenizer(str(path))
    except UserError as error:
        assert str(path) in str(error)
        return
    special = {i: t for i, t in library.get_added_tokens_decoder().items() if t.special}

    def normalized(text):
        return library.normalizer.normalize_str(text) if library.normalizer else text

    for text in several:
        try:
            (ids,) = tokenizer.encode_documents([text])
            prompt = tokenizer.encode(text).tolist()
        except UserError as error:
            assert "tokenizers library" in str(error)
            return
        assert prompt == library.encode(text, add_special_tokens=False).ids
        assert not special.keys() & set(ids[:-1].tolist())
        assert not special.keys() & set(prompt) or tokenizer.find_special_token(text)
        has_special = special.keys() & set(prompt) or any(
            t.content in text or normalized(t.content) in normalized(text) for t in special.values()
        )
        if not has_special:
            assert prompt == ids[:-1].tolist()
        counted = int(tokenizer.token_byte_counts[ids].sum())
        decoded = library.decode(prompt, skip_special_tokens=False)
        if not has_special and decoded == text and not text.startswith("##"):
            assert tokens.miscounted_bytes(counted, len(text.encode())) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "LONGEST", 8)
        patch.setattr(cuts, "_AROUND", 12)
        text = "".join(several) * 3
        (short,) = tokenizer.encode_documents([text])
        long = np.concatenate(list(tokenizer.encode_long_text(text.encode())))
    (whole,) = tokenizer.encode_documents([text])
    np.testing.assert_array_equal(whole, short)
    np.testing.assert_array_equal(whole, long)
