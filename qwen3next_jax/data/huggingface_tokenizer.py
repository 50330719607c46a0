"""The tokenizer of a Hugging Face `tokenizer.json`."""

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from qwen3next_jax.common import json_files
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
from qwen3next_jax.data.chat_template import read_template
from qwen3next_jax.data.cuts import Cutter
from qwen3next_jax.data.text import batches_by_size, text_pieces
from qwen3next_jax.data.tokens import (
    END_OF_TEXT,
    DifferentIds,
    byte_characters,
    tokenizer_fingerprint,
    write_tokenizer_files,
)

_COMMON_EOS = (END_OF_TEXT, "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>")
# Of every so many parts of a batch, one is compared: both libraries encode its first so many
# characters.
_COMPARED_EVERY, _COMPARED_CHARACTERS = 256, 1 << 12
_ENCODED_AT_ONCE = 1 << 20  # characters
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # how SentencePiece names a byte
_LARGEST_GAP = 1 << 20  # most unused ids of a vocabulary; a damaged file could demand gigabytes


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
        self.fingerprint = tokenizer_fingerprint(self.json, self.eos_id)
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

    @functools.cached_property
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
        bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
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
        characters = set(byte_characters())
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
        """Returns special token → its normalized text, for the special tokens that the tokenizers
        library looks for in normalized texts. `parse_tokens` are left out, and so are tokens whose
        normalized text is empty.
        """
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return {}
        hidden = self._unmatchable_tokens
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        normalized = {
            token.content: normalizer.normalize_str(token.content)
            for token in tokens
            if token.normalized and token.content in hidden
        }
        return {token: text for token, text in normalized.items() if text}

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
          DifferentIds: tiktoken and the tokenizers library give a sample of the texts
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
          DifferentIds: the ids differ.
        """
        (fast,), (slow,) = self._encode_by_tiktoken([text]), self._encode_by_tokenizers([text])
        if not np.array_equal(fast, slow):
            raise DifferentIds

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
        bos_token = None
        if self._template is not None:
            (epath.Path(directory) / "chat_template.jinja").write_text(self._template.text)
            bos_token = self._template.special_tokens["bos_token"]
        content = self._tokenizer.to_str(pretty=True)
        write_tokenizer_files(directory, content, self._eos_token, bos_token)


def _check_ids_are_distinct(path: epath.Path, ids: Mapping[str, int]) -> None:
    """Raises UserError if two tokens of a vocabulary, token → id, have the same id."""
    token_of: dict[int, str] = {}
    for token, i in ids.items():
        other = token_of.setdefault(i, token)
        if other != token:  # `require` would make a message for each token, which takes seconds
            raise UserError(
                f"tokenizer {path}: {other!r} and {token!r} both have id {i}, so that a model "
                "could not tell them apart: expected one token of each id: copy or download the "
                "file again"
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
