"""Grouped SwiGLU experts, forward + backward in float32: batched blocks, XLA's ragged_dot, and
the dense batched matmul that the same useful FLOPs would cost if all groups had one size.

    uv run python benchmarks/ops/grouped_matmul.py

Prints per problem the least and median milliseconds of interleaved runs and the useful GFLOP/s
at the least.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from qwen3next_jax.ops import expert_mlp

# R, D, I, E
PROBLEMS = ((8192, 128, 128, 8), (8192, 128, 128, 64), (16384, 256, 256, 8), (16384, 256, 256, 32))
# ragged_dot computes every group for every row on CPU; larger problems leave it out
RAGGED_DOT_FLOPS = 1e11


def dense(x, gate_up, down, group_sizes):
    """Every group of R / E rows."""
    e, i, d = down.shape
    gate, up = jnp.split(x.reshape(e, -1, d) @ gate_up.reshape(e, d, 2 * i), 2, axis=-1)
    return ((jax.nn.silu(gate) * up) @ down).reshape(x.shape)


def per_group(x, gate_up, down, group_sizes):
    """One matmul per group, the sizes read on the host."""
    ends = np.cumsum(group_sizes)
    return jnp.concatenate(
        [
            dense(x[end - size : end], gate_up[e : e + 1], down[e : e + 1], None)
            for e, (size, end) in enumerate(zip(np.asarray(group_sizes), ends))
            if size
        ]
    )


def problem(r, d, i, e):
    rng = np.random.default_rng(0)
    x, gate_up, down, dy = (
        jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5, jnp.float32)
        for s in ((r, d), (e, d, 2, i), (e, i, d), (r, d))
    )
    # as uneven as a balanced router
    group_sizes = rng.multinomial(r, rng.dirichlet(np.full(e, 5.0))).astype(np.int32)
    return x, gate_up, down, group_sizes, dy


def with_gradients(f):
    def run(x, gate_up, down, group_sizes, dy):
        y, pullback = jax.vjp(lambda *a: f(*a, group_sizes), x, gate_up, down)
        return y, *pullback(dy)

    return run


def main():
    harness.arguments(__doc__).parse_args()
    print(
        f"{'R':>6} {'D':>4} {'I':>4} {'E':>3}  {'':12} {'least ms':>9} {'median ms':>9} "
        f"{'GFLOP/s':>8}"
    )
    for r, d, i, e in PROBLEMS:
        arguments = problem(r, d, i, e)
        flops = 3 * 6 * r * d * i
        names = ("blocked", "ragged_dot") if flops * e < RAGGED_DOT_FLOPS else ("blocked",)
        candidates = {
            name: jax.jit(with_gradients(lambda *a, n=name: expert_mlp(*a, implementation=n)))
            for name in names
        }
        expected = with_gradients(per_group)(*arguments)
        for name, f in candidates.items():
            for got, want in zip(f(*arguments), expected, strict=True):
                error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
                assert error < 1e-5, f"{name} is off by {error:.1e}"
        candidates["dense"] = jax.jit(with_gradients(dense))
        jax.block_until_ready(candidates["dense"](*arguments))
        calls = {
            name: lambda f=f: jax.block_until_ready(f(*arguments)) for name, f in candidates.items()
        }
        for name, ms in harness.interleaved(calls, rounds=7).items():
            print(
                f"{r:6} {d:4} {i:4} {e:3}  {name:12} {min(ms):9.1f} {np.median(ms):9.1f} "
                f"{flops / min(ms) / 1e6:8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
