"""The interface of tokenizers, and the tokenizer of bytes.

`load_tokenizer("bytes")` and `load_tokenizer("path/to/tokenizer.json")` return objects with the
same interface (`Tokenizer`), so preparation, evaluation (bits per byte), generation and export
accept either. The file `huggingface_tokenizer` is imported only if a tokenizer.json is loaded.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import tokenizers
from etils import epath

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config.registry import TOKENIZERS, resolve

END_OF_TEXT = "<|endoftext|>"
_ENCODED_AT_ONCE = 1 << 20  # bytes


class DifferentIds(Exception):
    """tiktoken and the tokenizers library give a text different ids, or tiktoken rejects a
    pattern.
    """


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
        library, for texts to which tiktoken gives other ids (`DifferentIds`); otherwise
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
          DifferentIds: tiktoken gives other ids than the tokenizers library; the caller
            has to use `slower_tokenizer`.
        """

    def encode_long_text(self, text: bytes) -> Iterator[np.ndarray]:
        """Yields the ids that `encode_documents` gives to a text, in pieces: integers [n].

        Args:
          text: the text as UTF-8.

        Raises:
          DifferentIds: for the same reason as `encode_documents`, but maybe after some
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
        token, has more than `vocab_size` ids, has two tokens of one id, or lacks one of
        `parse_tokens`; or the tokenizers library gives an added token another id than its file or
        another file of its folder.
    """
    if spec in ("", "bytes"):
        require(not parse_tokens, "data.parse_tokens: the tokenizer 'bytes' has no such tokens")
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = resolve(TOKENIZERS, "tokenizer.json", "data.tokenizer")(spec, parse_tokens)
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
        write_tokenizer_files(directory, _byte_level_tokenizer().to_str(pretty=True), END_OF_TEXT)


def _byte_level_tokenizer() -> tokenizers.Tokenizer:
    model = tokenizers.models.BPE(
        vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]
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
    return tokenizer_fingerprint(_byte_level_tokenizer().to_str(), ByteTokenizer.eos_id)


def tokenizer_fingerprint(tokenizer_json: str, eos_id: int) -> str:
    """Returns `Tokenizer.fingerprint` for a tokenizer.json and the id of its end token."""
    return digests.sha256(f"{tokenizer_json}\0{eos_id}")


def write_tokenizer_files(
    directory: epath.PathLike, tokenizer_json: str, eos_token: str, bos_token: str | None = None
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` in the Hugging Face format."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
        **({"bos_token": bos_token} if bos_token else {}),
    }
    directory = epath.Path(directory)
    (directory / "tokenizer.json").write_text(tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def byte_characters() -> list[str]:
    """Returns, for each of the 256 bytes, the character that stands for the byte in byte-level BPE
    vocabularies, as in GPT-2's.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
