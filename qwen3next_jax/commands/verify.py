"""Compares the files of runs, exports and prepared data with their recorded checksums, and prints a
table. The exit code is 1 if anything is damaged.

    qwen3next verify PATH [PATH …]

A PATH is one of these folders: a run, whose run.json, tokenizer, checkpoints, frozen parameters and
dumps are checked; a Hugging Face directory with SHA256SUMS; a folder of prepared rows; or
`data.prepared_dir`, which holds folders of rows and the tokens from which the rows were packed.
Every row of prepared data is read, but not the padding between rows.

    qwen3next verify PREPARED_DIR --evaluation=GLOB --tokenizer=FILE [--text_field=NAME]

With --evaluation, the command also says which texts of an evaluation the prepared tokens contain.
"""

import pathlib
import re
from collections.abc import Callable, Iterator

from absl import flags
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from qwen3next_jax.commands.console import make_console
from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    WrittenByOlderVersion,
    error_message,
    escape_control,
    require,
    similar_folder_hint,
)
from qwen3next_jax.common.storage import StoreError, to_path

ARGUMENTS = "PATH"  # the positional arguments, for --help

_evaluation = flags.DEFINE_string(
    "evaluation", None, "files with texts of an evaluation: are they in the prepared data?"
)
_tokenizer = flags.DEFINE_string(
    "tokenizer", None, "with --evaluation: data.tokenizer of the prepared data"
)
_text_field = flags.DEFINE_string(
    "text_field", "text", "with --evaluation: the field that holds the text"
)

# (name of what was checked, description of its damage or None)
CheckedItem = tuple[str, str | None]


def main(arguments: list[str]) -> int:
    if not arguments:
        raise UserError("expected a folder: qwen3next verify runs/tiny")
    console, damaged, checked = make_console(), 0, 0
    table = Table("", "what", "state", box=SIMPLE)
    for path in map(to_path, arguments):
        for name, damage in verify(path):
            table.add_row(
                escape(escape_control(str(path))),
                escape(escape_control(name)),
                "ok"
                if damage is None
                else f"[bold red]damaged[/]: {escape(escape_control(damage))}",
            )
            checked += 1
            if damage is not None:
                damaged += 1
    console.print(table)
    print(f"{checked} checked, {damaged} damaged")
    if _evaluation.value:
        for path in arguments:
            print_contamination(path, _evaluation.value, _text_field.value, _tokenizer.value)
    return ExitCode.CRASHED if damaged else ExitCode.DONE


def print_contamination(
    prepared_dir: str, evaluation: str, text_field: str, tokenizer: str | None
) -> None:
    """Prints which texts of an evaluation occur in prepared data.

    Args:
      prepared_dir: the folder of prepared data.
      evaluation: a glob of files with texts.
      text_field: the field of a record that holds the text.
      tokenizer: "bytes" or the path of the tokenizer of the prepared data; None raises an error.

    Raises:
      UserError: no tokenizer is given; the texts cannot be read; or the folder holds no tokens of
        this tokenizer.
    """
    from qwen3next_jax.data import readers, sources
    from qwen3next_jax.data.contamination import find_contamination
    from qwen3next_jax.data.progress import PreparationProgress
    from qwen3next_jax.data.tokens import load_tokenizer

    if tokenizer is None:
        raise UserError("--evaluation needs --tokenizer: data.tokenizer of the prepared data")
    source = sources.find_source_of_glob(evaluation, text_field)
    texts = list(readers.read_documents(source))
    with PreparationProgress("reading") as progress:
        found = find_contamination(
            [text.text for text in texts],
            load_tokenizer(tokenizer),
            prepared_dir,
            progress=progress,
        )
    print(escape_control(f"{evaluation} in {prepared_dir}: {found.summary()}"))
    for i, share in found.worst_texts():
        place = readers.document_name(source, texts[i].file_index, texts[i].index_in_file)
        print(f"  {share:4.0%}  {escape_control(place)}")


def verify(path: pathlib.Path) -> Iterator[CheckedItem]:
    """Checks all files of the run, export or prepared data in `path`. For each file or folder that
    was checked, yields its name, and a description of the damage or None if there is no damage.

    Raises:
      UserError: `path` is neither the folder of a run, nor a Hugging Face directory with
        SHA256SUMS, nor prepared data; or SHA256SUMS cannot be read.
    """
    if (path / "run.json").exists() or (path / "checkpoints").is_dir():
        return _verify_run(path)
    if (path / "config.json").exists():
        return _verify_export(path)
    if (path / "metadata.json").exists() or list(path.glob("*.array_record")):
        return _verify_rows(path)
    folders = _row_folders(path)
    if folders or any(path.glob("tokens/*/*")) or any(path.glob("corpora/*.json")):
        return _verify_prepared_dir(path, folders)
    reason = (
        "no such folder"
        if not path.exists()
        else "it has no run.json, config.json or prepared rows"
    )
    raise UserError(
        f"{path}: neither the folder of a run, nor a Hugging Face directory, nor prepared data "
        f"({reason}){similar_folder_hint(path)}"
    )


def _verify_run(workdir: pathlib.Path) -> Iterator[CheckedItem]:
    """Yields (what was checked, its damage or None) for each part of a run's folder."""
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.runs import manifest
    from qwen3next_jax.runs.folder import is_step_name
    from qwen3next_jax.runs.record import read_record

    try:
        record = read_record(workdir)
        yield "run.json", None
    except UserError as error:
        record = None
        yield "run.json", str(error)
    if record and (workdir / "tokenizer").exists():
        try:
            same = load_tokenizer(str(workdir / "tokenizer")).fingerprint == record.tokenizer
            yield "tokenizer", None if same else "its fingerprint is not the one in run.json"
        except UserError as error:
            yield "tokenizer", str(error)
    frozen, expected = workdir / "frozen", set()
    for kind, run in (("checkpoints", record and record.id), ("dumps", None)):
        folders = [p for p in (workdir / kind).glob("*") if is_step_name(p.name)]
        for folder in sorted(folders, key=lambda p: int(p.name)):
            damage = manifest.find_damage(folder, run=run)
            if damage is None and (folder / manifest.FROZEN_FILE_NAME).is_file():
                try:
                    expected.add(manifest.read_frozen_record(folder)["manifest"])
                except UserError as error:
                    damage = str(error)
            yield f"{kind}/{folder.name}", damage
    if frozen.is_dir() or expected:
        damage = manifest.find_damage(frozen, run=record and record.id)
        if not frozen.is_dir():
            damage = "it is missing: without the frozen parameters no checkpoint can be read"
        elif damage is None and expected - {manifest.digest_of_manifest(frozen)}:
            damage = "its digest is not the one in the checkpoints: it is of another run"
        yield "frozen", damage


def _verify_export(directory: pathlib.Path) -> Iterator[CheckedItem]:
    from qwen3next_jax.interop.checksums import compare_with_checksums

    findings = list(compare_with_checksums(directory))
    if not findings:
        raise UserError(
            f"{directory}: it has no SHA256SUMS, and safetensors files carry no digests: there is "
            "nothing to compare it with"
        )
    return iter(findings)


def _row_folders(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders that hold rows in `path`, a `data.prepared_dir`, in sorted order."""
    folders = {file.parent for file in path.glob("rows/*/*.array_record")}
    folders |= {
        file.parent
        for file in path.glob("rows/*/metadata.json")
        if re.fullmatch("[0-9a-f]{20}", file.parent.name)
    }
    return sorted(folder for folder in folders if not folder.name.startswith("."))


def _verify_prepared_dir(path: pathlib.Path, folders: list[pathlib.Path]) -> Iterator[CheckedItem]:
    from qwen3next_jax.data.preparation import read_corpus_parts
    from qwen3next_jax.data.prepared import read_index_arrays
    from qwen3next_jax.data.row_groups import METADATA
    from qwen3next_jax.data.store import Store
    from qwen3next_jax.data.tokenized_parts import (
        find_part_by_key,
        open_part_tokens,
        open_part_weights,
        stored_part_keys,
    )

    older = "of an older version, not used: it may be deleted"

    def check(name: str, read: Callable[[], object]) -> CheckedItem:
        try:
            read()
        except StoreError:  # an outage is no damage
            raise
        except WrittenByOlderVersion:
            return f"{name} ({older})", None
        except (UserError, ValueError, OSError) as error:
            return name, error_message(error)
        return name, None

    def check_unit(key: str) -> None:
        part = find_part_by_key(store, key)
        open_part_tokens(store, part)
        open_part_weights(store, part)

    def check_index(name: str) -> None:
        _, arrays = read_index_arrays(store, name)
        for key, names in arrays.items():
            for folder in names.tolist() if key.endswith(".folders") else ():
                rows = f"rows/{folder.decode()}/{METADATA}"
                require(store.exists(rows), f"{rows}, which it names, is missing: prepare it again")

    store = Store(path)
    finished, unfinished = stored_part_keys(store)
    for key in finished:
        yield check(f"tokens/{key[:2]}/{key}.json", lambda: check_unit(key))
    for key in unfinished:
        what = "its manifest is missing: it is being prepared, or prepare it again"
        yield f"tokens/{key[:2]}/{key}.tokens", what
    for name in store.names_matching("corpora/*.json"):
        yield check(name, lambda: read_corpus_parts(store, name))
    for name in store.names_matching("indexes/*"):
        if name.endswith(".npz"):
            yield f"{name} ({older})", None
        else:
            yield check(name, lambda: check_index(name))
    for folder in folders:
        yield from _verify_rows(folder)


def _verify_rows(directory: pathlib.Path) -> Iterator[CheckedItem]:
    from qwen3next_jax.data.row_groups import HELDOUT, METADATA, TRAIN, read_group_metadata
    from qwen3next_jax.data.rows import RowReader, ShardTable

    try:
        content = read_group_metadata(directory)
        yield f"{directory.name}/{METADATA}", None
    except UserError as error:
        yield f"{directory.name}/{METADATA}", str(error)
        return
    for split in (TRAIN, HELDOUT):
        table = ShardTable.from_metadata(split, [directory], [content], [0], [])
        rows, first = RowReader(table, content["row_length"]), 0
        for number, count in enumerate(table.rows_per_shard.tolist()):
            damage = None
            try:
                for i in range(first, first + count):
                    rows[i]
            except UserError as error:
                damage = str(error)
            first += count
            yield f"{directory.name}/{table.path_and_shard(number)[1].file}", damage
