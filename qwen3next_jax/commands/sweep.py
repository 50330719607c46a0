"""Runs an ablation sweep and writes its report.

    qwen3next sweep configs/sweeps/ratio.py [--workdir=runs/sweeps/ratio] [--workers=2]
        [--emit] [--set optimizer.learning_rate=1e-3]

The same command after an interruption goes on where it was; finished points are not run again.
report.html and results.csv in the workdir are rewritten whenever a point ends. With --emit the
points run elsewhere, each by the command printed for it; once all have, this command without
--emit writes their report. A sweep file is Python and is run as such.
"""

import ast
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from qwen3next_jax.commands import cli
from qwen3next_jax.common.errors import ExitCode, UserError

ARGUMENTS = "SWEEP_FILE"  # what stands behind the flags


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise UserError(
            f"{len(arguments)} sweep files given: expected one, such as "
            "qwen3next sweep configs/sweeps/ratio.py"
        )
    path = arguments[0]
    changes = _changes(_set.value)
    # Imported here, so that a mistyped flag, and a mistake in the file, is answered at once.
    from qwen3next_jax.sweeps.points import load_sweep

    sweep = load_sweep(path, changes)
    from rich.console import Console

    from qwen3next_jax.sweeps import runner
    from qwen3next_jax.sweeps.check import check_points, check_settings
    from qwen3next_jax.sweeps.report import write_report
    from qwen3next_jax.sweeps.results import read_result

    check_points(sweep)
    workdir = cli.local_folder(
        "workdir", _workdir.value or f"runs/sweeps/{pathlib.Path(path).stem}"
    )
    if not (workdir / "sweep.json").exists():  # a sweep that has begun goes on as it is
        check_settings(sweep)
    runner.open_sweep(sweep, workdir)
    if _emit.value:
        sys.stdout.writelines(line + "\n" for line in runner.shell_lines(sweep, workdir))
        return ExitCode.DONE
    commands = {point.name: runner.shell_command(sweep, point, workdir) for point in sweep.points}
    console = Console(highlight=False)

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def after(failed: dict[str, str]) -> None:
        results = [
            read_result(point, runner.point_folder(workdir, point), failed.get(point.name, ""))
            for point in sweep.points
        ]
        write_report(sweep, results, commands, pathlib.Path(path).stem, workdir)

    tell(f"{path}: {len(sweep.points)} points in {workdir}, {_workers.value} at a time")
    code = runner.Runner(
        sweep, workdir, workers=_workers.value, retries=_retries.value, tell=tell, after=after
    ).run()
    tell(f"Report: {workdir / 'report.html'} · figures: {workdir / 'results.csv'}")
    return code


def _changes(assignments: Sequence[str]) -> dict[str, Any]:
    changes = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(
                f"--set {assignment}: expected SETTING=VALUE, such as --set train.seed=1"
            )
        changes[name] = _literal(text)
    return changes


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


_workdir = flags.DEFINE_string(
    "workdir", None, "folder of the sweep (default: runs/sweeps/NAME OF THE FILE)"
)
_workers = flags.DEFINE_integer("workers", 1, "points that run at the same time", lower_bound=1)
_retries = flags.DEFINE_integer(
    "retries", 2, "how often a point that died is started again", lower_bound=0
)
_set = flags.DEFINE_multi_string(
    "set", [], "SETTING=VALUE for every point; may be given several times"
)
_emit = flags.DEFINE_boolean(
    "emit", False, "print one command per point, for a cluster's scheduler, instead of running them"
)
