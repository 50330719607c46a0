"""The two parts of the causal convolution that XLA computes for the kernels, on TPUs and on GPUs:
how many of the W - 1 inputs before each token belong to the token's document, and the gradient of
the inputs before the first token.

B batch, T time, W kernel width, D channels.
"""

import jax
import jax.numpy as jnp


def gradient_of_inputs_before(activation, before, x, kernel, age, dy):
    """Returns the gradient of `before`.

    Args:
      activation: "silu" or None.
      before: [B, W - 1, D], the inputs before the first token.
      x: [B, T, D], the inputs.
      kernel: [W, D], the weights of the convolution.
      age: [B, T], the result of `count_earlier_inputs_in_document`; None if a row is one document.
      dy: [B, T, D], the gradient of the output.
    """
    width = kernel.shape[0]

    def first_outputs(before):  # the only outputs that depend on `before`
        extended = jnp.concatenate([before, x[:, : width - 1]], axis=1).astype(jnp.float32)
        z = sum(
            kernel[w].astype(jnp.float32)
            * extended[:, w : w + width - 1]
            * (1.0 if age is None else (age[:, : width - 1, None] >= width - 1 - w))
            for w in range(width)
        )
        return (jax.nn.silu(z) if activation == "silu" else z).astype(dy.dtype)

    return jax.vjp(first_outputs, before)[1](dy[:, : width - 1])[0]


def count_earlier_inputs_in_document(ids, width: int):
    """Returns [B, T] integers: how many of the W - 1 inputs before each token belong to the token's
    document; -1 for a token of padding. The kernels call this number of earlier inputs the age of
    the token. Returns None if `ids` is None.

    Args:
      ids: [B, W - 1 + T], the document ids of the W - 1 inputs before the first token and of the T
        tokens, 0 for padding; None if a row is one document.
      width: W, the number of inputs that an output depends on.
    """
    if ids is None:
        return None
    own = ids[:, width - 1 :]
    same = sum((ids[:, w : w + own.shape[1]] == own).astype(jnp.int32) for w in range(width - 1))
    return jnp.where(own > 0, same, -1)
