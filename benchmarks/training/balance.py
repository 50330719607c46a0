"""How evenly the experts of a small model are used, and its held-out loss, with a balance loss,
with router biases that follow the sign of the load, and with quantile balancing, for three seeds.

    python benchmarks/training/balance.py
    python benchmarks/training/balance.py quantile "sign, rate 0.01"      # some methods alone

The model is that of configs/tiny.py with two layers of width 64 and 16 experts, 2 for each token,
with sigmoid scores, without multi-token prediction. Prints each run as JSON, then the table.
"Busiest expert" is the load of the busiest expert of any layer, in equal shares (1: even), as a
mean over the second half of the steps. "Idle" is the number of experts of both layers, of 32, that
no token of a batch chose.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import harness
from qwen3next_jax.config import Config
from qwen3next_jax.config.moe import MoEConfig
from qwen3next_jax.data.pipeline import DataSource, open_data
from qwen3next_jax.evals.heldout import make_heldout_step, measure_and_sum_rows, metrics_from_sums
from qwen3next_jax.model import Qwen3Next
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.state import State

SEEDS = (0, 1, 2)
HELDOUT_ROWS = 128
BIAS = {"router_bias": True}
# name → (settings of model.moe, settings of train)
METHODS = {
    "loss, weight 0.001": ({}, {"balance_loss_weight": 0.001}),
    "loss, weight 0.01": ({}, {"balance_loss_weight": 0.01}),
    "sign, rate 0.001": (BIAS, {"balance_loss_weight": 0.0}),
    "sign, rate 0.01": (BIAS, {"balance_loss_weight": 0.0, "router_bias_rate": 0.01}),
    "quantile": (BIAS, {"balance_loss_weight": 0.0, "router_bias_update": "quantile"}),
}


def configure(base: Config, method: str, steps: int) -> Config:
    """Returns the configuration of the small model that is balanced by `method`."""
    moe, train = METHODS[method]
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model,
            hidden_size=64,
            num_hidden_layers=2,
            full_attention_interval=2,
            num_experts=16,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            mtp_depth=0,
            moe=MoEConfig(scoring_func="sigmoid", **moe),
        ),
        train=dataclasses.replace(
            base.train, steps=steps, batch_size=4, sequence_length=128, **train
        ),
        optimizer=dataclasses.replace(base.optimizer, warmup_steps=20),
    )


def train(
    run: ResolvedRun, step: Callable, evaluate: Callable, data: DataSource, state: State
) -> dict:
    """Trains the model from `state`, and returns its figures."""
    busiest, idle = [], []
    for number, batch in zip(range(run.steps), data.batches(0)):
        state, metrics = step(state, jax.device_put(batch, run.batch_sharding))
        if number >= run.steps // 2:
            load_LE = np.asarray(metrics["expert_load"])
            busiest.append(load_LE.max())
            idle.append(np.sum(load_LE == 0))
    batches = (jax.device_put(b, run.batch_sharding) for b in data.heldout_batches(HELDOUT_ROWS))
    heldout = metrics_from_sums(
        measure_and_sum_rows(evaluate, state["params"], batches, data.token_byte_counts)
    )
    return {
        "busiest": float(np.mean(busiest)),
        "idle": float(np.mean(idle)),
        "loss": heldout["loss"],
    }


def make_params(run: ResolvedRun) -> Callable[[jax.Array], dict]:
    """Returns a jitted function (random key) → start values of the parameters."""

    @jax.jit
    def random_params(key):
        return nnx.to_pure_dict(nnx.state(Qwen3Next(run.model, rngs=nnx.Rngs(key)), nnx.Param))

    return random_params


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(map(repr, METHODS))}")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    steps = options.steps
    base = harness.load_config(harness.ROOT / "configs" / "tiny.py")
    runs = {}
    for method in options.methods or METHODS:
        run = resolve_run(configure(base, method, steps), single_device_mesh())
        (stage,) = run.stages
        data = open_data(stage.data, stage.sequence_length, stage.batch_size, run.model.vocab_size)
        step, evaluate = make_train_step(run, stage), make_heldout_step(run.graphdef)
        start, random_params = None, make_params(run)
        runs[method] = []
        for seed in SEEDS:
            params = random_params(jax.random.key(seed))
            start = start or run.init_state(params)
            # a copy, as the step donates its state
            state = jax.tree.map(jnp.copy, start | {"params": params})
            figures = train(run, step, evaluate, data, state)
            runs[method].append(figures)
            print(
                json.dumps({"method": method, "seed": seed, "steps": steps} | figures), flush=True
            )
    print()
    harness.print_header(
        f"{steps} steps", "busiest expert, by seed", "mean", "idle", "loss, by seed", "mean"
    )
    for method, figures in runs.items():
        busiest, idle, loss = ([f[name] for f in figures] for name in ("busiest", "idle", "loss"))
        harness.print_row(
            method,
            " ".join(f"{x:.2f}" for x in busiest),
            f"{statistics.fmean(busiest):.2f}",
            f"{statistics.fmean(idle):.1f}",
            " ".join(f"{x:.4f}" for x in loss),
            f"{statistics.fmean(loss):.4f}",
        )


if __name__ == "__main__":
    main()
