"""How a run starts: what is checked before any data are prepared, and its first state."""

import pathlib
from collections.abc import Sequence

from jax.sharding import Mesh

from qwen3next_jax.common.rooms import require_room, warn_without
from qwen3next_jax.config import Config, EvalConfig, ModelConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.data.pipeline import Data, source_of
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.model.block import check_mixers
from qwen3next_jax.processes.distributed import is_process_0, run_on_all
from qwen3next_jax.runs import branching, origin, preflight
from qwen3next_jax.runs.folder import config_of, read_run, saved_steps
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import DataCursor, resolve_stages
from qwen3next_jax.training.state import State

SAMPLE_TEMPERATURE = 0.7


def prepare_start(
    config: Config, mesh: Mesh, workdir: pathlib.Path, restart: bool = False
) -> ResolvedRun:
    """Checks whatever can be checked before data are prepared, and works out the run: what
    `preflight` looks at, every stage's batches on `mesh`, the versions of a model that was
    trained before, evaluations and samples, the tensors of `train.init_from`.

    Raises:
      UserError: names the first mistake.
    """
    preflight.check(config, workdir, restart, records=is_process_0())
    begins = restart or not saved_steps(workdir)
    if not begins:
        record = read_run(workdir)
        check_versions(workdir, record, config_of(record, workdir), trains=True)
    elif parent := preflight.find_parent(config, workdir, restart):
        folder = pathlib.Path(parent["path"])
        branching.check_parent_versions(folder, read_run(folder), config)
    config = preflight.with_tokenizer(config, workdir, restart)
    run = resolve_run(config, mesh)
    tokenizer = source_of(config.data).tokenizer_of(config.data, run.model.vocab_size)
    check_evaluations(config.eval, run.model, tokenizer)
    init_from = config.train.init_from
    if init_from and begins and not preflight.names_run(init_from):
        require_room("interop", f"train.init_from = {init_from}")
        from qwen3next_jax.interop.huggingface import check_hf

        check_hf(init_from)
    return run


def check_settings_alone(config: Config) -> None:
    """Checks what depends on the settings and the data's files alone: no folder of a run, no
    devices.

    Raises:
      UserError: names the first mistake.
    """
    check_mixers(config.model)
    resolve(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    source = source_of(config.data)
    tokenizer = source.tokenizer_of(config.data, config.model.vocab_size)
    check_evaluations(config.eval, config.model, tokenizer)
    for stage in resolve_stages(config):
        source.check(stage.data, stage.sequence_length, config.model.vocab_size)


def check_evaluations(config: EvalConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Checks that the evaluations and the sample of a run can run on such a model.

    Raises:
      UserError: names the one that cannot.
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
    """(the state before the first step, the cursor of that step): random weights, or what
    `train.init_from` names.

    Args:
      parent: the run that `train.init_from` names, if it names one.
      files: what `stamp_hf` must say of the Hugging Face directory that it names, if it does.

    Raises:
      UserError: what it names is not what it was, is damaged, or of another structure.
    """
    if parent:
        return branching.start_state(run, data, parent)
    cursor = DataCursor(data[0].fingerprint, data[0].batch_size)
    init_from = run.config.train.init_from
    if not init_from:
        return run.init_state(), cursor
    from qwen3next_jax.interop.huggingface import load_params

    if files:
        run_on_all(lambda: origin.check_files(init_from, files))
    preflight.check_structure(run.model, init_from)
    return run.init_state(load_params(init_from, run.abstract_state["params"])), cursor
