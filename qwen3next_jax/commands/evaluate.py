"""Evaluates a checkpoint of a run or a Hugging Face directory for `eval.py`, prints the results as
tables, and writes them as JSON.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from flax import nnx
from rich.table import Table

from qwen3next_jax.commands.console import make_console, show_while_waiting
from qwen3next_jax.common.errors import UserError, escape_control_in_lines
from qwen3next_jax.common.metrics import Metric, MetricValue, pair_with_declarations
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import Config, DataConfig, MeshConfig, ModelConfig
from qwen3next_jax.config.compatibility import settings_incompatible_with_weights
from qwen3next_jax.config.registry import EVALUATIONS, check_name
from qwen3next_jax.data.pipeline import DataSource, open_data
from qwen3next_jax.data.progress import PreparationProgress
from qwen3next_jax.data.tokens import Tokenizer, same_token_ids
from qwen3next_jax.evals import evaluation
from qwen3next_jax.processes.distributed import is_process_0, process_0_first
from qwen3next_jax.runs.checkpoint import StepChoice
from qwen3next_jax.runs.facts import tokenizer_of_init_from
from qwen3next_jax.runs.record import read_config
from qwen3next_jax.trained.load import describe_ema_choice, load_model
from qwen3next_jax.training.stages import resolve_stages, stage_at
from qwen3next_jax.training.state import abstract_model


class EvaluationResult(NamedTuple):
    """The results of one evaluation.

    Attributes:
      name: the name of the evaluation, such as "heldout".
      title: a line for readers with the name, the model and the step.
      step: the step of the checkpoint; None for a Hugging Face directory.
      values: name of a value → the value.
      metric_declarations: name of a metric → its declaration.
      belongs_in_run_folder: whether the model is that of the run, with all its settings, so that
        the results belong into the run's folder.
    """

    name: str
    title: str
    step: int | None
    values: dict[str, float]
    metric_declarations: Mapping[str, Metric]
    belongs_in_run_folder: bool


def evaluate_and_print(
    config: Config | None,
    path: pathlib.Path,
    names: tuple[str, ...] = ("heldout",),
    options: evaluation.EvalOptions = evaluation.EvalOptions(),
    json_path: str = "",
    step: StepChoice = None,
    mesh: MeshConfig | None = None,
    dtype: str = "float32",
    ema: bool = False,
) -> int:
    """Runs evaluations, and prints the results of each evaluation as a table. Returns the exit
    code.

    If there are several processes, each must call this function; process 0 prints and writes.

    Args:
      config, path, names, options, step, mesh, dtype, ema: arguments of `run_evaluations`.
      json_path: path of a file to which the results are written; "" for none. The results of a run
        are also written to RUN/eval/NAME.json, or NAME_average.json with `ema`, unless `config`
        changes settings of the model.

    Raises:
      UserError: `run_evaluations` raises a UserError, or a file cannot be written.
    """
    results, wrote = {}, False
    during = show_while_waiting if is_process_0() else nullcontext
    for result in run_evaluations(config, path, names, options, step, mesh, dtype, ema, during):
        _print_values(
            result.title, pair_with_declarations(result.values, result.metric_declarations)
        )
        results[result.name] = {"step": result.step} | result.values
        if result.belongs_in_run_folder:
            name = f"{result.name}_average" if ema else result.name
            _write_values(path / "eval" / f"{name}.json", results[result.name])
            wrote = True
    if wrote:
        print(f"The same as JSON: {path / 'eval'}")
    if json_path:
        _write_values(to_path(json_path), results)
    return 0


def run_evaluations(
    config: Config | None,
    path: pathlib.Path,
    names: tuple[str, ...] = ("heldout",),
    options: evaluation.EvalOptions = evaluation.EvalOptions(),
    step: StepChoice = None,
    mesh: MeshConfig | None = None,
    dtype: str = "float32",
    ema: bool = False,
    during: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> Iterator[EvaluationResult]:
    """Runs evaluations, and yields the results of each evaluation as soon as it ends.

    If there are several processes, each must call this function.

    Args:
      config: the configuration of the evaluation, which names the data. None: the configuration of
        the run, or for a Hugging Face directory the default data. If `path` is a run, `config` may
        change the data, the row length, and settings of the model that do not change the meaning of
        its weights (`config.compatibility`).
      path: the folder of a run, or a Hugging Face directory.
      names: names of evaluations.
      options: the options of all evaluations.
      step, mesh, dtype, ema: arguments of `load_model`.
      during: function that maps a text to a context manager, which shows the text while an
        evaluation runs.

    Raises:
      UserError: an evaluation does not exist or cannot run on this model; the error is raised
        before anything is computed.
    """
    for name in names:
        check_name(EVALUATIONS, name, "--suite")
    is_run = (path / "run.json").exists() or not (path / "config.json").exists()
    if is_run:
        trained = read_config(path)
        if config is not None:
            _check_weights_fit_config(config.model, trained.model, path)
        else:
            # "" means the copy of the tokenizer in the run's folder; the original file may be gone.
            data = dataclasses.replace(trained.data, tokenizer="")
            config = dataclasses.replace(trained, data=data)
    model, tokenizer, step, places, _ = load_model(path, step, mesh, dtype, ema=ema)
    if tokenizer is None:
        raise UserError(
            f"{path}: no tokenizer.json there: put the model's own beside its config.json"
        )
    if config is not None and not config.data.tokenizer:
        data = dataclasses.replace(config.data, tokenizer=tokenizer_of_init_from(str(path)))
        config = dataclasses.replace(config, data=data)
    if is_run:
        # Evaluates with the row length and batch size of the stage that was trained last.
        config = stage_at(resolve_stages(config), step).as_single_stage(config)
    graphdef, params = nnx.split(model, nnx.Param)
    described = config.model if is_run else model.config
    # `other` names the settings of the model that --config changes.
    if other := described.differing_settings(model.config):
        graphdef, _ = abstract_model(described)
    if config is not None:
        data, length, batch_size = (
            config.data,
            config.train.sequence_length,
            config.train.batch_size,
        )
    else:
        data = dataclasses.replace(DataConfig(), tokenizer=str(path / "tokenizer.json"))
        length = max(options.row_lengths)
        batch_size = max(1, 8192 // length)
    vocab_size = model.config.vocab_size

    @functools.cache
    def open_once() -> DataSource:
        return process_0_first(
            lambda: _open_data(data, length, batch_size, path, tokenizer, vocab_size)
        )

    eval_context = evaluation.EvalContext(
        described, graphdef, tokenizer, open_once, options, places
    )
    evaluations = evaluation.make_evaluations(names, eval_context, "--suite", data)

    title = str(path)
    if step is not None:
        title += f" after step {step}"
        if trained.train.ema:
            title += f", {describe_ema_choice(ema)}"
    if other:
        title += f" read with another {', '.join(other)}"
    for name, one in evaluations.items():
        with during(f"{name}: compiling, then evaluating"):
            values = one.run(nnx.to_pure_dict(params))
        yield EvaluationResult(
            name, f"{name} · {title}", step, values, one.metrics, is_run and not other
        )


def _check_weights_fit_config(
    model: ModelConfig, trained: ModelConfig, workdir: pathlib.Path
) -> None:
    """Checks that `model`, the model of --config, can use the weights of `trained`, the model of
    the run in `workdir`.

    Raises:
      UserError: a setting of `model` requires weights with another shape or meaning.
    """
    for name in sorted(settings_incompatible_with_weights(model, trained))[:1]:
        theirs, ours = (
            c.mixers if name == "layer_types" else getattr(c, name) for c in (trained, model)
        )
        raise UserError(
            f"{workdir} holds a run whose model differs from --config (model.{name} = {theirs!r} "
            f"there, {ours!r} in --config): give the config it was trained with"
        )


def _open_data(
    data: DataConfig,
    sequence_length: int,
    batch_size: int,
    path: pathlib.Path,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> DataSource:
    """Opens the data, and checks that they were tokenized with `tokenizer`, the tokenizer of the
    model in `path`.

    Raises:
      UserError: the data were made with another tokenizer.
    """
    with PreparationProgress() as progress:
        opened = open_data(data, sequence_length, batch_size, vocab_size, progress)
    if not same_token_ids(opened.tokenizer.fingerprint, tokenizer.fingerprint):
        raise UserError(
            f"{path} was trained with another tokenizer than data.tokenizer = "
            f"{data.tokenizer!r} of the configuration: give the run's own (a copy is in "
            f"{path / 'tokenizer'}, unless it is bytes)"
        )
    return opened


def _print_values(title: str, values: list[MetricValue]) -> None:
    """Prints the values as a table. If several metrics were measured under the same conditions
    (such as loss and bits per byte at positions 1-1, 2-3, …), the table has a row per condition and
    a column per metric. If the metrics do not share their conditions, the table has a row per
    value.
    """
    cells = {(value.metric_name, value.condition_in_key): str(value) for value in values}
    titles = {value.metric_name: value.metric.title for value in values}
    conditions = {value.condition_in_key: value.displayed_condition for value in values}
    if len(cells) == len(titles) * len(conditions) > len(titles):
        table = Table("", *titles.values())
        for condition, text in conditions.items():
            table.add_row(text or "all", *(cells[kind, condition] for kind in titles))
    else:
        table = Table("", "", show_header=False)
        for value in values:
            table.add_row(value.title_and_condition, str(value))
    console = make_console()
    console.print(escape_control_in_lines(title), markup=False)
    console.print(table)


def _write_values(path: pathlib.Path, values: dict) -> None:
    if not is_process_0():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
