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
    "output_gate_type",
    "attention_output_gate",
    "qk_norm",
    "delta_rule",
    "decay_init",
    "linear_conv_kernel_dim",
    "yarn_factor",
    "block.rope_scaling",
]

# Attributes of mixers that earlier versions read → what they are called now.
_RENAMED = {
    "settings": "switches (docs/extending.md)",
    "normalized": "normalize_qk",
    "flattens": "uses_fused_layout",
}


class Mixer(nnx.Module):
    """The part of a layer that passes information between tokens. A new mixer implements
    `__init__`, `__call__`, `init_cache`, `forward_flops` and, if heads or widths are split over
    `tensor`, `splits`.

    Settings: the dataclass of the settings that the mixer reads of the group `model.mixer`, with
      defaults and bounds. `self.settings(config)` gives their values.
    switches: the settings of ModelConfig that only some mixers read, and this one does. A model
      none of whose mixers reads such a setting refuses it.
    meaning: those of `config.compatibility.CONTEXT_LENGTH_SETTINGS` that give the mixer's
      parameters their meaning: weights that were trained under one value are never read under
      another.
    weights_of: a mixer whose parameters are the same, one for one, and mean the same, so that
      either reads the other's weights; None: there is none. A subclass that adds parameters says
      None again.
    read_time: those of `Settings` that change how weights are read, not what they mean. A trained
      model may be evaluated with other values.
    version: counts up when the same weights come to mean something else, that is when the mixer's
      mathematics changes (not how it is computed, nor its start values). A run's record holds it,
      and a run that was trained with another version is refused.
    cache_kind: "slots" where the cache has an entry per token, so that later tokens overwrite
      rejected ones; "state" where its size does not depend on the number of tokens, so that
      rejecting tokens means restoring an earlier state.
    in_place: for a cache with slots: the mixer gets the caches of all layers that are stacked
      with it, [layers, B, …], and writes into that of `context.layer`. Cutting the layer's cache
      out and putting it back would copy it for every token.
    has_loss: it trains an indexer by a loss of its own (`Context.indexer`, `loss_tokens`).
    whole_rows: the mesh axis `context` cannot split the rows that it works on.
    names_kept: whether its products and operators name the results that the backward pass needs
      (`ops.blocks.save_for_backward`). Not inherited.
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
    has_loss: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    names_kept: ClassVar[bool] = False

    def __init_subclass__(cls, **options):
        """Refuses names of earlier versions, which would be ignored or fail far from here."""
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            if old in cls.__dict__ and (old != "settings" or isinstance(cls.settings, tuple)):
                raise TypeError(f"{cls.__name__}.{old}: is now called {new}")

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
          y [B, T, D]; diagnostics, small arrays by name ({} unless `context.collect_stats`),
          and beside them the mixer's own loss, if it has one: "mixer_loss" [], the sum over its
          `loss_tokens`; the cache after these tokens, None without one.
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
    def loss_tokens(
        cls, config: ModelConfig, positions_BT: jax.Array, counted_BT: jax.Array
    ) -> jax.Array:
        """[B, T] bool: the tokens, of those that count, over which the mixer's own loss is a mean.
        `positions_BT`: of each token in its document.
        """
        return counted_BT

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
