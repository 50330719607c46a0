"""Measures contamination: how many examples of the tasks of lm-evaluation-harness are in prepared
training data.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwen3next_jax.data.contamination import Contamination, find_contamination
from qwen3next_jax.data.tokens import Tokenizer


def contamination_of_tasks(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], tokenizer: Tokenizer, prepared_dir: str
) -> dict[str, Contamination]:
    """Searches prepared data for the examples of tasks, in one pass over the data. The text of an
    example is the concatenation of all strings in its record ("doc").

    Args:
      samples: name of a task → its examples, as the harness returns them ("samples").
      tokenizer: the tokenizer of the model and of the data.
      prepared_dir: the folder of prepared data.

    Returns:
      Name of a task → the contamination of its examples.

    Raises:
      UserError: the folder holds no tokens of this tokenizer.
    """
    texts = [
        " ".join(_all_strings(example["doc"]))
        for examples in samples.values()
        for example in examples
    ]
    found = find_contamination(texts, tokenizer, prepared_dir)
    by_task, start = {}, 0
    for task, examples in samples.items():
        shares = found.contained_shares[start : start + len(examples)]
        by_task[task] = dataclasses.replace(found, contained_shares=shares)
        start += len(examples)
    return by_task


def _all_strings(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _all_strings(inner)
