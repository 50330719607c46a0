"""Which tensors of a Hugging Face checkpoint hold a model's parameters: the layers' own entries,
under the names of their layers.

Every parameter is a transposition of its tensors: moving its axes gives (tensors…, rows…,
columns…), and each tensor is one slice of that, flattened to its own shape, its rows perhaps in
another order. So an entry (`model.hf_entries`) is data, not a pair of functions that might
disagree.
"""

from collections.abc import Iterator
from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.interop import kimi
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.block import Block, mixer_class
from qwen3next_jax.model.hf_entries import Entry
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Declared


class Parameter(NamedTuple):
    """One leaf of the parameter tree. `prefixes` are the layers stacked along its first axis, or
    one when not stacked.
    """

    path: str
    entry: Entry
    prefixes: tuple[str, ...]
    declared: Declared

    @property
    def shape(self) -> tuple[int, ...]:
        return self.declared.stack + self.declared.shape


def trunk(config: ModelConfig) -> str:
    """What the names of the trunk's tensors begin with."""
    return "model.language_model." if config.hf_form == "qwen3_5" else "model."


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of a model with this `config`, which has a Hugging Face form
    (`check_hf_form`), as `config.hf_form` and `config.hf_fused_experts` name and cut its
    tensors.
    """
    found = declared(config)

    def group(
        path: str, prefixes: tuple[str, ...], entries: Iterator[Entry]
    ) -> Iterator[Parameter]:
        fused = ("mtp" if path.startswith("mtp/") else "trunk") in config.hf_fused_experts
        for entry in entries:
            stored = entry._replace(slices=(entry.fused,)) if fused and entry.fused else entry
            yield Parameter(path + entry.path, stored, prefixes, found[path + entry.path])

    for entry in Qwen3Next.hf_entries(config):
        yield from group("", ("" if entry.path == "head" else trunk(config),), iter([entry]))
    for position, layers in enumerate(config.stacks):
        prefixes = tuple(f"{trunk(config)}layers.{i}." for i in layers)
        yield from group(
            f"layers/{position}/",
            prefixes,
            Block.hf_entries(config, *config.layer_kinds[layers[0]]),
        )
    if config.mtp_depth:
        yield from group("mtp/", ("mtp.",), MultiTokenPrediction.hf_entries(config))
        yield from group(
            "mtp/block/", ("mtp.layers.0.",), Block.hf_entries(config, *config.layer_kinds[-1])
        )


def check_hf_form(config: ModelConfig) -> None:
    """Raises UserError where transformers has no such model: an ablated part, or layers whose
    mixer it does not have (all named).
    """
    of_kimi = config.hf_form == "kimi_linear"

    def layers_with(name: str) -> str:
        numbers = [str(i) for i, mixer in enumerate(config.mixers) if mixer == name]
        return ", ".join(numbers) or "of MTP"

    without = [
        f"{name} (layers {layers_with(name)})"
        for name in dict.fromkeys(kind for kind, _ in config.layer_kinds)
        if mixer_class(name).hf_entries is None or (name in kimi.MIXERS.values()) != of_kimi
    ]
    if without:
        raise UserError(
            f"this model has layers without a Hugging Face form: {'; '.join(without)}: expected "
            "mixers that have one in "
            f"{config.hf_form}{'' if of_kimi else ' (kda and mla: in kimi_linear, --form)'}"
        )
    found = {f"block.{name}": value for name, value in vars(config.block).items()}
    found["mixer.qk_norm_over"] = config.settings_of("gated_attention").qk_norm_over
    defaults = {f"block.{name}": value for name, value in vars(BlockConfig()).items()}
    defaults["mixer.qk_norm_over"] = "head"
    for name, value in found.items():
        default = defaults[name]
        require(
            value == default,
            f"model.{name} = {value!r}: transformers' {'Kimi Linear' if of_kimi else 'Qwen3Next'} "
            f"has {default!r} alone, so this model has no Hugging Face form",
        )
    if of_kimi:
        return kimi.check(config)
    require(
        config.moe == MoEConfig(),
        f"model.moe: {config.hf_form} has no such router or shared expert: expected the defaults",
    )
    if config.ablated:
        raise UserError(
            f"model.{config.ablated[0]} = False: transformers' Qwen3Next always has it, so this "
            "model has no Hugging Face form"
        )
    for name in (
        ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers") if config.num_experts else ()
    ):
        value, default = getattr(config, name), ModelConfig.__dataclass_fields__[name].default
        require(
            config.hf_form == "qwen3_next" or value == default,
            f"model.{name} = {value!r}: {config.hf_form} has no such models: expected "
            f"{default!r}, or the form qwen3_next",
        )
    if config.mtp_depth and config.full_mixer != "gated_attention":
        raise UserError(
            f"model.full_mixer = {config.full_mixer!r}: the multi-token prediction module has a "
            "Hugging Face form with gated_attention alone: expected that, or model.mtp_depth = 0"
        )
