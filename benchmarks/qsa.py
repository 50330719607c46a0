"""Sparse attention (QSA): attention to all keys under a mask, gathered blocks of keys, and the TPU
kernels, which hide keys without writing scores to memory.

    python benchmarks/qsa.py                                 # memory, at the released sizes
    python benchmarks/qsa.py --lengths=512,1024,2048 --budget=128 --run
    python benchmarks/qsa.py --topology=v5p:2x2x1 --lengths=16384 [--heads=24] [--key_heads=2]
        [--forms=masked,gathered,pallas_tpu]

It prints, for rows of each length, the temporary memory of the compiled forward and backward pass
(without arguments and results), and with `--run` the seconds of a call on this machine.

With `--topology` it compiles for one chip of a TPU slice instead, and prints also the milliseconds
that the planner expects of the program by the compiler's own schedule of its kernels and fusions,
and by the cost model `roofline` (docs/planner.md). No TPU takes part.
"""

import argparse
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.model.layers import Context
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.zoo import qsa

WIDTH = 256  # of attention's heads in Qwen3.8-Flash-Next


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="4096,8192,16384", help="tokens of a row")
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a query selects")
    parser.add_argument("--heads", type=int, default=24, help="query heads")
    parser.add_argument("--key_heads", type=int, default=2)
    parser.add_argument("--forms", default="", help="names of implementations")
    parser.add_argument("--run", action="store_true", help="measure the time of a call, too")
    parser.add_argument("--topology", default="", help="TPU slice to compile for")
    args = parser.parse_args()
    args.devices = None
    if args.topology:
        args.schedules = tempfile.mkdtemp(prefix="schedules-")
        schedule.enable_schedule_dump(args.schedules)
        jax.config.update("jax_platforms", "cpu")
        args.described = describe_topology(args.topology)
        args.devices = Mesh(np.array(args.described.devices[:1]), ("data",))
    forms = args.forms or ("masked,gathered,pallas_tpu" if args.topology else "masked,gathered")
    for length in map(int, args.lengths.split(",")):
        for form in forms.split(","):
            print(f"{length:7} tokens, {form:10}: {_measure(form, length, args)}", flush=True)


def _measure(form: str, length: int, args) -> str:
    settings, dtype = qsa.QSA.Settings(indexer_budget=args.budget), jnp.bfloat16
    ratio, count = settings.indexer_compress_ratio, length // settings.indexer_compress_ratio
    shapes = (
        (length, args.heads, WIDTH),
        (length, args.key_heads, WIDTH),
        (length, args.key_heads, WIDTH),
        (length, settings.indexer_n_heads, settings.indexer_head_dim),
        (count, settings.indexer_head_dim),
        (length, args.heads, WIDTH),
    )

    def both_ways(q, k, v, index_q, block_k, do):
        t = jnp.arange(length, dtype=jnp.int32)[None]
        start = jnp.arange(count, dtype=jnp.int32)[None] * ratio
        of_rows = qsa.Blocks(block_k, start, jnp.ones_like(start), start + ratio - 1, t // ratio)
        rest = index_q, of_rows, qsa.tokens_of(Context(t)), settings
        attend = lambda *qkv: qsa.sparse_attention(*qkv, *rest, implementation=form)
        o, pullback = jax.vjp(attend, q, k, v)
        return o, pullback(do)

    if args.topology:
        place = NamedSharding(args.devices, PartitionSpec())
        arrays = [jax.ShapeDtypeStruct((1, *shape), dtype, sharding=place) for shape in shapes]
        with jax.sharding.use_abstract_mesh(args.devices.abstract_mesh):
            compiled = jax.jit(both_ways).lower(*arrays).compile()
    else:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(key, (1, *shape), dtype) for key, shape in zip(keys, shapes)]
        compiled = jax.jit(both_ways).lower(*arrays).compile()
    text = f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:7.0f} MiB"
    if args.topology:
        program = hlo.parse(compiled.as_text())
        schedules = schedule.read_schedules(args.schedules, program)
        for model, known in (("schedule", schedules), ("roofline", {})):
            chip, shape = args.described.chip, args.described.shape
            estimate = estimate_time(program, args.devices, chip, shape, known, model, str)
            text += f", {estimate.seconds * 1e3:8.2f} ms ({model})"
    if args.run:
        jax.block_until_ready(compiled(*arrays))
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        text += f", {time.perf_counter() - begin:6.2f} s"
    return text


if __name__ == "__main__":
    main()
