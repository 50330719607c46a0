"""The registry: tables that map names in settings to classes and functions.

There is one table for each kind of part (mixers, norms, optimizers, …). A table maps names to
import strings of the form "package.module:Name". Because import strings are only text, checking a
config imports no parts, and a run imports only the parts that it uses. Only this file contains the
import strings of this package's parts.

A setting whose values are the names of a table also accepts an import string of the user's own
code, "my_package.module:Name" (docs/extending.md). Importing a part by an import string runs the
code of its package. Therefore only the user may give an import string: in a config file, in a flag,
or in Python. A run.json, a Hugging Face directory or another file that this package reads may
contain an import string only if the string's package is trusted (by the function `trust` or the
flag --trust).
"""

import importlib
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean, error_message, require

# Token mixers, for model.layer_types, model.linear_mixer and model.full_mixer.
MIXERS = {
    "gated_deltanet": "qwen3next_jax.model.gated_deltanet:GatedDeltaNet",
    "gated_attention": "qwen3next_jax.model.gated_attention:GatedAttention",
    "kda": "qwen3next_jax.zoo.kda:KDA",
    "mamba2": "qwen3next_jax.zoo.state_space:Mamba2",
    "sliding_window": "qwen3next_jax.zoo.sliding_window:SlidingWindowAttention",
    "gla": "qwen3next_jax.zoo.gated_linear:GLA",
    "hgrn2": "qwen3next_jax.zoo.gated_linear:HGRN2",
    "rwkv6": "qwen3next_jax.zoo.rwkv:RWKV6",
    "mla": "qwen3next_jax.zoo.mla:MLA",
    "linear": "qwen3next_jax.zoo.linear_attention:LinearAttention",
    "retnet": "qwen3next_jax.zoo.linear_attention:RetNet",
    "lightning": "qwen3next_jax.zoo.linear_attention:LightningAttention",
    "gated_retention": "qwen3next_jax.zoo.linear_attention:GatedRetention",
    "gated_rfa": "qwen3next_jax.zoo.linear_attention:GatedRFA",
    "mlstm": "qwen3next_jax.zoo.mlstm:MLSTM",
    "gsa": "qwen3next_jax.zoo.gated_slots:GSA",
    "abc": "qwen3next_jax.zoo.gated_slots:ABC",
    "dfw": "qwen3next_jax.zoo.gated_linear:DecayingFastWeights",
    "mamba": "qwen3next_jax.zoo.state_space:Mamba",
    "rwkv4": "qwen3next_jax.zoo.rwkv:RWKV4",
    "gdn2": "qwen3next_jax.zoo.kda:GDN2",
    "gated_deltaproduct": "qwen3next_jax.zoo.gated_deltaproduct:GatedDeltaProduct",
    "s4d": "qwen3next_jax.zoo.state_space:S4D",
    "ttt": "qwen3next_jax.zoo.test_time_training:TTT",
    "titans": "qwen3next_jax.zoo.test_time_training:Titans",
    "lstm": "qwen3next_jax.zoo.rnn:LSTM",
    "rnn": "qwen3next_jax.zoo.rnn:RNN",
    "hyena": "qwen3next_jax.zoo.hyena:Hyena",
    "bahdanau": "qwen3next_jax.zoo.additive_attention:Bahdanau",
    "luong": "qwen3next_jax.zoo.additive_attention:Luong",
    "biased_attention": "qwen3next_jax.zoo.biased_attention:BiasedAttention",
    "sink_attention": "qwen3next_jax.zoo.biased_attention:SinkAttention",
    "nope_attention": "qwen3next_jax.zoo.pairwise:NoPEAttention",
    "masked_attention": "qwen3next_jax.zoo.pairwise:MaskedAttention",
    "alibi": "qwen3next_jax.zoo.pairwise:ALiBi",
    "t5_bias": "qwen3next_jax.zoo.pairwise:T5BiasAttention",
    "rerope": "qwen3next_jax.zoo.long_context:ReRoPE",
    "leaky_rerope": "qwen3next_jax.zoo.long_context:LeakyReRoPE",
    "dynamic_ntk": "qwen3next_jax.zoo.long_context:DynamicNTKAttention",
    "lambda_window": "qwen3next_jax.zoo.long_context:LambdaWindowAttention",
    "parallel_windows": "qwen3next_jax.zoo.long_context:ParallelWindowsAttention",
    "selected_tokens": "qwen3next_jax.zoo.long_context:LambdaWindowWithSelectedKeys",
    "qsa": "qwen3next_jax.zoo.qsa:QSA",
}
# Placements of a block's norms, for model.block.placement; N is a norm, f the mixer or the MLP.
PLACEMENTS = {
    "pre": "qwen3next_jax.model.block:Block",  # x + f(N(x))
    "post": "qwen3next_jax.zoo.block_parts:PostNorm",  # N(x + f(x))
    "olmo2": "qwen3next_jax.zoo.block_parts:Olmo2Norm",  # x + N(f(x))
    # recurrent layers x + f(N(x)), layers with attention x + N(f(x))
    "olmo_hybrid": "qwen3next_jax.zoo.block_parts:OlmoHybridNorm",
    "sandwich": "qwen3next_jax.zoo.block_parts:SandwichNorm",  # x + N'(f(N(x)))
    "deep": "qwen3next_jax.zoo.block_parts:DeepNorm",  # N(α x + f(x))
    # several streams: f reads a mixture of them, and gates add its output to each (model.streams)
    "gated_residual": "qwen3next_jax.zoo.gated_residual:GatedResidual",
    # several streams: a doubly stochastic matrix mixes them around f (model.streams)
    "mhc": "qwen3next_jax.zoo.hyper_connections:MHC",
    # f reads a weighted mean of the outputs of earlier blocks of layers (model.streams)
    "attention_residual": "qwen3next_jax.zoo.attention_residual:AttentionResidual",
}
# The placements whose residual stream is wider than the model → the settings of model.streams that
# each of them reads.
STREAM_SETTINGS = {
    "gated_residual": ("hc_count", "hc_lowrank"),
    "mhc": ("hc_count", "sinkhorn_iterations"),
    "attention_residual": ("block_layers",),
}
# Dense MLPs: model.block.mlp.
MLPS = {
    "swiglu": "qwen3next_jax.model.moe:DenseMLP",
    "geglu": "qwen3next_jax.zoo.block_parts:GeGLU",
    "gelu": "qwen3next_jax.zoo.block_parts:GELUMLP",
    "relu": "qwen3next_jax.zoo.block_parts:ReLUMLP",
    "relu2": "qwen3next_jax.zoo.block_parts:SquaredReLUMLP",
    "none": "qwen3next_jax.zoo.block_parts:NoMLP",
}
# Mixtures of experts, for model.moe.experts. The names say what an expert computes.
EXPERTS = {
    "swiglu": "qwen3next_jax.model.moe:SparseMoE",
    "relu2": "qwen3next_jax.zoo.experts:SquaredReLUExperts",
    "clipped_swiglu": "qwen3next_jax.zoo.experts:ClippedSwiGLUExperts",
}
# Norms, for model.block.norm, which does not change the norms inside recurrent layers.
NORMS = {
    "rms": "qwen3next_jax.model.layers:rms_norm",
    "layer": "qwen3next_jax.zoo.block_parts:LayerNorm",  # subtracts the mean, and has a bias
}
# Positions that are added to the embeddings, for model.block.positions. (Rotations are part of the
# mixers.)
POSITIONS = {
    "none": "qwen3next_jax.model.positions:NoPositions",
    "sinusoidal": "qwen3next_jax.zoo.block_parts:SinusoidalPositions",
    "learned": "qwen3next_jax.zoo.block_parts:LearnedPositions",
}
# Ways to stretch rotary positions to texts `yarn_factor` times as long, for
# model.block.rope_scaling.
ROPE_SCALINGS = {
    "yarn": "qwen3next_jax.model.layers:yarn_frequency_scale",
    "linear": "qwen3next_jax.zoo.block_parts:linear_rope_scaling",
    "ntk": "qwen3next_jax.zoo.block_parts:ntk_rope_scaling",
    "truncated": "qwen3next_jax.zoo.block_parts:truncated_rope_scaling",
}
# Embeddings that a layer adds to the residual stream before its mixer, for model.ple.embedding.
LAYER_EMBEDDINGS = {
    "ngram": "qwen3next_jax.zoo.ngram_embedding:NgramEmbedding",
}
# Optimizers, for optimizer.name. Settings that only one optimizer has are a group of
# `OptimizerConfig` with the optimizer's name.
OPTIMIZERS = {
    "adamw": "qwen3next_jax.training.optimizers.adamw:direction",
    "muon": "qwen3next_jax.training.optimizers.muon:direction",
}
# Evaluations, for eval.suites and the flag --suite of eval.py.
EVALUATIONS = {
    "heldout": "qwen3next_jax.evals.heldout:Heldout",
    "position": "qwen3next_jax.evals.perplexity:LossByPosition",
    "mqar": "qwen3next_jax.evals.recall:AssociativeRecall",
    "induction": "qwen3next_jax.evals.recall:Induction",
    "copy": "qwen3next_jax.evals.recall:Copy",
    "niah": "qwen3next_jax.evals.recall:NeedleInAHaystack",
    "sinks": "qwen3next_jax.evals.sinks:AttentionSinks",
    "state": "qwen3next_jax.evals.state:StateTracking",
}
# Sources of training data, for data.source.
DATA_SOURCES = {
    "text": "qwen3next_jax.data.pipeline:TextData",
    "mqar": "qwen3next_jax.data.synthetic:SyntheticData",
    "induction": "qwen3next_jax.data.synthetic:SyntheticData",
    "copy": "qwen3next_jax.data.synthetic:SyntheticData",
    "backcopy": "qwen3next_jax.data.synthetic:SyntheticData",
    **dict.fromkeys(
        ("parity", "modular_addition", "s3", "a5", "s5", "state_recall"),
        "qwen3next_jax.data.state_tasks:StateData",
    ),
    "recorded": "qwen3next_jax.data.recorded:RecordedData",
}
# Tokenizers besides that of bytes, by the name of the file that data.tokenizer names. They are
# built on data/tokens.py, which therefore cannot import them.
TOKENIZERS = {
    "tokenizer.json": "qwen3next_jax.data.huggingface_tokenizer:HuggingFaceTokenizer",
}
# The sources above whose rows are text, with the tokenizer data.tokenizer.
TEXT_SOURCES = ("text", "recorded")

# Dotted name of a setting that names parts → the table of these parts.
SETTINGS = {
    "model.layer_types": MIXERS,
    "model.linear_mixer": MIXERS,
    "model.full_mixer": MIXERS,
    "model.block.placement": PLACEMENTS,
    "model.block.mlp": MLPS,
    "model.moe.experts": EXPERTS,
    "model.block.norm": NORMS,
    "model.block.positions": POSITIONS,
    "model.block.rope_scaling": ROPE_SCALINGS,
    "model.ple.embedding": LAYER_EMBEDDINGS,
    "optimizer.name": OPTIMIZERS,
    "train.update_rules": {},  # import strings alone: other settings choose this package's rules
    "eval.suites": EVALUATIONS,
    "data.source": DATA_SOURCES,
}

PluginTable = Mapping[str, str]
_IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_trusted: set[str] = set()  # the packages whose import strings files may contain


def is_import_string(name: Any) -> bool:
    """Whether `name` has the form "my_package.module:Name"."""
    return isinstance(name, str) and _IMPORT_STRING.fullmatch(name) is not None


def check_name(table: PluginTable, name: str, setting: str) -> None:
    """Checks that `name` is a valid value of a setting, without importing the part with this name.

    Args:
      table: the table of the setting.
      name: the value of the setting.
      setting: the setting's dotted name, such as "data.source", for error messages.

    Raises:
      UserError: the table does not have `name`, and `name` is not an import string.
    """
    # The message is made for a mistake alone, because it takes milliseconds to find a similar name,
    # and every layer resolves its names when it is traced.
    if name not in table and not is_import_string(name):
        raise UserError(
            f"{setting} = {name!r}: expected one of {', '.join(table)}, or "
            f"'my_package.module:Name' of your own{did_you_mean(str(name), table)}"
        )


def resolve(table: PluginTable, name: str, setting: str) -> Any:
    """Returns the class or function that `name`, the value of a setting, stands for, after
    importing its module.

    Args:
      table: the table of the setting.
      name: a name in the table, or an import string.
      setting: the setting's dotted name, for error messages.

    Raises:
      UserError: `name` is neither in the table nor an import string, or the import fails.
    """
    check_name(table, name, setting)
    import_string = table.get(name, name)
    module, _, attribute = import_string.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module's code can raise anything
        reason = f"{type(error).__name__}: {error_message(error)}{_error_place(error)}"
        if name not in table and isinstance(error, NameError):
            raise UserError(
                f"{setting} = {name!r} cannot be imported ({reason}): add the import or correct "
                "the name; docs/extending.md shows whole files"
            ) from error
        if name not in table:
            raise UserError(
                f"{setting} = {name!r} cannot be imported ({reason}): correct the name or the "
                "module, or start in a folder from which Python can import it"
            ) from error
        if isinstance(error, ModuleNotFoundError) and _is_missing_folder(error.name, module):
            raise UserError(
                f"{setting} = {name!r}: this installation does not have "
                f"{error.name.replace('.', '/')}: restore that folder, or choose another"
            ) from error
        raise UserError(
            f"{setting} = {name!r}: the registry's {name!r}: {import_string!r} cannot be "
            f"imported ({reason}): correct the line or the module"
        ) from error


def _error_place(error: Exception) -> str:
    """Returns "; FILE, line N", the place that raised an error while a module was imported. Returns
    "" if the module was not found, or if this file raised the error.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if frame.filename.startswith("<frozen") or frame.filename == __file__:
        return ""
    return f"; {frame.filename}, line {frame.lineno}"


def _is_missing_folder(missing: str | None, module: str) -> bool:
    """Whether `missing`, the module that could not be found, is a folder of this package that
    contains `module`.
    """
    return bool(missing) and missing.startswith("qwen3next_jax.") and module.startswith(missing)


def trust(package: str) -> None:
    """Allows files that this package reads to contain import strings of `package`.

    Args:
      package: the name of a top-level package, such as "my_package".
    """
    _trusted.add(package)


def trust_user_settings(settings: Mapping[str, Any]) -> None:
    """Trusts the packages of all import strings in nested settings that a user wrote."""
    for _, name in _find_import_strings(settings):
        trust(_package_of(name))


def trust_flags_text(settings: Mapping[str, Any]) -> str:
    """Returns the flags --trust=PACKAGE, each with a space before it, that a command needs in order
    to read these nested settings; "" if the settings contain no import strings.
    """
    packages = {_package_of(name): None for _, name in _find_import_strings(settings)}
    return "".join(f" --trust={package}" for package in packages)


def check_trusted(settings: Mapping[str, Any], where: str) -> None:
    """Checks that nested settings, which were read from a file, name only trusted packages.

    Args:
      settings: the settings, as a nested dict.
      where: the name of the file, for messages.

    Raises:
      UserError: the value of a setting is an import string whose package is not trusted.
    """
    for setting, name in _find_import_strings(settings):
        package = _package_of(name)
        require(
            package in _trusted,
            f"{where}: {setting} = {name!r} would run code of the package {package!r}: if you "
            f"trust it, give --trust={package} (in Python: "
            f"qwen3next_jax.config.registry.trust({package!r}))",
        )


def _package_of(import_string: str) -> str:
    """Returns the top-level package of an import string."""
    return re.split(r"[.:]", import_string)[0]


def _find_import_strings(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name of a setting, import string) for all import strings in nested
    settings.
    """
    for key, value in settings.items():
        setting = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _find_import_strings(value, f"{setting}.")
        elif setting in SETTINGS:
            for name in value if isinstance(value, (list, tuple)) else [value]:
                if is_import_string(name):
                    yield setting, name
