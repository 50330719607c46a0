"""For whoever has an H100 or H200: are the kernels right there, how fast are they, and how fast is a training step?

    uv run --extra gpu python benchmarks/gpu.py [--config configs/small.py] [--json gpu.json]
    python benchmarks/gpu.py --interpret          the same code on a CPU, tiny and interpreted: its times say nothing

First every kind of call against the float64 recurrence (on the CPU) and against the XLA form (on the device): wrong ones are
not timed. Then forward, and forward and backward, at 1 x 32,768 and 4 x 8,192 tokens, 16 key and 32 value heads of 128, bfloat16, in
turns of some calls: the kernels, the XLA form, flash-linear-attention's (`fla`, torch) and jax-linear-attention's (`jla`) where they can
be imported, and beside them the least time that the bytes and products leave (docs/gpu.md). tokamax's kernels are tried against the XLA
form, too, and timed beside it at the sizes of configs/small.py. Then the config's training step with all kernels and with none:
tokens/s, MFU against 989 TFLOP/s. Everything also goes to the JSON file: please send it to the authors.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import platform
import runpy
import statistics
import sys
import tempfile
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu

from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.ops import attention, gated_delta_rule, grouped_matmul, kernel_trial, pallas_gpu_ragged
from qwen3next_jax.ops import pallas_gpu_causal_conv1d as convolution
from qwen3next_jax.ops import pallas_gpu_gated_norm as norm
from qwen3next_jax.ops.attention import pallas_gpu as attention_gpu
from qwen3next_jax.ops.delta_rule import pallas_gpu_trial
from qwen3next_jax.parallel.mesh import one_device
from qwen3next_jax.training.step import init_state, make_train_step

ROOT = pathlib.Path(__file__).parents[1]
PEAK = 989.4e12  # bfloat16 products of an H100 or H200 (SXM), by its data sheet
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, likewise
# Of one token: bytes of all 16 key and 32 value heads of 128, each array once, and FLOP of a value head; forward, forward and backward
# (states and inverses saved and read again).
LEAST = {"forward": (24_832, 163_840), "forward + backward": (24_832 + 94_720, 163_840 + 475_136)}
BARS = {"o": 0.01, "final": 0.01}  # relative L2 against float64; gradients 0.03


def arrays(batch, time_, groups, heads, key, value, seed=0):
    """Inputs and cotangents, bfloat16 and float32 as in training."""
    rng = np.random.default_rng(seed)
    make = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    numbers = lambda: make(batch, time_, heads, dtype=jnp.float32)
    x = dict(q=make(batch, time_, groups, key), k=make(batch, time_, groups, key), v=make(batch, time_, heads, value),
             g=-jnp.exp(numbers() - 2), beta=jax.nn.sigmoid(numbers()))
    return x, make(batch, time_, heads, value)


@functools.partial(jax.jit, static_argnames=("implementation", "backward"))
def run(x, do, implementation, backward):
    if not backward:
        return gated_delta_rule(**x, implementation=implementation)
    (o, final), pullback = jax.vjp(lambda x: gated_delta_rule(**x, implementation=implementation), x)
    return dict(o=o, final=final) | pullback((do.astype(o.dtype), jnp.ones_like(final)))[0]


def errors(sizes) -> dict:
    """Relative L2 errors of the kernels against the recurrence in float64 on the CPU."""
    x, do = arrays(*sizes)
    got = jax.tree.map(lambda a: np.asarray(a, np.float64), run(x, do, "pallas_gpu", True))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, do))
        want = run(*wide, "recurrent", True)
    return {n: float(np.linalg.norm(got[n] - np.asarray(w)) / np.linalg.norm(np.asarray(w))) for n, w in want.items()}


def of_widths(key: int, value: int, interpret: bool) -> tuple[dict, dict]:
    """Errors of the kernels for heads of these widths, and those of them that are too large."""
    line = errors((1, 130, 1, 2, key, value))
    bad = {n: e for n, e in line.items() if not e <= BARS.get(n, 0.03)}
    for normalize, erase in ((True, True), (False, True), (True, False)) if (key, value) == (128, 128) else ((True, True),):
        name, apart = pallas_gpu_trial.worst(key, value, normalize, erase, normalize and erase, interpret)
        if not apart <= pallas_gpu_trial.APART:
            bad[f"{name} against XLA, normalize {normalize}, erase {erase}"] = apart
    return line, bad


def correctness(compared: dict, interpret: bool) -> tuple[list, bool]:
    """`compared`: what `of_widths` gives of (key, value), to come."""
    found, right = [], True
    for (key, value), result in compared.items():
        line, bad = result.result()
        right &= not bad
        found.append(dict(key=key, value=value, errors=line, wrong=bad))
        print(f"K {key:3} V {value:3}: {'WRONG ' + str(bad) if bad else 'right'}; against float64 o {line['o']:.2%}, worst gradient "
              f"{max(e for n, e in line.items() if n not in BARS):.2%}", flush=True)
    for what, (name, apart), bar in (("convolution", convolution.worst("silu", "bfloat16", 4, interpret), convolution.APART),
                                     ("norm and gate", norm.worst(1e-6, 128, interpret), norm.APART)):
        right &= apart <= bar
        found.append(dict(what=what, worst=name, apart=apart))
        print(f"{what}: {'right' if apart <= bar else 'WRONG'}; {name} {apart:.2%} from XLA's", flush=True)
    return found, right


def fla(sizes) -> dict:
    """{pass: function that runs it} of flash-linear-attention; {} where it cannot be imported."""
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        print(f"flash-linear-attention: not there ({error})")
        return {}
    batch, time_, _, heads, key, value = sizes  # the heads of the keys repeated, as its callers do
    make = lambda width: torch.randn(batch, time_, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v, do = make(key), make(key), make(value), make(value)
    g, beta = (f(torch.randn(batch, time_, heads, device="cuda")) for f in (torch.nn.functional.logsigmoid, torch.sigmoid))

    def forward():
        chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return torch.cuda.synchronize

    def both():
        torch.autograd.backward(chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0], do)
        return torch.cuda.synchronize

    return {"forward": forward, "forward + backward": both}


def jla(pool, sizes, x, do) -> dict:
    """The same of jax-linear-attention, which also has the heads of the keys repeated."""
    try:
        from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule as other
    except ImportError as error:
        print(f"jax-linear-attention: not there ({error})")
        return {}
    q, k = (jnp.repeat(x[name], sizes[3] // sizes[2], axis=2) for name in "qk")
    forward = lambda *inputs: other(*inputs, use_qk_l2norm=True)[0]
    both = lambda do, *inputs: jax.vjp(forward, *inputs)[1](do.astype(inputs[2].dtype))
    inputs = q, k, x["v"], x["g"], x["beta"]
    return {"forward": compiling(pool, forward, *inputs), "forward + backward": compiling(pool, both, do, *inputs)}


def runs(name: str, function) -> bool:
    try:
        wait(function())
    except Exception as error:  # whatever a peer says of this machine
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return False
    return True


def wait(result):
    result() if callable(result) else jax.block_until_ready(result)


CALLS = 5  # of a turn, one behind the other, so that what the host does to start one is not waited for


def in_turns(functions: dict, rounds: int) -> dict:
    """Median seconds of a call of each, after two turns to warm up."""
    seconds = {name: [] for name in functions}
    for i in range(rounds + 2):
        for name, function in functions.items():
            begun = time.perf_counter()
            for _ in range(CALLS):
                result = function()
            wait(result)
            if i >= 2:
                seconds[name].append((time.perf_counter() - begun) / CALLS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compiling(pool, function, *arguments):
    """A call of the function with these arguments, the program to come: it is lowered here and compiled in the pool."""
    program = pool.submit(jax.jit(function).lower(*arguments).compile)
    return lambda: program.result()(*arguments)


def operator(pool, interpret: bool) -> list:
    """[(rows, tokens, pass, {form: function})], their programs on the way."""
    cases = []
    for batch, time_ in ((1, 128),) if interpret else ((1, 32_768), (4, 8_192)):
        sizes = (batch, time_, 1, 2, 64, 64) if interpret else (batch, time_, 16, 32, 128, 128)
        x, do = arrays(*sizes)
        peers = {} if interpret else {"fla": fla(sizes), "jla": jla(pool, sizes, x, do)}
        for name, backward in (("forward", False), ("forward + backward", True)):
            functions = {form: compiling(pool, functools.partial(run.__wrapped__, implementation=form, backward=backward), x, do)
                         for form in ("pallas_gpu", "chunked")}
            cases.append((batch, time_, name, functions | {peer: f[name] for peer, f in peers.items() if name in f}))
    return cases


def operator_times(cases: list, interpret: bool, rounds: int) -> list:
    found, device = [], jax.devices()[0].device_kind
    bandwidth = next((b for name, b in BANDWIDTH.items() if name in device), None)
    for batch, time_, name, functions in cases:
        functions = {form: f for form, f in functions.items() if form in ("pallas_gpu", "chunked") or runs(f"{form}, {name}", f)}
        milliseconds = {form: 1e3 * s for form, s in in_turns(functions, rounds).items()}
        if bandwidth and not interpret:
            moved, computed = LEAST[name]
            milliseconds["least"] = 1e3 * batch * time_ * max(moved / bandwidth, 32 * computed / PEAK)
        by_kernel = {} if interpret else {form: kernel_times(functions[form]) for form in ("pallas_gpu", "jla") if form in functions}
        found.append(dict(batch=batch, tokens=time_, what=name, milliseconds=milliseconds, kernels=by_kernel))
        print(f"{batch} x {time_:6} {name:18}", *(f"{form} {ms:.3f} ms" for form, ms in milliseconds.items()), sep="  ", flush=True)
        for form, kernels in by_kernel.items():
            longest = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in kernels.items() if ms > 0.02)
            print(f"  {form}, kernels alone: {sum(kernels.values()):.3f} ms: {longest}", flush=True)
    return found


def kernel_times(function, times: int = 3) -> dict:
    """{kernel: milliseconds of a call} by the profiler, the longest first."""
    nanoseconds = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(function())
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            planes = [plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes if "GPU" in plane.name]
            for event in (e for plane in planes for line in plane.lines if line.name.startswith("Stream") for e in line.events):
                nanoseconds[event.name] += event.duration_ns
    return {name: 1e-6 * ns / times for name, ns in nanoseconds.most_common()}


def library(interpret: bool) -> tuple[list, bool]:
    """tokamax's kernels against the XLA forms; interpreted, the product of rows alone: the others use what the interpreter lacks."""
    if why := pallas_gpu_ragged.tokamax_refusal():
        print(f"tokamax's kernels: not tried: {why}")
        return [], True
    product = pallas_gpu_ragged.matmul

    def gradients(x, w, sizes, dy):
        _, pullback = jax.vjp(lambda w: grouped_matmul(x, w, sizes), w)
        return product(dy, w.swapaxes(1, 2), sizes), *pullback(dy)

    if interpret:
        with mosaic_gpu.force_gpu_interpret_mode():
            found = [dict(what="product of rows", apart=pallas_gpu_ragged.worst((product, gradients)), most=pallas_gpu_ragged.APART)]
    else:
        found = [dict(what="products", apart=pallas_gpu_ragged.worst(), most=pallas_gpu_ragged.APART)]
        found += [dict(what=f"attention, heads of {width}", apart=attention_gpu.worst(width), most=attention_gpu.APART)
                  for width in attention_gpu.WIDTHS]
    for line in found:
        line["right"] = line["apart"][1] <= line["most"]
        print(f"tokamax, {line['what']}: {'right' if line['right'] else 'WRONG'}; {line['apart'][0]} {line['apart'][1]:.2%} from XLA's")
    return found, all(line["right"] for line in found)


def library_times(interpret: bool, rounds: int) -> list:
    """Forward and backward at the sizes of configs/small.py: tokamax's kernels and the XLA form."""
    rng, found, (rows, t) = np.random.default_rng(0), [], (1, 128) if interpret else (32, 2048)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    ids = jnp.asarray(np.repeat([[1] * (t // 4) + [2] * (t - t // 4)], rows, axis=0))
    sizes = jnp.full((16,), rows * t // 8, jnp.int32)
    cases = {"attention": (lambda form, *x: attention(*x, segment_ids=ids, implementation=form), "xla",
                           (make(rows, t, 8, 128), make(rows, t, 2, 128), make(rows, t, 2, 128))),
             "products": (lambda form, *x: grouped_matmul(*x, sizes, implementation=form), "blocked",
                          (make(2 * rows * t, 512), make(16, 512, 256)))}
    for what, (f, xla, arguments) in cases.items():
        def both(form, *x, f=f):
            y, pullback = jax.vjp(functools.partial(f, form), *x)
            return y, pullback(y)
        forms = {"tokamax": "tokamax" if what == "attention" and not interpret else None, xla: xla}
        functions = {name: functools.partial(jax.jit(functools.partial(both, form)), *arguments) for name, form in forms.items()}
        milliseconds = {form: 1e3 * s for form, s in in_turns(functions, rounds).items()}
        found.append(dict(what=what, milliseconds=milliseconds))
        print(f"{what}, forward + backward", *(f"{form} {ms:.3f} ms" for form, ms in milliseconds.items()), sep="  ", flush=True)
    return found


def training(pool, path: str, interpret: bool):
    """(path, config, {whether with kernels: a state, its batch, and the step of both}), the programs on the way."""
    steps, config = {}, from_dict(Config, runpy.run_path(path)["get_config"]().to_dict())
    if interpret:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=1, sequence_length=64))
    shape = config.train.batch_size, config.train.sequence_length
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {"tokens": jnp.asarray(tokens), "segment_ids": jnp.ones(shape, jnp.int32)}
    takes = kernel_trial.takes
    for kernels in (False,) if interpret else (True, False):
        kernel_trial.takes = takes if kernels else lambda *_: False
        state = init_state(config, one_device())
        program = pool.submit(make_train_step(config, one_device()).lower(state, batch).compile)
        steps[kernels] = lambda state, program=program: program.result()(state, batch)
    kernel_trial.takes = takes
    return path, config, steps


def training_times(path: str, config, steps: dict, rounds: int) -> list:
    found, tokens = [], config.train.batch_size * config.train.sequence_length
    for kernels, step in steps.items():
        state, seconds = init_state(config, one_device()), []
        for _ in range(rounds + 2):
            begun = time.perf_counter()
            state, metrics = step(state)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - begun)
        median = statistics.median(seconds[2:])
        mfu = flops_per_token(config.model, config.train.sequence_length) * tokens / median / PEAK
        found.append(dict(config=path, kernels=kernels, seconds=median, tokens_per_second=tokens / median, mfu=mfu,
                          loss=float(metrics["loss"])))
        print(f"{pathlib.Path(path).name}, {'kernels' if kernels else 'XLA alone'}: {median:.4f} s a step, "
              f"{tokens / median:,.0f} tokens/s, MFU {mfu:.2%}, loss {float(metrics['loss']):.4f}", flush=True)
        del state
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="")
    parser.add_argument("--json", default="gpu.json", help="a file that is not there yet")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    device = jax.devices()[0]
    if not args.interpret and getattr(device, "compute_capability", "") != "9.0":
        print(f"error: the first device is {device.device_kind}: expected an H100 or H200, and jax with its CUDA plugin "
              "(uv run --extra gpu); --interpret runs this code on a CPU", file=sys.stderr)
        return 2
    if pathlib.Path(args.json).exists():
        print(f"error: {args.json} is there already: give another --json", file=sys.stderr)
        return 2
    rounds = 1 if args.interpret else args.rounds
    config = args.config or str(ROOT / "configs" / ("tiny.py" if args.interpret else "small.py"))
    about = dict(device=device.device_kind, jax=jax.__version__, python=platform.python_version(), interpreted=args.interpret)
    print(*(f"{name} {value}" for name, value in about.items()), sep=", ", flush=True)
    widths = [(64, 64)] if args.interpret else [(k, v) for k in (64, 128, 256) for v in (64, 128, 256)]
    # Nearly all of the time is the compiler's: every width in a process of its own, and here all programs that will be timed.
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        compared = {sizes: processes.submit(of_widths, *sizes, args.interpret) for sizes in widths}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            steps, cases = training(pool, config, args.interpret), operator(pool, args.interpret)
        checked, right = correctness(compared, args.interpret)
    results = about | dict(correctness=checked)
    if right:
        results |= dict(operator=operator_times(cases, args.interpret, rounds), training=training_times(*steps, rounds))
    of_library, library_right = library(args.interpret)
    results |= dict(library=of_library)
    if library_right:
        results |= dict(library_times=library_times(args.interpret, rounds))
    pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    print(f"written to {args.json}" if right else f"wrong: the kernels were not timed; see {args.json}; {pallas_gpu_trial.AVOID}")
    return 0 if right and library_right else 1


if __name__ == "__main__":
    sys.exit(main())
