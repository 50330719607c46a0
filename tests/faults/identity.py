"""Row 16: a configuration with a mistake in it, and a run that would go on as another."""

import contextlib
import io
import json
import pathlib

from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.config import Config, from_dict, to_dict
from tests.faults.lab import Lab, Trial

# setting, value, what the message must name
MISTAKES = [
    ("train.stesp", 5, "did you mean 'steps'"),
    ("trian", {}, "did you mean 'train'"),
    ("model.hiden_size", 8, "did you mean 'hidden_size'"),
    ("train.steps", "many", "train.steps"),
    ("train.steps", 1.5, "train.steps"),
    ("train.steps", True, "train.steps"),
    ("optimizer.learning_rate", "1e-3", "optimizer.learning_rate"),
    ("data.weights", 3, "data.weights"),
    ("model", 3, "model"),
    ("train.steps", 0, "train.steps"),
    ("train.batch_size", -1, "train.batch_size"),
    ("optimizer.beta1", 1.0, "optimizer.beta1"),
    ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate"),
    ("guards.spike_z", 0, "guards.spike_z"),
    ("guards.on_spike", "rewnd", "did you mean 'rewind'"),
    ("checkpoint.keep_last", 0, "checkpoint.keep_last"),
    ("data.heldout_fraction", 2.0, "data.heldout_fraction"),
    ("model.num_attention_heads", 5, "num_attention_heads"),
    ("optimizer.schedule", "cosin", "did you mean 'cosine'"),
    ("train.sequence_length", 10**9, "train.sequence_length"),
    ("train.init_from", "a" * 5000, "train.init_from"),
    ("data.path", "texts/*.txt," + "a/" * 2500, "data.path"),
    ("data.tokenizer", "a" * 256, "data.tokenizer"),
    ("data.prepared_dir", "a\0b", "data.prepared_dir"),
    ("train.stages", [{"steps": 44, "name": "\x1b[31m"}], "train.stages"),
    ("train.stages", [{"steps": 44, "name": "\udcff"}], "train.stages"),
    ("eval.sample_prompt", "\ud800", "eval.sample_prompt"),
]
# setting, value: of a run that is there
OTHER_RUNS = [
    ("model.hidden_size", 64),
    ("model.rope_theta", 5.0),
    ("train.batch_size", 4),
    ("train.seed", 1),
    ("train.sequence_length", 32),
    ("train.balance_loss_weight", 0.5),
    ("train.gradient_accumulation", 2),
    ("optimizer.learning_rate", 1.0),
    ("optimizer.beta2", 0.9),
    ("data.seed", 1),
    ("data.heldout_fraction", 0.3),
    ("guards.window", 16),
    ("train.init_from", "elsewhere"),
]


def config_mistakes(lab: Lab, _: int) -> list[Trial]:
    trials = []
    for name, value, expected in MISTAKES:
        values = json.loads(json.dumps(to_dict(lab.config)))
        *sections, field = name.split(".")
        group = values
        for section in sections:
            group = group[section]
        group[field] = value
        trials.append(_refused(lambda: from_dict(Config, values), expected, name))
    return trials


def other_runs(lab: Lab, _: int) -> list[Trial]:
    """The folder of a run with another setting, data or tokenizer, and a run.json that was
    changed: refused, untouched.
    """
    from qwen3next_jax.runs.changes import compare_data
    from qwen3next_jax.runs.facts import read_facts
    from qwen3next_jax.runs.record import read_record
    from qwen3next_jax.runs.start import decide_start

    workdir = lab.reference()
    record, trials = (workdir / "run.json").read_bytes(), []
    folder = read_facts(lab.config, workdir).folder
    run = folder.record
    data = [cursor.fingerprint for cursor in run.data]
    for name, value in OTHER_RUNS:
        section, field = name.split(".")
        other = lab.with_(**{section: {field: value}})
        trials.append(_refused(lambda: decide_start(other, read_facts(other, workdir)), name, name))
    trials.append(
        _refused(
            lambda: compare_data(folder, run, ["0" * 20], run.tokenizer),
            "other data",
            "data",
        )
    )
    trials.append(
        _refused(lambda: compare_data(folder, run, data, "0" * 20), "other tokens", "tokenizer")
    )
    assert (workdir / "run.json").read_bytes() == record
    folder = lab.new_folder()
    for position in range(40, len(record), len(record) // 12):  # a flipped bit in the record itself
        (folder / "run.json").write_bytes(
            record[:position] + bytes([record[position] ^ 1]) + record[position + 1 :]
        )
        trials.append(_refused(lambda: read_record(folder), "run.json", "run.json"))
    return trials


def changed_text(lab: Lab, _: int) -> list[Trial]:
    """One letter of one training text, changed between two starts of a real run."""
    folder = lab.new_folder()
    for text in (lab.folder / "texts").iterdir():
        (folder / text.name).write_text(text.read_text())
    config = lab.with_(data={"path": f"{folder}/*.txt"}, train={"steps": 8})
    workdir = lab.new_folder() / "run"
    assert lab.run(workdir, config) == 0, lab.log(workdir)
    victim = pathlib.Path(folder / "07.txt")
    victim.write_text(victim.read_text().replace("x", "z", 1))
    longer = lab.with_(data={"path": f"{folder}/*.txt"}, train={"steps": 12})
    code = lab.run(workdir, longer)
    return [
        Trial(
            told=code == ExitCode.USER_ERROR and "run on other data" in lab.log(workdir),
            note="a letter of a text",
        )
    ]


def _refused(work, expected: str, note: str) -> Trial:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            work()
        except UserError as error:
            return Trial(told=expected in str(error) and "\n" not in str(error), note=note)
    return Trial(told=False, note=note)
