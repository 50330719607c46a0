"""Manifests: SHA-256 digests of all files of a folder. Orbax does not notice a flipped bit in a
file; a manifest does.

    FOLDER/manifest.json    {"run": ID, "step": N, "piece": bytes,
                             "files": {relative path: [bytes, [SHA-256 of each piece]]}}

In a bucket a digest would cost a download of everything that was just written. There the manifest
holds the MD5 that the store computed of each object when it was written, as "md5:…", and its key
"arrays" names the folder of the files, relative to FOLDER. `find_damage` compares these with what
one listing says; a folder that was copied to a file system is read and digested.

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

NAME = "manifest.json"
# Files that Orbax writes: what it read, and the index of the arrays, which it writes last.
_ORBAX, _ORBAX_INDEX = "_METADATA", "manifest.ocdbt"
FROZEN = "frozen.json"  # in a checkpoint: with which frozen parameters it was trained
PIECE = 1 << 25  # size of a piece in bytes
# where a manifest in a bucket may say that its files are
_PLACE = re.compile(r"(\.\./){2,9}arrays/[0-9][^/]*")
_MD5 = "md5:"  # the beginning of a digest that is an MD5 of a whole file

Folder = pathlib.Path | BucketPath


def write_manifest(directory: pathlib.Path, step: int | None = None, run: str | None = None) -> int:
    """Writes the manifest of a complete folder.

    Args:
      step: the step of a checkpoint; None if the folder is not a checkpoint.
      run: the id of the checkpoint's run; None or "" if the run has no id.

    Returns:
      The size of all files in bytes.
    """
    sizes = {name: entry.size for name, entry in _files(directory).items()}
    for name in sizes:  # without this, a power failure could leave a manifest without its files
        fsync(directory / name)
    pieces = {name: [] for name in sizes}
    for name, _, digest in _digests(directory, sizes, PIECE):
        pieces[name].append(digest)
    files = {name: [sizes[name], pieces[name]] for name in sizes}
    record = _identity(step, run) | {"piece": PIECE, "files": files}
    temporary = directory / (NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    fsync(temporary)
    os.replace(temporary, directory / NAME)
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
      replaces: the version of the manifest that this one replaces; ABSENT if there may be none.

    Returns:
      The size of all files in bytes.

    Raises:
      Conflict: there is a manifest of another version.
    """
    files = {
        name: [entry.size, [_MD5 + (entry.md5 or md5_of(arrays / name))]]
        for name, entry in _files(arrays).items()
    }
    place = os.path.relpath("/" + arrays.key, "/" + directory.key)
    record = _identity(step, run) | {"arrays": place, "piece": PIECE, "files": files}
    (directory / NAME).write(json.dumps(record, indent=1).encode(), replaces)
    return sum(size for size, _ in files.values())


def _identity(step: int | None, run: str | None) -> dict[str, Any]:
    """Returns the keys of a manifest that say which checkpoint of which run it describes."""
    return ({"run": run} if run else {}) | ({} if step is None else {"step": step})


def arrays_folder(directory: Folder) -> Folder:
    """Returns the folder with the files that the manifest of `directory` names. It is `directory`
    itself, unless the folder was written to a bucket and its manifest can be read.

    Raises:
      OSError: the manifest cannot be read, but may exist.
    """
    try:
        place = json_files.read(directory / NAME).get("arrays", "")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        place = ""
    return _resolved(directory, place)


def moved_deeper(content: bytes) -> bytes:
    """Returns the content of a manifest for a place one folder deeper than before, so that it still
    names the same files. A manifest that is damaged stays as it is.
    """
    try:
        record = json_files.parse(content)
        record["arrays"] = "../" + record["arrays"]
    except (ValueError, KeyError, TypeError):
        return content
    return json.dumps(record, indent=1).encode()


def _resolved(directory: Folder, place: Any) -> Folder:
    """Returns the folder `place`, relative to `directory`; `directory` if `place` names none."""
    if not isinstance(place, str) or not _PLACE.fullmatch(place):
        return directory
    folder = directory.absolute()
    for name in place.split("/"):
        folder = folder.parent if name == ".." else folder / name
    return folder


def find_damage(directory: Folder, sizes_only: bool = False, run: str | None = None) -> str | None:
    """Compares a folder with its manifest.

    Args:
      sizes_only: whether to compare only the sizes of files, not their content.
      run: the id of the run to which the checkpoint must belong; None accepts any run.

    Returns:
      A description of the first damage found; None if the folder is as it was written.
    """
    try:
        return _find_damage(directory, sizes_only, run)
    except StoreError:  # an outage is no damage
        raise
    except OSError as error:  # a bad sector, or a run that deletes the folder meanwhile
        return f"it cannot be read: {error}"


def _find_damage(directory: Folder, sizes_only: bool, run: str | None) -> str | None:
    path = directory / NAME
    try:
        record = json_files.read(path)
    except FileNotFoundError:
        return f"it has no {NAME}: it is being written, or the run died before it was complete"
    except ValueError:
        return f"{NAME} is damaged"
    try:
        piece = int(record["piece"])
        sizes = {name: int(size) for name, (size, _) in record["files"].items()}
        expected = [digest for _, of_pieces in record["files"].values() for digest in of_pieces]
        # Every piece needs a digest; otherwise some bytes would not be verified.
        is_valid = record.keys() - {"run", "step", "arrays"} == {"piece", "files"} and piece > 0
        is_valid = is_valid and all(
            _is_md5(d) or len(d) == len(_pieces(size, piece))
            for size, d in record["files"].values()
        )
        is_valid = is_valid and all(isinstance(digest, str) for digest in expected)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        return f"{NAME} is damaged"
    if run is not None and record.get("run") != run:
        theirs = str(record.get("run", "unknown"))[:13]
        return f"it is a checkpoint of another run ({theirs}; this one is {run[:13]})"
    if "step" in record and str(record["step"]) != directory.name:
        return f"it holds step {record['step']}, by its {NAME}: the folder was renamed or copied"
    if _ORBAX in sizes and _ORBAX_INDEX not in sizes:
        return f"Orbax wrote no {_ORBAX_INDEX}, the index of the arrays: it cannot be read"
    folder = _resolved(directory, record.get("arrays"))
    present = _files(folder)
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
            if of_pieces[0] != _MD5 + (present[name].md5 or md5_of(folder / name)):
                return f"{name} is not what was written (its MD5 differs)"
    expected = [digest for digest in expected if not digest.startswith(_MD5)]
    for (name, start, digest), right in zip(_digests(folder, sizes, piece), expected, strict=True):
        if digest != right:
            where = ""
            if sizes[name] > piece:
                where = f" in bytes {start} … {min(start + piece, sizes[name])}"
            return f"{name} is not what was written (SHA-256 differs{where})"
    return None


def _is_md5(of_pieces: list[str]) -> bool:
    return len(of_pieces) == 1 and of_pieces[0].startswith(_MD5)


def digest(directory: Folder) -> str | None:
    """Returns the SHA-256 digest of the manifest file; None if there is no manifest, or it cannot
    be read. The manifest has the digests of all other files, so its own digest identifies the
    content of the folder.
    """
    try:
        return sha256_of(directory / NAME)
    except StoreError:
        raise
    except OSError:
        return None


def file_versions(directory: Folder) -> dict[str, str] | None:
    """Returns path → version of each file in the folder, without reading any file. A version
    changes if the file is replaced or rewritten. Returns None if there is no file, or if the folder
    is being removed.
    """
    try:
        return {name: entry.version for name, entry in files_in(directory).items()} or None
    except StoreError:
        raise
    except OSError:
        return None


def _files(directory: Folder) -> dict[str, FileInfo]:
    """Returns the files of a folder, without its manifest, as `files_in` does."""
    found = files_in(directory)
    return {n: entry for n, entry in found.items() if not n.rpartition("/")[2].startswith(NAME)}


def _pieces(size: int, piece: int) -> range:
    """Returns the offset of the first byte of each piece of a file; an empty file has one piece."""
    return range(0, max(size, 1), piece)


def _digests(directory: Folder, sizes: dict[str, int], piece: int):
    """Yields (name, offset of the first byte, SHA-256) of every piece of the files in `sizes`, in
    order. One thread per core reads and digests pieces.
    """
    pieces = [(name, start) for name, size in sizes.items() for start in _pieces(size, piece)]

    def digest_of(place: tuple[str, int]) -> str:
        name, start = place
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
    """Returns the content of the file FROZEN in a checkpoint: {"manifest": the digest of the
    manifest of WORKDIR/frozen, "parameters": the paths of the parameters in it}.

    Raises:
      UserError: the file is missing or damaged.
    """
    with as_user_error(f"{checkpoint / FROZEN}: damaged", ValueError, OSError):
        record = json_files.read(checkpoint / FROZEN)
        digest, paths = record.get("manifest"), record.get("parameters")
        is_valid = isinstance(digest, str) and isinstance(paths, list)
        if not is_valid or not all(isinstance(path, str) for path in paths):
            raise ValueError("expected a digest and a list of parameters")
    return record
