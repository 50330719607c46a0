"""What preparing data costs: tokens per CPU second, memory, two workers against one, kills, an
appended file, a second row length, opening the index of 15 T tokens; and datatrove's own tokenizing
step and Megatron-LM's tool on the same lines, where they are installed.

    python benchmarks/data/preparation.py --tokenizer=DIR [--megabytes=1000] [--kills=10]
    python benchmarks/data/preparation.py --ranks=qwen.tiktoken --tokenizer=DIR   # makes DIR first
    python benchmarks/data/preparation.py … --megatron="python Megatron-LM/tools/preprocess_data.py"

The input is made from the Python files of this installation, as .jsonl, .jsonl.gz, .jsonl.zst and
.parquet. `qwen.tiktoken` is in the package `dashscope`. Each pass runs in a process of its own.
Speeds depend on what else the machine does; ratios of one run less so.
"""

import argparse
import base64
import json
import os
import pathlib
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks import harness
from qwen3next_jax.common import digests
from qwen3next_jax.data.prepared import PreparedSource, write_index
from qwen3next_jax.data.row_groups import HELDOUT, METADATA, TRAIN, Statistics
from qwen3next_jax.data.rows import RowReader, ShardTable
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.store import Store

_INDEX_SHARDS = 223_000  # of 2^26 tokens: 15 T
_GROUP_SHARDS = 4

# Runs a pass and prints {"wall", "cpu", "peak_bytes", "tokens", …} as JSON.
_PASS = """
import json, resource, sys, time
from qwen3next_jax.data import preparation, sources, tokens
from qwen3next_jax.data.store import Store
path, tokenizer, prepared, workers, length, engine = sys.argv[1:]
tokenizer = tokens.load_tokenizer(tokenizer)
if engine == "tokenizers":
    tokenizer = tokenizer.slower_tokenizer or tokenizer
source, store, workers = sources.find_source_of_glob(path, "text"), Store(prepared), int(workers)
used = lambda: sum(sum(resource.getrusage(who)[:2])
                   for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
start, begin = used(), time.perf_counter()
corpus = preparation.tokenize_source(source, tokenizer, store, workers=workers)
found = {"tokens": sum(part.tokens for part in corpus.tokenized), "digest": corpus.digest,
         "library": str(dict(tokenizer.library_versions)), "parts": len(corpus.tokenized),
         "wall": time.perf_counter() - begin, "cpu": used() - start}
if int(length):
    start, begin = used(), time.perf_counter()
    recipe = preparation.RowRecipe(int(length), 0.02, 0)
    divided = preparation._choose_divided_documents({0: corpus}, tokenizer, recipe, store)
    rows = preparation.pack_source(corpus, divided.get(0), tokenizer, recipe, store,
                                   workers=workers)
    found |= {"rows": rows.fingerprint, "pack_wall": time.perf_counter() - begin,
              "pack_cpu": used() - start}
found["peak_bytes"] = 1024 * max(resource.getrusage(who).ru_maxrss
                                 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps(found))
"""

_OPEN = """
import json, sys, time
from qwen3next_jax.data.prepared import open_rows_from_index
from qwen3next_jax.data.row_groups import RowRecipe
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.store import Store
resident = lambda: 4096 * int(open("/proc/self/statm").read().split()[1])
before, start = resident(), time.perf_counter()
sources, recipe = [Source("all", (), "text")], RowRecipe(4096, 0, 0)
found = open_rows_from_index(Store(sys.argv[1]), "index.npz", sources, recipe)
print(json.dumps({"seconds": time.perf_counter() - start, "rows": len(found[0].rows["train"]),
                  "bytes": resident() - before}))
"""

_DATATROVE = """
import json, resource, sys, time
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
folder, pattern, tokenizer, out = sys.argv[1:]
used = lambda: sum(sum(resource.getrusage(who)[:2])
                   for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
start = used()
step = DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>",
                         shuffle_documents=False)
LocalPipelineExecutor([JsonlReader(folder, glob_pattern=pattern), step], tasks=1,
                      logging_dir=out + "/logs").run()
size = sum(p.stat().st_size for p in __import__("pathlib").Path(out).glob("*.ds"))
print(json.dumps({"tokens": size // 4, "cpu": used() - start}))
"""


def run(program: str, *arguments: object) -> dict:
    """The JSON that a program prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", *sys.path]))}
    environment |= {"TOKENIZERS_PARALLELISM": "false"}  # CPU seconds of one core
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if result.returncode:
        sys.exit(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


def make_corpus(folder: pathlib.Path, size: int) -> None:
    """Writes `size` bytes of text: Python files, each with a number of its own."""
    roots = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    files = sorted(path for root in roots for path in pathlib.Path(root).rglob("*.py"))
    folder.mkdir(parents=True)
    writers = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
    per_file = min(size // 40, 150_000_000)
    texts: list[str] = []
    written = number = count = 0
    while written < size:
        for path in files:
            text = path.read_text(errors="ignore").replace("\0", "")
            if text:
                number += 1
                texts.append(f"# {number}\n{text}")
                written += len(texts[-1])
            if sum(map(len, texts[-1:])) and written - count * per_file >= per_file:
                _write(folder / f"{count:03d}.{writers[count % len(writers)]}", texts)
                texts, count = [], count + 1
            if written >= size:
                break
    if texts:
        _write(folder / f"{count:03d}.jsonl", texts)


def _write(path: pathlib.Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=2000)
    elif path.suffix == ".jsonl":
        path.write_bytes(lines)
    else:
        with pyarrow.output_stream(path, {".gz": "gzip", ".zst": "zstd"}[path.suffix]) as stream:
            stream.write(lines)


def make_tokenizer(ranks_file: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the tokenizer.json that a file of tiktoken's ranks describes, with Qwen's pattern."""
    from qwen3next_jax.data.tokens import byte_characters

    ranks = {}
    for line in ranks_file.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    characters = byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    def pair(token: bytes) -> list[bytes]:
        """The two tokens that are merged last."""
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            found = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
            i = found.index(min(found))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    in_order = sorted(ranks, key=ranks.get)
    merges = [list(map(written, pair(token))) for token in in_order if len(token) > 1]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    byte_level["trim_offsets"] = False
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = flags | {"id": len(ranks), "content": "<|endoftext|>", "special": True}
    vocab = {written(token): rank for token, rank in ranks.items()}
    content = {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level],
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def contents(folder: pathlib.Path) -> str:
    """Digest of all parts and rows in a folder."""
    files = sorted(p for kind in ("tokens", "rows") for p in (folder / kind).rglob("*.*"))
    return digests.sha256_json(
        [[str(p.relative_to(folder)), digests.sha256_file(p)] for p in files if p.is_file()]
    )


def killed(arguments: list, kills: int, parts: int, folder: pathlib.Path) -> tuple[int, int, int]:
    """Starts a pass and kills it at a random moment, again and again. The moments are spread over
    the pass: each kill has its own tenth (of ten) of the parts and of the packing after them.

    Returns:
      (number of kills, number of kills while rows were packed, number of unfinished files and
      folders that the kills left).
    """
    rng, count, packing = random.Random(0), 0, 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", *sys.path]))}
    for i in range(kills):
        wanted = int((i + rng.random()) / kills * 1.2 * parts)
        process = subprocess.Popen(
            [sys.executable, "-c", _PASS, *map(str, arguments)],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        before = len(list(folder.glob(".partial/*")))
        while process.poll() is None and (
            len(list(folder.glob("tokens/*/*.json"))) < min(wanted, parts)
            or len(list(folder.glob(".partial/*"))) == before
        ):
            time.sleep(0.02)
        time.sleep(rng.random())
        process.kill()
        if process.wait() == -signal.SIGKILL:
            count += 1
            packing += len(list(folder.glob("tokens/*/*.json"))) == parts
    return count, packing, len(list(folder.glob(".partial/*")))


def make_index(folder: pathlib.Path) -> None:
    """The (empty) shards of 15 T tokens in rows of 4,096, and their index."""
    groups = np.arange(1, 1 + _INDEX_SHARDS // _GROUP_SHARDS)
    shards = _GROUP_SHARDS * len(groups)
    tables = {
        side: ShardTable(
            root=folder / "rows",
            split=side,
            dtype="uint32",
            folders=np.array([f"{group:020x}".encode() for group in groups]),
            rows_per_chunk=np.ones(len(groups), np.int64),
            folder_shard_ends=count * groups,
            rows_per_shard=np.full(count * len(groups), (1 << 26) // 4096),
            shard_bytes=np.zeros(count * len(groups), np.int64),
            shard_heads=np.zeros(count * len(groups), np.int64),
            folder_part_ends=8 * groups,
            part_origins=np.stack(
                [np.arange(8 * len(groups)), np.zeros(8 * len(groups), np.int64)], 1
            ),
        )
        for side, count in ((TRAIN, _GROUP_SHARDS), (HELDOUT, 0))
    }
    for i in range(len(groups)):
        tables[TRAIN].folder_path(i).mkdir(parents=True)
        (tables[TRAIN].folder_path(i) / METADATA).touch()
    for path in tables[TRAIN].shard_paths():
        os.close(os.open(path, os.O_CREAT))
    assert len(list(tables[TRAIN].shard_paths())) == shards
    rows = {side: RowReader(table, 4096) for side, table in tables.items()}
    statistics = {side: Statistics() for side in tables}
    one = PreparedSource(Source("all", (), "text"), "", statistics, rows)
    write_index(Store(folder), "index.npz", [one])


def run_megatron(
    command: list[str], file: pathlib.Path, tokenizer: pathlib.Path, folder: pathlib.Path
) -> dict:
    """Tokenizes `file` with one worker. Returns the number of tokens, the CPU seconds, and those
    of the start, which a run over a single line takes and which do not count.
    """
    folder.mkdir()
    line = folder / "line.jsonl"
    with file.open() as lines:
        line.write_text(next(lines))

    def used(source: pathlib.Path, name: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        options = {
            "input": source,
            "output-prefix": folder / name,
            "tokenizer-type": "HuggingFaceTokenizer",
            "tokenizer-model": tokenizer,
            "workers": 1,
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        result = subprocess.run(
            [*command, *arguments, "--append-eod"], capture_output=True, text=True
        )
        if result.returncode:
            sys.exit(result.stderr[-3000:])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(after[:2]) - sum(before[:2])

    start = used(line, "line")
    seconds = used(file, "all")
    size = (folder / "all_text_document.bin").stat().st_size
    return {"tokens": size // 4, "cpu": seconds - start, "start": start}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", type=pathlib.Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--megatron", help="command of Megatron-LM's tools/preprocess_data.py")
    parser.add_argument("--no-index", action="store_true", help="leave out the index of 15 T")
    args = parser.parse_args()
    if args.ranks:
        make_tokenizer(args.ranks, args.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        measure(args, pathlib.Path(scratch))


def measure(args: argparse.Namespace, folder: pathlib.Path) -> None:
    corpus = folder / "corpus"
    make_corpus(corpus, args.megabytes * 1_000_000)
    files = list(corpus.iterdir())
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {size / 1e6:,.0f} MB on disk, {args.megabytes:,} MB of text")
    glob, tokenizer = f"{corpus}/*", args.tokenizer

    def one(name: str, workers: int, length: int = 0, engine: str = "") -> dict:
        return run(_PASS, glob, tokenizer, folder / name, workers, length, engine)

    def speed(found: dict, kind: str = "") -> str:
        return f"{found['tokens'] / found[kind + 'cpu'] / 1e6:.2f} M tokens per CPU second"

    first = one("one", 1, 4096)
    print(f"one worker: {speed(first)} with {first['library']}, {first['wall']:.1f} s")
    print(f"  {first['tokens']:,} tokens in {first['parts']} parts")
    print(f"  peak memory of a process {first['peak_bytes'] / 1e6:,.0f} MB")
    print(f"  packing into rows of 4,096: {speed(first, 'pack_')}, {first['pack_wall']:.1f} s")
    two = one("two", 2, 4096)
    ratio = first["wall"] / two["wall"]
    print(f"two workers: {two['wall']:.1f} s, {ratio:.2f} times as fast: {ratio / 2:.0%} efficient")
    print(f"  of the same CPU time: {first['cpu'] / two['cpu']:.0%}; {speed(two)}")
    print(f"  the same bytes: {contents(folder / 'one') == contents(folder / 'two')}")
    again = one("one", 1, 256)
    print(
        f"a second row length (256): {again['cpu']:.1f} s of CPU before packing, then "
        f"{speed(again, 'pack_')}"
    )
    arguments = [glob, tokenizer, folder / "killed", 2, 4096, ""]
    count, packing, lost = killed(arguments, args.kills, first["parts"], folder / "killed")
    last = one("killed", 2, 4096)
    shutil.rmtree(folder / "killed" / ".partial")
    shutil.rmtree(folder / "one" / "rows")
    one("one", 1, 4096)
    print(
        f"killed {count} times, {packing} of them while it packed rows, with {lost} unfinished "
        f"files left behind; then {last['wall']:.1f} s more; the same bytes: "
        f"{contents(folder / 'one') == contents(folder / 'killed')}, the same rows: "
        f"{first['rows'] == last['rows']}"
    )
    lines = (corpus / "000.jsonl").read_bytes()[:10_000_000]
    (corpus / "appended.jsonl").write_bytes(lines[: lines.rindex(b"\n") + 1])
    appended = one("one", 1)
    print(
        f"an appended file of 10 MB: {appended['cpu']:.1f} s of CPU "
        f"(the whole corpus: {first['cpu']:.1f} s)"
    )
    (corpus / "appended.jsonl").unlink()
    shutil.copytree(corpus, folder / "small", ignore=lambda _, names: set(names) - {"000.jsonl"})
    glob = f"{folder}/small/*"
    fast, slow = one("fast", 1), one("slow", 1, engine="tokenizers")
    print(f"000.jsonl alone: {speed(fast)}; by tokenizers {speed(slow)}")
    print(f"  the same tokens: {fast['digest'] == slow['digest']}")
    try:
        import datatrove  # noqa: F401
    except ImportError:
        print("datatrove is not installed")
    else:
        theirs = run(
            _DATATROVE, folder / "small", "*.jsonl", tokenizer / "tokenizer.json", folder / "dt"
        )
        print(f"  by datatrove's DocumentTokenizer {speed(theirs)}")
    if args.megatron:
        theirs = run_megatron(
            shlex.split(args.megatron), folder / "small" / "000.jsonl", tokenizer, folder / "meg"
        )
        print(
            f"  by Megatron-LM's preprocess_data.py {speed(theirs)}, without "
            f"{theirs['start']:.1f} s of CPU of its start"
        )
    if not args.no_index:
        make_index(folder / "index")
        size = (folder / "index" / "index.npz").stat().st_size
        begin = time.perf_counter()
        opened = run(_OPEN, folder / "index")
        print(
            f"opening the index of {opened['rows'] * 4096 / 1e12:.1f} T tokens, {_INDEX_SHARDS:,} "
            f"shards: {opened['seconds']:.1f} s, {opened['bytes'] / 1e6:,.0f} MB of memory; the "
            f"index has {size / 1e6:,.0f} MB "
            f"({time.perf_counter() - begin:.1f} s with the process)"
        )


if __name__ == "__main__":
    main()
