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

from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make


def settings(c):
    """Of the mixer that all layers are."""
    return c.settings_of(c.mixers[0])


def outer(q, k, v, g, beta=None, *, erase=False, bonus=None, normaliser=False, erase_key=None):
    """S ← e^g S, S ← S + β k (v − Sᵀk)ᵀ (or + β k vᵀ), o = Sᵀq; with a bonus o = Sᵀq + (Σ q u k)
    v of the state before. q, k [T, H, K], v [T, H, V], g [T, H] or [T, H, K]. With `normaliser`
    also zᵀq, z ← e^g z + β k. `erase_key`: Sᵀe for Sᵀk.
    """
    beta = jnp.ones(v.shape[:2]) if beta is None else beta
    g = jnp.broadcast_to(g[..., None] if g.ndim == 2 else g, k.shape)
    v = jnp.concatenate([v, jnp.ones((*v.shape[:2], 1))], axis=-1) if normaliser else v

    def step(s, token):
        q, k, v, g, beta, e = token
        read = lambda s: jnp.einsum("hkv,hk->hv", s, q)
        o = None if bonus is None else read(s) + jnp.sum(q * bonus * k, axis=-1, keepdims=True) * v
        s = jnp.exp(g)[..., None] * s
        s = (
            s
            + beta[:, None, None]
            * k[..., None]
            * (v - jnp.einsum("hkv,hk->hv", s, e) if erase else v)[:, None]
        )
        return s, read(s) if bonus is None else o

    _, o = jax.lax.scan(
        step,
        jnp.zeros((*k.shape[1:], v.shape[-1])),
        (q, k, v, g, beta, k if erase_key is None else erase_key),
    )
    return (o[..., :-1], o[..., -1:]) if normaliser else o


def slab(c, p, x, name="in_proj", convolved=False):
    """q, k [T, H, K], v and (if it is there) gate [T, H, V] of the fused projection, after
    convolution and SiLU where there is one.
    """
    g, h, k, v = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    y = jnp.einsum("td,dgc->tgc", x, p[name])
    y, gate = y[..., : 2 * k + h // g * v], y[..., 2 * k + h // g * v :]
    if convolved:
        padded = jnp.pad(y, ((len(p["conv_kernel"]) - 1, 0), (0, 0), (0, 0)))
        y = jax.nn.silu(
            sum(padded[w : w + len(x)] * kernel for w, kernel in enumerate(p["conv_kernel"]))
        )
    wide = lambda y: jnp.repeat(y, h // g, axis=1)
    q, key, value = wide(y[..., :k]), wide(y[..., k : 2 * k]), y[..., 2 * k :].reshape(len(x), h, v)
    return q, key, value, gate.reshape(len(x), h, -1) if gate.size else None


unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
rms = lambda c, x, axis=-1: x / jnp.sqrt(jnp.mean(x * x, axis=axis, keepdims=True) + c.rms_norm_eps)
out = lambda p, o: jnp.einsum("thv,hvd->td", o, p["out_proj"])
softplus, sigmoid, silu = jax.nn.softplus, jax.nn.sigmoid, jax.nn.silu


def gated_deltanet(c, p, x):
    q, k, v, z = slab(c, p, x, "in_proj_qkvz", convolved=True)
    h, r = v.shape[1], v.shape[1] // c.linear_num_key_heads
    b, a = (
        y.reshape(-1, h)
        for y in jnp.split(jnp.einsum("td,dgr->tgr", x, p["in_proj_ba"]), [r], axis=-1)
    )
    o = outer(
        unit(q) * q.shape[-1] ** -0.5,
        unit(k),
        v,
        -jnp.exp(p["a_log"]) * softplus(a + p["dt_bias"]),
        sigmoid(b),
        erase=True,
    )
    return out(p, rms(c, o) * p["norm"] * silu(z))


def kda(c, p, x):
    q, k, v, _ = slab(c, p, x, convolved=True)
    low = lambda name: jnp.einsum("tr,rhk->thk", x @ p[f"{name}_down"], p[f"{name}_up"])
    g = -jnp.exp(p["a_log"])[:, None] * softplus(low("decay") + p["dt_bias"])
    o = outer(unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, sigmoid(x @ p["beta_proj"]), erase=True)
    return out(p, rms(c, o) * p["norm"] * sigmoid(low("gate")))


def mamba2(c, p, x):
    q, k, v, z = slab(c, p, x, convolved=True)
    step = softplus(x @ p["step_proj"] + p["dt_bias"])
    y = (outer(q, k, v, -jnp.exp(p["a_log"]) * step, step) + p["skip"][:, None] * v) * silu(z)
    groups = (len(x), c.linear_num_key_heads, -1)
    return out(p, rms(c, y.reshape(groups)).reshape(y.shape) * p["norm"])


def gla(c, p, x):
    q, k, v, z = slab(c, p, x)
    logit = jnp.einsum("tr,rhk->thk", x @ p["decay_down"], p["decay_up"]) + p["decay_bias"]
    return out(
        p,
        rms(c, outer(q * q.shape[-1] ** -0.5, k, v, -softplus(-logit) / 16)) * p["norm"] * silu(z),
    )


def hgrn2(c, p, x):
    q, logit, v, _ = slab(c, p, x)
    bound = jnp.repeat(sigmoid(p["bound"]), v.shape[1] // c.linear_num_key_heads, axis=0)
    forget = bound + (1 - bound) * sigmoid(logit)
    return out(p, rms(c, outer(silu(q), 1 - forget, v, jnp.log(forget))) * p["norm"])


def rwkv6(c, p, x):
    before = jnp.pad(x, ((1, 0), (0, 0)))[:-1]
    heads = lambda y: jnp.repeat(y, c.linear_num_value_heads // c.linear_num_key_heads, axis=1)
    low = jnp.tanh(jnp.einsum("td,dpr->tpr", x + (before - x) * p["mix_all"], p["mix_down"]))
    mixed = [x + (before - x) * (p["mix"][i] + low[:, i] @ p["mix_up"][i]) for i in range(5)]
    part = lambda i, name: jnp.einsum("td,dgc->tgc", mixed[i], p[f"{name}_proj"])
    w = p["decay"] + jnp.einsum("tr,rhk->thk", jnp.tanh(mixed[0] @ p["decay_down"]), p["decay_up"])
    v, z = (
        part(i, name).reshape(len(x), c.linear_num_value_heads, -1)
        for i, name in ((2, "value"), (4, "gate"))
    )
    o = outer(heads(part(3, "receptance")), heads(part(1, "key")), v, -jnp.exp(w), bonus=p["bonus"])
    return out(p, rms(c, o - o.mean(axis=-1, keepdims=True)) * p["norm"] * silu(z))


def linear(c, p, x):
    q, k, v, _ = slab(c, p, x)
    if settings(c).feature_map == "elu":
        q, k = (jnp.where(y > 0, y + 1, jnp.exp(jnp.minimum(y, 0))) for y in (q, k))
    none = jnp.zeros(v.shape[:2])
    if not settings(c).normaliser:
        return out(p, rms(c, outer(q, k, v, none)) * p["norm"])
    o, z = outer(q, k, v, none, normaliser=True)
    return out(p, rms(c, o / (z + 1e-6)) * p["norm"])


def rotated(x):
    """Rotate-half RoPE of base 10,000 over the whole head."""
    half = x.shape[-1] // 2
    angle = (jnp.arange(len(x))[:, None] * 10_000.0 ** (-jnp.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1
    )


def retnet(c, p, x):
    q, k, v, z = slab(c, p, x)
    g = jnp.broadcast_to(jnp.log(1 - 2.0 ** (-5 - jnp.arange(v.shape[1]))), v.shape[:2])
    if "decay_proj" in p:
        g = -softplus(-x @ p["decay_proj"]) / 16
    return out(
        p, rms(c, outer(rotated(q), rotated(k) * k.shape[-1] ** -0.5, v, g)) * p["norm"] * silu(z)
    )


def lightning(c, p, x):
    """The first layer."""
    q, k, v, z = slab(c, p, x)
    h = v.shape[1]
    slope = 2.0 ** (-8 * (jnp.arange(h) + 1) / h) * (1 + 1e-5)
    o = outer(silu(q), silu(k), silu(v), jnp.broadcast_to(-slope, v.shape[:2]))
    return out(p, rms(c, o, (-2, -1)) * p["norm"] * sigmoid(z))


def gated_rfa(c, p, x):
    q, k, v, _ = slab(c, p, x)
    omega = jax.lax.stop_gradient(
        jnp.repeat(p["frequencies"], v.shape[1] // c.linear_num_key_heads, axis=0)
    )

    def features(y):
        angle = jnp.einsum("thk,hfk->thf", unit(y), omega)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1) / jnp.sqrt(omega.shape[1])

    logit = x @ p["decay_proj"]
    o, z = outer(features(q), features(k), v, -softplus(-logit), sigmoid(-logit), normaliser=True)
    return out(p, rms(c, o / (jnp.where(z < 0, -1, 1) * jnp.maximum(jnp.abs(z), 1e-6))) * p["norm"])


def mlstm(c, p, x):
    """As printed, without a stabiliser: e^i itself."""
    q, k, v, z = slab(c, p, x)
    i, f = x @ p["input_proj"] + p["input_bias"], x @ p["forget_proj"] + p["forget_bias"]
    o, n = outer(q, k * k.shape[-1] ** -0.5, v, -softplus(-f), jnp.exp(i), normaliser=True)
    return out(p, rms(c, o / jnp.maximum(jnp.abs(n), 1)) * p["norm"] * sigmoid(z))


def gsa(c, p, x):
    q, k, v, _ = slab(c, p, x)
    forget = sigmoid(jnp.einsum("td,dhm->thm", x, p["forget_proj"])) ** (1 / 8)

    def step(carry, token):
        keys, values = carry
        q, k, v, f = token
        keys = keys * f[:, None] + k[..., None] * (1 - f)[:, None]
        values = f[..., None] * values + (1 - f)[..., None] * v[:, None]
        weights = jax.nn.softmax(jnp.einsum("hkm,hk->hm", keys, q), axis=-1)
        return (keys, values), jnp.einsum("hmv,hm->hv", values, weights)

    slots = forget.shape[1:]
    empty = jnp.zeros((slots[0], k.shape[-1], slots[1])), jnp.zeros((*slots, v.shape[-1]))
    return out(p, rms(c, silu(jax.lax.scan(step, empty, (q, k, v, forget))[1])) * p["norm"])


def abc(c, p, x):
    q, k, v, _ = slab(c, p, x)
    s = jnp.einsum("td,dhm->thm", x, p["forget_proj"])
    causal = jnp.where(np.tril(np.ones((len(x), len(x)), bool))[..., None, None], s[None], -jnp.inf)
    weights = jax.nn.softmax(causal, axis=1)  # of token j in each slot at time i
    keys, values = (jnp.einsum("ijhm,jhc->ihmc", weights, y) for y in (k, v))
    o = jnp.einsum(
        "ihm,ihmv->ihv", jax.nn.softmax(jnp.einsum("ihmk,ihk->ihm", keys, q), axis=-1), values
    )
    return out(p, rms(c, silu(o)) * p["norm"])


def rwkv4(c, p, x):
    before = jnp.pad(x, ((1, 0), (0, 0)))[:-1]
    r, k, v = (
        (p["mix"][i] * x + (1 - p["mix"][i]) * before) @ p[f"{name}_proj"]
        for i, name in enumerate(("receptance", "key", "value"))
    )
    i, j = np.ogrid[: len(x), : len(x)]
    age = jnp.asarray(np.maximum(i - 1 - j, 0))[..., None]
    weight = jnp.where(
        (j < i)[..., None], jnp.exp(k[None] - age * jnp.exp(p["decay"])), 0
    ) + jnp.where((j == i)[..., None], jnp.exp(p["bonus"] + k[None]), 0)
    return (sigmoid(r) * jnp.einsum("ijd,jd->id", weight, v) / weight.sum(axis=1)) @ p["out_proj"]


def dfw(c, p, x):
    q, k, v, _ = slab(c, p, x)
    decay = sigmoid(jnp.einsum("td,dhc->thc", x, p["decay_proj"]))

    def step(s, token):
        q, k, v, f = token
        s = f[:, : k.shape[-1], None] * s * f[:, None, k.shape[-1] :] + k[..., None] * v[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q)

    return out(
        p,
        rms(c, jax.lax.scan(step, jnp.zeros((*k.shape[1:], v.shape[-1])), (q, k, v, decay))[1])
        * p["norm"],
    )


def mamba(c, p, x):
    x, z = jnp.split(jnp.einsum("td,dhc->thc", x, p["in_proj"]), 2, axis=-1)
    padded = jnp.pad(x, ((c.linear_conv_kernel_dim - 1, 0), (0, 0), (0, 0)))
    x = silu(sum(padded[w : w + len(x)] * kernel for w, kernel in enumerate(p["conv_kernel"])))
    low, b, read = jnp.split(
        jnp.einsum("thv,hvr->tr", x, p["x_proj"]),
        np.cumsum([len(p["step_up"]), settings(c).state_size]),
        axis=-1,
    )
    dt = softplus(jnp.einsum("tr,rhv->thv", low, p["step_up"]) + p["dt_bias"])

    def step(h, token):
        x, b, read, dt = token
        h = jnp.exp(-dt[..., None] * jnp.exp(p["a_log"])) * h + (dt * x)[..., None] * b
        return h, h @ read + p["skip"] * x

    y = jax.lax.scan(step, jnp.zeros(p["a_log"].shape), (x, b, read, dt))[1]
    return out(p, y * silu(z))


def gdn2(c, p, x):
    q, k, v, _ = slab(c, p, x, convolved=True)
    low = lambda name: jnp.einsum("tr,rhk->thk", x @ p[f"{name}_down"], p[f"{name}_up"])
    g = -jnp.exp(p["a_log"])[:, None] * softplus(low("decay") + p["dt_bias"])
    gates = sigmoid(jnp.einsum("td,dhc->thc", x, p["beta_proj"]))
    b, w = gates[..., : k.shape[-1]], gates[..., k.shape[-1] :]
    o = outer(unit(q) * q.shape[-1] ** -0.5, unit(k), w * v, g, erase=True, erase_key=b * unit(k))
    return out(p, rms(c, o) * p["norm"] * silu(low("gate")))


def s4d(c, p, x):
    """As a convolution: y_t = Σ_l κ_l x_{t−l} + D x_t, κ_l = 2 Re Σ_n C B̄ e^{l Δ A}."""
    x = jnp.einsum("td,dhv->thv", x, p["in_proj"])
    a = jax.lax.complex(-jnp.exp(p["a_log"]), p["a_imag"])
    step = jnp.exp(p["log_step"])[..., None]
    weight = jax.lax.complex(p["read"][..., 0], p["read"][..., 1]) * (jnp.exp(step * a) - 1) / a
    kernel = (
        2
        * jnp.einsum(
            "hvn,lhvn->lhv", weight, jnp.exp(jnp.arange(len(x))[:, None, None, None] * step * a)
        ).real
    )
    y = (
        jnp.stack([jnp.einsum("lhv,lhv->hv", kernel[: t + 1], x[t::-1]) for t in range(len(x))])
        + p["skip"] * x
    )
    value, gate = jnp.moveaxis(jnp.einsum("thv,hvpd->tpd", jax.nn.gelu(y), p["out_proj"]), 1, 0)
    return value * sigmoid(gate)


def ttt(c, p, x):
    """Every token's gradient by autodiff, at the state of the start of its block."""
    q, k, v, _ = slab(c, p, x)

    def f(w, x):
        y = jnp.einsum("hkv,hk->hv", w, x)
        y = y - y.mean(axis=-1, keepdims=True)
        return (
            x
            + p["scale"] * y / jnp.sqrt((y * y).mean(axis=-1, keepdims=True) + c.rms_norm_eps)
            + p["shift"]
        )

    def step(carry, token):
        (w, start), (t, q, k, v, rate) = carry, token
        start = jnp.where(t % settings(c).block == 0, w, start)
        w = w - rate[:, None, None] * jax.grad(lambda w: jnp.sum((f(w, k) - v) ** 2) / 2)(start)
        return (w, start), f(w, q)

    tokens = jnp.arange(len(x)), q, k, v, sigmoid(x @ p["rate_proj"]) / k.shape[-1]
    return out(p, rms(c, jax.lax.scan(step, (p["start"], p["start"]), tokens)[1]) * p["norm"])


def titans(c, p, x):
    q, k, v, _ = slab(c, p, x, convolved=True)
    q, k = unit(q), unit(k)
    gates = sigmoid(jnp.einsum("td,dhg->thg", x, p["gates_proj"]) + p["gates_bias"])

    def step(carry, token):
        (m, start, past), (t, q, k, v, gates) = carry, token
        kept, momentum, rate = jnp.moveaxis(gates, -1, 0)[..., None, None]
        start = jnp.where(t % settings(c).block == 0, m, start)
        surprise = jax.grad(lambda m: jnp.sum((jnp.einsum("hkv,hk->hv", m, k) - v) ** 2) / 2)(start)
        past = momentum * past - rate / settings(c).block * surprise
        m = kept * m + past
        return (m, start, past), jnp.einsum("hkv,hk->hv", m, q)

    empty = jnp.zeros((*k.shape[1:], v.shape[-1]))
    return out(
        p,
        rms(c, jax.lax.scan(step, (empty,) * 3, (jnp.arange(len(x)), q, k, v, gates))[1])
        * p["norm"],
    )


def rnn(c, p, x):
    def step(h, row):
        h = jnp.tanh(row + jnp.einsum("hv,hvc->hc", h, p["recurrent"]))
        return h, h

    x = jnp.einsum("td,dhc->thc", x, p["in_proj"]) + p["bias"]
    return out(p, jax.lax.scan(step, jnp.zeros(p["out_proj"].shape[:2]), x)[1])


def lstm(c, p, x):
    def step(carry, row):
        h, memory = carry
        take, forget, new, give = jnp.split(
            row + jnp.einsum("hv,hvc->hc", h, p["recurrent"]), 4, axis=-1
        )
        memory = sigmoid(forget) * memory + sigmoid(take) * jnp.tanh(new)
        h = sigmoid(give) * jnp.tanh(memory)
        return (h, memory), h

    x = jnp.einsum("td,dhc->thc", x, p["in_proj"]) + p["bias"]
    return out(p, jax.lax.scan(step, (jnp.zeros(p["out_proj"].shape[:2]),) * 2, x)[1])


def softmax_attention(q, k, v, seen, scale, sink=None):
    """q, k, v [T, N, ·], seen [T, T]; sink [N]: a logit that takes weight and gives nothing."""
    s = jnp.where(seen, jnp.einsum("inc,jnc->nij", q, k) * scale, -jnp.inf)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:2], 1))], axis=-1)
    return jnp.einsum("nij,jnv->inv", jax.nn.softmax(s, axis=-1)[..., : len(k)], v)


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
    o = jnp.einsum("nij,jnk->ink", weights, v) * sigmoid(gate)
    return jnp.einsum("tnk,nkd->td", o, p["o_proj"])


REFERENCES = dict(
    gated_deltanet=gated_deltanet,
    gated_attention=gated_attention,
    kda=kda,
    mamba2=mamba2,
    gla=gla,
    hgrn2=hgrn2,
    rwkv6=rwkv6,
    linear=linear,
    retnet=retnet,
    lightning=lightning,
    gated_retention=retnet,
    gated_rfa=gated_rfa,
    mlstm=mlstm,
    gsa=gsa,
    abc=abc,
    dfw=dfw,
    rwkv4=rwkv4,
    mamba=mamba,
    gdn2=gdn2,
    s4d=s4d,
    ttt=ttt,
    titans=titans,
    lstm=lstm,
    rnn=rnn,
)


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


def errors(name, config, dtype, length, seed=0, added=None, of_reference=False):
    """Largest relative error of (output, any gradient) of a layer in `dtype` against its
    reference in float64, given the same numbers.

    An error is of the largest number of the array; of gradients that are all but zero, of the
    largest gradient of a parameter. added: {parameter: a number that is added to all of it}.
    of_reference: instead of the reference itself, computed in `dtype`.
    """
    config = dataclasses.replace(config, dtype=dtype)
    graph, params = nnx.split(mixer_class(name)(config, Make(config, nnx.Rngs(seed)), (0,)))
    rng = np.random.default_rng(seed)
    rounded = lambda x: jnp.asarray(x, dtype).astype(jnp.float32)
    params = jax.tree.map(
        lambda p: p.replace(rounded(p[...]) if p.declared.operand else p[...]),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    for parameter, number in (added or {}).items():
        params[parameter] = params[parameter].replace(params[parameter][...] + number)
    x, dy = (rounded(rng.normal(size=(length, config.hidden_size))) for _ in range(2))
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def ours(params, x):
        y, _, _ = nnx.merge(graph, params)(x[None].astype(dtype), Context(positions))
        return jnp.sum(y[0].astype(jnp.float32) * dy), y[0]

    if of_reference:
        narrow = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)
        (_, y), d = _gradient(name, config)(*map(narrow, (nnx.to_pure_dict(params), x, dy)))
    else:
        (_, y), d = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(params, x)
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
