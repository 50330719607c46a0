"""Settings that a user gives and that change nothing in the run, which is refused.

A setting is only refused where a user gives it for a new run: on the command line, in a sweep, or
in the config file itself. What a config file holds for its own model may lose its meaning by
another setting (experts' sizes where the command line asks for none), and a run that has begun
keeps the settings it was begun with.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import FULL, LINEAR, Config, OptimizerConfig, to_dict
from qwen3next_jax.config.files import UserInput, names_in_code
from qwen3next_jax.config.ngram import PLEConfig
from qwen3next_jax.config.registry import EVALUATIONS, WITH_STREAMS, resolve
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.runs import preflight
from qwen3next_jax.runs.folder import read_config
from qwen3next_jax.training.stages import STAGE_SETTINGS, resolve_stages

# Setting → (whether a run of this configuration reads it, why it does not).
_READ: dict[str, tuple[Callable[[Config], bool], str]] = {
    "model.linear_mixer": (
        lambda c: LINEAR in c.model.pattern,
        f"no layer of the pattern is {LINEAR!r}",
    ),
    "model.full_mixer": (
        lambda c: FULL in c.model.pattern or c.model.mtp_depth > 0,
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
    **dict.fromkeys(
        ("model.streams.hc_count", "model.streams.hc_lowrank"),
        (
            lambda c: c.model.block.placement in WITH_STREAMS,
            "there is one residual stream (model.block.placement)",
        ),
    ),
    **dict.fromkeys(
        (f"model.ple.{field.name}" for field in dataclasses.fields(PLEConfig)),
        (
            lambda c: bool(c.model.ple.layer_ids),
            "no layer embeds n-grams (model.ple.layer_ids = ())",
        ),
    ),
    "train.indexer_loss_weight": (
        lambda c: any(stage.train.indexer_training != "frozen" for stage in resolve_stages(c)),
        "no stage trains an indexer (train.indexer_training)",
    ),
    "model.intermediate_size": (lambda c: c.model.has_dense_mlps, "every layer has experts"),
    # A weight of 0 says what is the case.
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
            lambda c: c.profile.range.start <= c.train.steps,
            "the run ends before those steps (train.steps)",
        ),
    ),
}


def unread(config: Config) -> dict[str, str]:
    """Settings that change nothing in a run of `config` → why. "train.stages[1].schedule" is one
    of a stage. Needs no JAX; `by_layers` knows the rest.
    """
    found = {name: why for name, (reads, why) in _READ.items() if not reads(config)}
    read = source_of(config.data).settings(config.data)
    if read is not None:
        found |= {
            f"data.{name}": f"data.source = {config.data.source!r} does not read it"
            for name in flatten(to_dict(config.data))
            if name not in (*read, "source", "seed")
        }
    found |= _of_profile(config)
    return found | _of_stages(config, found.get("data.weights"))


def by_layers(config: Config) -> dict[str, str]:
    """As `unread`: what mixers and evaluations would read."""
    from qwen3next_jax.model.block import has_indexer, unread_by_mixers

    found = {f"model.{name}": why for name, why in unread_by_mixers(config.model).items()}
    if not has_indexer(config.model):
        why = "no mixer of the model has an indexer"
        stages = [f"train.stages[{i}]" for i, _ in enumerate(config.train.stages)]
        found |= {
            f"{group}.indexer_training": why
            for group in ("train", *stages)
            if f"{group}.indexer_training" in values(config)
        }
    suites = [resolve(EVALUATIONS, name, "eval.suites").settings for name in config.eval.suites]
    if None not in suites:
        found |= {
            f"eval.{name}": f"no evaluation of eval.suites = {config.eval.suites} reads it"
            for name in ("suite_lengths", "suite_pairs")
            if not any(name in read for read in suites)
        }
    return found


Find = Callable[[Config], dict[str, str]]


def check(
    config: Config,
    given: UserInput | None,
    workdir: pathlib.Path | None = None,
    restart: bool = False,
    find: Find = unread,
) -> None:
    """Raises UserError where a new run is given a setting that it does not read, or that leaves
    it nothing to train on. A run that has begun goes on with the settings it has.

    Args:
      given: what the user gives; None: any settings may be without use.
      workdir: the folder of the run, where it has one.
      restart: whether what is in `workdir` is moved away.
      find: `unread` or `by_layers`.
    """
    begun = _begun(workdir, restart)
    check_targets(config, begun)
    if given is None:
        return
    settings, before = values(config), values(begun) if begun else {}
    for name, why in refused(config, given, find).items():
        require(name in before and before[name] == settings[name], why)


def refused(config: Config, given: UserInput, find: Find) -> dict[str, str]:
    """The given settings that a run of `config` does not read, by their names → what is wrong. A
    default is not refused.
    """
    settings, found = values(config), {}
    changed = {
        name: why for name, why in find(config).items() if settings[name] != DEFAULTS.get(name)
    }
    in_file, alone = frozenset(), {}
    if given.file_config and changed:
        in_file, alone = names_in_code(given.file), find(given.file_config)
    for name, why in changed.items():
        if name.partition("[")[0] in given.overrides:
            where = ""
        elif name.rpartition(".")[2] in in_file and name in alone:
            where = f"{given.file}: "
        else:
            continue
        found[name] = (
            f"{where}{name} = {settings[name]!r} changes nothing in this run, as {why}: leave it "
            "out"
        )
    return found


def check_targets(config: Config, begun: Config | None = None) -> None:
    """Raises UserError where there is nothing to train on, or not what was named. `begun`: the
    run that goes on; what it has is left to it.
    """
    data = config.data
    require(
        bool(data.globs) or not data.path or bool(begun and begun.data.path == data.path),
        f"data.path = {data.path!r}: it names no file: expected comma-separated globs, or '' for "
        "Python's standard library",
    )
    mixer = config.model.mixer
    if not mixer or (begun and begun.model.mixer == mixer):
        return
    # the mixers are asked, and JAX is imported, only where they have settings
    from qwen3next_jax.model.visible_targets import check_prefix

    for stage in resolve_stages(config):
        check_prefix(config.model, stage.sequence_length)


def values(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, those that stages set included."""
    found = flatten(to_dict(config))
    for i, stage in enumerate(config.train.stages):
        found |= {
            f"train.stages[{i}].{name}": value
            for name, value in vars(stage).items()
            if value is not None
        }
    return found


def _of_profile(config: Config) -> dict[str, str]:
    """The settings of a profile of steps that the run does not take, as its parent took them."""
    if not config.profile.steps:
        return {}
    taken = preflight.steps_of_parent(config.train)
    if taken < config.profile.range[-1]:
        return {}
    why = f"the run begins after step {taken} (train.init_from)"
    return dict.fromkeys(("profile.steps", "profile.memory"), why)


def _of_stages(config: Config, no_weights: str | None) -> dict[str, str]:
    """Of the settings that a stage may have: those that it does not read, and those of the run
    that no stage reads. `no_weights`: why the data have no weights, if they have none.
    """
    resolved = resolve_stages(config)
    stages = config.train.stages
    found = {}
    for i, (stage, one) in enumerate(zip(stages, resolved)):
        why = _of_schedule(one.optimizer) | ({"weights": no_weights} if no_weights else {})
        found |= {
            f"train.stages[{i}].{name}": why[name]
            for name in why
            if getattr(stage, name) is not None
        }
    begins = {one.steps_before: stage for one, stage in zip(resolved, stages)}
    for group, names in STAGE_SETTINGS.items():
        for name in names:
            # the stages whose value is the run's; a schedule is that of the stage it began with
            readers = []
            for one in resolved:
                begin = one.schedule_start if group == "optimizer" else one.steps_before
                if not stages or getattr(begins[begin], name) is None:
                    readers.append(one)
            reasons = [_of_schedule(one.optimizer).get(name) for one in readers]
            if not readers:
                found[f"{group}.{name}"] = "every stage of train.stages has its own"
            elif group == "optimizer" and all(reasons):
                found[f"{group}.{name}"] = reasons[0]
    return found


def _of_schedule(optimizer: OptimizerConfig) -> dict[str, str]:
    """What the schedule does not read → why."""
    schedule = optimizer.schedule
    why, found = f"the schedule is {schedule!r}", {}
    if schedule != "warmup_stable_decay":
        found["decay_fraction"] = why
    if schedule == "constant":
        found["final_fraction"] = why
    return found


def _begun(workdir: pathlib.Path | None, restart: bool) -> Config | None:
    """The configuration of the run in `workdir`, where one has begun there."""
    if workdir is None or restart or not (workdir / "run.json").exists():
        return None
    try:
        return read_config(workdir)
    except UserError:  # which is told where the folder is opened
        return None


DEFAULTS = values(Config())
