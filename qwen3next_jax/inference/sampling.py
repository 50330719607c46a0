"""Chooses the next token: the most likely one, or a sample from a filtered distribution.

Letters: B batch, V vocabulary; `...` any dimensions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError

# A random key depends on its purpose: to sample a token, to accept a draft, to sample a token in
# place of a rejected draft, or to sample a draft.
TOKEN, ACCEPT, RESAMPLE, DRAFT = range(4)


class Sampling(NamedTuple):
    """The options with which tokens are sampled. The filters top_k, top_p and min_p are applied in
    this order, each to the tokens that the earlier filters have kept. The most likely token is
    always kept. A token that is exactly as likely as the least likely kept token is kept, too.

    Attributes:
      temperature: the number by which the logits are divided. 0 means greedy decoding, which takes
        the most likely token. A number too small for float32 has the effect of 0.
      top_k: keep this number of the most likely tokens; 0: all.
      top_p: keep the smallest number of the most likely tokens whose probabilities sum to this
        number or more; 1: all.
      min_p: keep the tokens whose probability is at least `min_p` times the probability of the most
        likely token; 0: all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """Whether any filter is set."""
        return self[1:] != (0, 1.0, 0.0)

    def check(self) -> None:
        """Checks the options.

        Raises:
          UserError: a number is out of range, or a filter is set for greedy decoding.
        """
        bounds = {
            "temperature": (0 <= self.temperature < 3.4e38, "0 (greedy) … 3.4e38, as float32 can"),
            "top_k": (0 <= self.top_k < 2**31, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0, up to 1 (all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "0 (all tokens) … 1"),
        }
        for name, (holds, expected) in bounds.items():
            if not holds:
                raise UserError(f"{name} = {getattr(self, name)}: expected {expected}")
        if self.is_greedy and self.has_filters:
            name = next(
                name
                for name in ("top_k", "top_p", "min_p")
                if getattr(self, name) != self._field_defaults[name]
            )
            raise UserError(
                f"{name} = {getattr(self, name)} with temperature = 0, which takes the likeliest "
                f"token whatever {name} is: expected one of the two"
            )


def log_probabilities(logits: jax.Array, sampling: Sampling, filters: bool) -> jax.Array:
    """Returns the log-probabilities [..., V] from which a token is sampled; -inf for tokens that a
    filter drops.

    Args:
      logits: [..., V].
      sampling: the options; its fields may be traced arrays.
      filters: whether `sampling` sets any filter; not traced.
    """
    logits = logits.astype(jnp.float32)
    # The largest logit is subtracted before the division. Then no logit is above 0, and none
    # overflows to +inf at a low temperature. Devices treat numbers below `tiny` as 0, so the
    # temperature is at least `tiny`.
    temperature = jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if filters:
        descending = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        rank_V = jnp.arange(scaled.shape[-1])
        in_top_k_V = (rank_V < sampling.top_k) | (sampling.top_k == 0)
        p = jax.nn.softmax(jnp.where(in_top_k_V, descending, -jnp.inf), axis=-1)
        # top_p = 1 is treated separately, because rounding may bring the sum of the probabilities
        # to 1 before the last token.
        in_top_p = (jnp.cumsum(p, axis=-1) - p < sampling.top_p) | (sampling.top_p == 1)
        kept = in_top_k_V & in_top_p & (p >= sampling.min_p * p[..., :1])
        kept = kept | (rank_V == 0)  # even if float32 rounds top_p to 0
        num_kept = jnp.sum(kept, axis=-1, keepdims=True)
        smallest_kept = jnp.take_along_axis(descending, num_kept - 1, axis=-1)
        scaled = jnp.where(scaled >= smallest_kept, scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled, axis=-1)


def argmax_token(logits: jax.Array) -> jax.Array:
    """Returns the index [...] int32 of the largest logit [..., V]; the first one if several are
    equal.

    On a CPU, `jnp.argmax` compares one number at a time, and takes 18 times as long as this
    function for a vocabulary of 151,936.
    """
    size = logits.shape[-1]
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    index = jnp.min(jnp.where(is_largest, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.minimum(index, size - 1)  # if the logits are NaN, none equals the largest


def random_keys(seed, position_B: jax.Array, purpose: int) -> jax.Array:
    """Returns random keys [B]. A key depends only on the seed, the index of the row, the position
    [B] of the token that is sampled, and the purpose (TOKEN, ACCEPT, RESAMPLE or DRAFT).
    """

    def key(row, position):
        key_of_row = jax.random.fold_in(jax.random.key(seed), row)
        return jax.random.fold_in(jax.random.fold_in(key_of_row, position), purpose)

    return jax.vmap(key)(jnp.arange(len(position_B)), position_B)


def sample_token(
    log_p_BV: jax.Array, seed, position_B: jax.Array, purpose: int = TOKEN
) -> jax.Array:
    """Samples a token for each row.

    Args:
      log_p_BV: log-probabilities.
      seed, position_B, purpose: the arguments of `random_keys`.

    Returns:
      [B] int32.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, log_p_BV.shape[1:], log_p_BV.dtype))(
        random_keys(seed, position_B, purpose)
    )
    return argmax_token(noise + log_p_BV)
