"""Added tokens: tokens outside of a tokenizer's ordinary vocabulary, which the tokenizer cuts out
of a text before it does anything else.

A special token is an added token that marks something, such as the end of a document or whose turn
it is. An added token that is not special stands for text, such as a run of spaces. `tokenizer.json`
lists special and other added tokens. tokenizer_config.json or added_tokens.json, in the same
folder, may name added tokens that tokenizer.json lacks; transformers reads these files, too.
"""

import contextlib
import copy
import re
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

import tokenizers
from etils import epath

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, as_user_error, require, short_repr

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_NAMED += ("mask_token",)
# The first character of the name of a token that no text matches. No document contains it
# (`readers` refuses it).
_UNMATCHABLE_PREFIX = "\0"


def check_ids_of_added_tokens(
    path: epath.Path, content: Mapping[str, Any], tokenizer: tokenizers.Tokenizer
) -> None:
    """Raises UserError if an added token has another id in `tokenizer` than in its tokenizer.json.
    The tokenizers library gives an added token that the vocabulary lacks the next free id, whatever
    id the file names. It leaves out an added token without characters.

    Args:
      path: the tokenizer.json.
      content: its content.
      tokenizer: what the tokenizers library read from it.
    """
    for token in content.get("added_tokens", []):
        text, i = token["content"], token["id"]
        has = tokenizer.token_to_id(text)
        if has not in (None, i):  # None: the library has left the token out
            raise UserError(
                f"tokenizer {path}: the added token {text!r} has id {i} there, but the tokenizers "
                f"library gives it id {has}: write {has} there if the model was trained with it; "
                "else take the file of the model"
            )


def add_tokens_from_config_files(folder: epath.Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Adds to `tokenizer` the tokens in the field `added_tokens_decoder` of tokenizer_config.json;
    without this field, the tokens in added_tokens.json. transformers has the same rule.

    Raises:
      UserError: a file cannot be read, or a token would not get the id that the file names.
    """
    path, named = _read_tokens_from_config_files(folder)
    known = tokenizer.get_added_tokens_decoder()
    new = {i: token for i, token in sorted(named.items()) if repr(known.get(i)) != repr(token)}
    for i, token in new.items():
        has = tokenizer.token_to_id(token.content)
        require(
            has in (None, i) and tokenizer.id_to_token(i) in (None, token.content),
            f"{path}: {token.content!r} has id {i} there, but in tokenizer.json "
            + (
                f"id {has}"
                if has is not None
                else f"this id is that of {tokenizer.id_to_token(i)!r}"
            )
            + ": expected one meaning of each id: take both files from one model",
        )
        tokenizer.add_tokens([token])
        has = tokenizer.token_to_id(token.content)
        require(
            has == i,
            f"{path}: {token.content!r} has id {i} there, but the next free id of tokenizer.json "
            f"is {has}: expected no gap: take both files from one model",
        )


def _read_tokens_from_config_files(
    folder: epath.Path,
) -> tuple[epath.Path, dict[int, tokenizers.AddedToken]]:
    """Returns (the file that names added tokens, id → token)."""
    path = folder / "tokenizer_config.json"
    config = _read_json_object(path)
    decoder = config.get("added_tokens_decoder")
    specials = _special_token_texts(config)
    if decoder is not None:
        where = f"{path}: added_tokens_decoder"
        require(isinstance(decoder, dict), f"{where}: expected an object of id → token")
        found = {}
        for key, token in decoder.items():
            require(
                key.isascii()
                and key.isdigit()
                and len(key) < 10
                and isinstance(token, dict)
                and _is_nonempty_utf8(token.get("content"))
                and all(isinstance(token.get(flag, False), bool) for flag in _FLAGS),
                f"{where}: {short_repr(key)} names {short_repr(token)}: expected an id and a token "
                "with its content and flags",
            )
            content, flags = token["content"], {f: token[f] for f in _FLAGS if f in token}
            if content in specials:
                flags["special"] = True
            found[int(key)] = tokenizers.AddedToken(content, **flags)
        return path, found
    specials |= _special_token_texts(_read_json_object(folder / "special_tokens_map.json"))
    path = folder / "added_tokens.json"
    found = {}
    for content, i in _read_json_object(path).items():
        require(
            type(i) is int and 0 <= i < 10**9 and _is_nonempty_utf8(content),
            f"{path}: {short_repr(content)} names {short_repr(i)}: expected token → id",
        )
        special = content in specials
        found[i] = tokenizers.AddedToken(content, normalized=not special, special=special)
    return path, found


def _is_nonempty_utf8(content: Any) -> bool:
    """Whether `content` is a non-empty string without lone surrogates."""
    return isinstance(content, str) and content.encode(errors="ignore").decode() == content != ""


def _read_json_object(path: epath.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with as_user_error(f"{path}: cannot be read", OSError, ValueError):
        return json_files.read(path)


def _special_token_texts(fields: Mapping[str, Any]) -> set[str]:
    """Returns the special tokens that a tokenizer_config.json or special_tokens_map.json names."""
    extra = [fields.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    lists = [value for value in extra if isinstance(value, list)]
    tokens = [fields.get(name) for name in _NAMED] + [token for one in lists for token in one]
    texts = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return {text for text in texts if isinstance(text, str)}


@contextlib.contextmanager
def panic_as_user_error() -> Iterator[None]:
    """Turns a panic of the tokenizers library into a UserError. The tokenizers library panics at
    some texts if an added token matches only in certain surroundings, such as at word boundaries.
    """
    try:
        yield
    except BaseException as error:  # a PanicException is no Exception, and cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"data.tokenizer: the tokenizers library fails at a text ({error}): expected added "
            "tokens without single_word, lstrip and rstrip"
        ) from None


def make_tokens_unmatchable(tokenizer: Mapping[str, Any], unmatchable: Set[str]) -> dict[str, Any]:
    """Returns a copy of a tokenizer.json in which no text matches the special tokens `unmatchable`:
    a text that spells out such a token is encoded as ordinary text. A text that contains none of
    the tokens `unmatchable` keeps its ids.

    The tokens `unmatchable` keep their ids, and get names that no document contains. The function
    writes the new names into the list of added tokens and into the model's vocabulary.

    Args:
      tokenizer: the content of a tokenizer.json.
      unmatchable: the texts of special tokens.
    """

    def name(token: Any) -> Any:
        return _UNMATCHABLE_PREFIX + token if token in unmatchable else token

    found = copy.deepcopy({k: v for k, v in tokenizer.items() if k not in ("model", "decoder")})
    for token in found["added_tokens"]:
        if token["content"] in unmatchable:
            token |= {"content": name(token["content"]), "normalized": False}
    found["post_processor"] = None  # it may name an added token, and is not needed here
    model = found["model"] = dict(tokenizer["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name(token): i for token, i in model["vocab"].items()}
    else:
        model["vocab"] = [[name(token), score] for token, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = name(model["unk_token"])
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if unmatchable.isdisjoint((left, right, left + right[prefix:]))
        ]
    return found


def is_unmatchable(token: str) -> bool:
    """Whether `token` is a name that `make_tokens_unmatchable` gave to a special token."""
    return token.startswith(_UNMATCHABLE_PREFIX)


class AddedTokenSplitter:
    """Cuts added tokens out of a text, as the tokenizers library does: first the tokens that match
    in the text itself, then the tokens that match in the normalized text. Of several tokens that
    begin at the same character, the longest is taken.

    Args:
      added: id → token.
      normalizer: the tokenizer's normalizer; None: there is none.
    """

    def __init__(
        self,
        added: Mapping[int, tokenizers.AddedToken],
        normalizer: tokenizers.normalizers.Normalizer | None,
    ):
        def normalized(token: str) -> str:
            return normalizer.normalize_str(token) if normalizer else token

        self._normalizer = normalizer
        # NFC does not change ASCII text. Normalizing it anyway would take 20 ns per byte.
        self._keeps_ascii = isinstance(normalizer, tokenizers.normalizers.NFC)
        raw = {t.content: i for i, t in added.items() if not t.normalized}
        later = {normalized(t.content): i for i, t in added.items() if t.normalized}
        self._passes = [(_pattern_of_any(tokens), tokens) for tokens in (raw, later)]

    @staticmethod
    def supports_token(token: tokenizers.AddedToken) -> bool:
        """Whether `split` handles a token: it matches in any surroundings, and takes no spaces
        beside it.
        """
        return not (token.single_word or token.lstrip or token.rstrip)

    def split(self, text: str) -> Iterator[str | int]:
        """Yields the normalized texts between the added tokens in `text`, and the ids of these
        tokens.
        """
        for part in _split_at_matches(text, *self._passes[0]):
            if isinstance(part, int):
                yield part
                continue
            if self._normalizer and not (self._keeps_ascii and part.isascii()):
                part = self._normalizer.normalize_str(part)
            yield from _split_at_matches(part, *self._passes[1])


def _pattern_of_any(tokens: Collection[str]) -> re.Pattern[str] | None:
    if not tokens:
        return None
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True)))})")


def _split_at_matches(
    text: str, pattern: re.Pattern[str] | None, ids: Mapping[str, int]
) -> Iterator[str | int]:
    if pattern is None:
        yield text
        return
    for i, part in enumerate(pattern.split(text)):
        if i % 2:
            yield ids[part]
        elif part:
            yield part
