"""`train.py --dry-run`: prints how a run would start, and its size, without training."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.estimate import Estimate, estimate_size
from qwen3next_jax.data.pipeline import data_source_class, find_sources
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.processes.distributed import is_process_0, run_on_all
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.checks import check_and_resolve_run
from qwen3next_jax.runs.folder import check_checkpoints_not_lost
from qwen3next_jax.runs.init_from import describe_skipped_checkpoints
from qwen3next_jax.runs.memory import (
    bytes_per_device,
    check_activations_fit,
    check_state_fits,
    format_bytes,
    minimum_activation_bytes,
)
from qwen3next_jax.runs.notices import surprising_settings
from qwen3next_jax.runs.start import Start
from qwen3next_jax.runs.telemetry import device_memory_peak_and_limit
from qwen3next_jax.sharding.compiler_options import compiler_options, options_text
from qwen3next_jax.sharding.mesh import make_mesh, mesh_text
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    ResolvedStage,
    SourceReading,
    cursor_of_first_step,
    describe_epochs,
    epochs_warning,
    resolve_stages,
    tokens_seen,
)


def dry_run(start: Start, *, devices: Sequence[Any] | None = None) -> ExitCode:
    """Prints how a run would start: its parameters, memory, data, tokens, FLOPs and first step.

    Args:
      start: the decision about the start, from `runs.start.prepare_start`.
      devices: the devices of the run; None: all devices that JAX finds.

    Returns:
      The exit code.

    Raises:
      UserError: the run cannot start; `train` would raise the same error. This function does not
        find every error that `train` finds, because it reads only the first documents of each data
        source, and no values of the tensors in `train.init_from`.
    """
    mesh = make_mesh(start.config.parallel, devices)
    run = run_on_all(lambda: check_and_resolve_run(start, mesh))
    lengths = sorted({stage.sequence_length for stage in run.stages})
    data = run_on_all(lambda: _read_first_documents(run.config.data, run.model.vocab_size, lengths))
    step = (
        0 if start.facts.restart else _newest_valid_step(start.workdir)
    )  # all processes take part
    if not is_process_0():
        return ExitCode.DONE
    train = run.config.train
    taken = start.parent.step if start.parent and train.init_state == "all" else step
    if not step and not start.facts.restart:
        check_checkpoints_not_lost(start.workdir)
    for line in surprising_settings(run, start):
        print(line)
    _print_size(run)
    print(f"Data: {data.text}")
    _print_stages(run, taken)
    _print_epochs(run, data.size_estimates, find_data_read_by_parent(run, start))
    if step:
        first = f"after step {step}"
    elif not train.init_from:
        first = f"with random weights (train.seed = {train.seed})"
    else:
        first = _describe_init_from(start)
    finished = "no step remains " if step >= run.steps else ""
    print(f"Start in {start.workdir}: {finished}{first}. Nothing has been written")
    # This check comes last, so that the size of a run that does not fit is printed first.
    check_state_fits(run.abstract_state)
    for stage in run.stages:
        check_activations_fit(run, stage)
    return ExitCode.DONE


def _print_size(run: ResolvedRun) -> None:
    """Prints the number of parameters, the devices, the compiler options, and the memory that the
    train state needs on a device.
    """
    params, opt_state = run.abstract_state["params"], run.abstract_state["opt_state"]
    kind = run.mesh.devices.flat[0].device_kind
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{run.config.name}: {parameters:,} parameters on {run.mesh.size} × {kind} "
        f"({mesh_text(dict(run.mesh.shape))})"
    )
    if options := compiler_options(run.config.parallel, run.mesh):
        print(f"The step's {options_text(options)}")
    sizes = {
        "parameters": bytes_per_device(params),
        "optimizer state": bytes_per_device(opt_state),
        "gradients": bytes_per_device(params) - bytes_per_device(run.groups.select_frozen(params)),
    }
    if "ema" in run.abstract_state:
        sizes["average of the parameters"] = bytes_per_device(run.abstract_state["ema"])
    limit = device_memory_peak_and_limit()[1]
    print(
        "Memory of a device: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        + f": {format_bytes(sum(sizes.values()))}"
        + (f" of {format_bytes(limit)}" if limit else "")
    )
    activations = max(minimum_activation_bytes(run, stage) for stage in run.stages)
    at_least = f" at least {format_bytes(activations)}, the layers' inputs alone"
    print(
        f"Activations add to this{at_least if activations else ''}; qwen3next plan compiles the "
        "real step and says how much"
    )


def _print_stages(run: ResolvedRun, taken: int) -> None:
    """Prints the numbers of tokens and FLOPs of every stage. The first `taken` steps of the run,
    which an earlier process or the parent has taken, do not count.
    """
    total = 0.0
    for stage in run.stages:
        first = max(stage.steps_before, taken)
        steps = stage.last_step - first
        if steps <= 0:
            continue
        of_stage = f" of stage {stage.name}" if stage.name else ""
        tokens = stage.tokens_per_step
        tokens_at_once = -(-tokens // (stage.micro_batches * run.mesh.size))
        flops = flops_per_token(run.model, stage.sequence_length)
        total += flops * tokens * steps
        print(
            f"Tokens{of_stage}: {stage.batch_size:,} × {stage.sequence_length:,} = {tokens:,} a "
            f"step, {tokens * steps:,} in {steps:,} steps ({first + 1:,} … {stage.last_step:,}), "
            f"{tokens_at_once:,} a device and micro-batch"
        )
        print(
            f"FLOPs of the model{of_stage}, forward and backward: {flops:.4g} a token, "
            f"{flops * tokens:.4g} a step, {flops * tokens * steps:.4g} in all"
        )
    if run.config.train.stages:
        tokens = tokens_seen(run.stages, run.steps) - tokens_seen(run.stages, taken)
        print(f"Together: {tokens:,} tokens, {total:.4g} FLOPs in {run.steps - taken:,} steps")


def _describe_init_from(start: Start) -> str:
    """Describes the model in `train.init_from` with which a new run begins."""
    train, parent = start.config.train, start.parent
    model = train.init_from
    if parent:
        skipped = describe_skipped_checkpoints(start.facts.initial_model)
        model = (
            f"{parent.path}, step {parent.step}{skipped}, train.init_state = {train.init_state!r}"
        )
    return f"with {model}, reading {start.tokenizer_note}"


class _DataSummary(NamedTuple):
    """A description of the training data.

    Attributes:
      text: the description, for the terminal.
      size_estimates: the estimated size of each data source; None for a source whose text files are
        gone, so that only prepared tokens remain. Empty if the data are generated.
    """

    text: str
    size_estimates: Sequence[Estimate | None]


def _read_first_documents(
    config: DataConfig, vocab_size: int, row_lengths: Sequence[int]
) -> _DataSummary:
    """Reads the first documents of each data source, and estimates the sizes of the sources.

    Args:
      config: settings of the data.
      vocab_size: size of the model's vocabulary.
      row_lengths: for all stages, the number of tokens of a row.
    """
    if config.source != "text":
        return _DataSummary(f"{config.source}, generated during training", [])
    tokenizer = data_source_class(config).tokenizer_of(config, vocab_size)
    resolved = find_sources(config, tokenizer)
    estimates = [
        None if source.text_is_gone else estimate_size(source, tokenizer, row_lengths)
        for source in resolved
    ]
    long = "".join(text for one in estimates if one for text in one.long_conversation_notes)
    files = sum(len(source.files) for source in resolved)
    text = (
        f"{files:,} {'file' if files == 1 else 'files'}, "
        f"{format_bytes(sum(source.size for source in resolved))}, tokenizer of "
        f"{tokenizer.vocab_size:,} tokens; the first documents"
        f"{' of each source' if len(resolved) > 1 else ''} have been read{long}"
    )
    return _DataSummary(text, estimates)


class DataReadByParent(NamedTuple):
    """How much training data the parent of a run had read when the run began.

    Attributes:
      parent_steps: the number of steps that the parent had taken; 0 if the run begins at step 0.
      shared_stages: the stages in which the parent read the data of this run.
    """

    parent_steps: int
    shared_stages: Sequence[ResolvedStage]


def find_data_read_by_parent(run: ResolvedRun, start: Start) -> DataReadByParent:
    """Returns how much the parent had read, if the run begins or began with the whole state of its
    parent (`train.init_state = "all"`). If the run has a checkpoint of its own, the function does
    not read the parent, and assumes that the parent has the stages of the run.
    """
    if start.config.train.init_state != "all":
        return DataReadByParent(0, ())
    if start.parent:
        keys_of_run = {_key_of_rows_read(stage) for stage in run.stages}
        stages_of_parent = resolve_stages(start.facts.initial_model.config)
        shared_stages = [
            stage for stage in stages_of_parent if _key_of_rows_read(stage) in keys_of_run
        ]
        return DataReadByParent(start.parent.step, shared_stages)
    cursor = cursor_of_first_step(start.facts.folder.record.data)
    return DataReadByParent(cursor.step, run.stages if cursor.continues_stream else ())


def _key_of_rows_read(stage: ResolvedStage) -> tuple[DataConfig, int]:
    """Returns a key that is equal for two stages that read the same rows, even if the weights of
    their data sources differ.
    """
    return dataclasses.replace(stage.data, weights="", prepared_dir=""), stage.sequence_length


def estimate_source_readings(
    stages: Sequence[ResolvedStage], estimates: Sequence[Estimate], parent: DataReadByParent
) -> dict[str, SourceReading]:
    """Estimates how much of each data source a run reads, including what its parent has read.

    Args:
      stages: the stages of the run.
      estimates: the estimated size of each data source.
      parent: how much the parent has read.

    Returns:
      Name of a source → how much of the source is read. `training.stages.reading_by_source`
      computes the same numbers from the rows of prepared data.
    """
    first = parent.parent_steps
    steps = [(s, min(s.last_step, first) - s.steps_before) for s in parent.shared_stages]
    steps += [(s, s.last_step - max(s.steps_before, first)) for s in stages]
    read: dict[str, SourceReading] = {}
    for stage, count in steps:
        tokens = max(count, 0) * stage.tokens_per_step
        weights = stage.data.source_weights or [one.tokens for one in estimates]
        for source, one, weight in zip(stage.data.sources, estimates, weights, strict=True):
            share = tokens * weight / sum(weights)
            before = read.get(source.name, SourceReading(0.0, 0.0, 0))
            read[source.name] = SourceReading(
                before.epochs + share / one.tokens, before.tokens_read + share, round(one.documents)
            )
    return read


def _print_epochs(
    run: ResolvedRun, estimates: Sequence[Estimate | None], parent: DataReadByParent
) -> None:
    """Prints how often the run reads each data source, as far as the first documents of the source
    let one estimate its size.

    Args:
      estimates: the estimated size of each data source; None if the size is unknown.
    """
    if not estimates or None in estimates:
        return
    read = estimate_source_readings(run.stages, estimates, parent)
    print(f"The run {describe_epochs(read, run.steps)}, as the first documents suggest")
    if line := epochs_warning(read):
        print(f"warning: {line}")


def _newest_valid_step(workdir: pathlib.Path) -> int:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.newest_valid_step() or 0
