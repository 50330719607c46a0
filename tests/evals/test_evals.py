"""Evaluations measure models whose answers are known, and are refused for models on which they
cannot run.
"""

import contextlib
import dataclasses
import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import drawn_model
from page import example, line

from qwen3next_jax.commands import evaluate
from qwen3next_jax.common.metrics import evaluation_event_fields, pair_with_declarations
from qwen3next_jax.config import (
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from qwen3next_jax.config.registry import EVALUATIONS
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.data.synthetic import TaskTokenizer
from qwen3next_jax.data.tokens import ByteTokenizer
from qwen3next_jax.evals import continuation, evaluation, heldout, perplexity, recall
from qwen3next_jax.evals.scoring import make_score_step, make_scorer
from qwen3next_jax.evals.sinks import measure_sinks
from qwen3next_jax.evals.state import StateTracking
from qwen3next_jax.inference.decode import generate_to_end
from qwen3next_jax.inference.sampling import Sampling
from qwen3next_jax.reporting.page import write_report
from qwen3next_jax.runs.checks import check_without_devices
from qwen3next_jax.sharding.mesh import make_mesh, mesh_unless_single_device
from qwen3next_jax.sweeps.points import Point
from qwen3next_jax.sweeps.results import main_metrics, read_result
from qwen3next_jax.training.state import abstract_model
from tests.in_process import resolved
from tests.models import HYBRID
from tests.refusals import refused

BYTES, IDS = ByteTokenizer(), TaskTokenizer(257)
TEXT = np.frombuffer(
    b"the quick brown fox jumps over the lazy dog and runs away. " * 40, np.uint8
).astype(np.int32)


NANO = Config(
    model=dataclasses.replace(
        HYBRID, num_experts=0, initializer_range=0.3, decay_init="log_uniform"
    ),
    data=DataConfig(source="backcopy"),
    train=TrainConfig(batch_size=4, sequence_length=32),
    eval=EvalConfig(sample_tokens=0),
)


def scorer_that_knows(known):
    """Returns a scorer whose guess is right wherever `known(tokens [B, T])` [B, T-1] is true.

    Its losses are 0.5 for token 1, 1.5 for token 2, and so on.
    """

    def score(tokens, segment_ids=None):
        b, t = tokens.shape
        wrong = np.where(known(tokens), 0, 1)
        return np.broadcast_to(np.arange(t - 1) + 0.5, (b, t - 1)), tokens[:, 1:] + wrong

    return score


def test_task_accuracy_is_the_share_of_right_answers():
    always, never = (
        scorer_that_knows(lambda t: np.ones(t[:, 1:].shape, bool)),
        scorer_that_knows(lambda t: np.zeros(t[:, 1:].shape, bool)),
    )
    for task in ("mqar", "induction", "copy"):
        assert recall.task_accuracy(always, task, 64, 64, rows=10) == 1.0
        assert recall.task_accuracy(never, task, 64, 64, rows=10) == 0.0
    # 16 of the 31 targets of a copy are in the last 16 positions.
    late = scorer_that_knows(lambda t: np.arange(t.shape[1] - 1)[None] >= 47)
    assert recall.task_accuracy(late, "copy", 64, 64, rows=300) == pytest.approx(16 / 31)


def test_texts_end_at_their_stop_strings(monkeypatch):
    said, steps = ["one\nmore and more and", "two; three", "ends", "ends"], []

    def scripted(model, prompts, *, max_new_tokens, **options):
        assert len(prompts) == 4  # the three prompts, and the last one repeated
        for i in range(max_new_tokens):
            steps.append(i)
            yield [np.array([ord(c) for c in text[i : i + 1]], np.int32) for text in said]

    monkeypatch.setattr(continuation, "generate", scripted)
    prompts = [np.array([1]), np.array([2, 2]), np.array([3])]

    def texts(*stops):
        steps.clear()
        return continuation.generate_until(
            None, ByteTokenizer(), prompts, stops, rows=4, max_new_tokens=20
        )

    assert texts(["\n", "n"], [";"], []) == ["o", "two", "ends"]
    assert len(steps) == 5
    assert texts(["\n"], ["e"], []) == ["one", "two; thr", "ends"]
    assert len(steps) == 9
    assert texts([], [], []) == [said[0][:20], "two; three", "ends"]
    assert len(steps) == 20


def options_of_task(**given):
    """The decoder's options, for options that the harness has nothing to settle about."""
    settled = {"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False} | given
    return continuation.parse_generation_options(settled, lambda options, limit: options, 256)


def test_a_tasks_sampling_options_reach_the_decoder():
    got = options_of_task(top_p=0.9, num_beams=1)
    assert got == (7, Sampling(), ["\n"])  # greedy decoding ignores the filters, as elsewhere
    sampled = dict(do_sample=True, temperature=0.8, top_p=0.9, top_k=5)
    assert options_of_task(**sampled).sampling == Sampling(0.8, 5, 0.9)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_beams", 10),
        ("temprature", 1.0),
        ("top_p", 2.0),
        ("top_k", 0.5),
        ("max_gen_toks", 0),
        ("do_sample", "false"),
        ("until", [1]),
    ],
)
def test_a_tasks_wrong_option_is_named(name, value):
    with refused(name):
        options_of_task(**dict(do_sample=True, temperature=0.8) | {name: value})


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_completion_tokens"])
def test_the_harness_names_one_limit_in_many_ways(name):
    models = pytest.importorskip("lm_eval.models.utils")
    options = functools.partial(
        continuation.parse_generation_options,
        normalize=models.normalize_gen_kwargs,
        max_new_tokens=256,
    )
    assert options({name: 3, "temperature": 0.8}) == (3, Sampling(0.8), [])
    with refused("temperature"):
        options({"temperature": "hot"})


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_needle_rows_hide_one_fact_a_depth(kind):
    tokenizer, rng, depths = ByteTokenizer(), np.random.default_rng(0), []
    for depth in (0.0, 0.5, 1.0):
        tokens, count = recall._needle_row(rng, tokenizer, kind, 256, depth, TEXT)
        text, answer = tokenizer.decode(tokens[:-count]), tokenizer.decode(tokens[-count:])
        assert len(tokens) == 256
        assert count == (8 if kind < 3 else 37)
        assert text.count("The secret number of") == 2
        assert f"{text.rpartition(chr(10))[2]}{answer}." in text
        assert text.endswith(" is")
        depths.append(text.index("The secret number of"))
        assert ("river is wide" in text) == (kind == 1)
    assert depths[0] < 5
    assert depths[0] < depths[1] < depths[2]


def test_needle_accuracy_wants_the_whole_answer():
    def all_but_the_last(tokens):
        known = np.ones(tokens[:, 1:].shape, bool)
        known[::2, -1] = False
        return known

    tokenizer = ByteTokenizer()
    assert recall.needle_accuracy(
        scorer_that_knows(all_but_the_last), tokenizer, 2, 256, 10, TEXT
    ) == (
        0.5,
        pytest.approx(1 - 1 / 16),
    )
    with refused("niah", 50):
        recall.needle_accuracy(scorer_that_knows(all_but_the_last), tokenizer, 2, 50, 10, TEXT)
    with refused(10):
        recall.needle_accuracy(
            scorer_that_knows(all_but_the_last), tokenizer, 2, 256, 10, TEXT[:10]
        )


TWO_DOCUMENTS = {
    "tokens": np.zeros((1, 8), np.int32),
    "segment_ids": np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32),
}


def test_loss_by_position_counts_within_documents():
    """Tokens 1 … 7 have the losses 0.5, 1.5, …. Targets are tokens 1-3 of the first document, at
    positions 1-3, and tokens 5 and 6 of the second, at positions 1 and 2.
    """
    values = perplexity.loss_by_position(
        scorer_that_knows(lambda t: t[:, 1:] == 0), [TWO_DOCUMENTS], np.full(1, 2)
    )
    assert values["loss/1-1"] == (0.5 + 4.5) / 2
    assert values["loss/2-3"] == (1.5 + 2.5 + 5.5) / 3
    assert (values["targets/1-1"], values["targets/2-3"]) == (2, 3)
    assert values["loss"] == 14.5 / 5
    assert values["bits_per_byte"] == pytest.approx(14.5 / 10 / np.log(2))


def test_loss_by_position_counts_a_task_s_targets_alone():
    mask = np.arange(8)[None] == 2
    segments = np.ones((1, 8), np.int32)
    task = TWO_DOCUMENTS | {"segment_ids": segments, "target_mask": mask}
    values = perplexity.loss_by_position(
        scorer_that_knows(lambda t: t[:, 1:] == 0), [task], np.zeros(1, np.int32)
    )
    assert values["loss"] == 1.5
    assert values["targets"] == 1


def counts_of_batch(segment_ids):
    """The second result of the step of the evaluation "sinks", for rows of one document."""
    tokens, rows = (segment_ids > 0).sum(), (segment_ids[:, 0] > 0).sum()
    return {"tokens": tokens, "later_tokens": tokens - rows}


def test_sinks_weigh_tokens_not_batches():
    """The second batch has a quarter of the tokens of the first."""

    def step(params, tokens, segment_ids):
        share = np.array([tokens[0, 0] / 10])
        layer = {"activation_max": 4.0, "activation_median": share[0], "first_token_share": share}
        return (layer,), counts_of_batch(segment_ids)

    batches = [
        {"tokens": np.full((4, 3), n), "segment_ids": (np.arange(4) < rows)[:, None] * np.ones(3)}
        for n, rows in ((2, 4), (7, 1))
    ]
    found = measure_sinks(step, None, batches, 1)
    assert (found["first_token_share"], found["activation_ratio"]) == pytest.approx((0.3, 4 / 0.3))


def test_sinks_are_means_over_heads_and_layers():
    # Layer 0 is recurrent; layer 1 is attention with two heads, one of them a sink.
    def step(params, tokens, segment_ids):
        layers = (
            {"activation_max": tokens.max(), "activation_median": 2.0},
            {
                "activation_max": 5.0,
                "activation_median": 0.5,
                "first_token_share": np.array([0.1, tokens[0, 0] / 10]),
            },
            # the MTP module, which must not count
            {
                "activation_max": 99.0,
                "activation_median": 0.5,
                "first_token_share": np.array([1.0, 1.0]),
            },
        )
        return layers, counts_of_batch(segment_ids)

    batches = [{"tokens": np.full((1, 2), n), "segment_ids": np.ones((1, 2))} for n in (4, 8)]
    assert measure_sinks(step, None, batches, 2) == pytest.approx(
        {
            "first_token_share": (0.1 + 0.6) / 2,
            "first_token_heads": 0.5,
            "activation_max": 8,
            "activation_ratio": 10,
            "first_token_share/layer 1": 0.35,
            "activation_max/layer 0": 8,
            "activation_max/layer 1": 5,
        }
    )


@pytest.mark.parametrize(
    "suites, options, tokens, model, names",
    [
        (("mqar", "niah", "heldout"), {}, BYTES, {}, None),
        (("niha",), {}, BYTES, {}, ("eval.suites = 'niha'", "'niah'")),
        (
            ("mqar", "copy"),
            {},
            BYTES,
            {"max_position_embeddings": 1024},
            ("copy", 2048, 1024),
        ),
        (
            ("mqar",),
            {"row_lengths": (1,)},
            BYTES,
            {"max_position_embeddings": 128},
            ("mqar", 256),
        ),
        (
            ("mqar",),
            {},
            IDS,
            {"vocab_size": 32},
            ("mqar", "model.vocab_size = 32", 130),
        ),
        (
            ("copy",),
            {"row_lengths": (3,)},
            BYTES,
            {},
            ("copy", 3, 4),
        ),
        (("niah",), {}, IDS, {}, ("niah",)),
        (
            ("niah",),
            {"row_lengths": (256, 60)},
            BYTES,
            {},
            ("niah", 60),
        ),
        (("heldout",), {"rows": 0}, BYTES, {}, (0,)),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_computed(
    suites, options, tokens, model, names
):
    options = evaluation.EvalOptions(
        **{"row_lengths": (256, 2048), "pair_counts": (4, 64)} | options
    )
    config = ModelConfig(**{"vocab_size": 257, "max_position_embeddings": 2048} | model)
    with refused(*names) if names else contextlib.nullcontext():
        evaluation.check_evaluations(suites, options, config, tokens)


@pytest.mark.parametrize(
    "data, lengths, names",
    [
        ({"source": "mqar"}, (64,), ("state", "data.source", "mqar")),
        ({"source": "state_recall"}, (16,), ("state", "eval.suite_lengths", 16)),
        ({"source": "parity"}, (64,), ("model.mtp_depth",)),
        ({"source": "state_recall"}, (64,), ()),
    ],
)
def test_a_sweep_refuses_data_that_do_not_fit(data, lengths, names):
    config = dataclasses.replace(
        NANO,
        model=dataclasses.replace(NANO.model, mtp_depth=int("model.mtp_depth" in names)),
        data=DataConfig(**data),
        train=TrainConfig(batch_size=4, sequence_length=64),
        eval=EvalConfig(sample_tokens=0, suites=("state",), suite_lengths=lengths),
    )
    with refused(*names) if names else contextlib.nullcontext():
        check_without_devices(config)


def test_eval_refuses_data_that_do_not_fit_before_it_opens_them(tmp_path, monkeypatch):
    class Loaded(nnx.Module):
        config = NANO.model

    loaded = Loaded(), IDS, None, None, None
    monkeypatch.setattr(evaluate, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(evaluate, "tokenizer_of_init_from", lambda path: "bytes")
    monkeypatch.setattr(evaluate, "open_data", None)
    (tmp_path / "config.json").touch()
    config = dataclasses.replace(NANO, data=DataConfig(source="mqar"))
    with refused("state", "data.source", "mqar"):
        options = evaluation.EvalOptions(row_lengths=(64,))
        list(evaluate.run_evaluations(config, tmp_path, ("state",), options))


def test_sources_are_measured_in_one_pass(tmp_path, monkeypatch):
    """Each row counts once: 3 rows make up the total, and the missing rows of each source are in
    the same batch.
    """
    for name, size in (("large", 60), ("small", 6)):
        lines = (json.dumps({"text": f"{name} {i} " * 9}) for i in range(size))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        path=f"large={tmp_path}/large.jsonl,small={tmp_path}/small.jsonl",
        heldout_fraction=0.5,
        prepared_dir=str(tmp_path / "prepared"),
    )
    data = open_data(config, 64, 32)
    context = evaluation.EvalContext(
        NANO.model, None, data.tokenizer, lambda: data, evaluation.EvalOptions(rows=3)
    )
    calls = []

    def step(params, batch, token_bytes):  # the "loss" of a row is the sum of its tokens
        calls.append(batch)
        one = np.asarray(batch["segment_ids"]).max(axis=1) > 0
        nll = np.asarray(batch["tokens"]).sum(axis=1)
        return {"nll": nll, "targets": one, "bytes": one, "correct": one}

    monkeypatch.setattr(heldout, "make_heldout_step", lambda *args: step)
    values = heldout.Heldout(context).run(None)
    assert len(calls) == 1
    rows = [data.heldout_row(i) for i in range(data.heldout_rows)]
    sums = [row["tokens"].sum() for row in rows]
    is_large = [b"large" in bytes(row["tokens"].clip(0, 255).astype(np.uint8)) for row in rows]
    assert 1 <= len(rows) - sum(is_large) < 8 < sum(is_large)
    assert values["targets"] == 3
    assert values["loss"] == np.mean(sums[:3])
    large = [value for value, is_so in zip(sums, is_large, strict=True) if is_so]
    small = [value for value, is_so in zip(sums, is_large, strict=True) if not is_so]
    assert values["loss/large"] == np.mean(large[:8])
    assert values["loss/small"] == np.mean(small)


def test_a_new_evaluation_is_one_file_and_one_line(tmp_path, monkeypatch, capsys):
    """The example of docs/extending.md is checked, run, printed, reported and compared by sweeps
    without any further code. A number that it does not declare is shown under its own name.
    """
    code = example("my_evaluation.py", tmp_path)
    (tmp_path / "my_evaluation.py").write_text(
        code.replace("return values", "return values | {'rows_read': 32}")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EVALUATIONS, *line("EVALUATIONS"))
    config, options = (
        ModelConfig(max_position_embeddings=64),
        evaluation.EvalOptions(row_lengths=(8, 16)),
    )
    with refused("repetition", 256, 64):
        evaluation.check_evaluations(("repetition",), evaluation.EvalOptions(), config, IDS)
    eval_context = evaluation.EvalContext(config, None, IDS, None, options)
    monkeypatch.setattr(
        evaluation.EvalContext,
        "scorer",
        lambda self, params: scorer_that_knows(
            lambda t: np.arange(t.shape[1] - 1) % 2 < t[:, :1] + 1
        ),
    )
    (made,) = evaluation.make_evaluations(("repetition",), eval_context).values()
    values = made.run(None)
    assert values == {"accuracy/8 tokens": 1.0, "accuracy/16 tokens": 1.0, "rows_read": 32}

    evaluate._print_values("repetition", pair_with_declarations(values, made.metrics))
    printed = capsys.readouterr().out
    assert "accuracy 8 tokens" in printed
    assert "100.0%" in printed
    assert "rows read" in printed

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"config": {}}')
    # an event that declares none of its numbers
    old = {"event": "suite", "suite": "gone", "loss/1-1": 2.0, "overall": "nan"}
    events = [
        {"event": "heldout", "loss": 1.0},
        old,
        {"event": "suite", "suite": "repetition", **evaluation_event_fields(values, made.metrics)},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(event | {"step": 5, "time": 1.0}) + "\n" for event in events)
    )
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "repetition: accuracy" in page
    assert "Higher is better" in page
    assert "repetition: rows read" in page
    assert "gone: loss" in page

    point = Point(
        "p",
        {"x": "1"},
        {},
        Config(train=TrainConfig(steps=5), eval=EvalConfig(suites=("repetition",))),
    )
    result = read_result(point, folder)
    assert {name: value.value for name, value in result.final_metrics.items()} == {
        "heldout loss": 1.0,
        "gone loss/1-1": 2.0,
        **{f"repetition {name}": value for name, value in values.items()},
    }
    assert [name for name, figure in main_metrics([result]).items() if figure.better] == [
        "repetition accuracy/8 tokens",
        "repetition accuracy/16 tokens",
    ]


def test_a_source_is_measured_as_if_alone(tmp_path):
    model = dataclasses.replace(NANO.model, vocab_size=257)
    graphdef, params = nnx.split(drawn_model(model))
    for name in ("web", "code"):
        lines = (json.dumps({"text": f"{name} {i} " * (i % 7 + 1)}) for i in range(60))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def measure(path: str) -> dict[str, float]:
        config = DataConfig(
            path=path, heldout_fraction=0.3, prepared_dir=str(tmp_path / "prepared")
        )
        data = open_data(config, 32, 4, 257)
        context = evaluation.EvalContext(model, graphdef, BYTES, lambda: data)
        return evaluation.make_evaluations(("heldout",), context)["heldout"].run(params)

    web, code = f"web={tmp_path}/web.jsonl", f"code={tmp_path}/code.jsonl"
    both = measure(f"{web},{code}")
    alone = {name: measure(path) for name, path in (("web", web), ("code", code))}
    for name, values in alone.items():
        assert both[f"bits_per_byte/{name}"] == pytest.approx(values["bits_per_byte"], rel=1e-6)
    bits = sum(values["bits_per_byte"] * values["bytes"] for values in alone.values())
    assert both["bits_per_byte"] == pytest.approx(bits / both["bytes"], rel=1e-6)
    assert "bits_per_byte/web" not in alone["web"]


@pytest.mark.slow
def test_a_mesh_evaluates_as_one_device():
    data = open_data(NANO.data, 32, 4, 32)
    graphdef, _ = abstract_model(NANO.model)
    found, said = [], []
    for axes in ({"data": 1}, {"data": 2, "context": 2, "tensor": 2}):
        mesh = make_mesh(
            ParallelConfig(mesh=MeshConfig(**axes)), jax.devices()[: math.prod(axes.values())]
        )
        # three rows, which two devices cannot divide evenly
        options = evaluation.EvalOptions(rows=3, pair_counts=(3,))
        eval_context = evaluation.EvalContext(
            NANO.model,
            graphdef,
            data.tokenizer,
            lambda: data,
            options,
            mesh_unless_single_device(mesh),
        )
        params = resolved(NANO, mesh).init_state()["params"]
        evaluations = evaluation.make_evaluations(("heldout", "mqar"), eval_context)
        found.append(
            {
                f"{name} {kind}": value
                for name, one in evaluations.items()
                for kind, value in one.run(params).items()
            }
        )
        said.append(
            generate_to_end(
                nnx.merge(graphdef, params),
                [np.arange(1, n) for n in (6, 20, 2)],
                max_new_tokens=8,
                seed=3,
                temperature=1.0,
                mesh=mesh_unless_single_device(mesh),
            )
        )
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0]["heldout loss"] > 1
    np.testing.assert_array_equal(said[1], said[0])
    assert len(np.unique(said[0])) > 8


def test_scores_are_the_models_log_probabilities():
    graphdef, _ = abstract_model(NANO.model)
    params = resolved(NANO).init_state()["params"]
    # the shape of the test above, so that its compiled program is used again
    tokens = np.random.default_rng(0).integers(0, 32, (3, 64)).astype(np.int32)
    segments = np.repeat([[1, 2]], 32, axis=1).repeat(3, axis=0).astype(np.int32)
    nll, guess = make_scorer(make_score_step(graphdef), params)(tokens, segments)
    logits = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens, segments).logits)(params)[
        :, :-1
    ]
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[
        ..., 0
    ]
    np.testing.assert_allclose(nll, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(guess, jnp.argmax(logits, axis=-1))


def test_state_is_measured_between_lengths():
    """A scorer that knows the parity at the first 8 positions alone, and says odd after them."""
    data = open_data(DataConfig(source="parity"), 8, 4, 4)

    def scorer(tokens):
        parity = np.cumsum(tokens == 2, axis=1) % 2
        return None, np.where(np.arange(tokens.shape[1]) < 8, 1 + parity, 2)[:, :-1]

    context = types.SimpleNamespace(
        open_data=lambda: data,
        options=evaluation.EvalOptions(rows=64, row_lengths=(32, 8)),
        scorer=lambda params: scorer,
    )
    state = StateTracking.__new__(StateTracking)
    state.eval_context = context
    found = state.run({})
    assert found.keys() == {"accuracy/1-8", "accuracy/9-32"}
    assert found["accuracy/1-8"] == 1
    assert found["accuracy/9-32"] == pytest.approx(0.5, abs=4 * 0.5 / (64 * 23) ** 0.5)
