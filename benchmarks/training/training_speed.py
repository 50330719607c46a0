"""Training speed on this CPU against transformers' Qwen3-Next (torch), side by side in one run.

Both train the same float32 weights on the same batches of real text: forward, backward,
clipping, AdamW. Multi-token prediction and the balance loss are off, since transformers trains
without them. Before anything is timed, the two must compute the same loss. The peer gets its
fastest attention and experts implementation, found by timing all of them; its convolution and
delta rule are its own torch code, since the kernels it would prefer need a GPU. Then both sides
run in turns with pauses between them, block by block, after warm-up, and the medians over all
steps are compared. The rate of the model's own products stands beside what this machine gives
large ones. The machine must be idle otherwise.

    python benchmarks/training/training_speed.py --python=/path/to/python/with/torch
    [--config=configs/tiny.py] [--compile]
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from benchmarks import harness
from qwen3next_jax import Qwen3Next, save_hf
from qwen3next_jax.commands import process_setup
from qwen3next_jax.config import Config
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

WARM_UP = 5  # steps; torch's first ones are up to 2.6 times slower
BATCHES = 8  # different ones, taken in turn
# s between turns: OpenMP's threads (torch's) keep a core busy for a while after their work
PAUSE = 0.5


def load_config(args: argparse.Namespace) -> Config:
    """The config file's model and batch, in float32, without what transformers does not train."""
    config = harness.load_config(args.config)
    model = dataclasses.replace(config.model, mtp_depth=0, dtype="float32")
    train = dataclasses.replace(
        config.train,
        balance_loss_weight=0.0,
        mtp_loss_weight=0.0,
        batch_size=args.batch_size or config.train.batch_size,
        sequence_length=args.sequence_length or config.train.sequence_length,
    )
    optimizer = dataclasses.replace(
        config.optimizer, warmup_steps=0, schedule="warmup_stable_decay", decay_fraction=0.0
    )
    return dataclasses.replace(config, model=model, train=train, optimizer=optimizer)


def text_batches(config: Config) -> np.ndarray:
    """[batches, B, T] int32: bytes of the Python standard library (modulo the vocabulary, where
    it is smaller).
    """
    shape = (BATCHES, config.train.batch_size, config.train.sequence_length)
    library = pathlib.Path(os.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    needed = int(np.prod(shape))
    assert len(text) >= needed, f"the batches take {needed} bytes, {library} has {len(text)}"
    return (
        np.frombuffer(text[:needed], np.uint8).reshape(shape).astype(np.int32)
        % config.model.vocab_size
    )


class Ours:
    def __init__(self, config: Config, model: Qwen3Next, batches: np.ndarray):
        run = resolve_run(config, single_device_mesh())
        self.state = run.init_state(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.train_step = make_train_step(run, *run.stages)
        self.steps = 0
        self.batches = [
            {"tokens": jnp.asarray(b), "segment_ids": jnp.ones_like(b)} for b in batches
        ]

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """(seconds, losses) of each step."""
        seconds, losses = [], []
        for _ in range(steps):
            start = time.perf_counter()
            self.state, metrics = self.train_step(self.state, self.batches[self.steps % BATCHES])
            jax.block_until_ready(self.state)
            seconds.append(time.perf_counter() - start)
            losses.append(float(metrics["loss"]))
            self.steps += 1
        return seconds, losses


class Peer(harness.Peer):
    """transformers' training step in another interpreter."""

    def __init__(self, python: str, model_dir: str, tokens_file: str, config: Config):
        super().__init__(python, "train", model_dir, tokens_file)
        self.ask(threads=os.cpu_count())
        c = config.optimizer
        self.optimizer = {
            "learning_rate": c.learning_rate,
            "weight_decay": c.weight_decay,
            "clip_norm": c.clip_norm,
            "betas": [c.beta1, c.beta2],
            "eps": c.eps,
        }

    def start(self, attention: str, experts: str, compiled: bool) -> int:
        """A new trainer from the exported weights; → its number of parameters."""
        return self.ask(
            new={"attention": attention, "experts": experts, "compiled": compiled, **self.optimizer}
        )["parameters"]

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        answer = self.ask(steps=steps)
        return answer["seconds"], answer["losses"]


def fastest_variant(peer: Peer, compiled: bool, tokens: int) -> tuple[str, str, bool]:
    """Times every way transformers offers on CPU (one that starts 5 times slower than the best
    so far is not warmed up); prints them; → the fastest.
    """
    medians = {}
    for variant in itertools.product(
        ("eager", "sdpa"), ("eager", "grouped_mm", "batched_mm"), (False, True)[: 1 + compiled]
    ):
        peer.start(*variant)
        first = min(peer.run(2)[0])
        hopeless = medians and first > 5 * min(medians.values())
        medians[variant] = (
            first if hopeless else statistics.median(peer.run(WARM_UP + 5)[0][WARM_UP:])
        )
        attention, experts, is_compiled = variant
        print(
            f"  attention {attention:6} experts {experts:11}{'compiled' if is_compiled else '':9}"
            f"{tokens / medians[variant]:9,.0f} tokens/s",
            flush=True,
        )
    return min(medians, key=medians.get)


def product_rate(n: int = 4096) -> float:
    """FLOP/s of an [n, n] float32 product on this machine, the best of five."""
    x, product = jnp.ones((n, n)), jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    return max(
        2 * n**3 / seconds for seconds in (_seconds(lambda: product(x, x)) for _ in range(5))
    )


def _seconds(function) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--python", required=True, help="interpreter with torch and transformers")
    parser.add_argument("--config", default=str(harness.ROOT / "configs" / "tiny.py"))
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--sequence_length", type=int)
    parser.add_argument(
        "--compile", action="store_true", help="try torch.compile as well (minutes)"
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="per block and side")
    args = parser.parse_args()
    process_setup.keep_freed_memory()  # as train.py does; the peer does the same
    config = load_config(args)
    batches = text_batches(config)
    tokens = batches[0].size
    with tempfile.TemporaryDirectory() as directory:
        model = Qwen3Next(config.model, rngs=nnx.Rngs(config.train.seed))
        save_hf(model, f"{directory}/model")
        save_file({"input_ids": batches}, f"{directory}/tokens.safetensors")
        peer = Peer(args.python, f"{directory}/model", f"{directory}/tokens.safetensors", config)
        _describe(args, config, peer)
        variant = fastest_variant(peer, args.compile, tokens)

        ours = Ours(config, model, batches)
        parameters = peer.start(*variant)
        assert parameters == sum(x.size for x in jax.tree.leaves(ours.state["params"]))
        (_, our_losses), (_, peer_losses) = ours.run(WARM_UP), peer.run(WARM_UP)
        np.testing.assert_allclose(our_losses[0], peer_losses[0], rtol=1e-5)
        print(
            f"same loss from the same weights and batch: {our_losses[0]:.6f}, "
            f"{peer_losses[0]:.6f}; "
            f"after {WARM_UP - 1} updates {our_losses[-1]:.4f}, {peer_losses[-1]:.4f}"
        )
        time.sleep(PAUSE)
        our_seconds, peer_seconds = [], []
        for _ in range(args.blocks):
            our_seconds += ours.run(args.steps)[0]
            time.sleep(PAUSE)
            peer_seconds += peer.run(args.steps)[0]
            time.sleep(PAUSE)
        peer.process.stdin.close()
        peer.process.wait()
    _print_table({"this project": our_seconds, "transformers": peer_seconds}, tokens)
    rate = (
        flops_per_token(config.model, config.train.sequence_length)
        * tokens
        / statistics.median(our_seconds)
    )
    print(
        f"the model's own products at {rate / 1e9:.0f} GFLOP/s; [4096, 4096] float32 products "
        f"alone at {product_rate() / 1e9:.0f}"
    )
    return 0


def _describe(args: argparse.Namespace, config: Config, peer: Peer) -> None:
    c, t = config.model, config.train
    kinds = "".join("A" if mixer == c.full_mixer else "r" for mixer in c.mixers)
    print(
        f"{pathlib.Path(args.config).name}: layers {kinds} (r recurrent, A attention), hidden "
        f"{c.hidden_size}, "
        f"{c.num_experts} experts top-{c.num_experts_per_tok} of width {c.moe_intermediate_size}, "
        f"vocabulary {c.vocab_size}; "
        f"batch {t.batch_size} × {t.sequence_length}, float32, AdamW, clipping "
        f"{config.optimizer.clip_norm}"
    )
    print(
        f"{os.cpu_count()} threads; jax {jax.__version__}; torch {peer.versions['torch']}, "
        f"transformers {peer.versions['transformers']}:",
        flush=True,
    )


def _print_table(seconds: dict[str, list[float]], tokens: int) -> None:
    print(f"\n{'':14} {'median s/step':>14} {'quartiles':>16} {'tokens/s':>10}")
    rates = {}
    for name, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        rates[name] = tokens / median
        print(f"{name:14} {median:14.4f} {f'{low:.4f}–{high:.4f}':>16} {rates[name]:10,.0f}")
    print(
        f"{rates['this project'] / rates['transformers']:.2f} × transformers' tokens/s "
        f"({len(values)} steps each)"
    )


if __name__ == "__main__":
    sys.exit(main())
