"""The rows of the table: which trials they are made of, and how their outcomes are summed up."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

from tests.faults import buckets, damage, disk, identity, kills, numbers, provenance, runs
from tests.faults.lab import Lab, Trial

DOCS = pathlib.Path(__file__).parents[2] / "docs"
COLUMNS = (
    "fault",
    "trials",
    "detected",
    "harmless",
    "silent",
    "recovered",
    "steps lost",
    "bitwise afterwards",
    "plain stack",
)
PAGE = DOCS / "reference" / "faults.md"
BEGIN, END = "<!-- fault table -->\n", "<!-- end of the fault table -->"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Some trials of one kind that are made together."""

    function: Callable[[Lab, int], list[Trial]]
    argument: int = 0

    @property
    def key(self) -> str:
        module = self.function.__module__.rpartition(".")[2]
        return f"{module}.{self.function.__name__}({self.argument})"

    def run(self, lab: Lab) -> list[Trial]:
        return self.function(lab, self.argument)


@dataclasses.dataclass(frozen=True)
class Row:
    number: int
    fault: str
    ours: Sequence[Unit]
    plain: Sequence[Unit] = ()
    plain_text: str = ""  # where there is nothing to measure

    @property
    def units(self) -> Sequence[Unit]:
        return (*self.ours, *self.plain)


def _times(function: Callable, count: int, start: int = 0) -> list[Unit]:
    return [Unit(function, start + i) for i in range(count)]


ROWS = (
    Row(
        1,
        "SIGKILL at a random time during a save",
        _times(kills.kill_during_saves, 7),
        _times(kills.plain_kill_during_saves, 1),
    ),
    Row(
        2,
        "SIGKILL between saves",
        _times(kills.kill_between_saves, 5),
        _times(kills.plain_kill_between_saves, 1),
    ),
    Row(3, "SIGTERM, 1 process", _times(kills.sigterm, 5), _times(kills.plain_sigterm, 2)),
    Row(
        3,
        "SIGTERM to one of 2, of 4 processes",
        [Unit(runs.sigterm_of_many, n) for n in (20, 21, 40)],
        plain_text=(
            "the same step saved by both where jax.distributed's own service is polled each step"
        ),
    ),
    Row(
        4,
        "bit flips in a checkpoint",
        [Unit(damage.flips_in_checkpoint, 200)],
        [Unit(damage.plain_flips_in_checkpoint, 200)],
    ),
    Row(
        4,
        "bit flips in an export",
        [Unit(damage.flips_in_export, 200)],
        [Unit(damage.plain_flips_in_export, 200)],
    ),
    Row(
        5,
        "each file of a checkpoint truncated, deleted",
        [Unit(damage.files_of_checkpoint)],
        [Unit(damage.plain_files_of_checkpoint)],
    ),
    Row(
        6,
        "the newest 1, 2, 3 checkpoints corrupt",
        [Unit(damage.newest_checkpoints, k) for k in (1, 2, 3)],
        [Unit(damage.plain_newest_checkpoints, k) for k in (1, 2, 3)],
    ),
    Row(
        7,
        "disk full for a while; to the end",
        [*_times(disk.disk_full, 3), *_times(disk.disk_stays_full, 2)],
        _times(disk.plain_disk_full, 1),
    ),
    Row(
        8,
        "bit flips in a data shard",
        [Unit(damage.flips_in_shard, 200)],
        [Unit(damage.plain_flips_in_shard, 200)],
    ),
    Row(9, "missing or truncated data shard", [Unit(damage.missing_shards)]),
    Row(10, "malformed record", [Unit(damage.malformed_records)]),
    Row(11, "restore on 1, 2, 4, 8 devices, from each of them", [Unit(runs.device_counts)]),
    Row(11, "restore by 1, 2, 4 processes, data order included", [Unit(runs.process_counts)]),
    Row(
        12,
        "NaN gradient at step k, then SIGKILL",
        _times(numbers.nan_gradient, 4),
        _times(numbers.plain_nan_gradient, 1),
    ),
    Row(
        13,
        "loss spike, rewound, then SIGKILL",
        _times(numbers.loss_spike, 4),
        plain_text="no such thing",
    ),
    Row(
        14,
        "stalled data loader",
        _times(kills.stalled_loader, 3),
        _times(kills.plain_stalled_loader, 1),
    ),
    Row(
        14,
        "stopped (SIGSTOP) beyond the limit, and continued",
        _times(kills.stopped_and_continued, 2),
    ),
    Row(
        15,
        "dead peer of 2 processes, restarted by the supervisor",
        _times(runs.dead_peer, 2),
        plain_text="survivors abort after the heartbeat's 100 s; nothing restarts them",
    ),
    Row(16, "config typo, type, range", [Unit(identity.config_mistakes)]),
    Row(
        16,
        "other settings, data, tokenizer on resume; damaged run.json",
        [Unit(identity.other_runs), Unit(identity.changed_text)],
    ),
    Row(
        17,
        "hostile safetensors header; a pickle as weights",
        [Unit(damage.hostile)],
        [Unit(damage.plain_hostile)],
    ),
    Row(
        18,
        "run.json, checkpoints or metrics gone, all checkpoints damaged",
        [Unit(provenance.lost_parts)],
    ),
    Row(
        19,
        "checkpoint renamed, copied to another step or from another run; a folder of older code",
        [Unit(provenance.other_steps), Unit(provenance.older_folders)],
    ),
    Row(
        20,
        "source that changes while it is prepared; links in circles",
        [Unit(provenance.changing_sources), Unit(provenance.links)],
    ),
    Row(20, "bit flips in Parquet pages with check sums", [Unit(provenance.parquet_pages, 100)]),
    Row(
        21,
        "diverged in the last steps; weights that are not finite",
        [
            *_times(provenance.diverged_at_the_end, 3, start=1),
            Unit(provenance.weights_that_are_not_finite),
        ],
    ),
    Row(
        22,
        "tokens outside the vocabulary through the Python API",
        [Unit(provenance.tokens_outside)],
    ),
    Row(
        23,
        "a mistake corrected in the same folder; texts moved; nothing to do",
        [Unit(provenance.corrected_mistakes), Unit(provenance.killed_before_a_step)],
    ),
    Row(24, "of 2 processes one sees another file system", [Unit(runs.other_file_systems)]),
    Row(
        25,
        "SIGKILL at random times along a run of stages that begins with another one",
        _times(kills.kill_staged_branch, 20),
    ),
    Row(
        26,
        "SIGKILL where a stage ends and the next one begins",
        _times(kills.kill_at_boundaries, 4),
    ),
    Row(
        27,
        "SIGKILL of what `--restart --max-restarts` starts, before, while and after the run before "
        "is moved",
        _times(kills.kill_supervised_restart, 4),
    ),
    Row(
        28,
        "SIGKILL of a branch with the whole state, from before it has a checkpoint of its own",
        _times(kills.kill_whole_state_branch, 3),
    ),
    Row(29, "SIGKILL of an export", _times(kills.kill_exports, 4)),
    Row(
        30,
        "bucket: SIGKILL while it starts, saves, writes metrics; 2 % of all requests fail",
        _times(buckets.kills, 10),
    ),
    Row(
        31,
        "bucket: an outage of half the patience at a start, step, save, evaluation, end",
        [Unit(buckets.outage, 2 * moment) for moment in range(len(buckets.MOMENTS))],
    ),
    Row(
        31,
        "bucket: an outage of more than the patience at the same moments",
        [Unit(buckets.outage, 2 * moment + 1) for moment in range(len(buckets.MOMENTS))],
    ),
    Row(32, "bucket: two runs started in one workdir", _times(buckets.two_runs, 3)),
    Row(
        33,
        "bucket: an owner stopped (SIGSTOP) past its lease, replaced, and woken",
        _times(buckets.frozen_owner, 3),
    ),
    Row(
        34,
        "bucket: of 2 processes one loses the network for more than the patience",
        [Unit(buckets.one_host_cut_off, process) for process in range(2)],
    ),
    Row(
        35,
        "bucket: one write a second to an object, a tenth of all requests refused",
        _times(buckets.throttled, 2),
    ),
    Row(35, "bucket: turns read-only while a run trains", _times(buckets.read_only, 2)),
)


def summary(known: dict[str, dict]) -> list[dict]:
    """One record a row, in the columns of the table; rows without trials say so."""
    records = []
    for row in ROWS:
        trials = [t for unit in row.ours for t in known.get(unit.key, {"trials": []})["trials"]]
        missing = [unit.key for unit in row.ours if unit.key not in known]
        lost = [t["steps_lost"] for t in trials if t["steps_lost"] is not None]
        compared = [t["bitwise"] for t in trials if t["bitwise"] is not None]
        told, harmless = (
            sum(t["told"] for t in trials),
            sum(t["harmless"] and not t["told"] for t in trials),
        )
        records.append(
            {
                "row": row.number,
                "fault": row.fault,
                "trials": len(trials),
                "detected": told,
                "harmless": harmless,
                "silent": len(trials) - told - harmless,
                "recovered": sum(t["recovered"] for t in trials) or "",
                "steps lost": (
                    f"{min(lost)} … {max(lost)}" if min(lost) < max(lost) else f"{min(lost)}"
                )
                if lost
                else "",
                "bitwise afterwards": f"{sum(compared)} of {len(compared)}" if compared else "",
                "plain stack": row.plain_text or _plain(row, known),
                "missing": missing,
                "seconds": round(
                    sum(known[unit.key]["seconds"] for unit in row.units if unit.key in known)
                ),
            }
        )
    return records


def _plain(row: Row, known: dict[str, dict]) -> str:
    trials = [t for unit in row.plain for t in known.get(unit.key, {"trials": []})["trials"]]
    if not trials:
        return "not measured" if row.plain else "–"
    silent = sum(not t["told"] and not t["harmless"] for t in trials)
    notes = sorted({t["note"] for t in trials} - {""})
    lost = [t["steps_lost"] for t in trials if t["steps_lost"] is not None]
    text = f"{silent} of {len(trials)} silent" + (
        f", {min(lost)} … {max(lost)} steps lost" if lost else ""
    )
    return text + (f" ({'; '.join(notes[:2])})" if notes else "")


def render(records: list[dict]) -> str:
    """The table as Markdown."""
    lines = ["| # | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for record in records:
        cells = [str(record[name]) for name in COLUMNS]
        if record["missing"]:
            cells[1] += " (unfinished)"
        lines.append(f"| {record['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_docs(known: dict[str, dict]) -> None:
    """Writes docs/fault_table.json and puts the table into docs/reference/faults.md; rows of
    which no trial is known here stay as they are.
    """
    before = {
        (record["row"], record["fault"]): record
        for record in json.loads((DOCS / "fault_table.json").read_text())
    }
    records = [
        record if record["trials"] else before.get((record["row"], record["fault"]), record)
        for record in summary(known)
    ]
    (DOCS / "fault_table.json").write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + render(records) + "\n" + END + after)
