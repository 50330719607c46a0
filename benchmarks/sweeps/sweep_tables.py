"""Prints the tables of docs/notes/studies.md from the results.json of
a sweep: one row for each value on the x axis, with the results of every seed in a cell.

    # lists the metrics that the sweep measured, and its findings
    python benchmarks/sweeps/sweep_tables.py docs/sweeps/mqar.json
    # prints a table for each metric that is named
    python benchmarks/sweeps/sweep_tables.py docs/sweeps/mqar.json "heldout accuracy"
    # the same in percent
    python benchmarks/sweeps/sweep_tables.py docs/sweeps/mqar.json "heldout accuracy" --percent
"""

import json
import pathlib

from benchmarks import harness


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("metrics", nargs="*")
    parser.add_argument("--percent", action="store_true", help="shares as whole percents")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    points, axes = results["points"], results["axes"]
    not_metrics = {*axes, "point", "command"}
    names = dict.fromkeys(key for point in points for key in point)
    known = [name for name in names if name not in not_metrics]
    if unknown := [metric for metric in arguments.metrics if metric not in known]:
        parser.error(f"no such metrics as {', '.join(unknown)}: there are {', '.join(known)}")
    if not arguments.metrics:
        print("\n".join([*known, "", *results["findings"]]))
    for metric in arguments.metrics:
        _print_table(points, axes, results["x"], metric, arguments.percent)
    minutes = sum(point["seconds"] for point in points) / 60
    print(f"\n{len(points)} points, {minutes:.0f} minutes in all")


def _print_table(
    points: list[dict], axes: dict[str, list], x: str, metric: str, percent: bool
) -> None:
    """Prints a table in Markdown.

    A row is a value of the axis `x`. A column is a combination of the values of all other axes
    except seeds. A cell has the metric of all points with these values.
    """
    seeds = [axis for axis in axes if _last_part(axis) == "seed"]
    others = [axis for axis in axes if axis != x and axis not in seeds]
    measured = [point for point in points if metric in point]
    columns = list(dict.fromkeys(tuple(point[axis] for axis in others) for point in measured))
    titles = [
        ", ".join(f"{_last_part(axis)} {value}" for axis, value in zip(others, column)) or metric
        for column in columns
    ]
    seed_notes = [f", {_last_part(axis)} {', '.join(axes[axis])}" for axis in seeds if axis != x]
    print(f"\n{metric}{''.join(seed_notes)}\n")
    harness.print_header(_last_part(x), *titles)
    for value in axes[x]:
        row = [point for point in measured if point[x] == value]
        cells = [
            " ".join(
                f"{100 * point[metric]:.0f}" if percent else f"{point[metric]:.4g}"
                for point in row
                if tuple(point[axis] for axis in others) == column
            )
            for column in columns
        ]
        harness.print_row(value, *cells)


def _last_part(setting: str) -> str:
    """Returns the last part of a setting's name: "seed" of "train.seed"."""
    return setting.rpartition(".")[2]


if __name__ == "__main__":
    main()
