"""Every mixer of config/registry.py: errors against its paper's recurrence in float64, time
of a training step of configs/tiny.py.

    python benchmarks/model/mixers.py                       # the errors, as rows of a table
    python benchmarks/model/mixers.py --steps=8 [names …]   # instead: the time of a step over that
                                                            # with Gated DeltaNet, in turns
    python benchmarks/model/mixers.py --layers [names …]    # instead: a layer (of kda) over one of
                                                            # Gated DeltaNet, both passes

Errors: largest of the output's and of any gradient's, each over the largest number of its array,
of a layer of `tests/zoo/test_mixers.py`'s sizes on 70 tokens; in bfloat16 the recurrence gets the
rounded numbers. A gradient far below the others counts as one thousandth of the largest. Where
nothing is timed, programs are compiled quickly, as the tests' are. Times: medians of so many
steps after the first two, both programs in one process. Of a step its CPU time, on which what
else the machine does tells less; for that of a layer it must be idle.
"""

import dataclasses
import os
import statistics
import sys
import time

from benchmarks import harness

if not any(argument.startswith(("--steps", "--layers")) for argument in sys.argv[1:]):
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )

import jax
import numpy as np
from flax import nnx

sys.path[:0] = [str(harness.ROOT / "tests"), str(harness.ROOT / "tests" / "zoo")]

from mixer_references import errors  # noqa: E402
from test_mixers import base  # noqa: E402

from qwen3next_jax.commands import process_setup  # noqa: E402
from qwen3next_jax.config import ModelConfig  # noqa: E402
from qwen3next_jax.config.mixer import MixerConfig  # noqa: E402
from qwen3next_jax.config.registry import MIXERS  # noqa: E402
from qwen3next_jax.model.flops import parameter_counts  # noqa: E402
from qwen3next_jax.model.layer_properties import mixer_class  # noqa: E402
from qwen3next_jax.model.layers import Context  # noqa: E402
from qwen3next_jax.model.parameters import Make  # noqa: E402
from qwen3next_jax.sharding.mesh import make_mesh  # noqa: E402
from qwen3next_jax.training.loop import make_train_step  # noqa: E402
from qwen3next_jax.training.resolve import resolve_run  # noqa: E402

# of sizes that suit configs/tiny.py
SETTINGS = {"sliding_window": {"window": 64}, "mla": {"latent_rank": 64}}


class Step:
    """A training step of configs/tiny.py with this mixer in place of the recurrent layers
    (`mla`: of attention).
    """

    def __init__(self, name: str):
        config = harness.load_config(harness.ROOT / "configs" / "tiny.py")
        mixer = config.model.mixer | SETTINGS.get(name, {})
        model = dataclasses.replace(
            config.model, mixer=mixer, **{"full_mixer" if name == "mla" else "linear_mixer": name}
        )
        config = dataclasses.replace(config, model=model)
        run = resolve_run(config, make_mesh(config.parallel, jax.devices()[:1]))
        (stage,) = run.stages
        shape = (stage.batch_size, stage.sequence_length)
        tokens = np.random.default_rng(0).integers(0, 256, shape, np.int32)
        self.batch = jax.device_put(
            {"tokens": tokens, "segment_ids": np.ones(shape, np.int32)},
            run.batch_sharding,
        )
        self.state = run.init_state()
        self.step = make_train_step(run, stage)
        self.seconds = []
        self.parameters = parameter_counts(model).total

    def take(self):
        start = time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(metrics["loss"])
        self.seconds.append(time.process_time() - start)


def times_of(step: Step, peer: Step, steps: int) -> float:
    """The median time of a step over the peer's."""
    peer.seconds.clear()
    for _ in range(steps + 2):
        step.take()
        peer.take()
    return statistics.median(step.seconds[2:]) / statistics.median(peer.seconds[2:])


def layer(name: str, batch: int, length: int, heads: int, width: int):
    """Forward and backward of one float32 layer, key heads half as many as value heads; → a call
    that runs it.
    """
    config = ModelConfig(
        hidden_size=heads * width,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        dtype="float32",
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width,
        max_position_embeddings=8192,
        decay_init="log_uniform",
        num_hidden_layers=1,
        layer_types=(name,),
        mtp_depth=0,
        mixer=MixerConfig(**SETTINGS.get(name, {})),
    )
    graph, params = nnx.split(mixer_class(name)(config, Make(config, nnx.Rngs(0)), (0,)))
    x, dy = (
        jax.random.normal(jax.random.key(i), (batch, length, config.hidden_size)) for i in range(2)
    )
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    run = jax.jit(
        jax.grad(
            lambda params, x: (nnx.merge(graph, params)(x, Context(positions))[0] * dy).sum(),
            argnums=(0, 1),
        )
    )
    return lambda: jax.block_until_ready(run(params, x))


def layers(names):
    """Of kda in two shapes, of others in the first, which is that of configs/tiny.py."""
    for name, shape in [(name, (8, 256, 4, 32)) for name in names or ("kda",)] + [
        ("kda", (1, 1024, 8, 64))
    ] * (not names):
        calls, seconds = [layer(mixer, *shape) for mixer in (name, "gated_deltanet")], ([], [])
        for _ in range(22):
            for call, times in zip(calls, seconds):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        of, one = (1e3 * statistics.median(times[2:]) for times in seconds)
        sizes = "{} × {} tokens, {} value heads of {}".format(*shape)
        print(
            f"{sizes}: {name} {of:.1f} ms, Gated DeltaNet {one:.1f} ms, {of / one:.2f} ×",
            flush=True,
        )


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("names", nargs="*", help="of config/registry.py; all")
    parser.add_argument("--steps", type=int, default=0, help="steps that are timed")
    parser.add_argument("--layers", action="store_true", help="time layers")
    a = parser.parse_args()
    process_setup.keep_freed_memory()
    if a.layers:
        return layers(a.names)
    if a.steps:
        print("| mixer | step | parameters |")
        peer = Step("gated_deltanet")
        for name in a.names or MIXERS:
            step = Step(name)
            print(
                f"| `{name}` | {times_of(step, peer, a.steps):.2f} × | {step.parameters:,} |",
                flush=True,
            )
        return
    print("| mixer | output float32 | gradients | output bfloat16 | gradients |")
    for name in a.names or MIXERS:
        row = [f"`{name}`"]
        config = dataclasses.replace(
            base(name), num_hidden_layers=4, layer_types=(name,) * 4, decay_init="log_uniform"
        )
        for dtype in ("float32", "bfloat16"):
            output, gradients = errors(name, config, dtype, 70)
            row += [f"{output:.1e}", f"{max(jax.tree.leaves(gradients)):.1e}"]
        if max(jax.tree.leaves(gradients)) > 0.05:
            _, gradients = errors(name, config, dtype, 70, of_reference=True)
            row[-1] += (
                f" (the recurrence itself in bfloat16: {max(jax.tree.leaves(gradients)):.1e})"
            )
        print(f"| {' | '.join(row)} |", flush=True)
    for number in (0, 300) if not a.names or "mlstm" in a.names else ():
        output, gradients = errors(
            "mlstm", base("mlstm"), "float32", 70, added={"input_bias": number}
        )
        print(
            f"mlstm with {number} added to its input gates, float32: {output:.1e}, "
            f"{max(jax.tree.leaves(gradients)):.1e}"
        )


if __name__ == "__main__":
    main()
