"""Checkpoints and numbers of transformers in tests/fixtures, in as few bytes as keep every
comparison.

A folder has `model.safetensors` as transformers wrote it, and `cases.safetensors` with what
transformers computed from it. Of a large array of the cases only every 29th value is there
(`sampled`). Two kinds of folders have a part of their weights, and `checkpoint` makes the whole
file. A wrapper has the weights of a text model under other names and a vision tower of its own: its
folder has the tower alone. qwen4_exp_text_tiny has 38 tensors, bit for bit, of qwen3_5_moe_tiny:
its folder has the other ones.

    python -m tests.references REFERENCE DIRECTORY     writes a fixture from a whole reference
"""

import argparse
import functools
import hashlib
import pathlib
import re
import shutil
import tempfile
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
# Values of an array that is kept whole, and the distance of values that are kept of a larger one.
# 29 divides no dimension of the references, so that every row and column has kept values.
WHOLE, STRIDE = 256, 29
# A fixture that has tensors of another one under the same names: (the other one, sha256 of the file
# that transformers wrote).
SHARED = {
    "qwen4_exp_text_tiny": (
        "qwen3_5_moe_tiny",
        "2168e072cff4fc7d19207f469c494322bacb8d14f831cd0e73ffcbd170624f03",
    )
}
SHARED_NAMES = r"model\.(embed_tokens|layers\.0\.(linear_attn|mlp))\."


class Wrapper(NamedTuple):
    """text: the fixture that has the weights. fused: whether the wrapper has one tensor for all
    experts of a layer. sha256: of the file that transformers wrote.
    """

    text: str
    fused: bool
    sha256: str


WRAPPERS = {
    "qwen3_5_wrapper_tiny": Wrapper(
        "qwen3_5_tiny", False, "fa5168c9d9f96e98fb5ab48a2ec73f59bec9ff566fbab81f0fee35b3057249de"
    ),
    "qwen3_5_moe_wrapper_fused_mtp_tiny": Wrapper(
        "qwen3_5_moe_tiny", True, "ccc92db9652039cd00559e22d432e7a1d5f21842b93735ff551e03890f6ed920"
    ),
    "qwen4_exp_wrapper_tiny": Wrapper(
        "qwen4_exp_text_tiny",
        False,
        "d2f4b8179a33ac4ac0e0089a047b4363906218ca1f4557cb2dc506bcde415790",
    ),
}


@functools.cache
def checkpoint(name: str) -> pathlib.Path:
    """The directory of a reference's checkpoint, which no test may change."""
    folder = FIXTURES / name
    if name in WRAPPERS:
        tensors, sha256 = _tensors_of_wrapper(name), WRAPPERS[name].sha256
    elif name in SHARED:
        tensors, sha256 = _tensors_of_both(name), SHARED[name][1]
    else:
        return folder
    made = pathlib.Path(_temporary_folder().name) / name
    made.mkdir()
    shutil.copy(folder / "config.json", made)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    digest = hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()
    assert digest == sha256, f"{name}: the checkpoint is not that of transformers"
    return made


def _tensors_of_wrapper(name: str) -> dict[str, np.ndarray]:
    tensors = wrapped(load_file(checkpoint(WRAPPERS[name].text) / "model.safetensors"))
    if WRAPPERS[name].fused:
        tensors = fused(tensors)
    return tensors | load_file(FIXTURES / name / "vision.safetensors")


def _tensors_of_both(name: str) -> dict[str, np.ndarray]:
    """A fixture's own tensors, and those that it shares with another fixture."""
    other = load_file(FIXTURES / SHARED[name][0] / "model.safetensors")
    shared = {tensor: x for tensor, x in other.items() if re.match(SHARED_NAMES, tensor)}
    return shared | load_file(FIXTURES / name / "own_tensors.safetensors")


def cases(name: str) -> dict[str, np.ndarray]:
    """What transformers computed from a checkpoint (of a wrapper: its text model), `sampled`."""
    text = WRAPPERS[name].text if name in WRAPPERS else name
    return load_file(FIXTURES / text / "cases.safetensors")


def sampled(array: np.ndarray) -> np.ndarray:
    """The values of an array that a reference keeps: all integers, and of more than 256 numbers
    every 29th in row-major order, as a vector.
    """
    array = np.asarray(array)
    if array.size <= WHOLE or not np.issubdtype(array.dtype, np.floating):
        return array
    return array.reshape(-1)[::STRIDE]


def wrapped(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A text model's tensors under the names that they have in a wrapper."""
    return {re.sub(r"^model\.", "model.language_model.", name): x for name, x in tensors.items()}


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with [E, 2I, D] (gate | up) and [E, D, I] of a layer in place of its experts'."""
    kept = {name: x for name, x in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for layer in {
        name.split("0.gate_proj")[0] for name in tensors if ".experts.0.gate_proj." in name
    }:
        experts = sum(name.startswith(layer) for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors[f"{layer}{e}.{part}_proj.weight"] for e in range(experts)])
            for part in ("gate", "up", "down")
        )
        kept[f"{layer}gate_up_proj"] = np.concatenate((gate, up), axis=1)
        kept[f"{layer}down_proj"] = down
    return kept


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory:
    """It is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="references_")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=pathlib.Path, help="a folder that transformers filled")
    parser.add_argument("directory", type=pathlib.Path, help="the fixture; its name decides")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.reference / "config.json", args.directory)
    if args.directory.name in WRAPPERS:
        tensors = load_file(args.reference / "model.safetensors")
        tower = {name: x for name, x in tensors.items() if "visual" in name}
        save_file(tower, args.directory / "vision.safetensors")
        return
    if args.directory.name in SHARED:
        other = load_file(FIXTURES / SHARED[args.directory.name][0] / "model.safetensors")
        tensors = load_file(args.reference / "model.safetensors")
        own = {
            name: x
            for name, x in tensors.items()
            if name not in other or x.tobytes() != other[name].tobytes()
        }
        save_file(own, args.directory / "own_tensors.safetensors")
    else:
        shutil.copy(args.reference / "model.safetensors", args.directory)
    whole = load_file(args.reference / "cases.safetensors")
    kept = {name: np.ascontiguousarray(sampled(x)) for name, x in whole.items()}
    save_file(kept, args.directory / "cases.safetensors")


if __name__ == "__main__":
    main()
