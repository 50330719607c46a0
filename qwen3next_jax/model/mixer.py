"""The base class of token mixers (attention and recurrent layers). `config/registry.py` lists the
classes of mixers by name, and each decoder layer makes an instance of one of them.

Letters: B batch, T time, D model.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make

# Names of those settings of ModelConfig that only some mixers read.
Switch = Literal[
    "short_convolution",
    "decay_gate",
    "delta_term",
    "beta_gate",
    "beta_range",
    "linear_output_gate",
    "output_gate_type",
    "attention_output_gate",
    "qk_norm",
    "delta_rule",
    "decay_init",
    "linear_conv_kernel_dim",
    "yarn_factor",
    "block.rope_scaling",
]


class Mixer(nnx.Module):
    """The part of a decoder layer that passes information between tokens. A new mixer implements
    `__init__`, `__call__`, `init_cache` and `activation_flops`. A mixer also implements
    `sizes_split_by_tensor` if the mesh axis `tensor` splits its heads or widths.

    Class attributes:
      Settings: a dataclass of the settings that the mixer reads from the group `model.mixer`, with
        their defaults and bounds. `self.settings(config)` returns the values of the settings.
      switches_read: the settings in `Switch` that this mixer reads. A setting in `Switch` must have
        its default value if no layer of the model reads the setting.
      settings_fixed_by_weights: the settings in `config.compatibility.CONTEXT_LENGTH_SETTINGS` on
        which the meaning of the mixer's parameters depends. Weights that were trained with one
        value are not loaded with another value.
      loads_weights_of: another mixer class with the same parameters, which have the same meaning,
        so that each class can load the other's weights; None: there is no such class. A subclass
        that adds parameters sets `loads_weights_of` to None again.
      settings_free_after_training: the fields of `Settings` that change how trained weights are
        used, but not what the weights mean. A trained model may be evaluated with other values of
        these settings.
      version: a number that is increased when the mixer's mathematics changes, so that the same
        weights mean something else. A faster algorithm or other start values do not increase the
        version. A run records the version; weights of another version are not loaded.
      cache_kind: "slots" if the cache has an entry per token; later tokens then overwrite rejected
        tokens. "state" if the size of the cache does not depend on the number of tokens; to reject
        tokens then means to restore an earlier state.
      writes_cache_in_place: only for caches of kind "slots". True: the mixer gets the caches
        [layers, B, …] of all layers that are stacked with its own layer, and writes to the cache
        with the index `context.layer_in_stack`. False: the mixer gets the cache of its own layer,
        which is copied for every token.
      has_indexer_loss: whether the mixer has an indexer that is trained with a loss of its own
        (`ForwardOptions.indexer_training`, `loss_token_mask`).
      needs_whole_rows: whether the mixer needs whole rows on one device, so that the mesh axis
        `context` must not split them.
      marks_saved_results: whether the mixer marks the results that the backward pass needs with
        `ops.blocks.save_for_backward`. The attribute is not inherited: each subclass has to set
        `marks_saved_results` again.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """The default: a mixer without settings of its own."""

    switches_read: ClassVar[tuple[Switch, ...]] = ()
    settings_fixed_by_weights: ClassVar[tuple[str, ...]] = ()
    loads_weights_of: ClassVar["type[Mixer] | None"] = None
    settings_free_after_training: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    cache_kind: ClassVar[Literal["state", "slots"]] = "state"
    writes_cache_in_place: ClassVar[bool] = False
    has_indexer_loss: ClassVar[bool] = False
    needs_whole_rows: ClassVar[bool] = False
    marks_saved_results: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, make: Make, layer_indices: tuple[int, ...]):
        """Makes the parameters.

        Args:
          config: the model's settings.
          make: makes one parameter at a time.
          layer_indices: the indices, from 0, of the layers whose parameters are stacked. The layer
            of the multi-token prediction module gets the index of the model's last layer.
        """
        raise NotImplementedError

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Mixes the tokens of each document.

        Args:
          x_BTD: [B, T, D], the mixer's input.
          context: the inputs that the layers of the forward pass share, and a few inputs that
            belong to this layer.
          cache: the layer's cache, from `init_cache` or returned by an earlier call; with
            `writes_cache_in_place`, the caches of all layers that are stacked with this layer; None
            in training.

        Returns:
          y [B, T, D]; a dict of small arrays; the cache after these tokens, or None without a
          cache. The dict has the diagnostics, if `context.options.collect_stats` is set, and
          "mixer_loss" [], if the mixer has a loss of its own: the sum of this loss over the tokens
          that `loss_token_mask` marks.
        """
        raise NotImplementedError

    def call_or_return_all_states(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Calls `call_returning_all_states` if the options of the forward pass ask for the state
        after every token and the mixer's cache is of kind "state"; otherwise calls `__call__`.
        """
        if context.options.return_all_states and self.cache_kind == "state":
            return self.call_returning_all_states(x_BTD, context, cache)
        return self(x_BTD, context, cache)

    def call_returning_all_states(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict[str, Any], dict]:
        """Does the same as `__call__`, but returns the cache after every token, each array
        [B, T, …]. The method is called with a few tokens without padding, for a cache of kind
        "state". Speculative decoding uses the caches to go back to the state before a rejected
        token. This implementation processes one token at a time; a mixer with a faster
        implementation overrides this method.
        """
        outputs, caches = [], []
        for t in range(x_BTD.shape[1]):
            y_B1D, _, cache = self(
                x_BTD[:, t : t + 1],
                context._replace(
                    positions=context.positions[:, t : t + 1],
                    options=context.options._replace(return_all_states=False),
                ),
                cache,
            )
            outputs.append(y_B1D)
            caches.append(cache)
        return (
            jnp.concatenate(outputs, axis=1),
            {},
            jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *caches),
        )

    @classmethod
    def settings(cls, config: ModelConfig) -> Any:
        """Returns the mixer's `Settings`, with the values of the group `model.mixer`."""
        return config.mixer.settings_for(cls.Settings)

    @classmethod
    def loss_token_mask(
        cls, config: ModelConfig, positions_BT: jax.Array, counted_BT: jax.Array
    ) -> jax.Array:
        """Returns [B, T] bool: the tokens over which the mixer's own loss is averaged.

        Args:
          config: the model's settings.
          positions_BT: the position of each token in its document.
          counted_BT: the tokens that may count. The result marks some or all of the tokens that
            `counted_BT` marks.
        """
        return counted_BT

    @classmethod
    def noncausal_prefix_tokens(cls, config: ModelConfig) -> float:
        """Returns how many tokens at the start of a document are visible to tokens before them: 0
        for a causal mixer, math.inf if every token sees all tokens of its document. A token that
        is visible to earlier tokens is not a target of training.
        """
        return 0

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """Returns the cache before the first token, {name: array [B, …]}, for rows of up to
        `length` tokens.
        """
        raise NotImplementedError

    @classmethod
    def activation_flops(cls, config: ModelConfig, length: int) -> float:
        """Returns the FLOPs per token of the products between activations, such as queries and
        keys, in the forward pass over a row of `length` tokens. `model.flops` adds the products
        with matrices, which it counts from the declarations of the parameters. Products with
        parameters that are not declared as matrices, such as the recurrent weights of an RNN, are
        counted by this method.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UserError if the mixer cannot be built with these settings."""

    @classmethod
    def sizes_split_by_tensor(cls, config: ModelConfig) -> dict[str, int]:
        """Returns {name of a setting: its value}. The size of the mesh axis `tensor` must divide
        the value of each of the settings.
        """
        return {}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        """Returns how many tokens a device reads from its neighbour's part of a row, if `context`
        splits rows.
        """
        return 0
