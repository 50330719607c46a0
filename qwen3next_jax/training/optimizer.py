"""AdamW through optax: schedules, clipping, and which parameters decay."""

import jax
import optax

from qwen3next_jax.config import Config, ModelConfig, OptimizerConfig
from qwen3next_jax.model import declared
from qwen3next_jax.parallel.rules import path_string


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Step (from 0) → learning rate: linear warm-up to the peak, then cosine, or constant and a linear fall at the end.

    The first step already learns (peak / warm-up), and the last one runs at final_fraction of the peak.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    rising = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    after = max(steps - warmup - 1, 1)
    if config.schedule == "cosine":
        return optax.join_schedules((rising, optax.cosine_decay_schedule(peak, after, config.final_fraction)), (warmup,))
    falling = max(round(config.decay_fraction * steps), 1)
    stable_until = max(steps - falling, warmup)
    fall = optax.linear_schedule(peak, final, max(steps - 1 - stable_until, 1))
    return optax.join_schedules((rising, optax.constant_schedule(peak), fall), (warmup, stable_until))


def decay_mask(params: dict, model: ModelConfig, decay_norm_weights: bool) -> dict:
    """Tree of bools: which parameters take weight decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: declared(model)[path_string(path)].decays(decay_norm_weights), params)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    c = config.optimizer
    clip = optax.clip_by_global_norm(c.clip_norm) if c.clip_norm else optax.identity()
    adamw = optax.adamw(learning_rate_schedule(c, config.train.steps), b1=c.beta1, b2=c.beta2, eps=c.eps, weight_decay=c.weight_decay,
                        mask=lambda params: decay_mask(params, config.model, c.decay_norm_weights))
    return optax.chain(clip, adamw)
