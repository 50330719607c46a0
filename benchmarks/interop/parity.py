"""How far this implementation is from transformers' own Qwen3-Next, Qwen3.5, Kimi Linear,
Qwen3.8-Flash-Next and Olmo Hybrid, quantity by quantity, in float32.

A reference is a small random-weight checkpoint and what transformers computed from it: of large
arrays every 29th value (`tests/references.py`), which is compared with ours at the same place. With
`--python` (an interpreter that has torch and transformers) the model is also exported, loaded
there, and its logits compared.

    python benchmarks/interop/parity.py [--gradients] [--python=/path/to/python] [--variants]

`--variants` makes further Qwen3.8-Flash-Nexts and Olmo Hybrids (`VARIANTS`) with transformers, in
the interpreter `--python`, and measures them alone.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from benchmarks import harness
from qwen3next_jax import ModelConfig, Qwen3Next, hf_tensors, load_hf, save_hf
from qwen3next_jax.interop import huggingface, layout
from qwen3next_jax.model.layers import Context
from tests import references

REFERENCES = (
    "qwen3_next_tiny",
    "qwen3_5_tiny",
    "qwen3_5_wrapper_tiny",
    "qwen3_5_moe_tiny",
    "qwen3_5_moe_wrapper_fused_mtp_tiny",
    "kimi_linear_tiny",
    "qwen4_exp_text_tiny",
    "qwen4_exp_wrapper_tiny",
    "olmo_hybrid_tiny",
)

# Fields of transformers' configuration that the variants of Qwen3.8-Flash-Next share.
_FLASH_NEXT = {
    "reference": "qwen4_reference",
    "vocab_size": 64,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# The same of Olmo Hybrid. What is missing has transformers' defaults.
_OLMO = {
    "reference": "olmo_hybrid_reference",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "eos_token_id": 3,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}
_INDEXED, _LINEAR, _FULL = "indexed_attention", "linear_attention", "full_attention"
# Variants, by fields of transformers' configuration; "reference": the command of
# transformers_peer.py that makes one; "rows": [B, T]; "wrapper": with a vision tower.
VARIANTS = {
    "five streams, n-grams of 2 to 4 in two layers, ratio 3, attention first": _FLASH_NEXT
    | {
        "layer_types": [_INDEXED, _LINEAR, _LINEAR],
        "hc_count": 5,
        "hc_lowrank": 7,
        "ple_layer_ids": [3, 2],
        "ple_embed_dim": 36,
        "ngram_size": 4,
        "split_ngram_parts": 7,
        "indexer_budget": 24,
        "indexer_compress_ratio": 3,
        "rows": [2, 61],
    },
    "one stream, n-grams of 2 in an attention layer, tied head, rows of two tokens": _FLASH_NEXT
    | {
        "layer_types": [_INDEXED, _LINEAR],
        "hc_count": 1,
        "hc_lowrank": 5,
        "ple_layer_ids": [1],
        "ple_embed_dim": 12,
        "ngram_size": 2,
        "split_ngram_parts": 512,
        "tie_word_embeddings": True,
        "output_gate_type": "sigmoid",
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "rows": [3, 2],
    },
    "three streams, a wrapper with fused experts, several end tokens, ratio 1": _FLASH_NEXT
    | {
        "layer_types": [_LINEAR, _FULL],
        "hc_count": 3,
        "hc_lowrank": 7,
        "ple_layer_ids": [1],
        "ple_embed_dim": 48,
        "ngram_size": 3,
        "split_ngram_parts": 3,
        "output_gate_type": "sigmoid",
        "eos_token_id": [3, 9],
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
        "wrapper": True,
        "rows": [2, 40],
    },
    "Olmo Hybrid: attention first, rotary positions, β in (0, 1)": _OLMO
    | {
        "layer_types": [_FULL, _LINEAR, _LINEAR],
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "linear_allow_neg_eigval": False,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rows": [2, 70],
    },
    "Olmo Hybrid: tied head, convolution over 5 tokens, rows of three": _OLMO
    | {
        "layer_types": [_LINEAR, _LINEAR, _FULL],
        "tie_word_embeddings": True,
        "linear_conv_kernel_dim": 5,
        "rows": [3, 3],
    },
    "Olmo Hybrid: default layers and heads, equal widths, three end tokens": _OLMO
    | {
        "num_hidden_layers": 3,
        "linear_value_head_dim": 9,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [3, 9, 11],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rows": [2, 33],
    },
}


class Row(NamedTuple):
    """One quantity: its error and the largest that passes."""

    group: str
    name: str
    error: float
    bar: float

    @property
    def passes(self) -> bool:
        return self.error <= self.bar  # False for NaN


def measure(reference: str = "qwen3_next_tiny") -> list[Row]:
    """Every quantity of a reference in tests/fixtures against this implementation, export → import,
    and what YaRN makes of longer texts.
    """
    return measure_directory(references.checkpoint(reference), references.cases(reference))


def measure_directory(directory: pathlib.Path, cases: dict[str, np.ndarray]) -> list[Row]:
    """Every quantity of `cases` against what this implementation computes from the checkpoint in
    `directory`.
    """
    model = load_hf(directory)
    params, run = nnx.state(model, nnx.Param), _programs(_text_form(model.config))
    losses, out, gradient = run.gradients(params, jnp.asarray(cases["input_ids"]))
    rows = [
        Row("logits", "logits", _max_error(out.logits, cases["logits"]), 1e-4),
        *(
            Row(
                "MTP logits",
                f"mtp_logits, depth {d}",
                _max_error(logits, cases["mtp_logits"]),
                1e-4,
            )
            for d, logits in enumerate(out.mtp_logits)
        ),
        *(
            Row("losses", name, _relative(value, cases[name]), 1e-5)
            for name, value in losses.items()
            if name in cases
        ),
    ]
    rows += [
        Row("hidden states", f"hidden_states.{i}", _max_error(x, cases[f"hidden_states.{i}"]), 1e-4)
        for i, x in enumerate(out.hidden_states)
    ]
    rows += [
        Row(
            "router logits",
            name := f"router_logits.{i}",
            _max_error(x.reshape(-1, x.shape[-1]), cases[name]),
            1e-4,
        )
        for i, x in enumerate(out.router_logits)
    ]
    ours = hf_tensors(gradient, _text_form(model.config))
    ours = _join_tables(ours | references.fused(ours))
    graded = sorted(name.removeprefix("grad.") for name in cases if name.startswith("grad."))
    rows += [
        Row("gradients", name, _relative_l2(ours[name], cases[f"grad.{name}"]), 1e-3)
        for name in graded
    ]
    rows += [
        Row("choices", name, int(np.sum(np.asarray(found) != cases[name])), 0)
        for name, found in _choices(model, cases, out.hidden_states).items()
    ]
    rows.append(
        Row(
            "greedy",
            "greedy continuation: tokens that differ",
            _greedy_differences(run, params, cases),
            0,
        )
    )
    rows.append(
        Row(
            "export",
            "export → import: tensors whose bits differ",
            round_trip_differences(model, directory),
            0,
        )
    )
    if (directory / "yarn.safetensors").exists():
        rows.append(_yarn_row(model, load_file(directory / "yarn.safetensors")))
    return rows


def variant_rows(python: str, name: str) -> list[Row]:
    """Makes a variant with transformers and measures it. The configuration of Qwen3.8-Flash-Next in
    transformers, and so the export here, refuses one stream and n-grams in attention layers, which
    transformers' model can compute; these checks are left out.
    """
    settings = dict(VARIANTS[name])
    reference = settings.pop("reference")
    if "layer_types" in settings:
        settings["num_hidden_layers"] = len(settings["layer_types"])
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder) / "model"
        (pathlib.Path(folder) / "settings.json").write_text(json.dumps(settings))
        peer = [python, str(harness.TRANSFORMERS_PEER)]
        command = [*peer, reference, str(directory), f"{folder}/settings.json"]
        subprocess.run(command, check=True, capture_output=True)
        with (
            unittest.mock.patch.object(huggingface, "check_hf_form"),
            unittest.mock.patch.object(layout, "check_hf_form"),
        ):
            whole = load_file(directory / "cases.safetensors")
            return measure_directory(
                directory, {name: references.sampled(x) for name, x in whole.items()}
            )


def _text_form(config: ModelConfig) -> ModelConfig:
    """The form that the cases name gradients by. What is computed does not depend on it, so that
    forms share programs.
    """
    return dataclasses.replace(
        config,
        hf_form={"qwen3_5": "qwen3_5_text", "qwen4_exp": "qwen4_exp_text"}.get(
            config.hf_form, config.hf_form
        ),
        hf_fused_experts=(),
    )


class Programs(NamedTuple):
    """gradients: (params, tokens) → (losses, output, gradient of the next token's cross-entropy;
    in the multi-token prediction module that of its own). logits: (params, tokens) → logits.
    """

    gradients: Callable
    logits: Callable


@functools.cache
def _programs(config: ModelConfig) -> Programs:
    graph = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))[0]

    def cross_entropy(logits, targets):
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        )

    def losses(params, tokens):
        out = nnx.merge(graph, params)(tokens, output_hidden_states=True)
        mtp = (
            cross_entropy(out.mtp_logits[0][:, :-1], tokens[:, 2:])
            if out.mtp_logits
            else jnp.zeros(())
        )
        return (cross_entropy(out.logits[:, :-1], tokens[:, 1:]), mtp), out

    def gradients(params, tokens):
        (main, mtp), pull, out = jax.vjp(
            lambda params: losses(params, tokens), params, has_aux=True
        )
        if config.mtp_depth:
            # A loop, so that XLA compiles the backward pass once for both losses.
            both = jax.lax.map(lambda weights: pull(tuple(weights))[0], jnp.eye(2))
            gradient = jax.tree.map(lambda leaf: leaf[0], both)
            gradient["mtp"] = jax.tree.map(lambda leaf: leaf[1], both["mtp"])
        else:
            (gradient,) = pull((jnp.ones(()), jnp.zeros(())))
        return (
            {"cross_entropy": main, "mtp_cross_entropy": mtp, "balance_loss": out.balance_loss},
            out,
            gradient,
        )

    return Programs(
        jax.jit(gradients), jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).logits)
    )


def _choices(model: Qwen3Next, cases: dict[str, np.ndarray], hidden_states) -> dict[str, jax.Array]:
    """What is chosen by integers, under the names of the cases: rows of n-grams, and the tokens
    that the first layer with sparse attention sees.
    """
    config = model.config
    graph, state = nnx.split(model)

    @jax.jit  # operation by operation, it would be 200 programs
    def choices(state, tokens, hidden_states):
        model, found = nnx.merge(graph, state), {}
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if config.ple.layer_ids:
            ids = config.ple.embedding_class().ngram_ids(config, 0, tokens, positions)
            found["ngram_ids.first_ple_layer"] = ids
        if "qsa" in config.mixers:
            layer = config.mixers.index("qsa")
            stack = next(i for i, layers in enumerate(config.layer_stacks) if layer in layers)
            block_graph, params = nnx.split(model.layers[stack])
            which = config.layer_stacks[stack].index(layer)
            block = nnx.merge(block_graph, jax.tree.map(lambda leaf: leaf[which], params))
            context, h = Context(positions, tokens=tokens), hidden_states[layer]
            if block.embedding is not None:
                h = h + block.embedding(h, context)[0]
            found["selected.first_attention_layer"] = block.mixer.attention_mask(
                block.input_and_add_output(h, "mixer", context)[0], context
            )
        return found

    return choices(state, jnp.asarray(cases["input_ids"]), hidden_states)


def _join_tables(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the whole tables of n-gram embeddings, whose rows are divided over several tensors."""
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith(".shard_0.weight")]:
        table = name.removesuffix("shard_0.weight")
        parts = [part for part in tensors if part.startswith(f"{table}shard_")]
        in_order = [tensors[f"{table}shard_{i}.weight"] for i in range(len(parts))]
        joined[f"{table}weight"] = np.concatenate(in_order)
    return joined


def _greedy_differences(run: Programs, params: nnx.State, cases: dict[str, np.ndarray]) -> int:
    """Reads the reference's continuation once: it is this model's own greedy one iff every token
    in it is what this model ranks first after the tokens before it.
    """
    continued, prompt = cases["greedy"], cases["input_ids"].shape[1]
    chosen = np.asarray(jnp.argmax(run.logits(params, jnp.asarray(continued)), axis=-1))
    return int(np.sum(chosen[:, prompt - 1 : -1] != continued[:, prompt:]))


def _yarn_row(model: Qwen3Next, case: dict[str, np.ndarray]) -> Row:
    """Logits at the end of a text longer than the trained context, which YaRN stretches by four."""
    config = dataclasses.replace(_text_form(model.config), yarn_factor=4.0)
    logits = _programs(config).logits(nnx.state(model, nnx.Param), jnp.asarray(case["input_ids"]))
    return Row(
        "YaRN",
        f"YaRN × 4: logits at {case['input_ids'].shape[1]} tokens, "
        f"{config.max_position_embeddings} trained",
        _max_error(logits[:, -case["logits"].shape[1] :], case["logits"]),
        1e-4,
    )


def round_trip_differences(model: Qwen3Next, reference: pathlib.Path) -> int:
    """Checkpoint → model → export: names and bits, those of a vision tower included, against the
    original file.
    """
    with tempfile.TemporaryDirectory() as directory:
        save_hf(model, f"{directory}/export")
        original, back = (
            load_file(f"{place}/model.safetensors") for place in (reference, f"{directory}/export")
        )
    same = [
        name
        for name in original
        if name in back and original[name].tobytes() == back[name].tobytes()
    ]
    return len(original.keys() | back.keys()) - len(same)


def transformers_rows(python: str, reference: str = "qwen3_next_tiny") -> list[Row]:
    """The export, loaded by transformers in the interpreter `python`, against this
    implementation; with YaRN, too.
    """
    tokens = references.cases(reference)["input_ids"]
    return _loaded_there(python, references.checkpoint(reference), tokens)


def _stretches(config: ModelConfig) -> bool:
    """Whether an export of the model may have YaRN."""
    return config.rotary_dim > 0 and config.hf_form != "olmo_hybrid"


def _loaded_there(python: str, reference: pathlib.Path, tokens: np.ndarray) -> list[Row]:
    model, rows = load_hf(reference), []
    for factor in (1.0, 4.0) if _stretches(model.config) else (1.0,):
        model.config = dataclasses.replace(model.config, yarn_factor=factor)
        run = _programs(_text_form(model.config))
        ours = run.logits(nnx.state(model, nnx.Param), jnp.asarray(tokens))
        with tempfile.TemporaryDirectory() as directory:
            save_hf(model, f"{directory}/export")
            save_file({"input_ids": tokens}, f"{directory}/tokens.safetensors")
            peer = subprocess.run(
                [
                    python,
                    str(harness.TRANSFORMERS_PEER),
                    "logits",
                    f"{directory}/export",
                    f"{directory}/tokens.safetensors",
                    f"{directory}/logits.safetensors",
                ],
                check=True,
                capture_output=True,
                text=True,
            )
            theirs = load_file(f"{directory}/logits.safetensors")
        report, words = json.loads(peer.stdout.splitlines()[-1]), ", YaRN × 4" * (factor > 1)
        cases = {"input_ids": tokens, "greedy": theirs["greedy"]}
        rows += [
            Row(
                "transformers",
                f"logits of the export in transformers {report['transformers']}{words}",
                _max_error(ours, theirs["logits"]),
                1e-4,
            ),
            Row(
                "transformers",
                "greedy continuation there: tokens that differ",
                _greedy_differences(run, nnx.state(model, nnx.Param), cases),
                0,
            ),
            Row(
                "transformers",
                "tensors of the export that it misses or misreads",
                report["missing"],
                0,
            ),
        ]
    return rows


def _as_sampled(ours, theirs) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64; of ours the values that the reference has."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        ours = references.sampled(ours)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return ours, theirs


def _max_error(ours, theirs) -> float:
    """max |Δ| / max |reference|."""
    ours, theirs = _as_sampled(ours, theirs)
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


def _relative_l2(ours, theirs) -> float:
    """|Δ| / |reference|; |Δ| where the reference is 0, as the gradient of QSA's indexer."""
    ours, theirs = _as_sampled(ours, theirs)
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0))


def _relative(ours, theirs) -> float:
    return float(abs(float(ours) - float(theirs[0])) / abs(float(theirs[0])))


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--reference", choices=REFERENCES, action="append", help="one of them alone"
    )
    parser.add_argument(
        "--gradients", action="store_true", help="list every gradient tensor, not the worst alone"
    )
    parser.add_argument(
        "--python", help="interpreter with torch and transformers, to load the export there"
    )
    parser.add_argument("--variants", action="store_true", help="models that --python makes, alone")
    args = parser.parse_args()
    if args.variants and not args.python:
        parser.error("--variants: needs --python")
    failures = 0
    for reference in VARIANTS if args.variants else args.reference or REFERENCES:
        if args.variants:
            rows = variant_rows(args.python, reference)
        else:
            rows = measure(reference) + (
                transformers_rows(args.python, reference) if args.python else []
            )
        print(f"{reference:62} {'error':>9} {'bar':>7}")
        gradients = sorted((r for r in rows if r.group == "gradients"), key=lambda r: -r.error)
        for row in rows:
            if row.group != "gradients" or args.gradients:
                _print(row)
        _print(
            gradients[0]._replace(name=f"worst of {len(gradients)} gradients: {gradients[0].name}")
        )
        failed = [r for r in rows if not r.passes]
        print(
            f"{len(rows) - len(failed)} of {len(rows)} within their bars"
            + "".join(f"; FAILED {r.name}" for r in failed),
            end="\n\n",
        )
        failures += len(failed)
    return 1 if failures else 0


def _print(row: Row) -> None:
    print(f"{row.name:62} {row.error:9.2g} {row.bar:7.0e}{'' if row.passes else '  FAILED'}")


if __name__ == "__main__":
    sys.exit(main())
