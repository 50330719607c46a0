"""How the router of a mixture of experts scores and ranks experts. The released model uses a
softmax. `MoEConfig` has the options of DeepSeek-V3: sigmoid scores, a bias, groups of experts.

Letters: R tokens, E experts, G groups of experts, J chosen groups, M bins of a histogram.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.config.moe import MoEConfig

# The number of bins of the histogram from which quantile balancing reads its biases.
BINS = 1000


def score_experts(config: MoEConfig, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes scores from the router's logits [..., E].

    Returns:
      (scores, scores divided by their sum over the experts), each [..., E]. With softmax, both
      results are the same array.
    """
    if config.scoring_func == "softmax":
        probabilities = jax.nn.softmax(logits, axis=-1)
        return probabilities, probabilities
    scores = jax.nn.sigmoid(logits)
    return scores, normalized_scores(scores)


def normalized_scores(scores: jax.Array) -> jax.Array:
    """Returns scores / (Σ scores + 1e-20), [..., N], as in DeepSeek-V3's code. The result is 0 if
    all scores are 0.

    Numerator and denominator are both multiplied by 2**33, which does not change the result.
    Without the factor 2**33, the gradient would divide by the square of the sum, which may be as
    small as 1e-40, below the normal numbers of float32.
    """
    scores = scores * 2.0**33
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 2.0**33 * 1e-20)


def rank_experts(config: MoEConfig, score_RE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    """Returns the numbers [R, E] by which a token ranks the experts; the experts with the largest
    numbers are chosen.

    Without a bias the numbers are the scores. With a bias the numbers are score + bias, and no
    gradient passes through them. With groups of experts, a token keeps its `topk_group` best
    groups, and the numbers of all other experts are -∞. Groups are ranked by the sum of the numbers
    of their two best experts (2412.19437, section 2.1.2).
    """
    rank_RE = score_RE if bias_E is None else jax.lax.stop_gradient(score_RE + bias_E)
    if config.n_group == 1:
        return rank_RE
    rank_RGE = rank_RE.reshape(rank_RE.shape[0], config.n_group, -1)
    best_RG = jnp.sum(jax.lax.top_k(rank_RGE, 2)[0], axis=-1)
    _, group_RJ = jax.lax.top_k(best_RG, config.topk_group)
    is_chosen_RG = jnp.any(group_RJ[..., None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(is_chosen_RG[..., None], rank_RGE, -jnp.inf).reshape(rank_RE.shape)


def required_bias_range(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lowest and the highest bias [..., 1] that `required_bias_histogram` counts.
    Scores are 0 … 1, so no token needs a bias outside of the returned range.

    Args:
      bias_E: the biases [..., E] with which the tokens chose their experts.
    """
    return (
        jnp.min(bias_E, axis=-1, keepdims=True) - 1,
        jnp.max(bias_E, axis=-1, keepdims=True) + 1,
    )


def required_bias_histogram(
    score_RE: jax.Array, bias_E: jax.Array, experts_per_token: int, counted_R: jax.Array
) -> jax.Array:
    """Returns, for each expert, a histogram of the biases at which the tokens would choose the
    expert.

    For one token, let n_1 ≥ … ≥ n_A ≥ c be the A + 1 largest values of score + bias. The token
    chooses an expert if the expert's value is above c, so it would choose expert e at the bias c -
    score_e. Quantile balancing sets the bias of expert e to the A/E quantile of c - score_e over
    the tokens (Kimi K3's report, section 2.3.3; appendix D has the histogram).

    Args:
      score_RE: the scores, 0 … 1, without the bias.
      bias_E: the biases.
      experts_per_token: A, less than E.
      counted_R: whether each token counts, as 0 or 1.

    Returns:
      [E, BINS] int32: how many tokens need a bias in each of BINS equal parts of
      `required_bias_range`. Histograms of devices or micro-batches can be added, in any order.
    """
    score_RE = jax.lax.stop_gradient(score_RE)
    cutoff_R1 = jax.lax.top_k(score_RE + bias_E, experts_per_token + 1)[0][:, -1:]
    low, high = required_bias_range(bias_E)
    position_RE = (cutoff_R1 - score_RE - low) / (high - low) * BINS
    bin_RE = jnp.clip(position_RE.astype(jnp.int32), 0, BINS - 1)
    counted_R1 = counted_R.astype(jnp.int32)[:, None]
    experts = score_RE.shape[1]
    return (
        jnp.zeros((experts, BINS), jnp.int32)
        .at[jnp.arange(experts), bin_RE]
        .add(jnp.broadcast_to(counted_R1, bin_RE.shape))
    )
