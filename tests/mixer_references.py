"""What a mixer computes, token by token as its paper prints it, for one row [T, D] of one
document, and how far the mixer is off. A family of the zoo brings its own references.

Plain jax.numpy in the widest dtype, so that gradients are autodiff's. `c` is the ModelConfig,
`p` the parameters by name.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make
from tests.models import drawn


def gated_deltanet(c, p, x):
    """Gated DeltaNet (2412.06464, equation 10), token by token."""
    g, h = c.linear_num_key_heads, c.linear_num_value_heads
    r, k, v = h // g, c.linear_key_head_dim, c.linear_value_head_dim
    channels = 2 * k + r * v
    qkvz = jnp.einsum("td,dgc->tgc", x, p["in_proj_qkvz"])
    z = qkvz[..., channels:].reshape(len(x), h, v)
    width = len(p["conv_kernel"])
    padded = jnp.pad(qkvz[..., :channels], ((width - 1, 0), (0, 0), (0, 0)))
    convolved = sum(padded[w : w + len(x)] * p["conv_kernel"][w] for w in range(width))
    q, key, value = jnp.split(jax.nn.silu(convolved), (k, 2 * k), axis=-1)
    q, key = (jnp.repeat(unit(y), r, axis=1) for y in (q, key))
    ba = jnp.einsum("td,dgr->tgr", x, p["in_proj_ba"])
    beta = c.beta_range * jax.nn.sigmoid(ba[..., :r]).reshape(len(x), h)
    step = jax.nn.softplus(ba[..., r:].reshape(len(x), h) + p["dt_bias"])
    decay = jnp.exp(-jnp.exp(p["a_log"]) * step)

    def one_token(s, token):
        q, k, v, decay, beta = token
        s = decay[:, None, None] * s
        error = v - jnp.einsum("hkv,hk->hv", s, k)
        s = s + beta[:, None, None] * k[..., None] * error[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q) * k.shape[-1] ** -0.5

    tokens = (q, key, value.reshape(len(x), h, v), decay, beta)
    _, o = jax.lax.scan(one_token, jnp.zeros((h, k, v)), tokens)
    return jnp.einsum("thv,hvd->td", rms(c, o) * p["norm"] * jax.nn.silu(z), p["out_proj"])


def unit(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def rms(c, x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.rms_norm_eps)


def gated_attention(c, p, x):
    """Every query with every key before it, turned by its distance from the key."""
    half = c.rotary_dim // 2
    q, gate = jnp.split(jnp.einsum("td,dnk->tnk", x, p["q_proj"]), 2, axis=-1)
    k, v = (jnp.einsum("td,dmk->tmk", x, p[name]) for name in ("k_proj", "v_proj"))
    q, k = rms(c, q) * (1 + p["q_norm"]), rms(c, k) * (1 + p["k_norm"])
    k, v = (jnp.repeat(y, q.shape[1] // k.shape[1], axis=1) for y in (k, v))
    distance = np.arange(len(x))[:, None] - np.arange(len(x))[None]
    angle = distance[..., None, None] * c.rope_theta ** (-np.arange(half) / half)
    first, second, rest = jnp.split(q[:, None], (half, 2 * half), axis=-1)
    turned = [
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
        jnp.broadcast_to(rest, (len(x), len(x), *rest.shape[2:])),
    ]
    scores = jnp.einsum("ijnk,jnk->nij", jnp.concatenate(turned, axis=-1), k) * c.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(distance >= 0, scores, -jnp.inf), axis=-1)
    o = jnp.einsum("nij,jnk->ink", weights, v) * jax.nn.sigmoid(gate)
    return jnp.einsum("tnk,nkd->td", o, p["o_proj"])


REFERENCES = {"gated_deltanet": gated_deltanet, "gated_attention": gated_attention}


def _family(name):
    return importlib.import_module(mixer_class(name).__module__)


def reference(name):
    """The mixer's reference: its family's in the zoo, or that of a core mixer here."""
    return REFERENCES.get(name) or _family(name).REFERENCES[name]


def example_of(name):
    """Settings of the model with which rows of some ten tokens meet all that the mixer does."""
    return getattr(_family(name), "EXAMPLES", {}).get(name, {})


@functools.cache
def _gradient(name, config):
    def theirs(p, x, dy):
        y = reference(name)(config, p, x)
        return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True))


def _away_from_zero(p, rng):
    """A parameter that starts at zero, such as a bias, with random numbers in its place."""
    if p.declared.kind != "rate" or np.any(p[...]):
        return p
    return p.replace(jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype))


def errors(name, config, dtype, length, seed=0, added=None, of_reference=False):
    """Largest relative error of (output, any gradient) of a layer in `dtype` against its
    reference in float64, given the same numbers.

    An error is of the largest number of the array; of gradients that are all but zero, of the
    largest gradient of a parameter. added: {parameter: a number that is added to all of it}.
    of_reference: instead of the reference itself, computed in `dtype`.
    """
    config = dataclasses.replace(config, dtype=dtype)
    layer = drawn(lambda: mixer_class(name)(config, Make(config, nnx.Rngs(seed)), (0,)), seed)
    graph, params = nnx.split(layer)
    rng = np.random.default_rng(seed)
    # by NumPy, which does not compile a program for each shape
    rounded = lambda x: np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float32)
    params = jax.tree.map(
        lambda p: p.replace(rounded(p[...]) if p.declared.uses_model_dtype else p[...]),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    params = jax.tree.map(
        lambda p: _away_from_zero(p, rng),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    for parameter, number in (added or {}).items():
        params[parameter] = params[parameter].replace(params[parameter][...] + number)
    x, dy = (rounded(rng.normal(size=(length, config.hidden_size))) for _ in range(2))
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def ours(params, x):
        y, _, _ = nnx.merge(graph, params)(x[None].astype(dtype), Context(positions))
        return jnp.sum(y[0].astype(jnp.float32) * dy), y[0]

    if of_reference:
        narrow = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)
        (_, y), d = _gradient(name, config)(*map(narrow, (nnx.to_pure_dict(params), x, dy)))
    else:
        (_, y), d = ours(params, x)
        d = (nnx.to_pure_dict(d[0]), d[1])
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), tree)
        reference = _gradient(name, dataclasses.replace(config, dtype="float32"))
        (_, want_y), want = reference(*map(wide, (nnx.to_pure_dict(params), x, dy)))
    largest = max(np.abs(np.asarray(a)).max() for a in jax.tree.leaves(want))

    def relative(got, want, least):
        want = np.asarray(want)
        return float(
            np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), least)
        )

    return relative(y, want_y, 0), jax.tree.map(
        lambda a, b: relative(a, b, 1e-3 * largest), d, want
    )
