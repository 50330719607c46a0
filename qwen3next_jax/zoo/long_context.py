"""Variants of gated attention that apply trained weights to texts longer than the training texts.
The variants limit the distances by which queries and keys are rotated, divide a text into parallel
windows, select keys, or increase the base of the rotary positions with the length of the text.

Letters: B batch, T queries, S keys (the tokens of the row; with a cache, its slots), C queries that
are computed at once (a chunk), N query heads, M key/value heads, H = N // M, K head width, P pairs
of rotated numbers of a head.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.layers import rotate
from qwen3next_jax.zoo.attention_references import gated_attention, positions_and_causal_mask
from qwen3next_jax.zoo.ops.pair_attention import scaled_dot
from qwen3next_jax.zoo.pair_mixer import PairAttention

EXAMPLES = {
    "rerope": {"full_mixer": "rerope", "mixer": {"window": 5}},
    "leaky_rerope": {"full_mixer": "leaky_rerope", "mixer": {"window": 5, "stretch": 3.0}},
    "lambda_window": {"full_mixer": "lambda_window", "mixer": {"window": 5, "first_tokens": 2}},
    "selected_tokens": {
        "full_mixer": "selected_tokens",
        "mixer": {"window": 5, "first_tokens": 2, "selected": 3},
    },
    "parallel_windows": {
        "full_mixer": "parallel_windows",
        "mixer": {"window": 4, "contexts": 3},
    },
    "dynamic_ntk": {
        "full_mixer": "dynamic_ntk",
        "max_position_embeddings": 8,
        "yarn_factor": 8.0,
        "partial_rotary_factor": 0.5,
    },
}


class ReRoPE(PairAttention):
    """ReRoPE (Su, 2023). A query and a key whose distance is less than `window` are rotated
    relative to each other by their distance; a more distant query and key are rotated by `window`.
    The mixer computes the score of each query and key with both rotations, and then chooses one of
    the two scores by the distance.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(PairAttention.Settings):
        # a query and a key whose distance is less than this are rotated by their true distance; for
        # lambda_window and selected_tokens also the number of most recent keys that a query sees,
        # including its own
        window: Annotated[int, "at least 1"] = 1024

    settings_free_after_training = ("window",)

    def queries_for_score(self, q_BTNK, t_BT):
        far_BT = self.far_rotary_positions(t_BT, self.settings(self.config).window)
        return rotate(q_BTNK, t_BT, self.config), rotate(q_BTNK, far_BT, self.config)

    def keys_for_score(self, k_BSMK, s_BS):
        far_BS = self.far_rotary_positions(s_BS, 0)
        return rotate(k_BSMK, s_BS, self.config), rotate(k_BSMK, far_BS, self.config)

    def far_rotary_positions(self, positions, window):
        """Returns the positions by which queries or keys are rotated for the scores of keys beyond
        the window. The argument `window` is the setting `window` for queries, and 0 for keys. The
        position returned for a query minus the position returned for a key is the distance by which
        query and key are rotated relative to each other.
        """
        return jnp.full_like(positions, window)

    def score(self, q, k, t_BC1, s_B1S):
        is_near = (t_BC1 - s_B1S < self.settings(self.config).window)[:, None]
        return jnp.where(is_near, scaled_dot(q[0], k[0]), scaled_dot(q[1], k[1]))


class LeakyReRoPE(ReRoPE):
    """`ReRoPE` with slowly growing distances beyond the window: a query and a key whose distance d
    is at least `window` are rotated relative to each other by window + (d - window) / stretch.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(ReRoPE.Settings):
        # factor by which distances beyond the window grow more slowly than the true distances
        stretch: Annotated[float, "at least 1"] = 16.0

    settings_free_after_training = ("window", "stretch")

    def far_rotary_positions(self, positions, window):
        stretch = self.settings(self.config).stretch
        return window - window / stretch + positions.astype(jnp.float32) / stretch


class LambdaWindowAttention(ReRoPE):
    """The Λ-shaped mask of LM-Infinite (2308.16137): a query sees the last `window` keys
    and the first `first_tokens` keys of its document. As in `ReRoPE`, a query and a key are rotated
    relative to each other by at most `window`.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(ReRoPE.Settings):
        # number of keys at the start of a document that stay visible beyond the window
        first_tokens: Annotated[int, "0 or more"] = 0

    settings_free_after_training = ("window", "first_tokens")

    def attention_mask(self, t_BC1, s_B1S):
        return _lambda_window_mask(self.settings(self.config), t_BC1, s_B1S)

    @classmethod
    def visible_pair_count(cls, config, length):
        return _lambda_window_pair_count(cls.settings(config), length)


def _lambda_window_mask(settings, t_BC1, s_B1S):
    """Returns the mask of `LambdaWindowAttention`, bool [B, C, S]."""
    in_window = t_BC1 - s_B1S < settings.window
    return (s_B1S <= t_BC1) & (in_window | (s_B1S < settings.first_tokens))


def _lambda_window_pair_count(settings, length):
    """Returns the number of pairs for which the mask of `LambdaWindowAttention` is true, in a row
    of `length` tokens that is one document.
    """
    window = min(settings.window, length)
    # A query at t ≥ window sees the last `window` keys, and up to `first_tokens` of the
    # t + 1 - window keys before them.
    queries_beyond_window = length - window
    # The first queries beyond the window see 1, 2, 3, … of the first tokens, the others all.
    growing_queries = min(settings.first_tokens, queries_beyond_window)
    first_token_pairs = (
        growing_queries * (growing_queries + 1) / 2
        + (queries_beyond_window - growing_queries) * settings.first_tokens
    )
    return window * (window + 1) / 2 + queries_beyond_window * window + first_token_pairs


class LambdaWindowWithSelectedKeys(ReRoPE):
    """`LambdaWindowAttention` with selected keys: of the keys between the first tokens and the
    window, each query and head also sees the `selected` keys with the highest scores. The selected
    keys are rotated as if their distance were `window`. InfLLM (2402.04617) selects blocks of keys;
    this mixer selects single keys.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(LambdaWindowAttention.Settings):
        # number of selected keys beyond the window, for each query and head
        selected: Annotated[int, "at least 1"] = 64

    settings_free_after_training = ("window", "first_tokens", "selected")

    @property
    def num_selected_keys(self):
        return self.settings(self.config).selected

    def attention_mask(self, t_BC1, s_B1S):
        always = _lambda_window_mask(self.settings(self.config), t_BC1, s_B1S)
        return always, (s_B1S <= t_BC1) & ~always

    @classmethod
    def visible_pair_count(cls, config, length):
        """Returns the mean of two counts of pairs of a query and a key: the causal pairs, which all
        need a score, and the pairs in which the query sees the key, which also need a weighted
        value. `activation_flops` counts one score and one weighted value for every pair that this
        method returns.
        """
        s = cls.settings(config)
        causal = length * (length + 1) / 2
        return (
            causal + min(causal, _lambda_window_pair_count(s, length) + s.selected * length)
        ) / 2


class ParallelWindowsAttention(PairAttention):
    """Parallel context windows (2212.10947). The first `contexts` × `window` tokens of a document
    form `contexts` windows. The tokens of a window have the positions 0 … `window` - 1 and do not
    see other windows. The tokens after the windows have the positions from `window` on and see all
    windows.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(PairAttention.Settings):
        # number of windows at the start of a document
        contexts: Annotated[int, "at least 1"] = 1
        # number of tokens of each window
        window: Annotated[int, "at least 1"] = 1024

    settings_free_after_training = ("contexts", "window")

    def rotary_positions(self, positions):
        """Returns the positions for the rotation (RoPE). `positions` are the positions of the
        tokens in their document.
        """
        s = self.settings(self.config)
        in_windows = s.contexts * s.window
        return jnp.where(
            positions < in_windows, positions % s.window, positions - in_windows + s.window
        )

    def queries_for_score(self, q_BTNK, t_BT):
        return rotate(q_BTNK, self.rotary_positions(t_BT), self.config)

    def keys_for_score(self, k_BSMK, s_BS):
        return rotate(k_BSMK, self.rotary_positions(s_BS), self.config)

    def attention_mask(self, t_BC1, s_B1S):
        s = self.settings(self.config)
        same_window = t_BC1 // s.window == s_B1S // s.window
        return (s_B1S <= t_BC1) & ((t_BC1 >= s.contexts * s.window) | same_window)

    @classmethod
    def visible_pair_count(cls, config, length):
        s = cls.settings(config)
        in_windows = min(s.contexts * s.window, length)
        full, rest = divmod(in_windows, s.window)
        within = full * s.window * (s.window + 1) / 2 + rest * (rest + 1) / 2
        return within + (length * (length + 1) - in_windows * (in_windows + 1)) / 2


class DynamicNTKAttention(PairAttention):
    """Attention whose rotary base grows with the length of the text (dynamic NTK scaling). Let L be
    the trained length `max_position_embeddings`, f the setting `yarn_factor`, and R the number of
    rotated dimensions: a query at position t ≥ L, and the keys that it reads, are rotated with the
    base θ (f (t + 1) / L - f + 1)^(R / (R - 2)); at t < L the base is θ. So the base of a query
    depends only on the query's own position, not on the tokens after it. The cache holds keys that
    are not rotated. An implementation that caches rotated keys would compare a query with keys that
    were rotated with the bases of earlier queries.
    """

    switches_read = ("attention_output_gate", "qk_norm", "yarn_factor")
    chunk = 8  # each query rotates all keys anew, so memory must hold chunk × T rotated keys

    def queries_for_score(self, q_BTNK, t_BT):
        return q_BTNK

    def keys_for_score(self, k_BSMK, s_BS):
        return k_BSMK

    def score(self, q_BCNK, k_BSMK, t_BC1, s_B1S):
        c, (b, queries, n, width) = self.config, q_BCNK.shape
        rotated, half = c.rotary_dim, c.rotary_dim // 2
        length = c.yarn_factor * (t_BC1 + 1.0) / c.max_position_embeddings
        excess = jnp.maximum(length - c.yarn_factor + 1, 1)
        log_base_BC1 = jnp.log(c.rope_theta) + jnp.log(excess) * (rotated / (rotated - 2))
        frequency_BC1P = jnp.exp(-log_base_BC1[..., None] * jnp.arange(half) / half)
        angle_BCS1P = ((s_B1S - t_BC1)[..., None] * frequency_BC1P)[:, :, :, None]
        cos, sin = jnp.cos(angle_BCS1P), jnp.sin(angle_BCS1P)

        parts = jnp.split(k_BSMK.astype(jnp.float32)[:, None], (half, rotated), axis=-1)
        first, second, rest = parts
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rest = jnp.broadcast_to(rest, (*turned.shape[:-1], width - rotated))
        k_BCSMK = jnp.concatenate([turned, rest], axis=-1).astype(k_BSMK.dtype)

        q_BCMHK = q_BCNK.reshape(b, queries, k_BSMK.shape[2], -1, width)
        s_BMHCS = jnp.einsum(
            "bcmhk,bcsmk->bmhcs", q_BCMHK, k_BCSMK, preferred_element_type=jnp.float32
        )
        return (s_BMHCS * width**-0.5).reshape(b, n, queries, -1)

    @classmethod
    def check(cls, config):
        super().check(config)
        require(
            config.rotary_dim > 2,
            f"the mixer 'dynamic_ntk' with {config.rotary_dim} rotated dimensions (model.head_dim "
            "× model.partial_rotary_factor): expected more than 2, as its base grows to the power "
            "of R / (R − 2)",
        )


# ---- references
# --------------------------------------------------------------------------------------------------


def rerope_reference(config, params, x):
    window = config.settings_of_mixer("rerope").window
    i, j, causal = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=causal, distance=np.minimum(i - j, window))


def leaky_rerope_reference(config, params, x):
    s = config.settings_of_mixer("leaky_rerope")
    i, j, causal = positions_and_causal_mask(x)
    far = s.window + (i - j - s.window) / s.stretch
    distance = np.where(i - j < s.window, i - j, far)
    return gated_attention(config, params, x, seen=causal, distance=distance)


def lambda_window_reference(config, params, x):
    s = config.settings_of_mixer(config.mixers[0])
    i, j, causal = positions_and_causal_mask(x)
    seen = causal & ((i - j < s.window) | (j < s.first_tokens))
    selected = (causal & ~seen, s.selected) if hasattr(s, "selected") else None
    distance = np.minimum(i - j, s.window)
    return gated_attention(config, params, x, seen=seen, distance=distance, selected=selected)


def parallel_windows_reference(config, params, x):
    s = config.settings_of_mixer("parallel_windows")
    i, j, causal = positions_and_causal_mask(x)
    in_windows = s.contexts * s.window
    place = np.array(
        [t % s.window if t < in_windows else t - in_windows + s.window for t in range(len(x))]
    )
    seen = causal & ((i // s.window == j // s.window) | (i >= in_windows))
    distance = place[:, None] - place[None]
    return gated_attention(config, params, x, seen=seen, distance=distance)


def dynamic_ntk_reference(config, params, x):
    i, j, causal = positions_and_causal_mask(x)
    length, trained, r = i + 1, config.max_position_embeddings, config.rotary_dim
    growth = config.yarn_factor * length / trained - (config.yarn_factor - 1)
    growth = np.where(length > trained, growth, 1.0) ** (r / (r - 2))
    theta = config.rope_theta * growth[..., None, None]
    return gated_attention(config, params, x, seen=causal, distance=i - j, theta=theta)


REFERENCES = {
    "rerope": rerope_reference,
    "leaky_rerope": leaky_rerope_reference,
    "lambda_window": lambda_window_reference,
    "selected_tokens": lambda_window_reference,
    "parallel_windows": parallel_windows_reference,
    "dynamic_ntk": dynamic_ntk_reference,
}
