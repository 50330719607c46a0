"""One decoder layer, and the mixers that a model's layers name."""

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
    """The class of the mixer called `name`, as a layer's setting names it.

    Raises:
      UserError: the class cannot be imported, or declares its settings in the obsolete form, as a
        tuple `settings`.
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
    """Raises UserError if a mixer refuses the settings, or if a switch differs from its default
    and no layer of the model reads it.
    """
    used = {name: mixer_class(name) for name, _ in config.layer_kinds}
    for mixer in used.values():
        mixer.check(config)
    read = {setting for mixer in used.values() for setting in mixer.switches} | set(Block.switches)
    others = ("output_gate_type", "delta_rule", "yarn_factor", "block.rope_scaling")
    for setting in (*ABLATIONS, *others):
        value, default = map(operator.attrgetter(setting), (config, ModelConfig()))
        require(
            value == default or setting in read,
            f"model.{setting} = {value!r}: no layer of this model reads it (its mixers: "
            f"{', '.join(used)}): expected {default!r}",
        )


# {setting that only some mixers read: the switch that turns off the part of the mixer that reads
# it}. If no mixer reads such a setting, `runs.unread` refuses it where a user gives it, but not
# where the model of a config file has it.
GIVEN = {"decay_init": "decay_gate", "linear_conv_kernel_dim": "short_convolution"}


def unread_by_mixers(config: ModelConfig) -> dict[str, str]:
    """{setting of `GIVEN` that no layer of the model reads: why no layer reads it}."""
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
    """Whether a mixer of the model trains an indexer by a loss of its own."""
    return any(mixer_class(name).has_loss for name, _ in config.layer_kinds)


def partial_ablations(config: ModelConfig) -> list[str]:
    """One line of text for each ablation that reaches only some layers: which ones it reaches."""
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
    """[0, 1, 2, 4] is "0-2, 4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def versions(config: ModelConfig) -> dict[str, int]:
    """{name: version of its mathematics} for every mixer, and every other part of a block, that the
    model's settings name ("gdn2", "block.norm = rms"). The version is 1 if the part declares none.
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
    """What the layers ask of a mesh (see `sharding.mesh.check_divides`): the settings that
    `tensor` must divide, the tokens read of a neighbour, and the parts that need whole rows.
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
    """The cache of one layer before the first token: its mixer's, and under "embedding" that of
    the layer's embedding, if it has one.
    """
    cache = mixer_class(config.mixers[layer]).init_cache(config, batch, length)
    if config.ple.number(layer) is None:
        return cache
    return cache | {"embedding": config.ple.module().init_cache(config, batch)}


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). `layers`: numbers of the layers stacked in it.

    What goes from layer to layer is the residual stream, here as wide as the model. Another
    placement overrides `before` and `after`, or `around`; one with a wider stream also `enter`,
    `make_last`, `leave` and `multi_token_prediction`.
    """

    switches = ("zero_centered_norm",)
    # a module that adds an embedding of the tokens before the mixer; the model gives it to a layer
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
        """→ (x, auxiliary outputs of the MLP, cache).

        With `context.collect_stats` the auxiliary outputs hold "diagnostics": those of the mixer
        and the MLP, and activation_max [] = max |x| over the counted tokens, activation_median [] =
        the mean over tokens of median |x|.
        """

        # Keeps x whole along the mesh axis `tensor`. Without this constraint the partitioner might
        # split time along it between the matmuls.
        def whole(x_BTD):
            return constrain(x_BTD, context.mesh, "batch", context.time, None)

        sparse = isinstance(self.mlp, SparseMoE)
        # diagnostics are means over all tokens, so they need all rows in one group
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
            input_BTD, add = self.around(rows_BTD, "mixer")
            mixed_BTD, diagnostics, cache = mix(whole(input_BTD), own, cache)
            xs_BTD.append(save_for_backward(whole(add(mixed_BTD))))
            contexts.append(own)
            if "mixer_loss" in diagnostics:
                mixer_losses.append(diagnostics.pop("mixer_loss"))
        inputs_BTD, adds = zip(*(self.around(rows_BTD, "mlp") for rows_BTD in xs_BTD))
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
        """(x with the layer's embedding added, the mixer's cache, the embedding's cache)."""
        own = None
        if cache is not None:
            own = cache["embedding"]
            cache = {name: leaf for name, leaf in cache.items() if name != "embedding"}
        added_BTD, own = self.embedding(x_BTD, context, own)
        return x_BTD + added_BTD, cache, own

    def make_norm(self, make: Make) -> nnx.Module | nnx.Param:
        """The parameters with which `before` and `after` treat the mixer, or the MLP."""
        return make.norm(self.config.hidden_size)

    def around(self, x_BTD: jax.Array, part: str) -> tuple[jax.Array, Callable]:
        """The input of `part`, and a function: the part's output → the residual stream after it. A
        placement whose two halves share a computation overrides this in place of `before` and
        `after`.
        """
        return self.before(x_BTD, part), lambda y_BTD: self.after(x_BTD, y_BTD, part)

    def before(self, x_BTD: jax.Array, part: str) -> jax.Array:
        """The input of `part`, "mixer" or "mlp", computed from the residual stream x [B, T, D]."""
        return rms_norm(x_BTD, getattr(self, f"{part}_norm")[...], self.config)

    def after(self, x_BTD: jax.Array, y_BTD: jax.Array, part: str) -> jax.Array:
        """The residual stream after `part`: x is the stream before it, y the part's output."""
        return x_BTD + y_BTD

    @staticmethod
    def enter(x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        """The residual stream before the first layer, of the embeddings [B, T, D]."""
        return x_BTD

    @staticmethod
    def make_last(config: ModelConfig, make: Make) -> nnx.Module | nnx.Param:
        """The parameters of `leave`."""
        return make.norm(config.hidden_size)

    @staticmethod
    def leave(x_BTD: jax.Array, last: Any, config: ModelConfig) -> jax.Array:
        """What the head reads [B, T, D], of the residual stream after the last layer."""
        return rms_norm(x_BTD, last[...], config)


def _activations(x_BTD: jax.Array, counted_BT: jax.Array | None) -> dict[str, jax.Array]:
    size_BTD = jnp.abs(x_BTD.astype(jnp.float32))
    largest = jnp.max(jnp.max(size_BTD, axis=-1), where=counted_BT, initial=0.0)
    # The median of each token's own features: a median over all tokens would be a sort across
    # devices.
    return {
        "activation_max": largest,
        "activation_median": token_mean(jnp.median(size_BTD, axis=-1), counted_BT),
    }
