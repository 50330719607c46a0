"""Functions that the float64 reference implementations of attention share: gated attention for one
row [T, D] that is one document, with a score for every pair of tokens.

A reference is a function (config, params, x): the ModelConfig, the parameters by name, and the row.
A reference uses only jax.numpy, so that autodiff computes its gradients. The mixers of the zoo
rotate queries and keys by their positions. A reference rotates only the query, by the distance of
query and key, so that it checks the mixer's rotary positions by another computation.

Letters: T queries, S keys, D model, N query heads, M key/value heads, K head width.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def apply_norm(config, x, weight):
    """Applies the norm that `model.block.norm` names over the last axis of x, which has n entries.
    `weight` has the shape [n], or [2, n] (scale and bias) for a LayerNorm.
    """
    centre = 1 if config.zero_centered_norm else 0
    if config.block.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        scale, bias = weight
    else:
        scale, bias = weight, 0
    size = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
    return x / size * (centre + scale) + bias


def rms_norm(config, x):
    """Returns x divided by its root mean square over the last axis."""
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)


def rotate_by_distance(config, x, distance, theta=None):
    """Rotates the first R = `config.rotary_dim` entries of the last axis of x. Entries i and i +
    R/2 form a pair, which is rotated by the angle distance · θ^(-2i/R). The entries of x after the
    first R do not change.

    Args:
      x: [..., K].
      distance: [...], the number of positions to rotate by.
      theta: the base θ; None means `config.rope_theta`.

    Returns:
      The rotated array. The leading axes of x and the axes of `distance` are broadcast together.
    """
    half = config.rotary_dim // 2
    theta = config.rope_theta if theta is None else theta
    angle = distance[..., None] * theta ** (-np.arange(half) * 2 / config.rotary_dim)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = first * cos - second * sin, second * cos + first * sin
    rest = jnp.broadcast_to(rest, (*first.shape[:-1], rest.shape[-1]))
    return jnp.concatenate([first, second, rest], axis=-1)


def positions_and_causal_mask(x):
    """Returns the positions of the queries [T, 1], the positions of the keys [1, S], and the causal
    mask [T, S]: whether each query sees each key. T and S are the length of x.
    """
    t, s = np.arange(len(x))[:, None], np.arange(len(x))[None]
    return t, s, s <= t


def gated_attention(
    config, params, x, *, seen, distance=None, theta=None, bias=None, selected=None, sink=None
):
    """Computes gated attention of one row, with biases of the projections if `params` has them.

    Args:
      config: the ModelConfig.
      params: name of a parameter → its array.
      x: the row, [T, D].
      seen: [T, S] bool, whether the query sees the key.
      distance: [T, S], the distance by which the query is rotated for each key; None for no
        rotation.
      theta: [T, 1, 1, 1], the base of the rotations for each query; None means `config.rope_theta`.
      bias: [N, T, S], added to the scores; None adds nothing.
      selected: the pair (mask [T, S] bool, n): each query and head also sees the n keys with the
        highest scores among the keys for which the mask is true; None selects no keys.
      sink: [N], a logit s of each head that adds e^s to the softmax's denominator; None adds
        nothing.

    Returns:
      The output [T, D].
    """
    settings, width = config.settings_of_mixer(config.mixers[0]), config.head_dim
    q = jnp.einsum("td,dnk->tnk", x, params["q_proj"]) + params.get("q_bias", 0)
    k = jnp.einsum("td,dmk->tmk", x, params["k_proj"]) + params.get("k_bias", 0)
    v = jnp.einsum("td,dmk->tmk", x, params["v_proj"]) + params.get("v_bias", 0)
    gate = None
    if config.attention_output_gate:
        q, gate = q[..., :width], q[..., width:]
    if config.qk_norm:
        rows = (len(x), -1) if settings.qk_norm_over == "layer" else (len(x), -1, q.shape[-1])
        q = apply_norm(config, q.reshape(rows), params["q_norm"]).reshape(q.shape)
        k = apply_norm(config, k.reshape(rows), params["k_norm"]).reshape(k.shape)
    readers = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, readers, axis=1), jnp.repeat(v, readers, axis=1)

    q_TSNK = q[:, None]
    if distance is not None:
        q_TSNK = rotate_by_distance(config, q_TSNK, jnp.asarray(distance)[..., None], theta)
    s_NTS = jnp.sum(q_TSNK * k[None], axis=-1).transpose(2, 0, 1) / math.sqrt(width)
    s_NTS = s_NTS if bias is None else s_NTS + bias
    seen = jnp.broadcast_to(jnp.asarray(seen), s_NTS.shape)
    if selected is not None:
        pairs, count = selected
        far = jnp.where(pairs, s_NTS, -jnp.inf)
        seen = seen | (pairs & (far >= jnp.sort(far, axis=-1)[..., -count, None]))
    s_NTS = jnp.where(seen, s_NTS, -jnp.inf)
    if sink is not None:
        column = jnp.broadcast_to(sink[:, None, None], (*s_NTS.shape[:2], 1))
        s_NTS = jnp.concatenate([s_NTS, column], axis=-1)
    weights = jax.nn.softmax(s_NTS, axis=-1)[..., : len(x)]
    o = jnp.einsum("nts,snk->tnk", weights, v)
    if gate is not None:
        o = o * jax.nn.sigmoid(gate)
    return jnp.einsum("tnk,nkd->td", o, params["o_proj"]) + params.get("o_bias", 0)
