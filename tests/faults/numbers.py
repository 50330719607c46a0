"""Rows 12, 13: a NaN gradient, and a spike of the loss, in a real run that is then killed and
resumed.
"""

import numpy as np

from tests.faults.lab import EVERY, Lab, Trial, events, kill, losses, lost_steps, wait_for
from tests.faults.worker import POISON, SURGE


def nan_gradient(lab: Lab, seed: int) -> list[Trial]:
    """The update of a random step is dropped and everything else goes on; killed behind it and
    resumed, nothing differs.
    """
    step = int(np.random.default_rng(seed).integers(10, 30))
    faults = {"poison": {step - 1: POISON}}
    undisturbed = lab.reference(f"nan-{step}", **faults)
    workdir = lab.new_folder() / "run"
    _killed_behind(lab, workdir, lab.config, step, faults)
    skipped = [e["step"] for e in events(workdir, "skip")]
    until = [entry for entry in losses(lab.reference()) if entry[0] < step]
    told = (
        skipped == [step]
        and losses(workdir)[: step - 1] == until
        and all(np.isfinite(loss) for i, loss, _ in losses(workdir)[step:])
    )
    return [
        Trial(
            told=told,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, undisturbed),
        )
    ]


def loss_spike(lab: Lab, seed: int) -> list[Trial]:
    """A spike rewinds to the last checkpoint and passes over the data since; killed behind it
    and resumed, nothing differs.
    """
    step = int(np.random.default_rng(seed).integers(14, 30))
    faults = {"poison": {step - 1: SURGE}}
    config = lab.with_(guards={"on_spike": "rewind", "spike_z": 40.0})
    undisturbed = lab.reference(f"spike-{step}", config, **faults)
    workdir = lab.new_folder() / "run"
    _killed_behind(lab, workdir, config, step, faults)
    (event,) = [e for e in events(undisturbed, "rewind")]
    target = (step - 1) // EVERY * EVERY
    told = (event["to_step"], event["data_offset"]) == (target, step - target) and bool(
        events(workdir, "rewind")
    )
    until = [entry for entry in losses(lab.reference()) if entry[0] <= target]
    return [
        Trial(
            told=told and losses(workdir)[:target] == until,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, undisturbed),
            note=f"{step - target} batches passed over",
        )
    ]


def _killed_behind(lab: Lab, workdir, config, step: int, faults: dict) -> None:
    progress = workdir.parent / "progress"
    process = lab.start(workdir, config, pace=0.01, progress=str(progress), **faults)
    if wait_for(
        progress,
        f"save {step + EVERY}\n" if step % EVERY == 0 else f"save {(step // EVERY + 2) * EVERY}\n",
        process,
    ):
        kill(process)
    assert lab.run(workdir, config, **faults) == 0, lab.log(workdir)[-3000:]


def plain_nan_gradient(lab: Lab, seed: int) -> list[Trial]:
    """The same step with optax as it is: are the weights finite at the end, and did anything say
    so?
    """
    from tests.faults.plain import train_plain

    folder = lab.new_folder()
    process = lab.start_plain(train_plain, folder, steps=16, poison=9)
    process.join(120)
    finite = (folder / "finite").read_text() == "True"
    return [
        Trial(
            told=process.exitcode != 0,
            harmless=finite,
            note="" if finite else "NaN weights, saved as checkpoints",
        )
    ]
