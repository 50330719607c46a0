"""What every implementation of the gated delta rule takes and returns.

An implementation is a module, or a table, of three functions: `forward`, `affine_map` and
`backward`, each with the signature that `Implementation` shows. `dispatch` lists those in XLA;
the plugin of kernels lists those in Pallas.

B batch, T time, G key heads, H value heads, K key width, V value width, C chunk length, N = ⌈T / C⌉
chunks.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """The arrays of one call that have a row for each token."""

    q: jax.Array  # [B, T, G, K]
    k: jax.Array  # [B, T, G, K]
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H] log decay; 0 on padding rows
    beta: jax.Array  # [B, T, H]; 0 on padding rows
    segments: jax.Array | None = None  # [B, T] signed ids, see `chunk_math.encode_segments`

    def cast(self, gradients) -> "Inputs":
        """The gradients of q, k, v, g and beta in these arrays' dtypes; ids have none."""
        return Inputs(*(dx.astype(x.dtype) for dx, x in zip(gradients, self)))


class Settings(NamedTuple):
    """What is static in one call and the same in all its passes."""

    chunk_size: int  # C; kernels for GPUs work in chunks of 64 whatever it is
    normalize_qk: bool  # L2-normalise q and k
    erase: bool  # whether a write subtracts what the state already holds at its key


class Implementation(Protocol):
    """The three passes. Kernels take a further argument, `interpret`."""

    def forward(
        self, x: Inputs, initial_state, inverses, settings: Settings, *, save: bool
    ) -> tuple:
        """Outputs and the final state, and with `save` what `backward` needs of this pass.

        Args:
          initial_state: [B, H, K, V] in float32 at least.
          inverses: A of an earlier pass over the same k, g and beta (from `affine_map`), or None.

        Returns:
          o: [B, T, H, V] in v's dtype.
          final state: [B, H, K, V] in float32 at least.
          states: [N, B, H, K, V] in v's dtype, the state that enters each chunk; None without
            `save`.
          inverses: A of each chunk in a form of the implementation's own, with the shape
            [N, B, ⌈H / 2⌉, C, 2C]; None without `save` or without `erase`.
        """

    def affine_map(self, x: Inputs, initial_state, settings: Settings) -> tuple:
        """The effect of these tokens on any further state S: the final state is U + M S and the
        outputs are o + r S, where U and o start from `initial_state`.

        Returns:
          U: [B, H, K, V] and M: [B, H, K, K] in float32 at least.
          r: [N, B, H, C, K] in v's dtype.
          inverses: as `forward` returns them.
        """

    def backward(self, x: Inputs, states, inverses, do, dfinal, settings: Settings) -> tuple:
        """Gradients from those of o [B, T, H, V] and of the final state [B, H, K, V].

        Returns:
          dq, dk, dv, dg, dbeta in the shapes of the inputs (`Inputs.cast` gives them their dtypes),
          and the gradient of the initial state [B, H, K, V].
        """


def chunk_size(x: Inputs) -> int:
    """C, the tokens of a chunk: 64; 16 for float32 heads of at most 32 channels; for a shorter
    sequence the power of two that holds it, 16 at least.

    In narrow heads the work inside a chunk (8 C d) outweighs that of the state (6 d²): a training
    step of configs/tiny.py took 0.57 s with chunks of 16 and 0.66 s with chunks of 64 on 2 CPU
    cores. In bfloat16 it stays 64, because each chunk rounds the state once more as an operand.
    """
    narrow = max(x.q.shape[-1], x.v.shape[-1]) <= 32
    longest = 16 if narrow and x.v.dtype == jnp.float32 else 64
    return min(longest, max(16, 1 << (x.q.shape[1] - 1).bit_length()))
