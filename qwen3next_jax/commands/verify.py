"""Compares runs, exports and prepared data with their recorded digests, and prints a table. The
exit code is 1 if anything is damaged.

    qwen3next verify PATH [PATH …]

A PATH is the folder of a run, whose run.json, tokenizer, checkpoints, frozen parameters and dumps
are checked; a Hugging Face directory with SHA256SUMS; a folder of prepared rows; or
`data.prepared_dir`, which holds several such folders and the tokens from which their rows were
packed. Every row of prepared data is read, but not the padding between rows.

    qwen3next verify PREPARED_DIR --evaluation=GLOB --tokenizer=FILE [--text_field=NAME]

also says which texts of an evaluation the prepared tokens contain.
"""

import pathlib
from collections.abc import Iterator

from absl import flags
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from qwen3next_jax.commands import cli
from qwen3next_jax.common.errors import ExitCode, UserError, escape_control, similar_folder
from qwen3next_jax.common.storage import to_path

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
Finding = tuple[str, str | None]


def main(arguments: list[str]) -> int:
    if not arguments:
        raise UserError("expected a folder: qwen3next verify runs/tiny")
    console, damaged, checked = cli.make_console(), 0, 0
    table = Table("", "what", "state", box=SIMPLE)
    for path in map(to_path, arguments):
        for name, damage in verify(path):
            table.add_row(
                escape(str(path)),
                escape(escape_control(name)),
                "ok" if damage is None else f"[bold red]damaged[/]: {escape(damage)}",
            )
            checked, damaged = checked + 1, damaged + (damage is not None)
    console.print(table)
    print(f"{checked} checked, {damaged} damaged")
    if _evaluation.value:
        for path in arguments:
            print_contamination(path, _evaluation.value, _text_field.value, _tokenizer.value)
    return ExitCode.CRASHED if damaged else ExitCode.DONE


def print_contamination(
    prepared_dir: str, evaluation: str, text_field: str, tokenizer: str | None
) -> None:
    """Prints which texts of an evaluation prepared data contain.

    Args:
      prepared_dir: the folder of prepared data.
      evaluation: a glob of files with texts.
      text_field: the field of the texts.
      tokenizer: the tokenizer of the prepared data, as `load_tokenizer` reads it.

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
    source = sources.resolve(evaluation, text_field)
    texts = list(readers.documents(source))
    with PreparationProgress("reading") as progress:
        found = find_contamination(
            [text.text for text in texts],
            load_tokenizer(tokenizer),
            prepared_dir,
            progress=progress,
        )
    print(f"{evaluation} in {prepared_dir}: {found.summary()}")
    for i, share in found.worst():
        print(f"  {share:4.0%}  {readers.describe(source, texts[i].file, texts[i].record)}")


def verify(path: pathlib.Path) -> Iterator[Finding]:
    """Checks all files of the run, export or prepared data in `path`, and yields a finding for each
    part.

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
    folders = sorted({p.parent for p in path.glob("*/*.array_record")})
    folders += sorted({p.parent for p in path.glob("rows/*/*.array_record")})
    folders = [folder for folder in folders if not folder.name.startswith(".")]
    manifests = sorted(path.glob("tokens/*/*.json"))
    if folders or manifests:
        return _verify_prepared(path, folders, manifests)
    reason = (
        "no such folder"
        if not path.exists()
        else "it has no run.json, config.json or prepared rows"
    )
    raise UserError(
        f"{path}: neither the folder of a run, nor a Hugging Face directory, nor prepared data "
        f"({reason}){similar_folder(path)}"
    )


def _verify_run(workdir: pathlib.Path) -> Iterator[Finding]:
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.runs import manifest
    from qwen3next_jax.runs.folder import is_step_name, read_run

    try:
        record = read_run(workdir)
        yield "run.json", None
    except UserError as error:
        record = None
        yield "run.json", str(error)
    if record and (workdir / "tokenizer").exists():
        try:
            same = load_tokenizer(str(workdir / "tokenizer")).fingerprint == record["tokenizer"]
            yield "tokenizer", None if same else "its fingerprint is not the one in run.json"
        except UserError as error:
            yield "tokenizer", str(error)
    for kind, run in (("checkpoints", record and record.get("id", "")), ("dumps", None)):
        folders = [p for p in (workdir / kind).glob("*") if is_step_name(p.name)]
        for folder in sorted(folders, key=lambda p: int(p.name)):
            yield f"{kind}/{folder.name}", manifest.find_damage(folder, run=run)
    if (workdir / "frozen").is_dir():
        yield "frozen", manifest.find_damage(workdir / "frozen", run=record and record.get("id"))


def _verify_export(directory: pathlib.Path) -> Iterator[Finding]:
    from qwen3next_jax.interop.checksums import verify_hf

    findings = list(verify_hf(directory))
    if not findings:
        raise UserError(
            f"{directory}: it has no SHA256SUMS, and safetensors files carry no digests: there is "
            "nothing to compare it with"
        )
    return iter(findings)


def _verify_prepared(
    path: pathlib.Path, folders: list[pathlib.Path], manifests: list[pathlib.Path]
) -> Iterator[Finding]:
    from qwen3next_jax.data.store import Store
    from qwen3next_jax.data.units import find_unit, open_unit, open_weights

    store = Store(path)
    for manifest in manifests:
        damage = None
        try:
            unit = find_unit(store, manifest.stem)
            open_unit(store, unit)
            open_weights(store, unit)
        except UserError as error:
            damage = str(error)
        yield str(manifest.relative_to(path)), damage
    for folder in folders:
        yield from _verify_rows(folder)


def _verify_rows(directory: pathlib.Path) -> Iterator[Finding]:
    from qwen3next_jax.data.row_groups import METADATA, read_metadata
    from qwen3next_jax.data.rows import RowReader, RowTable

    try:
        content = read_metadata(directory)
        yield f"{directory.name}/{METADATA}", None
    except UserError as error:
        yield f"{directory.name}/{METADATA}", str(error)
        return
    for split in content["shards"]:
        table = RowTable.of(split, [directory], [content], [0], [])
        rows, first = RowReader(table, content["row_length"]), 0
        for number, count in enumerate(table.rows.tolist()):
            damage = None
            try:
                for i in range(first, first + count):
                    rows[i]
            except UserError as error:
                damage = str(error)
            first += count
            yield f"{directory.name}/{table.shard(number)[1].file}", damage
