"""How the router of a mixture of experts scores and ranks experts. The released model uses a
softmax. `MoEConfig` has the options of DeepSeek-V3: sigmoid scores, a bias, groups of experts.

Letters: R tokens, E experts, G groups of experts, J chosen groups.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.config.moe import MoEConfig


def score_experts(config: MoEConfig, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes scores from the router's logits [..., E].

    Returns:
      (scores, scores divided by their sum over the experts), each [..., E]. With softmax, both are
      the same array.
    """
    if config.scoring_func == "softmax":
        probabilities = jax.nn.softmax(logits, axis=-1)
        return probabilities, probabilities
    scores = jax.nn.sigmoid(logits)
    return scores, over_sum(scores)


def over_sum(scores: jax.Array) -> jax.Array:
    """Returns scores / (Σ scores + 1e-20), [..., N], as in DeepSeek-V3's code. The result is 0 if
    all scores are 0.

    Numerator and denominator are both multiplied by 2**33, which does not change the result.
    Without this factor, the gradient would divide by the square of the sum. The square may be as
    small as 1e-40, which float32 cannot represent as a normal number.
    """
    scores = scores * 2.0**33
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 2.0**33 * 1e-20)


def rank_experts(config: MoEConfig, score_RE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    """Returns numbers [R, E]. The experts with a token's largest numbers are chosen.

    Without a bias the numbers are the scores. With a bias they are score + bias, and no gradient
    passes through them. With groups of experts, they are -∞ for experts outside of the token's
    `topk_group` best groups; a group's rank is the sum of its two best experts' numbers
    (2412.19437, section 2.1.2).
    """
    rank_RE = score_RE if bias_E is None else jax.lax.stop_gradient(score_RE + bias_E)
    if config.n_group == 1:
        return rank_RE
    rank_RGE = rank_RE.reshape(rank_RE.shape[0], config.n_group, -1)
    best_RG = jnp.sum(jax.lax.top_k(rank_RGE, 2)[0], axis=-1)
    _, group_RJ = jax.lax.top_k(best_RG, config.topk_group)
    is_chosen_RG = jnp.any(group_RJ[..., None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(is_chosen_RG[..., None], rank_RGE, -jnp.inf).reshape(rank_RE.shape)
