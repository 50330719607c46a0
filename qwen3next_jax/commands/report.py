"""Writes a page that shows runs: `qwen3next report WORKDIR [WORKDIR …]
[--out=FILE.html]`.

One run: WORKDIR/report.html, which training also writes at every checkpoint. Several:
report.html in the current folder, the runs on the same axes, with the settings that differ.
docs/report.md explains every chart.
"""

import pathlib

from absl import flags

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.reporting.page import write_report

ARGUMENTS = "WORKDIR …"  # what stands behind the flags

_OUT = flags.DEFINE_string(
    "out", None, "file to write (default: WORKDIR/report.html of one run, report.html of several)"
)


def main(arguments: list[str]) -> int:
    if not arguments:
        raise UserError(
            "the folder of a run is missing: expected qwen3next report WORKDIR [WORKDIR …]"
        )
    workdirs = [pathlib.Path(argument) for argument in arguments]
    out = (
        pathlib.Path(_OUT.value)
        if _OUT.value
        else (workdirs[0] if len(workdirs) == 1 else pathlib.Path()) / "report.html"
    )
    try:
        write_report(workdirs, out)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}): give another --out"
        ) from error
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0
