"""The checks before the start of a run that need JAX: of the mesh, the code of the model and the
evaluations.
"""

import dataclasses

from jax.sharding import Mesh

from qwen3next_jax.common.subpackages import has_subpackage_or_warn
from qwen3next_jax.config import Config, DataConfig, EvalConfig, ModelConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.model.layer_properties import check_mixers
from qwen3next_jax.runs.facts import ParentRun, PretrainedModel
from qwen3next_jax.runs.start import Start
from qwen3next_jax.runs.versions import check_module_versions
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import resolve_stages

SAMPLE_TEMPERATURE = 0.7


def check_and_resolve_run(start: Start, mesh: Mesh) -> ResolvedRun:
    """Resolves the settings of a run for its mesh, and checks that the run can start with them.

    Raises:
      UserError: the mesh cannot split the batches of a stage; this code computes a module of the
        model in another way than the code that trained the weights; an evaluation or the sample
        cannot run; a hook cannot be imported; or the Hugging Face directory in `train.init_from`
        lacks a tensor. The message names the first mistake.
    """
    check_versions_of_weights(start)
    for name in start.config.train.hooks:
        resolve({}, name, "train.hooks")
    run = resolve_run(start.config, mesh)
    check_evaluations(start.config.eval, start.config.data, run.model)
    if isinstance(start.facts.initial_model, PretrainedModel):
        from qwen3next_jax.interop.huggingface import check_hf

        check_hf(start.config.train.init_from)
    return run


def check_versions_of_weights(start: Start) -> None:
    """Checks that this code computes the modules of the model in the same way as the code that
    trained the weights. The weights come from a checkpoint of the run or of its parent.

    Raises:
      UserError: a module of the model has another version in this code.
    """
    folder, parent = start.facts.folder, start.facts.initial_model
    if folder.complete_steps:
        record = folder.record_if_trained()
        model = record.read_config(folder.path).model
        check_module_versions(folder.path, record.versions, record.code, model)
    elif isinstance(parent, ParentRun):
        theirs, ours = parent.model_config, start.config.model
        shared = dataclasses.replace(theirs, mtp_depth=min(theirs.mtp_depth, ours.mtp_depth))
        check_module_versions(parent.folder, parent.record.versions, parent.record.code, shared)


def check_without_devices(config: Config) -> None:
    """Checks the settings of a run and the files of its data, without devices and without the
    folder of the run. A sweep checks each of its configurations with this function.

    Raises:
      UserError: a check failed; the message names the first mistake.
    """
    check_mixers(config.model)
    resolve(OPTIMIZERS, config.optimizer.name, "optimizer.name")
    source = data_source_class(config.data)
    for stage in resolve_stages(config):
        source.check(stage.data, stage.sequence_length, config.model.vocab_size)
        source.check_model(stage.data, config.model)
    check_evaluations(config.eval, config.data, config.model)


def check_evaluations(config: EvalConfig, data: DataConfig, model: ModelConfig) -> None:
    """Checks that the evaluations in the settings `eval`, and the sample, can run on the model.

    Raises:
      UserError: an evaluation or the sample cannot run; the message names it.
    """
    tokenizer = data_source_class(data).tokenizer_of(data, model.vocab_size)
    if has_subpackage_or_warn("evals", "nothing is evaluated"):
        from qwen3next_jax.evals import evaluation

        evaluation.check_evaluations(
            config.suites, evaluation.options_from_config(config), model, tokenizer, data=data
        )
    if config.sample_tokens and has_subpackage_or_warn("inference", "no samples are drawn"):
        from qwen3next_jax.inference.decode import checked_prompts

        prompt = tokenizer.encode(config.sample_prompt)
        checked_prompts(model, [prompt], config.sample_tokens, SAMPLE_TEMPERATURE)
