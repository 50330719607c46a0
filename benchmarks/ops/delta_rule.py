"""The gated delta rule on this machine, float32, forward + backward: growth with the length, and
transformers' torch form.

    python benchmarks/ops/delta_rule.py [--python=/path/to/python/with/torch] [--batch 1] [--length
    1024] [--longest 65536]
                                    [--key_heads 4] [--value_heads 8] [--width 64]

Equality of outputs and of every gradient is asserted before anything is timed. With --python,
`torch_chunk_gated_delta_rule` runs in that interpreter on the same inputs, in turns with ours,
and the medians are compared. Then the chunked form from 1024 tokens to --longest, and the slope
of log time over log length. The machine must be idle otherwise.
"""

import os
import statistics
import tempfile
import time

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import harness
from qwen3next_jax.commands import process_setup
from qwen3next_jax.ops import gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta")
# seconds between turns: OpenMP's threads (torch's) keep a core busy for a while after their work
_PAUSE = 0.5


def inputs(batch, length, groups, heads, width):
    """q, k, v, g, beta and the cotangent of o."""
    rng = np.random.default_rng(0)
    a = lambda *shape: rng.normal(size=(batch, length, *shape)).astype(np.float32)
    gates = (
        (-np.logaddexp(0, a(heads))).astype(np.float32),
        (1 / (1 + np.exp(-a(heads)))).astype(np.float32),
    )
    return a(groups, width), a(groups, width), a(heads, width), *gates, a(heads, width)


def form(implementation):
    @jax.jit
    def run(q, k, v, g, beta, do):
        f = lambda *x: gated_delta_rule(*x[:3], g=x[3], beta=x[4], implementation=implementation)[0]
        o, pullback = jax.vjp(f, q, k, v, g, beta)
        return o, *pullback(do)

    return run


def seconds(run, x, runs: int) -> list[float]:
    jax.block_until_ready(run(*x))
    return [harness.seconds_of(lambda: jax.block_until_ready(run(*x))) for _ in range(runs)]


class Peer(harness.Peer):
    """torch_chunk_gated_delta_rule in another interpreter."""

    def __init__(self, python: str, x, directory: str):
        files = [f"{directory}/inputs.safetensors", f"{directory}/results.safetensors"]
        save_file(dict(zip((*NAMES, "do"), x)), files[0])
        super().__init__(python, "delta_rule", *files)
        results = load_file(files[1])
        self.results = [results[name] for name in ("o", *("d" + n for n in NAMES))]


def equal(got, want, bar: float, name: str):
    worst = max(
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True)
    )
    assert worst <= bar, f"{name}: relative L2 error {worst:.1e} of an output or gradient"
    print(f"  {name}: outputs and gradients equal to {worst:.0e}")


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--python", help="interpreter with torch and transformers")
    parser.add_argument(
        "--blocks", type=int, default=8, help="turns of the comparison, of 5 runs each"
    )
    for name, default in (
        ("batch", 1),
        ("length", 1024),
        ("longest", 65536),
        ("key_heads", 4),
        ("value_heads", 8),
        ("width", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    process_setup.keep_freed_memory()  # as train.py does; the peer does the same
    x = inputs(a.batch, a.length, a.key_heads, a.value_heads, a.width)
    forms = {name: form(name) for name in ("chunked", "associative", "recurrent")}
    print(
        f"{a.batch} × {a.length} tokens, {a.key_heads} key and {a.value_heads} value heads of "
        f"{a.width}, {os.cpu_count()} threads"
    )
    want = forms["recurrent"](*x)
    equal(forms["chunked"](*x), want, 1e-4, "chunked")
    equal(forms["associative"](*x), want, 1e-4, "associative")
    if a.python:
        with tempfile.TemporaryDirectory() as directory:
            peer = Peer(a.python, x, directory)
        equal(
            peer.results,
            want,
            1e-4,
            f"transformers {peer.versions['transformers']}, torch {peer.versions['torch']}",
        )
        ours, theirs = [], []
        for _ in range(a.blocks):
            ours += seconds(forms["chunked"], x, 5)
            time.sleep(_PAUSE)
            theirs += peer.ask(runs=6)[1:]
            time.sleep(_PAUSE)
        peer.close()
        for name, times in (("chunked", ours), ("transformers", theirs)):
            low, median, high = (1e3 * y for y in statistics.quantiles(times, n=4))
            print(
                f"  {name:12} median {median:8.1f} ms, quartiles {low:.1f}–{high:.1f}, "
                f"{len(times)} runs"
            )
        print(f"  {statistics.median(theirs) / statistics.median(ours):.2f} × transformers' speed")
    for name in ("associative", "recurrent"):
        print(f"  {name:12} best of 3 {1e3 * min(seconds(forms[name], x, 3)):8.1f} ms")
    lengths = [1024 * 2**i for i in range((a.longest // 1024).bit_length())]
    times = [
        min(seconds(forms["chunked"], inputs(1, n, a.key_heads, a.value_heads, a.width), 3))
        for n in lengths
    ]
    print("chunked by length, one row, best of 3:")
    for n, t in zip(lengths, times):
        print(f"  {n:6d} tokens {1e3 * t:9.1f} ms")
    if len(lengths) > 1:
        print(f"  log-log slope {np.polyfit(np.log(lengths), np.log(times), 1)[0]:.3f}")


if __name__ == "__main__":
    main()
