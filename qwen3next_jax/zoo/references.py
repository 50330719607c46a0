"""Functions that the float64 reference implementations of recurrent mixers share: the parts of a
layer for one row [T, D] that is one document, written as plainly as possible.

A reference is a function (config, params, x): the ModelConfig, the parameters by name, and the row.
A reference computes the recurrence token by token, as the paper prints it, in the dtype of its
arguments. Autodiff computes its gradients. Every file of zoo/ that defines mixers has two dicts:
`REFERENCES` maps the name of a mixer to its reference, and `EXAMPLES` maps the same name to the
settings that select the mixer, with small values of the mixer's own settings.
tests/zoo/test_mixers.py makes the mixer of a small configuration with the settings in `EXAMPLES`,
and compares the mixer's output and gradients with those of the reference.

Letters: T time, D model, G key heads, H value heads, K/V widths of a key and of a value.
"""

import jax
import jax.numpy as jnp


def outer_product_recurrence(
    q, k, v, g, beta=None, *, delta_term=False, erase_key=None, bonus=None, normaliser=False
):
    """Computes the recurrence S ← e^g S + β k vᵀ, o = Sᵀq, where S [H, K, V] starts at zero.

    Args:
      q, k: queries and keys, [T, H, K].
      v: values, [T, H, V].
      g: log decay, [T, H] or, for each key channel, [T, H, K].
      beta: write strength, [T, H]; None for 1.
      delta_term: whether to compute the delta rule, S ← e^g S, then S ← S + β k (v - Sᵀe)ᵀ.
      erase_key: the key e of the delta rule, [T, H, K]; None for k.
      bonus: [H, K] or None. With a bonus u, a token reads the state before its own decay and write:
        o = Sᵀq + (Σ_c q_c u_c k_c) v, with S before the token.
      normaliser: whether to return zᵀq [T, H, 1], too, where z ← e^g z + β k starts at zero.

    Returns:
      o [T, H, V], or (o, zᵀq).
    """
    beta = jnp.ones(v.shape[:2]) if beta is None else beta
    g = jnp.broadcast_to(g[..., None] if g.ndim == 2 else g, k.shape)
    if normaliser:  # z is the column of S for a value channel that is always 1
        v = jnp.concatenate([v, jnp.ones((*v.shape[:2], 1))], axis=-1)

    def step(s, token):
        q, k, v, g, beta, e = token

        def read(s):
            return jnp.einsum("hkv,hk->hv", s, q)

        if bonus is not None:
            o = read(s) + jnp.sum(q * bonus * k, axis=-1, keepdims=True) * v
        s = jnp.exp(g)[..., None] * s
        written = v - jnp.einsum("hkv,hk->hv", s, e) if delta_term else v
        s = s + beta[:, None, None] * k[..., None] * written[:, None]
        return s, read(s) if bonus is None else o

    empty = jnp.zeros((*k.shape[1:], v.shape[-1]))
    erase_key = k if erase_key is None else erase_key
    _, o = jax.lax.scan(step, empty, (q, k, v, g, beta, erase_key))
    return (o[..., :-1], o[..., -1:]) if normaliser else o


def queries_keys_values_gate(config, params, x, convolved=False):
    """Computes the projection that `Recurrent.make_projection` makes.

    Args:
      convolved: whether q, k and v pass through the short convolution and a SiLU after the
        projection.

    Returns:
      q [T, H, K], k [T, H, K], v [T, H, V], and the output gate before its activation [T, H, V],
      or None if the projection has no gate.
    """
    g, h = config.linear_num_key_heads, config.linear_num_value_heads
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    y = jnp.einsum("td,dgc->tgc", x, params["in_proj"])
    gate = y[..., 2 * k + h // g * v :]
    y = y[..., : 2 * k + h // g * v]
    if convolved:
        y = jax.nn.silu(causal_convolution(y, params["conv_kernel"]))
    q = jnp.repeat(y[..., :k], h // g, axis=1)
    key = jnp.repeat(y[..., k : 2 * k], h // g, axis=1)
    value = y[..., 2 * k :].reshape(len(x), h, v)
    return q, key, value, gate.reshape(len(x), h, -1) if gate.size else None


def causal_convolution(x, kernel):
    """Returns y[t] = Σ_w kernel[w] x[t - W + 1 + w] for every channel, with x [T, …] and kernel
    [W, …].
    """
    width = len(kernel)
    padded = jnp.pad(x, [(width - 1, 0)] + [(0, 0)] * (x.ndim - 1))
    return sum(padded[w : w + len(x)] * kernel[w] for w in range(width))


def shift_by_one_token(x):
    """Returns x [T, D] shifted by one token: row t holds x[t - 1], and row 0 holds zeros."""
    return jnp.pad(x, ((1, 0), (0, 0)))[:-1]


def unit_length(x):
    """Returns x normalised to length 1 over the last axis."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def rms_norm(config, x, axis=-1):
    """Returns x divided by its root mean square over `axis`."""
    return x / jnp.sqrt(jnp.mean(x * x, axis=axis, keepdims=True) + config.rms_norm_eps)


def project_out(params, o):
    """Projects the outputs of the heads [T, H, V] to [T, D]."""
    return jnp.einsum("thv,hvd->td", o, params["out_proj"])
