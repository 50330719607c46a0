"""What `eval.py` runs: evaluations by name on a run's newest checkpoint or on a Hugging Face
directory, as tables and JSON.
"""

import dataclasses
import functools
import json
import pathlib

from flax import nnx
from rich.console import Console
from rich.table import Table

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.metrics import MetricValue, to_metric_values
from qwen3next_jax.config import Config, DataConfig, MeshConfig
from qwen3next_jax.config.compatibility import weights_differ
from qwen3next_jax.config.registry import EVALUATIONS, check_name
from qwen3next_jax.data.pipeline import Data, open_data
from qwen3next_jax.data.tokens import Tokenizer, same_tokens
from qwen3next_jax.evals import evaluation
from qwen3next_jax.processes.distributed import is_leader, process_0_first
from qwen3next_jax.runs.display import PreparationProgress
from qwen3next_jax.runs.folder import read_config
from qwen3next_jax.runs.load import load_model
from qwen3next_jax.runs.preflight import tokenizer_of_model
from qwen3next_jax.training.stages import resolve_stages, stage_at
from qwen3next_jax.training.state import abstract_model


def evaluate(
    config: Config | None,
    path: pathlib.Path,
    names: tuple[str, ...] = ("heldout",),
    options: evaluation.EvalOptions = evaluation.EvalOptions(),
    json_path: str = "",
    step: int | None = None,
    mesh: MeshConfig | None = None,
    dtype: str = "float32",
) -> int:
    """Runs the evaluations `names`, prints a table of each as it ends. Returns the exit code.

    Args:
      config: what rows are read; None is the run's own, and for a Hugging Face directory the
      default corpus. One that is given
        must name the same architecture, and may name other data; of a run, also another way to
        read the same parameters (`config.compatibility`) and another context.
      path: the folder of a run, or a Hugging Face directory.
      json_path: where the results go as well. A run's go to RUN/eval/NAME.json in any case, but
      not where it is read in another way. step, mesh, dtype: see `load_model`. Several processes
      call this together, and the first of them writes.

    Raises:
      UserError: an evaluation does not exist or cannot run on this model (said before anything
      is computed).
    """
    for name in names:
        check_name(EVALUATIONS, name, "--suite")
    is_run = (path / "run.json").exists() or not (path / "config.json").exists()
    if is_run:
        config = _config_of_run(config, path)
    model, tokenizer, step, places, _ = load_model(path, step, mesh, dtype)
    if tokenizer is None:
        raise UserError(
            f"{path}: no tokenizer.json there: put the model's own beside its config.json"
        )
    if config is not None and not config.data.tokenizer:
        data = dataclasses.replace(config.data, tokenizer=tokenizer_of_model(str(path)))
        config = dataclasses.replace(config, data=data)
    if is_run:
        # The rows of the stage that was trained last.
        config = stage_at(resolve_stages(config), step).as_single_stage(config)
    graphdef, params = nnx.split(model, nnx.Param)
    described = config.model if is_run else model.config
    if other := described.differs(model.config):  # the run's parameters, read in another way
        graphdef, _ = abstract_model(described)
    eval_context = evaluation.EvalContext(
        described,
        graphdef,
        tokenizer,
        functools.cache(
            lambda: process_0_first(
                lambda: _open(
                    config, path, tokenizer, model.config.vocab_size, max(options.lengths)
                )
            )
        ),
        options,
        places,
    )
    evaluations = evaluation.make_evaluations(names, eval_context, "--suite")

    results = {}
    title = (
        f"{path} after step {step}" if step is not None else str(path)
    ) + f" read with another {', '.join(other)}" * bool(other)
    for name, one in evaluations.items():
        values = one.run(nnx.to_pure_dict(params))
        _print(f"{name} · {title}", to_metric_values(values, one.metrics))
        results[name] = {"step": step} | values
        if is_run and not other:
            _write(path / "eval" / f"{name}.json", results[name])
    if is_run and not other:
        print(f"The same as JSON: {path / 'eval'}")
    if json_path:
        _write(pathlib.Path(json_path), results)
    return 0


def _config_of_run(config: Config | None, workdir: pathlib.Path) -> Config:
    trained = read_config(workdir)
    different = () if config is None else weights_differ(config.model, trained.model)
    for name in sorted(different)[:1]:
        theirs, ours = (
            c.mixers if name == "layer_types" else getattr(c, name)
            for c in (trained.model, config.model)
        )
        raise UserError(
            f"{workdir} holds a run whose model differs from --config (model.{name} = {theirs!r} "
            f"there, {ours!r} in --config): give the config it was trained with"
        )
    # with the tokenizer of which the run keeps a copy, wherever the file is that it was read from
    return config or dataclasses.replace(
        trained, data=dataclasses.replace(trained.data, tokenizer="")
    )


def _open(
    config: Config | None, path: pathlib.Path, tokenizer: Tokenizer, vocab_size: int, length: int
) -> Data:
    with PreparationProgress() as progress:
        if config is not None:
            data = open_data(
                config.data,
                config.train.sequence_length,
                config.train.batch_size,
                vocab_size,
                progress,
            )
            if not same_tokens(data.tokenizer.fingerprint, tokenizer.fingerprint):
                raise UserError(
                    f"{path} was trained with another tokenizer than data.tokenizer = "
                    f"{config.data.tokenizer!r} of the "
                    f"configuration: give the run's own (a copy is in {path / 'tokenizer'}, "
                    "unless it is bytes)"
                )
            return data
        data = dataclasses.replace(DataConfig(), tokenizer=str(path / "tokenizer.json"))
        return open_data(data, length, max(1, 8192 // length), vocab_size, progress)


def _print(title: str, values: list[MetricValue]) -> None:
    """Prints the values as a table. If several metrics were measured under the same conditions
    (loss and bits per byte at positions 1-1, 2-3, …), a row is a condition and a column a metric;
    otherwise a row is a value.
    """
    cells = {(value.kind, value.condition): str(value) for value in values}
    titles = {value.kind: value.metric.title for value in values}
    conditions = list(dict.fromkeys(value.condition for value in values))
    if len(cells) == len(titles) * len(conditions) > len(titles):
        table = Table("", *titles.values())
        for condition in conditions:
            table.add_row(condition or "all", *(cells[kind, condition] for kind in titles))
    else:
        table = Table("", "", show_header=False)
        for value in values:
            table.add_row(value.label, str(value))
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(table)


def _write(path: pathlib.Path, values: dict) -> None:
    if not is_leader():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
