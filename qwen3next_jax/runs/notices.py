"""Warns of settings that are allowed, but may do something else than the user meant."""

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import partial_ablation_lines
from qwen3next_jax.runs.start import Start
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage


def surprising_settings(run: ResolvedRun, start: Start) -> list[str]:
    """Returns one line for each setting that may surprise the user. `train.py` and `--dry-run`
    print the returned lines before the run computes anything.
    """
    lines = [*partial_ablation_lines(run.model), *run.groups.summary_lines]
    lines += filter(None, [_warm_up_warning(run.stages[0])])
    model, released = run.model, ModelConfig()
    if (
        model.has_dense_mlps
        and model.intermediate_size == released.intermediate_size
        and model.hidden_size != released.hidden_size
    ):
        lines.append(
            f"note: the dense MLPs have the width of the released model, model.intermediate_size = "
            f"{model.intermediate_size}; its model.hidden_size is {released.hidden_size}, here it "
            f"is {model.hidden_size}"
        )
    initial_model = start.facts.initial_model
    if model.lora.rank and initial_model is None and not start.facts.folder.complete_steps:
        lines.append(
            "warning: model.lora.rank without train.init_from: the adapters are beside random "
            "weights, which nothing trains"
        )
    initial_vocab_size = (
        initial_model.model_config.vocab_size if initial_model else model.vocab_size
    )
    if model.lora.rank and initial_vocab_size != model.vocab_size:
        lines.append(
            f"note: the vocabulary grows from {initial_vocab_size:,} to {model.vocab_size:,}, "
            "so the adapters cannot be exported alone (export --adapter), only merged"
        )
    return lines


def _warm_up_warning(stage: ResolvedStage) -> str:
    """Returns a warning if the learning-rate schedule of the first stage has fewer steps than its
    warm-up; "" if not. Only the first stage has a warm-up.
    """
    warm_up, steps = stage.optimizer.warmup_steps, stage.train.steps
    if warm_up <= steps:
        return ""
    return (
        f"warning: optimizer.warmup_steps = {warm_up} is more than the {steps} steps of the "
        "schedule: the learning rate rises to the last step; give fewer, or more steps"
    )
