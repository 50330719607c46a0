"""How the router of a mixture of experts scores experts and ranks them: by softmax as in the
released model, or with the options of `MoEConfig` (as in DeepSeek-V3: sigmoid scores, a bias,
groups of experts).

Letters: R tokens, E experts, G groups of experts, J chosen groups.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.config.moe import MoEConfig


def score_experts(config: MoEConfig, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scores, scores over their sum), each [..., E]. With softmax both are the same array."""
    if config.scoring_func == "softmax":
        probabilities = jax.nn.softmax(logits, axis=-1)
        return probabilities, probabilities
    scores = jax.nn.sigmoid(logits)
    return scores, over_sum(scores)


def over_sum(scores: jax.Array) -> jax.Array:
    """scores / (Σ scores + 1e-20), [..., N], as in DeepSeek-V3's code: the result is 0 if all
    scores are 0. Numerator and denominator are multiplied by a power of two, which does not change
    the result. Without it the gradient would divide by the square of the sum, which may be 1e-40
    and is then too small for a normal float32.
    """
    scores = scores * 2.0**33
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 2.0**33 * 1e-20)


def rank_experts(config: MoEConfig, score_RE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    """[R, E] numbers of which the largest choose a token's experts: the scores themselves; with a
    bias, score + bias, through which no gradient passes; with groups, -∞ outside the `topk_group`
    groups whose two best experts have the largest sums (2412.19437, section 2.1.2).
    """
    rank_RE = score_RE if bias_E is None else jax.lax.stop_gradient(score_RE + bias_E)
    if config.n_group == 1:
        return rank_RE
    rank_RGE = rank_RE.reshape(rank_RE.shape[0], config.n_group, -1)
    best_RG = jnp.sum(jax.lax.top_k(rank_RGE, 2)[0], axis=-1)
    _, group_RJ = jax.lax.top_k(best_RG, config.topk_group)
    is_chosen_RG = jnp.any(group_RJ[..., None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(is_chosen_RG[..., None], rank_RGE, -jnp.inf).reshape(rank_RE.shape)
