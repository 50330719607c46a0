"""Gated DeltaProduct: Gated DeltaNet with several writes to the state for each token.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G value heads of one key head,
K/V widths of a key and of a value, n writes of a token (n_h of the paper), L = n T.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.gated_deltanet import GatedDeltaNet
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import ParameterPart
from qwen3next_jax.model.recurrent import ProjectedInputs
from qwen3next_jax.zoo.references import (
    causal_convolution,
    project_out,
    rms_norm,
    unit_length,
)

EXAMPLES = {
    "gated_deltaproduct": {
        "linear_mixer": "gated_deltaproduct",
        "mixer": {"num_householder": 3},
        "beta_range": 2,
    }
}


class GatedDeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct (2502.10297): a token decays the state once, writes to it n times, and
    then reads it.

    S ← e^g S, then for j = 1, …, n S ← S + β_j k_j (v_j − Sᵀk_j)ᵀ, then o = Sᵀq / √K, where every
    k_j, v_j and β_j is a projection of the token's input, and q and k_j are scaled to length 1.
    Each token multiplies the state by the product of n matrices I − β_j k_j k_jᵀ. With β between 0
    and 2 (`model.beta_range` = 2), the product of the n matrices can be a rotation or a permutation
    of n + 1 elements; one matrix I − β k kᵀ is at most a reflection. The paper uses β between 0 and
    2.

    With one write per token, Gated DeltaProduct is Gated DeltaNet. With n writes, the operator and
    kernels of Gated DeltaNet run over rows of n T tokens. The diagnostic beta is the mean of the
    write strength β over the n writes of each token.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedDeltaNet.Settings):
        # number of writes to the state for each token (n_h of the paper); 1: Gated DeltaNet
        num_householder: Annotated[int, "at least 1"] = 2

    marks_saved_results = True

    @classmethod
    def qkv_channel_counts(cls, config: ModelConfig) -> tuple[int, int, int]:
        query, key, values = super().qkv_channel_counts(config)
        return query, _writes_per_token(config) * key, _writes_per_token(config) * values

    @classmethod
    def beta_and_decay_parts(cls, config: ModelConfig) -> tuple[ParameterPart, ...]:
        n = _writes_per_token(config)  # there are n β per head
        return tuple(
            ParameterPart("b", n * part.width, n * part.width) if part.name == "b" else part
            for part in super().beta_and_decay_parts(config)
        )

    def concatenates_heads(self) -> bool:
        return _writes_per_token(self.config) == 1 and super().concatenates_heads()

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        inputs = super().project_inputs(x_BTD, context)
        if _writes_per_token(self.config) == 1 or inputs.beta is None:
            return inputs
        heads = self.config.linear_num_value_heads
        return inputs._replace(beta=inputs.beta.reshape(*inputs.beta.shape[:2], heads, -1))

    def recurrence(self, heads, state):
        n = _writes_per_token(self.config)
        if n == 1:
            return super().recurrence(heads, state)
        beta_BTHn = heads.beta
        if beta_BTHn.ndim == 3:  # there is no gate, and β is 1
            beta_BTHn = jnp.broadcast_to(beta_BTHn[..., None], (*beta_BTHn.shape, n))
        ids = heads.segment_ids
        heads = heads._replace(
            q=_zeros_at_other_writes(heads.q, n - 1, n),
            k=_writes_to_time_axis(heads.k, n),
            v=_writes_to_time_axis(heads.v, n),
            log_decay=_zeros_at_other_writes(heads.log_decay, 0, n),
            beta=_writes_to_time_axis(beta_BTHn, n)[..., 0],
            segment_ids=None if ids is None else jnp.repeat(ids, n, axis=1),
        )
        o_BLHV, states = super().recurrence(heads, state)
        return o_BLHV[:, n - 1 :: n], states

    @classmethod
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs of the recurrence for one token: n writes, and one reading of the
        output.
        """
        read = (
            2
            * config.linear_num_value_heads
            * config.linear_key_head_dim
            * config.linear_value_head_dim
        )
        return _writes_per_token(config) * (super().activation_flops(config, length) - read) + read


def _writes_per_token(config: ModelConfig) -> int:
    """Returns n, the number of writes of a token."""
    return GatedDeltaProduct.settings(config).num_householder


def _writes_to_time_axis(x_BTHC: jax.Array, n: int) -> jax.Array:
    """Splits the last axis into n writes and puts the writes of a token one after the other along
    the time axis: [B, T, H, n C'] → [B, n T, H, C'].
    """
    batch, time, heads, width = x_BTHC.shape
    x_BTHnC = x_BTHC.reshape(batch, time, heads, n, width // n)
    return jnp.swapaxes(x_BTHnC, 2, 3).reshape(batch, time * n, heads, width // n)


def _zeros_at_other_writes(x: jax.Array, write: int, n: int) -> jax.Array:
    """Expands x [B, T, …] to n entries for each token, [B, n T, …]. Entry number `write` (from 0)
    of a token is the token's entry of x; all other entries are zeros.
    """
    padding = [(0, 0), (0, 0), (write, n - 1 - write)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, :, None], padding).reshape(x.shape[0], -1, *x.shape[2:])


def gated_deltaproduct_reference(config, params, x):
    n = config.settings_of_mixer("gated_deltaproduct").num_householder
    h = config.linear_num_value_heads
    r = h // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    y = jnp.einsum("td,dgc->tgc", x, params["in_proj_qkvz"])
    z = y[..., -r * value :].reshape(len(x), h, value)
    y = jax.nn.silu(causal_convolution(y[..., : -r * value], params["conv_kernel"]))
    q = jnp.repeat(unit_length(y[..., :key]), r, axis=1)
    k = jnp.repeat(y[..., key : (1 + n) * key], r, axis=1).reshape(len(x), h, n, key)
    v = y[..., (1 + n) * key :].reshape(len(x), h, n, value)
    ba = jnp.einsum("td,dgc->tgc", x, params["in_proj_ba"])
    beta = config.beta_range * jax.nn.sigmoid(ba[..., :-r]).reshape(len(x), h, n)
    step = jax.nn.softplus(ba[..., -r:].reshape(len(x), h) + params["dt_bias"])
    decay = jnp.exp(-jnp.exp(params["a_log"]) * step)

    def token(s, arrays):
        q, k, v, beta, decay = arrays
        s = decay[:, None, None] * s
        for j in range(n):
            error = v[:, j] - jnp.einsum("hkv,hk->hv", s, k[:, j])
            s = s + beta[:, j, None, None] * k[:, j, :, None] * error[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q) * key**-0.5

    _, o = jax.lax.scan(token, jnp.zeros((h, key, value)), (q, unit_length(k), v, beta, decay))
    o = rms_norm(config, o) * params["norm"] * jax.nn.silu(z)
    return project_out(params, o)


REFERENCES = {"gated_deltaproduct": gated_deltaproduct_reference}
