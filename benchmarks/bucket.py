"""What a run in a bucket costs: requests and bytes of a start, a step, a save and a report, the
time of a step, and the speed of rows.

    uv run --extra gcs python -m benchmarks.bucket [--delay=0.01] [--rows [--row_length=4096]]

The bucket is `tests.bucket` in a process of its own, which waits `--delay` seconds before each
answer. Without `--rows`: a nano run is resumed when its folder has 1, 100 and 1,000 checkpoints
(those before the newest five have a manifest alone, which is all that a start looks at), and then
trained in a local folder for comparison. With `--rows`: rows are read in random order.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

BASE, STEPS = 1100, 30  # steps before the first measurement, and in each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=0.01, help="seconds before each answer")
    parser.add_argument("--rows", action="store_true", help="measure the speed of rows")
    parser.add_argument("--row_length", type=int, default=4096, help="tokens of a row")
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bucket"], stdout=subprocess.PIPE, text=True
    )
    try:
        lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(4)]
        os.environ.update(dict(line.split("=", 1) for line in lines))
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        print(f"delay {options.delay:g} s, load {os.getloadavg()[0]:.1f}")
        if options.rows:
            rows(options.delay, options.row_length)
        else:
            requests(options.delay)
    finally:
        server.terminate()


def _ask(path: str, post: bool = False) -> dict:
    request = urllib.request.Request(
        os.environ["STORAGE_EMULATOR_HOST"] + path, method="POST" if post else "GET"
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def _counts() -> list[int]:
    """[requests, bytes up, bytes down] since the last call."""
    rows = _ask("/_count?reset=1").values()
    return [sum(row[i] for row in rows) for i in range(3)]


def _config(steps: int, every: int):
    from qwen3next_jax.config import (
        CheckpointConfig,
        Config,
        DataConfig,
        EvalConfig,
        ModelConfig,
        OptimizerConfig,
        SyntheticConfig,
        TrainConfig,
    )

    return Config(
        name="nano",
        model=ModelConfig(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            full_attention_interval=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=0,
            intermediate_size=64,
            mtp_depth=0,
            dtype="float32",
        ),
        data=DataConfig(source="mqar", synthetic=SyntheticConfig(pairs=4)),
        train=TrainConfig(steps=steps, batch_size=8, sequence_length=256, log_every=1),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=1),
        checkpoint=CheckpointConfig(every=every, keep_last=3, keep_every=1),
        eval=EvalConfig(every=10**6, rows=8, sample_tokens=0),
    )


def train(config, workdir, **options) -> None:
    from qwen3next_jax.runs import train as runs_train
    from qwen3next_jax.runs.start import prepare_start

    runs_train.train(prepare_start(config, workdir), **options)


def requests(delay: float) -> None:
    from qwen3next_jax.common.storage import to_path
    from qwen3next_jax.reporting.page import write_report

    workdir = to_path("gs://bucket/run")
    _silently(train, _config(BASE, BASE), workdir)
    template = json.loads((workdir / f"checkpoints/{BASE}/manifest.json").read_text())
    there = 1
    print("| checkpoints | start | 20 steps | save | report |\n|---|---|---|---|---|")
    for number, checkpoints in enumerate((1, 100, 1000)):
        _ask("/_set?delay=0", post=True)
        for step in range(there, checkpoints):
            _add_checkpoint(workdir, step, template, with_arrays=step > checkpoints - 6)
        there = checkpoints
        _ask(f"/_set?delay={delay}", post=True)
        _counts()
        found = {}
        first = BASE + number * STEPS

        def measure(trainer, first=first, found=found):
            found["start"] = _counts()

            def hook(info):
                if info.step == first + 20:
                    found["steps"] = _counts()

            trainer.add_hook(hook, every=1)

        _silently(train, _config(first + STEPS, STEPS * 10**3), workdir, add_hooks=measure)
        found["save"] = _counts()
        with tempfile.TemporaryDirectory() as folder:
            write_report([workdir], pathlib.Path(folder) / "report.html")
        found["report"] = _counts()
        cells = [
            f"{n} requests, {up / 1e3:,.0f} kB up, {down / 1e3:,.0f} kB down"
            for n, up, down in (found[name] for name in ("start", "steps", "save", "report"))
        ]
        print(f"| {checkpoints:,} | " + " | ".join(cells) + " |", flush=True)
    _step_times()


def _add_checkpoint(workdir, step: int, template: dict, with_arrays: bool) -> None:
    """Adds a checkpoint that looks as if the run had saved it."""
    record = template | {"step": step}
    if with_arrays:
        source = workdir / "checkpoints" / str(BASE) / template["arrays"]
        name = f"{step}-{template['run'][:8]}-benchmark-0"
        for path in source.entries():
            target = workdir / "arrays" / name / str(path.relative_to(source))
            target.write_bytes(path.read_bytes())
        record["arrays"] = f"../../arrays/{name}"
    (workdir / f"checkpoints/{step}/manifest.json").write_text(json.dumps(record))


def _step_times() -> None:
    """Steps with a save every 20, in a local folder and in the bucket, in turn."""
    from qwen3next_jax.common.events import read_events
    from qwen3next_jax.common.storage import to_path

    seconds = {"local": [], "bucket": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(3):
            for kind in seconds:
                place = f"{folder}/{turn}" if kind == "local" else f"gs://bucket/turn-{turn}"
                workdir = to_path(place)
                _silently(train, _config(200, 20), workdir)
                events = read_events(workdir / "metrics.jsonl")
                seconds[kind] += [
                    e["seconds"] for e in events if e["event"] == "train" and e["step"] > 10
                ]
    for kind, values in seconds.items():
        print(
            f"a step, {kind}: median {1e3 * statistics.median(values):.2f} ms, "
            f"mean {1e3 * statistics.mean(values):.2f} ms ({len(values)} steps)"
        )


def rows(delay: float, length: int) -> None:
    import numpy as np

    from qwen3next_jax.config import DataConfig
    from qwen3next_jax.data.pipeline import TextData

    batch, batches = 8, 60
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for i in range(40):
            text = "".join(map(chr, random.integers(32, 127, 400_000)))
            pathlib.Path(folder, f"{i}.txt").write_text(text)
        config = DataConfig(path=f"{folder}/*.txt", heldout_fraction=0.1)
        local, remote = (
            TextData(dataclasses.replace(config, prepared_dir=place), length, batch)
            for place in (f"{folder}/prepared", "gs://bucket/prepared")
        )
        _ask(f"/_set?delay={delay}", post=True)
        ours, theirs = remote.batches(0), local.batches(0)
        for _ in range(8):  # also fills the buffers of both
            expected, found = next(theirs), next(ours)
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
        for kind, source in (("bucket", ours), ("local", theirs)):
            begun = time.perf_counter()
            for _ in range(batches):
                next(source)
            speed = batches * batch * length / (time.perf_counter() - begun)
            print(f"{kind}: {speed:,.0f} tokens/s, rows of {length} tokens")


def _silently(function, *arguments, **options) -> None:
    """Calls `function` without its output."""
    sys.stdout.flush()
    out = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            function(*arguments, **options)
        finally:
            sys.stdout.flush()
            os.dup2(out, 1)
            os.close(out)


if __name__ == "__main__":
    main()
