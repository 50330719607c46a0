"""Finds settings that have no effect on a run, and refuses them if the user gave them.

A setting is refused only if the user gives it for a new run: on the command line, in a sweep, or in
the code of the config file. A setting in the config file may lose its effect because the command
line overrides another setting; this is allowed. For example, with `--config.model.num_experts=0`
the sizes of the experts in the config file have no effect. A resumed run may keep all its settings.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import (
    FULL,
    LINEAR,
    Config,
    OptimizerConfig,
    Stage,
    to_dict,
)
from qwen3next_jax.config.files import UserInput, setting_names_in_code
from qwen3next_jax.config.ngram import PLEConfig
from qwen3next_jax.config.registry import EVALUATIONS, STREAM_SETTINGS, resolve
from qwen3next_jax.config.streams import StreamsConfig
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.training.stages import STAGE_SETTINGS, ResolvedStage, resolve_stages

# Setting → (function that returns whether the setting has an effect on a run of a configuration,
# the reason if it has none).
_CONDITIONS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "model.linear_mixer": (
        lambda c: LINEAR in c.model.resolved_layer_types,
        f"no layer of the pattern is {LINEAR!r}",
    ),
    "model.full_mixer": (
        lambda c: FULL in c.model.resolved_layer_types or c.model.mtp_depth > 0,
        f"no layer of the pattern is {FULL!r}",
    ),
    "model.full_attention_interval": (
        lambda c: not c.model.layer_types,
        "model.layer_types names every layer",
    ),
    "model.full_attention_placement": (
        lambda c: not c.model.layer_types and c.model.full_attention_interval > 1,
        "there is no choice of a layer (model.layer_types, model.full_attention_interval)",
    ),
    **dict.fromkeys(
        (
            "model.num_experts_per_tok",
            "model.moe_intermediate_size",
            "model.shared_expert_intermediate_size",
            "model.norm_topk_prob",
            "model.decoder_sparse_step",
            "model.mlp_only_layers",
        ),
        (lambda c: c.model.num_experts > 0, "the model has no experts (model.num_experts = 0)"),
    ),
    **{
        f"model.streams.{field.name}": (
            lambda c, name=field.name: name in STREAM_SETTINGS.get(c.model.block.placement, ()),
            "the placement of the blocks does not read it (model.block.placement)",
        )
        for field in dataclasses.fields(StreamsConfig)
    },
    **dict.fromkeys(
        (f"model.ple.{field.name}" for field in dataclasses.fields(PLEConfig)),
        (
            lambda c: bool(c.model.ple.layer_ids),
            "no layer embeds n-grams (model.ple.layer_ids = ())",
        ),
    ),
    "model.depth_scaled_init": (
        lambda c: not c.train.init_from,
        "the weights are those of train.init_from",
    ),
    "train.indexer_loss_weight": (
        lambda c: any(stage.train.indexer_training != "frozen" for stage in resolve_stages(c)),
        "no stage trains an indexer (train.indexer_training)",
    ),
    "optimizer.ngram_table": (
        lambda c: bool(c.model.ple.layer_ids),
        "no layer has an n-gram embedding (model.ple.layer_ids)",
    ),
    "model.intermediate_size": (lambda c: c.model.has_dense_mlps, "every layer has experts"),
    # A weight of 0 is allowed without experts, because it says that there is no balance loss.
    "train.balance_loss_weight": (
        lambda c: c.model.has_experts or not c.train.balance_loss_weight,
        "no layer has experts",
    ),
    "train.router_z_loss_weight": (lambda c: c.model.has_experts, "no layer has experts"),
    "train.mtp_loss_weight": (
        lambda c: c.model.mtp_depth > 0 or not c.train.mtp_loss_weight,
        "the model has no multi-token prediction (model.mtp_depth = 0)",
    ),
    "optimizer.decay_norm_weights": (
        lambda c: c.optimizer.weight_decay > 0,
        "optimizer.weight_decay = 0",
    ),
    "eval.sample_prompt": (lambda c: c.eval.sample_tokens > 0, "eval.sample_tokens = 0"),
    **dict.fromkeys(
        ("eval.suite_rows", "eval.suite_lengths", "eval.suite_pairs"),
        (lambda c: bool(c.eval.suites), "eval.suites is empty"),
    ),
    **dict.fromkeys(
        ("profile.steps", "profile.memory"),
        (
            lambda c: c.profile.traced_steps.start <= c.train.steps,
            "the run ends before those steps (train.steps)",
        ),
    ),
}


def find_unused(config: Config) -> dict[str, str]:
    """Returns setting → reason, for settings that have no effect on a run of `config`. A setting of
    a stage is named "train.stages[1].schedule".

    This function does not import JAX. `find_unused_by_mixers_and_evals` finds the unused settings
    of mixers and evaluations.
    """
    unused = {name: why for name, (reads, why) in _CONDITIONS.items() if not reads(config)}
    read = data_source_class(config.data).settings_read(config.data)
    if read is not None:
        unused |= {
            f"data.{name}": f"data.source = {config.data.source!r} does not read it"
            for name in flatten(to_dict(config.data))
            if name not in (*read, "source", "seed")
        }
    resolved = resolve_stages(config)
    return unused | _unused_in_stages(config.train.stages, resolved, unused.get("data.weights"))


def find_unused_by_mixers_and_evals(config: Config) -> dict[str, str]:
    """Returns setting → reason, for settings of mixers and evaluations that have no effect on a run
    of `config`. This function imports JAX.
    """
    from qwen3next_jax.model.layer_properties import has_indexer, settings_unused_by_mixers

    unused = {f"model.{name}": why for name, why in settings_unused_by_mixers(config.model).items()}
    if not has_indexer(config.model):
        why = "no mixer of the model has an indexer"
        stages = [f"train.stages[{i}]" for i, _ in enumerate(config.train.stages)]
        unused |= {
            f"{group}.indexer_training": why
            for group in ("train", *stages)
            if f"{group}.indexer_training" in settings_by_name(config)
        }
    suites = [
        resolve(EVALUATIONS, name, "eval.suites").settings_read for name in config.eval.suites
    ]
    if None not in suites:
        unused |= {
            f"eval.{name}": f"no evaluation of eval.suites = {config.eval.suites} reads it"
            for name in ("suite_lengths", "suite_pairs")
            if not any(name in read for read in suites)
        }
    return unused


UnusedSettingsFinder = Callable[[Config], dict[str, str]]


def check_effect_and_targets(
    config: Config,
    user_input: UserInput | None,
    resumed_config: Config | None = None,
    find: UnusedSettingsFinder = find_unused,
) -> None:
    """Checks that a run has tokens to train on, and that the user's settings have an effect. In a
    resumed run, settings without effect are allowed if run.json has them with the same values.

    Args:
      config: the configuration of the run.
      user_input: the settings that the user gave; None if settings without effect are allowed.
      resumed_config: the configuration in run.json of a resumed run; None: the run is new.
      find: the function that finds settings without effect: `find_unused` or
        `find_unused_by_mixers_and_evals`.

    Raises:
      UserError: a setting has no effect, or there are no tokens to train on. The message names the
        setting, or the reason why there are no tokens.
    """
    check_tokens_to_train_on(config, resumed_config)
    if user_input is None:
        return
    settings = settings_by_name(config)
    recorded = settings_by_name(resumed_config) if resumed_config else {}
    for name, message in find_unused_given_by_user(config, user_input, find).items():
        require(name in recorded and recorded[name] == settings[name], message)


def find_unused_given_by_user(
    config: Config, user_input: UserInput, find: UnusedSettingsFinder
) -> dict[str, str]:
    """Returns setting → error message, for settings that the user gave and that have no effect on a
    run of `config`. Settings that have their default value are left out.
    """
    settings, messages = settings_by_name(config), {}
    changed = {
        name: why for name, why in find(config).items() if settings[name] != DEFAULTS.get(name)
    }
    names_in_file, unused_in_file = frozenset(), {}
    if user_input.config_without_overrides and changed:
        names_in_file = setting_names_in_code(user_input.config_file)
        unused_in_file = find(user_input.config_without_overrides)
    for name, why in changed.items():
        if name.partition("[")[0] in user_input.overridden_settings:
            where = ""
        elif name.rpartition(".")[2] in names_in_file and name in unused_in_file:
            where = f"{user_input.config_file}: "
        else:
            continue
        messages[name] = (
            f"{where}{name} = {settings[name]!r} has no effect on this run, because {why}: leave "
            "it out"
        )
    return messages


def check_tokens_to_train_on(config: Config, resumed_config: Config | None = None) -> None:
    """Checks that `data.path` is "" or names files, and that every row has tokens to predict.

    Args:
      config: the configuration of the run.
      resumed_config: the configuration in run.json of a resumed run, whose settings are allowed;
        None: the run is new.

    Raises:
      UserError: `data.path` names no file; or a mixer's mask shows a prefix to all tokens that is
        at least as long as a row, so that no token remains to predict.
    """
    data = config.data
    require(
        bool(data.sources) or bool(resumed_config and resumed_config.data.path == data.path),
        f"data.path = {data.path!r}: it names no file: expected comma-separated globs, or '' for "
        "Python's standard library",
    )
    mixer = config.model.mixer
    if not mixer or (resumed_config and resumed_config.model.mixer == mixer):
        return
    # This import loads JAX, so it happens only if mixers have settings.
    from qwen3next_jax.model.visible_targets import check_rows_exceed_prefix

    for stage in resolve_stages(config):
        check_rows_exceed_prefix(config.model, stage.sequence_length)


def settings_by_name(config: Config) -> dict[str, Any]:
    """Returns dotted name → value for every setting, including the settings of stages."""
    settings = flatten(to_dict(config))
    for i, stage in enumerate(config.train.stages):
        settings |= {
            f"train.stages[{i}].{name}": value
            for name, value in vars(stage).items()
            if value is not None
        }
    return settings


def _unused_in_stages(
    stages: Sequence[Stage], resolved_stages: Sequence[ResolvedStage], no_weights: str | None
) -> dict[str, str]:
    """Returns setting → reason, for settings in `train.stages` that have no effect on their stage,
    and for settings of the run that have no effect on any stage.

    Args:
      stages: `train.stages`.
      resolved_stages: the stages with the values of all their settings; the whole run as one stage
        if `stages` is empty.
      no_weights: the reason why `data.weights` has no effect; None if it has one.
    """
    unused = {}
    for i, (stage, resolved_stage) in enumerate(zip(stages, resolved_stages)):
        why = _unused_by_schedule(resolved_stage.optimizer)
        if no_weights:
            why["weights"] = no_weights
        unused |= {
            f"train.stages[{i}].{name}": why[name]
            for name in why
            if getattr(stage, name) is not None
        }
    by_first_step = {
        resolved.steps_before: stage for resolved, stage in zip(resolved_stages, stages)
    }
    for group, names in STAGE_SETTINGS.items():
        for name in names:
            # `readers` are the stages that use the run's value. The stage with which a
            # learning-rate schedule begins sets the optimizer's settings for all stages of that
            # schedule.
            readers = []
            for one in resolved_stages:
                begin = one.schedule_start if group == "optimizer" else one.steps_before
                if not stages or getattr(by_first_step[begin], name) is None:
                    readers.append(one)
            reasons = [_unused_by_schedule(one.optimizer).get(name) for one in readers]
            if not readers:
                unused[f"{group}.{name}"] = "every stage of train.stages has its own"
            elif group == "optimizer" and all(reasons):
                unused[f"{group}.{name}"] = reasons[0]
    return unused


def _unused_by_schedule(optimizer: OptimizerConfig) -> dict[str, str]:
    """Returns setting → reason, for settings that the learning-rate schedule does not read."""
    schedule = optimizer.schedule
    why, unused = f"the schedule is {schedule!r}", {}
    if schedule != "warmup_stable_decay":
        unused["decay_fraction"] = why
    if schedule in ("constant", "inverse_sqrt"):
        unused["final_fraction"] = why
    return unused


DEFAULTS = settings_by_name(Config())
