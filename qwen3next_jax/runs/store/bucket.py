"""The folder of a run in a bucket, which has no rename, no append and no locks.

    WORKDIR/lock              a lease (`store.lease`)
    WORKDIR/checkpoints/, arrays/, damaged/   `store.bucket_checkpoints`
    WORKDIR/metrics/          metrics.jsonl in pieces (`store.bucket_events`)
    WORKDIR/restarting.json   {"to": "before-TIME"}, while `--restart` moves the old run
    WORKDIR/before-TIME/      the old run: run.json, metrics, manifests of checkpoints, …

`--restart` moves an old run by copying its small objects and then deleting the originals. The
arrays of the old run's checkpoints stay in WORKDIR/arrays, where the moved manifests find them. A
new run puts its own id into the names of its folders of arrays, and deletes no arrays of another
run. `--restart` does not move the dumps and profiles of the old run either.
"""

import faulthandler
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Container
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.object_stores import set_gcsfs_patience
from qwen3next_jax.common.storage import BucketPath, check_bucket_access
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.record import run_id
from qwen3next_jax.runs.store.events import EventLog
from qwen3next_jax.runs.store.lease import Lease
from qwen3next_jax.runs.store.store import RunStore

_RESTART_MARK = "restarting.json"
_MOVED_NAMES = (
    "checkpoints",
    "damaged",
    "eval",
    "metrics",
    "metrics.jsonl",
    "report.html",
    "run.json",
    "tokenizer",
)
_CONTROL_CHARACTERS = "".join(
    map(chr, range(32))
)  # Google Cloud Storage refuses some of them in names
_STACKS_PATIENCE_SECONDS = 5.0  # seconds; the process that writes them is to end


class BucketStore(RunStore):
    """The folder of a run in a bucket. The lock of the folder is a lease, which ends by itself if
    the process does not renew it.
    """

    other_libraries_can_write = False
    is_quick_to_read = False

    def __init__(self, workdir: BucketPath, patience: float, is_owner: bool):
        """Makes a store whose lock is not held yet.

        Args:
          patience: the seconds for which the bucket may be unreachable before the process ends.
          is_owner: whether this is process 0, which holds the lock. All processes except process 0
            only watch whether the bucket answers.
        """
        super().__init__(workdir.with_patience(patience))
        self._patience = patience
        self._lease = Lease(self.workdir, patience, is_owner)

    def check_can_hold_run(self, where: str) -> None:
        self._check_folder_path(
            where, tuple(self.workdir.key.split("/")), forbidden="?#" + _CONTROL_CHARACTERS
        )
        require(
            self.workdir.scheme == "gs",
            f"{where}: Orbax writes no checkpoints to s3://: give gs:// or a folder on a file "
            "system (s3:// may hold prepared data and Hugging Face directories)",
        )
        check_bucket_access(where, self.workdir)

    # ---- the lock

    def __enter__(self):
        self._lease.__enter__()
        return self

    def __exit__(self, *exception):
        self._lease.__exit__(*exception)

    def run_locked(self, function: Callable[[], Any]) -> Any:
        """As `RunStore.run_locked`. If another process has the lock, first waits until the other
        process renews the lock, or until its lease has ended.
        """
        return self._lease.run_locked(function)

    # ---- --restart

    def has_unfinished_move(self) -> bool:
        return (self.workdir / _RESTART_MARK).is_file()

    def move_old_run_aside(self) -> None:
        mark = self.workdir / _RESTART_MARK
        try:
            if mark.is_file():
                target = self.workdir / json_files.read(mark)["to"]
            elif self._objects_to_move():
                target = self.workdir / time.strftime("before-%Y%m%d-%H%M%S")
                mark.write_text(json.dumps({"to": target.name}))
            else:
                return
            # run.json is the last: as long as it is there, the supervisor sees the old run.
            for path in sorted(self._objects_to_move(), key=lambda path: path.name == "run.json"):
                for source in sorted(path.file_infos()) or [path]:
                    _move_object(source, target / str(source.relative_to(self.workdir)))
            mark.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"--workdir={self.workdir}: its old run could not be moved aside "
                f"({getattr(error, 'strerror', None) or error}): the same command goes on with that"
            ) from error

    def _objects_to_move(self) -> list[BucketPath]:
        return [path for path in self.workdir.iterdir() if path.name in _MOVED_NAMES]

    def run_file_identities(self) -> dict[str, str]:
        """Returns the version of run.json alone, because `move_old_run_aside` deletes run.json
        last.
        """
        entry = (self.workdir / "run.json").file_info()
        return {"run.json": entry.version} if entry else {}

    # ---- what a run writes

    def _copy_tokenizer(self, tokenizer: Any, copy: BucketPath) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(folder)
            # tokenizer.json is the last: without it there is no copy
            for file in sorted(pathlib.Path(folder).iterdir(), key=lambda f: -len(f.name)):
                (copy / file.name).write_bytes(file.read_bytes())

    def open_checkpoints(
        self,
        retention: CheckpointConfig,
        keep_steps: Container[int] = (),
        frozen_paths: frozenset[str] = frozenset(),
    ) -> Any:
        """As `RunStore.open_checkpoints`. Ignores `frozen_paths`: in a bucket every checkpoint
        holds the frozen parameters, too.
        """
        from qwen3next_jax.runs.store.bucket_checkpoints import BucketCheckpoints

        set_gcsfs_patience(self._patience)
        return BucketCheckpoints(self.workdir, retention, keep_steps, self._lease)

    def open_events(self) -> EventLog:
        from qwen3next_jax.runs.store.bucket_events import BucketEvents

        return BucketEvents(self.workdir / "metrics.jsonl", self._lease, self._patience)

    def dump_folder(self, step: int) -> BucketPath:
        # A run that `--restart` moved may have left its dumps here.
        return self.workdir / "dumps" / f"{step}-{(run_id(self.workdir) or '')[:8]}"

    def write_manifest(self, folder: BucketPath) -> None:
        manifest.write_bucket_manifest(folder, folder)

    def write_thread_stacks(self, process: int, stop: dict[str, Any]) -> None:
        """Writes the stacks to standard error first, because the process may hang on the bucket,
        and then tries to write them to the bucket, too. Does not write the event `stop`.
        """
        path = self.workdir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{process}.txt"
        reason = stop["reason"]
        os.write(2, f"error: {reason}; the stacks of all threads:\n".encode())
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        os.write(2, stacks)
        patient = path.with_patience(_STACKS_PATIENCE_SECONDS)
        patient.write_bytes(f"{reason}\n\n".encode() + stacks)
        os.write(2, f"the stacks are also in {path}\n".encode())


def _move_object(source: BucketPath, target: BucketPath) -> None:
    content = source.read_bytes()
    if source.name == manifest.FILE_NAME:
        content = manifest.content_after_move_to_subfolder(content)
    target.write_bytes(content)
    source.unlink(missing_ok=True)
