"""`--restart` in a bucket, which has no rename.

    WORKDIR/restarting.json   {"to": "before-TIME"}, while the objects of the old run are moved
    WORKDIR/before-TIME/      the old run: run.json, metrics, manifests of checkpoints, …

Small objects are copied and then deleted. The arrays of checkpoints stay in WORKDIR/arrays, and the
moved manifests name them there; a new run writes its own arrays under its own id, and deletes no
others. Dumps and profiles stay where they are, too.
"""

import json
import time

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.runs import manifest

_MARK = "restarting.json"
_MOVED = (
    "checkpoints",
    "damaged",
    "eval",
    "metrics",
    "metrics.jsonl",
    "report.html",
    "run.json",
    "tokenizer",
)


def is_unfinished(workdir: BucketPath) -> bool:
    """Whether a process was killed in `move_aside`."""
    return (workdir / _MARK).is_file()


def run_objects(workdir: BucketPath) -> list[BucketPath]:
    """Returns the objects and folders of the run in `workdir` that `move_aside` moves."""
    return [path for path in workdir.iterdir() if path.name in _MOVED]


def move_aside(workdir: BucketPath) -> None:
    """Moves the run in `workdir` into `workdir`/before-TIME. If a process was killed in such a
    move, continues that move.

    Raises:
      UserError: the bucket cannot be written to.
    """
    mark = workdir / _MARK
    try:
        if mark.is_file():
            target = workdir / json_files.read(mark)["to"]
        elif run_objects(workdir):
            target = workdir / time.strftime("before-%Y%m%d-%H%M%S")
            mark.write_text(json.dumps({"to": target.name}))
        else:
            return
        # run.json is the last: as long as it is there, the supervisor sees the old run.
        for path in sorted(run_objects(workdir), key=lambda path: path.name == "run.json"):
            for source in sorted(path.entries()) or [path]:
                _move(source, target / str(source.relative_to(workdir)))
        mark.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--workdir={workdir}: its old run could not be moved aside "
            f"({getattr(error, 'strerror', None) or error}): the same command goes on with that"
        ) from error


def _move(source: BucketPath, target: BucketPath) -> None:
    content = source.read_bytes()
    if source.name == manifest.NAME:
        content = manifest.moved_deeper(content)
    target.write_bytes(content)
    source.unlink(missing_ok=True)
