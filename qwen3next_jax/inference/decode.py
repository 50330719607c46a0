"""Text generation with a cache. The function `generate` continues prompts of different lengths in
one batch, greedily or by sampling, and yields tokens as soon as they are generated.

The module `plain` generates one token per pass of the model without its multi-token prediction
module ("the trunk"). The module `speculative` lets the multi-token prediction module draft several
tokens, which one pass of the trunk verifies.

Letters: B batch, T time, X = T + lookahead.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.inference import plain
from qwen3next_jax.inference import speculative as drafting
from qwen3next_jax.inference.cache import round_up_cache_length
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.adapters import merged_model
from qwen3next_jax.model.visible_targets import check_prompts_hold_prefix
from qwen3next_jax.sharding.rules import ROWS, activation_spec, num_shards

PREFILL_CHUNK = 512  # the most prompt tokens per row that one prefill call processes
_CHAT_CHUNK = 64  # in a chat, the end of a prompt is divided into chunks of this size
# The most seconds that one call of the program "advance" should take. The tokens of a call are
# shown only when it ends.
MAX_CALL_SECONDS = 0.05
# The most steps per call if several processes decode together. All processes must take the same
# number of steps, so they cannot derive this number from the time that a call took.
_MAX_STEPS_OF_PROCESSES = 8


class TokenStream:
    """An iterator over the new tokens of all rows, which also counts tokens and accepted drafts.

    Each item is a list with one int32 array for each prompt. The array holds the tokens that were
    generated for the prompt since the previous item; it may be empty.

    Attributes:
      tokens: number of tokens of all rows that were yielded so far.
      passes: number of forward passes of the trunk so far; a pass with n rows counts n times.
      drafted: [K], for each MTP depth the number of drafts that the trunk verified.
      accepted: [K], for each MTP depth the number of drafts that the trunk accepted. A draft is
        accepted only if all earlier drafts of its round are accepted. `drafted` and `accepted` do
        not count the first round of each row, because the multi-token prediction module did not
        make the drafts of the first round (`speculative.init_state`).
      routed_experts: for each prompt, the experts to which the n tokens of prompt and continuation
        were routed, int16 [n - 1, layers, experts per token]; the last token never enters the
        model. `routed_experts` is empty before the stream has ended, and if the experts are not
        recorded.
    """

    def __init__(self, pieces: Callable[["TokenStream"], Iterator[list[np.ndarray]]], drafts: int):
        self.tokens = self.passes = 0
        self.drafted, self.accepted = np.zeros(drafts, int), np.zeros(drafts, int)
        self.routed_experts: list[np.ndarray] = []
        self._pieces = pieces(self)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        return next(self._pieces)

    def add_to_totals(self, piece: list[np.ndarray], emitted: plain.EmittedTokens) -> None:
        """Adds the tokens, passes and drafts of one call of the compiled function "advance" to the
        attributes.
        """
        if self.tokens:
            self.drafted += emitted.model_passes
            self.accepted += emitted.accepted_drafts
        self.tokens += sum(map(len, piece))
        self.passes += int(emitted.model_passes)


def generate(
    model: Qwen3Next,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    speculative: int = 0,
    min_cache_length: int = 0,
    mesh: Mesh | None = None,
    record_routing: bool = False,
    on_compile: Callable[[], None] = lambda: None,
) -> TokenStream:
    """Generates a continuation of every prompt, as the returned stream is read. All programs are
    compiled before this function returns.

    Args:
      prompts: integer arrays of token ids, each of at least one token, of any lengths.
      max_new_tokens: the most tokens to generate per row.
      temperature, top_k, top_p, min_p: see `Sampling`.
      seed: seed of the random numbers. A sampled token depends only on the seed, the index of its
        row, its position in the row, and the tokens before it in the row.
      stop_ids: a row ends when one of these token ids is generated; the stop token itself is not
        yielded.
      speculative: the number of tokens, at most 4, that the multi-token prediction module drafts
        per pass of the trunk; 0: no drafts. Drafting changes neither the tokens of greedy decoding
        nor the distribution of samples.
      min_cache_length: the least number of cache slots; more than 0 in a chat. All prompts that fit
        into `min_cache_length` slots use the same compiled programs.
      mesh: the mesh on which the model's parameters lie, as in `Qwen3Next.features`; None for a
        single device. If several processes share the mesh, all of them must pass the same
        arguments, and all get the same tokens.
      record_routing: whether to record the experts of every token (`TokenStream.routed_experts`).
      on_compile: called before each compilation of a program.

    Raises:
      UserError: a prompt is empty, a token is outside the vocabulary, a number is out of range or
        contradicts another, the model cannot draft, or prompt and new tokens exceed
        `ModelConfig.context_length`.
    """
    is_chat = min_cache_length > 0
    chunk = _CHAT_CHUNK if is_chat else PREFILL_CHUNK
    prompts = checked_prompts(model.config, prompts, max_new_tokens, temperature, chunk)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    stop_ids = np.asarray(stop_ids, np.int64).reshape(-1)
    _check_options(model.config, sampling, stop_ids, speculative, record_routing)
    num_prompts = len(prompts)
    if mesh is not None:  # the mesh divides the rows evenly
        prompts = prompts + [prompts[-1]] * (-num_prompts % num_shards(mesh, *ROWS))

    model = merged_model(model)
    graphdef, params = nnx.split(model)
    programs = cached_programs(
        graphdef, mesh, sampling.is_greedy, sampling.has_filters, speculative, record_routing
    )
    length = cache_length(prompts, max_new_tokens, speculative, min_cache_length)
    initial_state = programs.init_state(
        model,
        length,
        np.array([prompt[-1] for prompt in prompts], np.int32),
        np.array([len(prompt) - 1 for prompt in prompts], np.int32),
        np.full(len(prompts), max_new_tokens, np.int32),
    )
    sampling_arrays = Sampling(*map(np.float32, sampling))._replace(top_k=np.int32(top_k))
    arguments = stop_ids.astype(np.int32), sampling_arrays, np.uint32(seed)

    def compile_prefill(begin: int, tokens_BX: np.ndarray) -> Callable:
        """Returns a function state → state that writes a chunk of the prompts to the caches."""
        chunk = tokens_BX, np.int32(begin)
        prefill = programs.compile_for("prefill", on_compile, params, initial_state, *chunk)
        return lambda state: prefill(params, state, *chunk)

    lookahead = 1 if speculative else 0
    chunks = prompt_chunks(prompts, lookahead, is_chat=is_chat)
    prefills = [compile_prefill(begin, tokens_BX) for begin, tokens_BX in chunks]
    if is_chat:  # compiles the programs that longer prompts of this chat will need
        for size in (PREFILL_CHUNK, _CHAT_CHUNK):
            if size <= length:
                compile_prefill(0, np.zeros((len(prompts), size + lookahead), np.int32))
    advance = programs.compile_for(
        "advance", on_compile, params, initial_state, np.int32(1), *arguments
    )

    decoding = _CompiledGeneration(
        initial_state,
        prefills,
        lambda state, steps: advance(params, state, np.int32(steps), *arguments),
        num_prompts,
        programs.max_steps,
        record_routing,
    )
    return TokenStream(decoding.generate_into, speculative)


def _check_options(
    config: ModelConfig,
    sampling: Sampling,
    stop_ids: np.ndarray,
    speculative: int,
    record_routing: bool,
) -> None:
    """Raises UserError if an option of `generate` is not valid for the model."""
    sampling.check()
    _check_token_ids(config, stop_ids, "stop_ids")
    if speculative:
        drafting.check_drafts(config, speculative)
    if record_routing:
        _check_can_record_experts(config, speculative)


@dataclasses.dataclass(frozen=True)
class _CompiledGeneration:
    """The compiled functions and the initial state of one call of `generate`.

    Attributes:
      initial_state: the decoding state before any prompt token is processed.
      prefill_calls: functions state → state, which write the chunks of the prompts to the caches.
      advance: function (state, number of steps) → (state, the emitted tokens, the number of tokens
        that each row may still get).
      num_prompts: number of prompts; rows of the batch beyond this number only fill the mesh.
      max_steps: the most steps of one call of `advance`.
      record_routing: as in `generate`.
    """

    initial_state: Any
    prefill_calls: Sequence[Callable]
    advance: Callable
    num_prompts: int
    max_steps: int
    record_routing: bool

    def generate_into(self, stream: "TokenStream") -> Iterator[list[np.ndarray]]:
        """Yields the new tokens of all prompts, several steps at a time. Adds their counts, and at
        the end the recorded experts, to `stream`.
        """
        state, num_prompts = self.initial_state, self.num_prompts
        for prefill in self.prefill_calls:
            state = prefill(state)
        # The first call takes one step, so that the first token appears at once.
        steps, is_active = 1, True
        while is_active:
            started = time.perf_counter()
            state, *results = self.advance(state, steps)
            emitted, remaining_B = jax.device_get(results)
            is_active = bool(np.any(remaining_B[:num_prompts] > 0))
            rows = zip(emitted.tokens[:num_prompts], emitted.token_counts[:num_prompts])
            piece = [tokens[:count] for tokens, count in rows]
            stream.add_to_totals(piece, emitted)
            steps = _steps_of_next_call(steps, time.perf_counter() - started, self.max_steps)
            if any(map(len, piece)):
                yield piece
        if self.record_routing:
            routing, fed_B = jax.device_get((state.recorded_experts, state.pending_position))
            stream.routed_experts = [
                row[:fed] for row, fed in zip(routing[:num_prompts], fed_B[:num_prompts])
            ]


def generate_to_end(model: Qwen3Next, prompts: Sequence[np.ndarray], **options) -> list[np.ndarray]:
    """Calls `generate` and reads its stream to the end. Returns the new tokens of each row, [n]
    int32, without the stop token.
    """
    return concatenate_tokens_by_row(generate(model, prompts, **options), len(prompts))


def concatenate_tokens_by_row(pieces: Iterator[list[np.ndarray]], rows: int) -> list[np.ndarray]:
    """Concatenates the items of a `TokenStream`. Returns the tokens of each row."""
    tokens_of_rows: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in range(rows)]
    for piece in pieces:
        for row, tokens in zip(tokens_of_rows, piece):
            row.append(tokens)
    return [np.concatenate(row) for row in tokens_of_rows]


def _steps_of_next_call(steps: int, seconds: float, max_steps: int) -> int:
    """Returns the number of steps of the next call of "advance", from the number of steps of the
    last call and the seconds that it took.
    """
    if jax.process_count() > 1:
        return min(2 * steps, _MAX_STEPS_OF_PROCESSES)
    if seconds > MAX_CALL_SECONDS:
        return max(steps // 2, 1)
    return min(2 * steps, max_steps) if seconds < MAX_CALL_SECONDS / 3 else steps


class DecodePrograms:
    """The compiled functions for one model structure and one set of decoding options.

    Args:
      graphdef: the model without its parameters.
      mesh: the devices; None: one device.
      greedy: whether every step takes the most likely token.
      filters: whether sampling uses top_k, top_p or min_p.
      drafts: the number of drafts per pass; 0: decoding without drafts.
      record_routing: whether the state records the experts of the tokens; only without drafts.

    Attributes:
      max_steps: the most steps (with drafts: rounds) that one call of "advance" can take.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        mesh: Mesh | None,
        greedy: bool,
        filters: bool,
        drafts: int,
        record_routing: bool,
    ):
        method = drafting if drafts else plain
        self.max_steps = drafting.MAX_ROUNDS if drafts else plain.MAX_STEPS
        self._init_state = method.init_state
        if drafts:
            self._init_state = functools.partial(drafting.init_state, drafts=drafts, greedy=greedy)
        elif record_routing:
            self._init_state = functools.partial(plain.init_state, record_routing=True)
        self._mesh, self._compiled = mesh, {}

        def prefill(params, state, tokens_BX, begin):
            model = nnx.merge(graphdef, params)
            return self._shard_rows(method.prefill(model, mesh, state, tokens_BX, begin))

        def advance(params, state, *arguments):
            model = nnx.merge(graphdef, params)
            state, emitted = method.advance(model, mesh, greedy, filters, state, *arguments)
            results = emitted, state.remaining_tokens
            if mesh is not None:  # every process reads the results of all rows
                replicated = NamedSharding(mesh, activation_spec())
                results = jax.lax.with_sharding_constraint(results, replicated)
            return self._shard_rows(state), *results

        self._functions = {
            "prefill": jax.jit(prefill, donate_argnums=1),
            "advance": jax.jit(advance, donate_argnums=1),
        }

    def init_state(self, model: Qwen3Next, length: int, *rows_B: np.ndarray):
        """Returns the decoding state before the first token, with caches of `length` slots.

        Args:
          model: the model.
          length: the number of slots.
          rows_B: three arrays [B]: the pending tokens (the last of each prompt), their positions,
            and the numbers of tokens to generate.
        """

        def make(*rows_B):
            return self._shard_rows(self._init_state(model, length, *rows_B))

        return make(*map(jnp.asarray, rows_B)) if self._mesh is None else jax.jit(make)(*rows_B)

    def compile_for(self, name: str, on_compile: Callable[[], None], *args) -> Callable:
        """Returns the function `name` ("prefill" or "advance"), compiled for arguments with the
        shapes of `args`. Calls `on_compile` before it compiles the function.
        """
        key = (
            name,
            *((x.shape, x.dtype, getattr(x, "sharding", None)) for x in jax.tree.leaves(args)),
        )
        if key not in self._compiled:
            on_compile()
            self._compiled[key] = self._functions[name].lower(*args).compile()
        return self._compiled[key]

    def _shard_rows(self, state):
        """Shards the rows of the decoding state over the mesh, in the same way in every program."""
        if self._mesh is None:
            return state
        by_row = NamedSharding(self._mesh, activation_spec("batch"))
        by_layer_and_row = NamedSharding(self._mesh, activation_spec(None, "batch"))
        caches = {
            name: jax.tree.map(lambda _: by_layer_and_row, getattr(state, name))
            for name in state._fields
            if "cache" in name
        }
        shardings = jax.tree.map(lambda _: by_row, state)._replace(**caches)
        return jax.lax.with_sharding_constraint(state, shardings)


@functools.lru_cache(maxsize=8)
def cached_programs(
    graphdef: nnx.GraphDef,
    mesh: Mesh | None = None,
    greedy: bool = True,
    filters: bool = False,
    drafts: int = 0,
    record_routing: bool = False,
) -> DecodePrograms:
    """Returns the `DecodePrograms` for these arguments. Calls with the same arguments return the
    same object, so that the functions of the object are compiled once.
    """
    return DecodePrograms(graphdef, mesh, greedy, filters, drafts, record_routing)


def cache_length(
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    speculative: int = 0,
    min_cache_length: int = 0,
) -> int:
    """Returns the number of slots of the cache that `generate` makes for these arguments. The slots
    are enough for all tokens, for the padding of the last prompt chunk, and for drafts.
    """
    longest = max(map(len, prompts))
    bounds = _chunk_starts_and_sizes(longest - 1, is_chat=min_cache_length > 0)
    ends = (start + size for start, size in bounds)
    return round_up_cache_length(
        max(longest + max_new_tokens + 2 * speculative, min_cache_length, *ends)
    )


def checked_prompts(
    config: ModelConfig,
    prompts: Sequence,
    max_new_tokens: int,
    temperature: float,
    chunk: int = PREFILL_CHUNK,
) -> list[np.ndarray]:
    """Checks the prompts and returns them as int32 arrays.

    Token ids are checked before the conversion to int32, which would turn 2³² + 5 into 5.

    Args:
      config: the model's settings.
      prompts: the token ids of each prompt.
      max_new_tokens, temperature: see `generate`.
      chunk: the size, in tokens, of the smallest chunks into which prompts are divided for prefill.

    Raises:
      UserError: see `generate`.
    """
    prompts = [np.asarray(prompt).reshape(-1) for prompt in prompts]
    if not prompts:
        raise UserError("no prompts: expected at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens}: expected at least 1")
    Sampling(temperature).check()
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty: expected at least one token")
        _check_token_ids(config, prompt, f"prompt {i}")
    _check_context_length(config, max(map(len, prompts)), max_new_tokens)
    check_prompts_hold_prefix(config, prompts, chunk)
    return [prompt.astype(np.int32) for prompt in prompts]


def _check_can_record_experts(config: ModelConfig, speculative: int) -> None:
    """Raises UserError if the experts of tokens cannot be recorded: without experts, with drafts,
    or in a run of several processes.
    """
    if not config.has_experts:
        raise UserError("record_routing: the model has no experts: expected a model with experts")
    if speculative:
        raise UserError(
            f"record_routing with speculative = {speculative}: the experts of drafts are not "
            "recorded: expected speculative = 0"
        )
    if jax.process_count() > 1:
        raise UserError(
            f"record_routing with {jax.process_count()} processes: expected a single process"
        )


def _check_context_length(config: ModelConfig, longest: int, max_new_tokens: int) -> None:
    """Raises UserError if the longest prompt and the new tokens together exceed
    `ModelConfig.context_length`. `longest`: the number of tokens of the longest prompt.
    """
    total = longest + max_new_tokens
    if total <= config.context_length:
        return
    if config.yarn_factor > 1:
        limit, advice = "max_position_embeddings × yarn_factor", ""
    else:
        limit = "max_position_embeddings"
        advice = "; YaRN reaches further: model.yarn_factor, rope_scaling in config.json"
    raise UserError(
        f"prompt of {longest} tokens + {max_new_tokens} new ones = {total}: expected at most "
        f"{limit} = {config.context_length}{advice}"
    )


def _check_token_ids(config: ModelConfig, ids: np.ndarray, name: str) -> None:
    """Raises UserError, whose message begins with `name`, unless `ids` are integers in the
    vocabulary.
    """
    if ids.dtype.kind not in "iu":
        raise UserError(f"{name} is of dtype {ids.dtype}: expected integers, the ids of tokens")
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(outside):
        raise UserError(
            f"{name} holds token {outside[0]}: expected 0 … {config.vocab_size - 1}, the model's "
            "vocabulary"
        )


def _chunk_starts_and_sizes(
    total: int, chunk: int = PREFILL_CHUNK, is_chat: bool = False
) -> Iterator[tuple[int, int]]:
    """Yields (start, size) of the chunks into which `total` prompt tokens are divided for prefill.

    All chunks but the last have `chunk` tokens. The size of the last chunk is rounded up to a power
    of two, at least 16 and at most `chunk`. In a chat, the tokens after the last whole chunk are
    divided into chunks of _CHAT_CHUNK tokens instead, so that prefill is compiled for two chunk
    sizes only.
    """
    start = 0
    while start < total:
        remaining = total - start
        if is_chat and remaining < chunk:
            size = _CHAT_CHUNK
        else:
            size = min(chunk, max(16, 1 << (remaining - 1).bit_length()))
        yield start, size
        start += size


def prompt_chunks(
    prompts: list[np.ndarray],
    lookahead: int = 0,
    chunk: int = PREFILL_CHUNK,
    is_chat: bool = False,
) -> Iterator[tuple[int, np.ndarray]]:
    """Divides the prompts, without their last tokens, into chunks for prefill.

    Yields:
      (start, tokens). start is the position of the chunk's first token. tokens [B, T + lookahead]
      holds the T tokens of the chunk and the `lookahead` tokens after the chunk. Prompts are padded
      with zeros at their ends.
    """
    for start, size in _chunk_starts_and_sizes(max(map(len, prompts)) - 1, chunk, is_chat):
        tokens_BX = np.zeros((len(prompts), size + lookahead), np.int32)
        for row, prompt in zip(tokens_BX, prompts):
            part = prompt[start : start + size + lookahead]
            row[: len(part)] = part
        yield start, tokens_BX
