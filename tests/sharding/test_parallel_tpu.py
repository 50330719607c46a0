"""Compiles code that only a TPU can run, with the TPU's compiler, for described chips: the exchange
of the experts' tokens by ragged_all_to_all.

`-m slow` also compiles whole sharded train steps with their Pallas kernels inside shard_map. Each
topology has a process of its own, because the compiler reads its environment once.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

EXCHANGE = """
import functools, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.model.expert_parallelism import expert_parallel_moe
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import per_shard
from qwen3next_jax.planner.topology import describe_topology

mesh = make_mesh(ParallelConfig(mesh=MeshConfig(data=1, expert=16)), describe_topology("v5e:4x4").devices)
rows, experts = P(("data", "expert")), P("expert")
run = per_shard(functools.partial(expert_parallel_moe, expert_axis="expert", token_axes=("data", "expert", "context")), mesh,
            (rows, rows, rows, experts, experts), rows)

def gradients(x, weight, expert, gate_up, down):
    y, pullback = jax.vjp(lambda x, w, g, d: run(x, w, expert, g, d), x, weight, gate_up, down)
    return pullback(y)

place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels ask the described chip for its memory
    text = jax.jit(gradients).lower(
        place((16 * 256, 256), jnp.bfloat16, rows), place((16 * 256, 4), jnp.bfloat16, rows), place((16 * 256, 4), jnp.int32, rows),
        place((32, 256, 2, 128), jnp.bfloat16, experts), place((32, 128, 256), jnp.bfloat16, experts)).compile().as_text()
print(all(name in text for name in ("ragged-all-to-all", "expert_backward_rows", "expert_backward_weights", "sum_by_token")))
"""  # noqa: E501

STEP = """
import sys
from qwen3next_jax.config import Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.planner.planning import abstract_batch
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

topology, axes = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2].split(","))
config = Config(
    model=ModelConfig(vocab_size=1024, hidden_size=256, num_hidden_layers=2, full_attention_interval=2, num_attention_heads=4,
                      num_key_value_heads=2, head_dim=128, linear_num_key_heads=4, linear_num_value_heads=8, num_experts=16,
                      num_experts_per_tok=4, moe_intermediate_size=256, shared_expert_intermediate_size=256, mtp_depth=0),
    train=TrainConfig(batch_size=4, sequence_length=512, remat="offload"),
    parallel=ParallelConfig(mesh=MeshConfig(**{"data": 1} | {axis: int(size) for axis, size in axes.items()})))
mesh = make_mesh(config.parallel, describe_topology(topology).devices)
run = resolve_run(config, mesh)
stage, = run.stages
step = make_train_step(run, stage).lower(run.abstract_state, abstract_batch(run, stage)).compile()
print("tpu_custom_call" in step.as_text())
"""  # noqa: E501


def _output_of(program: str, *arguments: str) -> str:
    """Runs a Python program in a process of its own and returns what it prints."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.needs("kernels")
@needs_compiler
def test_many_shards_exchange_by_ragged_all_to_all():
    assert _output_of(EXCHANGE) == "True"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, axes",
    [("v5p:2x2x1", "expert=2,tensor=2"), ("v6e:2x2", "data=4"), ("v5p:2x2x1", "data=2,context=2")],
)
def test_the_sharded_step_compiles_with_its_kernels(topology, axes):
    assert _output_of(STEP, topology, axes) == "True"
