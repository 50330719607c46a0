"""May the default take the kernels for Hopper GPUs on this process's GPU?

They were written without one. So before the first use each kind of call is tried once on the user's own device, on a tiny
input, against the form in XLA alone; what came out is remembered by chip, JAX and the kernels' sources. That it failed is not:
the GPU may have been full.
"""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.ops.delta_rule import chunk_math, chunked, pallas_gpu, pallas_gpu_gradients, pallas_gpu_kernels

AVOID = "--config.model.delta_rule=chunked avoids it"
APART = 0.03  # of two results of bfloat16 operands, relative L2; both are within 0.5 % (outputs) and 2 % (gradients) of float64's
RIGHT, FAILED = "right", "failed where it was tried on this GPU"
FOLDER = pathlib.Path(os.path.expanduser("~/.cache/qwen3next_jax/kernels"))


def takes(x: chunk_math.Inputs, normalize: bool, erase: bool, axis_name: str | None, named: bool) -> bool:
    """Whether the kernels run this call: named, they do, or this raises NotImplementedError; else where they may, and it says once
    what it decided and why."""
    why = pallas_gpu.refusal(x.q, x.k, x.v)
    if axis_name is not None:
        why = why or "over a mesh axis: there is no kernel for it"
    if named:
        if why:
            raise NotImplementedError(f"implementation='pallas_gpu' {why}; use 'chunked'")
        return True
    if x.q.shape[1] <= pallas_gpu.C // 2:  # the XLA form cuts shorter rows into shorter chunks
        return False
    why = why or verdict(jax.local_devices()[0], x.q.shape[3], x.v.shape[3], normalize, erase)
    say(f"gated delta rule: XLA's form, no kernel: the call {why}" if why else
        f"gated delta rule: the kernels for Hopper GPUs. They were never run on hardware: {AVOID}")
    return not why


@functools.cache
def say(line: str):
    print(line, file=sys.stderr, flush=True)


@functools.cache
def verdict(device, key: int, value: int, normalize: bool, erase: bool, folder: pathlib.Path = FOLDER) -> str:
    """Empty where the kernels gave what the XLA form gives, else what they did."""
    sources = b"".join(pathlib.Path(module.__file__).read_bytes() for module in (pallas_gpu, pallas_gpu_kernels, pallas_gpu_gradients))
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    kind = (device.device_kind, versions, hashlib.sha256(sources).hexdigest(), key, value, normalize, erase)
    file = folder / (hashlib.sha256(repr(kind).encode()).hexdigest()[:16] + ".txt")
    try:
        if found := file.read_text():  # empty: another process is writing it
            return found.removeprefix(RIGHT)
    except OSError:
        pass
    found = []
    thread = threading.Thread(target=lambda: found.append(_try(device, key, value, normalize, erase)))  # the caller may be tracing
    thread.start()
    thread.join()
    if found[0].startswith(FAILED):
        return found[0]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found[0] or RIGHT)
    except OSError:  # then the next process tries again
        pass
    return found[0]


def _try(device, key: int, value: int, normalize: bool, erase: bool) -> str:
    try:
        with jax.default_device(device):
            name, apart = worst(key, value, normalize, erase, interpret=False)
    except Exception as error:
        return f"{FAILED} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return "" if apart <= APART else f"gave another {name} than XLA where it was tried on this GPU ({apart:.2g} apart, at most {APART})"


def worst(key: int, value: int, normalize: bool, erase: bool, interpret: bool) -> tuple[str, float]:
    """The output or gradient in which the two forms differ most, and its relative L2 difference: three chunks, two documents and
    padding, two value heads a key head."""
    rng = np.random.default_rng(0)
    time, heads = 2 * pallas_gpu.C + 6, 2
    array = lambda *shape, dtype=jnp.bfloat16: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v, do = array(1, time, 1, key), array(1, time, 1, key), array(1, time, heads, value), array(1, time, heads, value)
    scale = 1 if normalize else key**-0.5
    segments = chunk_math.encode_segments(jnp.asarray([[1] * 40 + [2] * (time - 44) + [0] * 4]))
    live = segments[:, :, None] > 0
    g, beta = (jnp.where(live, f(array(1, time, heads, dtype=jnp.float32)), 0) for f in (lambda x: -jnp.exp(x), jax.nn.sigmoid))
    x = chunk_math.Inputs(q * scale, k * scale, v, g, beta, segments)
    initial, dfinal = (array(1, heads, key, value, dtype=jnp.float32) for _ in range(2))

    def results(form, **settings):
        settings |= dict(size=pallas_gpu.C, normalize_qk=normalize, erase=erase)
        o, final, *saved = form.forward(x, initial, None, save=True, **settings)
        return o, final, *form.backward(x, *saved, do, dfinal, **settings)

    got = jax.jit(functools.partial(results, pallas_gpu, interpret=interpret))()
    want = jax.jit(functools.partial(results, chunked, parallel=False))()
    apart = {}
    for name, a, b in zip(("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "gradient of the initial state"), got, want):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32).reshape(a.shape)
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        apart[name] = difference if np.isfinite(difference) else np.inf
    return max(apart.items(), key=lambda item: item[1])
