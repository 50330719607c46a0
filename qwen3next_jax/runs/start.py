"""Decides how a run starts, before anything is written.

`decide` holds every refusal that follows from the settings and the facts alone. It is pure:
`facts.read_facts` has already read what it needs. Neither imports JAX, so the user learns of a
mistake within a second. `checks.resolve_start` adds what needs the mesh and the code of the model.
"""

import dataclasses
import pathlib

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.config import Config, TelemetryConfig
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.runs.changes import compare_settings
from qwen3next_jax.runs.facts import Facts, ParentRun, read_facts
from qwen3next_jax.runs.init_from import check_source, compare_tokens, parent_of
from qwen3next_jax.runs.record import Change, Parent
from qwen3next_jax.training.stages import resolve_stages


@dataclasses.dataclass(frozen=True)
class Start:
    """How a run starts.

    Attributes:
      given: the configuration as the user gave it.
      config: the configuration, with the name of a tokenizer.
      facts: what the decision is based on.
      parent: the checkpoint of another run with which the run begins; None if it begins with none,
        or continues from a checkpoint of its own.
      tokens: describes the tokenizer beside that of the model in `train.init_from`; "" without one.
      changes: the allowed changes since the last start.
    """

    given: Config
    config: Config
    facts: Facts
    parent: Parent | None
    tokens: str
    changes: tuple[Change, ...]

    @property
    def workdir(self) -> pathlib.Path | BucketPath:
        """The folder of the run."""
        return self.facts.folder.path


def prepare_start(
    config: Config,
    workdir: pathlib.Path | BucketPath,
    restart: bool = False,
    writes_telemetry: bool = True,
) -> Start:
    """Reads what the start of a run depends on, decides how it starts, and checks that its data are
    there. Reads no large file.

    Args:
      config: the configuration of the run.
      workdir: the folder of the run.
      restart: whether the run begins anew and does not resume the run in `workdir`.
      writes_telemetry: whether this process writes the telemetry of the run.

    Raises:
      UserError: the run cannot start; the message names the first mistake.
    """
    start = decide(config, read_facts(config, workdir, restart, writes_telemetry))
    stages = resolve_stages(start.config)
    for data, length in dict.fromkeys((stage.data, stage.sequence_length) for stage in stages):
        data_source_class(data).check(data, length, config.model.vocab_size)
        data_source_class(data).check_model(data, config.model)
    return start


def decide(config: Config, facts: Facts) -> Start:
    """Decides how a run starts. Reads and writes nothing.

    Raises:
      UserError: the run cannot start; the message names the first mistake.
    """
    given, config = config, dataclasses.replace(config, data=facts.data)
    if not facts.takes_other_writers:
        _check_local_only(config)
    _check_packages(config.telemetry, facts.missing_packages)
    record = facts.folder.trained_record()
    parent, tokens = None, ""
    if facts.source:
        check_source(config, facts.source, facts.folder)
        tokens = compare_tokens(config, facts.tokens)
        parent = parent_of(facts.source) if isinstance(facts.source, ParentRun) else None
    changes = compare_settings(facts.folder, record, config, parent) if record else []
    return Start(given, config, facts, parent, tokens, tuple(changes))


def _check_local_only(config: Config) -> None:
    """Raises UserError if a setting needs a workdir on a file system."""
    for needed, setting in (
        (config.telemetry.tensorboard, "telemetry.tensorboard = True"),
        (config.telemetry.wandb, f"telemetry.wandb = {config.telemetry.wandb!r}"),
        (config.profile.steps, f"profile.steps = {config.profile.steps!r}"),
    ):
        require(
            not needed,
            f"{setting}: its files are written to a local --workdir alone: leave it out, or give a "
            "--workdir on a file system",
        )


def _check_packages(telemetry: TelemetryConfig, missing: tuple[str, ...]) -> None:
    """Raises UserError if a package that `telemetry` needs is not installed."""
    for setting, package, extra in (
        ("telemetry.tensorboard = True", "tensorboardX", "tensorboard"),
        (f"telemetry.wandb = {telemetry.wandb!r}", "wandb", "wandb"),
    ):
        require(
            package not in missing,
            f"{setting} needs the package {package}: {how_to_install(extra)}, or leave the setting "
            "out",
        )
