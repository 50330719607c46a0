"""Parts of a block that the released model does not have: norms, placements of norms, dense MLPs,
position embeddings, and scaled rotary positions for texts longer than the training texts. The
settings `model.block.*` choose the parts of a model's blocks by name.

Letters: B batch, T time, D model, I width of an MLP.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import Block
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.layers import Context, call_saving_only_inputs, rms_norm
from qwen3next_jax.model.moe import DenseMLP
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.positions import NoPositions
from qwen3next_jax.zoo.attention_references import (
    apply_norm,
    gated_attention,
    positions_and_causal_mask,
)

# Settings of example models for the tests. Every placement, norm and MLP of this file occurs in at
# least one of them.
EXAMPLES = {
    "gemma": {
        "block": {"placement": "sandwich", "norm": "layer", "mlp": "geglu"},
        "mixer": {"qk_norm_over": "layer"},
    },
    "deepnet": {"block": {"placement": "deep", "mlp": "relu2"}},
    "transformer": {"block": {"placement": "post", "norm": "layer", "mlp": "relu"}},
    "olmo2": {
        "block": {"placement": "olmo2", "mlp": "gelu"},
        "mixer": {"qk_norm_over": "layer"},
    },
    "olmo_hybrid": {"block": {"placement": "olmo_hybrid"}, "mixer": {"qk_norm_over": "layer"}},
    "gpt2": {"block": {"norm": "layer"}, "zero_centered_norm": False},
}


# ---- norms
# --------------------------------------------------------------------------------------------------


class LayerNorm:
    """LayerNorm (1607.06450): RMSNorm of x − mean(x), plus a bias. Row 0 of the weight [2, D] holds
    the scale, or the scale − 1 with `model.zero_centered_norm`; row 1 holds the bias.
    """

    @staticmethod
    def weight(make: Make, width: int) -> nnx.Param:
        """Makes the weight [2, width], which starts as a scale of 1 and a bias of 0."""
        centre = 0.0 if make.config.zero_centered_norm else 1.0
        return make.parameter(
            lambda shape: jnp.broadcast_to(jnp.array([[centre], [0.0]]), shape),
            (2, width),
            ". .",
            kind="norm",
        )

    @staticmethod
    def apply(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
        """Applies the norm over the last axis of x. The norm is computed in float32, and the result
        has the dtype of x.
        """

        def normalise(x, weight):
            scale, bias = weight.astype(jnp.float32)
            x32 = x.astype(jnp.float32)
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
            variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
            x32 = x32 * jax.lax.rsqrt(variance + config.rms_norm_eps)
            scale = 1 + scale if config.zero_centered_norm else scale
            return (x32 * scale + bias).astype(x.dtype)

        return call_saving_only_inputs(normalise, x, weight)


# ---- placements of norms (in the formulas N is a norm, f is the mixer or the MLP)
# --------------------------------------------------------------------------------------------------


class PostNorm(Block):
    """Norms after the residual sum: N(x + f(x)) for a norm N and a mixer or MLP f, as in the
    Transformer (1706.03762).
    """

    def sublayer_input(self, x_BTD, part):
        return x_BTD

    def add_output(self, x_BTD, y_BTD, part):
        return super().sublayer_input(x_BTD + y_BTD, part)


class Olmo2Norm(Block):
    """Norms of the outputs of mixer and MLP: x + N(f(x)) for a norm N and a mixer or MLP f, as in
    OLMo 2 (2501.00656).
    """

    def sublayer_input(self, x_BTD, part):
        return x_BTD

    def add_output(self, x_BTD, y_BTD, part):
        return x_BTD + super().sublayer_input(y_BTD, part)


class OlmoHybridNorm(Block):
    """Norms of the inputs in recurrent layers, x + f(N(x)), and of the outputs in layers with
    attention, x + N(f(x)), as in Olmo Hybrid; N is a norm, and f a mixer or an MLP. A layer has
    attention if its mixer is a `GatedAttention`, or if the mixer's cache grows with the text.
    """

    def __init__(self, config, mixer, sparse, make, layer_indices):
        super().__init__(config, mixer, sparse, make, layer_indices)
        self.norms_outputs = (
            isinstance(self.mixer, GatedAttention) or self.mixer.cache_kind == "slots"
        )

    def sublayer_input(self, x_BTD, part):
        return x_BTD if self.norms_outputs else super().sublayer_input(x_BTD, part)

    def add_output(self, x_BTD, y_BTD, part):
        return x_BTD + (super().sublayer_input(y_BTD, part) if self.norms_outputs else y_BTD)


class SandwichNorm(Block):
    """Norms of inputs and outputs of mixer and MLP: x + N'(f(N(x))) for two norms N and N' and a
    mixer or MLP f (CogView, 2105.13290; Gemma 3).
    """

    def __init__(self, config, mixer, sparse, make, layer_indices):
        super().__init__(config, mixer, sparse, make, layer_indices)
        self.after_mixer_norm = make.norm(config.hidden_size)
        self.after_mlp_norm = make.norm(config.hidden_size)

    def add_output(self, x_BTD, y_BTD, part):
        return x_BTD + rms_norm(y_BTD, getattr(self, f"after_{part}_norm")[...], self.config)


class DeepNorm(PostNorm):
    """DeepNorm (2203.00555): N(α x + f(x)) with α = (2 L)^¼ for L layers, where N is a norm and f
    is the mixer or the MLP. DeepNorm multiplies the initial values of the MLP's matrices, the value
    projection and the output projection by β = (8 L)^-¼. If one parameter of a mixer holds the
    projections of queries, keys and values, the initial values of the parameter are not multiplied
    by β.
    """

    def __init__(self, config, mixer, sparse, make, layer_indices):
        super().__init__(config, mixer, sparse, make, layer_indices)
        self.alpha = (2 * config.num_hidden_layers) ** 0.25
        beta = (8 * config.num_hidden_layers) ** -0.25
        names = ("v_proj", "value_proj", "o_proj", "out_proj")
        smaller = [(self.mixer, name) for name in names if hasattr(self.mixer, name)]
        smaller += [(self.mlp, name) for name in vars(self.mlp)]
        for owner, name in smaller:
            parameter = getattr(owner, name)
            if getattr(getattr(parameter, "declared", None), "kind", None) == "matrix":
                setattr(owner, name, parameter.replace(parameter[...] * beta))

    def add_output(self, x_BTD, y_BTD, part):
        return super().add_output(self.alpha * x_BTD, y_BTD, part)


# ---- dense MLPs
# --------------------------------------------------------------------------------------------------

gelu = functools.partial(jax.nn.gelu, approximate=True)  # the tanh form, as in Gemma and GPT-2


class GeGLU(DenseMLP):
    """The MLP down(gelu(gate x) · up x), where gate, up and down are matrices (2002.05202)."""

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        gate_up = jnp.einsum("btd,dci->btci", x_BTD, self.gate_up[...].astype(x_BTD.dtype))
        hidden_BTI = call_saving_only_inputs(
            lambda gate_up: gelu(gate_up[..., 0, :]) * gate_up[..., 1, :], gate_up
        )
        return hidden_BTI @ self.down[...].astype(x_BTD.dtype), {}


class GELUMLP(nnx.Module):
    """The MLP down(gelu(up x)), where up and down are matrices."""

    activation = staticmethod(gelu)

    def __init__(self, config: ModelConfig, make: Make):
        d, i = config.hidden_size, config.intermediate_size
        self.up = make.matrix((d, i), "embed -> mlp")
        self.down = make.matrix((i, d), "mlp -> embed")

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        hidden_BTI = call_saving_only_inputs(
            self.activation, x_BTD @ self.up[...].astype(x_BTD.dtype)
        )
        return hidden_BTI @ self.down[...].astype(x_BTD.dtype), {}


class ReLUMLP(GELUMLP):
    """The MLP down(max(0, up x)), where up and down are matrices (1706.03762)."""

    activation = staticmethod(jax.nn.relu)


class SquaredReLUMLP(GELUMLP):
    """The MLP down(max(0, up x)²), where up and down are matrices (2109.08668)."""

    activation = staticmethod(lambda x: jnp.square(jax.nn.relu(x)))


class NoMLP(nnx.Module):
    """An MLP that returns zeros, for layers that consist of a mixer alone. A layer without an MLP
    still has the MLP's norms.
    """

    def __init__(self, config: ModelConfig, make: Make):
        pass

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        return jnp.zeros_like(x_BTD), {}


# ---- positions that are added to the embeddings
# --------------------------------------------------------------------------------------------------


class SinusoidalPositions(NoPositions):
    """Adds sin(t / 10000^(2i/D)) to entry 2i and cos(t / 10000^(2i/D)) to entry 2i + 1 of the
    embedding at position t (1706.03762, section 3.5).
    """

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        half = self.config.hidden_size // 2
        angle = positions_BT[..., None] * jnp.exp(jnp.arange(half) * (-math.log(10_000) / half))
        added_BTD = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(x_BTD.shape)
        return x_BTD + added_BTD.astype(x_BTD.dtype)


class LearnedPositions(NoPositions):
    """Adds a learned vector to the embedding of each token: the row of the token's position in a
    table of `config.context_length` rows.

    Raises (when it is called):
      UserError: a row has more tokens than the table has positions.
    """

    settings_fixed_by_weights = ("max_position_embeddings", "yarn_factor")

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.table = make.matrix(
            (config.context_length, config.hidden_size), ". .", kind="embedding"
        )

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        length, rows = x_BTD.shape[1], self.config.context_length
        require(
            length <= rows,
            f"rows of {length} tokens with model.block.positions = 'learned': expected at most "
            f"{rows}, model.max_position_embeddings × model.yarn_factor, as many as its table has",
        )
        return x_BTD + self.table[...][positions_BT].astype(x_BTD.dtype)


# ---- scaled rotary positions for texts `factor` times as long as the trained length `context`
# --------------------------------------------------------------------------------------------------
# `factor` is model.yarn_factor, and `context` is model.max_position_embeddings. There are `half`
# pairs of rotated dimensions. Like `layers.yarn_frequency_scale`, each function returns two values:
# an array [half] by which the frequencies of the base `theta` are multiplied, and a number by which
# cos and sin are multiplied.


def linear_rope_scaling(
    half: int, theta: float, factor: float, context: int
) -> tuple[np.ndarray, float]:
    """Computes position interpolation (2306.15595): divides all frequencies by `factor`."""
    return np.full(half, 1 / factor, np.float32), 1.0


def ntk_rope_scaling(
    half: int, theta: float, factor: float, context: int
) -> tuple[np.ndarray, float]:
    """Computes NTK-aware scaling: multiplies the base by factor^(R / (R − 2)), where R = 2 · half
    is the number of rotated dimensions. The fastest pair of dimensions keeps its frequency, and the
    frequency of the slowest pair is divided by `factor`.
    """
    return (factor ** (-np.arange(half) / max(half - 1, 1))).astype(np.float32), 1.0


def truncated_rope_scaling(
    half: int, theta: float, factor: float, context: int
) -> tuple[np.ndarray, float]:
    """Computes a truncated basis (Giraffe, 2308.10882). A pair of dimensions that makes at least
    one full turn over `context` positions keeps its frequency. A slower pair that makes more than
    one turn over `context` · `factor` positions gets the frequency of exactly one turn over
    `context` · `factor` positions. The slowest pairs are not rotated. The paper does not give the
    limits of one turn over `context` and over `context` · `factor` positions; this code chooses
    them.
    """
    frequency = theta ** (-np.arange(half) / half)
    once = 2 * math.pi / context
    once_stretched = 2 * math.pi / (context * factor)
    slower = np.where(frequency > once_stretched, once_stretched / frequency, 0)
    return np.where(frequency >= once, 1, slower).astype(np.float32), 1.0


# ---- reference
# --------------------------------------------------------------------------------------------------


def block_reference(config, params, x):
    """Computes one layer of gated attention and a dense MLP, [T, D] → [T, D], with the placement of
    norms in `config`.
    """
    alpha = (2 * config.num_hidden_layers) ** 0.25
    for part, f in (("mixer", _attention_reference), ("mlp", _mlp_reference)):
        f = functools.partial(f, config, params[part])

        def normed(x, name=part):
            return apply_norm(config, x, params[f"{name}_norm"])

        match config.block.placement:
            case "pre":
                x = x + f(normed(x))
            case "post":
                x = normed(x + f(x))
            case "olmo2" | "olmo_hybrid":  # in a layer with attention
                x = x + normed(f(x))
            case "sandwich":
                x = x + normed(f(normed(x)), f"after_{part}")
            case "deep":
                x = normed(alpha * x + f(x))
    return x


def _attention_reference(config, params, x):
    i, j, causal = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=causal, distance=i - j)


def _mlp_reference(config, params, x):
    def gelu_by_tanh(x):
        return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    kind = config.block.mlp
    if kind in ("swiglu", "geglu"):
        gate, up = x @ params["gate_up"][:, 0], x @ params["gate_up"][:, 1]
        gate = gelu_by_tanh(gate) if kind == "geglu" else gate / (1 + jnp.exp(-gate))
        return (gate * up) @ params["down"]
    up = x @ params["up"]
    positive = jnp.where(up > 0, up, 0)
    hidden = {"gelu": gelu_by_tanh(up), "relu": positive, "relu2": positive**2}[kind]
    return hidden @ params["down"]
