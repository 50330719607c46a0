"""Hyena (2302.10866, definition 3.1): convolutions as long as the row, with gates between them. A
small network computes the filters of the convolutions as functions of the distance between tokens.

Letters: B batch, T time, S slots of a cache, D model, H heads of V channels (heads have no meaning
in Hyena; the mesh axis `tensor` splits the channels by head), L distances, C channels of a row (any
trailing axes, flattened), W taps of the short convolution or width of the network.
"""

import functools
import math

import jax
import jax.numpy as jnp

from qwen3next_jax.model.gated_attention import write_tokens_to_cache
from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.ops import causal_conv1d, checks
from qwen3next_jax.sharding.rules import activation_spec, per_shard

EXAMPLES = {"hyena": {"linear_mixer": "hyena"}}
ORDER = 2  # number of long convolutions
# The network that computes the filters:
FILTER_FREQUENCIES = 8  # number of frequencies whose cosines and sines of the distance are inputs
FILTER_NETWORK_WIDTH = 64  # width of the hidden layers
FILTER_SINE_FACTOR = 10.0  # factor of the argument of the hidden layers' sines
# Each filter is multiplied by a window that decays with the distance. At the start of training, the
# window of the fastest channel falls to 1 % over FASTEST_WINDOW × max_position_embeddings tokens,
# and the window of the slowest channel over SLOWEST_WINDOW × max_position_embeddings tokens.
# WINDOW_FLOOR is added to the window.
FASTEST_WINDOW = 0.3
SLOWEST_WINDOW = 1.5
WINDOW_FLOOR = 0.05
# Cached decoding convolves up to this many tokens by sums, and more tokens by Fourier transforms.
MOST_TOKENS_BY_SUMS = 8


class Hyena(Mixer):
    """The mixer of Hyena. A projection and a short convolution compute a value v and two gates x₁
    and x₂ for each channel: v, x₁, x₂ = conv(W x). The signal z starts as v, and becomes x_n ⊙ (h_n
    ∗ z + b_n z) for n = 1 and then for n = 2, where h_n is a filter as long as the row and b_n is a
    learned number per channel. The output is a projection of the last z.

    The filter h_n(d) is the output of a network, multiplied by the window e^{-α d} + 0.05, with a
    learned α per channel; d is the distance in tokens divided by max_position_embeddings. There are
    linear_num_value_heads × linear_value_head_dim channels. The cache holds, for every token, the
    inputs of the short convolution and of both long convolutions.

    Diagnostics: gate_size [H], the mean absolute product |x₁ x₂| of the two gates for each head.
    """

    switches_read = ("linear_conv_kernel_dim",)
    settings_fixed_by_weights = ("max_position_embeddings",)
    cache_kind = "slots"

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        d, h, v = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
        width = (ORDER + 1) * v
        parts = (("value", v), *((f"gate_{n}", v) for n in range(ORDER)))

        def scaled(shape):
            start = jax.random.uniform(make.rngs.params(), shape, minval=-1, maxval=1)
            return start * shape[len(make.stack_shape)] ** -0.5

        def windows(shape):
            rates = jnp.linspace(1 / FASTEST_WINDOW, 1 / SLOWEST_WINDOW, h * v).reshape(
                h, v
            ) * jnp.log(100)
            return jnp.broadcast_to(rates, shape)

        vector = functools.partial(make.parameter, scaled, kind="vector", uses_model_dtype=False)
        self.in_proj = make.matrix((d, h, width), "embed -> value_heads .", parts=parts)
        self.conv_kernel = make.matrix(
            (c.linear_conv_kernel_dim, h, width),
            ". value_heads channels",
            kind="convolution",
            parts=parts,
        )
        self.filter_in = vector((2 * FILTER_FREQUENCIES + 1, FILTER_NETWORK_WIDTH), ". embed_out")
        self.filter_hidden = vector((FILTER_NETWORK_WIDTH, FILTER_NETWORK_WIDTH), ". embed_out")
        self.filter_out = vector((FILTER_NETWORK_WIDTH, ORDER, h, v), ". . value_heads .")
        self.bias = make.parameter(jnp.ones, (ORDER, h, v), ". value_heads .", kind="rate")
        self.window = make.parameter(windows, (h, v), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def __call__(self, x_BTD, context, cache=None):
        u_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        axis = context.mesh_time_axis

        def run(u, kernel, network, bias, window, positions, ids, cache):
            if cache is None:
                length = u.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
            else:
                length = cache["input"].shape[1]
            filters_OLHV = self.compute_filters(length, *network, window)
            if cache is None:
                u, _ = causal_conv1d(u, kernel, activation=None, segment_ids=ids, axis_name=axis)
            else:
                cache = dict(cache, input=write_tokens_to_cache(cache["input"], u, positions))
                u = short_convolution_over_cache(cache["input"], kernel, positions)
            z, *gates = jnp.split(u, ORDER + 1, axis=-1)
            for n, gate in enumerate(gates):
                if cache is None:
                    y = fft_convolution(z, filters_OLHV[n], segment_ids=ids, axis_name=axis)
                else:
                    cache[f"z_{n}"] = write_tokens_to_cache(cache[f"z_{n}"], z, positions)
                    y = long_convolution_over_cache(cache[f"z_{n}"], filters_OLHV[n], positions)
                z = (gate * (y.astype(jnp.float32) + bias[n] * z)).astype(u.dtype)
            return z, jnp.abs(gates[0] * gates[1]).mean(axis=-1), cache

        rows = activation_spec("batch", context.logical_time_axis, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)
        slots = activation_spec("batch", None, "heads")
        narrow = activation_spec(None, "heads")
        network = (activation_spec(), activation_spec(), activation_spec(None, None, "heads"))
        in_specs = (rows, narrow, network, narrow, activation_spec("heads"), tokens, tokens, slots)
        z_BTHV, size_BTH, cache = per_shard(run, context.mesh, in_specs, (rows, rows, slots))(
            u_BTHC,
            self.conv_kernel[...].astype(u_BTHC.dtype),
            (self.filter_in[...], self.filter_hidden[...], self.filter_out[...]),
            self.bias[...],
            self.window[...],
            context.positions,
            context.segment_ids,
            cache,
        )
        y_BTD = jnp.einsum("bthv,hvd->btd", z_BTHV, self.out_proj[...].astype(x_BTD.dtype))
        diagnostics = {}
        if context.options.collect_stats:
            diagnostics = {"gate_size": token_mean(size_BTH, context.stats_mask)}
        return y_BTD, diagnostics, cache

    def compute_filters(self, length: int, filter_in, filter_hidden, filter_out, window_HV):
        """Computes the filters [ORDER, L, H, V], float32, for the distances 0 to L - 1.

        Args:
          length: L, the number of distances.
          filter_in, filter_hidden, filter_out: the weights of the network, [2 FILTER_FREQUENCIES +
            1, W], [W, W] and [W, ORDER, H, V].
          window_HV: the decay rate α of each channel's window.
        """
        at_L1 = jnp.arange(length)[:, None] / self.config.max_position_embeddings
        angle = 2 * jnp.pi * at_L1 * jnp.arange(FILTER_FREQUENCIES)
        x = jnp.concatenate([at_L1, jnp.cos(angle), jnp.sin(angle)], axis=-1)
        for weight in (filter_in, filter_hidden):
            x = jnp.sin(FILTER_SINE_FACTOR * (x @ weight))
        window_LHV = jnp.exp(-at_L1[..., None] * window_HV) + WINDOW_FLOOR
        return jnp.einsum("lw,wohv->olhv", x, filter_out) * window_LHV

    @classmethod
    def init_cache(cls, config, batch, length):
        shape = (batch, length, config.linear_num_value_heads)
        v = config.linear_value_head_dim
        empty = lambda width: jnp.zeros((*shape, width), config.dtype)
        return {"input": empty((ORDER + 1) * v)} | {f"z_{n}": empty(v) for n in range(ORDER)}

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of the long convolutions. Each long convolution needs a
        Fourier transform and an inverse transform of n ≥ 2 `length` points, with 2.5 n log₂ n
        operations each, and the product with the transformed filter. The FLOPs of the filters are
        not counted, because all rows share the filters.
        """
        doubled = 1 << (2 * length - 1).bit_length()
        channels = config.linear_num_value_heads * config.linear_value_head_dim
        transforms = 2 * 2.5 * doubled * (doubled.bit_length() - 1)
        return ORDER * channels * (transforms + 3 * doubled) / length

    @classmethod
    def sizes_split_by_tensor(cls, config):
        return {"linear_num_value_heads": config.linear_num_value_heads}

    @classmethod
    def halo(cls, config):
        return config.linear_conv_kernel_dim - 1


def short_convolution_over_cache(u_BSHC, kernel_WHC, positions_BT):
    """Applies the short convolution to the tokens in a cache's slots, and returns its output at the
    positions `positions_BT`, [B, T, H, C].
    """
    before_BTW = positions_BT[..., None] - jnp.arange(len(kernel_WHC))[::-1]
    taps = jax.vmap(lambda rows, at: rows[jnp.maximum(at, 0)])(u_BSHC, before_BTW)
    taps = jnp.where((before_BTW >= 0)[..., None, None], taps, 0)
    return jnp.einsum("btwhc,whc->bthc", taps, kernel_WHC)


def long_convolution_over_cache(z_BSHV, filter_SHV, positions_BT):
    """Applies a long convolution to the tokens in a cache's slots, and returns its output at the
    positions `positions_BT`, [B, T, H, V]. The convolution is computed by sums for up to
    MOST_TOKENS_BY_SUMS positions, and by Fourier transforms for more positions.
    """
    slots = z_BSHV.shape[1]
    if positions_BT.shape[1] > MOST_TOKENS_BY_SUMS:
        return jax.vmap(lambda y, at: y[at])(fft_convolution(z_BSHV, filter_SHV), positions_BT)
    # The zeros are the weights of the slots after the position.
    backwards = jnp.concatenate([filter_SHV[::-1], jnp.zeros_like(filter_SHV)])

    def one(z_SHV, at):
        weights = jax.lax.dynamic_slice_in_dim(backwards, slots - 1 - at, slots)
        return jnp.einsum("shv,shv->hv", z_SHV.astype(jnp.float32), weights)

    return jax.vmap(jax.vmap(one, (None, 0)))(z_BSHV, positions_BT)


def hyena_reference(config, params, x):
    """Computes Hyena with sums in place of Fourier transforms."""
    length = len(x)
    lag = jnp.arange(length)[:, None] / config.max_position_embeddings
    kernel = params["conv_kernel"]
    u = jnp.einsum("td,dhc->thc", x, params["in_proj"])
    u = jnp.pad(u, ((len(kernel) - 1, 0), (0, 0), (0, 0)))
    u = sum(u[w : w + length] * kernel[w] for w in range(len(kernel)))
    z, *gates = jnp.split(u, 3, axis=-1)

    angle = 2 * jnp.pi * lag * jnp.arange(len(params["filter_in"]) // 2)
    features = jnp.concatenate([lag, jnp.cos(angle), jnp.sin(angle)], axis=-1)
    for weight in (params["filter_in"], params["filter_hidden"]):
        features = jnp.sin(10 * features @ weight)
    window = jnp.exp(-lag[..., None] * params["window"]) + 0.05
    for n, gate in enumerate(gates):
        taps = jnp.einsum("lw,whv->lhv", features, params["filter_out"][:, n]) * window
        y = jnp.stack([jnp.sum(taps[: t + 1] * z[t::-1], axis=0) for t in range(length)])
        z = gate * (y + params["bias"][n] * z)
    return jnp.einsum("thv,hvd->td", z, params["out_proj"])


REFERENCES = {"hyena": hyena_reference}


# ---- the operator
# --------------------------------------------------------------------------------------------------


def fft_convolution(x, kernel, *, segment_ids=None, axis_name: str | None = None):
    """Computes the causal convolution y_t = Σ_{s ≤ t} kernel_{t-s} x_s by Fourier transforms, for
    each channel separately. The sum is over the tokens s of the document of token t.

    A Fourier transform mixes all tokens of a row, so the documents of a row are transformed one
    after another. Therefore the work is proportional to the largest number of documents in a row.

    Args:
      x: [B, T, *channels].
      kernel: [L, *channels], the weight for each distance, from distance 0; L is at least the
        length of the whole row.
      segment_ids: [B, T] integers or None. The ids are positive and non-decreasing along T, and 0
        marks padding at the end, where y is 0.
      axis_name: inside `shard_map`, the mesh axis over which T is split in order; None if T is not
        split. All shards pass the same kernel, for all distances of the whole row. An all-to-all
        gives each shard whole rows of a part of the channels; the shard transforms these rows, and
        a second all-to-all returns the results.

    Returns:
      y: [B, T, *channels] in x's dtype, computed in float32 (float64 for float64).

    Raises:
      ValueError: the arguments' shapes or dtypes do not fit.
    """
    channels = x.shape[2:]
    shard_count = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    length = x.shape[1] * shard_count
    checks.check_shapes(
        x=(x, ("B", "T", *channels)),
        kernel=(kernel, ("L", *channels)),
        segment_ids=(segment_ids, "BT"),
    )
    checks.check_integers(segment_ids=segment_ids)
    if kernel.shape[0] < length:
        raise ValueError(f"kernel has {kernel.shape[0]} rows: expected at least the {length} of x")
    size = math.prod(channels)
    wide = jnp.promote_types(jnp.float32, x.dtype)
    x_BTC = x.reshape(*x.shape[:2], size).astype(wide)
    kernel_TC = kernel.reshape(-1, size)[:length].astype(wide)
    if axis_name is not None:
        share = -(-size // shard_count)
        more = share * shard_count - size
        x_BTC = jnp.pad(x_BTC, [(0, 0), (0, 0), (0, more)])
        kernel_TC = jnp.pad(kernel_TC, [(0, 0), (0, more)])
        x_BTC = jax.lax.all_to_all(x_BTC, axis_name, split_axis=2, concat_axis=1, tiled=True)
        kernel_TC = jax.lax.dynamic_slice_in_dim(
            kernel_TC, jax.lax.axis_index(axis_name) * share, share, axis=1
        )
        if segment_ids is not None:
            segment_ids = jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True)
    y_BTC = _convolve_documents(x_BTC, kernel_TC, _document_numbers(segment_ids, x_BTC.shape[:2]))
    if axis_name is not None:
        y_BTC = jax.lax.all_to_all(y_BTC, axis_name, split_axis=1, concat_axis=2, tiled=True)
        y_BTC = y_BTC[..., :size]
    return y_BTC.reshape(x.shape).astype(x.dtype)


def _document_numbers(segment_ids, shape):
    """Returns the number of each token's document, [B, T]. The documents of a row have the numbers
    1, 2, …; padding has the number 0. If `segment_ids` is None, all tokens have the number 1.
    """
    if segment_ids is None:
        return jnp.ones(shape, jnp.int32)
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    is_token = segment_ids > 0
    is_new = is_token & (segment_ids != before)
    return jnp.where(is_token, 1 + jnp.cumsum(is_new, axis=1), 0)


def _fold_over_documents(step, start, document_BT, *arrays):
    """Calls `step` for the first document of all rows, then for the second document of all rows,
    and so on, and passes the result of each call to the next.

    Args:
      step: function (result of the previous call, mask [B, T, 1] of the document's tokens, *arrays)
        → result. The arrays that `step` gets are 0 outside the document.
      start: the first argument of the first call.
      document_BT: the result of `_document_numbers`.
      arrays: arrays [B, T, C].

    Returns:
      The result of the last call.
    """

    def one(carry):
        i, total = carry
        here = (document_BT == i)[..., None]
        return i + 1, step(total, here, *(jnp.where(here, x, 0) for x in arrays))

    def is_left(carry):
        return carry[0] <= jnp.max(document_BT)

    return jax.lax.while_loop(is_left, one, (jnp.ones((), jnp.int32), start))[1]


def _transform_and_inverse(time: int):
    """Returns two functions. The first function computes the real Fourier transform along the
    second-last axis, padded to a power of two of at least 2 · `time` - 1 entries. The second
    function computes the inverse transform and returns the first `time` entries.
    """
    n = 1 << (2 * time - 1).bit_length()
    there = functools.partial(jnp.fft.rfft, n=n, axis=-2)
    return there, lambda x: jnp.fft.irfft(x, n=n, axis=-2)[..., :time, :]


@jax.custom_vjp
def _convolve_documents(x_BTC, kernel_TC, document_BT):
    """Returns y [B, T, C], the convolution within each document. `document_BT` is the result of
    `_document_numbers`.
    """
    there, back = _transform_and_inverse(x_BTC.shape[1])
    transformed = there(kernel_TC)
    return _fold_over_documents(
        lambda y, here, x: y + jnp.where(here, back(there(x) * transformed), 0),
        jnp.zeros_like(x_BTC),
        document_BT,
        x_BTC,
    )


def _convolve_documents_backward(residuals, dy_BTC):
    x_BTC, kernel_TC, document_BT = residuals
    there, back = _transform_and_inverse(x_BTC.shape[1])
    mirrored = jnp.conj(there(kernel_TC))

    def step(total, here, x, dy):
        dx, dkernel = total
        dy_there = there(dy)
        dx = dx + jnp.where(here, back(dy_there * mirrored), 0)
        dkernel = dkernel + jnp.sum(jnp.conj(there(x)) * dy_there, axis=0)
        return dx, dkernel

    start = (jnp.zeros_like(x_BTC), jnp.zeros_like(mirrored))
    dx, dkernel = _fold_over_documents(step, start, document_BT, x_BTC, dy_BTC)
    return dx, back(dkernel), None


_convolve_documents.defvjp(
    lambda *inputs: (_convolve_documents(*inputs), inputs), _convolve_documents_backward
)
