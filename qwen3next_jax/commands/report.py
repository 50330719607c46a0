"""Writes a page with the charts of runs: `qwen3next report WORKDIR [WORKDIR …] [--out=FILE.html]`.

For one run, the command writes WORKDIR/report.html, as training does at every checkpoint. For
several runs, the command writes report.html in the current folder, with the curves of all runs on
the same axes and the settings in which the runs differ. If the newest steps of the runs differ, the
page compares the runs at the last step that all of them recorded. If there are exactly two runs,
both with a constant learning rate, the page and the command give the effective speed-up of the
second run over the first. docs/report.md explains every chart.
"""

import pathlib

from absl import flags

from qwen3next_jax.common.errors import UserError, warn
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.reporting.page import write_report

ARGUMENTS = "WORKDIR …"  # the positional arguments, for --help

_OUT = flags.DEFINE_string(
    "out", None, "file to write (default: WORKDIR/report.html for one run, report.html for several)"
)


def main(arguments: list[str]) -> int:
    if not arguments:
        raise UserError(
            "the folder of a run is missing: expected qwen3next report WORKDIR [WORKDIR …]"
        )
    workdirs = [to_path(argument) for argument in arguments]
    folder = workdirs[0] if len(workdirs) == 1 else pathlib.Path()
    out = to_path(_OUT.value, "--out=") if _OUT.value else folder / "report.html"
    try:
        notes = write_report(workdirs, out)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}): give another --out"
        ) from error
    for note in notes:
        warn(note, "note")
    runs = f"{len(workdirs)} runs" if len(workdirs) > 1 else "1 run"
    print(
        f"wrote {out.absolute()}: {runs}, {out.stat().st_size / 1e6:.1f} MB; open it in a browser"
    )
    return 0
