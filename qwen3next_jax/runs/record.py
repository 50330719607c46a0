"""run.json: the type of its content (`RunRecord`), a function that reads the file, and one that
makes its text.

    WORKDIR/run.json    configuration, data, tokenizer, code, processes, devices, parent, and every
                        allowed change since the first start; with its format and a digest

A run writes run.json before its first step. A run that resumes compares its settings with run.json.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, check_format_number, similar_folder_hint
from qwen3next_jax.common.storage import BucketPath, StoreError
from qwen3next_jax.config import Config, from_dict, to_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.training.stages import DataCursor

# The number of the format of run.json and of all other files of a run. It must be raised with a
# change after which the code would read older files wrongly.
_FORMAT = 4


class Change(NamedTuple):
    """A difference between run.json and the settings or devices with which the run resumes.

    Attributes:
      name: the key in run.json, such as "config.train.steps" or "code".
      old: the value in run.json; None if the file has no such key.
      new: the value with which the run resumes; None if it has no such key.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} → {self.new!r}"


@dataclasses.dataclass(frozen=True)
class ParentCheckpoint:
    """The checkpoint of another run with which a run began.

    Attributes:
      path: the folder of the other run.
      step: the number of steps after which the checkpoint was saved.
      manifest: the first digits of the digest of the checkpoint's manifest.
      run: the id of the other run.
    """

    path: str
    step: int
    manifest: str
    run: str


@dataclasses.dataclass(frozen=True)
class MergedCheckpoint(ParentCheckpoint):
    """One of the checkpoints of which `qwen3next merge` has computed the mean.

    Attributes:
      weight: the weight of this checkpoint in the mean.
    """

    weight: float


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """The Hugging Face directory with which a run, or the first run in its chain of parents, began.
    The user may delete the directory. An export of the run has the file format of the directory.

    Attributes:
      path: the path of the directory.
      form: the file format of the directory, a value of `model.hf_form`.
      files: a digest of the names, sizes and times of the files in the directory
        (`interop.weights.modification_digest`); "" unless the run itself began with the directory.
    """

    path: str
    form: str
    files: str = ""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of run.json, without its format and digest.

    Attributes:
      config: the settings, as nested dicts of JSON values (`settings_as_json`).
      data: for every stage of the run, the place in the training data at which the stage begins to
        read; None for stages before the first step of the run.
      tokenizer: the fingerprint of the tokenizer.
      code: the version of the code.
      versions: name of a module of the model → the version of its mathematics (`runs.versions`).
      processes: number of processes.
      devices: number and kind of the devices.
      source: the Hugging Face directory with which the weights began; None if they began at random.
      id: the id of the run, random hexadecimal digits.
      parent: the checkpoint of another run with which this run began; None if there is none.
      merged: the checkpoints of which this run is the mean; () if the run was not merged.
      changes: the allowed changes since the first start.
      operators: which implementation runs each operator of the model, with the fields of the event
        "operators"; () until a step has been traced.
    """

    config: dict[str, Any]
    data: tuple[DataCursor | None, ...]
    tokenizer: str
    code: str
    versions: Mapping[str, int]
    processes: int
    devices: str
    source: BaseModel | None
    id: str
    parent: ParentCheckpoint | None = None
    merged: tuple[MergedCheckpoint, ...] = ()
    changes: tuple[Change, ...] = ()
    operators: tuple[dict[str, Any], ...] = ()

    def read_config(self, folder: pathlib.Path | BucketPath) -> Config:
        """Returns the configuration of the run in `folder`.

        Raises:
          UserError: a setting is wrong, or names code of a package that is not trusted.
        """
        where = f"{folder / 'run.json'}: config"
        check_trusted(self.config, where)
        return from_dict(Config, self.config, where)


def settings_as_json(config: Config) -> dict[str, Any]:
    """Returns the settings as run.json holds them: as nested dicts of JSON values, with the kind of
    every layer in `model.layer_types`.
    """
    settings = json.loads(json.dumps(to_dict(config)))
    settings["model"]["layer_types"] = list(config.model.resolved_layer_types)
    return settings


def record_as_json(record: RunRecord) -> dict[str, Any]:
    """Returns the record as JSON values. Leaves out the entries "parent", "merged" and "operators"
    if they are empty.
    """
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    values["data"] = [cursor and cursor._asdict() for cursor in record.data]
    values["changes"] = [[*change] for change in record.changes]
    for name in ("parent", "merged", "operators"):
        if not values[name]:
            del values[name]
    if record.source:
        values["source"] = dataclasses.asdict(record.source)
        if not record.source.files:
            del values["source"]["files"]
    if record.parent:
        values["parent"] = dataclasses.asdict(record.parent)
    if record.merged:
        values["merged"] = [dataclasses.asdict(one) for one in record.merged]
    return values


def _record_from_json(values: dict[str, Any]) -> RunRecord:
    """Makes a `RunRecord` from the result of `record_as_json`.

    Raises:
      KeyError, TypeError: an entry is missing or has another form.
    """
    parent, source = values.get("parent"), values["source"]
    return RunRecord(
        **values
        | {
            "data": tuple(cursor and DataCursor(**cursor) for cursor in values["data"]),
            "parent": parent and ParentCheckpoint(**parent),
            "source": source and BaseModel(**source),
            "merged": tuple(MergedCheckpoint(**one) for one in values.get("merged", ())),
            "changes": tuple(Change(*change) for change in values.get("changes", ())),
            "operators": tuple(values.get("operators", ())),
        }
    )


def run_json_text(record: RunRecord) -> str:
    """Returns the text of run.json: the record, the number of the format, and a digest."""
    content = {"format": _FORMAT} | record_as_json(record)
    content |= {"digest": digests.sha256_json(content)}
    return json.dumps(content, indent=2)


def read_record(workdir: pathlib.Path | BucketPath) -> RunRecord:
    """Reads run.json in the folder of a run, and verifies its digest and its format.

    Raises:
      UserError: the file is missing or damaged, or another version wrote it.
    """
    path = workdir / "run.json"
    damaged = UserError(
        f"{path}: damaged, or changed by hand: restore it, or give another --workdir"
    )
    try:
        values = json_files.read(path)
        is_intact = values.pop("digest") == digests.sha256_json(values)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{workdir}: not the folder of a run (it has no run.json){similar_folder_hint(workdir)}"
        ) from error
    except StoreError:
        raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}): restore it, or give another --workdir"
        ) from error
    except (ValueError, KeyError) as error:
        raise damaged from error
    if not is_intact:
        raise damaged
    check_format_number(path, values.pop("format", None), _FORMAT)
    try:
        return _record_from_json(values)
    except (KeyError, TypeError) as error:
        raise damaged from error


def read_config(workdir: pathlib.Path | BucketPath) -> Config:
    """Reads the configuration of the run in `workdir`.

    Raises:
      UserError: run.json is missing or damaged, or names code of a package that is not trusted.
    """
    return read_record(workdir).read_config(workdir)


def read_config_if_readable(workdir: pathlib.Path | BucketPath) -> Config | None:
    """Reads the configuration of the run in `workdir`. Returns None if run.json is missing or
    cannot be read; the error message for this case comes from `runs.start.decide_start`.
    """
    if not (workdir / "run.json").exists():
        return None
    try:
        return read_config(workdir)
    except UserError:
        return None


def run_id(workdir: pathlib.Path | BucketPath) -> str | None:
    """Returns the id of the run in `workdir`; None if run.json cannot be read."""
    try:
        return read_record(workdir).id
    except StoreError:
        raise
    except UserError:
        return None
