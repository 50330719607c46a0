"""Manifests. The manifest of a folder lists the digests of all its files. With a manifest a reader
notices a flipped bit in a file, which Orbax does not notice.

    FOLDER/manifest.json    {"run": ID, "step": N, "piece": bytes,
                             "files": {relative path: [bytes, [SHA-256 of each piece]]}}

In a bucket a SHA-256 digest would cost a download of all that was just written. So the manifest in
a bucket holds the MD5 digests that the object store itself computes, as "md5:…". The key "arrays"
of a manifest in a bucket names the folder of the files, relative to FOLDER. `find_damage` compares
the MD5 digests with those in a listing of the bucket. If the folder was copied to a file system,
`find_damage` reads the files and computes their MD5 digests.

The manifest of a checkpoint names its run (the id in run.json) and its step, so a renamed or copied
folder is not mistaken for another step or another run. The manifest is written atomically after all
other files are on the disk. Digests are computed over pieces of files, so that several cores can
share the work for a large file.
"""

import concurrent.futures
import json
import os
import pathlib
import re
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import as_user_error
from qwen3next_jax.common.storage import (
    ABSENT,
    BucketPath,
    FileInfo,
    StoreError,
    files_in,
    md5_of,
    sha256_of,
)

FILE_NAME = "manifest.json"
# Files that Orbax writes: a description of the arrays, and their index, which it writes last.
_ORBAX_METADATA, _ORBAX_INDEX = "_METADATA", "manifest.ocdbt"
# the file of a checkpoint that says with which frozen parameters it was trained
FROZEN_FILE_NAME = "frozen.json"
PIECE_BYTES = 1 << 25  # size of a piece of a file, which has a digest of its own
# the values that the key "arrays" of a manifest may have
_ARRAYS_FOLDER_PATTERN = re.compile(r"(\.\./){2,9}arrays/[0-9][^/]*")
_MD5_PREFIX = "md5:"  # before the MD5 digest of a whole file

Folder = pathlib.Path | BucketPath


def write_manifest(directory: pathlib.Path, step: int | None = None, run: str | None = None) -> int:
    """Writes the manifest of a complete folder.

    Args:
      step: the step of a checkpoint; None if the folder is not a checkpoint.
      run: the id of the checkpoint's run; None or "" if the run has no id.

    Returns:
      The size of all files in bytes.
    """
    sizes = {name: entry.size for name, entry in _files_but_manifest(directory).items()}
    for name in sizes:  # without this, a power failure could leave a manifest without its files
        fsync(directory / name)
    pieces = {name: [] for name in sizes}
    for name, _, digest in _digest_pieces(directory, sizes, PIECE_BYTES):
        pieces[name].append(digest)
    files = {name: [sizes[name], pieces[name]] for name in sizes}
    record = _run_and_step_entries(step, run) | {"piece": PIECE_BYTES, "files": files}
    temporary = directory / (FILE_NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    fsync(temporary)
    os.replace(temporary, directory / FILE_NAME)
    fsync(directory)
    return sum(sizes.values())


def write_bucket_manifest(
    directory: BucketPath,
    arrays: BucketPath,
    step: int | None = None,
    run: str | None = None,
    replaces: str = ABSENT,
) -> int:
    """Writes `directory`/manifest.json, which describes the files in the complete folder `arrays`.

    Args:
      step, run: as for `write_manifest`.
      replaces: the version of the manifest that the new manifest replaces; ABSENT if there must be
        no manifest yet.

    Returns:
      The size of all files in bytes.

    Raises:
      Conflict: the folder has a manifest of another version.
    """
    files = {
        name: [entry.size, [_MD5_PREFIX + (entry.md5 or md5_of(arrays / name))]]
        for name, entry in _files_but_manifest(arrays).items()
    }
    place = os.path.relpath("/" + arrays.key, "/" + directory.key)
    record = _run_and_step_entries(step, run) | {
        "arrays": place,
        "piece": PIECE_BYTES,
        "files": files,
    }
    (directory / FILE_NAME).write(json.dumps(record, indent=1).encode(), replaces)
    return sum(size for size, _ in files.values())


def _run_and_step_entries(step: int | None, run: str | None) -> dict[str, Any]:
    """Returns the entries of a manifest that name the run and the step of its checkpoint."""
    return ({"run": run} if run else {}) | ({} if step is None else {"step": step})


def arrays_folder(directory: Folder) -> Folder:
    """Returns the folder that holds the files in the manifest of `directory`. The folder is
    `directory` itself, unless the manifest can be read and has the key "arrays".

    Raises:
      OSError: the manifest may exist, but cannot be read.
    """
    try:
        place = json_files.read(directory / FILE_NAME).get("arrays", "")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        place = ""
    return _resolved_arrays_folder(directory, place)


def content_after_move_to_subfolder(content: bytes) -> bytes:
    """Returns the content that a manifest needs after a move into a subfolder, so that its key
    "arrays", a relative path, still names the same folder. The content of a damaged manifest is
    returned unchanged.
    """
    try:
        record = json_files.parse(content)
        record["arrays"] = "../" + record["arrays"]
    except (ValueError, KeyError, TypeError):
        return content
    return json.dumps(record, indent=1).encode()


def _resolved_arrays_folder(directory: Folder, arrays_entry: Any) -> Folder:
    """Returns the folder with the path `arrays_entry` relative to `directory`; or `directory`
    itself, if `arrays_entry` is not a value that the key "arrays" may have.
    """
    if not isinstance(arrays_entry, str) or not _ARRAYS_FOLDER_PATTERN.fullmatch(arrays_entry):
        return directory
    folder = directory.absolute()
    for name in arrays_entry.split("/"):
        folder = folder.parent if name == ".." else folder / name
    return folder


def find_damage(directory: Folder, sizes_only: bool = False, run: str | None = None) -> str | None:
    """Compares the files of a folder with its manifest.

    Args:
      sizes_only: whether to compare only the names and sizes of files, not their content. With
        `sizes_only`, a checkpoint without damage is plausible, but perhaps not valid (see
        `runs.checkpoint`).
      run: the id of the run to which the checkpoint must belong; None accepts any run.

    Returns:
      A description of the first damage found; None if no damage was found.
    """
    try:
        return _find_damage_or_raise(directory, sizes_only, run)
    except StoreError:  # an outage is no damage
        raise
    except OSError as error:  # a bad sector, or a run that deletes the folder meanwhile
        return f"it cannot be read: {error}"


def _find_damage_or_raise(directory: Folder, sizes_only: bool, run: str | None) -> str | None:
    path = directory / FILE_NAME
    try:
        record = json_files.read(path)
    except FileNotFoundError:
        return f"it has no {FILE_NAME}: it is being written, or the run died before it was complete"
    except ValueError:
        return f"{FILE_NAME} is damaged"
    try:
        piece = int(record["piece"])
        sizes = {name: int(size) for name, (size, _) in record["files"].items()}
        expected = [digest for _, of_pieces in record["files"].values() for digest in of_pieces]
        # Every piece needs a digest; otherwise some bytes would not be verified.
        is_valid = record.keys() - {"run", "step", "arrays"} == {"piece", "files"} and piece > 0
        is_valid = is_valid and all(
            _is_md5(d) or len(d) == len(_piece_offsets(size, piece))
            for size, d in record["files"].values()
        )
        is_valid = is_valid and all(isinstance(digest, str) for digest in expected)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        return f"{FILE_NAME} is damaged"
    if run is not None and record.get("run") != run:
        theirs = str(record.get("run", "unknown"))[:13]
        return f"it is a checkpoint of another run ({theirs}; this one is {run[:13]})"
    if "step" in record and str(record["step"]) != directory.name:
        return (
            f"it holds step {record['step']}, by its {FILE_NAME}: the folder was renamed or copied"
        )
    if _ORBAX_METADATA in sizes and _ORBAX_INDEX not in sizes:
        return f"Orbax wrote no {_ORBAX_INDEX}, the index of the arrays: it cannot be read"
    folder = _resolved_arrays_folder(directory, record.get("arrays"))
    present = _files_but_manifest(folder)
    for name, size in sizes.items():
        if name not in present:
            return f"{name} is missing"
        if (actual_size := present[name].size) != size:
            return f"{name} has {actual_size} bytes instead of {size}"
    if extra := sorted(present.keys() - sizes.keys()):
        return f"{extra[0]} was added to it"
    if sizes_only:
        return None
    for name, (_, of_pieces) in record["files"].items():
        if _is_md5(of_pieces):
            sizes.pop(name)
            # Another program may have left the object without an MD5.
            if of_pieces[0] != _MD5_PREFIX + (present[name].md5 or md5_of(folder / name)):
                return f"{name} is not what was written (its MD5 differs)"
    expected = [digest for digest in expected if not digest.startswith(_MD5_PREFIX)]
    for (name, start, digest), right in zip(
        _digest_pieces(folder, sizes, piece), expected, strict=True
    ):
        if digest != right:
            where = ""
            if sizes[name] > piece:
                where = f" in bytes {start} … {min(start + piece, sizes[name])}"
            return f"{name} is not what was written (SHA-256 differs{where})"
    return None


def _is_md5(of_pieces: list[str]) -> bool:
    return len(of_pieces) == 1 and of_pieces[0].startswith(_MD5_PREFIX)


def digest_of_manifest(directory: Folder) -> str | None:
    """Returns the SHA-256 digest of the manifest file; None if the manifest is missing or cannot be
    read. Since the manifest has the digests of all other files, its own digest identifies the
    content of the folder.
    """
    try:
        return sha256_of(directory / FILE_NAME)
    except StoreError:
        raise
    except OSError:
        return None


def file_versions(directory: Folder) -> dict[str, str] | None:
    """Returns path → version of each file in the folder, without reading any file. The version of a
    file changes if the file is replaced or rewritten. Returns None if the folder has no files or is
    being removed.
    """
    try:
        return {name: entry.version for name, entry in files_in(directory).items()} or None
    except StoreError:
        raise
    except OSError:
        return None


def _files_but_manifest(directory: Folder) -> dict[str, FileInfo]:
    """Returns name → entry of the files of a folder, except its manifest."""
    found = files_in(directory)
    return {
        n: entry for n, entry in found.items() if not n.rpartition("/")[2].startswith(FILE_NAME)
    }


def _piece_offsets(size: int, piece: int) -> range:
    """Returns the offset of the first byte of each piece of a file; an empty file has one piece."""
    return range(0, max(size, 1), piece)


def _digest_pieces(directory: Folder, sizes: dict[str, int], piece: int):
    """Yields (name of the file, offset of the first byte, SHA-256 digest) of every piece of the
    files in `sizes`, in order. One thread per core reads pieces and computes digests.
    """
    pieces = [
        (name, start) for name, size in sizes.items() for start in _piece_offsets(size, piece)
    ]

    def digest_of(name_and_start: tuple[str, int]) -> str:
        name, start = name_and_start
        is_last = start + piece >= sizes[name]
        return sha256_of(directory / name, start, None if is_last else start + piece)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(digest_of, pieces)
        try:
            for (name, start), digest in zip(pieces, results, strict=True):
                yield name, start, digest
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def read_frozen_record(checkpoint: Folder) -> dict[str, Any]:
    """Returns the content of frozen.json in the folder of a checkpoint: {"manifest": the digest of
    the manifest of WORKDIR/frozen, "parameters": the paths of the parameters in WORKDIR/frozen}.

    Raises:
      UserError: the file is missing or damaged.
    """
    with as_user_error(f"{checkpoint / FROZEN_FILE_NAME}: damaged", ValueError, OSError):
        record = json_files.read(checkpoint / FROZEN_FILE_NAME)
        digest, paths = record.get("manifest"), record.get("parameters")
        is_valid = isinstance(digest, str) and isinstance(paths, list)
        if not is_valid or not all(isinstance(path, str) for path in paths):
            raise ValueError("expected a digest and a list of parameters")
    return record
