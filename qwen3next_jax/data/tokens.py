"""Tokenizers with one small interface: bytes, or any Hugging Face `tokenizer.json`.

`load_tokenizer("bytes")` and `load_tokenizer("path/to/tokenizer.json")` return objects with the
same interface (`Tokenizer`), so preparation, evaluation (bits per byte), generation and export
accept either.
"""

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from etils import epath

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error, did_you_mean, require, short_repr
from qwen3next_jax.common.storage import is_bucket, to_path
from qwen3next_jax.data import cuts, fast_bpe
from qwen3next_jax.data.added_tokens import (
    AddedTokenSplitter,
    add_tokens_from_config_files,
    check_ids_of_added_tokens,
    make_tokens_unmatchable,
    panic_as_user_error,
)
from qwen3next_jax.data.chat_template import TemplateFile, read_template
from qwen3next_jax.data.cuts import Cutter
from qwen3next_jax.data.text import batches_by_size, text_pieces

END_OF_TEXT = "<|endoftext|>"
_COMMON_EOS = (END_OF_TEXT, "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>")
_ENCODED_AT_ONCE = 1 << 20  # characters
# Of every so many parts of a batch, one is compared: both libraries encode its first so many
# characters.
_COMPARED_EVERY, _COMPARED_CHARACTERS = 256, 1 << 12
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # how SentencePiece names a byte
_LARGEST_GAP = 1 << 20  # most unused ids of a vocabulary; a damaged file could demand gigabytes


class Tokenizer(Protocol):
    """The interface of all tokenizers.

    Attributes:
      vocab_size: number of ids (the largest id plus one).
      eos_id: the id that ends every document.
      token_byte_counts: int32 [vocab_size], number of UTF-8 bytes that each token stands for inside
        of a text; 0 for special tokens that are not in `parse_tokens`. The sum of
        `token_byte_counts` over a document differs from the document's bytes if the tokenizer
        changes or loses parts of a text (`miscounted_bytes`).
      fingerprint: hexadecimal digest that changes when the mapping from text to ids may change.
      library_versions: name of each library that determines the ids of a text → its version.
      parse_tokens: the special tokens that get their own ids where a document spells them out. A
        special token that is not in `parse_tokens` is encoded as ordinary text where a document
        spells it out.
      slower_tokenizer: if tiktoken encodes documents, the same tokenizer with the slower tokenizers
        library, for texts to which tiktoken gives other ids (`fast_bpe.DifferentIds`); otherwise
        None.
      misses_tiktoken: whether tiktoken is not installed, and would encode documents if it were.
      special_tokens: the texts of all special tokens, such as the token that ends a document.
      reads_text: whether the ids stand for text; False for the ids of a synthetic task.
    """

    reads_text: bool
    library_versions: Mapping[str, str]
    parse_tokens: tuple[str, ...]
    special_tokens: tuple[str, ...]
    slower_tokenizer: "Tokenizer | None"
    misses_tiktoken: bool
    vocab_size: int
    eos_id: int
    token_byte_counts: np.ndarray
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n]. A special token that `text` spells out gets its id.
        No special token is added.
        """

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 or uint16 [n], with `eos_id` at the end. Unlike
        `encode`, this method encodes a special token that a text spells out as ordinary text,
        unless the token is one of `parse_tokens`.

        Raises:
          fast_bpe.DifferentIds: tiktoken gives other ids than the tokenizers library; the caller
            has to use `slower_tokenizer`.
        """

    def encode_long_text(self, text: bytes) -> Iterator[np.ndarray]:
        """Yields the ids that `encode_documents` gives to a text, in pieces: integers [n].

        Args:
          text: the text as UTF-8.

        Raises:
          fast_bpe.DifferentIds: for the same reason as `encode_documents`, but maybe after some
            pieces were yielded.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""

    def save(self, directory: epath.PathLike) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` in the Hugging Face format, and
        `chat_template.jinja` if the tokenizer has a chat template.
        """


def load_tokenizer(
    spec: str, vocab_size: int | None = None, parse_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Returns the tokenizer that `spec` names.

    Args:
      spec: "bytes" or "" for bytes; or the path of a Hugging Face `tokenizer.json`, or of a
        directory that holds a tokenizer.json (local or gs://).
      vocab_size: size of the model's vocabulary; None: unknown.
      parse_tokens: the special tokens that get their own ids where documents spell them out
        (`data.parse_tokens`).

    Raises:
      UserError: the file is missing or is not a tokenizer; the tokenizer has no end-of-document
        token, has more than `vocab_size` ids, or lacks one of `parse_tokens`; or another file of
        its folder names added tokens that contradict the tokenizer.
    """
    if spec in ("", "bytes"):
        require(not parse_tokens, "data.parse_tokens: the tokenizer 'bytes' has no such tokens")
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = HuggingFaceTokenizer(spec, parse_tokens)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {spec} has {tokenizer.vocab_size} ids, the model's vocabulary only "
            f"{vocab_size}: set model.vocab_size "
            f"to at least {tokenizer.vocab_size}, or to 0 for what the tokenizer has, or choose "
            "another data.tokenizer"
        )
    return tokenizer


def same_token_ids(one: str, other: str) -> bool:
    """Whether two tokenizers, given their fingerprints, give every text the same ids, as far as
    their files show. `ByteTokenizer` has two fingerprints: its own, and the fingerprint of the
    tokenizer.json that its `save` writes.
    """
    return one == other or {one, other} == {ByteTokenizer.fingerprint, _saved_byte_fingerprint()}


def extends_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether the tokenizer `one` is the tokenizer `other` with more added tokens, such as the
    tokens of a chat format. If True, both tokenizers give the same ids to every text that contains
    no added token of `one` that `other` lacks.
    """
    ours, theirs = (
        json.loads(_byte_level_tokenizer().to_str() if isinstance(t, ByteTokenizer) else t.json)
        for t in (one, other)
    )
    added, before = ours.pop("added_tokens"), theirs.pop("added_tokens")
    for content in (ours, theirs):
        content.pop("post_processor", None)  # documents are encoded without it
    new = [token for token in added if token not in before]
    return (
        ours == theirs
        and all(token in added for token in before)
        and all(token["id"] >= other.vocab_size for token in new)
    )


def miscounted_bytes(token_bytes: int, text_bytes: int) -> int:
    """Returns the difference, in bytes, between a document and the text that its tokens stand for.

    If the tokens stand for one byte more than the document has, the difference counts as 0: the
    first token may stand for a space that the document does not have, and the first token of a
    document is never a target.

    Args:
      token_bytes: the sum of the tokenizer's `token_byte_counts` over the document.
      text_bytes: number of bytes of the document as UTF-8.
    """
    more = token_bytes - text_bytes
    return 0 if more == 1 else abs(more)


class ByteTokenizer:
    """The tokenizer whose ids 0 … 255 are the bytes of UTF-8 text; id 256 ends a document."""

    reads_text = True
    library_versions: Mapping[str, str] = {}
    parse_tokens: tuple[str, ...] = ()
    special_tokens = (END_OF_TEXT,)
    slower_tokenizer = None
    misses_tiktoken = False
    vocab_size = 257
    eos_id = 256
    token_byte_counts = np.array([1] * 256 + [0], np.int32)
    fingerprint = digests.sha256("bytes, 256 = end of document")

    def encode(self, text: str) -> np.ndarray:
        documents = self.encode_documents(text.split(END_OF_TEXT))
        return np.concatenate(documents)[:-1].astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        documents = []
        for text in texts:
            data = text.encode("utf-8")
            # A long document takes half the memory of int32.
            ids = np.full(len(data) + 1, self.eos_id, np.uint16)
            ids[:-1] = np.frombuffer(data, np.uint8)
            documents.append(ids)
        return documents

    def encode_long_text(self, text: bytes) -> Iterator[np.ndarray]:
        for start in range(0, len(text), _ENCODED_AT_ONCE):
            yield np.frombuffer(text[start : start + _ENCODED_AT_ONCE], np.uint8)
        yield np.array([self.eos_id], np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the bytes `ids`, with END_OF_TEXT for the end of a document. Bytes
        that are not UTF-8, and ids that the tokenizer does not have, become the character U+FFFD.
        """
        invalid = b"\xff"  # this byte occurs in no UTF-8 text
        special = {self.eos_id: END_OF_TEXT.encode()}
        return b"".join(bytes([i]) if i < 256 else special.get(i, invalid) for i in ids).decode(
            "utf-8", "replace"
        )

    def save(self, directory: epath.PathLike) -> None:
        """Writes a tokenizer.json with a byte-level BPE without merges. Every program that reads
        Hugging Face tokenizers gets the ids of `ByteTokenizer` from this file.
        """
        _write_tokenizer_files(directory, _byte_level_tokenizer().to_str(pretty=True), END_OF_TEXT)


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, which the `tokenizers` library reads. tiktoken encodes
    documents if it gives the same ids as `tokenizers` (see `fast_bpe`).

    The end-of-document token is `eos_token` of the `tokenizer_config.json` in the same directory.
    If tokenizer_config.json names no `eos_token`, the end-of-document token is the first token of
    `_COMMON_EOS` that is in the vocabulary.
    """

    reads_text = True

    def __init__(self, spec: str, parse_tokens: Sequence[str] = ()):
        path = to_path(spec) if is_bucket(spec) else epath.Path(spec)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.exists():
            raise UserError(
                f"tokenizer {path}: no such file; expected 'bytes' or the path of a Hugging Face "
                "tokenizer.json"
            )
        with (
            as_user_error(f"tokenizer {path}: cannot be read", OSError),
            as_user_error(f"tokenizer {path}: not a Hugging Face tokenizer.json", ValueError),
        ):
            with json_files.open_regular_file(path) as file:
                content = file.read(json_files.MAX_BYTES)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        check_ids_of_added_tokens(path, json.loads(content), self._tokenizer)
        add_tokens_from_config_files(path.parent, self._tokenizer)
        _check_deterministic(path, self._tokenizer)
        # `token_byte_counts` and the library allocate tables with an entry for every id up to the
        # largest.
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        if self.vocab_size > _LARGEST_GAP + len(ids):
            raise UserError(
                f"tokenizer {path}: {max(ids, key=ids.get)!r} has id {self.vocab_size - 1} in a "
                f"vocabulary of {len(ids)} tokens: damaged; copy or download it again"
            )
        _check_ids_are_distinct(path, ids)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._eos_token = _find_eos_token(path, self._tokenizer)
        self._template = read_template(path.parent)
        self.eos_id = self._tokenizer.token_to_id(self._eos_token)
        self.json = self._tokenizer.to_str()
        self.fingerprint = _tokenizer_fingerprint(self.json, self.eos_id)
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        added = [token.content for token in tokens]
        special = [token.content for token in tokens if token.special]
        self.special_tokens = tuple(dict.fromkeys([*special, self._eos_token]))
        for token in parse_tokens:
            require(
                token in added and token != self._eos_token,
                f"data.parse_tokens: {token!r} is not an added token of {path}, or ends documents"
                f"{did_you_mean(token, added)}",
            )
        self.parse_tokens = tuple(parse_tokens)
        self._may_use_tiktoken = True

    @property
    def _unmatchable_tokens(self) -> set[str]:
        """The special tokens that are encoded as ordinary text in documents: all but
        `parse_tokens`.
        """
        return set(self.special_tokens) - set(self.parse_tokens)

    def _document_tokenizer_json(self) -> dict[str, Any]:
        """Returns the content of the tokenizer.json that encodes documents: if a document spells
        out one of `_unmatchable_tokens`, this tokenizer encodes it as ordinary text.
        """
        return make_tokens_unmatchable(json.loads(self.json), self._unmatchable_tokens)

    @functools.cached_property
    def _document_tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(self._document_tokenizer_json()))

    @functools.cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self._document_tokenizer)

    @property
    def _added_tokens_in_documents(self) -> dict[int, tokenizers.AddedToken]:
        """The added tokens that documents may get: all but `_unmatchable_tokens`."""
        added, hidden = self._tokenizer.get_added_tokens_decoder(), self._unmatchable_tokens
        return {i: token for i, token in added.items() if token.content not in hidden}

    @functools.cached_property
    def _added_token_splitter(self) -> AddedTokenSplitter:
        return AddedTokenSplitter(self._added_tokens_in_documents, self._tokenizer.normalizer)

    @functools.cached_property
    def _tiktoken_table(self) -> fast_bpe.TiktokenTable | None:
        """The arguments of tiktoken.Encoding; None if the tokenizers library encodes documents."""
        return None if fast_bpe.tiktoken_version() is None else self._tiktoken_table_if_installed()

    def _tiktoken_table_if_installed(self) -> fast_bpe.TiktokenTable | None:
        """Returns the value that `_tiktoken_table` would have if tiktoken were installed."""
        added = self._added_tokens_in_documents.values()
        if not self._may_use_tiktoken or not all(map(AddedTokenSplitter.supports_token, added)):
            return None
        bytes_of = {character: byte for byte, character in enumerate(_byte_characters())}
        return fast_bpe.tiktoken_table(
            self._document_tokenizer_json(), bytes_of, [token.content for token in added]
        )

    @property
    def misses_tiktoken(self) -> bool:
        return (
            fast_bpe.tiktoken_version() is None and self._tiktoken_table_if_installed() is not None
        )

    @functools.cached_property
    def _tiktoken_encoding(self) -> Any:
        """The tiktoken.Encoding for documents; None if the tokenizers library encodes documents."""
        return self._tiktoken_table and self._tiktoken_table.encoding()

    @property
    def library_versions(self) -> Mapping[str, str]:
        if self._tiktoken_table is None:
            return {"tokenizers": tokenizers.__version__}
        return {"tiktoken": fast_bpe.tiktoken_version()}

    @property
    def slower_tokenizer(self) -> "HuggingFaceTokenizer | None":
        if self._tiktoken_table is None:
            return None
        slow = copy.copy(self)
        slow._may_use_tiktoken = False
        slow.__dict__.pop("_tiktoken_table")
        return slow

    def __getstate__(self) -> dict[str, Any]:  # a copy makes its own Encoding
        return {key: value for key, value in self.__dict__.items() if key != "_tiktoken_encoding"}

    @functools.cached_property
    def token_byte_counts(self) -> np.ndarray:
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        hidden = self._unmatchable_tokens
        added = {t.content for t in self._tokenizer.get_added_tokens_decoder().values()}
        content = json.loads(self.json)
        # Without a decoder, the pre-tokenizer says what the characters of a token are.
        kinds = _step_types(content, "decoder") or _step_types(content, "pre_tokenizer")
        # A decoder may treat the first token of a text in another way than those after it.
        before = next((i for token, i in ids.items() if token not in added), 0)
        decoded = self._tokenizer.decode_batch(
            [[before], *([before, i] for i in ids.values())], skip_special_tokens=False
        )
        start = len(decoded[0].encode())
        characters = set(_byte_characters())
        sizes = np.zeros(self.vocab_size, np.int32)
        for (token, i), text in zip(ids.items(), decoded[1:], strict=True):
            if token in hidden:
                continue
            if "ByteLevel" in kinds:
                is_bytes = token not in added and characters.issuperset(token)
                sizes[i] = len(token) if is_bytes else len(token.encode())
            elif "ByteFallback" in kinds and _BYTE_TOKEN.fullmatch(token):
                sizes[i] = 1
            else:
                sizes[i] = max(len(text.encode()) - start, 0)
        return sizes

    def find_special_token(self, text: str) -> str | None:
        """Returns a special token, not in `parse_tokens`, that `text` spells out, so that `encode`
        would give it its id; None if there is none. A text may spell out a token in the normalized
        text alone, such as "<|IM_END|>" if the normalizer makes letters small.
        """
        found = next((token for token in self._unmatchable_tokens if token in text), None)
        if found or not self._normalized_special_tokens:
            return found
        normalized = self._tokenizer.normalizer.normalize_str(text)
        return next(
            (t for t, n in self._normalized_special_tokens.items() if n in normalized), None
        )

    @functools.cached_property
    def _normalized_special_tokens(self) -> dict[str, str]:
        """Special token that is looked for in the normalized text → the text that it has there,
        without `parse_tokens`.
        """
        normalizer = self._tokenizer.normalizer
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        hidden = [
            t.content for t in tokens if t.normalized and t.content in self._unmatchable_tokens
        ]
        return {text: normalizer.normalize_str(text) for text in hidden} if normalizer else {}

    def encode(self, text: str) -> np.ndarray:
        with panic_as_user_error():
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [list(self._cutter.cut(text_pieces(text) if text else [""])) for text in texts]
        encoded = self._encode_parts(part for parts_of_text in parts for part in parts_of_text)
        end = np.array([self.eos_id], np.int32)
        return [
            np.concatenate([*(next(encoded) for _ in parts_of_text), end])
            for parts_of_text in parts
        ]

    def encode_long_text(self, text: bytes) -> Iterator[np.ndarray]:
        yield from self._encode_parts(self._cutter.cut(text_pieces(text)))
        yield np.array([self.eos_id], np.int32)

    def _encode_parts(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the ids of each text.

        Raises:
          fast_bpe.DifferentIds: tiktoken and the tokenizers library give a sample of the texts
            different ids.
        """
        if self._tiktoken_encoding is None:
            return self._encode_by_tokenizers(texts)
        return self._encode_by_tiktoken(self._pass_on_and_check_samples(texts))

    def _pass_on_and_check_samples(self, texts: Iterable[str]) -> Iterator[str]:
        for i, text in enumerate(texts):
            if i % _COMPARED_EVERY == 0:
                self._check_same_ids(text[:_COMPARED_CHARACTERS])
            yield text

    def _check_same_ids(self, text: str) -> None:
        """Compares the ids that tiktoken and the tokenizers library give to a text.

        Raises:
          fast_bpe.DifferentIds: the ids differ.
        """
        (fast,), (slow,) = self._encode_by_tiktoken([text]), self._encode_by_tokenizers([text])
        if not np.array_equal(fast, slow):
            raise fast_bpe.DifferentIds

    def _encode_by_tiktoken(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in texts:
            if len(text) > 2 * cuts.LONGEST:  # tiktoken fails at long runs of spaces
                yield from self._encode_by_tokenizers([text])
                continue
            ids: list[int] = []
            for part in self._added_token_splitter.split(text):
                ids += (
                    [part]
                    if isinstance(part, int)
                    else self._tiktoken_encoding.encode_ordinary(part)
                )
            yield np.fromiter(ids, np.int32, len(ids))  # faster than np.array

    def _encode_by_tokenizers(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for batch in batches_by_size(texts, len, _ENCODED_AT_ONCE):
            with panic_as_user_error():
                encodings = self._document_tokenizer.encode_batch_fast(
                    batch, add_special_tokens=False
                )
            for encoding in encodings:
                yield np.array(encoding.ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, directory: epath.PathLike) -> None:
        _write_tokenizer_files(
            directory, self._tokenizer.to_str(pretty=True), self._eos_token, self._template
        )


def _byte_level_tokenizer() -> tokenizers.Tokenizer:
    model = tokenizers.models.BPE(
        vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


@functools.cache
def _saved_byte_fingerprint() -> str:
    return _tokenizer_fingerprint(_byte_level_tokenizer().to_str(), ByteTokenizer.eos_id)


def _tokenizer_fingerprint(tokenizer_json: str, eos_id: int) -> str:
    return digests.sha256(f"{tokenizer_json}\0{eos_id}")


def _write_tokenizer_files(
    directory: epath.PathLike,
    tokenizer_json: str,
    eos_token: str,
    template: TemplateFile | None = None,
) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    directory = epath.Path(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template.text)
        if template.special_tokens["bos_token"]:
            config["bos_token"] = template.special_tokens["bos_token"]
    (directory / "tokenizer.json").write_text(tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _check_ids_are_distinct(path: epath.Path, ids: Mapping[str, int]) -> None:
    """Raises UserError if two tokens of a vocabulary, token → id, have the same id."""
    token_of: dict[int, str] = {}
    for token, i in ids.items():
        other = token_of.setdefault(i, token)
        require(
            other == token,
            f"tokenizer {path}: {other!r} and {token!r} both have id {i}, so that a model could "
            "not tell them apart: expected one token of each id: copy or download the file again",
        )


def _check_deterministic(path: epath.Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises UserError if the tokenizers library may give the same text different ids at different
    times.
    """
    dropout = getattr(tokenizer.model, "dropout", None)
    require(
        not dropout,
        f"tokenizer {path}: its BPE drops merges at random (dropout = {dropout}), so that a text "
        'has many encodings: set "dropout" to null in it',
    )
    seen: dict[str, str] = {}
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.normalized and tokenizer.normalizer:
            text = tokenizer.normalizer.normalize_str(token.content)
            other = seen.setdefault(text, token.content)
            require(
                other == token.content,
                f"tokenizer {path}: its normalizer makes the added tokens {other!r} and "
                f"{token.content!r} the same text, so that it could be either: set "
                '"normalized" to false in one of them',
            )


def _find_eos_token(path: epath.Path, tokenizer: tokenizers.Tokenizer) -> str:
    config_path = path.parent / "tokenizer_config.json"
    if config_path.exists():
        with as_user_error(f"{config_path}: cannot be read", OSError, ValueError):
            token = json_files.read(config_path).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            # `token_to_id` would fail at a lone surrogate
            if not isinstance(token, str) or token not in tokenizer.get_vocab():
                raise UserError(
                    f"{config_path}: eos_token {short_repr(token)} is not in the vocabulary "
                    f"of {path}: expected one of its tokens"
                )
            return token
    for token in _COMMON_EOS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise UserError(
        f"tokenizer {path}: no end-of-document token found (tried {', '.join(_COMMON_EOS)}); name "
        "it as "
        f'"eos_token" in {config_path}'
    )


def _step_types(tokenizer: Mapping[str, Any], part: str) -> list[str]:
    """Returns the type of each step in one part of a tokenizer.json, such as the decoder."""
    step = tokenizer.get(part) or {}
    inner = [value for value in step.values() if isinstance(value, list)]
    steps = [step, *(one for found in inner for one in found if isinstance(one, dict))]
    return [one["type"] for one in steps if "type" in one]


def _byte_characters() -> list[str]:
    """Returns, for each of the 256 bytes, the character that stands for the byte in byte-level BPE
    vocabularies, as in GPT-2's.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
