"""Hyena (2302.10866, definition 3.1): long convolutions whose filters are functions of the
distance, and gates between them.

Letters: B batch, T time, S slots of a cache, D model, H heads of V channels (only to be split
over `tensor`), L distances.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.mixers.gated_attention import write
from qwen3next_jax.model.mixers.recurrent import FEW_TOKENS
from qwen3next_jax.ops import causal_conv1d, fft_convolution
from qwen3next_jax.sharding.rules import activation_spec, local

ORDER = 2  # long convolutions
# of the filters' network: sines of the distance, its width, and what its own sines multiply
BANDS, WIDTH, FREQUENCY = 8, 64, 10.0
# the part of max_position_embeddings over which the channels' windows fall to 1 %, and to what
FASTEST, SLOWEST, FLOOR = 0.3, 1.5, 0.05


class Hyena(Mixer):
    """z ← v, then z ← x_n ⊙ (h_n ∗ z + b_n z) for n = 1, 2; v, x₁, x₂ = conv(W x). h_n is a
    network of the distance over max_position_embeddings, times a window e^{−α ·} + 0.05. Of
    linear_num_value_heads × linear_value_head_dim channels. A filter is as long as the row, and
    the cache keeps every token's z.

    Diagnostics, per head [H]: gate_size, the mean of |x₁ x₂|.
    """

    switches = ("linear_conv_kernel_dim",)
    meaning = ("max_position_embeddings",)
    cache_kind = "slots"

    def __init__(self, config, make, layers):
        self.config = c = config
        d, h, v = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
        parts = (("value", v), *((f"gate_{n}", v) for n in range(ORDER)))
        scaled = lambda shape: (
            jax.random.uniform(make.rngs.params(), shape, minval=-1, maxval=1)
            * shape[len(make.stack)] ** -0.5
        )
        self.in_proj = make.matrix((d, h, (ORDER + 1) * v), "embed -> value_heads .", parts=parts)
        self.conv_kernel = make.matrix(
            (c.linear_conv_kernel_dim, h, (ORDER + 1) * v),
            ". value_heads channels",
            kind="convolution",
            parts=parts,
        )
        self.filter_in = make.parameter(
            scaled, (2 * BANDS + 1, WIDTH), ". embed_out", kind="vector", operand=False
        )
        self.filter_hidden = make.parameter(
            scaled, (WIDTH, WIDTH), ". embed_out", kind="vector", operand=False
        )
        self.filter_out = make.parameter(
            scaled, (WIDTH, ORDER, h, v), ". . value_heads .", kind="vector", operand=False
        )
        self.bias = make.parameter(jnp.ones, (ORDER, h, v), ". value_heads .", kind="rate")
        spread = lambda shape: jnp.broadcast_to(
            jnp.linspace(1 / FASTEST, 1 / SLOWEST, h * v).reshape(h, v) * jnp.log(100), shape
        )
        self.window = make.parameter(spread, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def __call__(self, x_BTD, context, cache=None):
        axes = (
            ("batch", context.time, "heads"),
            ("batch", context.time),
            (None, "heads"),
            (None, None, "heads"),
            ("heads",),
        )
        rows, tokens, narrow, out, heads = (activation_spec(*names) for names in axes)
        u_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))

        def run(
            u, kernel, filter_in, filter_hidden, filter_out, bias, window, positions, ids, cache
        ):
            axis = context.time_axis
            length = (
                u.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
                if cache is None
                else cache["input"].shape[1]
            )
            filters_OLHV = self.filters(length, filter_in, filter_hidden, filter_out, window)
            if cache is None:
                u, _ = causal_conv1d(u, kernel, activation=None, segment_ids=ids, axis_name=axis)
                convolve = lambda n, z: fft_convolution(
                    z, filters_OLHV[n], segment_ids=ids, axis_name=axis
                )
            else:
                cache = {"input": write(cache["input"], u, positions)} | {
                    name: x for name, x in cache.items() if name != "input"
                }
                before = positions[..., None] - jnp.arange(len(kernel))[::-1]
                taps = jax.vmap(lambda rows, at: rows[jnp.maximum(at, 0)])(cache["input"], before)
                u = jnp.einsum(
                    "btwhc,whc->bthc", jnp.where((before >= 0)[..., None, None], taps, 0), kernel
                )

                def convolve(n, z):
                    cache[f"z_{n}"] = write(cache[f"z_{n}"], z, positions)
                    return read(cache[f"z_{n}"], filters_OLHV[n], positions)

            z, *gates = jnp.split(u, ORDER + 1, axis=-1)
            for n, gate in enumerate(gates):
                z = (gate * (convolve(n, z).astype(jnp.float32) + bias[n] * z)).astype(u.dtype)
            return z, jnp.abs(gates[0] * gates[1]).mean(axis=-1), cache

        whole, slots = activation_spec(), activation_spec("batch", None, "heads")
        in_specs = (rows, narrow, whole, whole, out, narrow, heads, tokens, tokens, slots)
        weights = (
            self.filter_in[...],
            self.filter_hidden[...],
            self.filter_out[...],
            self.bias[...],
            self.window[...],
        )
        z_BTHV, size_BTH, cache = local(run, context.mesh, in_specs, (rows, rows, slots))(
            u_BTHC,
            self.conv_kernel[...].astype(u_BTHC.dtype),
            *weights,
            context.positions,
            context.segment_ids,
            cache,
        )
        y_BTD = jnp.einsum("bthv,hvd->btd", z_BTHV, self.out_proj[...].astype(x_BTD.dtype))
        return (
            y_BTD,
            {"gate_size": token_mean(size_BTH, context.counted)} if context.diagnose else {},
            cache,
        )

    def filters(self, length: int, filter_in, filter_hidden, filter_out, window_HV):
        """[ORDER, L, H, V] float32, of a network that sees sines of the distance."""
        at = jnp.arange(length)[:, None] / self.config.max_position_embeddings
        angle = 2 * jnp.pi * at * jnp.arange(BANDS)
        x = jnp.concatenate([at, jnp.cos(angle), jnp.sin(angle)], axis=-1)
        for weight in (filter_in, filter_hidden):
            x = jnp.sin(FREQUENCY * (x @ weight))
        return jnp.einsum("lw,wohv->olhv", x, filter_out) * (
            jnp.exp(-at[..., None] * window_HV) + FLOOR
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        shape = (batch, length, config.linear_num_value_heads)
        empty = lambda width: jnp.zeros(
            (*shape, width * config.linear_value_head_dim), config.dtype
        )
        return {"input": empty(ORDER + 1)} | {f"z_{n}": empty(1) for n in range(ORDER)}

    @classmethod
    def forward_flops(cls, config, length):
        """A transform there and one back of twice the row, 2.5 n log₂ n each, and their product;
        the filters are every row's.
        """
        doubled = 1 << (2 * length - 1).bit_length()
        channels = config.linear_num_value_heads * config.linear_value_head_dim
        return (
            ORDER
            * channels
            * (2 * 2.5 * doubled * (doubled.bit_length() - 1) + 3 * doubled)
            / length
        )

    @classmethod
    def splits(cls, config):
        return {"linear_num_value_heads": config.linear_num_value_heads}

    @classmethod
    def halo(cls, config):
        return config.linear_conv_kernel_dim - 1


def read(z_BSHV, filter_SHV, positions_BT):
    """[B, T, H, V] the convolution at `positions` of the tokens in a cache's slots: of a few by
    sums, of many by transforms.
    """
    slots = z_BSHV.shape[1]
    if positions_BT.shape[1] > FEW_TOKENS:
        return jax.vmap(lambda y, at: y[at])(fft_convolution(z_BSHV, filter_SHV), positions_BT)
    # 0 for slots behind the position
    backwards = jnp.concatenate([filter_SHV[::-1], jnp.zeros_like(filter_SHV)])

    def one(z_SHV, at):
        weights = jax.lax.dynamic_slice_in_dim(backwards, slots - 1 - at, slots)
        return jnp.einsum("shv,shv->hv", z_SHV.astype(jnp.float32), weights)

    return jax.vmap(jax.vmap(one, (None, 0)))(z_BSHV, positions_BT)
