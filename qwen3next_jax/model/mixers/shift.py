"""The token before each one, of its document, and mixers whose inputs it is mixed into.

Letters: B batch, T time, D model, P inputs.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import ByChannel, through
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.sharding.rules import activation_spec, local


def shifted(
    x_BTD: jax.Array, context: Context, before_B1D: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(x of the token before [B, T, D], zeros for a document's first; the row's last x [B, 1,
    D]). `before`: x before the first token.
    """

    def run(x, segment_ids, before):
        kernel = jnp.stack([jnp.ones(x.shape[-1], x.dtype), jnp.zeros(x.shape[-1], x.dtype)])
        return causal_conv1d(
            x,
            kernel,
            activation=None,
            initial_state=before,
            segment_ids=segment_ids,
            axis_name=context.time_axis,
        )

    rows, first = activation_spec("batch", context.time), activation_spec("batch")
    return local(run, context.mesh, (rows, rows, first), (rows, first))(
        x_BTD, context.segment_ids, before_B1D
    )


class Shifted(ByChannel):
    """Linear attention (`ByChannel`) of several inputs x + (x₋₁ − x) ⊙ (μ + Δ), each with a μ of
    its own and a Δ that comes from the token itself, of low rank (RWKV-6, 2404.05892, equations
    13–15). `inputs` gets x and x₋₁ side by side, and takes them apart by `mixed`.
    """

    def make_mixing(self, make, count: int, rank: int) -> None:
        d, half = make.config.hidden_size, lambda shape: jnp.full(shape, 0.5)
        self.mix_all = make.parameter(half, (d,), "embed_out", kind="rate")
        self.mix = make.parameter(half, (count, d), ". embed_out", kind="rate")
        self.mix_down = make.matrix((d, count, rank), "embed -> * .")
        self.mix_up = make.matrix((count, rank, d), "* . -> embed_out")

    def mixed(self, x_BTE: jax.Array) -> jax.Array:
        """[P, B, T, D], of x and x₋₁ side by side."""
        x, before = jnp.split(x_BTE, 2, axis=-1)
        change, dtype = before - x, x.dtype
        low_BTPR = jnp.tanh(
            through(x + change * self.mix_all[...].astype(dtype), self.mix_down)
        ).astype(dtype)
        delta = (
            jnp.einsum("btpr,prd->pbtd", low_BTPR, self.mix_up[...].astype(dtype))
            + self.mix[...].astype(dtype)[:, None, None]
        )
        return x + change * delta

    def __call__(self, x_BTD, context: Context, cache=None):
        before_BTD, last = shifted(x_BTD, context, cache and cache["shift"])
        rest = cache and {name: x for name, x in cache.items() if name != "shift"}
        y, diagnostics, rest = super().__call__(
            jnp.concatenate([x_BTD, before_BTD], axis=-1), context, rest
        )
        return y, diagnostics, rest and rest | {"shift": last}

    @classmethod
    def init_cache(cls, config, batch, length):
        return super().init_cache(config, batch, length) | {
            "shift": jnp.zeros((batch, 1, config.hidden_size), config.dtype)
        }

    @classmethod
    def halo(cls, config):
        return 1
