"""One decoder layer, and the registry of mixers that `layer_types` may name."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.gated_deltanet import GatedDeltaNet
from qwen3next_jax.model.layers import Context, norm_weight, rms_norm, token_mean
from qwen3next_jax.model.moe import DenseMLP, SparseMoE
from qwen3next_jax.parallel.rules import constrain

# A mixer is an nnx.Module with __call__(x, context, cache) → (y, diagnostics, cache) and init_cache(config, batch, length).
MIXERS = {LINEAR: GatedDeltaNet, FULL: GatedAttention}


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). `stack` is the shape put before every parameter's own."""

    def __init__(self, config: ModelConfig, kind: str, sparse: bool, *, rngs: nnx.Rngs, stack: tuple[int, ...] = (),
                 dtype=jnp.float32):
        self.config = config
        self.mixer_norm = norm_weight(config, (*stack, config.hidden_size), dtype)
        self.mixer = MIXERS[kind](config, rngs=rngs, stack=stack, dtype=dtype)
        self.mlp_norm = norm_weight(config, (*stack, config.hidden_size), dtype)
        self.mlp = (SparseMoE if sparse else DenseMLP)(config, rngs=rngs, stack=stack, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, context: Context,
                 cache: dict | None = None) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """→ (x, auxiliary outputs of the MLP, cache).

        With `context.diagnose` the auxiliary outputs hold "diagnostics": those of the mixer and the MLP, and
        activation_max [] = max |x| over the counted tokens, activation_median [] = the mean over tokens of median |x|.
        """
        def whole(x_BTD):  # over `tensor`; else the partitioner may split time over it between the matmuls
            return constrain(x_BTD, context.mesh, "batch", "time", None)

        normed_BTD = whole(rms_norm(x_BTD, self.mixer_norm[...], self.config))
        mixed_BTD, diagnostics, cache = self.mixer(normed_BTD, context, cache)
        x_BTD = whole(x_BTD + mixed_BTD)
        y_BTD, aux = self.mlp(whole(rms_norm(x_BTD, self.mlp_norm[...], self.config)), context)
        x_BTD = whole(x_BTD + y_BTD)
        if context.diagnose:
            aux["diagnostics"] = diagnostics | aux.get("diagnostics", {}) | _activations(x_BTD, context.counted)
        return x_BTD, aux, cache


def _activations(x_BTD: jax.Array, counted_BT: jax.Array | None) -> dict[str, jax.Array]:
    size_BTD = jnp.abs(x_BTD.astype(jnp.float32))
    largest_BT = jnp.max(size_BTD, axis=-1)
    if counted_BT is not None:
        largest_BT = jnp.where(counted_BT, largest_BT, 0.0)
    # The median of each token's own features: a median over all tokens would be a sort across devices.
    return {"activation_max": jnp.max(largest_BT), "activation_median": token_mean(jnp.median(size_BTD, axis=-1), counted_BT)}
