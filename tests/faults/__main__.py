"""Tries every fault and prints the table: `uv run python -m tests.faults [--rows=1,4] [--fresh]
[--record]`.

Every trial's outcome is appended to runs/faults/trials.jsonl as it ends, and a second start goes
on where the first one was ended. `--record` writes docs/fault_table.json and the table in
docs/reference/faults.md.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import threading
import time

ROOT = pathlib.Path(__file__).parents[2]
RUNS = ROOT / "runs" / "faults"


def prepare_environment(cache: pathlib.Path = RUNS / "compilation_cache") -> None:
    """For this process and all it starts, before JAX is imported: CPU, quick compilation, one
    cache.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    )
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.absolute())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only these rows, such as 1,4,17")
    parser.add_argument("--fresh", action="store_true", help="forget the trials there are")
    parser.add_argument("--record", action="store_true", help="write the table into docs/")
    parser.add_argument("--workers", type=int, default=2, help="units at once")
    options = parser.parse_args()
    prepare_environment()
    import jax

    # here only: the processes of a run have as many as their trial says
    jax.config.update("jax_num_cpu_devices", 8)

    from tests.faults.lab import Lab
    from tests.faults.table import ROWS, render, summary, write_docs

    if options.fresh:
        shutil.rmtree(RUNS, ignore_errors=True)
    lab, file, lock = Lab(RUNS / "lab"), RUNS / "trials.jsonl", threading.Lock()
    wanted = {int(row) for row in options.rows.split(",") if row}
    known = _read(file)
    units = [
        unit
        for row in ROWS
        if not wanted or row.number in wanted
        for unit in row.units
        if unit.key not in known
    ]
    lab.reference()

    def work(unit) -> None:
        begun = time.time()
        trials = unit.run(lab)
        with lock, file.open("a") as out:
            out.write(
                json.dumps(
                    {
                        "unit": unit.key,
                        "seconds": round(time.time() - begun, 1),
                        "trials": [dataclasses.asdict(t) for t in trials],
                    }
                )
                + "\n"
            )
        print(
            f"{time.strftime('%H:%M:%S')} {unit.key}: {len(trials)} trials, "
            f"{sum(t.silent for t in trials)} silent, "
            f"{time.time() - begun:.0f} s",
            flush=True,
        )

    failed = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        futures = {pool.submit(work, unit): unit.key for unit in units}
        for future in concurrent.futures.as_completed(futures):
            if error := future.exception():
                failed.append(f"{futures[future]}: {type(error).__name__}: {str(error)[:2000]}")
                print("FAILED", failed[-1], flush=True)
    shutil.rmtree(lab.folder / "trials", ignore_errors=True)
    known = _read(file)
    print(render(summary(known)))
    if options.record:
        write_docs(known)
    if failed:
        raise SystemExit("\n".join(failed))


def _read(file: pathlib.Path) -> dict[str, dict]:
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["unit"]: line for line in lines}


if __name__ == "__main__":
    main()
