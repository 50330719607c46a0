"""Cached decoding and drafting against the plain forward pass."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from qwen3next_jax import generate as generate_command
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.data.tokens import load_tokenizer
from qwen3next_jax.errors import UserError
from qwen3next_jax.inference import complete, decode, generate, speculative, speculative_generate
from qwen3next_jax.inference.cache import cache_bytes, rounded_length
from qwen3next_jax.interop.huggingface import save_hf
from qwen3next_jax.model import Qwen3Next

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "qwen3_next_tiny"

# Wide initial weights and slow decay: with the usual ones a random model hardly depends on its context, and a wrong cache
# would go unnoticed.
CONFIG = ModelConfig(
    vocab_size=257, hidden_size=32, num_hidden_layers=4, full_attention_interval=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, max_position_embeddings=512, dtype="float32", initializer_range=0.2,
    decay_init="log_uniform", mtp_depth=3)
# Float32 sums over at most ~100 terms, through 4 layers whose outputs are of order 1.
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


NEW = 32  # tokens generated everywhere, so that all tests share one cache length and its compiled programs


def made(config):
    return nnx.jit(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))()


def jitted(model, method):
    graphdef, params = nnx.split(model)
    function = jax.jit(lambda params, *args: method(nnx.merge(graphdef, params), *args))
    return lambda *args: function(params, *args)


@pytest.fixture(scope="module")
def model():
    return made(CONFIG)


@pytest.fixture(scope="module")
def forward(model):
    return jitted(model, lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab_size, n) for n in (1, 19, 2, 24)]


@pytest.fixture(scope="module")
def greedy(model, prompts):
    """The greedy continuations and [4, 64] whole rows, padded."""
    new = complete(model, prompts, max_new_tokens=NEW)
    return new, np.stack([np.pad(np.concatenate(pair), (0, 64 - len(pair[0]) - NEW)) for pair in zip(prompts, new)])


def test_cached_states_are_those_of_the_whole_sequence(model, forward, greedy):
    """Rows cut at different places into a prefill (of no tokens, one, some, as many as fit) and what follows."""
    _, whole = greedy
    expected = forward(whole).logits
    decode_some = jitted(model, Qwen3Next.decode)
    first, step = np.array([[0], [1], [6], [16]]), np.arange(16)
    cache = model.init_cache(4, 64)
    for start, count in ((np.zeros((4, 1), int), first), (first, np.full((4, 1), 16)), (first + 16, np.full((4, 1), 2))):
        positions = (start + step).astype(np.int32)
        hidden, cache = decode_some(np.take_along_axis(whole, positions, axis=1), positions, cache, (step < count).astype(np.int32))
        logits = np.asarray(model.logits(hidden))
        for row in range(4):
            n, at = count[row, 0], start[row, 0]
            np.testing.assert_allclose(logits[row, :n], expected[row, at:at + n], **TOLERANCE)


def test_greedy_continuations_of_a_ragged_batch(forward, prompts, greedy):
    """Every new token is the forward pass's own choice."""
    new, whole = greedy
    choice = np.argmax(forward(whole).logits, axis=-1)
    for i, prompt in enumerate(prompts):
        assert len(new[i]) == NEW
        np.testing.assert_array_equal(new[i], choice[i, len(prompt) - 1:len(prompt) + NEW - 1])


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
    options = dict(max_new_tokens=NEW, temperature=1.0)
    first = complete(model, prompts, seed=1, **options)
    np.testing.assert_array_equal(first, complete(model, prompts, seed=1, **options))
    np.testing.assert_array_equal(first[:2], complete(model, [*prompts[:2], prompts[3], prompts[3]], seed=1, **options)[:2])
    assert not np.array_equal(first, complete(model, prompts, seed=2, **options))
    twins = complete(model, [prompts[1]] * 4, seed=1, **options)
    assert not np.array_equal(twins[0], twins[1])


def test_samples_follow_the_distribution(model, forward, prompts):
    seeds, temperature = 200, 0.7
    tokens = np.concatenate([next(generate(model, [prompts[1]] * 4, max_new_tokens=NEW, temperature=temperature, seed=seed))
                             for seed in range(seeds)])
    row = np.pad(prompts[1], (0, 64 - len(prompts[1])))
    p = jax.nn.softmax(forward(np.stack([row] * 4)).logits[0, len(prompts[1]) - 1] / temperature)
    expected = len(tokens) * np.asarray(p)
    observed = np.bincount(tokens, minlength=CONFIG.vocab_size)
    common = expected >= 5
    assert common.sum() >= 5
    # χ² over the common tokens: mean about their number n, variance about 2n; five standard deviations.
    assert np.sum((observed - expected)[common] ** 2 / expected[common]) < common.sum() + 5 * np.sqrt(2 * common.sum())


def test_rows_stop_one_by_one(model, prompts, greedy):
    free, _ = greedy
    stop = int(free[1][9])
    cut = [row[:np.argmax(row == stop)] if stop in row else row for row in free]
    assert len({len(row) for row in cut}) > 1
    for row, expected in zip(complete(model, prompts, max_new_tokens=NEW, stop_ids=[stop]), cut):
        np.testing.assert_array_equal(row, expected)
    for row, expected in zip(speculative_generate(model, prompts, max_new_tokens=NEW, stop_ids=[stop]).tokens, cut):
        np.testing.assert_array_equal(row, expected)
    assert len(list(generate(model, [prompts[1]] * 4, max_new_tokens=NEW, stop_ids=[stop]))) == len(cut[1])
    at_once = complete(model, [prompts[1]] * 4, max_new_tokens=NEW, stop_ids=[int(free[1][0])])
    assert [list(row) for row in at_once] == [[]] * 4


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_speculation_is_exact_whatever_the_drafts(depth, forward, prompts, greedy):
    """Drafts are replaced by ones whose leading part is right. After every round the tokens are those of plain decoding and
    the new drafts come from the trained MTP logits, recomputed from the whole sequence."""
    # One module serves every depth, so both models have the weights of `forward`'s.
    config = dataclasses.replace(CONFIG, mtp_depth=depth)
    model = made(config)
    graphdef, params = nnx.split(model)
    whole = np.pad(greedy[1], ((0, 0), (0, depth)))
    rng = np.random.default_rng(depth)
    state = speculative.start(model, prompts, NEW)
    accepted = set()
    for _ in range(8):
        tokens, position = np.array(state.tokens), np.asarray(state.position)
        for i, p in enumerate(position):
            drafts = whole[i, p + 1:p + 1 + depth].copy()
            drafts[rng.integers(0, depth + 1):] += 1
            tokens[i, p + 1:p + 1 + depth] = drafts % config.vocab_size
        state, step = speculative._round_program(graphdef)(params, state._replace(tokens=jnp.asarray(tokens)), np.ones(4, bool))
        accepted |= set(np.asarray(step.accepted).tolist())
        tokens, position = np.asarray(state.tokens), np.asarray(state.position)
        for i, p in enumerate(position):
            np.testing.assert_array_equal(tokens[i, :p + 1], whole[i, :p + 1])
        mtp_logits = forward(tokens).mtp_logits
        for d in range(depth):
            for i in np.flatnonzero(position):
                np.testing.assert_allclose(state.draft_logits[i, d], mtp_logits[d][i, position[i] - 1], **TOLERANCE)
    assert accepted == set(range(depth + 1))


def test_recurrent_cache_is_constant(model):
    short, long = cache_bytes(CONFIG, 2, 64), cache_bytes(CONFIG, 2, 256)
    assert short["state"] == long["state"] > 0
    assert long["slots"] == 4 * short["slots"] > 0
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(2, 64)))
    assert held == sum(short.values())


def test_cache_lengths_are_few_and_close():
    lengths = {n: rounded_length(n) for n in range(1, 20_000)}
    assert all(n <= length <= max(64, 1.25 * n) for n, length in lengths.items())
    assert len(set(lengths.values())) < 40


@pytest.mark.parametrize(("prompts", "options", "message"), [
    ([], {}, "no prompts"),
    ([[1], []], {}, "prompt 1 is empty"),
    ([[257]], {}, "token 257: expected 0 … 256"),
    ([[1]], dict(max_new_tokens=0), "max_new_tokens = 0: expected at least 1"),
    ([[1]], dict(temperature=-1.0), "temperature = -1.0"),
    ([[1]], dict(temperature=float("nan")), "temperature = nan"),
    ([[1] * 500], dict(max_new_tokens=13), "500 tokens + 13 new ones = 513: expected at most max_position_embeddings = 512; YaRN reaches further"),
])
def test_bad_requests(model, prompts, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        generate(model, prompts, **dict(max_new_tokens=5) | options)


@pytest.fixture
def command(monkeypatch):
    flags.FLAGS.mark_as_parsed()

    def run(**values):
        defaults = dict(model=None, prompt=None, max_new_tokens=200, temperature=0.7, seed=0)
        with flagsaver.flagsaver(**defaults | values):
            return generate_command.main()
    monkeypatch.setattr(generate_command.cli, "enable_compilation_cache", lambda: None)
    return run


def test_command_prints_the_text_and_nothing_else(command, tmp_path, capsys):
    config = dataclasses.replace(CONFIG, num_hidden_layers=2, layer_types=(), mtp_depth=0)
    model, tokenizer = made(config), load_tokenizer("bytes")
    save_hf(model, tmp_path / "model", tokenizer)
    assert command(model=str(tmp_path / "model"), prompt="x", max_new_tokens=20, temperature=0.0) == 0
    new = complete(model, [tokenizer.encode("x")], max_new_tokens=20, stop_ids=[tokenizer.eos_id])[0]
    out, err = capsys.readouterr()
    assert out == "x" + tokenizer.decode(new) + "\n"
    assert re.search(r"20 tokens|19 tokens at [\d,]+ tokens/s", err)


@pytest.mark.parametrize(("values", "message"), [
    (dict(model="m", prompt=""), "--prompt is missing or empty"),
    (dict(model="m", prompt="\udcff"), "--prompt is not UTF-8 at character 0"),
    (dict(prompt="def "), "--model is missing"),
    (dict(model="no/such/folder", prompt="def "), "--model=no/such/folder: not the folder of a run, nor a Hugging Face directory"),
    (dict(model=str(FIXTURE), prompt="def "), "no tokenizer.json"),
])
def test_bad_input_of_the_command(command, values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        command(**values)
