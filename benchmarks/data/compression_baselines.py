"""What general compressors make of the held-out documents, in bits per byte: the yardstick for a
model's held-out loss.

    python benchmarks/data/compression_baselines.py [--path=GLOB] [--heldout_fraction=0.02]

Order-0, gzip and xz see the held-out bytes alone (the documents one after the other). The last
line also gives xz the training documents: it is the growth of the compressed file when the
held-out bytes are appended to them.
"""

import gzip
import lzma

import numpy as np

from benchmarks import harness
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.readers import read_documents
from qwen3next_jax.data.row_groups import HELDOUT, TRAIN
from qwen3next_jax.data.sources import find_source_of_glob
from qwen3next_jax.data.tokenized_parts import text_hash

_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def order_0_bits(data: bytes) -> float:
    """Entropy of the bytes under their own frequencies, in bits for all of `data` (the table of
    frequencies is free).
    """
    counts = np.bincount(np.frombuffer(data, np.uint8))
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / len(data))).sum())


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--path", default=DataConfig.path, help="one glob; the default corpus when not given"
    )
    parser.add_argument("--text_field", default=DataConfig.text_field)
    parser.add_argument("--heldout_fraction", type=float, default=DataConfig.heldout_fraction)
    args = parser.parse_args()

    source = find_source_of_glob(args.path, args.text_field)
    texts: dict[str, list[bytes]] = {TRAIN: [], HELDOUT: []}
    for document in read_documents(source):
        is_heldout = text_hash(document.text) / 2**64 < args.heldout_fraction
        texts[HELDOUT if is_heldout else TRAIN].append(document.text.encode())
    train, heldout = b"".join(texts[TRAIN]), b"".join(texts[HELDOUT])
    xz = {
        name: len(lzma.compress(data, filters=_XZ))
        for name, data in (("heldout", heldout), ("train", train), ("both", train + heldout))
    }

    print(
        f"{source.name}: {len(texts[TRAIN])} training documents, {len(train)} bytes; "
        f"{len(texts[HELDOUT])} held-out documents, {len(heldout)} bytes"
    )
    rows = [
        ("order-0 entropy", order_0_bits(heldout)),
        ("gzip -9", 8 * len(gzip.compress(heldout, 9, mtime=0))),
        ("xz -9e", 8 * xz["heldout"]),
        ("xz -9e after the training documents", 8 * (xz["both"] - xz["train"])),
    ]
    for name, bits in rows:
        print(f"{name:40s} {bits / len(heldout):6.3f} bits/byte")


if __name__ == "__main__":
    main()
