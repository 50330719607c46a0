"""What a start says of settings that surprise."""

import dataclasses

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import LoRAConfig, ModelConfig, Stage
from qwen3next_jax.runs.checks import check_and_resolve_run
from qwen3next_jax.runs.facts import PretrainedModel
from qwen3next_jax.runs.memory import check_activations_fit, minimum_activation_bytes
from qwen3next_jax.runs.notices import surprising_settings
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.resolve import resolve_run
from tests.in_process import dry_run
from tests.runs.test_branching import with_


def notices(tmp_path, **groups):
    start = prepare_start(with_(**groups), tmp_path)
    return surprising_settings(check_and_resolve_run(start, single_device_mesh()), start)


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (
            {
                "train": {"steps": 3, "stages": (Stage(1), Stage(2))},
                "optimizer": {"warmup_steps": 5},
            },
            ["warmup_steps = 5", "3 steps"],
        ),
        ({"model": {"lora": LoRAConfig(rank=2)}}, ["model.lora.rank", "train.init_from"]),
        (
            {"model": {"num_experts": 0, "intermediate_size": ModelConfig.intermediate_size}},
            ["model.intermediate_size = 5120", "hidden_size is 2048", "note"],  # true if given too
        ),
    ],
)
def test_a_setting_that_surprises_is_named(tmp_path, groups, names):
    (line,) = (line for line in notices(tmp_path, **groups) if names[0] in line)
    assert all(name in line for name in names)


def test_adapters_beside_a_vocabulary_that_grows_are_named(tmp_path):
    start = prepare_start(with_(model={"lora": LoRAConfig(rank=2)}), tmp_path)
    model = start.config.model
    for smaller in (0, 1):
        theirs = dataclasses.replace(model, vocab_size=model.vocab_size - smaller)
        pretrained = PretrainedModel(tmp_path, theirs, "")
        facts = dataclasses.replace(start.facts, initial_model=pretrained)
        begun = dataclasses.replace(start, facts=facts)
        lines = surprising_settings(resolve_run(start.config, single_device_mesh()), begun)
        assert any("export --adapter" in line for line in lines) == bool(smaller)


def test_a_batch_beyond_the_memory_is_refused(tmp_path):
    config = with_(train={"batch_size": 10**9})
    run = check_and_resolve_run(prepare_start(config, tmp_path), single_device_mesh())
    (stage,) = run.stages
    expected = 10**9 * config.train.sequence_length * config.model.hidden_size * 4
    assert minimum_activation_bytes(run, stage) == expected * config.model.num_hidden_layers
    with pytest.raises(UserError, match="train.batch_size = 1000000000"):
        check_activations_fit(run, stage)
    for changes in ({"remat": "offload"}, {"freeze": ("kind=matrix",)}):
        keeps_none = dataclasses.replace(stage.train, **changes)
        assert minimum_activation_bytes(run, dataclasses.replace(stage, train=keeps_none)) == 0


def test_a_hook_that_is_missing_is_no_start(tmp_path):
    start = prepare_start(with_(train={"hooks": ("no_such_module:add",)}), tmp_path)
    with pytest.raises(UserError, match="train.hooks.*no_such_module"):
        check_and_resolve_run(start, single_device_mesh())


def test_a_dry_run_prints_no_bound_of_zero(tmp_path, capsys):
    for remat, is_bound in (("none", True), ("offload", False)):
        dry_run(with_(train={"remat": remat}), tmp_path)
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("Activations"))
        assert ("at least" in line) == is_bound
        assert " 0.0 MB" not in line
