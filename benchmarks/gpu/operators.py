"""The operators of one layer, forward and backward at a config's sizes, with kernels and in XLA's
forms: the milliseconds of each operator, and of each of its kernels.

    uv run --extra gpu python benchmarks/gpu/operators.py --config=configs/small.py
    python benchmarks/gpu/operators.py --config=configs/tiny.py --length=64     on a CPU

`compile.py --operators` compiles them for a described GPU.
"""

import dataclasses
import pathlib
import sys

from benchmarks import harness
from benchmarks.gpu import step

CALLS = 5  # one behind the other, so that what the host does to start one is not waited for


def operators(config, place):
    """{name: (function, shapes)}: forward and backward of one layer's operators at the config's
    sizes, in bfloat16, and of the whole recurrent layer, which computes again what a step does.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from qwen3next_jax import ops
    from qwen3next_jax.model import remat
    from qwen3next_jax.model.layer_properties import mixer_class
    from qwen3next_jax.model.layers import Context, document_positions
    from qwen3next_jax.model.parameters import Make
    from qwen3next_jax.ops.gated_norm import gated_norm

    m, b, t = config.model, config.train.batch_size, config.train.sequence_length

    def shaped(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    def with_gradients(f):
        def run(differentiated, others, dy):
            y, pullback = jax.vjp(lambda *a: f(*a, *others), *differentiated)
            return y, pullback(dy)

        return run

    rows, g, h = b * t * m.num_experts_per_tok, m.linear_num_key_heads, m.linear_num_value_heads
    k, v = m.linear_key_head_dim, m.linear_value_head_dim
    e, d, i, n, q = (
        m.num_experts,
        m.hidden_size,
        m.moe_intermediate_size,
        m.num_attention_heads,
        m.head_dim,
    )
    float_bth, ids = shaped(b, t, h, dtype=jnp.float32), shaped(b, t, dtype=jnp.int32)
    channels = 2 * k + h // g * v
    graph, params = nnx.split(
        nnx.eval_shape(lambda: mixer_class("gated_deltanet")(m, Make(m, nnx.Rngs(0)), (0,)))
    )
    layer = remat.rematerialized(
        lambda params, x, ids: nnx.merge(graph, params)(x, Context(document_positions(ids), ids))[
            0
        ],
        "kept",
    )
    return {
        "experts": (
            with_gradients(ops.expert_mlp),
            (shaped(rows, d), shaped(e, d, 2, i), shaped(e, i, d)),
            (shaped(e, dtype=jnp.int32),),
            shaped(rows, d),
        ),
        "attention": (
            with_gradients(lambda q, k, v, ids: ops.attention(q, k, v, segment_ids=ids)),
            (shaped(b, t, n, q), *[shaped(b, t, m.num_key_value_heads, q)] * 2),
            (ids,),
            shaped(b, t, n, q),
        ),
        "delta rule": (
            with_gradients(
                lambda q, k, v, g, beta, ids: ops.gated_delta_rule(
                    q, k, v, g=g, beta=beta, segment_ids=ids
                )[0]
            ),
            (shaped(b, t, g, k), shaped(b, t, g, k), shaped(b, t, h, v), float_bth, float_bth),
            (ids,),
            shaped(b, t, h, v),
        ),
        "convolution": (
            with_gradients(lambda x, w, ids: ops.causal_conv1d(x, w, segment_ids=ids)[0]),
            (shaped(b, t, g, channels), shaped(m.linear_conv_kernel_dim, g, channels)),
            (ids,),
            shaped(b, t, g, channels),
        ),
        "norm and gate": (
            with_gradients(lambda o, gate, weight: gated_norm(o, gate, weight, m.rms_norm_eps)),
            (shaped(b, t, h * v), shaped(b, t, h * v), shaped(v, dtype=jnp.float32)),
            (),
            shaped(b, t, h * v),
        ),
        "cross-entropy": (
            with_gradients(
                lambda x, w, targets, weights: ops.linear_cross_entropy(x, w, targets, weights)[0]
            ),
            (shaped(b * t, d), shaped(d, m.vocab_size, dtype=jnp.float32)),
            (shaped(b * t, dtype=jnp.int32), shaped(b * t, dtype=jnp.float32)),
            shaped(dtype=jnp.float32),
        ),
        "recurrent layer": (
            with_gradients(layer),
            (jax.tree.map(lambda p: shaped(*p.shape, dtype=p.dtype), params), shaped(b, t, d)),
            (ids,),
            shaped(b, t, d),
        ),
    }


def arrays(shapes, rows: int):
    """Makes arrays of these shapes: random ones, one document, rows spread evenly over experts."""
    import jax
    import jax.numpy as jnp

    def make(x):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return 0.1 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)
        per_expert = rows // x.size if x.ndim == 1 and x.size < rows else 1
        return jnp.full(x.shape, per_expert, x.dtype)

    return jax.tree.map(make, shapes)


def measure(name: str, config, rounds: int) -> str:
    """Times one operator; returns a cell of the table."""
    import jax

    train, model = config.train, config.model
    rows = train.batch_size * train.sequence_length * max(model.num_experts_per_tok, 1)
    function, *shapes = operators(config, None)[name]
    given = arrays(shapes, rows)
    program = jax.jit(function).lower(*given).compile()

    def calls(number):
        for _ in range(number):
            result = program(*given)
        jax.block_until_ready(result)

    with harness.alone():
        seconds, _ = harness.median_seconds(lambda: calls(CALLS), rounds)
        kernels = step.profile(lambda: calls(1))
    alone = sum(milliseconds for milliseconds, _ in kernels.values())
    return f"{1e3 * seconds / CALLS:.3f} ms, kernels {alone:.3f}"


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--config", default=str(harness.ROOT / "configs" / "small.py"))
    parser.add_argument("--length", type=int, default=0, help="instead of the config's")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    import jax

    from qwen3next_jax.kernels import self_test

    config = harness.load_config(options.config)
    length = options.length or config.train.sequence_length
    train = dataclasses.replace(config.train, sequence_length=length)
    config = dataclasses.replace(config, train=train)
    run_by_default = self_test.kernels_run_by_default
    title = f"{pathlib.Path(options.config).name}, {train.batch_size} x {length}"
    harness.print_header(title, "with kernels", "XLA's forms")
    for name in operators(config, None):
        if options.only not in name:
            continue
        cells = []
        for enabled in (run_by_default, lambda *_, **__: False):
            self_test.kernels_run_by_default = enabled
            jax.clear_caches()  # a part may be cached as the other form traced it
            try:
                cells.append(measure(name, config, options.rounds))
            except Exception as error:
                cells.append(f"failed: {harness.one_line(error)}")
        harness.print_row(name, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
