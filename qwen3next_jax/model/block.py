"""The decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).

`apply_block.py` runs a layer with diagnostics, with rows in groups, or with an n-gram embedding.

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
    """A decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)). A block may hold the parameters
    of several layers, stacked; `layer_stack` takes out one layer's parameters before it calls the
    block.

    In this class the residual stream x is as wide as the model. A subclass that places the norms
    elsewhere (the setting `model.block.placement`) overrides `sublayer_input` and `add_output`, or
    `input_and_add_output`. A subclass with a wider residual stream also overrides
    `residual_from_embeddings` and `head_input`. A subclass may also override `make_final_norm`,
    `residual_for_diagnostics`, `residual_flops` and `multi_token_prediction`.
    """

    # The n-gram embedding that is added to x before the mixer (the settings `model.ple`). Most
    # layers have none. `Qwen3Next` sets it in the layers that have one.
    embedding: nnx.Module | None = None
    multi_token_prediction = MultiTokenPrediction

    def __init__(
        self,
        config: ModelConfig,
        mixer: str,
        sparse: bool,
        make: Make,
        layer_indices: tuple[int, ...],
    ):
        """Makes the parameters of one layer, or of several stacked layers of one kind.

        Args:
          config: the model's settings.
          mixer: the name of the mixer, such as "gated_attention".
          sparse: whether the MLP is a mixture of experts; otherwise it is dense.
          make: makes the parameters; for stacked layers each parameter gets a leading axis.
          layer_indices: the indices of these layers in the model, from 0.
        """
        self.config = config
        self.mixer_norm = self.make_norm(make)
        self.mixer = mixer_class(mixer)(config, make, layer_indices)
        self.mlp_norm = self.make_norm(make)
        mlp_class = config.moe.mixture_class() if sparse else config.block.import_part("mlp")
        self.mlp = mlp_class(config, make)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Applies the layer: x [B, T, D] → (x, auxiliary outputs, cache after these tokens).

        The auxiliary outputs are those of the MLP (see `SparseMoE`; {} for a dense MLP) and of the
        mixer (see `Mixer.__call__`).
        """
        x_BTD, mixer_aux, cache = self.mixer_sublayer(x_BTD, context, cache)
        x_BTD, mlp_aux = self.mlp_sublayer(x_BTD, context)
        return x_BTD, mixer_aux | mlp_aux, cache

    def mixer_sublayer(self, x_BTD: jax.Array, context: Context, cache: dict | None = None):
        """Returns (x + mixer(norm(x)), the mixer's auxiliary outputs, the mixer's cache)."""
        input_BTD, add = self.constrained_input_and_add_output(x_BTD, "mixer", context)
        y_BTD, aux, cache = self.mixer.call_or_return_all_states(input_BTD, context, cache)
        return save_for_backward(add(y_BTD), "mixer"), aux, cache

    def mlp_sublayer(self, x_BTD: jax.Array, context: Context):
        """Returns (x + mlp(norm(x)), the MLP's auxiliary outputs)."""
        input_BTD, add = self.constrained_input_and_add_output(x_BTD, "mlp", context)
        y_BTD, aux = self.mlp(input_BTD, context)
        return add(y_BTD), aux

    def constrained_input_and_add_output(
        self, x_BTD: jax.Array, part: str, context: Context
    ) -> tuple[jax.Array, Callable]:
        """Does the same as `input_and_add_output`, and constrains the sharding of the input and of
        the residual stream: the mesh axis `tensor` does not split them. Without the constraint,
        XLA's partitioner might split time along `tensor` between the matrix products.
        """

        def unsplit(x_BTD):
            return constrain(x_BTD, context.mesh, "batch", context.logical_time_axis, None)

        input_BTD, add = self.input_and_add_output(x_BTD, part, context)
        return unsplit(input_BTD), lambda y_BTD: unsplit(add(y_BTD))

    def make_norm(self, make: Make) -> nnx.Module | nnx.Param:
        """Makes the norm of one sublayer, for `sublayer_input` and `add_output`. A block calls this
        method twice: for the mixer and for the MLP.
        """
        return make.norm(self.config.hidden_size)

    def input_and_add_output(
        self, x_BTD: jax.Array, part: str, context: Context
    ) -> tuple[jax.Array, Callable]:
        """Returns the input of a sublayer, and a function (output of the sublayer → residual stream
        after the sublayer). `part`: "mixer" or "mlp". A subclass overrides this method in place of
        `sublayer_input` and `add_output` if the input and the output of a sublayer share a
        computation or need the context.
        """
        return self.sublayer_input(x_BTD, part), lambda y_BTD: self.add_output(x_BTD, y_BTD, part)

    def sublayer_input(self, x_BTD: jax.Array, part: str) -> jax.Array:
        """Computes the input of `part`, "mixer" or "mlp", from the residual stream x [B, T, D]."""
        return rms_norm(x_BTD, getattr(self, f"{part}_norm")[...], self.config)

    def add_output(self, x_BTD: jax.Array, y_BTD: jax.Array, part: str) -> jax.Array:
        """Computes the residual stream [B, T, D] after `part`, "mixer" or "mlp", from the stream x
        before `part` and the output y of `part`.
        """
        return x_BTD + y_BTD

    @staticmethod
    def residual_from_embeddings(x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        """Computes the residual stream before the first layer from the embeddings [B, T, D]."""
        return x_BTD

    @staticmethod
    def make_final_norm(config: ModelConfig, make: Make) -> nnx.Module | nnx.Param:
        """Makes the final norm, which `head_input` gets as the argument `last`."""
        return make.norm(config.hidden_size)

    @staticmethod
    def head_input(x_BTD: jax.Array, last: Any, config: ModelConfig) -> jax.Array:
        """Computes the input of the output head, [B, T, D], from the residual stream after the last
        layer and the parameters `last` of `make_final_norm`.
        """
        return rms_norm(x_BTD, last[...], config)

    @staticmethod
    def residual_for_diagnostics(x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        """Returns the part of the residual stream x whose largest |x| is a diagnostic."""
        return x_BTD

    @staticmethod
    def residual_flops(config: ModelConfig, num_layers: int) -> float:
        """Counts the FLOPs per token that the forward pass spends on the residual stream in
        `num_layers` layers and in `head_input`, without products with declared matrices, which
        `model.flops` counts itself.
        """
        return 0.0
