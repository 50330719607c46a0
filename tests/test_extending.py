"""The examples of docs/extending.md, as they stand there: an optimizer and a data source by a line
of the registry (Retention is in test_mixers.py, the evaluation in test_evals.py), and all of them
by import strings alone.
"""

import dataclasses
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import Rngs
from page import PAGE, README, example, line

from qwen3next_jax import Qwen3Next, load_hf, save_hf
from qwen3next_jax.config import (
    Config,
    DataConfig,
    EvalConfig,
    MixerConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    TrainConfig,
    registry,
)
from qwen3next_jax.config.registry import DATA_SOURCES, OPTIMIZERS
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context, document_positions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.trained.load import load_model
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.zoo.pair_mixer import PairAttention
from tests.in_process import train
from tests.models import HYBRID
from tests.refusals import refused


@pytest.fixture(autouse=True)
def the_page_s_lines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    example("my_optimizer.py", tmp_path)
    example("my_source.py", tmp_path)
    monkeypatch.setitem(OPTIMIZERS, *line("OPTIMIZERS"))
    monkeypatch.setitem(DATA_SOURCES, *line("DATA_SOURCES"))


def test_a_new_optimizer_gets_schedule_and_decay():
    rate, decay = 0.01, 0.1
    config = Config(
        model=ModelConfig(num_hidden_layers=4, num_experts=0, hidden_size=64),
        optimizer=OptimizerConfig(
            name="lion", learning_rate=rate, warmup_steps=0, weight_decay=decay, clip_norm=0.0
        ),
    )
    schedule = learning_rate_schedule(config.optimizer, config.train.steps)
    optimizer = make_optimizer(config.optimizer, parameter_declarations(config.model), schedule)
    params = {"layers": {0: {"mixer": {"a_log": jnp.ones(3), "out_proj": jnp.ones(3)}}}}
    grads = {
        "layers": {
            0: {"mixer": {"a_log": jnp.array([1.0, -2, 3]), "out_proj": jnp.array([1.0, -2, 3])}}
        }
    }
    update = optimizer.update(grads, optimizer.init(params), params)[0]["layers"][0]["mixer"]
    np.testing.assert_allclose(update["a_log"], -rate * np.array([1, -1, 1]), rtol=1e-6)
    np.testing.assert_allclose(
        update["out_proj"], -rate * (np.array([1, -1, 1]) + decay), rtol=1e-6
    )


@pytest.fixture
def counting():
    return open_data(DataConfig(source="counting"), 16, 4, 32)


def test_a_new_source_is_read_by_index(counting):
    batch = next(counting.batches(7))
    tokens = batch["tokens"]
    assert tokens.shape == (4, 16)
    assert np.ptp(np.diff(tokens, axis=1) % 32, axis=1).max() == 0  # each row counts
    assert batch["target_mask"][:, 2:].all()
    np.testing.assert_array_equal(tokens[2], counting.row(7 * 4 + 2)["tokens"])


def test_a_new_source_has_held_out_rows(counting):
    heldout, batch = next(counting.heldout_batches(3)), next(counting.batches(7))
    assert heldout["segment_ids"].sum(axis=1).tolist() == [16, 16, 16, 0]
    assert (heldout["tokens"] != batch["tokens"]).any()


def test_a_new_source_says_what_it_is(counting):
    assert counting.document_names_of_batch(3)[0] == ["counting:12"]
    assert counting.describe()["bits_per_nat"] is None
    assert not counting.tokenizer.reads_text
    assert counting.fingerprint != open_data(DataConfig(source="copy"), 16, 4, 32).fingerprint


def test_mistakes_with_new_parts_are_refused():
    with refused("data.source = 'countin'", "'counting'"):
        DataConfig(source="countin")
    with refused("optimizer.name = 'lino'", "'lion'"):
        OptimizerConfig(name="lino")
    with refused("optimizer.muon", "optimizer.name = 'lion'"):
        dataclasses.replace(OptimizerConfig(name="lion"), muon=MuonConfig(momentum=0.9))


SMALL = dataclasses.replace(HYBRID, num_experts=0, max_position_embeddings=512)


def test_a_new_mixer_with_one_setting(tmp_path):
    """It computes what the zoo's window does on packed documents, as that of README.md does. It
    counts its pairs, and its setting has a type, a bound and a name that others refuse.
    """
    mixer_class("sliding_window")  # is there, or the test is skipped
    example("my_windowed.py", tmp_path)
    example("my_window.py", tmp_path, README)

    def layer(name, **settings):
        config = dataclasses.replace(SMALL, linear_mixer=name, mixer=MixerConfig(**settings))
        return mixer_class(name)(config, Make(config, Rngs(0)), (0,))

    own, known = layer("my_windowed:Windowed", window=5), layer("sliding_window", window=5)
    of_readme = layer("my_window:Windowed")
    of_readme.window = 5
    segments = jnp.asarray([[1] * 9 + [2] * 7])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, SMALL.hidden_size)), jnp.float32)
    context = Context(document_positions(segments), segments)
    run = nnx.jit(lambda layer: layer(x, context)[0])
    for mixer in (own, of_readme):
        np.testing.assert_allclose(run(mixer), run(known), rtol=0, atol=1e-5)
    for length in (3, 16):
        assert own.activation_flops(own.config, length) == known.activation_flops(
            known.config, length
        )
    for settings, named in [
        ({"window": 0}, "model.mixer.window = 0"),
        ({"window": "5"}, "model.mixer.window = '5'"),
        ({"windw": 5}, "model.mixer.windw = 5"),
    ]:
        with refused(named):
            dataclasses.replace(
                SMALL, linear_mixer="my_windowed:Windowed", mixer=MixerConfig(**settings)
            )


@pytest.mark.parametrize("name", ["queries_for_score", "keys_for_score", "score"])
def test_the_page_has_the_methods_of_pair_attention(name):
    signature = inspect.signature(getattr(PairAttention, name))
    assert f"`{name}{signature}`" in PAGE.read_text()


@pytest.mark.slow
def test_a_new_mixer_is_stored_by_its_entries(tmp_path, monkeypatch):
    for name in ("my_mixer.py", "my_stored_mixer.py"):
        example(name, tmp_path)
    monkeypatch.setattr(registry, "_trusted", set())
    model = Qwen3Next(
        dataclasses.replace(SMALL, linear_mixer="my_stored_mixer:StoredRetention"), rngs=Rngs(0)
    )
    save_hf(model, tmp_path / "out")
    with refused("--trust=my_stored_mixer"):
        load_hf(tmp_path / "out")
    registry.trust("my_stored_mixer")
    again = load_hf(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m) for m in (again, model)))


@pytest.mark.slow
def test_a_run_of_the_user_s_own_parts(tmp_path, monkeypatch, capsys):
    """A mixer, a hook, an optimizer, an evaluation and a data source that no table has train
    together. Who only has the folder of the run has to say that he trusts their code.
    """
    for name in ("my_mixer.py", "my_evaluation.py", "my_hooks.py"):
        example(name, tmp_path)
    monkeypatch.setattr(registry, "_trusted", set())
    config = Config(
        model=dataclasses.replace(SMALL, linear_mixer="my_mixer:Retention"),
        data=DataConfig(source="my_source:Counting"),
        train=TrainConfig(
            steps=10,
            batch_size=4,
            sequence_length=16,
            log_every=5,
            hooks=("my_hooks:add",),
        ),
        optimizer=OptimizerConfig(name="my_optimizer:direction", warmup_steps=1),
        eval=EvalConfig(
            **dict(every=10, rows=4, sample_tokens=0, suite_rows=2, suite_lengths=(8,)),
            suites=("my_evaluation:Repetition",),
        ),
    )
    workdir = tmp_path / "run"
    assert train(config, workdir) == 0
    events = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    losses = [event["loss"] for event in events if event["event"] == "train"]
    suites = [event for event in events if event["event"] == "suite"]
    assert re.search(r"^10 \d+\.\d+$", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert "accuracy/8 tokens" in str(suites)

    with refused("model.linear_mixer = 'my_mixer:Retention'", "--trust"):
        load_model(workdir)
    for package in ("my_mixer", "my_optimizer", "my_source", "my_evaluation"):
        registry.trust(package)
    assert load_model(workdir).step == 10
    with refused("no_package:Mixer"):
        Qwen3Next(dataclasses.replace(config.model, linear_mixer="no_package:Mixer"), rngs=Rngs(0))
