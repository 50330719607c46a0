"""The arguments and results of every implementation of the gated delta rule.

An implementation is a module, or an `XlaImplementation`, with the functions `forward`, `backward`
and `affine_map`. The protocol `Implementation` defines the signatures of these functions. Only a
sequence that is split over a mesh axis needs `affine_map`. `dispatch.py` lists the XLA
implementations; the plugin package of kernels (`ops.implementations`) lists the Pallas kernels.

B batch, T time, G key heads, H value heads, K key width, V value width, C chunk length, N = ⌈T / C⌉
chunks.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """The arrays of one call that have an axis of tokens."""

    q: jax.Array  # [B, T, G, K]
    k: jax.Array  # [B, T, G, K]
    v: jax.Array  # [B, T, H, V]
    log_decay: jax.Array  # [B, T, H], the logarithm of the decay; 0 for padding
    beta: jax.Array  # [B, T, H], the write strength; 0 for padding
    signed_segment_ids: jax.Array | None = (
        None  # [B, T], signed ids, see `chunk_math.signed_segment_ids`
    )

    def cast_gradients(self, gradients) -> "Inputs":
        """Returns `gradients`, the gradients of q, k, v, g and beta, each cast to the dtype of the
        array whose gradient it is. The gradient of `signed_segment_ids` is None.
        """
        return Inputs(*(dx.astype(x.dtype) for dx, x in zip(gradients, self)))


class Settings(NamedTuple):
    """The static settings of one call. All passes of the call get the same settings."""

    chunk_size: int  # C, the tokens of a chunk; the kernels for GPUs ignore it and use 64
    normalize_qk: bool  # whether q and k are L2-normalised
    delta_term: bool  # whether a write has the delta term -S^T k


class Implementation(Protocol):
    """The three passes of an implementation. The passes of kernels take one more argument,
    `interpret`: whether a CPU interprets the kernel.
    """

    def forward(
        self, x: Inputs, initial_state, inverses, settings: Settings, *, save: bool
    ) -> tuple:
        """Returns the outputs and the final state, and with `save` also the arrays of the forward
        pass that `backward` needs.

        Args:
          x: the arrays with an axis of tokens.
          initial_state: [B, H, K, V] in float32 or float64.
          inverses: the inverses that `affine_map` returned for the same k, g and beta, or None.
          settings: the static settings.
          save: whether to return `states` and `inverses`.

        Returns:
          o: [B, T, H, V] in v's dtype.
          final state: [B, H, K, V] in float32 or float64.
          states: [N, B, H, K, V] in v's dtype, the state before each chunk; None without `save`.
          inverses: [N, B, ⌈H / 2⌉, C, 2C], the matrix A of each chunk (docs/delta_rule.md). All
            implementations return the inverses in this shape, but each arranges the numbers in its
            own way. None without `save` or without `delta_term`.
        """

    def affine_map(self, x: Inputs, initial_state, settings: Settings) -> tuple:
        """Returns how the final state and the outputs depend on the initial state. Let U and o be
        the final state and the outputs for `initial_state`. If a state S is added to
        `initial_state`, the final state becomes U + M S, and the outputs become o + r S.

        Returns:
          U: [B, H, K, V] in float32 or float64.
          M: [B, H, K, K] in float32 or float64.
          r: [N, B, H, C, K] in v's dtype.
          inverses: the inverses that `forward` takes and returns; None without `delta_term`.
        """

    def backward(self, x: Inputs, states, inverses, do, dfinal, settings: Settings) -> tuple:
        """Returns the gradients of the inputs and of the initial state.

        Args:
          x: the arrays with a time axis.
          states: the states before each chunk, which `forward` returned.
          inverses: the inverses that `forward` returned.
          do: [B, T, H, V], the gradient of o.
          dfinal: [B, H, K, V], the gradient of the final state.
          settings: the static settings.

        Returns:
          (dq, dk, dv, dg and dbeta in the shapes of the inputs, the gradient of the initial state
          [B, H, K, V]), in any dtype: the caller casts the gradients (`Inputs.cast_gradients`).
        """


def choose_chunk_size(x: Inputs) -> int:
    """Returns C, the tokens of a chunk. C is 16 for float32 heads of at most 32 channels and 64
    otherwise. For a sequence of less than 64 tokens, C is at most the smallest power of two that is
    at least 16 and at least the sequence's length.

    For heads of few channels d, the work inside a chunk (about 8 C d operations per token) exceeds
    the work on the state (about 6 d² per token), so short chunks are faster: on 2 CPU cores a
    training step of configs/tiny.py took 0.57 s with chunks of 16 and 0.66 s with chunks of 64.
    bfloat16 heads keep chunks of 64, because every chunk rounds the state to bfloat16 for its
    products, so shorter chunks would round more often.
    """
    narrow = max(x.q.shape[-1], x.v.shape[-1]) <= 32
    longest = 16 if narrow and x.v.dtype == jnp.float32 else 64
    return min(longest, max(16, 1 << (x.q.shape[1] - 1).bit_length()))
