"""The decoder layer, and functions that ask the mixers of a model's layers for their properties."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.config.model import ABLATIONS
from qwen3next_jax.config.registry import MIXERS, resolve
from qwen3next_jax.model.layers import Context, rms_norm, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.row_groups import merge_rows, row_groups, split_rows
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import constrain


def mixer_class(name: str) -> type[Mixer]:
    """Returns the class of the mixer called `name`: a name of `config.registry.MIXERS`, or an
    import string.

    Raises:
      UserError: the class cannot be imported, or declares its settings in an obsolete form (as a
        tuple `settings`).
    """
    mixer = resolve(MIXERS, name, "mixer")
    require(
        not isinstance(mixer.settings, tuple),
        f"the mixer {name!r} has settings = {mixer.settings!r}: expected names of ModelConfig's "
        "settings as `switches`, and settings of model.mixer as a dataclass `Settings` "
        "(docs/extending.md)",
    )
    return mixer


def check_mixers(config: ModelConfig) -> None:
    """Raises UserError if a mixer refuses the settings, or if a setting that only some mixers read
    differs from its default and no layer of the model reads it.
    """
    used = {name: mixer_class(name) for name, _ in config.layer_kinds}
    for mixer in used.values():
        mixer.check(config)
    read = {setting for mixer in used.values() for setting in mixer.switches} | set(Block.switches)
    others = ("output_gate_type", "beta_range", "delta_rule", "yarn_factor", "block.rope_scaling")
    for setting in (*ABLATIONS, *others):
        value, default = map(operator.attrgetter(setting), (config, ModelConfig()))
        require(
            value == default or setting in read,
            f"model.{setting} = {value!r}: no layer of this model reads it (its mixers: "
            f"{', '.join(used)}): expected {default!r}",
        )


# {setting: the switch that turns off the part of a mixer that reads the setting}. If no mixer of
# the model reads such a setting, `runs.unread` refuses it where the user of a run gives it. A
# model's own config file may contain it.
GIVEN = {"decay_init": "decay_gate", "linear_conv_kernel_dim": "short_convolution"}


def unread_by_mixers(config: ModelConfig) -> dict[str, str]:
    """Returns {setting of `GIVEN` that no layer of the model reads: the reason, as text}."""
    used = {name: mixer_class(name) for name, _ in config.layer_kinds}
    return {
        setting: f"no mixer of the model ({', '.join(used)}) reads it"
        + (f" with model.{switch} = False" if not getattr(config, switch) else "")
        for setting, switch in GIVEN.items()
        if not any(
            setting in mixer.switches and (switch not in mixer.switches or getattr(config, switch))
            for mixer in used.values()
        )
    }


def has_indexer(config: ModelConfig) -> bool:
    """Whether any mixer of the model has an indexer, which it trains with a loss of its own."""
    return any(mixer_class(name).has_loss for name, _ in config.layer_kinds)


def partial_ablations(config: ModelConfig) -> list[str]:
    """Returns a line of text for each ablation that has an effect in some layers only. It says in
    which layers. An ablation is a switched-off setting of `config.model.ABLATIONS`.
    """
    lines = []
    for setting in config.ablated:
        reached = [
            setting in (*mixer_class(name).switches, *Block.switches) for name in config.mixers
        ]
        if all(reached):
            continue
        if not any(reached):
            lines.append(f"model.{setting} = False reaches multi-token prediction alone")
            continue
        layers = []
        for wanted in (True, False):
            numbers = [i for i, found in enumerate(reached) if found == wanted]
            mixers = ", ".join(dict.fromkeys(config.mixers[i] for i in numbers))
            layers.append(f"{_ranges(numbers)} ({mixers})")
        lines.append(f"model.{setting} = False reaches layers {layers[0]}, not {layers[1]}")
    return lines


def _ranges(numbers: list[int]) -> str:
    """Returns ascending numbers as text: [0, 1, 2, 4] is "0-2, 4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def versions(config: ModelConfig) -> dict[str, int]:
    """Returns {name: version of its mathematics (`Mixer.version`)} for every mixer, and for every
    other part of a block that the model's settings name. Names are such as "gdn2" and "block.norm =
    rms". The version is 1 if the part declares none.
    """
    parts = {name: mixer_class(name) for name, _ in config.layer_kinds}
    unread = {"mlp": not config.has_dense_mlps, "rope_scaling": config.yarn_factor == 1}
    for setting in vars(config.block):
        if not unread.get(setting):
            name = getattr(config.block, setting)
            parts[f"block.{setting} = {name}"] = config.block.resolve(setting)
    if config.has_experts:
        parts[f"moe.experts = {config.moe.experts}"] = config.moe.mixture()
    return {name: getattr(part, "version", 1) for name, part in parts.items()}


def split_sizes(config: ModelConfig) -> tuple[dict[str, int], int, list[str]]:
    """Returns the requirements of the layers on a mesh, as three arguments of
    `sharding.mesh.check_divides`: {setting: value that the size of `tensor` must divide}, the
    largest number of tokens that a layer reads from the neighbour's part of a row, and the names of
    the parts that need whole rows.
    """
    mixers = {name: mixer_class(name) for name, _ in config.layer_kinds}
    splits = {
        setting: size for mixer in mixers.values() for setting, size in mixer.splits(config).items()
    }
    whole_rows = [f"the mixer {name!r}" for name, mixer in mixers.items() if mixer.whole_rows]
    if config.ple.layer_ids and config.ple.module().whole_rows:
        whole_rows.append(f"the embedding {config.ple.embedding!r} of model.ple.layer_ids")
    return splits, max(mixer.halo(config) for mixer in mixers.values()), whole_rows


def layer_cache(config: ModelConfig, layer: int, batch: int, length: int) -> dict[str, Any]:
    """Returns the cache of one layer before the first token: the arrays of the mixer's cache, and
    under "embedding" the cache of the layer's embedding, if it has one.

    Args:
      config: the model's settings.
      layer: the number of the layer, from 0.
      batch: the number of rows.
      length: the number of slots.
    """
    cache = mixer_class(config.mixers[layer]).init_cache(config, batch, length)
    if config.ple.number(layer) is None:
        return cache
    return cache | {"embedding": config.ple.module().init_cache(config, batch)}


class Block(nnx.Module):
    """A decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)). A block may hold the stacked
    parameters of several layers; the argument `layers` has the numbers of these layers.

    The residual stream x is as wide as the model here. Subclasses are other placements of the norms
    (`model.block.placement`). They override `before` and `after`, or `around`. A subclass with a
    wider residual stream also overrides `enter`, `make_last`, `leave` and `multi_token_prediction`.
    """

    switches = ("zero_centered_norm",)
    # The module of `model.ple`, which adds an embedding of the tokens before the mixer. `Qwen3Next`
    # sets it in the layers that have one.
    embedding: nnx.Module | None = None
    multi_token_prediction = MultiTokenPrediction

    def __init__(
        self, config: ModelConfig, mixer: str, sparse: bool, make: Make, layers: tuple[int, ...]
    ):
        self.config = config
        self.mixer_norm = self.make_norm(make)
        self.mixer = mixer_class(mixer)(config, make, layers)
        self.mlp_norm = self.make_norm(make)
        mlp = config.moe.mixture() if sparse else config.block.resolve("mlp")
        self.mlp = mlp(config, make)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict[str, Any], dict | None]:
        """Applies the layer: x [B, T, D] → (x, auxiliary outputs, cache after these tokens).

        The auxiliary outputs are the MLP's (see `SparseMoE`; {} for a dense one), and "mixer_loss"
        [] if the mixer has a loss of its own. With `context.collect_stats` they also hold
        "diagnostics": the measurements of the mixer and the MLP, and over the tokens that count
        activation_max [], the largest |x|, and activation_median [], the mean of each token's
        median |x|.
        """

        # Keeps x unsplit along the mesh axis `tensor`. Without this constraint XLA's partitioner
        # might split time along `tensor` between the matrix products.
        def whole(x_BTD):
            return constrain(x_BTD, context.mesh, "batch", context.time, None)

        sparse = isinstance(self.mlp, SparseMoE)
        # Diagnostics are means over all tokens, so with them all rows form one group.
        several = sparse and cache is None and not context.collect_stats
        mix = (
            self.mixer.each_token
            if context.return_all_states and self.mixer.cache_kind == "state"
            else self.mixer
        )
        if self.embedding is not None:
            x_BTD, cache, embedding_cache = self._add_embedding(x_BTD, context, cache)
        xs_BTD, contexts, mixer_losses = [], [], []
        for rows_BTD, own in split_rows(
            x_BTD, context, row_groups(x_BTD, self.config, context.mesh) if several else 1
        ):
            input_BTD, add = self.around(rows_BTD, "mixer", own)
            mixed_BTD, diagnostics, cache = mix(whole(input_BTD), own, cache)
            xs_BTD.append(save_for_backward(whole(add(mixed_BTD)), "mixer"))
            contexts.append(own)
            if "mixer_loss" in diagnostics:
                mixer_losses.append(diagnostics.pop("mixer_loss"))
        inputs_BTD, adds = zip(
            *(self.around(rows_BTD, "mlp", own) for rows_BTD, own in zip(xs_BTD, contexts))
        )
        inputs_BTD = [whole(input_BTD) for input_BTD in inputs_BTD]
        y_BTD, aux = self.mlp(inputs_BTD, contexts) if sparse else self.mlp(inputs_BTD[0], context)
        x_BTD = merge_rows(
            [whole(add(y)) for add, y in zip(adds, y_BTD if sparse else [y_BTD])], context
        )
        if mixer_losses:
            aux["mixer_loss"] = sum(mixer_losses)
        if context.collect_stats:
            aux["diagnostics"] = (
                diagnostics | aux.get("diagnostics", {}) | _activations(x_BTD, context.stats_mask)
            )
        if self.embedding is not None and cache is not None:
            cache = cache | {"embedding": embedding_cache}
        return x_BTD, aux, cache

    def _add_embedding(self, x_BTD: jax.Array, context: Context, cache: dict | None):
        """Adds the layer's embedding to x. Returns (x, the mixer's cache, the embedding's
        cache).
        """
        own = None
        if cache is not None:
            own = cache["embedding"]
            cache = {name: leaf for name, leaf in cache.items() if name != "embedding"}
        added_BTD, own = self.embedding(x_BTD, context, own)
        return x_BTD + added_BTD, cache, own

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


def _activations(x_BTD: jax.Array, counted_BT: jax.Array | None) -> dict[str, jax.Array]:
    """Returns activation_max and activation_median as `Block.__call__` describes them.
    `counted_BT`: the mask of the tokens that count; None: all count.
    """
    size_BTD = jnp.abs(x_BTD.astype(jnp.float32))
    largest = jnp.max(jnp.max(size_BTD, axis=-1), where=counted_BT, initial=0.0)
    # The median is taken over each token's own features, because a median over all tokens would
    # have to sort across devices.
    return {
        "activation_max": largest,
        "activation_median": token_mean(jnp.median(size_BTD, axis=-1), counted_BT),
    }
