"""Decides how a run starts, before anything is written.

`decide_start` raises every error that follows from the settings and the facts alone. `decide_start`
reads no file: `facts.read_facts` has read all that the decision depends on. Neither `decide_start`
nor `read_facts` needs JAX, so the user learns of a mistake within a second.
`checks.check_and_resolve_run` later checks what depends on the mesh and on the code of the model.
"""

import dataclasses
import pathlib

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.config import Config, TelemetryConfig
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.runs.changes import compare_settings
from qwen3next_jax.runs.facts import ParentRun, StartFacts, read_facts
from qwen3next_jax.runs.init_from import check_initial_model, compare_tokenizers, parent_record
from qwen3next_jax.runs.record import Change, ParentCheckpoint
from qwen3next_jax.training.stages import resolve_stages


@dataclasses.dataclass(frozen=True)
class Start:
    """The decision how a run starts. It does not say whether the run resumes: the newest valid
    checkpoint decides this later (`runs.train.train`).

    Attributes:
      given_config: the configuration as the user gave it.
      config: the same configuration, with the name of a tokenizer where the user named none.
      facts: what the decision is based on.
      parent: the checkpoint of another run with which the run begins; None if it begins with none,
        or resumes from a checkpoint of its own.
      tokenizer_note: says how the run's tokenizer differs from that of the model in
        `train.init_from`, for the terminal; "" if the run begins with no such model.
      changes: the allowed changes since the last start.
    """

    given_config: Config
    config: Config
    facts: StartFacts
    parent: ParentCheckpoint | None
    tokenizer_note: str
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
    """Reads what the start of a run depends on, decides how the run starts, and checks that its
    data are there. Reads no large file.

    Args:
      config: the configuration of the run.
      workdir: the folder of the run.
      restart: whether the run begins anew and does not resume the run in `workdir`.
      writes_telemetry: whether this process writes the telemetry of the run.

    Raises:
      UserError: the run cannot start; the message names the first mistake.
    """
    start = decide_start(config, read_facts(config, workdir, restart, writes_telemetry))
    stages = resolve_stages(start.config)
    for data, length in dict.fromkeys((stage.data, stage.sequence_length) for stage in stages):
        data_source_class(data).check(data, length, config.model.vocab_size)
        data_source_class(data).check_model(data, config.model)
    return start


def decide_start(config: Config, facts: StartFacts) -> Start:
    """Decides how a run starts. Reads and writes nothing.

    Raises:
      UserError: the run cannot start; the message names the first mistake.
    """
    given_config, config = config, dataclasses.replace(config, data=facts.data)
    if not facts.other_libraries_can_write:
        _check_needs_no_file_system(config)
    _check_packages_installed(config.telemetry, facts.missing_packages)
    record = facts.folder.record_if_trained()
    parent, tokenizer_note = None, ""
    if facts.initial_model:
        check_initial_model(config, facts.initial_model, facts.folder)
        tokenizer_note = compare_tokenizers(config, facts.tokenizers)
        if isinstance(facts.initial_model, ParentRun):
            parent = parent_record(facts.initial_model)
    changes = compare_settings(facts.folder, record, config, parent) if record else []
    return Start(given_config, config, facts, parent, tokenizer_note, tuple(changes))


def _check_needs_no_file_system(config: Config) -> None:
    """Raises UserError if a setting writes files that a bucket cannot hold."""
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


def _check_packages_installed(telemetry: TelemetryConfig, missing: tuple[str, ...]) -> None:
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
