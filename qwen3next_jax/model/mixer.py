"""The base class of token mixers (attention and recurrent layers). `config/registry.py` lists the
mixers by name; a block looks up the class of its mixer there and makes an instance.

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

# Names of the settings of ModelConfig that only some mixers read.
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
    `__init__`, `__call__`, `init_cache` and `activation_flops`. It implements `splits` if the mesh
    axis `tensor` splits its heads or widths.

    Class attributes:
      Settings: a dataclass of the settings that the mixer reads from the group `model.mixer`, with
        their defaults and bounds. `self.settings(config)` returns their values.
      switches: the settings in `Switch` that this mixer reads. A model refuses a changed setting of
        this list that none of its layers reads.
      meaning: the settings in `config.compatibility.CONTEXT_LENGTH_SETTINGS` on which the meaning
        of the mixer's parameters depends. Weights that were trained with one value are not loaded
        with another.
      weights_of: another mixer class whose parameters correspond to this mixer's one for one, with
        the same meaning, so that each can load the other's weights; None: there is none. A subclass
        that adds parameters sets it to None again.
      read_time: the names in `Settings` that change how trained weights are used, but not what they
        mean. A trained model may be evaluated with other values of them.
      version: a number that is increased when the mixer's mathematics changes, so that the same
        weights mean something else. A faster way to compute the same thing, or other start values,
        do not change it. A run records the version, and weights of another version are refused.
      cache_kind: "slots" if the cache has an entry per token; rejected tokens are then overwritten
        by later ones. "state" if the size of the cache does not depend on the number of tokens;
        rejecting tokens then means to restore an earlier state.
      in_place: only for a cache with slots. If True, the mixer gets the caches of all layers that
        are stacked with its own, [layers, B, …], and writes to the cache number `context.layer`.
        With False, the layer's cache is cut out and put back, which copies it for every token.
      has_loss: whether the mixer has an indexer that it trains with a loss of its own
        (`ForwardOptions.indexer`, `loss_tokens`).
      whole_rows: whether the mixer needs whole rows on one device, so that the mesh axis `context`
        must not split them.
      names_kept: whether the mixer marks the results that the backward pass needs with
        `ops.blocks.save_for_backward`. A subclass does not inherit this.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """The settings of a mixer that has none of its own."""

    switches: ClassVar[tuple[Switch, ...]] = ()
    meaning: ClassVar[tuple[str, ...]] = ()
    weights_of: ClassVar["type[Mixer] | None"] = None
    read_time: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    cache_kind: ClassVar[Literal["state", "slots"]] = "state"
    in_place: ClassVar[bool] = False
    has_loss: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    names_kept: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, make: Make, layers: tuple[int, ...]):
        """Makes the parameters.

        Args:
          config: the model's settings.
          make: makes one parameter at a time.
          layers: the numbers of the layers whose parameters are stacked, each less than
            `num_hidden_layers`. The layer of the multi-token prediction module has the number of
            the model's last layer.
        """
        raise NotImplementedError

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Mixes the tokens of each document.

        Args:
          x_BTD: [B, T, D], the mixer's input.
          context: the inputs that the layers of the forward pass share, and a few that belong to
            this layer.
          cache: the layer's cache, from `init_cache` or returned by an earlier call; with
            `in_place`, the caches of all layers that are stacked with this one; None in training.

        Returns:
          y [B, T, D]; a dict of small arrays: the diagnostics, only if
          `context.options.collect_stats` is set, and "mixer_loss" [] if the mixer has a loss of its
          own, as the sum over its `loss_tokens`; the cache after these tokens, or None without a
          cache.
        """
        raise NotImplementedError

    def run(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Does the same as `__call__`, or as `each_token` if the caller of the forward pass asks
        for the state after every token and the mixer has one.
        """
        if context.options.return_all_states and self.cache_kind == "state":
            return self.each_token(x_BTD, context, cache)
        return self(x_BTD, context, cache)

    def each_token(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict[str, Any], dict]:
        """Does the same as `__call__` for a few tokens without padding and a cache of kind "state",
        but returns the cache after every token, each array [B, T, …]. Speculative decoding uses it
        to go back to the state before a rejected token. This method processes one token at a time;
        a mixer with a faster way overrides it.
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
        """Returns the mixer's `Settings` with the values that the configuration gives them."""
        return config.mixer.settings_for(cls.Settings)

    @classmethod
    def loss_tokens(
        cls, config: ModelConfig, positions_BT: jax.Array, counted_BT: jax.Array
    ) -> jax.Array:
        """Returns [B, T] bool: the tokens over which the mixer's own loss is a mean.

        Args:
          config: the model's settings.
          positions_BT: the position of each token in its document.
          counted_BT: the tokens that may count. The result marks some or all of them.
        """
        return counted_BT

    @classmethod
    def tokens_seen_ahead(cls, config: ModelConfig) -> float:
        """Returns how many tokens at the start of a document earlier tokens can see: 0 for a causal
        mixer, math.inf if every token sees all tokens of its document. A token that earlier tokens
        can see is not a target of training.
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
        """Returns the FLOPs per token of the products between activations (such as queries and
        keys) in the forward pass over a row of `length` tokens. `model.flops` adds the products
        with matrices, which it counts from the declarations of the matrices. A product with a
        parameter that is not declared as a matrix (the recurrent weights of an RNN) counts here.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UserError if the mixer cannot be built with these settings."""

    @classmethod
    def splits(cls, config: ModelConfig) -> dict[str, int]:
        """Returns {name of a setting: its value}. The size of the mesh axis `tensor` must divide
        each of these values.
        """
        return {}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        """Returns how many tokens a device reads from its neighbour's part of a row, if `context`
        splits rows.
        """
        return 0
