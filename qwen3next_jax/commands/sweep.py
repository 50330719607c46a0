"""Runs an ablation sweep and writes its report.

    qwen3next sweep configs/sweeps/ratio.py [--workdir=runs/sweeps/ratio] [--workers=2]
        [--emit] [--set optimizer.learning_rate=1e-3]

A sweep runs one training run, called a point, for every combination of the values in the sweep
file. After an interruption the same command continues the sweep and does not repeat points that are
done. Whenever a point ends, the command rewrites report.html, results.csv and results.json in the
workdir. At the end of a sweep over several budgets of compute, it prints the effective speed-ups
(docs/sweeps.md). With --emit, the command runs nothing and prints one shell command per point,
which another machine can run. When all points have run, the command without --emit writes the
report. A sweep file is Python code, which this command executes.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    error_message,
    escape_control,
    escape_control_in_lines,
    warn,
)
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config.files import default_of_setting
from qwen3next_jax.config.reading import parse_flag_text

ARGUMENTS = "SWEEP_FILE"  # the positional arguments, for --help


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise UserError(
            f"{len(arguments)} sweep files given: expected one, such as "
            "qwen3next sweep configs/sweeps/ratio.py"
        )
    path = arguments[0]
    changes = _parse_set_flags(_set.value)
    # Imported here, so that the user learns of a wrong flag, or of a mistake in the file, before
    # JAX loads.
    from qwen3next_jax.sweeps.points import load_sweep

    sweep = load_sweep(path, changes)
    for sentence in sweep.override_sentences:
        print(escape_control(sentence), file=sys.stderr, flush=True)
    from rich.console import Console

    from qwen3next_jax.reporting.speedup import speed_up_sentence
    from qwen3next_jax.sweeps import runner
    from qwen3next_jax.sweeps.check import check_points_can_run, check_settings_have_effect
    from qwen3next_jax.sweeps.report import write_report
    from qwen3next_jax.sweeps.results import PointResult, read_result
    from qwen3next_jax.sweeps.speedups import budget_axis, compare_arms

    check_points_can_run(sweep)
    workdir = to_path(_workdir.value or f"runs/sweeps/{pathlib.Path(path).stem}", "--workdir=")
    if not (workdir / "sweep.json").exists():  # a sweep that has begun keeps its settings
        check_settings_have_effect(sweep)
    runner.create_or_check_sweep_folder(sweep, workdir)
    if _emit.value:
        sys.stdout.writelines(line + "\n" for line in runner.one_line_commands(sweep, workdir))
        return ExitCode.DONE
    commands = {point.name: runner.shell_command(sweep, point, workdir) for point in sweep.points}
    console = Console(highlight=False)

    def log(line: str) -> None:
        console.print(escape_control_in_lines(line), markup=False, soft_wrap=True)

    def read_results(failed: dict[str, str]) -> list[PointResult]:
        return [
            read_result(point, runner.point_folder(workdir, point), failed.get(point.name, ""))
            for point in sweep.points
        ]

    def update_report(failed: dict[str, str]) -> None:
        results = read_results(failed)
        try:
            write_report(sweep, results, commands, pathlib.Path(path).stem, workdir)
        except OSError as error:  # the points go on, whose folders may be on another disk
            warn(
                f"{workdir}: the report cannot be written ({error_message(error)}): make room; the "
                "end of a point, or the same command, writes it again"
            )

    log(f"{path}: {len(sweep.points)} points in {workdir}, {_workers.value} at a time")
    code = runner.Runner(
        sweep,
        workdir,
        workers=_workers.value,
        retries=_retries.value,
        log=log,
        on_point_end=update_report,
    ).run()
    if budget_axis(sweep):
        try:
            for comparison in compare_arms(sweep, read_results({})):
                log(speed_up_sentence(comparison))
        except UserError as error:
            log(f"No effective speed-ups: {error}.")
    log(f"Report: {workdir / 'report.html'} · figures: {workdir / 'results.csv'}")
    return code


def _parse_set_flags(assignments: Sequence[str]) -> dict[str, Any]:
    """Returns setting → value, from the texts SETTING=VALUE that `--set` gives.

    Raises:
      UserError: a text has no "=", there is no such setting, or the value has another type.
    """
    changes = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(
                f"--set {assignment}: expected SETTING=VALUE, such as --set train.seed=1"
            )
        default = default_of_setting(name, as_flag=False)
        changes[name] = parse_flag_text(text, default, f"--set {assignment}")
    return changes


_workdir = flags.DEFINE_string(
    "workdir", None, "folder of the sweep (default: runs/sweeps/NAME OF THE FILE)"
)
_workers = flags.DEFINE_integer("workers", 1, "points that run at the same time", lower_bound=1)
_retries = flags.DEFINE_integer(
    "retries", 2, "how often a point that died is started again", lower_bound=0
)
_set = flags.DEFINE_multi_string(
    "set",
    [],
    "SETTING=VALUE for every point, also where the file has another value; may be given several "
    "times",
)
_emit = flags.DEFINE_boolean(
    "emit", False, "print one command per point, for a cluster's scheduler, instead of running them"
)
