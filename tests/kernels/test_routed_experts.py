"""The routed experts by token, their TPU kernels (interpreted), and what a skewed router leaves
to the loop, against float64.
"""

import contextlib
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.kernels.experts_precision import (
    a_row_a_choice,
    by_token,
    errors,
    exact,
    inputs,
    interpreted,
)
from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu import routed_experts as tpu_kernels
from qwen3next_jax.kernels.tpu.routed_experts import sum_rows_by_token
from qwen3next_jax.ops.routed_experts import layout as routed_experts
from qwen3next_jax.planner.topology import describe_topology

TOKENS, EXPERTS = 96, 4
RNG = np.random.default_rng(0)
ROUTINGS = {
    "balanced, half of it elsewhere": RNG.permuted(
        np.tile(np.arange(2 * EXPERTS), (TOKENS, 1)), axis=1
    )[:, :2],
    "all to two experts": np.tile([2, 1], (TOKENS, 1)),
    "empty experts": np.tile([3, -1], (TOKENS, 1)),
    "one choice": np.where(np.arange(2 * TOKENS).reshape(TOKENS, 2) == 77, 0, EXPERTS),
    "nothing": np.full((TOKENS, 2), EXPERTS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "room, kernels",
    [
        (2 * TOKENS, False),
        (2 * TOKENS, True),
        (TOKENS // 4, True),
    ],
    ids=("products", "kernels", "loop"),
)
def test_any_routing_is_exact(room, kernels, monkeypatch):
    """The kernels as on a chip with two cores. The hidden layer of half of the tokens is kept."""
    monkeypatch.setattr(chip, "core_count", lambda: 2)
    monkeypatch.setattr(routed_experts, "LOOP_ROWS", 16)
    monkeypatch.setattr(routed_experts, "_LARGEST_NUMBER", 2**31 if kernels else 0)
    *given, dy = (
        a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
        for a in inputs(TOKENS, 2, 128, EXPERTS, 128)
    )
    with interpreted() if kernels else contextlib.nullcontext():
        run = jax.jit(functools.partial(by_token, room=room, pieces=2, keep=1))
        for name, expert in ROUTINGS.items():
            arguments = (*given[:2], jnp.asarray(expert, jnp.int32), *given[3:], dy)
            for part, error in errors(run(*arguments), exact(*arguments)).items():
                # a lone dweight is a sum of terms of either sign
                assert error < (2e-5 if part == "dweight" else 2e-6), (name, part)


@pytest.mark.slow
def test_bfloat16_loses_nothing_to_rows_a_choice():
    """By the kernels, and by products in four parts that are summed in bfloat16 (as by a
    reduce-scatter); tokens in halves.
    """
    given = inputs(tokens=128, experts=8)
    expected = exact(*given)
    before = errors(jax.jit(a_row_a_choice)(*given), expected)
    for context, shards in ((interpreted(), 1), (contextlib.nullcontext(), 4)):
        with context:
            now = errors(
                jax.jit(functools.partial(by_token, shards=shards, pieces=2))(*given), expected
            )
        assert all(now[name] <= 1.25 * before[name] for name in now), (shards, now, before)


def test_matrices_of_another_dtype_have_no_tpu_kernel():
    """Mosaic multiplies no float32 rows by bfloat16 matrices."""
    x, gate_up = jnp.zeros((16, 128), jnp.float32), jnp.zeros((1, 128, 256), jnp.bfloat16)
    reason = tpu_kernels.unsupported_reason(x, gate_up, 16, False)
    assert "float32" in reason
    assert "bfloat16" in reason


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("width", [64, 128, 384])
def test_rows_of_any_width_are_summed(width):
    """Pallas refuses a block that is no whole number of lanes, when it lowers a program for a TPU;
    it does not when it interprets a kernel.
    """
    mesh = Mesh(np.array(describe_topology("v5p:2x2x1").devices[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    rows, tokens = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (((512, width), jnp.bfloat16), ((512,), jnp.int32))
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert chip.core_count() == 2
        jax.jit(functools.partial(sum_rows_by_token, tokens=200)).lower(rows, tokens)
