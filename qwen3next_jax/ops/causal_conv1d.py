"""Causal depthwise convolution over time. A token reads no inputs of other documents. The operator
takes and returns a state: the last W - 1 inputs.

B batch, T time, W kernel width, D channels (the size of all trailing axes, flattened).
"""

import functools
import math

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)


def causal_conv1d(
    x,
    kernel,
    *,
    activation: str | None = "silu",
    initial_state=None,
    segment_ids=None,
    axis_name: str | None = None,
):
    """Returns y with y_t = activation(sum_w kernel[w] * x_{t - (W - 1) + w}) for each channel, and
    the final state.

    Args:
      x: [B, T, *channels], the inputs.
      kernel: [W, *channels]. kernel[W - 1] multiplies the input of the current token.
      activation: "silu" or None.
      initial_state: [B, W - 1, *channels], the inputs before the first token, oldest first; None
        means zeros. With `segment_ids`, `initial_state` belongs to the first segment.
      segment_ids: [B, T] integers or None. The ids of documents are positive and non-decreasing
        along T; 0 marks padding at the end. A token reads no input of another document. The outputs
        of padding are zeros. A NaN or an infinity in the last W - 1 tokens of a document may reach
        the next documents, because inputs of other documents are multiplied by zero.
      axis_name: name of the mesh axis over which T is split in order, for a call inside
        `shard_map`. With `axis_name`, x and `segment_ids` are this shard's parts, and a document
        has the same id on every shard. Only the first shard reads `initial_state`; on all other
        shards, `initial_state` is ignored and gets no gradient. Every shard returns the final state
        of the whole row.

    Returns:
      y: [B, T, *channels] in x's dtype. Products and sums are in float32 (float64 for float64).
      final_state: [B, W - 1, *channels] in x's dtype, the last W - 1 inputs before the padding,
        oldest first. With `segment_ids`, only inputs of the last document are kept; all other
        inputs are replaced by zeros.

    Raises:
      ValueError: shapes, dtypes or the activation do not fit, or a shard holds fewer than W - 1
        tokens.
    """
    _check_arguments(x, kernel, activation, initial_state, segment_ids)
    if axis_name is not None and x.shape[1] < kernel.shape[0] - 1:
        raise ValueError(
            f"x has {x.shape[1]} tokens a shard of axis {axis_name!r}: expected at least the "
            f"{kernel.shape[0] - 1} "
            f"that a kernel of width {kernel.shape[0]} reads of the shard before"
        )
    batch, time, channels = x.shape[0], x.shape[1], x.shape[2:]
    width, size = kernel.shape[0], math.prod(channels)
    x_BTD, kernel_WD = x.reshape(batch, time, size), kernel.reshape(width, size)
    if initial_state is None:
        before = jnp.zeros((batch, width - 1, size), x.dtype)
    else:
        before = initial_state.reshape(batch, width - 1, size).astype(x.dtype)
    ids_before = None if segment_ids is None else jnp.repeat(segment_ids[:, :1], width - 1, axis=1)
    if axis_name is not None and width > 1:
        before = _inputs_of_previous_shard(x_BTD, before, width - 1, axis_name)
        ids_before = (
            None
            if segment_ids is None
            else _inputs_of_previous_shard(segment_ids, ids_before, width - 1, axis_name)
        )
    ids = None if segment_ids is None else jnp.concatenate([ids_before, segment_ids], axis=1)
    chosen = choose_implementation(
        "causal_conv1d", None, XLA_IMPLEMENTATIONS, x=x_BTD, kernel=kernel_WD, activation=activation
    )
    y_BTD = _differentiable_conv(chosen, activation, before, x_BTD, kernel_WD, ids)
    final = _last_inputs_before_padding(before, x_BTD, ids, segment_ids, axis_name)
    return y_BTD.reshape(x.shape), final.reshape(batch, width - 1, *channels)


def _last_inputs_before_padding(before, x_BTD, ids, segment_ids, axis_name):
    """Returns [B, W - 1, D]: the last W - 1 inputs of each row before its padding. Inputs that do
    not belong to the row's last document are replaced by zeros.

    Args:
      before: [B, W - 1, D], the inputs before the first token.
      x_BTD: [B, T, D], the inputs.
      ids: [B, W - 1 + T], the document ids of `before` and x; None if a row is one document.
      segment_ids: [B, T], the document ids of x, or None.
      axis_name: name of the mesh axis over which T is split, or None.
    """
    batch, time, _ = x_BTD.shape
    state_size = before.shape[1]
    extended = jnp.concatenate([before, x_BTD], axis=1)  # input t is row t + W - 1
    if ids is None:
        length_B = jnp.full((batch,), time)
        final = extended[:, time:]
    else:
        length_B = jnp.sum(segment_ids > 0, axis=1)
        window = jax.vmap(lambda rows, start: jax.lax.dynamic_slice_in_dim(rows, start, state_size))
        same_document = window(ids, length_B) == jnp.max(segment_ids, axis=1, keepdims=True)
        final = jnp.where(same_document[..., None], window(extended, length_B), 0)
    if axis_name is not None:
        # The row ends on the last shard that has a token. A row without tokens ends on the first
        # shard.
        shard = jax.lax.axis_index(axis_name)
        last_B = jax.lax.pmax(jnp.where(length_B > 0, shard, 0), axis_name)
        final = jax.lax.psum(jnp.where((shard == last_B)[:, None, None], final, 0), axis_name)
    return final


def _check_arguments(x, kernel, activation, initial_state, segment_ids):
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r}: expected 'silu' or None")
    channels = x.shape[2:]
    checks.check_shapes(
        x=(x, ("B", "T", *channels)),
        kernel=(kernel, ("W", *channels)),
        segment_ids=(segment_ids, "BT"),
    )
    checks.check_integers(segment_ids=segment_ids)
    checks.check_shapes(initial_state=(initial_state, (x.shape[0], kernel.shape[0] - 1, *channels)))


def _inputs_of_previous_shard(x, first, size: int, axis_name: str):
    """Returns the last `size` entries along T of the previous shard's x; `first` on the first
    shard.
    """
    shards = jax.lax.axis_size(axis_name)
    received = jax.lax.ppermute(
        x[:, x.shape[1] - size :], axis_name, [(i, i + 1) for i in range(shards - 1)]
    )
    return jnp.where(jax.lax.axis_index(axis_name) == 0, first, received)


def _same_document_masks(ids, width: int, dtype):
    """Returns [W, B, T]: entry (w, b, t) is 1 if t is a token (not padding) and the input that
    kernel[w] multiplies for token t belongs to the document of token t, else 0.
    """
    own = ids[:, width - 1 :]
    time = own.shape[1]
    return jnp.stack([(ids[:, w : w + time] == own) & (own > 0) for w in range(width)]).astype(
        dtype
    )


def _masked_products_by_tap(inputs_by_tap, scale, same_document):
    """Returns a list of the arrays inputs_by_tap[w] * scale[w] for the taps w = 0 … W - 1 of the
    kernel, with zeros where the input is of another document.

    Args:
      inputs_by_tap: W arrays [B, T, D].
      scale: W arrays that broadcast to [B, T, D].
      same_document: [W, B, T], the result of `_same_document_masks`; None if a row is one document.
    """
    return [
        x * y if same_document is None else x * y * same_document[w][..., None]
        for w, (x, y) in enumerate(zip(inputs_by_tap, scale))
    ]


def _shifted_slices(padded, width: int):
    """Returns W arrays [B, T, D], the parts of `padded` [B, T + W - 1, D] that start at 0 … W -
    1.
    """
    time = padded.shape[1] - width + 1
    return [padded[:, w : w + time] for w in range(width)]


def _outputs_before_activation(extended, kernel, same_document):
    """Returns the outputs [B, T, D] before the activation, for inputs `extended` [B, W - 1 + T,
    D].
    """
    return sum(
        _masked_products_by_tap(_shifted_slices(extended, kernel.shape[0]), kernel, same_document)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable_conv(chosen: ChosenImplementation, activation, before, x, kernel, ids):
    return chosen.function_named("forward")(activation, before, x, kernel, ids)


def _conv_backward(chosen: ChosenImplementation, activation, residuals, dy):
    return *chosen.function_named("backward")(activation, *residuals, dy), None


_differentiable_conv.defvjp(
    lambda chosen, activation, *inputs: (_differentiable_conv(chosen, activation, *inputs), inputs),
    _conv_backward,
)


# ---- in XLA alone


def _forward_in_xla(activation, before, x, kernel, ids):
    wide = jnp.promote_types(jnp.float32, x.dtype)
    same_document = None if ids is None else _same_document_masks(ids, kernel.shape[0], wide)
    z = _outputs_before_activation(
        jnp.concatenate([before, x], axis=1).astype(wide), kernel.astype(wide), same_document
    )
    return (jax.nn.silu(z) if activation == "silu" else z).astype(x.dtype)


def _backward_in_xla(activation, before, x, kernel, ids, dy, *, row_by_row: bool):
    """Returns the gradients of `before`, x and `kernel`, given dy, the gradient of the outputs.
    `row_by_row` says whether the sum for the gradient of `kernel` takes one row of the batch at a
    time.
    """
    extended = jnp.concatenate([before, x], axis=1)
    dextended, dkernel = _input_and_kernel_gradients(
        activation, row_by_row, extended, kernel, ids, dy
    )
    return dextended[:, : before.shape[1]], dextended[:, before.shape[1] :], dkernel


def _input_and_kernel_gradients(activation, row_by_row, extended, kernel, ids, dy):
    """Returns two gradients: of `extended` [B, W - 1 + T, D], which is `before` followed by x, and
    of `kernel`. `_backward_in_xla` describes the other arguments.
    """
    width, wide = kernel.shape[0], jnp.promote_types(jnp.float32, extended.dtype)
    x, weights, dz = extended.astype(wide), kernel.astype(wide), dy.astype(wide)
    same_document = None if ids is None else _same_document_masks(ids, width, wide)
    if activation == "silu":
        z = _outputs_before_activation(x, weights, same_document)
        gate = jax.nn.sigmoid(z)
        dz *= gate * (1 + z * (1 - gate))
    time = dz.shape[1]
    # The barrier stops XLA from fusing the computation of these arrays into the operations that
    # read them. If they were fused, the padding would turn every read into a branch, and the
    # activation's gradient would be computed W times. x gets no barrier here, because a barrier
    # would make XLA write a float32 copy of x to memory.
    padded = jnp.pad(dz, ((0, 0), (width - 1, width - 1), (0, 0)))
    padded, same_document = jax.lax.optimization_barrier((padded, same_document))
    dz = padded[:, width - 1 : width - 1 + time]
    terms_of = lambda x, dz, same_document: _masked_products_by_tap(
        _shifted_slices(x, width), [dz] * width, same_document
    )
    terms = terms_of(x, dz, same_document)
    if row_by_row:  # one row of the batch at a time: the W sums stay in a CPU's caches
        x = jax.lax.optimization_barrier(x)
        rows = (
            x[:, None],
            dz[:, None],
            None if same_document is None else same_document.swapaxes(0, 1)[:, :, None],
        )
        add = lambda sums, row: ([*map(jnp.add, sums, terms_of(*row))], None)
        terms, _ = blocks.scan_or_call_once(add, [jnp.zeros_like(dz[:1])] * width, rows)
    dkernel = jnp.stack([jnp.sum(term, axis=range(term.ndim - 1)) for term in terms])
    # kernel[w] multiplies the input at index s of `extended` for the output at index s - w.
    if same_document is not None:
        same_document = jnp.stack(
            [jnp.pad(same_document[w], ((0, 0), (w, width - 1 - w))) for w in range(width)]
        )
    dx = sum(_masked_products_by_tap(_shifted_slices(padded, width)[::-1], weights, same_document))
    return dx.astype(extended.dtype), dkernel.astype(kernel.dtype)


def _xla_implementation(platforms, row_by_row: bool) -> XlaImplementation:
    """Returns the implementation "xla" for `platforms`. `row_by_row` says whether the sum for the
    gradient of the kernel takes one row of the batch at a time.
    """
    backward = functools.partial(_backward_in_xla, row_by_row=row_by_row)
    return XlaImplementation("xla", platforms, dict(forward=_forward_in_xla, backward=backward))


XLA_IMPLEMENTATIONS = (
    _xla_implementation(("cpu",), row_by_row=True),
    _xla_implementation(("gpu", "tpu"), row_by_row=False),
)
