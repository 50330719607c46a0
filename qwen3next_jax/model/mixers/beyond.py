"""Attention for texts longer than those trained on: distances that stay within the trained ones,
windows in parallel, selected keys.

Letters: see pairwise.py; R rotated dimensions.
"""

import dataclasses

import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.layers import rotate
from qwen3next_jax.model.mixers.nope_attention import NoPEAttention
from qwen3next_jax.model.mixers.pairwise import Pairwise
from qwen3next_jax.ops.pair_attention import dot


class ReRoPE(Pairwise):
    """Rotations by the distance up to `mixer.window`, beyond it by the window itself (Su,
    ReRoPE, 2023): two sets of scores.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(Pairwise.Settings):
        # distances that are the true ones
        window: int = 1024

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "window"})

    read_time = ("window",)
    leak = False

    def queries(self, q_BTNK, t_BT):
        return rotate(q_BTNK, t_BT, self.config), rotate(
            q_BTNK, self._far(t_BT, self.settings(self.config).window), self.config
        )

    def keys(self, k_BSMK, s_BS):
        return rotate(k_BSMK, s_BS, self.config), rotate(k_BSMK, self._far(s_BS, 0), self.config)

    def _far(self, positions, from_there):
        """Where a token of the far scores stands: with distance d of the true ones, `window`, or
        `window` + (d − window) / stretch.
        """
        if not self.leak:
            return jnp.full_like(positions, from_there)
        stretch, window = self.settings(self.config).stretch, from_there
        return window - window / stretch + positions.astype(jnp.float32) / stretch

    def score(self, q, k, t_BC1, s_B1S):
        near = (t_BC1 - s_B1S < self.settings(self.config).window)[:, None]
        return jnp.where(near, dot(q[0], k[0]), dot(q[1], k[1]))


class LeakyReRoPE(ReRoPE):
    """`ReRoPE` whose distances d beyond the window go on growing, `mixer.stretch` times slower."""

    @dataclasses.dataclass(frozen=True)
    class Settings(ReRoPE.Settings):
        # how much slower distances grow beyond the window
        stretch: float = 16.0

        def __post_init__(self):
            super().__post_init__()
            check_bounds(self, "model.mixer", {"at least 1": "stretch"})

    read_time = ("window", "stretch")
    leak = True


class LambdaWindow(ReRoPE):
    """The Λ-shaped mask of LM-Infinite (2308.16137): `mixer.window` keys and the first
    `mixer.first_tokens` of the document, distances up to the window.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(ReRoPE.Settings):
        # keys at the start of a document that stay visible beyond the window
        first_tokens: int = 0

        def __post_init__(self):
            super().__post_init__()
            check_bounds(self, "model.mixer", {"0 or more": "first_tokens"})

    read_time = ("window", "first_tokens")

    def seen(self, t_BC1, s_B1S):
        c = self.settings(self.config)
        return (s_B1S <= t_BC1) & ((t_BC1 - s_B1S < c.window) | (s_B1S < c.first_tokens))

    @classmethod
    def pairs(cls, config, length):
        window, first = min(cls.settings(config).window, length), cls.settings(config).first_tokens
        # queries that do not see all: the window, and of the t + 1 − window others at most `first`
        beyond = length - window
        few = min(first, beyond)
        return (
            window * (window + 1) / 2
            + beyond * window
            + few * (few + 1) / 2
            + (beyond - few) * first
        )


class SelectedTokens(LambdaWindow):
    """`LambdaWindow` and, of the keys between the two, for each query and head the
    `mixer.selected` of the highest scores, all as far as the window (in the manner of InfLLM,
    2402.04617, token by token).
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(LambdaWindow.Settings):
        # keys beyond the window, for each query and head
        selected: int = 64

        def __post_init__(self):
            super().__post_init__()
            check_bounds(self, "model.mixer", {"at least 1": "selected"})

    read_time = ("window", "first_tokens", "selected")

    @property
    def best(self):
        return self.settings(self.config).selected

    def seen(self, t_BC1, s_B1S):
        always = super().seen(t_BC1, s_B1S)
        return always, (s_B1S <= t_BC1) & ~always

    @classmethod
    def pairs(cls, config, length):
        """Scores of every pair, and the sum over those that are seen."""
        every, selected = length * (length + 1) / 2, cls.settings(config).selected * length
        return (every + min(every, super().pairs(config, length) + selected)) / 2


class ParallelWindows(Pairwise):
    """Parallel context windows (2212.10947): the first `mixer.contexts` × `mixer.window` tokens
    of a document are windows that do not see each other and stand at the same places; what
    follows stands behind them and sees all.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(Pairwise.Settings):
        # how many windows stand side by side
        contexts: int = 1
        # tokens of each window
        window: int = 1024

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "contexts window"})

    read_time = ("contexts", "window")

    def _place(self, position):
        c = self.settings(self.config)
        together = c.contexts * c.window
        return jnp.where(position < together, position % c.window, position - together + c.window)

    def queries(self, q_BTNK, t_BT):
        return rotate(q_BTNK, self._place(t_BT), self.config)

    def keys(self, k_BSMK, s_BS):
        return rotate(k_BSMK, self._place(s_BS), self.config)

    def seen(self, t_BC1, s_B1S):
        c = self.settings(self.config)
        return (s_B1S <= t_BC1) & (
            (t_BC1 >= c.contexts * c.window) | (t_BC1 // c.window == s_B1S // c.window)
        )

    @classmethod
    def pairs(cls, config, length):
        window, together = (
            cls.settings(config).window,
            min(cls.settings(config).contexts * cls.settings(config).window, length),
        )
        whole, rest = divmod(together, window)
        return (
            whole * window * (window + 1) / 2
            + rest * (rest + 1) / 2
            + (length * (length + 1) - together * (together + 1)) / 2
        )


class DynamicNTK(Pairwise):
    """RoPE whose base grows with the text (dynamic NTK scaling): a query at place t ≥ L, the
    trained context `max_position_embeddings`, turns itself and its keys by θ (f (t + 1) / L − f
    + 1)^(R / (R − 2)), f = `yarn_factor`. So every token is what it is as the last of its text;
    implementations that cache rotated keys mix the bases of different lengths.
    """

    switches = (*NoPEAttention.switches, "yarn_factor")
    block = 8  # each query has keys of its own: block × T of them

    def queries(self, q_BTNK, t_BT):
        return q_BTNK

    def keys(self, k_BSMK, s_BS):
        return k_BSMK

    def score(self, q_BCNK, k_BSMK, t_BC1, s_B1S):
        c, (b, queries, n, width) = self.config, q_BCNK.shape
        rotated, half = c.rotary_dim, c.rotary_dim // 2
        excess = jnp.maximum(
            c.yarn_factor * (t_BC1 + 1.0) / c.max_position_embeddings - c.yarn_factor + 1, 1
        )
        log_base_BC1 = jnp.log(c.rope_theta) + jnp.log(excess) * (rotated / (rotated - 2))
        frequency_BC1R = jnp.exp(-log_base_BC1[..., None] * jnp.arange(half) / half)
        angle_BCS1R = ((s_B1S - t_BC1)[..., None] * frequency_BC1R)[:, :, :, None]
        first, second, rest = jnp.split(
            k_BSMK.astype(jnp.float32)[:, None], (half, rotated), axis=-1
        )
        cos, sin = jnp.cos(angle_BCS1R), jnp.sin(angle_BCS1R)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        k_BCSMK = jnp.concatenate(
            [turned, jnp.broadcast_to(rest, (*turned.shape[:-1], width - rotated))], axis=-1
        ).astype(k_BSMK.dtype)
        q_BCMHK = q_BCNK.reshape(b, queries, k_BSMK.shape[2], -1, width)
        s_BMHCS = (
            jnp.einsum("bcmhk,bcsmk->bmhcs", q_BCMHK, k_BCSMK, preferred_element_type=jnp.float32)
            * width**-0.5
        )
        return s_BMHCS.reshape(b, n, queries, -1)

    @classmethod
    def check(cls, config):
        super().check(config)
        require(
            config.rotary_dim > 2,
            f"the mixer 'dynamic_ntk' with {config.rotary_dim} rotated dimensions (model.head_dim "
            "× model.partial_rotary_factor): expected more than 2, as its base grows to the power "
            "of R / (R − 2)",
        )
