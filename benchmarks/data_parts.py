"""Three parts of preparing data, each alone: memory of one long record, packing by length of the
rows, and the search for n-grams of an evaluation.

    python benchmarks/data_parts.py [--tokenizer=DIR] [--megabytes=100]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.data import row_groups, tokenized_parts
from qwen3next_jax.data.contamination import NgramIndex
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import ByteTokenizer

# Tokenizes a file and prints the process's largest resident size in bytes.
_TOKENIZE = """
import re, sys
from qwen3next_jax.data import preparation, sources, tokens
from qwen3next_jax.data.store import Store
tokenizer = tokens.load_tokenizer(sys.argv[2])
source = sources.resolve(sys.argv[1], "text")
preparation.tokenize(source, tokenizer, Store(sys.argv[3]), workers=1)
# Unlike getrusage, this leaves out the memory of the parent process.
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""
_CODE = "def f(x):\n    return x + 42  # words and words\n"
_RECORDS = {  # kind of records → (beginning of the text, what repeats, escapes, number of records)
    "ASCII": ("", _CODE, False, 1),
    "other letters": ("", "größe∀", False, 1),
    "ASCII with one emoji": ("😀", _CODE, False, 1),
    "the emoji as an escape": ("😀", _CODE, True, 1),
    "two records in a row": ("😀", _CODE, False, 2),
    "emoji as escapes": ("", "😀", True, 1),
}


def peak(folder: pathlib.Path, tokenizer: str, lines: list[str]) -> int:
    """Returns the largest resident size, in bytes, of a process that tokenizes JSON lines."""
    short = json.dumps({"text": "a short text é"}, ensure_ascii=False)
    (folder / "a.jsonl").write_text("\n".join([short, *lines]) + "\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", *sys.path]))}
    with tempfile.TemporaryDirectory() as prepared:
        result = subprocess.run(
            [sys.executable, "-c", _TOKENIZE, str(folder / "a.jsonl"), tokenizer, prepared],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    return int(result.stdout)


def make_part(store: Store, tokens: int, mean: int) -> tokenized_parts.TokenizedPart:
    """Writes a part of random tokens in documents of about `mean` tokens."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, (rng.lognormal(0, 1, tokens // mean) * mean * 0.6).astype(int))
    table = np.zeros(len(lengths), tokenized_parts.DOCUMENT)
    table["end"] = np.cumsum(lengths)
    table["hash"] = 2 * rng.integers(0, 2**63, len(lengths)).astype(np.uint64)
    table["record"] = np.arange(len(lengths))
    count = int(table["end"][-1])
    data = rng.zipf(1.3, count).clip(0, 150_000).astype("<u4").tobytes() + table.tobytes()
    key = "ab" + 30 * "0"
    path = store.path(f"tokens/ab/{key}.tokens")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    documents = len(lengths)
    sizes = (documents, count, 4 * count, documents)
    content = digests.sha256(data)
    return tokenized_parts.TokenizedPart(
        key, "uint32", *sizes, (0, 0), 2**64 - 1, 0, {}, (), content
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="a folder with a tokenizer.json, besides bytes")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the long record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for tokenizer in filter(None, ("bytes", args.tokenizer)):
            least = peak(folder, tokenizer, [])
            for kind, (beginning, repeated, escapes, count) in _RECORDS.items():
                size = args.megabytes * 1_000_000
                written = json.dumps(repeated, ensure_ascii=escapes)[1:-1]
                text = beginning + repeated * (size // len(written.encode()))
                line = json.dumps({"text": text}, ensure_ascii=escapes)
                more = (peak(folder, tokenizer, [line] * count) - least) / len(line.encode())
                print(f"memory, {tokenizer}, {kind}: {more:.1f} bytes per byte of the record")
        store = Store(folder / "prepared")
        part = make_part(store, 20_000_000, 700)
        for length in (256, 512, 1024, 4096, 256, 512, 1024, 4096):
            start = time.process_time()
            recipe = row_groups.Recipe(length, 0.02, time.time_ns() % 2**32)
            group = row_groups.Group(0, (part,), None)
            row_groups.pack_group(group, recipe, store, ByteTokenizer())
            speed = part.tokens / (time.process_time() - start) / 1e6
            print(f"packing into rows of {length}: {speed:.1f} M tokens per CPU second")
    rng = np.random.default_rng(0)
    index = NgramIndex([rng.integers(0, 150_000, 200) for _ in range(5000)])
    tokens = rng.zipf(1.3, 1 << 24).clip(0, 150_000).astype("<u4")
    start = time.process_time()
    index.mark(tokens, np.zeros(len(index.ngrams), bool))
    speed = len(tokens) / (time.process_time() - start) / 1e6
    print(f"{len(index.ngrams):,} n-grams: {speed:.0f} M tokens per CPU second")


if __name__ == "__main__":
    main()
