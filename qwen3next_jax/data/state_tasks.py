"""Rows of tasks that need a state: the answer at a token depends on all tokens before it, and no
token of the row shows the answer.

A row holds inputs alone. The model is to predict the state after token t. The state is not the next
token of the row, but a label beside the tokens. So the model never sees its earlier answers. With
them (a scratchpad), the next answer would follow in one step.

    parity            The inputs are bits; the label is the parity of the bits so far. A layer whose
                      state has transitions with positive eigenvalues alone cannot, at a finite
                      precision, tell long rows apart; one with an eigenvalue of -1 can (2411.12537,
                      theorem 1), so β in (0, 2) suffices. Attention without a scratchpad cannot for
                      all lengths (1906.06755).
    modular_addition  The inputs are numbers below `data.synthetic.modulus`; the label is their sum
                      modulo this number. Beyond 2 a transition needs complex eigenvalues, as the
                      product of two reflections has (2411.12537, theorem 2).
    s3, a5, s5        Word problems: the inputs are elements of the group of permutations of three
                      or five things (a5: the even ones); the label is their product so far. If
                      `data.synthetic.max_moved` = m, the inputs are the elements that move at most
                      m things: m - 1 reflections a token suffice for such an element (2502.10297).
                      Two suffice for all of a5, the rotations of an icosahedron. a5 and s5 are
                      complete for NC1 (Barrington 1989), also with few generators, so attention and
                      layers with diagonal transitions, which are in TC0, solve them for all lengths
                      only if TC0 = NC1 (2404.08819).
    state_recall      A row begins with `data.synthetic.pairs` keys, each followed by two values.
                      Then bits and keys follow. The label of a key is its first value if the parity
                      of the bits so far is even, and else its second. It needs a state and a
                      lookup, which a mixture of recurrent layers and attention has (2605.16640).

Letters: T tokens of a row, P keys, V vocabulary.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import DataConfig, ModelConfig, SyntheticConfig
from qwen3next_jax.data.pipeline import Batch, DataSource
from qwen3next_jax.data.synthetic import HELDOUT_SPLIT, SyntheticData

# Id 0 is no input and no label. The ids of a group's elements, and of numbers, begin after it.
FIRST_ID = 1
_ZERO, _ONE = 1, 2  # the bits of state_recall
_FIRST_KEY = 3


class StateRow(NamedTuple):
    """A row of a task.

    Attributes:
      tokens: int32 [T], the inputs.
      labels: int32 [T]; labels[t + 1] is the id that the model is to predict after token t, instead
        of tokens[t + 1].
      target_mask: bool [T], whether each label counts as a target.
    """

    tokens: np.ndarray
    labels: np.ndarray
    target_mask: np.ndarray


class StateRows:
    """The rows of one split of a task. Row i is the same whenever and wherever it is made.

    Raises:
      UserError: rows of `length` tokens over `vocab_size` ids are too small for the task.
    """

    def __init__(
        self,
        task: str,
        length: int,
        vocab_size: int,
        options: SyntheticConfig,
        seed: int,
        split: int,
    ):
        self._length, self._vocab_size = length, vocab_size
        self._task = TASKS[task](options)
        needed = self._task.min_vocab_size
        require(
            vocab_size >= needed,
            f"model.vocab_size = {vocab_size}: {task} needs {needed} ids: 0, "
            f"{self._task.id_meanings}",
        )
        require(
            length >= self._task.min_row_length,
            f"{task} rows have {length} tokens: expected at least {self._task.min_row_length}",
        )
        self._key = np.array([seed, split], np.uint64)

    def __getitem__(self, index: int) -> StateRow:
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, index, 0, 0]))
        return self._task.make_row(rng, self._length, self._vocab_size)


class _Task(NamedTuple):
    """A task.

    Attributes:
      make_row: function (random numbers, row length, size of the vocabulary) → a row.
      min_vocab_size: number of ids of the smallest vocabulary.
      id_meanings: what its ids stand for, for messages.
      min_row_length: number of tokens of the shortest row.
    """

    make_row: Callable[[np.random.Generator, int, int], StateRow]
    min_vocab_size: int
    id_meanings: str
    min_row_length: int = 2


def _modular_addition_task(modulus: int) -> _Task:
    def make(rng: np.random.Generator, length: int, vocab_size: int) -> StateRow:
        inputs = rng.integers(0, modulus, length)
        return _row_with_state_labels(inputs, np.cumsum(inputs) % modulus)

    return _Task(make, FIRST_ID + modulus, f"and one for each number below {modulus}")


def _word_problem_task(things: int, even: bool, max_moved: int) -> _Task:
    elements = _group_elements(things, even)
    inputs = [i for i, element in enumerate(elements) if _count_moved_things(element) <= max_moved]
    require(
        len(inputs) > 1,
        f"data.synthetic.max_moved = {max_moved}: expected at least 3, as every even "
        "permutation but one moves three things or more",
    )
    product = _group_product_table(things, even)

    def make(rng: np.random.Generator, length: int, vocab_size: int) -> StateRow:
        numbers = np.array(inputs)[rng.integers(0, len(inputs), length)]
        states = list(itertools.accumulate(numbers, lambda state, x: product[state, x]))
        return _row_with_state_labels(numbers, np.array(states))

    return _Task(make, FIRST_ID + len(product), f"and one for each of the {len(product)} elements")


def _group_elements(things: int, even: bool) -> list[tuple[int, ...]]:
    """Returns the elements of a group of permutations; element 0 changes nothing. `even`: whether
    only the even permutations belong to the group.
    """
    elements = list(itertools.permutations(range(things)))
    if even:
        elements = [element for element in elements if not _inversion_count(element) % 2]
    return elements


def _count_moved_things(permutation: tuple[int, ...]) -> int:
    return sum(x != i for i, x in enumerate(permutation))


@functools.cache
def _group_product_table(things: int, even: bool) -> np.ndarray:
    """Returns the table of a group of permutations: [a, b] is the number of the element "first a,
    then b".
    """
    elements = _group_elements(things, even)
    number = {element: i for i, element in enumerate(elements)}
    return np.array(
        [[number[tuple(b[x] for x in a)] for b in elements] for a in elements], np.int64
    )


def _inversion_count(element: tuple[int, ...]) -> int:
    return sum(a > b for a, b in itertools.combinations(element, 2))


def _row_with_state_labels(inputs: np.ndarray, states: np.ndarray) -> StateRow:
    """Makes a row whose label after each input is the state there."""
    labels = np.concatenate([[0], FIRST_ID + states[:-1]])
    targets = np.arange(len(inputs)) > 0
    return StateRow((FIRST_ID + inputs).astype(np.int32), labels.astype(np.int32), targets)


def _state_recall_task(keys: int) -> _Task:
    def make(rng: np.random.Generator, length: int, vocab_size: int) -> StateRow:
        first_value = _FIRST_KEY + keys
        values = rng.integers(first_value, vocab_size, (keys, 2))
        order = rng.permutation(keys)
        table = np.concatenate([_FIRST_KEY + order[:, None], values[order]], axis=1).reshape(-1)
        rest = length - len(table)
        is_key, bits = rng.random(rest) < 0.5, rng.integers(0, 2, rest)
        asked = rng.integers(0, keys, rest)
        parity = np.cumsum(np.where(is_key, 0, bits)) % 2
        tokens = np.concatenate([table, np.where(is_key, _FIRST_KEY + asked, _ZERO + bits)])
        labels, targets = np.zeros(length, np.int64), np.zeros(length, bool)
        places = np.flatnonzero(is_key[:-1])
        labels[len(table) + places + 1] = values[asked[places], parity[places]]
        targets[len(table) + places + 1] = True
        return StateRow(tokens.astype(np.int32), labels.astype(np.int32), targets)

    return _Task(
        make,
        _FIRST_KEY + keys + 2,
        f"two bits, {keys} keys (data.synthetic.pairs) and two values or more",
        3 * keys + 2,
    )


# Name of a task → function (settings) → the task.
TASKS: dict[str, Callable[[SyntheticConfig], _Task]] = {
    "parity": lambda options: _modular_addition_task(2),
    "modular_addition": lambda options: _modular_addition_task(options.modulus),
    "s3": lambda options: _word_problem_task(3, even=False, max_moved=options.max_moved),
    "a5": lambda options: _word_problem_task(5, even=True, max_moved=options.max_moved),
    "s5": lambda options: _word_problem_task(5, even=False, max_moved=options.max_moved),
    "state_recall": lambda options: _state_recall_task(options.pairs),
}
_SETTINGS = {
    "modular_addition": ("synthetic.modulus",),
    "s3": ("synthetic.max_moved",),
    "a5": ("synthetic.max_moved",),
    "s5": ("synthetic.max_moved",),
    "state_recall": ("synthetic.pairs",),
}


class StateData(SyntheticData):
    """The rows of a task. Each row is made when it is read.

    Raises:
      UserError: the rows or the vocabulary are too small for the task.
    """

    array_dtypes = DataSource.array_dtypes | {"labels": np.int32, "target_mask": bool}

    @classmethod
    def settings_read(cls, config: DataConfig) -> tuple[str, ...] | None:
        return _SETTINGS.get(config.source, ())

    @staticmethod
    def task_rows(config: DataConfig, length: int, vocab_size: int, split: int) -> StateRows:
        return StateRows(config.source, length, vocab_size, config.synthetic, config.seed, split)

    @staticmethod
    def check_model(config: DataConfig, model: ModelConfig) -> None:
        require(
            model.mtp_depth == 0,
            f"data.source = {config.source!r}: model.mtp_depth = {model.mtp_depth}: expected 0, as "
            "a label is of one position, not of a token that can be predicted earlier",
        )

    def heldout_rows_of_length(self, length: int, count: int) -> list[StateRow]:
        """Returns the first `count` held-out rows of `length` tokens, which may differ from the
        length of the other rows.
        """
        rows = self.task_rows(self._config, length, self.tokenizer.vocab_size, HELDOUT_SPLIT)
        return [rows[i] for i in range(count)]

    def row(self, index: int) -> Batch:
        return _arrays_of_row(self._rows[index])

    def heldout_row(self, index: int) -> Batch:
        return _arrays_of_row(self._heldout[index])


def _arrays_of_row(row: StateRow) -> Batch:
    return {
        "tokens": row.tokens,
        "segment_ids": np.ones_like(row.tokens),
        "labels": row.labels,
        "target_mask": row.target_mask,
    }
