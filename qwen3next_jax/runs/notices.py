"""Lines about a start that surprise a user who does not know them: what the settings do, and what
they were perhaps not meant to do.
"""

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import partial_ablations
from qwen3next_jax.runs.start import Start
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage


def describe_notices(run: ResolvedRun, start: Start) -> list[str]:
    """Returns the lines, which `train.py` and its `--dry-run` print before anything is computed."""
    lines = [*partial_ablations(run.model), *run.groups.lines]
    lines += filter(None, map(_short_warm_up, run.stages))
    model, released = run.model, ModelConfig()
    if (
        model.has_dense_mlps
        and model.intermediate_size == released.intermediate_size
        and model.hidden_size != released.hidden_size
    ):
        lines.append(
            f"warning: model.intermediate_size = {model.intermediate_size} is the released model's "
            f"(its model.hidden_size is {released.hidden_size}, not {model.hidden_size}): the "
            "configuration gives no width of its dense MLPs"
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
    """Returns a line if the schedule of a stage has fewer steps than its warm-up; else ""."""
    warm_up, steps = stage.optimizer.warmup_steps, stage.train.steps
    if warm_up <= steps:
        return ""
    of_stage = f" of stage {stage.name}" if stage.name else ""
    return (
        f"warning: optimizer.warmup_steps = {warm_up} is more than the {steps} steps of the "
        f"schedule{of_stage}: the learning rate rises to the last step; give fewer, or more steps"
    )
