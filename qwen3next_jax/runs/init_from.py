"""Checks whether a run can begin with the model in `train.init_from`. `runs.facts` has read it."""

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config, LoRAConfig, ModelConfig, OptimizerConfig
from qwen3next_jax.config.compatibility import settings_incompatible_with_weights
from qwen3next_jax.data.tokens import extends_tokenizer, same_token_ids
from qwen3next_jax.runs.facts import (
    ParentRun,
    PretrainedModel,
    TokenizerPair,
    require_plausible_checkpoint,
)
from qwen3next_jax.runs.folder import RunFolder
from qwen3next_jax.runs.record import ParentCheckpoint

# Model settings that have no effect on a model without experts.
EXPERT_SETTINGS = {
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}
# Model settings that may differ between the run and the model in `train.init_from`, because they
# change neither the shape nor the meaning of a parameter.
NON_STRUCTURAL_SETTINGS = {
    "dtype",
    "mtp_depth",
    "decay_init",
    "initializer_range",
    "depth_scaled_init",
    "delta_rule",
    "bos_token_id",
    "eos_token_id",
    "hf_form",
    "hf_fused_experts",
    "lora",
}


def check_initial_model(
    config: Config, initial_model: ParentRun | PretrainedModel, folder: RunFolder
) -> None:
    """Checks whether a run can begin with the model in `train.init_from`.

    Args:
      config: the settings of the run.
      initial_model: what `train.init_from` names.
      folder: the folder of the run, which has no complete checkpoint.

    Raises:
      UserError: the run cannot begin with the model; the message names the first reason.
    """
    if isinstance(initial_model, ParentRun):
        _check_parent_run(config, initial_model, folder)
    else:
        _check_pretrained_model(config, initial_model, folder)
    check_same_structure(config.model, initial_model.model_config, config.train.init_from)
    if isinstance(initial_model, ParentRun) and config.train.init_state == "all":
        _check_can_take_over_state(config, initial_model)


def parent_record(parent: ParentRun) -> ParentCheckpoint:
    """Returns the checkpoint with which the run begins, as run.json records it."""
    status = parent.checkpoint
    return ParentCheckpoint(
        str(parent.folder.absolute()), status.step, status.manifest_digest, parent.record.id
    )


def _check_pretrained_model(config: Config, pretrained: PretrainedModel, folder: RunFolder) -> None:
    require(
        config.train.init_state == "weights",
        f"train.init_from = {config.train.init_from}: a Hugging Face directory has no optimizer "
        "state: set train.init_state = 'weights'",
    )
    begun = folder.record_if_trained()
    recorded = begun and begun.source and begun.source.files
    require(
        not recorded or recorded == pretrained.files_digest,
        f"{folder.path}: its run began with files of a Hugging Face directory that were replaced "
        "since (their sizes or times differ), and it has no checkpoint yet: put them back, "
        "give another --workdir, or start anew with --restart",
    )


def _check_parent_run(config: Config, parent: ParentRun, folder: RunFolder) -> None:
    where, theirs = f"train.init_from = {config.train.init_from}", parent.config
    require(
        parent.folder.resolve() != folder.path.resolve(),
        f"{where}: that is the folder of this run: give another --workdir",
    )
    require(
        parent.checkpoint is not None,
        f"{where}: it has no valid checkpoint yet (its checkpoint.every = "
        f"{theirs.checkpoint.every})",
    )
    require_plausible_checkpoint(where, parent.checkpoint)
    scalings = [describe_optimizer_scaling(one.optimizer) for one in (theirs, config)]
    require(
        scalings[0] == scalings[1],
        f"{where}: its optimizer.scaling is {scalings[0]}, here it is {scalings[1]}: its "
        "parameters have the sizes of its scaling: set optimizer.scaling, base_width and "
        "base_depth to its values",
    )


def _check_can_take_over_state(config: Config, parent: ParentRun) -> None:
    """Checks whether the run can take over the optimizer state and the step of its parent."""
    where, step = f"train.init_from = {config.train.init_from}", parent.checkpoint.step
    theirs, optimizer, train = parent.config, config.optimizer, config.train
    require(
        theirs.optimizer.name == optimizer.name,
        f"{where}: its optimizer.name is {theirs.optimizer.name!r}, here it is "
        f"{optimizer.name!r}, which has another "
        "state: set both to the same optimizer, or train.init_state = 'weights'",
    )
    require(
        theirs.optimizer.mean_dtype == optimizer.mean_dtype,
        f"{where}: its optimizer.mean_dtype is {theirs.optimizer.mean_dtype!r}, here it is "
        f"{optimizer.mean_dtype!r}: set both to the same, or train.init_state = 'weights'",
    )
    require(
        theirs.train.freeze == train.freeze,
        f"{where}: its train.freeze is {theirs.train.freeze}, here it is {train.freeze}, so "
        "its optimizer has the state of other parameters: set both to the same, or "
        "train.init_state = 'weights'",
    )
    require(
        step < train.steps,
        f"{where}: train.steps = {train.steps} includes the {step} steps of that run: give a "
        "larger number, or train.init_state = 'weights'",
    )
    traced = config.profile.traced_steps
    require(
        not traced or step < traced[-1],
        f"profile.steps = {config.profile.steps!r} has no effect on this run, because it begins "
        f"after step {step} ({where}): leave it out",
    )
    require(
        theirs.model.vocab_size == config.model.vocab_size,
        f"{where}: its vocab_size is {theirs.model.vocab_size}, here it is "
        f"{config.model.vocab_size}, so its optimizer has no state for the new tokens: set "
        "both to the same, or train.init_state = 'weights'",
    )
    require(
        theirs.model.lora == config.model.lora,
        f"{where}: its model.lora is {theirs.model.lora}, here it is "
        f"{config.model.lora}, so its optimizer has the state of other parameters: set "
        "both to the same, or train.init_state = 'weights'",
    )


def describe_optimizer_scaling(optimizer: OptimizerConfig) -> str:
    """Describes `optimizer.scaling`, on which the sizes of a run's parameters depend."""
    return (
        f"{optimizer.scaling} (base width {optimizer.base_width}, base depth "
        f"{optimizer.base_depth})"
    )


def check_same_structure(model: ModelConfig, initial_model: ModelConfig, init_from: str) -> None:
    """Checks that `model` can take the parameters of `initial_model`, the model in
    `train.init_from`.

    Raises:
      UserError: the parameters of `initial_model` have other shapes or another meaning than those
        of `model`.
    """
    # The end token decides which rows of its table an n-gram has.
    structural = {"eos_token_id"} if model.ple.layer_ids else set()
    for name in settings_incompatible_with_weights(model, initial_model):
        # The vocabulary may grow (training/vocabulary.py), but the hashes of n-grams depend on it.
        grows = name == "vocab_size" and model.vocab_size > initial_model.vocab_size
        if (
            name not in NON_STRUCTURAL_SETTINGS - structural
            and (not grows or model.ple.layer_ids)
            and (name != "intermediate_size" or model.has_dense_mlps)
            and (name not in EXPERT_SETTINGS or model.has_experts)
        ):
            ours, theirs = (
                c.mixers if name == "layer_types" else getattr(c, name)
                for c in (model, initial_model)
            )
            advice = f"set model.{name} to its value"
            if name == "eos_token_id":
                advice += (
                    f", and model.vocab_size to {initial_model.vocab_size}, because with 0 the "
                    "tokenizer sets both"
                )
            raise UserError(
                f"train.init_from = {init_from}: its {name} is {theirs}, model.{name} "
                f"= {ours}; {advice}"
            )
    require(
        initial_model.lora in (LoRAConfig(), model.lora),
        f"train.init_from = {init_from}: it has adapters, with model.lora = {initial_model.lora}: "
        "set model.lora to the same, or begin with its export, which has them merged",
    )
    if model.mtp_depth and not initial_model.mtp_depth:
        raise UserError(
            f"train.init_from = {init_from}: it has no mtp.* tensors; set model.mtp_depth = 0"
        )


def compare_tokenizers(config: Config, tokenizers: TokenizerPair) -> str:
    """Compares the tokenizer of the data with the tokenizer of the model in `train.init_from`.

    Returns:
      A description of the run's tokenizer, for the terminal.

    Raises:
      UserError: the data and the model are both text, and their tokenizers differ.
    """
    ours, theirs, data = tokenizers.run_tokenizer, tokenizers.initial_model_tokenizer, config.data
    fingerprint = tokenizers.initial_model_fingerprint
    if same_token_ids(ours.fingerprint, fingerprint):
        return f"its tokenizer ({data.tokenizer})" if ours.reads_text else "its ids"
    if theirs and extends_tokenizer(ours, theirs):
        return (
            f"its tokenizer with {ours.vocab_size - theirs.vocab_size} further tokens "
            f"({data.tokenizer})"
        )
    require(
        not tokenizers.model_reads_text or not ours.reads_text,
        f"train.init_from = {config.train.init_from}: it was trained with another tokenizer than "
        f"data.tokenizer = {data.tokenizer!r} (fingerprint {fingerprint[:12]}, here "
        f"{ours.fingerprint[:12]}), so its ids have another meaning: leave data.tokenizer out, "
        f"or set it to the tokenizer of that model ({tokenizers.initial_model_tokenizer_place})",
    )
    what = data.tokenizer if ours.reads_text else f"ids of {data.source}"
    if not fingerprint:
        return f"{what} (it has no tokenizer to compare with)"
    return f"OTHER TOKENS than it was trained on ({what})"


def describe_skipped_checkpoints(parent: ParentRun) -> str:
    """Names the damaged checkpoints of the parent that are newer than the checkpoint with which the
    run begins, as text; "" if there are none.
    """
    return "".join(
        f"; step {step} is skipped: {damage}"
        for step, damage in sorted(parent.damage_of_skipped.items())
    )
