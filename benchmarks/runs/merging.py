"""What a merge of checkpoints is worth beside a decay of the learning rate of the same length.

For each seed a run of configs/tiny.py, with smaller batches, trains at a constant rate to the last
step. A branch of it decays the rate linearly to 0 over the steps from --begin to --end. The
checkpoints of the constant run over the same steps are merged with each of the weights. All models
read the same held-out rows; a seed is that of the start and of the order of the data.

    uv run python benchmarks/runs/merging.py [--begin=160] [--end=240] [--every=20] [--seeds=3]
"""

import argparse
import dataclasses
import pathlib
import statistics
import tempfile

import jax
import numpy as np

from benchmarks import harness
from qwen3next_jax.commands import process_setup
from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import open_data
from qwen3next_jax.evals.evaluation import EvalContext, EvalOptions, make_evaluations
from qwen3next_jax.runs.start import prepare_start
from qwen3next_jax.runs.train import train
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.trained.merging import find_sources, read_merged_state, weight_of_each_checkpoint
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import resolve_run

CONFIG = harness.ROOT / "configs" / "tiny.py"
WEIGHTS = ("uniform", "linear", "cosine", "1-sqrt")


def make_config(seed: int, steps: int, every: int, **optimizer) -> Config:
    """Returns configs/tiny.py with 8 × 128 tokens a step and checkpoints that are all kept."""
    config = harness.load_config(CONFIG)
    changes = {
        "data": {"seed": seed},
        "train": {"seed": seed, "steps": steps, "batch_size": 8, "sequence_length": 128},
        "optimizer": optimizer,
        "checkpoint": {"every": every, "keep_every": every},
        "eval": {"every": steps, "rows": 8, "sample_tokens": 0},
    }
    return dataclasses.replace(
        config,
        **{
            group: dataclasses.replace(getattr(config, group), **values)
            for group, values in changes.items()
        },
    )


def branch(config: Config, init_from: str) -> Config:
    """Returns `config` as a run that goes on from `init_from`, RUN@STEP, with its whole state."""
    settings = dataclasses.replace(config.train, init_from=init_from, init_state="all")
    return dataclasses.replace(config, train=settings)


class Bench:
    """Trains and evaluates; each update step and the evaluation are compiled once."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self._steps = {}
        config = make_config(0, arguments.end, arguments.every, schedule="constant")
        run = resolve_run(config, single_device_mesh())
        data = open_data(config.data, 128, 8, config.model.vocab_size)
        options = EvalOptions(arguments.rows)
        context = EvalContext(run.model, run.graphdef, data.tokenizer, lambda: data, options, None)
        self._heldout = make_evaluations(("heldout",), context)["heldout"]

    def train(self, config: Config, workdir: pathlib.Path) -> str:
        """Trains a run and returns its folder."""

        def make_step(run, stage):
            schedule = stage.optimizer.schedule
            if schedule not in self._steps:
                self._steps[schedule] = make_train_step(run, stage)
            return self._steps[schedule]

        code = train(prepare_start(config, workdir), devices=jax.devices()[:1], make_step=make_step)
        assert code == 0, f"{workdir}: exit code {code}"
        return str(workdir)

    def bits_per_byte(self, names: list[str], weights: str = "uniform") -> float:
        """Returns the held-out bits per byte of the merge of the checkpoints RUN@STEP."""
        sources = find_sources(names)
        of_sources = weight_of_each_checkpoint(weights, [source.step for source in sources])
        state = read_merged_state(sources, of_sources, single_device_mesh(), whole=False)
        return self._heldout.run(state["params"])["bits_per_byte"]

    def measure(self, seed: int, folder: pathlib.Path) -> dict[str, float]:
        """Returns the held-out bits per byte of every model of one seed, by name."""
        begin, end, every = self.arguments.begin, self.arguments.end, self.arguments.every
        constant = make_config(seed, end, every, schedule="constant")
        run = self.train(constant, folder / f"constant-{seed}")
        annealed = make_config(
            seed,
            end,
            every,
            schedule="warmup_stable_decay",
            decay_fraction=(end - begin) / end,
            final_fraction=0.0,
        )
        decayed = self.train(branch(annealed, f"{run}@{begin}"), folder / f"annealed-{seed}")
        names = [f"{run}@{step}" for step in range(begin, end + 1, every)]
        found = {
            f"constant, step {begin}": self.bits_per_byte(names[:1]),
            f"constant, step {end}": self.bits_per_byte(names[-1:]),
            "annealed": self.bits_per_byte([f"{decayed}@{end}"]),
        }
        return found | {
            f"merged, {weights}": self.bits_per_byte(names, weights) for weights in WEIGHTS
        }


def main() -> None:
    parser = harness.arguments(__doc__)
    for name, default in (("begin", 160), ("end", 240), ("every", 20), ("seeds", 3), ("rows", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    process_setup.enable_compilation_cache()
    bench = Bench(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seeds = [bench.measure(seed, pathlib.Path(folder)) for seed in range(arguments.seeds)]
    columns = ["model", *(f"seed {i}" for i in range(len(seeds))), "mean", "− annealed"]
    harness.print_header(*columns)
    for name in seeds[0]:
        values = [found[name] for found in seeds]
        worse = np.array(values) - [found["annealed"] for found in seeds]
        cells = [f"{value:.4f}" for value in values]
        harness.print_row(name, *cells, f"{statistics.mean(values):.4f}", f"{worse.mean():+.4f}")
    print(f"{jax.devices()[0].device_kind}, {arguments}")


if __name__ == "__main__":
    main()
