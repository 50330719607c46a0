"""Every name that a setting may give to a part of the program, and the part that it stands for.

One table per kind of part: a name, and where its code is ("package.module:Name"). The tables hold
strings, so that they can stand here, below the rooms that they name: a config is checked without
an import, and a run imports only the parts that it uses. No other file names a plugin.

Where a setting takes a name of a table, it also takes "my_package.module:Name", a part of the
user's own (docs/extending.md). To import such a part is to run its code. So a name of this form
counts only where a user wrote it: in a config file, in a flag, in Python. The records that
this package reads (a run.json, a Hugging Face directory) may name one only if its package is
trusted (`trust`, the flag --trust).
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean, error_message, require

# Token mixers: model.layer_types, model.linear_mixer, model.full_mixer.
MIXERS = {
    "gated_deltanet": "qwen3next_jax.model.gated_deltanet:GatedDeltaNet",
    "gated_attention": "qwen3next_jax.model.gated_attention:GatedAttention",
    "kda": "qwen3next_jax.zoo.kda:KDA",
    "mamba2": "qwen3next_jax.zoo.state_space:Mamba2",
    "sliding_window": "qwen3next_jax.zoo.sliding_window:SlidingWindow",
    "gla": "qwen3next_jax.zoo.gated_linear:GLA",
    "hgrn2": "qwen3next_jax.zoo.gated_linear:HGRN2",
    "rwkv6": "qwen3next_jax.zoo.rwkv:RWKV6",
    "mla": "qwen3next_jax.zoo.mla:MLA",
    "linear": "qwen3next_jax.zoo.linear_attention:Linear",
    "retnet": "qwen3next_jax.zoo.linear_attention:RetNet",
    "lightning": "qwen3next_jax.zoo.linear_attention:Lightning",
    "gated_retention": "qwen3next_jax.zoo.linear_attention:GatedRetention",
    "gated_rfa": "qwen3next_jax.zoo.linear_attention:GatedRFA",
    "mlstm": "qwen3next_jax.zoo.mlstm:MLSTM",
    "gsa": "qwen3next_jax.zoo.gated_slots:GSA",
    "abc": "qwen3next_jax.zoo.gated_slots:ABC",
    "dfw": "qwen3next_jax.zoo.gated_linear:DFW",
    "mamba": "qwen3next_jax.zoo.state_space:Mamba",
    "rwkv4": "qwen3next_jax.zoo.rwkv:RWKV4",
    "gdn2": "qwen3next_jax.zoo.kda:GDN2",
    "s4d": "qwen3next_jax.zoo.state_space:S4D",
    "ttt": "qwen3next_jax.zoo.test_time_training:TTT",
    "titans": "qwen3next_jax.zoo.test_time_training:Titans",
    "lstm": "qwen3next_jax.zoo.rnn:LSTM",
    "rnn": "qwen3next_jax.zoo.rnn:RNN",
    "hyena": "qwen3next_jax.zoo.hyena:Hyena",
    "bahdanau": "qwen3next_jax.zoo.additive_attention:Bahdanau",
    "luong": "qwen3next_jax.zoo.additive_attention:Luong",
    "nope_attention": "qwen3next_jax.zoo.pairwise:NoPEAttention",
    "masked_attention": "qwen3next_jax.zoo.pairwise:Masked",
    "alibi": "qwen3next_jax.zoo.pairwise:ALiBi",
    "t5_bias": "qwen3next_jax.zoo.pairwise:T5Bias",
    "rerope": "qwen3next_jax.zoo.long_context:ReRoPE",
    "leaky_rerope": "qwen3next_jax.zoo.long_context:LeakyReRoPE",
    "dynamic_ntk": "qwen3next_jax.zoo.long_context:DynamicNTK",
    "lambda_window": "qwen3next_jax.zoo.long_context:LambdaWindow",
    "parallel_windows": "qwen3next_jax.zoo.long_context:ParallelWindows",
    "selected_tokens": "qwen3next_jax.zoo.long_context:SelectedTokens",
    "qsa": "qwen3next_jax.zoo.qsa:QSA",
}
# Where the norms around a mixer and an MLP stand; N is a norm, f the mixer or the MLP:
# model.block.placement.
PLACEMENTS = {
    "pre": "qwen3next_jax.model.block:Block",  # x + f(N(x))
    "post": "qwen3next_jax.zoo.block_parts:Post",  # N(x + f(x))
    "olmo2": "qwen3next_jax.zoo.block_parts:Olmo2",  # x + N(f(x))
    "sandwich": "qwen3next_jax.zoo.block_parts:Sandwich",  # x + N'(f(N(x)))
    "deep": "qwen3next_jax.zoo.block_parts:Deep",  # N(α x + f(x))
    # several streams, mixed for f and written by f through gates: model.streams
    "gated_residual": "qwen3next_jax.zoo.gated_residual:GatedResidual",
}
# Those of them that have several residual streams (model.streams).
WITH_STREAMS = ("gated_residual",)
# Dense MLPs; experts are SwiGLU in every model: model.block.mlp.
MLPS = {
    "swiglu": "qwen3next_jax.model.moe:DenseMLP",
    "geglu": "qwen3next_jax.zoo.block_parts:GeGLU",
    "gelu": "qwen3next_jax.zoo.block_parts:GELU",
    "relu": "qwen3next_jax.zoo.block_parts:ReLU",
    "relu2": "qwen3next_jax.zoo.block_parts:SquaredReLU",
    "none": "qwen3next_jax.zoo.block_parts:NoMLP",
}
# Every norm but the recurrent layers' own: model.block.norm.
NORMS = {
    "rms": "qwen3next_jax.model.layers:rms_norm",
    "layer": "qwen3next_jax.zoo.block_parts:LayerNorm",  # minus the mean, and with a bias
}
# Positions that are added to the embeddings; rotations belong to the mixers:
# model.block.positions.
POSITIONS = {
    "none": "qwen3next_jax.model.positions:NoPositions",
    "sinusoidal": "qwen3next_jax.zoo.block_parts:Sinusoidal",
    "learned": "qwen3next_jax.zoo.block_parts:Learned",
}
# How rotary positions reach `yarn_factor` times as far: model.block.rope_scaling.
ROPE_SCALINGS = {
    "yarn": "qwen3next_jax.model.layers:yarn",
    "linear": "qwen3next_jax.zoo.block_parts:linear",
    "ntk": "qwen3next_jax.zoo.block_parts:ntk",
    "truncated": "qwen3next_jax.zoo.block_parts:truncated",
}
# What a layer adds to the residual stream before its mixer, of the tokens: model.ple.embedding.
LAYER_EMBEDDINGS = {
    "ngram": "qwen3next_jax.zoo.ngram_embedding:NgramEmbedding",
}
# Optimizers: optimizer.name. A group of settings of its own stands in `OptimizerConfig` under its
# name.
OPTIMIZERS = {
    "adamw": "qwen3next_jax.training.optimizers.adamw:direction",
    "muon": "qwen3next_jax.training.optimizers.muon:direction",
}
# Evaluations: eval.suites, and eval.py --suite.
EVALUATIONS = {
    "heldout": "qwen3next_jax.evals.heldout:Heldout",
    "position": "qwen3next_jax.evals.perplexity:Position",
    "mqar": "qwen3next_jax.evals.recall:AssociativeRecall",
    "induction": "qwen3next_jax.evals.recall:Induction",
    "copy": "qwen3next_jax.evals.recall:Copy",
    "niah": "qwen3next_jax.evals.recall:Needles",
    "sinks": "qwen3next_jax.evals.sinks:Sinks",
}
# What a run trains on: data.source.
DATA_SOURCES = {
    "text": "qwen3next_jax.data.pipeline:TrainData",
    "mqar": "qwen3next_jax.data.synthetic:SyntheticData",
    "induction": "qwen3next_jax.data.synthetic:SyntheticData",
    "copy": "qwen3next_jax.data.synthetic:SyntheticData",
    "backcopy": "qwen3next_jax.data.synthetic:SyntheticData",
}

# Every setting that names a part, and its table.
SETTINGS = {
    "model.layer_types": MIXERS,
    "model.linear_mixer": MIXERS,
    "model.full_mixer": MIXERS,
    "model.block.placement": PLACEMENTS,
    "model.block.mlp": MLPS,
    "model.block.norm": NORMS,
    "model.block.positions": POSITIONS,
    "model.block.rope_scaling": ROPE_SCALINGS,
    "model.ple.embedding": LAYER_EMBEDDINGS,
    "optimizer.name": OPTIMIZERS,
    "eval.suites": EVALUATIONS,
    "data.source": DATA_SOURCES,
}

Table = Mapping[str, str]
_IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_trusted: set[str] = set()


def is_import_string(name: Any) -> bool:
    """Whether `name` has the form "my_package.module:Name"."""
    return isinstance(name, str) and _IMPORT_STRING.fullmatch(name) is not None


def check_name(table: Table, name: str, setting: str) -> None:
    """Raises UserError unless the table has `name`, or `name` is an import string; imports
    nothing. `setting` says where it was given, such as "data.source".
    """
    require(
        name in table or is_import_string(name),
        f"{setting} = {name!r}: expected one of {', '.join(table)}, or "
        f"'my_package.module:Name' of your own{did_you_mean(str(name), table)}",
    )


def resolve(table: Table, name: str, setting: str) -> Any:
    """Imports what `name` stands for.

    Raises:
      UserError: the table does not have `name`, or the import fails.
    """
    check_name(table, name, setting)
    place = table.get(name, name)
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module's code can raise anything
        found = f"{type(error).__name__}: {error_message(error)}"
        if name not in table:
            raise UserError(
                f"{setting} = {name!r} cannot be imported ({found}): correct the name or the "
                "module, or start where Python finds it"
            ) from error
        if isinstance(error, ModuleNotFoundError) and _is_missing_room(error.name, module):
            raise UserError(
                f"{setting} = {name!r}: this installation does not have "
                f"{error.name.replace('.', '/')}: restore that folder, or choose another"
            ) from error
        raise UserError(
            f"{setting} = {name!r}: the registry's {name!r}: {place!r} cannot be imported "
            f"({found}): correct the line or the module"
        ) from error


def _is_missing_room(missing: str | None, module: str) -> bool:
    return bool(missing) and missing.startswith("qwen3next_jax.") and module.startswith(missing)


def trust(package: str) -> None:
    """Lets the records that this package reads name parts of `package`, the first part of an
    import string.
    """
    _trusted.add(package)


def is_trusted(package: str) -> bool:
    """Whether `trust` was called with this name."""
    return package in _trusted


def trust_written(settings: Mapping[str, Any]) -> None:
    """Trusts the packages of all parts that nested settings name, which a user wrote."""
    for _, name in _import_strings(settings):
        trust(_package(name))


def check_trusted(settings: Mapping[str, Any], where: str) -> None:
    """Raises UserError where the nested settings of a run, read from a record, name a part of a
    package that is not trusted. `where` names the record.
    """
    for setting, name in _import_strings(settings):
        package = _package(name)
        require(
            package in _trusted,
            f"{where}: {setting} = {name!r} would run code of the package {package!r}: if you "
            f"trust it, give --trust={package} (in Python: "
            f"qwen3next_jax.config.registry.trust({package!r}))",
        )


def _package(import_string: str) -> str:
    return re.split(r"[.:]", import_string)[0]


def _import_strings(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(setting, import string) of all settings that name a part so."""
    for key, value in settings.items():
        setting = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _import_strings(value, f"{setting}.")
        elif setting in SETTINGS:
            for name in value if isinstance(value, (list, tuple)) else [value]:
                if is_import_string(name):
                    yield setting, name
