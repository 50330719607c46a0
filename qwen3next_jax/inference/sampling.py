"""Which token comes next: the likeliest, or one drawn from the likelier ones.

Letters: B batch, V vocabulary; `...` any dimensions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError


class Sampling(NamedTuple):
    """How tokens are drawn; each setting leaves some of the tokens that the one before has left.

    temperature: logits are divided by it; 0 takes the likeliest token, and so does what is too
    small for float32.
    top_k: so many of the likeliest tokens; 0: all.
    top_p: the likeliest ones that together have at least this probability; 1: all.
    min_p: those with at least this share of the likeliest one's probability; 0: all.
    A token as likely as the last one that is left is left, too. The likeliest token is always
    left.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        return self[1:] != (0, 1.0, 0.0)

    def check(self) -> None:
        """Raises UserError: a number out of range, or two that contradict each other."""
        bounds = {
            "temperature": (0 <= self.temperature < 3.4e38, "0 (greedy) … 3.4e38, as float32 can"),
            "top_k": (0 <= self.top_k < 2**31, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0, up to 1 (all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "0 (all tokens) … 1"),
        }
        for name, (holds, expected) in bounds.items():
            if not holds:
                raise UserError(f"{name} = {getattr(self, name)}: expected {expected}")
        if self.greedy and self.filters:
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
    """logits [..., V] → log-probabilities of what is drawn, -inf of what is left out. `sampling`
    may be traced, `filters` not.
    """
    logits = logits.astype(jnp.float32)
    # The largest logit becomes 0 before the division, so that it stays 0 at any temperature and
    # nothing overflows to +inf. Devices take numbers below `tiny` for 0.
    temperature = jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if filters:
        falling = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        index_V = jnp.arange(scaled.shape[-1])
        counted_V = (index_V < sampling.top_k) | (sampling.top_k == 0)
        p = jax.nn.softmax(jnp.where(counted_V, falling, -jnp.inf), axis=-1)
        # A sum of many probabilities may be rounded to more than 1.
        within = (jnp.cumsum(p, axis=-1) - p < sampling.top_p) | (sampling.top_p == 1)
        left = counted_V & within & (p >= sampling.min_p * p[..., :1])
        left = left | (index_V == 0)  # a top_p that float32 rounds to 0 leaves the likeliest
        last = jnp.take_along_axis(falling, jnp.sum(left, axis=-1, keepdims=True) - 1, axis=-1)
        scaled = jnp.where(scaled >= last, scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled, axis=-1)


def argmax_token(logits: jax.Array) -> jax.Array:
    """[..., V] → [...] int32, the first of the largest. `jnp.argmax` takes one number at a time
    on a CPU, 18 times as long for 151,936.
    """
    size = logits.shape[-1]
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    # none of NaNs
    return jnp.minimum(
        jnp.min(jnp.where(is_largest, jnp.arange(size, dtype=jnp.int32), size), axis=-1), size - 1
    )


def random_keys(seed, position_B: jax.Array, purpose: int) -> jax.Array:
    """[B] keys that depend on the seed, the row, the position of the token that is drawn and
    what for, on nothing else.
    """

    def key(row, position):
        return jax.random.fold_in(
            jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position), purpose
        )

    return jax.vmap(key)(jnp.arange(len(position_B)), position_B)


def sample_token(log_p_BV: jax.Array, seed, position_B: jax.Array, purpose: int = 0) -> jax.Array:
    """[B] int32."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, log_p_BV.shape[1:], log_p_BV.dtype))(
        random_keys(seed, position_B, purpose)
    )
    return argmax_token(noise + log_p_BV)
