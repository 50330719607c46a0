"""RWKV-4 (2305.13048, equations 11–16): per channel a mean of values weighted by e^k, which
decays by a constant.

Letters: B batch, T time, D model and channels.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.mixers.shift import shifted
from qwen3next_jax.ops import linear_scan, max_plus_scan
from qwen3next_jax.sharding.rules import activation_spec, local

STATES = ("largest", "weighted", "total")


class RWKV4(Mixer):
    """o = σ(r) (Σ_{j<t} e^{k_j − (t−1−j) e^w} v_j + e^{u + k_t} v_t) / (the same of ones), r, k,
    v of μ x + (1 − μ) x₋₁. The sums are kept over e^m, m_t = max(m_{t−1} − e^w, k_t). Channels
    are not split over `tensor`.
    """

    def __init__(self, config, make, layers):
        d, half = config.hidden_size, lambda shape: jnp.full(shape, 0.5)
        self.mix = make.parameter(half, (3, d), ". embed_out", kind="rate")
        for name in ("receptance", "key", "value"):
            setattr(self, f"{name}_proj", make.matrix((d, d), "embed -> ."))
        self.decay = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.linspace(-5.0, 3.0, d), shape),
            (d,),
            "embed_out",
            kind="rate",
        )
        self.bonus = make.parameter(
            lambda shape: jnp.full(shape, jnp.log(0.3)), (d,), "embed_out", kind="rate"
        )
        self.out_proj = make.matrix((d, d), ". -> embed")

    def __call__(self, x_BTD, context, cache=None):
        before, last = shifted(x_BTD, context, cache and cache["shift"])
        mixed = x_BTD + (before - x_BTD) * (1 - self.mix[...]).astype(x_BTD.dtype)[:, None, None]
        r, k, v = (
            x @ weight[...].astype(x.dtype)
            for x, weight in zip(mixed, (self.receptance_proj, self.key_proj, self.value_proj))
        )

        def run(k, v, w, bonus, ids, state):
            k, v, common = (
                k.astype(jnp.float32),
                v.astype(jnp.float32),
                dict(segment_ids=ids, axis_name=context.time_axis),
            )
            rate = jnp.broadcast_to(-jnp.exp(w), k.shape)
            m, m_before, largest = max_plus_scan(
                rate, k, initial_state=state and state[0], **common
            )
            m = jnp.where(m == -jnp.inf, 0, m)  # of a row without a token
            change = jnp.where(m_before == -jnp.inf, 0, jnp.minimum(rate + m_before - m, 0))
            a, own = rate + jax.lax.stop_gradient(change - rate), jnp.exp(k - m)
            (_, weighted, s), (_, total, n) = (
                linear_scan(a, own * y, initial_state=state and state[i], **common)
                for i, y in ((1, v), (2, jnp.ones_like(v)))
            )
            m_before = jnp.where(total == 0, -jnp.inf, m_before)
            top = jax.lax.stop_gradient(jnp.maximum(m_before, bonus + k))
            past, now = jnp.exp(m_before - top), jnp.exp(bonus + k - top)
            return (past * weighted + now * v) / (past * total + now), (largest, s, n)

        rows, first, whole = (
            activation_spec("batch", context.time),
            activation_spec("batch"),
            activation_spec(),
        )
        state = cache and tuple(cache[name] for name in STATES)
        o, state = local(run, context.mesh, (rows, rows, whole, whole, rows, first), (rows, first))(
            k, v, self.decay[...], self.bonus[...], context.segment_ids, state
        )
        y = (jax.nn.sigmoid(r.astype(jnp.float32)) * o).astype(x_BTD.dtype) @ self.out_proj[
            ...
        ].astype(x_BTD.dtype)
        diagnostics = {
            "half_life": jnp.log(2) * jnp.exp(-self.decay[...]),
            "receptance": token_mean(jax.nn.sigmoid(r), context.counted),
        }
        return (
            y,
            diagnostics if context.diagnose else {},
            cache and dict(zip(STATES, state)) | {"shift": last},
        )

    @staticmethod
    def init_cache(config, batch, length):
        states = {name: jnp.zeros((batch, config.hidden_size)) for name in STATES}
        # The largest of no keys. From 0, e^{k − 0} of lower ones would underflow.
        states["largest"] = jnp.full_like(states["largest"], -jnp.inf)
        return states | {"shift": jnp.zeros((batch, 1, config.hidden_size), config.dtype)}

    @staticmethod
    def forward_flops(config, length):
        return 0.0  # no products but those of the parameters

    @staticmethod
    def halo(config):
        return 1
