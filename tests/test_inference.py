"""Cached decoding and drafting against the plain forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.errors import UserError
from qwen3next_jax.inference import complete, decode, generate, mtp_acceptance, speculative, speculative_generate
from qwen3next_jax.inference.cache import cache_bytes, rounded_length
from qwen3next_jax.model import Qwen3Next

# Wide initial weights and slow decay: with the usual ones a random model hardly depends on its context, and a wrong cache
# would go unnoticed.
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, full_attention_interval=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, max_position_embeddings=512, dtype="float32", initializer_range=0.2,
    decay_init="log_uniform", mtp_depth=3)
# Float32 sums over at most ~100 terms, through 4 layers whose outputs are of order 1.
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def model():
    return Qwen3Next(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def forward(model):
    graphdef, params = nnx.split(model)
    return lambda tokens: jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab_size, n) for n in (1, 21, 2, 40)]


def pad(rows, length):
    return jnp.asarray(np.stack([np.pad(row, (0, length - len(row))) for row in rows]), jnp.int32)


@pytest.mark.parametrize("prefill", [1, 2, 3, 5, 16])
def test_cached_states_are_those_of_the_whole_sequence(model, prefill):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 20)), jnp.int32)
    expected = model.features(tokens).hidden
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20))
    hidden, cache = model.decode(tokens[:, :prefill], positions[:, :prefill], model.init_cache(2, 32))
    step = jax.jit(model.decode)
    parts = [hidden]
    for t in range(prefill, 20):
        hidden, cache = step(tokens[:, t:t + 1], positions[:, t:t + 1], cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, **TOLERANCE)


def test_greedy_continuations_of_a_ragged_batch(model, forward, prompts):
    """Every new token is the forward pass's own choice, whether its row ran in a batch or alone."""
    new = complete(model, prompts, max_new_tokens=20)
    whole = [np.concatenate(pair) for pair in zip(prompts, new)]
    choice = np.asarray(jnp.argmax(forward(pad(whole, 60)).logits, axis=-1))
    for i, (prompt, tokens) in enumerate(zip(prompts, new)):
        np.testing.assert_array_equal(tokens, choice[i, len(prompt) - 1:len(prompt) + 19])
    alone = complete(model, [prompts[1]], max_new_tokens=20)
    np.testing.assert_array_equal(alone[0], new[1])


def test_prefill_in_chunks_is_one_prefill(model, prompts, monkeypatch):
    def cache_after(chunk):
        monkeypatch.setattr(decode, "CHUNK", chunk)
        graphdef, params = nnx.split(model)
        return decode.start_rows(decode.programs(graphdef, True), params, prompts, model.init_cache(len(prompts), 64)).cache

    # Slots past a row's end hold padding, which differs; nobody reads it before it is overwritten.
    known = np.arange(64) < np.array([[len(prompt) - 1] for prompt in prompts])
    for whole, chunked in zip(cache_after(64), cache_after(16)):
        for name in whole:
            mask = known[None, :, :, None, None] if name in ("k", "v") else True
            np.testing.assert_allclose(np.where(mask, chunked[name], 0), np.where(mask, whole[name], 0), **TOLERANCE)


def test_samples_depend_on_seed_row_and_position_only(model, prompts):
    options = dict(max_new_tokens=24, temperature=1.0)
    first = complete(model, prompts, seed=1, **options)
    np.testing.assert_array_equal(first, complete(model, prompts, seed=1, **options))
    np.testing.assert_array_equal(first[:2], complete(model, prompts[:2], seed=1, **options))
    assert not np.array_equal(first, complete(model, prompts, seed=2, **options))
    twins = complete(model, [prompts[1]] * 2, seed=1, **options)
    assert not np.array_equal(*twins)


def test_samples_follow_the_distribution(model, forward, prompts):
    rows, temperature = 2000, 0.7
    tokens = next(generate(model, [prompts[1]] * rows, max_new_tokens=1, temperature=temperature, seed=3))
    p = jax.nn.softmax(forward(jnp.asarray(prompts[1][None], jnp.int32)).logits[0, -1] / temperature)
    observed = np.bincount(tokens, minlength=CONFIG.vocab_size) / rows
    # The χ² statistic has mean V - 1 and variance 2 (V - 1): five standard deviations.
    v = CONFIG.vocab_size
    assert rows * np.sum((observed - p) ** 2 / p) < v - 1 + 5 * np.sqrt(2 * (v - 1))


def test_rows_stop_one_by_one(model, prompts):
    free = complete(model, prompts, max_new_tokens=20)
    stop = int(free[1][9])
    cut = [row[:np.argmax(row == stop)] if stop in row else row for row in free]
    assert len({len(row) for row in cut}) > 1
    for row, expected in zip(complete(model, prompts, max_new_tokens=20, stop_ids=[stop]), cut):
        np.testing.assert_array_equal(row, expected)
    for row, expected in zip(speculative_generate(model, prompts, max_new_tokens=20, stop_ids=[stop]).tokens, cut):
        np.testing.assert_array_equal(row, expected)
    steps = list(generate(model, [prompts[1]], max_new_tokens=20, stop_ids=[stop]))
    assert len(steps) == len(cut[1])


@pytest.mark.parametrize("depth", [1, 3])
def test_speculation_is_exact_whatever_the_drafts(model, forward, prompts, depth):
    """Drafts are replaced by right ones, wrong ones and half right ones. After every round the tokens are those of plain
    decoding and the new drafts those of the trained MTP logits, recomputed from the whole sequence."""
    if depth != CONFIG.mtp_depth:
        model = Qwen3Next(dataclasses.replace(CONFIG, mtp_depth=depth), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    rng = np.random.default_rng(depth)
    greedy = complete(model, prompts, max_new_tokens=40)
    whole = np.asarray(pad([np.concatenate(pair) for pair in zip(prompts, greedy)], 96))
    state = speculative.start(model, prompts, 40)
    live = np.ones(len(prompts), bool)
    accepted_counts = set()
    for _ in range(9):
        tokens, position = np.array(state.tokens), np.array(state.position)
        for i, p in enumerate(position):
            right = rng.integers(0, depth + 1)  # so many leading drafts are right
            tokens[i, p + 1:p + 1 + depth] = whole[i, p + 1:p + 1 + depth]
            tokens[i, p + 1 + right:p + 1 + depth] = (tokens[i, p + 1 + right:p + 1 + depth] + 1) % CONFIG.vocab_size
        state, step = speculative._round_program(graphdef)(params, state._replace(tokens=jnp.asarray(tokens)), live)
        accepted_counts |= set(np.asarray(step.accepted).tolist())
        tokens, position = np.asarray(state.tokens), np.asarray(state.position)
        for i, p in enumerate(position):
            np.testing.assert_array_equal(tokens[i, :p + 1], whole[i, :p + 1])
        known = np.where(np.arange(tokens.shape[1]) <= position[:, None] + depth, tokens, 0)
        mtp_logits = forward(params, jnp.asarray(known)).mtp_logits
        for d in range(depth):
            expected = np.asarray(mtp_logits[d])[np.arange(len(prompts)), position - 1]
            row = position >= 1
            np.testing.assert_allclose(np.asarray(state.draft_logits)[row, d], expected[row], **TOLERANCE)
    assert accepted_counts == set(range(depth + 1))


def test_acceptance_is_the_chained_match(model):
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (3, 24)), jnp.int32)
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (3, 24)), axis=1) * (np.arange(24) < [[24], [20], [9]]), jnp.int32)
    f = model.features(tokens, segments)
    # MTP states that agree with the trunk at random places, as a random model's would not.
    rolled = [jnp.roll(f.hidden, -(1 + d), axis=1) for d in range(3)]
    agree = jnp.asarray(rng.random((3, 3, 24, 1)) < 0.7)
    f = f._replace(mtp_hidden=tuple(jnp.where(a, r, h) for a, r, h in zip(agree, rolled, f.mtp_hidden)))
    accepted, possible = speculative.acceptance_of(model, f, segments)

    trunk = np.argmax(model.logits(f.hidden), -1)
    drafts = [np.argmax(model.logits(h), -1) for h in f.mtp_hidden]
    expected = np.zeros((2, 3), int)
    for row in range(3):
        for t in range(24):
            for d in range(3):
                if t + 2 + d < 24 and segments[row, t] > 0 and segments[row, t + 2 + d] == segments[row, t]:
                    expected[1, d] += 1
                    expected[0, d] += all(drafts[j][row, t] == trunk[row, t + 1 + j] for j in range(d + 1))
    np.testing.assert_array_equal((accepted, possible), expected)
    assert 0 < expected[0, 2] < expected[0, 0] < expected[1, 0]
    np.testing.assert_array_equal(mtp_acceptance(model, tokens, segments)[1], possible)


def test_recurrent_cache_is_constant(model):
    short, long = cache_bytes(CONFIG, 2, 64), cache_bytes(CONFIG, 2, 256)
    assert short["recurrent"] == long["recurrent"] > 0
    assert long["attention"] == 4 * short["attention"] > 0
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(2, 64)))
    assert held == sum(short.values())


def test_cache_lengths_are_few_and_close():
    lengths = {n: rounded_length(n) for n in range(1, 20_000)}
    assert all(n <= length <= max(64, 1.25 * n) for n, length in lengths.items())
    assert len(set(lengths.values())) < 40


@pytest.mark.parametrize(("prompts", "options", "message"), [
    ([], {}, "no prompts"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[64]], {}, "token 64: expected 0 … 63"),
    ([[1]], dict(max_new_tokens=0), "max_new_tokens = 0: expected at least 1"),
    ([[1]], dict(temperature=-1.0), "temperature = -1.0"),
    ([[1]], dict(temperature=float("nan")), "temperature = nan"),
    ([[1] * 500], dict(max_new_tokens=13), "500 tokens + 13 new ones = 513: expected at most max_position_embeddings = 512"),
])
def test_bad_requests(model, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **dict(max_new_tokens=5) | options)
