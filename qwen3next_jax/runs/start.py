"""The start of a run: checks before the data are prepared, and the first train state."""

import dataclasses
import pathlib
from collections.abc import Sequence

from jax.sharding import Mesh

from qwen3next_jax.common.rooms import require_room, warn_without
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import Config, EvalConfig, ModelConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.data.pipeline import Data, source_of
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.model.adapter_names import base_params
from qwen3next_jax.model.layer_properties import check_mixers
from qwen3next_jax.processes.distributed import is_process_0, run_on_all
from qwen3next_jax.runs import branching, origin, preflight
from qwen3next_jax.runs.folder import complete_steps, config_of, read_run
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import DataCursor, resolve_stages
from qwen3next_jax.training.state import State
from qwen3next_jax.training.vocabulary import grow_vocabulary, with_vocabulary

SAMPLE_TEMPERATURE = 0.7


def prepare_start(
    config: Config, mesh: Mesh, workdir: pathlib.Path, restart: bool = False
) -> ResolvedRun:
    """Resolves the settings of a run, and makes all checks that need no data.

    These are the checks of `preflight`, and the following. The mesh can split the batches of every
    stage. If the run resumes, or begins with the weights of another run, this code has the versions
    of the model's modules with which the weights were trained. The evaluations and the sample can
    run. If the run begins with a Hugging Face directory, no tensor of it is missing.

    Raises:
      UserError: a check failed; the message names the first mistake.
    """
    preflight.check(config, workdir, restart, records=is_process_0())
    is_new = restart or not complete_steps(workdir)
    if not is_new:
        record = read_run(workdir)
        trained = config_of(record, workdir)
        check_versions(workdir, record, trained.model)
    elif parent := preflight.find_parent(config.train, config.optimizer, workdir, restart):
        folder = to_path(parent["path"])
        branching.check_parent_versions(folder, read_run(folder), config.model.mtp_depth)
    init_from = config.train.init_from
    data = preflight.with_tokenizer(config.data, init_from, workdir, restart)
    config = dataclasses.replace(config, data=data)
    run = resolve_run(config, mesh)
    tokenizer = source_of(config.data).tokenizer_of(config.data, run.model.vocab_size)
    check_evaluations(config.eval, run.model, tokenizer)
    if init_from and is_new and not preflight.is_run(init_from):
        require_room("interop", f"train.init_from = {init_from}")
        from qwen3next_jax.interop.huggingface import check_hf

        check_hf(init_from)
    return run


def check_without_devices(config: Config) -> None:
    """Checks the settings of a run and the files of its data, without devices and without the
    folder of the run. Sweeps check their points with this function.

    Raises:
      UserError: a check failed; the message names the first mistake.
    """
    check_mixers(config.model)
    resolve(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    source = source_of(config.data)
    tokenizer = source.tokenizer_of(config.data, config.model.vocab_size)
    check_evaluations(config.eval, config.model, tokenizer)
    for stage in resolve_stages(config):
        source.check(stage.data, stage.sequence_length, config.model.vocab_size)


def check_evaluations(config: EvalConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Checks that the evaluations and the sample of a run can run on the model.

    Raises:
      UserError: an evaluation or the sample cannot run on the model; the message names it.
    """
    if warn_without("evals", "nothing is evaluated"):
        from qwen3next_jax.evals import evaluation

        evaluation.check_evaluations(
            config.suites, evaluation.options_from_config(config), model, tokenizer
        )
    if config.sample_tokens and warn_without("inference", "no samples are drawn"):
        from qwen3next_jax.inference.decode import check_request

        prompt = tokenizer.encode(config.sample_prompt)
        check_request(model, [prompt], config.sample_tokens, SAMPLE_TEMPERATURE)


def start_state(
    run: ResolvedRun,
    data: Sequence[Data],
    parent: preflight.Parent | None = None,
    files: str = "",
) -> tuple[State, DataCursor]:
    """Makes the first state of a run, from random weights or from the model in `train.init_from`.

    Args:
      run: the run.
      data: the training data of every stage.
      parent: the record of the run in `train.init_from`; None if `train.init_from` names no run.
      files: the digest (`huggingface.stamp_hf`) that the files of the Hugging Face directory in
        `train.init_from` had when the run was set up; "" skips the comparison.

    Returns:
      The train state before the first step; and a `DataCursor`, the place in the training data at
      which the run begins to read.

    Raises:
      UserError: the model in `train.init_from` was replaced since the run was set up, or is
        damaged; its parameters have other shapes or another meaning than the run's, or it has no
        multi-token prediction module and the run's model has one; or another version of the code
        computes one of its modules differently.
    """
    if parent:
        return branching.state_from_parent(run, data, parent)
    cursor = DataCursor(data[0].fingerprint, data[0].batch_size)
    init_from = run.config.train.init_from
    if not init_from:
        return run.init_state(), cursor
    from qwen3next_jax.interop.huggingface import load_params

    def check_files():
        if files:
            run_on_all(lambda: origin.check_files(init_from, files))

    check_files()
    preflight.check_structure(run.model, init_from)
    grown = base_params(run.abstract_state["params"])
    vocab_size = preflight.source_model(init_from).vocab_size
    params = load_params(init_from, with_vocabulary(grown, run.model, vocab_size))
    check_files()  # they may have been replaced while they were read
    return run.init_state(grow_vocabulary(params, grown, run.model)), cursor
