"""Fits the loss as a function of model size and training tokens, over the runs of sweeps.

    qwen3next scaling runs/sweeps/ladder [SWEEP …] [--size=flops] [--metric="heldout loss"]

The command prints the constants of L = E + A / N^α + B / D^β (2203.15556) with intervals, the
compute-optimal size and number of tokens, and the errors of predictions for the largest run and for
the runs with the highest budget, each from a fit of all other runs. The command writes scaling.html
with charts, and scaling.json, into the folder of the sweep; for several sweeps, into the current
folder. Every SWEEP is the folder of a sweep or its results.json. A sweep of several model sizes
with an axis "flops", such as configs/sweeps/ladder.py, also gives isoFLOP parabolas.
"""

import pathlib
import sys

from absl import flags

from qwen3next_jax.common.errors import ExitCode, UserError, escape_control, escape_control_in_lines
from qwen3next_jax.common.storage import to_path, write_text_atomically

ARGUMENTS = "SWEEP …"  # the positional arguments, for --help

_METRIC = flags.DEFINE_string("metric", "heldout loss", "the metric to fit, as in results.json")
_SIZE = flags.DEFINE_enum(
    "size",
    "parameters",
    ["parameters", "flops"],
    "what N counts: all parameters, or FLOPs per token / 6 (models with experts)",
)
_RESAMPLES = flags.DEFINE_integer(
    "resamples",
    200,
    "resampled fits from which intervals are",
    lower_bound=20,
    upper_bound=10_000,
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the resampling", lower_bound=0)
_OUT = flags.DEFINE_string("out", None, "folder for scaling.html and scaling.json")


def main(arguments: list[str]) -> int:
    if not arguments:
        raise UserError(
            "a sweep is missing: expected qwen3next scaling SWEEP [SWEEP …], such as "
            "runs/sweeps/ladder"
        )
    # scipy takes a moment to load.
    from qwen3next_jax.sweeps.scaling import (
        analyse_scaling,
        missing_point_sentences,
        mixed_axis_sentences,
        read_runs,
    )
    from qwen3next_jax.sweeps.scaling_report import as_json, as_text, render_page

    paths = [to_path(argument) for argument in arguments]
    runs = read_runs(paths, _METRIC.value, _SIZE.value)
    for sentence in (
        *missing_point_sentences(paths),
        *mixed_axis_sentences(paths, _METRIC.value, _SIZE.value),
    ):
        print(escape_control(sentence), file=sys.stderr)
    scaling = analyse_scaling(runs, _RESAMPLES.value, _SEED.value)
    print(escape_control_in_lines(as_text(scaling, _RESAMPLES.value)))
    alone = paths[0] if paths[0].is_dir() else paths[0].parent
    folder = alone if len(paths) == 1 else pathlib.Path()
    folder = to_path(_OUT.value, "--out=") if _OUT.value else folder
    title = "Scaling: " + " · ".join(path.name for path in paths)
    page = render_page(scaling, title, _METRIC.value, _RESAMPLES.value, _SIZE.value)
    try:
        # A name in results.json may contain half a surrogate pair, which UTF-8 cannot encode.
        for name, text in (("scaling.html", page), ("scaling.json", as_json(scaling))):
            write_text_atomically(folder / name, text, errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}): give --out") from error
    print(f"\n{folder / 'scaling.html'}")
    return ExitCode.DONE
