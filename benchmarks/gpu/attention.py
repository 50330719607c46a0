"""Attention by cuDNN on this GPU: is it right, and how long does it take beside XLA's form?

    uv run --extra gpu python benchmarks/gpu/attention.py [--json attention.json]
    python benchmarks/gpu/attention.py --tiny     the same on a CPU, with small arrays and with
                                                  cuDNN's calls computed in JAX: its times say
                                                  nothing

First, packed = separate: rows of documents of many lengths, with padding, against XLA's form of
each document alone. Then, by shape, the relative L2 difference between cuDNN and XLA's form for the
output and each gradient, and the milliseconds of the forward pass and of both passes. Rows have six
documents, one document, or documents of lengths as in text (of 20 tokens to a whole row). Exits
with 1 if a difference is more than the kernels' tolerance, or if a shape failed.
"""

import concurrent.futures
import functools
import pathlib
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from qwen3next_jax.kernels.gpu import attention as cudnn_attention
from qwen3next_jax.kernels.gpu import cudnn
from qwen3next_jax.ops import attention

SHAPES = (  # rows, tokens, query heads, key/value heads, width, documents
    (8, 4096, 16, 2, 256, "six"),
    (32, 2048, 8, 2, 128, "six"),
    (1, 32768, 16, 2, 256, "six"),
    (1, 32768, 16, 2, 256, "one"),
    (8, 4096, 16, 2, 256, "text"),
    (1, 32768, 16, 2, 256, "text"),
)
TINY = ((2, 256, 4, 2, 8, "six"), (2, 256, 4, 2, 8, "one"), (1, 512, 4, 2, 8, "text"))
CALLS = 5  # one behind the other, so that what the host does to start one is not waited for
RESULTS = ("o", "dq", "dk", "dv")


def lengths_of(documents: str, t: int, seed: int) -> list[int]:
    """Returns the lengths of the documents of a row of t tokens."""
    if documents == "one":
        return [t]
    if documents == "six":
        return [t // 6] * 5 + [t - 5 * (t // 6)]
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < t:  # log-normal, with a median of 400 tokens
        length = max(20, int(rng.lognormal(np.log(400), 1.2)))
        lengths.append(min(length, t - sum(lengths)))
    return lengths


def problem(b, t, n, m, d, documents):
    """Returns q, k, v, do and segment ids."""
    rng = np.random.default_rng(0)
    draw = jax.jit(
        lambda key, heads: jax.random.normal(key, (b, t, heads, d), jnp.bfloat16), static_argnums=1
    )
    q, k, v, do = (draw(jax.random.key(i), heads) for i, heads in enumerate((n, m, m, n)))
    rows = (lengths_of(documents, t, int(rng.integers(2**31))) for _ in range(b))
    ids = np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows])
    return q, k, v, do, jnp.asarray(ids, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def forward(name, q, k, v, do, ids):
    return attention(q, k, v, segment_ids=ids, implementation=name)


@functools.partial(jax.jit, static_argnums=0)
def both(name, q, k, v, do, ids):
    o, pullback = jax.vjp(lambda *x: attention(*x, segment_ids=ids, implementation=name), q, k, v)
    return o, *pullback(do)


def errors(got, want) -> dict[str, float]:
    """Returns the relative L2 difference of each result."""
    found = {}
    for name, a, b in zip(RESULTS, got, want, strict=True):
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        found[name] = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    return found


def packed_and_separate(t: int, width: int) -> dict[str, float]:
    """Returns the differences between packed rows by cuDNN and the same documents in rows of their
    own by XLA.
    """
    rows = (t // 2 + 1, 70, 1, 64, 65), (t // 8 + 1, t // 8, 20, t // 4 + 1, 3), (t,)
    q, k, v, do, _ = problem(len(rows), t, 4, 2, width, "one")
    ids = np.zeros((len(rows), t), np.int32)
    places = []  # of each document: its row, and the indices of its tokens there
    for i, lengths in enumerate(rows):
        ids[i, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        edges = np.cumsum((0, *lengths))
        places += [(i, np.arange(a, b)) for a, b in zip(edges, edges[1:])]
    packed = both("cudnn", q, k, v, do, jnp.asarray(ids))

    row = np.array([i for i, _ in places])[:, None]
    token = np.stack([np.pad(at, (0, t - len(at))) for _, at in places])
    alone = np.stack([np.arange(t) < len(at) for _, at in places])
    separate = both("xla", *(x[row, token] for x in (q, k, v, do)), jnp.asarray(alone, jnp.int32))
    return errors([x[row, token][alone] for x in packed], [x[alone] for x in separate])


def milliseconds(f, *arguments) -> float:
    """Returns the median time of a call, measured over several calls in a row."""

    def calls():
        for _ in range(CALLS):
            result = f(*arguments)
        jax.block_until_ready(result)

    with harness.alone():
        seconds, _ = harness.median_seconds(calls, 7)
    return 1e3 * seconds / CALLS


def measure(shape: tuple) -> dict:
    """Returns the differences of a shape's results, and the milliseconds of both implementations,
    each forward and with the backward pass.
    """
    arguments = problem(*shape)
    programs = [(name, passes) for name in ("xla", "cudnn") for passes in (forward, both)]

    def compiled(program):
        name, passes = program
        return passes.lower(name, *arguments).compile()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = dict(zip(programs, threads.map(compiled, programs)))
    apart = errors(runs["cudnn", both](*arguments), runs["xla", both](*arguments))
    times = {
        name: [milliseconds(runs[name, passes], *arguments) for passes in (forward, both)]
        for name in ("xla", "cudnn")
    }
    return dict(shape=shape, ms=times, apart=apart)


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small arrays, on a CPU")
    parser.add_argument("--json", type=pathlib.Path, help="file to which the figures are written")
    options = parser.parse_args()
    if options.tiny:
        jax.config.update("jax_platforms", "cpu")
    elif (
        reason := cudnn.unsupported_reason() if jax.default_backend() == "gpu" else "without a GPU"
    ):
        print(f"error: cuDNN cannot run {reason}; --tiny runs this on a CPU", file=sys.stderr)
        return 3
    device = jax.devices()[0].device_kind
    found = dict(
        device=device,
        jax=jax.__version__,
        cudnn=cudnn.cudnn_version(),
        python=platform.python_version(),
    )
    print(f"{device}, jax {found['jax']}, cuDNN {found['cudnn']}")
    found["packed = separate"], found["shapes"], found["failed"] = {}, [], {}
    worst, bar = 0.0, cudnn_attention.TOLERANCE
    text = lambda apart: ", ".join(f"{name} {error:.1e}" for name, error in apart.items())
    for width in (8,) if options.tiny else (64, 128, 256):
        name = f"packed = separate, heads of {width}"
        try:
            apart = packed_and_separate(512 if options.tiny else 2048, width)
        except Exception as error:  # the others are measured nevertheless
            found["failed"][name] = harness.one_line(error)
            print(f"{name}: failed: {found['failed'][name]}", flush=True)
            continue
        found["packed = separate"][width] = apart
        worst = max(worst, *apart.values())
        print(f"{name}: {text(apart)}", flush=True)
    print()
    harness.print_header(
        "rows, tokens, heads, width, documents", "XLA forward / both, ms", "cuDNN", "difference"
    )
    for shape in TINY if options.tiny else SHAPES:
        b, t, n, m, d, documents = shape
        name = f"{b}, {t}, {n}/{m}, {d}, {documents}"
        try:
            measured = measure(shape)
        except Exception as error:
            found["failed"][name] = harness.one_line(error)
            harness.print_row(name, f"failed: {found['failed'][name]}", "", "")
        else:
            found["shapes"].append(measured)
            worst = max(worst, *measured["apart"].values())
            ms = ["{:.2f} / {:.2f}".format(*measured["ms"][side]) for side in ("xla", "cudnn")]
            harness.print_row(name, *ms, text(measured["apart"]))
        if options.json:  # after every shape, so that an end in between loses nothing
            harness.write_json(options.json, found)
    if not worst <= bar:
        print(f"error: a difference of {worst:.2g}: expected at most {bar:.2g}", file=sys.stderr)
    return int(bool(found["failed"]) or not worst <= bar)


if __name__ == "__main__":
    sys.exit(main())
