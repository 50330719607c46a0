"""Cached decoding: prompts of unequal length in one batch, greedy or sampled, with drafts or
without, tokens yielded as they come.

`plain` takes one token per pass of the trunk, `speculative` several. Letters: B batch, T time.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.inference import plain
from qwen3next_jax.inference import speculative as drafting
from qwen3next_jax.inference.cache import rounded_length
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.visible_targets import check_prompts
from qwen3next_jax.sharding.rules import ROWS, activation_spec, num_shards

CHUNK = 512  # most prompt tokens (per row) that one prefill call holds in memory
_SMALL_CHUNK = 64  # of a conversation, whose prompts have two sizes of chunk alone
LATE = 0.05  # seconds that one call may take: its first token is seen when it ends
# steps of one call at most where several processes decode: their clocks would choose different
# numbers
_TOGETHER = 8


class Stream:
    """An iterator over pieces: lists with one int32 array for every prompt, its new tokens since
    the piece before, maybe none.

    tokens, passes: tokens given so far, and how often rows went through the trunk for them.
    drafted, accepted: [K], how often a draft of each depth was verified, and accepted together
    with all before it; a row's first round has made-up drafts and does not count.
    """

    def __init__(self, pieces: Callable[["Stream"], Iterator[list[np.ndarray]]], drafts: int):
        self.tokens = self.passes = 0
        self.drafted, self.accepted = np.zeros(drafts, int), np.zeros(drafts, int)
        self._pieces = pieces(self)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        return next(self._pieces)

    def count(self, piece: list[np.ndarray], emitted: plain.Emitted) -> None:
        if self.tokens:
            self.drafted += emitted.passes
            self.accepted += emitted.accepted
        self.tokens += sum(map(len, piece))
        self.passes += int(emitted.passes)


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
    room: int = 0,
    mesh: Mesh | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> Stream:
    """Continues every prompt. What is not compiled yet is compiled before this returns.

    Args:
      prompts: integer arrays of at least one token each, of any lengths.
      max_new_tokens: at most so many tokens are generated per row.
      temperature, top_k, top_p, min_p: see `Sampling`.
      seed: with the index of the row and the position of the token it determines the sample,
      whatever else is in the batch. stop_ids: a row ends before the first of these tokens.
      speculative: tokens drafted per pass of the trunk, up to 4, by the multi-token prediction
      module; 0: none. Greedy tokens stay
        the same, samples keep their distribution.
      room: of a conversation: slots of its cache, at least. Prompts of all lengths that fit
      share their programs. mesh: on which the model's parameters lie, as `Qwen3Next.features`
      takes it; None: one device. On a mesh of several
        processes all of them ask for the same, and get the same.
      on_compile: called before each program that has to be compiled.

    Raises:
      UserError: an empty prompt, a token outside the vocabulary, a number out of range or
      contradicting another, drafts without the
        module, or more tokens than `ModelConfig.context_length`.
    """
    prompts = check_request(
        model.config, prompts, max_new_tokens, temperature, _SMALL_CHUNK if room else CHUNK
    )
    sampling = Sampling(temperature, top_k, top_p, min_p)
    sampling.check()
    stop_ids = np.asarray(stop_ids, np.int64).reshape(-1)
    _check_ids(model.config, stop_ids, "stop_ids")
    if speculative:
        drafting.check(model.config, speculative)
    wanted = len(prompts)
    if mesh is not None:  # as many rows as its axes divide
        prompts = prompts + [prompts[-1]] * (-wanted % num_shards(mesh, *ROWS))
    graphdef, params = nnx.split(model)
    run = programs(graphdef, mesh, sampling.greedy, sampling.filters, speculative)
    length = cache_length(prompts, max_new_tokens, speculative, room)
    state = run.start(
        model,
        length,
        np.array([prompt[-1] for prompt in prompts], np.int32),
        np.array([len(prompt) - 1 for prompt in prompts], np.int32),
        np.full(len(prompts), max_new_tokens, np.int32),
    )
    numbers = Sampling(*map(np.float32, sampling))._replace(top_k=np.int32(top_k))
    arguments, ahead = (stop_ids.astype(np.int32), numbers, np.uint32(seed)), int(speculative > 0)
    chunks = [
        (params, state, tokens_BX, np.int32(begin))
        for begin, tokens_BX in prompt_chunks(prompts, ahead, even=bool(room))
    ]
    prefills = [run.compiled("prefill", on_compile, *chunk) for chunk in chunks]
    # what later prompts take
    for size in (n for n in (CHUNK, _SMALL_CHUNK) if room and n <= length):
        run.compiled(
            "prefill",
            on_compile,
            params,
            state,
            np.zeros((len(prompts), size + ahead), np.int32),
            np.int32(0),
        )
    advance = run.compiled("advance", on_compile, params, state, np.int32(1), *arguments)

    def pieces(stream: Stream) -> Iterator[list[np.ndarray]]:
        rows = state
        for prefill, (_, _, *chunk) in zip(prefills, chunks):
            rows = prefill(params, rows, *chunk)
        size, going = 1, True  # the first token comes at once; later ones in blocks
        while going:
            started = time.perf_counter()
            rows, *seen = advance(params, rows, np.int32(size), *arguments)
            emitted, left_B = jax.device_get(seen)
            going = bool(np.any(left_B[:wanted] > 0))
            piece = [tokens[:count] for tokens, count in zip(emitted.tokens, emitted.count)][
                :wanted
            ]
            stream.count(piece, emitted)
            size = _next_size(size, time.perf_counter() - started, run.most)
            if any(map(len, piece)):
                yield piece

    return Stream(pieces, speculative)


def complete(model: Qwen3Next, prompts: Sequence[np.ndarray], **options) -> list[np.ndarray]:
    """`generate` run to its end: the new tokens of every row, without the stop token."""
    return joined(generate(model, prompts, **options), len(prompts))


def joined(pieces: Iterator[list[np.ndarray]], rows: int) -> list[np.ndarray]:
    return [np.concatenate([np.zeros(0, np.int32), *of_row]) for of_row in zip(*pieces)] or [
        np.zeros(0, np.int32)
    ] * rows


def _next_size(size: int, seconds: float, most: int) -> int:
    if jax.process_count() > 1:
        return min(2 * size, _TOGETHER)
    if seconds > LATE:
        return max(size // 2, 1)
    return min(2 * size, most) if seconds < LATE / 3 else size


class Programs:
    """The compiled functions of one architecture, kept for requests of the same sizes."""

    def __init__(
        self, graphdef: nnx.GraphDef, mesh: Mesh | None, greedy: bool, filters: bool, drafts: int
    ):
        form = drafting if drafts else plain
        self.most = drafting.ROUNDS if drafts else plain.STEPS
        self._start = (
            functools.partial(form.start, drafts=drafts, greedy=greedy) if drafts else form.start
        )
        self._mesh, self._compiled = mesh, {}

        def prefill(params, state, tokens_BX, begin):
            return self._placed(
                form.prefill(nnx.merge(graphdef, params), mesh, state, tokens_BX, begin)
            )

        def advance(params, state, *arguments):
            state, emitted = form.advance(
                nnx.merge(graphdef, params), mesh, greedy, filters, state, *arguments
            )
            seen = emitted, state.left
            if mesh is not None:  # every process reads all of it
                seen = jax.lax.with_sharding_constraint(
                    seen, NamedSharding(mesh, activation_spec())
                )
            return self._placed(state), *seen

        self._functions = {
            "prefill": jax.jit(prefill, donate_argnums=1),
            "advance": jax.jit(advance, donate_argnums=1),
        }

    def start(self, model: Qwen3Next, length: int, *rows_B: np.ndarray):
        """The state before the first token."""

        def make(*rows_B):
            return self._placed(self._start(model, length, *rows_B))

        return make(*map(jnp.asarray, rows_B)) if self._mesh is None else jax.jit(make)(*rows_B)

    def compiled(self, name: str, on_compile: Callable[[], None], *args) -> Callable:
        """The program "prefill" or "advance" for arguments like these."""
        key = (
            name,
            *((x.shape, x.dtype, getattr(x, "sharding", None)) for x in jax.tree.leaves(args)),
        )
        if key not in self._compiled:
            on_compile()
            self._compiled[key] = self._functions[name].lower(*args).compile()
        return self._compiled[key]

    def _placed(self, state):
        """Its rows over the mesh, in every program alike."""
        if self._mesh is None:
            return state
        of_row, of_layers_row = (
            NamedSharding(self._mesh, activation_spec(*names))
            for names in (("batch",), (None, "batch"))
        )
        caches = {
            name: jax.tree.map(lambda _: of_layers_row, getattr(state, name))
            for name in state._fields
            if "cache" in name
        }
        where = jax.tree.map(lambda _: of_row, state)._replace(**caches)
        return jax.lax.with_sharding_constraint(state, where)


@functools.lru_cache(maxsize=8)
def programs(
    graphdef: nnx.GraphDef,
    mesh: Mesh | None = None,
    greedy: bool = True,
    filters: bool = False,
    drafts: int = 0,
) -> Programs:
    """Kept, so that repeated calls find what they compiled."""
    return Programs(graphdef, mesh, greedy, filters, drafts)


def cache_length(
    prompts: Sequence[np.ndarray], max_new_tokens: int, speculative: int = 0, room: int = 0
) -> int:
    """Slots of the cache that `generate` uses: all tokens and a last chunk's padding have one."""
    longest = max(map(len, prompts))
    ends = (start + size for start, size in _chunks(longest - 1, even=bool(room)))
    return rounded_length(max(longest + max_new_tokens + 2 * speculative, room, *ends))


def check_request(
    config, prompts: Sequence, max_new_tokens: int, temperature: float, chunk: int = CHUNK
) -> list[np.ndarray]:
    """The prompts as int32 arrays, looked at before they are made such: 2³² + 5 would wrap to 5.
    `chunk`: the smallest that they come in.

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
        _check_ids(config, prompt, f"prompt {i}")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > config.context_length:
        stretched = (
            ""
            if config.yarn_factor > 1
            else "; YaRN reaches further: model.yarn_factor, rope_scaling in config.json"
        )
        raise UserError(
            f"prompt of {longest} tokens + {max_new_tokens} new ones = "
            f"{longest + max_new_tokens}: expected at most "
            f"max_position_embeddings{' × yarn_factor' * (not stretched)} = "
            f"{config.context_length}{stretched}"
        )
    check_prompts(config, prompts, chunk)
    return [prompt.astype(np.int32) for prompt in prompts]


def _check_ids(config, ids: np.ndarray, name: str) -> None:
    if ids.dtype.kind not in "iu":
        raise UserError(f"{name} is of dtype {ids.dtype}: expected integers, the ids of tokens")
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(outside):
        raise UserError(
            f"{name} holds token {outside[0]}: expected 0 … {config.vocab_size - 1}, the model's "
            "vocabulary"
        )


def _chunks(total: int, chunk: int = CHUNK, even: bool = False) -> Iterator[tuple[int, int]]:
    """(start, size) of the chunks of so many tokens: sizes are powers of two up to `chunk`, or
    of two `even` ones.
    """
    start = 0
    while start < total:
        size = min(chunk, max(16, 1 << (total - start - 1).bit_length()))
        size = _SMALL_CHUNK if even and total - start < chunk else size
        yield start, size
        start += size


def prompt_chunks(
    prompts: list[np.ndarray], ahead: int = 0, chunk: int = CHUNK, even: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts all but the last token of the right-padded prompts into (start, [B, T + ahead]), T as
    `_chunks` says, each with the `ahead` tokens that follow it.
    """
    for start, size in _chunks(max(map(len, prompts)) - 1, chunk, even):
        tokens_BX = np.zeros((len(prompts), size + ahead), np.int32)
        for row, prompt in zip(tokens_BX, prompts):
            part = prompt[start : start + size + ahead]
            row[: len(part)] = part
        yield start, tokens_BX
