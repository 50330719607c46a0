"""Prints the tables of docs/notes/2026-11-23-sweeps.md from a sweep's results.json: one row per
value of the x axis, with the metric of every seed.

    python benchmarks/sweep_tables.py docs/sweeps/mqar.json "heldout accuracy" [more metrics]
    python benchmarks/sweep_tables.py docs/sweeps/mqar.json     # lists the metrics and findings
"""

import argparse
import json
import pathlib


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("figures", nargs="*")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    points, axes = results["points"], results["axes"]
    known = [
        name
        for name in dict.fromkeys(key for point in points for key in point)
        if name not in axes and name not in ("point", "command")
    ]
    if unknown := [figure for figure in arguments.figures if figure not in known]:
        parser.error(f"no such figures as {', '.join(unknown)}: there are {', '.join(known)}")
    if not arguments.figures:
        print("\n".join([*known, "", *results["findings"]]))
    x = results["x"]
    seeds = [axis for axis in axes if axis.rpartition(".")[2] == "seed"]
    others = [axis for axis in axes if axis != x and axis not in seeds]
    for figure in arguments.figures:
        columns = list(
            dict.fromkeys(
                tuple(point[axis] for axis in others) for point in points if figure in point
            )
        )
        names = [
            ", ".join(f"{axis.rpartition('.')[2]} {value}" for axis, value in zip(others, column))
            for column in columns
        ]
        averaged = [
            f", {axis.rpartition('.')[2]} {', '.join(axes[axis])}" for axis in seeds if axis != x
        ]
        print(f"\n{figure}{''.join(averaged)}\n")
        print(
            f"| {x.rpartition('.')[2]} | "
            + " | ".join(name or figure for name in names)
            + " |\n|---|"
            + "---|" * len(columns)
        )
        for value in axes[x]:
            cells = [
                [
                    point[figure]
                    for point in points
                    if point[x] == value
                    and tuple(point[axis] for axis in others) == column
                    and figure in point
                ]
                for column in columns
            ]
            print(
                f"| {value} | "
                + " | ".join(" ".join(f"{number:.4g}" for number in cell) for cell in cells)
                + " |"
            )
    print(
        f"\n{len(points)} points, {sum(point['seconds'] for point in points) / 60:.0f} minutes in "
        "all"
    )


if __name__ == "__main__":
    main()
