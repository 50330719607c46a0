"""Fields of records by a dotted path: `content.text` is the field `text` inside the object
`content`. If the record has a field whose own name is the whole path, dots included, the path means
that field.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute

from qwen3next_jax.common.errors import did_you_mean

_MOST_NAMES = 20  # that a message lists


class FoundField(NamedTuple):
    """A field of a record, or what is missing on the path to it.

    Attributes:
      value: the value of the field.
      objects_on_path: the objects on the path to the field, from the record on.
      fault: what is missing on the path; "" if the record has the field.
    """

    value: Any
    objects_on_path: Sequence[Mapping[str, Any]]
    fault: str = ""


def find_field(record: Mapping[str, Any], path: str) -> FoundField:
    """Returns the field of a JSON record that a dotted path names."""
    if path in record:
        return FoundField(record[path], [record])
    objects, value, walked = [], record, []
    for name in path.split("."):
        if not isinstance(value, dict):
            return FoundField(
                None,
                objects,
                f"{_no_field_message(path)}: {_quoted(walked)} {_describe_non_object(value)}",
            )
        objects.append(value)
        if name not in value:
            place = f"{_quoted(walked)} has" if walked else "it has"
            hint = did_you_mean(name, value)
            return FoundField(
                None, objects, f"{_no_field_message(path)}{hint}; {place} {_names_in_object(value)}"
            )
        value = value[name]
        walked.append(name)
    return FoundField(value, objects)


def describe_object_fault(value: Mapping[str, Any], path: str) -> str:
    """Returns a message that there is an object where a string is expected, with the paths of the
    object's fields.
    """
    inner = ", ".join(f"{path}.{name}" for name in list(value)[:_MOST_NAMES]) or "nothing"
    return f"is an object: expected a string; it holds {inner}"


def column_type(schema: pyarrow.Schema, path: str) -> tuple[pyarrow.DataType | None, str]:
    """Returns (type of the column that a dotted path names, ""), or (None, what is missing)."""
    if (count := schema.names.count(path)) == 1:
        return schema.field(path).type, ""
    if count > 1:
        return None, f"two columns {path!r}; it has {_quoted_each(schema.names)}"
    fields, names, walked = schema, schema.names, []
    for name in path.split("."):
        place = f"{_quoted(walked)} has" if walked else "it has"
        if names.count(name) > 1:
            what = f"{'fields' if walked else 'columns'} {_quoted([*walked, name])}"
            return None, f"two {what}; {place} {_quoted_each(names)}"
        if name not in names:
            hint = did_you_mean(name, names)
            return None, f"no column {path!r}{hint}; {place} {_quoted_each(names)}"
        type_ = fields.field(name).type
        walked.append(name)
        fields = type_
        names = [type_[i].name for i in range(type_.num_fields)] if _is_struct(type_) else []
        if not names and len(walked) <= path.count("."):
            return None, f"no column {path!r}: {_quoted(walked)} is of type {type_}, not a struct"
    return type_, ""


def column_at(batch: pyarrow.RecordBatch, path: str) -> pyarrow.Array:
    """Returns the column of a batch that a dotted path names. The value of a row is null if a
    struct on the path is null.

    Raises:
      pyarrow.ArrowInvalid: a struct on the path is damaged.
    """
    if path in batch.schema.names:
        return batch.column(path)
    first, *inner = path.split(".")
    found = batch.column(first)
    for name in inner:
        found.validate()
        found = pyarrow.compute.struct_field(found, name)
    return found


def _is_struct(type_: pyarrow.DataType) -> bool:
    return pyarrow.types.is_struct(type_)


def _no_field_message(path: str) -> str:
    return f"no field {path!r}"


def _quoted(names: Sequence[str]) -> str:
    return repr(".".join(names))


def _quoted_each(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _describe_non_object(value: Any) -> str:
    if value is None:
        return "is null"
    if isinstance(value, list):
        return "is a list: a path leads through objects alone"
    return f"is of type {type(value).__name__}: a path leads through objects"


def _names_in_object(value: Mapping[str, Any]) -> str:
    """Returns the names of an object's fields; after a field that is itself an object, also the
    names of its fields.
    """
    found = []
    for name, inner in list(value.items())[:_MOST_NAMES]:
        within = (
            f" (with {_quoted_each(list(inner)[:5])})" if isinstance(inner, dict) and inner else ""
        )
        found.append(f"{name!r}{within}")
    return ", ".join(found) + (", …" if len(value) > _MOST_NAMES else "") or "none"
