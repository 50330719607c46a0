"""Causal attention over packed rows, forward + backward in float32: blockwise against the plain
softmax with its mask.

    uv run python benchmarks/ops/attention.py

Prints per problem the least and median milliseconds of interleaved runs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from qwen3next_jax.ops import attention

PROBLEMS = ((16, 256, 4, 2, 32), (4, 512, 8, 2, 64), (1, 1024, 8, 2, 64))  # B, T, N, M, D
ROUNDS = 9


def plain(q, k, v, segment_ids):
    b, t, n, d = q.shape
    q = q.reshape(b, t, k.shape[2], -1, d)
    mask = np.tril(np.ones((t, t), bool)) & (segment_ids[:, :, None] == segment_ids[:, None])
    scores = jnp.einsum("btmhd,bsmd->bmhts", q, k) * d**-0.5
    p = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bmhts,bsmd->btmhd", p, v).reshape(b, t, n, d)


def with_gradients(f):
    def run(q, k, v, do, segment_ids):
        o, pullback = jax.vjp(lambda *a: f(*a, segment_ids), q, k, v)
        return o, *pullback(do)

    return jax.jit(run)


def main():
    harness.arguments(__doc__).parse_args()
    candidates = {
        "plain softmax": with_gradients(plain),
        "blockwise": with_gradients(lambda q, k, v, s: attention(q, k, v, segment_ids=s)),
    }
    for b, t, n, m, d in PROBLEMS:
        rng = np.random.default_rng(0)
        q, k, v, do = (
            jnp.asarray(rng.normal(size=(b, t, heads, d)), jnp.float32) for heads in (n, m, m, n)
        )
        for documents in (1, 4):
            arguments = (
                q,
                k,
                v,
                do,
                jnp.asarray(np.sort(rng.integers(1, documents + 1, (b, t)), axis=1)),
            )
            results = [f(*arguments) for f in candidates.values()]
            for want, got in zip(*results, strict=True):
                error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
                assert error < 1e-5, f"off by {error:.1e}"
            calls = {
                name: lambda f=f: jax.block_until_ready(f(*arguments))
                for name, f in candidates.items()
            }
            for name, ms in harness.interleaved(calls, ROUNDS).items():
                print(
                    f"B={b} T={t} N={n} M={m} D={d} documents={documents}  {name:14} "
                    f"least {min(ms):8.1f} ms  median {np.median(ms):8.1f} ms"
                )


if __name__ == "__main__":
    main()
