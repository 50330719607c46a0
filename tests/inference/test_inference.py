"""Cached decoding and drafting give what the forward pass over whole rows gives; bad requests are
refused.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx
from jax.sharding import NamedSharding

from qwen3next_jax.commands import generate as generate_command
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.data import chat_template
from qwen3next_jax.data.chat_template import ChatTemplate
from qwen3next_jax.data.tokens import load_tokenizer
from qwen3next_jax.inference import decode, generate, generate_to_end, plain
from qwen3next_jax.inference.cache import cache_bytes_by_kind, round_up_cache_length
from qwen3next_jax.inference.decode import concatenate_tokens_by_row
from qwen3next_jax.inference.end_tokens import read_end_token_ids
from qwen3next_jax.inference.sampling import Sampling, log_probabilities
from qwen3next_jax.interop.huggingface import save_hf
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.model.layers import Context, ForwardOptions
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.ops.decode_moe import decode_moe
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import storage_spec
from tests.models import UNEVEN, drawn_model
from tests.refusals import refused

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "qwen3_next_tiny"

# With the usual initial weights a random model hardly depends on its context, and a test would not
# notice a wrong cache. So the weights are large and the decay is slow.
CONFIG = dataclasses.replace(UNEVEN, vocab_size=257, mtp_depth=1, max_position_embeddings=512)
# Float32 sums over at most ~100 terms, through 4 layers whose outputs are of order 1.
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


# All tests generate this many tokens, so that they share one cache length and its programs.
NEW = 32


def jit_method(model, method):
    graphdef, params = nnx.split(model)
    function = jax.jit(lambda params, *args: method(nnx.merge(graphdef, params), *args))
    return lambda *args: function(params, *args)


@pytest.fixture(scope="module")
def model():
    return drawn_model(CONFIG)


@pytest.fixture(scope="module")
def forward(model):
    return jit_method(model, lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab_size, n) for n in (1, 19, 2, 24)]


@pytest.fixture(scope="module")
def greedy(model, prompts):
    """The greedy continuations, and [4, 64] the prompts with their continuations, padded."""
    new = generate_to_end(model, prompts, max_new_tokens=NEW)
    return new, np.stack(
        [np.pad(np.concatenate(pair), (0, 64 - len(pair[0]) - NEW)) for pair in zip(prompts, new)]
    )


def test_cached_states_are_those_of_the_whole_sequence(model, forward):
    """Each row starts with a chunk of another size: no tokens, one, some, all of the chunk."""
    whole = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (4, 64))
    expected = np.asarray(forward(whole).logits)
    decode_some = jit_method(model, Qwen3Next.decode)
    logits_of = jit_method(model, Qwen3Next.logits)
    first, step = np.array([[0], [1], [6], [16]]), np.arange(16)
    cache = model.init_cache(4, 64)
    for start, count in (
        (np.zeros((4, 1), int), first),
        (first, np.full((4, 1), 16)),
        (first + 16, np.full((4, 1), 2)),
    ):
        positions = (start + step).astype(np.int32)
        hidden, cache = decode_some(
            np.take_along_axis(whole, positions, axis=1),
            positions,
            cache,
            (step < count).astype(np.int32),
        )
        logits = np.asarray(logits_of(hidden))
        for row in range(4):
            n, at = count[row, 0], start[row, 0]
            np.testing.assert_allclose(logits[row, :n], expected[row, at : at + n], **TOLERANCE)


@pytest.mark.slow
def test_greedy_continuations_of_a_ragged_batch(forward, prompts, greedy):
    """Every new token is the most likely one of the forward pass."""
    new, whole = greedy
    choice = np.argmax(forward(whole).logits, axis=-1)
    for i, prompt in enumerate(prompts):
        assert len(new[i]) == NEW
        np.testing.assert_array_equal(new[i], choice[i, len(prompt) - 1 : len(prompt) + NEW - 1])


@pytest.mark.slow
def test_prefill_in_chunks_is_one_prefill(model, prompts):
    fill = jit_method(model, lambda model, *args: plain.prefill(model, None, *args))

    def cache_after(chunk):
        last_B, known_B = (
            jnp.array([f(prompt) for prompt in prompts], jnp.int32)
            for f in (lambda p: p[-1], lambda p: len(p) - 1)
        )
        rows = plain.init_state(model, 64, last_B, known_B, known_B)
        for begin, tokens_BT in decode.prompt_chunks(prompts, chunk=chunk):
            rows = fill(rows, tokens_BT, begin)
        return rows.cache

    # Slots past a row's end hold padding, which may differ: it is overwritten before it is read.
    known = np.arange(64) < np.array([[len(prompt) - 1] for prompt in prompts])
    for whole, chunked in zip(cache_after(64), cache_after(16)):
        for name in whole:
            mask = known[None, :, :, None, None] if name in ("k", "v") else True
            np.testing.assert_allclose(
                np.where(mask, chunked[name], 0), np.where(mask, whole[name], 0), **TOLERANCE
            )


@pytest.mark.slow
def test_samples_depend_on_seed_row_and_position_only(model, prompts):
    options = dict(max_new_tokens=NEW, temperature=1.0, top_p=0.99)
    first = generate_to_end(model, prompts, seed=1, **options)
    np.testing.assert_array_equal(first, generate_to_end(model, prompts, seed=1, **options))
    np.testing.assert_array_equal(
        first[:2],
        generate_to_end(model, [*prompts[:2], prompts[3], prompts[3]], seed=1, **options)[:2],
    )
    assert not np.array_equal(first, generate_to_end(model, prompts, seed=2, **options))
    twins = generate_to_end(model, [prompts[1]] * 4, seed=1, **options)
    assert not np.array_equal(twins[0], twins[1])


def filtered_distribution(logits, temperature, top_k, top_p, min_p):
    """Computes the sampled distribution [V] as the docstring of `Sampling` describes it."""
    p = np.exp((logits - logits.max()) / np.float32(temperature), dtype=np.float64)
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or None]
    kept = kept[np.cumsum(p[kept] / p[kept].sum()) - p[kept] / p[kept].sum() < top_p]
    kept = kept[p[kept] >= min_p * p.max()]
    q = np.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


def test_filters_keep_the_tokens_that_their_descriptions_say():
    rng = np.random.default_rng(0)
    unfiltered, filtered = (
        jax.jit(lambda *args, f=filters: jnp.exp(log_probabilities(*args, filters=f)))
        for filters in (False, True)
    )
    for _ in range(200):
        numbers = (
            rng.choice([0.5, 1.0, 2.0]),
            int(rng.integers(0, 12)),
            rng.choice([0.3, 0.8, 1.0]),
            rng.choice([0.0, 0.05, 0.5]),
        )
        logits = rng.normal(size=30).astype(np.float32) * 2
        np.testing.assert_allclose(
            filtered(logits, Sampling(*numbers)),
            filtered_distribution(logits, *numbers),
            rtol=1e-5,
            atol=1e-7,
        )

    logits = np.array([-7.0, 90.0, 3.0, 89.9], np.float32)
    likeliest = np.array([0.0, 1.0, 0.0, 0.0])
    # the smallest float32 numbers; then numbers far below float32
    least = {"temperature": 1e-38, "top_p": 1e-45}
    for name in least:
        for number in (least[name], 1e-60, 1e-300):
            numbers = Sampling(1.0)._replace(**{name: number})
            numbers.check()
            numbers = Sampling(*map(np.float32, numbers))
            for probabilities in (unfiltered, filtered)[name == "top_p" :]:
                p = probabilities(logits, numbers)
                np.testing.assert_array_equal(p, likeliest, f"{name} = {number}")
    # All tokens are kept, though rounding makes the sum of probabilities 1 before the last one.
    logits = np.linspace(1, 0, 150_000, dtype=np.float32)
    assert (filtered(logits, Sampling(1.0, min_p=1e-3)) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_samples_follow_the_distribution(drafts):
    """A χ² test compares the frequencies of the first three tokens with the probabilities of the
    forward pass. With a vocabulary of six, some drafts are accepted and some rejected.
    """
    config = dataclasses.replace(
        CONFIG,
        vocab_size=6,
        num_hidden_layers=1,
        full_attention_interval=1,
        layer_types=(),
        num_experts=0,
        intermediate_size=32,
    )
    model, batch, options = (
        drawn_model(config),
        64,
        dict(temperature=0.9, top_k=5, top_p=0.95, min_p=0.02),
    )
    prompt = np.array([1, 4, 2, 5, 3])
    pairs = np.array([(a, b) for a in range(6) for b in range(6)])
    rows = np.concatenate([np.tile(prompt, (36, 1)), pairs], axis=1)
    logits = np.asarray(jit_method(model, lambda model, tokens: model(tokens).logits)(rows))
    p = {
        (i, n): filtered_distribution(logits[i, n], *options.values())
        for i in range(36)
        for n in (4, 5, 6)
    }
    expected = np.array(
        [p[i, 4][a] * p[i, 5][b] * p[i, 6] for i, (a, b) in enumerate(pairs)]
    ).reshape(6, 6, 6)
    observed = np.zeros_like(expected)
    for seed in range(20):
        stream = generate(
            model, [prompt] * batch, max_new_tokens=3, seed=seed, speculative=drafts, **options
        )
        for a, b, c in concatenate_tokens_by_row(stream, batch):
            observed[a, b, c] += 1
        if drafts:
            assert 0.2 < stream.accepted[0] / stream.drafted[0] < 0.95
    assert not np.any(observed[expected == 0])
    expected *= observed.sum()
    common = expected >= 5
    # For n common outcomes, χ² has a mean of about n and a variance of about 2n. The bound is five
    # standard deviations above the mean.
    assert common.sum() >= 20
    assert np.sum(
        (observed - expected)[common] ** 2 / expected[common]
    ) < common.sum() + 5 * np.sqrt(2 * common.sum())


@pytest.mark.slow
def test_rows_stop_one_by_one(model, prompts, greedy):
    free, _ = greedy
    stop = int(free[1][9])
    cut = [row[: np.argmax(row == stop)] if stop in row else row for row in free]
    assert len({len(row) for row in cut}) > 1
    for row, expected in zip(
        generate_to_end(model, prompts, max_new_tokens=NEW, stop_ids=[stop]), cut
    ):
        np.testing.assert_array_equal(row, expected)
    for row, expected in zip(
        generate_to_end(model, prompts, max_new_tokens=NEW, stop_ids=[stop], speculative=3), cut
    ):
        np.testing.assert_array_equal(row, expected)
    at_once = generate_to_end(
        model, [prompts[1]] * 4, max_new_tokens=NEW, stop_ids=[int(free[1][0])]
    )
    assert [list(row) for row in at_once] == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation_is_exact_whatever_the_drafts(drafts, model, prompts, greedy):
    """The test replaces the drafts of every round by drafts of which the first few are right.

    After the round, the new tokens are those of plain decoding. Each new draft is the module's most
    likely token, computed without a cache from the trunk's hidden states for the first draft, and
    from the module's own state of the token before for the others.
    """

    @functools.partial(jit_method, model)
    def best_logit_minus_drafts(model, tokens, position, drafts):
        t, row, hidden = jnp.arange(64), jnp.arange(4), model.features(tokens).hidden
        differences = []
        for d in range(drafts.shape[1]):
            out = model.mtp(
                hidden, model.embed(jnp.roll(tokens, -1, axis=1)), Context(jnp.tile(t, (4, 1)))
            )[0]
            out = out[row, position - 1 + d]
            logits = model.logits(out)
            differences.append(jnp.max(logits, axis=-1) - logits[row, drafts[:, d]])
            hidden = hidden.at[row, position + d].set(out)
        return jnp.stack(differences)

    graphdef, params = nnx.split(model)
    whole = np.pad(greedy[1], ((0, 0), (0, drafts)))
    rng = np.random.default_rng(drafts)
    run = decode.cached_programs(graphdef, drafts=drafts)
    state = run.init_state(
        model,
        64,
        *(
            np.array(x, np.int32)
            for x in ([p[-1] for p in prompts], [len(p) - 1 for p in prompts], [NEW] * 4)
        ),
    )

    def call(name, state, *args):
        return run.compile_for(name, lambda: None, params, state, *args)(params, state, *args)

    for begin, tokens in decode.prompt_chunks(prompts, 1):
        state = call("prefill", state, tokens, np.int32(begin))
    numbers = Sampling(*map(np.float32, Sampling()))._replace(top_k=np.int32(0))
    accepted = np.zeros(drafts, int)
    for _ in range(8):
        position = np.asarray(state.pending_position)
        forced = whole[np.arange(4)[:, None], position[:, None] + np.arange(1, drafts + 1)]
        forced = (
            np.where(np.arange(drafts) < rng.integers(0, drafts + 1, (4, 1)), forced, forced + 1)
            % CONFIG.vocab_size
        )
        state, emitted, _ = call(
            "advance",
            state._replace(drafts=jnp.asarray(forced, jnp.int32)),
            np.int32(1),
            np.zeros(0, np.int32),
            numbers,
            np.uint32(0),
        )
        accepted += emitted.accepted_drafts
        tokens = np.zeros((4, 64), np.int32)
        for i, (before, after) in enumerate(zip(position, np.asarray(state.pending_position))):
            new = emitted.tokens[i, : emitted.token_counts[i]]
            np.testing.assert_array_equal(new, whole[i, before + 1 : before + 1 + len(new)])
            assert emitted.token_counts[i] == after - before
            tokens[i, : after + 1], tokens[i, after + 1 : after + 1 + drafts] = (
                whole[i, : after + 1],
                state.drafts[i],
            )
        # Nobody reads the drafts of a row that has ended.
        shortfall = best_logit_minus_drafts(tokens, state.pending_position, state.drafts)[
            :, state.remaining_tokens > 0
        ]
        np.testing.assert_array_less(shortfall, 1e-3)
    assert np.all(accepted > 0)
    assert accepted[0] < 4 * 8


@pytest.mark.slow
def test_drafting_on_a_mesh_is_drafting_on_one_device(model, prompts, greedy):
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, tensor=2)), jax.devices()[:4])
    graphdef, params = nnx.split(model)
    placed = jax.tree.map(
        lambda p: p.replace(
            jax.device_put(p[...], NamedSharding(mesh, storage_spec(p.declared, p.shape, mesh)))
        ),
        params,
        is_leaf=lambda leaf: hasattr(leaf, "declared"),
    )
    for drafts in (0, 2):
        new = generate_to_end(
            nnx.merge(graphdef, placed), prompts, max_new_tokens=NEW, speculative=drafts, mesh=mesh
        )
        jax.tree.map(np.testing.assert_array_equal, new, list(greedy[0]))


@pytest.mark.slow
def test_states_after_each_token(model):
    """A mixer's own `call_returning_all_states` gives what the default gives, which goes token by
    token.
    """
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(model.layers[0].mixer)
    mixer = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], params))
    x = jnp.asarray(rng.normal(size=(2, 3, CONFIG.hidden_size)), jnp.float32)
    cache = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        mixer.init_cache(CONFIG, 2, 64),
    )
    context = Context(
        jnp.tile(jnp.arange(3), (2, 1)),
        logical_time_axis=None,
        options=ForwardOptions(return_all_states=True),
    )
    at_once, one_by_one = (
        jax.jit(lambda x, cache, f=f: f(mixer, x, context, cache)[::2])(x, cache)
        for f in (type(mixer).call_returning_all_states, Mixer.call_returning_all_states)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), at_once, one_by_one)


@pytest.mark.parametrize(("tokens", "skewed"), [(1, False), (3, False), (20, False), (20, True)])
def test_decoding_experts_is_their_weighted_sum(tokens, skewed):
    """The three cases of `decode_moe`: chosen experts one by one, all experts at once, and several
    passes because most tokens chose the same two.
    """
    rng = np.random.default_rng(tokens)
    x, gate_up, down = (
        rng.normal(size=(tokens, 8)),
        rng.normal(size=(16, 8, 2, 4)),
        rng.normal(size=(16, 4, 8)),
    )
    weight, expert = (
        rng.random((tokens, 2)),
        np.stack([rng.permutation(16)[:2] for _ in range(tokens)]),
    )
    expert[: 17 * skewed] = [3, 9]
    hidden = np.einsum("rd,radci->raci", x, gate_up[expert])
    expected = np.einsum(
        "ra,rai,raid->rd",
        weight,
        hidden[:, :, 0] / (1 + np.exp(-hidden[:, :, 0])) * hidden[:, :, 1],
        down[expert],
    )
    run = jax.jit(
        lambda x: decode_moe(
            x, jnp.float32(weight), expert, jnp.float32(gate_up), jnp.float32(down)
        )
    )
    np.testing.assert_allclose(run(jnp.float32(x)), expected, **TOLERANCE)
    x[-1] = np.inf  # must not change the output of any other token
    np.testing.assert_allclose(run(jnp.float32(x))[:-1], expected[:-1], **TOLERANCE)


@pytest.mark.slow
def test_prompts_of_similar_lengths_share_their_programs(model, prompts):
    compiled = []
    for n in (20, 23, 29, 31):
        new = generate_to_end(
            model, [np.arange(n)] * 4, max_new_tokens=NEW, on_compile=lambda: compiled.append(n)
        )
        assert [len(row) for row in new] == [NEW] * 4
    assert set(compiled) <= {20}


def test_a_chat_compiles_later_prompts_chunks(model, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        decode.DecodePrograms,
        "compile_for",
        lambda _, name, on_compile, params, state, x, *rest: sizes.append(x.shape[-1:]),
    )
    for length, chunks in ((512, {512, 64}), (256, {64})):
        sizes.clear()
        generate(model, [np.arange(5)], max_new_tokens=8, min_cache_length=length)
        assert {size for (size,) in filter(None, sizes)} == chunks


def test_recurrent_cache_is_constant(model):
    short, long = cache_bytes_by_kind(CONFIG, 2, 64), cache_bytes_by_kind(CONFIG, 2, 256)
    assert short["state"] == long["state"] > 0
    assert long["slots"] == 4 * short["slots"] > 0
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(2, 64)))
    assert held == sum(short.values())


def test_cache_lengths_are_few_and_close():
    lengths = {n: round_up_cache_length(n) for n in range(1, 20_000)}
    assert all(n <= length <= max(64, 1.25 * n) for n, length in lengths.items())
    assert len(set(lengths.values())) < 40


@pytest.mark.parametrize(
    ("prompts", "options", "names"),
    [
        ([], {}, ()),
        ([[1], []], {}, ("1",)),
        ([[257]], {}, ("257", "0", "256")),
        ([[1]], dict(max_new_tokens=0), ("max_new_tokens = 0", "1")),
        ([[1]], dict(temperature=-1.0), ("temperature = -1.0",)),
        ([[1]], dict(temperature=float("nan")), ("temperature = nan",)),
        ([[1]], dict(temperature=1e39), ("temperature = 1e+39",)),
        ([[1]], dict(top_k=5), ("top_k = 5", "temperature = 0")),
        ([[1]], dict(temperature=1.0, top_p=0.0), ("top_p = 0.0", "0")),
        ([[1]], dict(temperature=1.0, min_p=1.5), ("min_p = 1.5",)),
        ([[1]], dict(stop_ids=[300]), ("stop_ids", "300")),
        ([[1]], dict(speculative=5), ("speculative = 5", "1", "4")),
        (
            [[1] * 500],
            dict(max_new_tokens=13),
            ("500", "13", "513", "max_position_embeddings = 512", "YaRN"),
        ),
    ],
)
def test_bad_requests(model, prompts, options, names):
    with refused(*names):
        generate(model, prompts, **dict(max_new_tokens=5) | options)


@pytest.fixture
def command(monkeypatch):
    flags.FLAGS.mark_as_parsed()

    def run(**values):
        defaults = {
            flag.name: flag.default
            for flag in flags.FLAGS.flags_by_module_dict()[generate_command.__name__]
        }
        with flagsaver.flagsaver(**defaults | values):
            return generate_command.main()

    monkeypatch.setattr(generate_command.process_setup, "enable_compilation_cache", lambda: None)
    return run


def test_command_prints_the_text_and_nothing_else(command, tmp_path, capsys):
    config = dataclasses.replace(
        CONFIG,
        num_hidden_layers=1,
        full_attention_interval=1,
        layer_types=(),
        num_experts=0,
        intermediate_size=16,
        mtp_depth=0,
    )
    model, tokenizer = drawn_model(config), load_tokenizer("bytes")
    save_hf(model, tmp_path / "model", tokenizer)
    assert (
        command(model=str(tmp_path / "model"), prompt="x", max_new_tokens=20, temperature=0.0) == 0
    )
    new = generate_to_end(
        model, [tokenizer.encode("x")], max_new_tokens=20, stop_ids=[tokenizer.eos_id]
    )[0]
    out, err = capsys.readouterr()
    assert out == "x" + tokenizer.decode(new) + "\n"
    assert re.search(rf"then {len(new) - 1} tokens at [\d,]+ tokens/s", err)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ messages[0].content }}{{ eos_token }}", None),
        (None, ()),
        (
            "{% for m in messages %}",
            ("tokenizer_config.json", "TemplateSyntaxError"),
        ),
        ("{{ messages[3].content }}", ("UndefinedError",)),
        ("{% include '/etc/passwd' %}", ("TypeError",)),
        ("{{ ''.__class__.__mro__ }}", ("SecurityError",)),
        (
            "{{ raise_exception('no system\\nrole') }}",
            (),
        ),
        ("", ("0",)),
        ("{% for i in range(99999) %}{{ 'abc' * 100 }}{% endfor %}", ("1048576",)),
        ("{{ 'a' * 10 ** 9 }}", ("256 MiB",)),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            ("1",),
        ),
        ("a" * (2**20 + 1), ("1048576",)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chat_templates(template, names, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_CPU_SECONDS", 1)
    monkeypatch.setattr(chat_template, "_MAX_BYTES", 1 << 28)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<E>", "chat_template": template})
    )
    messages = [{"role": "user", "content": "hello"}]
    if names is None:
        assert ChatTemplate.of_folder(tmp_path, "").render_prompt(messages) == "hello<E>"
        return
    with refused(*names):
        ChatTemplate.of_folder(tmp_path, "").render_prompt(messages)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_a_regular_file(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with refused(name):
        ChatTemplate.of_folder(tmp_path, "")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with refused(name):
        ChatTemplate.of_folder(tmp_path, "")


def test_all_end_tokens_count(tmp_path):
    assert read_end_token_ids(tmp_path, 8) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_end_token_ids(tmp_path, 8) == {3, 5, 7}
    (tmp_path / "config.json").write_text('{"text_config": [1]}')
    assert read_end_token_ids(tmp_path, 8) == {3, 5}
    (tmp_path / "config.json").write_text(
        '{"eos_token_id": null, "text_config": {"eos_token_id": 6}}'
    )
    assert read_end_token_ids(tmp_path, 8) == {3, 5, 6}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    with refused("config.json", "eos_token_id = [7]"):
        read_end_token_ids(tmp_path, 7)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (dict(model="m", prompt=""), ("--prompt",)),
        (dict(model="m", prompt="x", chat=True), ("--prompt", "--chat")),
        (
            dict(model="m", prompt_file="no/such"),
            ("--prompt_file=no/such",),
        ),
        (dict(model="m", prompt="x", temperature=0.0, top_k=3), ("--top_k=3", "--temperature=0")),
        (
            dict(model="m", prompt="x", temperature=0.0, samples=3),
            ("--samples=3", "--temperature=0"),
        ),
        (dict(model=str(FIXTURE), prompt="x", speculative=9), ("speculative = 9", "1", "4")),
        (dict(model="m", prompt="\udcff"), ("--prompt", "UTF-8", "0")),
        (dict(prompt="def "), ("--model",)),
        (
            dict(model="no/such/folder", prompt="def "),
            ("--model=no/such/folder",),
        ),
        (dict(model=str(FIXTURE), prompt="def "), ("tokenizer.json",)),
    ],
)
def test_bad_input_of_the_command(command, values, names):
    with refused(*names):
        command(**values)
