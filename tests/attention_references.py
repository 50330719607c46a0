"""What each kind of attention computes, every pair of tokens by itself, for one row [T, D] of
one document: oracles of test_mixers.py and test_block.py. Positions turn the query by the
distance alone, where the model turns queries and keys by their places.

Plain jax.numpy in the widest dtype, so that gradients are autodiff's. `c` is the ModelConfig,
`p` the parameters by name.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


def norm(c, x, weight):
    """The model's norm over the last axis: weight [D], or [2, D] of a LayerNorm."""
    centre = 1 if c.zero_centered_norm else 0
    if c.block.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return (
            x
            / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.rms_norm_eps)
            * (centre + weight[0])
            + weight[1]
        )
    return (
        x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.rms_norm_eps) * (centre + weight)
    )


def turned(c, x, distance, theta):
    """x [..., K] with its first rotated dimensions turned by `distance` [...] (and those of K by
    θ^(-2i/R)).
    """
    half = c.rotary_dim // 2
    angle = distance[..., None] * theta ** (-np.arange(half) * 2 / c.rotary_dim)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(
        [first, second, jnp.broadcast_to(rest, (*first.shape[:-1], rest.shape[-1]))], axis=-1
    )


def attention(c, p, x, *, seen, distance=None, theta=None, bias=None, selected=None):
    """seen [T, S] bool; distance [T, S], None: no positions; theta: [T, 1, 1, 1] or None for the
    model's; bias [N, T, S]; selected: (more pairs [T, S], how many of them).
    """
    gated, n, m = c.attention_output_gate, c.num_attention_heads, c.num_key_value_heads
    q = jnp.einsum("td,dnk->tnk", x, p["q_proj"])
    q, gate = (q[..., : c.head_dim], q[..., c.head_dim :]) if gated else (q, None)
    k, v = (jnp.einsum("td,dmk->tmk", x, p[name]) for name in ("k_proj", "v_proj"))
    if c.qk_norm:
        flat = (
            (lambda y: y.reshape(len(x), -1))
            if settings(c).qk_norm_over == "layer"
            else lambda y: y
        )
        q, k = (
            norm(c, flat(y), p[name]).reshape(y.shape) for y, name in ((q, "q_norm"), (k, "k_norm"))
        )
    k, v = (jnp.repeat(y, n // m, axis=1) for y in (k, v))
    pairs = q[:, None]
    if distance is not None:
        pairs = turned(
            c, pairs, jnp.asarray(distance)[..., None], c.rope_theta if theta is None else theta
        )
    scores = jnp.sum(pairs * k[None], axis=-1).transpose(2, 0, 1) / math.sqrt(c.head_dim) + (
        0 if bias is None else bias
    )
    seen = jnp.broadcast_to(jnp.asarray(seen), scores.shape)
    if selected is not None:
        more = jnp.where(selected[0], scores, -jnp.inf)
        seen = seen | (selected[0] & (more >= jnp.sort(more, axis=-1)[..., -selected[1], None]))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    o = jnp.einsum("nts,snk->tnk", weights, v)
    return jnp.einsum("tnk,nkd->td", o * jax.nn.sigmoid(gate) if gated else o, p["o_proj"])


def settings(c):
    """Of the mixer that all layers are."""
    return c.settings_of(c.mixers[0])


def places(x):
    t, s = np.arange(len(x))[:, None], np.arange(len(x))[None]
    return t, s, s <= t


def mask(c, x):
    t, s, causal = places(x)
    prefix = settings(c).prefix_tokens
    return {
        "causal": causal,
        "prefix": causal | (t < prefix) & (s < prefix),
        "bidirectional": causal | True,
    }[settings(c).mask]


def rotated(c, p, x):
    t, s, causal = places(x)
    return attention(c, p, x, seen=causal, distance=t - s)


def nope_attention(c, p, x):
    return attention(c, p, x, seen=places(x)[2])


def masked_attention(c, p, x):
    t, s, _ = places(x)
    return attention(c, p, x, seen=mask(c, x), distance=t - s)


def alibi(c, p, x):
    t, s, _ = places(x)
    n = c.num_attention_heads
    assert n & (n - 1) == 0
    slopes = 2.0 ** (-8 / n * np.arange(1, n + 1))
    return attention(c, p, x, seen=mask(c, x), bias=-slopes[:, None, None] * np.abs(t - s))


def bucket(distance, buckets, largest, both_ways):
    first = 0
    if both_ways:
        buckets //= 2
        first, distance = (buckets if distance < 0 else 0), abs(distance)
    if distance < buckets // 2:
        return first + max(distance, 0)
    further = (
        math.log(distance / (buckets // 2))
        / math.log(largest / (buckets // 2))
        * (buckets - buckets // 2)
    )
    return first + min(buckets // 2 + int(further), buckets - 1)


def t5_bias(c, p, x):
    t, s, _ = places(x)
    of = np.vectorize(
        lambda d: bucket(
            int(d),
            settings(c).buckets,
            settings(c).max_distance,
            settings(c).mask != "causal",
        )
    )
    return attention(c, p, x, seen=mask(c, x), bias=p["bias"][:, of(t - s)])


def rerope(c, p, x):
    t, s, causal = places(x)
    return attention(c, p, x, seen=causal, distance=np.minimum(t - s, settings(c).window))


def leaky_rerope(c, p, x):
    (t, s, causal), w = places(x), settings(c).window
    return attention(
        c,
        p,
        x,
        seen=causal,
        distance=np.where(t - s < w, t - s, w + (t - s - w) / settings(c).stretch),
    )


def lambda_window(c, p, x, selects=False):
    (t, s, causal), w = places(x), settings(c).window
    seen = causal & ((t - s < w) | (s < settings(c).first_tokens))
    selected = (causal & ~seen, settings(c).selected) if selects else None
    return attention(c, p, x, seen=seen, distance=np.minimum(t - s, w), selected=selected)


def parallel_windows(c, p, x):
    (t, s, causal), w, windows = (
        places(x),
        settings(c).window,
        settings(c).contexts,
    )
    place = np.array([i % w if i < windows * w else i - (windows - 1) * w for i in range(len(x))])
    seen = causal & ((t // w == s // w) | (t >= windows * w))
    return attention(c, p, x, seen=seen, distance=place[:, None] - place[None])


def dynamic_ntk(c, p, x):
    t, s, causal = places(x)
    length, trained, r = t + 1, c.max_position_embeddings, c.rotary_dim
    growth = np.where(
        length > trained, c.yarn_factor * length / trained - (c.yarn_factor - 1), 1.0
    ) ** (r / (r - 2))
    return attention(
        c, p, x, seen=causal, distance=t - s, theta=c.rope_theta * growth[..., None, None]
    )


REFERENCES = dict(
    gated_attention=rotated,
    nope_attention=nope_attention,
    masked_attention=masked_attention,
    alibi=alibi,
    t5_bias=t5_bias,
    rerope=rerope,
    leaky_rerope=leaky_rerope,
    dynamic_ntk=dynamic_ntk,
    lambda_window=lambda_window,
    parallel_windows=parallel_windows,
    selected_tokens=functools.partial(lambda_window, selects=True),
)
