"""Prepares sources: tokenizes their files, packs the tokens into rows, and opens the rows.

`pipeline` and the command `qwen3next prepare` call `prepare`. Finished data are in
`data.prepared_dir` (see `store`):

    tokens/            the tokens of each file, or of each part of a large one (`tokenized_parts`)
    corpora/<id>.json  the list of a source's parts; with it, the text is no longer needed
    rows/<key>/        packed rows of a group of parts (`row_groups`)
    indexes/           where all rows of a run are, so that a run opens in seconds (`prepared`)
    digests/           digests of large files, so that they are not read at every start

A preparation uses every finished part and group of parts, whichever process made it. So a killed
preparation continues where it stopped, rows of every length are packed from the same tokens, and
several hosts may prepare the same data at once.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, WrittenByOlderVersion, require, warn
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.data import readers, row_groups, sources, tokenized_parts
from qwen3next_jax.data.digest_cache import DigestCache
from qwen3next_jax.data.prepared import (
    PreparedSource,
    index_name,
    open_rows_from_index,
    write_index,
)
from qwen3next_jax.data.readers import Part
from qwen3next_jax.data.row_groups import (
    HELDOUT,
    TRAIN,
    DocumentInBothSplits,
    RowRecipe,
    Statistics,
)
from qwen3next_jax.data.rows import RowReader, ShardTable
from qwen3next_jax.data.sources import Source, SourceFile
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokenized_parts import TokenizedPart, TokenizeJob
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.data.workers import run_in_workers, usable_cores

# There is one worker for each so many bytes of text (or tokens to pack), because starting a worker
# takes half a second, in which one core tokenizes some megabytes.
_BYTES_PER_WORKER = 1 << 24
_TOKENS_PER_WORKER = 1 << 25
_WORTH_TIKTOKEN = 1 << 28  # bytes, from which on a missing tiktoken is worth a word

_NONE: collections.Counter[str] = collections.Counter()
Progress = Callable[[str, int, int], None]  # (what is prepared, bytes done, bytes in all)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source whose parts are all tokenized."""

    source: Source
    parts: tuple[tuple[int, Part], ...]  # (index of the file in the source, part), in order
    tokenized: tuple[TokenizedPart, ...]  # the tokens of each part

    @property
    def digest(self) -> str:
        """Digest of the tokens of all parts and of their tables of documents, in order."""
        return digests.sha256_json([part.identity for part in self.tokenized])

    @property
    def nonempty_parts(self) -> list[TokenizedPart]:
        """The parts that hold at least one document."""
        return [part for part in self.tokenized if part.documents]

    @property
    def part_origins(self) -> list[tuple[int, int]]:
        """For each part: (index of its file, number of the file's records before the part)."""
        found, records, last = [], 0, -1
        for (file, _), part in zip(self.parts, self.tokenized, strict=True):
            records = records if file == last else 0
            found.append((file, records))
            records, last = records + part.records, file
        return found

    @property
    def bad_counts(self) -> dict[str, int]:
        """Kind of fault → number of records with it, see `readers.BadRecords`."""
        return dict(
            sum((collections.Counter(part.bad) for part in self.tokenized if part.bad), _NONE)
        )

    @property
    def first_bad_places(self) -> list[str]:
        """Where the first five bad records are, such as "part.jsonl:17"."""
        found = (
            readers.document_name(self.source, file, records + number)
            for (file, records), part in zip(self.part_origins, self.tokenized, strict=True)
            for number, _ in part.bad_first
        )
        return list(itertools.islice(found, 5))

    @property
    def miscounted_bytes(self) -> int:
        """The sum of `tokens.miscounted_bytes` over all documents."""
        return sum(part.miscounted_bytes for part in self.tokenized)

    @property
    def record_count(self) -> int:
        """The number of records, including empty and bad ones."""
        return sum(part.records for part in self.tokenized)


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of one of several processes, on one or several hosts, in the parts to tokenize.

    Attributes:
      rank: number of the process, from 0.
      process_count: number of processes.
    """

    rank: int = 0
    process_count: int = 1


class Unfinished(Exception):
    """Raised by a process that has tokenized its share of the parts, while parts of other processes
    are missing.

    Attributes:
      missing: number of parts that are missing.
      parts: number of all parts.
    """

    def __init__(self, missing: int, parts: int):
        super().__init__(f"{missing} of {parts} parts are not there yet")
        self.missing, self.parts = missing, parts


def prepare(
    all_sources: Sequence[Source],
    tokenizer: Tokenizer,
    recipe: RowRecipe,
    prepared_dir: str | os.PathLike,
    progress: Progress | None = None,
    workers: int | None = None,
    share: Share = Share(),
) -> list[PreparedSource]:
    """Returns the rows of every source, after preparing the sources that are not prepared yet.

    Args:
      all_sources: the sources, with their files.
      tokenizer: the tokenizer that encodes the documents.
      recipe: the recipe of the rows.
      prepared_dir: the folder of prepared data. Rows are read from this folder in random order, so
        it should be on a local or fast disk.
      progress: called now and then while something is prepared.
      workers: number of processes that tokenize and pack at once; None: one per usable core.
      share: the parts that this process tokenizes.

    Raises:
      UserError: unreadable input, too little text, or prepared data that are damaged.
      Unfinished: parts of other shares are missing.
    """
    progress = progress or (lambda *_: None)
    store = Store(prepared_dir)
    store.remove_leftovers()
    gone = {
        i: _read_corpus_list(store, _corpus_list_name(source, tokenizer))["tokens"]
        for i, source in enumerate(all_sources)
        if source.text_is_gone
    }
    index = index_name(all_sources, tokenizer, recipe, gone)
    if index and (opened := open_rows_from_index(store, index, all_sources, recipe)):
        for one in opened:
            _check_bad_records(one.source, one.bad_counts, one.first_bad_places, one.record_count)
    else:
        opened = _prepare_all(all_sources, tokenizer, recipe, store, progress, workers, share)
        if index:
            with contextlib.suppress(UserError):  # the folder may be read-only
                write_index(store, index, opened)
    _check_conversations_have_targets(opened, recipe, tokenizer)
    for one in opened:
        if not one.statistics[HELDOUT].documents:
            warn(
                f"{one.source.name}: too few documents: by their hashes, none is held out; the "
                "held-out rows are those of the other sources; raise data.heldout_fraction, or add "
                "documents"
            )
        if not one.token_bytes_match_text:
            warn(
                f"{one.source.name}: bits per byte are not reported: data.tokenizer changes or "
                f"loses parts of a text, so that its tokens are {one.miscounted_bytes:,} bytes off"
            )
    return opened


def _check_conversations_have_targets(
    opened: Sequence[PreparedSource], recipe: RowRecipe, tokenizer: Tokenizer
) -> None:
    """Warns about conversations in which no end token counts in the loss.

    Raises:
      UserError: a source of conversations has no row to train on, or no source has a held-out row.
    """
    for one in opened:
        if not one.source.chat_format:
            continue
        counts = one.total_statistics
        require(
            one.statistics[TRAIN].documents > 0,
            f"{one.source.name}: {one.long_conversations_note}: none is left to train on: expected "
            "shorter prompts, or a larger train.sequence_length",
        )
        if counts.endless:
            warn(
                f"{one.source.name}: {counts.endless:,} of {counts.documents:,} conversations have "
                f"no end token ({tokenizer.decode([tokenizer.eos_id])!r}) that counts in the loss, "
                "so that generation would not stop: name the token that ends a turn as eos_token "
                "in tokenizer_config.json"
            )
    require(
        any(one.statistics[HELDOUT].documents for one in opened)
        or not any(one.source.chat_format for one in opened),
        "no held-out conversation has a token that counts in the loss in its first "
        f"{recipe.row_length} tokens: expected more conversations, a larger data.heldout_fraction, "
        "or a larger train.sequence_length",
    )


def _prepare_all(
    all_sources: Sequence[Source],
    tokenizer: Tokenizer,
    recipe: RowRecipe,
    store: Store,
    progress: Progress,
    workers: int | None,
    share: Share,
) -> list[PreparedSource]:
    corpora: dict[int, Corpus] = {}
    missing = in_all = 0
    for i, source in enumerate(all_sources):
        try:
            corpora[i] = tokenize_source(source, tokenizer, store, progress, workers, share)
        except Unfinished as error:
            missing, in_all = missing + error.missing, in_all + error.parts
        else:
            in_all += len(corpora[i].tokenized)
    if missing:
        raise Unfinished(missing, in_all)
    divided = _choose_divided_documents(corpora, tokenizer, recipe, store)
    return [
        pack_source(corpus, divided.get(i), tokenizer, recipe, store, progress, workers, share)
        for i, corpus in corpora.items()
    ]


# ---- tokens


def tokenize_source(
    source: Source,
    tokenizer: Tokenizer,
    store: Store,
    progress: Progress = lambda *_: None,
    workers: int | None = None,
    share: Share = Share(),
) -> Corpus:
    """Tokenizes those parts of `source` that belong to `share` and are not tokenized yet.

    Returns:
      The source with all of its parts.

    Raises:
      UserError: unreadable input, no text, or a damaged manifest of a part.
      Unfinished: parts of other shares are missing.
    """
    if source.text_is_gone:
        return _read_corpus(source, tokenizer, store)
    cache = DigestCache(store, source)
    parts = [(i, part) for i, file in enumerate(source.files) for part in readers.file_parts(file)]
    jobs = [
        TokenizeJob(
            source.files[i],
            part,
            source.text_field,
            source.on_bad_text,
            source.bad_records,
            chat_format=source.chat_format,
        )
        for i, part in parts
    ]
    found = _finished_parts(range(len(jobs)), jobs, cache, tokenizer, store)
    todo = [n for n in range(len(jobs)) if n not in found and n % share.process_count == share.rank]
    todo.sort(
        key=lambda n: -jobs[n].size
    )  # the largest first, so that all workers end at about the same time
    read = {n: 0 for n in todo}
    total = sum(jobs[n].size for n in todo)
    text_bytes = sum(jobs[n].size for n in todo if jobs[n].holds_texts)
    if text_bytes >= _WORTH_TIKTOKEN and tokenizer.misses_tiktoken:
        warn(
            "tiktoken is not installed; with it, a byte-level BPE is tokenized several times as "
            f"fast: {how_to_install('prepare')}"
        )

    unchecked = sum(readers.lacks_zstd_checksum(jobs[n].file) for n in todo)
    if unchecked:
        warn(
            f"{source.name}: {unchecked} .zst files have no checksums, so damage in them may not "
            "be noticed; zstd --check writes them"
        )

    lines = [
        jobs[n].file for n in todo if readers.looks_like_json_lines(jobs[n].file, source.text_field)
    ]
    if lines:
        warn(
            f"{source.name}: {len(lines)} files are read as one text each, but seem to hold JSON "
            f"lines, such as {lines[0].path}: files of JSON lines have names that end in .jsonl"
        )

    def show(item: int, done: int) -> None:
        read[todo[item]] = done
        progress(source.name, sum(read.values()) if len(read) < 1000 else done, total)

    make = functools.partial(_tokenize_part, tokenizer=tokenizer, store=store)
    count = min(workers or usable_cores(), -(-total // _BYTES_PER_WORKER))
    try:
        for item, (digest, part) in run_in_workers(make, [jobs[n] for n in todo], count, show):
            job = jobs[todo[item]]
            cache.add(job.file, job.part, digest)
            found[todo[item]] = part
            show(item, job.size)
    except tokenized_parts.FileChanged:
        cache.forget_all()  # a file may change and keep its size and modification time
        raise
    if len(found) < len(jobs):
        # Other processes have made parts in the meantime. Each process looks again after its own
        # share, so the one that ends last finds all parts, and packs them.
        missing = [n for n in range(len(jobs)) if n not in found]
        cache = DigestCache(store, source)
        found |= _finished_parts(missing, jobs, cache, tokenizer, store)
    if len(found) < len(jobs):
        raise Unfinished(len(jobs) - len(found), len(jobs))
    corpus = Corpus(source, tuple(parts), tuple(found[n] for n in range(len(jobs))))
    _check_corpus(corpus)
    _write_corpus_list(corpus, tokenizer, store)
    return corpus


def _finished_parts(
    numbers: Iterable[int],
    jobs: list[TokenizeJob],
    cache: DigestCache,
    tokenizer: Tokenizer,
    store: Store,
) -> dict[int, TokenizedPart]:
    """Returns index of a job → its tokenized part, for the jobs in `numbers` whose parts are
    finished.

    Fills in the digests of the jobs in `numbers`, except digests for which a large local file would
    have to be read.
    """
    found = {}
    for number in numbers:
        job = jobs[number]
        digest = job.digest or cache.get(job.file, job.part)
        if not digest and (not cache.in_use or sources.is_remote(os.fspath(job.file.path))):
            digest = readers.part_digest(job.file, job.part, job.text_field)
        jobs[number] = job = dataclasses.replace(job, digest=digest)
        if digest and (part := tokenized_parts.find_part_of_job(store, job, tokenizer)):
            found[number] = part
    return found


def _tokenize_part(
    job: TokenizeJob, progress: Callable[[int], None], tokenizer: Tokenizer, store: Store
):
    return tokenized_parts.tokenize_part(job, tokenizer, store, progress)


def _check_corpus(corpus: Corpus) -> None:
    """Warns of bad records.

    Raises:
      UserError: the share of bad records is larger than `data.bad_records_limit`, or no part holds
        a document.
    """
    _check_bad_records(
        corpus.source, corpus.bad_counts, corpus.first_bad_places, corpus.record_count
    )
    if not any(part.documents for part in corpus.tokenized):
        raise readers.no_text_error(corpus.source, corpus.bad_counts)


def _check_bad_records(
    source: Source, bad: Mapping[str, int], places: Sequence[str], records: int
) -> None:
    """Warns of the bad records of `source`, if there are any.

    Args:
      source: the source.
      bad: kind of fault → number of records with it.
      places: where the first bad records are.
      records: number of all records.

    Raises:
      UserError: the share of bad records is larger than `data.bad_records_limit`.
    """
    if not bad:
        return
    summary = readers.describe_bad_records(bad, places)
    require(
        source.bad_records == "stop" or sum(bad.values()) <= source.bad_records_limit * records,
        f"{source.name}: {summary}: more than data.bad_records_limit = "
        f"{source.bad_records_limit} of its {records:,} records: look at them, or raise the "
        "limit; what is tokenized stays",
    )
    warn(f"{source.name}: {summary}")


# ---- the list of a source's parts


def find_source_files(source: Source, tokenizer: Tokenizer, prepared_dir: str) -> Source:
    """Returns `source` with its files filled in. If no file matches the glob any more, but the
    tokens of the source exist, the files are those from which the tokens were made.

    Raises:
      UserError: the source has no files, and no tokens that were made with the same settings and
        the same version of this module.
    """
    try:
        found = sources.find_source_of_glob(source.name, source.text_field)
        return dataclasses.replace(source, name=found.name, files=found.files)
    except sources.NothingFound:
        store = Store(prepared_dir)
        if not store.exists(_corpus_list_name(source, tokenizer)):
            lists = map(store.read_json, store.names_matching("corpora/*.json"))
            require(
                all(content.get("source") != source.name for content in lists),
                f"data.path {source.name!r}: the text is not there, and what was prepared of it in "
                f"{store.root} is of another tokenizer, of other settings or of an older version, "
                "which gave some texts other tokens: give its files back",
            )
            raise
    files = _files_in_corpus_list(_read_corpus_list(store, _corpus_list_name(source, tokenizer)))
    warn(
        f"data.path {source.name!r}: the text is not there; taking the tokens of {len(files)} "
        f"files that were prepared in {store.root}"
    )
    return dataclasses.replace(source, files=files, text_is_gone=True)


def _files_in_corpus_list(content: Mapping) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(sources.epath.Path(label), label, size, "") for label, size in content["files"]
    )


def _corpus_list_name(source: Source, tokenizer: Tokenizer) -> str:
    where = source.name if sources.is_remote(source.name) else os.path.abspath(source.name)
    key = [
        tokenized_parts.FORMAT,
        where,
        source.text_field,
        source.on_bad_text,
        source.bad_records,
        tokenizer.fingerprint,
        sorted(tokenizer.parse_tokens),
        *([source.chat_format.identity] if source.chat_format else []),
    ]
    return f"corpora/{digests.sha256_json(key)[:20]}.json"


def _write_corpus_list(corpus: Corpus, tokenizer: Tokenizer, store: Store) -> None:
    name = _corpus_list_name(corpus.source, tokenizer)
    content = {
        "format": tokenized_parts.FORMAT,
        "name": name,
        "source": corpus.source.name,
        "tokenizer": tokenizer.fingerprint,
        "files": [[file.relative_path, file.size] for file in corpus.source.files],
        "parts": [
            [i, *part, tokenized.key]
            for (i, part), tokenized in zip(corpus.parts, corpus.tokenized, strict=True)
        ],
        "tokens": corpus.digest,
    }
    try:
        if store.read_json(name) == content:
            return
    except (FileNotFoundError, UserError):
        pass
    store.write_json(name, content)


def _read_corpus_list(store: Store, name: str) -> dict:
    """Returns the list of parts that `_write_corpus_list` wrote to the file `name`.

    Raises:
      UserError: the list is missing or damaged, or is the list of another source.
    """
    path = store.path(name)
    try:
        content = store.read_json(name)
    except FileNotFoundError as error:
        raise UserError(f"{path}: it is missing") from error
    if "name" not in content:
        raise WrittenByOlderVersion(path)
    require(
        content["name"] == name,
        f"{path}: it is the list {content['name']} of {content.get('source')}: it was renamed; "
        "give it its name back, or delete it and prepare its texts again",
    )
    fields = [content.get(key) for key in ("source", "tokens", "files", "parts")]
    is_valid = [isinstance(field, kind) for field, kind in zip(fields, (str, str, list, list))]
    is_valid = all(is_valid) and all(_is_list_of_types(row, (str, int)) for row in content["files"])
    require(
        is_valid and all(_is_list_of_types(row, (int, int, int, str)) for row in content["parts"]),
        f"{path} is damaged: delete it and prepare its texts again",
    )
    return content


def _is_list_of_types(row: object, kinds: Sequence[type]) -> bool:
    """Whether `row` is a list of values of the types `kinds`."""
    is_list = isinstance(row, list) and len(row) == len(kinds)
    return is_list and all(isinstance(value, kind) for value, kind in zip(row, kinds))


def read_corpus_parts(store: Store, name: str) -> tuple[dict, list[TokenizedPart]]:
    """Returns the content of the list of parts `name`, and the parts that it names.

    Raises:
      UserError: the list is damaged, or a part is missing or has changed since the list was
        written.
    """
    path, content = store.path(name), _read_corpus_list(store, name)
    advice = f"give data.path = {content['source']!r} its files back"
    found = []
    for *_, key in content["parts"]:
        part = tokenized_parts.find_part_by_key(store, key)
        require(
            part is not None,
            f"{path}: its part {key} is missing; it is made anew from the text that it was made "
            f"of: {advice}",
        )
        found.append(part)
    require(
        digests.sha256_json([part.identity for part in found]) == content["tokens"],
        f"{path}: its parts hold other tokens than it says: {advice}, and delete this file",
    )
    return content, found


def _read_corpus(source: Source, tokenizer: Tokenizer, store: Store) -> Corpus:
    content, found = read_corpus_parts(store, _corpus_list_name(source, tokenizer))
    parts = tuple((i, Part(start, stop)) for i, start, stop, _ in content["parts"])
    return Corpus(
        dataclasses.replace(source, files=_files_in_corpus_list(content)), parts, tuple(found)
    )


# ---- rows


def pack_source(
    corpus: Corpus,
    divided: DocumentInBothSplits | None,
    tokenizer: Tokenizer,
    recipe: RowRecipe,
    store: Store,
    progress: Progress = lambda *_: None,
    workers: int | None = None,
    share: Share = Share(),
) -> PreparedSource:
    """Opens the rows of `corpus`, after packing the parts of `corpus` that are not packed yet.

    Every process that calls this function packs all groups of parts that are missing, and begins
    with the groups of its own share. So processes that run at the same time seldom pack the same
    group, and no process waits for another.

    Args:
      corpus: the source with its parts.
      divided: the document of the source that is divided between the two splits; None: no document
        is divided, and the hash of every document decides whether it is trained on or held out.
      tokenizer: the tokenizer of the parts.
      recipe: the recipe of the rows.
      store: where the parts are, and where the rows are written.
      progress: called with (description of what is packed, bytes of the tokens packed so far, bytes
        of all tokens).
      workers: the largest number of processes that pack; None: one per usable core.
      share: the share of the groups with which this process begins.

    Raises:
      UserError: prepared data that are damaged.
    """
    found = row_groups.group_parts(
        corpus.nonempty_parts, divided, truncate_documents=corpus.source.chat_format is not None
    )
    missing = [
        i
        for i, group in enumerate(found)
        if not store.exists(row_groups.group_folder_name(row_groups.group_key(group, recipe)))
    ]

    def turn(i: int) -> tuple[int, int]:
        """Returns a sort key. The groups of this process' share come first. The groups of every
        other process follow in reverse order, because that process packs its groups from the first
        on.
        """
        distance = (i - share.rank) % share.process_count
        return distance, -i if distance else i

    todo = [found[i] for i in sorted(missing, key=turn)]
    tokens = sum(group.token_count for group in todo)
    done = {i: 0 for i in range(len(todo))}

    def show(item: int, packed: int) -> None:
        done[item] = packed
        what, size = (
            f"{corpus.source.name}, rows of {recipe.row_length}",
            todo[item].token_itemsize,
        )
        progress(what, sum(done.values()) * size, tokens * size)

    do = functools.partial(_write_group_rows, recipe=recipe, store=store, tokenizer=tokenizer)
    count = min(workers or usable_cores(), -(-tokens // _TOKENS_PER_WORKER))
    for item, _ in run_in_workers(do, todo, count, show):
        show(item, todo[item].token_count)
    return _open_rows(corpus, found, recipe, store)


def _write_group_rows(
    group: row_groups.Group,
    progress: Callable[[int], None],
    recipe: RowRecipe,
    store: Store,
    tokenizer: Tokenizer,
) -> None:
    row_groups.write_group_rows(group, recipe, store, tokenizer, progress)


def _choose_divided_documents(
    corpora: Mapping[int, Corpus],
    tokenizer: Tokenizer,
    recipe: RowRecipe,
    store: Store,
) -> dict[int, DocumentInBothSplits]:
    """Chooses the documents that are divided between the training and the held-out split.

    The hash of a document decides whether it is trained on or held out, except for the chosen
    documents. If the hashes would hold out all documents of a source, one of these documents is
    chosen to train on. If the hashes would hold out no document of any source, the document with
    the smallest hash is chosen, and its end is held out.

    Returns:
      Index of the source → its divided document.
    """

    def share_of_hash(hash_: int) -> float:
        return hash_ / 2**64

    smallest = {i: min(part.smallest[0] for part in c.nonempty_parts) for i, c in corpora.items()}
    largest = {i: max(part.largest_hash for part in c.nonempty_parts) for i, c in corpora.items()}
    without_heldout = [i for i in corpora if share_of_hash(smallest[i]) >= recipe.heldout_fraction]
    without_train = [i for i in corpora if share_of_hash(largest[i]) < recipe.heldout_fraction]
    chosen = {
        i: _divide_document(corpora[i], True, tokenizer, recipe, store) for i in without_train
    }
    if without_heldout and len(without_heldout) == len(corpora):
        i = min(without_heldout, key=lambda i: smallest[i])
        chosen[i] = _divide_document(corpora[i], False, tokenizer, recipe, store)
    return chosen


def _divide_document(
    corpus: Corpus, all_heldout: bool, tokenizer: Tokenizer, recipe: RowRecipe, store: Store
) -> DocumentInBothSplits:
    """Divides the document of `corpus` with the smallest hash.

    If `all_heldout`, the document is trained on as a whole. If not `all_heldout`, the end of the
    document is held out, with `recipe.heldout_fraction` of the tokens of the corpus; a document
    with at most so many tokens is held out as a whole. If the corpus has a single document, the
    document is always cut in two.

    Args:
      corpus: a source with its parts.
      all_heldout: True if the hashes hold out all documents; False if they hold out no document.
      tokenizer: the tokenizer of the parts.
      recipe: the recipe of the rows.
      store: where the parts are.
    """
    filled = corpus.nonempty_parts
    documents = sum(part.documents for part in filled)
    number = min(range(len(filled)), key=lambda i: filled[i].smallest[0])
    document = filled[number].smallest[1]
    tokens, table = tokenized_parts.open_part_tokens(store, filled[number])
    start = int(table["end"][document - 1]) if document else 0
    own = tokens[start : int(table["end"][document]) - 1]  # without the end token
    if all_heldout and documents > 1:
        return DocumentInBothSplits(number, document, len(own), int(table["bytes"][document]))
    in_all = sum(part.tokens for part in filled) - documents
    heldout = max(round(recipe.heldout_fraction * in_all), 1)
    if documents > 1 and heldout >= len(own):
        return DocumentInBothSplits(number, document, 0, 0)
    require(
        len(own) >= 2,
        f"{corpus.source.name!r} holds a single document of {len(own)} token: too little to train "
        "on and to hold out; expected at least 2 tokens",
    )
    kept = len(own) - min(heldout, len(own) - 1)
    # The bytes of the held-out end are counted, because only a text's first token may stand for a
    # space that the text does not have.
    bytes_of_end = int(tokenizer.token_byte_counts[own[kept:]].sum())
    return DocumentInBothSplits(
        number, document, kept, max(int(table["bytes"][document]) - bytes_of_end, 0)
    )


def _open_rows(
    corpus: Corpus, found: Sequence[row_groups.Group], recipe: RowRecipe, store: Store
) -> PreparedSource:
    origins = [
        origin
        for origin, part in zip(corpus.part_origins, corpus.tokenized, strict=True)
        if part.documents
    ]
    keys = [row_groups.group_key(group, recipe) for group in found]
    directories = [store.path(row_groups.group_folder_name(key)) for key in keys]
    metadata = [row_groups.read_group_metadata(directory) for directory in directories]
    part_ends = [group.first_part + len(group.parts) for group in found]
    statistics, rows = {}, {}
    for side in (TRAIN, HELDOUT):
        counts = (Statistics(**content["statistics"][side]) for content in metadata)
        statistics[side] = sum(counts, Statistics())
        table = ShardTable.from_metadata(side, directories, metadata, part_ends, origins)
        table.check_shard_files()
        rows[side] = RowReader(table, recipe.row_length)
    return PreparedSource(
        corpus.source,
        digests.sha256_json({"format": 2, "rows": keys})[:20],
        statistics,
        rows,
        corpus.bad_counts,
        corpus.first_bad_places,
        corpus.record_count,
        sum(part.empty for part in corpus.tokenized),
        corpus.miscounted_bytes,
    )
