"""The training run: exact accumulation, bitwise resume, schedules, starting from other weights,
and refusals.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx

import qwen3next_jax
from qwen3next_jax.commands import export
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    TrainConfig,
    from_dict,
    to_dict,
)
from qwen3next_jax.data.tokens import END_OF_TEXT, load_tokenizer
from qwen3next_jax.interop import huggingface
from qwen3next_jax.interop.huggingface import load_params, save_hf
from qwen3next_jax.interop.weights import modification_digest
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.runs.checkpoint import Checkpoints, load_trained
from qwen3next_jax.runs.first_state import make_first_state
from qwen3next_jax.runs.record import BaseModel, read_record
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.trained.load import load_model
from qwen3next_jax.training import stages
from qwen3next_jax.training.gradients import make_gradients
from qwen3next_jax.training.optimizer import learning_rate_schedule
from qwen3next_jax.training.state import abstract_model
from tests.corpora import write_texts
from tests.in_process import resolved, train
from tests.models import HYBRID

ROOT = pathlib.Path(__file__).parents[2]
ONE_DEVICE = single_device_mesh()
MODEL = dataclasses.replace(HYBRID, vocab_size=257, mlp_only_layers=(0,))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, 40)
    return folder


@pytest.fixture(scope="module")
def config(texts, tmp_path_factory):
    return Config(
        name="nano",
        model=MODEL,
        data=DataConfig(
            path=f"{texts}/*.txt",
            heldout_fraction=0.2,
            prepared_dir=str(tmp_path_factory.mktemp("prepared")),
        ),
        train=TrainConfig(steps=20, batch_size=4, sequence_length=64, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        checkpoint=CheckpointConfig(every=10),
        eval=EvalConfig(every=20, rows=4, sample_tokens=0),
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """The workdir of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert train(config, workdir) == 0
    return workdir


def _losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in lines
        if line["event"] == "train"
    ]


def _same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_learns_and_a_second_start_says_it_is_done(config, finished, capsys):
    losses = [loss for _, loss, _ in _losses(finished)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    before = (finished / "metrics.jsonl").read_bytes()
    assert train(config, finished) == 0
    assert "already trained to step 20" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_run_records_what_runs_each_operator(finished):
    (event,) = [e for e in read_events(finished / "metrics.jsonl") if e["event"] == "operators"]
    assert list(read_record(finished).operators) == event["operators"]
    found = {entry["operator"]: entry for entry in event["operators"]}
    assert found["attention"]["implementation"] == "xla"
    assert all(entry["why"] == "the default on a CPU" for entry in found.values())
    page = (finished / "report.html").read_text()
    assert "What runs each operator" in page
    assert found["attention"]["call"] in page


def test_a_run_is_read_as_arrays(finished):
    run = qwen3next_jax.Run(finished)
    steps, losses = run.series("loss")
    assert steps.tolist() == list(range(1, 21))
    assert np.isfinite(losses).all()
    assert run.checkpoints == [10, 20]
    assert run.config["train"]["batch_size"] == 4
    table = run.table()
    assert np.array_equal(table["loss"], losses)
    assert len(table["step"]) == 20
    assert "step 20" in repr(run)
    assert "<svg" in run._repr_html_().replace("&lt;", "<")
    with pytest.raises(UserError, match="no 'train' event has 'los'; .*loss"):
        run.series("los")


def test_a_killed_and_resumed_run_is_bitwise_the_undisturbed_one(config, finished, tmp_path):
    """Killed by a real SIGKILL somewhere after the first checkpoint, torn metrics line included."""
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    program = f"""
import json, pathlib, time
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.data.pipeline import TextData
from tests.in_process import train
def slowly(*arguments, batches=TextData.batches):  # else it would be over before it is killed
    for batch in batches(*arguments):
        time.sleep(0.05)
        yield batch
TextData.batches = slowly
config = from_dict(Config, json.load(open({str(tmp_path / "config.json")!r})))
train(config, pathlib.Path({str(tmp_path / "run")!r}))"""
    # As many devices as here, so that the programs which are compiled here are found.
    devices = f" --xla_force_host_platform_device_count={jax.device_count()}"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + devices, "PYTHONPATH": str(ROOT)},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (
        metrics.exists() and '"checkpoint"' in metrics.read_text()
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with metrics.open("a") as file:
        file.write('{"event": "train", "step": 9')
    assert train(config, tmp_path / "run") == 0
    assert _losses(tmp_path / "run") == _losses(finished)
    _same(
        *(
            nnx.to_pure_dict(nnx.state(load_trained(w)[0], nnx.Param))
            for w in (tmp_path / "run", finished)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("balance_loss_weight", [0.1, 0])
def test_micro_batches_and_remat_change_no_gradient(config, balance_loss_weight):
    """4 micro-batches, recomputed in the backward, against one batch: equal up to the order of
    float32 sums, although the micro-batches are padded unequally and the balance loss is not a
    sum over rows.
    """
    train_config = dataclasses.replace(
        config.train,
        balance_loss_weight=balance_loss_weight,
        router_z_loss_weight=0.01,
        mtp_loss_weight=0.3,
    )
    rng = np.random.default_rng(0)
    inside = np.arange(64) < np.array([[64], [1], [40], [7]])
    batch = {
        "tokens": jnp.asarray(rng.integers(0, 257, (4, 64)) * inside, jnp.int32),
        "segment_ids": jnp.asarray(
            np.sort(rng.integers(1, 4, (4, 64)), axis=1) * inside, jnp.int32
        ),
    }
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            MODEL,
            num_hidden_layers=1,
            full_attention_interval=0,
            layer_types=(),
            mlp_only_layers=(),
            mtp_depth=1,
        ),
    )
    whole, parts = (
        dataclasses.replace(config, train=dataclasses.replace(train_config, **change))
        for change in ({}, {"gradient_accumulation": 4, "remat": "block"})
    )
    params = jax.tree.map(
        lambda s: jnp.asarray(0.2 * rng.normal(size=s.shape), s.dtype),
        abstract_model(whole.model)[1],
    )
    (gradient, *one), (summed, *four) = (
        jax.jit(make_gradients(run, *run.stages))(params, batch)
        for run in (resolved(whole), resolved(parts))
    )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(four), strict=True
    ):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(summed), strict=True
    ):
        error = float(jnp.linalg.norm(a - b)) / (float(jnp.linalg.norm(a)) + 1e-6)
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def test_schedules():
    cosine = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10), 100)
    assert [float(cosine(s)) for s in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert float(cosine(99)) == pytest.approx(0.1)
    assert float(cosine(54)) == pytest.approx(0.556, abs=0.01)
    stable = learning_rate_schedule(
        OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule="warmup_stable_decay"), 100
    )
    assert [float(stable(s)) for s in (0, 10, 79, 99)] == pytest.approx([0.1, 1.0, 1.0, 0.1])


def test_inverse_sqrt_is_the_formula_of_the_paper():
    rate = learning_rate_schedule(
        OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="inverse_sqrt"), 100
    )
    for step in range(1, 101):  # step n has the rate of n - 1 updates
        expected = 2.0 * min(step / 10, (10 / step) ** 0.5)
        assert float(rate(step - 1)) == pytest.approx(expected, rel=1e-6), step


def test_inverse_sqrt_needs_a_warm_up():
    with pytest.raises(UserError, match="inverse_sqrt.*warmup_steps = 0"):
        OptimizerConfig(warmup_steps=0, schedule="inverse_sqrt")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "warmup_stable_decay", "constant"])
def test_the_last_step_of_every_schedule_is_at_its_final_fraction(schedule):
    wrong = []
    for steps, warmup, decay, final in itertools.product(
        (1, 2, 3, 10), (0, 1, 2, 9, 10, 100), (0.0, 0.01, 0.2, 1.0), (0.0, 0.1, 1.0)
    ):
        settings = OptimizerConfig(
            learning_rate=2.0,
            schedule=schedule,
            warmup_steps=warmup,
            decay_fraction=decay,
            final_fraction=final,
        )
        # always 10 steps, so that all lengths share their programs
        rates = np.array(learning_rate_schedule(settings, steps)(np.arange(10)))[:steps]
        last = 2.0 if schedule == "constant" else 2.0 * final
        good = (
            np.allclose(rates[-1], last, atol=1e-6)
            and (steps == 1 or rates[0] > 0)
            and rates.min() >= 0
            and rates.max() < 2.0 + 1e-6
        )
        if not good:
            wrong.append((steps, warmup, decay, final, rates))
    assert not wrong, f"{len(wrong)} of them, such as {wrong[0]}"


def test_decay_rates_never_decay_and_norms_only_if_asked():
    for path, parameter in parameter_declarations(dataclasses.replace(MODEL, mtp_depth=1)).items():
        for decay_norms in (True, False):
            name = path.rpartition("/")[2]
            assert parameter.decays(decay_norms) == (
                name not in ("a_log", "dt_bias") and (decay_norms or "norm" not in name)
            ), path


def test_a_run_keeps_its_tokenizer_and_exports_its_end_token(
    config, finished, tmp_path, monkeypatch
):
    load_tokenizer("bytes").save(tmp_path)  # as a file of its own, which then goes away
    moved = dataclasses.replace(
        config, data=dataclasses.replace(config.data, tokenizer=str(tmp_path / "tokenizer.json"))
    )
    shutil.copytree(finished, tmp_path / "run")
    tokenizer = load_tokenizer(moved.data.tokenizer)
    open_store(tmp_path / "run").write_run_json_and_tokenizer(
        dataclasses.replace(
            read_record(tmp_path / "run"), config=to_dict(moved), tokenizer=tokenizer.fingerprint
        ),
        tokenizer,
        new=False,
    )
    (tmp_path / "tokenizer.json").unlink()
    assert load_model(tmp_path / "run").tokenizer.eos_id == 256
    monkeypatch.setattr(
        sys, "argv", ["export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'hf'}"]
    )
    flags.FLAGS(sys.argv)
    assert export.main() == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256


@pytest.mark.slow
def test_starts_from_a_hugging_face_directory(config, finished, tmp_path, monkeypatch):
    model = load_trained(finished).model
    save_hf(model, tmp_path / "hf", load_tokenizer("bytes"))
    again = dataclasses.replace(
        config, train=dataclasses.replace(config.train, init_from=str(tmp_path / "hf"))
    )
    run = resolved(again)
    data = stages.open_data_of_stages(run.stages, MODEL.vocab_size)
    start = prepare_start(again, tmp_path / "new")
    state, _ = make_first_state(run, data, start)
    _same(state["params"], nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert int(state["step"]) == 0
    with pytest.raises(UserError, match="hidden_size is 16, model.hidden_size = 32"):
        wider = dataclasses.replace(again, model=dataclasses.replace(MODEL, hidden_size=32))
        prepare_start(wider, tmp_path / "new")

    # A rewind to step 0 reads the files again, and so does a start after a kill before the first
    # checkpoint: the same ones, or none.
    short = dataclasses.replace(again, train=dataclasses.replace(again.train, steps=1))
    assert train(short, tmp_path / "begun") == 0
    source = BaseModel(str(tmp_path / "hf"), "qwen3_next", modification_digest(tmp_path / "hf"))
    assert read_record(tmp_path / "begun").source == source
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    events = tmp_path / "begun" / "metrics.jsonl"
    events.write_text(
        "".join(line for line in events.open() if json.loads(line)["event"] != "checkpoint")
    )
    make_first_state(run, data, start)
    weights = tmp_path / "hf" / "model.safetensors"

    def replaced_while_it_is_read(*args):
        os.utime(weights, (2, 2))
        return load_params(*args)

    with monkeypatch.context() as patched:
        patched.setattr(huggingface, "load_params", replaced_while_it_is_read)
        with pytest.raises(UserError, match="files .*were replaced"):
            make_first_state(run, data, start)
    os.utime(weights, (1, 1))
    for begin in (
        lambda: make_first_state(run, data, start),
        lambda: train(again, tmp_path / "begun"),
    ):
        with pytest.raises(UserError, match="files .*were replaced"):
            begin()


def test_a_run_reads_the_tokens_of_the_model_that_it_begins_with(config, finished, tmp_path):
    """Without a setting it takes that model's tokenizer; another one is refused, unless one of
    the two stands for no text.
    """

    def begins(folder, tokenizer="", **data):
        return dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, tokenizer=tokenizer, **data),
            train=dataclasses.replace(config.train, init_from=str(folder)),
        )

    def taken(config, workdir=tmp_path / "new"):
        return load_tokenizer(prepare_start(config, workdir).config.data.tokenizer).fingerprint

    bytes_, model = load_tokenizer("bytes"), load_trained(finished)[0]
    (tmp_path / "swapped").mkdir()
    bytes_.save(tmp_path / "swapped")
    file = tmp_path / "swapped" / "tokenizer.json"
    written = json.loads(file.read_text())
    ids = written["model"]["vocab"]
    ids["x"], ids["y"] = ids["y"], ids["x"]
    file.write_text(json.dumps(written))
    swapped = load_tokenizer(str(file))

    save_hf(model, tmp_path / "hf of swapped", swapped)
    shutil.copytree(finished, tmp_path / "run of swapped")
    record = read_record(tmp_path / "run of swapped")
    record = dataclasses.replace(record, tokenizer=swapped.fingerprint)
    open_store(tmp_path / "run of swapped").write_run_json_and_tokenizer(record, swapped, new=False)
    for parent in ("hf of swapped", "run of swapped"):
        assert taken(begins(tmp_path / parent)) == swapped.fingerprint
        assert taken(begins(tmp_path / parent, str(file))) == swapped.fingerprint
        with pytest.raises(UserError, match="another tokenizer than data.tokenizer = 'bytes'"):
            taken(begins(tmp_path / parent, "bytes"))
        prepare_start(begins(tmp_path / parent, source="mqar", path=""), tmp_path / "new")
    # another tokenizer is named before its size is, which no larger vocabulary would mend
    ids[END_OF_TEXT] = bytes_.eos_id
    ids |= {f"token{i}": i for i in range(len(ids), 2 * MODEL.vocab_size)}
    (tmp_path / "large").mkdir()
    shutil.copy(file.with_name("tokenizer_config.json"), tmp_path / "large")
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="another tokenizer than data.tokenizer"):
        taken(begins(finished, str(tmp_path / "large" / "tokenizer.json")))
    # a run that goes on has its own copy
    assert taken(begins(""), tmp_path / "run of swapped") == swapped.fingerprint

    save_hf(model, tmp_path / "hf of bytes", bytes_)  # written as a tokenizer.json
    for parent in (tmp_path / "hf of bytes", finished):
        assert taken(begins(parent)) == taken(begins(parent, "bytes")) == bytes_.fingerprint
        with pytest.raises(UserError, match="another tokenizer than data.tokenizer"):
            taken(begins(parent, str(file)))
    save_hf(model, tmp_path / "hf of none")
    with pytest.raises(UserError, match="no tokenizer.json: set data.tokenizer"):
        taken(begins(tmp_path / "hf of none"))
    assert taken(begins(tmp_path / "hf of none", "bytes")) == bytes_.fingerprint


@pytest.mark.slow
def test_more_than_ten_layers_without_a_period_come_back_in_order(config, tmp_path):
    """Orbax sorts the names of layers as text: 0, 1, 10, 11, 2, … Muon's state holds AdamW's,
    too.
    """
    long = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(name="muon"),
        model=dataclasses.replace(
            MODEL,
            num_hidden_layers=12,
            layer_types=(),
            full_attention_interval=0,
            mlp_only_layers=(0, 2, 5, 11),
        ),
    )
    assert len(long.model.layer_stacks) == 12
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda s: jnp.asarray(rng.integers(0, 1000, s.shape), s.dtype),
        resolved(long).abstract_state,
    )
    state["step"] = jnp.int32(1)
    with open_store(tmp_path).open_checkpoints(CheckpointConfig(keep_last=2)) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path) as checkpoints:
        _same(checkpoints.restore(1, resolved(long).abstract_state), state)


def _damage(folder, how):
    largest = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    if how == "a flipped bit":
        data[len(data) // 2] ^= 16
        largest.write_bytes(data)
    elif how == "a truncated file":
        largest.write_bytes(data[:-100])
    elif how == "a missing file":
        largest.unlink()
    else:
        (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "how", ["a flipped bit", "a truncated file", "a missing file", "no manifest"]
)
def test_a_damaged_checkpoint_is_reported_and_skipped(config, finished, tmp_path, capsys, how):
    shutil.copytree(finished, tmp_path / "run")
    _damage(tmp_path / "run" / "checkpoints" / "20", how)
    with pytest.raises(UserError, match="checkpoints/20: damaged"):
        load_trained(tmp_path / "run", step=20)
    assert load_trained(tmp_path / "run").step == 10
    assert "checkpoints/20 is skipped" in capsys.readouterr().err


def test_training_goes_on_from_the_last_whole_checkpoint(config, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    _damage(tmp_path / "run" / "checkpoints" / "20", "a flipped bit")
    assert train(config, tmp_path / "run") == 0
    assert _losses(tmp_path / "run") == _losses(finished)
    assert len(list((tmp_path / "run" / "damaged").iterdir())) == 1
    _same(
        *(
            nnx.to_pure_dict(nnx.state(load_trained(w)[0], nnx.Param))
            for w in (tmp_path / "run", finished)
        )
    )


def test_the_best_checkpoint_of_a_run_is_named_and_loaded(config, finished, tmp_path, capsys):
    """Of step 10, whose loss the record has, and step 20, whose loss is measured."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints" / "20")
    record = workdir / "metrics.jsonl"
    best_so_far = {"event": "heldout", "step": 10, "time": 1, "loss": 99.0}
    record.write_text(json.dumps(best_so_far) + "\n" + record.read_text())
    keeps_best = dataclasses.replace(config.checkpoint, keep_best=True)
    assert train(dataclasses.replace(config, checkpoint=keeps_best), workdir) == 0
    assert "step 20 has the lowest held-out loss" in capsys.readouterr().out
    assert load_model(workdir, step="best").step == 20
    record.write_text(record.read_text().replace('"loss": 99.0', '"loss": 0.01'))
    assert load_model(workdir, step="best").step == 10
    assert load_model(workdir).step == 20


def test_config_round_trips_and_names_mistakes(config):
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    for values, message in (
        ({"train": {"stesp": 1}}, "config.train.stesp: no such setting .did you mean 'steps'"),
        ({"train": {"steps": "many"}}, "config.train.steps = 'many' is of type str: expected int"),
        (
            {"model": {"num_experts": 4}},
            "num_experts_per_tok = 10: expected 1 … model.num_experts = 4",
        ),
        (
            {"model": {"num_attention_heads": 5}},
            "5 is not a multiple of model.num_key_value_heads = 2",
        ),
        (
            {
                "model": {
                    "num_hidden_layers": 2,
                    "layer_types": ["linear_attention", "ful_attention"],
                }
            },
            "did you mean 'full_attention'",
        ),
        ({"optimizer": {"schedule": "cosin"}}, "expected one of 'cosine', 'warmup_stable_decay'"),
        (
            {"optimizer": {"name": "moun"}},
            "optimizer.name = 'moun': expected one of adamw, muon.*did you mean 'muon'",
        ),
        (
            {"optimizer": {"muon": {"steps": 3}}},
            "optimizer.muon is set, but optimizer.name = 'adamw' does not read it",
        ),
        ({"data": {"path": "a,b", "weights": "1"}}, "1 value for 2 sources"),
    ):
        with pytest.raises(UserError, match=message):
            from_dict(Config, values)
