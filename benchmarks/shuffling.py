"""Whether it matters that only documents near each other in the input share a row.

    python benchmarks/shuffling.py [--steps=400] [--seeds=3]

The packer puts documents into one row that it buffers together: 16 M tokens of the input. This
study scales that down: short documents of three sources (Python, C headers, prose), one source
after the other, are packed into rows of 256 with the smallest buffer (16 rows) and with one that
holds everything. The order of rows is random in both cases, as in every run. A tiny model is
trained on each, with several seeds, and evaluated on the same held-out rows. Prints the losses.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import re
import sys
import sysconfig
import tempfile

import numpy as np

from qwen3next_jax.config import Config, DataConfig, from_dict
from qwen3next_jax.config.files import load_config_file
from qwen3next_jax.data import row_groups
from qwen3next_jax.data.packing import Packer
from qwen3next_jax.data.pipeline import TextData
from qwen3next_jax.data.row_groups import TRAIN

ROW_LENGTH = 256
BYTES_PER_SOURCE = 700_000
BUFFERS = {"16 rows": 16 * ROW_LENGTH, "everything": 1 << 24}
_SOURCES = {
    "python": ("stdlib", "*.py"),
    "headers": ("purelib", "*.h"),
    "prose": ("purelib", "*.md,*.rst,METADATA,LICENSE*"),
}


def make_corpus(folder: pathlib.Path) -> None:
    """Writes one file per source, whose lines are paragraphs of at most 200 characters."""
    rng = random.Random(0)
    for name, (root, patterns) in _SOURCES.items():
        paragraphs: set[str] = set()
        root = pathlib.Path(sysconfig.get_paths()[root])
        files = sorted({p for pattern in patterns.split(",") for p in root.rglob(pattern)})
        rng.shuffle(files)
        size = 0
        for file in files:
            if not file.is_file():
                continue
            for text in re.split(r"\n\s*\n", file.read_text(errors="ignore").replace("\0", "")):
                text = text.strip("\n")[:200]
                if len(text) > 40 and text not in paragraphs and size < BYTES_PER_SOURCE:
                    paragraphs.add(text)
                    size += len(text.encode())
        chosen = sorted(paragraphs)
        rng.shuffle(chosen)
        print(f"{name}: {len(chosen):,} documents, {size:,} bytes")
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in chosen)
        )


def config_of(folder: pathlib.Path, buffered: int, steps: int, seed: int):
    config = from_dict(Config, load_config_file(pathlib.Path("configs/tiny.py")))
    data = DataConfig(
        path=f"{folder}/*.jsonl",
        prepared_dir=f"{folder}/prepared-{buffered}",
        heldout_fraction=0.05,
        seed=seed,
    )
    model = dataclasses.replace(config.model, hidden_size=64, num_hidden_layers=2, num_experts=4)
    train = dataclasses.replace(config.train, steps=steps, seed=seed)
    evaluations = dataclasses.replace(config.eval, every=steps, rows=1 << 20, sample_tokens=0)
    checkpoint = dataclasses.replace(config.checkpoint, every=steps)
    return dataclasses.replace(
        config, data=data, model=model, train=train, eval=evaluations, checkpoint=checkpoint
    )


def prepare(config, buffered: int) -> TextData:
    """Prepares the data with a buffer of so many tokens for training rows; held-out rows are packed
    with the usual one, so that they are the same.
    """
    packers = []

    def packer(row_length: int, seed: int) -> Packer:
        packers.append(row_length)
        return Packer(row_length, seed, buffered if len(packers) % 2 else 1 << 24)

    row_groups.Packer = packer
    try:
        return TextData(config.data, ROW_LENGTH, config.train.batch_size)
    finally:
        row_groups.Packer = Packer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    from qwen3next_jax.common.events import read_events
    from qwen3next_jax.runs.start import prepare_start
    from qwen3next_jax.runs.train import train

    losses = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        make_corpus(folder)
        for seed in range(args.seeds):
            for name, buffered in BUFFERS.items():
                config = config_of(folder, buffered, args.steps, seed)
                data = prepare(config, buffered)
                reader = data._prepared[0].rows[TRAIN]
                files = [{file for file, _ in reader[i].origins} for i in range(len(reader))]
                alone = sum(len(found) == 1 for found in files) / len(files)
                workdir = folder / f"run-{buffered}-{seed}"
                train(prepare_start(config, workdir))
                heldout = [e for e in read_events(workdir / "metrics.jsonl")
                           if e["event"] == "heldout"]  # fmt: skip
                losses[name].append(heldout[-1]["loss"])
                print(
                    f"seed {seed}, buffer of {name}: {len(reader):,} rows, {alone:.0%} of them of "
                    f"one source; {heldout[-1]['targets']:,} held-out targets, loss "
                    f"{losses[name][-1]:.4f} nats per token",
                    flush=True,
                )
    small, large = (np.array(losses[name]) for name in BUFFERS)
    for name, values in losses.items():
        print(
            f"{name}: mean {np.mean(values):.4f}, standard deviation {np.std(values, ddof=1):.4f}"
        )
    print(f"16 rows - everything, seed by seed: {np.round(small - large, 4).tolist()}")


if __name__ == "__main__":
    sys.exit(main())
