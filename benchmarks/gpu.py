"""For whoever has an H100 or H200: are the kernels right there, how fast are they, and how fast is a training step?

    uv run --extra gpu python benchmarks/gpu.py [--parts=operator,training] [--config configs/small.py] [--json gpu.json]
    python benchmarks/gpu.py --interpret          the same code on a CPU, tiny and interpreted: its times say nothing

Parts, the cheapest and most important first:

    correctness   the kernels that are timed, against the recurrence in float64 (on the CPU) and the XLA form (on the device)
    operator      the delta rule's kernels, forward, and forward and backward, at 1 x 32,768 and 4 x 8,192 tokens, 16 key and 32 value
                  heads of 128, bfloat16, beside the least time that the bytes and products leave (docs/gpu.md)
    training      the config's training step with all kernels: tokens/s, MFU against 989 TFLOP/s, memory, time by kernel
    layer         forward and backward of one recurrent layer of the config with kernels, with kernels and arrays by head (docs/gpu.md)
                  and in XLA; of norm and gate, convolution and experts with kernels and in XLA
    peers         `operator` of flash-linear-attention (`fla`, torch) and jax-linear-attention (`jla`), where they can be imported
    xla           `operator` in XLA alone
    training_xla  the training step in XLA alone
    widths        `correctness` for heads of all other widths
    tokamax       its attention and grouped products against the XLA form, and attention's time

Each is a process of its own, and every result of it is printed and written to the JSON file at once. So what fails, does not end
(--minutes) or is interrupted (Ctrl-C; twice within two seconds: all of them) costs itself alone, and stands in the file and in the
table at the end with its reason. Kernels that are wrong are not timed. Please send the file to the authors.
"""

import argparse
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
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
PEAK = 989.4e12  # bfloat16 products of an H100 or H200 (SXM), by its data sheet
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, likewise
# Of one token: bytes of all 16 key and 32 value heads of 128, each array once, and FLOP of a value head; forward, forward and backward
# (states and inverses saved and read again).
LEAST = {"forward": (24_832, 163_840), "forward + backward": (24_832 + 94_720, 163_840 + 475_136)}
BARS = {"o": 0.01, "final": 0.01}  # relative L2 against float64; gradients 0.03
CALLS = 5  # of a turn, one behind the other, so that what the host does to start one is not waited for
NO_GPU = 3  # exit code of a part


# ---- what every part uses -------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def attempt(note, what: str):
    """What fails in here fails alone, and what is not installed is left out."""
    try:
        yield
    except ImportError as error:
        note(what, f"left out: {error}", left_out=str(error))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {' '.join(' '.join(lines[-1:] if 'Traceback' in lines[0] else lines).split())[:300]}"
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
    import jax

    result() if callable(result) else jax.block_until_ready(result)


def seconds_of(function, rounds: int) -> float:
    """Median seconds of a call, after two turns to warm up."""
    seconds = []
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        for _ in range(CALLS):
            result = function()
        wait(result)
        seconds.append((time.perf_counter() - begun) / CALLS)
    return statistics.median(seconds[2:])


def kernel_times(function, times: int = 3) -> dict:
    """{kernel: milliseconds of a call} by the profiler, the longest first."""
    import jax

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


def by_name(kernels: dict, most: int = 8) -> str:
    longest = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in list(kernels.items())[:most] if ms > 0.02)
    return f"kernels alone {sum(kernels.values()):.3f} ms ({longest})" if kernels else "no kernels by the profiler"


def timed(note, args, what: str, lower, *arguments, least: float = 0, **numbers):
    """Compiles, times and profiles one call."""
    with attempt(note, what):
        program, compile_seconds = compiled(what, lower, *arguments)
        function = lambda: program(*arguments)
        milliseconds = 1e3 * seconds_of(function, args.rounds)
        kernels = {} if args.interpret else kernel_times(function)
        said = f"{milliseconds:.3f} ms by the clock, {by_name(kernels)}" + (f", at least {least:.3f}" if least else "")
        note(what, said, milliseconds=milliseconds, kernels=kernels, compile_seconds=compile_seconds, **numbers)


# ---- right ----------------------------------------------------------------------------------------------------------


def arrays(batch, time_, groups, heads, key, value, seed=0):
    """Inputs and cotangents, bfloat16 and float32 as in training."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)
    make = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    numbers = lambda: make(batch, time_, heads, dtype=jnp.float32)
    x = dict(q=make(batch, time_, groups, key), k=make(batch, time_, groups, key), v=make(batch, time_, heads, value),
             g=-jnp.exp(numbers() - 2), beta=jax.nn.sigmoid(numbers()))
    return x, make(batch, time_, heads, value)


def delta_rule(implementation: str, backward: bool, x: dict, do) -> dict:
    import jax
    import jax.numpy as jnp

    from qwen3next_jax.ops import gated_delta_rule

    f = lambda x: gated_delta_rule(**x, implementation=implementation)
    if not backward:
        return f(x)
    (o, final), pullback = jax.vjp(f, x)
    return dict(o=o, final=final) | pullback((do.astype(o.dtype), jnp.ones_like(final)))[0]


def against_float64(key: int, value: int) -> dict:
    """{array: (relative L2 error of the kernels, the bar)}."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, do = arrays(1, 130, 1, 2, key, value)
    got = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.jit(functools.partial(delta_rule, "pallas_gpu", True))(x, do))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, do))
        want = jax.jit(functools.partial(delta_rule, "recurrent", True))(*wide)
    apart = {n: float(np.linalg.norm(got[n] - np.asarray(w)) / np.linalg.norm(np.asarray(w))) for n, w in want.items()}
    return {name: (error, BARS.get(name, 0.03)) for name, error in apart.items()}


def against_xla(module: str, *arguments) -> dict:
    """The same of the array that is furthest from the XLA form's."""
    of = importlib.import_module(f"qwen3next_jax.ops.{module}")
    name, apart = of.worst(*arguments)
    return {name: (apart, of.APART)}


def kinds_of_call(key: int, value: int, interpret: bool) -> dict:
    trial = functools.partial(against_xla, "delta_rule.pallas_gpu_trial", key, value)
    heads = f"delta rule, K {key} V {value}"
    return {f"{heads}, float64": functools.partial(against_float64, key, value),
            f"{heads}, XLA, a row in pieces": functools.partial(trial, True, True, True, interpret)}


def correctness(args, note):
    i, width = args.interpret, 64 if args.interpret else 128
    trial = functools.partial(against_xla, "delta_rule.pallas_gpu_trial", width, width)
    further = {} if i else {"delta rule, XLA, without norms": functools.partial(trial, False, True, False, i),
                            "delta rule, XLA, without erasing": functools.partial(trial, True, False, False, i)}
    check(args, note, kinds_of_call(width, width, i) | further | {
        "convolution, XLA": functools.partial(against_xla, "pallas_gpu_causal_conv1d", "silu", "bfloat16", 4, i),
        "norm and gate, XLA": functools.partial(against_xla, "pallas_gpu_gated_norm", 1e-6, 128, i)})


def widths(args, note):
    pairs = [(k, v) for k in (64, 128, 256) for v in (64, 128, 256) if (k, v) != (128, 128)]
    found = [kinds_of_call(*pair, args.interpret) for pair in pairs]
    check(args, note, functools.reduce(dict.__or__, found))


def check(args, note, kinds: dict):
    """Nearly all of the time is the compiler's: every kind of call in a process of its own (interpreted: in this one), as they end."""
    workers, begun = min(len(kinds), os.cpu_count()), time.perf_counter()
    print(f"{len(kinds)} kinds of call: compiling since {time.strftime('%H:%M:%S')}", flush=True)

    def judge(what, result):
        with attempt(note, what):
            found = result()
            right = all(error <= bar for error, bar in found.values())
            said = ", ".join(f"{name} {error:.2%}{'' if error <= bar else f' (at most {bar:.0%})'}" for name, (error, bar) in found.items())
            note(what, f"{'right' if right else 'WRONG'}: apart {said}; after {time.perf_counter() - begun:.0f} s", right=right,
                 errors={name: error for name, (error, _) in found.items()})
    if args.interpret:
        for what, f in kinds.items():
            judge(what, f)
        return
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        results = {pool.submit(f): what for what, f in kinds.items()}
        for result in concurrent.futures.as_completed(results):
            judge(results[result], result.result)


# ---- fast -----------------------------------------------------------------------------------------------------------


def cases(interpret: bool):
    """(what, sizes, pass, backward) of the delta rule."""
    for batch, time_ in ((1, 128),) if interpret else ((1, 32_768), (4, 8_192)):
        sizes = (batch, time_, 1, 2, 64, 64) if interpret else (batch, time_, 16, 32, 128, 128)
        for name, backward in (("forward", False), ("forward + backward", True)):
            yield f"{batch} x {time_} {name}", sizes, name, backward


def operator(args, note, form: str = "pallas_gpu"):
    import jax

    bandwidth = next((b for name, b in BANDWIDTH.items() if name in jax.devices()[0].device_kind), None)
    for what, sizes, name, backward in cases(args.interpret):
        moved, computed = LEAST[name]
        least = 1e3 * sizes[0] * sizes[1] * max(moved / bandwidth, 32 * computed / PEAK) if bandwidth and not args.interpret else 0
        lower = jax.jit(functools.partial(delta_rule, form, backward)).lower
        timed(note, args, f"{form} {what}", lower, *arrays(*sizes), least=least, sizes=sizes, least_milliseconds=least)


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
    make = lambda width: torch.randn(batch, time_, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v, do = make(key), make(key), make(value), make(value)
    g, beta = (f(torch.randn(batch, time_, heads, device="cuda")) for f in (torch.nn.functional.logsigmoid, torch.sigmoid))

    def run():
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        if backward:
            torch.autograd.backward(o, do)
        return torch.cuda.synchronize
    print(f"{what}: compiling since {time.strftime('%H:%M:%S')}", flush=True)
    milliseconds = 1e3 * seconds_of(run, args.rounds)
    note(what, f"{milliseconds:.3f} ms by the clock", milliseconds=milliseconds)


def jla_times(args, note, what, sizes, backward):
    import jax
    import jax.numpy as jnp
    from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule

    x, do = arrays(*sizes)
    q, k = (jnp.repeat(x[n], sizes[3] // sizes[2], axis=2) for n in "qk")
    forward = lambda *inputs: gated_delta_rule(*inputs, use_qk_l2norm=True)[0]
    both = lambda *inputs: jax.vjp(forward, *inputs)[1](do)
    timed(note, args, what, jax.jit(both if backward else forward).lower, q, k, x["v"], x["g"], x["beta"])


def configured(args):
    from qwen3next_jax.config import Config, from_dict

    if importlib.util.find_spec("ml_collections") is None:
        raise ImportError("a config file needs ml_collections, which is not installed")
    config = from_dict(Config, runpy.run_path(args.config)["get_config"]().to_dict())
    if args.interpret:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=1, sequence_length=64))
    return config


def training(args, note, kernels: bool = True):
    from qwen3next_jax.ops import kernel_trial

    what = f"training step of {pathlib.Path(args.config).name}, {'kernels' if kernels else 'XLA alone'}"
    with attempt(note, what):
        config = configured(args)
        if not kernels:
            kernel_trial.takes = lambda *_, **__: False
        train(args, note, what, config)


def train(args, note, what, config):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from qwen3next_jax.model.flops import flops_per_token
    from qwen3next_jax.parallel.mesh import one_device
    from qwen3next_jax.training.step import init_state, make_train_step

    shape = config.train.batch_size, config.train.sequence_length
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {"tokens": jnp.asarray(tokens), "segment_ids": jnp.ones(shape, jnp.int32)}
    state = init_state(config, one_device())
    step, compile_seconds = compiled(what, make_train_step(config, one_device()).lower, state, batch)
    seconds = []
    for _ in range(args.rounds + 2):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
    median, loss, count = statistics.median(seconds[2:]), float(metrics["loss"]), shape[0] * shape[1]
    mfu = flops_per_token(config.model, shape[1]) * count / median / PEAK
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    said = (f"{median:.4f} s, {count / median:,.0f} tokens/s, MFU {mfu:.2%}, {f'at most {peak / 2**30:.1f} GiB, ' if peak else ''}"
            f"loss {loss:.4f} after {len(seconds)} steps")
    numbers = dict(seconds=median, tokens_per_second=count / median, mfu=mfu, loss=loss, peak_bytes=peak, compile_seconds=compile_seconds)
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
    import gpu_compile  # beside this file
    import jax
    import jax.numpy as jnp
    import numpy as np

    from qwen3next_jax.model.mixers.gated_deltanet import GatedDeltaNet
    from qwen3next_jax.ops import kernel_trial

    rng, m = np.random.default_rng(0), config.model
    rows = config.train.batch_size * config.train.sequence_length * m.num_experts_per_tok

    def array(x):
        if jnp.issubdtype(x.dtype, jnp.integer):  # documents; rows of each expert
            return jnp.full(x.shape, rows // m.num_experts if x.shape == (m.num_experts,) else 1, x.dtype)
        return jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)

    takes, flattens = kernel_trial.takes, GatedDeltaNet.flattens
    cases = [("recurrent layer", form) for form in ("kernels", "kernels, arrays by head", "XLA")]
    cases += [(what, form) for what in ("norm and gate", "convolution", "experts") for form in ("kernels", "XLA")]
    for what, form in cases[:1] if args.interpret else cases:
        kernel_trial.takes = (lambda *_, **__: False) if form == "XLA" else takes
        GatedDeltaNet.flattens = (lambda self: False) if form.endswith("by head") else flattens
        jax.clear_caches()  # they may know a part as it was traced in another form
        function, *shapes = gpu_compile.operators(config, None)[what]
        timed(note, args, f"{what} of {pathlib.Path(args.config).name}, {form}", jax.jit(function).lower, *jax.tree.map(array, shapes))


def tokamax(args, note):
    """Interpreted, the product of rows alone: the others use what the interpreter lacks."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu

    from qwen3next_jax.ops import attention, grouped_matmul, pallas_gpu_ragged
    from qwen3next_jax.ops.attention import pallas_gpu

    if why := pallas_gpu_ragged.tokamax_refusal():
        return note("tokamax", f"not tried {why}", skipped=why)

    def gradients(x, w, sizes, dy):
        _, pullback = jax.vjp(lambda w: grouped_matmul(x, w, sizes), w)
        return pallas_gpu_ragged.matmul(dy, w.swapaxes(1, 2), sizes), *pullback(dy)

    tried = {f"tokamax attention, heads of {w}": (functools.partial(pallas_gpu.worst, w), pallas_gpu.APART) for w in pallas_gpu.WIDTHS}
    tried = {"tokamax products": (pallas_gpu_ragged.worst, pallas_gpu_ragged.APART)} | tried
    if args.interpret:
        of_rows = lambda: pallas_gpu_ragged.worst((pallas_gpu_ragged.matmul, gradients))
        tried = {"tokamax product of rows": (of_rows, pallas_gpu_ragged.APART)}
    right = {}
    with mosaic_gpu.force_gpu_interpret_mode() if args.interpret else contextlib.nullcontext():
        for what, (worst, most) in tried.items():
            with attempt(note, what):
                print(f"{what}: compiling since {time.strftime('%H:%M:%S')}", flush=True)
                name, apart = worst()
                right[what] = apart <= most
                note(what, f"{'right' if right[what] else 'WRONG'}: {name} {apart:.2%} from XLA's", right=right[what], errors={name: apart})
    if args.interpret or not right.get("tokamax attention, heads of 128"):
        return
    rng, (rows, t) = np.random.default_rng(0), (32, 2048)
    make = lambda heads: jnp.asarray(rng.normal(size=(rows, t, heads, 128)), jnp.bfloat16)
    ids = jnp.asarray(np.repeat([[1] * (t // 4) + [2] * (t - t // 4)], rows, axis=0))
    for form in ("tokamax", "xla"):
        def both(q, k, v, form=form):
            y, pullback = jax.vjp(lambda *a: attention(*a, segment_ids=ids, implementation=form), q, k, v)
            return y, pullback(y)
        timed(note, args, f"attention, {form}, forward + backward", jax.jit(both).lower, make(8), make(2), make(2))


PARTS = {"correctness": correctness, "operator": operator, "training": training, "layer": layer, "peers": peers,
         "xla": functools.partial(operator, form="chunked"), "training_xla": functools.partial(training, kernels=False),
         "widths": widths, "tokamax": tokamax}
OF_KERNELS = "operator", "training", "layer"  # are timed where `correctness` found none of theirs wrong
NOT_INTERPRETED = "peers", "training_xla", "widths"


# ---- one after the other --------------------------------------------------------------------------------------------


def one_part(args, name: str) -> int:
    """In a process of its own, which alone sees the GPU."""
    import jax

    device, file = jax.devices()[0], pathlib.Path(args.json)
    if not args.interpret and getattr(device, "compute_capability", "") != "9.0":
        print(f"error: the first device is {device.device_kind}: expected an H100 or H200, and jax with its CUDA plugin "
              "(uv run --extra gpu); --interpret runs this code on a CPU", file=sys.stderr)
        return NO_GPU
    about = dict(device=device.device_kind, jax=jax.__version__, python=platform.python_version(), interpreted=args.interpret)
    results = json.loads(file.read_text())
    if not results.keys() & about.keys():
        print(*(f"{key} {value}" for key, value in about.items()), sep=", ", flush=True)
        write(file, about | results)
    PARTS[name](args, functools.partial(note, file, name))
    return 0


def ended(args, name: str) -> str:
    """Runs a part; why it did not come to its end, or "" where it did."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": paths}  # torch and several processes share it
    if args.interpret:  # the interpreter waits for ever where there are fewer threads than it waits in, one a device
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
                        "--xla_backend_optimization_level=0"}
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], f"--one={name}"], env=environment, start_new_session=True)
    try:
        code = child.wait(60 * args.minutes)
    except subprocess.TimeoutExpired:
        return f"not done after {args.minutes:g} minutes (--minutes)"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        child.wait()
    if code == NO_GPU:
        raise SystemExit(2)  # it said why
    return "" if code == 0 else f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="some of them, by commas; default: all")
    parser.add_argument("--config", default="")
    parser.add_argument("--json", default="gpu.json", help="a file that is not there yet")
    parser.add_argument("--rounds", type=int, default=20, help="calls or steps that are timed")
    parser.add_argument("--minutes", type=float, default=10, help="that a part may take")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = 1 if args.interpret else args.rounds
    args.config = args.config or str(ROOT / "configs" / ("tiny.py" if args.interpret else "small.py"))
    if args.one:
        return one_part(args, args.one)
    file, asked = pathlib.Path(args.json), [name.strip() for name in args.parts.split(",") if args.parts]
    wrong = [f"--parts={name}: expected some of {', '.join(PARTS)}" for name in asked if name not in PARTS]
    wrong += [f"--config={args.config}: no such file"] * (not pathlib.Path(args.config).is_file())
    wrong += ["--rounds and --minutes: expected more than nothing"] * (args.rounds < 1 or not args.minutes > 0)
    wrong += ["no jax here: expected `uv run --extra gpu python benchmarks/gpu.py`"] * (importlib.util.find_spec("jax") is None)
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
    try:
        run_parts(args, file, asked)
    except SystemExit:
        file.unlink()
        raise
    results = json.loads(file.read_text())
    table(results)
    print(f"written to {file}")
    lines = [line for name in PARTS for line in results.get(name, ())]
    return 1 if any("failed" in line or not line.get("right", True) for line in lines) else 0


def run_parts(args, file, asked):
    chosen = [name for name in PARTS if name in asked or not asked and not (args.interpret and name in NOT_INTERPRETED)]
    if "correctness" not in chosen and set(chosen) & set(OF_KERNELS):
        chosen.insert(0, "correctness")
    terminated, interrupted = [], float("-inf")
    signal.signal(signal.SIGTERM, lambda *_: (terminated.append(True), signal.raise_signal(signal.SIGINT)))
    for name in chosen:
        checked = json.loads(file.read_text()).get("correctness", [])
        needed = [line for line in checked if name != "operator" or not line["what"].startswith(("convolution", "norm"))]
        if name in OF_KERNELS and not all(line.get("right") for line in needed):
            why = "not timed, as not all of its kernels were found right"
        else:
            print(f"\n{name}", flush=True)
            begun = time.monotonic()
            why = ended(args, name)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        if why:
            note(file, name, name, f"failed: {why}", failed=why)
        if why == "interrupted":
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
