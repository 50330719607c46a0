"""Recorded texts: texts that a model generated, each with the experts that its tokens used. This
module reads and writes files of recorded texts. The data source "recorded" trains on recorded texts
with the recorded experts (router replay, 2510.11370).

A recorded text is a safetensors file with the arrays
  tokens          [n], integers: the prompt and the new tokens.
  routed_experts  [n - 1, layers, A], integers: the A experts of each token in each decoder layer,
                  in the layout of vLLM and SGLang. The last token never enters the model, so it has
                  no experts; [n, layers, A] is read, too. A token's experts in a layer may all be
                  -1: then the layer's router chooses. The numbers of layers without experts are
                  ignored.
and the metadata, which a file of another program need not have:
  prompt_tokens   the number of tokens of the prompt (not targets); default: 1.
  model           JSON: the settings `_IDENTITY` of the model that generated the text.

Letters: T, the number of tokens of a row; L, of layers; A, of experts per token.
"""

import glob as local_glob
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import UserError, as_user_error, error_message, require, short_repr
from qwen3next_jax.config import DataConfig, ModelConfig
from qwen3next_jax.data import sources
from qwen3next_jax.data.pipeline import Batch, DataSource, Epoch
from qwen3next_jax.data.preparation import Progress
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer

_IDENTITY = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
)


# What safetensors raises for a damaged file, or for a dtype that NumPy does not have.
_READ_ERRORS = (
    AttributeError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    safetensors.SafetensorError,
)


class RecordedText(NamedTuple):
    """A text, and the experts that its tokens used.

    Attributes:
      tokens: int32 [n], the prompt and the new tokens.
      routed_experts: int16 [n, L, A], the experts of each token in each layer; -1: the router
        chooses.
      prompt_length: the number of tokens of the prompt, which are no targets.
      model_settings: the settings `_IDENTITY` of the model that generated the text; {} if unknown.
    """

    tokens: np.ndarray
    routed_experts: np.ndarray
    prompt_length: int
    model_settings: dict[str, Any]


def write_recorded_text(
    folder: pathlib.Path,
    model: ModelConfig,
    tokens: np.ndarray,
    routed_experts: np.ndarray,
    prompt_tokens: int,
) -> pathlib.Path:
    """Writes a text and its experts to a new file in `folder`. The function makes the folder if it
    is missing. The file's name is a digest of its content, so no other file is overwritten.

    Args:
      model: the settings of the model that generated the text.
      tokens: [n], the prompt and the new tokens.
      routed_experts: [n - 1, L, A].
      prompt_tokens: the number of tokens of the prompt.

    Returns:
      The path of the file.

    Raises:
      UserError: the folder cannot be written to.
    """
    identity = {name: getattr(model, name) for name in _IDENTITY}
    content = safetensors.numpy.save(
        {
            "tokens": np.ascontiguousarray(tokens, np.int32),
            "routed_experts": np.ascontiguousarray(routed_experts, np.int16),
        },
        {"prompt_tokens": str(prompt_tokens), "model": json.dumps(identity)},
    )
    path = folder / f"{digests.sha256(content)[:20]}.safetensors"
    part = path.with_suffix(f".{os.getpid()}.part")
    with as_user_error(f"{folder}: cannot be written to", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        fsync(part)
        part.rename(path)
    return path


def read_recorded_text(path: os.PathLike) -> RecordedText:
    """Reads a file with a recorded text.

    Raises:
      UserError: the file cannot be read, or does not hold a recorded text.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            missing = {"tokens", "routed_experts"} - names
            require(
                not missing,
                f"{path}: no array {' and '.join(sorted(missing))}: expected a file of recorded "
                "routing (docs/routing.md)",
            )
            tokens, experts = file.get_tensor("tokens"), file.get_tensor("routed_experts")
        prompt_tokens = int(metadata.get("prompt_tokens", 1))
        model = json_files.parse(metadata.get("model", "{}"))
    except _READ_ERRORS as error:
        raise UserError(
            f"{path}: cannot be read ({error_message(error)}): expected a safetensors file of "
            "recorded routing (docs/routing.md)"
        ) from error
    kinds = tokens.dtype.kind, experts.dtype.kind
    require(
        set(kinds) <= set("iu") and tokens.ndim == 1 and experts.ndim == 3 and len(tokens) >= 2,
        f"{path}: tokens of shape {tokens.shape} and {tokens.dtype}, routed_experts of shape "
        f"{experts.shape} and {experts.dtype}: expected integers [n] and [n - 1, layers, experts "
        "per token] with n of 2 or more",
    )
    n = len(tokens)
    require(
        len(experts) in (n - 1, n),
        f"{path}: routed_experts of {len(experts)} tokens for {n} tokens: expected {n - 1} or {n}",
    )
    require(
        experts.size > 0,
        f"{path}: routed_experts of shape {experts.shape}: expected one layer and one expert at "
        "least",
    )
    require(
        experts.min() >= -1 and experts.max() < 2**15,
        f"{path}: routed_experts holds numbers {experts.min()} … {experts.max()}: expected "
        f"-1 … {2**15 - 1}",
    )
    require(
        tokens.min() >= 0 and tokens.max() < 2**31,
        f"{path}: tokens {tokens.min()} … {tokens.max()}: expected 0 … {2**31 - 1}",
    )
    require(
        0 <= prompt_tokens <= n,
        f"{path}: prompt_tokens = {short_repr(prompt_tokens)}: expected 0 … {n}, its tokens",
    )
    padded = np.full((n, *experts.shape[1:]), -1, np.int16)
    padded[: len(experts)] = experts
    return RecordedText(tokens.astype(np.int64), padded, max(prompt_tokens, 1), model)


def check_recorded_text(path: os.PathLike, text: RecordedText, model: ModelConfig) -> None:
    """Raises UserError if the recorded tokens and experts of a text do not fit `model`."""
    for name, value in text.model_settings.items():
        own = getattr(model, name) if name in _IDENTITY else None
        require(
            value == own,
            f"{path}: recorded by a model with {name[:80]} = {short_repr(value)}, while "
            f"model.{name[:80]} = {short_repr(own)}: "
            "expected the routing of the model that is trained",
        )
    layers, chosen = text.routed_experts.shape[1:]
    expected = (model.num_hidden_layers, model.num_experts_per_tok)
    require(
        (layers, chosen) == expected,
        f"{path}: routed_experts of {layers} layers and {chosen} experts per token: expected "
        f"{expected[0]} layers (model.num_hidden_layers) and {expected[1]} experts per token "
        "(model.num_experts_per_tok)",
    )
    kinds = model.mixers_and_sparsity[:layers]  # without the layer of multi-token prediction
    sparse = [layer for layer, (_, experts) in enumerate(kinds) if experts]
    ids_NLA = np.sort(text.routed_experts[:, sparse], axis=-1)
    left_NL = np.all(ids_NLA == -1, axis=-1)
    valid_NL = (ids_NLA[..., 0] >= 0) & (ids_NLA[..., -1] < model.num_experts)
    valid_NL &= np.all(np.diff(ids_NLA, axis=-1) > 0, axis=-1)
    wrong = np.argwhere(~left_NL & ~valid_NL)
    if len(wrong):
        token, layer = wrong[0].tolist()
        raise UserError(
            f"{path}: token {token} uses the experts "
            f"{text.routed_experts[token, sparse[layer]].tolist()} in layer {sparse[layer]}: "
            f"expected different numbers 0 … {model.num_experts - 1}, or -1 for all of them"
        )
    highest = text.tokens.max()
    require(
        0 <= text.tokens.min() and highest < model.vocab_size,
        f"{path}: tokens {text.tokens.min()} … {highest}: expected 0 … {model.vocab_size - 1} "
        "(model.vocab_size)",
    )


class RecordedData(DataSource):
    """The rows of recorded texts, one text in a row. The new tokens are the targets. Every epoch
    shuffles the texts anew. A share of `data.heldout_fraction` of the texts is held out, but at
    least one text. Evaluations ignore the recorded experts: the routers choose.

    Raises:
      UserError: there are fewer than two texts, or a text is longer than a row.
    """

    array_dtypes = DataSource.array_dtypes | {"target_mask": bool}

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int | None = None,
        progress: Progress | None = None,
    ):
        self.tokenizer = self.tokenizer_of(config, vocab_size)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self._seed = config.seed
        self._labels, self._texts, contents = [], [], []
        for label, path in _recorded_files(config):
            text = read_recorded_text(path)
            _check_fits_row(path, text, sequence_length)
            self._labels.append(label)
            self._texts.append(text)
            shapes = [r.routed_experts.shape[1:] for r in (text, self._texts[0])]
            require(
                shapes[0] == shapes[1],
                f"{path}: routed_experts of {shapes[0][0]} layers and {shapes[0][1]} experts per "
                f"token, {shapes[1][0]} and {shapes[1][1]} in {self._labels[0]}: expected texts of "
                "one model",
            )
            contents.append(digests.sha256_file(path))
        count = len(self._texts)
        self.heldout_rows = max(1, round(config.heldout_fraction * count))
        require(
            count > self.heldout_rows,
            f"data.path = {config.path!r}: {count} recorded texts, of which {self.heldout_rows} "
            "held out: expected one more at least",
        )
        order = np.random.default_rng(config.seed).permutation(count)
        self._heldout, self._train = order[: self.heldout_rows], order[self.heldout_rows :]
        identity = [sorted(contents), config.seed, config.heldout_fraction, sequence_length]
        self.fingerprint = digests.sha256_json(identity)[:20]
        tokens = sum(len(self._texts[i].tokens) for i in self._train)
        count = len(self._train)
        self.stream_epochs = {self.fingerprint: Epoch("recorded texts", count, tokens, count)}

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int | None) -> Tokenizer:
        return load_tokenizer(config.tokenizer or "bytes", vocab_size, config.parse_tokens)

    @classmethod
    def settings_read(cls, config: DataConfig) -> tuple[str, ...] | None:
        return ("path", "tokenizer", "parse_tokens", "heldout_fraction")

    @staticmethod
    def check(config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        for _, path in _recorded_files(config):
            _check_fits_row(path, read_recorded_text(path), sequence_length)

    @staticmethod
    def check_model(config: DataConfig, model: ModelConfig) -> None:
        for _, path in _recorded_files(config):
            check_recorded_text(path, read_recorded_text(path), model)

    def row(self, index: int) -> Batch:
        return self._arrays_of_text(self._texts[self._text_index(index)])

    def heldout_row(self, index: int) -> Batch:
        return self._arrays_of_text(self._texts[self._heldout[index]])

    def _heldout_indices(self, rows: int, source: str | None, least: int = 0) -> Sequence[int]:
        return range(min(rows, self.heldout_rows))

    def document_names_of_row(self, index: int) -> list[str]:
        return [self._labels[self._text_index(index)]]

    def describe(self) -> dict[str, Any]:
        tokens = sum(len(text.tokens) for text in self._texts)
        size = sum(int(self.tokenizer.token_byte_counts[r.tokens].sum()) for r in self._texts)
        return {
            "title": f"{len(self._texts):,} recorded texts, {tokens:,} tokens",
            "bits_per_nat": tokens / size / math.log(2) if size else None,
        }

    def _text_index(self, index: int) -> int:
        """Returns the index of the recorded text in training row `index`."""
        epoch, place = divmod(index, len(self._train))
        return self._train[
            np.random.default_rng([self._seed, epoch]).permutation(self._train.size)[place]
        ]

    def _arrays_of_text(self, text: RecordedText) -> Batch:
        n, rest = len(text.tokens), self.sequence_length - len(text.tokens)
        t = np.arange(self.sequence_length)
        return {
            "tokens": np.pad(text.tokens, (0, rest)).astype(np.int32),
            "segment_ids": (t < n).astype(np.int32),
            "target_mask": (t >= text.prompt_length) & (t < n),
            "expert_ids": np.pad(
                text.routed_experts, ((0, rest), (0, 0), (0, 0)), constant_values=-1
            ),
        }

    def _stack_rows(self, rows: Sequence[Batch], count: int) -> Batch:
        shape = (count, self.sequence_length, *self._texts[0].routed_experts.shape[1:])
        experts = np.full(shape, -1, np.int16)
        for b, row in enumerate(rows):
            experts[b] = row["expert_ids"]
        plain = [{name: row[name] for name in self.array_dtypes} for row in rows]
        return super()._stack_rows(plain, count) | {"expert_ids": experts}


def _check_fits_row(path: os.PathLike, text: RecordedText, sequence_length: int) -> None:
    require(
        len(text.tokens) <= sequence_length,
        f"{path}: {len(text.tokens)} tokens: expected at most train.sequence_length = "
        f"{sequence_length}",
    )


def _recorded_files(config: DataConfig) -> list[tuple[str, pathlib.Path]]:
    """Returns (label, path) of each file that `data.path` names. `data.path` holds globs, or
    folders whose .safetensors files are read.
    """
    require(
        bool(config.path and config.sources),
        f"data.path = {config.path!r} with data.source = 'recorded': expected the folder of "
        "qwen3next generate --record_routing, or a glob",
    )
    found = []
    for glob in (source.glob for source in config.sources):
        require(
            not sources.is_remote(glob),
            f"data.path = {glob!r} with data.source = 'recorded': expected a local folder or glob",
        )
        folder = pathlib.Path(glob)
        in_folder = f"{local_glob.escape(str(folder))}/*.safetensors"
        pattern = in_folder if folder.is_dir() else glob
        found += [
            (file.relative_path, pathlib.Path(file.path))
            for file in sources.find_source_of_glob(pattern, "").files
        ]
    return found
