"""Settings that change nothing are refused where a user gives them, and nowhere else."""

import ast
import copy
from pathlib import Path

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, ModelConfig, from_dict, to_dict
from qwen3next_jax.config.files import UserInput, apply_overrides, load_config_file
from qwen3next_jax.model.layer_properties import partial_ablation_lines
from qwen3next_jax.runs.record import read_config_if_readable
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.sweeps import points, runner
from qwen3next_jax.sweeps.check import check_settings_have_effect
from qwen3next_jax.sweeps.points import load_sweep
from qwen3next_jax.training import unused_settings
from tests.records import record

ROOT = Path(__file__).parents[2]
TINY, MQAR, STAGES = (f"configs/{name}.py" for name in ("tiny", "mqar", "stages"))
FINDERS = (unused_settings.find_unused, unused_settings.find_unused_by_mixers_and_evals)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def given(file, **overrides):
    """(configuration, UserInput) of a config file and the texts of its overrides; "__" is a dot."""
    alone = load_config_file(Path(file))
    if alone["model"].get("vocab_size") == 0:  # the tokenizer says it
        alone["model"]["vocab_size"] = 256
    values = copy.deepcopy(alone)
    names = {name.replace("__", "."): text for name, text in overrides.items()}
    apply_overrides(values, list(names.items()))
    settings = UserInput(frozenset(names), Path(file), from_dict(Config, alone))
    return from_dict(Config, values), settings


def refused(file, **overrides):
    config, settings = given(file, **overrides)
    return {
        name
        for find in FINDERS
        for name in unused_settings.find_unused_given_by_user(config, settings, find)
    }


PATTERN = "('gated_deltanet', 'gated_attention') * 2"
DENSE = {"model__num_experts": "0", "model__intermediate_size": "64"}
NO_MTP = {"model__mtp_depth": "0"}
ALL_FULL = NO_MTP | {"model__layer_types": "full_attention," * 3 + "full_attention"}
ALL_LINEAR = NO_MTP | {"model__full_attention_interval": "0"}
MIXED = {"model__layer_types": "kda,gated_attention,kda,gated_attention"}
PREFIX = {"model__full_mixer": "masked_attention", "model__mixer__mask": "prefix"}


@pytest.mark.parametrize(
    "file, others, setting, text",
    [
        (TINY, DENSE, "train.balance_loss_weight", "0.1"),
        (TINY, DENSE, "train.router_z_loss_weight", "0.1"),
        (TINY, DENSE, "model.moe_intermediate_size", "64"),
        (TINY, {}, "model.intermediate_size", "64"),
        (TINY, NO_MTP, "train.mtp_loss_weight", "0.3"),
        (TINY, {"model__linear_mixer": "mamba"}, "model.decay_init", "log_uniform"),
        (TINY, {"model__decay_gate": "False"}, "model.decay_init", "log_uniform"),
        (TINY, {"model__linear_mixer": "gla"}, "model.linear_conv_kernel_dim", "3"),
        (TINY, {"model__short_convolution": "False"}, "model.linear_conv_kernel_dim", "3"),
        (TINY, ALL_FULL, "model.linear_mixer", "kda"),
        (TINY, ALL_LINEAR, "model.full_mixer", "mla"),
        (TINY, MIXED, "model.full_attention_interval", "2"),
        (TINY, MIXED, "model.full_attention_placement", "first"),
        (TINY, {"optimizer__schedule": "constant"}, "optimizer.final_fraction", "0.5"),
        (TINY, {"train__init_from": "a_run"}, "model.depth_scaled_init", "True"),
        (TINY, {}, "optimizer.decay_fraction", "0.5"),
        (STAGES, {}, "optimizer.decay_fraction", "0.5"),
        (
            TINY,
            {},
            "train.stages",
            "({'steps': 250}, {'steps': 250, 'decay_fraction': 0.2})",
        ),
        (
            TINY,
            {"train__stages": "({'steps': 500, 'batch_size': 4},)"},
            "train.batch_size",
            "2",
        ),
        (TINY, {}, "data.synthetic.pairs", "3"),
        (MQAR, {}, "data.path", "nowhere"),
        (MQAR, {}, "data.heldout_fraction", "0.1"),
        (MQAR, {"data__source": "copy"}, "data.synthetic.gap_power", "0.5"),
        (TINY, {}, "eval.suite_rows", "3"),
        (TINY, {"eval__suites": "induction"}, "eval.suite_pairs", "3"),
        (MQAR, {}, "eval.sample_prompt", "1"),
        (TINY, {}, "profile.steps", "501:503"),
    ],
)
def test_what_a_user_gives_must_be_read(file, others, setting, text):
    found = refused(file, **others | {setting.replace(".", "__"): text})
    assert {name.partition("[")[0] for name in found} == {setting}


@pytest.mark.parametrize(
    "file, overrides",
    [
        # what the file has for its own model, or by default
        (TINY, DENSE | NO_MTP | {"model__linear_mixer": "mamba"}),
        (MQAR, {"data__source": "backcopy"}),
        (MQAR, {"data__source": "text", "model__vocab_size": "257"}),
        (STAGES, {"train__steps": "5", "train__stages": "({'steps': 5, 'learning_rate': 0.1},)"}),
        # what is so anyway
        (TINY, DENSE | {"train__balance_loss_weight": "0", "eval__suite_pairs": "(4, 8, 16)"}),
        # what something reads
        (
            TINY,
            {"model__linear_mixer": "gla", "model__full_mixer": "hyena"}
            | {"model__linear_conv_kernel_dim": "3"},
        ),
        (STAGES, {"optimizer__final_fraction": "0.5", "optimizer__schedule": "linear"}),
        (TINY, {"eval__suites": "heldout,mqar", "eval__suite_pairs": "3", "eval__suite_rows": "2"}),
        (TINY, {"profile__steps": "500:502"}),
        (TINY, PREFIX | {"model__mixer__prefix_tokens": "255"}),
    ],
)
def test_what_is_read_or_not_the_user_s_is_not_refused(file, overrides):
    assert refused(file, **overrides) == set()
    unused_settings.check_tokens_to_train_on(given(file, **overrides)[0])


def test_a_file_is_held_to_what_it_says_itself(tmp_path, monkeypatch):
    # which counts parameters, and takes seconds
    monkeypatch.setattr(points, "_matching_width", lambda *_: ("model.intermediate_size", 8))
    own = tmp_path / "own.py"
    head = "from configs.tiny import get_config as tiny\ndef get_config():\n    config = tiny()\n"
    dense = "    config.model.num_experts = 0\n"
    own.write_text(f"{head}{dense}    return config  # num_experts_per_tok is that of tiny\n")
    assert refused(own) == set()
    own.write_text(f"{head}{dense}    config.train.router_z_loss_weight = 0.1\n    return config\n")
    assert refused(own) == {"train.router_z_loss_weight"}
    for file in (ROOT / "configs").rglob("*.py"):
        functions = [
            node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")
        ]
        if "get_config" in functions:
            assert refused(file) == set(), file
        if "get_sweep" in functions:
            sweep = load_sweep(file)
            check_settings_have_effect(sweep)
            assert "--allow-unused" not in runner.train_arguments(sweep, sweep.points[0], Path("w"))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"data__path": " , "}, "data.path"),
        (PREFIX | {"model__mixer__prefix_tokens": "256"}, "prefix_tokens = 256: .* less than 256"),
        (DENSE | {"train__router_z_loss_weight": "0.1"}, "train.router_z_loss_weight = 0.1"),
    ],
)
def test_a_run_that_has_begun_goes_on_with_what_it_has(tmp_path, overrides, message):
    config, settings = given(TINY, **overrides)
    with pytest.raises(UserError, match=message):
        unused_settings.check_effect_and_targets(
            config, settings, read_config_if_readable(tmp_path)
        )
    open_store(tmp_path).write_run_json(record(config=to_dict(config)))
    unused_settings.check_effect_and_targets(config, settings, read_config_if_readable(tmp_path))
    with pytest.raises(UserError, match=message):
        unused_settings.check_effect_and_targets(config, settings)
    changed = to_dict(config)
    changed["train"]["router_z_loss_weight"] = 0.2
    changed["data"]["path"], changed["model"]["mixer"]["prefix_tokens"] = "", 3
    open_store(tmp_path).write_run_json(record(config=changed))
    with pytest.raises(UserError, match=message):
        unused_settings.check_effect_and_targets(
            config, settings, read_config_if_readable(tmp_path)
        )


def test_a_sweep_may_give_what_some_points_read(tmp_path, monkeypatch):
    record = {
        "base": TINY,
        "set": {"model.linear_mixer": "kda", "model.mtp_depth": 0},
        "axes": {"ratio": ["0:1", "3:1"]},
    }
    monkeypatch.setattr(points, "call_function_of_file", lambda *_: record)
    monkeypatch.setattr(points, "load_config_file", lambda *_: load_config_file(ROOT / TINY))
    sweep = load_sweep("sweep.py")
    check_settings_have_effect(sweep)
    allowed = ["--allow-unused" in runner.train_arguments(sweep, p, tmp_path) for p in sweep.points]
    assert allowed == [True, False]
    record["axes"] = {"ratio": ["0:1"], "train.seed": [0, 1]}
    with pytest.raises(UserError, match="point ratio=0-1,seed=0: model.linear_mixer = 'kda'"):
        check_settings_have_effect(load_sweep("sweep.py"))


def test_an_ablation_of_some_layers_says_which():
    small = ModelConfig(
        num_hidden_layers=6,
        layer_types=("gated_deltanet", "gated_deltanet", "kda", "gated_deltanet", "kda", "mla"),
        beta_gate=False,
        zero_centered_norm=False,
    )
    (line,) = partial_ablation_lines(small)
    assert "beta_gate" in line
    assert "0-1, 3 (gated_deltanet)" in line
    assert "2, 4-5 (kda, mla)" in line
