"""AdamW through optax: schedules, clipping, and which parameters decay."""

import jax
import optax

from qwen3next_jax.config import OptimizerConfig

# Parameters by the last part of their path. Decay rates start from a distribution that weight decay would erase.
NEVER_DECAYED = ("a_log", "dt_bias")
NORM_WEIGHTS = ("mixer_norm", "mlp_norm", "final_norm", "q_norm", "k_norm", "norm", "embedding_norm", "hidden_norm")


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


def decay_mask(params: dict, decay_norm_weights: bool) -> dict:
    """Tree of bools: which parameters take weight decay."""
    excluded = NEVER_DECAYED if decay_norm_weights else NEVER_DECAYED + NORM_WEIGHTS
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in excluded, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adamw = optax.adamw(learning_rate_schedule(config, steps), b1=config.beta1, b2=config.beta2, eps=config.eps,
                        weight_decay=config.weight_decay,
                        mask=lambda params: decay_mask(params, config.decay_norm_weights))
    return optax.chain(clip, adamw)
