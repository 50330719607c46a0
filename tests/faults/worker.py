"""What runs in the processes that are killed: the training loop as it is, with the fault to
come.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import sys
import time
import traceback
import zlib

# segment ids that mark a batch whose loss becomes NaN, or a thousand times too large
POISON, SURGE = 101, 102


def main(spec: dict) -> None:
    """Trains as `spec` says and leaves with the exit code of train.py.

    spec: config (dict), workdir, log; and optionally pace (seconds a batch), progress (a file
    that gets lines "pid N", and "step N" or "save N" as each begins), poison ({batch index:
    mark}), stall (batch index that never comes), devices, launch (flags), restart (progress then
    gets "move" before each file or folder is moved), cwd (where the process starts), environment
    (variables, as of the bucket that the workdir is in).
    """
    os.environ.update(spec.get("environment", {}))
    output = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        code = _train(spec)
    except BaseException as error:  # as the interpreter does: say it, and leave with code 1
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    if spec.get("launch"):  # as the interpreter's end does: the others read what process 0 keeps
        with contextlib.suppress(Exception):
            import jax

            jax.distributed.shutdown()
    os._exit(int(code))


def _train(spec: dict) -> int:
    import jax

    from qwen3next_jax.common.storage import to_path, with_patience
    from qwen3next_jax.config import Config, from_dict
    from qwen3next_jax.processes import distributed
    from qwen3next_jax.processes.launch import Launch

    if spec.get("cwd"):
        os.chdir(spec["cwd"])
    if spec.get("devices"):
        jax.config.update("jax_num_cpu_devices", spec["devices"])
    config = from_dict(Config, spec["config"])
    launch = Launch(**spec["launch"]) if spec.get("launch") else None
    with distributed.distributed_run(launch, config.parallel, spec["config"]):
        from qwen3next_jax.runs.start import prepare_start
        from qwen3next_jax.runs.train import train
        from qwen3next_jax.training.loop import make_train_step
        from qwen3next_jax.training.loss import total_loss

        _prepare_faults(spec)
        loss = poisoned_loss if spec.get("poison") else total_loss
        start = distributed.run_on_all(
            lambda: prepare_start(
                config,
                with_patience(to_path(spec["workdir"]), config.checkpoint.patience),
                spec.get("restart", False),
                distributed.is_process_0(),
            )
        )
        return train(
            start,
            make_step=functools.partial(make_train_step, loss=loss),
        )


def _prepare_faults(spec: dict) -> None:
    from qwen3next_jax.data.pipeline import TextData
    from qwen3next_jax.runs.store.bucket_checkpoints import BucketCheckpoints
    from qwen3next_jax.runs.store.local_checkpoints import LocalCheckpoints

    progress = (
        os.open(spec["progress"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if spec.get("progress")
        else None
    )
    if progress is not None:
        os.write(progress, f"pid {os.getpid()}\n".encode())
    if spec.get("restart") and progress is not None:
        _tell_moves(progress, spec.get("pace", 0))
    marks = {int(index): mark for index, mark in spec.get("poison", {}).items()}
    batches = TextData.batches

    def spoiled(self, start, *share):
        for index, batch in zip(itertools.count(start), batches(self, start, *share)):
            if index == spec.get("stall"):
                time.sleep(3600)
            time.sleep(spec.get("pace", 0))
            if index in marks:
                batch = batch | {"segment_ids": _marked(batch["segment_ids"], marks[index])}
            if progress is not None:
                rows = " ".join(str(zlib.crc32(row.tobytes())) for row in batch["tokens"])
                os.write(progress, f"rows {index} {rows}\nstep {index + 1}\n".encode())
            yield batch

    def told(self, step, state, *options, **more):
        os.write(progress, f"save {step}\n".encode())
        return save(self, step, state, *options, **more)

    TextData.batches = spoiled
    if progress is not None:
        folders = BucketCheckpoints if "://" in spec["workdir"] else LocalCheckpoints
        save = folders.save
        folders.save = told


def _tell_moves(progress: int, pace: float) -> None:
    from qwen3next_jax.runs.store.local import LocalStore

    rename, move_old_run_aside = pathlib.Path.rename, LocalStore.move_old_run_aside

    def told_rename(path, target):
        os.write(progress, b"move\n")
        time.sleep(pace)
        return rename(path, target)

    def told_move(store):
        pathlib.Path.rename = told_rename
        try:
            move_old_run_aside(store)
        finally:
            pathlib.Path.rename = rename

    LocalStore.move_old_run_aside = told_move


def _marked(segment_ids, mark):
    import numpy as np

    return np.where(segment_ids == 1, mark, segment_ids)


def poisoned_loss(model, batch, *rest, **options):
    """The loss of a run, but that of marked batches is NaN or a thousand times too large."""
    import jax.numpy as jnp

    from qwen3next_jax.training.loss import total_loss

    total, parts = total_loss(model, batch, *rest, **options)
    mark = jnp.max(batch["segment_ids"])
    factor = jnp.where(mark == POISON, jnp.nan, jnp.where(mark == SURGE, 1e3, 1.0))
    return total * factor, parts | {"total_loss": parts["total_loss"] * factor}


if __name__ == "__main__":
    restart = {"restart": False} if "--norestart" in sys.argv else {}
    main(json.loads(sys.argv[1]) | restart)
