"""For whoever has an H100 or H200: are the kernels right there, how fast are they, and how fast
is a training step?

    uv run --extra gpu python benchmarks/gpu.py [--parts=operator,training]
        [--config configs/small.py] [--json gpu.json]
    python benchmarks/gpu.py --interpret     the same code on a CPU, tiny and interpreted: its
                                             times say nothing

Parts, the cheapest and most important first:

    correctness   the kernels that are timed, against the recurrence in float64 (on the CPU) and
                  the XLA form (on the device)
    operator      the delta rule's kernels, forward, and forward and backward, at 1 x 32,768 and
                  4 x 8,192 tokens, 16 key and 32 value heads of 128, bfloat16, beside the least
                  time that the bytes and products leave (docs/notes/2026-11-26-gpu.md)
    training      the config's training step with all kernels: tokens/s, MFU against 989 TFLOP/s,
                  memory, time by kernel
    layer         forward and backward of one recurrent layer of the config with kernels, with
                  kernels and arrays by head, and in XLA; of norm and gate, convolution and
                  experts with kernels and in XLA
    peers         `operator` of flash-linear-attention (`fla`, torch) and jax-linear-attention
                  (`jla`), where they can be imported
    xla           `operator` in XLA alone
    training_xla  the training step in XLA alone
    widths        `correctness` for heads of all other widths
    tokamax       its grouped products against the XLA form

Each is a process of its own, and every result of it is printed and written to the JSON file at
once. So what fails, does not end (--minutes) or is interrupted (Ctrl-C; twice within two
seconds: all of them) costs itself alone, but for `correctness`, without which kernels are not
timed, and stands in the file and in the table at the end with its reason. Please send the file
to the authors.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
PARTS = (
    "correctness",
    "operator",
    "training",
    "layer",
    "peers",
    "xla",
    "training_xla",
    "widths",
    "tokamax",
)
# are timed where `correctness` found none of theirs wrong
OF_KERNELS = "operator", "training", "layer"
NOT_INTERPRETED = "peers", "training_xla", "widths"
NO_GPU = 3  # exit code of a part
INTERRUPTED, GONE = "interrupted", "there is no GPU, or none any more"


def write(file: pathlib.Path, results: dict):
    """Whole or not at all."""
    beside = file.with_name(file.name + ".tmp")
    beside.write_text(json.dumps(results, indent=1))
    os.replace(beside, file)


def note(file: pathlib.Path, part: str, what: str, said: str, **numbers):
    """One result, printed and written."""
    print(f"{what}: {said}", flush=True)
    results = json.loads(file.read_text())
    results.setdefault(part, []).append(dict(what=what, said=said) | numbers)
    write(file, results)


def ended(args, name: str) -> str:
    """Runs a part; why it did not come to its end, or "" where it did."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # torch and several processes share it
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": paths}
    # the interpreter waits for ever where there are fewer threads than it waits in, one a device
    if args.interpret:
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
            "--xla_backend_optimization_level=0",
        }
    command = [sys.executable, ROOT / "benchmarks" / "gpu_parts.py", *sys.argv[1:], f"--one={name}"]
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = child.wait(60 * args.minutes)
    except subprocess.TimeoutExpired:
        return f"not done after {args.minutes:g} minutes (--minutes)"
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        # a process on a GPU takes a second to end
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        child.wait()
        signal.signal(signal.SIGINT, before)
    if code == NO_GPU:
        return GONE
    return (
        ""
        if code == 0
        else f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="", help="some of them, by commas; default: all")
    parser.add_argument("--config", default="")
    parser.add_argument(
        "--json", type=pathlib.Path, default="gpu.json", help="a file that is not there yet"
    )
    parser.add_argument("--rounds", type=int, default=20, help="calls or steps that are timed")
    parser.add_argument("--minutes", type=float, default=10, help="that a part may take")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = 1 if args.interpret else args.rounds
    args.config = args.config or str(
        ROOT / "configs" / ("tiny.py" if args.interpret else "small.py")
    )
    return args


def main() -> int:
    args = options()
    file, asked = args.json, [name.strip() for name in args.parts.split(",") if args.parts]
    wrong = [
        f"--parts={name}: expected some of {', '.join(PARTS)}"
        for name in asked
        if name not in PARTS
    ]
    wrong += [f"--config={args.config}: no such file"] * (not pathlib.Path(args.config).is_file())
    wrong += [
        f"--{name}={value:g}: expected more than nothing"
        for name, value in (("rounds", args.rounds), ("minutes", args.minutes))
        if not value > 0
    ]
    wrong += ["no jax here: expected `uv run --extra gpu python benchmarks/gpu.py`"] * (
        importlib.util.find_spec("jax") is None
    )
    if not wrong:
        try:
            file.open("x").close()
        except FileExistsError:
            wrong.append(f"{file} is there already: give another --json")
        except OSError as error:
            wrong.append(f"--json={file}: {error.strerror}")
    if wrong:
        print(f"error: {wrong[0]}", file=sys.stderr)
        return 2
    write(file, {})
    with contextlib.suppress(KeyboardInterrupt):  # what is there is shown
        run_parts(args, file, asked)
    results = json.loads(file.read_text())
    lines = [line for name in PARTS for line in results.get(name, ())]
    if [line.get("failed") for line in lines] == [GONE]:
        file.unlink()
        return 2  # the part said why
    table(results)
    print(f"written to {file}")
    return 1 if any("failed" in line or not line.get("right", True) for line in lines) else 0


def run_parts(args, file, asked):
    chosen = [
        name
        for name in PARTS
        if name in asked or not asked and not (args.interpret and name in NOT_INTERPRETED)
    ]
    if "correctness" not in chosen and set(chosen) & set(OF_KERNELS):
        chosen.insert(0, "correctness")
    terminated, interrupted = [], float("-inf")
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, lambda *_: (terminated.append(True), signal.raise_signal(signal.SIGINT)))
    for name in chosen:
        checked = json.loads(file.read_text()).get("correctness", [])
        needed = [
            line
            for line in checked
            if name != "operator" or not line["what"].startswith(("convolution", "norm"))
        ]
        if name in OF_KERNELS and not all(line.get("right") for line in needed):
            unfinished = any("failed" in line and line["what"] == "correctness" for line in checked)
            why = "not timed, as " + (
                "`correctness` did not come to its end"
                if unfinished
                else "not all of its kernels were found right"
            )
        else:
            print(f"\n{name}", flush=True)
            begun = time.monotonic()
            why = ended(args, name)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        if why:
            note(file, name, name, f"failed: {why}", failed=why)
        if why == GONE:
            return
        if why == INTERRUPTED:
            if terminated or time.monotonic() - interrupted < 2:
                return
            interrupted = time.monotonic()


def table(results: dict):
    print("\n| part | what | result |\n|---|---|---|")
    for name in PARTS:
        for line in results.get(name, ()):
            print(f"| {name} | {line['what']} | {line['said']} |")


if __name__ == "__main__":
    sys.exit(main())
