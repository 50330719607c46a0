"""Row 7: a disk that is really full: a small tmpfs with the run's folder and ballast in it."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.runs import manifest
from tests.faults.lab import EVERY, Lab, Patience, Trial, events, wait, wait_for

SIZE = 8 << 20


class NoMount(Exception):
    """Mounting a file system is refused here."""


@contextlib.contextmanager
def small_disk(lab: Lab) -> Iterator[pathlib.Path]:
    folder = lab.new_folder()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise NoMount(result.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: pathlib.Path) -> pathlib.Path:
    """Takes every free byte."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    return ballast


def disk_full(lab: Lab, seed: int) -> list[Trial]:
    """The disk fills up after a save and has room again two saves later: the run goes on, and
    ends as the undisturbed one.
    """
    with small_disk(lab) as disk:
        workdir, progress = disk / "run", lab.new_folder() / "progress"
        process = lab.start(workdir, pace=0.03, progress=str(progress))
        filled_at = (2 + seed % 3) * EVERY
        _wait_for_seal(workdir, filled_at, process)
        ballast = _fill(disk)
        wait_for(progress, f"step {filled_at + 3 * EVERY}\n", process)
        told = "could not be saved" in lab.log(workdir)
        good = manifest.find_damage(workdir / "checkpoints" / str(filled_at)) is None
        left = [p.name for p in (workdir / "checkpoints").iterdir() if not p.name.isdigit()]
        ballast.unlink()
        code = wait(process, 240)
        told = told and code == ExitCode.DONE and bool(events(workdir, "save_failed"))
        same = lab.same(workdir, lab.reference())
        return [Trial(told=told, recovered=good and not left, steps_lost=0, bitwise=same)]


def disk_stays_full(lab: Lab, seed: int) -> list[Trial]:
    """The disk stays full to the end: an exit code of its own, and with room the same command
    goes on from the good one.
    """
    with small_disk(lab) as disk:
        workdir = disk / "run"
        process = lab.start(workdir, pace=0.03)
        # While there are at most `keep_last` checkpoints, none is deleted, which would make room.
        filled_at = (lab.config.checkpoint.keep_last - seed % 2) * EVERY
        _wait_for_seal(workdir, filled_at, process)
        ballast = _fill(disk)
        code = wait(process, 240)
        ballast.unlink()
        assert lab.run(workdir) == 0, lab.log(workdir)
        return [
            Trial(
                told=code == ExitCode.NOT_SAVED,
                recovered=True,
                steps_lost=lab.config.train.steps - filled_at,
                bitwise=lab.same(workdir, lab.reference()),
            )
        ]


def _wait_for_seal(workdir: pathlib.Path, step: int, process) -> None:
    patience = Patience(200, f"step {step} was not sealed")
    while not (workdir / "checkpoints" / str(step) / manifest.FILE_NAME).exists():
        assert process.is_alive()
        patience.wait()


def plain_disk_full(lab: Lab, seed: int) -> list[Trial]:
    """A plain loop with Orbax's manager on the same disk."""
    from tests.faults.plain import train_plain

    with small_disk(lab) as disk:
        process = lab.start_plain(train_plain, disk, steps=40, pace=0.03)
        wait_for(disk / "progress", "step 9\n", process)
        _fill(disk)
        process.join(60)
        steps = [p.name for p in (disk / "checkpoints").iterdir() if p.name.isdigit()]
        return [
            Trial(
                told=process.exitcode != 0,
                note=f"the run dies; steps {', '.join(sorted(steps))} stay",
            )
        ]
