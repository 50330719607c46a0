"""What `eval.py` runs: the newest checkpoint of a run against all its held-out text, as a table and as JSON."""

import json
import pathlib

from flax import nnx
from rich.console import Console
from rich.table import Table

from qwen3next_jax.config import Config
from qwen3next_jax.data.pipeline import TrainData
from qwen3next_jax.errors import UserError
from qwen3next_jax.evals.heldout import evaluate_heldout, make_heldout_step
from qwen3next_jax.training.checkpoint import load_trained
from qwen3next_jax.training.display import PreparationProgress
from qwen3next_jax.training.fingerprint import read_config

DESCRIPTIONS = {"loss": "held-out loss, nats per token", "perplexity": "perplexity per token",
                "bits_per_byte": "held-out bits per byte", "targets": "tokens predicted", "bytes": "bytes predicted",
                "mtp_loss": "MTP loss at depth", "mtp_acceptance": "drafts accepted at depth"}


def evaluate(config: Config | None, workdir: pathlib.Path) -> int:
    """Evaluates on the held-out rows of `config.data`, prints a table, writes WORKDIR/heldout.json. Returns the exit code.

    `config` None is the run's own. One that is given must name the same architecture, and may name other data.
    """
    trained = read_config(workdir)
    config = config or trained
    if config.model != trained.model:
        raise UserError(f"{workdir} holds a run whose model differs from --config ({_first_difference(config, trained)}): "
                        "give the config it was trained with")
    with PreparationProgress() as progress:
        data = TrainData(config.data, config.train.sequence_length, config.train.batch_size, config.model.vocab_size, progress)
    model, _, step = load_trained(workdir)
    graphdef, params = nnx.split(model)
    values = evaluate_heldout(make_heldout_step(graphdef), nnx.to_pure_dict(params), data.heldout(), data.tokenizer.token_bytes)

    table = Table("held-out text", "", title=f"{workdir} after step {step}", title_justify="left")
    for name, value in values.items():
        base, _, depth = name.partition("/")
        shown = f"{value:.1%}" if base == "mtp_acceptance" else f"{value:,.0f}" if base in ("targets", "bytes") else f"{value:.4f}"
        table.add_row(f"{DESCRIPTIONS[base]} {depth}".strip(), shown)
    Console().print(table)
    path = workdir / "heldout.json"
    path.write_text(json.dumps({"step": step, "data_fingerprint": data.fingerprint} | values, indent=2) + "\n")
    print(f"The same as JSON: {path}")
    return 0


def _first_difference(config: Config, trained: Config) -> str:
    name = next(n for n in vars(config.model) if getattr(config.model, n) != getattr(trained.model, n))
    return f"model.{name} = {getattr(trained.model, name)!r} there, {getattr(config.model, name)!r} in --config"
