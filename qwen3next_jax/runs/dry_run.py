"""`train.py --dry-run`: prints what has been decided about the start of a run, and its size."""

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
from qwen3next_jax.runs.checks import resolve_start
from qwen3next_jax.runs.folder import check_checkpoints_not_lost
from qwen3next_jax.runs.init_from import describe_skipped
from qwen3next_jax.runs.memory import (
    activation_bytes,
    check_activations_fit,
    check_state_fits,
    device_bytes,
    gigabytes,
)
from qwen3next_jax.runs.notices import describe_notices
from qwen3next_jax.runs.start import Start
from qwen3next_jax.runs.telemetry import device_memory
from qwen3next_jax.sharding.compiler_options import compiler_options, options_text
from qwen3next_jax.sharding.mesh import make_mesh, mesh_text
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    ResolvedStage,
    SourceReading,
    describe_epochs,
    epochs_warning,
    first_cursor,
    resolve_stages,
    tokens_seen,
)


def dry_run(start: Start, *, devices: Sequence[Any] | None = None) -> ExitCode:
    """Prints how a run starts: its parameters, memory, data, tokens, FLOPs and first step.

    Args:
      start: the decision about the start, from `runs.start.prepare_start`.
      devices: the devices of the run; None: all that JAX finds.

    Returns:
      The exit code.

    Raises:
      UserError: the run cannot start; `train` would raise the same error. Some errors only `train`
        finds, because this function reads only the first documents of each source, and reads no
        values of the tensors in `train.init_from`.
    """
    mesh = make_mesh(start.config.parallel, devices)
    run = run_on_all(lambda: resolve_start(start, mesh))
    lengths = sorted({stage.sequence_length for stage in run.stages})
    data = run_on_all(lambda: _describe_data(run.config.data, run.model.vocab_size, lengths))
    step = 0 if start.facts.restart else _newest_step(start.workdir)  # all processes take part
    if not is_process_0():
        return ExitCode.DONE
    train = run.config.train
    taken = start.parent.step if start.parent and train.init_state == "all" else step
    if not step and not start.facts.restart:
        check_checkpoints_not_lost(start.workdir)
    for line in describe_notices(run, start):
        print(line)
    _print_devices(run)
    print(f"Data: {data.text}")
    _print_stages(run, taken)
    _print_epochs(run, data.estimates, parent_reading(run, start))
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


def _print_devices(run: ResolvedRun) -> None:
    """Prints the number of parameters, the devices, the compiler options and the state's memory."""
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
        "parameters": device_bytes(params),
        "optimizer state": device_bytes(opt_state),
        "gradients": device_bytes(params) - device_bytes(run.groups.select_frozen(params)),
    }
    if "ema" in run.abstract_state:
        sizes["average of the parameters"] = device_bytes(run.abstract_state["ema"])
    limit = device_memory()[1]
    print(
        "Memory of a device: "
        + ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items())
        + f": {gigabytes(sum(sizes.values()))}"
        + (f" of {gigabytes(limit)}" if limit else "")
    )
    activations = max(activation_bytes(run, stage) for stage in run.stages)
    at_least = f" at least {gigabytes(activations)}, the layers' inputs alone"
    print(
        f"Activations add to this{at_least if activations else ''}; qwen3next plan compiles the "
        "real step and says how much"
    )


def _print_stages(run: ResolvedRun, taken: int) -> None:
    """Prints tokens and FLOPs of every stage, without the first `taken` steps of the run, which are
    already taken.
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
        model = (
            f"{parent.path}, step {parent.step}{describe_skipped(start.facts.source)}, "
            f"train.init_state = {train.init_state!r}"
        )
    return f"with {model}, reading {start.tokens}"


class _Described(NamedTuple):
    """The training data.

    Attributes:
      text: a description.
      estimates: the size of each source; None if its text is gone, and only its tokens are there.
        Empty if the data are generated.
    """

    text: str
    estimates: Sequence[Estimate | None]


def _describe_data(config: DataConfig, vocab_size: int, row_lengths: Sequence[int]) -> _Described:
    """Reads the first documents of each source.

    Args:
      config: settings of the data.
      vocab_size: size of the model's vocabulary.
      row_lengths: the numbers of tokens of a row, over all stages.
    """
    if config.source != "text":
        return _Described(f"{config.source}, generated during training", [])
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
        f"{gigabytes(sum(source.size for source in resolved))}, tokenizer of "
        f"{tokenizer.vocab_size:,} tokens; the first documents"
        f"{' of each source' if len(resolved) > 1 else ''} have been read{long}"
    )
    return _Described(text, estimates)


class ParentReading(NamedTuple):
    """What the parent of a branch had read when the branch began.

    Attributes:
      steps: the number of steps of the parent; 0 if the run begins at step 0.
      stages: the stages in which the parent read the data of this run.
    """

    steps: int
    stages: Sequence[ResolvedStage]


def parent_reading(run: ResolvedRun, start: Start) -> ParentReading:
    """Returns what the parent had read, if the run begins, or began, with the whole state of its
    parent. The parent of a run with a checkpoint of its own is not read: its stages are taken to be
    those of the run.
    """
    if start.config.train.init_state != "all":
        return ParentReading(0, ())
    if start.parent:
        ours = {_what_is_read(stage) for stage in run.stages}
        theirs = resolve_stages(start.facts.source.config)
        same = [stage for stage in theirs if _what_is_read(stage) in ours]
        return ParentReading(start.parent.step, same)
    cursor = first_cursor(start.facts.folder.record.data)
    return ParentReading(cursor.step, run.stages if cursor.continues_stream else ())


def _what_is_read(stage: ResolvedStage) -> tuple[DataConfig, int]:
    """Returns a key that is equal for stages that read the same rows, in whatever proportion."""
    return dataclasses.replace(stage.data, weights="", prepared_dir=""), stage.sequence_length


def estimate_reading(
    stages: Sequence[ResolvedStage], estimates: Sequence[Estimate], parent: ParentReading
) -> dict[str, SourceReading]:
    """Returns name of a source → how much of it a run reads, with what its parent has read, as
    `training.stages.reading_by_source` returns it for rows.

    Args:
      stages: the stages of the run.
      estimates: the size of each source of the data.
    """
    steps = [(s, min(s.last_step, parent.steps) - s.steps_before) for s in parent.stages]
    steps += [(s, s.last_step - max(s.steps_before, parent.steps)) for s in stages]
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
    run: ResolvedRun, estimates: Sequence[Estimate | None], parent: ParentReading
) -> None:
    """Prints how often the run reads each source, by the sizes of their first documents.

    Args:
      estimates: the size of each source of the data; None: unknown.
    """
    if not estimates or None in estimates:
        return
    read = estimate_reading(run.stages, estimates, parent)
    print(f"The run {describe_epochs(read, run.steps)}, as the first documents suggest")
    if line := epochs_warning(read):
        print(f"warning: {line}")


def _newest_step(workdir: pathlib.Path) -> int:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.newest_good_step() or 0
