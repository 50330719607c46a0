"""Lines about a start that surprise a user who does not know them: what the settings do, and what
they were perhaps not meant to do.
"""

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import partial_ablation_lines
from qwen3next_jax.runs.start import Start
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage


def describe_notices(run: ResolvedRun, start: Start) -> list[str]:
    """Returns the lines, which `train.py` and its `--dry-run` print before anything is computed."""
    lines = [*partial_ablation_lines(run.model), *run.groups.summary_lines]
    lines += filter(None, [_short_warm_up(run.stages[0])])
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
    source = start.facts.source
    if model.lora.rank and source is None and not start.facts.folder.complete_steps:
        lines.append(
            "warning: model.lora.rank without train.init_from: the adapters are beside random "
            "weights, which nothing trains"
        )
    if model.lora.rank and source and source.model.vocab_size != model.vocab_size:
        lines.append(
            f"note: the vocabulary grows from {source.model.vocab_size:,} to {model.vocab_size:,}, "
            "so the adapters cannot be exported alone (export --adapter), only merged"
        )
    return lines


def _short_warm_up(stage: ResolvedStage) -> str:
    """Returns a line if the schedule of the first stage, which alone has a warm-up, has fewer steps
    than the warm-up; else "".
    """
    warm_up, steps = stage.optimizer.warmup_steps, stage.train.steps
    if warm_up <= steps:
        return ""
    return (
        f"warning: optimizer.warmup_steps = {warm_up} is more than the {steps} steps of the "
        "schedule: the learning rate rises to the last step; give fewer, or more steps"
    )
