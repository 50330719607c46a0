"""The base class of token mixers. `config/registry.py` lists the mixers by name; a block looks up
the class of its mixer and makes an instance.

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

# The settings of ModelConfig that only some mixers read.
Switch = Literal[
    "short_convolution",
    "decay_gate",
    "erase",
    "beta_gate",
    "linear_output_gate",
    "attention_output_gate",
    "qk_norm",
    "delta_rule",
    "decay_init",
    "linear_conv_kernel_dim",
    "yarn_factor",
    "block.rope_scaling",
]


class Mixer(nnx.Module):
    """The part of a layer that passes information between tokens. A new mixer implements
    `__init__`, `__call__`, `init_cache`, `forward_flops` and, if heads or widths are split over
    `tensor`, `splits`.

    Settings: the dataclass of the settings that the mixer reads from the group `model.mixer`, with
      defaults and bounds. `self.settings(config)` returns their values.
    switches: the settings of ModelConfig that this mixer reads and some other mixers do not. A
      model refuses such a setting if none of its mixers reads it.
    meaning: the settings in `config.compatibility.CONTEXT_LENGTH_SETTINGS` that determine what the
      mixer's parameters mean. Weights that were trained with one value of such a setting are never
      loaded with another value.
    weights_of: another mixer with the same parameters, of the same meaning, so that each of the two
      can load the other's weights; None if there is no such mixer. A subclass that adds parameters
      sets this to None again.
    read_time: the names of those `Settings` that change how the weights are used, but not what they
      mean. A trained model may be evaluated with other values of these.
    version: the version of the mixer's mathematics. Increase it when the same weights come to mean
      something else, but not for a change of the implementation or of the start values. A run's
      record holds the version, and a run that was trained with another version is refused.
    cache_kind: "slots" if the cache has an entry for each token, so that later tokens overwrite
      rejected tokens; "state" if the size of the cache does not depend on the number of tokens, so
      that an earlier state must be restored when tokens are rejected.
    in_place: (for a cache with slots) whether the mixer gets the caches of all layers of its stack,
      [layers, B, …], and writes into the cache of layer `context.layer`. Otherwise each token would
      cost a copy of the layer's cache, out of the stack and back.
    names_kept: whether the mixer names the results that the backward pass needs
      (`ops.blocks.save_for_backward`). Subclasses do not inherit this value.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """A mixer without settings of its own."""

    switches: ClassVar[tuple[Switch, ...]] = ()
    meaning: ClassVar[tuple[str, ...]] = ()
    weights_of: ClassVar["type[Mixer] | None"] = None
    read_time: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    cache_kind: ClassVar[Literal["state", "slots"]] = "state"
    in_place: ClassVar[bool] = False
    names_kept: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, make: Make, layers: tuple[int, ...]):
        """Makes the parameters.

        Args:
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
          x_BTD: [B, T, D].
          cache: the result of `init_cache` or of an earlier call; None in training.

        Returns:
          y [B, T, D]; diagnostics, {name: small array} ({} unless `context.collect_stats`); the
          cache after these tokens, None if `cache` is None.
        """
        raise NotImplementedError

    def each_token(
        self, x_BTD: jax.Array, context: Context, cache: dict
    ) -> tuple[jax.Array, dict[str, Any], dict]:
        """`__call__` for a few tokens without padding and a cache of kind "state". It returns the
        cache after every token, each array [B, T, …], so that rejected tokens can be taken back.
        This method goes token by token; a mixer that has a cheaper way overrides it.
        """
        outputs, caches = [], []
        for t in range(x_BTD.shape[1]):
            y_B1D, _, cache = self(
                x_BTD[:, t : t + 1],
                context._replace(
                    positions=context.positions[:, t : t + 1], return_all_states=False
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
        """The values of `Settings` in this configuration."""
        return config.mixer.read(cls.Settings)

    @classmethod
    def tokens_seen_ahead(cls, config: ModelConfig) -> float:
        """The number of tokens at the start of a document that are visible to the tokens before
        them. math.inf: every token sees all tokens of its document. A token that earlier tokens see
        is not a target of training.
        """
        return 0

    @classmethod
    def init_cache(cls, config: ModelConfig, batch: int, length: int) -> dict[str, jax.Array]:
        """The cache before the first token, with `length` slots: {name: array [B, …]}."""
        raise NotImplementedError

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """FLOPs per token of the products that have no parameter, in a row of `length` tokens. The
        products with a parameter are counted from its declaration.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UserError where the mixer cannot be built with these settings."""

    @classmethod
    def splits(cls, config: ModelConfig) -> dict[str, int]:
        """{setting: its value}: the values that the size of the mesh axis `tensor` must divide."""
        return {}

    @classmethod
    def halo(cls, config: ModelConfig) -> int:
        """The number of tokens that a device reads from its neighbour's part of a row."""
        return 0
