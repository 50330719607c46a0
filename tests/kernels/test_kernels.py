"""Kernels are a plugin: one way to choose an implementation, by what is compiled for; the library
without the folder; nothing of another platform in a CPU's program.
"""

import functools
import importlib
import pathlib
import shutil
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.pallas.mosaic_gpu import lowering as mosaic_gpu_lowering

from qwen3next_jax import kernels as plugin
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.kernels.gpu import causal_conv1d as gpu_causal_conv1d
from qwen3next_jax.kernels.gpu import delta_rule_passes
from qwen3next_jax.kernels.gpu import gated_norm as gpu_gated_norm
from qwen3next_jax.kernels.tpu import (
    causal_conv1d,
    indexed_attention,
    residual_streams,
    routed_experts,
    top_k,
)
from qwen3next_jax.model.layers import Context, ForwardOptions
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.model.remat import keeps_expert_hidden, rematerialized
from qwen3next_jax.ops import attention, attention_heads, gated_delta_rule, implementations
from qwen3next_jax.ops.compile_target import CompileTarget, compile_target, compiling_for
from qwen3next_jax.ops.delta_rule.interface import Inputs, Settings
from qwen3next_jax.ops.implementations import XlaImplementation, choose_implementation
from qwen3next_jax.zoo.ops.indexed_attention import TokensAndBlocks
from tests.traced import operations

ROOT = pathlib.Path(__file__).parents[2]
STEP = """
import sys
import jax
from configs import tiny
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.planner.planning import abstract_batch
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

values = tiny.get_config().to_dict()
values["model"] |= {"num_hidden_layers": 2, "full_attention_interval": 2}
config = from_dict(Config, values)
mesh = make_mesh(config.parallel, jax.devices()[:1])
run = resolve_run(config, mesh)
(stage,) = run.stages
arguments = run.abstract_state, abstract_batch(run, stage)
traced = make_train_step(run, stage).trace(*arguments)
print(str(traced.jaxpr).count("pallas_call"))
kernels = "qwen3next_jax.kernels", "jax.experimental.pallas"
print(*(name for name in sys.modules if name.startswith(kernels)))
"""
WITHOUT = """
import jax, jax.numpy as jnp
from qwen3next_jax.ops import attention, gated_delta_rule
from qwen3next_jax.ops.compile_target import compiling_for

q, g = jnp.ones((1, 256, 1, 128)), -jnp.ones((1, 256, 1))
with compiling_for("tpu"):
    for f in (lambda q: gated_delta_rule(q, q, q, g=g, beta=-g), lambda q: attention(q, q, q)):
        print(str(jax.make_jaxpr(f)(q)).count("pallas_call"))
for run in (lambda: attention(q, q, q, implementation="splash"),
            lambda: gated_delta_rule(q, q, q, g=g, beta=-g, implementation="pallas_gpu")):
    try:
        run()
    except NotImplementedError as error:
        print(error)
"""


def lines_of(program: str, folder: pathlib.Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_cpu_imports_no_kernel():
    assert lines_of(STEP, ROOT) == ["0", ""]


def test_without_the_kernels_xla_runs(tmp_path):
    ignored = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "qwen3next_jax", tmp_path / "qwen3next_jax", ignore=ignored)
    delta_rule, scores, *refused = lines_of(WITHOUT, tmp_path)
    assert (delta_rule, scores) == ("0", "0")
    assert len(refused) == 2
    for line, name in zip(refused, ("splash", "pallas_gpu"), strict=True):
        assert f"implementation='{name}'" in line
        assert "qwen3next_jax/kernels" in line
        assert "missing" in line


def test_every_listed_module_says_what_it_supports():
    for operator, listed in plugin.KERNELS.items():
        for platform, module in listed.values():
            assert platform in ("tpu", "gpu"), operator
            assert callable(importlib.import_module(module).unsupported_reason), module


FORMS = (
    XlaImplementation("xla", ("cpu",), {}),
    XlaImplementation("xla", ("gpu", "tpu"), {}),
    XlaImplementation("other", (), {}),
)


@pytest.fixture
def two_kernels(monkeypatch):
    """A TPU kernel for even sizes, preferred, and one for all sizes."""
    monkeypatch.setitem(
        plugin.KERNELS, "test", {"even": ("tpu", "even_kernel"), "all": ("tpu", "all_kernel")}
    )
    even = types.SimpleNamespace(
        unsupported_reason=lambda size: "has an odd size" if size % 2 else ""
    )
    monkeypatch.setitem(sys.modules, "even_kernel", even)
    monkeypatch.setitem(
        sys.modules, "all_kernel", types.SimpleNamespace(unsupported_reason=lambda size: "")
    )
    implementations.kernels_by_name.cache_clear()
    yield
    implementations.kernels_by_name.cache_clear()


@pytest.mark.parametrize(
    "platform, named, size, expected",
    [
        ("tpu", None, 4, ("even", False)),
        ("tpu", None, 3, ("all", False)),
        ("gpu", None, 4, ("xla", False)),
        ("cpu", None, 4, ("xla", False)),
        ("tpu", "xla", 4, ("xla", False)),
        ("tpu", "other", 4, ("other", False)),
        ("cpu", "even", 4, ("even", True)),
        ("tpu", "even", 3, "implementation='even' has an odd size; use 'xla'"),
        ("gpu", "even", 4, "implementation='even' on gpu: .* use 'xla'"),
    ],
)
def test_the_choice(two_kernels, platform, named, size, expected):
    with compiling_for(platform):
        if isinstance(expected, str):
            with pytest.raises(NotImplementedError, match=expected):
                choose_implementation("test", named, FORMS, size=size)
            return
        chosen = choose_implementation("test", named, FORMS, size=size)
        assert (chosen.name, chosen.interpret) == expected
        assert chosen == choose_implementation("test", named, FORMS, size=size)
        assert hash(chosen)
        if chosen.name == "xla":
            assert platform in chosen.implementation.platforms


def test_a_listed_module_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(plugin.KERNELS, "test", {"broken": ("tpu", "qwen3next_jax.kernels.none")})
    implementations.kernels_by_name.cache_clear()
    with compiling_for("tpu"), pytest.raises(ImportError, match=r"qwen3next_jax\.kernels\.none"):
        choose_implementation("test", None, FORMS, size=4)
    implementations.kernels_by_name.cache_clear()


def test_the_platform_is_the_one_that_is_compiled_for(monkeypatch):
    """Explicitly, else the described mesh's, else the default device's, else this process'."""
    assert compile_target() == CompileTarget("cpu", may_lack_device=False)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compile_target() == CompileTarget("gpu", may_lack_device=False)
    with jax.default_device(jax.devices()[0]):
        assert compile_target().platform == "cpu"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert compile_target() == CompileTarget("cpu", may_lack_device=True)
        with compiling_for("tpu"):
            assert compile_target() == CompileTarget("tpu", may_lack_device=True)


def test_another_platform_is_traced_anew():
    q, g = jnp.ones((1, 128, 1, 64)), -jnp.ones((1, 128, 1))
    delta_rule = jax.jit(lambda q: gated_delta_rule(q, q, q, g=g, beta=-g)[0])
    scores = jax.jit(lambda q: attention(q, q, q))

    def kernels():
        return [str(f.trace(q).jaxpr).count("pallas_call[") for f in (delta_rule, scores)]

    assert kernels() == [0, 0]
    with compiling_for("tpu"):
        assert kernels() == [1, 1]
    assert kernels() == [0, 0]


@pytest.mark.parametrize(
    "policy, runs", [pytest.param("kept", 1, marks=pytest.mark.slow), ("block", 2)]
)
def test_what_a_policy_saves_is_not_computed_again(policy, runs):
    """Three convolutions and the gated norm. The choice of experts is saved by both policies."""
    config = ModelConfig(
        hidden_size=128,
        num_hidden_layers=1,
        full_attention_interval=0,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        dtype="bfloat16",
    )
    layer = config.block.import_part("placement")
    graphdef, params = nnx.split(
        nnx.eval_shape(
            lambda: layer(config, "gated_deltanet", True, Make(config, nnx.Rngs(0)), (0,))
        )
    )

    def apply(params, x_BTD):
        positions_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2])
        context = Context(
            positions_BT,
            jnp.ones_like(positions_BT),
            options=ForwardOptions(keep_expert_hidden=keeps_expert_hidden(policy)),
        )
        return nnx.merge(graphdef, params)(x_BTD, context, None)[0]

    def loss(params, x_BTD):
        return jnp.sum(rematerialized(apply, policy)(params, x_BTD).astype(jnp.float32))

    x_BTD = jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16)
    with compiling_for("tpu"):
        equations = operations(jax.jit(jax.grad(loss)).trace(params, x_BTD).jaxpr, "pallas_call")
    calls = [equation.params["name"] for equation in equations]
    assert calls.count("causal_conv1d_forward") == 3 * runs
    assert calls.count("gated_norm_forward") == runs
    assert calls.count("top_k") == 1


def tokens_and_blocks(tokens: int, blocks: int) -> TokensAndBlocks:
    numbers = lambda size: jnp.zeros((1, size), jnp.int32)
    return TokensAndBlocks(
        position=numbers(tokens),
        segment=numbers(tokens),
        complete_blocks_before=numbers(tokens),
        block_indexer_key=jnp.zeros((1, blocks, 128), jnp.bfloat16),
        block_end_position=numbers(blocks),
        block_segment=numbers(blocks),
    )


def choose_and_attend(x_BTNK):
    rows = tokens_and_blocks(128, 2)
    chosen = indexed_attention.choose_blocks(1, rows, x_BTNK)
    return indexed_attention.forward(64, rows, chosen, x_BTNK, *[x_BTNK] * 3)


# operator → a call of its TPU kernels, and the shapes of the call's arrays
TPU_CALLS = {
    "causal_conv1d": (
        lambda x, before, kernel: causal_conv1d.forward("silu", before, x, kernel, None),
        ((1, 16, 128), (1, 1, 128), (2, 128)),
    ),
    "gated_delta_rule": (
        lambda q, g: gated_delta_rule(q, q, q, g=g, beta=g, implementation="pallas_tpu"),
        ((1, 16, 2, 128), (1, 16, 2)),
    ),
    "attention": (
        lambda q: attention(q, q, q, implementation="splash"),
        ((1, 128, 1, 128),),
    ),
    "indexed_attention": (choose_and_attend, ((1, 128, 1, 128),)),
    "residual_streams": (residual_streams.write, ((128, 256), (128, 128), (128, 2))),
    "routed_experts": (
        lambda rows, weight, gate_up, down: routed_experts.mlp(
            rows, weight, gate_up, down, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
        ),
        ((16, 128), (16,), (1, 128, 256), (1, 128, 128)),
    ),
    "top_k": (lambda x: top_k.top_k(x, 2), ((128, 8),)),
}


@pytest.mark.parametrize("operator", TPU_CALLS)
def test_x64_gives_a_tpu_no_64_bit_index(operator):
    """The TPU's compiler refuses them."""
    call, shapes = TPU_CALLS[operator]
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(call)(*(jnp.zeros(shape, jnp.float32) for shape in shapes)).jaxpr
    calls = operations(jaxpr, "pallas_call")
    blocks = [block for call in calls for block in call.params["grid_mapping"].block_mappings]
    assert blocks
    assert "i64" not in "".join(map(str, (*calls, *(block.index_map_jaxpr for block in blocks))))


def delta_rule_for_gpus(q, v, gates, state):
    x = Inputs(q, q, v, gates, gates)
    return delta_rule_passes.forward(x, state, None, Settings(64, True, True), save=True)


GPU_CALLS = {  # a layer's operator, the shapes of its inputs, and how many kernels it runs
    "gated_delta_rule": (
        delta_rule_for_gpus,
        ((1, 64, 1, 64), (1, 64, 2, 64), (1, 64, 2), (1, 2, 64, 64)),
        2,
    ),
    "causal_conv1d": (
        lambda before, x, kernel: gpu_causal_conv1d.forward("silu", before, x, kernel, None),
        ((1, 3, 128), (1, 32, 128), (4, 128)),
        1,
    ),
    "gated_norm": (
        lambda o, gate, weight: gpu_gated_norm.forward(1e-6, o, gate, weight),
        ((1, 64, 128), (1, 64, 128), (128,)),
        1,
    ),
}


@pytest.mark.parametrize("operator", GPU_CALLS)
def test_two_layers_share_their_gpu_kernels(operator, monkeypatch):
    """Each start lowers the kernels of its programs again, which takes seconds."""
    run, shapes, kernels = GPU_CALLS[operator]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    lower = mock.Mock(side_effect=mosaic_gpu_lowering.lower_unpipelined_jaxpr_to_module)
    monkeypatch.setattr(mosaic_gpu_lowering, "lower_unpipelined_jaxpr_to_module", lower)
    two_layers = jax.jit(lambda *inputs: (run(*inputs), run(*inputs)))
    two_layers.trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lower.call_count == kernels


def test_a_float32_gate_has_no_gpu_kernel():
    """The kernels copy the gate to bfloat16 tiles."""
    o, gate = (jnp.zeros((1, 64, 128), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    reason = gpu_gated_norm.unsupported_reason(o, gate, jnp.zeros(128), 1e-6)
    assert "float32" in reason


def test_a_tpu_gates_heads_of_any_dtype():
    o = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((1, 16, 128), jnp.float32)
    with compiling_for("tpu"):
        y, pullback = jax.eval_shape(
            functools.partial(jax.vjp, attention_heads.gate_heads), o, gate
        )
        do, dgate = jax.eval_shape(pullback, y)
    assert [x.dtype for x in (y, do, dgate)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
