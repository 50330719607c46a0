"""How far the best learning rate moves when a model gets wider or deeper, with `optimizer.scaling`
and without: tiny hybrids (Gated DeltaNet, gated attention) on bytes of the Python standard library,
three seeds.

    python benchmarks/training/widths.py                             # AdamW, widths 64, 128, 256
    python benchmarks/training/widths.py --optimizer=muon --sizes=32,64,128
    python benchmarks/training/widths.py --axis=depth --sizes=2,4,8  # mup and completep, width 64

All rates and seeds of one size train side by side in one program. A rate's loss is that on held-out
rows after the last step. The best rate is the minimum of the parabola through the lowest mean and
its neighbours, over the log of the rate; "moved" counts in steps of √2 from the first size.
"""

import dataclasses
import json
import math
import pathlib
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import harness
from qwen3next_jax.config import ModelConfig, OptimizerConfig
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.language_model import Qwen3Next
from qwen3next_jax.sweeps.learning_rates import best_rate
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.parameter_groups import make_parameter_groups

SEEDS = (0, 1, 2)
ROWS, LENGTH = 8, 64
HEAD = 16
HELD_OUT_ROWS = 128


def model(width: int, layers: int, start: float) -> ModelConfig:
    """A dense hybrid; `start`: the standard deviation of its matrices at the base width."""
    heads = width // HEAD
    return ModelConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        full_attention_interval=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        decay_init="log_uniform",
        initializer_range=start,
        num_experts=0,
        mtp_depth=0,
        rope_theta=10_000.0,
        max_position_embeddings=LENGTH,
        dtype="float32",
    )


def corpus() -> np.ndarray:
    """Bytes of the standard library's top-level modules."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def rows(text: np.ndarray, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random pieces [*shape, LENGTH + 1] of the text."""
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, shape)
    return text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)


def losses(config: ModelConfig, optimizer: OptimizerConfig, rates: list[float], steps: int):
    """Held-out losses [seeds, rates] after training; infinite where it diverged."""
    text = corpus()
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    groups = make_parameter_groups(config, (), optimizer)
    shape = learning_rate_schedule(dataclasses.replace(optimizer, learning_rate=1.0), steps)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))

    def loss(params, batch):
        module = nnx.merge(graphdef, params)
        logits = module(batch[:, :-1]).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def start(seed):
        params = nnx.state(Qwen3Next(config, rngs=nnx.Rngs(seed)), nnx.Param)
        return groups.scale_initial_params(nnx.to_pure_dict(params))

    def run(rate, params, batches, unseen):
        updater = make_optimizer(
            optimizer,
            parameter_declarations(config),
            lambda count: rate * shape(count),
            None,
            groups.learning_rate_factors,
            groups.weight_decays,
        )

        def step(carry, batch):
            params, state = carry
            updates, state = updater.update(jax.grad(loss)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, updater.init(params)), batches)
        return loss(params, unseen)

    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(start(seed) for seed in SEEDS))
    batches = np.stack([rows(train, (steps, ROWS), seed) for seed in SEEDS])
    over_rates = jax.vmap(run, in_axes=(0, None, None, None))
    over_seeds = jax.jit(jax.vmap(over_rates, in_axes=(None, 0, 0, None)))
    unseen = rows(held_out, (HELD_OUT_ROWS,), 99)
    found = np.asarray(over_seeds(jnp.asarray(rates), params, batches, unseen), float)
    return np.where(np.isfinite(found), found, np.inf)


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--axis", choices=("width", "depth"), default="width")
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lowest", type=float, default=1e-3, help="the lowest learning rate")
    parser.add_argument("--rates", type=int, default=7, help="how many, each twice the one before")
    parser.add_argument("--start", type=float, default=0.02, help="model.initializer_range")
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    rates = [arguments.lowest * 2**i for i in range(arguments.rates)]
    base = {"base_width": sizes[0]}
    if arguments.axis == "depth":
        base = {"base_width": 64}
    scalings = {"none": {}, "mup": base}
    if arguments.axis == "depth":
        scalings = {"mup": base, "completep": base | {"base_depth": sizes[0]}}
    print()
    head = [f"{rate:.3g}" for rate in rates]
    harness.print_header("scaling", arguments.axis, *head, "best (by seed)", "moved")
    at_base = None  # of the first size, which every scaling leaves alone
    for scaling, settings in scalings.items():
        first = None
        for size in sizes:
            begin = time.monotonic()
            shape = (size, 2) if arguments.axis == "width" else (64, size)
            config = model(*shape, arguments.start)
            optimizer = OptimizerConfig(
                name=arguments.optimizer,
                scaling=scaling,
                warmup_steps=10,
                schedule="linear",
                **settings,
            )
            found = at_base
            if size > sizes[0] or at_base is None:
                found = losses(config, optimizer, rates, arguments.steps)
            at_base = found if size == sizes[0] else at_base
            best, at_edge = best_rate(rates, found.mean(axis=0))
            by_seed = " ".join(f"{best_rate(rates, one)[0]:.2g}" for one in found)
            first = first or best
            moved = 2 * math.log2(best / first)
            cells = [f"{mean:.3f}" for mean in found.mean(axis=0)]
            edge = ", at the edge" if at_edge else ""
            harness.print_row(
                scaling, size, *cells, f"{best:.2g} ({by_seed}){edge}", f"{moved:+.1f}"
            )
            record = {
                "axis": arguments.axis,
                "size": size,
                "scaling": scaling,
                "optimizer": arguments.optimizer,
                "start": arguments.start,
                "steps": arguments.steps,
                "rates": rates,
                "losses": found.tolist(),
                "seconds": round(time.monotonic() - begin),
            }
            out = pathlib.Path("runs/widths.jsonl")
            out.parent.mkdir(exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
