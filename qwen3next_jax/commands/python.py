"""The commands as Python functions, for scripts and notebooks:

    import qwen3next_jax as qwen3next

    config = qwen3next.load_config("tiny", {"train.steps": 100})
    run = qwen3next.train(config, "runs/first")
    steps, losses = run.series("loss")
    print(qwen3next.generate("runs/first", "def ", max_new_tokens=40))

A mistake raises `UserError`, whose text is the line that the command prints.
"""

import dataclasses
import html
import os
import pathlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qwen3next_jax.common.errors import ExitCode, UserError, did_you_mean, require, short_repr
from qwen3next_jax.common.installation import exclude_absent_tpu_from_jax
from qwen3next_jax.common.storage import to_path, with_patience
from qwen3next_jax.config import Config, MeshConfig, from_dict, registry
from qwen3next_jax.config.files import (
    default_of_setting,
    find_user_or_shipped_file,
    load_config_file,
)

exclude_absent_tpu_from_jax(os.environ)  # before the functions below import JAX


def load_config(path: str | pathlib.Path, settings: Mapping[str, Any] | None = None) -> Config:
    """Reads a config file.

    Args:
      path: the path of the file, or the name of a config that comes with this project, such as
        "tiny".
      settings: {dotted name: value} of settings to change, such as {"train.steps": 100}.

    Raises:
      UserError: the file cannot be read, or a setting does not exist or is not valid.
    """
    from qwen3next_jax.runs.vocabulary import fill_vocabulary_from_tokenizer

    require(
        isinstance(path, (str, os.PathLike)) and os.fspath(path) != "",
        f"path = {short_repr(path)}: expected a config file, or a name such as 'tiny'",
    )
    require(
        settings is None or isinstance(settings, Mapping),
        f"settings = {short_repr(settings)}: expected a dict such as {{'train.steps': 100}}",
    )
    values = load_config_file(find_user_or_shipped_file(path), flag="")
    for name, value in (settings or {}).items():
        require(
            isinstance(name, str),
            f"settings: {short_repr(name)}: expected the name of a setting, such as 'train.steps'",
        )
        default_of_setting(name, as_flag=False)  # raises if there is no such setting
        *groups, key = name.split(".")
        group = values
        for part in groups:
            group = group.setdefault(part, {})
        group[key] = value
    fill_vocabulary_from_tokenizer(values)
    registry.trust_user_settings(values)
    return from_dict(Config, values)


def train(config: Config, workdir: str | pathlib.Path, restart: bool = False) -> "Run":
    """Trains a model, or continues the run in `workdir`, as `qwen3next train` does.

    Args:
      workdir: the folder of the run.
      restart: begin a new run. The files of an old run in `workdir` are moved into the folder
        before-TIME in `workdir`.

    Raises:
      UserError: the run cannot start, or it ended before its last step; metrics.jsonl says why.
    """
    from qwen3next_jax.runs import train as runs_train
    from qwen3next_jax.runs.start import prepare_start

    _require_config(config)
    workdir = with_patience(to_path(workdir, "workdir = "), config.checkpoint.patience)
    code = runs_train.train(prepare_start(config, workdir, restart))
    if code != ExitCode.DONE:
        raise UserError(
            f"{workdir}: the run ended before its last step (exit code {int(code)}, "
            f"{ExitCode(code).name}): metrics.jsonl in it says why",
            ExitCode(code),
        )
    return Run(workdir)


def evaluate(
    path: str | pathlib.Path,
    names: Sequence[str] = ("heldout",),
    config: Config | None = None,
    step: int | Literal["best"] | None = None,
    rows: int | None = None,
    ema: bool = False,
) -> dict[str, dict[str, float]]:
    """Evaluates a run or a Hugging Face directory, as `qwen3next eval` does, but writes no files.

    Args:
      path: the folder of a run, or a Hugging Face directory.
      names: names of evaluations, such as "heldout" and "position".
      config: the configuration that names the data; None: the configuration of the run.
      step: the number of steps after which the checkpoint was saved; "best": the checkpoint with
        the lowest held-out loss; None: the newest.
      rows: the number of rows of each evaluation; None: the default number of the evaluation.
      ema: for a run, whether to evaluate the moving average of its parameters (`train.ema`).

    Returns:
      {name of the evaluation: {name of a value: number}}.

    Raises:
      UserError: an evaluation does not exist or cannot run on this model.
    """
    from qwen3next_jax.commands.evaluate import run_evaluations
    from qwen3next_jax.evals.evaluation import EvalOptions

    if config is not None:
        _require_config(config)
    require(
        not isinstance(names, str) and all(isinstance(name, str) for name in names),
        f"names = {short_repr(names)}: expected a list of evaluations, such as ['heldout']",
    )
    options = dataclasses.replace(EvalOptions(), rows=rows)
    results = run_evaluations(
        config, to_path(path, "path = "), tuple(names), options, step, ema=ema
    )
    return {result.name: result.values for result in results}


def generate(
    path: str | pathlib.Path,
    prompts: str | Sequence[str],
    step: int | Literal["best"] | None = None,
    **options: Any,
) -> str | list[str]:
    """Continues prompts with a trained model. To continue many prompts one after another, load the
    model once with `trained.load.load_model` and call `inference.decode.generate_to_end`.

    Args:
      path: the folder of a run, or a Hugging Face directory.
      prompts: one text, or several.
      step: the number of steps after which the checkpoint was saved; "best": the checkpoint with
        the lowest held-out loss; None: the newest.
      options: arguments of `inference.decode.generate`, such as temperature=0.8 and seed=1.
        `max_new_tokens` is 100 unless it is given.

    Returns:
      The continuation without the prompt; for several prompts a list.

    Raises:
      UserError: `path` has no model or no tokenizer, or an option is not valid.
    """
    from qwen3next_jax.inference.decode import generate_to_end
    from qwen3next_jax.inference.end_tokens import read_end_token_ids
    from qwen3next_jax.trained.load import load_model

    texts = [prompts] if isinstance(prompts, str) else prompts
    require(
        isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts),
        f"prompts = {short_repr(prompts)}: expected a text or a list of texts",
    )
    _check_generate_options(options)
    path = to_path(path, "path = ")
    model, tokenizer, _, mesh, _ = load_model(path, step)
    if tokenizer is None:
        raise UserError(f"{path}: no tokenizer.json there: put the model's own beside config.json")
    ends = read_end_token_ids(path, model.config.vocab_size)
    stop_ids = sorted((ends | {tokenizer.eos_id, model.config.eos_token_id}) - {-1})
    rows = generate_to_end(
        model,
        [tokenizer.encode(text) for text in texts],
        **{"max_new_tokens": 100, "stop_ids": stop_ids, "mesh": mesh} | options,
    )
    continued = [tokenizer.decode(row) for row in rows]
    return continued[0] if isinstance(prompts, str) else continued


def plan(
    config: Config, topology: str, mesh: Mapping[str, int] | None = None, slices: int = 1
) -> Any:
    """Predicts memory and time of a step on a slice, as `qwen3next plan` does. Compiles the step,
    which takes minutes for a large model.

    Args:
      config: a configuration of one stage.
      topology: the slice, such as "v5p:8x8x8".
      mesh: {axis: number of devices}; None: the mesh of `config`.
      slices: number of slices of this shape.

    Returns:
      A `planner.planning.Plan`; `as_dict()` has its figures.

    Raises:
      UserError: the topology does not exist, or the mesh does not fit the topology or the model.
    """
    from qwen3next_jax.planner.subprocess_plan import make_plan_in_subprocess
    from qwen3next_jax.planner.topology import describe_topology

    _require_config(config)
    require(
        isinstance(topology, str),
        f"topology = {short_repr(topology)}: expected a slice, such as 'v5p:8x8x8'",
    )
    require(
        mesh is None or isinstance(mesh, Mapping),
        f"mesh = {short_repr(mesh)}: expected a dict such as {{'data': 8}}",
    )
    require(
        type(slices) is int and slices >= 1,
        f"slices = {short_repr(slices)}: expected the number of slices, at least 1",
    )
    if mesh is not None:
        mesh_config = from_dict(MeshConfig, dict(mesh), "mesh")
        parallel = dataclasses.replace(config.parallel, mesh=mesh_config)
        config = dataclasses.replace(config, parallel=parallel)
    return make_plan_in_subprocess(config, describe_topology(topology, slices))


class Run:
    """The settings, metrics and checkpoints in the folder of a run. Each call of a method reads the
    folder again, so a run that is still training gives its newest numbers.

    Attributes:
      path: the folder.

    Raises:
      UserError: the folder has no run, or nothing was recorded yet.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = to_path(path, "path = ")
        self._load_recorded_run()

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as nested dicts."""
        return self._load_recorded_run().config

    @property
    def checkpoints(self) -> list[int]:
        """The steps whose checkpoints are in the folder."""
        from qwen3next_jax.runs.folder import saved_steps

        return saved_steps(self.path)

    def series(self, name: str, event: str = "train") -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps [N] and the values [N] of one metric. A value that is null in
        metrics.jsonl is NaN.

        Args:
          name: a field of the events, such as "loss".
          event: the kind of the events: "train", or the name of an evaluation.

        Raises:
          UserError: no event of this kind has the field `name`.
        """
        found = [
            (e["step"], _nan_if_null(e[name])) for e in self._events_of_kind(event) if name in e
        ]
        if not found:
            known = ", ".join(sorted({name for e in self._events_of_kind(event) for name in e}))
            raise UserError(f"{self.path}: no {event!r} event has {name!r}; they have {known}")
        steps, values = zip(*found, strict=True)
        return np.array(steps), np.array(values)

    def table(self, event: str = "train") -> dict[str, np.ndarray]:
        """Returns field → column of numbers, for all events of one kind; pandas.DataFrame accepts
        the result. If a field is missing or null in an event, the number is NaN.
        """
        events = list(self._events_of_kind(event))
        names = dict.fromkeys(
            name
            for one in events
            for name, value in one.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        return {name: np.array([_nan_if_null(one.get(name)) for one in events]) for name in names}

    def _events_of_kind(self, event: str) -> Iterator[dict[str, Any]]:
        return iter(self._load_recorded_run().events_by_kind.get(event, ()))

    def _load_recorded_run(self):
        from qwen3next_jax.reporting.runs import load_run

        return load_run(self.path)

    def __repr__(self) -> str:
        last = self._load_recorded_run().all_events[-1].get("step", 0)
        return f"Run({str(self.path)!r}): step {last}, checkpoints {self.checkpoints}"

    def _repr_html_(self) -> str:
        """Returns the report of the run as HTML, which a notebook shows."""
        from qwen3next_jax.reporting.page import render_report

        page = html.escape(render_report([self._load_recorded_run()]), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="640" frameborder="0"></iframe>'


def _check_generate_options(options: Mapping[str, Any]) -> None:
    """Raises UserError if an option is not an argument of `inference.decode.generate`, or is not a
    number of the argument's type.
    """
    from qwen3next_jax.inference.decode import generate

    kinds = typing.get_type_hints(generate)
    for name, value in options.items():
        require(
            name in kinds and name not in ("model", "prompts", "return"),
            f"{name} = {short_repr(value)}: no such option{did_you_mean(name, kinds)}: expected "
            "an argument of inference.decode.generate, such as max_new_tokens",
        )
        accepted = {int: (int,), float: (int, float)}.get(kinds[name], (object,))
        require(
            isinstance(value, accepted) and (accepted == (object,) or not isinstance(value, bool)),
            f"{name} = {short_repr(value)}: expected a number"
            + (" without a fraction" if kinds[name] is int else ""),
        )


def _require_config(config: Any) -> None:
    require(
        isinstance(config, Config),
        f"config = {short_repr(config)}: expected a Config, which load_config('tiny') returns",
    )


def _nan_if_null(value: Any) -> Any:
    return np.nan if value is None else value
