"""The two operators of several residual streams, with custom gradients: `mix_streams` makes the
input of a block from the streams, and `add_to_streams` adds the block's output to the streams.

For a token, with h_s the stream s of S, and n_s = size_s · scale_s ∘ h_s its RMSNorm,

    inner = Σ_s size_s · h_s down_s      gate = sigmoid(up silu(inner / S))
    x = mean over streams of gate_s ∘ n_s

The matrix `down` already contains the factor `scale` of the norm. Only the first R columns of
`inner` enter the gate; the caller uses the other columns.

`mix_streams` returns the streams, too, and the caller adds the block's output to the returned
streams. So the backward pass of `mix_streams` gets the gradient of the returned streams, and adds
its own part to this gradient while it reads the streams anyway.

The kernels read and write each array of the streams once. XLA computes the gradients of the gate's
two matrices, as products that read the streams and the gradient of the gate. So on a mesh, XLA sums
the gradients of the gate's matrices over the devices as it does for every other matrix.

Letters: B batch, T time, S streams, D model, E = S · D, R rank of the gate, X columns of `inner`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.ops.blocks import accumulation_dtype
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)
from qwen3next_jax.sharding.rules import CONTEXT, ROWS, activation_spec, num_shards, per_shard

LANES = 128  # the kernels need a multiple of this number of columns


class _StaticOptions(NamedTuple):
    """The arguments of a call that do not depend on the values of its arrays.

    Attributes:
      implementation: the kernels or the XLA functions that run the call.
      norm_eps: the number that the norms of the streams add to the mean squares.
      stream_count: the number of streams.
      mesh, logical_time_axis: the arguments `mesh` and `time` of `mix_streams`.
    """

    implementation: ChosenImplementation
    norm_eps: float
    stream_count: int
    mesh: Mesh | None
    logical_time_axis: str | None


def mix_streams(
    h_BTE: jax.Array,
    scale_SD: jax.Array,
    down_SDX: jax.Array,
    up_RSD: jax.Array,
    eps: float,
    mesh: Mesh | None = None,
    time: str | None = "time",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the input of a block: the gated mean of the normed streams.

    Args:
      h_BTE: the streams of a token side by side.
      scale_SD: float32, the weights of the streams' norms.
      down_SDX: the matrix that reads the normed streams, already multiplied by the weights of the
        norms, in h's dtype.
      up_RSD: the gate's second matrix, in h's dtype.
      eps: number added to the mean squares.
      mesh: the devices that share the tokens; None: one device.
      time: the logical axis of the tokens of a row, "time" or None (see `model.layers.Context`).
      implementation: "xla" or "pallas_tpu"; None: the best one.

    Returns:
      x [B, T, D] in h's dtype; inner [B, T, X] float32; the streams [B, T, E].
    """
    streams, width, columns = down_SDX.shape
    padded = -(-columns // LANES) * LANES
    options = _choose_implementation(h_BTE, streams, padded, eps, mesh, time, implementation)
    up_RE = up_RSD.reshape(up_RSD.shape[0], -1)
    down_EX = down_SDX.reshape(-1, columns)
    if options.implementation.is_kernel:
        up_RE = jnp.pad(up_RE, ((0, padded - up_RE.shape[0]), (0, 0)))
        down_EX = jnp.pad(down_EX, ((0, 0), (0, padded - columns)))
    x_BTD, inner_BTX, h_BTE = _differentiable_mix(
        options, h_BTE, scale_SD.reshape(-1), down_EX, up_RE
    )
    return x_BTD, inner_BTX[..., :columns], h_BTE


def add_to_streams(
    h_BTE: jax.Array,
    y_BTD: jax.Array,
    a_BTS: jax.Array,
    mesh: Mesh | None = None,
    time: str | None = "time",
    implementation: str | None = None,
) -> jax.Array:
    """Adds a block's output to the streams: returns h_s + a_s · y for every stream s, [B, T, E].

    Args:
      h_BTE: the streams.
      y_BTD: the block's output.
      a_BTS: float32, for each stream the factor of the output.
      mesh, time, implementation: as in `mix_streams`.
    """
    options = _choose_implementation(h_BTE, a_BTS.shape[-1], 0, 0.0, mesh, time, implementation)
    return _differentiable_add(options, h_BTE, y_BTD, a_BTS)


def _choose_implementation(
    h_BTE, streams, columns, eps, mesh, time, implementation
) -> _StaticOptions:
    """Chooses the implementation of a call in which `inner` has `columns` columns. Returns the
    static arguments of the call.
    """
    chosen = choose_implementation(
        "residual_streams",
        implementation,
        XLA_IMPLEMENTATIONS,
        tokens=h_BTE.shape[0] * h_BTE.shape[1] // num_shards(mesh, *_mesh_axes_of_tokens(time)),
        width=h_BTE.shape[-1] // streams,
        streams=streams,
        columns=columns,
        dtype=h_BTE.dtype,
    )
    return _StaticOptions(chosen, eps, streams, mesh, time)


def _mesh_axes_of_tokens(time: str | None) -> tuple[str, ...]:
    """Returns the mesh axes that split the tokens."""
    return (*ROWS, CONTEXT) if time else ROWS


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_mix(options: _StaticOptions, h_BTE, scale_E, down_EX, up_RE):
    return _mix_forward(options, h_BTE, scale_E, down_EX, up_RE)[0]


def _mix_forward(options: _StaticOptions, h_BTE, *weights):
    forward = functools.partial(
        options.implementation.function_named("forward"), options.norm_eps, options.stream_count
    )
    x_BTD, inner_BTX, sizes_BTS = _run_on_each_device(options, forward, (weights,), h_BTE)
    return (x_BTD, inner_BTX, h_BTE), (h_BTE, weights, inner_BTX, sizes_BTS)


def _mix_backward(options: _StaticOptions, saved, gradients):
    h_BTE, weights, inner_BTX, sizes_BTS = saved
    scale_E, down_EX, up_RE = weights
    dx_BTD, dinner_BTX, dh_BTE = gradients
    dh_BTE, dgate_BTE, dinner_BTX, dscale_ZE = _run_on_each_device(
        options,
        options.implementation.function_named("backward"),
        (weights,),
        *(h_BTE, inner_BTX, sizes_BTS, dh_BTE, dx_BTD, dinner_BTX),
        returns_sums=True,
    )
    dtype, z_BTR = h_BTE.dtype, inner_BTX[..., : up_RE.shape[0]] / options.stream_count
    dup_RE = _weight_gradient(jax.nn.silu(z_BTR).astype(dtype), dgate_BTE)
    ddown_EX = jnp.concatenate(
        [
            _weight_gradient(h_BTD, (sizes_BTS[..., s : s + 1] * dinner_BTX).astype(dtype))
            for s, h_BTD in enumerate(jnp.split(h_BTE, options.stream_count, axis=-1))
        ]
    )
    return dh_BTE, jnp.sum(dscale_ZE, axis=0), ddown_EX.astype(dtype), dup_RE.astype(dtype)


_differentiable_mix.defvjp(_mix_forward, _mix_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_add(options: _StaticOptions, h_BTE, y_BTD, a_BTS):
    return _run_on_each_device(
        options,
        options.implementation.function_named("write"),
        (),
        h_BTE,
        y_BTD,
        a_BTS,
        num_results=1,
    )


def _add_backward(options: _StaticOptions, saved, dh_BTE):
    return dh_BTE, *_run_on_each_device(
        options,
        options.implementation.function_named("write_gradients"),
        (),
        *saved,
        dh_BTE,
        num_results=2,
    )


_differentiable_add.defvjp(
    lambda options, h, y, a: (_differentiable_add(options, h, y, a), (y, a)), _add_backward
)


def _weight_gradient(left_BTI, right_BTO):
    """Returns Σ left rightᵀ over all tokens, [I, O]: the gradient of a weight matrix."""
    return jnp.einsum(
        "bti,bto->io", left_BTI, right_BTO, preferred_element_type=accumulation_dtype(left_BTI)
    )


def _run_on_each_device(
    options: _StaticOptions,
    function,
    weights,
    *arrays,
    num_results: int = 3,
    returns_sums: bool = False,
):
    """Returns function(*weights, *arrays). A kernel runs on each device's own tokens, and gets
    arrays [B · T, …].

    Args:
      options: the static arguments of the call.
      function: the function of the implementation.
      weights: a tuple of one item, the weights, which every device has as a whole; or ().
      arrays: arrays [B, T, …].
      num_results: the number of results [B, T, …].
      returns_sums: whether the function returns one more array: for each device, sums over its
        tokens.
    """
    if not options.implementation.is_kernel:
        return function(*weights, *arrays)

    single = num_results == 1 and not returns_sums

    def on_device(weights, *arrays):
        found = function(*weights, *(x.reshape(-1, x.shape[-1]) for x in arrays))
        found = (found,) if single else found
        leading = arrays[0].shape[:2]
        return *(x.reshape(*leading, -1) for x in found[:num_results]), *found[num_results:]

    out_specs = [activation_spec("batch", options.logical_time_axis, None)] * num_results
    if returns_sums:
        out_specs.append(P(_mesh_axes_of_tokens(options.logical_time_axis)))
    found = per_shard(
        on_device,
        options.mesh,
        (P(), *(activation_spec("batch", options.logical_time_axis, None) for _ in arrays)),
        tuple(out_specs),
    )(weights, *arrays)
    return found[0] if single else found


# ---- in XLA alone


def _mix_in_xla(eps, streams, weights, h_BTE):
    """Returns x [B, T, D], inner [B, T, X], and for each stream 1 / √(mean square + eps),
    [B, T, S].

    The code splits the array of the streams into S slices, and does not reshape it to an array with
    an axis S: a TPU would copy the array to another layout.
    """
    scale_E, down_EX, up_RE = weights
    dtype, exact = h_BTE.dtype, accumulation_dtype(h_BTE)
    slices = jnp.split(h_BTE, streams, axis=-1)
    sizes, inner_BTX = [], 0.0
    for h_BTD, down_DX in zip(slices, jnp.split(down_EX, streams)):
        square_BT1 = jnp.mean(jnp.square(h_BTD.astype(exact)), -1, keepdims=True)
        sizes.append(jax.lax.rsqrt(square_BT1 + eps))
        inner_BTX += sizes[-1] * jnp.matmul(h_BTD, down_DX, preferred_element_type=exact)
    hidden_BTR = jax.nn.silu(inner_BTX[..., : up_RE.shape[0]] / streams).astype(dtype)
    x_BTD = sum(
        gate_BTD.astype(exact) * (h_BTD.astype(exact) * size_BT1 * scale_D)
        for gate_BTD, h_BTD, size_BT1, scale_D in zip(
            jnp.split(_input_gate(hidden_BTR, up_RE).astype(dtype), streams, axis=-1),
            slices,
            sizes,
            jnp.split(scale_E, streams),
        )
    )
    return (x_BTD / streams).astype(dtype), inner_BTX, jnp.concatenate(sizes, axis=-1)


def _input_gate(hidden_BTR, up_RE):
    gate_BTE = jnp.matmul(hidden_BTR, up_RE, preferred_element_type=accumulation_dtype(hidden_BTR))
    return jax.nn.sigmoid(gate_BTE)


def _mix_gradients_in_xla(weights, h_BTE, inner_BTX, sizes_BTS, dh_BTE, dx_BTD, dinner_BTX):
    """Computes the gradients of `_mix_in_xla` with respect to the arrays of each token, and to
    scale.

    Args:
      weights, h_BTE: the arguments of `_mix_in_xla`.
      inner_BTX, sizes_BTS: the last two results of `_mix_in_xla`.
      dh_BTE: the part of the streams' gradient that does not pass through the mix.
      dx_BTD, dinner_BTX: the gradients of x and of inner.

    Returns:
      dh [B, T, E], the whole gradient of the streams; dgate [B, T, E], the gradient of the gate
      before its sigmoid; dinner [B, T, X] in h's dtype, the whole gradient of inner; [1, E], the
      part of scale's gradient that does not pass through down.
    """
    (scale_E, down_EX, up_RE), streams = weights, sizes_BTS.shape[-1]
    dtype, exact, rank = h_BTE.dtype, accumulation_dtype(h_BTE), up_RE.shape[0]
    z_BTR = inner_BTX[..., :rank] / streams
    sigmoid_BTR = jax.nn.sigmoid(z_BTR)
    gates = jnp.split(_input_gate((z_BTR * sigmoid_BTR).astype(dtype), up_RE), streams, axis=-1)
    normed = [
        h_BTD.astype(exact) * sizes_BTS[..., s : s + 1]
        for s, h_BTD in enumerate(jnp.split(h_BTE, streams, axis=-1))
    ]
    scales, dx_BTD = jnp.split(scale_E, streams), dx_BTD.astype(exact) / streams
    gated = [dx_BTD * gate_BTD for gate_BTD in gates]
    dgate_BTE = jnp.concatenate(
        [
            (gated_BTD * normed_BTD * scale_D * (1 - gate_BTD)).astype(dtype)
            for gated_BTD, normed_BTD, scale_D, gate_BTD in zip(gated, normed, scales, gates)
        ],
        axis=-1,
    )
    dscale_E = jnp.concatenate([jnp.sum(g * n, axis=(0, 1)) for g, n in zip(gated, normed)])
    dhidden_BTR = jnp.matmul(dgate_BTE, up_RE.T, preferred_element_type=exact)
    dz_BTR = dhidden_BTR * sigmoid_BTR * (1 + z_BTR * (1 - sigmoid_BTR)) / streams
    rest = ((0, 0), (0, 0), (0, inner_BTX.shape[-1] - rank))
    dinner_BTX = (dinner_BTX + jnp.pad(dz_BTR, rest)).astype(dtype)
    results = []
    for s, (h_BTD, down_DX) in enumerate(zip(normed, jnp.split(down_EX, streams))):
        dnormed_BTD = gated[s] * scales[s] + jnp.matmul(
            dinner_BTX, down_DX.T, preferred_element_type=exact
        )
        mean_BT1 = jnp.mean(dnormed_BTD * h_BTD, axis=-1, keepdims=True)
        results.append(sizes_BTS[..., s : s + 1] * (dnormed_BTD - h_BTD * mean_BT1))
    dh_BTE = (dh_BTE.astype(exact) + jnp.concatenate(results, axis=-1)).astype(dtype)
    return dh_BTE, dgate_BTE, dinner_BTX, dscale_E[None]


def _add_in_xla(h_BTE, y_BTD, a_BTS):
    """Adds the block's output y, times the factor a_s, to every stream s, and returns the streams
    [B, T, E].
    """
    y_BTD, streams = y_BTD.astype(a_BTS.dtype), a_BTS.shape[-1]
    added = [(a_BTS[..., s : s + 1] * y_BTD).astype(h_BTE.dtype) for s in range(streams)]
    return h_BTE + jnp.concatenate(added, axis=-1)


def _add_gradients_in_xla(y_BTD, a_BTS, dh_BTE):
    """Returns the gradients of y and of a, given the gradient of the streams."""
    exact, dslices = a_BTS.dtype, jnp.split(dh_BTE, a_BTS.shape[-1], axis=-1)
    dslices = [dh_BTD.astype(exact) for dh_BTD in dslices]
    dy_BTD = sum(a_BTS[..., s : s + 1] * dh_BTD for s, dh_BTD in enumerate(dslices))
    y32_BTD = y_BTD.astype(exact)
    da_BTS = [jnp.sum(dh_BTD * y32_BTD, axis=-1, keepdims=True) for dh_BTD in dslices]
    return dy_BTD.astype(y_BTD.dtype), jnp.concatenate(da_BTS, axis=-1)


XLA_IMPLEMENTATIONS = (
    XlaImplementation(
        "xla",
        ("cpu", "gpu", "tpu"),
        dict(
            forward=_mix_in_xla,
            backward=_mix_gradients_in_xla,
            write=_add_in_xla,
            write_gradients=_add_gradients_in_xla,
        ),
    ),
)
