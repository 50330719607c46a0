"""Sparse attention (QSA): attention to all keys under a mask against gathered blocks of keys.

    python benchmarks/qsa.py                                 # memory, at the released sizes
    python benchmarks/qsa.py --lengths=512,1024,2048 --budget=128 --run

It prints, for rows of each length, the temporary memory of the compiled forward and backward pass
(without arguments and results), and with `--run` the seconds of a call on this machine.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.zoo import qsa

QUERY_HEADS, KEY_HEADS, WIDTH = 24, 2, 256  # of attention in Qwen3.8-Flash-Next
FORMS = {"under a mask": qsa.masked_attention, "gathered": qsa.selected_attention}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="4096,8192,16384", help="tokens of a row")
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a query selects")
    parser.add_argument("--run", action="store_true", help="measure the time of a call, too")
    args = parser.parse_args()
    settings = qsa.QSA.Settings(indexer_budget=args.budget)
    for length in map(int, args.lengths.split(",")):
        for name, attend in FORMS.items():
            print(f"{length:7} tokens, {name:12}: {_measure(attend, length, settings, args.run)}")


def _measure(attend, length: int, settings: qsa.QSA.Settings, run: bool) -> str:
    ratio, dtype = settings.indexer_compress_ratio, jnp.bfloat16
    heads, width = settings.indexer_n_heads, settings.indexer_head_dim
    count = length // ratio
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda key, *shape: jax.random.normal(key, (1, length, *shape), dtype)
    arrays = (
        draw(keys[0], QUERY_HEADS, WIDTH),
        draw(keys[1], KEY_HEADS, WIDTH),
        draw(keys[2], KEY_HEADS, WIDTH),
        draw(keys[3], heads, width),
        draw(keys[4], width)[:, :count],
    )

    def total(q, k, v, index_q, block_k):
        t = jnp.arange(length, dtype=jnp.int32)[None]
        start = jnp.arange(count, dtype=jnp.int32)[None] * ratio
        of_rows = qsa.Blocks(block_k, start, jnp.ones_like(start), start + ratio - 1, t // ratio)
        tokens = qsa.tokens_of(Context(t))
        o = attend(q, k, v, index_q, of_rows, tokens, settings)
        return jnp.sum(o.astype(jnp.float32))

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arrays).compile()
    text = f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:7.0f} MiB"
    if not run:
        return text
    jax.block_until_ready(compiled(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(compiled(*arrays))
    return f"{text}, {time.perf_counter() - begin:6.2f} s"


if __name__ == "__main__":
    main()
