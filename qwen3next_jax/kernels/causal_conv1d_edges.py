"""What the kernels of the convolution, for TPUs and for GPUs, leave to XLA: how far back each token
reads, and the gradient of the inputs before the first token.

B batch, T time, W kernel width, D channels.
"""

import jax
import jax.numpy as jnp


def gradient_before(activation, before, x, kernel, age, dy):
    """The gradient of `before`.

    Args:
      activation: "silu" or None.
      before: [B, W - 1, D], the inputs before the first token. x: [B, T, D]. kernel: [W, D].
      age: as `document_ages` returns it.
      dy: [B, T, D], the gradient of the output.
    """
    width = kernel.shape[0]

    def first_outputs(before):  # `before` enters these outputs only
        extended = jnp.concatenate([before, x[:, : width - 1]], axis=1).astype(jnp.float32)
        z = sum(
            kernel[w].astype(jnp.float32)
            * extended[:, w : w + width - 1]
            * (1.0 if age is None else (age[:, : width - 1, None] >= width - 1 - w))
            for w in range(width)
        )
        return (jax.nn.silu(z) if activation == "silu" else z).astype(dy.dtype)

    return jax.vjp(first_outputs, before)[1](dy[:, : width - 1])[0]


def document_ages(ids, width: int):
    """[B, T]: how many of the W - 1 inputs before a token belong to its document; -1 for padding.
    None where `ids` is None.

    Args:
      ids: [B, W - 1 + T], the documents of all inputs, 0 for padding; None: one document.
      width: W.
    """
    if ids is None:
        return None
    own = ids[:, width - 1 :]
    same = sum((ids[:, w : w + own.shape[1]] == own).astype(jnp.int32) for w in range(width - 1))
    return jnp.where(own > 0, same, -1)
