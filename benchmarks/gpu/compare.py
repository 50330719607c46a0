"""Training steps of this project and of its peer, one after the other on the same GPU: the table
of docs/results.md, with the profile of each.

    uv run --extra gpu python benchmarks/gpu/compare.py --peer_python=PYTHON_WITH_TORCH
    uv run --extra gpu python benchmarks/gpu/compare.py --shapes=period,small --sides=ours,eager \\
        --peer_python=PYTHON_WITH_TORCH
    python benchmarks/gpu/compare.py --tiny --peer_python=PYTHON_WITH_TORCH     on CPUs, tiny

PYTHON_WITH_TORCH is an interpreter with torch, transformers 5.23 and flash-linear-attention 0.6
(`peer.py`); without one, --sides=ours. Every measurement is a process of its own (`step.py`,
`peer.py`). Its home folder is empty, so that nothing is stored: neither programs, nor what Triton,
cuDNN and XLA tuned, nor the outcome of kernels' tests. The same folder is there when a second
process measures the first step again (--cold_only leaves that out).

What is measured is written to --json after every process. With --resume, what that file already
has is not measured again. What fails, or takes more than --minutes, costs itself alone, and has
its reason in the table.

`--store` also writes docs/results/gpu.json, from which `benchmarks/reporting/results.py` makes the
page.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import site
import subprocess
import sys
import tempfile

from benchmarks import harness
from benchmarks.gpu import measuring, shapes

HERE = pathlib.Path(__file__).parent
SIDES = {"ours": "this project", "eager": "transformers and fla", "compile": "the same, compiled"}
COLUMNS = (
    "step",
    "by",
    "seconds",
    "tokens/s",
    "MFU",
    "GiB",
    "first step, s: nothing stored, stored",
    "goal",
)
# What others published of whole training steps in bfloat16, for the remarks of the page.
PUBLIC = (
    "Whole steps that others published, in bfloat16: Qwen3.6-35B-A3B on 16 H100, 5,885 tokens/s a "
    "GPU, 13.7 % MFU (18.7 % with forced balance); Qwen3-30B-A3B on 8 H100, 12,040, 28 %; Nemotron "
    "3 Nano 30B on 8 H100, 16,789, 33 %; jax-linear-attention's Qwen3-Next 1.3B on one H100, 26.7 "
    "to 28.4 %; marin's mixture of 64 experts, 2,048 wide, on 8 H100, 26.7 %; dense models of 1B "
    "on H100, 42,000 to 46,000, 40 %."
)


def command(side: str, shape: str, options: argparse.Namespace) -> list[str]:
    """The command that measures one side."""
    if side == "ours":
        words = [sys.executable, str(HERE / "step.py")]
    else:
        words = [options.peer_python, str(HERE / "peer.py"), f"--weights={options.peer_weights}"]
        words += ["--compile"] * (side == "compile")
    words += [f"--shape={shape}", f"--rounds={options.rounds}"]
    return words + ["--tiny"] * options.tiny


def run(words: list[str], home: str, minutes: float) -> dict:
    """Runs one process; returns what it wrote, or why it wrote nothing."""
    file = pathlib.Path(home) / "result.json"
    file.unlink(missing_ok=True)
    search = [str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(search),
        "HOME": home,
        "XDG_CACHE_HOME": f"{home}/.cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        "PYTHONUSERBASE": site.getuserbase(),  # installed packages stay where they are
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if "--tiny" in words:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    print(f"\n$ {' '.join(words)}", flush=True)
    child = subprocess.Popen([*words, f"--json={file}"], env=environment, start_new_session=True)
    code = measuring.wait_or_kill(child, 60 * minutes)
    if code is None:
        why = f"not done after {minutes:g} minutes (--minutes)"
    else:
        why = f"ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
    return json.loads(file.read_text()) if file.exists() else {"failed": why}


def measure(side: str, shape: str, options: argparse.Namespace) -> dict:
    """Measures one side with nothing stored, and its first step again with what that stored."""
    home = tempfile.mkdtemp(prefix="gpu_compare_")
    try:
        words = command(side, shape, options)
        result = run(words, home, options.minutes)
        if "failed" not in result and not options.cold_only:
            again = run([*words, "--first_step_alone"], home, options.minutes)
            result["stored_first_step_seconds"] = again.get("first_step_seconds")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return result


def add_flops(results: dict, tiny: bool) -> None:
    """Adds the model FLOPs and the MFU to every measurement, both sides by one formula
    (`step.flops_of`).
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process leaves the GPU alone
    from benchmarks.gpu import step

    for name, sides in results.items():
        flops = step.flops_of(shape_of(name, tiny))
        for found in sides.values():
            if "seconds" in found:
                peak = step.peak_flops(found["device"])
                found["flops"] = flops
                found["mfu"] = flops / found["seconds"] / peak if peak else None


def shape_of(name: str, tiny: bool) -> shapes.Shape:
    return shapes.tiny(shapes.SHAPES[name]) if tiny else shapes.SHAPES[name]


def rows(results: dict, tiny: bool) -> list[list[str]]:
    """The cells of the table, one row for each side and each published figure of a shape."""
    table = []
    for name, sides in results.items():
        shape = shape_of(name, tiny)
        first = [f"`{name}`: {shape.title}"]
        for side, found in sides.items():
            table.append([*first, SIDES[side], *cells(found), shape.goal if side == "ours" else ""])
            first = [""]
        for source, seconds in shape.published.items():
            rate = f"{shape.tokens / seconds:,.0f}"
            table.append([*first, f"{source} (published)", f"{seconds:.3f}", rate, *[""] * 4])
    return table


def cells(found: dict) -> list[str]:
    """Seconds, tokens/s, MFU, GiB, and the first steps."""
    if "seconds" not in found:
        return [f"failed: {found.get('failed', 'interrupted')}", *[""] * 4]
    first = [found["first_step_seconds"], found.get("stored_first_step_seconds")]
    return [
        f"{found['seconds']:.4f}",
        f"{found['tokens'] / found['seconds']:,.0f}",
        f"{found['mfu']:.1%}" if found["mfu"] else "",
        f"{found['peak_bytes'] / 2**30:.1f}" if found["peak_bytes"] else "",
        ", ".join(f"{seconds:.0f}" for seconds in first if seconds),
    ]


def profiles(results: dict) -> list[list[str]]:
    """The cells of the table of kernels: milliseconds of a step by kind, one row for each side."""
    groups = [*measuring.GROUPS, measuring.OTHERS]
    table = [["milliseconds of kernels", "all", *groups]]
    for name, sides in results.items():
        for side, found in sides.items():
            if "profile" in found:
                of = found["profile"]["groups"]
                times = [f"{of[group]:.1f}" if group in of else "" for group in groups]
                total = f"{found['profile']['milliseconds']:.1f}"
                table.append([f"`{name}`, {SIDES[side]}", total, *times])
    return table


def markdown(columns, table: list[list[str]]) -> str:
    """The table in Markdown."""
    return "\n".join([harness.table_header(columns), *map(harness.table_row, table)])


def machine(results: dict) -> str:
    """The GPU, its driver and the versions of both sides."""
    found = [f for sides in results.values() for f in sides.values() if "device" in f]
    devices = dict.fromkeys(f["device"] for f in found)
    versions = dict.fromkeys(v for f in found for v in f["versions"].split(", "))
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        driver = ""
    parts = [*devices, *([f"driver {driver}"] if driver else []), *versions]
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def headline(results: dict) -> str:
    """One row for the README's table of results, of `period`; "" if it was not measured."""
    sides = {side: f for side, f in results.get("period", {}).items() if "seconds" in f}
    if "ours" not in sides:
        return ""
    ours = sides["ours"]
    peers = [f"{SIDES[side]} {f['seconds']:.3f} s" for side, f in sides.items() if side != "ours"]
    mfu = f", {ours['mfu']:.1%} of the peak" if ours["mfu"] else ""
    beside = f"; {', '.join(peers)}" if peers else ""
    return (
        f"| one GPU ({ours['device']}): a training step of one period of the released model, 64 "
        f"experts, 32,768 tokens | **{ours['seconds']:.3f} s**{mfu}{beside} |"
    )


def store(results: dict, words: list[str]) -> None:
    """Writes docs/results/gpu.json (benchmarks/reporting/results.py says what the fields are)."""
    from benchmarks.reporting import results as page

    words = ["--peer_python=PYTHON" if "peer_python" in word else word for word in words]
    times = profiles(results)
    record = {
        "title": "One GPU: training steps beside transformers and flash-linear-attention",
        "date": datetime.date.today().isoformat(),
        "commit": page.commit(),
        "machine": machine(results),
        "command": f"uv run --extra gpu python benchmarks/gpu/compare.py {' '.join(words)}"
        "  # needs a GPU",
        "columns": list(COLUMNS),
        "rows": rows(results, tiny=False),
        "remarks": [
            "The median of the steps after three others, each synchronised; MFU of 989.4 TFLOP/s "
            "by one count of model FLOPs for both sides (`qwen3next_jax/model/flops.py`); the "
            "device's peak memory. This project has float32 weights and moments, the peer "
            "bfloat16 ones. First step: from the start of the process, with an empty home folder "
            "and with what the first process stored there.",
            "By the profiler:\n\n" + markdown(times[0], times[1:]),
            PUBLIC,
        ],
    }
    harness.write_json(harness.ROOT / "docs" / "results" / "gpu.json", record)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--peer_python", default="", help="interpreter with torch")
    parser.add_argument("--peer_weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shapes", default=",".join(shapes.SHAPES), help="by commas")
    parser.add_argument("--sides", default="", help=f"of {','.join(SIDES)}; default: all")
    parser.add_argument("--json", type=pathlib.Path, default="gpu.json", help="the file to write")
    parser.add_argument("--resume", action="store_true", help="keep what --json has")
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed")
    parser.add_argument("--minutes", type=float, default=10, help="that a process may take")
    parser.add_argument("--cold_only", action="store_true", help="no second first step")
    parser.add_argument("--tiny", action="store_true", help="on CPUs; the times say nothing")
    parser.add_argument("--store", action="store_true", help="write docs/results/gpu.json")
    options = parser.parse_args()
    options.shapes = [name for name in options.shapes.split(",") if name]
    options.sides = [name for name in (options.sides or ",".join(SIDES)).split(",") if name]
    for flag, names, known in (
        ("shapes", options.shapes, shapes.SHAPES),
        ("sides", options.sides, SIDES),
    ):
        for name in names:
            if name not in known:
                parser.error(f"--{flag}: {name!r}: expected some of {', '.join(known)}")
    if options.sides != ["ours"] and not shutil.which(options.peer_python):
        parser.error(
            f"--peer_python={options.peer_python}: no such program: expected a Python with torch, "
            "transformers and flash-linear-attention, or --sides=ours"
        )
    if options.json.exists() and not options.resume:
        parser.error(f"--json={options.json} is there already: expected another name, or --resume")
    if options.tiny and options.store:
        parser.error("--store: the times of --tiny say nothing")
    return options


def main() -> int:
    options = parse()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for shape in options.shapes:
        for side in options.sides:
            done = results.setdefault(shape, {})
            if side in done and "failed" not in done[side]:
                continue
            if side == "ours" or shapes.SHAPES[shape].family:
                done[side] = measure(side, shape, options)
                harness.write_json(options.json, results)
    add_flops(results, options.tiny)
    harness.write_json(options.json, results)
    print("\n" + markdown(COLUMNS, rows(results, options.tiny)))
    times = profiles(results)
    print("\n" + markdown(times[0], times[1:]))
    print(f"\n{headline(results)}\n\n{machine(results)}; written to {options.json}")
    if options.store:
        store(results, sys.argv[1:])
        print("docs/results/gpu.json")
    failed = [s for sides in results.values() for s in sides.values() if "failed" in s]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
