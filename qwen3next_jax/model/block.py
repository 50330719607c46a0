"""One decoder layer, and the registry of mixers that `layer_types` may name."""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.gated_deltanet import GatedDeltaNet
from qwen3next_jax.model.layers import Context, rms_norm, zeros
from qwen3next_jax.model.moe import DenseMLP, SparseMoE

# A mixer is an nnx.Module with __call__(x, context, cache) → (y, cache) and init_cache(config, batch, length).
MIXERS = {LINEAR: GatedDeltaNet, FULL: GatedAttention}


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). `stack` is the shape put before every parameter's own."""

    def __init__(self, config: ModelConfig, kind: str, sparse: bool, *, rngs: nnx.Rngs, stack: tuple[int, ...] = (),
                 dtype=jnp.float32):
        self.config = config
        self.mixer_norm = zeros((*stack, config.hidden_size), dtype)
        self.mixer = MIXERS[kind](config, rngs=rngs, stack=stack, dtype=dtype)
        self.mlp_norm = zeros((*stack, config.hidden_size), dtype)
        self.mlp = (SparseMoE if sparse else DenseMLP)(config, rngs=rngs, stack=stack, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, context: Context,
                 cache: dict | None = None) -> tuple[jax.Array, dict[str, jax.Array], dict | None]:
        """→ (x, auxiliary outputs of the MLP, cache)."""
        eps = self.config.rms_norm_eps
        mixed_BTD, cache = self.mixer(rms_norm(x_BTD, self.mixer_norm[...], eps), context, cache)
        x_BTD = x_BTD + mixed_BTD
        y_BTD, aux = self.mlp(rms_norm(x_BTD, self.mlp_norm[...], eps), context)
        return x_BTD + y_BTD, aux, cache
