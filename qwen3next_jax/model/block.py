"""The decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).

`apply_block.py` has what a forward pass may add around a layer: rows in groups, an embedding of the
layer's own, measurements.

Letters: B batch, T time, D model.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context, rms_norm
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import constrain


class Block(nnx.Module):
    """A decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)). A block may hold the stacked
    parameters of several layers, whose indices are the argument `layers`; `layer_stack` takes out
    the parameters of one layer before it calls the block.

    The residual stream x is as wide as the model here. Subclasses are other placements of the norms
    (the setting `model.block.placement`). They override `before` and `after`, or `around`. A
    subclass with a wider residual stream also overrides `enter` and `leave`. It may override
    `make_last`, `observed`, `residual_flops` and `multi_token_prediction`.
    """

    # The nnx.Module that the settings `model.ple` choose, which adds an embedding of the tokens
    # before the mixer. `Qwen3Next` sets it in the layers that have one.
    embedding: nnx.Module | None = None
    multi_token_prediction = MultiTokenPrediction

    def __init__(
        self, config: ModelConfig, mixer: str, sparse: bool, make: Make, layers: tuple[int, ...]
    ):
        self.config = config
        self.mixer_norm = self.make_norm(make)
        self.mixer = mixer_class(mixer)(config, make, layers)
        self.mlp_norm = self.make_norm(make)
        mlp_class = config.moe.mixture_class() if sparse else config.block.import_part("mlp")
        self.mlp = mlp_class(config, make)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Applies the layer: x [B, T, D] → (x, auxiliary outputs, cache after these tokens).

        The auxiliary outputs are those of the MLP (see `SparseMoE`; {} for a dense one) and of the
        mixer ("mixer_loss" [] if it has a loss of its own).
        """
        x_BTD, of_mixer, cache = self.mix(x_BTD, context, cache)
        x_BTD, of_mlp = self.feed_forward(x_BTD, context)
        return x_BTD, of_mixer | of_mlp, cache

    def mix(self, x_BTD: jax.Array, context: Context, cache: dict | None = None):
        """Computes x + mixer(norm(x)), the auxiliary outputs of the mixer, and its cache."""
        input_BTD, add = self.unsplit_around(x_BTD, "mixer", context)
        y_BTD, aux, cache = self.mixer.run(input_BTD, context, cache)
        return save_for_backward(add(y_BTD), "mixer"), aux, cache

    def feed_forward(self, x_BTD: jax.Array, context: Context):
        """Computes x + mlp(norm(x)), and the auxiliary outputs of the MLP."""
        input_BTD, add = self.unsplit_around(x_BTD, "mlp", context)
        y_BTD, aux = self.mlp(input_BTD, context)
        return add(y_BTD), aux

    def unsplit_around(
        self, x_BTD: jax.Array, part: str, context: Context
    ) -> tuple[jax.Array, Callable]:
        """Returns what `around` returns, with arrays that the mesh axis `tensor` does not split.
        Without this constraint XLA's partitioner might split time along `tensor` between the matrix
        products.
        """

        def unsplit(x_BTD):
            return constrain(x_BTD, context.mesh, "batch", context.time, None)

        input_BTD, add = self.around(x_BTD, part, context)
        return unsplit(input_BTD), lambda y_BTD: unsplit(add(y_BTD))

    def make_norm(self, make: Make) -> nnx.Module | nnx.Param:
        """Makes the parameters of `before` and `after`, once for the mixer and once for the MLP."""
        return make.norm(self.config.hidden_size)

    def around(self, x_BTD: jax.Array, part: str, context: Context) -> tuple[jax.Array, Callable]:
        """Returns the input of `part`, and a function that maps the part's output to the residual
        stream after it. A placement whose two halves share a computation, or which needs the
        context of the forward pass, overrides this in place of `before` and `after`.
        """
        return self.before(x_BTD, part), lambda y_BTD: self.after(x_BTD, y_BTD, part)

    def before(self, x_BTD: jax.Array, part: str) -> jax.Array:
        """Computes the input of `part`, "mixer" or "mlp", from the residual stream x [B, T, D]."""
        return rms_norm(x_BTD, getattr(self, f"{part}_norm")[...], self.config)

    def after(self, x_BTD: jax.Array, y_BTD: jax.Array, part: str) -> jax.Array:
        """Computes the residual stream after `part` from the stream x before it and the output y of
        `part`, [B, T, D].
        """
        return x_BTD + y_BTD

    @staticmethod
    def enter(x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        """Computes the residual stream before the first layer from the embeddings [B, T, D]."""
        return x_BTD

    @staticmethod
    def make_last(config: ModelConfig, make: Make) -> nnx.Module | nnx.Param:
        """Makes the parameters of `leave`, the argument `last`."""
        return make.norm(config.hidden_size)

    @staticmethod
    def leave(x_BTD: jax.Array, last: Any, config: ModelConfig) -> jax.Array:
        """Computes what the output head reads, [B, T, D], from the residual stream after the last
        layer.
        """
        return rms_norm(x_BTD, last[...], config)

    @staticmethod
    def observed(x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        """Returns the numbers of the residual stream x that diagnostics measure."""
        return x_BTD

    @staticmethod
    def residual_flops(config: ModelConfig, layers: int) -> float:
        """Counts the FLOPs of one token's forward pass in the products of the residual stream that
        `model.flops` does not read from a parameter: those of `layers` layers, and of `leave`.
        """
        return 0.0
