"""The short form of the fault table (`python -m tests.faults` is the long one): a few trials of
each kind.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import pathlib, sys
from tests.faults.__main__ import prepare_environment
if __name__ == "__main__":
    prepare_environment(pathlib.Path("runs/test_compilation_cache"))
    from tests.faults import damage, disk, identity, kills
    from tests.faults.lab import Lab, wait_for
    lab = Lab(pathlib.Path(sys.argv[1]), steps=20)
    trials = {
        "bits of a checkpoint": damage.flips_in_checkpoint(lab, 12, goes_on=0),
        "files of a checkpoint": damage.files_of_checkpoint(lab, 0, goes_on=0),
        "bits of an export": damage.flips_in_export(lab, 12), "bits of a shard": damage.flips_in_shard(lab, 12),
        "shards": damage.missing_shards(lab, 0), "records": damage.malformed_records(lab, 0), "hostile weights": damage.hostile(lab, 0),
        "config": identity.config_mistakes(lab, 0), "other runs": identity.other_runs(lab, 0),
        "kills": kills.kill_during_saves(lab, 0, kills=2),
        "kills of an export": kills.kill_exports(lab, 0, kills=1),
        "kills of a restart": kills.kill_while_moving(lab, 0),
    }
    try:
        trials["disk"] = disk.disk_full(lab, 0)
    except disk.NoMount as reason:
        print("no disk:", reason)
    for name, some in trials.items():
        print(name, len(some), "silent", sum(t.silent for t in some), "not bitwise", sum(t.bitwise is False for t in some))
        for t in some:
            if t.silent or t.bitwise is False:
                print("   ", t)
"""  # noqa: E501


@pytest.mark.slow
def test_nothing_passes_silently_and_what_goes_on_is_bitwise_the_undisturbed_run(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    program = tmp_path / "program.py"  # a file: the processes it starts import it
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, program, tmp_path / "lab"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if " silent " in line]
    assert len(lines) >= 12, result.stdout
    assert all(line.endswith("silent 0 not bitwise 0") for line in lines), result.stdout
