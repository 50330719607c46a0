"""The settings `model.ple`: an embedding of n-grams that some layers add to the residual stream
(PLE, the per-layer embedding of Qwen3.8-Flash-Next), and the constants of its hash functions.

The constants of the hash functions follow from the settings alone, by the formulas of transformers'
`qwen4_exp`. A Hugging Face checkpoint also stores the constants of the hash functions.
`zoo/ngram_embedding.py` has the formulas of the embedding.
"""

import dataclasses
import functools
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.registry import LAYER_EMBEDDINGS, check_name, resolve

_LAYER_STRIDE = 10_007
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_INT64 = 2**63 - 1
_MOST_ROWS = 2**31 - 1  # of a table: the number of a row is an int32


@dataclasses.dataclass(frozen=True)
class PLEConfig:
    """Settings of the n-gram embedding. The settings are named after the fields of transformers'
    `config.json` for `qwen4_exp`, without the prefix `ple_`.
    """

    # numbers of the layers that have an n-gram embedding, counted from 1; (): no layer has one
    layer_ids: tuple[int, ...] = ()
    # the kind of embedding, a name of LAYER_EMBEDDINGS in config/registry.py
    embedding: str = "ngram"
    # the number of tokens of the longest n-grams; the shortest have 2 tokens
    ngram_size: int = 3
    # number of heads for each length of n-grams; every head has a hash function and a part of the
    # table
    heads_per_ngram: int = 8
    # width of the rows of all heads together
    embed_dim: int = 2560
    # the number of rows of each head is a prime number that is at least this
    ngram_vocab_size_base: int = 20_000_000
    # the number of rows of the table is a multiple of this; the rows after those of the heads are
    # not used
    make_ngram_vocab_size_divisible_by: int = 128
    # number of taps of the causal convolution; neighbouring taps are `ngram_size` tokens apart
    conv_kernel_size: int = 4
    # seed of the constants of the hash functions
    seed: int = 1234
    # number of tensors that hold the table in a Hugging Face directory (`parts`)
    split_ngram_parts: int = 128

    def __post_init__(self):
        object.__setattr__(self, "layer_ids", tuple(sorted(self.layer_ids)))
        check_bounds(
            self,
            "model.ple",
            {
                "at least 1": "heads_per_ngram embed_dim make_ngram_vocab_size_divisible_by "
                "conv_kernel_size split_ngram_parts",
                "at least 2": "ngram_size ngram_vocab_size_base",
                "0 or more": "seed",
            },
        )

    @property
    def total_heads(self) -> int:
        """The number of heads of an embedding, over all lengths of n-grams."""
        return self.heads_per_ngram * (self.ngram_size - 1)

    @property
    def head_width(self) -> int:
        """The width of a row of the table."""
        return self.embed_dim // self.total_heads

    def embedding_class(self) -> Any:
        """Returns the class of the embedding that the setting `embedding` names."""
        return resolve(LAYER_EMBEDDINGS, self.embedding, "model.ple.embedding")

    def embedding_index(self, layer: int) -> int | None:
        """Returns the index of the layer's embedding among all n-gram embeddings of the model,
        counted from 0; None if the layer has no n-gram embedding.

        Args:
          layer: the index of a layer; the first layer has the index 0.
        """
        ids = self.layer_ids
        return ids.index(layer + 1) if layer + 1 in ids else None

    def table_rows_per_head(self, number: int) -> tuple[int, ...]:
        """Returns for each head of embedding `number` how many rows of the table belong to the
        head. No two heads of the model have the same number of rows.
        """
        count = len(self.layer_ids) * self.total_heads
        return _primes_from(self.ngram_vocab_size_base, count)[
            number * self.total_heads : (number + 1) * self.total_heads
        ]

    def table_rows(self, number: int) -> int:
        """Returns the number of rows of the table of embedding `number`, including unused rows at
        the end.
        """
        return _round_up(
            sum(self.table_rows_per_head(number)), self.make_ngram_vocab_size_divisible_by
        )

    def table_row_slices(self, number: int) -> tuple[slice, ...]:
        """Returns how a Hugging Face directory divides the table of embedding `number`: for each
        tensor, the slice of rows that the tensor holds. As with `torch.chunk`, all tensors have
        equally many rows, except that the last may have fewer; and there can be fewer than
        `split_ngram_parts` tensors.
        """
        rows = self.table_rows(number)
        rows_per_tensor = -(-rows // self.split_ngram_parts)
        return tuple(
            slice(start, min(start + rows_per_tensor, rows))
            for start in range(0, rows, rows_per_tensor)
        )

    def head_row_offsets(self, number: int) -> tuple[int, ...]:
        """Returns for each head of embedding `number` the index of its first row in the table."""
        sizes = self.table_rows_per_head(number)
        return tuple(sum(sizes[:head]) for head in range(len(sizes)))

    def hash_multipliers(self, number: int, vocab_size: int) -> tuple[int, ...]:
        """Returns the odd factors of the hash functions of embedding `number`: the first factor is
        for the last token of an n-gram, the second factor for the token before it, and so on. The
        product of a token id and a factor is less than 2^63.
        """
        half = max(1, _LARGEST_INT64 // vocab_size // 2)
        seed = self.seed + _LAYER_STRIDE * number
        return tuple(
            2 * (_splitmix64(seed + _GOLDEN * (k + 1)) % half) + 1 for k in range(self.ngram_size)
        )

    def check_fits_model(self, model: Any) -> None:
        """Raises UserError if `model`, the ModelConfig, cannot have these n-gram embeddings."""
        if not self.layer_ids:
            return
        check_name(LAYER_EMBEDDINGS, self.embedding, "model.ple.embedding")
        ids, layers = self.layer_ids, model.num_hidden_layers
        for i in ids:
            require(
                1 <= i <= layers and ids.count(i) == 1,
                f"model.ple.layer_ids = {ids} names layer {i}"
                f"{' twice' if ids.count(i) > 1 else ''}: expected numbers of different layers, "
                f"1 … {layers} (model.num_hidden_layers)",
            )
        require(
            0 <= model.eos_token_id < model.vocab_size,
            f"model.ple.layer_ids = {ids} with model.eos_token_id = {model.eos_token_id}: n-grams "
            f"end at an end token: expected the number of a token, 0 … {model.vocab_size - 1}",
        )
        require(
            self.embed_dim % self.total_heads == 0,
            f"model.ple.embed_dim = {self.embed_dim}: expected a multiple of the "
            f"{self.total_heads} heads, model.ple.heads_per_ngram × (model.ple.ngram_size - 1)",
        )
        smallest = self.ngram_vocab_size_base * self.total_heads
        require(
            smallest <= _MOST_ROWS,
            f"model.ple.ngram_vocab_size_base = {self.ngram_vocab_size_base}: {self.total_heads} "
            f"heads of as many n-gram ids are {smallest} rows: expected at most {_MOST_ROWS}, as "
            "rows have int32 numbers here (transformers has int64: at most 2^63 - 1)",
        )
        for number in range(len(ids)):
            rows = self.table_rows(number)
            require(
                rows <= _MOST_ROWS,
                f"model.ple.ngram_vocab_size_base = {self.ngram_vocab_size_base}: the table of "
                f"layer {ids[number]} has {rows} rows: expected at most {_MOST_ROWS}",
            )


def _round_up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _splitmix64(state: int) -> int:
    """Returns the next output of the random number generator splitmix64 (Steele, Lea and Flood
    2014) for the state `state`.
    """
    z = (state + _GOLDEN) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=16)
def _primes_from(first: int, count: int) -> tuple[int, ...]:
    """Returns the smallest `count` primes that are at least `first`."""
    found, candidate = [], first
    while len(found) < count:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found)


def _is_prime(n: int) -> bool:
    """Returns whether n is a prime, by the test of Miller and Rabin with the bases 2, 3, 5 and 7.
    The test is exact for n < 3,215,031,751, so for every n < 2^31.
    """
    if n < 2 or any(n % p == 0 for p in (2, 3, 5, 7)):
        return n in (2, 3, 5, 7)
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7):
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
