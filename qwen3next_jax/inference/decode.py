"""Cached decoding: prompts of unequal length in one batch, greedy or sampled, tokens yielded as they come.

Every row carries one pending token: known, but not yet in the cache. Prefill puts all but the last token of each prompt
into the cache; one decode step puts the pending token in and chooses the next. So a prompt of one token needs no prefill,
and rows of any length enter the same decode program.

Letters: B batch, T time, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.errors import UserError
from qwen3next_jax.inference.cache import rounded_length
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.parallel.rules import ROWS, activation_spec, shards

CHUNK = 512  # most prompt tokens (per row) that one prefill call holds in memory
BLOCK = 8  # most tokens per row that one decode call emits: a call costs as much as a step of a small model
STOPPED = -1


class Rows(NamedTuple):
    """Decoding in progress. Donated to every call that continues it.

    cache: as `Qwen3Next.init_cache`, holding the tokens before `position`.
    token, position: [B] int32, the pending token and its position.
    done: [B] bool, rows that have met a stop token.
    """

    cache: list
    token: jax.Array
    position: jax.Array
    done: jax.Array


class Programs(NamedTuple):
    """The compiled functions of one architecture, see `_prefill` and `_decode`."""

    prefill: Callable
    decode: Callable


@functools.lru_cache(maxsize=8)
def programs(graphdef: nnx.GraphDef, greedy: bool, mesh: Mesh | None = None) -> Programs:
    """Kept per architecture, so that repeated calls find what they compiled."""
    return Programs(jax.jit(functools.partial(_prefill, graphdef, mesh), donate_argnums=1),
                    jax.jit(functools.partial(_decode, graphdef, mesh, greedy), donate_argnums=1))


def generate(model: Qwen3Next, prompts: Sequence[np.ndarray], *, max_new_tokens: int, temperature: float = 0.0,
             seed: int = 0, stop_ids: Sequence[int] = (), mesh: Mesh | None = None) -> Iterator[np.ndarray]:
    """Continues every prompt.

    Args:
      prompts: integer arrays of at least one token each, of any lengths.
      max_new_tokens: at most so many tokens are generated per row.
      temperature: logits are divided by it before sampling; 0 takes the likeliest token.
      seed: with the index of the row and the position of the token it determines the sample, whatever else is in the batch.
      stop_ids: a row ends before the first of these tokens.
      mesh: on which the model's parameters lie, as `Qwen3Next.features` takes it; None: one device. On a mesh of several
        processes all of them ask for the same, and get the same.

    Returns:
      An iterator over [B] int32 arrays, one per generated position: the next token of every row, -1 for rows that have
      ended. It ends when all rows have, or after `max_new_tokens`.

    Raises:
      UserError: an empty prompt, a token outside the vocabulary, a number out of range, or more tokens than
        `ModelConfig.context_length`.
    """
    prompts = check_request(model.config, prompts, max_new_tokens, temperature)
    return _generate(model, prompts, max_new_tokens, temperature, seed, stop_ids, mesh)


def complete(model: Qwen3Next, prompts: Sequence[np.ndarray], **options) -> list[np.ndarray]:
    """`generate` run to its end: the new tokens of every row, without the stop token."""
    steps = np.array(list(generate(model, prompts, **options)), np.int32).reshape(-1, len(prompts))
    return [row[row != STOPPED] for row in steps.T]


def compile_ahead(model: Qwen3Next, prompts: Sequence[np.ndarray], *, max_new_tokens: int, temperature: float = 0.0,
                  stop_ids: Sequence[int] = ()) -> None:
    """Compiles what `generate` will run for these arguments, for callers that measure its speed."""
    graphdef, params = nnx.split(model)
    run = programs(graphdef, greedy=temperature == 0)
    cache = jax.eval_shape(lambda: model.init_cache(len(prompts), cache_length(prompts, max_new_tokens)))
    numbers_B = jax.ShapeDtypeStruct((len(prompts),), jnp.int32)
    for _, tokens_BT in prompt_chunks(prompts):
        run.prefill.lower(params, cache, tokens_BT, 0, numbers_B).compile()
    rows = Rows(cache, numbers_B, numbers_B, jax.ShapeDtypeStruct((len(prompts),), bool))
    run.decode.lower(params, rows, 1, jnp.asarray(np.asarray(stop_ids, np.int32)), temperature, 0).compile()


def cache_length(prompts: Sequence[np.ndarray], max_new_tokens: int) -> int:
    """Slots of the cache that `generate` uses."""
    return rounded_length(max(map(len, prompts)) + max_new_tokens)


def check_request(config, prompts: Sequence, max_new_tokens: int, temperature: float) -> list[np.ndarray]:
    """The prompts as int32 arrays, looked at before they are made such: 2³² + 5 would wrap to 5.

    Raises:
      UserError: see `generate`.
    """
    prompts = [np.asarray(prompt).reshape(-1) for prompt in prompts]
    if not prompts:
        raise UserError("no prompts: expected at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens}: expected at least 1")
    if not temperature >= 0:
        raise UserError(f"temperature = {temperature}: expected 0 (greedy) or more")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty: expected at least one token")
        if prompt.dtype.kind not in "iu":
            raise UserError(f"prompt {i} is of dtype {prompt.dtype}: expected integers, the ids of tokens")
        outside = prompt[(prompt < 0) | (prompt >= config.vocab_size)]
        if len(outside):
            raise UserError(f"prompt {i} holds token {outside[0]}: expected 0 … {config.vocab_size - 1}, the model's vocabulary")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > config.context_length:
        stretched = "" if config.yarn_factor > 1 else "; YaRN reaches further: model.yarn_factor, rope_scaling in config.json"
        raise UserError(f"prompt of {longest} tokens + {max_new_tokens} new ones = {longest + max_new_tokens}: expected at most "
                        f"max_position_embeddings{' × yarn_factor' * (not stretched)} = {config.context_length}{stretched}")
    return [prompt.astype(np.int32) for prompt in prompts]


def _generate(model, prompts, max_new_tokens, temperature, seed, stop_ids, mesh):
    graphdef, params = nnx.split(model)
    run = programs(graphdef, temperature == 0, mesh)
    wanted = len(prompts)
    if mesh is not None:  # as many rows as its axes divide
        prompts = prompts + [prompts[-1]] * (-wanted % shards(mesh, *ROWS))
    rows = start_rows(run, params, prompts, _empty_cache(model, len(prompts), cache_length(prompts, max_new_tokens), mesh), mesh)
    stop_ids = np.asarray(stop_ids, np.int32)
    size = 1  # the first token comes at once; later ones in blocks
    while max_new_tokens:
        size = min(size, max_new_tokens)
        rows, tokens_NB = run.decode(params, rows, size, stop_ids, temperature, seed)
        tokens_NB = np.asarray(tokens_NB)[:size, :wanted]
        for tokens_B in tokens_NB:
            if np.all(tokens_B == STOPPED):
                return
            yield tokens_B
        max_new_tokens -= size
        size = min(2 * size, BLOCK)


def _empty_cache(model: Qwen3Next, batch: int, length: int, mesh: Mesh | None) -> list:
    if mesh is None:
        return model.init_cache(batch, length)
    return jax.jit(lambda: model.init_cache(batch, length), out_shardings=_sharding(mesh, None, "batch"))()


def start_rows(run: Programs, params, prompts: list[np.ndarray], cache: list, mesh: Mesh | None = None) -> Rows:
    """Prefills all but the last token of each prompt into an empty `cache`."""
    known_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    for start, tokens_BT in prompt_chunks(prompts):
        cache = run.prefill(params, cache, tokens_BT, start, known_B)
    last_B = np.array([prompt[-1] for prompt in prompts], np.int32)
    by_row = _sharding(mesh, "batch")
    return Rows(cache, *(jnp.asarray(x_B) if mesh is None else jax.make_array_from_callback(x_B.shape, by_row, x_B.__getitem__)
                         for x_B in (last_B, known_B, np.zeros(len(prompts), bool))))


def _sharding(mesh: Mesh | None, *names: str | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, activation_spec(*names))


def prompt_chunks(prompts: list[np.ndarray], chunk: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts all but the last token of the right-padded prompts into (start, [B, T]), with T a power of two up to `chunk`."""
    chunk = chunk or CHUNK
    total = max(map(len, prompts)) - 1
    start = 0
    while start < total:
        size = min(chunk, max(16, 1 << (total - start - 1).bit_length()))
        tokens_BT = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(tokens_BT, prompts):
            part = prompt[start:start + size]
            row[:len(part)] = part
        yield start, tokens_BT
        start += size


def _prefill(graphdef, mesh, params, cache, tokens_BT, start, known_B):
    """Puts the tokens at positions start … below `known_B` into the cache."""
    model = nnx.merge(graphdef, params)
    positions_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    return model.decode(tokens_BT, positions_BT, cache, (positions_BT < known_B[:, None]).astype(jnp.int32), mesh)[1]


def _decode(graphdef, mesh, greedy: bool, params, rows: Rows, steps, stop_ids, temperature, seed):
    """`steps` ≤ BLOCK decode steps → (rows, [BLOCK, B] new tokens, -1 for rows that have ended and steps not taken)."""
    model = nnx.merge(graphdef, params)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(rows.token)))

    def choose(logits_BV, position_B):
        if greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        keys = jax.vmap(jax.random.fold_in)(row_keys, position_B)
        return jax.vmap(jax.random.categorical)(keys, logits_BV / temperature).astype(jnp.int32)

    def more(carry):
        step, rows, _ = carry
        return (step < steps) & ~jnp.all(rows.done)

    def advance(carry):
        step, rows, tokens_NB = carry
        hidden_B1D, cache = model.decode(rows.token[:, None], rows.position[:, None], rows.cache, mesh=mesh)
        next_B = choose(model.logits(hidden_B1D[:, 0]), rows.position + 1)
        done_B = rows.done | jnp.isin(next_B, stop_ids)
        tokens_NB = tokens_NB.at[step].set(jnp.where(done_B, STOPPED, next_B))
        # A finished row repeats its last step: its slots stay inside the cache and nobody reads them.
        rows = Rows(cache, jnp.where(done_B, rows.token, next_B), rows.position + ~done_B, done_B)
        return step + 1, rows, tokens_NB

    tokens_NB = jnp.full((BLOCK, len(rows.token)), STOPPED, jnp.int32)
    _, rows, tokens_NB = jax.lax.while_loop(more, advance, (0, rows, tokens_NB))
    return rows, tokens_NB if mesh is None else jax.lax.with_sharding_constraint(tokens_NB, _sharding(mesh))
