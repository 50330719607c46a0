"""The residual streams against their formulas in float64: outputs and every gradient, in XLA and by
the TPU kernels, interpreted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen3next_jax.config import MeshConfig, ModelConfig, ParallelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.streams import StreamsConfig
from qwen3next_jax.kernels.tpu import residual_streams as tpu_kernels
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.zoo.gated_residual import StreamMix
from qwen3next_jax.zoo.ops import residual_streams
from tests.models import drawn

NAMES = "h", "y", "norm", "down", "up", "inject"


def formula(h_NSD, y_ND, p):
    """x and the streams after the block, as the top of zoo/gated_residual.py has them."""
    streams = h_NSD.shape[1]
    size_NS1 = jnp.sqrt(jnp.mean(h_NSD**2, axis=-1, keepdims=True) + 1e-6)
    n_NSD = h_NSD / size_NS1 * (1 + p["norm"].reshape(streams, -1))
    inner_NR = jax.nn.silu(jnp.einsum("nsd,sdr->nr", n_NSD, p["down"]) / streams)
    w_NSD = jax.nn.sigmoid(jnp.einsum("nr,rsd->nsd", inner_NR, p["up"]))
    a_NS = 2 * jax.nn.sigmoid(jnp.einsum("nsd,sdz->nz", n_NSD, p["inject"]) / streams)
    return jnp.mean(w_NSD * n_NSD, axis=1), h_NSD + a_NS[..., None] * y_ND[:, None]


def problem(rows, tokens, streams, width, rank, seed=0):
    """Returns the arrays of NAMES, and the gradients of the two results."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape, scale=1.0: scale * rng.normal(size=shape)
    return (
        draw(rows, tokens, streams * width, scale=rng.uniform(0.2, 3, streams * width)),
        draw(rows, tokens, width),
        draw(streams * width, scale=0.5),
        draw(streams, width, rank, scale=2 / width**0.5),
        draw(rank, streams, width, scale=3 / rank**0.5),
        draw(streams, width, streams, scale=2 / width**0.5),
    ), (draw(rows, tokens, width), draw(rows, tokens, streams * width))


def errors(implementation, monkeypatch, dtype, mesh=None, **sizes):
    """Returns {name: relative L2 error} of the results and of the gradients."""
    values, gradients = jax.tree.map(lambda x: jnp.asarray(x, dtype), problem(**sizes))
    streams, width = sizes["streams"], sizes["width"]

    def results_and_gradients(f):
        def run(values, gradients):
            results, pullback = jax.vjp(f, *values)
            return *results, *pullback(gradients)

        return jax.jit(run)

    def oracle(h, y, *p):
        by_token = h.reshape(-1, streams, width), y.reshape(-1, width)
        x, after = formula(*by_token, dict(zip(NAMES[2:], p)))
        return x.reshape(y.shape), after.reshape(h.shape)

    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (values, gradients))
        wanted = [np.asarray(w) for w in results_and_gradients(oracle)(*exact)]
    choose = residual_streams.choose_implementation
    monkeypatch.setattr(
        residual_streams,
        "choose_implementation",
        lambda name, _, *args, **call: choose(name, implementation, *args, **call),
    )
    config = ModelConfig(
        hidden_size=width,
        block=BlockConfig(placement="gated_residual"),
        streams=StreamsConfig(hc_count=streams, hc_lowrank=sizes["rank"]),
    )
    graph, params = nnx.split(drawn(lambda: StreamMix(config, Make(config, nnx.Rngs(0)))))

    def block(h, y, *p):
        own = jax.tree.map(lambda x: x, params)
        for name, value in zip(NAMES[2:], p):
            own[name] = own[name].replace(value)
        x, a, h = nnx.merge(graph, own).block_input_and_factors(h, Context(None, mesh=mesh))
        return x, residual_streams.add_to_streams(h, y, a, mesh)

    got = results_and_gradients(block)(values, gradients)
    names = ("x", "after", *(f"d{name}" for name in NAMES))
    return {
        name: float(np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w))
        for name, g, w in zip(names, got, wanted)
    }


slow = pytest.mark.slow
ONE, THREE = dict(rows=2, tokens=5, streams=1), dict(rows=2, tokens=5, streams=3)


@pytest.mark.parametrize(
    "implementation, sizes, dtype",
    [
        ("xla", THREE | dict(width=24, rank=5), jnp.float32),
        *(
            pytest.param(implementation, sizes, dtype, marks=slow)
            for implementation, sizes, dtype in (
                ("xla", ONE | dict(width=8, rank=3), jnp.float32),
                ("xla", THREE | dict(width=24, rank=5), jnp.bfloat16),
                (
                    "pallas_tpu",
                    dict(rows=2, tokens=128, streams=1, width=256, rank=20),
                    jnp.float32,
                ),
                (
                    "pallas_tpu",
                    dict(rows=1, tokens=384, streams=3, width=128, rank=126),
                    jnp.bfloat16,
                ),
            )
        ),
    ],
)
def test_results_and_gradients_are_those_of_the_formulas(implementation, sizes, dtype, monkeypatch):
    """float32: sums over the channels and over the tokens, and some 30 roundings beside them.
    bfloat16: 6 roundings in a row (a matrix times the norm's weight, the hidden layer, the gate,
    its gradient, the gradient of the sums, the result).
    """
    found = errors(implementation, monkeypatch, dtype, **sizes)
    terms = sizes["streams"] * sizes["width"] + sizes["rows"] * sizes["tokens"] + 30
    bound = {jnp.float32: terms**0.5 * 2**-24, jnp.bfloat16: 6**0.5 * 2**-8}[dtype]
    assert max(found.values()) < bound, found


@slow
def test_devices_run_the_kernels_on_their_own_tokens(monkeypatch):
    mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=2, context=2, tensor=2)), jax.devices())
    sizes = dict(rows=2, tokens=256, streams=2, width=128, rank=20)
    found = errors("pallas_tpu", monkeypatch, jnp.float32, mesh=mesh, **sizes)
    assert max(found.values()) < (256 + 512 + 30) ** 0.5 * 2**-24, found


def test_calls_without_a_kernel_are_refused():
    call = dict(width=2560, streams=4, columns=384, dtype=jnp.dtype(jnp.bfloat16))
    for tokens, changes, words in (
        (4000, {}, "has 4000 tokens"),
        (4096, {"width": 100}, "streams of 100"),
        (4096, {"dtype": jnp.dtype(jnp.float16)}, "has float16"),
        (4096, {}, "bytes of VMEM"),  # of the smallest chip
    ):
        assert words in tpu_kernels.unsupported_reason(tokens=tokens, **call | changes)
