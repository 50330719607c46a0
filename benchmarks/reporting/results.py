"""Writes docs/results.md from the records in docs/results.

    uv run python benchmarks/reporting/results.py                     writes the page
    uv run python benchmarks/training/balance.py | tee table.txt     a benchmark that prints a table
    uv run python benchmarks/reporting/results.py --store=balance --table=table.txt \\
        --command="uv run python benchmarks/training/balance.py"     stores its figures, and writes
                                                                     the page

A record is a JSON file with a table and how it was made:

| field | what it is |
|---|---|
| `title` | the heading of its section |
| `date`, `commit` | when its figures were recorded, and with which code |
| `machine` | on what they were measured |
| `command` | what prints them again |
| `columns`, `rows` | the table, in Markdown; or `plans`, the names of plans in docs/planner |
| `remarks` | paragraphs below it; without a table, the items of a list |

`--store` replaces table, command, date, commit and machine of a record, and keeps its title and its
remarks, which may need a change by hand. A test compares the page with the records.
"""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

from benchmarks import harness
from qwen3next_jax.sharding.mesh import mesh_text

DOCS = harness.ROOT / "docs"
# The sections of the page, in this order. A section without a record is left out: its figures
# have not been measured yet.
SECTIONS = (
    "gpu",
    "tiny",
    "exactness",
    "decoding",
    "decoding_transformers",
    "delta_rule_tpu",
    "delta_rule_cpu",
    "h200",
    "cpu_training",
    "many_devices",
    "planner",
    "muon",
    "ratio",
    "state",
    "permutations",
    "state_ratio",
    "sweeps",
    "widths",
    "scaling",
    "balance",
    "merging",
    "faults",
    "losing",
)
INTRODUCTION = """# Results

<!-- Written by benchmarks/reporting/results.py from docs/results/*.json. -->

The commands below a table printed its figures. The line under a table has the machine, the date and
the commit. The history of `docs/results` has earlier figures.
"""
PLAN_COLUMNS = [
    "slice",
    "mesh",
    "tokens a device",
    "remat",
    "GiB a device",
    "s a step",
    "MFU by `calibrated`",
    "by `schedule`, `roofline`",
]


def page() -> str:
    """Returns the text of docs/results.md.

    Raises:
      ValueError: there is a record without a place in SECTIONS.
    """
    left_over = {path.stem for path in (DOCS / "results").glob("*.json")} - set(SECTIONS)
    if left_over:
        raise ValueError(f"docs/results: SECTIONS has no place for {', '.join(sorted(left_over))}")
    sections = [section(read(name)) for name in recorded()]
    return "\n".join([INTRODUCTION, *sections])


def recorded() -> list[str]:
    """Returns the names of the records that exist, in the order of the page."""
    return [name for name in SECTIONS if (DOCS / "results" / f"{name}.json").exists()]


def read(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def section(record: dict[str, Any]) -> str:
    """Returns the section of one record, in Markdown."""
    lines = [f"## {record['title']}", ""]
    columns, rows = record.get("columns"), record.get("rows")
    if "plans" in record:
        columns, rows = PLAN_COLUMNS, [plan_row(name) for name in record["plans"]]
    if columns is None:
        return "\n".join([*lines, *(f"- {remark}" for remark in record["remarks"]), ""])
    lines.append(harness.table_header(columns))
    lines += [harness.table_row(row) for row in rows]
    lines += ["", f"{record['machine']} · {record['date']} · {record['commit']}"]
    lines += ["", "```bash", *record["command"].split("; "), "```", ""]
    for remark in record["remarks"]:
        lines += [remark, ""]
    return "\n".join(lines)


def plan_row(name: str) -> list[str]:
    """Returns the cells of a plan that `qwen3next plan --json` wrote into docs/planner."""
    plan = json.loads((DOCS / "planner" / f"{name}.json").read_text())
    estimates = plan["estimates"]
    of_config = f" ({plan['config']})" * (plan["config"] != "qwen3_next_80b_a3b")
    length = f", rows of {plan['sequence_length']:,}" * (plan["sequence_length"] > 4096)
    return [
        f"{plan['topology']}, {plan['chips']} chips{of_config}",
        mesh_text(plan["mesh"]),
        f"{plan['tokens_per_step'] // plan['devices']:,}{length}",
        plan["remat"],
        f"{plan['peak_hbm_bytes'] / 2**30:.1f} of {plan['usable_hbm_bytes'] / 2**30:.1f}",
        f"{estimates['calibrated']['step_seconds']:.3f}",
        f"{estimates['calibrated']['mfu']:.1%}",
        f"{estimates['schedule']['mfu']:.1%}, {estimates['roofline']['mfu']:.1%}",
    ]


# ---- Storing a table


def store(name: str, table: str, command: str, machine: str) -> None:
    """Replaces the figures of a record, or makes a new one.

    Args:
      name: the record.
      table: text with one table in Markdown, which a benchmark printed.
      command: the command that printed it.
      machine: on what it ran.

    Raises:
      ValueError: the text has no table.
    """
    lines = [line.strip() for line in table.splitlines() if line.strip().startswith("|")]
    if len(lines) < 3:
        raise ValueError("--table: no table in Markdown is there: expected lines that begin with |")
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    path = DOCS / "results" / f"{name}.json"
    old = read(name) if path.exists() else {"title": name, "remarks": []}
    record = {
        "title": old["title"],
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "command": command,
        "columns": columns,
        "rows": rows,
        "remarks": old["remarks"],
    }
    harness.write_json(path, record)


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=harness.ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = " with changes" * bool(git("status", "--porcelain", "--untracked-files=no"))
    return git("rev-parse", "--short=8", "HEAD") + changed


def this_machine() -> str:
    """Returns the processor, the cores and the memory of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = names[0] if names else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {memory:.0f} GiB"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--store", help="the record to replace")
    parser.add_argument("--table", type=pathlib.Path, help="file with what a benchmark printed")
    parser.add_argument("--command", help="the command that printed it")
    parser.add_argument("--machine", help="on what it ran; without it, this machine's processor")
    arguments = parser.parse_args()
    if arguments.store:
        if not (arguments.table and arguments.command):
            parser.error("--store needs --table and --command")
        try:
            machine = arguments.machine or this_machine()
            store(arguments.store, arguments.table.read_text(), arguments.command, machine)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
    (DOCS / "results.md").write_text(page())
    print("docs/results.md")


if __name__ == "__main__":
    main()
