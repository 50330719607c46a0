"""The parts of gpu.py, which says what each is: what they compile, run and note."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
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

import gpu
import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu

from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import causal_conv1d as convolution_gpu
from qwen3next_jax.kernels.gpu import delta_rule_self_test
from qwen3next_jax.kernels.gpu import gated_norm as gated_norm_gpu
from qwen3next_jax.kernels.gpu import grouped_matmul as products
from qwen3next_jax.kernels.gpu import tokamax as tokamax_release
from qwen3next_jax.kernels.gpu.delta_rule_problem import Split
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.model.gated_deltanet import GatedDeltaNet
from qwen3next_jax.ops import gated_delta_rule, grouped_matmul
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

PEAK = 989.4e12  # bfloat16 products of an H100 or H200 (SXM), by its data sheet
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, likewise
# Of one token: bytes of all 16 key and 32 value heads of 128, each array once, and FLOP of a value
# head; forward, forward and backward (states and inverses saved and read again).
LEAST = {"forward": (24_832, 163_840), "forward + backward": (24_832 + 94_720, 163_840 + 475_136)}
BARS = {"o": 0.01, "final": 0.01}  # relative L2 against float64; gradients 0.03
# of a turn, one behind the other, so that what the host does to start one is not waited for
CALLS = 5


# ---- what every part uses
# -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attempt(note, what: str):
    """What fails in here fails alone, and what is not installed is left out."""
    try:
        yield
    except ModuleNotFoundError as error:
        note(what, f"left out: {error}", left_out=str(error))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        why = (
            f"{type(error).__name__}: "
            f"{' '.join(' '.join(lines[-1:] if 'Traceback' in lines[0] else lines).split())[:300]}"
        )
        note(what, f"failed: {why}", failed=why)


def compiled(what: str, lower, *arguments):
    """(the program, seconds that it took)."""
    print(f"{what}: compiling since {time.strftime('%H:%M:%S')}", flush=True)
    begun = time.perf_counter()
    program = lower(*arguments).compile()
    seconds = time.perf_counter() - begun
    print(f"{what}: compiled in {seconds:.0f} s", flush=True)
    return program, seconds


def wait(result):
    result() if callable(result) else jax.block_until_ready(result)


def seconds_of(function, rounds: int) -> float:
    """Median seconds of a call, after two turns to warm up."""
    seconds, calls = [], min(CALLS, rounds)
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        for _ in range(calls):
            result = function()
        wait(result)
        seconds.append((time.perf_counter() - begun) / calls)
    return statistics.median(seconds[2:])


def kernel_times(function, times: int = 3) -> dict:
    """{kernel: milliseconds of a call} by the profiler, the longest first."""
    nanoseconds = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(function())
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            planes = [
                plane
                for plane in jax.profiler.ProfileData.from_file(str(file)).planes
                if "GPU" in plane.name
            ]
            for event in (
                e
                for plane in planes
                for line in plane.lines
                if line.name.startswith("Stream")
                for e in line.events
            ):
                nanoseconds[event.name] += event.duration_ns
    return {name: 1e-6 * ns / times for name, ns in nanoseconds.most_common()}


def by_name(kernels: dict, most: int = 8) -> str:
    longest = ", ".join(
        f"{kernel} {ms:.3f}" for kernel, ms in list(kernels.items())[:most] if ms > 0.02
    )
    return (
        f"kernels alone {sum(kernels.values()):.3f} ms ({longest})"
        if kernels
        else "no kernels by the profiler"
    )


def timed(note, args, what: str, lower, *arguments, least: float = 0, **numbers):
    """Compiles, times and profiles one call."""
    with attempt(note, what):
        program, compile_seconds = compiled(what, lower, *arguments)
        function = lambda: program(*arguments)
        milliseconds = 1e3 * seconds_of(function, args.rounds)
        kernels = {} if args.interpret else kernel_times(function)
        said = f"{milliseconds:.3f} ms by the clock, {by_name(kernels)}" + (
            f", at least {least:.3f}" if least else ""
        )
        note(
            what,
            said,
            milliseconds=milliseconds,
            kernels=kernels,
            compile_seconds=compile_seconds,
            **numbers,
        )


# ---- right
# --------------------------------------------------------------------------------------------------


def arrays(batch, time_, groups, heads, key, value, seed=0):
    """Inputs and cotangents, made on the device, bfloat16 and float32 as in training."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    make = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)
    numbers = lambda: make(batch, time_, heads, dtype=jnp.float32)
    x = dict(
        q=make(batch, time_, groups, key),
        k=make(batch, time_, groups, key),
        v=make(batch, time_, heads, value),
        g=-jnp.exp(numbers() - 2),
        beta=jax.nn.sigmoid(numbers()),
    )
    return x, make(batch, time_, heads, value)


def delta_rule(implementation: str, backward: bool, x: dict, do) -> dict:
    f = lambda x: gated_delta_rule(**x, implementation=implementation)
    if not backward:
        return f(x)
    (o, final), pullback = jax.vjp(f, x)
    return dict(o=o, final=final) | pullback((do.astype(o.dtype), jnp.ones_like(final)))[0]


def against_float64(key: int, value: int) -> dict:
    """{array: (relative L2 error of the kernels, the bar)}."""
    x, do = arrays(1, 130, 1, 2, key, value)
    got = jax.tree.map(
        lambda a: np.asarray(a, np.float64),
        jax.jit(functools.partial(delta_rule, "pallas_gpu", True))(x, do),
    )
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, do))
        want = jax.jit(functools.partial(delta_rule, "recurrent", True))(*wide)
    apart = {
        n: float(np.linalg.norm(got[n] - np.asarray(w)) / np.linalg.norm(np.asarray(w)))
        for n, w in want.items()
    }
    return {name: (error, BARS.get(name, 0.03)) for name, error in apart.items()}


def against_xla(worst, bar: float, *arguments) -> dict:
    """The same of the array that is furthest from the XLA form's."""
    name, apart = worst(*arguments)
    return {name: (apart, bar)}


def kinds_of_call(key: int, value: int, interpret: bool) -> dict:
    trial = functools.partial(
        against_xla, delta_rule_self_test.max_error, delta_rule_self_test.TOLERANCE, key, value
    )
    heads = f"delta rule, K {key} V {value}"
    return {
        f"{heads}, float64": functools.partial(against_float64, key, value),
        f"{heads}, XLA, a row in pieces": functools.partial(
            trial, True, True, Split(3, 1), interpret
        ),
    }


def correctness(args, note):
    i, width = args.interpret, 64 if args.interpret else 128
    trial = functools.partial(
        against_xla, delta_rule_self_test.max_error, delta_rule_self_test.TOLERANCE, width, width
    )
    whole = Split(1, 1)
    further = (
        {}
        if i
        else {
            "delta rule, XLA, without norms": functools.partial(trial, False, True, whole, i),
            "delta rule, XLA, without erasing": functools.partial(trial, True, False, whole, i),
            "delta rule, XLA, two tiles a block": functools.partial(
                trial, True, True, Split(1, 2), i
            ),
        }
    )
    convolution = functools.partial(
        against_xla,
        convolution_gpu.max_error,
        convolution_gpu.TOLERANCE,
        "silu",
        "bfloat16",
        4,
        i,
    )
    norm = functools.partial(
        against_xla, gated_norm_gpu.max_error, gated_norm_gpu.TOLERANCE, 1e-6, 128, i
    )
    check(
        args,
        note,
        kinds_of_call(width, width, i)
        | further
        | {"convolution, XLA": convolution, "norm and gate, XLA": norm},
    )


def widths(args, note):
    pairs = [(k, v) for k in (64, 128, 256) for v in (64, 128, 256) if (k, v) != (128, 128)]
    found = [kinds_of_call(*pair, args.interpret) for pair in pairs]
    check(args, note, functools.reduce(dict.__or__, found))


def check(args, note, kinds: dict):
    """Nearly all of the time is the compiler's: every kind of call in a process of its own
    (interpreted: in this one), as they end.
    """
    workers, begun = min(len(kinds), os.cpu_count()), time.perf_counter()
    print(f"{len(kinds)} kinds of call: compiling since {time.strftime('%H:%M:%S')}", flush=True)

    def judge(what, result):
        with attempt(note, what):
            found = result()
            right = all(error <= bar for error, bar in found.values())
            said = ", ".join(
                f"{name} {error:.2%}{'' if error <= bar else f' (at most {bar:.0%})'}"
                for name, (error, bar) in found.items()
            )
            note(
                what,
                f"{'right' if right else 'WRONG'}: apart {said}; after "
                f"{time.perf_counter() - begun:.0f} s",
                right=right,
                errors={name: error for name, (error, _) in found.items()},
            )

    if args.interpret:
        for what, f in kinds.items():
            judge(what, f)
        return

    def alone(f):  # a process that dies takes those of its pool with it
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")
        ) as pool:
            return pool.submit(f).result()

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        results = {threads.submit(alone, f): what for what, f in kinds.items()}
        for result in concurrent.futures.as_completed(results):
            judge(results[result], result.result)


# ---- fast
# --------------------------------------------------------------------------------------------------


def cases(interpret: bool):
    """(what, sizes, pass, backward) of the delta rule."""
    for batch, time_ in ((1, 128),) if interpret else ((1, 32_768), (4, 8_192)):
        sizes = (batch, time_, 1, 2, 64, 64) if interpret else (batch, time_, 16, 32, 128, 128)
        for name, backward in (("forward", False), ("forward + backward", True)):
            yield f"{batch} x {time_} {name}", sizes, name, backward


def operator(args, note, form: str = "pallas_gpu"):
    bandwidth = next(
        (b for name, b in BANDWIDTH.items() if name in jax.devices()[0].device_kind), None
    )
    for what, sizes, name, backward in cases(args.interpret):
        moved, computed = LEAST[name]
        least = (
            1e3 * sizes[0] * sizes[1] * max(moved / bandwidth, 32 * computed / PEAK)
            if bandwidth and not args.interpret
            else 0
        )
        lower = jax.jit(functools.partial(delta_rule, form, backward)).lower
        timed(
            note,
            args,
            f"{form} {what}",
            lower,
            *arrays(*sizes),
            least=least,
            sizes=sizes,
            least_milliseconds=least,
        )


def peers(args, note):
    """Both have the heads of the keys repeated, as their callers do."""
    for peer, times in (("fla", fla_times), ("jla", jla_times)):
        with attempt(note, peer):
            importlib.import_module(peer)
            for what, sizes, _, backward in cases(args.interpret):
                with attempt(note, f"{peer} {what}"):
                    times(args, note, f"{peer} {what}", sizes, backward)


def fla_times(args, note, what, sizes, backward):
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch, time_, _, heads, key, value = sizes
    make = lambda width: torch.randn(
        batch, time_, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    q, k, v, do = make(key), make(key), make(value), make(value)
    g, beta = (
        f(torch.randn(batch, time_, heads, device="cuda"))
        for f in (torch.nn.functional.logsigmoid, torch.sigmoid)
    )

    def run():
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        if backward:
            torch.autograd.backward(o, do)
        return torch.cuda.synchronize

    print(f"{what}: compiling since {time.strftime('%H:%M:%S')}", flush=True)
    milliseconds = 1e3 * seconds_of(run, args.rounds)
    note(what, f"{milliseconds:.3f} ms by the clock", milliseconds=milliseconds)


def jla_times(args, note, what, sizes, backward):
    from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule

    x, do = arrays(*sizes)
    q, k = (jnp.repeat(x[n], sizes[3] // sizes[2], axis=2) for n in "qk")
    forward = lambda *inputs: gated_delta_rule(*inputs, use_qk_l2norm=True)[0]
    both = lambda *inputs: jax.vjp(forward, *inputs)[1](do)
    timed(
        note,
        args,
        what,
        jax.jit(both if backward else forward).lower,
        q,
        k,
        x["v"],
        x["g"],
        x["beta"],
    )


def configured(args):
    if importlib.util.find_spec("ml_collections") is None:
        raise ModuleNotFoundError("a config file needs ml_collections, which is not installed")
    config = from_dict(Config, runpy.run_path(args.config)["get_config"]().to_dict())
    if args.interpret:
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, batch_size=1, sequence_length=64)
        )
    return config


def training(args, note, kernels: bool = True):
    what = (
        f"training step of {pathlib.Path(args.config).name}, "
        f"{'kernels' if kernels else 'XLA alone'}"
    )
    with attempt(note, what):
        config = configured(args)
        if not kernels:
            self_test.is_enabled = lambda *_, **__: False
        train(args, note, what, config)


def train(args, note, what, config):
    shape = config.train.batch_size, config.train.sequence_length
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {"tokens": jnp.asarray(tokens), "segment_ids": jnp.ones(shape, jnp.int32)}
    run = resolve_run(config, single_device_mesh())
    state = run.init_state()
    step, compile_seconds = compiled(what, make_train_step(run, *run.stages).lower, state, batch)
    seconds = []
    for _ in range(args.rounds + 2):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
    median, loss, count = (
        statistics.median(seconds[2:]),
        float(metrics["loss"]),
        shape[0] * shape[1],
    )
    mfu = flops_per_token(config.model, shape[1]) * count / median / PEAK
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    said = (
        f"{median:.4f} s, {count / median:,.0f} tokens/s, MFU {mfu:.2%}, "
        f"{f'at most {peak / 2**30:.1f} GiB, ' if peak else ''}"
        f"loss {loss:.4f} after {len(seconds)} steps"
    )
    numbers = dict(
        seconds=median,
        tokens_per_second=count / median,
        mfu=mfu,
        loss=loss,
        peak_bytes=peak,
        compile_seconds=compile_seconds,
    )
    note(what, said, config=args.config, **numbers)
    if args.interpret:
        return

    def another():
        nonlocal state
        state, _ = step(state, batch)
        return state

    with attempt(note, f"{what}, by kernel"):
        kernels = kernel_times(another)
        note(f"{what}, by kernel", by_name(kernels, 20), kernels=kernels)


def layer(args, note):
    with attempt(note, "layer"):
        layer_of(args, note, configured(args))


def layer_of(args, note, config):
    m = config.model
    rows = config.train.batch_size * config.train.sequence_length * m.num_experts_per_tok

    def array(x):
        if jnp.issubdtype(x.dtype, jnp.integer):  # documents; rows of each expert
            return jnp.full(
                x.shape, rows // m.num_experts if x.shape == (m.num_experts,) else 1, x.dtype
            )
        return 0.1 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    is_enabled, fused = self_test.is_enabled, GatedDeltaNet.uses_fused_layout
    cases = [("recurrent layer", form) for form in ("kernels", "kernels, arrays by head", "XLA")]
    cases += [
        (what, form)
        for what in ("norm and gate", "convolution", "experts")
        for form in ("kernels", "XLA")
    ]
    for what, form in cases[:1] if args.interpret else cases:
        self_test.is_enabled = (lambda *_, **__: False) if form == "XLA" else is_enabled
        GatedDeltaNet.uses_fused_layout = (
            (lambda self: False) if form.endswith("by head") else fused
        )
        jax.clear_caches()  # they may know a part as it was traced in another form
        function, *shapes = gpu_compile.operators(config, None)[what]
        timed(
            note,
            args,
            f"{what} of {pathlib.Path(args.config).name}, {form}",
            jax.jit(function).lower,
            *jax.tree.map(array, shapes),
        )


def tokamax(args, note):
    """Interpreted, the product of rows alone: that of matrices uses what the interpreter lacks."""
    if why := tokamax_release.unsupported():
        return note("tokamax", f"not tried {why}", skipped=why)

    def gradients(x, w, sizes, dy):
        _, pullback = jax.vjp(lambda w: grouped_matmul(x, w, sizes), w)
        return products.matmul(dy, w.swapaxes(1, 2), sizes), *pullback(dy)

    tried = {"tokamax products": (products.max_error, products.TOLERANCE)}
    if args.interpret:
        of_rows = lambda: products.max_error((products.matmul, gradients))
        tried = {"tokamax product of rows": (of_rows, products.TOLERANCE)}
    with mosaic_gpu.force_gpu_interpret_mode() if args.interpret else contextlib.nullcontext():
        for what, (worst, most) in tried.items():
            with attempt(note, what):
                print(f"{what}: compiling since {time.strftime('%H:%M:%S')}", flush=True)
                name, apart = worst()
                note(
                    what,
                    f"{'right' if apart <= most else 'WRONG'}: {name} {apart:.2%} from XLA's",
                    right=apart <= most,
                    errors={name: apart},
                )


def xla(args, note):
    operator(args, note, "chunked")


def training_xla(args, note):
    training(args, note, kernels=False)


def main() -> int:
    """One part, in a process of its own, which alone sees the GPU."""
    args, device = gpu.options(), jax.devices()[0]
    if not args.interpret and getattr(device, "compute_capability", "") != "9.0":
        print(
            f"error: the first device is {device.device_kind}: expected an H100 or H200, and jax "
            "with its CUDA plugin (uv run --extra gpu); --interpret runs this code on a CPU",
            file=sys.stderr,
        )
        return gpu.NO_GPU
    results = json.loads(args.json.read_text())
    if "device" not in results:
        about = dict(
            device=device.device_kind,
            jax=jax.__version__,
            python=platform.python_version(),
            interpreted=args.interpret,
        )
        print(*(f"{key} {value}" for key, value in about.items()), sep=", ", flush=True)
        gpu.write(args.json, about | results)
    globals()[args.one](args, functools.partial(gpu.note, args.json, args.one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
