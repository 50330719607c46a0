"""Errors of the experts' layer in bfloat16 against float64 of the same bfloat16 inputs: relative
L2 of y and of each gradient.

    JAX_PLATFORMS=cpu python benchmarks/kernels/experts_precision.py [--shards=8]

"one row a choice": each choice's row rounded, then weighted and summed in float32, as CPUs do
it. "products", "kernels": the router's weight in the hidden layer and rows summed by token in a
product, by XLA's products or the TPU's kernels, interpreted. "…, n shards": the experts in n
parts whose results are summed one after another in bfloat16, the worst that a reduce-scatter
does.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from qwen3next_jax.kernels.tpu import routed_experts as kernels
from qwen3next_jax.kernels.tpu import sum_by_token
from qwen3next_jax.model.expert_implementations import sorted_moe
from qwen3next_jax.ops.routed_experts import layout as routed_experts

NAMES = ("y", "dx", "dweight", "dgate_up", "ddown")


def inputs(tokens=512, choices=4, width=256, experts=16, hidden=128):
    """(x, weight, expert, gate_up, down, dy), bfloat16."""
    rng = np.random.default_rng(0)
    x, gate_up, down, dy = (
        jnp.asarray(rng.standard_normal(s) * scale, jnp.bfloat16)
        for s, scale in (
            ((tokens, width), 1),
            ((experts, width, 2, hidden), width**-0.5),
            ((experts, hidden, width), hidden**-0.5),
            ((tokens, width), 1),
        )
    )
    logits = rng.standard_normal((tokens, experts))
    expert = np.argsort(-logits, axis=1)[:, :choices]
    weight = np.exp(np.take_along_axis(logits, expert, axis=1))
    return (
        x,
        jnp.asarray(weight / weight.sum(1, keepdims=True), jnp.bfloat16),
        jnp.asarray(expert, jnp.int32),
        gate_up,
        down,
        dy,
    )


def exact(x, weight, expert, gate_up, down, dy):
    """y and gradients in float64."""
    x, weight, gate_up, down, dy = (
        np.asarray(a, np.float64) for a in (x, weight, gate_up, down, dy)
    )
    expert, y, dx, dweight, dgate_up, ddown = (
        np.asarray(expert),
        *(np.zeros_like(a) for a in (x, x, weight, gate_up, down)),
    )
    for e in range(gate_up.shape[0]):
        token, choice = np.nonzero(expert == e)
        w = weight[token, choice][:, None]
        gate, up = x[token] @ gate_up[e, :, 0], x[token] @ gate_up[e, :, 1]
        s = 1 / (1 + np.exp(-gate))
        np.add.at(y, token, w * (gate * s * up @ down[e]))
        da = dy[token] @ down[e].T
        dweight[token, choice] = np.sum(da * gate * s * up, axis=1)
        ddown[e] = (w * gate * s * up).T @ dy[token]
        dgate, dup = w * da * up * s * (1 + gate * (1 - s)), w * da * gate * s
        dgate_up[e, :, 0], dgate_up[e, :, 1] = x[token].T @ dgate, x[token].T @ dup
        np.add.at(dx, token, dgate @ gate_up[e, :, 0].T + dup @ gate_up[e, :, 1].T)
    return y, dx, dweight, dgate_up, ddown


def a_row_a_choice(x, weight, expert, gate_up, down, dy):
    y, pullback = jax.vjp(
        lambda x, w, g, d: sorted_moe(x, w, expert, g, d), x, weight, gate_up, down
    )
    return y, *pullback(dy)


def by_token(x, weight, expert, gate_up, down, dy, shards=1, room=None, pieces=1, keep=0):
    """The form of accelerators, `pieces` of the tokens one after another; `room` below all
    choices leaves some of them to the loop. The hidden layer of the first `keep` pieces is kept for
    the gradients, which compute that of the others again.
    """

    def shard(n):
        mine = slice(n * gate_up.shape[0] // shards, (n + 1) * gate_up.shape[0] // shards)
        dw, rows, most = (), [], dict(capacity=room or expert.size // pieces)
        for i, (*piece, dy_piece) in enumerate(
            zip(*(jnp.split(a, pieces) for a in (x, weight, expert - mine.start, dy)))
        ):
            y, kept = routed_experts.routed_experts(
                *piece, gate_up[mine], down[mine], **most, keep_hidden=i < keep
            )
            dx, dweight, *dw = routed_experts.routed_experts_gradients(
                *piece,
                gate_up[mine],
                down[mine],
                dy_piece,
                *dw,
                **most,
                kept=kept if i < keep else None,
            )
            rows.append((y, dx, dweight))
        return *map(jnp.concatenate, zip(*rows)), *dw

    parts = list(zip(*map(shard, range(shards))))
    y, dx, dweight = (sum(part[1:], part[0]).astype(part[0].dtype) for part in parts[:3])
    return y, dx, dweight.astype(weight.dtype), *(jnp.concatenate(part) for part in parts[3:])


def interpreted():
    """A context in which the TPU's kernels stand in for products and sums."""

    def sums(rows, choice, shape):
        token, order = jax.lax.sort(
            (choice // shape[1], jnp.arange(choice.shape[0], dtype=jnp.int32)), num_keys=1
        )
        return kernels.sum_rows_by_token(rows[order], token, shape[0], interpret=True)

    return mock.patch.multiple(
        routed_experts,
        sum_by_token=sums,
        _values_by_choice=functools.partial(sum_by_token.values_by_choice, interpret=True),
        _run_weighted_mlp=lambda p, *a: kernels.mlp(
            a[0],
            p.weight_P,
            *a[1:3],
            p.expert_T,
            p.used_tile_count,
            keep_hidden=a[3],
            interpret=True,
        ),
        _run_weighted_mlp_gradients=lambda p, *a: kernels.mlp_gradients(
            a[0], p.weight_P, *a[1:3], p.expert_T, p.used_tile_count, *a[3:], interpret=True
        ),
    )


def errors(got, expected) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-300))
        for name, a, b in zip(NAMES, got, expected, strict=True)
    }


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--shards", type=int, default=8)
    shards = parser.parse_args().shards
    given = inputs()
    expected = exact(*given)
    harness.print_header("relative L2 error, %", *NAMES)

    def show(name, got):
        harness.print_row(name, *(f"{100 * error:.3f}" for error in errors(got, expected).values()))

    show("one row a choice", a_row_a_choice(*given))
    for name, n in (("", 1), (f", {shards} shards", shards)):
        show("products" + name, by_token(*given, shards=n))
        with interpreted():
            show("kernels" + name, by_token(*given, shards=n))
    with interpreted():
        show("kernels, tokens in halves", by_token(*given, pieces=2))
    show("products, three quarters in the loop", by_token(*given, room=given[2].size // 4))


if __name__ == "__main__":
    main()
