"""How far this implementation is from transformers' own Qwen3-Next, quantity by quantity, in float32.

The reference directory holds a small random-weight checkpoint and `cases.safetensors`, what transformers computed from
it. With `--python` (an interpreter that has torch and transformers) the model is also exported, loaded there, and its
logits compared.

    python benchmarks/parity.py [--gradients] [--python=/path/to/python]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from qwen3next_jax import Qwen3Next, hf_tensors, load_hf, save_hf

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = ROOT / "tests" / "fixtures" / "qwen3_next_tiny"


class Row(NamedTuple):
    """One quantity: its error and the largest that passes."""

    group: str
    name: str
    error: float
    bar: float

    @property
    def passes(self) -> bool:
        return self.error <= self.bar  # False for NaN


def measure(reference: pathlib.Path = REFERENCE) -> list[Row]:
    """Every quantity of `cases.safetensors` against this implementation, and export → import."""
    cases, model = load_file(reference / "cases.safetensors"), load_hf(reference)
    tokens = jnp.asarray(cases["input_ids"])
    (cross_entropy, out), gradient = _value_and_gradient(model, tokens)
    rows = [
        Row("logits", "logits", _max_error(out.logits, cases["logits"]), 1e-4),
        *(Row("MTP logits", f"mtp_logits, depth {d}", _max_error(logits, cases["mtp_logits"]), 1e-4)
          for d, logits in enumerate(out.mtp_logits)),
        Row("losses", "cross-entropy", _relative(cross_entropy, cases["cross_entropy"]), 1e-5),
        Row("losses", "balance loss", _relative(out.balance_loss, cases["balance_loss"]), 1e-5),
    ]
    rows += [Row("hidden states", f"hidden_states.{i}", _max_error(x, cases[f"hidden_states.{i}"]), 1e-4)
             for i, x in enumerate(out.hidden_states)]
    rows += [Row("router logits", name := f"router_logits.{i}", _max_error(x.reshape(-1, x.shape[-1]), cases[name]), 1e-4)
             for i, x in enumerate(out.router_logits)]
    ours = _fuse_experts(hf_tensors(gradient, model.config), model.config.num_experts)
    graded = sorted(name.removeprefix("grad.") for name in cases if name.startswith("grad."))
    rows += [Row("gradients", name, _relative_l2(ours[name], cases[f"grad.{name}"]), 1e-3) for name in graded]
    rows.append(Row("greedy", "greedy continuation: tokens that differ", _greedy_differences(model, cases), 0))
    rows.append(Row("export", "export → import: tensors whose bits differ", _round_trip_differences(model, reference), 0))
    return rows


def _value_and_gradient(model: Qwen3Next, tokens: jax.Array):
    """((mean next-token cross-entropy, output), its gradient) in one compiled program."""
    graph, params = nnx.split(model)

    def cross_entropy(params):
        out = nnx.merge(graph, params)(tokens, output_hidden_states=True)
        log_p = jax.nn.log_softmax(out.logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)), out

    return jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))(params)


def _fuse_experts(tensors: dict[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """Adds the fused forms [E, 2I, D] (gate | up) and [E, D, I] to per-expert tensors."""
    fused = dict(tensors)
    for layer in {name.split("0.gate_proj")[0] for name in tensors if name.endswith("experts.0.gate_proj.weight")}:
        gate, up, down = (np.stack([tensors[f"{layer}{e}.{part}_proj.weight"] for e in range(experts)])
                          for part in ("gate", "up", "down"))
        fused |= {f"{layer}gate_up_proj": np.concatenate((gate, up), axis=1), f"{layer}down_proj": down}
    return fused


def _greedy_differences(model: Qwen3Next, cases: dict[str, np.ndarray]) -> int:
    """Reads the reference's continuation once: it is this model's own greedy one iff every token in it is what this
    model ranks first after the tokens before it."""
    continued, prompt = cases["greedy"], cases["input_ids"].shape[1]
    graph, params = nnx.split(model)
    logits = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).logits)(params, jnp.asarray(continued))
    chosen = np.asarray(jnp.argmax(logits, axis=-1))
    return int(np.sum(chosen[:, prompt - 1:-1] != continued[:, prompt:]))


def _round_trip_differences(model: Qwen3Next, reference: pathlib.Path) -> int:
    """Checkpoint → model → export → model: names and bits against the original file."""
    with tempfile.TemporaryDirectory() as directory:
        save_hf(model, f"{directory}/export")
        again = load_hf(f"{directory}/export")
    original, back = load_file(reference / "model.safetensors"), hf_tensors(nnx.state(again, nnx.Param), again.config)
    same = [name for name in original if name in back and original[name].tobytes() == back[name].tobytes()]
    return len(original.keys() | back.keys()) - len(same)


def transformers_rows(python: str, reference: pathlib.Path = REFERENCE) -> list[Row]:
    """The export, loaded by transformers in the interpreter `python`, against this implementation."""
    model, tokens = load_hf(reference), load_file(reference / "cases.safetensors")["input_ids"]
    graph, params = nnx.split(model)
    ours = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).logits)(params, jnp.asarray(tokens))
    with tempfile.TemporaryDirectory() as directory:
        save_hf(model, f"{directory}/export")
        save_file({"input_ids": tokens}, f"{directory}/tokens.safetensors")
        peer = subprocess.run([python, str(ROOT / "benchmarks" / "transformers_peer.py"), "logits", f"{directory}/export",
                               f"{directory}/tokens.safetensors", f"{directory}/logits.safetensors"],
                              check=True, capture_output=True, text=True)
        theirs = load_file(f"{directory}/logits.safetensors")["logits"]
    report = json.loads(peer.stdout.splitlines()[-1])
    return [Row("transformers", f"logits of the export in transformers {report['transformers']}",
                _max_error(ours, theirs), 1e-4),
            Row("transformers", "tensors of the export that it misses or misreads", report["missing"], 0)]


def _max_error(ours, theirs) -> float:
    """max |Δ| / max |reference|."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


def _relative_l2(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _relative(ours, theirs) -> float:
    return float(abs(float(ours) - float(theirs[0])) / abs(float(theirs[0])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=pathlib.Path, default=REFERENCE)
    parser.add_argument("--gradients", action="store_true", help="list every gradient tensor, not the worst alone")
    parser.add_argument("--python", help="interpreter with torch and transformers, to load the export there")
    args = parser.parse_args()
    rows = measure(args.reference) + (transformers_rows(args.python, args.reference) if args.python else [])
    print(f"{'quantity':62} {'error':>9} {'bar':>7}")
    gradients = sorted((r for r in rows if r.group == "gradients"), key=lambda r: -r.error)
    for row in rows:
        if row.group != "gradients" or args.gradients:
            _print(row)
    _print(gradients[0]._replace(name=f"worst of {len(gradients)} gradients: {gradients[0].name}"))
    failed = [r for r in rows if not r.passes]
    print(f"{len(rows) - len(failed)} of {len(rows)} within their bars" + "".join(f"; FAILED {r.name}" for r in failed))
    return 1 if failed else 0


def _print(row: Row) -> None:
    print(f"{row.name:62} {row.error:9.2g} {row.bar:7.0e}{'' if row.passes else '  FAILED'}")


if __name__ == "__main__":
    sys.exit(main())
